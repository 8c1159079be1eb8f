"""Where the images lie inside a tar file: an index that is built once and kept.

Only headers are read, one after the other, with bounded memory and from anything that can be read at a given place.
Nothing is ever unpacked: a member's name is a label for people and never becomes a path, so that '../../x', absolute
names, links and devices in an archive have nothing to act on. Python's `tarfile` is not used for reading because it
keeps an object for each member, believes sizes that it reads, and cannot say where a damaged archive ends.

Members are grouped as WebDataset does it: a sample is a run of members with the same name up to the first dot of the
last component, and what follows that dot tells what a member is: `0017.jpg`, `0017.cls`, `0017.json`.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from co2.data.decode import EXTENSIONS
from co2.data.folder import PackedPaths
from co2.data.source import printable
from co2.files import parse_json

Read = Callable[[int, int], bytes]
"""Called with an offset and a size; returns the bytes there, fewer at the end of the file."""

MOST_CLASSES = 1_000_000
_BLOCK = 512
_END = bytes(_BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes: never looked at
_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL = b"L", b"K", b"x", b"g"
_MOST_METADATA = 1 << 20  # a name or a label of more than a megabyte is no name and no label
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK": "zip"}
_SAMPLE_NAME = re.compile(rb"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_PAX_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]+)=")
_IMAGE_EXTENSIONS = tuple(extension[1:].encode() for extension in EXTENSIONS)
_COMPOUND_EXTENSIONS = tuple(extension.encode() for extension in EXTENSIONS)
_VERSION = 1
_LONGEST_HEAD = 1 << 16  # JSON can take many times its length in memory


class DamagedTar(Exception):  # noqa: N818  (it names the archive, not the program, as what is wrong)
    """A tar file that cannot be read further. The message is the reason, in a few plain words."""


@dataclass(frozen=True)
class TarIndex:
    """The images in a tar file."""

    offsets: np.ndarray
    """[N] int64: where the bytes of each image begin."""
    sizes: np.ndarray
    """[N] int64: how many they are."""
    labels: np.ndarray
    """[N] int64: the class of each image, -1 where the archive does not tell."""
    names: PackedPaths
    """What the archive calls them."""
    damage: str = ""
    """Why the archive could not be read to its end, if so."""

    def __len__(self) -> int:
        return len(self.offsets)


def build_index(read: Read, length: int) -> TarIndex:
    """Find the images in a tar file of `length` bytes. What comes after a damage is not found."""
    found = _Images()
    sample = _Sample()
    damage = ""
    try:
        for name, offset, size in tar_members(read, length):
            match = _SAMPLE_NAME.fullmatch(name)
            if match is None:
                continue
            key, extension = match[1], match[2].lower()
            if key != sample.key:
                found.take(sample)
                sample = _Sample(key)
            if extension in _IMAGE_EXTENSIONS:
                sample.plain.append((name, offset, size))
            elif extension.endswith(_COMPOUND_EXTENSIONS):
                sample.compound.append((name, offset, size))
            elif extension in (b"cls", b"json") and size <= _MOST_METADATA:
                label = _label(extension, read(offset, size))
                sample.label = label if label >= 0 else sample.label
    except DamagedTar as error:
        damage = str(error)
    found.take(sample)
    return found.index(damage)


@dataclass
class _Sample:
    key: bytes | None = None
    label: int = -1
    plain: list[tuple[bytes, int, int]] = field(default_factory=list)  # 'KEY.jpg': name, offset, size
    compound: list[tuple[bytes, int, int]] = field(default_factory=list)  # 'KEY.left.jpg'


class _Images:
    """What has been found so far, in a few bytes for each."""

    def __init__(self) -> None:
        self.offsets, self.sizes, self.labels, self.ends = array("q"), array("q"), array("q"), array("q")
        self.names = bytearray()

    def take(self, sample: _Sample) -> None:
        """The image of a sample is KEY.jpg. Where there is none, as in a plain archive of 'holiday.2021.07.jpg', all
        that end like one count; beside one they do not: 'KEY.mask.png' is no picture to learn from."""
        for name, offset, size in sample.plain[:1] or sample.compound:
            self.offsets.append(offset)
            self.sizes.append(size)
            self.labels.append(sample.label)
            self.names += name
            self.ends.append(len(self.names))

    def index(self, damage: str) -> TarIndex:
        offsets, sizes, labels, ends = (
            np.frombuffer(numbers, dtype=np.int64) if numbers else np.empty(0, np.int64)
            for numbers in (self.offsets, self.sizes, self.labels, self.ends)
        )
        names = np.frombuffer(bytes(self.names), dtype=np.uint8)
        return TarIndex(offsets, sizes, labels, PackedPaths.from_arrays(names, ends), damage)


def _label(extension: bytes, data: bytes) -> int:
    """The class number in KEY.cls, or under "cls" or "label" in KEY.json; -1 if there is none."""
    try:
        number: Any = int(data) if extension == b"cls" else json.loads(data)
        if isinstance(number, dict):
            number = number.get("cls", number.get("label"))
    except (ValueError, RecursionError):
        return -1
    return number if type(number) is int and 0 <= number < MOST_CLASSES else -1


# The format: POSIX.1-1988 (ustar), with the extensions of POSIX.1-2001 (pax) and GNU for long names and large sizes.


def tar_members(read: Read, length: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset and size of the regular files in a tar file. Raises DamagedTar where it cannot be read further."""
    position = 0
    long_name: bytes | None = None
    long_size: int | None = None
    while True:
        header = read(position, _BLOCK)
        if header == _END:
            return
        if len(header) < _BLOCK:
            raise DamagedTar("it is cut off" if position else "it is no tar file")
        if not _checksum_fits(header):
            raise DamagedTar(f"it is damaged at byte {position:,}" if position else _what_else(header))
        kind = header[156:157]
        data = position + _BLOCK
        size = 0 if kind in _WITHOUT_DATA else _number(header[124:136])
        if kind in _REGULAR and long_size is not None:
            size = long_size
        if size < 0:
            raise DamagedTar(f"it is damaged at byte {position:,}")
        if data + size > length:
            raise DamagedTar("it is cut off, or tells of more bytes than it has")
        position = data + -(-size // _BLOCK) * _BLOCK
        if kind in (_LONG_NAME, _PAX, _PAX_FOR_ALL, _LONG_LINK):
            if size > _MOST_METADATA:
                raise DamagedTar(f"it has a name of {size:,} bytes")
            if kind == _LONG_NAME:
                long_name = read(data, size).split(b"\0", 1)[0]
            elif kind == _PAX:
                records = _pax_records(read(data, size))
                long_name = records.get(b"path", long_name)
                long_size = _decimal(records[b"size"]) if b"size" in records else long_size
            continue
        if kind == b"S":
            raise DamagedTar("it has sparse files, which are not read")
        if kind in _REGULAR:
            name = long_name if long_name is not None else _name(header)
            if not name.endswith(b"/"):  # how old archives write folders
                yield name, data, size
        long_name = long_size = None


def _checksum_fits(header: bytes) -> bool:
    told = _number(header[148:156])
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if told == total:
        return True
    signed = total - 256 * sum(byte > 127 for byte in header[:148] + header[156:])  # as some old programs add up
    return told == signed


def _number(text: bytes) -> int:
    """A number in a header: octal digits, or with the highest bit set the bytes of a large one. -1 if it is neither."""
    if text[0] in (0o200, 0o377):
        return int.from_bytes(text[1:], "big") if text[0] == 0o200 else -1
    digits = text.split(b"\0", 1)[0].strip()
    if not digits:
        return 0
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else -1


def _decimal(text: bytes) -> int:
    return int(text) if re.fullmatch(rb"[0-9]{1,18}", text) else -1


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Lines of 'LENGTH KEY=VALUE', where LENGTH counts the whole line."""
    records: dict[bytes, bytes] = {}
    position = 0
    while (match := _PAX_RECORD.match(data, position)) is not None:
        end = position + int(match[1])
        if not match.end() < end <= len(data):
            break
        records[match[2]] = data[match.end() : end - 1]
        position = end
    return records


def _what_else(beginning: bytes) -> str:
    for magic, name in _COMPRESSED.items():
        if beginning.startswith(magic):
            return f"it is compressed by {name}, and images in it cannot be reached without unpacking it all"
    return "it is no tar file"


# The index as a file: a line of JSON, then the arrays. Its length follows from the line, so that reading one, whoever
# wrote it, takes no more memory than the file has bytes.


def index_to_bytes(index: TarIndex, length: int, stamp: str) -> bytes:
    """The index as it is kept, good as long as the tar file has this length and this stamp."""
    numbers = np.concatenate([index.offsets, index.sizes, index.labels, index.names.ends])  # [4N]
    body = numbers.astype("<i8").tobytes() + index.names.joined.tobytes()
    head = {
        "format": "co2 tar index",
        "version": _VERSION,
        "length": length,
        "stamp": stamp,
        "images": len(index),
        "checksum": zlib.crc32(body),
        "damage": index.damage,
    }
    return json.dumps(head).encode() + b"\n" + body


def index_from_bytes(data: bytes, length: int, stamp: str) -> TarIndex | None:
    """The index that `index_to_bytes` wrote; None if it is about another state of the tar file, or no sound index."""
    try:
        end = data.index(b"\n", 0, _LONGEST_HEAD)
        head, body = parse_json(data[:end]), data[end + 1 :]
        told = {name: head[name] for name in ("format", "version", "length", "stamp", "checksum")}
        count, damage = head["images"], head["damage"]
    except (ValueError, TypeError, KeyError):
        return None
    expected = {"format": "co2 tar index", "version": _VERSION, "length": length, "stamp": stamp}
    if told != expected | {"checksum": zlib.crc32(body)} or type(count) is not int or not 0 <= 32 * count <= len(body):
        return None
    offsets, sizes, labels, ends = np.frombuffer(body, dtype="<i8", count=4 * count).astype(np.int64).reshape(4, count)
    names = np.frombuffer(body, dtype=np.uint8, offset=32 * count)
    inside = (offsets >= 0) & (sizes >= 0) & (offsets <= length) & (sizes <= length - offsets)
    in_order = np.diff(ends, prepend=0) >= 0
    labelled = (labels >= -1) & (labels < MOST_CLASSES)
    if not (inside.all() and in_order.all() and labelled.all() and (not count or ends[-1] == len(names))):
        return None
    return TarIndex(offsets, sizes, labels, PackedPaths.from_arrays(names, ends), printable(str(damage)))
