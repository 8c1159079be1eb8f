"""The bound of a step: against networks that can be counted by hand, and against bounds that are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock

from co2 import recipes
from co2.bench.roofline import (
    BACKWARD,
    FORWARD,
    OPTIMISER,
    UPDATE,
    VIEWS,
    Rates,
    Work,
    backward_work,
    bound_of,
    forward_work,
    layers_of,
    measure_rates,
    step_work,
)

AN_H200 = Rates(bytes_per_second=4.15e12, flops_per_second=745e12)


def total(works: list[Work]) -> tuple[float, float]:
    return sum(work.flops for work in works), sum(work.bytes for work in works)


def test_an_operation_takes_what_is_longer() -> None:
    rates = Rates(bytes_per_second=10.0, flops_per_second=100.0)
    assert Work("", flops=200, bytes=10).seconds(rates) == 2.0
    assert Work("", flops=200, bytes=50).seconds(rates) == 5.0


def test_a_small_network_counted_by_hand() -> None:
    # 2 images of 3 x 8 x 8; 4 channels of 8 x 8 = 512 numbers each in both images together
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
    ).to("meta")
    layers = layers_of(network, torch.empty(2, 3, 8, 8, device="meta"))
    images, hidden, outputs = 2 * 3 * 64, 2 * 4 * 64, 2 * 5
    kernel, matrix = 4 * 3 * 9, 256 * 5
    convolution, product = 2 * hidden * 27, 2 * outputs * 256

    flops, moved = total(forward_work(layers, "", 2))
    assert flops == convolution + product
    assert moved == 2 * ((images + hidden + kernel) + 3 * hidden + (hidden + outputs + matrix))

    flops, moved = total(backward_work(layers, 2))
    assert flops == convolution + 2 * product  # nobody needs the gradient of the images
    assert moved == 2 * ((images + hidden + kernel) + 5 * hidden + 2 * (hidden + outputs + matrix))


def test_a_residual_block_adds_in_its_last_normalisation_and_its_gradients_before_the_first_layer() -> None:
    network = nn.Sequential(BasicBlock(4, 4)).to("meta")
    layers = layers_of(network, torch.empty(1, 4, 8, 8, device="meta"))
    numbers, weights = 4 * 64, 4 * 4 * 9
    convolution = 2 * numbers + weights
    assert total(forward_work(layers, "", 1))[1] == 2 * convolution + (3 + 4) * numbers
    assert total(backward_work(layers, 1))[1] == 3 * convolution + (5 + 7) * numbers + 3 * numbers


def test_products_outside_layers_count_by_their_arithmetic() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.mT

    layers = layers_of(nn.Sequential(Product()), torch.empty(2, 3, 5, device="meta"))
    assert total(forward_work(layers, "", 2)) == (2 * 2 * 3 * 3 * 5, 0)


def test_a_vision_transformer_has_products_in_its_attention() -> None:
    network, method = {"backbone": "timm/vit_tiny_patch16_224"}, {"shuffle": False, "queue": 16}
    experiment = recipes.get("moco-v2").edit(batch_size=8, size=32, network=network, method=method)
    by_part = {part: sum(w.flops for w in step_work(experiment, 2) if w.part == part) for part in (FORWARD, BACKWARD)}
    assert by_part[FORWARD] > 0
    assert 0.9 < by_part[BACKWARD] / by_part[FORWARD] <= 1  # that of the keys has no backward pass


@pytest.mark.parametrize(("recipe", "images_per_second"), [("moco-small", 85_235), ("moco-v2", 6_588)])
def test_the_bounds_of_an_h200(recipe: str, images_per_second: float) -> None:
    experiment = recipes.get(recipe)
    found = experiment.batch_size / bound_of(experiment, AN_H200, 2).seconds
    assert found == pytest.approx(images_per_second, rel=0.2)


def test_the_parts_of_a_step_are_those_of_every_method() -> None:
    for recipe in ("moco-small", "simclr-small", "insdisc-small"):
        works = step_work(recipes.get(recipe).edit(batch_size=8), 2)
        assert {work.part for work in works} == {VIEWS, FORWARD, BACKWARD, OPTIMISER, UPDATE}
        followed = sum(work.bytes for work in works if work.part == UPDATE)
        assert (followed > 1e8) == (recipe == "moco-small")  # a network that follows another


def test_what_is_encoded_twice_costs_twice() -> None:
    def flops(**method: object) -> float:
        experiment = recipes.get("moco-small").edit(batch_size=8, method={"queue": 16, **method})
        return total(step_work(experiment, 2))[0]

    assert flops(symmetric=True) == pytest.approx(2 * flops(), rel=1e-3)


def test_the_objective_of_a_large_queue_is_two_products_and_one_back() -> None:
    small, large = (recipes.get("moco-v2").edit(method={"queue": size}) for size in (4096, 65_536))
    difference = [total(step_work(one, 2)) for one in (small, large)]
    more = 65_536 - 4096
    assert difference[1][0] - difference[0][0] == 3 * 2 * 256 * more * 128
    assert difference[1][1] - difference[0][1] == 2 * 4 * more * 128


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_device_has_rates(precision: torch.dtype) -> None:
    rates = measure_rates(torch.device("cpu"), precision)
    assert 1e8 < rates.bytes_per_second < 1e13
    assert 1e8 < rates.flops_per_second < 1e14
