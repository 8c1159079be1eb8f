"""Whole runs on rendered pictures: small, but real."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import co2
from co2.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from co2.cli import main
from co2.data.fingerprint import fingerprint_of_names
from co2.data.open import open_data
from co2.engine.monitor import Monitor
from co2.engine.pretrain import check_names, check_sizes, memory_advice, precision_advice, pretrain
from co2.networks.parts import Parts

ALL_METHODS = [
    "demo-moco",
    "demo-co2",
    "moco-label-smoothing-small",
    "simclr-small",
    "co2-simclr-small",
    "insdisc-small",
    "co2-insdisc-small",
]


def weights(run):
    return read_checkpoint(checkpoints(run)[-1])["nets"]


def assert_same_weights(first, second):
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def write_pictures(folder, count, size=20):
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(generator.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(folder / f"{i:03d}.png")
    return folder


@pytest.mark.parametrize("recipe", ALL_METHODS)
def test_every_method_runs_and_leaves_a_whole_run_folder(tiny, rows, tmp_path, recipe):
    run = pretrain(tiny(recipe, negatives=30), out=tmp_path / "run")
    assert {"config.json", "metrics.jsonl", "checkpoints", "backbone.safetensors"} <= set(os.listdir(run))
    train = rows(run)
    assert [row["step"] for row in train] == [1, 2, 3, 4, 5, 6]  # 40 images at 16: two whole batches and a short one
    for row in train:
        assert all(np.isfinite(row[name]) for name in ("loss", "instance", "consistency", "learning_rate"))
        assert 0 <= row["top1"] <= row["top5"] <= 1
        assert row["images_per_second"] > 0
        assert 0 <= row["waiting"] <= 1
    alpha = json.loads((run / "config.json").read_text())["method"]["alpha"]
    for row in train:  # without CO2 the term is measured but is no part of the loss
        assert row["loss"] == pytest.approx(row["instance"] + alpha * row["consistency"], rel=1e-5)
        assert row["consistency"] > 0
    epochs = rows(run, "epoch")
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    for row in epochs:
        assert {"alignment", "uniformity", "effective_rank", "mean_norm", "knn_top1", "knn_top5"} <= set(row)
    features = co2.load_backbone(run).eval()(torch.randn(2, 3, 16, 16))
    assert features.shape[0] == 2
    assert torch.isfinite(features).all()


def test_tensorboard_sees_the_same_numbers(tiny, rows, tmp_path):
    run = pretrain(tiny(), out=tmp_path / "run")
    events = EventAccumulator(str(run)).Reload()
    points = events.Scalars("train/loss")
    assert [point.step for point in points] == [row["step"] for row in rows(run)]
    assert [point.value for point in points] == pytest.approx([row["loss"] for row in rows(run)], rel=1e-6)
    assert len(events.Scalars("epoch/knn_top1")) == 3


def test_tensorboard_sees_every_step_of_a_resumed_run_once(tiny, rows, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        StopAfter(patch, 4)
        with pytest.raises(co2.engine.pretrain.Stopped):
            pretrain(tiny(), out=tmp_path / "run")
    time.sleep(1)  # TensorBoard names its files by the second, and reads them in that order
    run = pretrain(tiny(resume=True), out=tmp_path / "run")
    events = EventAccumulator(str(run)).Reload()
    assert [point.step for point in events.Scalars("train/loss")] == [row["step"] for row in rows(run)]
    assert [point.step for point in events.Scalars("epoch/knn_top1")] == [0, 3, 6]


def test_a_run_repeats_whatever_the_number_of_workers(tiny, tmp_path):
    first = pretrain(tiny(workers=0), out=tmp_path / "first")
    second = pretrain(tiny(workers=2), out=tmp_path / "second")
    assert_same_weights(first, second)
    other = pretrain(tiny(seed=1), out=tmp_path / "other")
    assert not torch.equal(weights(first)["queue.rows"], weights(other)["queue.rows"])


def test_checkpoints_of_every_second_epoch_are_kept(tiny, tmp_path):
    run = pretrain(tiny(epochs=6, monitoring={"keep_every": 2, "evaluate_every": 6}), out=tmp_path / "run")
    assert [path.name for path in checkpoints(run)] == [f"step-{3 * epoch:09d}.pt" for epoch in (2, 4, 5, 6)]


class StopAfter:
    """Ends a run from outside, as a user with Ctrl-C would, once it has taken a number of steps."""

    def __init__(self, monkeypatch, steps):
        from co2.engine import trainer

        original, taken = trainer.Trainer.train_step, itertools.count(1)

        def train_step(self, batch):
            measured = original(self, batch)
            if next(taken) == steps:
                os.kill(os.getpid(), signal.SIGINT)
            return measured

        monkeypatch.setattr(trainer.Trainer, "train_step", train_step)


@pytest.mark.parametrize("recipe", ["demo-co2", "co2-simclr-small", "co2-insdisc-small"])
@pytest.mark.parametrize("steps", [2, 3, 4])  # in mid-epoch, at its end, in the next one
def test_a_run_stopped_and_resumed_ends_with_identical_weights(tiny, rows, tmp_path, monkeypatch, recipe, steps):
    undisturbed = pretrain(tiny(recipe, negatives=30), out=tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        StopAfter(patch, steps)
        with pytest.raises(co2.engine.pretrain.Stopped) as stop:
            pretrain(tiny(recipe, negatives=30), out=tmp_path / "stopped")
    assert stop.value.signal_number == signal.SIGINT
    resumed = pretrain(tiny(recipe, negatives=30, resume=True), out=tmp_path / "stopped")
    assert_same_weights(undisturbed, resumed)
    for kind in ("train", "epoch"):
        ours, theirs = rows(undisturbed, kind), rows(resumed, kind)
        assert [row["step"] for row in ours] == [row["step"] for row in theirs]
        for name in ("loss", "consistency", "knn_top1", "uniformity"):
            assert [row.get(name) for row in ours] == [row.get(name) for row in theirs]
    backbones = [co2.load_backbone(run).state_dict() for run in (undisturbed, resumed)]
    assert all(torch.equal(backbones[0][name], backbones[1][name]) for name in backbones[0])


@pytest.mark.parametrize("epochs_before", [0, 1])
def test_a_run_told_to_stop_while_it_measures_makes_no_further_step(tiny, rows, tmp_path, monkeypatch, epochs_before):
    """With every epoch saved: where that is not so, there is a step more to save."""
    from co2.engine import monitor

    often = {"monitoring": {"evaluate_every": 1, "checkpoint_seconds": 0.0}}
    undisturbed = pretrain(tiny(epochs=2, **often), out=tmp_path / "undisturbed")
    original, measured = monitor.Monitor.measure, []

    def measure(self, encoder):
        measured.append(True)
        if len(measured) == epochs_before + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, encoder)

    with monkeypatch.context() as patch:
        patch.setattr(monitor.Monitor, "measure", measure)
        with pytest.raises(co2.engine.pretrain.Stopped) as stop:
            pretrain(tiny(epochs=2, **often), out=tmp_path / "stopped")
    assert stop.value.signal_number == signal.SIGTERM
    steps = 3 * epochs_before
    assert (f"after step {steps}" if steps else "before the first step") in str(stop.value)
    assert [row["step"] for row in rows(tmp_path / "stopped", "epoch")] == [0, 3][: epochs_before + 1]
    resumed = pretrain(tiny(epochs=2, resume=True, **often), out=tmp_path / "stopped")
    assert_same_weights(undisturbed, resumed)
    assert [row["step"] for row in rows(resumed, "epoch")] == [0, 3, 6]


def test_a_run_told_to_stop_at_the_end_of_an_epoch_leaves_the_measurement_to_the_next(
    tiny, rows, tmp_path, monkeypatch
):
    StopAfter(monkeypatch, 3)
    with pytest.raises(co2.engine.pretrain.Stopped):
        pretrain(tiny(monitoring={"evaluate_every": 1}), out=tmp_path / "stopped")
    assert [row["step"] for row in rows(tmp_path / "stopped", "epoch")] == [0]


def test_views_that_grow_during_a_run_that_is_stopped_and_resumed(tiny, tmp_path, monkeypatch, capsys):
    from co2.engine import trainer

    original, seen = trainer.Trainer.train_step, []

    def train_step(self, batch):
        seen.append(batch.views[0].shape[-1])
        return original(self, batch)

    monkeypatch.setattr(trainer.Trainer, "train_step", train_step)
    growing = tiny(epochs=4, size=16, earlier_sizes=(8,))
    undisturbed = pretrain(growing, out=tmp_path / "undisturbed")
    assert seen == [16, *6 * [8], *6 * [16]]  # the first one is a rehearsal
    assert "Views have 8 pixels at first, 16 from epoch 3 on" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        StopAfter(patch, 1 + 5)
        with pytest.raises(co2.engine.pretrain.Stopped):
            pretrain(growing, out=tmp_path / "stopped")
    resumed = pretrain(growing.edit(resume=True), out=tmp_path / "stopped")
    assert seen[13:] == [16, *5 * [8], 16, 8, *6 * [16]]
    assert_same_weights(undisturbed, resumed)


def test_time_goes_with_the_pixels_of_views(tiny):
    growing = tiny(epochs=4, size=16, earlier_sizes=(8,))
    of_first = co2.engine.pretrain.work(growing, steps_per_epoch=3)
    assert [of_first(steps) for steps in (0, 1, 6, 7, 12)] == [0, 0.25, 1.5, 2.5, 7.5]
    of_first = co2.engine.pretrain.work(tiny(), steps_per_epoch=3)
    assert [of_first(steps) for steps in range(7)] == list(range(7))


def test_a_run_with_growing_views_looks_for_memory_first(tiny, tmp_path, monkeypatch):
    """For a step of the largest views, which come last."""
    from co2.engine import trainer

    rehearsed = []
    monkeypatch.setattr(trainer.Trainer, "rehearse", lambda self, batch: rehearsed.append((self.step, batch)))
    pretrain(tiny(epochs=1), out=tmp_path / "all-alike")
    assert rehearsed == []
    pretrain(tiny(size=16, earlier_sizes=(8,)), out=tmp_path / "growing")
    ((step, batch),) = rehearsed
    assert step == 0
    assert [(view.shape, view.dtype) for view in batch.views] == [((16, 3, 16, 16), torch.uint8)] * 2
    assert (batch.indices.tolist(), batch.total) == (list(range(16)), 16)


@pytest.fixture
def dropout(monkeypatch):
    """Encoders that draw random numbers in each step, as those with dropout or stochastic depth do."""
    build = Parts.encoder

    def with_dropout(*arguments):
        encoder = build(*arguments)
        encoder.head = torch.nn.Sequential(torch.nn.Dropout(0.3), encoder.head)
        return encoder

    monkeypatch.setattr(Parts, "encoder", with_dropout)


def test_a_network_that_draws_repeats_and_resumes_exactly(tiny, rows, tmp_path, monkeypatch, dropout):
    torch.manual_seed(1)
    first = pretrain(tiny(workers=0), out=tmp_path / "first")
    torch.manual_seed(2)
    second = pretrain(tiny(workers=1), out=tmp_path / "second")
    assert_same_weights(first, second)
    for steps in (2, 3):  # in mid-epoch, and at its end
        with monkeypatch.context() as patch:
            StopAfter(patch, steps)
            with pytest.raises(co2.engine.pretrain.Stopped):
                pretrain(tiny(), out=tmp_path / f"stopped-{steps}")
        torch.manual_seed(3)
        resumed = pretrain(tiny(workers=1, resume=True), out=tmp_path / f"stopped-{steps}")
        assert_same_weights(first, resumed)
        assert [row["loss"] for row in rows(first)] == [row["loss"] for row in rows(resumed)]


def words_for(run, *words):
    command = ["pretrain", "demo-co2", "--data", "shapes:40:16", "--out", str(run), "--size", "16"]
    command += ["--batch-size", "16", "--device", "cpu", "--method.queue", "50", "--monitoring.log-every", "1"]
    command += ["--monitoring.health-images", "16", "--monitoring.bank-images", "30", "--monitoring.query-images", "20"]
    command += ["--monitoring.checkpoint-seconds", "0"]
    return [*command, *words]


KILL_AT_STEP = """
import os, signal, sys, time
from co2.cli import main
from co2.engine import trainer
original = trainer.Trainer.train_step
def train_step(self, batch):
    if self.step == int(sys.argv[1]):
        while not os.path.exists(sys.argv[2]):  # it is written beside the training
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch)
trainer.Trainer.train_step = train_step
sys.exit(main(sys.argv[3:]))
"""


def test_a_killed_process_resumes_to_identical_weights(tmp_path):
    words = words_for(tmp_path / "killed", "--epochs", "3")
    newest = tmp_path / "killed" / "checkpoints" / "step-000000006.pt"
    command = [sys.executable, "-c", KILL_AT_STEP, "7", str(newest), *words]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoints(tmp_path / "killed")[-1] == newest
    assert main([*words, "--resume"]) == 0
    assert main(words_for(tmp_path / "undisturbed", "--epochs", "3")) == 0
    assert_same_weights(tmp_path / "undisturbed", tmp_path / "killed")


def test_sigterm_writes_a_checkpoint_and_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "co2.cli", *words_for(tmp_path / "run", "--epochs", "500")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: checkpoints(tmp_path / "run"), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "--resume" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("room", ["open_data", "choose_input"])  # before and after it has claimed its folder
def test_sigterm_while_a_run_starts_leaves_nothing_behind(tmp_path, monkeypatch, capsys, room):
    before = signal.getsignal(signal.SIGTERM)
    words = words_for(tmp_path / "new" / "run", "--epochs", "1")
    with monkeypatch.context() as patch:
        patch.setattr(f"co2.engine.pretrain.{room}", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        assert main(words) == 128 + signal.SIGTERM
    assert "The same command starts it again" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before
    assert main(words) == 0


def test_sigterm_while_a_run_goes_on_again_keeps_it(tmp_path, monkeypatch):
    words = words_for(tmp_path / "run", "--epochs", "2")
    with monkeypatch.context() as patch:
        StopAfter(patch, 4)
        assert main(words) == 128 + signal.SIGINT
    with monkeypatch.context() as patch:
        patch.setattr("co2.engine.pretrain.choose_input", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        assert main([*words, "--resume"]) == 128 + signal.SIGTERM
    assert main([*words, "--resume"]) == 0
    assert main(words_for(tmp_path / "undisturbed", "--epochs", "2")) == 0
    assert_same_weights(tmp_path / "undisturbed", tmp_path / "run")


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the process does not get anywhere"
        time.sleep(0.01)


def test_an_occupied_folder_is_refused_with_both_remedies(tiny, tmp_path):
    run = pretrain(tiny(), out=tmp_path / "run")
    before = sorted(os.listdir(run))
    with pytest.raises(co2.UserError, match=r"--resume.*--out"):
        pretrain(tiny(), out=run)
    assert sorted(os.listdir(run)) == before


def test_resuming_nothing_or_something_else_is_refused(tiny, tmp_path):
    with pytest.raises(co2.UserError, match="no run to resume"):
        pretrain(tiny(resume=True), out=tmp_path / "nothing")
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(co2.UserError, match="not a run folder"):
        pretrain(tiny(resume=True), out=tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 14},
        {"seed": 1},
        {"views": {"flip_probability": 0.1}},
        {"method": {"dimension": 9}},
        {"method": {"momentum": 0.5}},
        {"method": {"tau": 0.3}},
        {"optimisation": {"learning_rate": 0.5}},
        {"execution": {"precision": "bfloat16"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_run_is_not_resumed_with_another_setting_of_any_kind(tiny, tmp_path, change):
    pretrain(tiny(epochs=1), out=tmp_path / "run")
    with pytest.raises(co2.UserError, match=next(iter(change))):
        pretrain(tiny(epochs=1, resume=True).edit(**change), out=tmp_path / "run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_fused_kernel_without_a_gpu_is_refused_before_anything_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("co2.objective.fused.INTERPRETED", False)
    with pytest.raises(co2.UserError, match=r"--method\.backend fused cannot run here: .* reference"):
        pretrain(tiny(method={"backend": "fused"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resuming_with_other_settings_says_what_differs(tiny, tmp_path):
    pretrain(tiny(epochs=1), out=tmp_path / "run")
    with pytest.raises(co2.UserError, match=r"method\.alpha: 0\.3 in the run folder, 2\.0 asked for"):
        pretrain(tiny(epochs=1, method={"alpha": 2.0}, resume=True), out=tmp_path / "run")
    with pytest.raises(co2.UserError, match="trained on 40 images"):
        pretrain(tiny(epochs=1, data="shapes:41:16", resume=True), out=tmp_path / "run")


def test_resuming_with_pictures_rendered_at_another_size_is_refused(tiny, tmp_path):
    run = pretrain(tiny(epochs=1, data="shapes:40:16"), out=tmp_path / "run")
    with pytest.raises(co2.UserError, match=r"other names.*Resume with the data it was started with"):
        pretrain(tiny(epochs=1, data="shapes:40:24", resume=True), out=run)


def test_resuming_with_as_many_other_images_is_refused(tiny, tmp_path):
    data = write_pictures(tmp_path / "pictures", 40)
    run = pretrain(tiny(epochs=1), data=data, out=tmp_path / "run")
    before = sorted(run.rglob("*"))
    with pytest.raises(co2.UserError, match=r"other names.*Resume with the data it was started with"):
        pretrain(tiny(epochs=1, resume=True), out=run)  # 40 as well
    (data / "z").mkdir()
    (data / "007.png").rename(data / "z" / "007.png")  # every image after it has another number now
    with pytest.raises(co2.UserError, match=r"other names.*Resume with the data it was started with"):
        pretrain(tiny(epochs=1, resume=True), data=data, out=run)
    assert sorted(run.rglob("*")) == before
    (data / "z" / "007.png").rename(data / "007.png")
    (data / "z").rmdir()
    moved = data.rename(tmp_path / "moved")
    pretrain(tiny(epochs=1, resume=True), data=moved, out=run)


def test_every_checkpoint_of_a_run_says_which_images_it_is_of(tiny, tmp_path):
    experiment = tiny(epochs=2)
    run = pretrain(experiment, out=tmp_path / "run")
    states = [read_checkpoint(path) for path in checkpoints(run)]
    assert len(states) == 2
    assert {state["names"] for state in states} == {fingerprint_of_names(open_data(experiment.data).train)}


def test_a_checkpoint_from_before_names_were_noted_is_accepted(tiny, tmp_path):
    run = pretrain(tiny(epochs=1), out=tmp_path / "run")
    state = read_checkpoint(checkpoints(run)[-1])
    del state["names"]
    write_checkpoint(run, state, state["step"])
    pretrain(tiny(epochs=1, resume=True), out=run)


def test_processes_must_mean_the_same_images(tiny):
    check_names(tiny(), [3, 3])
    with pytest.raises(co2.UserError, match="All must see the same images"):
        check_names(tiny(), [3, 4])


def test_a_checkpoint_too_many_is_removed_when_a_run_goes_on(tiny, tmp_path):
    """Which is what a process leaves that was killed between writing the last one and removing the oldest."""
    run = pretrain(tiny(epochs=4), out=tmp_path / "run")
    kept = checkpoints(run)
    too_many = kept[0].with_name("step-000000001.pt")
    for ending in (".pt", ".sha256"):
        too_many.with_suffix(ending).write_bytes(kept[0].with_suffix(ending).read_bytes())
    pretrain(tiny(epochs=4, resume=True), out=run)
    assert checkpoints(run) == kept
    assert not too_many.with_suffix(".sha256").exists()


def test_a_finished_run_can_be_resumed_without_harm(tiny, tmp_path):
    run = pretrain(tiny(), out=tmp_path / "run")
    before = co2.load_backbone(run).state_dict()
    pretrain(tiny(resume=True), out=run)
    after = co2.load_backbone(run).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_unlabelled_pictures_of_ones_own(tiny, rows, tmp_path):
    pictures = write_pictures(tmp_path / "pictures", 24)
    run = co2.pretrain(tiny(), data=pictures, out=tmp_path / "run")
    last = rows(run, "epoch")[-1]
    assert "effective_rank" in last
    assert "knn_top1" not in last
    assert not (run / "bad_images.txt").exists()


def test_a_few_bad_images_are_skipped_counted_and_named(tiny, rows, tmp_path, capsys):
    pictures = write_pictures(tmp_path / "pictures", 40)
    (pictures / "007.png").write_bytes(b"")
    whole = (pictures / "020.png").read_bytes()
    (pictures / "020.png").write_bytes(whole[: len(whole) // 2])
    run = pretrain(tiny(), data=pictures, out=tmp_path / "run")
    lines = (run / "bad_images.txt").read_text().splitlines()
    assert sorted(line.split("\t")[0].split(os.sep)[-1] for line in lines) == ["007.png", "020.png"]
    assert all(line.split("\t")[1] for line in lines)
    assert len(rows(run)) == 6
    assert "cannot be read" in capsys.readouterr().out


def test_too_many_bad_images_end_the_run_and_lose_nothing(tiny, tmp_path):
    pictures = write_pictures(tmp_path / "pictures", 40)
    for number in range(10, 15):
        (pictures / f"{number:03d}.png").write_bytes(b"not a picture")
    with pytest.raises(co2.UserError, match="more than a tenth"):
        pretrain(tiny(), data=pictures, out=tmp_path / "run")
    assert len((tmp_path / "run" / "bad_images.txt").read_text().splitlines()) == 5
    assert checkpoints(tmp_path / "run")
    write_pictures(tmp_path / "pictures", 40)  # repaired
    pretrain(tiny(resume=True), data=pictures, out=tmp_path / "run")


def test_a_batch_larger_than_the_data_set_is_refused(tiny, tmp_path):
    with pytest.raises(co2.UserError, match=r"larger than the data set of 40 images.*--batch-size"):
        pretrain(tiny(batch_size=64), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", ["demo-moco", "simclr-small", "insdisc-small"])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_a_batch_that_is_advised_is_not_refused_in_its_turn(tiny, recipe, groups):
    experiment = tiny(recipe, batch_size=64, network={"groups": groups})
    for images in range(4 if recipe == "demo-moco" else 2, 64):
        with pytest.raises(co2.UserError, match=r"Use --batch-size \d+.*, or more images") as refusal:
            check_sizes(experiment, [images])
        advised = re.search(r"--batch-size (\d+)(?: with --network.groups (\d+))?", str(refusal.value))
        size, fewer = advised.groups()
        check_sizes(experiment.edit(network={"groups": int(fewer or groups)}, batch_size=int(size)), [images])
    with pytest.raises(co2.UserError, match=r"needs [24] images at least"):
        check_sizes(experiment, [1])


@pytest.mark.parametrize("kind", ["captured", "compiled"])
def test_a_step_for_gpus_is_refused_on_a_cpu_unless_the_run_comes_from_one(tiny, tmp_path, capsys, kind):
    for_a_gpu = {"execution": {"step": kind}}
    for resume in (False, True, "auto"):
        with pytest.raises(co2.UserError, match=f"A step is only {kind} on a GPU. Use eager or auto"):
            pretrain(tiny(resume=resume, **for_a_gpu), out=tmp_path / "run")
        assert not (tmp_path / "run").exists()
    pretrain(tiny(epochs=1), out=tmp_path / "run")
    assert "as they are written" not in capsys.readouterr().out
    pretrain(tiny(epochs=1, resume=True, **for_a_gpu), out=tmp_path / "run")
    assert f"Steps are not {kind} but taken as they are written: the device is cpu." in capsys.readouterr().out


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_who_could_compute_faster_is_told_how(tiny, tmp_path, capsys, monkeypatch, precision, has_instructions):
    monkeypatch.setattr("co2.engine.pretrain.multiplies_bfloat16", lambda: has_instructions)
    pretrain(tiny(epochs=1, execution={"precision": precision}), out=tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    remedies = {("auto", True): "bfloat16", ("bfloat16", False): "float32"}
    for remedy in ("bfloat16", "float32"):
        wanted = remedies.get((precision, has_instructions)) == remedy
        assert (f"--execution.precision {remedy}" in said) == wanted
    pretrain(tiny(epochs=1, resume=True, execution={"precision": precision}), out=tmp_path / "run")
    assert "--execution.precision" not in capsys.readouterr().out  # a run keeps what it was begun with


def test_a_run_in_float32_that_goes_on_on_a_gpu_says_what_changes():
    gpu = torch.device("cuda")
    assert "bfloat16 from here on" in precision_advice(gpu, "float32", continued=True)
    assert precision_advice(gpu, "auto", continued=True) is precision_advice(gpu, "bfloat16", continued=False) is None


def test_a_run_in_bfloat16_stopped_and_resumed_ends_with_identical_weights(tiny, tmp_path, monkeypatch):
    rounded = {"execution": {"precision": "bfloat16"}}
    undisturbed = pretrain(tiny(**rounded), out=tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        StopAfter(patch, 2)
        with pytest.raises(co2.engine.pretrain.Stopped):
            pretrain(tiny(**rounded), out=tmp_path / "stopped")
    assert_same_weights(undisturbed, pretrain(tiny(resume=True, **rounded), out=tmp_path / "stopped"))
    exact = weights(pretrain(tiny(), out=tmp_path / "exact"))
    assert not torch.equal(exact["encoder.head.weight"], weights(undisturbed)["encoder.head.weight"])


TOO_LITTLE = {"input": "resident", "resident_gib": 1e-6}


def test_a_run_that_is_refused_at_its_start_leaves_its_folder_to_a_corrected_one(tiny, tmp_path):
    with pytest.raises(co2.UserError, match="do not fit"):
        pretrain(tiny(execution=TOO_LITTLE), out=tmp_path / "runs" / "mine")
    assert os.listdir(tmp_path) == []
    (tmp_path / "runs").mkdir()
    with pytest.raises(co2.UserError, match="do not fit"):
        pretrain(tiny(execution=TOO_LITTLE), out=tmp_path / "runs")
    assert os.listdir(tmp_path) == ["runs"]  # which was there
    assert os.listdir(tmp_path / "runs") == []
    pretrain(tiny(epochs=1), out=tmp_path / "runs")


def test_a_run_that_is_there_survives_the_refusal_to_continue_it(tiny, tmp_path):
    run = pretrain(tiny(epochs=1), out=tmp_path / "run")
    before = sorted(run.rglob("*"))
    with pytest.raises(co2.UserError, match="do not fit"):
        pretrain(tiny(epochs=1, resume=True, execution=TOO_LITTLE), out=run)
    assert sorted(run.rglob("*")) == before
    for checkpoint in checkpoints(run):  # ended before its first one
        checkpoint.unlink()
    with pytest.raises(co2.UserError, match="do not fit"):
        pretrain(tiny(epochs=1, resume=True, execution=TOO_LITTLE), out=run)
    assert (run / "config.json").is_file()


def test_memory_advice_is_about_the_current_gpu(tiny, tmp_path, monkeypatch):
    class Properties:
        total_memory = 7 * 2**30

    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: asked.append(device) or Properties())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 2**30)
    (tmp_path / "config.json").write_text(tiny().to_json())
    assert "(7 GiB) ran out; the run had reached 1.0 GiB" in memory_advice(tmp_path)
    assert asked == [None]


@pytest.mark.parametrize("recipe", ["demo-co2", "co2-simclr-small", "co2-insdisc-small"])
def test_memory_advice_names_the_queue_where_there_is_one(tiny, tmp_path, recipe):
    (tmp_path / "config.json").write_text(tiny(recipe, negatives=30).to_json())
    advice = memory_advice(tmp_path)
    assert ("--method.queue 15" in advice) == (recipe == "demo-co2")
    assert "--batch-size 8" in advice


def test_a_queue_larger_than_the_data_set_is_a_warning(tiny, tmp_path, capsys):
    pretrain(tiny(method={"queue": 100}, epochs=1), out=tmp_path / "run")
    assert "older keys of itself" in capsys.readouterr().out


def test_advice_is_told_and_recorded(tiny, rows, tmp_path, capsys):
    run = pretrain(tiny(method={"alpha": 0.0, "queue": 200}, epochs=4), out=tmp_path / "run")
    advice = [row["text"] for row in rows(run, "advice")]
    assert any("real keys replace them" in text for text in advice)
    assert "real keys replace them" in capsys.readouterr().out


def test_a_run_that_is_continued_does_not_repeat_its_advice(tiny, rows, tmp_path, monkeypatch):
    experiment = tiny(method={"alpha": 0.0, "queue": 200}, epochs=4)
    StopAfter(monkeypatch, 6)
    with pytest.raises(co2.engine.pretrain.Stopped):
        pretrain(experiment, out=tmp_path / "run")
    before = rows(tmp_path / "run", "advice")
    assert before
    run = pretrain(experiment.edit(resume=True), out=tmp_path / "run")
    assert rows(run, "advice") == before


def test_a_start_that_was_too_fast_is_told_with_the_rank_of_the_untrained_network(tiny, rows, tmp_path, monkeypatch):
    ranks = iter((48.0, 5.0, 4.0))
    healthy = Monitor._label_free
    monkeypatch.setattr(
        Monitor, "_label_free", lambda *a: healthy(*a) | {"effective_rank": next(ranks), "uniformity": -1}
    )
    run = pretrain(tiny(epochs=2, monitoring={"evaluate_every": 1}), out=tmp_path / "run")
    told = [row["text"] for row in rows(run, "advice") if "fewer dimensions" in row["text"]]
    assert len(told) == 1
    assert "effective rank 5.0, untrained 48.0" in told[0]
