"""From an image file to pixels: whatever the format, uint8 RGB, upright.

What is transparent is laid over white, as most programs show it: the colours stored under transparent pixels are
often garbage. Numbers of 16 bits are scaled to 8, never clipped. Of an animation the first frame is taken.

Files come from anywhere, so nothing in them is believed: whatever a file claims or holds, reading it gives pixels or
`BadImage`, opens nothing but regular files, starts no program and takes a bounded amount of memory.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from co2.data.source import BadImage, in_words
from co2.files import MOST_BYTES, UnreadableFile, open_regular

# Only these decoders are tried, whatever a file is called: some of Pillow's others start external programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

# A few kilobytes can unpack to gigabytes. Photographs of 108 million pixels exist; a file that holds so many pixels
# without any compression, with transparency, just fits the second limit.
MOST_PIXELS = 128_000_000
MOST_SCANS = 100  # each scan of a progressive JPEG is a pass over all pixels; programs write about ten
TOO_LARGE = f"larger than {MOST_BYTES // 2**20} MiB"

# EXIF tag 0x0112 says how the camera was held; each value is undone by one transposition.
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)
_BITS_PER_SAMPLE_TAG = 258
_PIXELS_AT_ONCE = 1 << 20

# Pillow reports oddities of TIFF files through its logger, which prints to the terminal unless it has a handler.
logging.getLogger("PIL").addHandler(logging.NullHandler())


def read_image(path: str | bytes | os.PathLike[str]) -> torch.Tensor:
    """The image in a file as uint8 [3, H, W]. Raises BadImage, and nothing else, if there is none to be had."""
    with unreadable_is_bad(), open_regular(path, empty=False) as file:
        return _decode(file)


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
    return _decode(io.BytesIO(data))


def _decode(file: BinaryIO) -> torch.Tensor:
    try:
        with _NO_WARNINGS, Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise Image.DecompressionBombError
            if "progressive" in image.info and _scans(file) > MOST_SCANS:
                raise BadImage(f"more than {MOST_SCANS} scans")
            image.load()
            rgb = _rgb(_upright(image))
            pixels = np.array(rgb)  # [H, W, 3] uint8
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
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def upright_size(path: str | bytes | os.PathLike[str]) -> tuple[int, int]:
    """Width and height of the image in a file, once it is upright, from the beginning of the file.

    An image that cannot be read has no size, (0, 0). Whoever loads it is told so.
    """
    try:
        with open_regular(path, empty=False) as file, _NO_WARNINGS, Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                return 0, 0
            if image.format == "TIFF":  # Pillow turns it itself, and until it is loaded its size may be turned or not
                image.load()
            width, height = image.size
            return (height, width) if _turn(image) in _SIDEWAYS else (width, height)
    except Exception:  # a broken file makes Pillow raise anything from SyntaxError to struct.error
        return 0, 0


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


def _scans(file: BinaryIO) -> int:
    """How many scans a JPEG begins: this mark can stand nowhere else but in what other programs left in its header."""
    file.seek(0)
    return file.read().count(b"\xff\xda")


def _upright(image: Image.Image) -> Image.Image:
    turn = _turn(image)
    return image if turn is None else image.transpose(turn)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What makes an image upright, if it is not."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)  # Pillow turns TIFF itself and takes the tag away
    except Exception:  # unreadable notes beside good pixels do not spoil the picture
        return None
    return _UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        grey = _eight_bits(image)  # [H, W]
        if isinstance(image.info.get("transparency"), int):  # the one value that is see-through, over white
            grey[np.asarray(image) == image.info["transparency"]] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", layer.size, (255, 255, 255))
        white.paste(layer, mask=layer)
        return white
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Grey values that need more than 8 bits, scaled to 0..255: [H, W] uint8.

    The full range is known for unsigned numbers of 16 (or 12) bits. Numbers of 32 bits and real numbers come without
    one: they are read as 0..1, 0..255 or 0..65535, the first that holds all of them, and else stretched.
    """
    values = np.asarray(image)  # [H, W]
    if image.mode.startswith("I;16") or image.format == "PNG":
        tags = getattr(image, "tag_v2", None) or {}
        bits = tags.get(_BITS_PER_SAMPLE_TAG, (16,))[0]
        low, high = 0.0, float(2**bits - 1)
    else:
        low, high = _range(values)
        if low >= 0 and image.mode == "F" and high <= 1:
            low, high = 0.0, 1.0
        elif low >= 0 and high <= 255:
            low, high = 0.0, 255.0
        elif low >= 0 and high <= 65535:
            low, high = 0.0, 65535.0
    scaled = np.empty(values.shape, dtype=np.uint8)
    rows = max(1, _PIXELS_AT_ONCE // values.shape[1])
    for first in range(0, len(values), rows):  # a large image as float64 would be eight times as large again
        some = np.nan_to_num(values[first : first + rows].astype(np.float64), nan=low, posinf=low, neginf=low)
        scaled[first : first + rows] = np.rint((some - low) * (255.0 / (high - low or 1.0))).clip(0, 255)
    return scaled


def _range(values: np.ndarray) -> tuple[float, float]:
    """The smallest and largest value that is a number at all."""
    if values.dtype.kind != "f":
        return float(values.min()), float(values.max())
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
