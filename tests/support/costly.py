"""Pictures that cost far more than they look, and what reading them takes.

`python tests/support/costly.py FOLDER SECONDS` reads each file in a folder, in a process of its own with so many
seconds of its processor, and prints a line of JSON for each: its name, the seconds and the MiB that it took (the file
included), and what came of it.
"""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hostile import saved
from PIL import Image

from co2.data.decode import decode_image, read_image
from co2.data.source import BadImage
from co2.files import MOST_BYTES


class Cost(NamedTuple):
    """What reading a picture took."""

    seconds: float
    mebibytes: int
    said: str
    """Its shape, or why there is none."""


def costs(folder: Path, seconds: int = 20) -> dict[str, Cost]:
    """What reading each file in a folder takes; one that does not end in time has said nothing."""
    command = [sys.executable, __file__, str(folder), str(seconds)]
    count = len(list(folder.iterdir()))
    result = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * seconds * count, check=True)
    return {name: Cost(*cost) for name, *cost in map(json.loads, result.stdout.splitlines())}


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith(name))


def _print_costs(folder: str, seconds: int) -> None:
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):  # what is made once is not counted
        decode_image(saved(kind))
    for name in sorted(os.listdir(folder)):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
            before, begin = _memory("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
            try:
                said = str(tuple(read_image(os.path.join(folder, name)).shape))
            except BadImage as reason:
                said = str(reason)
            end = resource.getrusage(resource.RUSAGE_SELF)
            taken = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
            os.write(writing, json.dumps([taken, _memory("VmHWM") - before, said]).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as file:
            cost = json.loads(file.read() or f'[{seconds}, 0, ""]')
        os.waitpid(child, 0)
        print(json.dumps([name, *cost]), flush=True)


# JPEG.


def segment(marker: int, body: bytes = b"") -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def with_segments(data: bytes, *segments: bytes) -> bytes:
    """A JPEG with more segments at its beginning."""
    return data[:2] + b"".join(segments) + data[2:]


def good_jpeg(width: int, height: int, **options: object) -> bytes:
    """A JPEG as a camera's, of so many pixels."""
    colours = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return saved("JPEG", Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC), **options)


def jpeg_that_refines_noise(width: int, height: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again, each time with something for every pixel."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width), dtype=np.uint8)
    data = saved("JPEG", noise, progressive=True, quality=95)
    scan = data[data.rindex(b"\xff\xda\x00\x08\x01") : -2]
    own = data.count(b"\xff\xda\x00\x08\x01")
    return data[:-2] + scan * min(scans - own, (MOST_BYTES - len(data)) // len(scan)) + data[-2:]


def exif(orientation: int) -> bytes:
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHIHHI", 1, 0x112, 3, 1, orientation, 0, 0)


# PNG.


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int,
    height: int,
    colours: int,
    bits: int = 8,
    *,
    before: Iterable[bytes] = (),
    after: Iterable[bytes] = (),
) -> bytes:
    """A PNG of zeros, of one of its kinds of colours (0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGBA)."""
    row = 1 + (width * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colours] * bits + 7) // 8
    packer, packed, rows = zlib.compressobj(1), [], max(1, (1 << 24) // row)
    for first in range(0, height, rows):
        packed.append(packer.compress(bytes(row * min(rows, height - first))))
    packed.append(packer.flush())
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0))
    return b"".join([b"\x89PNG\r\n\x1a\n", header, *before, chunk(b"IDAT", b"".join(packed)), *after, chunk(b"IEND")])


# BMP, GIF, WebP.


def bmp(width: int, height: int, bits: int, pixels: bytes | None = None, compression: int = 0) -> bytes:
    """A BMP of these bytes, or of as many zeros as it needs."""
    colours = 1 << bits if bits <= 8 else 0
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, colours, 0)
    palette = bytes(4 * colours - 1) + b"\1" if colours else b""
    body = bytes((width * bits + 31) // 32 * 4 * height) if pixels is None else pixels
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + len(palette)) + header + palette + body


def gif_with_comment(blocks: int, block: bytes) -> bytes:
    screen = struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6)
    comment = b"!\xfe" + (bytes([len(block)]) + block) * blocks + b"\0"
    return b"GIF89a" + screen + comment + b"," + struct.pack("<HHHHB", 0, 0, 8, 8, 0) + b"\2\2D\1\0;"


def animated_webp(width: int, height: int) -> bytes:
    frames = [Image.new("RGBA", (width, height), colour) for colour in ((1, 2, 3, 4), (5, 6, 7, 8))]
    return saved("WEBP", frames[0], save_all=True, append_images=frames[1:], lossless=True, method=0, quality=0)


# TIFF.


def tiff(*entries: tuple[int, int, int, int | bytes], pixels: bytes = bytes(64)) -> bytes:
    """A TIFF of 8 x 8 grey pixels, with these (tag, type, count, value) as well or instead. Bytes are put elsewhere."""
    standard: dict[int, tuple[int, int, int | bytes]] = {256: (4, 1, 8), 257: (4, 1, 8), 258: (3, 1, 8)}
    standard |= {259: (3, 1, 1), 262: (3, 1, 1), 273: (4, 1, 8), 277: (3, 1, 1), 278: (4, 1, 8), 279: (4, 1, 64)}
    standard |= {tag: (kind, count, value) for tag, kind, count, value in entries}
    directory, values = struct.pack("<H", len(standard)), b""
    place = 8 + len(pixels)
    for tag, (kind, count, value) in sorted(standard.items()):
        if isinstance(value, bytes):
            number, values = place + len(values), values + value
        else:
            number = value
        directory += struct.pack("<HHII", tag, kind, count, number)
    header = struct.pack("<2sHI", b"II", 42, place + len(values))
    return header + pixels + values + directory + bytes(4)


def tiff_of_one_strip_many_times(strips: int, size: int, compression: int = 8) -> bytes:
    """A TIFF of 1 x strips pixels, each a strip, all of which are the same bytes of the file."""
    places, sizes = struct.pack("<I", 8) * strips, struct.pack("<I", size) * strips
    pixels = zlib.compress(b"\0") if compression == 8 else b"\0"
    return tiff(
        *((256, 4, 1, 1), (257, 4, 1, strips), (259, 3, 1, compression), (278, 4, 1, 1)),
        *((273, 4, strips, places), (279, 4, strips, sizes)),
        pixels=pixels + bytes(size),
    )


def tiff_of_a_tile(width: int, height: int, pixels: bytes, compression: int) -> bytes:
    """A TIFF of 8 x 8 pixels in one tile of this size."""
    tile = ((322, 4, 1, width), (323, 4, 1, height), (324, 4, 1, 8), (325, 4, 1, len(pixels)))
    data = tiff((259, 3, 1, compression), *tile, pixels=pixels)
    return data.replace(struct.pack("<HHII", 273, 4, 1, 8), struct.pack("<HHII", 270, 4, 1, 8))  # no strips


def deflated_zeros(count: int) -> bytes:
    packer, file = zlib.compressobj(9), io.BytesIO()
    for _ in range(count >> 20):
        file.write(packer.compress(bytes(1 << 20)))
    return file.getvalue() + packer.flush()


if __name__ == "__main__":
    _print_costs(sys.argv[1], int(sys.argv[2]))
