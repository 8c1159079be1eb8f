"""The handwritten digits that come with scikit-learn: real data that needs no download."""

from __future__ import annotations

import numpy as np

from co2.data.source import ArraySource

_ENLARGEMENT = 4  # from 8 pixels to 32, by repeating pixels
_BRIGHTEST = 16  # a pixel counts the dark points in a 4x4 block of the scan
_TEST_COUNT = 360


def digits_splits(seed: int = 0) -> tuple[ArraySource, ArraySource]:
    """1,437 digits to learn from and 360 held out, drawn at random by `seed`, white on black."""
    from sklearn.datasets import load_digits  # takes a second to import

    digits = load_digits()
    grey = np.rint(digits.images * (255 / _BRIGHTEST)).astype(np.uint8)  # [N, 8, 8]
    large = grey.repeat(_ENLARGEMENT, axis=1).repeat(_ENLARGEMENT, axis=2)  # [N, 32, 32]
    pixels = np.repeat(large[:, None], 3, axis=1)  # [N, 3, 32, 32]
    labels = digits.target.astype(np.int64)  # [N]
    classes = tuple(str(name) for name in digits.target_names)
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(labels))
    parts = order[_TEST_COUNT:], order[:_TEST_COUNT]
    train, test = (ArraySource("digits", pixels[part], labels[part], classes) for part in parts)
    return train, test
