"""Files that somebody scraped, or wrote to do harm, and what becomes of each: the one table behind tests and docs.

`python tests/data/hostile.py` prints the table of docs/RELIABILITY.md, which a test compares with it.
"""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image, PngImagePlugin

WIDTH, HEIGHT = 48, 32
_QUARTERS = np.array([[(250, 20, 30), (20, 240, 40)], [(30, 20, 250), (240, 240, 20)]], dtype=np.uint8)
PIXELS = _QUARTERS.repeat(HEIGHT // 2, axis=0).repeat(WIDTH // 2, axis=1)  # [32, 48, 3]
NOISE = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)

NOT_AN_IMAGE = "not an image, or damaged at its beginning"
TRUNCATED = "truncated file"
TOO_MANY_PIXELS = "more than 128 million pixels"
NOT_REGULAR = "not a regular file"
DAMAGED = r"damaged file \(.*\)"


def in_bounds(act: Callable[[], object], seconds: int = 10) -> str:
    """What something returns, or how it is refused, in a copy of this process that has so long and another GiB."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            if os.path.exists("/proc/self/status"):  # Linux tells how much memory was taken
                with open("/proc/self/status") as file:
                    data = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
                resource.setrlimit(resource.RLIMIT_DATA, (data + 2**30, data + 2**30))
            try:
                said = str(act())
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        said = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it hangs, or was ended"
    return said


def make_pipe(path: str | os.PathLike[str]) -> None:
    os.mkfifo(path)


def make_endless(path: str | os.PathLike[str]) -> None:
    os.symlink("/dev/zero", path)


@dataclass(frozen=True)
class Hostile:
    """A file, how it is made, and its outcome, which is the same on every way into the program."""

    name: bytes
    story: str
    reason: str | None
    """Why it is skipped, a pattern; None if it is read, as a picture of 48 x 32 pixels."""
    make: Callable[[bytes], object]
    """Called with the path to make."""
    is_folder: bool = False

    @property
    def in_a_list(self) -> bool:
        """Whether a text file with a name on each line can name it."""
        text = os.fsdecode(self.name)
        return text == text.strip() and not set(text) & set("\n\r\t") and not text.startswith("#")


def _holding(data: bytes) -> Callable[[bytes], object]:
    def make(path: bytes) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # a name with a slash in it
        with open(path, "wb") as file:
            file.write(data)

    return make


def saved(kind: str, pixels: np.ndarray | Image.Image = PIXELS, **options: object) -> bytes:
    """An image file of this kind, as bytes."""
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def _png_chunk(kind: bytes, body: bytes, length: int | None = None) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body) if length is None else length) + kind + body + check


def png(*extra: bytes, width: int = WIDTH, height: int = HEIGHT, data: bytes | None = None) -> bytes:
    """A PNG put together by hand, with more chunks before its pixels."""
    rows = b"".join(b"\0" + row.tobytes() for row in PIXELS) if data is None else data
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = _png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", header) + b"".join(extra) + pixels + _png_chunk(b"IEND", b"")


def _zeros(mebibytes: int) -> bytes:
    return zlib.compress(bytes(mebibytes << 20), 9)


def _replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) >= 1
    return data.replace(old, new, 1)


def _jpeg_of_size(width: int, height: int) -> bytes:
    size = struct.pack(">HH", HEIGHT, WIDTH)
    return _replaced(
        saved("JPEG"), b"\xff\xc0\x00\x11\x08" + size, b"\xff\xc0\x00\x11\x08" + struct.pack(">HH", height, width)
    )


def jpeg_of_many_scans(scans: int, side: int = 64) -> bytes:
    """A progressive grey JPEG that refines nothing, again and again: each scan costs a pass over all pixels."""

    def segment(marker: int, body: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body

    blocks = (side // 8) ** 2
    table = bytes([1] + [0] * 15)  # one code, of one bit
    start = b"\xff\xd8" + segment(0xDB, b"\0" + b"\1" * 64)
    start += segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0")
    start += segment(0xC4, b"\x00" + table + b"\0")  # DC: no difference to the block before
    start += segment(0xDA, b"\1\1\0\0\0\0") + bytes(-(-blocks // 8))
    end_of_band = segment(0xC4, b"\x10" + table + b"\0")  # AC: nothing (more) in this block
    scan = segment(0xDA, b"\1\1\0\1\x3f\0") + bytes(-(-blocks // 8))
    return start + end_of_band + scan * scans + b"\xff\xd9"


def jpeg_of_early_scans(scans: int, side: int, frame: int = 0xC0) -> bytes:
    """A JPEG of 64 x 64 that claims other sides, with scans of ten bytes before its own: not progressive."""
    data = saved("JPEG", Image.new("RGB", (64, 64)))
    place, first = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    header = data[: place + 1] + bytes([frame]) + data[place + 2 : place + 5] + struct.pack(">HH", side, side)
    return header + data[place + 9 : first] + bytes.fromhex("ffda0008010100003f00") * scans + data[first:]


def _tiff(*entries: tuple[int, int, int, int], following: int = 0) -> bytes:
    """A small TIFF, little-endian, of these (tag, type, count, value) and 48 x 32 grey pixels."""
    pixels = PIXELS[..., 0].tobytes()
    standard = {256: (3, 1, WIDTH), 257: (3, 1, HEIGHT), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1)}
    standard |= {273: (4, 1, 8), 277: (3, 1, 1), 278: (3, 1, HEIGHT), 279: (4, 1, len(pixels))}
    standard |= {tag: (kind, count, value) for tag, kind, count, value in entries}
    directory = struct.pack("<H", len(standard))
    for tag, (kind, count, value) in sorted(standard.items()):
        directory += struct.pack("<HHII", tag, kind, count, value)
    return struct.pack("<2sHI", b"II", 42, 8 + len(pixels)) + pixels + directory + struct.pack("<I", following)


def _gif(screen: tuple[int, int], frame: tuple[int, int]) -> bytes:
    data = b"GIF89a" + struct.pack("<HH", *screen) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    return data + b"\x2c" + struct.pack("<HHHH", 0, 0, *frame) + b"\0" + b"\x02\x02\x4c\x01\0" + b"\x3b"


def _bmp(width: int, height: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 100, 0, 0, 54) + header + bytes(100)


def webp_of_size(width: int, height: int) -> bytes:
    return _replaced(
        saved("WEBP"),
        b"\x9d\x01\x2a" + struct.pack("<HH", WIDTH, HEIGHT),
        b"\x9d\x01\x2a" + struct.pack("<HH", width, height),
    )


def _frames(kind: str, **options: object) -> bytes:
    first = Image.fromarray(PIXELS)
    others = [Image.new("RGB", first.size, colour) for colour in ("white", "black", "white")]
    return saved(kind, first, save_all=True, append_images=others, **options)


_HELD = {  # how a camera that was held so stores an upright picture
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def _turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = Image.fromarray(PIXELS)
    stored = upright.transpose(_HELD[orientation]) if orientation in _HELD else upright
    return saved("JPEG", stored, exif=exif)


def _ycck() -> bytes:
    """As Photoshop writes them: CMYK, inverted, turned into YCCK, which a marker of Adobe's tells."""
    data = saved("JPEG", Image.fromarray(PIXELS).convert("CMYK"))
    assert b"Adobe\0" in data
    place = data.index(b"Adobe\0") + 11  # the last byte of the marker: 0 for CMYK, 2 for YCCK
    return data[:place] + b"\2" + data[place + 1 :]


def _transparent_palette() -> bytes:
    image = Image.fromarray(PIXELS).quantize(4)
    return saved("PNG", image, transparency=bytes([0, 128, 255, 255]))


def _text(text: str) -> PngImagePlugin.PngInfo:
    information = PngImagePlugin.PngInfo()
    information.add_text("Comment", text)
    return information


def _zip_after(image: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("evil.sh", "rm -rf /")
    return image + file.getvalue()


def _pickle() -> bytes:
    return pickle.dumps(print, protocol=2)


def _sparse(path: bytes, size: int, beginning: bytes = b"") -> None:
    with open(path, "wb") as file:
        file.write(beginning)
        file.truncate(size)


def _socket(path: bytes) -> None:
    """A path for a socket is short, so it is made where it is to be."""
    here = os.getcwd()
    folder, name = os.path.split(path)
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fsdecode(name))
    finally:
        os.chdir(here)


def _linked(target: str) -> Callable[[bytes], object]:
    return lambda path: os.symlink(target.encode(), path)


def _corpus() -> list[Hostile]:
    files: list[Hostile] = []

    def add(name: str | bytes, story: str, reason: str | None, content: bytes | Callable[[bytes], object]) -> None:
        make = _holding(content) if isinstance(content, bytes) else content
        files.append(Hostile(name.encode() if isinstance(name, str) else name, story, reason, make))

    # Cut off: after the first byte, in the header, in the middle, near the end.
    cuts: list[tuple[str, str, dict[str, object], str, str]] = [
        ("JPEG", "jpg", {}, TRUNCATED, TRUNCATED),
        ("JPEG", "progressive.jpg", {"progressive": True}, TRUNCATED, TRUNCATED),
        ("PNG", "png", {}, TRUNCATED, TRUNCATED),
        ("WEBP", "webp", {}, DAMAGED, DAMAGED),
        ("BMP", "bmp", {}, TRUNCATED, TRUNCATED),
        ("GIF", "gif", {}, NOT_AN_IMAGE, TRUNCATED),
        ("TIFF", "tif", {}, NOT_AN_IMAGE, TRUNCATED),
        ("TIFF", "lzw.tif", {"compression": "tiff_lzw"}, NOT_AN_IMAGE, NOT_AN_IMAGE),  # what it is stands at its end
    ]
    for kind, extension, options, early, late in cuts:
        whole = saved(kind, NOISE, **options)
        add(f"cut-1.{extension}", "cut off after one byte", NOT_AN_IMAGE, whole[:1])
        add(f"cut-2%.{extension}", f"{kind} cut off in its header", early, whole[: len(whole) // 50])
        for percent in (50, 90):
            cut = whole[: len(whole) * percent // 100]
            add(f"cut-{percent}%.{extension}", f"{kind} cut off in its pixels", late, cut)
    add("empty.jpg", "no bytes at all", r"empty file \(0 bytes\)", b"")
    add("nul.png", "one byte of zero", NOT_AN_IMAGE, b"\0")
    add(
        "zeros.tif",
        "a hundred megabytes of zeros, which take no room on the disk",
        NOT_AN_IMAGE,
        partial(_sparse, size=100 << 20),
    )
    add("no-last-byte.png", "PNG without its last byte", None, saved("PNG")[:-1])
    add("no-end.jpg", "JPEG without its end mark", TRUNCATED, saved("JPEG")[:-2])
    add("trailing.png", "PNG with a megabyte of zeros after it", None, saved("PNG") + bytes(1 << 20))
    add(
        "flipped.png",
        "PNG with a wrong checksum in its header",
        NOT_AN_IMAGE,
        _replaced(png(), struct.pack(">II", WIDTH, HEIGHT), struct.pack(">II", WIDTH, HEIGHT + 1)),
    )

    # Not what the name says.
    add("png-called.jpg", "PNG called .jpg", None, saved("PNG"))
    add("jpeg-called.png", "JPEG called .png", None, saved("JPEG"))
    add("webp-called.gif", "WebP called .gif", None, saved("WEBP"))
    for kind in ("PPM", "ICO", "TGA", "PCX", "SGI"):
        add(
            f"{kind.lower()}-called.jpg",
            "an image in a format that is not read, called .jpg",
            NOT_AN_IMAGE,
            saved(kind),
        )
    add(
        "page.jpg",
        "PostScript, for which some programs start an interpreter",
        NOT_AN_IMAGE,
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n",
    )
    add("document.png", "PDF called .png", NOT_AN_IMAGE, b"%PDF-1.7\n1 0 obj <</Type /Catalog>> endobj\n")
    add(
        "drawing.jpg",
        "SVG with a script in it",
        NOT_AN_IMAGE,
        b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    )
    add(
        "commands.png",
        "drawing commands that other programs obey",
        NOT_AN_IMAGE,
        b"push graphic-context\nfill 'url(https://example.org/\"|id)'\npop graphic-context\n",
    )
    add("page.gif", "HTML called .gif", NOT_AN_IMAGE, b"<!DOCTYPE html><script>alert(1)</script>")
    add("program.png", "a shell script called .png", NOT_AN_IMAGE, b"#!/bin/sh\nrm -rf /\n")
    add("pickle.png", "a pickle, which runs what it likes when it is opened as one", NOT_AN_IMAGE, _pickle())
    add("comment.jpg", "JPEG with a script in its comment", None, saved("JPEG", comment=b"<script>alert(1)</script>"))
    add(
        "comment.png",
        "PNG with a PHP program in a text chunk",
        None,
        saved("PNG", pnginfo=_text("<?php system($_GET['c']); ?>")),
    )
    add("polyglot.gif", "GIF that is JavaScript too", None, saved("GIF") + b"*/=alert(1);/*")
    add("polyglot.png", "PNG with a zip archive after it", None, _zip_after(saved("PNG")))

    # Small files that claim or unpack to a great deal.
    add("bomb-claims.png", "PNG that claims 60,000 x 60,000 pixels", TOO_MANY_PIXELS, png(width=60_000, height=60_000))
    add("bomb-claims.jpg", "JPEG that claims 65,000 x 65,000 pixels", TOO_MANY_PIXELS, _jpeg_of_size(65_000, 65_000))
    add("bomb-claims.webp", "WebP that claims 16,383 x 16,383 pixels", TOO_MANY_PIXELS, webp_of_size(16_383, 16_383))
    add("bomb-claims.bmp", "BMP that claims 30,000 x 30,000 pixels", TOO_MANY_PIXELS, _bmp(30_000, 30_000))
    add("bomb-below.bmp", "BMP that claims 11,000 x 11,000 pixels and has 33", TRUNCATED, _bmp(11_000, 11_000))
    add("bomb-screen.gif", "GIF that claims 65,535 x 65,535 pixels", TOO_MANY_PIXELS, _gif((65_535, 65_535), (8, 8)))
    add(
        "bomb-frame.gif",
        "GIF of 8 x 8 pixels with a frame of 65,535 x 65,535",
        TOO_MANY_PIXELS,
        _gif((8, 8), (65_535, 65_535)),
    )
    add(
        "bomb-claims.tif",
        "TIFF that claims 100,000 x 100,000 pixels",
        TOO_MANY_PIXELS,
        _tiff((256, 4, 1, 100_000), (257, 4, 1, 100_000)),
    )
    add("bomb-strip.tif", "TIFF that claims a strip of 4 GB", DAMAGED, _tiff((279, 4, 1, 0xFFFFFFF0), (259, 3, 1, 8)))
    add("bomb-tag.tif", "TIFF with a tag of 4 billion numbers", None, _tiff((700, 4, 0xFFFFFFFF, 8)))
    add(
        "bomb-pixels.png",
        "PNG of 48 x 32 pixels whose pixels unpack to 64 MB",
        None,
        png(data=b"".join(b"\0" + row.tobytes() for row in PIXELS) + bytes(64 << 20)),
    )
    add(
        "bomb-text.png",
        "PNG with a text chunk that unpacks to 64 MB",
        DAMAGED,
        png(_png_chunk(b"zTXt", b"k\0\0" + _zeros(64))),
    )
    add(
        "bomb-international.png",
        "PNG with an international text chunk that unpacks to 64 MB",
        DAMAGED,
        png(_png_chunk(b"iTXt", b"k\0\1\0\0\0" + _zeros(64))),
    )
    add(
        "bomb-profile.png",
        "PNG with a colour profile that unpacks to 64 MB",
        DAMAGED,
        png(_png_chunk(b"iCCP", b"k\0\0" + _zeros(64))),
    )
    add(
        "bomb-chunk.png",
        "PNG with a chunk that claims 2 GB",
        TRUNCATED,
        png(_png_chunk(b"tEXt", b"k\0v", length=0x7FFFFFFF)),
    )
    add("bomb-scans.jpg", "JPEG of 5,000 passes over its pixels", "more than 50 scans", jpeg_of_many_scans(5000))
    for name, frame in (("sequential", 0xC0), ("arithmetic", 0xC9)):
        story = f"JPEG, {name}, of 5,000 passes over 121 million pixels"
        add(f"bomb-{name}.jpg", story, "more than 50 scans", jpeg_of_early_scans(5000, 11_000, frame))
    long = "a side of more than 65,535 pixels"
    add("bomb-row.bmp", "BMP that claims a row of 120 million pixels", long, _bmp(120_000_000, 1))
    add("bomb-column.png", "PNG that claims a column of 128 million pixels", long, png(width=1, height=128_000_000))
    add(
        "bomb-comments.jpg",
        "JPEG of 20,000 comments with nothing in them",
        "more work to read than its pixels can be worth",
        _replaced(saved("JPEG"), b"\xff\xd8", b"\xff\xd8" + b"\xff\xfe\0\2" * 20_000),
    )
    add(
        "bomb-chunks.png",
        "PNG of 20,000 chunks with nothing in them",
        "more work to read than its pixels can be worth",
        png(*[_png_chunk(b"prVt", b"")] * 20_000),
    )
    add(
        "huge.jpg",
        "a terabyte that takes no room on the disk, with a JPEG at its beginning",
        "larger than 512 MiB",
        partial(_sparse, size=1 << 40, beginning=saved("JPEG")),
    )
    add("large.webp", "WebP followed by 64 MB of zeros", None, partial(_sparse, size=64 << 20, beginning=saved("WEBP")))

    # Odd but good.
    add("cmyk.jpg", "CMYK JPEG", None, saved("JPEG", Image.fromarray(PIXELS).convert("CMYK")))
    add("ycck.jpg", "YCCK JPEG", None, _ycck())
    add("cmyk.tif", "CMYK TIFF", None, saved("TIFF", Image.fromarray(PIXELS).convert("CMYK")))
    add("sixteen.png", "16 bits of grey", None, saved("PNG", PIXELS[..., 0].astype(np.uint16) * 257))
    add("sixteen.tif", "16 bits of grey", None, saved("TIFF", PIXELS[..., 0].astype(np.uint16) * 257))
    add(
        "real.tif",
        "real numbers, one of them no number",
        None,
        saved("TIFF", np.where(PIXELS[..., 0] > 100, np.nan, 0.5).astype(np.float32)),
    )
    add("palette.png", "palette with transparency", None, _transparent_palette())
    add("alpha.webp", "transparency", None, saved("WEBP", Image.fromarray(PIXELS).convert("RGBA")))
    add("bits.gif", "one bit for each pixel", None, saved("GIF", Image.fromarray(PIXELS[..., 0] > 100)))
    add("animated.gif", "animation: the first frame", None, _frames("GIF"))
    add("animated.webp", "animation: the first frame", None, _frames("WEBP", lossless=True))
    add("animated.png", "animation: the first frame", None, _frames("PNG"))
    add("pages.tif", "several pages: the first", None, _frames("TIFF"))
    add("endless.tif", "TIFF whose list of pages goes in a circle", None, _tiff(following=8 + WIDTH * HEIGHT))
    for orientation in range(1, 9):
        add(f"turned-{orientation}.jpg", "orientation in EXIF, 1 to 8: upright", None, _turned(orientation))
    add("turned-9.jpg", "an orientation that does not exist", None, _turned(9))
    add("exif-garbage.jpg", "EXIF of garbage", None, saved("JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage"))
    add(
        "exif-circle.png",
        "EXIF that points to itself",
        None,
        saved("PNG", exif=b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHIII", 1, 0x8769, 4, 1, 8, 8)),
    )
    add(
        "exif-huge.webp",
        "EXIF with a tag of 4 billion numbers",
        None,
        saved("WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHIII", 1, 0x0112, 4, 0xFFFFFFFF, 8, 0)),
    )

    # Names. The pictures are good, and two of them are not.
    for name, story in (
        ("two\nlines.png", "name with a line end"),
        ("tab\tbed\r.png", "name with a tab and a carriage return"),
        (" spaces .png", "name with spaces around"),
        ("Ünïcödé 写真 😀.png", "name in Unicode"),
        ("\u202egnp.exe.png", "name that is written from right to left"),
        ("line\u2028separator.png", "name with a line separator of Unicode"),
        ("\x1b[31mred\x1b]0;title\x07.png", "name with commands to the terminal"),
        ("[red]markup[bold].png", "name with markup of the console"),
        ("[/].png", "name with markup of the console, of a folder and a file"),
        (":bomb:.png", "name with an emoji's code"),
        ("<img src=x onerror=alert(1)>.png", "name with HTML"),
        ("'; DROP TABLE images; --.png", "name with SQL"),
        ("$(touch owned)`touch owned`.png", "name with commands to the shell"),
        ("-rf.png", "name like an option"),
        ("%s%n{0}{x}.png", "name with placeholders"),
        ("back\\slash\\n.png", "name with backslashes"),
        ("#comment.png", "name that begins like a comment"),
        ("x" * 251 + ".png", "the longest name"),
    ):
        add(name, story, None, saved("PNG"))
    add(b"caf\xe9.png", "name that is no UTF-8", None, saved("PNG"))
    add(
        "bad\n[red]<b>\x1b[2J\u202e.png",
        "no image, and a name with a line end, markup and commands",
        NOT_AN_IMAGE,
        b"no image",
    )
    add(b"bad\xff\xfe.jpg", "no image, and a name that is no UTF-8", NOT_AN_IMAGE, b"no image")

    # What is no file.
    add("nowhere.png", "link to nothing", "the file does not exist", _linked("/nowhere/at/all.png"))
    add(
        "circle.png", "link to itself", r"cannot be opened \(Too many levels of symbolic links\)", _linked("circle.png")
    )
    add("device.png", "link to an endless device", NOT_REGULAR, _linked("/dev/zero"))
    add("process.png", "link to a file of the kernel's", r"empty file \(0 bytes\)", _linked("/proc/version"))
    add("pipe.png", "pipe that nobody writes to", NOT_REGULAR, os.mkfifo)
    add("socket.png", "socket", NOT_REGULAR, _socket)
    files.append(Hostile(b"folder.jpg", "folder with the name of an image", NOT_REGULAR, os.mkdir, is_folder=True))
    return files


CORPUS = _corpus()


def table() -> str:
    """The corpus as a table in Markdown."""
    from co2.data.source import printable

    rows: dict[tuple[str, str], list[str]] = {}
    for file in CORPUS:
        name = printable(file.name) if len(file.name) < 100 else f"{len(file.name)} letters"
        name = name.replace("`", "'").replace("|", r"\|")
        outcome = "read" if file.reason is None else f"skipped: {file.reason}".replace("\\", "").replace(".*", "...")
        rows.setdefault((file.story, outcome), []).append(f"`{name}`")
    lines = ["| file | what it is | outcome |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {story} | {outcome} |" for (story, outcome), names in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
