"""How fast a training step could be on a device: the time that its arithmetic or its memory traffic takes at least.

Each operation takes at least as long as its products need at the device's measured matrix rate, and as its bytes need
at the measured rate of a copy; the sum of the larger of both over all operations bounds the step. What is counted, with
x the input of a layer, y its output, and b bytes for a number (2 in bfloat16, as on every GPU; 4 in float32):

    convolution, linear   forward    y = W x                     one product; reads x and W, writes y
                          backward   gradients of x and of W     one product each; reads dy, W and dy, x, writes dx, dW.
                                                                 The first layer's input needs no gradient.
    batch normalisation   forward    reads x for the statistics; then x (and what is added), and writes y
    with addition, ReLU   backward   reads dy, x for two sums; then dy, x, and writes dx. With an addition the sums read
                                     y too and write dy where y > 0, which is the gradient of what was added.
                          This is what `co2.kernels.normalisation` does: as few passes as there can be between
                          convolutions that are operations of their own.
    other normalisations  forward    reads x, writes y             backward   reads dy, x, writes dx
    pooling               forward    reads x, writes y             backward   reads dy, writes dx
    residual block        backward   adds the gradients of its input by both ways: reads two, writes one
    weights               rounded to b bytes once a step for each encoder, their gradients back to float32;
                          the optimiser reads weight, gradient and momentum and writes two of them;
                          the momentum encoder reads two weights and writes one
    objective             for each query and negative: a product with the query and one with the key, both again in
                          backward, and one for the query's gradient (three more where negatives have gradients, too);
                          the negatives are read in both directions, float32
    views                 read as bytes, written as numbers

Activation functions alone, dropout, reshaping and launches are free. Products that belong to no layer, such as those of
attention, count by their arithmetic. So a step cannot be faster than the bound unless it fuses more than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd, _MaxPoolNd
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.resnet import BasicBlock, Bottleneck

from co2.config import Experiment
from co2.networks.encoder import build_encoder

EXACT = 4  # bytes of a float32

VIEWS, KEY_FORWARD, QUERY_FORWARD, LOSS, BACKWARD, OPTIMISER, MOMENTUM = (
    "views", "key forward", "query forward", "loss", "backward", "optimiser", "momentum encoder and negatives",
)  # fmt: skip
"""The parts of a step, as `Mechanism.lap` is told them."""


@dataclass(frozen=True)
class Rates:
    """What a device does at best."""

    bytes_per_second: float
    """Of a large copy, read plus written."""
    flops_per_second: float
    """Of a large matrix product; on a CPU of a large convolution, where that is faster."""


@dataclass(frozen=True)
class Work:
    """An operation."""

    part: str
    """Of the step."""
    flops: float
    bytes: float

    def seconds(self, rates: Rates) -> float:
        """How long it takes at least."""
        return max(self.flops / rates.flops_per_second, self.bytes / rates.bytes_per_second)


@dataclass(frozen=True)
class Bound:
    """What a step takes at least."""

    seconds: float
    by_part: dict[str, float]
    flops: float
    bytes: float


def bound_of(experiment: Experiment, rates: Rates, number_bytes: int) -> Bound:
    """The least time of a training step, with `number_bytes` for a number of an activation."""
    works = step_work(experiment, number_bytes)
    by_part: dict[str, float] = {}
    for work in works:
        by_part[work.part] = by_part.get(work.part, 0.0) + work.seconds(rates)
    return Bound(sum(by_part.values()), by_part, sum(w.flops for w in works), sum(w.bytes for w in works))


# ---------------------------------------------------------------- what is counted


def step_work(experiment: Experiment, number_bytes: int) -> list[Work]:
    """The operations of a step of this experiment."""
    size, batch = experiment.views.size, experiment.batch_size
    negatives, dimension = experiment.negatives, experiment.encoder.dimension
    queue, in_batch = negatives.source == "queue", negatives.source == "in-batch"
    directions = 2 if queue and negatives.symmetric else 1
    rows = 2 * batch if in_batch else directions * batch  # that ask
    columns = 2 * batch if in_batch else negatives.size
    encoder = build_encoder(experiment.encoder, size).to("meta")
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    layers = layers_of(encoder, torch.empty(rows, 3, size, size, device="meta"))

    views = (2 * rows if queue else rows) * 3 * size**2  # numbers
    works = [Work(VIEWS, 0, (1 + number_bytes) * views)]
    rounding = Work(QUERY_FORWARD, 0, (EXACT + number_bytes) * parameters if number_bytes < EXACT else 0)
    works += [*forward_work(layers, QUERY_FORWARD, number_bytes), rounding]
    works += [*backward_work(layers, number_bytes), Work(BACKWARD, 0, rounding.bytes)]
    products = 8 if in_batch else 5
    works.append(Work(LOSS, products * 2 * rows * columns * dimension, 2 * EXACT * columns * dimension))
    works.append(Work(OPTIMISER, 0, 5 * EXACT * parameters))
    if queue:
        works += [*forward_work(layers, KEY_FORWARD, number_bytes), Work(KEY_FORWARD, 0, rounding.bytes)]
        works.append(Work(MOMENTUM, 0, EXACT * (3 * parameters + 2 * rows * dimension)))
    elif not in_batch:
        works.append(Work(LOSS, 0, 2 * EXACT * columns * dimension))  # rows of the bank are gathered
        works.append(Work(MOMENTUM, 0, 3 * EXACT * rows * dimension))
    return works


@dataclass(frozen=True)
class Layer:
    """What a layer of a network was given and gave, counted in numbers."""

    kind: str
    inputs: int
    outputs: int
    weights: int = 0
    flops: float = 0.0
    adds: bool = False
    """Whether a normalisation adds the shortcut of its block."""


def layers_of(network: nn.Module, images: Tensor) -> list[Layer]:
    """The layers that `network` passes `images` through, both on the meta device, in order."""
    layers: list[Layer] = []
    adding = {
        id(block.bn3 if isinstance(block, Bottleneck) else block.bn2)
        for block in network.modules()
        if isinstance(block, BasicBlock | Bottleneck)
    }

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        given, gave = inputs[0].numel(), output.numel()
        if isinstance(module, _ConvNd | nn.Linear):
            flops = 2 * gave * module.weight[0].numel()  # each number of the output is a sum over one row of weights
            layers.append(Layer("product", given, gave, module.weight.numel(), flops))
        elif isinstance(module, _BatchNorm):
            layers.append(Layer("batch normalisation", given, gave, adds=id(module) in adding))
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            layers.append(Layer("normalisation", given, gave))
        elif isinstance(module, _MaxPoolNd | _AvgPoolNd | _AdaptiveAvgPoolNd):
            layers.append(Layer("pooling", given, gave))
        elif isinstance(module, BasicBlock | Bottleneck):
            layers.append(Layer("block", given, gave))

    hooks = [module.register_forward_hook(note) for module in network.modules()]
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(images)
    finally:
        for hook in hooks:
            hook.remove()
    rest = counter.get_total_flops() - sum(layer.flops for layer in layers)
    return [*layers, Layer("product", 0, 0, flops=rest)] if rest > 0 else layers


def forward_work(layers: list[Layer], part: str, number_bytes: int) -> list[Work]:
    """The operations of a forward pass."""
    works = []
    for layer in layers:
        numbers = layer.inputs + layer.outputs
        if layer.kind == "product":
            works.append(Work(part, layer.flops, number_bytes * (numbers + layer.weights)))
        elif layer.kind == "batch normalisation":
            works.append(Work(part, 0, number_bytes * layer.inputs))
            works.append(Work(part, 0, number_bytes * (numbers + layer.outputs * layer.adds)))
        elif layer.kind != "block":
            works.append(Work(part, 0, number_bytes * numbers))
    return works


def backward_work(layers: list[Layer], number_bytes: int) -> list[Work]:
    """The operations of the backward pass that belongs to a forward pass."""
    works = []
    first_product = True
    for layer in layers:
        numbers = layer.inputs + layer.outputs
        if layer.kind == "product":
            gradient = Work(BACKWARD, layer.flops, number_bytes * (numbers + layer.weights))
            works += [gradient] if first_product else [gradient, gradient]  # of the weights, and of the input
            first_product = False
        elif layer.kind == "batch normalisation":
            works.append(Work(BACKWARD, 0, number_bytes * layer.inputs * (4 if layer.adds else 2)))
            works.append(Work(BACKWARD, 0, number_bytes * layer.inputs * 3))
        elif layer.kind == "normalisation":
            works.append(Work(BACKWARD, 0, number_bytes * (numbers + layer.inputs)))
        elif layer.kind == "pooling":
            works.append(Work(BACKWARD, 0, number_bytes * numbers))
        elif layer.kind == "block":
            works.append(Work(BACKWARD, 0, number_bytes * 3 * layer.inputs))
    return works


# ---------------------------------------------------------------- what the device can do


def measure_rates(device: torch.device, precision: torch.dtype) -> Rates:
    """The rates of a large copy and of a large product of random numbers, in the type that steps run in."""
    if device.type != "cuda":
        return _measure_cpu(precision)
    from co2.bench.loss import measure, release

    with torch.cuda.device(device):
        rates = Rates(_copy_rate(measure, device), _product_rate(measure, device, precision))
        release()
    return rates


def _copy_rate(measure: Callable[..., dict[str, float]], device: torch.device) -> float:
    source = torch.randn(2**28, device=device)  # 1 GiB, many times the second-level cache
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source), 0.2)["ms"] * 1e3


def _product_rate(measure: Callable[..., dict[str, float]], device: torch.device, precision: torch.dtype) -> float:
    n = 8192
    left, right = (torch.randn(n, n, device=device, dtype=precision) for _ in range(2))
    return 2 * n**3 / measure(lambda: left @ right, 0.2)["ms"] * 1e3


def _measure_cpu(precision: torch.dtype) -> Rates:
    source = torch.randn(2**24)  # 64 MiB
    target = torch.empty_like(source)
    copying = _best(lambda: target.copy_(source))
    n = 1024
    left, right = (torch.randn(n, n, dtype=precision) for _ in range(2))
    product = 2 * n**3 / _best(lambda: left @ right)
    # The library of matrix products does not know every processor as well as that of convolutions does.
    channels, side = 256, 14
    images = torch.randn(32, channels, side, side, dtype=precision).contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(channels, channels, 3, 3, dtype=precision).contiguous(memory_format=torch.channels_last)
    convolution = 2 * images.numel() * kernel[0].numel() / _best(lambda: F.conv2d(images, kernel, padding=1))
    return Rates(2 * source.nbytes / copying, max(product, convolution))


def _best(action: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of the fastest of a few runs."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return min(found)
