"""What every collection of images looks like to the rest of the program."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from co2.errors import RunError, escaped

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with how many images are done, and of how many."""
BAD_IN_A_ROW = 50
"""So many unreadable images one after the other are no accident."""
HELD_OUT = ("val", "valid", "validation", "test")
"""What people call the images that are not trained on, in the order in which they are preferred."""


class BadImage(Exception):  # noqa: N818  (it names the image, not the program, as what is wrong)
    """An image that cannot be read. The message is the reason, in a few plain words: 'truncated file'."""


def printable(name: str | bytes) -> str:
    """A name from outside as text for people: one line, and nothing in it that acts on a terminal.

    What cannot be printed (line ends, escape sequences, marks that turn the direction of writing, bytes that are no
    UTF-8) is shown as Python shows it, \\n or \\x1b; a backslash is doubled, so that no two names become the same.
    """
    text = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
    return escaped(text.replace("\\", "\\\\"))


def in_words(error: Exception) -> str:
    """What an error says, in a line that can stand in a sentence."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(words.strip().rstrip("."))


class ImageSource(ABC):
    """Images by index, perhaps with labels.

    A source is copied into every worker of a loader, so it holds no open file and keeps what grows with the number
    of images in arrays, which pickle quickly and which forked workers share.
    """

    name: str
    """What the user calls this data."""
    labels: np.ndarray | None
    """[N] int64, or None where no labels are known."""
    classes: tuple[str, ...]
    """The name of each label; empty without labels."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def image(self, index: int) -> torch.Tensor:
        """Image `index` as uint8 [3, H, W], RGB and upright. Raises BadImage if it cannot be read."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """What to call image `index` when talking to the user: its path, or 'digits image 17'. Always one line."""

    def encoded(self, index: int) -> tuple[bytes, str]:
        """Image `index` as a file: its bytes, and the extension that goes with them.

        These are the bytes it came in, good or bad, where it came in a file, and else a PNG. Raises BadImage if there
        are none.
        """
        file = io.BytesIO()
        Image.fromarray(self.image(index).permute(1, 2, 0).numpy()).save(file, "PNG")  # [H, W, 3]
        return file.getvalue(), ".png"

    def stacked(self) -> np.ndarray | None:
        """All images as one array, uint8 [N, 3, H, W], where they lie in memory that way; else None."""
        return None

    def subset(self, indices: Sequence[int] | np.ndarray) -> ImageSource:
        """The images at these indices, in this order."""
        return Subset(self, np.asarray(indices, dtype=np.int64))

    def spread(self, most: int) -> ImageSource:
        """At most so many images (0: all), evenly spread."""
        return self if not most or len(self) <= most else self.subset(evenly(len(self), most))

    def spread_over_classes(self, most: int) -> ImageSource:
        """At most so many labelled images (0: all), as large a share of every class as of the others."""
        assert self.labels is not None
        return self if not most or len(self) <= most else self.subset(evenly_by_class(self.labels, most))


Source = TypeVar("Source", bound=ImageSource)
Parts = tuple[ImageSource, ImageSource | None, ImageSource | None, str]
"""What is pre-trained on, the labelled bank, the labelled test images, and one line about them."""


def in_numbers(source: ImageSource) -> str:
    """How much there is of it: "12 images, 2 classes"."""
    kinds = f"{len(source.classes):,} classes" if source.labels is not None else "no labels"
    return f"{len(source):,} image{'s' if len(source) != 1 else ''}, {kinds}"


def choose_held_out(names: Sequence[str], open_split: Callable[[str], Source]) -> tuple[Source | None, str]:
    """The first of the held-out splits that has labels, if one has, and how a line about the data goes on: which it is,
    and what is not used.

    `names` are those of all splits that are not trained on. None is opened without need: shards may be far away.
    """
    held_out = [split for split in HELD_OUT if split in names]
    opened = ((split, open_split(split)) for split in held_out)
    told, chosen = next((one for one in opened if one[1].labels is not None), (next(iter(held_out), ""), None))
    words = ""
    if chosen is not None:
        words = f"; {len(chosen):,} held out in {told}"
    elif told:
        words = f"; {told} has no labels and is left out"
    unused = [split for split in names if split != told]
    return chosen, f"{words} (not used: {', '.join(unused)})" if unused else words


def evenly(count: int, most: int) -> np.ndarray:
    """At most so many of the numbers below `count`, evenly spread: [min(count, most)]."""
    chosen = min(count, most)
    return np.arange(chosen) * count // chosen


def evenly_by_class(labels: np.ndarray, most: int) -> np.ndarray:
    """The places of at most so many labels [N], evenly spread over each class: sorted, [min(N, most)].

    Evenly over the places would leave out classes that come in turns.
    """
    return np.sort(np.argsort(labels, kind="stable")[evenly(len(labels), most)])


def readable(source: ImageSource, read: Callable[[int], T], index: int, bad: dict[int, str]) -> tuple[int, T]:
    """What `read` makes of the image at `index`, or of the next one of the source that can be read, and which one that
    is: a function of `index`, whichever worker asks.

    Writes down in `bad` what was passed over on the way.
    """
    for step in range(min(BAD_IN_A_ROW, len(source))):
        used = (index + step) % len(source)
        try:
            return used, read(used)
        except BadImage as error:
            bad[used] = str(error)
    raise too_many_in_a_row(source, step + 1, used, bad[used])


def too_many_in_a_row(source: ImageSource, count: int, last: int, reason: str) -> RunError:
    """To be raised when `count` images up to number `last` could not be read, that one for this reason."""
    return RunError(
        f"{count} images in a row could not be read, the last one being {source.describe(last)} ({reason}). "
        "Is the folder with the images still there? A training run goes on with --resume, anything else from the start."
    )


class Subset(ImageSource):
    """Some of the images of another source, in an order of their own."""

    def __init__(self, source: ImageSource, indices: np.ndarray) -> None:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(source):
            raise IndexError(f"a subset of {len(source)} images takes indices from 0 to {len(source) - 1}")
        self.source = source
        self.indices = indices  # [N] int64
        self.name = source.name
        self.classes = source.classes
        self.labels = None if source.labels is None else source.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> torch.Tensor:
        return self.source.image(int(self.indices[index]))

    def describe(self, index: int) -> str:
        return self.source.describe(int(self.indices[index]))

    def encoded(self, index: int) -> tuple[bytes, str]:
        return self.source.encoded(int(self.indices[index]))

    def stacked(self) -> np.ndarray | None:
        whole = self.source.stacked()
        return None if whole is None else whole[self.indices]


class ArraySource(ImageSource):
    """Small images that fit into memory as one array."""

    def __init__(
        self, name: str, pixels: np.ndarray, labels: np.ndarray | None = None, classes: tuple[str, ...] = ()
    ) -> None:
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 4
        assert pixels.shape[1] == 3
        self.name = name
        self.pixels = pixels  # [N, 3, H, W] uint8
        self.labels = labels
        self.classes = classes

    def __len__(self) -> int:
        return len(self.pixels)

    def image(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.pixels[index].copy())  # a copy: whoever changes it must not change the data

    def describe(self, index: int) -> str:
        return f"{self.name} image {index}"

    def stacked(self) -> np.ndarray | None:
        return self.pixels
