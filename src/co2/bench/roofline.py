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
                          a network that follows another reads two weights and writes one
    objective             the products of embeddings that belong to no layer, in both directions, as torch counts
                          them; what they are multiplied with is read once in each, float32
    views                 read as bytes, written as numbers

Activation functions alone, dropout, reshaping and launches are free. Products that belong to no layer, such as those of
attention, count by their arithmetic. So a step cannot be faster than the bound unless it fuses more than that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd, _MaxPoolNd
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.resnet import BasicBlock, Bottleneck

from co2.engine.distributed import ALONE
from co2.engine.trainer import build_networks, stream_of
from co2.experiment import Experiment
from co2.method import Step

EXACT = 4  # bytes of a float32

VIEWS, FORWARD, BACKWARD, OPTIMISER, UPDATE = "views", "forward", "backward", "optimiser", "update"
"""The parts of a step, as a `Trainer` tells its stopwatch: the forward pass ends with the loss."""


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
    """The operations of a step of this experiment: counted in one pass of its method's loss, without numbers."""
    batch = experiment.batch_size
    nets = build_networks(experiment, max(batch, 2)).to("meta")
    step = _step_without_numbers(experiment)
    with FlopCounterMode(display=False) as forward, _noting(nets.children(), forward) as layers:
        output = experiment.method.loss(nets, step)
    with FlopCounterMode(display=False) as backward:
        output.loss.backward()
    trained = sum(one.numel() for one in nets.parameters() if one.requires_grad)
    followed = sum(one.numel() for one in nets.parameters() if not one.requires_grad)
    kept = sum(one.numel() for one in output.kept.values())
    pictures = sum(view.numel() for view in step.views)
    in_networks = sum(layer.flops for layer in layers)
    with_gradient = [layer for layer in layers if layer.with_gradient]
    in_backward = sum(work.flops for work in backward_work(with_gradient, number_bytes))
    compared, back = forward.get_total_flops() - in_networks, max(0, backward.get_total_flops() - in_backward)
    rounding = (EXACT + number_bytes) if number_bytes < EXACT else 0  # of weights, from float32
    works = [Work(VIEWS, 0, (1 + number_bytes) * pictures)]
    works += [*forward_work(layers, FORWARD, number_bytes), Work(FORWARD, 0, rounding * (trained + followed))]
    # What is no network's are products of embeddings with others, of which each is read at least once in a direction.
    others = EXACT * compared / (4 * len(step.images))
    works += [Work(FORWARD, compared, others), Work(BACKWARD, back, others)]
    works += [*backward_work(with_gradient, number_bytes), Work(BACKWARD, 0, rounding * trained)]
    works.append(Work(OPTIMISER, 0, 5 * EXACT * trained))
    works.append(Work(UPDATE, 0, EXACT * (3 * followed + 2 * kept)))
    return works


def _step_without_numbers(experiment: Experiment) -> Step:
    """What a step hands to the method, on the meta device."""
    method, batch = experiment.method, experiment.batch_size
    empty = partial(torch.empty, device="meta")
    views = tuple(empty(batch, 3, view.size, view.size) for view in experiment.views())
    drawn = {
        name: draw.numbers(0, stream_of(name, draw), torch.zeros(1, dtype=torch.int64), batch, max(batch, 2))[0]
        for name, draw in method.draws().items()
        if draw.every == "step"
    }
    indices = empty(batch, dtype=torch.int64)
    return Step(
        views=views,
        made=({},) * len(views),
        images=indices,
        labels=indices if method.needs_labels else None,
        share=ALONE.share(batch, 1),
        numbers={name: empty(()) for name in method.schedules()},
        random={name: numbers.to("meta") for name, numbers in drawn.items()},
    )


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
    with_gradient: bool = True
    """Whether there is a backward pass of it."""


def layers_of(network: nn.Module, images: Tensor) -> list[Layer]:
    """The layers that `network` passes `images` through, both on the meta device, in order."""
    with FlopCounterMode(display=False) as counter, _noting([network], counter) as layers, torch.no_grad():
        network(images)
    return layers


@contextmanager
def _noting(networks: Iterable[nn.Module], counter: FlopCounterMode) -> Iterator[list[Layer]]:
    """The layers that these networks pass images through inside the block, on the meta device, in order; and behind
    those of a network the products that belong to none of them."""
    layers: list[Layer] = []
    networks = list(networks)
    inside = [module for network in networks for module in network.modules()]
    adding = {
        id(block.bn3 if isinstance(block, Bottleneck) else block.bn2)
        for block in inside
        if isinstance(block, BasicBlock | Bottleneck)
    }
    begun: list[tuple[int, int]] = []  # products, and how many layers there were

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        made = partial(Layer, inputs=inputs[0].numel(), outputs=output.numel(), with_gradient=torch.is_grad_enabled())
        if isinstance(module, _ConvNd | nn.Linear):
            flops = 2 * output.numel() * module.weight[0].numel()  # each number is a sum over one row of weights
            layers.append(made("product", weights=module.weight.numel(), flops=flops))
        elif isinstance(module, _BatchNorm):
            layers.append(made("batch normalisation", adds=id(module) in adding))
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            layers.append(made("normalisation"))
        elif isinstance(module, _MaxPoolNd | _AvgPoolNd | _AdaptiveAvgPoolNd):
            layers.append(made("pooling"))
        elif isinstance(module, BasicBlock | Bottleneck):
            layers.append(made("block"))

    def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        begun.append((counter.get_total_flops(), len(layers)))

    def end(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        before, first = begun.pop()
        rest = counter.get_total_flops() - before - sum(layer.flops for layer in layers[first:])
        if rest > 0:
            layers.append(Layer("product", 0, 0, flops=rest, with_gradient=torch.is_grad_enabled()))

    hooks = [module.register_forward_hook(note) for module in inside]
    hooks += [network.register_forward_pre_hook(begin) for network in networks]
    hooks += [network.register_forward_hook(end) for network in networks]
    try:
        yield layers
    finally:
        for hook in hooks:
            hook.remove()


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
    with torch.cuda.device(device):
        rates = Rates(_copy_rate(device), _product_rate(device, precision))
        torch.cuda.empty_cache()
    return rates


def measure(action: Callable[[], Any], budget: float, prepare: Callable[[], Any] | None = None) -> dict[str, float]:
    """Median and quantiles of the device's milliseconds for `action`, each time after `prepare`, which is not timed."""
    flushed = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")  # several times the second-level cache
    for _ in range(2):
        if prepare is not None:
            prepare()
        action()
    torch.cuda.synchronize()
    start = time.perf_counter()
    if prepare is not None:
        prepare()
    action()
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    repeats = max(5, min(100, int(budget / whole)))
    # The device sleeps while the host launches: at 2 GHz at most, so at least as long as that takes.
    cycles = int(min(launched * 1.5, 0.01) * 2e9)
    events = []
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        flushed.zero_()
        torch.cuda._sleep(cycles)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    found = sorted(begin.elapsed_time(end) for begin, end in events)
    low, high = found[round(0.2 * (len(found) - 1))], found[round(0.8 * (len(found) - 1))]
    return {"ms": statistics.median(found), "low_ms": low, "high_ms": high}


def _copy_rate(device: torch.device) -> float:
    source = torch.randn(2**28, device=device)  # 1 GiB, many times the second-level cache
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source), 0.2)["ms"] * 1e3


def _product_rate(device: torch.device, precision: torch.dtype) -> float:
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
