"""Writing packed images (see `co2.data.packed` for the format), from any images.

Worker processes read, decode, resize and encode; this process alone writes, in the order of the source, at the ends of
a few files. Every few seconds what was written is brought to the disk, and then a small file says how far things are:
how long each file is, and with which image to go on. Whatever ends the program, the next attempt cuts the files back to
these lengths and goes on from that image, so that in the end they hold the same bytes as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from co2.data.decode import decode_image
from co2.data.destination import claimed, write_json
from co2.data.fingerprint import fingerprint, name_bytes
from co2.data.open import open_splits
from co2.data.packed import (
    BAD_IMAGES,
    FORMAT,
    LONGEST_SIDE,
    MANIFEST,
    RECORD,
    UNFINISHED,
    VERSION,
    SplitChecks,
    open_pack_splits,
    read_json,
    read_manifest,
)
from co2.data.plain_jpeg import plain_frame
from co2.data.source import BadImage, ImageSource, Progress, in_words, printable
from co2.errors import RunError, UserError
from co2.files import UnreadableFile, open_own, open_regular, remove_leftovers, unfinished
from co2.machine.device import cores
from co2.machine.workers import WorkerLost, in_parts, results_of

SHORTER_SIDE, QUALITY = 256, 90
_SECONDS_BETWEEN_COMMITS = 5.0
_IMAGES_AT_ONCE = 16  # in one message from a worker
_MOST_BESIDE_PIXELS = 1 << 16  # bytes of thumbnails and notes that may be copied along with an image


@dataclass(frozen=True)
class Packed:
    """What `write_pack` has done."""

    images: dict[str, int]
    """How many images each split has now."""
    left_out: int
    """How many could not be read. Their names and the reasons are in bad_images.txt in the pack."""


def write_pack(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    shorter_side: int = SHORTER_SIDE,
    quality: int = QUALITY,
    workers: int = -1,
    progress: Progress | None = None,
) -> Packed:
    """Write a packed copy of the images of `source`, whatever `open_data` opens, with their splits, labels and names.

    Every image becomes an upright RGB JPEG whose shorter side has at most `shorter_side` pixels; none is enlarged. A
    baseline JPEG that is that already is copied byte for byte. An image that cannot be read is left out and named in
    bad_images.txt. If the program is interrupted, run it again with the same arguments: it goes on where it stood.

    Args:
        source: as for --data.
        destination: a folder that is new, empty, or was begun by this function with the same arguments.
        shorter_side: in pixels.
        quality: of the JPEGs, from 1 to 100.
        workers: processes that decode and encode; -1 takes every core, 0 works in this process.
        progress: told at the beginning and after every few images how far things are.
    """
    if shorter_side < 1:
        raise UserError(f"--shorter-side must be at least 1; got {shorter_side}.")
    if not 1 <= quality <= 100:
        raise UserError(f"--quality must be from 1 to 100; got {quality}.")
    source, destination = os.fspath(source).rstrip("/") or "/", os.fspath(destination)
    splits = open_splits(source)
    made_of = {
        "source": source,
        "shorter_side": shorter_side,
        "quality": quality,
        "images": {split: len(images) for split, images in splits.items()},
        "names": fingerprint(splits.values()),
    }
    recipe = _Recipe(shorter_side, quality)
    if workers < 0:
        workers = cores()
    try:
        with claimed(destination, _foreign):
            for name in (MANIFEST, UNFINISHED):
                remove_leftovers(os.path.join(destination, name))
            if not _is_finished(destination, made_of):
                _write(destination, splits, made_of, recipe, workers, progress)
                _finish(destination, splits, made_of)
    except OSError as error:
        raise RunError(
            f"The pack in '{printable(destination)}' cannot be written any further: {in_words(error)}. What is there "
            "is kept: make room or name another folder, and run the command again to go on."
        ) from None
    left_out = read_manifest(destination)["left_out"]
    return Packed({split: len(images) for split, images in open_pack_splits(source, destination).items()}, left_out)


# One image.


@dataclass(frozen=True)
class _Image:
    data: bytes
    height: int
    width: int


@dataclass(frozen=True)
class _Recipe:
    shorter_side: int
    quality: int

    def pack(self, data: bytes) -> _Image:
        """The image in a file as it lies in a pack. Raises BadImage."""
        pixels = decode_image(data).permute(1, 2, 0).numpy()  # [H, W, 3]
        height, width, _ = pixels.shape
        shorter = min(height, width)
        if shorter <= self.shorter_side and _is_plain_jpeg(data, height, width):
            return _Image(data, height, width)
        picture = Image.fromarray(np.ascontiguousarray(pixels))
        if shorter > self.shorter_side:
            width, height = (max(1, round(side * self.shorter_side / shorter)) for side in (width, height))
            # Pillow widens the filter by the factor of the reduction, which is what prevents aliasing.
            picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        if max(height, width) > LONGEST_SIDE:
            raise BadImage(f"longer than {LONGEST_SIDE:,} pixels, and no JPEG can be")
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=self.quality)
        return _Image(file.getvalue(), height, width)


def _is_plain_jpeg(data: bytes, height: int, width: int) -> bool:
    """Whether every decoder, also one on a GPU, makes the same upright RGB picture of this file, and quickly."""
    frame = plain_frame(data)
    if frame is None or len(data) > 3 * height * width + _MOST_BESIDE_PIXELS:
        return False
    return (frame.height, frame.width, len(frame.names)) == (height, width, 3)


# Many images.


class _PackedImages:
    def __init__(self, source: ImageSource, recipe: _Recipe) -> None:
        self.source = source
        self.recipe = recipe

    def __call__(self, indices: range) -> list[_Image | str]:
        """Each image as it lies in a pack, or the reason why there is none."""
        results: list[_Image | str] = []
        for index in indices:
            try:
                results.append(self.recipe.pack(self.source.encoded(index)[0]))
            except BadImage as error:
                results.append(str(error))
        return results


def _packed_images(source: ImageSource, recipe: _Recipe, first: int, workers: int) -> Iterator[list[_Image | str]]:
    parts = in_parts(range(first, len(source)), _IMAGES_AT_ONCE)
    try:
        yield from results_of(_PackedImages(source, recipe), parts, workers, tensors=False)
    except WorkerLost as error:
        raise RunError(f"{error} What is packed is kept: run the command again to go on.") from None


# Files.


@dataclass
class _Done:
    """How far a split is."""

    position: int = 0
    """The first image of the source that is not done with."""
    images: int = 0
    image_bytes: int = 0
    name_bytes: int = 0


@dataclass
class _State:
    """How far a pack is. What is beyond in the files does not count."""

    splits: dict[str, _Done]
    bad_bytes: int = 0
    left_out: int = 0

    def write(self, folder: str, made_of: dict[str, Any]) -> None:
        write_json(os.path.join(folder, UNFINISHED), {"format": FORMAT, "made_of": made_of, "state": asdict(self)})

    @staticmethod
    def read(folder: str, made_of: dict[str, Any]) -> _State:
        path = os.path.join(folder, UNFINISHED)
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(f"'{printable(path)}' is damaged. Delete the unfinished pack, and begin again.")
        _refuse_other_settings(folder, content, made_of)
        try:
            state = content["state"]
            splits = {split: _Done(**state["splits"][split]) for split in made_of["images"]}
            read = _State(splits, state["bad_bytes"], state["left_out"])
            numbers = [read.bad_bytes, read.left_out, *(n for done in splits.values() for n in asdict(done).values())]
            sound = all(type(number) is int and 0 <= number < 2**62 for number in numbers) and all(
                done.images <= done.position <= made_of["images"][split] for split, done in splits.items()
            )
        except (KeyError, TypeError):
            sound = False
        if not sound:
            raise UserError(f"'{printable(path)}' is damaged. Delete the unfinished pack, and begin again.")
        return read


@dataclass
class _Growing:
    """A file that grows at its end. Unbuffered: workers are forked meanwhile, and must not inherit unwritten bytes."""

    path: str
    length: int
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = open_own(self.path)
        if os.fstat(self.number).st_size < self.length:
            os.close(self.number)
            raise UserError(f"'{printable(self.path)}' was cut off. Delete the unfinished pack, and begin again.")
        os.ftruncate(self.number, self.length)

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # on a disk that is almost full, less may be written than was asked for
            rest = rest[os.write(self.number, rest) :]
        self.length += len(data)

    def bring_to_disk(self) -> None:
        os.fsync(self.number)

    def __enter__(self) -> _Growing:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)


def _write(
    folder: str,
    splits: dict[str, ImageSource],
    made_of: dict[str, Any],
    recipe: _Recipe,
    workers: int,
    progress: Progress | None,
) -> None:
    """Do what is still to be done, but for the manifest."""
    if os.path.exists(os.path.join(folder, UNFINISHED)):
        state = _State.read(folder, made_of)
    else:
        state = _State({split: _Done() for split in splits})
        state.write(folder, made_of)
    total = sum(map(len, splits.values()))
    if progress is not None:
        progress(sum(done.position for done in state.splits.values()), total)
    with _Growing(os.path.join(folder, BAD_IMAGES), state.bad_bytes) as bad:
        for split, source in splits.items():
            for _ in _write_split(folder, split, source, state, bad, made_of, recipe, workers):
                if progress is not None:
                    progress(sum(done.position for done in state.splits.values()), total)


def _write_split(
    folder: str,
    split: str,
    source: ImageSource,
    state: _State,
    bad: _Growing,
    made_of: dict[str, Any],
    recipe: _Recipe,
    workers: int,
) -> Iterator[None]:
    """Write a split to its end. Yields after every few images."""
    done = state.splits[split]
    if done.position == len(source):
        return
    with (
        _Growing(os.path.join(folder, f"{split}.images"), done.image_bytes) as images,
        _Growing(os.path.join(folder, f"{split}.names"), done.name_bytes) as names,
        _Growing(os.path.join(folder, f"{split}.index"), done.images * RECORD.size) as index,
    ):
        committed = time.monotonic()
        for some in _packed_images(source, recipe, done.position, workers):
            for position, image in enumerate(some, start=done.position):
                name = source.describe(position)
                if isinstance(image, str):
                    bad.append(name_bytes(f"{name}\t{image}\n"))
                    state.left_out += 1
                    continue
                images.append(image.data)
                names.append(name_bytes(name))
                label = -1 if source.labels is None else int(source.labels[position])
                checksum = zlib.crc32(image.data)
                index.append(RECORD.pack(images.length, names.length, checksum, image.height, image.width, label))
                done.images += 1
            done.position += len(some)
            done.image_bytes, done.name_bytes, state.bad_bytes = images.length, names.length, bad.length
            if done.position == len(source) or time.monotonic() - committed > _SECONDS_BETWEEN_COMMITS:
                for file in (images, names, index, bad):
                    file.bring_to_disk()
                state.write(folder, made_of)  # after the bytes that it speaks about
                committed = time.monotonic()
            yield


def _finish(folder: str, splits: dict[str, ImageSource], made_of: dict[str, Any]) -> None:
    """Write the manifest, which makes a pack of the files."""
    state = _State.read(folder, made_of)
    if not state.splits["train"].images:
        raise RunError(
            f"None of the images of '{printable(made_of['source'])}' could be read. "
            f"'{printable(os.path.join(folder, BAD_IMAGES))}' tells why."
        )
    entries = {}
    for split, done in state.splits.items():
        if done.images:
            lengths = {"index": done.images * RECORD.size, "names": done.name_bytes}
            sums = (_checksum(os.path.join(folder, f"{split}.{kind}"), length) for kind, length in lengths.items())
            labelled = splits[split].labels is not None
            entries[split] = asdict(SplitChecks(done.images, done.image_bytes, done.name_bytes, labelled, *sums))
    classes = max((source.classes for source in splits.values()), key=len)
    assert all(source.classes == classes[: len(source.classes)] for source in splits.values())
    content = {
        "format": FORMAT,
        "version": VERSION,
        "made_of": made_of,
        "left_out": state.left_out,
        "splits": entries,
        "classes": list(classes),
    }
    write_json(os.path.join(folder, MANIFEST), content)
    os.remove(os.path.join(folder, UNFINISHED))


def _checksum(path: str, length: int) -> int:
    """Of a file that has the length that was written."""
    checksum = 0
    try:
        with open_regular(path, sys.maxsize) as file:
            if os.fstat(file.fileno()).st_size != length:
                raise UnreadableFile("it has another length than was written")
            while part := file.read(1 << 20):
                checksum = zlib.crc32(part, checksum)
    except UnreadableFile as error:
        raise UserError(f"'{printable(path)}': {error}. Delete the unfinished pack, and begin again.") from None
    return checksum


# The folder.


def _foreign(present: set[str]) -> set[str]:
    begun = present & {MANIFEST, UNFINISHED}
    return set() if begun else {name for name in present if unfinished(name) != UNFINISHED}


def _is_finished(folder: str, made_of: dict[str, Any]) -> bool:
    if not os.path.exists(os.path.join(folder, MANIFEST)):
        return False
    _refuse_other_settings(folder, read_manifest(folder), made_of)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, UNFINISHED))  # left by a process that was killed after its last step but one
    return True


def _refuse_other_settings(folder: str, content: dict[str, Any], made_of: dict[str, Any]) -> None:
    theirs = content.get("made_of")
    if theirs == made_of:
        return
    theirs = theirs if isinstance(theirs, dict) else {}
    in_words = {
        "source": "another source",
        "shorter_side": "another --shorter-side",
        "quality": "another --quality",
        "images": "another number of images",
        "names": "images of other names or labels",
    }
    differ = [words for key, words in in_words.items() if theirs.get(key) != made_of[key]]
    raise UserError(
        f"The pack in '{printable(folder)}' was begun from or with {_listed(differ)}. "
        "Run the command that began it, on the data as they were then, or name a new folder."
    )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words) or "something else"
