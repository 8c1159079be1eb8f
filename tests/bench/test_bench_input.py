"""`co2 bench input` on pictures that it makes, and these pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from co2.bench import pictures
from co2.bench.input import measure_pieces, run
from co2.bench.pictures import parse_size, path_of, picture, write_pictures
from co2.bench.specification import InputBenchmark
from co2.cli import main
from co2.data.open import open_data
from co2.errors import UserError

SETTINGS = [
    "--batch-size", "4", "--views.size", "16", "--encoder.groups", "2", "--device", "cpu", "--workers", "0",
    "--seconds", "0.01",
]  # fmt: skip


def test_from_the_command_line_to_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, out = tmp_path / "pictures", tmp_path / "out"
    words = ["bench", "input", "--make", "9", "--size", "48x32", "--keep", str(kept), "--out", str(out), *SETTINGS]
    assert main([*words, "--inputs", "workers", "jpeg", "resident"]) == 0
    record: dict[str, Any] = json.loads((out / "input.json").read_text())
    assert record["images"] == 9
    assert [one["asked"] for one in record["inputs"]] == ["workers", "jpeg", "resident"]
    for one in record["inputs"]:
        assert one["images_per_second"] == pytest.approx(one["images"] / one["seconds"])
        assert one["images"] > 0
        assert one["bad_images"] == 0
    pieces = record["pieces_images_per_second"]
    assert [name.split(" (")[0] for name in pieces] == ["reading", "decoding", "making views"]
    assert "JPEGs are read ahead" in capsys.readouterr().out

    times = {path: path.stat().st_mtime_ns for path in kept.rglob("*.jpg")}
    assert len(times) == 9
    assert main(["bench", "input", str(kept), *SETTINGS]) == 0
    assert main([*words[:2], "--make", "10", *words[4:]]) == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times  # what is there is used again
    assert path_of(kept, 9).exists()


def test_pictures_are_like_photographs_to_a_decoder(tmp_path: Path) -> None:
    write_pictures(tmp_path, 3, 480, 384, workers=0)
    sizes = [path_of(tmp_path, number).stat().st_size for number in range(3)]
    assert all(35_000 < size < 65_000 for size in sizes)
    with Image.open(path_of(tmp_path, 0)) as image:
        assert (image.size, image.mode, image.format) == ((480, 384), "RGB", "JPEG")
    first, second, again = (np.asarray(picture(number, 480, 384)) for number in (0, 1, 0))
    assert np.array_equal(first, again)
    assert np.abs(first.astype(int) - second).mean() > 20


def test_pictures_are_written_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_WORTH_PROCESSES", 1)
    monkeypatch.setattr(pictures, "_AT_ONCE", 2)
    told: list[tuple[int, int]] = []
    write_pictures(tmp_path, 5, 32, 24, workers=2, progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (4, 5), (5, 5)]
    assert len(list(tmp_path.rglob("*.jpg"))) == 5
    assert not list(tmp_path.rglob("*.part"))


def test_the_pieces_of_the_work_leave_bad_images_out(tmp_path: Path, tiny: Any) -> None:
    write_pictures(tmp_path, 4, 32, 24, workers=0)
    path_of(tmp_path, 1).write_bytes(b"no picture at all")
    found = measure_pieces(tiny(), open_data(str(tmp_path)).train, torch.device("cpu"))
    assert len(found) == 3
    assert all(speed > 0 for speed in found.values())


def test_images_in_memory_are_neither_read_nor_decoded(tiny: Any) -> None:
    found = measure_pieces(tiny(), open_data("digits").train, torch.device("cpu"))
    assert list(found) == ["making views (on the CPU)"]


def test_mistakes_are_told_plainly(tiny: Any) -> None:
    with pytest.raises(UserError, match="Say which images to read"):
        run(tiny(), InputBenchmark(), None)
    with pytest.raises(UserError, match="Say which images to read"):
        run(tiny(), InputBenchmark(make=3), "digits")
    for wrong in ("480", "480x", "x384", "4x4", "axb"):
        with pytest.raises(UserError, match="WIDTHxHEIGHT"):
            parse_size(wrong)
    assert parse_size("480X384") == (480, 384)


@pytest.mark.gpu
def test_on_a_gpu_every_way_gives_batches(tmp_path: Path, tiny: Any) -> None:
    experiment = tiny("moco-v2", device="cuda", batch_size=16, workers=2, views={"size": 64})
    settings = InputBenchmark(
        make=64, size="160x120", keep=str(tmp_path), inputs=("resident", "jpeg", "workers"), seconds=0.5
    )
    record = run(experiment, settings, None)
    assert all(one["images_per_second"] > 0 and one["bad_images"] == 0 for one in record["inputs"])
    assert "decoding (on the GPU)" in record["pieces_images_per_second"]
