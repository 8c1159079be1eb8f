"""Where negatives come from. Each source keeps its own state and changes it only in an explicit `update`.

`update` is called after `backward`. Nothing is cloned on the way: autograd's version counter catches anyone who calls
it earlier.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Comparison(NamedTuple):
    """Who is compared with whom: the tensors that `contrast` takes."""

    query: Tensor  # [B, D]
    positive: Tensor  # [B, D]
    negatives: Tensor  # [K, D]
    exclude: Tensor | None  # [B, E] columns of `negatives` that a row must not see
    fresh: Tensor | None = None  # [N, D] keys of the whole batch, for the queue, where the rows are a part of it


class MomentumQueue(nn.Module):
    """The last K keys of the momentum encoder in a ring buffer (MoCo). Any batch size fits any K."""

    rows: Tensor
    written: Tensor

    def __init__(self, size: int, dimension: int, generator: torch.Generator) -> None:
        super().__init__()
        random_rows = F.normalize(torch.randn(size, dimension, generator=generator), dim=1)
        self.register_buffer("rows", random_rows)  # [K, D]; random until real keys have replaced them
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))  # keys ever written

    def compare(self, query: Tensor, key: Tensor, fresh: Tensor | None = None) -> Comparison:
        """Queries [B, D] with their keys [B, D] against the queue."""
        return Comparison(query, key, self.rows, None, fresh)

    @torch.no_grad()
    def update(self, keys: Tensor) -> None:
        """Write keys [B, D] over the oldest rows, round the end of the buffer where they reach it."""
        size = len(self.rows)
        newest = keys[-size:]  # of more keys than the queue holds, the last K stay
        first = self.written + (len(keys) - len(newest))
        places = (first + torch.arange(len(newest), device=keys.device)) % size  # computed on the device: no waiting
        self.rows.index_copy_(0, places, newest.to(self.rows.dtype))
        self.written += len(keys)


def compare_in_batch(embeddings: Tensor, images: slice = slice(None)) -> Comparison:
    """All embeddings of a batch against each other (SimCLR).

    Args:
        embeddings: [2B, D]; rows 2i and 2i+1 are the two views of image i.
        images: whose embeddings ask; by default those of all B images.
    """
    every_row = torch.arange(len(embeddings), device=embeddings.device)  # [2B]
    rows = every_row.view(-1, 2)[images].flatten()  # [2b]
    partner = rows ^ 1  # 0↔1, 2↔3, ...
    return Comparison(embeddings[rows], embeddings[partner], embeddings, torch.stack([rows, partner], dim=1))


class MemoryBank(nn.Module):
    """One row for each image of the data set, which follows that image's feature slowly (InsDisc)."""

    rows: Tensor

    def __init__(self, images: int, dimension: int, momentum: float, generator: torch.Generator) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("rows", F.normalize(torch.randn(images, dimension, generator=generator), dim=1))  # [N, D]

    def compare(self, query: Tensor, images: Tensor, sampled: Tensor) -> Comparison:
        """Queries [B, D] of the given images [B] with their own rows, against sampled rows [K] (sorted, distinct)."""
        place = torch.searchsorted(sampled, images).clamp(max=len(sampled) - 1)  # [B]
        own_column = torch.where(sampled[place] == images, place, -1)  # [B]; -1 where the own row was not sampled
        return Comparison(query, self.rows[images], self.rows[sampled], own_column[:, None])

    @torch.no_grad()
    def update(self, query: Tensor, images: Tensor) -> None:
        """Move the rows of these images [B] towards their features [B, D], and back onto the sphere."""
        moved = torch.lerp(query.to(self.rows.dtype), self.rows[images], self.momentum)  # [B, D]
        self.rows.index_copy_(0, images, F.normalize(moved, dim=1))


def spread_sample(draws: Tensor, count: int) -> Tensor:
    """One row out of each of K equal stretches of 0..count-1, sorted and distinct; all rows where K is larger.

    Distinct rows without a permutation of the whole bank, and every part of the data set is always represented.

    Args:
        draws: [K] random integers in 0 .. 2³¹ - 1.
        count: rows in the bank.
    """
    size = min(len(draws), count)
    edges = torch.arange(size + 1, device=draws.device) * count // size  # [K + 1]
    width = edges[1:] - edges[:-1]  # [K]
    return edges[:-1] + (draws[:size] * width >> 31)
