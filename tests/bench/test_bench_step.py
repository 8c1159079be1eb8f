"""`co2 bench step`, end to end on a small network, and its arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from co2.bench import step
from co2.bench.roofline import step_work
from co2.bench.specification import StepBenchmark
from co2.bench.step import parts_table, pays_from, run
from co2.cli import main
from co2.errors import UserError
from co2.experiment import Experiment

SMALL = [
    "--batch-size", "8", "--size", "16", "--network.backbone", "co2/resnet10-narrow", "--network.stem",
    "small-stride-2", "--method.dimension", "16", "--method.queue", "32", "--device", "cpu",
]  # fmt: skip
PARTS = ["views", "forward", "backward", "optimiser", "update", "between steps"]


def test_from_the_command_line_to_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "moco-small", *SMALL, "--steps", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    record: dict[str, Any] = json.loads((tmp_path / "step.json").read_text())
    assert record["experiment"]["batch_size"] == 8
    assert record["versions"]["torch"] == torch.__version__
    assert {"command", "commit", "date", "device", "rates"} <= set(record)
    assert {"processor", "cores", "threads"} <= set(record["device"])
    (kind,) = record["kinds"]
    assert kind["kind"] == kind["parts_of"] == "eager"
    assert len(kind["seconds"]) == 5
    assert kind["images_per_second"] == pytest.approx(8 / kind["step_seconds"])
    assert kind["slowest_images_per_second"] <= kind["images_per_second"] <= kind["fastest_images_per_second"]
    assert kind["share_of_bound"] == pytest.approx(kind["images_per_second"] / record["bound"]["images_per_second"])
    assert list(kind["shares"]) == PARTS
    assert set(record["bound"]["by_part"]) == set(PARTS[:-1])
    assert kind["memory_gib"] > 0
    for words in ("images/s", "of the bound", "backward", str(tmp_path / "step.json")):
        assert words in printed


def test_what_is_measured_is_said_before_it_is(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "measure_step", measure)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), StepBenchmark(steps=1))
    assert "ms at least: " in capsys.readouterr().out


def test_parts_add_up_to_the_step(tiny: Any) -> None:
    record = run(tiny(), StepBenchmark(steps=5))
    (kind,) = record["kinds"]
    # Generous, because the two are measured one after the other on a machine that may be busy.
    assert 0.3 < sum(kind["parts"].values()) / kind["step_seconds"] < 2


@pytest.mark.parametrize("recipe", ["simclr-small", "insdisc-small"])
def test_every_method_has_the_same_parts(recipe: str, tmp_path: Path) -> None:
    words = [word for word in SMALL if word not in ("--method.queue", "32")]  # which they do not have
    assert main(["bench", "step", recipe, *words, "--steps", "1", "--out", str(tmp_path / "a.json")]) == 0
    (kind,) = json.loads((tmp_path / "a.json").read_text())["kinds"]
    assert list(kind["shares"]) == PARTS


@pytest.mark.parametrize(("precision", "number_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_bound_is_that_of_the_precision(
    tiny: Any, capsys: pytest.CaptureFixture[str], precision: str, number_bytes: int
) -> None:
    experiment = tiny(execution={"precision": precision})
    bound = run(experiment, StepBenchmark(steps=1))["bound"]
    assert bound["bytes"] == sum(work.bytes for work in step_work(experiment, number_bytes))
    assert f"in {precision}." in capsys.readouterr().out


def test_when_a_slow_start_pays() -> None:
    # eager: 1 s, then 0.5 s a step; compiled: 61 s, then 0.2 s: after 200 steps beyond the first four
    (row,) = pays_from({"eager": (1.0, 0.5), "compiled": (61.0, 0.2)}, batch=10)
    assert (row["kind"], row["against"]) == ("compiled", "eager")
    assert row["pays_from_images"] == pytest.approx(2040)
    steps = row["pays_from_images"] / 10 - 4
    assert 1.0 + 0.5 * steps == pytest.approx(61.0 + 0.2 * steps)
    (never,) = pays_from({"captured": (5.0, 0.2), "compiled": (60.0, 0.3)}, batch=10)
    assert (never["kind"], never["pays_from_images"]) == ("compiled", None)
    assert len(pays_from({"a": (1.0, 3.0), "b": (2.0, 2.0), "c": (3.0, 1.0)}, batch=2)) == 3


def test_a_part_stands_beside_its_bound() -> None:
    rows = parts_table({"shares": {"forward": 0.5, "between steps": 0.5}, "step_seconds": 2.0}, {"forward": 0.6})
    assert rows[0]["at least, ms"] == pytest.approx(600)
    assert rows[1] == {"part": "between steps", "ms": 1000.0, "share": "50.0%", "at least, ms": None}


def test_mistakes_are_told_plainly(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="only captured on a GPU"):
        run(tiny(), StepBenchmark(kinds=("eager", "captured")))
    with pytest.raises(UserError, match="--steps must be above 0"):
        StepBenchmark(steps=0)
    assert main(["bench", "stepp"]) == 2
    assert "Did you mean 'step'" in capsys.readouterr().err
    assert main(["bench", "step", "moco-smal"]) == 2
    assert "There is no recipe 'moco-smal'" in capsys.readouterr().err
    assert main(["bench"]) == 0
    assert "co2 bench step" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_on_a_gpu_every_kind_of_step_has_parts(kind: Any, tiny: Any) -> None:
    experiment: Experiment = tiny("moco-small", device="cuda", batch_size=64)
    (found,) = run(experiment, StepBenchmark(kinds=(kind,), steps=20))["kinds"]
    assert found["kind"] == found["parts_of"] == kind
    assert not found["notes"]
    assert list(found["shares"]) == PARTS
    assert all(seconds > 0 for seconds in found["parts"].values())
    assert sum(found["parts"].values()) < 2 * found["step_seconds"]


@pytest.mark.gpu
@pytest.mark.slow
def test_a_compiled_step_has_the_same_parts(tiny: Any) -> None:
    experiment: Experiment = tiny("moco-small", device="cuda", batch_size=64)
    (found,) = run(experiment, StepBenchmark(kinds=("compiled",), steps=5))["kinds"]
    assert found["kind"] == "compiled"
    assert list(found["shares"]) == PARTS


def test_help_and_mistakes_are_told_without_torch() -> None:
    code = (
        "import sys\nfrom co2.cli import main\n"
        "main(['bench']); main(['plan']); main(['bench', 'stepp']); main(['bench', 'step', 'moco-smal'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
