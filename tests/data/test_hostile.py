"""Every hostile file has the outcome that its table states, on every way into the program."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hostile
import numpy as np
import pytest
import torch
from hostile import CORPUS, HEIGHT, PIXELS, WIDTH, Hostile, saved
from PIL import Image
from shards import write_shards

from co2.data.decode import decode_image, read_image
from co2.data.open import open_data
from co2.data.shards import ShardSource
from co2.data.source import BadImage, ImageSource, printable
from co2.engine.pretrain import pretrain
from co2.views.loader import ViewLoader, plain_batches
from co2.views.view import View

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "RELIABILITY.md"
GOOD_FOR_EACH = 5
FOUND = [file for file in CORPUS if not file.is_folder]  # a folder is entered, not read, where folders are looked at


def identity(file: Hostile) -> str:
    return printable(file.name)[:40].encode("ascii", "backslashreplace").decode()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = os.fsencode(tmp_path_factory.mktemp("corpus"))
    for file in CORPUS:
        file.make(os.path.join(folder, file.name))
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hostile files among enough good ones, and below one folder, so that there are no labels."""
    root = tmp_path_factory.mktemp("mixed")
    good = saved("PNG")
    for number, file in enumerate(CORPUS):
        folder = root / "all" / f"{number:03d}"
        folder.mkdir(parents=True)
        file.make(os.path.join(os.fsencode(folder), file.name))
        for copy in range(GOOD_FOR_EACH):
            (folder / f"good-{copy}.png").write_bytes(good)
    return root


def place_in(mixed: Path, file: Hostile) -> str:
    """How a hostile file of the mixture is called when people are told about it."""
    return printable(os.path.join(os.fsencode(mixed), b"all", b"%03d" % CORPUS.index(file), file.name))


def assert_named(bad: dict[str, str], expected: dict[str, Hostile]) -> None:
    """`bad`, reasons by name, names those of `expected` that are to be skipped, for their reasons, and no others."""
    assert set(bad) == {name for name, file in expected.items() if file.reason is not None}
    for name, reason in bad.items():
        assert re.fullmatch(str(expected[name].reason), reason), f"{name}: {reason}"


def test_the_documentation_has_the_same_table() -> None:
    assert hostile.table() in DOCUMENTATION.read_text(encoding="utf-8"), "run python tests/data/hostile.py and paste it"
    assert len(CORPUS) >= 40
    assert len({file.name for file in CORPUS}) == len(CORPUS)


@pytest.mark.parametrize("file", CORPUS, ids=identity)
def test_reading_a_file(corpus: bytes, file: Hostile) -> None:
    if file.reason is None:
        image = read_image(os.path.join(corpus, file.name))
        assert (image.shape, image.dtype) == ((3, HEIGHT, WIDTH), torch.uint8)
    else:
        with pytest.raises(BadImage) as refusal:
            read_image(os.path.join(corpus, file.name))
        assert re.fullmatch(file.reason, str(refusal.value)), str(refusal.value)


@pytest.mark.parametrize("name", [*(f"turned-{number}.jpg" for number in range(1, 10)), "animated.gif", "animated.png"])
def test_what_is_read_is_the_picture(corpus: bytes, name: str) -> None:
    image = read_image(os.path.join(corpus, name.encode())).permute(1, 2, 0).numpy()  # [32, 48, 3]
    middle = np.s_[8::16, 12::24]
    assert np.abs(image[middle].astype(int) - PIXELS[middle].astype(int)).max() <= 6


def bad_images(source: ImageSource, workers: int) -> dict[str, str]:
    loader = ViewLoader(source, (View(size=8),), batch_size=32, seed=0, workers=workers)
    return {source.describe(index): reason for batch in loader.epoch(0) for index, reason in batch.bad}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder(mixed: Path, workers: int) -> None:
    source = open_data(str(mixed)).train
    assert len(source) == GOOD_FOR_EACH * len(CORPUS) + len(FOUND)
    assert_named(bad_images(source, workers), {place_in(mixed, file): file for file in FOUND})


def test_a_folder_for_evaluation(mixed: Path) -> None:
    source = open_data(str(mixed)).train
    seen, bad = 0, {}
    for batch in plain_batches(source, size=8, batch_size=64, workers=0):
        seen += len(batch.indices)
        bad |= {source.describe(index): reason for index, reason in batch.bad}
    assert seen + len(bad) == len(source)
    assert_named(bad, {place_in(mixed, file): file for file in FOUND})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_list(mixed: Path, tmp_path: Path, workers: int) -> None:
    listed = [file for file in CORPUS if file.in_a_list]
    assert len(CORPUS) - len(listed) <= 5  # names with line ends and the like
    places = [os.path.join(os.fsencode(mixed), b"all", b"%03d" % CORPUS.index(file)) for file in listed]
    lines = []
    for file, place in zip(listed, places, strict=True):
        lines += [os.path.join(place, file.name), os.path.join(place, b"good-0.png")]
    (tmp_path / "list.txt").write_bytes(b"\n".join(lines))
    source = open_data(str(tmp_path / "list.txt")).train
    assert len(source) == 2 * len(listed)
    assert_named(bad_images(source, workers), {place_in(mixed, file): file for file in listed})


@pytest.fixture(scope="module")
def sharded(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardSource, dict[int, Hostile], set[str]]:
    """The mixture as shards, which hostile file is which image of them, and what was left out."""
    out = tmp_path_factory.mktemp("sharded") / "shards"
    left_out = write_shards(mixed, out, count=200)
    folder = open_data(str(mixed)).train
    by_name = {place_in(mixed, file): file for file in FOUND}
    assert_named(left_out, {name: by_name[name] for name in left_out})
    source = open_data(str(out)).train
    assert isinstance(source, ShardSource)
    assert len(source) + len(left_out) == len(folder)
    where = {int(source.names[place].split(b".")[0]): place for place in range(len(source))}
    files = {
        where[index]: by_name[folder.describe(index)]
        for index in range(len(folder))
        if index in where and folder.describe(index) in by_name
    }
    return source, files, set(left_out)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards(sharded: tuple[ShardSource, dict[int, Hostile], set[str]], workers: int) -> None:
    source, files, left_out = sharded
    assert len(files) + len(left_out) == len(FOUND)
    assert len(left_out) == 8  # what has no bytes: links to nowhere, pipes and so on, and the one that has too many
    assert_named(bad_images(source, workers), {source.describe(place): file for place, file in files.items()})


def test_a_whole_run_ends_well_and_names_exactly_the_bad_ones(mixed: Path, tmp_path: Path, tiny) -> None:
    run = pretrain(tiny(epochs=1, batch_size=64, method={"queue": 128}), data=mixed, out=tmp_path / "run")
    assert (run / "backbone.safetensors").is_file()
    lines = (run / "bad_images.txt").read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    named = dict(line.split("\t") for line in lines)  # one line is one image, whatever it is called
    assert len(named) == len(lines)
    assert_named(named, {place_in(mixed, file): file for file in FOUND})


# What happens while a file is read.


@contextlib.contextmanager
def after_looking_at(path: Path, act, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do something to a file between the look at what it is and its opening."""
    stat = os.stat

    def stat_and_act(asked, **others):
        information = stat(asked, **others)
        if asked == path:
            act()
        return information

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat_and_act)
        yield


def test_a_file_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved("PNG"))
    with after_looking_at(path, path.unlink, monkeypatch), pytest.raises(BadImage, match="does not exist"):
        read_image(path)


def test_a_file_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = tmp_path / "a.png", saved("PNG")
    path.write_bytes(whole[:50])
    with after_looking_at(path, lambda: path.write_bytes(whole), monkeypatch):
        assert read_image(path).shape == (3, HEIGHT, WIDTH)
    with (
        after_looking_at(path, lambda: os.truncate(path, 1 << 40), monkeypatch),
        pytest.raises(BadImage, match="larger than"),
    ):
        read_image(path)


def test_a_file_that_is_exchanged_for_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved("PNG"))

    def exchange() -> None:
        path.unlink()
        os.mkfifo(path)

    with after_looking_at(path, exchange, monkeypatch), pytest.raises(BadImage, match="not a regular file"):
        read_image(path)


def test_a_shard_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.png").write_bytes(saved("PNG"))
    write_shards(tmp_path / "in", tmp_path / "out")
    source = open_data(str(tmp_path / "out")).train
    os.truncate(tmp_path / "out" / "train-000000.tar", 1500)
    assert source.image(0).shape == (3, HEIGHT, WIDTH)
    for index in (1, 3):
        with pytest.raises(BadImage, match="truncated file"):
            source.image(index)


def test_a_file_without_permission(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("closed")
    path = folder / "secret.png"
    path.write_bytes(saved("PNG"))
    path.chmod(0)
    with not_the_administrator(folder), pytest.raises(BadImage, match="no permission to read it"):
        read_image(path)


@contextlib.contextmanager
def not_the_administrator(folder: Path) -> Iterator[None]:
    """Who may read everything."""
    if os.geteuid() != 0:
        yield
        return
    for parent in (folder, *folder.parents):
        if parent.is_relative_to(folder.parents[1]):
            parent.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# Memory and time.

MEASURE = """
import os, sys
from co2.data.decode import read_image
from co2.data.source import BadImage
folder = os.fsencode(sys.argv[1])
def most():  # not getrusage's, which a new process inherits from the one that started it
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("VmHWM"))
before = most()
for name in sorted(os.listdir(folder)):
    try:
        read_image(os.path.join(folder, name))
    except BadImage:
        pass
    after = most()
    print(after - before, ascii(name))
"""


on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells how much memory was taken")


def memory_for(folder: str, seconds: float) -> dict[str, int]:
    """MiB by which reading each file, one after the other, raises the most that a process ever took."""
    command = [sys.executable, "-c", MEASURE, folder]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    return {name: int(number) for number, name in (line.split(" ", 1) for line in result.stdout.splitlines())}


@on_linux
def test_no_file_of_the_corpus_takes_much_memory_or_hangs(corpus: bytes) -> None:
    taken = memory_for(os.fsdecode(corpus), seconds=120)
    assert len(taken) >= 100
    assert max(taken.values()) < 256


@on_linux
@pytest.mark.slow
def test_the_largest_pictures_that_are_read_take_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    """Just below the limit of pixels, in files of a few kilobytes: each is unpacked within 2.5 GiB."""
    size = (12_800, 10_000)
    for name, mode, colour, kind, options in (
        ("alpha.png", "RGBA", (1, 2, 3, 4), "PNG", {}),
        ("sixteen.png", "I;16", 500, "PNG", {}),
        ("solid.webp", "RGB", (9, 9, 9), "WEBP", {"lossless": True, "method": 0, "quality": 0}),
        ("palette.png", "P", 0, "PNG", {"transparency": 0}),
        ("inks.jpg", "CMYK", (9, 9, 9, 9), "JPEG", {}),
        ("real.tif", "F", 9.5, "TIFF", {"compression": "tiff_adobe_deflate"}),
    ):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        Image.new(mode, size, colour).save(folder / name, kind, **options)
        assert 800 < max(memory_for(str(folder), seconds=300).values()) < 2560
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "scans.jpg").write_bytes(hostile.jpeg_of_many_scans(49, side=11_312))
    assert max(memory_for(str(tmp_path / "scans"), seconds=300).values()) < 2560


def test_scans_are_counted_where_they_cost(tmp_path: Path) -> None:
    few = decode_image(hostile.jpeg_of_many_scans(49))
    assert few.shape == (3, 64, 64)
    with pytest.raises(BadImage, match="more than 50 scans"):
        decode_image(hostile.jpeg_of_many_scans(50))
