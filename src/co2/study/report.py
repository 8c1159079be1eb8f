"""What is there of a study, written down: STUDY.md, STUDY.csv, STUDY.svg and STUDY.png; and a page of several studies.

The page, docs/RESULTS.md say, is generated as a whole. What people write about the numbers is kept in files of their
own, which are included and never written to: notes.md and STUDY.notes.md in a folder of results, and PAGE.notes.md
beside the page. Links in them are relative to where they stand, and lead to the same places from the page.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, unquote

from co2 import recipes
from co2.errors import UserError
from co2.experiment import Experiment
from co2.files import MissingFile, UnreadableFile, read_text, write_atomically
from co2.measures.numbers import duration
from co2.report.markup import Markdown, active_content
from co2.runs import upgrade
from co2.study.grids import STUDIES, label_of, method_settings
from co2.study.plan import CELLS, PLAN, RUNS, Cell, Plan, read_plan, seeds_found
from co2.study.records import (
    DATA_NUMBERS,
    CellRecord,
    failures,
    mismatches,
    missing_protocols,
    read_record,
    record_path,
)
from co2.study.settings import changes_between, parse_assignments
from co2.study.tables import Results, csv_text, markdown_text

_LEFT_OUT = "left out"
_MARK = "<!-- Written by `co2 study report`. "


def gather(folder: Path, plan: Plan, study: str) -> Results:
    """The records of a study, planned or dropped in from elsewhere, and what is missing."""
    grid = plan.grids[study]
    failed = failures(folder)
    records: dict[str, dict[int, CellRecord]] = {variant.name: {} for variant in grid.variants}
    missing = {}
    for seed in sorted({*grid.seeds, *seeds_found(folder, grid.variants)}):
        for variant in grid.variants:
            cell = plan.cell(study, variant, seed)
            record, why = _usable(folder, plan, cell)
            if record is not None:
                records[variant.name][seed] = record
            if why and (seed in grid.seeds or record is not None or why.startswith(_LEFT_OUT)):
                missing[cell.name] = _shortened(failed.get(cell.name, "")) or why
    _leave_out_other_data(records, missing)
    return Results(study, grid.variants, records, missing, plan.base, plan.validate)


def _usable(folder: Path, plan: Plan, cell: Cell) -> tuple[CellRecord | None, str]:
    """The record of a cell if there is one with its settings, and why it is missing or incomplete."""
    try:
        record = read_record(record_path(folder, cell.name))
    except UserError as error:
        return None, f"{_LEFT_OUT}: {error}"
    if record is None:
        return None, "not computed yet"
    lines = mismatches(record, cell, plan)
    if lines:
        return None, f"{_LEFT_OUT}: its record has other settings ({'; '.join(lines[:3])})"
    absent = missing_protocols(record, cell)
    return record, f"not yet judged by {' and '.join(absent)}" if absent else ""


def _leave_out_other_data(records: Mapping[str, dict[int, CellRecord]], missing: dict[str, str]) -> None:
    """Tables are made without the data, which have other names elsewhere: what most records are of is the study's."""
    numbers = {
        (variant, seed): tuple(record.content["data"].get(name) for name in DATA_NUMBERS)
        for variant, by_seed in records.items()
        for seed, record in by_seed.items()
    }
    usual = Counter(numbers.values()).most_common(1)
    for (variant, seed), found in numbers.items():
        if found != usual[0][0]:
            said = ", ".join(f"{name} {number}" for name, number in zip(DATA_NUMBERS, found, strict=True))
            missing[f"{variant}-s{seed}"] = f"{_LEFT_OUT}: its record is of other data than most ({said})"
            del records[variant][seed]


def _shortened(error: str) -> str:
    return f"failed: {error.splitlines()[-1][:300]}" if error.strip() else ""


def report_study(folder: Path, plan: Plan, study: str) -> Results:
    """Write the tables and the figure of a study into its folder."""
    results = gather(folder, plan, study)
    heading = Markdown.of("# {study}: {summary}", study=study, summary=STUDIES[study].summary)
    command = Markdown.block(plan.grids[study].command)
    _write(folder / f"{study}.md", Markdown.paragraphs([heading, command, markdown_text(results)]) + "\n")
    _write(folder / f"{study}.csv", csv_text(results))
    try:
        from co2.study.figures import draw
    except ImportError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        print(f"matplotlib is not installed here. Draw the figure later: co2 study report {shlex.quote(str(folder))}")
    else:
        draw(results, folder)
    return results


def report_folder(folder: Path) -> tuple[Plan, list[Results]]:
    """The same for every study of a folder."""
    plan = read_plan(folder)
    if plan is None:
        raise UserError(f"{folder} holds no study: it has no {PLAN}. Name folders that `co2 study` has written.")
    return plan, [report_study(folder, plan, study) for study in plan.grids]


def write_page(folders: Sequence[Path], out: Path) -> Path:
    """One Markdown page of all studies in the folders, with their figures, commands and records."""
    _refuse_foreign(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    notes = out.with_name(f"{out.stem}.notes.md")
    heading, words_of_the_user = _heading_and_rest(_notes(notes, out))
    words = " ".join(["co2 study report", *(shlex.quote(os.fspath(folder)) for folder in folders)])
    parts: list[str] = [
        Markdown.of(
            _MARK + "Do not edit: write into {notes} beside this page, or into notes.md and STUDY.notes.md in the "
            "folders of results. -->",
            notes=notes.name,
        ),
        Markdown(heading or "# Results"),
        Markdown.of(
            "Made from the records by {command}. Every table and figure names the command that makes it and the "
            "records it is made of.",
            command=Markdown.code(f"{words} --out {shlex.quote(os.fspath(out))}"),
        ),
        Markdown(words_of_the_user),
    ]
    reports = [report_folder(folder) for folder in folders]
    titles = _titles(folders, [plan for plan, _ in reports])
    parts += [_contents(titles)] if len(titles) > 1 else []
    for folder, title, (plan, results) in zip(folders, titles, reports, strict=True):
        parts.append(Markdown.of("## {title}", title=title))
        parts += [_about_the_base(plan, folder, out.parent), _notes(folder / "notes.md", out)]
        parts += [section for one in results for section in _section(plan, one, folder, out)]
    _write(out, Markdown.paragraphs(parts) + "\n")
    return out


def _heading_and_rest(notes: str) -> tuple[str, str]:
    """Notes may begin with the heading of the page, `# How the settings were chosen`."""
    first, _, rest = notes.partition("\n")
    return (first, rest.strip()) if first.startswith("# ") else ("", notes)


def _write(path: Path, text: str) -> None:
    write_atomically(path, text.encode("utf-8", errors="backslashreplace"))  # names of files need not be text


def _refuse_foreign(out: Path) -> None:
    if out.is_dir():
        raise UserError(f"{out} is a folder. Give --out the name of a page in it: {out / 'RESULTS.md'}.")
    try:
        ours = read_text(out, errors="replace").startswith(_MARK)
    except MissingFile:
        return
    except UnreadableFile:
        ours = False
    if not ours:
        raise UserError(f"{out} was not written by `co2 study report` and is left alone. Choose another --out.")


def _titles(folders: Sequence[Path], plans: Sequence[Plan]) -> list[str]:
    """What the part of each folder is called: as little as tells it from the others. Links lead to these."""
    return [_title(plan, _told_by(plan, folder, plans)) for folder, plan in zip(folders, plans, strict=True)]


def _told_by(plan: Plan, folder: Path, plans: Sequence[Plan]) -> list[str]:
    """What tells a plan from those that are called the same: settings one after another, or at last the folder."""
    alike = [one for one in plans if _title(one) == _title(plan)]
    told: list[str] = []
    for tell in _TELLS:
        left = [one for one in alike if tell(one.base) == tell(plan.base)]
        if len(left) < len(alike):
            told.append(tell(plan.base))
        alike = left
    return told if len(alike) == 1 else [*told, os.fspath(folder)]


def _head(base: Experiment) -> str:
    head = method_settings(base).get("head", "mlp")
    return "MLP" if head == "mlp" else head


def _sizes(base: Experiment) -> str:
    return " then ".join(map(str, (*base.earlier_sizes, base.size)))


# How a reader would tell studies of the same data and length apart: what one would look for first comes first.
_TELLS: tuple[Callable[[Experiment], str], ...] = (
    lambda base: f"recipe {base.recipe}",
    lambda base: f"batch {base.batch_size}",  # before the learning rate, which follows it
    lambda base: f"learning rate {base.learning_rate:g}",
    lambda base: f"warm-up {100 * base.optimisation.warm_up:g}%" if base.optimisation.warm_up else "no warm-up",
    lambda base: f"{_sizes(base)} pixels",
    lambda base: f"crops from {100 * base.views()[0].crop_scale[0]:g}%",
    lambda base: f"{_head(base)} head",
    lambda base: f"instance temperature {method_settings(base).get('tau', 0):g}",
    label_of,
)


def _title(plan: Plan, told_by: Sequence[str] = ()) -> str:
    name = os.path.basename(os.path.normpath(plan.base.data))
    judged = [f"judged on {100 * plan.validate:g}% of the training images"] if plan.validate is not None else []
    return ", ".join([name, f"{plan.base.epochs} epochs", *told_by, *judged])


def _contents(titles: Sequence[str]) -> Markdown:
    """Links to the parts, by the names that Markdown's readers give to headings: letters, digits and hyphens."""
    names = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    links = [Markdown.of("- [{t}](#{n})", t=title, n=name) for title, name in zip(titles, names, strict=True)]
    return Markdown.joined(["## The studies", "", *links], "\n")  # a heading, since notes before it may have their own


def _about_the_base(plan: Plan, folder: Path, page: Path) -> Markdown:
    base = plan.base
    warm_up = base.optimisation.warm_up
    described = (
        f"{label_of(base)}, with {base.network.backbone}, views of {_sizes(base)} pixels, crops from "
        f"{100 * base.views()[0].crop_scale[0]:g}% of the area, batch {base.batch_size}, {_negatives(base)}"
        f"{_groups(base)} of batch statistics, "
        f"{'an' if _head(base) == 'MLP' else 'a'} {_head(base)} head{_temperature(base)}, "
        f"a learning rate of {base.learning_rate:g} "
        f"on a {base.optimisation.schedule} schedule"
        f"{f', warmed up over the first {100 * warm_up:g}% of the run' if warm_up else ''}; all of it in "
    )
    return Markdown.of(
        "Base: the recipe {} as {}.{}",
        Markdown.code(base.recipe),
        Markdown.of("{}{}", described, _link(PLAN, folder / PLAN, page)),
        _recipe_since(plan),
    )


def _negatives(base: Experiment) -> str:
    method = method_settings(base)
    count = method.get("queue", method.get("negatives"))
    if count is not None:
        return f"{count:,} negatives, "
    return "negatives from the batch itself, " if "tau" in method else ""


def _temperature(base: Experiment) -> str:
    tau = method_settings(base).get("tau")
    return "" if tau is None else f", an instance temperature of {tau:g}"


def _groups(base: Experiment) -> str:
    return "one group" if base.network.groups == 1 else f"{base.network.groups} groups"


def _named_in(command: str) -> set[str]:
    """The settings that a command does not leave to the recipe."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote that is not closed
        return set()
    named = parse_assignments([value for option, value in pairwise(words) if option == "--set"], "--set")
    named = {now: value for old, value in named.items() for now in upgrade.names_of(old)}
    return {*named, *(["epochs"] if "--epochs" in words else [])}


def _recipe_since(plan: Plan) -> Markdown:
    """Recipes get better settings. A command that left one to the recipe has to name it, to be the same again."""
    base = plan.base
    if base.recipe not in recipes.RECIPES:
        return Markdown.of(" There is no recipe {recipe} any more.", recipe=Markdown.code(base.recipe))
    commands = [one for grid in plan.grids.values() for one in re.split(r"\n(?=co2 study )", grid.command)]
    named_by_all = set.intersection(*map(_named_in, commands))
    left_out = {
        name: value
        for name, value in changes_between(recipes.get(base.recipe), base).items()
        if name not in named_by_all and not name.startswith("monitoring.")  # when a run is looked at, not what it does
    }
    options = [
        shlex.join(["--epochs", str(value)] if name == "epochs" else ["--set", f"{name}={_as_typed(value)}"])
        for name, value in left_out.items()
    ]
    if not options:
        return Markdown()
    add = Markdown.code(" ".join(options))
    return Markdown.of(" The recipe has changed since: add {add} to have the same settings today.", add=add)


def _as_typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _section(plan: Plan, results: Results, folder: Path, out: Path) -> list[str]:
    study, page = results.study, out.parent
    parts: list[str] = [
        Markdown.of("### {}: {}", study, STUDIES[study].summary),
        Markdown.block(plan.grids[study].command),
        Markdown.of(
            "Records: {} in {}, the numbers in {}. {}",
            len(results.found),
            _link(str(folder / CELLS), folder / CELLS, page),
            _link(f"{study}.csv", folder / f"{study}.csv", page),
            _time_taken(results.found),
        ),
        markdown_text(results),
    ]
    figure = folder / f"{study}.svg"
    if figure.is_file():
        parts.append(Markdown.of("!{}", _link(study, figure, page)))
    parts.append(_notes(folder / f"{study}.notes.md", out))
    return parts


def _time_taken(records: Sequence[CellRecord]) -> str:
    if not records:
        return "None yet."
    devices = sorted({str(record.content["made_with"]["device"]) for record in records})
    seconds = [float(record.content["seconds"]["wall"]) for record in records]
    # When each of them ran is not in the records.
    together = f" ({duration(sum(seconds))} in all, where cells that ran at once count one by one)"
    return (
        f"A cell took {duration(sum(seconds) / len(seconds))} on average by its own clock"
        f"{together if len(records) > 1 else ''}, on {' and '.join(devices)}."
    )


def _link(text: str, path: Path, page: Path) -> Markdown:
    return Markdown.of("[{}]({})", text, _relative(path, page))


def _relative(path: Path, page: Path) -> Markdown:
    return Markdown(quote(os.fsencode(os.path.relpath(path, page).replace(os.sep, "/"))))


def _notes(path: Path, out: Path) -> Markdown:
    """What people wrote, with links that lead from the page to the same places."""
    try:
        text = read_text(path).strip()
    except MissingFile:
        return Markdown()
    except UnreadableFile as error:
        raise UserError(f"{path}: {error}. Write it as a file of UTF-8 text, or remove it.") from None
    active = active_content(text)
    if active:
        raise UserError(f"{path} has {active} in it, which no page is given. Write plain Markdown, or remove it.")

    def moved(link: re.Match[str]) -> str:
        where, mark, heading = link[1].partition("#")
        if not where or where.startswith("/") or re.match(r"\w+:", where):  # in the notes themselves; another site
            return link[0]
        there = path.parent / unquote(where)
        if heading and there.resolve() == out.resolve():
            return f"](#{heading})"
        return f"]({_relative(there, out.parent)}{mark}{heading})"

    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    moving = (block if block.startswith("```") else re.sub(r"\]\(([^)\s]+)\)", moved, block) for block in blocks)
    return Markdown("".join(moving))


def keep_runs_out_of_git(out: Path, runs: Path) -> None:
    """Records are for keeping, checkpoints are not: a folder of runs inside the results is hidden from git."""
    if runs.resolve() == (out / RUNS).resolve():
        runs.mkdir(parents=True, exist_ok=True)
        write_atomically(runs / ".gitignore", b"# Checkpoints and logs; the records are in ../cells\n*\n")
