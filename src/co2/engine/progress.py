"""What the user sees while a run goes on: a progress bar on a terminal, quiet lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from co2.machine.terminal import Lasting
from co2.measures.metric import HEALTH, Metric, told

# Of a number of steps how long the first so many take, in any unit: time left is shown by it.
Work = Callable[[int], float]


class Display(Protocol):
    """Where a run reports to."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """How far something is that comes before the first step."""

    def begin(self, steps: int, first_step: int, work: Work) -> None:
        """Training starts with step number `first_step` of `steps`."""

    def interval(self, step: int, values: Mapping[str, float]) -> None:
        """The averages of a logging interval."""

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        """The measurements at the end of an epoch."""

    def close(self) -> None:
        """Nothing more comes."""


class Bar:
    """For people at a terminal, which they may close."""

    def __init__(self, epochs: int, metrics: Sequence[Metric]) -> None:
        self.epochs, self.metrics = epochs, metrics
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=Console(file=cast(IO[str], Lasting(sys.stdout)), highlight=False),
        )
        self.task: TaskID | None = None  # what is going on now
        self.progress.start()

    def preparing(self, what: str, done: int, total: int) -> None:
        if self.task is None:
            self.task = self.progress.add_task(what.capitalize(), total=total, numbers="", count="")
        self.progress.update(self.task, completed=done, count=f"{done:,}/{total:,}")

    def begin(self, steps: int, first_step: int, work: Work) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.steps, self.work = steps, work
        self.task = self.progress.add_task("Pre-training", total=work(steps), numbers="", count="")
        self._stands_at(first_step, "")

    def _stands_at(self, step: int, numbers: str) -> None:
        assert self.task is not None
        count = f"{step:,}/{self.steps:,}"
        self.progress.update(self.task, completed=self.work(step), count=count, numbers=numbers)

    def say(self, text: str) -> None:
        self.progress.console.print(Text(text))  # names of files may look like markup

    def interval(self, step: int, values: Mapping[str, float]) -> None:
        self._stands_at(step, f"{in_line(self.metrics, values)}  {values['images_per_second']:,.0f} images/s")

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        self.progress.console.print(epoch_line(number, self.epochs, values, self.metrics))

    def close(self) -> None:
        self.progress.stop()


class Lines:
    """For log files: a line at the end of each epoch."""

    def __init__(self, epochs: int, metrics: Sequence[Metric]) -> None:
        self.epochs, self.metrics = epochs, metrics
        self.step = 0
        self.intervals: list[tuple[int, Mapping[str, float]]] = []  # of the epoch: how many steps, and their averages
        self.log = Lasting(sys.stdout)

    def say(self, text: str) -> None:
        print(text, file=self.log, flush=True)

    def preparing(self, what: str, done: int, total: int) -> None:
        pass

    def begin(self, steps: int, first_step: int, work: Work) -> None:
        self.step = first_step

    def interval(self, step: int, values: Mapping[str, float]) -> None:
        self.intervals.append((step - self.step, values))
        self.step = step

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        self.say(epoch_line(number, self.epochs, {**self._averages(), **values}, self.metrics))
        self.intervals = []

    def _averages(self) -> dict[str, float]:
        steps = sum(count for count, _ in self.intervals)
        names = self.intervals[0][1] if self.intervals else {}
        return {name: sum(count * values[name] for count, values in self.intervals) / steps for name in names}

    def close(self) -> None:
        pass


class Quiet:
    """For the other ones of many processes."""

    def say(self, text: str) -> None:
        pass

    def preparing(self, what: str, done: int, total: int) -> None:
        pass

    def begin(self, steps: int, first_step: int, work: Work) -> None:
        pass

    def interval(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def in_line(metrics: Sequence[Metric], values: Mapping[str, float]) -> str:
    """Those that have a symbol: L_ins 6.180  found 35.1%. The loss, where none of them has."""
    return "  ".join(f"{one.symbol} {one.shown(values[one.name])}" for one in told(metrics) if one.name in values)


def epoch_line(number: int, epochs: int, values: Mapping[str, float], metrics: Sequence[Metric]) -> str:
    """An epoch in one line."""
    health = ", ".join(
        f"{metric.symbol} {metric.shown(values[metric.name])}"
        for metric in HEALTH
        if metric.symbol and metric.name in values
    )
    parts = [f"epoch {number}/{epochs}", in_line(metrics, values), health]
    if "images_per_second" in values:
        parts.append(f"{values['images_per_second']:,.0f} images/s, {values['waiting']:.0%} waiting for data")
    return "   ".join(part for part in parts if part)


def choose_display(epochs: int, metrics: Sequence[Metric]) -> Display:
    """A bar where somebody is looking, lines where not."""
    return Bar(epochs, metrics) if sys.stdout.isatty() else Lines(epochs, metrics)
