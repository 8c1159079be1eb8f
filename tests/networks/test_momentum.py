from __future__ import annotations

import copy

import torch
from torch import nn

from co2.networks.encoder import Encoder, build_encoder
from co2.networks.momentum import MomentumEncoder
from co2.networks.specification import EncoderSpecification


def encoder_with(groups: int) -> Encoder:
    torch.manual_seed(0)
    return build_encoder(EncoderSpecification(backbone="co2/resnet10-narrow", stem="small", groups=groups), 16)


def test_update_is_an_exponential_moving_average_of_the_parameters_alone() -> None:
    encoder = encoder_with(1)
    keys = MomentumEncoder(encoder)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter))
    encoder(torch.randn(4, 3, 16, 16))  # moves the encoder's own running statistics
    before = copy.deepcopy(keys.encoder)

    keys.update(encoder, 0.9)

    for name, parameter in keys.encoder.named_parameters():
        expected = 0.9 * before.get_parameter(name) + 0.1 * encoder.get_parameter(name)
        torch.testing.assert_close(parameter, expected)
    for name, buffer in keys.encoder.named_buffers():
        assert torch.equal(buffer, before.get_buffer(name))


def test_keys_carry_no_gradient_and_the_copy_is_frozen_and_apart() -> None:
    encoder = encoder_with(2)
    keys = MomentumEncoder(encoder.eval())
    assert all(module.training for module in keys.modules())
    assert not any(parameter.requires_grad for parameter in keys.parameters())
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    own = {parameter.data_ptr() for parameter in encoder.parameters()}
    assert own.isdisjoint(parameter.data_ptr() for parameter in keys.parameters())
    assert not keys.encode(torch.randn(4, 3, 16, 16)).requires_grad


def test_shuffling_moves_images_between_the_groups() -> None:
    encoder = encoder_with(2)
    keys = MomentumEncoder(encoder)
    plain = copy.deepcopy(encoder)
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.groups = 1
    images, order = torch.randn(6, 3, 16, 16), torch.tensor([4, 1, 0, 3, 5, 2])

    shuffled = keys.encode(images[order])

    with torch.no_grad():
        first, second = plain(images[[4, 1, 0]]), plain(images[[3, 5, 2]])
    torch.testing.assert_close(shuffled, torch.cat([first, second]), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(shuffled, keys.encode(images)[order], atol=1e-3)


def test_with_one_group_shuffling_does_nothing() -> None:
    """Why a run with one group and shuffled keys is refused: companions stay the same, so nothing is hidden."""
    keys = MomentumEncoder(encoder_with(1))
    images, order = torch.randn(6, 3, 16, 16), torch.tensor([4, 1, 0, 3, 5, 2])
    torch.testing.assert_close(keys.encode(images[order]), keys.encode(images)[order], atol=1e-5, rtol=1e-4)
