"""`co2 study`: grids of runs and evaluations, filled in one sitting or in several, and what they show.

Nothing here imports torch before there is something to compute.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from co2 import recipes
from co2.errors import UserError, did_you_mean
from co2.evaluation.presets import Preset
from co2.files import read_text
from co2.study import grids
from co2.study.grids import STUDIES, Wanted, cost_of, pixels_of, study_called
from co2.study.judges import BESIDES, judges
from co2.study.plan import CELLS, PLAN, RUNS, Cell, Grid, Plan, add_to_plan, all_cells, merge_plans, read_plan
from co2.study.settings import changed, parse_assignments, refuse_decided

if TYPE_CHECKING:
    from co2.study.sitting import Circumstances

VALIDATION_SHARE = 0.1
_MEASUREMENTS = 10  # during a run, besides its end: each passes all images through the network


@dataclass(frozen=True)
class Request:
    """What a study is told."""

    data: str = ""
    """Images with labels, as for `co2 pretrain`. Labels are never trained on."""
    out: str = ""
    """Folder for the plan, the records (cells/), the tables and the figures: small, and for keeping. Studies with the
    same base may share a folder, and then share their cells."""
    runs: str = ""
    """Folder for the run folders, with checkpoints, backbones and logs: large, and not for keeping (git is told to
    overlook it). By default runs/ inside --out."""
    base: str = grids.BASE
    """The recipe that everything is a variant of; one with the consistency term."""
    epochs: int | None = None
    """Epochs of every run, instead of the recipe's."""
    seeds: tuple[int, ...] = grids.SEEDS
    """Every variant is trained from each of these."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change any setting of the base, again and again: --set size=64 --set method.alpha=3."""
    alphas: tuple[float, ...] = grids.ALPHAS
    """alpha: the weights to try; 0 is the baseline."""
    taus: tuple[float, ...] = grids.TAUS
    """tau: the temperatures to try."""
    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """vary: a setting and its values, as JSON: --vary network.groups=[2,4,8], again and again. Values that are lists
    themselves are lists in the list: --vary views.crop_scale=[[0.08,1],[0.2,1]]."""
    only: tuple[str, ...] = ()
    """Work on these variants alone in this sitting, by name: what --plan shows, without the seed at the end."""
    validate: bool = False
    """Judge on a part of the training images, put aside before pre-training, and leave the test images alone: for
    choosing settings."""
    validate_share: float | None = None
    """How large a part, of each class; with --validate alone a tenth."""
    voc: str = ""
    """A folder in PASCAL VOC's layout, for transfer."""
    view_size: int = 224
    """Side of the views for VOC classification, in pixels."""
    protocol: Preset = "quick"
    """The settings of the evaluations: quick, or paper."""
    evaluation: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a setting of an evaluation: --evaluation linear.crops=2."""
    also: tuple[str, ...] = ()
    """Judge cells by these as well, each a column of the table: linear-paper, the paper's linear classification, which
    takes minutes where the quick one takes seconds, and semi-supervised, fine-tuning on 1% and 10% of the labels."""
    jobs: int = 1
    """Cells to work on at once, each in a process of its own, on one device. On a GPU they share it through NVIDIA's
    MPS where the driver has it: three small networks at once train a tenth more images a second than one."""
    time_limit: float | None = None
    """Minutes after which this sitting ends; what is not done then goes on in the next."""
    redo: bool = False
    """Compute cells again whose records or runs have other settings, instead of refusing; such runs are deleted."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished runs; their backbones are always kept."""
    plan: bool = False
    """Only show which cells there are and which are done."""
    report_only: bool = False
    """Only write the tables and figures of what is there."""
    device: str = "auto"
    """cuda, cuda:1, cpu, or auto: the first GPU if there is one."""
    workers: int = -1
    """Processes that read images, for each cell; -1 shares out what the machine has."""


@dataclass(frozen=True)
class ListRequest:
    """Which studies there are."""

    minutes_per_run: float | None = None
    """How long one run of the base takes, to say how long each study would."""


@dataclass(frozen=True)
class ReportRequest:
    """Tables and figures of folders of results, and one page of them all."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders that `co2 study --out` has written."""
    out: str = ""
    """The page to write, docs/RESULTS.md for instance; without it, only the tables and figures in the folders."""


def run(words: list[str]) -> int:
    """Carry out what comes after `co2 study`."""
    try:
        return _carry_out(words)
    except OSError as error:  # folders without access and full disks, wherever a study reads or writes
        what = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        raise UserError(
            f"{what}. Make room there, and make it readable and writable; or choose another --out or --runs."
        ) from error


def _carry_out(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "list":
        return _list(words[1:])
    if words[0] == "report":
        return _report(words[1:])
    if words[0] == "cell" and len(words) == 2:
        from co2.study.cell import work_on

        return work_on(words[1])
    names = _names(words)
    request = tyro.cli(
        Request,
        args=words[len(names) :],
        prog=f"co2 study {' '.join(names)}",
        description=". ".join(f"{name}: {study_called(name).summary}" for name in names) + ".",
    )
    return _study(names, request)


_CIRCUMSTANCES = ("runs", "only", "jobs", "time_limit", "redo", "keep_checkpoints", "device", "workers")
_INSTEAD = ("plan", "report_only")


def _command(names: Sequence[str], request: Request) -> str:
    """What was asked for, without what changes no number: the command that a record or a table is made by."""
    words = ["co2", "study", *names]
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if field.name in (*_CIRCUMSTANCES, *_INSTEAD) or value == field.default:
            continue
        option = f"--{field.name.replace('_', '-')}"
        if field.name in ("set", "vary", "evaluation"):
            words += [word for one in value for word in (option, one)]
        elif isinstance(value, tuple):
            words += [option, *map(str, value)]
        else:
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def _overview() -> str:
    width = max(map(len, STUDIES))
    return "\n".join(
        [
            "usage: co2 study NAME [NAME ...] --data PATH --out results/MINE [--epochs N] [--seeds 0 1 2] ...",
            "       co2 study list [--minutes-per-run N]",
            "       co2 study report DIR ... [--out docs/RESULTS.md]",
            "",
            *(f"  {name:<{width}}  {study.summary}" for name, study in STUDIES.items()),
            f"  {'list':<{width}}  the same with what each takes",
            f"  {'report':<{width}}  tables and figures of what is there, and one page of several studies",
            "",
            "A study is a grid of runs and evaluations. Stopped at any time, it goes on with the same command.",
            "--time-limit MINUTES stops it by itself; --jobs N works on several cells at once.",
            "`co2 study NAME --help` lists all options.",
        ]
    )


def _names(words: Sequence[str]) -> list[str]:
    names = []
    for word in words:
        if word.startswith("-"):
            break
        study_called(word)
        names.append(word)
    if not names:
        raise UserError("Name the study first: co2 study NAME --data PATH --out DIR. `co2 study` lists them.")
    return names


def _list(words: list[str]) -> int:
    request = tyro.cli(ListRequest, args=words, prog="co2 study list")
    if request.minutes_per_run is not None and not request.minutes_per_run > 0:
        raise UserError(f"--minutes-per-run must be above 0; got {request.minutes_per_run}.")
    wanted = Wanted(recipes.get(grids.BASE), vary={"network.groups": (2, 4, 8)})
    print(
        f"Base {grids.BASE}, {len(grids.SEEDS)} seeds. A run of MoCo or MoCo + CO2 counts 1, one with two losses 2.\n"
    )
    for name, study in STUDIES.items():
        variants = study.variants(wanted)
        shares = [cost_of(changed(wanted.base, v.changes)) / pixels_of(wanted.base) for v in variants]
        cost = len(grids.SEEDS) * sum(shares)
        duration = f", about {cost * request.minutes_per_run / 60:.1f} hours" if request.minutes_per_run else ""
        count = f"{len(variants)} variants x {len(grids.SEEDS)} seeds, {cost:.0f} runs' time{duration}"
        example = " (for three values)" if name == "vary" else ""
        judged = ", ".join(study.judges)
        print(f"{name}: {study.summary}\n  {count}{example}; judged by {judged}")
        for variant in variants:
            print(f"    {variant.name:<34} {variant.label}")
    print(
        f"\nThe evaluations come on top; --also {' '.join(BESIDES)} adds these. Studies that share --out share their "
        "cells: curves and transfer take the runs of claim. `co2 study NAME ... --plan` shows what is left to do."
    )
    return 0


def _report(words: list[str]) -> int:
    request = tyro.cli(ReportRequest, args=words, prog="co2 study report")
    if not request.folders:
        raise UserError("Name at least one folder of results: co2 study report results/MINE --out docs/RESULTS.md")

    from co2.study.report import report_folder, write_page

    folders = [Path(folder) for folder in request.folders]
    if request.out:
        print(f"Wrote {write_page(folders, Path(request.out))}.")
        return 0
    for folder in folders:
        _, results = report_folder(folder)
        print(f"Wrote the tables and figures of {', '.join(one.study for one in results)} into {folder}.")
    return 0


def _study(names: list[str], request: Request) -> int:
    if not request.out:
        raise UserError("Say where the results go: --out results/MINE.")
    out = Path(request.out)
    earlier = read_plan(out)
    if request.report_only and not request.data:
        if earlier is None:
            raise UserError(f"There is nothing to report on in {out} yet. Leave out --report-only to start.")
        absent = [name for name in names if name not in earlier.grids]
        if absent:
            raise UserError(f"{out} has no study {absent[0]}; it has {', '.join(earlier.grids)}.")
        return _write_up(out, earlier, names)
    if not request.data:
        raise UserError("A study needs labelled images: give --data, as for `co2 pretrain`.")
    asked = make_plan(names, request)
    plan = merge_plans(earlier, asked, out, request.redo)
    if earlier is not None:
        _say_what_goes(earlier, plan, out)
    chosen = _chosen(plan, names, request.only)
    if "transfer" in names and not request.voc and not request.report_only and not request.plan:
        raise UserError("transfer needs PASCAL VOC's layout: give --voc with the folder that holds VOCdevkit.")

    from co2.study.report import keep_runs_out_of_git
    from co2.study.sitting import Circumstances, outstanding, sit

    runs = Path(request.runs) if request.runs else out / RUNS
    circumstances = Circumstances(
        out=out,
        runs=runs,
        voc=request.voc,
        device=request.device,
        workers=request.workers,
        jobs=request.jobs,
        minutes=request.time_limit,
        redo=request.redo,
        keep_checkpoints=request.keep_checkpoints,
    )
    cells = [cell for cell in all_cells(plan, names) if cell.variant in chosen]
    if request.plan:
        return _show_plan(plan, cells, circumstances)
    if request.report_only:
        add_to_plan(out, plan, request.redo)
        return _write_up(out, plan, names)
    commands = {cell.name: asked.grids[name].command for name in reversed(names) for cell in plan.cells(name)}
    todo, done = outstanding(cells, plan, circumstances)  # what is refused is refused before anything is written
    if done:
        print(f"{len(done)} of {len(cells)} cells are done already.", flush=True)
    add_to_plan(out, plan, request.redo)  # another sitting may have begun meanwhile
    keep_runs_out_of_git(out, runs)
    outcome = sit(todo, len(done), plan, circumstances, commands)
    newest = read_plan(out)  # which another sitting may have added to, or taken these studies out of by --redo
    _write_up(out, newest if newest is not None and newest.grids.keys() >= set(names) else plan, names)
    if outcome.signal_number:
        return 128 + outcome.signal_number
    if outcome.failed:
        print(f"Failed: {', '.join(outcome.failed)}. The same command tries them again.")
        return 1
    return 0


def _say_what_goes(earlier: Plan, plan: Plan, out: Path) -> None:
    given_up = [name for name in earlier.grids if name not in plan.grids]
    if given_up:
        print(
            f"--redo takes {' and '.join(given_up)} out of {out / PLAN}: nothing there is for method.name="
            f"{plan.base.method.name}. The records stay in {out / CELLS}.",
            flush=True,
        )


def make_plan(names: Sequence[str], request: Request) -> Plan:
    """What is asked for, as data."""
    _refuse_idle(names, request)
    if not request.seeds or len(set(request.seeds)) < len(request.seeds):
        raise UserError(f"--seeds must be different numbers, at least one; got {' '.join(map(str, request.seeds))}.")
    share = request.validate_share
    if share is None and request.validate:
        share = VALIDATION_SHARE
    if share is not None and not 0 < share < 1:
        raise UserError(f"--validate-share is a share between 0 and 1; got {share}.")
    edits = parse_assignments(request.set, "--set")
    refuse_decided(edits, "--set")
    if request.epochs is not None:
        edits = {**edits, "epochs": request.epochs}
    base = changed(recipes.get(request.base), edits).edit(data=request.data)
    if "monitoring.evaluate_every" not in edits:
        edits["monitoring.evaluate_every"] = max(1, base.epochs // _MEASUREMENTS)
        base = changed(base, {"monitoring.evaluate_every": edits["monitoring.evaluate_every"]})
    wanted = Wanted(base, edits, request.alphas, request.taus, _values_to_vary(request.vary))
    return Plan(
        base=base,
        validate=share,
        view_size=request.view_size,
        grids={
            name: Grid(
                variants=tuple(study_called(name).variants(wanted)),
                seeds=request.seeds,
                protocols=judges(
                    study_called(name).judges, request.also, request.protocol, request.base, request.evaluation
                ),
                command=_command(names, request),
            )
            for name in names
        },
    )


def _refuse_idle(names: Sequence[str], request: Request) -> None:
    """What none of these studies has: who gives points of a grid, or more to judge by, expects them to be used."""
    for option, studies in {"alphas": ("alpha", "alpha-tau"), "taus": ("tau", "alpha-tau"), "vary": ("vary",)}.items():
        if getattr(request, option) != getattr(Request(), option) and not set(names) & set(studies):
            raise UserError(f"--{option} is for the study {' or '.join(studies)}. Name it, or leave --{option} out.")
    if request.also and set(names) == {"transfer"}:
        raise UserError("--also is for the other studies; transfer is judged on VOC. Name one, or leave --also out.")


def _values_to_vary(texts: Sequence[str]) -> dict[str, Sequence[Any]]:
    found = parse_assignments(texts, "--vary")
    refuse_decided(found, "--vary")
    for name, values in found.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"--vary {name} takes several values: --vary {name}=[1,2], for instance.")
    return found


def _chosen(plan: Plan, names: Sequence[str], only: Sequence[str]) -> list[str]:
    known = list(dict.fromkeys(variant.name for name in names for variant in plan.grids[name].variants))
    for name in only:
        if name not in known:
            raise UserError(
                f"There is no variant '{name}' in {' and '.join(names)}.{did_you_mean(name, known)} "
                f"There are {', '.join(known)}."
            )
    return list(only) or known


def _show_plan(plan: Plan, cells: Sequence[Cell], circumstances: Circumstances) -> int:
    from co2.study.sitting import standing

    left = []
    for cell in cells:
        found = standing(cell, plan, circumstances, images=None)  # the data need not be here
        begun = " (begun)" if (circumstances.runs / cell.name).is_dir() else ""
        other = [f"its record has other settings ({found.other_record[0]})"] if found.other_record else []
        other += [f"its run has other settings ({found.other_run[0]})"] if found.other_run else []
        if other:
            word = "to do again" if circumstances.redo else "refused without --redo"
            stands = f"{word}: {', and '.join(other)}"
        else:
            stands = f"to do{begun}: {', '.join(found.missing)}" if found.missing else "done"
        left += [cell] if found.missing else []
        print(f"{cell.name:<40} {stands}")
    runs_left = sum(cost_of(cell.experiment) for cell in left) / pixels_of(plan.base)
    print(f"{len(cells) - len(left)} of {len(cells)} cells are done; {runs_left:.0f} runs' time is left at most.")
    return 0


def _write_up(out: Path, plan: Plan, names: Sequence[str]) -> int:
    from co2.study.report import report_study

    for name in names:
        results = report_study(out, plan, name)
        count = len(results.found)
        print(f"\n{read_text(out / f'{name}.md')}")
        missing = f", {len(results.missing)} cells missing" if results.missing else ""
        figure = "Table and figure" if (out / f"{name}.svg").is_file() else "Table"
        endings = ".md, .csv, .svg, .png" if figure != "Table" else ".md, .csv"
        print(f"{name}: {count} cell{'s' if count != 1 else ''}{missing}. {figure}: {out / name}{endings}")
    return 0
