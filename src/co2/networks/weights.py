"""Weights out of files, whoever wrote them: what a file holds is known, and can be compared, before any of it is read.

Three kinds are understood: `.safetensors`, the archives that `torch.save` writes, and the bare pickles that it wrote
before PyTorch 1.6. Each describes its tensors (type, shape, and where in the file their numbers lie), and holds their
numbers as they are. So a description costs little whatever it claims, and a tensor no more than its part of the file.

Nothing in a pickle is called: its names stand for what is made here, and a name that stands for nothing is refused.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from co2.errors import UserError
from co2.files import UnreadableFile, open_regular, parse_json

MOST_BYTES = 32 * 2**30  # of a file; checkpoints of the largest networks have about ten
_MOST_DESCRIBED = 4 * 2**20  # of a pickle, a header or an archive's directory; those of the largest networks have one
_MOST_PARTS = 16  # of a shape, or of what a pickle has a tensor made of
_MOST_SPREAD = 4  # a slice of a tensor may lie in a stretch of the file of so many times its size
_UNPICKLER: Any = pickle._Unpickler  # the one in Python: which steps it takes can be chosen
_BARE_PICKLE = [0x1950A86A20F9469CFC6C, 1001]  # how torch marked it, and the version of that format
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_TYPES = (*_REAL, *_WHOLE, torch.bool, torch.complex64, torch.complex128)  # the last three are in no network
_CODES = dict(zip(["F16", "BF16", "F32", "F64", "U8", "I8", "I16", "I32", "I64", "BOOL", "C64"], _TYPES, strict=False))
_NAMES = {torch.empty(0, dtype=dtype).type().replace("Tensor", "Storage"): dtype for dtype in _TYPES}
# Names that pickles of torch's own mention, too; nothing here needs what they stand for, and None takes its place.
_PASSED_OVER = re.compile(
    r"torch\.(Size|Tensor|device|nn\.parameter\.Parameter|serialization\._get_layout|_utils\._rebuild_\w+|Q?U?\w+Storage|"
    r"(q?u?int|float|bits|complex|per_)\w+)|collections\.Counter|_codecs\.encode|(builtins|__builtin__)\.(set|bytearray|complex)"
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as the file describes it; nothing of it is in memory."""

    path: Path
    start: int  # byte of the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def stretch(self) -> int:
        """How many numbers lie in the file from its first to its last."""
        return (
            0 if 0 in self.shape else 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        )

    def read(self) -> Tensor:
        """The tensor itself."""
        if self.stretch > _MOST_SPREAD * math.prod(self.shape):
            raise UnreadableFile(f"one of the tensors is spread out over too much of {self.path}")
        numbers = torch.empty(self.stretch * self.dtype.itemsize, dtype=torch.uint8)
        with open_regular(self.path, MOST_BYTES) as file:
            file.seek(self.start)
            if file.readinto(numbers.numpy()) < len(numbers):  # type: ignore[attr-defined]
                raise UnreadableFile(f"{self.path} has become shorter")
        return numbers.view(self.dtype).as_strided(self.shape, self.stride)


def describe_pickled(path: Path, tensor: Callable[[StoredTensor], Any] = lambda stored: stored) -> Any:
    """What `torch.save` wrote, with what `tensor` makes of its description in the place of each tensor. Raises
    UnreadableFile, whose message is the reason alone."""
    with _told("it is damaged, incomplete, or no checkpoint at all"), open_regular(path, MOST_BYTES) as file:
        begins = file.read(4)
        _insist(begins == b"PK\x03\x04" or begins.startswith(b"\x80"))
        make = _archive if begins == b"PK\x03\x04" else _bare_pickle
        return make(path, file, os.fstat(file.fileno()).st_size, tensor)


def read_pickled(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU, in no more memory than the file has bytes. Raises as `describe_pickled`."""
    left = os.path.getsize(path)

    def read(stored: StoredTensor) -> Tensor:
        nonlocal left
        left -= max(stored.stretch, math.prod(stored.shape)) * stored.dtype.itemsize
        _insist(left >= 0)  # else they overlap
        return stored.read()

    return describe_pickled(path, read)


def read_tensors(weights: Mapping[str, StoredTensor | Tensor]) -> dict[str, Tensor]:
    """What is described, where it is not there already. Raises UserError if the file is no longer what it was."""
    try:
        return {key: own.read() if isinstance(own, StoredTensor) else own for key, own in weights.items()}
    except UnreadableFile as error:
        raise UserError(f"The weights cannot be read: {error}.") from error


def describe_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a .safetensors file, and what it says about itself. Raises UnreadableFile, whose message is the
    reason alone."""
    with _told("it is damaged, or something else"), open_regular(path, MOST_BYTES) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = parse_json(file.read(_described(length)))
        metadata = header.pop("__metadata__", {})
        _insist(all(isinstance(value, str) for value in metadata.values()))
        tensors, end = {}, 8 + length
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            tensor = tensors[name] = _stored(path, end, _CODES[entry["dtype"]], tuple(entry["shape"]))
            begin, stop = (8 + length + offset for offset in entry["data_offsets"])
            _insist(begin == end and stop == end + math.prod(tensor.shape) * tensor.dtype.itemsize)
            end = stop  # where the next one begins
        _insist(end == os.fstat(file.fileno()).st_size)
    return tensors, metadata


def misfits(weights: Mapping[str, StoredTensor | Tensor], wanted: Mapping[str, Tensor]) -> str:
    """What keeps weights from being those of a network with such a state dict, in a few words; nothing if they are."""
    found = [(key, weights[key], wanted[key]) for key in wanted if key in weights]
    shapes = [(key, tuple(own.shape), tuple(its.shape)) for key, own, its in found]
    kinds = [(key, own.dtype, its.dtype) for key, own, its in found]
    complaints = {
        "missing": [key for key in wanted if key not in weights],
        "unknown to it": [key for key in weights if key not in wanted],
        "of another shape": [f"{key} {own} instead of {its}" for key, own, its in shapes if own != its],
        "of another kind": [
            f"{key} {own} instead of {its}"
            for key, own, its in kinds
            if (own in _REAL, own in _WHOLE) != (its in _REAL, its in _WHOLE)
        ],
    }
    return "; ".join(f"{words}: {some(keys)}" for words, keys in complaints.items() if keys)


def some(names: Iterable[object], most: int = 6) -> str:
    """The first few of many names, which may come out of a file, as part of a sentence."""
    words = [name if len(name) <= 100 else f"{name[:100]}..." for name in map(str, names)]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _archive(path: Path, file: BinaryIO, size: int, tensor: Callable[[StoredTensor], Any]) -> Any:
    entries = zipfile.ZipFile(_Directory(file)).infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UnreadableFile(
            "its parts are compressed, and could be of any size. Load it with torch, and save it again"
        )
    _insist(sum(entry.file_size for entry in entries) <= size)
    places: dict[str, tuple[int, int]] = {}  # where each part begins, and how many bytes it has
    for entry in entries:
        file.seek(entry.header_offset)
        mark, name, extra = struct.unpack("<4s22xHH", file.read(30))
        begin = entry.header_offset + 30 + name + extra
        _insist(mark == b"PK\x03\x04" and entry.file_size <= size - begin and entry.filename not in places)
        places[entry.filename] = (begin, entry.file_size)
    (pickled,) = (name for name in places if name.endswith("/data.pkl"))
    folder = pickled.removesuffix("data.pkl")
    parts = {}
    for name in {pickled, f"{folder}byteorder"} & places.keys():
        file.seek(places[name][0])
        parts[name] = file.read(_described(places[name][1]))
    _insist(parts.get(f"{folder}byteorder", b"little").decode() == sys.byteorder)
    storages = {name.removeprefix(f"{folder}data/"): place for name, place in places.items()}
    return _Reader(io.BytesIO(parts[pickled]), path, tensor, storages).load()


def _bare_pickle(path: Path, file: BinaryIO, _: int, tensor: Callable[[StoredTensor], Any]) -> Any:
    """Five pickles one after the other, the fourth with what was saved; then the numbers of each storage behind their
    count, in the order of the fifth."""
    file.seek(0)
    pickles = io.BytesIO(file.read(_MOST_DESCRIBED))
    _insist([_Reader(pickles, path).load() for _ in range(2)] == _BARE_PICKLE)
    _insist(_Reader(pickles, path).load()["little_endian"] == (sys.byteorder == "little"))
    begin, asking = pickles.tell(), _Reader(pickles, path)
    asking.load()
    keys, places = _Reader(pickles, path).load(), {}
    place = pickles.tell()
    for key in keys:
        _insist(type(key) is str)
        file.seek(place)
        (count,) = struct.unpack("<Q", file.read(8))
        places[key] = (place + 8, count * asking.asked[key].itemsize)
        place = sum(places[key])
    pickles.seek(begin)
    return _Reader(pickles, path, tensor, places).load()


@dataclass(frozen=True)
class _Storage:
    """Where the numbers of one or several tensors lie."""

    dtype: torch.dtype
    start: int
    size: int  # in bytes


class _Reader(_UNPICKLER):
    """Reads containers, text, numbers and tensors, by the few steps that torch's pickles consist of. No step takes more
    memory or time than its own bytes account for."""

    def __init__(
        self,
        data: io.BytesIO,
        path: Path,
        tensor: Callable[[StoredTensor], Any] = lambda stored: stored,
        places: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(data, encoding="utf-8")
        self.path, self.places, self.tensor = path, places, tensor
        self.asked: dict[str, torch.dtype] = {}  # the storages, by their keys
        self.own: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
            "torch._tensor._rebuild_from_type_v2": lambda make, kind, arguments, state: self._made(make, arguments),
            "torch.storage.UntypedStorage": torch.uint8,
        }
        self.own |= _NAMES | {str(dtype): dtype for dtype in _TYPES}

    def find_class(self, module: str, name: str) -> Any:
        name = f"{module}.{name}"
        if name not in self.own and not _PASSED_OVER.fullmatch(name):
            raise UnreadableFile(
                "it holds more than tensors and plain values. Loading it could run any code that its author put there, "
                "so it is refused. If you trust its author, load it yourself, and save its state dict and architecture "
                "alone: torch.save({'arch': 'resnet50', 'state_dict': checkpoint['state_dict']}, 'clean.pth')"
            )
        return self.own.get(name)

    def persistent_load(self, saved: Any) -> _Storage:
        _insist(type(saved) is tuple and 5 <= len(saved) <= 6)
        _, dtype, key, _, count, *view = saved
        if not isinstance(dtype, torch.dtype):
            raise UnreadableFile("it holds quantised numbers, or others that no network here has")
        _insist(type(key) is str and type(count) is int and count >= 0 and view in ([], [None]))
        _insist(self.asked.setdefault(key, dtype) == dtype)
        start, size = (0, count * dtype.itemsize) if self.places is None else self.places[key]
        _insist(size == count * dtype.itemsize)
        return _Storage(dtype, start, size)

    def _tensor(self, storage: _Storage, offset: int, shape: Any, stride: Any, *rest: Any) -> Any:
        _insist(type(storage) is _Storage and type(offset) is int and offset >= 0)
        dtype = next((part for part in rest if isinstance(part, torch.dtype)), storage.dtype)
        stored = _stored(self.path, storage.start + offset * dtype.itemsize, dtype, shape, stride)
        _insist((offset + stored.stretch) * dtype.itemsize <= storage.size)
        return self.tensor(stored)

    def _made(self, make: Any, arguments: Any) -> Any:
        _insist(type(arguments) is tuple and len(arguments) <= _MOST_PARTS and not (make is OrderedDict and arguments))
        return None if make is None else make(*arguments)

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], arguments)

    def _build(self) -> None:
        self.stack.pop()  # notes of a state dict about versions, which `load_weights` has from the module

    def _set(self, items: list[Any]) -> None:
        _insist(type(self.stack[-1]) in (dict, OrderedDict))
        for key, value in zip(items[::2], items[1::2], strict=True):
            _insist(type(key) is str or (type(key) is int and abs(key) < 2**60))  # others can take any time to be found
            self.stack[-1][key] = value

    def _set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_several(self) -> None:
        self._set(self.pop_mark())

    dispatch: ClassVar[Any] = {
        step: _UNPICKLER.dispatch[step] for step in b"\x80.(N\x88\x89JKM\x8aGXU])}t\x85\x86\x87aehjqrcQ"
    }
    dispatch |= dict(zip(b"Rbsu", (_reduce, _build, _set_one, _set_several), strict=True))


class _Directory:
    """A file of which zipfile reads no more at once than an archive's directory may have."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, count: int = -1) -> bytes:
        return self.file.read(min(count, _MOST_DESCRIBED) if count >= 0 else _MOST_DESCRIBED)


def _stored(path: Path, start: int, dtype: torch.dtype, shape: Any, stride: Any = ()) -> StoredTensor:
    """A tensor whose rows lie one after the other, if no strides are given."""
    for numbers in (shape, stride):
        _insist(type(numbers) is tuple and len(numbers) <= _MOST_PARTS)
        _insist(all(type(number) is int and 0 <= number < 2**60 for number in numbers))
    stride = stride or tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    _insist(len(shape) == len(stride))
    return StoredTensor(path, start, dtype, shape, stride)


def _described(length: int) -> int:
    if length > _MOST_DESCRIBED:
        raise UnreadableFile(f"what it says about its tensors is larger than {_MOST_DESCRIBED // 2**20} MiB")
    return length


def _insist(condition: object) -> None:
    if not condition:
        raise ValueError("not as torch or safetensors would have written it")


@contextmanager
def _told(reason: str) -> Iterator[None]:
    try:
        yield
    except UnreadableFile:
        raise
    except Exception as error:  # what is damaged, or something else, makes its reader raise almost anything
        raise UnreadableFile(reason) from error
