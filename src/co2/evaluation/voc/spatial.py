"""What detection and segmentation share: a backbone in parts, images of any size in batches, and a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models.resnet import ResNet

from co2.errors import RunError
from co2.evaluation.progress import Progress

T = TypeVar("T")
MOST_STRIDE = 32
"""Sides of padded batches are multiples of this, so that every ResNet's feature map fits them exactly."""
_CURVE_POINTS = 100


class Trunk(nn.Module):
    """A ResNet from conv1 to conv4 (layer3): images [B, 3, H, W] in, features [B, channels, H / stride, W / stride]."""

    def __init__(self, backbone: ResNet) -> None:
        super().__init__()
        self.conv1 = backbone.conv1
        self.bn1 = backbone.bn1
        self.relu = backbone.relu
        self.maxpool = backbone.maxpool
        self.layer1 = backbone.layer1
        self.layer2 = backbone.layer2
        self.layer3 = backbone.layer3
        # Measured, because stems for small images have smaller strides: 4 or 8 instead of 16.
        self.channels, self.stride = _measure(self, torch.zeros(1, 3, 128, 128))

    def forward(self, images: Tensor) -> Tensor:
        stem: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features: Tensor = self.layer3(self.layer2(self.layer1(stem)))
        return features


def _measure(module: nn.Module, inputs: Tensor) -> tuple[int, int]:
    """Channels of a module's output, and how many times smaller than its input it is."""
    module.eval()
    with torch.no_grad():
        outputs: Tensor = module(inputs)
    module.train()
    return outputs.shape[1], inputs.shape[-1] // outputs.shape[-1]


def width_of(layer: nn.Module, channels: int) -> int:
    """Channels that a layer makes of features with so many."""
    return _measure(layer, torch.zeros(1, channels, 8, 8))[0]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """What is drawn in here depends on the seed alone, and leaves the generators outside as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


# Images.


class Preparation:
    """Brings uint8 images [B, 3, H, W] to the device, normalised as the backbone is used to."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.device = device
        self.mean = 255 * torch.tensor(mean, device=device)[:, None, None]  # [3, 1, 1]
        self.std = 255 * torch.tensor(std, device=device)[:, None, None]

    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        images = images.contiguous(memory_format=torch.channels_last)
        return (images - self.mean) / self.std


def padding_colour(mean: Sequence[float]) -> Tensor:
    """What images are padded with: the mean colour, which normalisation turns into zeros. uint8 [3, 1, 1]."""
    return (255 * torch.tensor(mean)).round().to(torch.uint8)[:, None, None]


# Training.


def stepped_rate(
    iteration: int,
    base: float,
    milestones: Iterable[float],
    decay: float,
    warmup: int = 0,
    warmup_factor: float = 1.0,
) -> float:
    """The learning rate of an iteration: a line up to `base`, and a step down at each milestone."""
    rate = base * decay ** sum(iteration >= milestone for milestone in milestones)
    if iteration < warmup:
        done = iteration / warmup
        rate *= warmup_factor * (1 - done) + done
    return rate


def parameter_groups(model: nn.Module, weight_decay: float, norm_weight_decay: float) -> list[dict[str, Any]]:
    """All parameters, those of batch normalisation with a weight decay of their own."""
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for parameter in module.parameters(recurse=False)
    }
    return [
        {"params": [p for p in model.parameters() if id(p) not in norms], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if id(p) in norms], "weight_decay": norm_weight_decay},
    ]


def fit(
    model: nn.Module,
    batches: Iterable[T],
    losses_of: Callable[[T], Mapping[str, Tensor]],
    optimiser: torch.optim.Optimizer,
    rate: Callable[[int], float],
    progress: Progress,
) -> dict[str, list[float]]:
    """Train on the batches, one step each, and return the curve of each loss: means over equal parts of training."""
    model.train()
    history: list[Tensor] = []
    names: list[str] = []
    for iteration, batch in enumerate(batches):
        for group in optimiser.param_groups:
            group["lr"] = rate(iteration)
        losses = losses_of(batch)
        total = torch.stack(list(losses.values())).sum()
        optimiser.zero_grad(set_to_none=True)
        total.backward()
        optimiser.step()
        names = list(losses)
        history.append(torch.stack([loss.detach().float() for loss in losses.values()]))  # [losses]
        if iteration % 100 == 99 and not history[-1].isfinite().all():
            break
        progress.advance()
    values = torch.stack(history).cpu()  # [iterations, losses]
    if not values.isfinite().all():
        first = int((~values.isfinite().all(dim=1)).nonzero()[0])
        raise RunError(
            f"The training diverged: a loss is no longer a number at iteration {first}. Give a lower --learning-rate."
        )
    parts = values.tensor_split(min(_CURVE_POINTS, len(values)))
    means = torch.stack([part.mean(dim=0) for part in parts])  # [points, losses]
    return {name: [round(number, 5) for number in means[:, place].tolist()] for place, name in enumerate(names)}


def take_statistics(model: nn.Module, batches: Iterable[T], forward: Callable[[T], object]) -> None:
    """Replace the running statistics of batch normalisation by plain means over these batches.

    Running statistics lag behind weights that still move; these belong to the weights as they are (detectron2's
    PreciseBN, which MoCo's configuration switches on).
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
    model.train()
    with torch.no_grad():
        for batch in batches:
            forward(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
