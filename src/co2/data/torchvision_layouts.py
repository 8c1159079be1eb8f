"""CIFAR-10, CIFAR-100 and STL-10 in the folders that torchvision's downloads leave on disk.

CIFAR's files are pickles, which may run any program when they are opened in the ordinary way. Here they are read by
an unpickler that knows arrays of numbers and nothing else, and that takes no more memory for them than the file gives
reason to.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from co2.data.decode import unreadable_is_bad
from co2.data.source import ArraySource, BadImage, ImageSource, Parts, in_words, printable
from co2.errors import UserError
from co2.files import UnreadableFile, open_regular, read_bytes

_CIFAR_SHAPE = (3, 32, 32)
_STL_SHAPE = (3, 96, 96)
_STL_BYTES = 3 * 96 * 96
_FOLDERS = ("cifar-10-batches-py", "cifar-100-python", "stl10_binary")
_AGAIN = "Download and unpack the data set again."
_MOST_STEPS = 2_000_000  # of a pickle; the largest, CIFAR-100's train, has some 200,000


def find_layout(path: str) -> str | None:
    """The folder in torchvision's layout that `path` is or contains, if there is one."""
    for name in (path, os.path.realpath(path)):  # a link to one may be called anything
        if os.path.basename(os.path.abspath(name)) in _FOLDERS:
            return name
    inside = [name for name in _FOLDERS if os.path.isdir(os.path.join(path, name))]
    if len(inside) > 1:
        choices = " or ".join(f"'{os.path.join(path, name)}'" for name in inside)
        raise UserError(f"'{path}' holds several data sets. Name one of them: {choices}.")
    return os.path.join(path, inside[0]) if inside else None


def open_layout(folder: str) -> Parts:
    """What is in a folder that `find_layout` found."""
    name = os.path.basename(os.path.abspath(folder))
    if name == "stl10_binary":
        return _stl10(folder)
    if name == "cifar-100-python":
        train = _cifar("CIFAR-100", folder, ["train"], "fine_labels", "meta", "fine_label_names")
        test = _cifar("CIFAR-100", folder, ["test"], "fine_labels", "meta", "fine_label_names")
    else:
        batches = [f"data_batch_{number}" for number in range(1, 6)]
        train = _cifar("CIFAR-10", folder, batches, "labels", "batches.meta", "label_names")
        test = _cifar("CIFAR-10", folder, ["test_batch"], "labels", "batches.meta", "label_names")
    words = f"{train.name}: {len(train):,} images of 32 pixels, {len(train.classes)} classes; {len(test):,} held out"
    return train, train, test, words


def _cifar(name: str, folder: str, files: list[str], labels_key: str, names_file: str, names_key: str) -> ArraySource:
    (names,) = _entries(os.path.join(folder, names_file), names_key)
    if not all(isinstance(word, str) for word in names):
        raise UserError(f"'{os.path.join(folder, names_file)}' does not hold the names of classes. {_AGAIN}")
    classes = tuple(map(printable, names))
    pixels, labels = [], []
    for file in files:
        path = os.path.join(folder, file)
        data, numbers = _entries(path, "data", labels_key)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(numbers), 3072):
            raise UserError(f"'{path}' does not hold CIFAR images with their labels. {_AGAIN}")
        if not all(isinstance(number, int | np.integer) and 0 <= number < len(classes) for number in numbers):
            raise UserError(f"'{path}' has labels that '{names_file}' has no names for. {_AGAIN}")
        pixels.append(data.reshape(-1, *_CIFAR_SHAPE))
        labels.append(np.asarray(numbers, dtype=np.int64))
    return ArraySource(name, np.concatenate(pixels), np.concatenate(labels), classes)


@contextmanager
def _told_as_user_error(path: str) -> Iterator[None]:
    try:
        yield
    except UnreadableFile as error:
        raise UserError(f"'{path}' cannot be read: {error}. {_AGAIN}") from None


def _entries(path: str, *keys: str) -> list[Any]:
    with _told_as_user_error(path):
        data = read_bytes(path, empty=False)
    try:
        _check_steps(data)
        contents = _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
        entries = [contents[key] for key in keys]
        return [entry.array() if isinstance(entry, _Part) else list(entry) for entry in entries]
    except _Refused as refusal:
        raise UserError(
            f"'{path}' asks for '{printable(str(refusal))}', which no CIFAR file needs and which could run a program. "
            f"It was not opened. {_AGAIN}"
        ) from None
    except Exception as error:  # a damaged pickle makes its reader raise almost anything
        reason = f"{type(error).__name__}: {in_words(error)}"
        raise UserError(f"'{path}' is damaged, or no CIFAR file ({reason}). {_AGAIN}") from None


def _check_steps(data: bytes) -> None:
    """Refuse a pickle that would take far more memory than it has bytes: every step may make an object, and where a
    step says under which number to keep something, there is room made for all numbers below."""
    for step, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if step > _MOST_STEPS or (operation.name in ("PUT", "LONG_BINPUT") and (argument or 0) > step):
            raise ValueError("it asks for too much memory")


class _Refused(Exception):  # noqa: N818
    """A name in a pickle that is not one of an array's parts."""


class _ArraysOnly(pickle.Unpickler):
    """Reads containers, text, numbers and the parts of NumPy arrays. Nothing is called on the way, not even NumPy: the
    few names that an array's pickle mentions stand for a `_Part`, and all others are refused."""

    def __init__(self, file: io.BytesIO, encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        self.encoded: dict[str, bytes] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how pickles for Python 2 spell bytes
            # The same text gives the same object, however often it is asked for.
            return lambda text, _: self.encoded.setdefault(text, text.encode("latin1"))
        if f"{module.replace('numpy._core', 'numpy.core')}.{name}" not in _NAMES_OF_ARRAYS:
            raise _Refused(f"{module}.{name}")
        return _Part


_NAMES_OF_ARRAYS = (
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.numeric._frombuffer",
)


class _Part:
    """Stands in for an array or for its type: keeps what it would be made of."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """The array of numbers that this was to become."""
        if self.state:
            _, shape, kind, order, data = self.state
        else:  # of pickles since Python 3.8
            data, kind, shape, order = self.given
        if not re.fullmatch("[uif][1248]", kind.given[0]):
            raise ValueError(f"an array of type {kind.given[0]}")
        dtype = np.dtype(kind.given[0]).newbyteorder(kind.state[1] if kind.state else "=")
        data = data.encode("latin1") if isinstance(data, str) else data  # text: written by Python 2
        return np.frombuffer(data, dtype).reshape(shape, order="F" if order in (True, "F") else "C")


class StlSource(ImageSource):
    """Images in STL-10's binary files, read from the disk one at a time: the unlabelled ones take 2.8 GB."""

    def __init__(self, paths: list[str], labels: np.ndarray | None = None, classes: tuple[str, ...] = ()) -> None:
        self.name = "STL-10"
        self.paths = paths
        self.ends = np.cumsum([_stl_count(path) for path in paths])  # images up to the end of each file
        self.labels = labels
        self.classes = classes

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _locate(self, index: int) -> tuple[str, int]:
        file = int(np.searchsorted(self.ends, index, side="right"))
        return self.paths[file], index - (int(self.ends[file - 1]) if file else 0)

    def image(self, index: int) -> torch.Tensor:
        path, position = self._locate(index)
        with unreadable_is_bad(), open_regular(path, sys.maxsize) as file:
            file.seek(position * _STL_BYTES)
            data = file.read(_STL_BYTES)
        if len(data) < _STL_BYTES:
            raise BadImage("truncated file")
        columns = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(_STL_SHAPE)  # [3, W, H]
        return columns.transpose(1, 2).contiguous()  # [3, H, W]

    def describe(self, index: int) -> str:
        path, position = self._locate(index)
        return f"{path} image {position}"


def _stl_count(path: str) -> int:
    with _told_as_user_error(path), open_regular(path, sys.maxsize, empty=False) as file:
        count, rest = divmod(os.fstat(file.fileno()).st_size, _STL_BYTES)
    if rest:
        raise UserError(f"'{path}' is cut off in the middle of an image. {_AGAIN}")
    return count


def _stl10(folder: str) -> Parts:
    """Pre-training takes the unlabelled images and the labelled ones of train; both are made for that."""
    train = _stl_labelled(folder, "train")
    test = _stl_labelled(folder, "test")
    files = [os.path.join(folder, f"{part}_X.bin") for part in ("unlabeled", "train")]
    files = [path for path in files if os.path.exists(path)]
    if not files:
        raise UserError(f"'{folder}' has neither unlabeled_X.bin nor train_X.bin. {_AGAIN}")
    everything = StlSource(files)
    words = f"STL-10: {len(everything):,} images of 96 pixels"
    if train is not None:
        words += f", {len(train):,} of them labelled, {len(train.classes)} classes"
    if test is not None:
        words += f"; {len(test):,} held out"
    return everything, train, test, words


def _stl_labelled(folder: str, part: str) -> StlSource | None:
    images, labels = (os.path.join(folder, f"{part}_{kind}.bin") for kind in "Xy")
    if not os.path.exists(images) or not os.path.exists(labels):
        return None
    names = os.path.join(folder, "class_names.txt")
    with _told_as_user_error(labels):
        numbers = (
            np.frombuffer(read_bytes(labels, empty=False), dtype=np.uint8).astype(np.int64) - 1
        )  # [N]; counted from 1
    classes: tuple[str, ...] = tuple(str(number) for number in range(1, 11))
    if os.path.exists(names):
        with _told_as_user_error(names):
            classes = tuple(printable(word) for word in read_bytes(names, empty=False).split())
    if len(numbers) != _stl_count(images) or (numbers < 0).any() or (numbers >= len(classes)).any():
        raise UserError(f"The labels in '{labels}' do not fit the images in '{images}'. {_AGAIN}")
    return StlSource([images], numbers, classes)
