"""Batch statistics in groups: one device computes what several would, each with its own share of the batch.

MoCo must not let BatchNorm tell which key belongs to which query, so each query and its key are normalised with
different companions (He et al. 2020, section 3.3, "Shuffling BN"). With one group, shuffling the keys does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

SMALLEST_GROUP = 2  # one image alone has no variance between images


def group_batch_statistics(module: nn.Module, groups: int) -> None:
    """Make every BatchNorm inside `module` normalise a training batch as `groups` contiguous separate ones.

    Works in place, on any model: it exchanges the class of each BatchNorm (torch's or a subclass such as timm's
    BatchNormAct2d) for a subclass of it, and leaves parameters, buffers and the state dict's names as they are. The
    running statistics move once per batch, towards the mean over the groups. Evaluation mode is not affected.
    SyncBatchNorm is left alone: it exists to share statistics.
    """
    assert groups >= 1
    for layer in module.modules():
        if isinstance(layer, GroupedStatistics):
            layer.groups = groups
        elif isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm) and groups > 1:
            layer.__class__ = _grouped(type(layer))
            assert isinstance(layer, GroupedStatistics)
            layer.groups = groups


def group_count(images: int, groups: int) -> int:
    """How many groups a batch of `images` falls into: `groups`, or fewer so that none is left with a single image."""
    return max(1, min(groups, images // SMALLEST_GROUP))


if TYPE_CHECKING:
    _Layer = _BatchNorm
else:
    _Layer = object


class GroupedStatistics(_Layer):
    """Mixed into a BatchNorm class by `group_batch_statistics`."""

    groups: int

    def forward(self, input: Tensor) -> Tensor:
        count = group_count(len(input), self.groups)
        if not self.training or count == 1:
            return super().forward(input)  # [N, C, ...]
        parts = input.tensor_split(count)  # nearly equal parts of [N, C, ...]
        if self.momentum is None:  # a cumulative average: each group is a batch of its own
            return torch.cat([super(GroupedStatistics, self).forward(part) for part in parts])
        # Group i of g has momentum (m/g) / (1 - (g-i) m/g). The product of what the later groups leave of it
        # telescopes, so that running = (1 - m) * running + m * mean over groups, whatever g.
        momentum, share = self.momentum, self.momentum / count
        normalised = []
        try:
            for later_groups, part in zip(reversed(range(count)), parts, strict=True):
                self.momentum = share / (1 - later_groups * share)
                normalised.append(super().forward(part))
        finally:
            self.momentum = momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.sub_(count - 1)  # it was one batch
        return torch.cat(normalised)  # [N, C, ...]


_grouped_kinds: dict[type, type] = {}


def _grouped(kind: type) -> type:
    """The subclass of a BatchNorm class that works in groups: always the same one for the same class."""
    if kind not in _grouped_kinds:
        _grouped_kinds[kind] = type(f"Grouped{kind.__name__}", (GroupedStatistics, kind), {})
    return _grouped_kinds[kind]
