"""What a picture costs is known before it is decoded: in memory, in passes over its pixels, and in parts to look at."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import costly
import hostile
import pytest
from costly import animated_webp, bmp, chunk, costs, exif, good_jpeg, png, segment, tiff, with_segments
from hostile import in_bounds, saved
from PIL import Image

from co2.data import decode
from co2.data.decode import MOST_SCANS, decode_image
from co2.data.source import BadImage

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells how much memory was taken")

MOST_MEMORY = 2560  # MiB, for 128 million pixels
MOST_TIME = 40  # times what a good one of as many pixels takes

TOO_LONG = "a side of more than 65,535 pixels"
TOO_MANY_SCANS = f"more than {MOST_SCANS} scans"
TOO_MANY_PARTS = "more work to read than its pixels can be worth"
TOO_MANY_NUMBERS = "more numbers in its header than a picture has"
PROFILE = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20)))
GREY_TABLE = b"\0" + bytes(range(1, 65))
EMPTY_RESOURCE = b"8BIM\1\2" + bytes(6)

REFUSED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "sequential JPEG, 20,000 scans": (TOO_MANY_SCANS, lambda: hostile.jpeg_of_early_scans(20_000, 11_000)),
    "sequential JPEG, a scan too many": (TOO_MANY_SCANS, lambda: hostile.jpeg_of_early_scans(MOST_SCANS, 64)),
    "arithmetic JPEG, 20,000 scans": (TOO_MANY_SCANS, lambda: hostile.jpeg_of_early_scans(20_000, 11_000, 0xC9)),
    "progressive arithmetic JPEG": (TOO_MANY_SCANS, lambda: hostile.jpeg_of_early_scans(20_000, 11_000, 0xCA)),
    "MPO, 20,000 scans": (TOO_MANY_SCANS, lambda: mpo_of_scans(20_000)),
    "JPEG, a scan of two components at once": (
        TOO_MANY_SCANS,
        lambda: hostile.jpeg_of_early_scans(1, 64).replace(
            bytes.fromhex("ffda0008010100003f00"), bytes.fromhex("ffda000a02010002003f00") * 101
        ),
    ),
    "BMP, 127 million in a row": (TOO_LONG, lambda: bmp(127_000_000, 1, 8, b"")),
    "BMP, 70,000 in a row": (TOO_LONG, lambda: bmp(70_000, 1, 8)),
    "BMP of 1 bit, 127 million in a column": (TOO_LONG, lambda: bmp(1, 127_000_000, 1, b"")),
    "RGBA PNG, 70,000 in a column": (TOO_LONG, lambda: png(1, 70_000, 6)),
    "PNG, many chunks before the pixels": (TOO_MANY_PARTS, lambda: png(8, 8, 2, before=[chunk(b"prVt")] * 100_000)),
    "PNG, many chunks after the pixels": (TOO_MANY_PARTS, lambda: png(8, 8, 2, after=[chunk(b"prVt")] * 100_000)),
    "PNG, many empty chunks of pixels": (TOO_MANY_PARTS, lambda: png(8, 8, 2, before=[chunk(b"IDAT")] * 100_000)),
    "PNG, many colour profiles": (TOO_MANY_PARTS, lambda: png(8, 8, 2, before=[PROFILE] * 100)),
    "JPEG, junk before its header": (
        TOO_MANY_PARTS,
        lambda: with_segments(saved("JPEG"), segment(0xFE), bytes(1 << 20)),
    ),
    "JPEG, many comments": (TOO_MANY_PARTS, lambda: with_segments(saved("JPEG"), segment(0xFE) * 100_000)),
    "JPEG, 20 MB of notes in pieces": (
        TOO_MANY_PARTS,
        lambda: with_segments(saved("JPEG"), segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 310),
    ),
    "GIF, a comment in pieces": (TOO_MANY_PARTS, lambda: costly.gif_with_comment(200_000, b"a")),
    "BMP, steps over no pixels": (TOO_MANY_PARTS, lambda: bmp(8, 8, 8, b"\0\2\0\0" * 50_000, compression=1)),
    "BMP, runs beyond the row": (TOO_MANY_PARTS, lambda: bmp(8, 8, 8, b"\xff\1" * 50_000, compression=1)),
    "TIFF, a million fractions": (TOO_MANY_NUMBERS, lambda: tiff((282, 5, 1_000_000, bytes(8_000_000)))),
    "TIFF, two million strips": (TOO_MANY_NUMBERS, lambda: tiff((273, 4, 2_000_000, bytes(8_000_000)))),
    "TIFF, a million fractions, told last": (
        TOO_MANY_NUMBERS,
        lambda: tiff((282, 5, 1_000_000, bytes(8_000_000)))[:-4],
    ),
    "TIFF, strips told in bytes": (TOO_MANY_NUMBERS, lambda: tiff((273, 1, 2_000_000, bytes(2_000_000)))),
    "TIFF, fractions in its notes": (
        TOO_MANY_NUMBERS,
        lambda: tiff((34665, 4, 1, 8), pixels=struct.pack("<HHHIII", 1, 33434, 5, 1_000_000, 40, 0) + bytes(8_000_000)),
    ),
    "TIFF, notes in notes": (
        TOO_MANY_NUMBERS,
        lambda: tiff(
            (330, 4, 1, 8), pixels=b"".join(struct.pack("<HHHII", 1, 330, 4, 1, 22 + 14 * n) for n in range(5000))
        ),
    ),
    "TIFF, all strips the same bytes": (
        "parts that are larger than the file",
        lambda: costly.tiff_of_one_strip_many_times(60_000, 500_000),
    ),
    "TIFF, strips without lengths": (
        "parts that are larger than the file",
        lambda: costly.tiff_of_one_strip_many_times(60_000, 500_000).replace(
            struct.pack("<HH", 279, 4), struct.pack("<HH", 280, 4)
        ),
    ),
    "TIFF, a tile of a billion pixels": (
        "tiles that are larger than the picture",
        lambda: costly.tiff_of_a_tile(32_768, 32_768, costly.deflated_zeros(64 << 20), 8),
    ),
    "TIFF, a row of a gigabyte": (
        "tiles that are larger than the picture",
        lambda: costly.tiff_of_a_tile(1 << 30, 8, bytes(1 << 20), 1),
    ),
}


def mpo_of_scans(scans: int) -> bytes:
    """Two pictures in one file, the first of which has so many scans before its own."""
    pictures = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    data = saved("MPO", pictures[0], save_all=True, append_images=pictures[1:])
    first = data.index(b"\xff\xda")
    return data[:first] + bytes.fromhex("ffda0008010100003f00") * scans + data[first:]


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_cost_too_much_is_refused_in_time(name: str) -> None:
    reason, make = REFUSED[name]
    data = make()
    assert in_bounds(lambda: decode_image(data).shape) == f"BadImage: {reason}"


def test_what_a_webp_holds_is_counted_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = animated_webp(400, 300)
    holds = 17 * 400 * 300 + 2 * len(data)
    monkeypatch.setattr(decode, "_MOST_HELD", holds)
    assert decode_image(data).shape == (3, 300, 400)
    monkeypatch.setattr(decode, "_MOST_HELD", holds - 1)
    with pytest.raises(BadImage, match="GiB to decode"):
        decode_image(data)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_an_ordinary_jpeg_is_not_searched_for_scans(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_SCANS", 0)
    assert decode_image(saved("JPEG", Image.new(mode, (64, 64)))).shape == (3, 64, 64)
    with pytest.raises(BadImage, match="more than 0 scans"):
        decode_image(saved("JPEG", Image.new(mode, (64, 64)), progressive=True))


def test_what_costs_little_is_read() -> None:
    for data in (
        saved("MPO", Image.new("RGB", (8, 8)), save_all=True, append_images=[Image.new("RGB", (8, 8))]),
        saved("JPEG", Image.new("CMYK", (8, 8)), progressive=True),
        hostile.jpeg_of_early_scans(MOST_SCANS - 1, 64),
        saved("JPEG") + bytes.fromhex("ffda") * 1000,  # by chance, in a film that follows the photograph
        saved("JPEG", progressive=True) + bytes.fromhex("ffda") * 1000,
        png(8, 8, 2, before=[chunk(b"prVt", bytes(1 << 20))] * 4),
        with_segments(saved("JPEG"), segment(0xE2, b"ICC_PROFILE\0" + bytes(60_000)) * 60),
        tiff((37724, 7, 40 << 20, bytes(40 << 20))),  # layers, as Photoshop keeps them
        saved("TIFF", Image.new("L", (2000, 2000)), compression="tiff_lzw", strip_size=1000),
        bmp(254, 999, 8, (b"\2\1" * 127 + b"\0\0") * 999, compression=1),  # short runs
    ):
        assert decode_image(data).shape[0] == 3


# Memory, by the most that a process takes.

SOME = ("photo.jpg", "inks.jpg", "arithmetic.jpg", "alpha.png", "animated.webp", "bits.bmp", "blank.bmp", "real.tif")


def pictures(width: int, height: int) -> dict[str, Callable[[], bytes]]:
    """The most expensive that are read, of each format."""
    turned = chunk(b"eXIf", exif(6)[6:])

    def solid(kind: str, mode: str, colour: float | tuple[int, ...], **options: object) -> Callable[[], bytes]:
        return lambda: saved(kind, Image.new(mode, (width, height), colour), **options)

    clear = (1, 2, 3, 4)
    lossless = {"lossless": True, "method": 0, "quality": 0}
    deflate = {"compression": "tiff_adobe_deflate", "tiffinfo": {274: 6}}
    return {
        "photo.jpg": lambda: good_jpeg(width, height, exif=exif(6)),
        "inks.jpg": solid("JPEG", "CMYK", clear, progressive=True, exif=exif(6)),
        "scans.jpg": lambda: hostile.jpeg_of_early_scans(MOST_SCANS - 1, int((width * height) ** 0.5)),
        "arithmetic.jpg": lambda: hostile.jpeg_of_early_scans(MOST_SCANS - 1, int((width * height) ** 0.5), 0xC9),
        "refined.jpg": lambda: hostile.jpeg_of_many_scans(MOST_SCANS - 1, int((width * height) ** 0.5) // 8 * 8),
        "noise.jpg": lambda: costly.jpeg_that_refines_noise(width, height, MOST_SCANS),
        "alpha.png": lambda: png(width, height, 6, before=[turned]),
        "alpha-sixteen.png": lambda: png(width, height, 6, 16, before=[turned]),
        "grey-sixteen.png": lambda: png(width, height, 0, 16, before=[turned, chunk(b"tRNS", b"\0\0")]),
        "key.png": lambda: png(width, height, 2, before=[turned, chunk(b"tRNS", bytes(6))]),
        "palette.png": lambda: png(
            width, height, 3, before=[chunk(b"PLTE", bytes(768)), chunk(b"tRNS", b"\0"), turned]
        ),
        "tall.png": lambda: png(width * height // 65_535, 65_535, 6, before=[turned]),
        "animated.webp": lambda: animated_webp(width, height),
        "lossless.webp": solid("WEBP", "RGBA", clear, **lossless),
        "lossy.webp": solid("WEBP", "RGBA", clear, method=0, quality=0),
        "still.gif": solid("GIF", "P", 3, transparency=3, disposal=2),
        "bits.bmp": lambda: bmp(width * height // 65_535, 65_535, 1),
        "row.bmp": lambda: bmp(65_535, width * height // 65_536, 8),
        "colours.bmp": lambda: bmp(width, height, 32),
        "blank.bmp": lambda: bmp(65_535, width * height // 65_535, 8, b"\1\1\0\0" * 3000, compression=1),
        "real.tif": solid("TIFF", "F", 9.5, **deflate),
        "alpha.tif": solid("TIFF", "RGBA", clear, **deflate),
        "packed.tif": solid("TIFF", "RGB", clear[:3], compression="tiff_lzw"),
        "fax.tif": solid("TIFF", "1", 1, compression="group4"),
        "jpeg.tif": solid("TIFF", "RGB", clear[:3], compression="jpeg"),
        "raw.tif": solid("TIFF", "RGBA", clear),
    }


def too_expensive(folder: Path, width: int, height: int, names: Iterable[str]) -> dict[str, costly.Cost]:
    """Which of the pictures take more than is promised; all must be read."""
    make = pictures(width, height)
    for name in names:
        (folder / name).write_bytes(make[name]())
    found = costs(folder, seconds=120)
    good = found["photo.jpg"].seconds
    for name, cost in found.items():
        print(f"{name:20} {cost.seconds / good:6.2f} times the time, {cost.mebibytes:5} MiB")
        assert cost.said.startswith("(3, "), f"{name}: {cost.said}"
    most = MOST_MEMORY * width * height / 128e6
    return {
        name: cost
        for name, cost in found.items()
        if cost.mebibytes > most or cost.seconds > MOST_TIME * max(good, 0.01)
    }


def test_memory_and_time_of_the_most_expensive_pictures(tmp_path: Path) -> None:
    assert too_expensive(tmp_path, 4_000, 3_000, SOME) == {}


@pytest.mark.slow
def test_memory_and_time_of_the_largest_pictures(tmp_path: Path) -> None:
    assert too_expensive(tmp_path, 16_000, 8_000, pictures(1, 1)) == {}


# Time, where it is not the pixels that take it.


def test_many_parts_take_no_longer_than_forty_good_pictures(tmp_path: Path) -> None:
    """As many as are read at most, in a picture of a million pixels."""
    side = 1000
    for name, data in {
        **{f"good-{number}": good_jpeg(side, side) for number in range(3)},
        "chunks": png(side, side, 2, after=[chunk(b"prVt")] * ((1 << 14) // 3 + side * side // 9 - 100)),
        "profiles": png(side, side, 2, after=[PROFILE] * 110),
        "runs": bmp(side, side, 8, (b"\2\1" * (side // 2) + b"\0\0") * side, compression=1),
        "beyond": bmp(side, side, 8, b"\xff\1" * (side * side), compression=1),
        "notes": with_segments(good_jpeg(side, side), segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 120),
        "resources": with_segments(
            good_jpeg(side, side), segment(0xED, b"Photoshop 3.0\0" + EMPTY_RESOURCE * 5_000) * 125
        ),
        "tables": with_segments(good_jpeg(side, side), segment(0xDB, GREY_TABLE * 1_000) * 120),
        "comments": with_segments(good_jpeg(side, side), segment(0xFE) * 4_000),
        "comment": costly.gif_with_comment(8_000, bytes(range(1, 256))),
        "fractions": tiff((282, 5, 1 << 17, bytes(8 << 17))),
        "strips": saved("TIFF", Image.new("L", (8, 60_000)), strip_size=1),
        "tile": costly.tiff_of_a_tile(2048, 2048, costly.deflated_zeros(4 << 20), 8),
        "overlapping": tiff(*((tag, 7, 1_000_000, 8) for tag in range(1_000, 1_040)), pixels=bytes(1_000_000)),
        "exif": with_segments(
            good_jpeg(side, side),
            segment(
                0xE1,
                b"Exif\0\0II*\0\x08\0\0\0"
                + struct.pack("<H", 2700)
                + b"".join(struct.pack("<HHII", 300 + place, 1, 60_000, 16) for place in range(2700))
                + bytes(33_000),
            ),
        ),
    }.items():
        (tmp_path / name).write_bytes(data)
    found = costs(tmp_path)
    good = sorted(found[f"good-{number}"].seconds for number in range(3))[1]
    print({name: (round(cost.seconds / good, 1), cost.mebibytes, cost.said) for name, cost in found.items()})
    slow = {name: cost for name, cost in found.items() if cost.seconds > 2 * MOST_TIME * good}  # for a busy computer
    assert slow == {}
    assert max(cost.mebibytes for cost in found.values()) < 512


def test_a_picture_of_many_scans_is_read_where_there_are_not_too_many() -> None:
    with pytest.raises(BadImage, match=TOO_MANY_SCANS):
        decode_image(hostile.jpeg_of_many_scans(MOST_SCANS))
    assert decode_image(hostile.jpeg_of_many_scans(MOST_SCANS - 1)).shape == (3, 64, 64)
