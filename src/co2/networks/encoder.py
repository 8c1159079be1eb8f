"""The encoder: a backbone, and a head that projects its pooled features onto the unit sphere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.networks.backbones import build_backbone, feature_width
from co2.networks.batch_statistics import group_batch_statistics
from co2.networks.residual_blocks import fuse_residual_blocks
from co2.networks.specification import EncoderSpecification


class Encoder(nn.Module):
    """f(x): images [N, 3, S, S] in, unit features [N, D] out."""

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
        # In at least float32 even under autocast: bfloat16 would leave lengths that are off by half a percent.
        projected = projected.to(torch.promote_types(projected.dtype, torch.float32))
        return F.normalize(projected, dim=1)  # [N, D]


def build_head(width: int, hidden: int | None, dimension: int) -> nn.Module:
    """What projects features of this width: a layer (MoCo v1), or two with a hidden one between them."""
    if hidden is None:
        return nn.Linear(width, dimension)
    # MoCo v2 (Chen et al. 2020, table 1): for ResNet-50, 2048 - 2048 - 128
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dimension))


def build_encoder(specification: EncoderSpecification, view_size: int) -> Encoder:
    """An encoder with fresh weights, in training mode, whose BatchNorm layers work in the specified groups."""
    backbone = build_backbone(specification.backbone, specification.stem, view_size)
    width = feature_width(backbone)
    hidden = None if specification.head == "linear" else specification.hidden or width
    encoder = Encoder(backbone, build_head(width, hidden, specification.dimension))
    group_batch_statistics(encoder, specification.groups)
    fuse_residual_blocks(encoder)
    return encoder
