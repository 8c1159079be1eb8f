"""A batch in groups is computed as the groups would be by that many devices, one each."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from co2.networks.backbones import build_backbone
from co2.networks.batch_statistics import (
    GroupedStatistics,
    group_batch_statistics,
    group_count,
    nearly_equal,
    synchronise_batch_statistics,
    views_together,
)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.BatchNorm1d(5))


def small(name: str) -> Callable[[], nn.Module]:
    return lambda: build_backbone(name, view_size=32)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (small("torchvision/resnet18"), (3, 32, 32)),
    "timm, BatchNormAct2d": (small("timm/test_efficientnet"), (3, 32, 32)),
    "BatchNorm1d": (perceptron, (6,)),
}


def separately(model: nn.Module, batch: Tensor, groups: int, upstream: Tensor) -> dict[str, Tensor]:
    """The truth: every group through its own copy of the model; gradients add up, running statistics are averaged."""
    copies = [copy.deepcopy(model) for _ in range(groups)]
    batch = batch.detach().requires_grad_()
    outputs = torch.cat([one(part) for one, part in zip(copies, batch.tensor_split(groups), strict=True)])
    (outputs * upstream).sum().backward()
    truth = {"outputs": outputs.detach(), "input gradient": batch.grad}
    for name, _ in model.named_parameters():
        truth[name] = torch.stack([one.get_parameter(name).grad for one in copies]).sum(dim=0)
    for name, buffer in model.named_buffers():
        truth[name] = torch.stack([one.get_buffer(name) for one in copies]).to(torch.float64).mean(dim=0).to(buffer)
    return truth


def together(model: nn.Module, batch: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    batch = batch.detach().requires_grad_()
    outputs = model(batch)
    (outputs * upstream).sum().backward()
    result = {"outputs": outputs.detach(), "input gradient": batch.grad}
    result |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return result | dict(model.named_buffers())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("images", "groups"), [(8, 4), (10, 4), (7, 2)])
def test_equals_running_the_groups_as_separate_batches(kind: str, images: int, groups: int) -> None:
    build, shape = MODELS[kind]
    torch.manual_seed(0)
    model = build().double()
    batch = torch.randn(images, *shape, dtype=torch.float64)
    upstream = torch.randn_like(model(batch)).detach()  # also moves the running statistics off their start
    truth = separately(model, batch, groups, upstream)

    group_batch_statistics(model, groups)
    result = together(model, batch, upstream)

    assert result.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(result[name], truth[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_equals_separate_batches_in_float32_and_channels_last() -> None:
    torch.manual_seed(0)
    model = build_backbone("torchvision/resnet18", "small", 16).to(memory_format=torch.channels_last)
    batch = torch.randn(8, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    upstream = torch.randn(8, 512)
    truth = separately(model, batch, 4, upstream)

    group_batch_statistics(model, 4)
    formats: list[bool] = []
    model.bn1.register_forward_hook(
        lambda _, __, output: formats.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    result = together(model, batch, upstream)

    assert formats == [True]
    for name in truth:
        scale = truth[name].abs().max().item()
        torch.testing.assert_close(result[name], truth[name], rtol=1e-4, atol=1e-4 * scale)


def test_grouping_matters() -> None:
    torch.manual_seed(0)
    model, batch = perceptron(), torch.randn(8, 6)
    whole = model(batch)
    group_batch_statistics(model, 4)
    assert not torch.allclose(model(batch), whole, atol=1e-2)


@settings(max_examples=50)
@given(groups=st.integers(1, 9), extra=st.integers(0, 20), momentum=st.floats(0.001, 1.0), steps=st.integers(1, 3))
def test_running_statistics_move_towards_the_mean_over_groups(
    groups: int, extra: int, momentum: float, steps: int
) -> None:
    torch.manual_seed(groups)
    layer = nn.BatchNorm1d(3, momentum=momentum).double()
    group_batch_statistics(layer, groups)
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for _ in range(steps):
        batch = torch.randn(2 * groups + extra, 3, dtype=torch.float64) * 3 + 1
        layer(batch)
        parts = batch.tensor_split(groups)
        mean = (1 - momentum) * mean + momentum * sum(part.mean(dim=0) for part in parts) / groups
        variance = (1 - momentum) * variance + momentum * sum(part.var(dim=0) for part in parts) / groups
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_var, variance)
    assert layer.num_batches_tracked == steps
    assert layer.momentum == momentum


def test_cumulative_averages_count_every_group() -> None:
    layer, batches = nn.BatchNorm1d(3, momentum=None), torch.randn(2, 8, 3)
    group_batch_statistics(layer, 4)
    for batch in batches:
        layer(batch)
    torch.testing.assert_close(layer.running_mean, batches.mean(dim=(0, 1)))


def test_layers_without_running_statistics() -> None:
    layer, batch = nn.BatchNorm1d(3, track_running_stats=False), torch.randn(8, 3)
    parts = torch.cat([layer(batch[:4]), layer(batch[4:])])
    group_batch_statistics(layer, 2)
    torch.testing.assert_close(layer(batch), parts)


@pytest.mark.parametrize(
    ("images", "groups", "expected"), [(8, 4, 4), (7, 4, 3), (5, 4, 2), (3, 4, 1), (1, 4, 1), (9, 1, 1)]
)
def test_no_group_is_left_with_a_single_image(images: int, groups: int, expected: int) -> None:
    assert group_count(images, groups) == expected
    torch.manual_seed(0)
    plain, batch = nn.BatchNorm2d(3), torch.randn(images, 3, 2, 2)
    grouped = copy.deepcopy(plain)
    group_batch_statistics(grouped, groups)
    parts = batch.tensor_split(expected)
    assert all(len(part) >= min(images, 2) for part in parts)
    torch.testing.assert_close(grouped(batch), torch.cat([plain(part) for part in parts]))


def test_evaluation_mode_is_not_affected() -> None:
    model, batch = perceptron(), torch.randn(8, 6)
    model(batch)
    model.eval()
    before = model(batch)
    group_batch_statistics(model, 4)
    assert torch.equal(model(batch), before)


def test_state_dict_keeps_its_names_and_loads_into_a_plain_model() -> None:
    model = build_backbone("timm/test_efficientnet", view_size=32)
    names = list(model.state_dict())
    group_batch_statistics(model, 4)
    assert list(model.state_dict()) == names
    build_backbone("timm/test_efficientnet", view_size=32).load_state_dict(model.state_dict())


def test_every_batchnorm_is_reached_and_nothing_else() -> None:
    model = nn.Sequential(
        build_backbone("timm/test_efficientnet", view_size=32),
        nn.BatchNorm3d(2),
        nn.SyncBatchNorm(2),
        nn.GroupNorm(1, 2),
    )
    group_batch_statistics(model, 2)
    for layer in model.modules():
        expected = isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        assert isinstance(layer, GroupedStatistics) == expected


def test_one_group_changes_nothing() -> None:
    model = perceptron()
    kinds = [type(module) for module in model.modules()]
    group_batch_statistics(model, 1)
    assert [type(module) for module in model.modules()] == kinds


def test_the_number_of_groups_can_be_changed() -> None:
    torch.manual_seed(0)
    model, batch = perceptron(), torch.randn(8, 6)
    whole = model(batch)
    for groups in (4, 2, 1):
        group_batch_statistics(model, groups)
    torch.testing.assert_close(model(batch), whole)


def test_deep_copies_are_grouped_and_independent() -> None:
    torch.manual_seed(0)
    model, batch = perceptron(), torch.randn(8, 6)
    group_batch_statistics(model, 4)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(batch), model(batch))
    copied(batch)
    assert copied[1].num_batches_tracked == 2
    assert model[1].num_batches_tracked == 1


@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 5))
def test_nearly_equal_parts_are_those_of_torch_and_can_be_cut_in_two_goes(count: int, parts: int, each: int) -> None:
    def cut(things: list[int], parts: int) -> list[list[int]]:
        bounds = nearly_equal(len(things), parts)
        return [things[start:stop] for start, stop in itertools.pairwise(bounds)]

    things = list(range(count))
    assert cut(things, parts) == [part.tolist() for part in torch.arange(count).tensor_split(parts)]
    shares = itertools.pairwise(nearly_equal(count, parts * each)[::each])
    in_two_goes = [part for start, stop in shares for part in cut(things[start:stop], each)]
    assert in_two_goes == cut(things, parts * each)


def test_no_group_begins_between_two_views_of_an_image() -> None:
    """Ten rows in two groups would be five and five; of five images in two views each, three and two make groups."""
    torch.manual_seed(0)
    together, truth = perceptron(), perceptron()
    truth.load_state_dict(together.state_dict())
    group_batch_statistics(together, 2)
    batch = torch.randn(10, 6)
    with views_together(together, 2):
        seen = together(batch)
    torch.testing.assert_close(seen, torch.cat([truth(batch[:6]), truth(batch[6:])]))
    of_five = perceptron()
    of_five.load_state_dict(truth.state_dict())
    torch.testing.assert_close(together(batch), torch.cat([of_five(batch[:5]), of_five(batch[5:])]))  # outside again


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("grouped_before", [False, True])
def test_synchronised_statistics_of_one_process_are_plain_ones(kind: str, grouped_before: bool) -> None:
    """Between processes they are tested where processes are: here gradients, running statistics, and activations."""
    build, shape = MODELS[kind]
    torch.manual_seed(0)
    plain = build().double()
    synchronised = copy.deepcopy(plain)
    if grouped_before:
        group_batch_statistics(synchronised, 2)
        group_batch_statistics(synchronised, 1)
    synchronise_batch_statistics(synchronised, lambda row: row[None])
    batch = torch.randn(5, *shape, dtype=torch.float64)
    upstream = torch.randn_like(copy.deepcopy(plain)(batch))
    ours, truth = together(synchronised, batch, upstream), together(plain, batch, upstream)
    torch.testing.assert_close(ours, truth)
    assert synchronised.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(synchronised.eval()(batch), plain.eval()(batch))


def test_synchronised_statistics_move_as_plain_ones_do() -> None:
    torch.manual_seed(0)
    for layer in (nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, track_running_stats=False)):
        synchronised = copy.deepcopy(layer)
        synchronise_batch_statistics(synchronised, lambda row: row[None])
        for _ in range(3):
            batch = torch.randn(4, 3, 5, 5) * 2 + 1
            torch.testing.assert_close(synchronised(batch), layer(batch))
            torch.testing.assert_close(dict(synchronised.named_buffers()), dict(layer.named_buffers()))


def test_synchronised_statistics_are_those_of_all_rows_together() -> None:
    """Two parts of one batch, of unequal size, each knowing of the other."""
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(4).double()
    parts = torch.randn(9, 4, dtype=torch.float64).split([6, 3])

    def row(part: Tensor) -> Tensor:
        variance, mean = torch.var_mean(part, 0, correction=0)
        return torch.cat([mean, variance, mean.new_tensor([len(part)])])

    outputs = []
    for part, other in (parts, parts[::-1]):
        layer = copy.deepcopy(plain)
        synchronise_batch_statistics(layer, lambda mine, other=other: torch.stack([mine, row(other)]))
        outputs.append(layer(part))
    torch.testing.assert_close(torch.cat(outputs), plain(torch.cat(parts)))
    torch.testing.assert_close(layer.running_mean, plain.running_mean)
    torch.testing.assert_close(layer.running_var, plain.running_var)
