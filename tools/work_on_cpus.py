"""What two habits of work on a CPU are worth: keeping freed memory, and channels-last layout for evaluations.

    python tools/work_on_cpus.py --out results/work-on-cpus

Training steps with and without `freed_memory_kept`, and features of a frozen backbone with neither habit, with the
first, and with both. Each measurement has a process of its own, because malloc does not forget what it was told; rounds
alternate between the ways, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from co2 import recipes
from co2.bench.record import provenance, show, write_record
from co2.bench.step import noise_batches
from co2.engine.trainer import Trainer
from co2.machine.memory import freed_memory_kept
from co2.networks.backbones import build_backbone

CPU = torch.device("cpu")
SECONDS = 6.0  # for each measurement, after one call to warm up
STEPS = {
    "step of the narrow ResNet-10 at 32 pixels, batch 512, float32": ("co2/resnet10-narrow", 512, "float32"),
    "step of the narrow ResNet-10 at 32 pixels, batch 512, bfloat16": ("co2/resnet10-narrow", 512, "bfloat16"),
    "step of ResNet-18 at 32 pixels, batch 128, float32": ("torchvision/resnet18", 128, "float32"),
    "step of ResNet-18 at 32 pixels, batch 128, bfloat16": ("torchvision/resnet18", 128, "bfloat16"),
}
FEATURES = {
    "features of ResNet-18 at 32 pixels": ("torchvision/resnet18", "small", 32),
    "features of ResNet-18 at 224 pixels": ("torchvision/resnet18", "standard", 224),
    "features of ResNet-50 at 224 pixels": ("torchvision/resnet50", "standard", 224),
}
NEITHER, KEPT, BOTH = "neither", "memory kept", "memory kept, channels last"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/work-on-cpus"))
    arguments = parser.parse_args()
    record = provenance(CPU)
    work = [(what, way) for what in STEPS for way in (NEITHER, KEPT)]  # steps are channels-last either way
    work += [(what, way) for what in FEATURES for way in (NEITHER, KEPT, BOTH)]
    found: dict[tuple[str, str], list[float]] = {one: [] for one in work}
    processes = multiprocessing.get_context("spawn")
    for _ in range(arguments.rounds):
        for what, way in work:
            with processes.Pool(1) as process:
                found[what, way].append(process.apply(measure, (what, way)))
            print(f"{what}, {way}: {found[what, way][-1]:,.1f} images/s", flush=True)
    rows = []
    for what in (*STEPS, *FEATURES):
        medians = {way: statistics.median(found[what, way]) for way in (NEITHER, KEPT, BOTH) if (what, way) in found}
        rows.append(
            {"images/s of": what, **medians, "gain": max(medians[KEPT], medians.get(BOTH, 0)) / medians[NEITHER]}
        )
    show("median of rounds", rows)
    record["images_per_second"] = [{"work": what, "way": way, "rounds": found[what, way]} for what, way in work]
    record["medians"] = rows
    write_record(record, str(arguments.out), "record")


def measure(what: str, way: str) -> float:
    """Images per second."""
    with contextlib.nullcontext() if way == NEITHER else freed_memory_kept(CPU):
        take, images = _step(*STEPS[what]) if what in STEPS else _features(*FEATURES[what], way == BOTH)
        take()
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            take()
            calls += 1
        return calls * images / (time.perf_counter() - start)


def _step(backbone: str, batch_size: int, precision: str) -> tuple[Callable[[], object], int]:
    recipe = recipes.co2_small()
    experiment = recipe.edit(batch_size=batch_size, network={"backbone": backbone}, execution={"precision": precision})
    trainer = Trainer(experiment, 50_000, 1_000, CPU)
    batch = noise_batches(experiment, CPU)[0]
    return lambda: trainer.train_step(batch), batch_size


def _features(name: str, stem: str, size: int, channels_last: bool) -> tuple[Callable[[], object], int]:
    images = torch.randn(256 if size < 224 else 64, 3, size, size)  # [B, 3, S, S]
    backbone = build_backbone(name, stem, size).eval()
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
        backbone = backbone.to(memory_format=torch.channels_last)

    def take() -> None:
        with torch.no_grad():
            backbone(images)

    return take, len(images)


if __name__ == "__main__":
    main()
