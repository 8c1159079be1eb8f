"""Where a record goes, refused before anything is measured if it cannot be written there; and what it was made with."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

from co2.bench.record import check_out, write_record
from co2.cli import main
from co2.errors import RunError, UserError


def measured(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("it was measured first")


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "step"],
        ["bench", "train", "--data", "shapes:40:16"],
        ["plan", "demo-moco", "--images", "5000"],
    ],
)
@pytest.mark.parametrize("out", ["file", "file/below", "file/record.json"])
def test_a_file_in_the_way_is_told_before_anything_is_measured(
    words: list[str], out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for work in ("step.measure_rates", "train.measure_rates", "plan.measure"):
        monkeypatch.setattr(f"co2.bench.{work}", measured)
    assert main([*words, "--device", "cpu", "--out", str(tmp_path / out)]) == 2
    assert f"{tmp_path / 'file'} is a file. Choose another --out." in capsys.readouterr().err


SMALL = [
    "--batch-size", "8", "--size", "16", "--network.backbone", "co2/resnet10-narrow", "--network.stem",
    "small-stride-2", "--method.dimension", "16", "--method.queue", "32", "--device", "cpu", "--workers", "0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "measuring"),
    [
        (["bench", "step", "moco-small", "--steps", "1"], "step.measure_step"),
        (["bench", "train", "moco-small", "--data", "shapes:40:16", "--steps", "1"], "train.measure_training"),
        (["bench", "train", "moco-small", "--images", "16", "--steps", "1"], "train.measure_training"),
        (["plan", "moco-small", "--images", "5000", "--seconds", "0.05"], "plan.measure"),
    ],
)
def test_a_record_names_the_commit_that_was_measured_and_not_a_later_one(
    words: list[str], measuring: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, function = measuring.split(".")
    original, heads = getattr(import_module(f"co2.bench.{room}"), function), ["measured"]

    def move_on(*arguments: Any, **named: Any) -> Any:
        heads.append("later")
        return original(*arguments, **named)

    monkeypatch.setattr("co2.bench.record.commit", lambda: heads[-1])
    monkeypatch.setattr(f"co2.bench.{measuring}", move_on)
    assert main([*words, *SMALL, "--out", str(tmp_path / "record.json")]) == 0
    assert heads == ["measured", "later"]
    assert json.loads((tmp_path / "record.json").read_text())["commit"] == "measured"


def test_places_for_a_record(tmp_path: Path) -> None:
    for good in ("", str(tmp_path), str(tmp_path / "new" / "folder"), str(tmp_path / "new" / "record.json")):
        check_out(good, "train")
    assert list(tmp_path.iterdir()) == []  # nothing is made before there is something to put there
    (tmp_path / "train.json").mkdir()
    for wrong in (tmp_path, tmp_path / "train.json"):
        with pytest.raises(UserError, match="which is a folder"):
            check_out(str(wrong), "train")
    with pytest.raises(RunError, match=r"The record cannot be written to .*: Is a directory"):
        write_record({}, str(tmp_path), "train")


def test_a_folder_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # to root nothing is forbidden
    with pytest.raises(UserError, match=r"Nothing can be written to .* another --out"):
        check_out(str(tmp_path / "new"), "train")
