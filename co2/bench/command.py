"""`co2 bench`: how fast the objective, the training step, the input path and all of it together are on this machine.

Nothing here imports torch before there is something to measure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tyro

from co2 import recipes
from co2.bench.specification import StepBenchmark
from co2.config import Experiment
from co2.errors import UserError, did_you_mean

USAGE = """\
usage: co2 bench step [RECIPE] [--kinds eager captured compiled] [--steps N] [--out DIR] [any setting of the recipe]
       co2 bench loss [--rows B ...] [--negatives K ...] [--backends ...] [--out DIR]

  step    the training step alone: images/s, memory, where the time goes, how far from the device's bound
  loss    time and memory of the objective: fused, compiled and plain (needs a CUDA GPU)"""
STEP_RECIPE = "moco-small"

Settings = TypeVar("Settings")


def run(words: list[str]) -> int:
    """One benchmark; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, rest = words[0], words[1:]
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise UserError(f"There is no benchmark '{name}'.{did_you_mean(name, BENCHMARKS)} There are {known}.")
    BENCHMARKS[name](rest)
    return 0


def _loss(words: list[str]) -> None:
    from co2.bench.loss import LossBenchmark, run

    run(tyro.cli(LossBenchmark, args=words, prog="co2 bench loss"))


def _step(words: list[str]) -> None:
    experiment, settings = parse(StepBenchmark, words, "co2 bench step", STEP_RECIPE)
    from co2.bench.step import run

    run(experiment, settings)


def parse(kind: type[Settings], words: list[str], command: str, recipe: str) -> tuple[Experiment, Settings]:
    """An experiment and a benchmark's own settings from the same line: RECIPE first, then settings of both."""
    if words and not words[0].startswith("-"):
        recipe, words = words[0], words[1:]
    default = recipes.get(recipe)
    settings, rest = tyro.cli(kind, args=words, prog=f"{command} {recipe}", return_unknown_args=True)
    experiment = tyro.cli(Experiment, args=rest, default=default, prog=f"{command} {recipe}")
    return experiment, settings


BENCHMARKS: dict[str, Callable[[list[str]], None]] = {
    "step": _step,
    "loss": _loss,
}
