import pytest
import torch
from torch import nn

from co2.engine.optimisers import Lars, build_optimiser
from co2.engine.specification import OptimisationSpecification


def test_lars_is_the_published_update_written_out():
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
    optimiser = Lars([weight, bias], 0.0, momentum=0.9, weight_decay=0.01, trust=0.001)
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
    optimiser = Lars([weight], 0.0, momentum=0.0, weight_decay=0.0)
    optimiser.param_groups[0]["lr"] = 0.1
    optimiser.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), -0.1))


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_an_optimiser_is_built_with_the_momentum_and_weight_decay_that_were_asked_for(name):
    specification = OptimisationSpecification(optimiser=name, momentum=0.8, weight_decay=0.03)
    (group,) = build_optimiser(nn.Linear(2, 2), specification, 0.5).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.8, 0.03)


def test_frozen_parameters_are_left_out():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    for name in ("sgd", "lars"):
        optimiser = build_optimiser(module, OptimisationSpecification(optimiser=name), 0.0)
        assert sum(len(group["params"]) for group in optimiser.param_groups) == 2
