"""From an image file to pixels: whatever the format, uint8 RGB, upright.

What is transparent is laid over white, as most programs show it: the colours stored under transparent pixels are
often garbage. Numbers of 16 bits are scaled to 8, never clipped. Of an animation the first frame is taken.

Files come from anywhere, so nothing in them is believed: whatever a file claims or holds, reading it gives pixels or
`BadImage`, opens nothing but regular files and starts no program. What a picture will cost is known before it is
decoded: at most 2.5 GiB of memory, and at most 40 times the time that a good one of as many pixels takes (one of fewer
than a million counting as a million). What cannot keep to that is refused by what stands in its header.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from co2.data.source import BadImage, in_words
from co2.files import MOST_BYTES, UnreadableFile, read_bytes

# Only these decoders are tried, whatever a file is called: some of Pillow's others start external programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

# A few kilobytes can unpack to gigabytes. Photographs of 108 million pixels exist; a file that holds so many pixels
# without any compression, with transparency, just fits the third limit.
MOST_PIXELS = 128_000_000
LONGEST_SIDE = 65_535  # as JPEG has it; a longer row or column costs more than its pixels
MOST_SCANS = 50  # each scan of a JPEG is a pass over all pixels; programs write about ten
TOO_LARGE = f"larger than {MOST_BYTES // 2**20} MiB"

# EXIF tag 0x0112 says how the camera was held; each value is undone by one transposition.
_ORIENTATION_TAG = 0x0112
_UPRIGHT: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {  # of pixels [3, H, W]
    2: lambda pixels: pixels.flip(2),
    3: lambda pixels: pixels.flip(1, 2),
    4: lambda pixels: pixels.flip(1),
    5: lambda pixels: pixels.transpose(1, 2),
    6: lambda pixels: pixels.transpose(1, 2).flip(2),
    7: lambda pixels: pixels.transpose(1, 2).flip(1, 2),
    8: lambda pixels: pixels.transpose(1, 2).flip(1),
}
_SIDEWAYS = (5, 6, 7, 8)
_PIXELS_AT_ONCE = 1 << 20

# What is read of a file before its pixels, and beside them, is bounded too.
_SMALL_FILE = 1 << 16  # bytes: nothing in so small a file takes long but its pixels
_STEPS = 1 << 14  # calls that read
_BYTES_OF_HEADER = 8 * 2**20
_NOTES = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}
_MOST_NOTES = 1 << 16  # bytes of EXIF, as much as fits into a JPEG's segment
_MOST_HELD = 2_500 * 2**20
_WEBP_BYTES_PER_PIXEL = 17  # two canvases of libwebp's, what it hands over and what Pillow makes of it, and a frame

# A JPEG's mark for a scan, with as many bytes after it as its number of components demands. In other data of the file,
# such as a film, it comes by chance once in hundreds of billions of bytes.
_SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")

# Of TIFF.
_TIFF = (b"II", b"MM")
_WIDTH_TAG, _HEIGHT_TAG, _BITS_PER_SAMPLE_TAG, _TILE_WIDTH_TAG, _TILE_HEIGHT_TAG = 256, 257, 258, 322, 323
_STRIP_TAGS = (273, 279, 324, 325)  # where strips are and how long, and tiles
_DIRECTORY_TAGS, _MOST_NESTED = (330, 34665, 34853, 40965), 16
_BYTES_TYPES, _POINTER_TYPES = (1, 2, 6, 7), (4, 13, 16)
_MOST_STRIPS, _MOST_NUMBERS = 1 << 18, 1 << 17
_LARGE_TILE = 1 << 22  # pixels

# Pillow reports oddities of TIFF files through its logger, which prints to the terminal unless it has a handler.
logging.getLogger("PIL").addHandler(logging.NullHandler())


def read_image(path: str | bytes | os.PathLike[str]) -> torch.Tensor:
    """The image in a file as uint8 [3, H, W]. Raises BadImage, and nothing else, if there is none to be had."""
    with unreadable_is_bad():
        data = read_bytes(path, empty=False)
    return decode_image(data)


@contextmanager
def unreadable_is_bad() -> Iterator[None]:
    """Of a file that cannot be read, as of one that holds no image, the reason is told by BadImage."""
    try:
        yield
    except UnreadableFile as error:
        raise BadImage(str(error)) from None


def decode_image(data: bytes) -> torch.Tensor:
    """The image in these bytes as uint8 [3, H, W]. Raises BadImage, and nothing else, if there is none to be had."""
    if not data:
        raise BadImage("empty file (0 bytes)")
    try:
        with _NO_WARNINGS, opened(data) as image:
            image.load()
            orientation = _orientation(image)
            pixels = _pixels(image)  # [3, H, W]
            if orientation in _UPRIGHT:
                image.close()  # its memory is not held beside that of both others
                pixels = _UPRIGHT[orientation](pixels).contiguous()
            return pixels
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image, or damaged at its beginning") from None
    except Image.DecompressionBombError:  # Pillow has a limit of its own, further up
        raise BadImage(f"more than {MOST_PIXELS // 1_000_000} million pixels") from None
    except MemoryError:
        raise BadImage("does not fit into memory") from None
    except Exception as error:  # a broken file makes Pillow raise anything from SyntaxError to struct.error
        if "truncated" in str(error).lower():
            raise BadImage("truncated file") from None
        raise BadImage(f"damaged file ({in_words(error)})") from None


def upright_size(path: str | bytes | os.PathLike[str]) -> tuple[int, int]:
    """Width and height of the image in a file, once it is upright, from its header.

    An image that cannot be read has no size, (0, 0). Whoever loads it is told so.
    """
    try:
        with _NO_WARNINGS, opened(read_bytes(path, empty=False)) as image:
            (width, height), tags = image.size, getattr(image, "tag_v2", None)
            orientation = _orientation(image) if tags is None else tags.get(_ORIENTATION_TAG)
            if tags is not None:  # whether the size of a TIFF is told as it will be turned depends on Pillow's version
                width, height = tags[_WIDTH_TAG], tags[_HEIGHT_TAG]
            return (height, width) if orientation in _SIDEWAYS else (width, height)
    except Exception:  # a broken file makes Pillow raise anything from SyntaxError to struct.error
        return 0, 0


# What a picture will cost.


def too_large(width: int, height: int) -> str | None:
    """Why a picture of this size is not read, whatever way it takes; None if it may be."""
    if width * height > MOST_PIXELS:
        return f"more than {MOST_PIXELS // 1_000_000} million pixels"
    return f"a side of more than {LONGEST_SIDE:,} pixels" if max(width, height) > LONGEST_SIDE else None


def opened(data: bytes, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """The image in these bytes, not decoded yet, once it is known that decoding it will not cost too much.

    Raises BadImage if it would, and whatever Pillow raises about other files.
    """
    if data[:2] in _TIFF:
        _check_tags(data)
    file: Any = io.BytesIO(data) if len(data) <= _SMALL_FILE else _Metered(data)
    image = Image.open(file, formats=formats)
    width, height = image.size
    if reason := too_large(width, height):
        raise BadImage(reason)
    if isinstance(image, JpegImageFile):
        # Where the header of the first scan, which Pillow has read last, names all components, there is no other scan.
        place, count = file.tell() - 8 - 2 * image.layers, image.layers
        at_once = data[place : place + 5] == bytes((0xFF, 0xDA, 0, 6 + 2 * count, count))
        several = image.format != "JPEG" or "progressive" in image.info or not at_once
        if several and sum(1 for _ in itertools.islice(_SCAN.finditer(data), MOST_SCANS + 1)) > MOST_SCANS:
            raise BadImage(f"more than {MOST_SCANS} scans")
    elif image.format == "TIFF":
        _check_strips(image, len(data))
    elif image.format == "WEBP" and width * height * _WEBP_BYTES_PER_PIXEL + 2 * len(data) > _MOST_HELD:
        raise BadImage(f"takes more than {_MOST_HELD / 2**30:.1f} GiB to decode")
    if isinstance(file, _Metered):  # from now on pixels are read, too, of a BMP perhaps in short runs
        file.steps += width * height * 3 // 2 if image.format == "BMP" else width * height // 3
        file.bytes += 2 * len(data)
    return image


class _Metered:
    """A file in memory that fails when it is read in more parts, or more often, than its pixels can be worth.

    Files can be made of millions of parts with nothing in them, and Pillow looks at each: at every byte in vain before
    a JPEG's header, every chunk of a PNG, every run of no pixels in a BMP.
    """

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.seek, self.tell = self._file.seek, self._file.tell
        self.steps = _STEPS
        # All notes in a TIFF are read, and twice; of others so much stands before the pixels at most.
        self.bytes = _BYTES_OF_HEADER + (2 * len(data) if data[:2] in _TIFF else 0)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.steps -= 3000 if data[4:] == b"iCCP" else 1  # a PNG's colour profile is unpacked, up to a mebibyte
        self.bytes -= len(data) if size >= 0 else 0  # some ask for the whole file, once
        if self.steps < 0 or self.bytes < 0:
            raise BadImage("more work to read than its pixels can be worth")
        return data


def _check_tags(data: bytes) -> None:
    """Refuses a TIFF with long lists of numbers: each number becomes an object before anything is known of it."""
    order, big = "<" if data[:1] == b"I" else ">", data[2:3] == b"+"
    forms = ("HHQQ", "Q", "Q") if big else ("HHII", "I", "H")
    entry, pointer, count = (struct.Struct(order + form) for form in forms)
    directories = [*pointer.unpack(data[8:16] if big else data[4:8])] if len(data) >= 16 else []
    for first in directories:  # of which there become more: notes have directories of their own
        entries = int.from_bytes(data[first : first + count.size], "little" if order == "<" else "big")
        first += count.size
        last = min(first + min(entries, _STEPS) * entry.size, len(data) - entry.size + 1)
        for place in range(first, last, entry.size):
            tag, kind, numbers, value = entry.unpack_from(data, place)
            most = _MOST_STRIPS if tag in _STRIP_TAGS else len(data) if kind in _BYTES_TYPES else _MOST_NUMBERS
            nested = tag in _DIRECTORY_TAGS
            astray = nested and (kind not in _POINTER_TYPES or len(directories) > _MOST_NESTED)
            if astray or most < numbers <= len(data):  # what is not there is not read
                raise BadImage("more numbers in its header than a picture has")
            directories += [value] if nested and value not in directories else []


def _check_strips(image: Image.Image, length: int) -> None:
    """Refuses a TIFF whose parts together are larger than it, or are larger than the picture that they make up."""
    tags = getattr(image, "tag_v2", {})
    across, down = tags.get(_TILE_WIDTH_TAG, 0), tags.get(_TILE_HEIGHT_TAG, 0)
    if max(across, down) > LONGEST_SIDE or across * down > max(2 * image.width * image.height, _LARGE_TILE):
        raise BadImage("tiles that are larger than the picture")
    for offsets, counts in (_STRIP_TAGS[:2], _STRIP_TAGS[2:]):
        parts, sizes = len(tags.get(offsets, ())), tags.get(counts, ())
        if parts > 1 and image.info["compression"] != "raw" and not (parts <= len(sizes) and sum(sizes) <= 2 * length):
            raise BadImage("parts that are larger than the file")


class _NoWarnings:
    """Keeps warnings quiet while any thread is inside.

    `warnings.catch_warnings` alone is not made for threads: one that leaves later than it entered brings back the
    other's silence, for good.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):  # the threads that were inside are not in a forked process
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._caught = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._caught.__exit__(None, None, None)


_NO_WARNINGS = _NoWarnings()


def _orientation(image: Image.Image) -> int | None:
    """How the camera was held, as EXIF tells it (1 to 8), if it does."""
    if image.format != "PNG" and _NOTES.isdisjoint(image.info):  # a PNG has them behind its pixels, too
        return None
    for notes in ("exif", "Raw profile type exif"):
        if len(image.info.get(notes, b"")) > _MOST_NOTES:  # what matters stands at their beginning
            image.info[notes] = image.info[notes][:_MOST_NOTES]
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)  # Pillow turns TIFF itself and takes the tag away
    except Exception:  # unreadable notes beside good pixels do not spoil the picture
        return None
    return orientation if isinstance(orientation, int) else None


def _pixels(image: Image.Image) -> torch.Tensor:
    """[3, H, W] uint8, made of a few rows at a time: a large picture is not held in a third and a fourth way."""
    values = _range(image) if image.mode[0] in "IF" else None
    width, height = image.size
    if width * height <= 4 * _PIXELS_AT_ONCE:
        return torch.from_numpy(np.array(_rgb(image, values))).permute(2, 0, 1).contiguous()
    pixels = torch.empty(3, height, width, dtype=torch.uint8)
    top = 0
    for band in _bands(image):
        pixels[:, top : top + band.height] = torch.from_numpy(np.array(_rgb(band, values))).permute(2, 0, 1)
        top += band.height
    return pixels


def _bands(image: Image.Image) -> Iterator[Image.Image]:
    """The rows of an image, about a million pixels of them at once."""
    rows = max(1, _PIXELS_AT_ONCE // image.width)
    for top in range(0, image.height, rows):
        yield image.crop((0, top, image.width, min(top + rows, image.height)))


def _rgb(image: Image.Image, values: tuple[float, float] | None) -> Image.Image:
    """In RGB, over white. Of numbers of more than 8 bits `values` are what becomes black and what becomes white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if values is not None:
        grey = _eight_bits(np.asarray(image), *values)  # [H, W]
        if isinstance(image.info.get("transparency"), int):  # the one value that is see-through, over white
            grey[np.asarray(image) == image.info["transparency"]] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", layer.size, (255, 255, 255))
        white.paste(layer, mask=layer)
        return white
    return image.convert("RGB")


def _eight_bits(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Grey values that need more than 8 bits, scaled to 0..255: [H, W] uint8."""
    numbers = np.nan_to_num(values.astype(np.float64), nan=low, posinf=low, neginf=low)
    return np.rint((numbers - low) * (255.0 / (high - low or 1.0))).clip(0, 255).astype(np.uint8)


def _range(image: Image.Image) -> tuple[float, float]:
    """Which values are black and white in grey of more than 8 bits.

    The full range is known for unsigned numbers of 16 (or 12) bits. Numbers of 32 bits and real numbers come without
    one: they are read as 0..1, 0..255 or 0..65535, the first that holds all of them, and else stretched.
    """
    if image.mode.startswith("I;16") or image.format == "PNG":
        tags = getattr(image, "tag_v2", None) or {}
        bits = tags.get(_BITS_PER_SAMPLE_TAG, (16,))[0]
        return 0.0, float(2**bits - 1)
    found = (values[np.isfinite(values)] for values in map(np.asarray, _bands(image)))
    ends = [float(end) for some in found if len(some) for end in (some.min(), some.max())] or [0.0]
    low, high = min(ends), max(ends)
    if low >= 0 and image.mode == "F" and high <= 1:
        return 0.0, 1.0
    if low >= 0 and high <= 255:
        return 0.0, 255.0
    if low >= 0 and high <= 65535:
        return 0.0, 65535.0
    return low, high
