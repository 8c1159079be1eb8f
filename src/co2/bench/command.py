"""`co2 bench` and `co2 plan`: how fast training and its parts are on this machine, and what follows from it.

Nothing here imports torch before there is something to measure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tyro

from co2 import recipes
from co2.bench.specification import PlanSettings, StepBenchmark, TrainBenchmark
from co2.errors import UserError, did_you_mean
from co2.experiment import Experiment

USAGE = """\
usage: co2 bench step [RECIPE] [--kinds eager captured compiled] [--steps N] [--out DIR] [any setting of the recipe]
       co2 bench train [RECIPE] --data PATH [--seconds N | --steps N] [--out DIR] [any setting of the recipe]
       co2 bench train [RECIPE] --images N ... [--queue K ...]

  step    the training step alone: images/s, memory, where the time goes, how far from the device's bound
  train   everything together: images/s, waiting, where the time goes; or what an image costs by size of the data set"""
MOVED = ("loss", "input")  # to tools/, beside the package
RECIPE = "moco-small"

Settings = TypeVar("Settings")


def run(words: list[str]) -> int:
    """One benchmark; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, rest = words[0], words[1:]
    if name in MOVED:
        raise UserError(f"`co2 bench {name}` is `python tools/{name}.py` in the repository now, with the same options.")
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise UserError(f"There is no benchmark '{name}'.{did_you_mean(name, BENCHMARKS)} There are {known}.")
    BENCHMARKS[name](rest)
    return 0


def _step(words: list[str]) -> None:
    experiment, settings = parse(StepBenchmark, words, "co2 bench step", RECIPE)
    from co2.bench.step import run

    run(experiment, settings)


def _train(words: list[str]) -> None:
    if "--make" in words:
        raise UserError("Make the pictures first, by `python tools/pictures.py FOLDER --count N`; then --data FOLDER.")
    experiment, settings = parse(TrainBenchmark, words, "co2 bench train", RECIPE)
    from co2.bench.train import run

    run(experiment, settings)


def plan(words: list[str]) -> int:
    """`co2 plan`; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(
            "usage: co2 plan RECIPE --images N [--epochs E] [--data PATH] [any setting of the recipe]\n\n"
            "Trains for some seconds and says how long the whole run takes on this machine, how much memory, and how\n"
            "much energy. With --data PATH the reading of images is measured, too. `co2 recipes` lists the recipes."
        )
        return 0
    if words[0].startswith("-"):
        raise UserError("Name the recipe first: co2 plan RECIPE --images N. `co2 recipes` lists them all.")
    experiment, settings = parse(PlanSettings, words, "co2 plan", RECIPE)
    from co2.bench.plan import plan

    plan(experiment, settings)
    return 0


def parse(kind: type[Settings], words: list[str], command: str, recipe: str) -> tuple[Experiment, Settings]:
    """An experiment and a benchmark's own settings from the same line: RECIPE first, then settings of both."""
    if words and not words[0].startswith("-"):
        recipe, words = words[0], words[1:]
    recipes.get(recipe)  # a mistake in its name is told before others
    command = f"{command} {recipe}"
    settings, rest = tyro.cli(kind, args=words, prog=command, return_unknown_args=True)
    return tyro.cli(Experiment, args=rest, default=recipes.get(recipe), prog=command), settings


BENCHMARKS: dict[str, Callable[[list[str]], None]] = {
    "step": _step,
    "train": _train,
}
