"""What methods are built of, fresh from the seed: networks with the backbone that the run names, queues and banks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.networks.backbones import feature_width
from co2.networks.encoder import Encoder
from co2.networks.heads import Layers
from co2.networks.kept import Bank, Queue, SlowCopy
from co2.networks.residual_blocks import fuse_residual_blocks


@dataclass
class Parts:
    """Hands out what a method asks for. Networks come from torch's generator, rows from one of their own, so that a
    queue does not change the networks that are made after it."""

    backbone: Callable[[], nn.Module]
    """Makes a fresh one."""
    images: int
    """In the data set."""
    classes: int | None
    """Of their labels, where a method asks for them."""
    generator: torch.Generator

    def encoder(self, head: Layers | None) -> Encoder:
        """A backbone with a head, made after it."""
        backbone = self.backbone()
        self._width = feature_width(backbone)
        encoder = Encoder(backbone, nn.Identity() if head is None else head.make(self._width))
        fuse_residual_blocks(encoder)
        return encoder

    def layers(self, layers: Layers, inputs: int | None = None) -> nn.Module:
        """Layers for rows of so many numbers; by default for the features of the encoder that was made before."""
        return layers.make(self._width if inputs is None else inputs)

    def slow_copy(self, network: nn.Module) -> SlowCopy:
        """A copy that follows."""
        return SlowCopy(network)

    def queue(self, size: int, dimension: int) -> Queue:
        """Room for `size` rows."""
        return Queue(self._rows(size, dimension))

    def bank(self, dimension: int) -> Bank:
        """A row for each image."""
        return Bank(self._rows(self.images, dimension))

    def _rows(self, count: int, dimension: int) -> Tensor:
        return F.normalize(torch.randn(count, dimension, generator=self.generator), dim=1)
