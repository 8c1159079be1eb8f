from __future__ import annotations

import pytest
import torch
from fresh import build_encoder
from torch import nn

from co2.networks.batch_statistics import GroupedStatistics
from co2.networks.encoder import Embedder


def embedder() -> Embedder:
    encoder = build_encoder(stem="small", dimension=24)
    return Embedder(encoder.backbone, encoder.head)


def widths(head: nn.Module) -> list[tuple[int, int]]:
    return [(layer.in_features, layer.out_features) for layer in head.modules() if isinstance(layer, nn.Linear)]


def test_heads_follow_the_backbones_width() -> None:
    with torch.device("meta"):
        v1 = build_encoder(backbone="torchvision/resnet50", size=224)
        v2 = build_encoder("mlp", backbone="torchvision/resnet50", size=224)
        narrow = build_encoder("mlp")
        wide = build_encoder("mlp", hidden=512)
    assert widths(v1.head) == [(2048, 128)]  # MoCo v1
    assert widths(v2.head) == [(2048, 2048), (2048, 128)]  # MoCo v2
    assert widths(narrow.head) == [(128, 128), (128, 128)]
    assert widths(wide.head) == [(128, 512), (512, 128)]


def test_features_are_unit_vectors_of_the_projected_backbone() -> None:
    torch.manual_seed(0)
    encoder = embedder().eval()
    images = torch.randn(5, 3, 32, 32)
    features = encoder(images)
    projected = encoder.head(encoder.backbone(images))
    assert features.shape == (5, 24)
    torch.testing.assert_close(features, projected / projected.norm(dim=1, keepdim=True))
    assert encoder.features(images).shape == (5, 128)


def test_features_have_unit_length_in_float32_under_autocast() -> None:
    encoder = embedder()
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder(torch.randn(8, 3, 32, 32))
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.norm(dim=1), torch.ones(8), atol=1e-6, rtol=0)


@pytest.mark.parametrize("groups", [1, 4])
def test_batch_statistics_are_in_groups(groups: int) -> None:
    layers = [m for m in build_encoder(groups=groups).modules() if isinstance(m, nn.BatchNorm2d)]
    assert layers
    assert all(isinstance(layer, GroupedStatistics) == (groups > 1) for layer in layers)
    assert all(layer.groups == groups for layer in layers if isinstance(layer, GroupedStatistics))


def test_gradients_reach_every_parameter() -> None:
    encoder = build_encoder("mlp")
    encoder(torch.randn(8, 3, 32, 32))[:, 0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
