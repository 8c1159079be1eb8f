"""The record of a cell: everything behind its numbers in one JSON file, and how it is told from another one's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from co2.errors import UserError
from co2.experiment import Experiment, differences
from co2.files import MissingFile, read_json, write_atomically
from co2.measures.metric import HEALTH
from co2.runs.rows import at_the_end
from co2.schema import Amount, Count, Line, read_as, shown
from co2.study.judges import Judge
from co2.study.plan import CELLS, FAILED, Cell, Plan

DATA_NUMBERS = ("train", "bank", "test", "classes")
"""How many images there are, and classes: by these a record is told from one of other data."""
_DIGITS = 6  # significant ones in a curve: more than a figure shows, and a third of the space


@dataclass(frozen=True)
class CellRecord:
    """A finished cell, as its file says."""

    path: Path
    experiment: Experiment
    content: Mapping[str, Any]

    @property
    def evaluations(self) -> Mapping[str, Any]:
        """By protocol: numbers, settings and details."""
        found: Mapping[str, Any] = self.content["evaluations"]
        return found

    def number(self, measure: str) -> float | None:
        """A number by its name: `linear.top1` from an evaluation, `train.consistency` from the end of a curve,
        `epoch.effective_rank` from the last measurement of the run."""
        kind, _, name = measure.partition(".")
        if kind == "train":
            return at_the_end(*self.curve(name))
        if kind == "epoch":
            measured: list[float | None] = self.content["curves"].get("epoch", {}).get(name, [])
            return measured[-1] if measured else None
        value = self.evaluations.get(kind, {}).get("numbers", {}).get(name)
        return None if value is None else float(value)

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Epochs and values of a measure of training, leaving out what is missing."""
        rows = self.content["curves"]["train"]
        pairs = [(e, v) for e, v in zip(rows.get("epoch", []), rows.get(name, []), strict=False) if v is not None]
        return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def record_path(folder: Path, cell: str) -> Path:
    """Where the record of a cell is."""
    return folder / CELLS / f"{cell}.json"


def read_record(path: Path) -> CellRecord | None:
    """The record in a file, or None if there is no such file."""
    try:
        content = read_as(_RECORD, read_json(path), "The record")
        metrics = (*content["settings"].method.metrics, *HEALTH)
        shares = {f"{metric.name}?": _SHARES for metric in metrics if metric.unit == "%"}
        read_as({"curves": {"train": shares, "epoch": shares}}, content, "The record")
    except MissingFile:
        return None
    except UserError as error:
        raise UserError(
            f"{path} is damaged, or not the record of a cell: {error} Delete it to compute it again."
        ) from error
    return CellRecord(path, content["settings"], content)


_SHARES = list[Annotated[float, "from 0 to 1"] | None]
_CURVES: dict[Any, Any] = {
    "step?": list[Count | None],
    "epoch?": list[Amount],
    "seconds?": list[Amount | None],
    "images_per_second?": list[Amount | None],
    "waiting?": _SHARES,
    Line: list[float | None],
}
NUMBERS = {"train?": Count, "bank?": Count, "test": Count, "classes?": Count}
EVALUATION = {"numbers": {Line: Annotated[float, "from 0 to 100"] | None}, "settings": {str: Any}}
# What tables, figures and pages take from a record.
_RECORD = {
    "settings": Experiment,
    "data": {**NUMBERS, "validate?": Annotated[float, "between 0 and 1"] | None},
    "evaluations": {Judge: EVALUATION},
    "seconds": {"wall": Amount},
    "made_with": {"device": Line},
    "curves": {"train": _CURVES, "epoch": _CURVES},
}


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """One line for each part, so that a person can find their way and a curve does not take a thousand lines."""
    parts = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in content.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{{\n{parts}\n}}\n".encode())


def mismatches(record: CellRecord, cell: Cell, plan: Plan, data: Mapping[str, Any] | None = None) -> list[str]:
    """How a record differs from what is asked for, a line each. What is not yet in it is no difference."""
    lines = [line.replace("the run folder", "the record") for line in differences(cell.experiment, record.experiment)]
    recorded = record.content["data"]
    if recorded.get("validate") != plan.validate:
        lines.append(
            f"share held out for validation: {recorded.get('validate')} in the record, {plan.validate} asked for"
        )
    if data is not None:
        lines += other_data(recorded, data, "the record")
    for protocol, settings in cell.protocols.items():
        if protocol in record.evaluations:
            theirs = record.evaluations[protocol]["settings"]
            lines += [
                f"{protocol}.{name}: {shown(theirs.get(name))} in the record, {value} asked for"
                for name, value in settings_to_record(protocol, settings, plan.view_size).items()
                if theirs.get(name) != value
            ]
    return lines


def other_data(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> list[str]:
    """How the numbers of images that something was made of differ from those there are now, a line each."""
    return [
        f"data, {name}: {theirs.get(name)} in {where}, {ours[name]} asked for"
        for name in DATA_NUMBERS
        if theirs.get(name) != ours[name]
    ]


def settings_to_record(protocol: str, settings: Mapping[str, Any], view_size: int) -> dict[str, Any]:
    """What a record must say of an evaluation, as JSON has it: lists for tuples."""
    size = {"view_size": view_size} if protocol == "svm" else {}  # the other two on VOC have sizes of their own
    recorded: dict[str, Any] = json.loads(json.dumps({**settings, **size}))
    return {name: value for name, value in recorded.items() if name != "storage"}


def missing_protocols(record: CellRecord | None, cell: Cell) -> list[str]:
    """What a cell still has to be judged by."""
    return [name for name in cell.protocols if record is None or name not in record.evaluations]


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of metrics.jsonl as columns, rounded: a curve each, null where a row has no such value."""
    names = dict.fromkeys(name for row in rows for name in row if name != "kind")
    return {name: [_rounded(row.get(name)) for row in rows] for name in names}


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def write_failure(path: Path, cell: Cell, error: str, exit_code: int) -> None:
    """What went wrong in a cell, beside the records; it goes away when the cell is tried again."""
    write_record(path, {"cell": cell.name, "exit_code": exit_code, "error": error})


def failures(folder: Path) -> dict[str, str]:
    """The error of each cell that failed, by its name."""
    found = {}
    for path in sorted((folder / CELLS).glob(f"*{FAILED}")):
        try:
            note = read_as({"error": str}, read_json(path), "The note")
            found[path.name.removesuffix(FAILED)] = note["error"]
        except UserError:
            found[path.name.removesuffix(FAILED)] = "its note is damaged"
    return found
