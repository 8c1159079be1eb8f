"""Weighted k-nearest-neighbour classification of features: whether pre-training worked, without training anything.

Wu et al. 2018 (InsDisc), section 3.4, as in the MoCo authors' CIFAR-10 notebook: cosine similarity s, each of the k
nearest images votes for its class with weight exp(s / t), k = 200, t = 0.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ELEMENTS = 2**25  # similarities held at a time: 128 MiB in float32


class KnnResult(NamedTuple):
    """Accuracies between 0 and 1, and how many neighbours voted."""

    top1: float
    top5: float
    k: int


def neighbour_count(bank_size: int, classes: int, k: int = 200) -> int:
    """At most `k`, and at most half as many as an average class has images in the bank (but at least one).

    More voters than that would have to come from other classes: in small sets they drown the right ones. The published
    settings are not affected (CIFAR-100 has 500 images per class, ImageNet about 1,300).
    """
    return max(1, min(k, bank_size // (2 * classes)))


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    classes: int,
    k: int = 200,
    temperature: float = 0.1,
    exclude_self: bool = False,
) -> KnnResult:
    """How often the neighbours in `bank` [N, F] name the right class of `queries` [M, F], first or among five.

    `exclude_self` is for queries that are the bank itself: no image votes for itself (leave one out). Fewer than `k`
    neighbours vote in small banks, see `neighbour_count`.
    """
    ranked = knn_predict(
        bank, bank_labels, queries, classes=classes, k=k, temperature=temperature, exclude_self=exclude_self
    )  # [M, classes]
    hits = ranked == query_labels.to(ranked.device)[:, None]  # [M, classes]
    return KnnResult(
        top1=hits[:, 0].double().mean().item(),
        top5=hits[:, :5].any(dim=1).double().mean().item(),
        k=neighbour_count(len(bank), classes, k),
    )


def knn_predict(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    classes: int,
    k: int = 200,
    temperature: float = 0.1,
    exclude_self: bool = False,
) -> Tensor:
    """The classes in the order of their votes, best first, for each query: [M, classes]."""
    bank_labels = bank_labels.to(bank.device)
    count = neighbour_count(len(bank), classes, k)
    ranked = []
    for similarities, neighbours in _nearest_blocks(bank, queries, count, exclude_self):  # [b, k] each
        votes = similarities.new_zeros(len(similarities), classes)  # [b, classes]
        votes.scatter_add_(1, bank_labels[neighbours], (similarities / temperature).exp())
        ranked.append(votes.argsort(dim=1, descending=True, stable=True))  # [b, classes]
    return torch.cat(ranked)


def nearest(bank: Tensor, queries: Tensor, count: int, *, exclude_self: bool = False) -> Tensor:
    """Rows of `bank` most similar to each query by cosine, nearest first: [M, count]."""
    blocks = _nearest_blocks(bank, queries, count, exclude_self)
    return torch.cat([neighbours for _, neighbours in blocks])


def _nearest_blocks(bank: Tensor, queries: Tensor, count: int, exclude_self: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Cosine similarities and bank rows of the nearest, a block of queries at a time: [b, count] each."""
    if not len(queries):
        raise ValueError("There are no queries.")
    if exclude_self and len(queries) != len(bank):
        raise ValueError("exclude_self is for queries that are the bank itself.")
    if not 1 <= count <= len(bank) - exclude_self:
        raise ValueError(f"{count} neighbours were asked of a bank of {len(bank)}.")
    bank = F.normalize(bank.float(), dim=1)  # [N, F]
    rows = max(1, BLOCK_ELEMENTS // len(bank))
    for start in range(0, len(queries), rows):
        block = F.normalize(queries[start : start + rows].to(bank), dim=1)  # [b, F]
        similarities = block @ bank.T  # [b, N]
        if exclude_self:
            similarities.diagonal(offset=start).fill_(-torch.inf)
        nearest_similarities, rows_of_bank = similarities.topk(count, dim=1)  # [b, count] each
        yield nearest_similarities, rows_of_bank
