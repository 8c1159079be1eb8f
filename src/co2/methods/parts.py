"""What methods are written with: a few lines of arithmetic, schedules and draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from co2 import philox
from co2.lazily import F, torch
from co2.method import Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn


def unit(rows: Tensor) -> Tensor:
    """Rows [..., D] of length 1, in at least float32: bfloat16 would leave lengths that are off by half a percent."""
    return F.normalize(rows.to(torch.promote_types(rows.dtype, torch.float32)), dim=-1)


def several(network: nn.Module, pictures: Tensor) -> Tensor:
    """One pass over k pictures of each image: [b, k, 3, S, S] in, [b, k, D] out.

    A group of batch statistics holds all pictures of an image. That belongs to the call and not to the network: the
    same network may see one picture of an image a line above.
    """
    from co2.networks.batch_statistics import views_together

    with views_together(network, pictures.shape[1]):
        rows = pictures.flatten(0, 1).contiguous(memory_format=torch.channels_last)  # [b * k, 3, S, S]
        return network(rows).unflatten(0, pictures.shape[:2])


# Schedules.


def constant(value: float) -> Schedule:
    """Always the same."""
    return lambda done: value


def half_cosine(start: float, end: float) -> Schedule:
    """From one number to the other along half a cosine."""
    return lambda done: end - (end - start) * (math.cos(math.pi * done) + 1) / 2


# Draws.


@dataclass(frozen=True)
class Permutation:
    """An order of the images of a batch: [B]."""

    every: Literal["step", "epoch"] = "step"
    stream: int | None = None

    def numbers(self, seed: int, stream: int, times: Tensor, batch: int, images: int) -> Tensor:
        """A permutation for each time [T]: [T, B]."""
        return philox.permutations(seed, stream, times, batch)


@dataclass(frozen=True)
class SpreadSample:
    """Images, one out of each of `count` equal stretches of the data set: sorted, distinct, all where there are fewer.

    Distinct without a permutation of the whole data set, and every part of it is always represented.
    """

    count: int
    every: Literal["step", "epoch"] = "step"
    stream: int | None = None

    def numbers(self, seed: int, stream: int, times: Tensor, batch: int, images: int) -> Tensor:
        """Images for each time [T]: [T, K]."""
        size = min(self.count, images)
        places = philox.samples(seed, stream, times, 2**31, self.count)[:, :size]  # [T, K], each in its stretch
        edges = torch.arange(size + 1, device=times.device) * images // size  # [K + 1]
        return edges[:-1] + (places * (edges[1:] - edges[:-1]) >> 31)
