"""Which JPEGs are handed to a GPU: those about which no two decoders disagree."""

import io
import struct

import pytest
from hostile import jpeg_of_early_scans, jpeg_of_many_scans
from hypothesis import given
from hypothesis import strategies as st
from inputs import jpeg, png, smooth, turned
from PIL import Image

from co2.data import decode
from co2.data.plain_jpeg import plain_jpeg_size


def exif(*entries, order="<"):
    """Notes with these (tag, kind, count, value)."""
    body = struct.pack(order + "H", len(entries))
    body += b"".join(struct.pack(order + "HHIHH", tag, kind, count, value, 0) for tag, kind, count, value in entries)
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + mark + struct.pack(order + "I", 8) + body + bytes(4)


PICTURE = smooth(0, 23, 41)


@pytest.mark.parametrize(
    "data",
    [
        jpeg(PICTURE),
        jpeg(PICTURE, quality=30, optimize=True),
        *(jpeg(PICTURE, subsampling=sampling) for sampling in (0, 1, 2)),
        jpeg(PICTURE.convert("L")),
        jpeg(PICTURE, comment=b"<script>"),
        jpeg(PICTURE, icc_profile=bytes(70_000)),
        jpeg(PICTURE, restart_marker_blocks=2),
        turned(PICTURE, 1),
        jpeg(PICTURE, exif=exif((0x0112, 3, 1, 1), order=">")),
        jpeg(PICTURE, exif=exif((0x010F, 3, 1, 7))),
        jpeg(PICTURE, xmp=b"<x:xmpmeta>a story</x:xmpmeta>"),
    ],
)
def test_plain_jpegs(data):
    assert plain_jpeg_size(data) == (23, 41)


def replaced(data, old, new):
    assert old in data
    return data.replace(old, new, 1)


FRAME = b"\xff\xc0\x00\x11\x08\x00\x17\x00\x29\x03"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        png(PICTURE),
        jpeg(PICTURE, progressive=True),
        jpeg_of_many_scans(5),
        jpeg_of_early_scans(5, 64),
        jpeg(PICTURE)[:-2] + bytes.fromhex("ffda0008010100003f00") * 20_000 + b"\xff\xd9",  # scans after the whole one
        jpeg(PICTURE, comment=b"x" * 60_000, icc_profile=bytes(1_200_000)),  # more to look at than the worker has time
        jpeg(PICTURE)[:2] + b"\xff\xfe\0\2" * 1000 + jpeg(PICTURE)[2:],
        jpeg(PICTURE.convert("CMYK")),
        jpeg(PICTURE, keep_rgb=True),
        *(turned(PICTURE, orientation) for orientation in range(2, 10)),
        jpeg(PICTURE, exif=exif((0x0112, 3, 1, 6), order=">")),
        jpeg(PICTURE, exif=exif((0x0112, 4, 1, 1))),
        jpeg(PICTURE, exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage"),
        jpeg(PICTURE, exif=b"Exif\0\0"),
        jpeg(PICTURE, xmp=b'<rdf tiff:Orientation="6"/>'),
        jpeg(PICTURE) + b"\0",
        jpeg(PICTURE)[:-2],
        replaced(jpeg(PICTURE), FRAME, FRAME[:4] + b"\x0c" + FRAME[5:]),  # 12 bits
        replaced(jpeg(PICTURE), FRAME, FRAME[:5] + b"\0\0" + FRAME[7:]),  # a height that comes later
        replaced(jpeg(PICTURE), FRAME, FRAME[:5] + b"\xff\xff\xff\xff" + FRAME[9:]),  # 4 billion pixels
        replaced(jpeg(PICTURE), FRAME, b"\xff\xc1" + FRAME[2:]),  # extended, not baseline
        replaced(jpeg(PICTURE), FRAME, b"\xff\xc9" + FRAME[2:]),  # arithmetic coding
        replaced(jpeg(PICTURE, subsampling=0), b"\x01\x11\x00\x02\x11\x01", b"\x01\x11\x00\x02\x22\x01"),
        replaced(jpeg(PICTURE), b"\xff\xc4", b"\xff\xfe"),  # a table is missing
        replaced(jpeg(PICTURE), b"\xff\xdb", b"\xff\xfe"),
        replaced(jpeg(PICTURE), b"\xff\xda\x00\x0c\x03\x01\x00", b"\xff\xda\x00\x0c\x03\x01\x22"),
        replaced(jpeg(PICTURE), b"\xff\xda\x00\x0c\x03", b"\xff\xda\x00\x0c\x01"),
    ],
)
def test_what_is_not_plain_is_left_to_the_cpu(data):
    assert plain_jpeg_size(data) is None


def test_a_picture_that_is_too_large_for_the_cpu_is_not_plain(monkeypatch):
    for name, most in (("MOST_PIXELS", 23 * 41), ("LONGEST_SIDE", 41)):
        with monkeypatch.context() as patch:
            patch.setattr(decode, name, most)
            assert plain_jpeg_size(jpeg(PICTURE)) == (23, 41)
            patch.setattr(decode, name, most - 1)
            assert plain_jpeg_size(jpeg(PICTURE)) is None


SOME = [jpeg(PICTURE), jpeg(PICTURE.convert("L")), turned(PICTURE, 1), jpeg(PICTURE, progressive=True)]


@pytest.mark.parametrize("data", SOME)
def test_what_is_cut_off_is_not_plain(data):
    assert all(plain_jpeg_size(data[:end]) is None for end in range(len(data)))
    for end in range(0, len(data) - 2, 7):
        plain_jpeg_size(data[:end] + b"\xff\xd9")  # does not raise


@given(st.binary(max_size=400))
def test_any_bytes_are_judged(data):
    for wrapped in (data, b"\xff\xd8" + data + b"\xff\xd9", b"\xff\xd8\xff\xe1" + data + b"\xff\xd9"):
        assert plain_jpeg_size(wrapped) is None or len(wrapped) > 60


@given(st.sampled_from(SOME), st.lists(st.tuples(st.integers(2, 700), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_header_gives_the_size_that_the_cpu_finds_or_none(data, changes):
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    size = plain_jpeg_size(bytes(damaged))
    if size is not None:
        with Image.open(io.BytesIO(bytes(damaged)), formats=["JPEG"]) as image:
            assert (image.height, image.width) == size
            assert image.mode in ("RGB", "L")
            assert image.getexif().get(0x0112, 1) == 1
