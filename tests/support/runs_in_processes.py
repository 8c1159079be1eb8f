"""Several runs one after the other, in this process or in each of those that torchrun starts.

    torchrun ... tests/support/runs_in_processes.py PLAN

PLAN is a JSON list of runs (see `execute`). In float64, so that what differs by more than rounding shows: in float32
training doubles a rounding error every step or two, and fifty steps make any two runs differ.
"""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

import co2
from co2.checkpoint import checkpoints
from co2.engine import monitor, trainer
from co2.engine.pretrain import Stopped, pretrain
from co2.experiment import Experiment


@contextmanager
def float64():
    """Networks and views of double precision."""
    originals = trainer.build_networks, trainer.Trainer._feed, monitor.normalise_for_convolutions
    build, feed, normalise = originals
    trainer.build_networks = lambda *arguments: build(*arguments).double()
    trainer.Trainer._feed = lambda self, view, pictures: feed(self, view, pictures).double()
    monitor.normalise_for_convolutions = lambda *arguments: normalise(*arguments).double()
    try:
        yield
    finally:
        trainer.build_networks, trainer.Trainer._feed, monitor.normalise_for_convolutions = originals


@contextmanager
def at_step(number, action):
    """Do something before the step after step `number` (if any) in the process of rank 1, or the only one."""
    original = trainer.Trainer.train_step

    def train_step(self, batch):
        if self.step == number and os.environ.get("RANK", "1") == "1":
            action(self)
        return original(self, batch)

    trainer.Trainer.train_step = train_step
    try:
        yield
    finally:
        trainer.Trainer.train_step = original


def die_after_a_checkpoint(run, trainer):
    while not checkpoints(run):  # it is written beside the training
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def execute(plan):
    """Each entry: `experiment` (its JSON), `out`, and if wanted `stop_at` (a step, before which SIGTERM comes twice),
    `kill_at` (the same with SIGKILL, once there is a checkpoint, the first time that torchrun starts this), `spoil_at`
    (the same with weights of NaN) and `data_of_rank` (what some rank has for data).

    A user's mistake is written to OUT.error.RANK.
    """
    started_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    rank = os.environ.get("RANK", "0")
    for run in plan:
        experiment = Experiment.from_json(run["experiment"])
        data = run.get("data_of_rank", {}).get(rank)
        stop = at_step(run.get("stop_at"), lambda trainer: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)])
        kill = at_step(None if started_again else run.get("kill_at"), partial(die_after_a_checkpoint, Path(run["out"])))
        spoil = at_step(run.get("spoil_at"), lambda trainer: trainer.nets["encoder"].head.weight.data.fill_(torch.nan))
        with stop, kill, spoil, suppress(Stopped):
            try:
                pretrain(experiment, data=data, out=run["out"])
            except co2.UserError as error:
                Path(f"{run['out']}.error.{rank}").write_text(f"{error.exit_code} {error}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with float64():
        execute(json.loads(Path(sys.argv[1]).read_text()))
