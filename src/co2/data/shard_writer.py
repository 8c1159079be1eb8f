"""Writing tar shards in the WebDataset convention, from any images."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from co2.data.decode import EXTENSIONS, opened
from co2.data.destination import claimed, write_json
from co2.data.fingerprint import fingerprint
from co2.data.open import open_splits
from co2.data.packed import read_json
from co2.data.shard_storage import index_of
from co2.data.shards import CLASSES_FILE, MANIFEST
from co2.data.source import HELD_OUT, BadImage, ImageSource, Progress, in_words, printable
from co2.errors import RunError, UserError
from co2.files import appearing_when_whole, unfinished

SIZE_MIB = 512
_SHARD = rf"({'|'.join(('train', *HELD_OUT))})-\d{{6}}\.tar"
_OURS = re.compile(rf"({_SHARD}|{re.escape(MANIFEST)}|{re.escape(CLASSES_FILE)})")
_BLOCK = 512
_ANOTHER_NAME = {".jpeg": ".jpg", ".jfif": ".jpg", ".tiff": ".tif"}  # by which more programs know them


@dataclass(frozen=True)
class Written:
    """What `write_shards` has done."""

    images: int
    """How many images lie in the shards now, those of an earlier attempt included."""
    shards: int
    left_out: tuple[tuple[str, str], ...]
    """Each image whose bytes could not be read, and why."""


def write_shards(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    size_mib: float = SIZE_MIB,
    count: int | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write train-000000.tar, ... with the images of `source`, whatever `open_data` opens; and val-000000.tar, ... or
    test-000000.tar, ... with those that it holds out.

    Images that are files are copied as they are, good or bad, and others written as PNG. KEY.cls beside KEY.jpg holds
    the class number, and classes.json the names. A shard appears when it is whole. If the program is interrupted, run
    it again with the same arguments: finished shards are kept.

    Args:
        source: as for --data.
        destination: a folder that is new, empty, or was begun by this function with the same arguments.
        size_mib: about how large a shard becomes; only the last is smaller.
        count: how many images a shard holds instead, if given.
        progress: told after each image how far things are.
    """
    if not 0 < size_mib < math.inf or (count is not None and count < 1):
        raise UserError("A shard needs room for an image: give a --size-mib above 0, or a --count of at least 1.")
    source, destination = os.fspath(source).rstrip("/") or "/", os.fspath(destination)
    splits = open_splits(source)
    splits.pop("bank", None)  # shards are of what is trained on, and of what is held out
    manifest = {
        "format": "co2 shards",
        "source": source,
        "images": {split: len(images) for split, images in splits.items()},
        "names": fingerprint(splits.values()),
        "size_mib": size_mib if count is None else None,
        "count": count,
        "finished": False,
    }
    try:
        with claimed(destination, _foreign):
            _begin(destination, manifest, splits)
            written = _write(destination, splits, _Limit(int(size_mib * 2**20), count), progress)
            write_json(os.path.join(destination, MANIFEST), {**manifest, "finished": True})
            return written
    except OSError as error:
        raise RunError(
            f"The shards in '{printable(destination)}' cannot be written any further: {in_words(error)}. Those that "
            "are there are whole: make room or name another folder, and run the command again to go on."
        ) from None


@dataclass(frozen=True)
class _Limit:
    size: int
    count: int | None

    def reached(self, size: int, count: int) -> bool:
        return size >= self.size if self.count is None else count >= self.count


def _write(folder: str, splits: dict[str, ImageSource], limit: _Limit, progress: Progress | None) -> Written:
    total = sum(len(images) for images in splits.values())
    done = images = shards = 0
    left_out: list[tuple[str, str]] = []
    for split, part in splits.items():
        writer = _SplitWriter(folder, split, part, limit)
        for index in writer.write():
            if progress is not None:
                progress(done + index + 1, total)
        done += len(part)
        images += writer.images
        shards += writer.shards
        left_out += writer.left_out
    return Written(images, shards, tuple(left_out))


class _SplitWriter:
    """Writes the shards of one split, from where an earlier attempt ended."""

    def __init__(self, folder: str, split: str, source: ImageSource, limit: _Limit) -> None:
        self.folder = folder
        self.split = split
        self.source = source
        self.limit = limit
        self.left_out: list[tuple[str, str]] = []
        self.images = 0
        self.shards = 0

    def write(self) -> Iterator[int]:
        """Yields the number of each image when it is done with."""
        position = self._finished()
        while position < len(self.source):
            samples = self._samples(position)
            first = next(samples, None)
            if first is None:  # nothing but unreadable files were left
                break
            path = self._path(self.shards)
            size = written = 0
            with _new_tar(path) as archive:
                for index, members in itertools.chain([first], samples):
                    for name, data in members:
                        _add(archive, name, data)
                        size += _BLOCK + -(-len(data) // _BLOCK) * _BLOCK
                    written += 1
                    position = index + 1
                    yield index
                    if self.limit.reached(size, written):
                        break
                else:
                    position = len(self.source)
            index_of(path)  # read it back, and keep its index beside it
            self.images += written
            self.shards += 1

    def _finished(self) -> int:
        """Count the shards that are there, and return the number of the first image that is in none of them."""
        position = 0
        while os.path.exists(self._path(self.shards)):
            index, _ = index_of(self._path(self.shards))
            key = index.names[len(index) - 1].split(b".")[0] if len(index) else b""
            if index.damage or not key.isdigit():
                raise UserError(
                    f"'{printable(self._path(self.shards))}' is damaged. Delete it, and run the command again."
                )
            position = int(key) + 1
            self.images += len(index)
            self.shards += 1
        return position

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, f"{self.split}-{number:06d}.tar")

    def _samples(self, first: int) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
        """From image `first` on: its number, and the names and bytes of the members that make it up."""
        for index in range(first, len(self.source)):
            try:
                data, extension = self.source.encoded(index)
            except BadImage as error:
                self.left_out.append((self.source.describe(index), str(error)))
                continue
            members = [(f"{index:09d}{_known_extension(data, extension)}", data)]
            if self.source.labels is not None:
                members.append((f"{index:09d}.cls", str(int(self.source.labels[index])).encode()))
            yield index, members


def _known_extension(data: bytes, extension: str) -> str:
    """One by which a member of an archive is known to be an image: a list may name files that have another, or none."""
    if extension in EXTENSIONS:
        return _ANOTHER_NAME.get(extension, extension)
    try:
        with opened(data) as image:
            found = f".{(image.format or '').lower()}"
    except Exception:  # no image, for whatever reason: who reads it will say so
        found = ""
    return _ANOTHER_NAME.get(found, found) if found in EXTENSIONS else ".jpg"


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # owner, time and so on are the same for all, so that equal images make equal shards
    member.size = len(data)
    member.mode = 0o444
    archive.addfile(member, io.BytesIO(data))


@contextmanager
def _new_tar(path: str) -> Iterator[tarfile.TarFile]:
    """A tar file that has its name only once it is complete and on the disk."""
    with (
        appearing_when_whole(path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        yield archive


def _foreign(present: set[str]) -> set[str]:
    if MANIFEST not in present:  # which comes before all others
        return {name for name in present if unfinished(name) != MANIFEST}
    return {name for name in present if not _OURS.fullmatch(unfinished(name) or name)}


def _begin(folder: str, manifest: dict[str, Any], splits: dict[str, ImageSource]) -> None:
    """Write down what the shards are made of, or make sure that an earlier attempt was at the same."""
    path = os.path.join(folder, MANIFEST)
    if os.path.exists(path):
        begun = read_json(path)
        if isinstance(begun, dict):
            # Earlier versions did not write down the names.
            begun = {"names": manifest["names"], **begun, "finished": manifest["finished"]}
        if begun != manifest:
            raise UserError(
                f"The shards in '{printable(folder)}' were begun from another source, from other images or with other "
                "settings. Run the command that began them, on the data as they were then, or name a new folder."
            )
    for name in os.listdir(folder):
        if _OURS.fullmatch(unfinished(name) or ""):
            os.remove(os.path.join(folder, name))
    write_json(path, manifest)
    classes = max((images.classes for images in splits.values()), key=len)  # the others have the first of them
    if classes:
        write_json(os.path.join(folder, CLASSES_FILE), list(classes))
