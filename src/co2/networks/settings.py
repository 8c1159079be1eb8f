"""Which network a run trains, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from co2.errors import UserError

Stem = Literal["standard", "small", "small-stride-1", "small-stride-2"]


@dataclass(frozen=True)
class Network:
    """The backbone, and how its batch statistics are computed. What projects features belongs to the method."""

    backbone: str = "torchvision/resnet50"
    """torchvision/NAME, timm/NAME (with the timm extra), or co2/resnet10-narrow, the demo's small network."""
    stem: Stem = "standard"
    """For ResNets: the first convolution is 3x3 without pooling in the small stems; 'small' takes stride 1 for views
    of up to 40 pixels and stride 2 above."""
    groups: int = 4
    """Groups of batch statistics in all: BatchNorm sees each batch as this many separate ones, as that many GPUs would.
    Several processes share the groups out; one group is computed by all of them together, as SyncBatchNorm does."""

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise UserError(f"network.groups must be at least 1; got {self.groups}.")
