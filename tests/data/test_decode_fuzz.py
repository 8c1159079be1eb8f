"""Whatever the bytes, decoding gives a picture or BadImage, and nothing else: mutations of valid files."""

from __future__ import annotations

import struct
import warnings
from functools import partial

import hostile
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from PIL import Image

from co2.data.decode import decode_image
from co2.data.source import BadImage

SMALL = np.random.default_rng(1).integers(0, 256, (9, 11, 3), dtype=np.uint8)
_GREY = SMALL[..., 0]
VALID = {
    "jpeg": hostile.saved("JPEG", SMALL),
    "progressive": hostile.saved("JPEG", SMALL, progressive=True),
    "cmyk": hostile.saved("JPEG", Image.fromarray(SMALL).convert("CMYK")),
    "turned": hostile.saved(
        "JPEG", SMALL, exif=b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHIHHI", 1, 0x112, 3, 1, 6, 0, 0)
    ),
    "png": hostile.saved("PNG", SMALL),
    "sixteen": hostile.saved("PNG", _GREY.astype(np.uint16) * 200),
    "palette": hostile.saved("PNG", Image.fromarray(SMALL).quantize(7), transparency=2),
    "apng": hostile.saved("PNG", Image.fromarray(SMALL), save_all=True, append_images=[Image.new("RGB", (11, 9))]),
    "webp": hostile.saved("WEBP", SMALL),
    "lossless": hostile.saved("WEBP", Image.fromarray(SMALL).convert("RGBA"), lossless=True),
    "bmp": hostile.saved("BMP", SMALL),
    "gif": hostile.saved("GIF", SMALL, save_all=True, append_images=[Image.new("RGB", (11, 9))]),
    "tiff": hostile.saved("TIFF", SMALL),
    "lzw": hostile.saved("TIFF", SMALL, compression="tiff_lzw"),
    "deflate": hostile.saved("TIFF", _GREY.astype(np.float32), compression="tiff_adobe_deflate"),
    "fax": hostile.saved("TIFF", Image.fromarray(_GREY > 99), compression="group4"),
}
EXTREME = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]


def mutated(choices: DataObject) -> bytes:
    """A valid file after a few accidents: changed bytes, extreme numbers, parts cut, doubled, moved or swapped."""
    draw = choices.draw
    data = bytearray(VALID[draw(st.sampled_from(sorted(VALID)))])
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(1, 40))
        match draw(st.sampled_from(["change", "number", "cut", "double", "insert", "end", "other"])):
            case "change":
                data[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case "number":
                order, value = draw(st.sampled_from("<>")), draw(st.sampled_from(EXTREME))
                form = "BHI"[(value > 0xFF) + (value > 0xFFFF)]
                number = struct.pack(order + form, value)
                data[place : place + len(number)] = number
            case "cut":
                del data[place : place + length]
            case "double":
                data[place:place] = data[place : place + length]
            case "insert":
                data[place:place] = draw(st.binary(min_size=1, max_size=20))
            case "end":
                del data[place:]
            case "other":
                other = VALID[draw(st.sampled_from(sorted(VALID)))]
                data[place : place + length] = other[place : place + length]
    return bytes(data)


def check(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none may reach the user
        try:
            image = decode_image(data)
        except BadImage as reason:
            text = str(reason)
            assert text
            assert text.isprintable()
            assert "0x" not in text  # an address in memory is no reason
        else:
            assert image.dtype == torch.uint8
            assert image.ndim == 3
            assert image.shape[0] == 3


fuzz = partial(settings, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", sorted(VALID))
def test_the_seeds_themselves_are_read(name: str) -> None:
    assert decode_image(VALID[name]).numel() == 3 * 9 * 11


@fuzz(max_examples=400)
@given(st.data())
def test_mutations(choices: DataObject) -> None:
    check(mutated(choices))


@fuzz(max_examples=200)
@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"BM", b"RIFF"]),
)
def test_any_bytes_at_all(data: bytes, magic: bytes) -> None:
    check(magic + data)


@pytest.mark.slow
@fuzz(max_examples=30_000)
@given(st.data())
def test_many_mutations(choices: DataObject) -> None:
    check(mutated(choices))
