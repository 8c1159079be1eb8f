"""Writing packs: what becomes of each image, and that no moment to be killed at is a bad one."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import CORPUS, HEIGHT, WIDTH, saved
from PIL import Image
from shards import write_shards

from co2.cli import main
from co2.data import pack_writer
from co2.data.decode import decode_image
from co2.data.open import open_data
from co2.data.pack_writer import Packed, write_pack
from co2.data.packed import MANIFEST, UNFINISHED, open_pack_splits, verify_pack
from co2.data.source import ImageSource
from co2.errors import RunError, UserError

NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
SMOOTH = np.linspace(0, 255, 300 * 500 * 3).reshape(300, 500, 3).astype(np.uint8)
SMALL = SMOOTH[::8, ::9] // 2 + np.arange(56, dtype=np.uint8)[:, None]  # [38, 56, 3]


def pictures(folder: Path, count: int = 12) -> Path:
    """PNG files with one among them that is none."""
    folder.mkdir(parents=True)
    for number in range(count):
        size = (20 + number, 30)
        Image.fromarray(NOISE[:30, : 20 + number]).resize(size).save(folder / f"{number:03d}.png")
    (folder / f"{count // 2:03d}-bad.png").write_bytes(b"no image")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def packed(tmp_path: Path, *files: bytes, **settings: int) -> list[bytes]:
    """What becomes of some files in a pack."""
    (tmp_path / "in").mkdir()
    for number, data in enumerate(files):
        (tmp_path / "in" / f"{number}.img.jpg").write_bytes(data)
    write_pack(tmp_path / "in", tmp_path / "out", **settings, workers=0)
    source = open_data(str(tmp_path / "out")).train
    return [source.encoded(index)[0] for index in range(len(source))]


def pixels(data: bytes) -> torch.Tensor:
    return decode_image(data).to(torch.float32)  # [3, H, W]


# One image.


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((500, 300), (107, 64)),
        ((300, 500), (64, 107)),
        ((64, 900), (64, 900)),
        ((65, 65), (64, 64)),
        ((30, 20), (30, 20)),  # not enlarged
        ((1, 40_000), (1, 40_000)),
        ((20_000, 66), (19_394, 64)),
    ],
)
def test_the_shorter_side_is_resized_and_nothing_enlarged(
    tmp_path: Path, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    picture = Image.fromarray(SMOOTH).resize(size)
    (data,) = packed(tmp_path, saved("PNG", picture), shorter_side=64, quality=93)
    expectation = picture if size == expected else picture.resize(expected, Image.Resampling.BICUBIC)
    assert data == saved("JPEG", expectation, quality=93)
    with Image.open(io.BytesIO(data)) as image:
        assert (image.size, image.mode) == (expected, "RGB")


def test_resizing_does_not_alias(tmp_path: Path) -> None:
    """Lines of one pixel, too fine for the smaller picture, become an even grey and no broad bands."""
    lines = np.zeros((500, 500, 3), dtype=np.uint8)
    lines[::2] = 255
    (data,) = packed(tmp_path, saved("PNG", lines), shorter_side=128)
    inner = pixels(data)[:, 4:-4, 4:-4]
    assert inner.std() < 8  # bands would have a standard deviation of 90 and more
    assert 120 < inner.mean() < 135


def test_a_plain_jpeg_that_is_small_enough_is_copied_byte_for_byte(tmp_path: Path) -> None:
    upright = Image.Exif()
    upright[0x0112] = 1
    files = [
        saved("JPEG", NOISE, quality=31),
        saved("JPEG", NOISE, quality=99, subsampling=0),
        saved("JPEG", NOISE, subsampling=1, optimize=True, comment=b"made by hand"),
        saved("JPEG", NOISE, exif=upright),
    ]
    assert packed(tmp_path, *files, shorter_side=40) == files


def rewritten() -> dict[str, bytes]:
    """JPEGs that are not plain."""
    turned = Image.Exif()
    turned[0x0112] = 3
    plain = saved("JPEG", SMALL)
    frame = plain.index(b"\xff\xc0")
    unusual = plain[: frame + 11] + b"\x14" + plain[frame + 12 :]  # 1 x 4 samples
    return {
        "too large": saved("JPEG", SMOOTH),
        "progressive": saved("JPEG", SMALL, progressive=True),
        "turned": saved("JPEG", SMALL, exif=turned),
        "grey": saved("JPEG", Image.fromarray(SMALL).convert("L")),
        "for printers": saved("JPEG", Image.fromarray(SMALL).convert("CMYK")),
        "stored as RGB": saved("JPEG", SMALL, keep_rgb=True),
        "said to be RGB by Adobe": plain[:2] + b"\xff\xee\0\x0eAdobe\0\x64" + bytes(5) + plain[2:],
        "with a large note": saved("JPEG", SMALL, comment=bytes(65_000)) + bytes(10_000),
        "unusual samples": unusual,
        "with fill bytes": plain[:2] + b"\xff" + plain[2:],
    }


@pytest.mark.parametrize("kind", rewritten())
def test_another_jpeg_is_rewritten(tmp_path: Path, kind: str) -> None:
    before = rewritten()[kind]
    expected = decode_image(before)
    (after,) = packed(tmp_path, before, shorter_side=100)
    assert after != before
    assert pack_writer._is_plain_jpeg(after, *decode_image(after).shape[1:])
    if kind not in ("too large", "unusual samples"):  # the latter is hardly a picture
        assert decode_image(after).shape == expected.shape
        assert (pixels(after) - expected).abs().mean() < 2


def test_any_header_is_plain_or_not(tmp_path: Path) -> None:
    good = saved("JPEG", NOISE, comment=b"note")
    assert pack_writer._is_plain_jpeg(good, 40, 60)
    assert not pack_writer._is_plain_jpeg(good, 60, 40)
    for place in range(min(700, len(good))):
        pack_writer._is_plain_jpeg(good[:place], 40, 60)
        pack_writer._is_plain_jpeg(good[:place] + b"\xff\x00\xff\xc0" + good[place:], 40, 60)


def test_what_no_jpeg_can_hold_is_left_out(tmp_path: Path) -> None:
    files = packed(tmp_path, saved("PNG", Image.new("RGB", (65_520, 2))), saved("PNG", NOISE))
    assert len(files) == 1
    name, reason = (tmp_path / "out" / "bad_images.txt").read_text().rstrip("\n").split("\t")
    assert name.endswith("0.img.jpg")
    assert reason == "longer than 65,500 pixels, and no JPEG can be"


def test_hostile_files_are_packed_or_named(tmp_path: Path) -> None:
    """The corpus of every other way into the program, with the same outcome."""
    folder = os.fsencode(tmp_path / "in")
    os.mkdir(folder)
    expected = {}
    for number, file in enumerate(CORPUS):
        inside = os.path.join(folder, b"%03d" % number)
        os.mkdir(inside)
        file.make(os.path.join(inside, file.name))
        if not file.is_folder:
            expected[number] = file
    (tmp_path / "in" / "good.png").write_bytes(saved("PNG"))  # beside the folders, so that they are no classes
    result = write_pack(tmp_path / "in", tmp_path / "out", workers=2)
    lines = (tmp_path / "out" / "bad_images.txt").read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    bad = {int(line[len(f"{tmp_path}/in/") :][:3]): line.split("\t")[1] for line in lines}
    assert set(bad) == {number for number, file in expected.items() if file.reason is not None}
    assert all(re.fullmatch(expected[number].reason or "", reason) for number, reason in bad.items())
    assert result == Packed({"train": 1 + len(expected) - len(bad)}, len(bad))
    source = open_data(str(tmp_path / "out")).train
    assert {source.image(index).shape for index in range(len(source))} == {(3, HEIGHT, WIDTH)}
    assert all(source.describe(index).isprintable() for index in range(len(source)))


# Splits, labels and names.


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (len(name),) * 3).save(root / name, "PNG")


def assert_same(ours: ImageSource | None, theirs: ImageSource | None) -> None:
    assert ours is not None
    assert theirs is not None
    assert len(ours) == len(theirs)
    assert ours.classes == theirs.classes
    assert (ours.labels is None) == (theirs.labels is None)
    if ours.labels is not None and theirs.labels is not None:
        assert ours.labels.tolist() == theirs.labels.tolist()
    for index in range(len(ours)):
        assert ours.describe(index).endswith(f": {theirs.describe(index)}")


def test_all_splits_are_kept(tmp_path: Path) -> None:
    put(tmp_path / "in", "train/cat/1.png", "train/dog/2.png", "train/dog/3.png")
    put(tmp_path / "in", "val/cat/4.png", "val/eel/5.png", "test/6.png", "test/7.png")
    (tmp_path / "in" / "validation").mkdir()  # with nothing in it
    assert write_pack(tmp_path / "in", tmp_path / "out", workers=0).images == {"train": 3, "val": 2, "test": 2}
    ours, theirs = open_data(str(tmp_path / "out")), open_data(str(tmp_path / "in"))
    assert_same(ours.train, theirs.train)
    assert_same(ours.test, theirs.test)
    assert ours.train.classes == ("cat", "dog", "eel")
    assert ours.description.endswith("3 images, 3 classes, packed; 2 held out in val (not used: test)")
    test = open_pack_splits("pack", str(tmp_path / "out"))["test"]
    assert (len(test), test.labels, test.classes) == (2, None, ())
    shutil.rmtree(tmp_path / "in" / "val")
    (tmp_path / "in" / "validation").rmdir()
    write_pack(tmp_path / "in", tmp_path / "without", workers=0)
    assert open_data(str(tmp_path / "without")).description.endswith("packed; test has no labels and is left out")
    assert open_data(str(tmp_path / "without")).test is None


def test_all_splits_of_packs_and_shards_are_kept_too(tmp_path: Path) -> None:
    put(tmp_path / "in", "train/cat/1.png", "train/dog/2.png", "train/dog/3.png")
    put(tmp_path / "in", "val/cat/4.png", "val/dog/5.png", "test/dog/6.png", "test/cat/7.png", "test/cat/8.png")
    write_pack(tmp_path / "in", tmp_path / "pack", workers=0)
    write_shards(tmp_path / "in", tmp_path / "shards")
    assert {path.name for path in (tmp_path / "shards").glob("*.tar")} == {
        "train-000000.tar",
        "val-000000.tar",
        "test-000000.tar",
    }
    counts = {"train": 3, "val": 2, "test": 3}
    for source in ("pack", "shards"):
        assert write_pack(tmp_path / source, tmp_path / f"of-{source}", workers=0).images == counts
        found = open_pack_splits("again", str(tmp_path / f"of-{source}"))
        assert {split: one.classes for split, one in found.items()} == dict.fromkeys(counts, ("cat", "dog"))
        assert {split: one.labels.tolist() for split, one in found.items() if one.labels is not None} == {
            "train": [0, 1, 1],
            "val": [0, 1],
            "test": [0, 0, 1],
        }
    write_shards(tmp_path / "pack", tmp_path / "shards-of-pack")
    assert len(list((tmp_path / "shards-of-pack").glob("*.tar"))) == 3


def test_pictures_without_files_and_a_pack_of_a_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("co2.data.open.SHAPES_TEST_COUNT", 20)
    write_pack("shapes:30:40", tmp_path / "one", quality=95, workers=0)
    ours, theirs = open_data(str(tmp_path / "one")), open_data("shapes:30:40")
    assert_same(ours.train, theirs.train)
    assert_same(ours.test, theirs.test)
    assert (ours.train.image(3).float() - theirs.train.image(3).float()).abs().mean() < 8
    write_pack(tmp_path / "one", tmp_path / "two", shorter_side=16, workers=0)
    assert open_data(str(tmp_path / "two")).train.image(3).shape == (3, 16, 16)


def test_labels_of_other_images_than_those_that_are_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for name, count in (("unlabeled", 4), ("train", 3), ("test", 2)):
        np.full((count, 3, 96, 96), 50, dtype=np.uint8).tofile(folder / f"{name}_X.bin")
        (np.arange(count, dtype=np.uint8) + 1).tofile(folder / f"{name}_y.bin")
    assert write_pack(folder, tmp_path / "out", workers=0).images == {"train": 7, "bank": 3, "test": 2}
    ours, theirs = open_data(str(tmp_path / "out")), open_data(str(folder))
    for mine, yours in ((ours.train, theirs.train), (ours.bank, theirs.bank), (ours.test, theirs.test)):
        assert_same(mine, yours)
    assert "7 images, no labels, packed; 3 images, 10 classes to look things up in; 2 held out" in ours.description


def test_any_number_of_workers_writes_the_same_pack(tmp_path: Path) -> None:
    pictures(tmp_path / "in", 40)
    for workers in (0, 1, 2):
        result = write_pack(tmp_path / "in", tmp_path / f"by {workers}", workers=workers)
        assert result == Packed({"train": 40}, 1)
    assert contents(tmp_path / "by 0") == contents(tmp_path / "by 1") == contents(tmp_path / "by 2")
    source = open_data(str(tmp_path / "by 2")).train
    assert [source.image(index).shape[2] for index in range(40)] == [20 + number for number in range(40)]


# Being killed.


def in_a_fork(act: Callable[[], object]) -> int:
    """Do something in a copy of this process; returns how it ended, as os.waitstatus_to_exitcode tells it."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except RunError:
            os._exit(3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


CALLS = ("write", "fsync", "replace", "remove", "ftruncate", "makedirs")


def killed_at(call: int, act: Callable[[], object]) -> int:
    """Do something in a copy of this process that is killed in the midst of its n-th call that changes the disk."""

    def watched() -> None:
        count = 0

        def watch(function: Callable) -> Callable:
            def instead(*words, **others):
                nonlocal count
                count += 1
                if count == call:
                    if function is write:
                        write(words[0], words[1][: len(words[1]) // 2])  # half of it reaches the disk
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*words, **others)

            return instead

        write = os.write
        for name in CALLS:
            setattr(os, name, watch(getattr(os, name)))
        act()

    return in_a_fork(watched)


def test_killed_at_any_moment_and_run_again_the_pack_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGKILL in each of the calls that change the disk, one after the other, until an attempt has none left."""
    pictures(tmp_path / "in" / "train", 3)
    put(tmp_path / "in", "val/a/1.png", "val/b/2.png")
    monkeypatch.setattr(pack_writer, "_SECONDS_BETWEEN_COMMITS", 0.0)
    monkeypatch.setattr(pack_writer, "_IMAGES_AT_ONCE", 2)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and needed where the power fails, not for a kill

    def attempt(folder: Path) -> Packed:
        return write_pack(tmp_path / "in", folder, workers=0)

    undisturbed = attempt(tmp_path / "undisturbed")
    expected = contents(tmp_path / "undisturbed")
    assert undisturbed == Packed({"train": 3, "val": 2}, 1)
    assert set(expected) == {f"{s}.{k}" for s in ("train", "val") for k in ("images", "index", "names")} | {
        MANIFEST,
        "bad_images.txt",
    }
    moment, ended = 0, -signal.SIGKILL
    while ended == -signal.SIGKILL:
        moment += 1
        out = tmp_path / f"killed at {moment}"
        ended = killed_at(moment, lambda out=out: attempt(out))
        if moment % 3 == 0:
            killed_at(moment % 7 + 3, lambda out=out: attempt(out))  # and once more on the way
        assert attempt(out) == undisturbed
        assert contents(out) == expected
        shutil.rmtree(out)
    assert ended == 0
    assert moment > 50


def test_the_state_never_speaks_of_bytes_that_a_power_failure_could_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written is on the disk before a file that tells of it takes its place."""
    pictures(tmp_path / "in", 6)
    waiting: set[int] = set()
    replaced = []
    write, fsync, replace = os.write, os.fsync, os.replace

    def noting_write(number: int, data: bytes) -> int:
        waiting.add(number)
        return write(number, data)

    def noting_fsync(number: int) -> None:
        waiting.discard(number)
        fsync(number)

    def noting_replace(old: str, new: str) -> None:
        replaced.append((os.path.basename(new), set(waiting)))
        replace(old, new)

    monkeypatch.setattr(os, "write", noting_write)
    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    monkeypatch.setattr(pack_writer, "_SECONDS_BETWEEN_COMMITS", 0.0)
    monkeypatch.setattr(pack_writer, "_IMAGES_AT_ONCE", 2)
    write_pack(tmp_path / "in", tmp_path / "out", workers=0)
    assert replaced == [(UNFINISHED, set())] * 5 + [(MANIFEST, set())]  # at the beginning and for each two of 7 images


def at_work(process: int) -> bool:
    """Whether there is such a process. One that has ended, but that nobody has asked how, is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_killed_with_workers_and_resumed_by_the_command(tmp_path: Path) -> None:
    pictures(tmp_path / "in", 150)
    code = (
        "import multiprocessing, os, signal, sys\nfrom co2.data import pack_writer\n"
        "pack_writer._SECONDS_BETWEEN_COMMITS = 0.0\n"
        "def kill(done, total):\n    if done >= 70:\n"
        "        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "pack_writer.write_pack(sys.argv[1], sys.argv[2], workers=2, progress=kill)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "in", tmp_path / "out"]
    with open(tmp_path / "workers", "w") as file:  # not a pipe, whose end would not come before the workers'
        assert subprocess.run(command, stdout=file).returncode == -signal.SIGKILL
    workers = [int(word) for word in (tmp_path / "workers").read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while (left := [worker for worker in workers if at_work(worker)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert left == []
    with pytest.raises(UserError, match="unfinished"):
        open_data(str(tmp_path / "out"))
    seen: list[tuple[int, int]] = []
    write_pack(tmp_path / "in", tmp_path / "out", workers=2, progress=lambda *words: seen.append(words))
    assert seen[0] == (80, 151)  # five messages of 16 images
    assert seen[-1] == (151, 151)
    write_pack(tmp_path / "in", tmp_path / "whole", workers=0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("room", [1, 700, 6_000, 20_000])
def test_a_full_disk_keeps_what_is_there(tmp_path: Path, room: int) -> None:
    """The system refuses to make any file larger than that."""
    pictures(tmp_path / "in", 20)

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        write_pack(tmp_path / "in", tmp_path / "out", workers=0)

    assert in_a_fork(attempt) == 3  # a RunError
    write_pack(tmp_path / "in", tmp_path / "out", workers=0)
    write_pack(tmp_path / "in", tmp_path / "whole", workers=0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_full_disk_is_told_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "in", 4)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunError, match=r"No space left on device.*run the command again to go on"):
            write_pack(tmp_path / "in", tmp_path / "out", workers=0)
    assert write_pack(tmp_path / "in", tmp_path / "out", workers=0).images == {"train": 4}


def test_a_worker_that_is_ended_by_the_system_is_told_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "in", 4)
    with monkeypatch.context() as patch:
        patch.setattr(pack_writer._Recipe, "pack", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RunError, match=r"ended by the system.*fewer --workers"):
            write_pack(tmp_path / "in", tmp_path / "out", workers=1)
    assert write_pack(tmp_path / "in", tmp_path / "out", workers=1).images == {"train": 4}


def test_a_worker_that_is_ended_once_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "in", 40)
    write_pack(tmp_path / "in", tmp_path / "undisturbed", workers=0)
    pack = pack_writer._Recipe.pack

    def once_fatal(recipe: pack_writer._Recipe, data: bytes) -> pack_writer._Image:
        if not (tmp_path / "it happened").exists():
            (tmp_path / "it happened").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return pack(recipe, data)

    monkeypatch.setattr(pack_writer._Recipe, "pack", once_fatal)
    write_pack(tmp_path / "in", tmp_path / "out", workers=2)
    assert (tmp_path / "it happened").exists()
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


# What is in the way.


def test_what_lies_in_the_destination_is_never_touched(tmp_path: Path) -> None:
    pictures(tmp_path / "in", 2)
    for name in ("thesis.txt", "train.images", "bad_images.txt"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("dear to me")
        with pytest.raises(UserError, match=rf"holds something else \('{name}'\)"):
            write_pack(tmp_path / "in", folder, workers=0)
        assert contents(folder) == {name: b"dear to me"}
    with pytest.raises(UserError, match="holds something else"):
        write_pack(tmp_path / "in", tmp_path / "in", workers=0)
    with pytest.raises(UserError, match="is a file"):
        write_pack(tmp_path / "in", tmp_path / "with thesis.txt" / "thesis.txt", workers=0)
    with pytest.raises(UserError, match=r"cannot be written to: Not a directory\. Name another folder"):
        write_pack(tmp_path / "in", tmp_path / "with thesis.txt" / "thesis.txt" / "below", workers=0)


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_do_not_mix(tmp_path: Path, finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "in", 4)

    def attempt(source: str = "in", **settings: int) -> None:
        write_pack(f"{tmp_path}/{source}", tmp_path / "out", workers=0, **settings)

    if finished:
        attempt()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(pack_writer, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                attempt()
        assert (tmp_path / "out" / UNFINISHED).is_file()
    before = contents(tmp_path / "out")
    if finished:
        attempt("in/")  # as shells complete a name
    with pytest.raises(UserError, match="another --quality"):
        attempt(quality=91)
    with pytest.raises(UserError, match="another --shorter-side"):
        attempt(shorter_side=255)
    shutil.copytree(tmp_path / "in", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="another source and images of other names"):
        attempt("elsewhere")
    (tmp_path / "in" / "000.png").rename(tmp_path / "in" / "000 once more.png")
    with pytest.raises(UserError, match="begun from or with images of other names or labels"):
        attempt()
    pictures(tmp_path / "in" / "more", 1)
    with pytest.raises(UserError, match="another number of images"):
        attempt()
    assert contents(tmp_path / "out") == before


def test_a_finished_pack_is_left_as_it_is(tmp_path: Path) -> None:
    pictures(tmp_path / "in", 4)
    first = write_pack(tmp_path / "in", tmp_path / "out", workers=0)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert write_pack(tmp_path / "in", tmp_path / "out", workers=0) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "co2 pack"}', "[" * 100_000])
def test_a_damaged_state_is_told_plainly(tmp_path: Path, text: str) -> None:
    pictures(tmp_path / "in", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / UNFINISHED).write_text(text)
    with pytest.raises(UserError):
        write_pack(tmp_path / "in", tmp_path / "out", workers=0)


@pytest.mark.parametrize(("name", "value"), [("position", -1), ("images", 10**9), ("image_bytes", 10**9), ("x", 1)])
def test_a_forged_state_is_told_plainly(tmp_path: Path, name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "in", 40)

    def stop(done: int, total: int) -> None:
        if done > 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(pack_writer, "_SECONDS_BETWEEN_COMMITS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        write_pack(tmp_path / "in", tmp_path / "out", workers=0, progress=stop)
    state = json.loads((tmp_path / "out" / UNFINISHED).read_text())
    state["state"]["splits"]["train"][name] = value
    (tmp_path / "out" / UNFINISHED).write_text(json.dumps(state))
    with pytest.raises(UserError, match="Delete the unfinished pack, and begin again"):
        write_pack(tmp_path / "in", tmp_path / "out", workers=0)


def test_two_processes_do_not_write_to_the_same_pack(tmp_path: Path) -> None:
    pictures(tmp_path / "in", 4)
    told, tell = os.pipe()
    wait, release = os.pipe()

    def hold() -> None:
        def progress(done: int, total: int) -> None:
            os.write(tell, b".")
            os.read(wait, 1)

        write_pack(tmp_path / "in", tmp_path / "out", workers=0, progress=progress)

    child = os.fork()
    if child == 0:
        try:
            hold()
        finally:
            os._exit(0)
    os.read(told, 1)
    with pytest.raises(UserError, match="Another process is writing"):
        write_pack(tmp_path / "in", tmp_path / "out", workers=0)
    os.write(release, b"." * 100)
    os.waitpid(child, 0)
    assert write_pack(tmp_path / "in", tmp_path / "out", workers=0).images == {"train": 4}


def test_where_no_image_can_be_read_there_is_no_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="The only image"):
        write_pack(tmp_path / "in", tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()
    Image.new("RGB", (65_520, 2)).save(tmp_path / "in" / "a.png")  # can be read, and not written
    with pytest.raises(RunError, match=r"None of the images.*bad_images.txt' tells why"):
        write_pack(tmp_path / "in", tmp_path / "out", workers=0)


@pytest.mark.parametrize("settings", [{"quality": 0}, {"quality": 101}, {"shorter_side": 0}])
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, int]) -> None:
    with pytest.raises(UserError, match="must be"):
        write_pack("digits", tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


# The command.


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "in", 6)
    words = ["data", "pack", str(tmp_path / "in"), str(tmp_path / "my pack"), "--shorter-side", "16", "--workers", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(pack_writer, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert main(words) == 130
    assert "goes on where it stood" in capsys.readouterr().err
    assert main(words) == 0
    output = capsys.readouterr()
    assert f"6 images are packed in {tmp_path}/my pack: 6 in train." in output.out
    assert f"--data '{tmp_path}/my pack'" in output.out
    assert f"Left out: 1 that cannot be read, named with the reasons in {tmp_path}/my pack/bad_images.txt" in output.err
    assert verify_pack(tmp_path / "my pack").images == 6
    assert main(["data", "verify", str(tmp_path / "in")]) == 2
    assert "There is no pack in" in capsys.readouterr().err
    assert main(["data", "pak"]) == 2
    assert "Did you mean 'pack'?" in capsys.readouterr().err
