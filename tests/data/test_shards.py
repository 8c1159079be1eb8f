"""Tar shards: what is found in them, how they are read, and what happens when they are hostile."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import in_bounds, make_endless, make_pipe
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shards import write_shards

from co2.checkpoint import load_backbone
from co2.cli import main
from co2.data import shard_storage
from co2.data.open import open_data, open_splits
from co2.data.shards import ShardSource
from co2.data.source import BadImage
from co2.data.tar_index import DamagedTar, build_index, index_from_bytes, index_to_bytes, tar_members
from co2.engine.pretrain import Stopped, pretrain
from co2.engine.trainer import Trainer
from co2.errors import UserError
from co2.views.loader import ViewLoader
from co2.views.view import View


def png(number: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 5), (number % 256, number // 256, 7)).save(file, "PNG")
    return file.getvalue()


def number_in(image: torch.Tensor) -> int:
    return int(image[0, 0, 0]) + 256 * int(image[1, 0, 0])


def tar(members: dict[str, bytes], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def reader(data: bytes):
    return lambda offset, size: data[offset : offset + size]


def names(data: bytes) -> list[str]:
    index = build_index(reader(data), len(data))
    return [index.names[i].decode() for i in range(len(index))]


def pictures(folder: Path, count: int, labelled: bool = False) -> Path:
    for number in range(count):
        place = folder / f"class {number % 3}" if labelled else folder
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:04d}.PNG").write_bytes(png(number))
    return folder


# The format.


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_member_is_where_the_standard_library_finds_it(kind: int) -> None:
    long = "d" * 120 + "/" + "e" * 90 + ".jpg"  # fits into ustar's two fields, and needs an extension elsewhere
    members = {"a.jpg": b"", "b/c.png": b"x" * 512, "ü.jpg": b"y" * 513, long: b"z" * 100_000, "empty": b""}
    if kind != tarfile.USTAR_FORMAT:
        members["n" * 3000 + ".jpg"] = b"long"
    data = tar(members, kind)
    found = {name.decode(): data[offset : offset + size] for name, offset, size in tar_members(reader(data), len(data))}
    assert found == members
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        theirs = [(member.name.encode(), member.offset_data, member.size) for member in archive]
    assert list(tar_members(reader(data), len(data))) == theirs


def test_sizes_beyond_eight_gigabytes() -> None:
    """Written as bytes instead of octal digits (GNU) or in an extended header (pax); the data itself is left out."""
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member = tarfile.TarInfo("a.tif")
        member.size = 9 * 2**30
        header = member.tobuf(kind)
        first = next(tar_members(reader(header), 10 * 2**30))
        assert first == (b"a.tif", len(header), 9 * 2**30)


def test_an_archive_made_by_the_tar_program(tmp_path: Path) -> None:
    if shutil.which("tar") is None:
        pytest.skip("there is no tar program here")
    pictures(tmp_path / "in", 5, labelled=True)
    subprocess.run(["tar", "cf", tmp_path / "plain.tar", "-C", tmp_path / "in", "."], check=True)
    source = open_data(str(tmp_path / "plain.tar")).train
    assert sorted(number_in(source.image(i)) for i in range(len(source))) == [0, 1, 2, 3, 4]
    assert source.labels is None


# The convention.


def webdataset_samples(data: bytes) -> dict[str, dict[str, bytes]]:
    """The grouping that WebDataset documents, written anew with the standard library, as an oracle."""
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
        for member in archive:
            match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name)
            if member.isreg() and match:
                sample = samples.setdefault(match[1], {})
                assert match[2].lower() not in sample, "WebDataset refuses duplicates"
                sample[match[2].lower()] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return samples


def test_samples_labels_and_what_is_no_image() -> None:
    data = tar(
        {
            "cat/001.jpg": b"1",
            "cat/001.cls": b"3\n",
            "cat/001.seg.png": b"a mask beside an image",
            "cat/002.json": b'{"label": 5}',
            "cat/002.JPG": b"2",
            "003.png": b"3",
            "003.txt": b"caption",
            "004.txt": b"no image",
            "._005.jpg": b"a resource fork",
            "006.v1.2.jpg": b"6",  # dots in a plain archive's names
            "006.v1.3.jpg": b"6b",
            "007": b"no extension",
        }
    )
    index = build_index(reader(data), len(data))
    found = [(index.names[i].decode(), int(index.labels[i])) for i in range(len(index))]
    assert found == [
        ("cat/001.jpg", 3),
        ("cat/002.JPG", 5),
        ("003.png", -1),
        ("006.v1.2.jpg", -1),
        ("006.v1.3.jpg", -1),
    ]


@pytest.mark.parametrize(
    ("name", "text", "label"),
    [
        ("a.cls", b" 12 \n", 12),
        ("a.cls", b"cat", -1),
        ("a.cls", b"-1", -1),
        ("a.cls", b"9" * 5000, -1),  # more digits than Python converts
        ("a.cls", b"99999999999", -1),  # no data set has so many classes
        ("a.cls", b"", -1),
        ("a.json", b'{"cls": 4, "label": 5}', 4),
        ("a.json", b'{"caption": "four"}', -1),
        ("a.json", b'{"label": true}', -1),
        ("a.json", b'{"label": 1e3}', -1),
        ("a.json", b"7", 7),
        ("a.json", b"[" * 100_000, -1),  # nested deeper than the reader's stack
        ("a.json", b"\xff\xfe", -1),
    ],
)
def test_labels_good_and_bad(name: str, text: bytes, label: int) -> None:
    data = tar({"a.jpg": b"x", name: text})
    assert build_index(reader(data), len(data)).labels.tolist() == [label]


# Reading.


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Shards of 50 labelled pictures, 12 in each, and their indices."""
    write_shards(pictures(tmp_path / "pictures", 50, labelled=True), tmp_path / "shards", count=12)
    open_data(str(tmp_path / "shards"))
    return tmp_path / "shards"


def test_every_way_to_name_shards(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(path.name for path in shards.glob("*.tar")) == [f"train-00000{i}.tar" for i in range(5)]
    for name, count in (
        (f"{shards}", 50),
        (f"{shards}/train-000003.tar", 12),
        (f"{shards}/train-{{000001..000004}}.tar", 38),
        (f"{shards}/train-{{000000,000004}}.tar", 14),
        (f"{shards}/train-*.tar", 50),
        (f"{shards}/train-00000[01].tar", 24),
        (f"file://{shards}", 50),
        (f"file://{shards}/train-{{000001..000004}}.tar", 38),
        (f"file://{shards}/train-*.tar", 50),
    ):
        data = open_data(name)
        assert (len(data.train), data.test) == (count, None)
        assert data.bank is data.train
        assert data.train.classes == ("class 0", "class 1", "class 2")
        assert f"{count} images, 3 classes" in data.description
    monkeypatch.chdir(shards)
    assert len(open_data("train-000000.tar").train) == 12


def test_shards_hold_what_the_folder_held(shards: Path) -> None:
    folder = open_data(str(shards.parent / "pictures")).train
    for data in (open_data(str(shards)), open_data(f"file://{shards}")):
        source = data.train
        assert source.labels is not None
        assert source.labels.tolist() == folder.labels.tolist()  # type: ignore[union-attr]
        for index in range(50):
            assert source.encoded(index) == folder.encoded(index)
            assert torch.equal(source.image(index), folder.image(index))
    assert source.describe(13) == f"file://{shards}/train-000001.tar: 000000013.png"


def test_splits_by_name(tmp_path: Path) -> None:
    for name in ("set-train-0", "set-train-1", "set-validation-0", "set-test-0", "extra-0"):
        (tmp_path / f"{name}.tar").write_bytes(tar({f"{name}.png": png(), f"{name}.cls": b"1"}))
    data = open_data(str(tmp_path))
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (2, 1)
    assert data.test.describe(0).endswith("set-validation-0.tar: set-validation-0.png")
    assert "1 held out in validation (not used: others, test)" in data.description
    assert len(open_data(str(tmp_path / "set-test-0.tar")).train) == 1
    assert open_data(str(tmp_path / "set-test-0.tar")).test is None


def test_splits_without_labels(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(tar({"a.png": png(), "a.cls": b"0", "b.png": png()}))
    (tmp_path / "val-0.tar").write_bytes(tar({"a.png": png()}))
    data = open_data(str(tmp_path))
    assert (data.bank, data.test) == (None, None)
    assert "labels not used because 1 have none" in data.description
    assert "val has no labels and is left out" in data.description


def test_val_is_preferred_unless_only_test_has_labels(tmp_path: Path) -> None:
    for name, label in (("train", b"0"), ("val", b"0"), ("test", b"1")):
        (tmp_path / f"{name}-0.tar").write_bytes(tar({f"{name}.png": png(), f"{name}.cls": label}))
    data = open_data(str(tmp_path))
    assert data.test is not None
    assert data.test.describe(0).endswith("val-0.tar: val.png")
    assert data.train.classes == ("0",)  # nobody looks into test
    assert data.description.endswith("; 1 held out in val (not used: test)")
    (tmp_path / "val-0.tar").write_bytes(tar({"val.png": png()}))
    data = open_data(str(tmp_path))
    assert data.test is not None
    assert data.test.describe(0).endswith("test-0.tar: test.png")
    assert data.train.classes == data.test.classes == ("0", "1")
    assert data.description.endswith("; 1 held out in test (not used: val)")
    (tmp_path / "test-0.tar").write_bytes(tar({"test.png": png()}))
    data = open_data(str(tmp_path))
    assert data.test is None
    assert data.description.endswith("; val has no labels and is left out (not used: test)")


def test_a_folder_of_pictures_with_an_archive_in_it_is_a_folder_of_pictures(tmp_path: Path) -> None:
    pictures(tmp_path, 3)
    (tmp_path / "backup.tar").write_bytes(tar({"a.png": png()}))
    assert len(open_data(str(tmp_path)).train) == 3


def test_views_from_shards_are_those_from_the_folder(shards: Path) -> None:
    """Order, augmentation and position come with the index: with workers, in mid-epoch, after pickling."""

    def epoch(source, workers: int, first: int = 0):
        loader = ViewLoader(source, (View(size=8),) * 2, batch_size=10, seed=3, workers=workers)
        return list(loader.epoch(4, first_batch=first))

    expected = epoch(open_data(str(shards.parent / "pictures")).train, 0)
    source = open_data(str(shards)).train
    source.image(0)  # a handle is open when the workers are forked
    for got in (epoch(source, 0), epoch(source, 2), epoch(pickle.loads(pickle.dumps(source)), 0)):
        for ours, theirs in zip(got, expected, strict=True):
            assert all(torch.equal(*two) for two in zip(ours.views, theirs.views, strict=True))
    rest = epoch(source, 2, first=3)
    assert torch.equal(rest[0].indices, expected[3].indices)
    seen = torch.cat([batch.indices for batch in epoch(source, 2)])
    assert sorted(seen.tolist()) == list(range(50))  # nothing lost, nothing twice


def test_a_run_over_shards_stopped_in_mid_epoch_ends_like_one_over_the_folder(
    shards: Path, tmp_path: Path, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = pretrain(tiny(), data=shards.parent / "pictures", out=tmp_path / "undisturbed")
    train_step = Trainer.train_step

    def stop_at_second_step(self: Trainer, *batch):
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stop_at_second_step)
        with pytest.raises(Stopped):
            pretrain(tiny(), data=shards, out=tmp_path / "run")
    resumed = pretrain(tiny(resume=True, workers=2), data=shards, out=tmp_path / "run")
    ours, theirs = (load_backbone(run).state_dict() for run in (undisturbed, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_few_files_are_open_however_many_shards(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"train-{number:06d}.tar").write_bytes(tar({f"{number}.png": png(number)}))
    source = ShardSource("many", sorted(map(str, tmp_path.glob("*.tar"))))
    for index in range(100):
        assert number_in(source.image(index)) == index
    open_now = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert sum(path.startswith(str(tmp_path)) for path in open_now) <= 64


def _is_link(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return True


def test_a_million_members_are_a_few_arrays(shards: Path) -> None:
    source = open_data(str(shards)).train
    assert len(pickle.dumps(source)) < 50 * (24 + 30 + 8) + 3000  # numbers, names and ends, and hardly more


def test_a_shard_that_vanishes_or_changes_is_named_image_by_image(shards: Path) -> None:
    shard_storage._open_shard.cache_clear()
    source = open_data(str(shards)).train
    shard_storage._open_shard.cache_clear()
    (shards / "train-000000.tar").unlink()
    with pytest.raises(BadImage, match="the shard does not exist"):
        source.image(0)
    (shards / "train-000000.tar").write_bytes(b"something else")
    with pytest.raises(BadImage, match="has changed"):
        source.image(0)
    assert number_in(source.image(49)) == 47  # sorted by class


# The index.


def test_the_index_is_kept_beside_the_shard_and_used(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (shards / ".train-000000.tar.index").is_file()
    monkeypatch.setattr(shard_storage, "build_index", None)  # not needed any more
    assert len(open_data(str(shards)).train) == 50


def test_a_changed_shard_is_indexed_anew(tmp_path: Path) -> None:
    shard = tmp_path / "train-0.tar"
    shard.write_bytes(tar({"a.png": png(), "b.png": png()}))
    assert len(open_data(str(shard)).train) == 2
    before = shard.stat()
    shard.write_bytes(tar({"a.png": png(), "b.txt": png()}))  # of the same length
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert shard.stat().st_size == before.st_size
    assert len(open_data(str(shard)).train) == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "claims", "text", "empty", "deep"])
def test_a_damaged_or_forged_index_is_made_anew(shards: Path, damage: str) -> None:
    path = shards / ".train-000000.tar.index"
    good = path.read_bytes()
    line, body = good.split(b"\n", 1)
    forged = {
        "cut": good[:-5],
        "flip": good[:-3] + b"\xff" + good[-2:],
        "claims": json.dumps(json.loads(line) | {"images": 10**15}).encode() + b"\n" + body,
        "text": b"no index\n" + body,
        "empty": b"",
        "deep": b"[" * 100_000 + b"\n" + body,
    }[damage]
    path.write_bytes(forged)
    assert len(open_data(str(shards)).train) == 50
    assert path.read_bytes() == good


@pytest.mark.parametrize("make", [make_pipe, make_endless])
def test_an_index_that_never_ends_is_made_anew(shards: Path, make: Callable[[Path], None]) -> None:
    path = shards / ".train-000000.tar.index"
    good = path.read_bytes()
    path.unlink()
    make(path)
    assert in_bounds(lambda: len(open_data(str(shards)).train)) == "50"
    assert not path.is_symlink()
    assert path.read_bytes() == good


def test_a_long_head_of_an_index_is_not_looked_at() -> None:
    data = tar({"a.jpg": b"x" * 100})
    line, body = index_to_bytes(build_index(reader(data), len(data)), len(data), "stamp").split(b"\n", 1)
    assert index_from_bytes(line + b" " * 1000 + b"\n" + body, len(data), "stamp") is not None
    assert index_from_bytes(line + b" " * 100_000 + b"\n" + body, len(data), "stamp") is None


def test_an_index_never_points_outside_its_shard() -> None:
    data = tar({"a.jpg": b"x" * 100})
    index = build_index(reader(data), len(data))
    for column, wrong in (("offsets", -1), ("offsets", len(data)), ("sizes", -5), ("sizes", 2**62), ("labels", -7)):
        numbers = np.array([wrong])
        forged = index_to_bytes(
            type(index)(**{**index.__dict__, column: numbers}), len(data), "stamp"
        )  # with a checksum that fits
        assert index_from_bytes(forged, len(data), "stamp") is None
    back = index_from_bytes(index_to_bytes(index, len(data), "stamp"), len(data), "stamp")
    assert back is not None
    assert back.offsets.tolist() == index.offsets.tolist()
    assert index_from_bytes(index_to_bytes(index, len(data), "stamp"), len(data), "another") is None


def test_where_nothing_can_be_written_the_index_goes_to_the_users_cache(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in shards.glob(".*.index"):
        index.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mkstemp = shard_storage.tempfile.mkstemp

    def read_only(*words, dir: str, **others):
        if dir == str(shards):
            raise PermissionError(30, "Read-only file system")
        return mkstemp(*words, dir=dir, **others)

    monkeypatch.setattr(shard_storage.tempfile, "mkstemp", read_only)
    assert len(open_data(str(shards)).train) == 50
    assert len(list((tmp_path / "cache" / "co2" / "shards").iterdir())) == 5
    assert not list(shards.glob(".*"))
    monkeypatch.setattr(shard_storage, "build_index", None)
    assert len(open_data(str(shards)).train) == 50


# What is hostile.


def test_nothing_is_ever_written_outside(tmp_path: Path) -> None:
    """Names that lead elsewhere, and links, devices and pipes in place of images: looked at, never followed."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("../../outside.png", "/tmp/absolute.png", "a/../../b.png", "..png", "C:\\x.png", "nul\x00.png"):
            member = tarfile.TarInfo(name)
            member.size = len(png())
            archive.addfile(member, io.BytesIO(png()))
        for kind, target in (
            (tarfile.SYMTYPE, "/etc/passwd"),
            (tarfile.LNKTYPE, "../../outside.png"),
            (tarfile.CHRTYPE, ""),
            (tarfile.BLKTYPE, ""),
            (tarfile.FIFOTYPE, ""),
            (tarfile.DIRTYPE, ""),
        ):
            member = tarfile.TarInfo(f"link{kind.decode()}.png")
            member.type, member.linkname = kind, target
            archive.addfile(member)
        last = tarfile.TarInfo("last.png")
        last.size = len(png())
        archive.addfile(last, io.BytesIO(png()))
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "evil.tar").write_bytes(file.getvalue())
    source = open_data(str(folder / "evil.tar")).train
    got = [source.describe(i).split(": ", 1)[1] for i in range(len(source))]
    assert got == ["../../outside.png", "/tmp/absolute.png", "a/../../b.png", "C:\\\\x.png", "last.png"]
    for index in range(len(source)):
        assert source.image(index).shape == (3, 5, 6)
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == ["deep/er/.evil.tar.index", "deep/er/evil.tar"]


@pytest.mark.parametrize("share", [0.15, 0.5, 0.9, 0.985])
def test_what_comes_before_a_cut_is_used_and_the_cut_is_told(tmp_path: Path, share: float) -> None:
    data = tar({f"{i:03d}.png": png(i) for i in range(40)})
    (tmp_path / "train-0.tar").write_bytes(data[: int(share * 40 * 1024)])
    splits = open_data(str(tmp_path))
    assert len(splits.train) == int(share * 40)
    assert f"train-0.tar is used up to image {int(share * 40)} only: it is cut off" in splits.description
    assert number_in(splits.train.image(len(splits.train) - 1)) == int(share * 40) - 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no tar file"),
        (b"x" * 5000, "no tar file"),
        (b"x" * 100, "no tar file"),
        (b"\x1f\x8b\x08" + bytes(2000), "compressed by gzip"),
        (b"PK\x03\x04" + bytes(2000), "compressed by zip"),
        (bytes(10240), "No images were found in the 1 tar"),
        (tar({"notes.txt": b"no picture"}), "No images were found in the 1 tar"),
    ],
)
def test_files_that_are_no_shards(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "train-0.tar").write_bytes(data)
    with pytest.raises(UserError, match=reason):
        open_data(str(tmp_path / "train-0.tar"))


@pytest.mark.parametrize("claim", [2**40, 2**62, 2**63, 2**80, -1])
def test_absurd_sizes_are_not_believed(claim: int) -> None:
    header = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (b"\x80" if claim > 0 else b"\xff") + (claim % 2**88).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 256)
    data = bytes(header) + bytes(2048)
    with pytest.raises(DamagedTar):
        list(tar_members(reader(data), len(data)))


def test_a_name_of_a_gigabyte_is_not_read() -> None:
    asked = []

    def read(offset: int, size: int) -> bytes:
        asked.append(size)
        return header[offset : offset + size].ljust(size, b"n")

    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE):
        member = tarfile.TarInfo("long")
        member.type, member.size = kind, 2**30
        header = member.tobuf(tarfile.GNU_FORMAT)
        with pytest.raises(DamagedTar, match="a name of 1,073,741,824 bytes"):
            list(tar_members(read, 2**31))
    assert max(asked) == 512


def test_an_image_too_large_to_be_one_is_not_read(tmp_path: Path) -> None:
    member = tarfile.TarInfo("huge.png")
    member.size = 600 * 2**20
    path = tmp_path / "train-0.tar"
    with open(path, "wb") as file:
        file.write(tar({"good.png": png()})[:1024] + member.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(1024 + 512 + member.size + 1024)  # holes, which take no room
    source = open_data(str(path)).train
    assert source.image(0).shape == (3, 5, 6)
    with pytest.raises(BadImage, match="larger than 512 MiB"):
        source.image(1)


@settings(max_examples=300)
@given(st.data())
def test_damage_anywhere_ends_the_archive_and_nothing_else(choices: st.DataObject) -> None:
    data = bytearray(FUZZED[choices.draw(st.sampled_from(sorted(FUZZED)))])
    for _ in range(choices.draw(st.integers(1, 6))):
        data[choices.draw(st.integers(0, len(data) - 1))] = choices.draw(st.integers(0, 255))
    data = data[: choices.draw(st.integers(0, len(data)))]
    index = build_index(reader(bytes(data)), len(data))
    assert ((index.offsets >= 0) & (index.offsets + index.sizes <= len(data))).all()
    assert len(index) <= 6


FUZZED = {
    kind: tar({f"{'p' * 150 * (i % 2)}{i}.{end}": b"7" * 40 for i in range(3) for end in ("jpg", "cls")}, kind)
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipe:curl -s https://example.org/train.tar", "commands are not run"),
        ("{folder}/train-{{000003..000009}}.tar", "There is no shard .*train-000005.tar"),
        ("{folder}/train-{{000009..000003}}.tar", "not a range of shards"),
        ("{folder}/train-{{0..99999999}}.tar", "not a range of shards"),
        ("{folder}/train-{{0..99999}}-{{0..99999}}.tar", "more than 1,000,000 shards"),
        ("{folder}/nothing-*.tar", "No file is called"),
        ("nowhere://bucket/train-000000.tar", "cannot be reached"),
        ("file://{folder}/gone.tar", "There is no shard"),
        ("file://{folder}/gone", "There is no shard|no tar files"),
    ],
)
def test_names_that_do_not_work_are_told_plainly(shards: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_data(name.format(folder=shards))


def test_an_address_without_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match="pip install fsspec"):
        open_data("s3://bucket/train-000000.tar")


@pytest.mark.parametrize("text", ["{", "[1, 2, 3]", '"cat"', "[" * 100_000, '["only one"]'])
def test_classes_that_do_not_fit_are_told_plainly(shards: Path, text: str) -> None:
    (shards / "classes.json").write_text(text)
    with pytest.raises(UserError, match=r"classes\.json"):
        open_data(str(shards))


@pytest.mark.parametrize("make", [make_pipe, make_endless])
def test_classes_that_never_end_are_told_plainly(shards: Path, make: Callable[[Path], None]) -> None:
    (shards / "classes.json").unlink()
    make(shards / "classes.json")
    assert re.match(
        r"UserError: .*classes\.json' is not a list .* Repair it", in_bounds(lambda: open_data(str(shards)))
    )


def test_without_names_classes_are_called_by_their_numbers(shards: Path) -> None:
    (shards / "classes.json").unlink()
    assert open_data(str(shards)).train.classes == ("0", "1", "2")


# What other programs write.


def test_what_is_read_is_what_webdataset_reads(shards: Path) -> None:
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(shards.glob("*.tar")):
        samples |= webdataset_samples(path.read_bytes())
    assert list(samples) == [f"{i:09d}" for i in range(50)]
    folder = open_data(str(shards.parent / "pictures")).train
    assert folder.labels is not None
    for number, sample in enumerate(samples.values()):
        assert set(sample) == {"png", "cls"}
        assert sample["png"] == folder.encoded(number)[0]
        assert int(sample["cls"]) == folder.labels[number]
    assert json.loads((shards / "classes.json").read_text()) == ["class 0", "class 1", "class 2"]


def test_classes_that_only_a_later_split_has_are_named(tmp_path: Path) -> None:
    for number, place in enumerate(("train/a", "train/b", "val/a", "val/b", "test/a", "test/b", "test/c")):
        (tmp_path / "in" / place).mkdir(parents=True)
        (tmp_path / "in" / place / "1.png").write_bytes(png(number))
    write_shards(tmp_path / "in", tmp_path / "out")
    splits = open_splits(str(tmp_path / "out"))
    assert set(splits) == {"train", "val", "test"}
    assert {source.classes for source in splits.values()} == {("a", "b", "c")}
    assert splits["test"].labels.tolist() == [0, 1, 2]  # type: ignore[union-attr]


def test_shards_that_are_not_all_there_are_not_trained_on(shards: Path) -> None:
    """As an earlier version of this program left them when it was interrupted."""
    manifest = {"format": "co2 shards", "images": {"train": 50}, "finished": False}
    (shards / "shards.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"are unfinished\. Pack the images .* with `co2 data pack`"):
        open_data(str(shards))
    assert len(open_data(f"{shards}/*.tar").train) == 50  # who names them wants these
    (shards / "shards.json").write_text(json.dumps(manifest | {"finished": True}))
    assert len(open_data(str(shards)).train) == 50


@pytest.mark.parametrize("make", [make_pipe, make_endless])
def test_a_manifest_that_never_ends_is_told_plainly(shards: Path, make: Callable[[Path], None]) -> None:
    make(shards / "shards.json")
    assert re.match("UserError: .*cannot be read.*Repair it", in_bounds(lambda: open_data(str(shards))))


def test_the_command_that_wrote_shards_names_the_one_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "shard", "pictures", "shards", "--count", "4"]) == 2
    assert "Use `co2 data pack SOURCE DESTINATION`" in capsys.readouterr().err
