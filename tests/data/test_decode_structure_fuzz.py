"""Whatever stands in headers, in whatever order: decoding gives a picture or BadImage, in bounded time and memory."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

import hostile
import numpy as np
import pytest
import torch
from hostile import in_bounds, saved
from PIL import Image

from co2.data.decode import decode_image
from co2.data.plain_jpeg import plain_jpeg_size
from co2.data.source import BadImage

PIXELS = np.random.default_rng(2).integers(0, 256, (16, 24, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)
SIDES = (
    0,
    1,
    2,
    7,
    8,
    9,
    16,
    24,
    255,
    256,
    1000,
    4000,
    11_000,
    16_383,
    65_535,
    65_536,
    127_000_000,
    2**31 - 1,
    2**32 - 1,
)
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 32, 255, 256, 65_535, 65_536, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1)
JPEGS = [
    saved("JPEG", PIXELS),
    saved("JPEG", PIXELS, subsampling=0, restart_marker_blocks=1),
    saved("JPEG", PIXELS, progressive=True),
    saved("JPEG", PICTURE.convert("L")),
    saved("JPEG", PICTURE.convert("CMYK"), progressive=True),
    saved("JPEG", PIXELS, exif=b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHIHHI", 1, 0x112, 3, 1, 6, 0, 0)),
    saved("MPO", PICTURE, save_all=True, append_images=[PICTURE]),
    hostile.jpeg_of_many_scans(5),
    hostile.jpeg_of_early_scans(3, 64),
]
ZEROS = zlib.compress(bytes(1 << 20))
FRAMES = [*range(0xC0, 0xD0)]
MARKERS = [*FRAMES, *range(0xD0, 0xE5), 0xED, 0xEE, 0xFE, 0x01, 0x00, 0xFF]


def segments(data: bytes) -> list[bytes]:
    """A JPEG cut before each of its marks."""
    places = [place for place in range(len(data) - 1) if data[place] == 0xFF and data[place + 1] not in (0, 0xFF)]
    return [data[first:last] for first, last in zip(places, [*places[1:], len(data)], strict=True)]


def jpeg(draw: random.Random) -> bytes:
    """Segments dropped, repeated, moved, longer than they are; other lengths, sides, scans, intervals and codings."""
    parts = segments(draw.choice(JPEGS))
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(parts))
        part = parts[place]
        match draw.choice(
            ["drop", "repeat", "often", "move", "other", "length", "longer", "mark", "frame", "scan", "rest"]
        ):
            case "drop" if len(parts) > 1:
                del parts[place]
            case "repeat":
                parts.insert(draw.randrange(len(parts) + 1), part)
            case "often" if len(part) < 1000:
                parts[place:place] = [part] * draw.choice([10, 99, 101, 1000, 10_000])
            case "move":
                parts.insert(draw.randrange(len(parts)), parts.pop(place))
            case "other":
                parts[place] = draw.choice(segments(draw.choice(JPEGS)))
            case "length" if len(part) >= 4:
                parts[place] = part[:2] + struct.pack(">H", draw.choice([0, 1, 2, 3, 8, 17, 65_535])) + part[4:]
            case "longer" if len(part) >= 4:
                more = draw.randbytes(draw.choice([1, 64, 5000]))
                parts[place] = part[:2] + struct.pack(">H", min(65_535, len(part) - 2 + len(more))) + part[4:] + more
            case "mark":
                parts[place] = bytes([0xFF, draw.choice(MARKERS)]) + part[2:]
            case "frame" | "scan" as what:
                wanted = FRAMES if what == "frame" else [0xDA]
                for number, one in enumerate(parts):
                    if len(one) > 9 and one[1] in wanted and one[1] not in (0xC4, 0xC8, 0xCC):
                        changed = bytearray(one)
                        if what == "frame":
                            changed[1] = draw.choice([changed[1], *FRAMES])
                            struct.pack_into(">HH", changed, 5, *(min(draw.choice(SIDES), 65_535) for _ in range(2)))
                        changed[draw.randrange(4, min(len(changed), 20))] = draw.choice(
                            [0, 1, 2, 3, 4, 0x11, 0x44, 255]
                        )
                        parts[number] = bytes(changed)
            case "rest":
                parts.insert(place, b"\xff\xdd\0\4" + struct.pack(">H", draw.choice([0, 1, 2, 65_535])))
    return b"".join(parts)


def png(draw: random.Random) -> bytes:
    """A header of other numbers, and chunks dropped, repeated, moved and changed, all with sound checksums."""
    kind = draw.choice(["RGB", "L", "P", "LA", "RGBA", "I;16"])
    grey = kind == "I;16"
    data = saved("PNG", Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 99) if grey else PICTURE.convert(kind))
    chunks, place = [], 8
    while place < len(data):
        (length,) = struct.unpack_from(">I", data, place)
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + length]))
        place += 12 + length
    others = [(b"tRNS", b"\0\1"), (b"PLTE", bytes(9)), (b"gAMA", bytes(4)), (b"acTL", bytes(8)), (b"fcTL", bytes(26))]
    others += [(b"eXIf", draw.randbytes(30)), (b"iCCP", b"a\0\0" + ZEROS), (b"prVt", b"")]
    others += [(b"zTXt", b"a\0\0" + ZEROS), (b"IDAT", ZEROS)]
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(chunks))
        match draw.choice(["drop", "repeat", "often", "move", "other", "header", "change"]):
            case "drop" if len(chunks) > 1:
                del chunks[place]
            case "repeat":
                chunks.insert(draw.randrange(len(chunks) + 1), chunks[place])
            case "often":
                chunks[place:place] = [draw.choice(others)] * draw.choice([10, 1000, 20_000])
            case "move":
                chunks.insert(draw.randrange(len(chunks)), chunks.pop(place))
            case "other":
                chunks.insert(place, draw.choice(others))
            case "header":
                form = (
                    draw.choice(SIDES),
                    draw.choice(SIDES),
                    draw.choice([1, 2, 4, 8, 16, 3]),
                    draw.choice([0, 2, 3, 4, 6, 1]),
                )
                chunks[0] = b"IHDR", struct.pack(">IIBBBBB", *form, 0, 0, draw.choice([0, 1, 2]))
            case "change" if chunks[place][1]:
                changed = bytearray(chunks[place][1])
                changed[draw.randrange(len(changed))] = draw.randrange(256)
                chunks[place] = chunks[place][0], bytes(changed)
    body = b"".join(hostile._png_chunk(name, content[: 1 << 20]) for name, content in chunks[:30_000])
    return data[:8] + body


def by_fields(seeds: list[bytes], fields: str, most: int) -> Callable[[random.Random], bytes]:
    """Files with other numbers at any place of their first `most` bytes."""

    def make(draw: random.Random) -> bytes:
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randint(1, 5)):
            form = draw.choice(fields)
            order = "<" if draw.random() < 0.9 else ">"
            place = draw.randrange(max(1, min(most, len(data)) - struct.calcsize(form)))
            value = draw.choice(SIDES if draw.random() < 0.5 else NUMBERS) & ((1 << 8 * struct.calcsize(form)) - 1)
            struct.pack_into(order + form, data, place, value)
        return bytes(data) + bytes(draw.choice([0, 0, 0, 5000, 1 << 20]))

    return make


def tiff(draw: random.Random) -> bytes:
    """Directories in which entries have other types, counts and values, are dropped or come twice."""
    options = draw.choice(
        [{}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}, {"compression": "jpeg"}]
    )
    image = (
        PICTURE
        if options.get("compression") == "jpeg"
        else PICTURE.convert(draw.choice(["RGB", "L", "P", "RGBA", "F"]))
    )
    data = saved("TIFF", image, **options)
    (first,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, first)
    entries = [bytearray(data[first + 2 + 12 * n : first + 14 + 12 * n]) for n in range(count)]
    values = [struct.unpack_from("<I", entry, 8)[0] for entry in entries]
    for _ in range(draw.randint(1, 5)):
        entry = draw.choice(entries)
        match draw.choice(["tag", "type", "count", "value", "drop", "twice"]):
            case "tag":
                struct.pack_into(
                    "<H", entry, 0, draw.choice([256, 257, 273, 274, 278, 279, 322, 323, 324, 325, 330, 34665, 999])
                )
            case "type":
                struct.pack_into("<H", entry, 2, draw.randrange(20))
            case "count":
                struct.pack_into("<I", entry, 4, draw.choice([*NUMBERS, 50_000, 300_000]))
            case "value":
                struct.pack_into("<I", entry, 8, draw.choice([*SIDES, *values, first, 8]))
            case "drop" if len(entries) > 1:
                entries.remove(entry)
            case "twice":
                entries.append(bytearray(entry))
    room = bytes(draw.choice([0, 0, 1 << 20, 3 << 20]))
    start = struct.pack("<I", len(data) + len(room))
    directory = struct.pack("<H", len(entries)) + b"".join(sorted(map(bytes, entries))) + bytes(4)
    return data[:4] + start + data[8:] + room + directory


def _frames(kind: str, **options: object) -> bytes:
    return saved(kind, PICTURE, save_all=True, append_images=[Image.new("RGB", (24, 16))], **options)


MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "jpeg": jpeg,
    "png": png,
    "tiff": tiff,
    "bmp": by_fields([saved("BMP", PICTURE.convert(mode)) for mode in ("1", "L", "P", "RGB", "RGBA")], "BHI", 60),
    "gif": by_fields([saved("GIF", PIXELS), _frames("GIF")], "BH", 1000),
    "webp": by_fields([saved("WEBP", PIXELS), saved("WEBP", PIXELS, lossless=True), _frames("WEBP")], "BHI", 80),
}


def tried(kind: str, seeds: range) -> str:
    """How many of these files end as they must; or the first that does not, and how."""
    torch.set_num_threads(1)  # in a copy of a process there are no others
    for seed in seeds:
        data = MAKERS[kind](random.Random(seed))
        try:
            image = decode_image(data)
        except BadImage as reason:
            if not str(reason) or not str(reason).isprintable():
                return f"{kind} {seed}: {str(reason)!r} is no reason"
        except BaseException as error:
            return f"{kind} {seed}: {error!r}"
        else:
            if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
                return f"{kind} {seed}: {image.dtype} {tuple(image.shape)}"
            size = plain_jpeg_size(data)
            if size is not None and size != tuple(image.shape[1:]):
                return f"{kind} {seed}: {tuple(image.shape)}, for a GPU {size}"
    return f"{len(seeds)} as they must"


@pytest.mark.parametrize("kind", MAKERS)
def test_changed_structures(kind: str) -> None:
    assert in_bounds(lambda: tried(kind, range(100)), seconds=60) == "100 as they must"


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_many_changed_structures(kind: str) -> None:
    for first in range(100, 20_100, 100):
        assert in_bounds(lambda first=first: tried(kind, range(first, first + 100)), seconds=120) == "100 as they must"
