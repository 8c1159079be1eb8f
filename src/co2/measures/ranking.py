"""How good a ranking is: precision and recall, average precision by PASCAL VOC's two rules, rank correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

ElevenPointOrArea = Literal["11-point", "area"]


def precision_recall(scores: np.ndarray, positives: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall of "everything scored at least s", for every score s that occurs, the highest first.

    Scores [N] that are equal are told apart by nobody, so that they come in together, in any order: [thresholds] each.
    `positives` [N] is true for what should be found.
    """
    order = np.argsort(-scores, kind="stable")
    scores, positives = scores[order], positives[order]
    last_of_its_score = np.append(scores[1:] != scores[:-1], True)  # [N]
    found = np.cumsum(positives)[last_of_its_score]  # [thresholds]
    taken = np.flatnonzero(last_of_its_score) + 1
    return found / taken, found / max(1, positives.sum())


def average_precision(scores: np.ndarray, positives: np.ndarray, rule: ElevenPointOrArea = "area") -> float:
    """Average precision, 0 to 1, of a ranking by `scores` [N]; NaN where nothing is to be found.

    Both of VOC's rules raise the precision at each recall to the best at that recall or a higher one. "11-point" (VOC
    2007) averages it over the recalls 0, 0.1, ..., 1; "area" (since VOC 2010) is the area under it.
    """
    positives = positives.astype(bool)
    if not positives.any():
        return math.nan
    precision, recall = precision_recall(scores, positives)
    return from_curve(precision, recall, rule)


def from_curve(precision: np.ndarray, recall: np.ndarray, rule: ElevenPointOrArea = "area") -> float:
    """Average precision of a curve whose recall [T] never falls. Recall that is never reached has precision 0."""
    if not len(precision):
        return 0.0
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]  # [T]
    if rule == "11-point":
        # A hair of tolerance: 3 found of 10 must reach the recall 0.3, however both are rounded.
        reached = np.searchsorted(recall + 1e-9, np.linspace(0, 1, 11))  # [11]
        return float(np.append(best_from_here, 0.0)[reached].mean())
    return float(np.sum(np.diff(recall, prepend=0.0) * best_from_here))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, -1 to 1; equal values share their mean rank. NaN where one never changes."""
    ranks = [_mean_ranks(np.asarray(values, dtype=float)) for values in (first, second)]
    centred = [rank - rank.mean() for rank in ranks]
    scale = math.sqrt(float((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / scale if scale > 0 else math.nan


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    return (ends - (sizes - 1) / 2)[group]
