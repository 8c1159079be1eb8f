"""What writing checkpoints costs: a ResNet-50 run with and without them, in one process, interleaved.

    python tools/gpu/checkpoint_cost.py --out results/checkpoint-cost

Steps of co2-v2 (batch 256, 224 pixels, queue of 65,536) on views that are already on the GPU, so that nothing but the
checkpoint can slow them down. Stretches of steps with one checkpoint at their beginning alternate with stretches
without; the difference is what a checkpoint costs. By default one is written after every epoch and every fifteen
minutes: on ImageNet an epoch is 5,004 steps, so the share of training time is that cost over the time of 5,004 steps
or fifteen minutes, whichever is shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from co2 import recipes
from co2.checkpoint import CheckpointWriter, checkpoints
from co2.engine.trainer import Trainer
from co2.views.loader import Batch

IMAGENET = 1_281_167


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="in a stretch; a checkpoint must fit into it")
    parser.add_argument("--pairs", type=int, default=5, help="of stretches with and without a checkpoint")
    parser.add_argument("--out", type=Path, default=Path("results/checkpoint-cost"))
    arguments = parser.parse_args()

    experiment = recipes.co2_v2()
    device = torch.device("cuda")
    trainer = Trainer(experiment, IMAGENET, steps=10**6, device=device)
    shape = (2, experiment.batch_size, 3, experiment.size, experiment.size)
    views = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).unbind()
    batch = Batch(torch.arange(experiment.batch_size, device=device), views, [], experiment.batch_size)

    def stretch(writer: CheckpointWriter | None) -> tuple[float, float]:
        """Seconds of a stretch, and those of them in which the loop stood still for a checkpoint."""
        torch.cuda.synchronize()
        started, stood = time.perf_counter(), 0.0
        if writer is not None:
            writer.write(trainer.state(), trainer.step)
            stood = time.perf_counter() - started
        for step in range(arguments.steps):
            trainer.train_step(batch)
            if step % experiment.monitoring.log_every == 0:
                torch.cuda.synchronize()  # as logging does
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        if writer is not None:
            writer.finish()  # outside the clock: training would have gone on
        return seconds, stood

    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder))
        stretch(writer)  # warm up
        pairs = [(stretch(None)[0], stretch(writer)) for _ in range(arguments.pairs)]
        writer.close()
        size = checkpoints(Path(folder))[-1].stat().st_size
    plain = statistics.median(without for without, _ in pairs)
    cost = statistics.median(with_one - without for without, (with_one, _) in pairs)
    stood = statistics.median(stood for _, (_, stood) in pairs)
    step_seconds = plain / arguments.steps
    epoch = IMAGENET // experiment.batch_size * step_seconds
    between = min(epoch, 60 * experiment.monitoring.checkpoint_minutes)
    record = {
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": f"{torch.cuda.get_device_name()}, {os.cpu_count()} CPU cores",
        "checkpoint_mib": size / 2**20,
        "images_per_second_without_checkpoints": experiment.batch_size / step_seconds,
        "seconds_the_loop_stood_still": stood,
        "seconds_lost_in_all": cost,
        "each_pair": [{"without": without, "with": with_one} for without, (with_one, _) in pairs],
        "seconds_between_checkpoints_on_imagenet": between,
        "share_of_training_time": cost / between,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
