"""Real processes, started by torchrun and connected by gloo, against one process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs_in_processes import execute, float64

import co2
from co2.checkpoint import checkpoints, read_checkpoint
from co2.engine.distributed import ALONE, Processes
from co2.engine.pretrain import check_sizes
from co2.machine.device import choose_device, choose_workers
from co2.machine.process import Launch, read_launch

HERE = Path(__file__).parent
PROJECT = str(HERE.parents[1])
LOSSES = ("loss", "instance", "consistency", "learning_rate")  # in float64
SHARES = ("top1", "top5")  # in float32
HEALTH = ("alignment", "uniformity", "effective_rank", "mean_norm", "knn_top1")  # likewise

# Two batches of 19 pictures and one of 15: no process ever has as many as another.
UNEVEN = {"data": "shapes:53:16", "batch_size": 19, "optimisation": {"learning_rate": 0.003}}
FIFTY_STEPS = {"epochs": 17}
METHODS = {
    "moco": ("demo-moco", {}),
    "co2": ("demo-co2", {}),
    "simclr": ("co2-simclr-small", {}),
    "insdisc": ("co2-insdisc-small", {"negatives": 20}),
}


def torchrun(processes, *words, restarts=0, meanwhile=None, send=None):
    """Start processes with torchrun and wait for their end, which must come; send a signal once `meanwhile` holds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 180
    try:
        while meanwhile is not None and not meanwhile() and started.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if send is not None:
            started.send_signal(send)
        output, errors = started.communicate(timeout=max(1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        started.terminate()  # torchrun ends what it has started
        output, errors = started.communicate()
        pytest.fail(f"the processes hang\n{output}\n{errors}")
    return subprocess.CompletedProcess(command, started.returncode, output, errors)


def carry_out(plan, processes, folder):
    """A plan of `runs_in_processes`, by so many processes."""
    if processes == 1:
        with float64():
            execute(plan)
        return
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    done = torchrun(processes, str(HERE.parent / "support" / "runs_in_processes.py"), str(path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def experiment(build_tiny):
    def build(recipe, groups, **changes):
        changes = UNEVEN | {"epochs": 1} | changes
        changes["network"] = {"groups": groups} | changes.get("network", {})
        changes["monitoring"] = {"evaluate_every": 100}
        return build_tiny(recipe, **changes)

    return build


def planned(experiments, folder):
    return [{"experiment": one.to_json(), "out": str(folder / name)} for name, one in experiments.items()]


def assert_same_run(ours, theirs, rows):
    """The same curves and the same state, but for rounding."""
    for kind, names, tolerance in (("train", LOSSES, 1e-9), ("train", SHARES, 1e-6), ("epoch", HEALTH, 1e-4)):
        our_rows, their_rows = rows(ours, kind), rows(theirs, kind)
        assert [row["step"] for row in our_rows] == [row["step"] for row in their_rows]
        for name in names:
            expected = [row[name] for row in their_rows]
            assert [row[name] for row in our_rows] == pytest.approx(expected, rel=tolerance, abs=tolerance), name
    our_state, their_state = (read_checkpoint(checkpoints(run)[-1]) for run in (ours, theirs))
    for part in ("nets", "optimiser"):
        torch.testing.assert_close(our_state[part], their_state[part], rtol=1e-8, atol=1e-8)


VARIANTS = {
    "two groups in each": ("demo-co2", 4, {}),
    "symmetric": ("demo-co2", 2, {"method": {"symmetric": True}}),
    "growing views": ("demo-co2", 2, {"epochs": 2, "size": 16, "earlier_sizes": (8,)}),
    "not shuffled": ("demo-co2", 2, {"method": {"shuffle": False}}),
    "one group over both": ("co2-simclr-small", 1, {}),
    "both views of an image in one group": ("co2-simclr-small", 4, {}),
}


MISTAKES = {
    "no such backbone": ({"network": {"backbone": "torchvision/resnet5"}}, {}, "Did you mean 'torchvision/resnet50'"),
    "no such data for one": ({}, {"1": "missing-folder"}, "missing-folder"),
    "other data for one": ({}, {"1": "shapes:54:16"}, "53 images for one of the processes and 54 for another"),
    "other names for one": ({"data": "digits"}, {"1": "shapes:1437:16"}, "other names for one of the processes"),
    "groups": ({"network": {"groups": 3}}, {}, "3 groups .* among 2 processes. Use --network.groups 4"),
    "NaN": ({}, {}, r"NaN or infinite at step 2; the 19 images .* There is no checkpoint yet"),
    "moco": ({}, {}, "is not empty"),  # the name of a run that is there
}


@pytest.fixture(scope="module")
def pairs(experiment, tmp_path_factory):
    """The same experiments done by one process and by two: {1: folder, 2: folder}; with two also things that go wrong.

    All in one go, because starting torchrun takes longer than most runs.
    """
    experiments = {name: experiment(recipe, 2, **FIFTY_STEPS, **own) for name, (recipe, own) in METHODS.items()}
    experiments |= {name: experiment(recipe, groups, **own) for name, (recipe, groups, own) in VARIANTS.items()}
    experiments["undisturbed"] = experiment("demo-co2", 2, epochs=3)
    folders = {count: tmp_path_factory.mktemp(f"by-{count}-") for count in (1, 2)}
    one_then_two, two_then_one = (
        {"experiment": experiments["undisturbed"].edit(resume="auto").to_json(), "out": str(folders[count] / "resumed")}
        for count in (2, 1)
    )
    carry_out([*planned(experiments, folders[1]), one_then_two | {"stop_at": 3}], 1, folders[1])
    mistakes = [
        {
            "experiment": experiment("demo-co2", **{"groups": 2} | changes).to_json(),
            "out": str(folders[2] / name),
            "data_of_rank": data,
            "spoil_at": 1,
        }
        for name, (changes, data, _) in MISTAKES.items()
    ]
    unreadable = {
        name: experiment("demo-co2", 2, data=str(pictures(folders[2] / f"{name} pictures", bad)))
        for name, bad in (("few unreadable", (7, 20, 21, 40)), ("many unreadable", range(8)))
    }
    by_two = [*planned(experiments, folders[2]), two_then_one | {"stop_at": 4}, one_then_two]
    carry_out([*by_two, *mistakes, *planned(unreadable, folders[2])], 2, folders[2])
    carry_out([two_then_one], 1, folders[1])
    return folders


def pictures(folder, bad):
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(53):
        path = folder / f"{number:02d}.png"
        Image.fromarray(generator.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(path)
        if number in bad:
            path.write_bytes(b"not a picture")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_with_a_group_each_are_one_process_with_two_groups(pairs, rows, method):
    assert len(rows(pairs[2] / method)) == 51
    assert_same_run(pairs[2] / method, pairs[1] / method, rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_are_one_process_in_every_variant(pairs, rows, name):
    assert_same_run(pairs[2] / name, pairs[1] / name, rows)


@pytest.mark.parametrize("last", [1, 2])
def test_a_run_goes_on_with_another_number_of_processes(pairs, rows, last):
    """Stopped by a signal to one of the processes, in mid-epoch: all stop after the same step, one writes."""
    assert_same_run(pairs[last] / "resumed", pairs[1] / "undisturbed", rows)


@pytest.mark.parametrize("name", MISTAKES)
def test_what_one_process_finds_wrong_all_raise(pairs, name):
    first, second = (Path(f"{pairs[2] / name}.error.{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert re.search(MISTAKES[name][2], first)


def test_the_images_of_a_batch_with_nan_are_those_of_all_processes(pairs):
    assert len(set((pairs[2] / "NaN" / "nan_batch.txt").read_text().splitlines())) == 19


def test_unreadable_images_of_all_processes_are_named(pairs):
    lines = (pairs[2] / "few unreadable" / "bad_images.txt").read_text().splitlines()
    assert {line.split("\t")[0][-6:] for line in lines} == {"07.png", "20.png", "21.png", "40.png"}
    assert len(lines) == 4
    assert "more than a tenth" in Path(f"{pairs[2] / 'many unreadable'}.error.1").read_text()
    assert checkpoints(pairs[2] / "many unreadable")


def four_against_one(names, experiment, rows, folder):
    larger = {"data": "shapes:101:16", "batch_size": 37} | FIFTY_STEPS
    experiments = {name: experiment(METHODS[name][0], 4, **larger, **METHODS[name][1]) for name in names}
    for count in (1, 4):
        (folder / str(count)).mkdir()
        carry_out(planned(experiments, folder / str(count)), count, folder)
    for name in experiments:
        assert len(rows(folder / "4" / name)) == 51
        assert_same_run(folder / "4" / name, folder / "1" / name, rows)


def test_four_processes_with_a_group_each_are_one_process_with_four_groups(experiment, rows, tmp_path):
    four_against_one(["co2"], experiment, rows, tmp_path)


@pytest.mark.slow
def test_four_processes_are_one_process_in_every_method(experiment, rows, tmp_path):
    four_against_one(METHODS, experiment, rows, tmp_path)


def test_a_killed_process_is_started_again_and_the_result_is_the_same(pairs, experiment, tmp_path):
    again = experiment("demo-co2", 2, epochs=3, resume="auto")
    plan = [{"experiment": again.to_json(), "out": str(tmp_path / "run"), "kill_at": 5}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = torchrun(2, str(HERE.parent / "support" / "runs_in_processes.py"), str(tmp_path / "plan.json"), restarts=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Going on from step 3" in done.stdout
    ours, theirs = (read_checkpoint(checkpoints(run)[-1]) for run in (tmp_path / "run", pairs[2] / "undisturbed"))
    torch.testing.assert_close(ours["nets"], theirs["nets"], rtol=0, atol=0)


COMMAND = ["-m", "co2.cli", "pretrain", "demo-co2", "--data", "shapes:53:16", "--batch-size", "19", "--device", "cpu"]
COMMAND += ["--size", "16", "--network.groups", "2", "--method.queue", "50", "--workers", "1"]
COMMAND += ["--monitoring.health-images", "16", "--monitoring.bank-images", "30", "--monitoring.query-images", "20"]
COMMAND += ["--monitoring.checkpoint-seconds", "0"]


def test_the_command_line_writes_and_prints_once_and_stops_when_asked(tmp_path):
    """SIGTERM to torchrun, as a cluster sends it; torchrun passes it on to all processes and their workers."""
    run = tmp_path / "run"
    done = torchrun(
        2, *COMMAND, "--epochs", "5000", "--out", str(run), meanwhile=lambda: checkpoints(run), send=signal.SIGTERM
    )
    lines = done.stdout.splitlines()
    assert len([line for line in lines if "2 processes with 1 CPU thread each" in line]) == 1
    assert len([line for line in lines if line.startswith("epoch 1/")]) == 1
    assert len([line for line in lines if line.startswith("Stopped after step") and "--resume" in line]) == 1
    # torchrun reports on its own, with the path of its program, which may lie in a folder called co2; we are silent.
    assert "co2" not in done.stderr.replace(PROJECT, "").replace("co2.cli", "")
    step = int(re.search(r"Stopped after step ([\d,]+)", done.stdout)[1].replace(",", ""))
    assert read_checkpoint(checkpoints(run)[-1])["step"] == step
    kinds = {name.split(".")[0] for name in os.listdir(run)}
    assert kinds == {"config", "metrics", "events", "checkpoints"}  # the lock is gone with the run
    assert len(list(run.glob("events.*"))) == 1


def test_a_mistake_is_told_once_and_ends_all_processes(tmp_path):
    done = torchrun(2, *COMMAND[:-6], "--network.groups", "3", "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("co2: ")]
    assert len(told) == 1
    assert "--network.groups 4" in told[0]
    assert "exitcode  : 2 " in done.stderr
    assert not (tmp_path / "run").exists()


def launched(rank=0, count=1):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }


def test_only_the_first_process_tells_of_a_misspelt_option(monkeypatch, capsys):
    from co2.cli import main

    for rank in (0, 1):
        for name, value in launched(rank, 2).items():
            monkeypatch.setenv(name, value)
        assert main(["pretrain", "moco-v22"]) == 2
        assert ("moco-v2" in capsys.readouterr().err) == (rank == 0)
        with pytest.raises(SystemExit):
            main(["pretrain", "moco-v2", "--bathc-size", "3"])
        assert bool("".join(capsys.readouterr())) == (rank == 0)


def test_what_a_launcher_says():
    assert read_launch({}) == Launch()
    assert read_launch({"RANK": "3"}) == Launch()  # some other program's variable
    environment = launched(5, 8) | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_launch(environment) == Launch(rank=5, count=8, local_rank=1, local_count=4)
    with pytest.raises(co2.UserError, match="no number"):
        read_launch(launched("five", 8))


@pytest.mark.parametrize("images", [8, 9, 37, 64])
@pytest.mark.parametrize(("processes", "groups"), [(1, 4), (2, 4), (4, 4), (2, 2), (4, 8), (3, 1)])
def test_processes_share_a_batch_by_its_groups(images, processes, groups):
    batch = torch.arange(images)
    together = [p for part in batch.tensor_split(processes if groups == 1 else groups) for p in [part.tolist()]]
    in_parts = []
    for rank in range(processes):
        share = Processes(Launch(rank, processes)).share(images, groups)
        assert share.total == images
        in_parts += [part.tolist() for part in batch[share.rows].tensor_split(max(1, groups // processes))]
    assert in_parts == together
    weights = [Processes(Launch(rank, processes)).share(images, groups).weight for rank in range(processes)]
    assert sum(weights) == pytest.approx(processes)


def test_alone_nothing_is_exchanged():
    share = ALONE.share(7, groups=2)
    assert (share.rows, share.total, share.weight) == (slice(0, 7), 7, 1.0)
    views = torch.randint(0, 255, (7, 3, 4, 4), dtype=torch.uint8)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    shuffled = share.shuffle(views, order)
    assert torch.equal(shuffled, views[order])
    assert torch.equal(share.put_back(shuffled, order), views)
    assert share.gather(views) is views


def test_a_batch_too_small_to_be_shared_out_is_refused(experiment):
    simclr = experiment("co2-simclr-small", 1, batch_size=24)
    with pytest.raises(co2.UserError, match=r"A batch of 5 images, the last of an epoch, .* among 8 processes"):
        check_sizes(simclr, [53] * 8)
    check_sizes(simclr.edit(batch_size=26), [53] * 8)  # the last one holds a single image and is left out
    with pytest.raises(co2.UserError, match="A batch of 24 images cannot be shared out among 32 processes"):
        check_sizes(simclr, [48] * 32)


@pytest.mark.parametrize("gpus", [0, 2])
def test_each_process_gets_a_device_of_its_own(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    second = Launch(rank=3, count=4, local_rank=1, local_count=2)
    assert choose_device("auto", second) == torch.device("cuda:1" if gpus else "cpu")
    assert choose_device("cpu", second) == torch.device("cpu")
    with pytest.raises(co2.UserError, match="each gets its own"):
        choose_device("cuda:0", second)
    if gpus:
        with pytest.raises(co2.UserError, match="--nproc-per-node 2"):
            choose_device("auto", Launch(rank=0, count=4, local_rank=0, local_count=4))


def test_processes_on_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert choose_workers(-1, 1) == 15
    assert choose_workers(-1, 4) == 3
    assert choose_workers(-1, 64) == 0
    assert choose_workers(5, 4) == 5
