from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from co2.networks.backbones import build_backbone
from co2.networks.features import evaluation_mode, extract


@dataclass
class Pictures:
    indices: Tensor
    views: Tensor


def to_unit_range(views: Tensor) -> Tensor:
    return views.float() / 255


def test_features_of_all_batches_in_order() -> None:
    torch.manual_seed(0)
    backbone = build_backbone("co2/resnet10-narrow", "small", 16)
    pictures = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    order = torch.tensor([5, 0, 3, 6, 1, 4, 2])
    batches = [Pictures(part, pictures[part][None]) for part in order.split(3)]
    before = {name: value.clone() for name, value in backbone.state_dict().items()}

    features, indices = extract(backbone, batches, to_unit_range, "cpu")

    assert torch.equal(indices, order)
    assert features.dtype == torch.float32
    assert not features.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    torch.testing.assert_close(features, backbone.eval()(to_unit_range(pictures))[order])


def test_every_sub_module_is_back_in_its_own_mode() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval(), nn.Dropout())

    def modes() -> list[bool]:
        return [module.training for module in network.modules()]

    before = modes()
    with evaluation_mode(network):
        assert not any(modes())
    assert modes() == before
    with pytest.raises(ZeroDivisionError), evaluation_mode(network):
        raise ZeroDivisionError
    assert modes() == before
