"""CIFAR-10, CIFAR-100 and STL-10 in the folders that torchvision's downloads leave on disk.

CIFAR's files are pickles, which may run any program when they are opened in the ordinary way. Here they are read by
an unpickler that knows arrays of numbers and nothing else.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import torch

from co2.data.source import ArraySource, BadImage, ImageSource
from co2.errors import UserError

_CIFAR_SHAPE = (3, 32, 32)
_STL_SHAPE = (3, 96, 96)
_STL_BYTES = 3 * 96 * 96
_FOLDERS = ("cifar-10-batches-py", "cifar-100-python", "stl10_binary")
Parts = tuple[ImageSource, ImageSource | None, ImageSource | None, str]
"""What is pre-trained on, the labelled bank, the labelled test images, and one line about them."""
_AGAIN = "Download and unpack the data set again."


def find_layout(path: str) -> str | None:
    """The folder in torchvision's layout that `path` is or contains, if there is one."""
    if os.path.basename(os.path.abspath(path)) in _FOLDERS:
        return path
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
    classes = tuple(str(word) for word in names)
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


def _entries(path: str, *keys: str) -> list[Any]:
    try:
        with open(path, "rb") as file:
            contents = _ArraysOnly(file, encoding="latin1").load()
        entries = [contents[key] for key in keys]
        return [entry.array() if isinstance(entry, _Array) else list(entry) for entry in entries]
    except _Refused as refusal:
        raise UserError(
            f"'{path}' asks for '{refusal}', which no CIFAR file needs and which could run a program. "
            f"It was not opened. {_AGAIN}"
        ) from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}. {_AGAIN}") from None
    except Exception as error:  # a damaged pickle makes its reader raise almost anything
        raise UserError(f"'{path}' is damaged, or no CIFAR file ({type(error).__name__}: {error}). {_AGAIN}") from None


class _Refused(Exception):  # noqa: N818
    """A name in a pickle that is not one of an array's parts."""


class _ArraysOnly(pickle.Unpickler):
    """Reads containers, text, numbers and NumPy arrays of numbers. Not even NumPy's own code is called on the way:
    the few names that an array's pickle mentions are bound to the stand-ins below, and all others are refused."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _STAND_INS.get((module.replace("numpy._core", "numpy.core"), name))
        if stand_in is None:
            raise _Refused(f"{module}.{name}")
        return stand_in


class _Type:
    """Stands in for numpy.dtype."""

    def __init__(self, code: str, *_: object) -> None:
        self.dtype = np.dtype(str(code))
        if self.dtype.kind not in "uif":
            raise ValueError(f"an array of type {code}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands in for numpy.ndarray: takes the parts and puts them together once they are all there."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.type, self.columns_first, self.data = state

    def array(self) -> np.ndarray:
        data = self.data.encode("latin1") if isinstance(self.data, str) else self.data  # text: written by Python 2
        return np.frombuffer(data, self.type.dtype).reshape(self.shape, order="F" if self.columns_first else "C")


def _begin_array(*_: object) -> _Array:
    return _Array()


def _whole_array(data: Any, kind: _Type, shape: tuple[int, ...], order: str = "C") -> _Array:
    array = _Array()
    array.__setstate__((1, shape, kind, order == "F", data))
    return array


def _encode(text: str, _: str) -> bytes:
    return text.encode("latin1")  # how pickles for Python 2 spell bytes


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): _begin_array,
    ("numpy.core.numeric", "_frombuffer"): _whole_array,
    ("_codecs", "encode"): _encode,
}


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
        try:
            with open(path, "rb") as file:
                file.seek(position * _STL_BYTES)
                data = file.read(_STL_BYTES)
        except OSError as error:
            raise BadImage(f"cannot be read ({error.strerror})") from None
        if len(data) < _STL_BYTES:
            raise BadImage("truncated file")
        columns = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(_STL_SHAPE)  # [3, W, H]
        return columns.transpose(1, 2).contiguous()  # [3, H, W]

    def describe(self, index: int) -> str:
        path, position = self._locate(index)
        return f"{path} image {position}"


def _stl_count(path: str) -> int:
    count, rest = divmod(os.path.getsize(path), _STL_BYTES)
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
    numbers = np.fromfile(labels, dtype=np.uint8).astype(np.int64) - 1  # [N]; counted from 1 in the file
    classes: tuple[str, ...] = tuple(str(number) for number in range(1, 11))
    if os.path.exists(names):
        with open(names, encoding="utf-8") as file:
            classes = tuple(file.read().split())
    if len(numbers) != _stl_count(images) or (numbers < 0).any() or (numbers >= len(classes)).any():
        raise UserError(f"The labels in '{labels}' do not fit the images in '{images}'. {_AGAIN}")
    return StlSource([images], numbers, classes)
