"""`co2 evaluate`: a backbone and data in; named numbers, their records, and a table out.

Nothing here imports torch before there is something to evaluate.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import tyro

from co2.errors import RunError, UserError
from co2.evaluation.presets import AFTER_STEPS, ALL, PROTOCOLS, Preset, check_given, protocol_called, settings_of
from co2.files import read_json

if TYPE_CHECKING:
    from rich.table import Table

    from co2.evaluation.protocol import Evaluation
    from co2.evaluation.subject import Subject

RECORDS = "evaluation"  # folder for records, inside a run folder or beside it
_MOST_BYTES_OF_A_NAME = 200  # in the name of a record; protocol, preset and seed come to it


@dataclass(frozen=True)
class Request:
    """What all protocols are told."""

    subject: Annotated[str, tyro.conf.Positional] = ""
    """A run folder, a backbone.safetensors, a checkpoint of a run, an official MoCo checkpoint (.pth.tar),
    torchvision/NAME or timm/NAME (with :DEFAULT for its published weights, which are then downloaded), or random."""
    data: str = ""
    """Images, as for `co2 pretrain`; with labels but for label-free. By default what the run folder was trained on."""
    voc: str = ""
    """A folder in PASCAL VOC's layout, for svm, detection and segmentation."""
    protocol: Preset = "quick"
    """The settings to start from: quick, for small data and short time, or paper."""
    runs: int = 1
    """How often, with consecutive seeds; the table has mean ± standard deviation."""
    seed: int = 0
    """Whatever is random follows from it."""
    against: str = ""
    """Another subject in the same table. `all` takes random, the same architecture with random weights, unless told
    none."""
    checkpoints: bool = False
    """label-free: all checkpoints of the run, with their kNN accuracy and how well each measure follows it."""
    view_size: int | None = None
    """Side of the views in pixels; by default what the subject was trained with, or 224."""
    embeddings: bool = False
    """knn, linear, svm, label-free: judge what comes out of the head instead of the features before it, as the MoCo
    authors' notebook does. For run folders that have checkpoints, and official MoCo checkpoints."""
    out: str = ""
    """Where records go: a .json file, or a folder. By default evaluation/ in the run folder, or here."""
    device: str = "auto"
    """cuda, cuda:1, cpu, or auto: the first GPU if there is one."""
    workers: int = -1
    """Processes that read images; -1 takes what the machine has."""
    print: bool = False
    """Only print the settings."""


def run(words: list[str]) -> int:
    """Carry out what comes after `co2 evaluate`."""
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0].startswith("-"):
        raise UserError(
            "Name the protocol first: co2 evaluate PROTOCOL SUBJECT --data PATH. `co2 evaluate` lists them."
        )
    name = words[0]
    request, settings = _parse(name, words[1:])
    if request.print:
        print(json.dumps(_settings_to_print(name, request.protocol, settings), indent=2))
        return 0
    if not request.subject:
        raise UserError(f"Say what to evaluate: co2 evaluate {name} SUBJECT, for instance a run folder, or random.")
    if request.checkpoints and name != "label-free":
        raise UserError("--checkpoints is for label-free: co2 evaluate label-free RUN --checkpoints.")
    if request.checkpoints and (request.runs != 1 or request.against not in ("", "none")):
        raise UserError("--checkpoints looks at one run, once: leave --runs and --against out.")
    given = _given(words)
    if settings is not None:  # `all` has none of its own
        check_given(name, settings, given)
    _evaluate(name, request, settings, given, command=shlex.join(["co2", "evaluate", *words]))
    return 0


def _overview() -> str:
    width = max(map(len, PROTOCOLS))
    lines = [f"  {name:<{width}}  {protocol.summary}" for name, protocol in PROTOCOLS.items()]
    return "\n".join(
        [
            "usage: co2 evaluate PROTOCOL SUBJECT --data PATH [--voc PATH] [--protocol paper|quick] [--runs N] ...",
            "",
            *lines,
            f"  {ALL:<{width}}  every one that the data allow, with random weights beside it",
            "",
            "SUBJECT: a run folder, a backbone.safetensors, a MoCo checkpoint, torchvision/NAME, timm/NAME or random.",
            "`co2 evaluate PROTOCOL --help` lists all settings; --print prints those of --protocol quick or paper.",
        ]
    )


def _parse(name: str, words: list[str]) -> tuple[Request, Any]:
    """The request and the protocol's settings: those of the preset, with what the command line changes."""
    program = f"co2 evaluate {name}"
    if name == ALL:
        return tyro.cli(Request, args=words, prog=program, description="Everything that the data allow."), None
    summary = protocol_called(name).summary
    settings = settings_of(name, _preset_named(words))
    together = dataclasses.make_dataclass(
        "Evaluate",
        [("request", Request), ("settings", type(settings), dataclasses.field(default=settings))],
    )
    parsed: Any = tyro.cli(
        together, args=words, prog=program, description=f"{summary}.", config=(tyro.conf.OmitArgPrefixes,)
    )
    return parsed.request, parsed.settings


def _preset_named(words: list[str]) -> Preset:
    """Which preset the settings start from must be known before they are parsed. Of several, the last one counts."""
    named: Preset = "quick"
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option != "--protocol":
            continue
        value = value if equals else "".join(words[place + 1 : place + 2])
        for preset in get_args(Preset):
            named = preset if value == preset else named
    return named


def _given(words: list[str]) -> set[str]:
    """Names of the settings that the command line speaks of."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def _settings_to_print(name: str, preset: Preset, settings: Any) -> dict[str, Any]:
    if name != ALL:
        return dataclasses.asdict(settings)
    return {protocol: dataclasses.asdict(settings_of(protocol, preset)) for protocol in PROTOCOLS}


def _evaluate(name: str, request: Request, settings: Any, given: Set[str], command: str) -> None:
    from co2.evaluation import label_free, suite
    from co2.evaluation.progress import shown
    from co2.evaluation.subject import open_subject

    if request.subject.endswith(":DEFAULT"):
        print(f"{request.subject}: published weights, downloaded unless they are there already.", file=sys.stderr)
    how: Any = {"view_size": request.view_size, "seed": request.seed, "embeddings": request.embeddings}
    subject = open_subject(request.subject, **how)
    subjects = [subject]
    against = request.against or ("random" if name == ALL and subject.drawn_from is None else "none")
    if against != "none":
        subjects.append(open_subject(against, like=subject, **how))
    records = _Records(name, request, command)
    with shown() as progress:
        circumstances = suite.circumstances_of(
            subject,
            data=request.data,
            voc=request.voc,
            runs=request.runs,
            seed=request.seed,
            device=request.device,
            workers=request.workers,
            progress=progress,
        )
        found: dict[tuple[str, str], list[Evaluation]] = {}
        left_out: dict[str, str] = {}
        followed: dict[str, float] = {}
        if request.checkpoints:
            runs = suite.evaluate_checkpoints(
                request.subject,
                settings,
                circumstances,
                request.protocol,
                request.view_size,
                request.embeddings,
                records.add,
            )
            found["label-free", request.subject] = runs
            followed = label_free.correlations(runs) if "knn_top1" in runs[0].numbers else {}
        elif name == ALL:

            def done(protocol: str, one: Subject, runs: list[Evaluation]) -> None:
                progress.say(f"{protocol}  {one.name}  {_line(runs)}")

            everything = suite.evaluate_all(subjects, request.protocol, circumstances, records.add, done)
            found, left_out = everything.runs, everything.left_out
        else:
            for one in subjects:
                own = suite.suited(name, request.protocol, one, settings, given, progress)
                found[name, one.name] = suite.evaluate_runs(
                    name, one, own, circumstances, request.protocol, records.add
                )
    if request.checkpoints:
        _show(_table_of_checkpoints(found["label-free", request.subject], followed))
    else:
        _show(_table(found, [one.name for one in subjects]))
    for protocol, why in left_out.items():
        print(f"Left out: {protocol}. {why}")
    print(f"Records: {records.finish(left_out, followed)}")


class _Records:
    """Writes every evaluation down as soon as it is there."""

    def __init__(self, protocol: str, request: Request, command: str) -> None:
        subject = Path(request.subject).expanduser()
        default = subject / RECORDS if subject.is_dir() else Path(RECORDS)
        self.out = Path(request.out).expanduser() if request.out else default
        self.single_file = self.out.suffix == ".json"
        self.preset = request.protocol
        self.command = command
        self.evaluations: list[Evaluation] = []
        self.failure: OSError | None = None
        folder = self.out.parent if self.single_file else self.out
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Records cannot be written to {self.out}: {error.strerror}. Give another --out.") from None
        if self.single_file and self.out.is_dir():
            raise UserError(
                f"{self.out} is a folder, and --out with .json at its end names a file. Give another --out."
            )
        if not os.access(folder, os.W_OK):
            raise UserError(f"Records cannot be written to {self.out}: permission denied. Give another --out.")
        there = self._protocols_there() - {protocol}
        if there and protocol != ALL:
            raise UserError(
                f"{self.out} holds the record of {' and '.join(sorted(there))}, which would be lost. Give another "
                "--out, or a folder, in which every record has a file of its own."
            )

    def _protocols_there(self) -> set[str]:
        """What the one file for all records holds already."""
        if not self.single_file:
            return set()
        try:
            content = read_json(self.out)
            return {str(one["protocol"]) for one in (content if isinstance(content, list) else [content])}
        except (OSError, ValueError, LookupError, TypeError):
            return set()  # nothing, or nothing of ours

    def add(self, evaluation: Evaluation) -> None:
        """One file for each, or all of them in the one that was asked for."""
        made = evaluation.details.get("made_with", {}) | {"command": self.command}
        evaluation = dataclasses.replace(evaluation, details=evaluation.details | {"made_with": made})
        self.evaluations.append(evaluation)
        if not self.single_file:
            self._write(self._place_of(evaluation), dataclasses.asdict(evaluation))
        else:
            records = [dataclasses.asdict(one) for one in self.evaluations]
            self._write(self.out, records[0] if len(records) == 1 else records)

    def _write(self, path: Path, value: Any) -> None:
        """What cannot be written must not take the numbers along, which may have taken hours: `finish` tells it."""
        from co2.evaluation.protocol import write_json

        try:
            write_json(path, value)
        except OSError as error:
            self.failure = self.failure or error

    def _place_of(self, evaluation: Evaluation) -> Path:
        """A name for its record: where there is one by that name of other data or settings, with a digest of these."""
        from co2.evaluation.protocol import as_json

        who = _short(re.sub(r"[^\w.]+", "-", evaluation.subject).strip("-"))
        words = [evaluation.protocol, who, f"s{evaluation.settings.get('seed', 0)}"]
        if evaluation.preset not in ("", "quick"):
            words.insert(1, evaluation.preset)
        plain = self.out / f"{'-'.join(words)}.json"
        try:
            there = read_json(plain)
            known = {name: there[name] for name in ("subject", "data", "settings")}
            steps = there["details"].get(AFTER_STEPS)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return plain  # nothing, or nothing to keep
        known |= {"architecture": there["architecture"]} if "architecture" in there else {}
        ours = json.loads(as_json({name: getattr(evaluation, name) for name in known}))
        ours |= {AFTER_STEPS: evaluation.details[AFTER_STEPS]} if AFTER_STEPS in evaluation.details else {}
        if known | ({AFTER_STEPS: steps} if steps is not None else {}) == ours:
            return plain
        digest = hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()[:8]
        return plain.with_name(f"{plain.stem}-{digest}.json")

    def finish(self, left_out: Mapping[str, str], followed: Mapping[str, float]) -> Path:
        """The table as a file, beside the records; and what could not be written."""
        if not self.single_file:
            self._summarise(left_out, followed)
        if self.failure is not None:
            raise RunError(
                f"The numbers are above, but not all records of them could be written to {self.out}: "
                f"{self.failure.strerror or self.failure}. Make room there or give another --out, and evaluate again."
            ) from self.failure
        return self.out

    def _summarise(self, left_out: Mapping[str, str], followed: Mapping[str, float]) -> None:
        from co2.evaluation.protocol import spread_over_runs

        groups: dict[tuple[str, str], list[Evaluation]] = {}
        for evaluation in self.evaluations:
            groups.setdefault((evaluation.protocol, evaluation.subject), []).append(evaluation)
        rows = [
            {
                "protocol": protocol,
                "subject": subject,
                "data": runs[0].data,
                "runs": len(runs),
                "numbers": {
                    name: {"mean": one.mean, "deviation": one.deviation or 0.0}
                    for name, one in spread_over_runs(runs).items()
                },
            }
            for (protocol, subject), runs in groups.items()
        ]
        summary: dict[str, Any] = {
            "command": self.command,
            "preset": self.preset,
            "results": rows,
            "left_out": dict(left_out),
        }
        if followed:
            summary["rank_correlation_with_knn"] = dict(followed)
        protocols = sorted({protocol for protocol, _ in groups})
        words = ["summary", *(protocols if len(protocols) == 1 else []), *(["paper"] if self.preset == "paper" else [])]
        self._write(self.out / f"{'-'.join(words)}.json", summary)


def _short(name: str) -> str:
    """The end of a name, which of a path tells the most: files cannot have names of more than 255 bytes."""
    return name.encode()[-_MOST_BYTES_OF_A_NAME:].decode(errors="ignore")


def _line(runs: Sequence[Evaluation]) -> str:
    from co2.evaluation.protocol import spread_over_runs

    return "  ".join(f"{name} {number.text()}" for name, number in spread_over_runs(runs).items())


def _table(found: Mapping[tuple[str, str], Sequence[Evaluation]], subjects: Sequence[str]) -> Table:
    """A column for each subject, a row for each number of each protocol."""
    from rich.markup import escape
    from rich.table import Table

    from co2.evaluation.protocol import spread_over_runs

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("protocol")
    table.add_column("number")
    for subject in subjects:
        table.add_column(escape(subject), justify="right", overflow="fold")
    for protocol in dict.fromkeys(protocol for protocol, _ in found):
        spreads = {one: spread_over_runs(found[protocol, one]) for one in subjects if (protocol, one) in found}
        for row, number in enumerate(next(iter(spreads.values()))):
            values = [spreads[one][number].text() if one in spreads else "" for one in subjects]
            table.add_row(protocol if row == 0 else "", number, *values)
    return table


def _table_of_checkpoints(runs: Sequence[Evaluation], followed: Mapping[str, float]) -> Table:
    """A row for each checkpoint, and under them how well each measure follows kNN accuracy."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("checkpoint")
    for name in runs[0].numbers:
        table.add_column(name, justify="right")
    for one in runs:
        table.add_row(Path(one.subject).stem, *(f"{value:.3f}" for value in one.numbers.values()))
    if followed:
        values = [f"{followed[name]:+.2f}" if name in followed else "" for name in runs[0].numbers]
        table.add_row("rank correlation with kNN", *values, style="bold")
    return table


def _show(table: Table) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 180).print(table)
