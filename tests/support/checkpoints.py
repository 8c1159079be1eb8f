"""Files of weights as nobody should write them: archives, pickles and headers put together, and taken apart, by hand.

Run as a program it opens the files that are named on its command line, one after the other as a stranger's, and prints
what came of each and how long it took, as a line of JSON, and at the end how much memory it took in all.
"""

from __future__ import annotations

import json
import pickletools
import random
import struct
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

DESCRIBED = {"backbone": "co2/resnet10-narrow", "stem": "small", "view_size": "32"}
DESCRIBED |= {"mean": "[0.5, 0.5, 0.5]", "std": "[0.5, 0.5, 0.5]"}
_EXTREME = [0, 1, 2, 255, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]


@dataclass(frozen=True)
class Member:
    """A part of a zip archive: what its bytes are, and what is claimed of them."""

    name: str
    data: bytes
    method: int = zipfile.ZIP_STORED
    size: int | None = None
    """Of what it unpacks to; None for the truth."""


def archive(members: list[Member], shift: int = 0) -> bytes:
    """A zip archive with these parts; `shift` is by how much its directory points beside them."""
    content, directory = bytearray(), bytearray()
    for member in members:
        name = member.name.encode("utf-8", "surrogateescape")
        size = len(member.data) if member.size is None else member.size
        stored = len(member.data) if member.method else size
        sizes = struct.pack("<IIHH", stored & 0xFFFFFFFF, size & 0xFFFFFFFF, len(name), 0)
        common = struct.pack("<HHHHHI", 20, 0x800, member.method, 0, 0, 0) + sizes
        place = max(0, len(content) + shift)
        directory += b"PK\x01\x02" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, place) + name
        content += b"PK\x03\x04" + common + name + member.data
    end = struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), len(content), 0)
    return bytes(content + directory) + b"PK\x05\x06" + end


def members(data: bytes, path: Path) -> list[Member]:
    """The parts of an archive that torch has written."""
    path.write_bytes(data)
    with zipfile.ZipFile(path) as opened:
        return [Member(entry.filename, opened.read(entry)) for entry in opened.infolist()]


def deflated(name: str, byte: bytes, times: int) -> Member:
    """A part of one byte very many times, packed a thousand times smaller."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    block = packer.compress(byte * 2**24) + packer.flush(zlib.Z_FULL_FLUSH)
    whole, rest = divmod(times, 2**24)
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return Member(name, block * whole + packer.compress(byte * rest) + packer.flush(), zipfile.ZIP_DEFLATED, times)


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def other_archive(parts: list[Member], draw: random.Random) -> bytes:
    """An archive after a few accidents: parts missing, doubled, packed or of another size, a pickle of other steps."""
    parts = list(parts)
    shift = 0
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        place = draw.randrange(len(parts))
        part = parts[place]
        match draw.choice(["pickle"] * 6 + ["without", "doubled", "packed", "size", "cut", "name", "moved", "shift"]):
            case "pickle":
                place = next((n for n, one in enumerate(parts) if one.name.endswith("data.pkl")), place)
                parts[place] = replace(parts[place], data=other_pickle(parts[place].data, draw))
            case "without" if len(parts) > 1:
                del parts[place]
            case "doubled":
                parts.insert(draw.randrange(len(parts)), part)
            case "packed":
                packer = zlib.compressobj(9, zlib.DEFLATED, -15)
                data = packer.compress(part.data) + packer.flush()
                parts[place] = Member(part.name, data, draw.choice([8, 8, 12, 14, 93]), len(part.data))
            case "size":
                parts[place] = replace(part, size=draw.choice([*_EXTREME, len(part.data) + 1, len(part.data) // 2]))
            case "cut":
                parts[place] = replace(part, data=part.data[: draw.randrange(len(part.data) + 1)])
            case "name":
                parts[place] = replace(
                    part, name=draw.choice([parts[draw.randrange(len(parts))].name, "", "../x", "a/data.pkl"])
                )
            case "moved":
                parts[place] = replace(part, data=parts[draw.randrange(len(parts))].data)
            case "shift":
                shift = draw.choice([-1, 1, 30, -(2**20), 2**20])
    data = archive(parts, shift)
    return data if draw.random() < 0.95 else data[: draw.randrange(len(data))]


def other_pickle(data: bytes, draw: random.Random) -> bytes:
    """A pickle after a few accidents: steps taken out, doubled, exchanged and put in, numbers and names changed."""
    try:
        starts = [place for _, _, place in pickletools.genops(data)]
    except Exception:
        return data[: draw.randrange(len(data) + 1)]
    steps = [data[begin:end] for begin, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        place = draw.randrange(len(steps))
        match draw.choice(["without", "doubled", "swapped", "put in", "number", "number", "number", "name", "other"]):
            case "without" if len(steps) > 1:
                del steps[place]
            case "doubled":
                steps[place:place] = steps[place : place + draw.choice([1, 1, 3, 10])] * draw.choice([1, 1, 2, 1000])
            case "swapped":
                other = draw.randrange(len(steps))
                steps[place], steps[other] = steps[other], steps[place]
            case "put in":
                steps.insert(place, draw.choice(_STEPS) * draw.choice([1, 1, 2, 5, 10_000]))
            case "number":
                numbers = [n for n, step in enumerate(steps) if step[:1] in (b"K", b"M", b"J", b"\x8a")]
                if numbers:
                    small = [*range(10), 16, 32, 64, 144, 9_408]
                    steps[draw.choice(numbers)] = number(draw.choice([*small, *_EXTREME, -1, -(2**31), 10**30]))
            case "name":
                names = [n for n, step in enumerate(steps) if step[:1] in (b"c", b"X")]
                if names:
                    steps[draw.choice(names)] = draw.choice(_NAMES)
            case "other":
                steps[place] = bytes([draw.randrange(256)]) + steps[place][1:]
    return b"".join(steps)


def number(value: int) -> bytes:
    """The step of a pickle that makes a number."""
    text = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(text)]) + text


def other_safetensors(data: bytes, draw: random.Random) -> bytes:
    """A .safetensors file with another header: offsets, shapes and types that lie, overlap or are no such things."""
    (length,) = struct.unpack("<Q", data[:8])
    header, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(draw.choice([1, 1, 2, 3])):
        key = draw.choice(sorted(header))
        entry = header[key]
        strange: list[object] = [
            *_EXTREME,
            -1,
            None,
            [],
            {},
            "x",
            1.5,
            True,
            [2**40] * 9,
            [[[0]]],
            "F128",
            10**400,
            [0] * 99,
        ]
        match draw.choice(["entry", "field", "field", "field", "other", "description", "without", "raw", "length"]):
            case "entry":
                header[key] = draw.choice(strange)
            case "field" if isinstance(entry, dict) and "shape" in entry:
                name = draw.choice(["shape", "dtype", "data_offsets"])
                inner = entry[name]
                if isinstance(inner, list) and inner and draw.random() < 0.7:
                    inner[draw.randrange(len(inner))] = draw.choice(strange)
                else:
                    entry[name] = draw.choice([*strange, "F64", "I64", "C64", "BOOL", "U8"])
            case "other":
                header[draw.choice(["\x1b[2J", "x" * 10**5, "conv1.weight\n", ""])] = entry
            case "description" if isinstance(header.get("__metadata__"), dict):
                known = [
                    *strange,
                    "torchvision/vit_h_14",
                    "torchvision/regnet_y_128gf",
                    "4004",
                    "timm/resnet18.x",
                    "\x1b]0;x\x07",
                ]
                header["__metadata__"][draw.choice(sorted(DESCRIBED))] = draw.choice(known)
            case "without":
                del header[key]
                header = header or {"x": 1}
            case "raw":
                text = json.dumps(header).encode()
                nested = draw.choice(
                    [b"[" * 10**5, b'{"a":' * 10**4, b"9" * 10**5, text * 2, text[:-1], b"[" + text + b"]"]
                )
                return safetensors(nested, numbers)
            case "length":
                return safetensors(header, numbers, draw.choice([*_EXTREME, len(data)]))
    return safetensors(header, draw.choice([numbers, numbers, numbers[:-1], numbers + b"x", b""]))


_STEPS = [
    *(bytes([code]) for code in b"(012)]}t\x85\x86\x87aesuRbQN.\x81o\x93\x8f"),
    *(b"q\x00", b"h\x00", b"h\x01", b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"I1\n", b"L9\n", b"P1\n"),
    *(b"X\xff\xff\xff\xff", b"\x8a\xff", b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8, b"\x95" + b"\xff" * 8),
    *(b"c__builtin__\nset\n", b"ctorch\nfloat64\n", b"ctorch\nQInt8Storage\n", b"ctorch.storage\nUntypedStorage\n"),
    *(b"ccollections\nOrderedDict\n", b"c_codecs\nencode\n", b"ctorch\nTensor\n"),
]
_NAMES = [
    *(b"ctorch._utils\n_rebuild_" + name + b"\n" for name in (b"sparse_tensor", b"qtensor", b"tensor_v3", b"tensor")),
    *(
        b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n",
        b"ctorch._tensor\n_rebuild_from_type_v2\n",
        b"cos\nsystem\n",
    ),
    *(b"ctorch\nLongStorage\n", b"ctorch\nComplexFloatStorage\n", b"ctorch\nBoolStorage\n", b"cbuiltins\nbytearray\n"),
    *(b"X\x01\x00\x00\x000", b"X\x04\x00\x00\x00\x1b[2J", b"X\x00\x00\x00\x00", b"X\x03\x00\x00\x00\xed\xb2\x80"),
]


def main(names: list[str]) -> None:
    import co2
    from co2.checkpoint import newest_sound_checkpoint
    from co2.evaluation.subject import open_subject

    for name in names:
        way, _, path = name.partition("=")
        begun = time.monotonic()
        try:
            if way == "resume":
                newest_sound_checkpoint(Path(path), lambda words: None)
            elif way == "load":
                co2.load_backbone(path)
            else:
                subject = open_subject(path, embeddings=way == "embed")
                assert all(tensor.isfinite().all() for tensor in subject.weights.values())
            outcome = "read"
        except co2.UserError as error:
            outcome = str(error)
        print(json.dumps({"name": name, "outcome": outcome, "seconds": time.monotonic() - begun}), flush=True)
    with open("/proc/self/status") as status:
        print(json.dumps({"mib": next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM"))}))


if __name__ == "__main__":
    main(sys.stdin.read().splitlines())
