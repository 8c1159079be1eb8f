"""`co2 plan`: from a measurement to hours, memory and energy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from co2 import recipes
from co2.bench import power
from co2.bench.plan import Speed, answer, foresee, plan, with_bearable_batch
from co2.bench.power import PowerMeter, read_watts
from co2.bench.specification import PlanSettings
from co2.cli import main
from co2.errors import UserError
from co2.measures.numbers import duration

CPU = torch.device("cpu")
SMALL = [
    "--batch-size", "8", "--size", "16", "--network.backbone", "co2/resnet10-narrow", "--network.stem",
    "small-stride-2", "--method.dimension", "16", "--method.queue", "32", "--device", "cpu", "--workers", "0",
    "--seconds", "0.05",
]  # fmt: skip


def test_an_answer_for_imagenet() -> None:
    speed = Speed(5200.0, 60.0, 24.3, watts=650.0, batch_size=256, input=None)
    forecast = foresee(speed, images=1_281_167, epochs=200)
    assert forecast.seconds == pytest.approx(60 + 1_281_167 * 200 / 5200)
    assert forecast.kilowatt_hours == pytest.approx(0.65 * forecast.seconds / 3600)
    first, *others = answer(recipes.get("moco-v2"), forecast, speed, "NVIDIA H200", on_gpu=True)
    assert first == (
        "moco-v2 with resnet50, 1,281,167 images, 200 epochs: about 13.7 hours on this machine's NVIDIA H200 "
        "(5,200 images/s), 24.3 GiB of GPU memory, about 8.9 kWh."
    )
    assert others == [
        "Reading images is not part of it: with --data PATH it is measured, too.",
        "The energy is that of the GPU alone, at 650 W.",
        "Monitoring and checkpoints come on top.",
    ]


def test_what_is_not_known_is_said() -> None:
    speed = Speed(10.0, 1.0, 2.0, watts=None, batch_size=32, input="Images come by post.", waiting=0.25)
    lines = answer(recipes.get("moco-v2"), foresee(speed, 1000, 2), speed, "CPU (2 threads)", on_gpu=False)
    assert "2.0 GiB of memory." in lines[0]
    assert lines[1] == "Images come by post. Steps waited for them for 25.0% of the time."
    assert "batches of 32" in lines[2]
    assert "Energy is not known" in lines[3]


def test_views_that_grow_are_taken_for_large_ones() -> None:
    speed = Speed(10.0, 1.0, 2.0, watts=None, batch_size=256, input=None)
    growing = recipes.get("moco-v2").edit(earlier_sizes=(128, 176))
    lines = answer(growing, foresee(speed, 1000, 200), speed, "CPU (2 threads)", on_gpu=False)
    assert "All views are taken to have 224 pixels; with smaller ones at first it takes less time." in lines


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (42, "42 seconds"),
        (600, "10 minutes"),
        (49_000, "13.6 hours"),
        (10 * 86_400, "10.0 days (240 hours)"),
    ],
)
def test_times_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_from_the_command_line_to_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "moco-small", *SMALL, "--epochs", "3", "--out", str(tmp_path)]
    assert main([*words, "--images", "5000"]) == 0
    assert "5,000 images, 3 epochs" in capsys.readouterr().out
    record: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    speed, forecast = record["speed"], record["forecast"]
    assert forecast["seconds"] == pytest.approx(speed["start_seconds"] + 15_000 / speed["images_per_second"])
    assert forecast["kilowatt_hours"] is None

    assert main([*words, "--data", "shapes:40:16"]) == 0
    printed = capsys.readouterr().out
    assert "40 images, 3 epochs" in printed
    assert "Images are read and augmented" in printed


def test_a_slow_step_is_measured_on_a_smaller_batch(tiny: Any) -> None:
    experiment = tiny(batch_size=64, network={"groups": 4})
    assert with_bearable_batch(experiment, CPU, step_seconds=1e-9).batch_size == 8
    assert with_bearable_batch(experiment, CPU, step_seconds=1e9).batch_size == 64


def test_power_comes_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "1234"

    asked: list[list[str]] = []

    def smi(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, stdout=said)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(power.subprocess, "run", smi)
    device = torch.device("cuda")
    said = "612.34\n"
    assert read_watts(device) == 612.34
    assert "--id=GPU-1234" in asked[0]
    said = "[N/A]\n"
    assert read_watts(device) is None
    assert read_watts(CPU) is None


def test_a_meter_takes_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([100.0, 300.0, None])
    monkeypatch.setattr(power, "read_watts", lambda device: next(readings))
    monkeypatch.setattr(power, "_EVERY", 0.0)
    meter = PowerMeter(torch.device("cuda"))
    with meter:
        meter._thread.join(10)
    assert meter.watts == 200


def test_a_meter_without_readings_says_nothing() -> None:
    with PowerMeter(CPU) as meter:
        pass
    assert meter.watts is None


def test_mistakes_are_told_plainly(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="how many images there will be"):
        plan(tiny(), PlanSettings())
    with pytest.raises(UserError, match="larger than the data set of 4 images"):
        plan(tiny(), PlanSettings(images=4))
    with pytest.raises(UserError, match="A step is only captured on a GPU"):
        plan(tiny(execution={"step": "captured"}), PlanSettings(images=40))
    with pytest.raises(UserError, match="--images must be above 0"):
        PlanSettings(images=0)
    assert main(["plan", "--images", "5"]) == 2
    assert "Name the recipe first" in capsys.readouterr().err
    assert main(["plan"]) == 0
    assert "usage: co2 plan RECIPE" in capsys.readouterr().out


def test_a_batch_that_is_advised_works(tiny: Any) -> None:
    experiment = tiny("demo-moco", network={"groups": 4})
    with pytest.raises(UserError, match=r"data set of 10 images\. Use --batch-size 8, or more images"):
        plan(experiment, PlanSettings(images=10))
    assert plan(experiment.edit(batch_size=8), PlanSettings(images=10, seconds=0.05))["forecast"]["images"] == 10


@pytest.mark.gpu
def test_on_a_gpu_memory_is_the_gpus(tiny: Any) -> None:
    record = plan(tiny("moco-small", device="cuda", batch_size=64), PlanSettings(images=1000, seconds=2.0))
    assert 0 < record["speed"]["memory_gib"] < 10
    assert record["speed"]["watts"] is None or 20 < record["speed"]["watts"] < 2000
