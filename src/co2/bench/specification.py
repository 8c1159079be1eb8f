"""What each benchmark is told, as data. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from co2.errors import UserError

Kind = Literal["auto", "eager", "captured", "compiled"]


@dataclass(frozen=True)
class StepBenchmark:
    """How fast the training step of a recipe is by itself: views of noise lie on the device, nothing is read.

    Every setting of `co2 pretrain RECIPE` can be given beside these."""

    kinds: tuple[Kind, ...] = ()
    """Ways to take a step, to compare with each other; by default the one that --execution.step says."""
    steps: int | None = None
    """Steps in each of five timed stretches; by default as many as take about two seconds."""
    out: str = ""
    """Folder for the record (step.json), or a file that ends in .json."""

    def __post_init__(self) -> None:
        _at_least_one(self, "steps")


@dataclass(frozen=True)
class TrainBenchmark:
    """How fast training is with everything in it: reading, views, steps, logging, but no monitoring or checkpoints.

    Every setting of `co2 pretrain RECIPE` can be given beside these."""

    data: str = ""
    """The images to train on, as for `co2 pretrain`; by default those of the recipe."""
    seconds: float = 20.0
    """How long to train after everything is warm."""
    steps: int | None = None
    """Train for so many steps instead."""
    images: tuple[int, ...] = ()
    """Train on data sets of noise of these sizes, one after the other, in place of --data: is the cost of an image
    the same?"""
    queue: tuple[int, ...] = ()
    """Likewise with these numbers of negatives."""
    out: str = ""
    """Folder for the record (train.json), or a file that ends in .json."""

    def __post_init__(self) -> None:
        _at_least_one(self, "seconds", "steps")
        if any(number < 1 for number in (*self.images, *self.queue)):
            raise UserError("--images and --queue take numbers of images and of negatives, above 0.")
        noise = "--images" if self.images else "--queue" if self.queue else ""
        if self.data and noise:
            raise UserError(
                f"--data and {noise} do not go together: each says what to train on (--images and "
                "--queue: noise). Leave out one."
            )


@dataclass(frozen=True)
class PlanSettings:
    """How long a run will take on this machine, by a short measurement of its training step.

    Every setting of `co2 pretrain RECIPE` can be given beside these, --epochs first of all."""

    images: int | None = None
    """How many images there will be; by default as many as --data has."""
    data: str = ""
    """The images, or some of them: then reading them is measured, too."""
    seconds: float = 15.0
    """How long to measure after everything is warm."""
    out: str = ""
    """Folder for the record (plan.json), or a file that ends in .json."""

    def __post_init__(self) -> None:
        _at_least_one(self, "images", "seconds")


def _at_least_one(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} must be above 0; got {value}.")
