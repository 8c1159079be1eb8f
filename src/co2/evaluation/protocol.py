"""The one shape of all evaluations: a subject and data in, named numbers and a record of the exact settings out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from co2.errors import RunError
from co2.files import write_atomically
from co2.measures.numbers import Spread, spread


@dataclass(frozen=True)
class Evaluation:
    """What one protocol says about one subject."""

    protocol: str
    """Name of the protocol, as on the command line: knn, linear, ..."""
    subject: str
    """What was evaluated, as the user named it."""
    data: str
    """On which data, as the user named it."""
    numbers: dict[str, float]
    """The result: {"top1": 63.5, ...}, accuracies and precisions in percent."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Every setting of the protocol, and the seed."""
    details: dict[str, Any] = field(default_factory=dict)
    """What is too long for a table: per-class numbers, the images of a subset, curves."""
    preset: str = ""
    """Which settings the user started from: quick or paper."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Of the subject: its backbone and stem, and the size, mean and std of what it is shown."""

    def write(self, path: Path) -> None:
        """The record as JSON."""
        write_json(path, asdict(self))


def write_json(path: Path, value: Any) -> None:
    """A file of JSON, whole or not at all."""
    text = as_json(value) + "\n"
    write_atomically(path, text.encode())


def as_json(value: Any) -> str:
    """The value as text that every reader of JSON takes."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not have: null keeps a record readable for every tool."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def spread_over_runs(runs: Sequence[Evaluation]) -> dict[str, Spread]:
    """Mean and standard deviation of each number over runs of one protocol on one subject."""
    spreads = {name: spread([run.numbers[name] for run in runs]) for name in runs[0].numbers}
    return {name: one for name, one in spreads.items() if one is not None}


def finite(losses: Sequence[float], protocol: str) -> list[float]:
    """The losses of a training, rounded for the record, if it did not diverge."""
    if not all(map(math.isfinite, losses)):
        raise diverged(protocol)
    return [round(loss, 5) for loss in losses]


def diverged(protocol: str) -> RunError:
    """To be raised where a training made numbers that are none."""
    return RunError(f"{protocol}: the training diverged (the loss is not a number). Give a lower --learning-rate.")
