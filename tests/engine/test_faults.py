"""What happens to long runs, injected for real: kills, full disks, vanished data, NaN, two writers."""

import errno
import gc
import itertools
import multiprocessing
import os
import pty
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import co2
from co2.checkpoint import CheckpointWriter, checkpoints, read_checkpoint, write_checkpoint
from co2.engine import monitor, trainer
from co2.engine.pretrain import Run, Stopped, pretrain
from co2.engine.progress import Quiet
from co2.errors import RunError
from co2.files import unfinished
from co2.runs.rows import read_rows

forked = multiprocessing.get_context("fork")  # a child starts at once, with everything imported


@pytest.fixture(autouse=True)
def one_thread():
    """A forked child must not meet the half of a thread pool that its parent has left it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights(run):
    return read_checkpoint(checkpoints(run)[-1])["nets"]


def assert_same_weights(first, second):
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def start(experiment, out, prepare=None):
    """A run in a process of its own."""

    def body():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if prepare is not None:
            prepare()
        pretrain(experiment, out=out)

    process = forked.Process(target=body)
    process.start()
    return process


def pictures(folder, count=40, size=20):
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(generator.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(folder / f"{i:03d}.png")
    return folder


def kill_and_resume(tiny, tmp_path, kills, seed):
    """Kill a run at `kills` random moments, let it go on each time, and compare with an undisturbed one."""
    settings = {"epochs": 6, "resume": "auto", "monitoring": {"checkpoint_minutes": 1e-4}}
    started = time.monotonic()
    undisturbed = pretrain(tiny(**settings), out=tmp_path / "undisturbed")
    duration = time.monotonic() - started
    moments, done = random.Random(seed), 0
    attempt = 0
    while done < kills:
        out = tmp_path / f"killed-{attempt}"
        attempt += 1
        while done < kills:
            process = start(tiny(**settings), out)
            process.join(timeout=moments.uniform(0.05, 1.0) * duration)
            process.kill()
            process.join()
            if process.exitcode == 0:  # it was faster
                break
            assert process.exitcode == -signal.SIGKILL
            done += 1
        assert pretrain(tiny(**settings), out=out)
        assert_same_weights(undisturbed, out)
        assert len(list((out / "checkpoints").glob("*.pt"))) <= 3
    return done


def test_kills_at_random_moments_change_nothing(tiny, tmp_path):
    assert kill_and_resume(tiny, tmp_path, kills=6, seed=0) == 6


@pytest.mark.slow
def test_thirty_kills_at_random_moments_change_nothing(tiny, tmp_path):
    assert kill_and_resume(tiny, tmp_path, kills=30, seed=1) == 30


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_kill_inside_a_checkpoint_write_changes_nothing(tiny, tmp_path, share):
    undisturbed = pretrain(tiny(epochs=3), out=tmp_path / "undisturbed")
    size = checkpoints(undisturbed)[0].stat().st_size

    def die_in_the_second_write():
        from co2 import checkpoint

        write, written = checkpoint._Summing.write, {"files": 0, "bytes": 0}

        def counting(self, data):
            if written.setdefault("file", self) is not self:
                written.update(file=self, bytes=0, files=written["files"] + 1)
            written["bytes"] += len(data)
            if written["files"] == 1 and written["bytes"] >= share * size:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, data)

        checkpoint._Summing.write = counting

    process = start(tiny(epochs=3), tmp_path / "killed", die_in_the_second_write)
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in checkpoints(tmp_path / "killed")] == ["step-000000003.pt"]
    assert list((tmp_path / "killed" / "checkpoints").glob("*.writing"))  # it died in the middle of it
    pretrain(tiny(epochs=3, resume=True), out=tmp_path / "killed")
    assert_same_weights(undisturbed, tmp_path / "killed")
    assert {path.suffix for path in (tmp_path / "killed" / "checkpoints").iterdir()} == {".pt", ".sha256"}


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_it_used(tiny, tmp_path, capsys):
    undisturbed = pretrain(tiny(epochs=3), out=tmp_path / "undisturbed")
    run = pretrain(tiny(epochs=3), out=tmp_path / "run")
    newest = checkpoints(run)[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    capsys.readouterr()
    pretrain(tiny(epochs=3, resume=True), out=run)
    said = capsys.readouterr().out
    assert newest.name in said
    assert "damaged" in said
    assert "Going on from step 6" in said
    assert_same_weights(undisturbed, run)


def lacking(part):
    """Makes a checkpoint one that lacks a part of itself."""

    def spoil(state):
        del state[part]

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        *map(lacking, ("images", "step", "nets", "optimiser")),
        lambda state: state.update(step="x"),
        lambda state: state.update(step=10**9),
        lambda state: state.update(images="many"),
        lambda state: state["nets"].popitem(),
        lambda state: state["nets"].update(encoder=3),
        lambda state: state["optimiser"].clear(),
        lambda state: state.clear(),
    ],
)
def test_a_checkpoint_that_lacks_something_is_damaged(tiny, tmp_path, capsys, spoil):
    run = pretrain(tiny(), out=tmp_path / "run")
    before = weights(run)
    for step, outcome in ((6, "Going on from step 3"), (3, "None of the checkpoints")):
        path = next(path for path in checkpoints(run) if path.name == f"step-{step:09d}.pt")
        state = read_checkpoint(path)
        spoil(state)
        write_checkpoint(run, state, step)
        if step == 6:
            pretrain(tiny(resume=True), out=run)
            assert all(torch.equal(before[name], value) for name, value in weights(run).items())
            said = capsys.readouterr().out
            assert f"{path} is damaged" in said
            assert outcome in said
            path.unlink()
    with pytest.raises(RunError, match=outcome):
        pretrain(tiny(resume=True), out=run)


def test_a_stop_after_damaged_checkpoints_leaves_one_to_go_on_from(tiny, tmp_path, monkeypatch):
    settings = {"epochs": 6, "monitoring": {"keep_every": 2, "evaluate_every": 6}}
    undisturbed = pretrain(tiny(**settings), out=tmp_path / "undisturbed")
    run = pretrain(tiny(**settings), out=tmp_path / "run")
    for path in checkpoints(run)[1:]:
        os.truncate(path, 1000)
    with monkeypatch.context() as patch:
        AtStep(patch, 9, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped):
            pretrain(tiny(**settings, resume=True), out=run)
    assert [path.name for path in checkpoints(run)][-1] == "step-000000010.pt"
    pretrain(tiny(**settings, resume=True), out=run)
    assert_same_weights(undisturbed, run)


def test_resume_auto_starts_and_continues(tiny, tmp_path):
    run = pretrain(tiny(resume="auto"), out=tmp_path / "run")
    before = weights(run)
    pretrain(tiny(resume="auto"), out=run)
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


def test_a_start_that_was_killed_in_its_first_write_starts_again(tiny, tmp_path):
    def die_at_once(file, data=None):
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare():
        from co2 import checkpoint

        checkpoint.os.fsync = die_at_once

    process = start(tiny(resume="auto"), tmp_path / "run", prepare)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    lock, left = sorted(os.listdir(tmp_path / "run"))
    assert (lock, unfinished(left)) == (".lock", "config.json")
    pretrain(tiny(epochs=1, resume="auto"), out=tmp_path / "run")


def test_a_run_killed_before_its_first_checkpoint_starts_again(tiny, rows, tmp_path):
    undisturbed = pretrain(tiny(), out=tmp_path / "undisturbed")

    def die_at_once():
        original = trainer.Trainer.train_step

        def train_step(self, batch):
            if self.step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, batch)

        trainer.Trainer.train_step = train_step

    process = start(tiny(), tmp_path / "killed", die_at_once)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert [row["step"] for row in rows(tmp_path / "killed", "epoch")] == [0]
    time.sleep(1)  # TensorBoard names its files by the second, and reads them in that order
    pretrain(tiny(resume="auto"), out=tmp_path / "killed")
    assert_same_weights(undisturbed, tmp_path / "killed")
    assert [row["step"] for row in rows(tmp_path / "killed", "epoch")] == [0, 3, 6]
    assert [row["step"] for row in rows(tmp_path / "killed")] == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(tmp_path / "killed")).Reload()
    assert [point.step for point in events.Scalars("epoch/effective_rank")] == [0, 3, 6]


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails as on a full disk
from co2.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def words(out, data="shapes:40:16"):
    command = ["pretrain", "demo-co2", "--data", str(data), "--out", str(out), "--size", "16", "--epochs", "2"]
    return [
        *command,
        "--batch-size",
        "16",
        "--device",
        "cpu",
        "--method.queue",
        "50",
        "--monitoring.health-images",
        "9",
        "--monitoring.checkpoint-seconds",
        "0",
    ]


def test_a_file_that_cannot_grow_is_a_full_disk_in_a_sentence(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, "200000", *words(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    assert "is full" in result.stderr
    assert "--resume" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))  # no half-written file takes up the room


@pytest.mark.parametrize(
    ("room", "name", "code", "sentence"),
    [("0", "run", 1, "is full"), ("1000", "run", 1, "is full"), ("1000000", "x" * 300, 2, "File name too long")],
)
@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_a_folder_that_cannot_be_begun_is_told_in_a_sentence(tmp_path, room, name, code, sentence, resume):
    command = [sys.executable, "-c", FULL_DISK, room, *words(tmp_path / name), *resume]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == code, result.stderr
    assert sentence in result.stderr
    assert "--out" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_really_full_disk_loses_nothing_but_steps(tiny, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs to be root")
    try:
        run = pretrain(tiny(epochs=1), out=disk / "run")
        shutil.copytree(run, tmp_path / "copy")
        filler = disk / "filler"
        space = os.statvfs(disk)
        filler.write_bytes(b"x" * (space.f_bavail * space.f_frsize - 100_000))
        config = (run / "config.json").read_text().replace('"epochs": 1', '"epochs": 2')
        (run / "config.json").write_text(config)
        with pytest.raises(co2.UserError, match=r"is full.*last good checkpoint is step-000000003\.pt"):
            pretrain(tiny(epochs=2, resume=True), out=run)
        filler.unlink()
        pretrain(tiny(epochs=2, resume=True), out=run)
        assert checkpoints(run)[-1].name == "step-000000006.pt"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


MANY_EPOCHS = ["--epochs", "20", "--monitoring.evaluate-every", "100", "--workers", "0"]


def assert_whole(run, epochs=20):
    assert checkpoints(run)[-1].name == f"step-{3 * epochs:09d}.pt"
    assert (run / "backbone.safetensors").is_file()


def test_a_reader_who_has_seen_enough_does_not_end_the_run(tmp_path):
    command = [sys.executable, "-m", "co2.cli", *words(tmp_path / "run"), *MANY_EPOCHS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("demo-co2")
    process.stdout.close()  # as `head -1` does
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 0, errors
    assert errors == ""
    assert_whole(tmp_path / "run")


def test_a_terminal_that_is_closed_does_not_end_the_run(tmp_path):
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "co2.cli", *words(tmp_path / "run"), *MANY_EPOCHS]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=its_end, stderr=its_end, start_new_session=True
    )
    os.close(its_end)
    shown = b""
    while b"epoch 0/20" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(timeout=120) == 0
    assert_whole(tmp_path / "run")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path):
    command = [sys.executable, "-m", "co2.cli", *words(tmp_path / "run"), *MANY_EPOCHS]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert_whole(tmp_path / "run")
        command = [sys.executable, "-m", "co2.cli", *words(tmp_path / "other"), *MANY_EPOCHS, "--epochs", "5000"]
        process = subprocess.Popen(command, stdout=full, stderr=full)
        wait_until(lambda: checkpoints(tmp_path / "other"), process)
        process.send_signal(signal.SIGINT)  # which is answered with a word that nobody can be told
        assert process.wait(timeout=60) == 128 + signal.SIGINT
    (row,) = [row for row in read_rows(tmp_path / "run") if row["kind"] == "epoch" and row["step"] == 60]
    assert "effective_rank" in row  # what was lost of the log is there


def wait_until(something, process):
    deadline = time.monotonic() + 60
    while not something():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


SMALL_SHARED_MEMORY = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'


def test_a_run_with_workers_needs_no_shared_memory_and_stops_when_asked(tmp_path):
    """With as little of it as some containers have; each result is larger."""
    own = ["unshare", "-m", "sh", "-c", SMALL_SHARED_MEMORY, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("making /dev/shm small for one process needs to be root")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "co2.cli", *words(run), "--size", "48", "--epochs", "5000", "--workers", "2"]
    process = subprocess.Popen([*own, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: checkpoints(run), process)
        process.terminate()
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "")
    assert "Stopped after step" in printed


def test_a_run_in_python_goes_on_without_its_reader(tiny, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody_listens:
        monkeypatch.setattr(sys, "stdout", nobody_listens)
        run = pretrain(tiny(), out=tmp_path / "run")
    assert_whole(run, epochs=2)


class AtStep:
    """Does something once, just before a step, while a run goes on in this process."""

    def __init__(self, monkeypatch, step, action):
        original = trainer.Trainer.train_step

        def train_step(self, batch):
            if self.step == step:
                action()
            return original(self, batch)

        monkeypatch.setattr(trainer.Trainer, "train_step", train_step)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_folder_that_vanishes_and_comes_back(tiny, tmp_path, monkeypatch, workers):
    data, away = pictures(tmp_path / "pictures", count=80), tmp_path / "away"
    settings = {"data": str(data), "epochs": 6, "workers": workers}
    undisturbed = pretrain(tiny(**settings), out=tmp_path / "undisturbed")
    message = None
    with monkeypatch.context() as patch:
        AtStep(patch, 7, lambda: data.rename(away))
        try:
            pretrain(tiny(**settings), out=tmp_path / "run")
        except RunError as error:  # not pytest.raises, which would keep the workers alive with the traceback
            message = str(error)
    assert message is not None
    assert "still there" in message or "more than a tenth" in message
    assert "--resume" in message
    away.rename(data)
    pretrain(tiny(**settings, resume=True), out=tmp_path / "run")
    assert_same_weights(undisturbed, tmp_path / "run")


def test_a_mount_that_vanishes_in_mid_run(tiny, tmp_path, monkeypatch):
    mount = tmp_path / "mount"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", mount], capture_output=True).returncode:
        pytest.skip("mounting needs to be root")
    try:
        data = pictures(mount / "pictures", count=80)
        with monkeypatch.context() as patch:
            AtStep(patch, 6, lambda: subprocess.run(["umount", "-l", mount], check=True))
            with pytest.raises(co2.UserError, match="--resume"):
                pretrain(tiny(data=str(data), epochs=4), out=tmp_path / "run")
    finally:
        subprocess.run(["umount", "-l", mount], capture_output=True)
    assert checkpoints(tmp_path / "run")


class AtMeasurement:
    """Does something once, just before a measurement, counted from 0."""

    def __init__(self, monkeypatch, number, action):
        original, calls = monitor.Monitor.measure, itertools.count()

        def measure(self, encoder):
            if next(calls) == number:
                action()
            return original(self, encoder)

        monkeypatch.setattr(monitor.Monitor, "measure", measure)


def assert_same_curves(first, second, rows):
    for kind in ("train", "epoch", "advice"):
        ours, theirs = (
            [{**row, "seconds": 0, "images_per_second": 0, "waiting": 0} for row in rows(run, kind)]
            for run in (first, second)
        )
        assert ours == theirs


def test_held_out_images_that_vanish_cost_no_epoch_and_no_measurement(tiny, rows, tmp_path, monkeypatch):
    data = tmp_path / "pictures"
    for folder in ("train/a", "train/b", "val/a", "val/b"):
        pictures(data / folder, count=20)
    monkeypatch.setattr(monitor, "KEPT_BYTES", 0)  # as with more images
    settings = {"data": str(data), "epochs": 3}
    undisturbed = pretrain(tiny(**settings), out=tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        AtMeasurement(patch, 2, lambda: (data / "val").rename(tmp_path / "away"))
        with pytest.raises(RunError, match=r"could not be measured: None of the .* go on with --resume"):
            pretrain(tiny(**settings), out=tmp_path / "run")
    assert checkpoints(tmp_path / "run")[-1].name == "step-000000006.pt"
    (tmp_path / "away").rename(data / "val")
    run = pretrain(tiny(**settings, resume=True), out=tmp_path / "run")
    assert_same_weights(undisturbed, run)
    assert_same_curves(undisturbed, run, rows)


@pytest.mark.parametrize("number", [1, 3])  # at the end of the first epoch, and of the run
def test_a_kill_in_a_measurement_costs_neither_the_epoch_nor_the_measurement(tiny, rows, tmp_path, number):
    undisturbed = pretrain(tiny(epochs=3), out=tmp_path / "undisturbed")
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{3 * number:09d}.pt"

    def die():
        wait_for(checkpoint)  # it is written beside the training
        os.kill(os.getpid(), signal.SIGKILL)

    process = start(tiny(epochs=3), tmp_path / "run", lambda: AtMeasurement(pytest.MonkeyPatch(), number, die))
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    run = pretrain(tiny(epochs=3, resume=True), out=tmp_path / "run")
    assert_same_weights(undisturbed, run)
    assert_same_curves(undisturbed, run, rows)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)


def test_a_killed_worker_is_replaced_and_the_result_is_the_same(tiny, tmp_path, monkeypatch, capsys):
    data = pictures(tmp_path / "pictures", count=200)
    settings = {"data": str(data), "epochs": 2, "workers": 2, "monitoring": {"health_images": 8}}
    undisturbed = pretrain(tiny(**settings), out=tmp_path / "undisturbed")
    others = set(multiprocessing.active_children())

    def kill_a_worker():
        worker = (set(multiprocessing.active_children()) - others).pop()
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()

    with monkeypatch.context() as patch:
        AtStep(patch, 2, kill_a_worker)
        pretrain(tiny(**settings), out=tmp_path / "run")
    assert "has been replaced" in capsys.readouterr().out
    assert_same_weights(undisturbed, tmp_path / "run")


def test_a_loss_of_nan_stops_the_run_with_what_one_needs_to_know(tiny, tmp_path, monkeypatch):
    data = pictures(tmp_path / "pictures")
    original, seen = trainer.Trainer.train_step, {}

    def train_step(self, batch):
        measured = original(self, batch)
        if self.step == 5:  # counted from 1: the second step of the second epoch
            seen["images"] = batch.indices.tolist()
            measured[0] = float("nan")
        return measured

    monkeypatch.setattr(trainer.Trainer, "train_step", train_step)
    run = tmp_path / "run"
    with pytest.raises(co2.UserError, match=r"NaN or infinite at step 5.*step-000000003\.pt.*learning-rate"):
        pretrain(tiny(data=str(data), monitoring={"log_every": 20}), out=run)
    named = [os.path.basename(line) for line in (run / "nan_batch.txt").read_text().splitlines()]
    assert named == [f"{image:03d}.png" for image in seen["images"]]
    assert [path.name for path in checkpoints(run)] == ["step-000000003.pt"]
    assert all(value.isfinite().all() for value in weights(run).values())


def test_weights_that_are_no_numbers_are_never_saved(tiny, tmp_path, monkeypatch):
    """The loss of a step is from before its update, and may be the last number that there was."""
    original = trainer.Trainer.train_step

    def train_step(self, batch):
        measured = original(self, batch)
        if self.step == 6:  # the last of the second epoch
            self.nets["encoder"].head.weight.data[0, 0] = torch.nan
        return measured

    monkeypatch.setattr(trainer.Trainer, "train_step", train_step)
    run = tmp_path / "run"
    with pytest.raises(RunError, match=r"weights became NaN or infinite by step 6.*step-000000003\.pt.*learning-rate"):
        pretrain(tiny(), out=run)
    assert [path.name for path in checkpoints(run)] == ["step-000000003.pt"]
    assert not (run / "backbone.safetensors").exists()


def test_a_backbone_that_is_no_numbers_is_not_handed_over(tiny, tmp_path):
    run = pretrain(tiny(), out=tmp_path / "run")
    (run / "backbone.safetensors").unlink()
    state = read_checkpoint(checkpoints(run)[-1])
    state["nets"]["encoder.head.weight"][0, 0] = torch.inf
    write_checkpoint(run, state, state["step"])  # as earlier versions could
    with pytest.raises(RunError, match=r"weights became NaN or infinite.*The last good checkpoint is .*000003\.pt"):
        pretrain(tiny(resume=True), out=run)
    assert not (run / "backbone.safetensors").exists()


def test_a_learning_rate_that_is_far_too_high_is_noticed(tiny, tmp_path):
    wild = tiny(optimisation={"learning_rate": 1e30}, epochs=4)
    with pytest.raises(co2.UserError, match="NaN or infinite"):
        pretrain(wild, out=tmp_path / "run")


def test_running_out_of_gpu_memory_says_which_knob_frees_how_much(tiny, tmp_path, monkeypatch):
    def too_large(self, batch):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(trainer.Trainer, "train_step", too_large)
    with pytest.raises(co2.UserError, match=r"(?s)--batch-size 8 frees about .* GiB.*--method\.queue 25 frees"):
        pretrain(tiny(), out=tmp_path / "run")


def test_really_running_out_of_memory_without_a_gpu(tiny, tmp_path):
    with pytest.raises(RunError, match=r"The machine's memory ran out.*--method\.queue"):
        pretrain(tiny(method={"queue": 10**14}), out=tmp_path / "run")


@pytest.mark.gpu
def test_really_running_out_of_gpu_memory(tiny, tmp_path):
    torch.cuda.set_per_process_memory_fraction(0.002)
    try:
        wide = {"backbone": "torchvision/resnet50", "stem": "small-stride-1"}
        huge = tiny(device="cuda", network=wide, size=64, data="shapes:64:64", batch_size=64, method={"head": "mlp"})
        with pytest.raises(co2.UserError, match="--batch-size 32 frees about"):
            pretrain(huge, out=tmp_path / "run")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_changes_nothing(tiny, rows, tmp_path, monkeypatch, jump):
    undisturbed = pretrain(tiny(), out=tmp_path / "undisturbed")
    real, offset = time.time, {"now": 0.0}
    monkeypatch.setattr(time, "time", lambda: real() + offset["now"])
    AtStep(monkeypatch, 2, lambda: offset.update(now=jump))
    run = pretrain(tiny(), out=tmp_path / "run")
    assert_same_weights(undisturbed, run)
    assert all(0 < row["images_per_second"] < 1e6 and 0 <= row["waiting"] <= 1 for row in rows(run))
    assert len(checkpoints(run)) == len(checkpoints(undisturbed))


def test_two_runs_cannot_write_to_one_folder(tiny, tmp_path):
    ready, finish = forked.Event(), forked.Event()

    def hold():
        original = trainer.Trainer.train_step

        def train_step(self, batch):
            ready.set()
            finish.wait(60)
            return original(self, batch)

        trainer.Trainer.train_step = train_step

    first = start(tiny(), tmp_path / "run", hold)
    try:
        assert ready.wait(60)
        for resume in (True, "auto"):
            with pytest.raises(co2.UserError, match=rf"Another process is writing.*process {first.pid} on"):
                pretrain(tiny(resume=resume), out=tmp_path / "run")
    finally:
        finish.set()
        first.join(60)
    assert first.exitcode == 0
    pretrain(tiny(resume=True), out=tmp_path / "run")  # and the lock is gone with its owner


def test_a_killed_run_leaves_no_lock_behind_while_its_workers_still_live(tiny, tmp_path):
    started = forked.Event()

    def announce():
        original = trainer.Trainer.train_step

        def train_step(self, batch):
            started.set()
            return original(self, batch)

        trainer.Trainer.train_step = train_step

    process = start(tiny(workers=2, epochs=4), tmp_path / "run", announce)
    assert started.wait(60)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    pretrain(tiny(epochs=4, resume="auto"), out=tmp_path / "run")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOTCONN])
def test_a_disk_that_fails_is_not_called_a_full_one(tiny, tmp_path, monkeypatch, code):
    def fail(self, state, step):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(CheckpointWriter, "write", fail)
    with pytest.raises(RunError, match=rf"cannot be written to any more \({os.strerror(code)}\).*--resume"):
        pretrain(tiny(), out=tmp_path / "run")


@pytest.mark.parametrize(("name", "place"), [(None, "run"), ("run/checkpoints/one", "run"), ("temp/one", "temp/one")])
def test_the_disk_that_is_called_full_is_the_one_that_is(tiny, tmp_path, monkeypatch, name, place):
    def fail(self, state, step):
        raise OSError(errno.ENOSPC, "No space left on device", *([str(tmp_path / name)] if name else []))

    monkeypatch.setattr(CheckpointWriter, "write", fail)
    with pytest.raises(RunError, match=f"The disk with {tmp_path / place} is full"):
        pretrain(tiny(), out=tmp_path / "run")


def test_other_errors_of_the_system_are_not_explained_away(tiny, tmp_path, monkeypatch):
    def fail(self, state, step):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a compiler")

    monkeypatch.setattr(CheckpointWriter, "write", fail)
    with pytest.raises(FileNotFoundError, match="a compiler"):
        pretrain(tiny(), out=tmp_path / "run")


def test_a_run_folder_that_goes_away_is_not_made_again_and_can_come_back(tiny, tmp_path, monkeypatch):
    undisturbed = pretrain(tiny(epochs=3), out=tmp_path / "undisturbed")
    run, away = tmp_path / "run", tmp_path / "away"
    with monkeypatch.context() as patch:
        AtStep(patch, 4, lambda: run.rename(away))
        with pytest.raises(RunError, match=r"cannot be written to any more \(No such file or directory\).*--resume"):
            pretrain(tiny(epochs=3), out=run)
    assert not run.exists()
    away.rename(run)
    pretrain(tiny(epochs=3, resume=True), out=run)
    assert_same_weights(undisturbed, run)


def test_many_runs_leak_nothing(tiny, tmp_path):
    """The short form of the soak: file handles, threads, memory and disk stay level from run to run."""

    def usage():
        gc.collect()
        return {"handles": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}

    def body(report):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        pretrain(tiny(), out=tmp_path / "0")
        before, memory = usage(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(1, 9):
            pretrain(tiny(), out=tmp_path / str(number))
        # On a busy machine the system may take a moment to clear away a thread that has been joined; a leak stays.
        deadline = time.monotonic() + 10
        while any(now > before[name] for name, now in usage().items()) and time.monotonic() < deadline:
            time.sleep(0.05)
        report.send((before, usage(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory))

    # In a process of its own: in this one, what other tests have left behind may end at any moment.
    ours, theirs = forked.Pipe()
    process = forked.Process(target=body, args=(theirs,))
    process.start()
    theirs.close()
    before, after, memory = ours.recv()
    process.join()
    assert all(after[name] <= before[name] for name in before), (before, after)
    assert memory < 60_000  # KiB, of about 500,000
    sizes = [sum(f.stat().st_size for f in (tmp_path / str(n)).rglob("*") if f.is_file()) for n in (0, 8)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_a_display_is_closed_when_a_run_does_not_even_start(tiny, tmp_path, monkeypatch):
    """A bar that is left open has hidden the cursor of the terminal."""

    class Watched(Quiet):
        closed = False

        def close(self):
            self.closed = True

    display = Watched()
    monkeypatch.setattr("co2.engine.pretrain.choose_display", lambda epochs, metrics: display)
    with pytest.raises(co2.UserError, match="resnet5"):
        pretrain(tiny(network={"backbone": "torchvision/resnet5", "stem": "standard"}), out=tmp_path / "run")
    assert display.closed


def test_a_replaced_worker_of_another_process_is_told_with_its_rank():
    told = []
    run = SimpleNamespace(
        processes=SimpleNamespace(count=3, joined=lambda lost: [0, 2, *lost]),
        loader=SimpleNamespace(workers=SimpleNamespace(lost=1)),
        display=SimpleNamespace(say=told.append),
        _lost_workers=[0, 1, 1],
    )
    for _ in range(2):
        Run._tell_of_lost_workers(run)
    assert told == ["A process that prepares images for process 1 of 3 was ended by the system and has been replaced."]
