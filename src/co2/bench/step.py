"""`co2 bench step`: how fast a training step is, what it needs, where its time goes, and how far it is from the bound.

The trainer is the one of `co2 pretrain`; views of noise lie on the device already. Time is that of several stretches of
steps without waiting in between, as in a run. Where the time goes is measured afterwards with a trainer of its own, so
that the stopwatch costs the first one nothing.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from co2.bench.parts import Stopwatch, shares, typical
from co2.bench.record import check_out, device_name, provenance, show, write_record
from co2.bench.roofline import (
    Bound,
    Rates,
    bound_of,
    measure_rates,
)
from co2.bench.specification import StepBenchmark
from co2.engine.capture import WARM_UP
from co2.engine.trainer import Trainer, check_execution, precision_on
from co2.errors import UserError
from co2.experiment import Experiment
from co2.machine.device import choose_device
from co2.machine.memory import freed_memory_kept
from co2.views.loader import Batch

STRETCHES = 5
_STRETCH_SECONDS = 2.0
_MOST_STEPS = 1000  # of a stretch
_STEPS_WITH_STOPWATCH = 20
_IMAGES = 50_000  # of the data set that there is not; a memory bank has as many rows
_MANY_STEPS = 10**6  # of the run that there is not
_DIFFERENT_BATCHES = 2
UNTIL_FAST = WARM_UP + 1  # steps until a captured one has been replayed for the first time


@dataclass(frozen=True)
class StepMeasurement:
    """What was found out about one way to take a step."""

    kind: str
    """As the trainer calls it."""
    seconds: list[float]
    """Of a step, in each stretch."""
    start_seconds: float
    """From nothing to the end of the first step at full speed: building, compiling, capturing, and the steps then."""
    memory_gib: float
    """The most that tensors took, on a GPU; the most the process took, on a CPU."""
    reserved_gib: float
    """The most that was taken from the GPU."""
    parts: dict[str, float]
    """Seconds of each part of a step."""
    parts_of: str
    """The kind of step that these were measured in."""
    notes: list[str]
    """What the trainer had to say."""

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)


def run(experiment: Experiment, settings: StepBenchmark) -> dict[str, Any]:
    """Measures, prints tables, and writes the record where `settings.out` says."""
    device = choose_device(experiment.device)
    kinds = settings.kinds or (experiment.execution.step,)
    for kind in kinds:
        check_execution(replace(experiment.execution, step=kind), device)
    check_out(settings.out, "step")
    made_with = provenance(device)
    precision = precision_on(device, experiment.execution.precision)
    rates = measure_rates(device, precision)
    bound = bound_of(experiment, rates, precision.itemsize)
    announce(experiment, device, precision, rates, bound)
    with explained(experiment), freed_memory_kept(device):  # as in a run
        libraries = prepare_libraries(experiment, device)
        found = [
            measure_step(experiment.edit(execution={"step": kind}), device, settings.steps)
            for kind in dict.fromkeys(kinds)
        ]
    batch = experiment.batch_size
    record = made_with | {
        "experiment": asdict(experiment),
        "rates": asdict(rates),
        "bound": describe_bound(bound, batch),
        "seconds_for_libraries": libraries,
        "kinds": [describe(one, batch, bound, libraries) for one in found],
        "pays": pays_from({one.kind: (libraries + one.start_seconds, one.step_seconds) for one in found}, batch),
    }
    present(record)
    write_record(record, settings.out, "step")
    return record


@contextlib.contextmanager
def explained(experiment: Experiment) -> Iterator[None]:
    """Says in a sentence that a step does not fit into the GPU's memory."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(
            f"A step with a batch of {experiment.batch_size} does not fit into this GPU's memory. "
            f"Try --batch-size {experiment.batch_size // 2}, or a smaller --size."
        ) from error


# ---------------------------------------------------------------- how it is measured


def noise_batches(experiment: Experiment, device: torch.device, images: int = _IMAGES) -> list[Batch]:
    """A few batches of views of noise, on the device."""
    batch = experiment.batch_size
    generator = torch.Generator(device).manual_seed(experiment.seed)
    noise = partial(torch.randint, 0, 256, dtype=torch.uint8, device=device, generator=generator)
    batches = []
    for number in range(_DIFFERENT_BATCHES):
        pixels = tuple(noise((batch, 3, view.size, view.size)) for view in experiment.views())
        indices = torch.arange(number * batch, (number + 1) * batch, device=device) % images  # [B]
        batches.append(Batch(indices, pixels, [], batch))
    return batches


def prepare_libraries(experiment: Experiment, device: torch.device) -> float:
    """Takes two plain steps. Seconds until CUDA is there, kernels are compiled and cuDNN has chosen its algorithms.

    Whatever kind of step is measured first would have to pay for these otherwise.
    """
    start = time.perf_counter()
    if device.type == "cuda":
        trainer = Trainer(experiment.edit(execution={"step": "eager"}), _IMAGES, _MANY_STEPS, device)
        for batch in noise_batches(experiment, device):
            trainer.train_step(batch)
        wait_for(device)
        del trainer
        release(device)
    return time.perf_counter() - start


def measure_step(experiment: Experiment, device: torch.device, steps: int | None = None) -> StepMeasurement:
    """The speed of a step as `experiment.execution.step` says, its memory, and its parts."""
    notes: list[str] = []
    batches = noise_batches(experiment, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    wait_for(device)
    start = time.perf_counter()
    trainer = Trainer(experiment, _IMAGES, _MANY_STEPS, device, tell=notes.append)
    take = endless_steps(trainer, batches)
    for _ in range(warm_up_steps(device)):
        take()
    wait_for(device)
    start_seconds = time.perf_counter() - start
    kind = trainer.kind
    stretch = steps or _steps_in(_STRETCH_SECONDS, take, device)
    seconds = [time_of(take, stretch, device) for _ in range(STRETCHES)]
    memory, reserved = peak_memory_gib(device)
    del take, trainer
    release(device)
    parts, parts_of = measure_parts(experiment, device, batches, notes)
    return StepMeasurement(kind, seconds, start_seconds, memory, reserved, parts, parts_of, notes)


def warm_up_steps(device: torch.device) -> int:
    """Steps until one has its full speed."""
    return UNTIL_FAST if device.type == "cuda" else 1


def endless_steps(trainer: Trainer, batches: list[Batch]) -> Callable[[], None]:
    """A function that takes the next step."""
    coming = itertools.cycle(batches)

    def take() -> None:
        trainer.train_step(next(coming))

    return take


def _steps_in(seconds: float, take: Callable[[], None], device: torch.device) -> int:
    once = time_of(take, 1, device)
    if once > seconds:
        return 1
    return max(1, min(_MOST_STEPS, int(seconds / time_of(take, max(1, min(20, int(seconds / 4 / once))), device))))


def time_of(take: Callable[[], None], steps: int, device: torch.device) -> float:
    """Seconds of a step in a stretch of `steps` of them."""
    wait_for(device)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            take()
        return (time.perf_counter() - start) / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        take()
    end.record()
    wait_for(device)
    return begin.elapsed_time(end) / 1e3 / steps


def measure_parts(
    experiment: Experiment, device: torch.device, batches: list[Batch], notes: list[str]
) -> tuple[dict[str, float], str]:
    """Seconds of each part of a step, and of which kind it was: an eager one where the wanted one does not tell."""
    try:
        return _parts(experiment, device, batches)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if experiment.execution.step == "eager":
            raise
        notes.append(f"Parts were measured in an eager step instead ({str(error).strip().splitlines()[0]}).")
        release(device)
        return _parts(experiment.edit(execution={"step": "eager"}), device, batches)


def _parts(experiment: Experiment, device: torch.device, batches: list[Batch]) -> tuple[dict[str, float], str]:
    stopwatch = Stopwatch(device)
    trainer = Trainer(experiment, _IMAGES, _MANY_STEPS, device, lap=stopwatch.lap)
    take = endless_steps(trainer, batches)
    started = time.perf_counter()
    for _ in range(warm_up_steps(device)):
        take()
        stopwatch.read()
    patience = 10 * (time.perf_counter() - started)
    found: list[dict[str, float]] = []
    while len(found) < _STEPS_WITH_STOPWATCH and (not found or time.perf_counter() - started < patience):
        take()
        found.append(stopwatch.read())
    parts, kind = typical(found), trainer.kind
    del take, trainer
    release(device)
    return parts, kind


def wait_for(device: torch.device) -> None:
    """Let the device finish what it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back memory that nothing refers to any more, and forget what was compiled for it."""
    gc.collect()
    if "torch._dynamo" in sys.modules:  # which takes seconds to import
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory_gib(device: torch.device) -> tuple[float, float]:
    """What tensors took at most since the peak was reset, and what was taken for them; on a CPU, by the process."""
    if device.type == "cuda":
        return (
            torch.cuda.max_memory_allocated(device) / 2**30,
            torch.cuda.max_memory_reserved(device) / 2**30,
        )
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return process, process


# ---------------------------------------------------------------- what comes out


def describe(found: StepMeasurement, batch: int, bound: Bound, libraries: float) -> dict[str, Any]:
    """A measurement as it stands in the record."""
    return asdict(found) | {
        "step_seconds": found.step_seconds,
        "images_per_second": batch / found.step_seconds,
        "slowest_images_per_second": batch / max(found.seconds),
        "fastest_images_per_second": batch / min(found.seconds),
        "seconds_to_first_fast_step": libraries + found.start_seconds,
        "share_of_bound": bound.seconds / found.step_seconds,
        "shares": shares(found.parts, found.step_seconds),
    }


def describe_bound(bound: Bound, batch: int) -> dict[str, Any]:
    """The bound as it stands in the record."""
    return asdict(bound) | {"images_per_second": batch / bound.seconds}


def pays_from(kinds: dict[str, tuple[float, float]], batch: int) -> list[dict[str, Any]]:
    """For each two kinds of step, from how many images on the one that starts later is done first.

    `kinds` gives the seconds until the first fast step, and those of each step after it. A run takes the shortest time
    in all with the kind that wins against every other at its number of images.
    """
    rows = []
    for first, second in itertools.combinations(kinds, 2):
        early, late = sorted((first, second), key=lambda kind: kinds[kind][0])
        delay = kinds[late][0] - kinds[early][0]
        gain = kinds[early][1] - kinds[late][1]  # seconds a step
        images = (UNTIL_FAST + delay / gain) * batch if gain > 0 else None
        rows.append({"kind": late, "against": early, "later_by_seconds": delay, "pays_from_images": images})
    return rows


def announce(experiment: Experiment, device: torch.device, precision: torch.dtype, rates: Rates, bound: Bound) -> None:
    """What is being measured, and the bound: said before, because large steps take minutes on a CPU."""
    print(
        f"{experiment.recipe}: {experiment.network.backbone} at {experiment.size} pixels, batch "
        f"{experiment.batch_size}, {experiment.network.groups} groups of batch statistics, "
        f"on {device_name(device)} in "
        f"{str(precision).removeprefix('torch.')}.\n"
        f"It copies {rates.bytes_per_second / 1e12:.3g} TB/s and multiplies "
        f"{rates.flops_per_second / 1e12:.3g} TFLOP/s; a step of {bound.flops / 1e12:.3g} TFLOP and "
        f"{bound.bytes / 1e9:.3g} GB takes {bound.seconds * 1e3:.3g} ms at least: "
        f"{experiment.batch_size / bound.seconds:,.0f} images/s.",
        flush=True,
    )


def present(record: dict[str, Any]) -> None:
    """Tables for people."""
    rows = [
        {
            "step": one["kind"],
            "images/s": one["images_per_second"],
            "slowest": one["slowest_images_per_second"],
            "fastest": one["fastest_images_per_second"],
            "ms a step": one["step_seconds"] * 1e3,
            "of the bound": f"{one['share_of_bound']:.1%}",
            "first fast step after s": one["seconds_to_first_fast_step"],
            "memory GiB": one["memory_gib"],
        }
        for one in record["kinds"]
    ]
    show(f"speed of a step: the median of {STRETCHES} stretches, the slowest and the fastest of them", rows)
    for row in record["pays"]:
        if row["pays_from_images"] is None:
            print(f"{row['kind']} starts later than {row['against']} and is not faster: it never pays.")
        else:
            print(
                f"{row['kind']} starts {row['later_by_seconds']:.1f} s after {row['against']} and pays from "
                f"{row['pays_from_images']:,.0f} images on (times epochs)."
            )
    for one in record["kinds"]:
        show(f"where the time goes, {one['parts_of']}", parts_table(one, record["bound"]["by_part"]))
        for note in one["notes"]:
            print(note)


def parts_table(one: dict[str, Any], bounds: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each part of a step: milliseconds, share, and the least that it could take."""
    rows = []
    for part, share in one["shares"].items():
        least = bounds.get(part)
        milliseconds = share * one["step_seconds"] * 1e3
        row = {"part": part, "ms": milliseconds, "share": f"{share:.1%}"}
        rows.append(row | {"at least, ms": None if least is None else least * 1e3})
    return rows
