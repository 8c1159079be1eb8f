"""Health of features without labels: are positives together, is the sphere used, has anything collapsed?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from co2.measures.knn import nearest

BLOCK_ELEMENTS = 2**24  # pairs held at a time: 64 MiB in float32


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance between the two views' unit features, [N, D] each: 0 when views do not matter at all.

    Wang and Isola 2020, section 4.1.1, alpha = 2.
    """
    return (first.float() - second.float()).square().sum(dim=1).mean().item()


def uniformity(features: Tensor, sharpness: float = 2.0) -> float:
    """log of the mean over all pairs of exp(-2 |x - y|^2) for unit features [N, D]: 0 when all are one point, and the
    more negative the more evenly they cover the sphere (about -4 at best in many dimensions).

    Wang and Isola 2020, section 4.1.2. Every pair counts; they are visited in blocks.
    """
    images = len(features)
    if images < 2:
        raise ValueError("Uniformity needs at least two features.")
    features = features.float()
    squared_norms = features.square().sum(dim=1)  # [N]
    rows = max(1, BLOCK_ELEMENTS // images)
    total = torch.zeros((), dtype=torch.float64, device=features.device)
    for start in range(0, images, rows):
        stop = start + rows
        distances = (
            squared_norms[start:stop, None] + squared_norms[start:] - 2 * features[start:stop] @ features[start:].T
        ).clamp_min_(0)  # [b, N - start], squared
        total += (-sharpness * distances).exp_().triu_(diagonal=1).sum(dtype=torch.float64)
    return (total / (images * (images - 1) / 2)).log().item()


def effective_rank(features: Tensor, epsilon: float = 1e-7) -> float:
    """RankMe (Garrido et al. 2023, equation 1): how many directions the features [N, D] use, between 1 and min(N, D).

    The exponential of the entropy of the singular values, normalised to sum to one. NaN where a feature is.
    """
    features = features.double()
    if not features.isfinite().all():
        return math.nan  # a diverged run is for the caller to report; the eigenvalues would raise
    if len(features) < features.shape[1]:
        features = features.T
    # Squared singular values are the eigenvalues of the smaller Gram matrix; in float64 squaring costs no accuracy
    # that epsilon leaves visible.
    squared = torch.linalg.eigvalsh(features.T @ features).clamp_min(0)  # [min(N, D)]
    singular_values = squared.sqrt()
    shares = singular_values / singular_values.sum().clamp_min(epsilon) + epsilon  # [min(N, D)]
    return torch.exp(-(shares * shares.log()).sum()).item()


def mean_norm(features: Tensor) -> float:
    """Length of the mean of unit features [N, D]: 1 when all point the same way, near 0 when they are spread out."""
    return features.float().mean(dim=0).norm().item()


def neighbour_agreement(first: Tensor, second: Tensor, bank: Tensor, k: int = 20) -> float:
    """Share of the k nearest images of one view that are also among the k nearest of the other: 0 to 1.

    `first` and `second` [N, D] show the images of `bank` [N, D], row by row, in two views; no image is its own
    neighbour. What the consistency term asks for, counted: that two views agree on which other images are similar.
    Two views that know nothing of each other agree on k / (N - 1).
    """
    if not len(first) == len(second) == len(bank):
        raise ValueError("Both views and the bank show the same images.")
    ours, theirs = (nearest(bank, view, k, exclude_self=True) for view in (first, second))  # [N, k] each
    rows = max(1, BLOCK_ELEMENTS // k**2)
    common = sum(
        int((ours[start : start + rows, :, None] == theirs[start : start + rows, None, :]).sum())  # [b, k, k]
        for start in range(0, len(ours), rows)
    )
    return common / ours.numel()
