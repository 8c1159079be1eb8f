"""Run folders as they lie on the disk, read into records. A run that is still being written can be read too."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2.errors import UserError
from co2.experiment import Experiment, read_experiment
from co2.files import MissingFile
from co2.measures.metric import HEALTH, Metric, told
from co2.runs.rows import METRICS, Row, at_the_end, lines_of, row_of

# The name that the engine gives this file. Not imported from there: a page should not have to wait for torch.
CONFIG = "config.json"


@dataclass(frozen=True)
class Advice:
    """Something that the program noticed while a run went on."""

    epoch: float
    text: str


@dataclass(frozen=True)
class RunRecord:
    """What a run folder says about its run."""

    name: str
    """What the page calls this run."""
    folder: Path
    experiment: Experiment
    train: tuple[Mapping[str, Any], ...]
    """One row for each logging interval: averages over its steps."""
    epochs: tuple[Mapping[str, Any], ...]
    """One row for each measurement of the encoder: before the first step, and at the end of epochs."""
    advice: tuple[Advice, ...] = ()
    seconds: float | None = None
    """How long the run took, where that is known."""

    def curve(self, kind: str, measure: str) -> tuple[list[float], list[float]]:
        """Epochs and values of a measure, leaving out the rows that lack it."""
        rows = self.train if kind == "train" else self.epochs
        points = [(float(row["epoch"]), float(row[measure])) for row in rows if row.get(measure) is not None]
        return [epoch for epoch, _ in points], [value for _, value in points]

    def final(self, measure: str) -> float | None:
        """Where a measure of training ended: its mean over the log lines of the last epoch, which is less noisy than
        the last line alone."""
        return at_the_end(*self.curve("train", measure))

    def latest(self, measure: str) -> float | None:
        """The last measurement of the trained encoder, None if there was none yet or the images have no labels."""
        epochs, values = self.curve("epoch", measure)
        return values[-1] if values and epochs[-1] > 0 else None

    def untrained(self, measure: str) -> float | None:
        """The measurement of the encoder before its first step, None if there is none."""
        epochs, values = self.curve("epoch", measure)
        return values[0] if values and epochs[0] == 0 else None

    def ended(self, metric: Metric) -> float | None:
        """Where the run stands, by what is measured of its training or of its network."""
        return self.latest(metric.name) if metric in HEALTH else self.final(metric.name)

    @property
    def epochs_done(self) -> float:
        """How far the run has come."""
        return max(float(row["epoch"]) for row in (*self.train, *self.epochs))


def read_run(folder: str | Path, *, name: str | None = None, seconds: float | None = None) -> RunRecord:
    """Read a run folder. `name` is what the page calls it, by default the folder's own name."""
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise UserError(f"There is no folder {folder}. Give a run folder, as `co2 pretrain --out` writes it.")
    try:
        experiment = read_experiment(folder / CONFIG)
    except MissingFile as error:
        raise UserError(
            f"{folder} is not a run folder: it has no {CONFIG}. Give one that `co2 pretrain` has written."
        ) from error
    rows = _whole_rows(folder)
    by_kind = {kind: tuple(row for row in rows if row["kind"] == kind) for kind in ("train", "epoch", "advice")}
    if not by_kind["train"] and not any(row["epoch"] > 0 for row in by_kind["epoch"]):
        raise UserError(f"The run in {folder} has not written any measurements yet. Try again when it has.")
    name = name if name is not None else folder.resolve().name
    return RunRecord(
        name=name.encode(errors="backslashreplace").decode(),  # names of folders need not be text
        folder=folder,
        experiment=experiment,
        train=by_kind["train"],
        epochs=by_kind["epoch"],
        advice=tuple(Advice(float(row["epoch"]), str(row.get("text", ""))) for row in by_kind["advice"]),
        seconds=seconds,
    )


def read_runs(folders: Sequence[str | Path]) -> list[RunRecord]:
    """Read several run folders. Folders of the same name are called by their paths, so that they can be told apart."""
    places = [Path(folder).resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise UserError(f"The run folder {folder} is named twice. Name every run once.")
    names = [place.name for place in places]
    return [
        read_run(folder, name=str(folder) if names.count(name) > 1 else name)
        for folder, name in zip(folders, names, strict=True)
    ]


def _whole_rows(folder: Path) -> list[Row]:
    """What a run has written: a line that is none has to go before anything is said of the others."""
    rows: list[Row] = []
    lines = lines_of(folder)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(row_of(line))
        except UserError as error:
            if number == len(lines):  # no line end yet: the run is writing this line just now, or was killed at it
                continue
            raise UserError(
                f"Line {number} of {folder / METRICS} is not a measurement: {error} Delete that line to report on the "
                "others."
            ) from error
    return rows


def measured(runs: Sequence[RunRecord]) -> tuple[Metric, ...]:
    """What is told of the training of these runs, as their methods declare it."""
    return told(metric for run in runs for metric in run.experiment.method.metrics)
