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


def band(records: Sequence[CellRecord], name: str) -> Band | None:
    """The runs' curves, averaged within equal parts of the training and then over runs; None without any."""
    curves = [curve for record in records if (curve := record.curve(name))[0]]
    if not curves:
        return None
    parts = min(MOST_PARTS, min(len(epochs) for epochs, _ in curves))
    last = min(epochs[-1] for epochs, _ in curves)
    edges = np.linspace(0.0, last, parts + 1)  # a log line belongs to the part in which its interval ends
    values = np.stack([_in_parts(np.asarray(epochs), np.asarray(values), edges) for epochs, values in curves])
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(parts)
    return Band((edges[:-1] + edges[1:]) / 2, values.mean(axis=0), deviation)


def _in_parts(epochs: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Means of the values within each part [parts]; a part without any is filled in from its neighbours."""
    place = np.clip(np.searchsorted(edges, epochs, side="left") - 1, 0, len(edges) - 2)
    sums = np.bincount(place, weights=values, minlength=len(edges) - 1)
    counts = np.bincount(place, minlength=len(edges) - 1)
    filled = np.flatnonzero(counts)
    return np.interp(np.arange(len(edges) - 1), filled, sums[filled] / counts[filled])
