"""What methods keep beside the networks they train: slow copies, a queue of past rows, a bank with a row per image.

Each changes only when it is told to, after `backward`. Nothing is cloned on the way: autograd's version counter catches
anyone who changes it earlier.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SlowCopy(nn.Module):
    """A copy of a network that no gradient reaches and that follows it. Its batch statistics are its own, as in MoCo
    (He et al. 2020, section 3.2) and BYOL."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(network).train().requires_grad_(False)

    def forward(self, pictures: Tensor) -> Tensor:
        """What the copy makes of pictures [N, 3, S, S], without gradient."""
        with torch.no_grad():
            rows: Tensor = self.encoder(pictures)
        return rows

    @torch.no_grad()
    def follow(self, network: nn.Module, momentum: float | Tensor) -> None:
        """own <- momentum own + (1 - momentum) network's, for all parameters at once; a schedule's momentum is a
        tensor, which a captured step reads where it is."""
        own: list[Tensor] = list(self.encoder.parameters())
        others: list[Tensor] = list(network.parameters())
        if isinstance(momentum, Tensor):
            way: list[Tensor] = list(torch._foreach_sub(others, own))
            torch._foreach_mul_(way, 1 - momentum)
            torch._foreach_add_(own, way)
        else:
            torch._foreach_lerp_(own, others, 1 - momentum)


class Queue(nn.Module):
    """The last K rows that were pushed, in a ring; random ones at first. Any number of rows fits any K."""

    rows: Tensor
    written: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)  # [K, D]
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))  # rows ever pushed

    @torch.no_grad()
    def push(self, rows: Tensor) -> None:
        """Write rows [B, D] over the oldest, round the end of the ring where they reach it."""
        newest = rows[-len(self.rows) :]  # of more rows than there is room for, the last K stay
        first = self.written + (len(rows) - len(newest))
        places = (first + torch.arange(len(newest), device=rows.device)) % len(self.rows)  # on the device: no waiting
        self.rows.index_copy_(0, places, newest.to(self.rows.dtype))
        self.written += len(rows)


class Bank(nn.Module):
    """One row for each image of the data set, which follows that image's embedding (Wu et al. 2018)."""

    rows: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)  # [N, D]

    def look_up(self, images: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The images' own rows [b, D], the sampled rows [K, D] (sorted, distinct), and where among these the own one
        stands [b, 1]; -1 where it does not."""
        place = torch.searchsorted(sampled, images).clamp(max=len(sampled) - 1)  # [b]
        own = torch.where(sampled[place] == images, place, -1)  # [b]
        return self.rows[images], self.rows[sampled], own[:, None]

    @torch.no_grad()
    def follow(self, images: Tensor, rows: Tensor, momentum: float) -> None:
        """Move the rows of these images [B] towards new ones [B, D], and back onto the sphere."""
        moved = torch.lerp(rows.to(self.rows.dtype), self.rows[images], momentum)  # [B, D]
        self.rows.index_copy_(0, images, F.normalize(moved, dim=1))
