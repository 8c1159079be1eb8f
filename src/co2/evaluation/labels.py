"""Labelled images for the protocols that learn from labels: which to learn from, which to be judged on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from co2.data.balance import balanced_subset as balanced_subset
from co2.data.folder import FileSource
from co2.data.open import DataSplits
from co2.data.source import ImageSource
from co2.errors import UserError

LAYOUT = (
    "Expected are class sub-folders, PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg (or PATH/CLASS/*.jpg alone), a "
    "CIFAR or STL-10 folder, or one of the built-in sets, shapes and digits."
)
_CLASSES_NAMED = 8
_HELD_OUT = 0.2  # of each class, where the data come without a held-out part


class LabelledSplit(NamedTuple):
    """What a classifier learns from, and what it is judged on."""

    train: ImageSource
    train_labels: np.ndarray  # [N] int64
    test: ImageSource
    test_labels: np.ndarray  # [M] int64
    classes: tuple[str, ...]
    divided: bool
    """Whether the data had no held-out part, so that one was put aside here."""


def labelled_split(data: DataSplits, protocol: str, seed: int) -> LabelledSplit:
    """The labelled images of a data set, and those held out: its own, or a fifth of each class that `seed` picks."""
    train = data.bank
    if train is None or train.labels is None:
        raise no_labels(protocol, data)
    test, divided = data.test, False
    if test is None or test.labels is None:
        divided = True
        aside = _put_aside(train.labels, protocol, seed)  # [M]
        rest = np.setdiff1d(np.arange(len(train)), aside)
        train, test = train.subset(rest), train.subset(aside)
    assert train.labels is not None
    assert test.labels is not None
    check_classes(protocol, train.labels, test.labels, train.classes)
    return LabelledSplit(train, train.labels, test, test.labels, train.classes, divided)


def _put_aside(labels: np.ndarray, protocol: str, seed: int) -> np.ndarray:
    """Which images to be judged on: sorted indices [M], a share of every class that has another to learn from."""
    several = not_alone(labels)
    if not len(several):
        raise UserError(
            f"{protocol} learns from some images of a class and is judged on others, and no class has two. Add images, "
            f"or a held-out part. {LAYOUT}"
        )
    return several[balanced_subset(labels[several], _HELD_OUT, seed)]


def not_alone(labels: np.ndarray) -> np.ndarray:
    """Which of the labels [N] are not the only one of their class: sorted indices [M]."""
    return np.flatnonzero(np.bincount(labels)[labels] > 1)


def no_labels(protocol: str, data: DataSplits) -> UserError:
    """To be raised where no image to learn from has a label."""
    if isinstance(data.train, FileSource) and data.train.only_folder:
        return UserError(
            f"{protocol} needs labels of two classes at least, and '{data.train.name}' has a single sub-folder with "
            f"images, '{data.train.only_folder}'. Put those of another class into one beside it. {LAYOUT}"
        )
    return UserError(f"{protocol} needs labels, and there are none in {data.description}. {LAYOUT}")


def check_classes(protocol: str, train: np.ndarray, test: np.ndarray, names: tuple[str, ...], remedy: str = "") -> None:
    """A classifier needs two classes at least, and an image of every class that it is asked about.

    `remedy` says what to do about it where more images are not what it takes.
    """
    present = np.unique(train)
    if len(present) < 2:
        only = f" ('{names[present[0]]}')" if len(present) else ""
        raise UserError(
            f"{protocol} tells classes apart, and the images to learn from are all of a single class{only}. "
            + (remedy or f"Give images of two classes at least. {LAYOUT}")
        )
    missing = np.setdiff1d(test, present)
    if len(missing):
        listed = ", ".join(f"'{names[label]}'" for label in missing[:_CLASSES_NAMED])
        more = f" and {len(missing) - _CLASSES_NAMED} more" if len(missing) > _CLASSES_NAMED else ""
        raise UserError(
            f"{protocol}: there are held-out images of {listed}{more}, but none to learn from. "
            + (remedy or "Add training images of these classes, or take their folders out of the held-out part.")
        )


def accuracies(ranked: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Top-1 and top-5 accuracy in percent: `ranked` [N, at least 5 or all classes], the best class first."""
    hits = ranked == labels[:, None]
    return {"top1": 100 * float(hits[:, 0].mean()), "top5": 100 * float(hits[:, :5].any(axis=1).mean())}
