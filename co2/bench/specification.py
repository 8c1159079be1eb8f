"""What each benchmark is told, as data. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from co2.errors import UserError

Kind = Literal["auto", "eager", "captured", "compiled"]
Input = Literal["auto", "resident", "jpeg", "workers"]


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


def _at_least_one(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} must be above 0; got {value}.")
