"""What an encoder is made of, described as data. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from co2.errors import UserError

Stem = Literal["standard", "small", "small-stride-1", "small-stride-2"]


@dataclass(frozen=True)
class EncoderSpecification:
    """A backbone and the head that projects its pooled features onto the unit sphere."""

    backbone: str = "torchvision/resnet50"
    """torchvision/NAME, timm/NAME (with the timm extra), or co2/resnet10-narrow, the demo's small network."""
    stem: Stem = "standard"
    """For ResNets: the first convolution is 3x3 without pooling in the small stems; 'small' takes stride 1 for views
    of up to 40 pixels and stride 2 above."""
    head: Literal["linear", "mlp"] = "linear"
    """linear (MoCo v1), or mlp: one hidden layer with ReLU (MoCo v2, SimCLR)."""
    hidden: int | None = None
    """Width of the mlp's hidden layer; by default as wide as the backbone's features."""
    dimension: int = 128
    """Length of the unit feature vectors that are contrasted."""
    groups: int = 4
    """Groups of batch statistics in all: BatchNorm sees each batch as this many separate ones, as that many GPUs would.
    Several processes share the groups out; one group is computed by all of them together, as SyncBatchNorm does."""
    shuffle_keys: bool = True
    """Shuffle keys across the groups before the key encoder, so that batch statistics do not give away the positive."""

    def __post_init__(self) -> None:
        if self.dimension < 1 or (self.hidden is not None and self.hidden < 1):
            raise UserError("encoder.dimension and encoder.hidden must be at least 1.")
        if self.hidden is not None and self.head == "linear":
            raise UserError("A linear head has no hidden layer: leave encoder.hidden out, or give encoder.head mlp.")
        if self.groups < 1:
            raise UserError(f"encoder.groups must be at least 1; got {self.groups}.")
