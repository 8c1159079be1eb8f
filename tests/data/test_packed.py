"""Reading packs: what is in them, what damage costs, and what happens when they are hostile."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile import saved
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from co2.cli import main
from co2.data import packed
from co2.data.open import open_data
from co2.data.pack_writer import write_pack
from co2.data.packed import MANIFEST, RECORDS, UNFINISHED, PackedSource, open_pack, verify_pack
from co2.data.source import BadImage
from co2.errors import UserError
from co2.views.loader import ViewLoader
from co2.views.view import View

COUNT = 12


def grey(number: int) -> Image.Image:
    return Image.new("RGB", (24, 16), (20 * number,) * 3)


def number_in(image: torch.Tensor) -> int:
    return round(int(image[0, 0, 0]) / 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packs")
    for number in range(COUNT):
        for split in ("train", "val"):
            folder = root / "in" / split / f"class {number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            grey(number).save(folder / f"{number:02d}.png")
    write_pack(root / "in", root / "pack", workers=0)
    return root


@pytest.fixture
def pack(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made / "pack", tmp_path / "pack"))


def train_of(pack: Path) -> PackedSource:
    source = open_data(str(pack)).train
    assert isinstance(source, PackedSource)
    return source


ORDER = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]  # class by class


def test_a_pack_is_the_data_that_it_was_made_of(made: Path) -> None:
    ours, theirs = open_data(str(made / "pack")), open_data(str(made / "in"))
    assert ours.bank is ours.train
    assert ours.description == f"{made}/pack: 12 images, 3 classes, packed; 12 held out in val"
    for mine, yours in ((ours.train, theirs.train), (ours.test, theirs.test)):
        assert mine is not None
        assert yours is not None
        assert len(mine) == COUNT
        assert mine.classes == yours.classes == ("class 0", "class 1", "class 2")
        assert mine.labels is not None
        assert mine.labels.dtype == np.int64
        assert mine.labels.tolist() == yours.labels.tolist()  # type: ignore[union-attr]
        assert [number_in(mine.image(index)) for index in range(COUNT)] == ORDER
        assert mine.image(0).shape == (3, 16, 24)
        assert mine.describe(5) == f"{made}/pack: {yours.describe(5)}"
    source = train_of(made / "pack")
    assert source.size(3) == (16, 24)
    data, extension = source.encoded(7)
    assert extension == ".jpg"
    assert data.startswith(b"\xff\xd8")
    assert data.endswith(b"\xff\xd9")
    for index in (-1, COUNT):
        with pytest.raises(IndexError):
            source.image(index)


def test_views_are_the_same_with_any_number_of_workers_and_after_pickling(pack: Path) -> None:
    def epoch(source: PackedSource, workers: int) -> list[torch.Tensor]:
        loader = ViewLoader(source, (View(size=8),) * 2, batch_size=5, seed=3, workers=workers)
        return [torch.stack(batch.views) for batch in loader.epoch(1)]

    source = train_of(pack)
    expected = epoch(source, 0)  # the files are mapped when the workers are forked
    copied = pickle.loads(pickle.dumps(source))
    packed._map.cache_clear()  # and are not in a process that was started anew
    for got in (epoch(source, 2), epoch(copied, 0)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def test_a_million_images_are_opened_in_little_memory(tmp_path: Path) -> None:
    count = 1_000_000
    picture = saved("JPEG", grey(3))
    records = np.zeros(count, RECORDS)
    records["end"] = np.arange(1, count + 1) * len(picture)
    records["name_end"] = np.arange(1, count + 1) * 10
    records["height"], records["width"], records["label"] = 16, 24, np.arange(count) % 1000
    records["checksum"] = zlib.crc32(picture)
    names = b"".join(b"image%05d" % (number % 100_000) for number in range(count))
    with open(tmp_path / "train.images", "wb") as file:
        file.write(picture)
        file.truncate(count * len(picture))  # a hole, which takes no room
    write_index(tmp_path, "train", records, names)
    entry = {"images": count, "image_bytes": count * len(picture), "labelled": True}
    manifest = {"format": "co2 pack", "version": 1, "classes": [str(i) for i in range(1000)], "splits": {}}
    manifest["splits"] = {"train": entry | sums(tmp_path, "train")}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    del records, names
    tracemalloc.start()
    source = train_of(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * count  # bytes; the index alone has as many, and is not copied
    assert len(pickle.dumps(source)) < 8 * count + 10_000  # the labels, and hardly more
    assert source.describe(count - 1).endswith(": image99999")
    assert number_in(source.image(0)) == 3
    with pytest.raises(BadImage, match="checksum"):
        source.image(count - 1)


# Damage.


def test_a_flipped_byte_is_found_and_costs_one_image(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_pack(pack).damaged == ()
    assert main(["data", "verify", str(pack)]) == 0
    assert f"0 of 24 images in {pack} are damaged." in capsys.readouterr().out
    ends = np.fromfile(pack / "train.index", RECORDS)["end"]
    flip(pack / "train.images", int(ends[4]) - 30)  # in the middle of image 4's pixels
    source = train_of(pack)
    with pytest.raises(BadImage, match=r"damaged in the pack \(its checksum differs\)"):
        source.image(4)
    with pytest.raises(BadImage, match="checksum"):
        source.encoded(4)
    assert [number_in(source.image(index)) for index in range(COUNT) if index != 4] == ORDER[:4] + ORDER[5:]
    assert [name for name, _ in verify_pack(pack).damaged] == [source.describe(4)]
    assert "class 1/01.png" in source.describe(4)
    assert main(["data", "verify", str(pack)]) == 1
    output = capsys.readouterr()
    assert f"{source.describe(4)}: damaged in the pack" in output.err
    assert "1 of 24 images" in output.out


@pytest.mark.parametrize("file", ["train.index", "train.names", "val.index", "val.names"])
def test_a_flipped_byte_in_an_index_is_found_when_a_pack_is_opened(pack: Path, file: str) -> None:
    flip(pack / file, 17)
    with pytest.raises(UserError, match=rf"{file}' is damaged: its checksum differs"):
        open_data(str(pack))


@pytest.mark.parametrize("change", [-1, 1, -1_000_000])
@pytest.mark.parametrize("file", ["train.images", "train.index", "val.names"])
def test_a_file_of_another_length_is_found_when_a_pack_is_opened(pack: Path, file: str, change: int) -> None:
    size = (pack / file).stat().st_size
    os.truncate(pack / file, max(0, size + change))
    with pytest.raises(UserError, match=rf"{file}' has .* bytes instead of {size:,}"):
        open_data(str(pack))


@pytest.mark.parametrize("file", ["train.images", "train.index", "train.names", MANIFEST])
def test_a_file_that_is_missing_or_not_a_file(pack: Path, file: str) -> None:
    (pack / file).unlink()
    if file == MANIFEST:
        with pytest.raises(UserError, match="There are no image files"):
            open_data(str(pack))
        (pack / UNFINISHED).write_text("{}")
        with pytest.raises(UserError, match=r"is unfinished.*goes on where it stood"):
            open_data(str(pack))
        return
    with pytest.raises(UserError, match=rf"{file}' cannot be read: No such file"):
        open_data(str(pack))
    os.mkfifo(pack / file)  # which would be waited for
    with pytest.raises(UserError, match=rf"{file}' is not a regular file"):
        open_data(str(pack))


def test_what_happens_to_the_files_of_an_open_pack_costs_images_and_not_the_process(pack: Path) -> None:
    source = train_of(pack)
    ends = np.fromfile(pack / "train.index", RECORDS)["end"]
    assert number_in(source.image(11)) == 11
    os.truncate(pack / "train.images", int(ends[2]))
    with pytest.raises(BadImage, match="cut off after it was opened"):
        source.image(11)
    os.truncate(pack / "train.index", 0)
    with pytest.raises(BadImage, match="cut off after it was opened"):
        source.encoded(0)
    assert source.describe(3) == f"{pack}: image 3"
    packed._map.cache_clear()
    with pytest.raises(BadImage, match="has changed since it was opened"):
        source.encoded(0)
    shutil.rmtree(pack)
    with pytest.raises(BadImage, match="does not exist any more"):
        source.encoded(0)


# What is hostile: everything fits together, checksums and all, and yet nothing in it is true.


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)


def write_index(pack: Path, split: str, records: np.ndarray, names: bytes) -> None:
    (pack / f"{split}.index").write_bytes(records.tobytes())
    (pack / f"{split}.names").write_bytes(names)


def sums(pack: Path, split: str) -> dict[str, int]:
    index, names = ((pack / f"{split}.{kind}").read_bytes() for kind in ("index", "names"))
    checksums = {"index_checksum": zlib.crc32(index), "names_checksum": zlib.crc32(names)}
    return {"name_bytes": len(names), **checksums}


def forge(pack: Path, change: Callable[[np.ndarray], object], names: bytes | None = None) -> None:
    """Change the records of train, and all sums with them."""
    records = np.fromfile(pack / "train.index", RECORDS)
    change(records)
    write_index(pack, "train", records, (pack / "train.names").read_bytes() if names is None else names)
    manifest = json.loads((pack / MANIFEST).read_text())
    manifest["splits"]["train"] |= sums(pack, "train") | {"images": len(records)}
    (pack / MANIFEST).write_text(json.dumps(manifest))


def put(column: str, index: int, value: int) -> Callable[[np.ndarray], object]:
    def change(records: np.ndarray) -> None:
        records[column][index] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("end", 3, -1),
        put("end", 0, -(2**63)),
        put("end", 3, 2**62),  # beyond the file
        put("end", 11, 2**63 - 1),
        put("end", 3, 0),  # before the one before it: overlapping
        put("name_end", 3, -1),
        put("name_end", 3, 2**62),
        put("name_end", 11, 1),
        put("height", 2, 0),
        put("width", 2, 2**32 - 1),
        put("width", 2, 65_501),
        put("label", 2, -1),
        put("label", 2, 3),
        put("label", 2, 2**31 - 1),
        lambda records: (put("height", 2, 65_000)(records), put("width", 2, 65_000)(records)),
        lambda records: records.__setitem__(slice(None), np.frombuffer(b"\xff" * records.nbytes, RECORDS)),
        lambda records: records.__setitem__(slice(None), np.zeros(1, RECORDS)),
    ],
)
def test_numbers_that_cannot_be(pack: Path, change: Callable[[np.ndarray], object]) -> None:
    forge(pack, change)
    with pytest.raises(UserError, match=r"train\.index' has numbers in it that cannot be"):
        open_data(str(pack))


def test_an_image_that_is_not_what_the_index_tells(pack: Path) -> None:
    forge(pack, lambda records: (put("height", 2, 17)(records), put("checksum", 3, 0)(records)))
    source = train_of(pack)
    with pytest.raises(BadImage, match="not of the size"):
        source.image(2)
    with pytest.raises(BadImage, match="checksum"):
        source.image(3)
    assert number_in(source.image(4)) == ORDER[4]


def test_empty_images_and_other_formats_are_bad_or_read_never_more(pack: Path) -> None:
    pictures = [b"", b"no image", saved("PNG", grey(2)), saved("JPEG", grey(3))[:-200], saved("JPEG", grey(4))]
    (pack / "train.images").write_bytes(b"".join(pictures))
    records = np.fromfile(pack / "train.index", RECORDS)[:5]
    records["end"] = np.cumsum([len(picture) for picture in pictures])
    records["checksum"] = [zlib.crc32(picture) for picture in pictures]
    records["name_end"] = [1, 2, 3, 4, 5]
    write_index(pack, "train", records, b"abcde")
    manifest = json.loads((pack / MANIFEST).read_text())
    entry = {"images": 5, "image_bytes": sum(map(len, pictures)), **sums(pack, "train")}
    manifest["splits"]["train"] |= entry
    (pack / MANIFEST).write_text(json.dumps(manifest))
    source = train_of(pack)
    for index, reason in ((0, "empty"), (1, "not an image"), (3, "truncated")):
        with pytest.raises(BadImage, match=reason):
            source.image(index)
    assert [number_in(source.image(index)) for index in (2, 4)] == [2, 4]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"two\nlines", "two\\nlines"),
        (b"\x1b[2J[red]x[/]", "\\x1b[2J[red]x[/]"),
        (b"\xff\xfe", "\\udcff\\udcfe"),
        ("\u202egnp.exe".encode(), "\\u202egnp.exe"),
        (b"back\\slash\n", "back\\slash\\n"),
        (b"", ""),
        (b"x" * 1_000_000, "x" * 65_536),
    ],
)
def test_names_stay_on_one_line(pack: Path, name: bytes, shown: str) -> None:
    def change(records: np.ndarray) -> None:
        records["name_end"] = len(name)

    forge(pack, change, name or b"-")
    if not name:
        forge(pack, lambda records: put("name_end", 11, 1)(records))
    assert train_of(pack).describe(0) == f"{pack}: {shown}"


def test_names_of_classes_stay_on_one_line(pack: Path) -> None:
    manifest = json.loads((pack / MANIFEST).read_text())
    (pack / MANIFEST).write_text(json.dumps(manifest | {"classes": ["a\nb", "\x1b[2J", "c\\d"]}))
    assert train_of(pack).classes == ("a\\nb", "\\x1b[2J", "c\\d")


TRAIN = {"images": 12, "image_bytes": 1, "name_bytes": 1, "labelled": True, "index_checksum": 0, "names_checksum": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something else"},
        {"version": 2},
        {"version": "1"},
        {"classes": None},
        {"classes": "abc"},
        {"classes": [1, 2, 3]},
        {"classes": [["a"]]},
        {"classes": []},
        {"splits": None},
        {"splits": []},
        {"splits": {}},
        {"splits": {"val": TRAIN}},
        {"splits": {"train": TRAIN, "../../etc/passwd": TRAIN}},
        {"splits": {"train": None}},
        {"splits": {"train": {}}},
        {"splits": {"train": TRAIN | {"more": 1}}},
        *({"splits": {"train": TRAIN | {"images": wrong}}} for wrong in (0, -1, 2**64, 1e9, True, "12", None, [12])),
        *({"splits": {"train": TRAIN | {"image_bytes": wrong}}} for wrong in (0, -1, 2**64, 10**15)),
        {"splits": {"train": TRAIN | {"images": 10**15}}},
        {"splits": {"train": TRAIN | {"labelled": 1}}},
        {"splits": {"train": TRAIN | {"labelled": "yes"}}},
    ],
)
def test_manifests_that_cannot_be(pack: Path, change: dict[str, Any]) -> None:
    manifest = json.loads((pack / MANIFEST).read_text())
    (pack / MANIFEST).write_text(json.dumps(manifest | change))
    with pytest.raises(UserError):
        open_data(str(pack))


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "3", "{", "[" * 100_000, '{"a":' * 100_000, '{"version": ' + "9" * 5000 + "}", "\xff"]
)
def test_manifests_that_are_none(pack: Path, text: str) -> None:
    (pack / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="damaged, or not about a pack"):
        open_data(str(pack))


@settings(max_examples=80)
@given(choices=st.data())
def test_any_index_is_refused_or_read(
    made: Path, tmp_path_factory: pytest.TempPathFactory, choices: st.DataObject
) -> None:
    """Bytes of the index and of the images are changed anywhere; the sums are made to fit."""
    folder = tmp_path_factory.getbasetemp() / "fuzzed pack"
    shutil.copytree(made / "pack", folder, dirs_exist_ok=True)

    def change(records: np.ndarray) -> None:
        data = records.view(np.uint8)
        for _ in range(choices.draw(st.integers(0, 4))):
            data[choices.draw(st.integers(0, len(data) - 1))] = choices.draw(st.integers(0, 255))

    forge(folder, change)
    flip(folder / "train.images", choices.draw(st.integers(0, (folder / "train.images").stat().st_size - 1)))
    try:
        source = open_pack("fuzzed", str(folder))[0]
    except UserError:
        return
    for index in range(len(source)):
        assert source.describe(index).isprintable()
        with contextlib.suppress(BadImage):
            assert source.image(index).dtype == torch.uint8
