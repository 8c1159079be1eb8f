"""Layers that are described before they are made: a head is chosen with the method, and made behind its backbone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from co2.lazily import nn, torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Head = Literal["linear", "mlp"]


@dataclass(frozen=True)
class Layers:
    """Linear layers with ReLU between them."""

    widths: tuple[int | None, ...]
    """None: as wide as what comes in."""
    norm: bool = False
    """Batch statistics before each ReLU; a layer before batch statistics has no bias."""
    last_norm: bool = False
    """Batch statistics, without scale and shift, at the end."""
    bias: bool = True
    """Of the last layer."""

    def make(self, inputs: int) -> Module:
        """Fresh ones, for rows of so many numbers."""
        layers: list[Module] = []
        *hidden, last = (inputs if width is None else width for width in self.widths)
        for width in hidden:
            norm = [nn.BatchNorm1d(width)] if self.norm else []
            layers += [nn.Linear(inputs, width, bias=not self.norm), *norm, nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.Linear(inputs, last, bias=self.bias and not self.last_norm))
        if self.last_norm:
            layers.append(nn.BatchNorm1d(last, affine=False))
        return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def linear(outputs: int) -> Layers:
    """One layer."""
    return Layers((outputs,))


def mlp(*widths: int | None, norm: bool = False, last_norm: bool = False, bias: bool = True) -> Layers:
    """Layers of these widths, the last of them the output's."""
    return Layers(widths, norm, last_norm, bias)


def head(kind: Head, outputs: int, hidden: int | None = None) -> Layers:
    """What projects features: a layer (MoCo v1), or two (MoCo v2: Chen et al. 2020, table 1), between them as many
    numbers as there are features unless said otherwise."""
    return linear(outputs) if kind == "linear" else mlp(hidden, outputs)


def layers_like(entries: Mapping[str, Tensor], width: int, widest: int) -> Layers | None:
    """The layers whose state dict, made for rows of `width` numbers, has entries of these names and shapes; none where
    there are none, or where they would be wider than `widest`: files may claim anything."""
    shapes = {key: tuple(tensor.shape) for key, tensor in entries.items()}
    order = sorted((key for key, shape in shapes.items() if len(shape) == 2), key=lambda key: (len(key), key))
    widths = tuple(shapes[key][0] for key in order)
    if not widths or not all(0 < one <= widest for one in widths) or not 0 < width <= widest or len(widths) > 8:
        return None
    for norm, last_norm, bias in itertools.product((False, True), repeat=3):
        if (norm and len(widths) == 1) or not (bias or norm):
            continue  # which no method has
        layers = Layers(widths, norm, last_norm, bias)
        with torch.device("meta"):
            made = layers.make(width).state_dict()
        if {key: tuple(tensor.shape) for key, tensor in made.items()} == shapes:
            return layers
    return None
