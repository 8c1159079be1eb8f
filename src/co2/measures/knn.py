"""Weighted k-nearest-neighbour classification of features: whether pre-training worked, without training anything.

Wu et al. 2018 (InsDisc), section 3.4, as in the MoCo authors' CIFAR-10 notebook: cosine similarity s, each of the k
nearest images votes for its class with weight exp(s / t), k = 200, t = 0.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ELEMENTS = 2**25  # similarities held at a time: 128 MiB in float32
BANK_ROWS = 2**15  # of the bank on the device at a time: 256 MiB for ResNet-50
QUERY_ROWS = 2**16  # that are answered in one pass over the bank


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
    own = _own_rows(bank, queries) if exclude_self else None
    count = neighbour_count(len(bank), classes, k)
    return knn_accuracies(
        bank, bank_labels, queries, query_labels, classes=classes, ks=[count], temperature=temperature, own=own
    )[0]


def knn_accuracies(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    classes: int,
    ks: Sequence[int],
    temperature: float = 0.1,
    own: Tensor | None = None,
) -> list[KnnResult]:
    """The accuracy with each k of `ks`, all from one search for the neighbours. Exactly k vote, however many that is.

    `own` [M] is the row of the bank that is a query's own image and may not vote for it.
    """
    right = torch.zeros(len(ks), 2, dtype=torch.int64, device=queries.device)  # first, among five
    for start, similarities, neighbours in _nearest_blocks(bank, queries, max(ks), own, classes):  # [b, k] each
        truth = query_labels[start : start + len(neighbours)].to(queries.device)[:, None]  # [b, 1]
        for row, k in enumerate(ks):
            votes = _votes(similarities[:, :k], neighbours[:, :k], bank_labels, classes, temperature)  # [b, classes]
            hits = votes.argsort(dim=1, descending=True, stable=True)[:, :5] == truth  # [b, 5]
            right[row] += torch.stack([hits[:, 0].sum(), hits.any(dim=1).sum()])
    shares = (right.double() / len(queries)).tolist()
    return [KnnResult(top1, top5, k) for (top1, top5), k in zip(shares, ks, strict=True)]


def nearest(bank: Tensor, queries: Tensor, count: int, *, exclude_self: bool = False) -> Tensor:
    """Rows of `bank` most similar to each query by cosine, nearest first: [M, count]."""
    own = _own_rows(bank, queries) if exclude_self else None
    return torch.cat([neighbours for _, _, neighbours in _nearest_blocks(bank, queries, count, own)])


def _own_rows(bank: Tensor, queries: Tensor) -> Tensor:
    if len(queries) != len(bank):
        raise ValueError("exclude_self is for queries that are the bank itself.")
    return torch.arange(len(bank))


def _votes(similarities: Tensor, neighbours: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """What each class gets from the neighbours [b, k], which stand in order, the nearest first: [b, classes].

    Votes are relative to the nearest neighbour's, exp((s - s_nearest) / t): the order is the same, and with a small
    temperature exp(s / t) would be more than a float holds. In double precision the far ones do not vanish either.
    """
    behind = (similarities - similarities[:, :1]).double()  # [b, k], 0 for the nearest
    votes = behind.new_zeros(len(behind), classes)
    named = labels[neighbours.to(labels.device)].to(votes.device)  # [b, k]
    return votes.scatter_add_(1, named, (behind / temperature).exp_())


def _nearest_blocks(
    bank: Tensor, queries: Tensor, count: int, own: Tensor | None, classes: int = 1
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Where a block of queries begins, and the cosine similarities and bank rows of its nearest: [b, count] each, the
    nearest first.

    The bank may be larger than the memory of the queries' device: it stays where it is, in main memory or in a mapped
    file, and comes over in blocks of rows, once for every block of queries. The nearest so far are merged with the
    nearest of each block.
    """
    if not len(queries):
        raise ValueError("There are no queries.")
    if not 1 <= count <= len(bank) - (own is not None):
        raise ValueError(f"{count} neighbours were asked of a bank of {len(bank)}.")
    bank_rows = min(len(bank), BANK_ROWS)
    rows = max(1, BLOCK_ELEMENTS // bank_rows)  # of queries, whose similarities to a block of the bank are held
    outer_rows = max(rows, min(QUERY_ROWS, BLOCK_ELEMENTS // max(count, classes)))  # whose nearest so far are held
    for outer in range(0, len(queries), outer_rows):
        asked = F.normalize(queries[outer : outer + outer_rows].float(), dim=1)  # [B, F]
        best = asked.new_empty(len(asked), 0)  # [B, at most count]
        best_rows = torch.empty(len(asked), 0, dtype=torch.int64, device=asked.device)
        for first in range(0, len(bank), bank_rows):
            part = F.normalize(bank[first : first + bank_rows].to(asked, non_blocking=True), dim=1)  # [n, F]
            merged = []
            for start in range(0, len(asked), rows):
                stop = min(start + rows, len(asked))
                similarities = asked[start:stop] @ part.T  # [b, n]
                if own is not None:
                    _forget_own(similarities, own[outer + start : outer + stop], first)
                merged.append(_merge(best[start:stop], best_rows[start:stop], similarities, first, count))
            best, best_rows = (torch.cat(parts) for parts in zip(*merged, strict=True))
        yield outer, best, best_rows


def _forget_own(similarities: Tensor, own: Tensor, first: int) -> None:
    """No image is its own neighbour: `own` [b] is its row of the bank, of which [b, n] shows those from `first` on."""
    columns = own.to(similarities.device) - first  # [b]
    here = ((columns >= 0) & (columns < similarities.shape[1])).nonzero()[:, 0]
    similarities[here, columns[here]] = -torch.inf


def _merge(best: Tensor, best_rows: Tensor, similarities: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The nearest of those known so far, [b, m] each, and of a block of the bank, [b, n], that begins at `first`."""
    near, columns = similarities.topk(min(count, similarities.shape[1]), dim=1)
    if best.shape[1] == 0:
        return near, columns + first
    both = torch.cat([best, near], dim=1)
    rows = torch.cat([best_rows, columns + first], dim=1)
    near, places = both.topk(min(count, both.shape[1]), dim=1)  # [b, m + n, at most count]
    return near, rows.gather(1, places)
