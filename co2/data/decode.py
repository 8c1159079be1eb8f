"""From an image file to pixels: whatever the format, uint8 RGB, upright.

What is transparent is laid over white, as most programs show it: the colours stored under transparent pixels are
often garbage. Numbers of 16 bits are scaled to 8, never clipped. Of an animation the first frame is taken.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import warnings
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from co2.data.source import BadImage

# Only these decoders are tried, whatever a file is called: some of Pillow's others start external programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

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
_BITS_PER_SAMPLE_TAG = 258

# Pillow reports oddities of TIFF files through its logger, which prints to the terminal unless it has a handler.
logging.getLogger("PIL").addHandler(logging.NullHandler())


def read_image(path: str | bytes | os.PathLike[str]) -> torch.Tensor:
    """The image in a file as uint8 [3, H, W]. Raises BadImage, and nothing else, if there is none to be had."""
    try:
        information = os.stat(path)
        if not stat.S_ISREG(information.st_mode):
            raise BadImage("not a regular file")  # reading a pipe would wait for ever
        if information.st_size == 0:
            raise BadImage("empty file (0 bytes)")
        with open(path, "rb") as file:
            return _decode(file)
    except FileNotFoundError:
        raise BadImage("the file does not exist") from None
    except PermissionError:
        raise BadImage("no permission to read it") from None
    except (OSError, ValueError) as error:  # a failing disk, or a path with a NUL in it
        raise BadImage(f"cannot be opened ({_in_words(error)})") from None


def decode_image(data: bytes) -> torch.Tensor:
    """The image in these bytes as uint8 [3, H, W]. Raises BadImage, and nothing else, if there is none to be had."""
    if not data:
        raise BadImage("empty file (0 bytes)")
    return _decode(io.BytesIO(data))


def _decode(file: BinaryIO) -> torch.Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file, formats=FORMATS) as image:
                image.load()
                rgb = _rgb(_upright(image))
                pixels = np.array(rgb)  # [H, W, 3] uint8
    except UnidentifiedImageError:
        raise BadImage("not an image, or damaged at its beginning") from None
    except Image.DecompressionBombError:
        raise BadImage(f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0) // 1_000_000} million pixels") from None
    except MemoryError:
        raise BadImage("does not fit into memory") from None
    except Exception as error:  # a broken file makes Pillow raise anything from SyntaxError to struct.error
        if "truncated" in str(error).lower():
            raise BadImage("truncated file") from None
        raise BadImage(f"damaged file ({_in_words(error)})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)  # Pillow turns TIFF itself and takes the tag away
    except Exception:  # unreadable notes beside good pixels do not spoil the picture
        return image
    operation = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if operation is None else image.transpose(operation)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Grey values that need more than 8 bits, scaled to 0..255: [H, W] uint8.

    The full range is known for unsigned numbers of 16 (or 12) bits. Numbers of 32 bits and real numbers come without
    one: they are read as 0..1, 0..255 or 0..65535, the first that holds all of them, and else stretched.
    """
    values = np.asarray(image).astype(np.float64)  # [H, W]
    finite = np.isfinite(values)
    values = np.where(finite, values, values[finite].min() if finite.any() else 0.0)
    low, high = float(values.min()), float(values.max())
    if image.mode.startswith("I;16") or image.format == "PNG":
        tags = getattr(image, "tag_v2", None) or {}
        bits = tags.get(_BITS_PER_SAMPLE_TAG, (16,))[0]
        low, high = 0.0, float(2**bits - 1)
    elif low >= 0 and image.mode == "F" and high <= 1:
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    scaled = (values - low) * (255.0 / (high - low or 1.0))
    return np.rint(scaled).clip(0, 255).astype(np.uint8)


def _in_words(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().rstrip(".")
