"""The curves of several runs as one: mean and standard deviation over seeds, part by part of the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from co2.study.records import CellRecord

MOST_PARTS = 100  # into which a training is divided


@dataclass(frozen=True)
class Band:
    """A measure over training: mean and standard deviation over seeds, [parts] each."""

    epochs: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


def most_parts(records: Sequence[CellRecord], name: str) -> int:
    """Into how many parts all of these curves can be divided; a run that was interrupted has more lines than others."""
    return min([MOST_PARTS, *(len(epochs) for record in records if (epochs := record.curve(name)[0]))])


def band(records: Sequence[CellRecord], name: str, parts: int | None = None) -> Band | None:
    """The runs' curves, averaged within equal parts of the training and then over runs; None without any."""
    curves = [curve for record in records if (curve := record.curve(name))[0]]
    if not curves:
        return None
    parts = most_parts(records, name) if parts is None else parts
    last = min(epochs[-1] for epochs, _ in curves)
    values = np.stack([_in_parts(np.asarray(epochs) / last * parts, np.asarray(row), parts) for epochs, row in curves])
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(parts)
    return Band((np.arange(parts) + 0.5) * last / parts, values.mean(axis=0), deviation)


def _in_parts(ends: np.ndarray, values: np.ndarray, parts: int) -> np.ndarray:
    """Means of the values within each part [parts]; a part without any is filled in from its neighbours.

    A log line belongs to the part in which its interval ends: at `ends` [lines], counted in parts. The log rounds
    epochs, so one that ends a hundredth of a part late still belongs to it.
    """
    place = np.clip(np.ceil(ends - 0.01).astype(int) - 1, 0, parts - 1)
    sums = np.bincount(place, weights=values, minlength=parts)
    counts = np.bincount(place, minlength=parts)
    filled = np.flatnonzero(counts)
    return np.interp(np.arange(parts), filled, sums[filled] / counts[filled])
