"""A run on a GPU that is stopped, killed and continued, against runs that nothing disturbed.

Two runs from the same seed may differ on a GPU: some kernels of cuDNN add up gradients in whatever order their threads
arrive. What is promised is that being stopped adds nothing to that. The differences are printed (pytest -rP).
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs_in_processes import at_step

from co2.checkpoint import checkpoints, read_checkpoint
from co2.engine.pretrain import Stopped, pretrain
from co2.engine.trainer import build_networks
from co2.experiment import Experiment

IMAGES = 600
STEPS = 40  # 4 epochs of 10
STOPPED_AT, KILLED_AT = 17, 26  # both in the middle of an epoch

# How many times farther from an undisturbed run a continued one may be than another undisturbed run is. Training
# amplifies the last bits of a sum: two undisturbed runs end a third of their way apart, and a continued one was seen
# 1.02 and 1.16 times as far. So this finds gross faults alone; that nothing at all is lost on the way is what the
# deterministic runs show.
TOLERANCE = 1.5


def start(experiment, out, signal_number=0, at=-1):
    """A run in a process of its own, which sends itself a signal before the step after step `at`."""
    words = [experiment.to_json(), str(out), str(int(signal_number)), str(at)]
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code):
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors[-3000:]


def encoder(state):
    """All weights of the query encoder in one row, without running statistics, which move by themselves."""
    own = {name: value for name, value in state.items() if name.startswith("encoder.")}
    return torch.cat([value.double().flatten() for name, value in own.items() if name.endswith(("weight", "bias"))])


def disturb_and_compare(experiment, folder):
    """Runs it twice undisturbed and once disturbed. Returns the distances between them, largest weight and length."""
    runs = {name: folder / name for name in ("first", "second", "continued")}
    undisturbed = [start(experiment, runs["first"]), start(experiment, runs["second"])]
    finish(start(experiment, runs["continued"], signal.SIGTERM, STOPPED_AT), 128 + signal.SIGTERM)
    assert read_checkpoint(checkpoints(runs["continued"])[-1])["step"] == STOPPED_AT + 1
    finish(start(experiment, runs["continued"], signal.SIGKILL, KILLED_AT), -signal.SIGKILL)
    assert STOPPED_AT < read_checkpoint(checkpoints(runs["continued"])[-1])["step"] <= KILLED_AT
    finish(start(experiment, runs["continued"]), 0)
    for process in undisturbed:
        finish(process, 0)

    states = {name: read_checkpoint(checkpoints(run)[-1]) for name, run in runs.items()}
    assert {state["step"] for state in states.values()} == {STEPS}
    ends = {name: encoder(state["nets"]) for name, state in states.items()}
    beginning = encoder(build_networks(experiment, IMAGES).state_dict())
    pairs = [("first", "second"), ("continued", "first"), ("continued", "second")]
    measured = {
        f"{one} and {other}": {
            "largest difference of a weight": (ends[one] - ends[other]).abs().max().item(),
            "distance": (ends[one] - ends[other]).norm().item(),
        }
        for one, other in pairs
    }
    moved = (ends["first"] - beginning).norm().item()
    measured["first and its beginning"] = {
        "largest difference of a weight": (ends["first"] - beginning).abs().max().item(),
        "distance": moved,
    }
    print(json.dumps(measured, indent=1))
    return [measured[f"{one} and {other}"]["distance"] for one, other in pairs], moved


def small(tiny):
    return tiny(
        data=f"shapes:{IMAGES}:32",
        device="cuda",
        epochs=4,
        batch_size=64,
        workers=2,
        resume="auto",
        size=32,
        method={"queue": 256},
        # Slow enough that training does not blow a difference in the last bit up to one that can be seen.
        optimisation={"learning_rate": 0.01},
        monitoring={"evaluate_every": 4},
    )


@pytest.mark.gpu
def test_a_continued_run_is_as_close_as_undisturbed_ones_are(tiny, tmp_path):
    (among_undisturbed, *from_continued), moved = disturb_and_compare(small(tiny), tmp_path)
    assert moved > 0
    assert min(from_continued) <= TOLERANCE * among_undisturbed


@pytest.mark.gpu
def test_a_deterministic_run_ends_with_the_same_bits(tiny, tmp_path):
    distances, moved = disturb_and_compare(small(tiny).edit(execution={"deterministic": True}), tmp_path)
    assert moved > 0
    assert distances == [0.0, 0.0, 0.0]


if __name__ == "__main__":
    text, out, number, step = sys.argv[1:]
    try:
        with at_step(int(step), lambda trainer: os.kill(os.getpid(), int(number))):
            pretrain(Experiment.from_json(text), out=Path(out))
    except Stopped as stopped:
        sys.exit(128 + stopped.signal_number)
