import pytest
import torch
from torch import nn

from co2.engine.optimisers import Lars, build_optimiser
from co2.experiment import Optimisation


def test_lars_is_the_published_update_written_out():
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
    optimiser = Lars([{"params": [weight, bias], "weight_decay": 0.01}], momentum=0.9, trust=0.001)
    expected_weight, expected_bias = weight.detach().clone(), bias.detach().clone()
    velocity_weight, velocity_bias = torch.zeros(4, 3), torch.zeros(4)
    for _ in range(3):
        weight.grad, bias.grad = torch.randn(4, 3), torch.randn(4)
        optimiser.param_groups[0]["lr"] = 0.5
        # You et al. 2017, algorithm 1, with the exceptions of SimCLR's appendix for vectors.
        gradient = weight.grad + 0.01 * expected_weight
        local_rate = 0.001 * expected_weight.norm() / gradient.norm()
        velocity_weight = 0.9 * velocity_weight + 0.5 * local_rate * gradient
        velocity_bias = 0.9 * velocity_bias + 0.5 * bias.grad
        expected_weight, expected_bias = expected_weight - velocity_weight, expected_bias - velocity_bias
        optimiser.step()
        torch.testing.assert_close(weight.detach(), expected_weight)
        torch.testing.assert_close(bias.detach(), expected_bias)


def test_lars_survives_weights_of_zero():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    optimiser = Lars([{"params": [weight]}], momentum=0.0)
    optimiser.param_groups[0]["lr"] = 0.1
    optimiser.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), -0.1))


def test_lars_adapts_and_decays_vectors_where_it_is_told_to():
    bias = nn.Parameter(torch.tensor([3.0, 4.0]))
    bias.grad = torch.tensor([0.0, 2.0])
    optimiser = Lars([{"params": [bias], "weight_decay": 0.5, "lr": 1.0}], momentum=0.0, decay_vectors=True,
                     adapt_vectors=True)  # fmt: skip
    optimiser.step()
    gradient = torch.tensor([1.5, 4.0])
    expected = torch.tensor([3.0, 4.0]) - 0.001 * 5.0 / gradient.norm() * gradient
    torch.testing.assert_close(bias.detach(), expected)


def built(network=None, rates=None, **settings):
    nets = nn.ModuleDict({"encoder": network if network is not None else nn.Linear(2, 2), "predictor": nn.Linear(2, 2)})
    return build_optimiser(nets, Optimisation(**settings), {"": 0.5, **(rates or {})})


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_an_optimiser_is_built_with_the_momentum_and_weight_decay_that_were_asked_for(name):
    optimiser, names = built(optimiser=name, momentum=0.8, weight_decay=0.03)
    (group,) = optimiser.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.8, 0.03)
    assert names == [""]


def test_adamw_has_the_betas_that_were_asked_for_and_decays_apart_from_the_gradient():
    weight = nn.Linear(2, 2, bias=False)
    before = weight.weight.detach().clone()
    optimiser, _ = built(weight, optimiser="adamw", momentum=0.8, beta2=0.95, weight_decay=0.1)
    assert optimiser.param_groups[0]["betas"] == (0.8, 0.95)
    weight.weight.grad = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    optimiser.step()
    expected = before * (1 - 0.5 * 0.1) - 0.5 * weight.weight.grad.sign()  # the first step of Adam, and the decay
    torch.testing.assert_close(weight.weight.detach(), expected)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_vectors_are_not_decayed_where_only_matrices_are(name):
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimiser, names = built(network, optimiser=name, weight_decay=0.1, decay="matrices")
    decayed = {id(one) for group in optimiser.param_groups if group["weight_decay"] for one in group["params"]}
    assert id(network[0].weight) in decayed
    assert not decayed & {id(network[0].bias), id(network[1].weight), id(network[1].bias)}
    assert names == ["", ""]
    assert sum(len(group["params"]) for group in optimiser.param_groups) == 6


def test_a_network_with_a_rate_of_its_own_is_a_group_of_its_own():
    optimiser, names = built(rates={"predictor": 0.25})
    assert names == ["", "predictor"]
    assert [group["lr"] for group in optimiser.param_groups] == [0.5, 0.25]


def test_frozen_parameters_are_left_out():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    for name in ("sgd", "lars"):
        optimiser, _ = built(module, optimiser=name)
        assert sum(len(group["params"]) for group in optimiser.param_groups) == 4
