"""`co2 bench train`, end to end on a few pictures, and what it makes of its clocks."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import made_pictures

from co2.bench.specification import TrainBenchmark
from co2.bench.step import noise_batches
from co2.bench.train import (
    Stretch,
    TrainMeasurement,
    endless_batches,
    noise_images,
    open_loader,
    run,
    spread,
    train_for,
)
from co2.cli import main
from co2.data.open import open_data
from co2.engine.trainer import Trainer
from co2.errors import UserError

CPU = torch.device("cpu")
SMALL = [
    "--batch-size", "8", "--size", "16", "--network.backbone", "co2/resnet10-narrow", "--network.stem",
    "small-stride-2", "--method.dimension", "16", "--method.queue", "32", "--device", "cpu", "--workers", "0",
]  # fmt: skip


def test_from_the_command_line_to_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "train", "moco-small", *SMALL, "--data", "shapes:40:16", "--steps", "7"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    record: dict[str, Any] = json.loads((tmp_path / "train.json").read_text())
    assert (record["steps"], record["images_seen"], record["images"]) == (7, 56, 40)
    assert record["images_per_second"] == pytest.approx(56 / record["seconds"])
    assert record["share_of_bound"] == pytest.approx(record["images_per_second"] / record["bound"]["images_per_second"])
    assert 0 < record["waiting"] < 1
    assert record["waiting"] == pytest.approx(record["loop_waiting"], rel=0.5)  # on a CPU there is only one clock
    assert record["shares"]["waiting for data"] == pytest.approx(record["waiting"])
    assert {"forward", "backward", "optimiser"} <= set(record["parts"])
    assert {"command", "commit", "versions", "device"} <= set(record)
    assert record["sentence"] in printed
    assert "waiting for data" in printed


def test_it_trains_on_pictures_that_were_made_for_it(tmp_path: Path) -> None:
    with made_pictures(9, "40x32", str(tmp_path / "made")) as data:
        words = ["bench", "train", "moco-small", *SMALL, "--data", data, "--execution.input", "jpeg", "--steps", "2"]
        assert main([*words, "--out", str(tmp_path)]) == 0
    record: dict[str, Any] = json.loads((tmp_path / "train.json").read_text())
    assert record["images"] == 9
    assert "JPEGs are read ahead" in record["sentence"]
    assert len(list((tmp_path / "made").rglob("*.jpg"))) == 9


def test_the_cost_of_an_image_by_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "train", "moco-small", *SMALL, "--images", "16", "64", "--queue", "32", "128", "--steps", "2"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    record: dict[str, Any] = json.loads((tmp_path / "train.json").read_text())
    assert [(row["images"], row["negatives"]) for row in record["sweep"]] == [(16, 32), (64, 32), (16, 128)]
    costs = [row["microseconds_per_image"] for row in record["sweep"]]
    assert costs == [pytest.approx(1e6 / row["images_per_second"]) for row in record["sweep"]]
    assert record["spread"] == max(costs) / min(costs) == spread(record["sweep"])
    assert "the cost of an image" in capsys.readouterr().out


def test_a_stretch_ends_after_its_steps_or_its_seconds(tiny: Any) -> None:
    experiment = tiny()
    trainer = Trainer(experiment, 100, 1000, CPU)
    batches = itertools.cycle(noise_batches(experiment, CPU, 100))
    assert train_for(trainer, batches, seconds=1e9, steps=3).steps == 3
    found = train_for(trainer, batches, seconds=1e-9)
    assert (found.steps, found.images_seen) == (1, 16)
    assert trainer.step == 4


def test_epochs_follow_each_other_and_can_be_left(tiny: Any) -> None:
    experiment = tiny()
    loader, sentence = open_loader(experiment, open_data(experiment.data).train, CPU)
    batches = endless_batches(loader)
    sizes = [batch.total for batch in itertools.islice(batches, 5)]
    batches.close()
    assert sizes == [16, 16, 8, 16, 16]
    assert "training process itself" in sentence


def test_views_that_are_made_between_steps_are_no_waiting() -> None:
    stretch = Stretch(
        10, 100, 2.0, gap_seconds=0.5, loop_waiting_seconds=1.5, interval_images_per_second=[50.0], bad_images=0
    )

    def measurement(views_seconds: float) -> TrainMeasurement:
        return TrainMeasurement("", "captured", stretch, 1.0, views_seconds, 1.0, [])

    assert measurement(0.0).waiting == pytest.approx(0.25)
    assert measurement(0.04).waiting == pytest.approx(0.05)
    assert measurement(0.06).waiting == 0


def test_noise_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("co2.bench.train._DIFFERENT_IMAGES", 4)
    pixels = noise_images(10, 8).pixels
    assert pixels.shape == (10, 3, 8, 8)
    assert np.array_equal(pixels[:4], pixels[4:8])
    assert np.array_equal(pixels[:2], pixels[8:])
    assert not np.array_equal(pixels[0], pixels[1])


def test_mistakes_are_told_plainly(tiny: Any) -> None:
    with pytest.raises(UserError, match="no --queue to vary"):
        run(tiny("simclr-small", network={"groups": 1}), TrainBenchmark(queue=(32, 64)))
    with pytest.raises(UserError, match="above 0"):
        TrainBenchmark(images=(0,))
    with pytest.raises(UserError, match="larger than the data set"):
        run(tiny(), TrainBenchmark(images=(4,), steps=1))
    for kind in ("captured", "compiled"):
        with pytest.raises(UserError, match=f"A step is only {kind} on a GPU. Use eager or auto"):
            run(tiny(execution={"step": kind}), TrainBenchmark(steps=1))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"data": "shapes", "images": (16,)}, "--data and --images"),
        ({"data": "digits", "queue": (32,)}, "--data and --queue"),
    ],
)
def test_only_one_thing_can_be_trained_on(settings: dict[str, Any], options: str) -> None:
    with pytest.raises(UserError, match=f"^{options} do not go together"):
        TrainBenchmark(**settings)


def test_data_of_the_command_line_is_told_from_that_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "train", "moco-small", "--data", "shapes", "--images", "9"])
    except SystemExit as end:  # newer releases of the parser ask for every setting that is wrong by itself
        code = end.code
    assert code == 2
    assert "--data and --images do not go together" in " ".join(
        re.sub(r"[│─╭╮╰╯]", " ", capsys.readouterr().err).split()
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["loss", "--rows", "256"], "python tools/loss.py"),
        (["input", "pictures"], "python tools/input.py"),
        (["train", "moco-small", "--make", "9"], "python tools/pictures.py"),
    ],
)
def test_what_has_moved_is_named(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert named in capsys.readouterr().err
    assert (Path(__file__).parents[2] / named.split()[1]).is_file()


@pytest.mark.gpu
def test_on_a_gpu_images_are_resident_and_the_step_is_captured(tiny: Any) -> None:
    experiment = tiny("moco-small", device="cuda", batch_size=64, data="shapes:1000:32", size=32)
    record = run(experiment, TrainBenchmark(steps=60))
    assert record["kind"] == record["parts_of"] == "captured"
    assert "on the GPU" in record["sentence"]
    assert 0 < record["views_seconds"] < record["step_seconds"]
    assert 0 <= record["waiting"] < 1
    swept = run(experiment, TrainBenchmark(images=(500, 2000), queue=(64,), steps=30))
    assert len(swept["sweep"]) == 3
