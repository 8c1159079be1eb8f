from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from co2.data.digits import digits_splits


def test_every_digit_is_in_exactly_one_part() -> None:
    train, test = digits_splits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.classes == tuple("0123456789")
    ours = np.concatenate([train.pixels, test.pixels])[:, 0, ::4, ::4].reshape(-1, 64)
    theirs = np.rint(load_digits().data * 255 / 16)
    assert np.array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])
    assert train.labels is not None
    assert np.bincount(train.labels).min() > 100


def test_pixels_are_repeated_and_the_labels_belong_to_them() -> None:
    train, _ = digits_splits()
    image = train.image(3)
    assert image.shape == (3, 32, 32)
    assert (image.view(3, 8, 4, 8, 4) == image.view(3, 8, 4, 8, 4)[:1, :, :1, :, :1]).all()
    digits = load_digits()
    small = np.rint(digits.images * 255 / 16)
    (match,) = np.flatnonzero((small == image[0, ::4, ::4].numpy()).all((1, 2)))
    assert train.labels is not None
    assert train.labels[3] == digits.target[match]


def test_the_seed_makes_the_split() -> None:
    first, again, other = (digits_splits(seed)[1].pixels for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
