"""tools/input.py on pictures that it makes, and these pictures."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import input as tool
import numpy as np
import pictures
import pytest
import torch
from input import InputBenchmark, main, measure_pieces, run
from pictures import made_pictures, parse_size, path_of, picture, write_pictures
from PIL import Image

from co2.data.open import open_data
from co2.errors import RunError, UserError
from co2.views import loader

SETTINGS = [
    "--batch-size", "4", "--size", "16", "--network.groups", "2", "--device", "cpu", "--workers", "0",
    "--seconds", "0.01",
]  # fmt: skip


def test_from_the_command_line_to_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, out = tmp_path / "pictures", tmp_path / "out"
    words = ["--make", "9", "--picture-size", "48x32", "--keep", str(kept), "--out", str(out), *SETTINGS]
    main([*words, "--inputs", "workers", "jpeg", "resident"])
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
    main([str(kept), *SETTINGS])
    main(["--make", "10", *words[2:]])
    assert {path: path.stat().st_mtime_ns for path in times} == times  # what is there is used again
    assert path_of(kept / "48x32", 9).exists()


@pytest.mark.parametrize("out", ["file", "file/below", "file/record.json"])
def test_a_file_in_the_way_is_told_before_anything_is_measured(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(tool, "measure_pieces", lambda *_: pytest.fail("it was measured first"))
    with pytest.raises(SystemExit, match=r"file is a file\. Choose another --out\."):
        main(["shapes:40:16", *SETTINGS, "--out", str(tmp_path / out)])


def test_a_record_names_the_commit_that_was_measured_and_not_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, measure_input = ["measured"], tool.measure_input
    monkeypatch.setattr("co2.bench.record.commit", lambda: heads[-1])
    monkeypatch.setattr(tool, "measure_input", lambda *how: heads.append("later") or measure_input(*how))
    main(["shapes:40:16", *SETTINGS, "--inputs", "workers", "--out", str(tmp_path / "record.json")])
    assert heads == ["measured", "later"]
    assert json.loads((tmp_path / "record.json").read_text())["commit"] == "measured"


def test_kept_pictures_are_as_many_and_as_large_as_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(make: int, size: str) -> tuple[int, set[tuple[int, ...]], str]:
        with made_pictures(make, size, str(tmp_path)) as data:
            source = open_data(data).train
            shapes = {tuple(source.image(index).shape) for index in range(len(source))}
            return len(source), shapes, capsys.readouterr().out.split(" in ")[0]

    assert read(6, "40x32") == (6, {(3, 32, 40)}, "Wrote 6 pictures of 40x32 pixels")
    assert read(6, "24x16") == (6, {(3, 16, 24)}, "Wrote 6 pictures of 24x16 pixels")
    assert read(4, "40X32") == (4, {(3, 32, 40)}, "Wrote 0 pictures of 40x32 pixels")
    with made_pictures(9, "40x32", str(tmp_path)) as data:
        assert len(open_data(data).train) == 9
    printed = capsys.readouterr().out
    assert printed.startswith("Wrote 3 pictures of 40x32 pixels")
    assert printed.endswith("; 6 were there already.\n")


def test_a_record_names_the_pictures_that_were_made(tmp_path: Path) -> None:
    for make, size in ((9, "40x32"), (6, "40x32"), (6, "24x16")):
        words = ["--make", str(make), "--picture-size", size, "--keep", str(tmp_path / "pictures")]
        main([*words, "--out", str(tmp_path), *SETTINGS])
        record: dict[str, Any] = json.loads((tmp_path / "input.json").read_text())
        assert (record["images"], record["data"]) == (make, f"{make} JPEGs of {size} pixels")


def test_pictures_that_cannot_be_kept_are_refused_in_a_sentence(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for keep in ("file", "file/below"):
        with pytest.raises(UserError, match=r"--keep needs a folder at .* but .*file is a file"):
            run(tiny(), InputBenchmark(make=3, keep=str(tmp_path / keep)), None)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pictures, "_write_whole", full)
    with pytest.raises(RunError, match=r"cannot be written to .*: No space left on device"):
        run(tiny(), InputBenchmark(make=3, keep=str(tmp_path / "kept")), None)


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


def test_the_pieces_are_measured_all_over_the_data(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "_SAMPLE", 4)
    write_pictures(tmp_path, 12, 32, 24, workers=0)
    source = open_data(str(tmp_path)).train
    for number in range(8):
        path_of(tmp_path, number).write_bytes(b"no picture at all")
    assert len(measure_pieces(tiny(), source, torch.device("cpu"))) == 3
    for number in range(12):
        path_of(tmp_path, number).write_bytes(b"no picture at all")
    assert list(measure_pieces(tiny(), source, torch.device("cpu"))) == ["reading (one process)"]
    for number in range(12):
        path_of(tmp_path, number).unlink()
    assert measure_pieces(tiny(), source, torch.device("cpu")) == {}


def test_on_a_cpu_views_are_timed_as_its_workers_make_them(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what makes them on a GPU, which is slower there than the whole way of an image."""
    made = []
    write_views = loader.write_views
    monkeypatch.setattr(
        tool, "write_views", lambda *how: made.append([view.shape for view in how[0]]) or write_views(*how)
    )
    measure_pieces(tiny(), open_data("shapes:6:24").train, torch.device("cpu"))
    assert made == [[(6, 3, 16, 16)] * 2]


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
    experiment = tiny("moco-v2", device="cuda", batch_size=16, workers=2, size=64)
    settings = InputBenchmark(
        make=64, picture_size="160x120", keep=str(tmp_path), inputs=("resident", "jpeg", "workers"), seconds=0.5
    )
    record = run(experiment, settings, None)
    assert all(one["images_per_second"] > 0 and one["bad_images"] == 0 for one in record["inputs"])
    assert "decoding (on the GPU)" in record["pieces_images_per_second"]
