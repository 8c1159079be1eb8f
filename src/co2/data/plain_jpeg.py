"""Which JPEGs every decoder, a GPU's too, understands as the CPU's does."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from co2.data.decode import too_large

_SEGMENT = struct.Struct(">BBH")
_FRAME = struct.Struct(">BHHB")
_BASELINE, _HUFFMAN, _QUANTISATION, _SCAN = 0xC0, 0xC4, 0xDB, 0xDA
_EXIF, _SEVERAL_PICTURES, _ADOBE = 0xE1, 0xE2, 0xEE
_NO_HARM = frozenset((*range(0xE0, 0xF0), 0xDD, 0xFE))  # other programs' notes, restart intervals, comments
_COMPONENTS = (b"\1\2\3", b"\0\1\2")  # brightness and two of colour; others may stand for red, green and blue
_LUMINANCE = (0x11, 0x21, 0x12, 0x22, 0x41)  # how many samples to one of colour, across and down
_LONGEST_SIDE = 16_384
_MOST_SEGMENTS, _MOST_HEADER = 256, 1 << 20  # before the pixels, bytes; what has more to tell is for the CPU to judge
_ALL_FREQUENCIES = b"\0\x3f\0"
_ORIENTATION = 0x0112
_SHORT = 3


class Frame(NamedTuple):
    """The picture in a JPEG."""

    height: int
    width: int
    names: bytes  # of the components
    tables: bytes  # the quantisation table of each


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that every decoder understands in the same way; None for whatever else it may be."""
    frame = plain_frame(data)
    return None if frame is None else (frame.height, frame.width)


def plain_frame(data: bytes) -> Frame | None:
    """The picture in a JPEG that every decoder understands in the same way; None for whatever else it may be.

    Plain is a baseline JPEG of 8 bits, in grey or in the usual colours, upright, with sound tables, in one scan and up
    to its end mark. Progressive ones are not: a GPU's decoder takes them one by one and has the CPU do half of the
    work, in the one thread that must not wait.
    """
    if data[:2] != b"\xff\xd8" or data[-2:] != b"\xff\xd9":
        return None
    place, end = 2, len(data) - 2
    frame: Frame | None = None
    huffman: frozenset[int] = frozenset()
    quantisation: frozenset[int] = frozenset()
    exif = False
    for _ in range(_MOST_SEGMENTS):
        if place > min(end - 4, _MOST_HEADER):
            return None
        mark, kind, length = _SEGMENT.unpack_from(data, place)
        begin, place = place + 4, place + 2 + length
        if mark != 0xFF or length < 2 or place > end:
            return None
        content = data[begin:place]
        if kind == _HUFFMAN:
            tables = _huffman_tables(content)
            if not tables:
                return None
            huffman |= tables
        elif kind == _QUANTISATION:
            tables = _quantisation_tables(content)
            if not tables:
                return None
            quantisation |= tables
        elif kind == _BASELINE:
            if frame is not None:
                return None
            frame = _plain_frame(content)
            if frame is None:
                return None
        elif kind == _EXIF:
            if content[:6] == b"Exif\0\0":
                if exif or not _is_upright(content[6:]):
                    return None
                exif = True
            elif b"Orientation" in content:
                return None
        elif kind == _ADOBE:
            if content[:5] == b"Adobe" and content[11:12] != b"\1":  # not the usual colours
                return None
        elif kind == _SEVERAL_PICTURES and content[:4] == b"MPF\0":
            return None
        elif kind == _SCAN:
            if frame is None or not quantisation.issuperset(frame.tables):
                return None
            # Another scan would be for nothing, and each is a pass over all pixels.
            alone = data.find(b"\xff\xda", place) < 0
            return frame if alone and _is_whole_scan(content, frame.names, huffman) else None
        elif kind not in _NO_HARM:
            return None
    return None


def _plain_frame(content: bytes) -> Frame | None:
    """The picture's size and components, if it is in grey or in the usual colours, of 8 bits and not too large."""
    if len(content) < 6:
        return None
    bits, height, width, count = _FRAME.unpack_from(content)
    if bits != 8 or len(content) != 6 + 3 * count or count not in (1, 3):
        return None
    if not (0 < height <= _LONGEST_SIDE and 0 < width <= _LONGEST_SIDE) or too_large(width, height):
        return None
    frame = Frame(height, width, content[6::3], content[8::3])
    samples = content[7::3]
    if count == 1:
        return frame if samples == b"\x11" else None
    usual = frame.names in _COMPONENTS and samples[0] in _LUMINANCE and samples[1:] == b"\x11\x11"
    return frame if usual else None


def _is_whole_scan(content: bytes, names: bytes, huffman: frozenset[int]) -> bool:
    """Whether all components follow, at all frequencies, by tables that are there."""
    count = len(names)
    if len(content) != 4 + 2 * count or content[0] != count or content[-3:] != _ALL_FREQUENCIES:
        return False
    selected = content[2 : 1 + 2 * count : 2]
    return content[1 : 1 + 2 * count : 2] == names and all(
        pair >> 4 in huffman and 0x10 | pair & 0xF in huffman for pair in selected
    )


@lru_cache(maxsize=256)  # most programs write the same tables all the time
def _huffman_tables(content: bytes) -> frozenset[int]:
    """Which tables these are: 0 and 1 for mean values, 16 and 17 for other frequencies. None if one is not sound."""
    found = set()
    place = 0
    while place < len(content):
        name, counts = content[place], content[place + 1 : place + 17]
        symbols = content[place + 17 : place + 17 + sum(counts)]
        if name not in (0x00, 0x01, 0x10, 0x11) or len(counts) < 16 or len(symbols) < sum(counts):
            return frozenset()
        codes = 0
        for bits, count in enumerate(counts, start=1):
            codes = 2 * codes + count
            if codes >= 1 << bits:  # more codes than there are, the one of ones only being kept free
                return frozenset()
        if name < 0x10 and any(symbol > 11 for symbol in symbols):
            return frozenset()
        found.add(name)
        place += 17 + len(symbols)
    return frozenset(found)


@lru_cache(maxsize=256)
def _quantisation_tables(content: bytes) -> frozenset[int]:
    """Which tables these are, 0 to 3. None if one is not sound, or of more than 8 bits."""
    names = content[::65]
    return frozenset(names) if content and len(content) % 65 == 0 and max(names) < 4 else frozenset()


def _is_upright(exif: bytes) -> bool:
    """Whether these notes say, or leave open, that the picture is upright. False also if they make no sense."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 10:
        return False
    (first,) = struct.unpack_from(order + "I", exif, 4)
    if first > len(exif) - 2:
        return False
    (count,) = struct.unpack_from(order + "H", exif, first)
    entries = exif[first + 2 : first + 2 + 12 * count]
    if len(entries) < 12 * count:
        return False
    for tag, kind, number, value, _ in struct.iter_unpack(order + "HHIHH", entries):
        if tag == _ORIENTATION:
            return (kind, number, value) == (_SHORT, 1, 1)
    return True
