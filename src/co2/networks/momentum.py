"""The momentum encoder of MoCo: a slow copy of the encoder that makes the keys (He et al. 2020, section 3.2)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class MomentumEncoder(nn.Module):
    """A frozen copy of `encoder` that follows it slowly. Its BatchNorm buffers are its own, as in MoCo."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).train().requires_grad_(False)

    @torch.no_grad()
    def update(self, encoder: nn.Module, momentum: float) -> None:
        """theta_key = momentum * theta_key + (1 - momentum) * theta_query, for all parameters at once."""
        torch._foreach_lerp_(list(self.encoder.parameters()), list(encoder.parameters()), 1 - momentum)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Unit features [N, D] of images [N, 3, S, S]."""
        features: Tensor = self.encoder(images)
        return features  # [N, D]
