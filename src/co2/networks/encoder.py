"""The encoder: a backbone, and a head that projects its pooled features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Encoder(nn.Module):
    """Images [N, 3, S, S] in, projections [N, D] out."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def features(self, images: Tensor) -> Tensor:
        """What downstream tasks use: the backbone's pooled features, before the head."""
        pooled: Tensor = self.backbone(images)  # [N, F]
        return pooled

    def forward(self, images: Tensor) -> Tensor:
        projected: Tensor = self.head(self.features(images))  # [N, D]
        return projected


class Embedder(Encoder):
    """The same with its projections on the unit sphere, for whoever judges embeddings."""

    def forward(self, images: Tensor) -> Tensor:
        projected = super().forward(images)
        return F.normalize(projected.to(torch.promote_types(projected.dtype, torch.float32)), dim=1)
