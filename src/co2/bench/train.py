"""`co2 bench train`: how fast training is with everything in it, by the loader and the trainer of `co2 pretrain`.

Waiting is what the device spends between two steps without work: on a GPU the time on its own clock from the end of a
step to the moment when the next batch is there, less what it takes to make views in between, where that is done there.
(A run's log counts on the same clock, but the making of views as well. The loop's own clock, which the record has as
`loop_waiting`, also runs while the GPU still has steps to do.)
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from co2.bench.parts import shares
from co2.bench.record import check_out, device_name, provenance, show, write_record
from co2.bench.roofline import bound_of, measure_rates
from co2.bench.specification import TrainBenchmark
from co2.bench.step import (
    describe_bound,
    explained,
    measure_parts,
    noise_batches,
    parts_table,
    peak_memory_gib,
    release,
    wait_for,
    warm_up_steps,
)
from co2.data.open import open_data
from co2.data.source import ArraySource, ImageSource
from co2.engine.clock import Moment
from co2.engine.pretrain import check_sizes
from co2.engine.trainer import Trainer, check_execution, precision_on
from co2.errors import UserError
from co2.experiment import Experiment, flatten
from co2.machine.device import choose_device, choose_workers, stream_of_its_own
from co2.machine.memory import freed_memory_kept
from co2.views.choose_input import choose_input
from co2.views.loader import Batch, ViewLoader
from co2.views.resident import ResidentViews

WAITING, MAKING_VIEWS = "waiting for data", "making views"
THE_REST = "the rest"
"""Copies and gaps between steps, and by how much steps are slower because images are decoded beside them."""
_MANY_STEPS = 10**6  # of the run that there is not
_NOISE_IMAGES = 50_000
_DIFFERENT_IMAGES = 10_000  # of noise; larger data sets repeat them
_LONGEST_WARM_UP = 3.0  # seconds for steps that only a few epochs bring, such as an epoch's short last one
_VIEWS_TIMED = 64  # batches
_AHEAD = 25e-3, 0.5  # seconds that the device sleeps while the host launches a batch, and the first one


@dataclass(frozen=True)
class Stretch:
    """Some steps of training."""

    steps: int
    images_seen: int
    seconds: float
    gap_seconds: float
    """Between two steps, on the device's clock, in all."""
    loop_waiting_seconds: float
    """What the loop waited for batches, by its own clock."""
    interval_images_per_second: list[float]
    """Between two waits for the device, of which a run has one for each line of its log."""
    bad_images: int

    @property
    def images_per_second(self) -> float:
        return self.images_seen / self.seconds


@dataclass(frozen=True)
class TrainMeasurement:
    """What was found out about training."""

    sentence: str
    """How images come to the device."""
    kind: str
    """Of step."""
    stretch: Stretch
    start_seconds: float
    """From opening the data to the end of the first step at full speed."""
    views_seconds: float
    """To make the views of a batch, where that happens between steps on a GPU."""
    memory_gib: float
    notes: list[str]

    @property
    def waiting(self) -> float:
        """Share of the time."""
        between = self.stretch.gap_seconds - self.views_seconds * self.stretch.steps
        return max(0.0, between) / self.stretch.seconds


def run(experiment: Experiment, settings: TrainBenchmark) -> dict[str, Any]:
    """Measures, prints tables, and writes the record where `settings.out` says."""
    device = choose_device(experiment.device)
    check_execution(experiment.execution, device)
    check_out(settings.out, "train")
    made_with = provenance(device)
    if settings.data:
        experiment = experiment.edit(data=settings.data)
    with explained(experiment):
        if settings.images or settings.queue:
            record = sweep(experiment, settings, device)
        else:
            record = together(experiment, settings, device)
    record = made_with | record
    write_record(record, settings.out, "train")
    return record


def together(experiment: Experiment, settings: TrainBenchmark, device: torch.device) -> dict[str, Any]:
    """Everything, on the user's images."""
    splits = open_data(experiment.data)
    precision = precision_on(device, experiment.execution.precision)
    rates = measure_rates(device, precision)
    bound = bound_of(experiment, rates, precision.itemsize)
    found = measure_training(experiment, splits.train, device, settings.seconds, settings.steps)
    release(device)
    notes = list(found.notes)
    parts, parts_of = measure_parts(experiment, device, noise_batches(experiment, device), notes)
    step_seconds = found.stretch.seconds / found.stretch.steps
    around = {WAITING: found.waiting * step_seconds}
    if found.views_seconds:
        around[MAKING_VIEWS] = found.views_seconds
    record = {
        "experiment": asdict(experiment),
        "data": splits.description,
        "images": len(splits.train),
        "rates": asdict(rates),
        "bound": describe_bound(bound, experiment.batch_size),
        **describe(found),
        "share_of_bound": found.stretch.images_per_second * bound.seconds / experiment.batch_size,
        "step_seconds": step_seconds,
        "parts": around | parts,
        "parts_of": parts_of,
        "shares": shares(around | parts, step_seconds, THE_REST),
        "notes": notes,
    }
    present(experiment, device, record)
    return record


def sweep(experiment: Experiment, settings: TrainBenchmark, device: torch.device) -> dict[str, Any]:
    """The cost of an image for several sizes of the data set, and of the queue."""
    own = flatten(experiment)
    setting = next((name for name in ("queue", "negatives") if f"method.{name}" in own), "")
    if settings.queue and not setting:
        raise UserError(f"{experiment.recipe} has no queue and no bank of negatives: there is no --queue to vary.")
    default = own.get(f"method.{setting}", 0)
    cases = [(images, default) for images in settings.images]
    cases += [(settings.images[0] if settings.images else _NOISE_IMAGES, size) for size in settings.queue]
    if device.type == "cuda":
        experiment = experiment.edit(execution={"input": "resident"})
    rows = []
    for images, negatives in dict.fromkeys(cases):
        edited = experiment.edit(method={setting: negatives}) if setting else experiment
        source = noise_images(images, experiment.size)
        found = measure_training(edited, source, device, settings.seconds, settings.steps)
        row = {"images": images, "negatives": negatives} | describe(found)
        rows.append(row | {"microseconds_per_image": 1e6 / found.stretch.images_per_second})
        print(
            f"{images:,} images, {negatives:,} negatives: {found.stretch.images_per_second:,.0f} images/s", flush=True
        )
        del source
        release(device)
    table = [
        {
            "images": row["images"],
            "negatives": row["negatives"],
            "µs an image": row["microseconds_per_image"],
            "images/s": row["images_per_second"],
            "waiting": f"{row['waiting']:.1%}",
            "memory GiB": row["memory_gib"],
        }
        for row in rows
    ]
    show(f"the cost of an image, {experiment.recipe} on {device_name(device)}", table)
    return {"experiment": asdict(experiment), "sweep": rows, "spread": spread(rows)}


def spread(rows: list[dict[str, Any]]) -> float:
    """By what factor the most expensive image costs more than the cheapest."""
    costs = [row["microseconds_per_image"] for row in rows]
    return max(costs) / min(costs)


def noise_images(count: int, size: int) -> ArraySource:
    """Images of noise in memory, `size` pixels each way. They repeat, which costs nobody anything."""
    generator = np.random.default_rng(0)
    some = generator.integers(0, 256, (min(count, _DIFFERENT_IMAGES), 3, size, size), dtype=np.uint8)
    pixels = np.empty((count, *some.shape[1:]), np.uint8)
    for first in range(0, count, len(some)):
        pixels[first : first + len(some)] = some[: count - first]
    return ArraySource("noise", pixels)


# ---------------------------------------------------------------- how it is measured


def open_loader(experiment: Experiment, source: ImageSource, device: torch.device) -> tuple[ViewLoader, str]:
    """The loader that `co2 pretrain` would use, and what it would say about it."""
    check_sizes(experiment, [len(source)])
    resident = experiment.execution.resident_gib
    return choose_input(
        source,
        experiment.views(),
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        workers=choose_workers(experiment.workers),
        device=device,
        smallest=2 * experiment.network.groups,
        wanted=experiment.execution.input,
        budget_bytes=None if resident is None else int(resident * 2**30),
    )


def endless_batches(loader: ViewLoader) -> Generator[Batch, None, None]:
    """Epoch after epoch. Close it, so that threads that read ahead end."""
    for number in itertools.count():
        yield from loader.epoch(number)


def measure_training(
    experiment: Experiment,
    source: ImageSource,
    device: torch.device,
    seconds: float,
    steps: int | None = None,
    during: contextlib.AbstractContextManager[Any] | None = None,
) -> TrainMeasurement:
    """Trains for a while on `source`, from a fresh start; `during` stands around what is timed."""
    notes: list[str] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    with stream_of_its_own(device), freed_memory_kept(device):  # as in a run
        loader, sentence = open_loader(experiment, source, device)
        print(sentence, flush=True)
        trainer = Trainer(experiment, len(source), _MANY_STEPS, device, tell=notes.append)
        with contextlib.closing(endless_batches(loader)) as batches:
            for batch in itertools.islice(batches, warm_up_steps(device)):
                trainer.train_step(batch)
            wait_for(device)
            start_seconds = time.perf_counter() - start
            _warm_up_rare_steps(trainer, batches, loader)
            with during or contextlib.nullcontext():
                stretch = train_for(trainer, batches, seconds, steps)
        memory, _ = peak_memory_gib(device)
        views_seconds = seconds_to_make_views(loader, device)
    return TrainMeasurement(sentence, trainer.kind, stretch, start_seconds, views_seconds, memory, notes)


def _warm_up_rare_steps(trainer: Trainer, batches: Iterator[Batch], loader: ViewLoader) -> None:
    """An epoch's last batch may have a shape of its own, which is captured when it has come a few times."""
    if trainer.device.type != "cuda":
        return
    started = time.perf_counter()
    for batch in itertools.islice(batches, warm_up_steps(trainer.device) * loader.batches_per_epoch):
        trainer.train_step(batch)
        wait_for(trainer.device)
        if time.perf_counter() - started > _LONGEST_WARM_UP:
            return


def train_for(trainer: Trainer, batches: Iterator[Batch], seconds: float, steps: int | None = None) -> Stretch:
    """Trains for so many seconds, or steps, as a run does: it waits for the device where a run writes to its log."""
    device, log_every = trainer.device, trainer.experiment.monitoring.log_every
    gaps: list[tuple[Moment, Moment]] = []
    measured: list[Tensor] = []  # since the last look, [5] each
    interval_speeds: list[float] = []
    images = images_before = bad = 0
    loop_waited = 0.0
    wait_for(device)
    started = looked = time.perf_counter()
    for count in itertools.count(1):
        done = Moment(device)
        asked = time.perf_counter()
        batch = next(batches)
        loop_waited += time.perf_counter() - asked
        gaps.append((done, Moment(device)))
        measured.append(trainer.train_step(batch))
        images += batch.total
        bad += len(batch.bad)
        last = count == steps if steps else time.perf_counter() - started >= seconds
        if count % log_every == 0 or last:
            torch.stack(measured).mean(dim=0).tolist()  # waits for the device
            measured.clear()
            now = time.perf_counter()
            interval_speeds.append((images - images_before) / (now - looked))
            images_before, looked = images, now
        if last:
            break
    elapsed = time.perf_counter() - started
    gap = math.fsum(before.until(after) for before, after in gaps)
    return Stretch(count, images, elapsed, gap, loop_waited, interval_speeds, bad)


def seconds_to_make_views(loader: ViewLoader, device: torch.device) -> float:
    """To make a batch of views on the stream of the training step, where that happens: else 0.

    The device sleeps while the host launches, so that its own work is timed.
    """
    if device.type != "cuda" or not isinstance(loader, ResidentViews):
        return 0.0
    found = []
    with contextlib.closing(loader.epoch(0)) as batches:  # type: ignore[type-var]
        for number in range(min(_VIEWS_TIMED, loader.batches_per_epoch)):
            wait_for(device)
            torch.cuda._sleep(int(_AHEAD[number == 0] * 2e9))  # cycles, at 2 GHz at most
            before = Moment(device)
            next(batches)
            found.append((before, Moment(device)))
        wait_for(device)
    return statistics.fmean(before.until(after) for before, after in found)


# ---------------------------------------------------------------- what comes out


def describe(found: TrainMeasurement) -> dict[str, Any]:
    """A measurement as it stands in the record."""
    plain = asdict(found)
    return {
        **plain.pop("stretch"),
        **plain,
        "images_per_second": found.stretch.images_per_second,
        "waiting": found.waiting,
        "loop_waiting": found.stretch.loop_waiting_seconds / found.stretch.seconds,
    }


def present(experiment: Experiment, device: torch.device, record: dict[str, Any]) -> None:
    """Tables for people."""
    print(
        f"{experiment.recipe}: {record['data']}; {experiment.network.backbone} at {experiment.size} pixels, "
        f"batch {experiment.batch_size}, on {device_name(device)}. The bound of its step is "
        f"{record['bound']['images_per_second']:,.0f} images/s."
    )
    row = {
        "step": record["kind"],
        "images/s": record["images_per_second"],
        "median of intervals": statistics.median(record["interval_images_per_second"]),
        "of the bound": f"{record['share_of_bound']:.1%}",
        "waiting": f"{record['waiting']:.1%}",
        "first fast step after s": record["start_seconds"],
        "memory GiB": record["memory_gib"],
    }
    show(f"training for {record['steps']:,} steps, {record['seconds']:.1f} s", [row])
    show(f"where the time goes; parts of a step ({record['parts_of']}) are from steps on noise",
         parts_table(record, record["bound"]["by_part"]))  # fmt: skip
    for note in record["notes"]:
        print(note)
