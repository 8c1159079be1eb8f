"""`co2 plan`: a short measurement on this machine, turned into the hours, the memory and the energy of a whole run."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from co2.bench.power import PowerMeter
from co2.bench.record import check_out, device_name, provenance, write_record
from co2.bench.specification import PlanSettings
from co2.bench.step import (
    endless_steps,
    explained,
    noise_batches,
    peak_memory_gib,
    time_of,
    wait_for,
    warm_up_steps,
)
from co2.bench.train import measure_training, train_for
from co2.data.open import open_data
from co2.data.source import ImageSource
from co2.engine.pretrain import check_sizes
from co2.engine.trainer import Trainer, check_execution
from co2.errors import UserError
from co2.experiment import Experiment
from co2.machine.device import choose_device
from co2.machine.memory import freed_memory_kept
from co2.measures.numbers import duration

_STEPS_AT_LEAST = 4  # in the time of a measurement on a CPU; else it is made with a smaller batch
_SMALLEST_BATCH = 8
_MANY_STEPS = 10**6  # of the run that is foreseen


@dataclass(frozen=True)
class Speed:
    """What a measurement has found."""

    images_per_second: float
    start_seconds: float
    """Until the first step at full speed."""
    memory_gib: float
    watts: float | None
    """Of the GPU while it trains; None where nobody tells."""
    batch_size: int
    """With which it was measured."""
    input: str | None
    """How images came to the device; None where views were there already."""
    waiting: float = 0.0
    """Share of the time that the device waited for images."""


@dataclass(frozen=True)
class Forecast:
    """What a run will take."""

    images: int
    epochs: int
    seconds: float
    kilowatt_hours: float | None


def plan(experiment: Experiment, settings: PlanSettings) -> dict[str, Any]:
    """Measures, prints the answer, and writes the record where `settings.out` says."""
    if settings.images is None and not settings.data:
        raise UserError("Say how many images there will be, --images 1281167, or where they are, --data PATH.")
    device = choose_device(experiment.device)
    check_execution(experiment.execution, device)
    check_out(settings.out, "plan")
    made_with = provenance(device)
    source = open_data(settings.data).train if settings.data else None
    images = settings.images or (0 if source is None else len(source))
    check_sizes(experiment, [images])
    with explained(experiment), freed_memory_kept(device):  # as in a run
        speed = measure(experiment, source, images, device, settings.seconds)
    forecast = foresee(speed, images, experiment.epochs)
    for line in answer(experiment, forecast, speed, device_name(device), device.type == "cuda"):
        print(line)
    record = made_with | {
        "experiment": asdict(experiment),
        "data": settings.data or None,
        "speed": asdict(speed),
        "forecast": asdict(forecast),
    }
    write_record(record, settings.out, "plan")
    return record


# ---------------------------------------------------------------- how it is measured


def measure(
    experiment: Experiment, source: ImageSource | None, images: int, device: torch.device, seconds: float
) -> Speed:
    """Trains for a while: on the user's images where they are given, else on views of noise."""
    if device.type != "cuda":
        experiment = with_bearable_batch(experiment, device, seconds / _STEPS_AT_LEAST)
    meter = PowerMeter(device)
    if source is not None:
        found = measure_training(experiment, source, device, seconds, during=meter)
        return Speed(
            found.stretch.images_per_second,
            found.start_seconds,
            found.memory_gib,
            meter.watts,
            experiment.batch_size,
            found.sentence,
            found.waiting,
        )
    start = time.perf_counter()
    trainer = Trainer(experiment, images, _MANY_STEPS, device, tell=print)
    batches = itertools.cycle(noise_batches(experiment, device, images))
    for batch in itertools.islice(batches, warm_up_steps(device)):
        trainer.train_step(batch)
    wait_for(device)
    start_seconds = time.perf_counter() - start
    with meter:
        stretch = train_for(trainer, batches, seconds)
    memory, _ = peak_memory_gib(device)
    return Speed(stretch.images_per_second, start_seconds, memory, meter.watts, experiment.batch_size, None)


def with_bearable_batch(experiment: Experiment, device: torch.device, step_seconds: float) -> Experiment:
    """The experiment with its batch halved until a step takes no longer than so many seconds, nor is it tiny.

    On a CPU the cost of a step is that of its images, so that a smaller one tells as much.
    """
    smallest = max(2 * experiment.network.groups, _SMALLEST_BATCH)
    if experiment.batch_size <= smallest:
        return experiment
    small = experiment.edit(batch_size=smallest)
    trainer = Trainer(small, smallest, _MANY_STEPS, device)
    once = time_of(endless_steps(trainer, noise_batches(small, device, smallest)), 1, device)
    affordable = smallest * step_seconds / once
    size = experiment.batch_size
    while size > affordable and size // 2 >= smallest:
        size //= 2
    return experiment.edit(batch_size=size)


# ---------------------------------------------------------------- what comes out


def foresee(speed: Speed, images: int, epochs: int) -> Forecast:
    """The time and the energy of a run at this speed."""
    seconds = speed.start_seconds + images * epochs / speed.images_per_second
    energy = None if speed.watts is None else speed.watts * seconds / 3.6e6
    return Forecast(images, epochs, seconds, energy)


def answer(experiment: Experiment, forecast: Forecast, speed: Speed, device: str, on_gpu: bool) -> list[str]:
    """What the user wants to know, in sentences."""
    memory = f"{speed.memory_gib:.1f} GiB of {'GPU ' if on_gpu else ''}memory"
    energy = "" if forecast.kilowatt_hours is None else f", about {_rounded(forecast.kilowatt_hours)} kWh"
    name = experiment.network.backbone.partition("/")[2]
    lines = [
        f"{experiment.recipe} with {name}, {forecast.images:,} images, {forecast.epochs} epochs: about "
        f"{duration(forecast.seconds)} on this machine's {device} ({_rounded(speed.images_per_second)} images/s), "
        f"{memory}{energy}."
    ]
    if speed.input is None:
        lines.append("Reading images is not part of it: with --data PATH it is measured, too.")
    else:
        lines.append(f"{speed.input} Steps waited for them for {speed.waiting:.1%} of the time.")
    if experiment.earlier_sizes:
        largest = experiment.size
        lines.append(f"All views are taken to have {largest} pixels; with smaller ones at first it takes less time.")
    if speed.batch_size != experiment.batch_size:
        lines.append(
            f"Measured with batches of {speed.batch_size} to save time; batches of {experiment.batch_size} take more "
            "memory than that."
        )
    if forecast.kilowatt_hours is None:
        lines.append("Energy is not known: nothing here reports how much power the device draws.")
    else:
        lines.append(f"The energy is that of the GPU alone, at {speed.watts:.0f} W.")
    lines.append("Monitoring and checkpoints come on top.")
    return lines


def _rounded(number: float) -> str:
    """Two digits that count, never as a power of ten."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}" if number >= 0.01 else "0.01"
