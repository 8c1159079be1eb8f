"""Packed images: a data set of any number of images in three files for each split, as `co2 data pack` writes them.

    co2-pack.json       what the pack was made of, its classes, and the length and checksum of each index
    train.images        JPEG files, one directly after the other
    train.index         for each image a record of 32 bytes (see RECORD)
    train.names         what the images were called before, one name directly after the other
    val.images, ...     the same for other splits

All three are mapped into memory, so that opening a pack takes no time worth speaking of and worker processes share what
they read. A record tells where an image ends, and it begins where the one before it ended: whatever an index says,
images never overlap, and with the last end at the file's length none of them lies outside.

A pack comes from anywhere, so nothing in it is believed. What can be checked of a million images in a fraction of a
second is checked when a pack is opened: the checksums of index and names, all numbers in the index, and the length of
the images. An image's own checksum is compared whenever it is read; `verify_pack` does that for all of them.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from co2.data.decode import MOST_PIXELS, TOO_LARGE, decode_image
from co2.data.source import (
    HELD_OUT,
    BadImage,
    ImageSource,
    Parts,
    Progress,
    choose_held_out,
    in_numbers,
    in_words,
    printable,
)
from co2.data.tar_index import MOST_CLASSES
from co2.errors import UserError
from co2.files import MOST_BYTES, MissingFile, UnreadableFile, open_regular, parse_json, read_bytes

MANIFEST = "co2-pack.json"
UNFINISHED = "co2-pack.unfinished.json"
BAD_IMAGES = "bad_images.txt"
FORMAT, VERSION = "co2 pack", 1
SPLITS = ("train", "bank", *HELD_OUT)
"""What the splits of a pack can be called. A bank has labels where what is trained on has none, as in STL-10."""

RECORD = struct.Struct("<qqIIIi")
RECORDS = np.dtype(
    [
        ("end", "<i8"),  # of the image, counted from the beginning of the images
        ("name_end", "<i8"),  # of its name, counted from the beginning of the names
        ("checksum", "<u4"),  # CRC-32 of the image's bytes
        ("height", "<u4"),
        ("width", "<u4"),
        ("label", "<i4"),  # -1 without labels
    ]
)
LONGEST_SIDE = 65_500  # of a JPEG, as libjpeg writes them


_MOST_MANIFEST_BYTES = 32 * 2**20
_LONGEST_NAME = 1 << 16
_AGAIN = "Copy the pack again, or make it anew with `co2 data pack`."


class PackedSource(ImageSource):
    """The images of one split of a pack."""

    def __init__(self, name: str, folder: str, split: str, classes: tuple[str, ...], checks: SplitChecks) -> None:
        self.name = name
        self.split = split
        self._images = _stamped(os.path.join(folder, f"{split}.images"), checks.image_bytes)
        self._index = _stamped(os.path.join(folder, f"{split}.index"), checks.images * RECORD.size)
        self._names = _stamped(os.path.join(folder, f"{split}.names"), checks.name_bytes)
        self._length = checks.images
        labels = _checked_labels(self._index, self._names, checks, len(classes))
        self.labels = labels if checks.labelled else None
        self.classes = classes if checks.labelled else ()

    def __len__(self) -> int:
        return self._length

    def image(self, index: int) -> torch.Tensor:
        pixels = decode_image(self.encoded(index)[0])
        if tuple(pixels.shape[1:]) != self.size(index):
            raise BadImage("not of the size that the index of the pack tells")
        return pixels

    def encoded(self, index: int) -> tuple[bytes, str]:
        start, end, checksum = self._place(index)
        if end - start > MOST_BYTES:
            raise BadImage(TOO_LARGE)
        data = _read(self._images, start, end)
        if zlib.crc32(data) != checksum:
            raise BadImage("damaged in the pack (its checksum differs)")
        return data, ".jpg"

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of image `index`, without decoding it."""
        _, _, _, height, width, _ = self._record(index)
        return height, width

    def describe(self, index: int) -> str:
        try:
            start = self._record(index - 1)[1] if index else 0
            end = self._record(index)[1]
            name = _read(self._names, start, min(end, start + _LONGEST_NAME))
        except BadImage:  # a pack that is gone has no names left
            return f"{printable(self.name)}: image {index}"
        return f"{printable(self.name)}: {_one_line(name.decode('utf-8', 'surrogateescape'))}"

    def _place(self, index: int) -> tuple[int, int, int]:
        start = self._record(index - 1)[0] if index else 0
        end, _, checksum, *_ = self._record(index)
        return start, end, checksum

    def _record(self, index: int) -> tuple[int, int, int, int, int, int]:
        if not 0 <= index < self._length:
            raise IndexError(f"a pack of {self._length} images has no image {index}")
        data = _read(self._index, index * RECORD.size, (index + 1) * RECORD.size)
        return RECORD.unpack(data)  # six integers


def _one_line(name: str) -> str:
    """A name out of a pack as one line. Names went through `printable` on their way in, so a backslash stays one."""
    if name.isprintable():
        return name
    return "".join(character if character == "\\" else printable(character) for character in name)


# Files.

Stamped = tuple[str, int, int, int]
"""A file and its state: path, length, number on the disk, time of its last change."""


class _Mapped:
    """A file in memory. It is read at given places, so forked processes and threads can share it."""

    def __init__(self, file: Stamped) -> None:
        with open_regular(file[0], sys.maxsize) as opened:
            if _stamp(file[0], os.fstat(opened.fileno())) != file:
                raise BadImage("the pack has changed since it was opened")
            self.memory = mmap.mmap(opened.fileno(), file[1], access=mmap.ACCESS_READ)

    def read(self, start: int, end: int) -> bytes:
        # To touch memory of a file that was cut off meanwhile would end the process, so look first.
        if self.memory.size() < len(self.memory):
            raise BadImage("the pack was cut off after it was opened")
        return self.memory[start:end]


@lru_cache(maxsize=64)
def _map(file: Stamped) -> _Mapped:
    return _Mapped(file)


def _read(file: Stamped, start: int, end: int) -> bytes:
    """The bytes from `start` to `end`. Raises BadImage, and nothing else."""
    try:
        return _map(file).read(start, end)
    except MissingFile:
        raise BadImage("the pack does not exist any more") from None
    except (OSError, ValueError) as error:
        raise BadImage(f"the pack cannot be read ({in_words(error)})") from None


def _stamped(path: str, length: int) -> Stamped:
    """A file of a pack that has the length it should have."""
    try:
        information = os.stat(path)
    except OSError as error:
        raise UserError(f"'{printable(path)}' cannot be read: {in_words(error)}. {_AGAIN}") from None
    if not stat.S_ISREG(information.st_mode):
        raise UserError(f"'{printable(path)}' is not a regular file. {_AGAIN}")
    if information.st_size != length:
        raise UserError(f"'{printable(path)}' has {information.st_size:,} bytes instead of {length:,}. {_AGAIN}")
    return _stamp(path, information)


def _stamp(path: str, information: os.stat_result) -> Stamped:
    return path, information.st_size, information.st_ino, information.st_mtime_ns


# Opening.


@dataclass(frozen=True)
class SplitChecks:
    """What the manifest says about a split."""

    images: int
    image_bytes: int
    name_bytes: int
    labelled: bool
    index_checksum: int
    names_checksum: int


def is_pack(path: str) -> bool:
    """Whether this is a folder that `co2 data pack` has written, or begun to."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (MANIFEST, UNFINISHED))


def open_pack(name: str, folder: str) -> Parts:
    """What is in a pack. `name` is what the user calls it."""
    splits = open_pack_splits(name, folder)
    train = splits["train"]
    bank = splits.get("bank", train)
    test, held_out = choose_held_out([split for split in splits if split in HELD_OUT], splits.__getitem__)

    words = f"{printable(name)}: {in_numbers(train)}, packed"
    if "bank" in splits:
        words += f"; {in_numbers(bank)} to look things up in"
    return train, bank if bank.labels is not None else None, test, words + held_out


def open_pack_splits(name: str, folder: str) -> dict[str, PackedSource]:
    """All splits of a pack, by their names."""
    manifest = read_manifest(folder)
    classes, checks = _contents(os.path.join(folder, MANIFEST), manifest)
    return {split: PackedSource(name, folder, split, classes, checks[split]) for split in checks}


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a finished pack."""
    path = os.path.join(folder, MANIFEST)
    if not os.path.exists(path):
        raise UserError(
            f"The pack in '{printable(folder)}' is unfinished. Run the `co2 data pack` that began it again: it goes on "
            "where it stood."
            if os.path.exists(os.path.join(folder, UNFINISHED))
            else f"There is no pack in '{printable(folder)}'. Make one with `co2 data pack SOURCE DESTINATION`."
        )
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"'{printable(path)}' is damaged, or not about a pack. {_AGAIN}")
    if manifest.get("version") != VERSION:
        raise UserError(f"'{printable(path)}' was written by another version of co2. {_AGAIN}")
    return manifest


def read_json(path: str) -> object:
    """What is in a JSON file, or None if it is none."""
    try:
        data = read_bytes(path, _MOST_MANIFEST_BYTES)
    except UnreadableFile as error:
        raise UserError(f"'{printable(path)}' cannot be read: {error}. Repair it, or name a new folder.") from None
    try:
        return parse_json(data)
    except UnreadableFile:
        return None


def _contents(path: str, manifest: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, SplitChecks]]:
    classes, splits = manifest.get("classes"), manifest.get("splits")
    try:
        if not isinstance(classes, list) or len(classes) > MOST_CLASSES or not all(type(c) is str for c in classes):
            raise ValueError("no list of names")
        if not isinstance(splits, dict) or "train" not in splits or not set(splits) <= set(SPLITS):
            raise ValueError("no splits, or unknown ones")
        checks = {split: _checks(splits[split]) for split in SPLITS if split in splits}
    except ValueError:
        raise UserError(f"'{printable(path)}' is damaged. {_AGAIN}") from None
    return tuple(map(_one_line, classes)), checks


def _checks(entry: object) -> SplitChecks:
    numbers = ("images", "image_bytes", "name_bytes", "index_checksum", "names_checksum")
    if not isinstance(entry, dict) or set(entry) != {*numbers, "labelled"} or type(entry["labelled"]) is not bool:
        raise ValueError("not what is said about a split")
    if not all(type(entry[name]) is int and 0 <= entry[name] < 2**62 for name in numbers):
        raise ValueError("no numbers")
    if not all(entry[name] for name in numbers[:3]):
        raise ValueError("a split without images")
    return SplitChecks(**entry)


def _checked_labels(index: Stamped, names: Stamped, checks: SplitChecks, classes: int) -> np.ndarray:
    """The labels [N] int64 of a split, once everything in its index is known to be sound."""
    try:
        index_memory, names_memory = _map(index).memory, _map(names).memory
        sums = zlib.crc32(index_memory), zlib.crc32(names_memory)
    except (BadImage, OSError, ValueError) as error:
        raise UserError(f"'{printable(index[0])}' cannot be read: {in_words(error)}. {_AGAIN}") from None
    if sums != (checks.index_checksum, checks.names_checksum):
        wrong = names if sums[0] == checks.index_checksum else index
        raise UserError(f"'{printable(wrong[0])}' is damaged: its checksum differs. {_AGAIN}")
    records = np.frombuffer(index_memory, dtype=RECORDS)  # [N]
    heights, widths, labels = records["height"], records["width"], records["label"]  # [N] each
    lowest, highest = (0, classes - 1) if checks.labelled else (-1, -1)
    sound = (
        _in_order(records["end"], checks.image_bytes)
        and _in_order(records["name_end"], checks.name_bytes)
        and 1 <= heights.min() <= heights.max() <= LONGEST_SIDE
        and 1 <= widths.min() <= widths.max() <= LONGEST_SIDE
        and (heights.astype(np.int64) * widths).max() <= MOST_PIXELS
        and lowest <= labels.min() <= labels.max() <= highest
    )
    if not sound:
        raise UserError(f"'{printable(index[0])}' has numbers in it that cannot be. {_AGAIN}")
    return labels.astype(np.int64)


def _in_order(ends: np.ndarray, last: int) -> bool:
    return bool(ends[0] >= 0 and (ends[1:] >= ends[:-1]).all() and ends[-1] == last)


# Checking all of it.


@dataclass(frozen=True)
class Verified:
    """What `verify_pack` has found."""

    images: int
    damaged: tuple[tuple[str, str], ...]
    """Each image whose bytes are not those that were written, and why."""


def verify_pack(folder: str | os.PathLike[str], progress: Progress | None = None) -> Verified:
    """Read every byte of a pack and compare it with its checksum. An index that is damaged is a UserError."""
    folder = os.fspath(folder)
    splits = open_pack_splits(folder, folder)
    total = sum(map(len, splits.values()))
    done = 0
    damaged = []
    for source in splits.values():
        for index in range(len(source)):
            try:
                source.encoded(index)
            except BadImage as error:
                damaged.append((source.describe(index), str(error)))
            done += 1
            if progress is not None:
                progress(done, total)
    return Verified(total, tuple(damaged))
