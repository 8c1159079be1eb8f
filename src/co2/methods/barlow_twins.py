"""Barlow Twins: two views agree in each number, and no number repeats another (Zbontar et al. 2021).

    C_ij = sum_b z1_bi z2_bj / B              numbers standardised over the batch                       (equation 2)
    L = sum_i (1 - C_ii)^2 + lambda sum_i sum_{j != i} C_ij^2                                           (equation 1)

No negatives, no slow copy, no predictor: embeddings that are all the same have no correlations at all. The batch is
that of all processes together: embeddings are gathered with their gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from co2.errors import UserError
from co2.experiment import Experiment, Optimisation, recipe
from co2.lazily import nn, torch
from co2.measures.metric import Metric
from co2.method import Method, Nets, Output, Step
from co2.methods.byol import FIRST, SECOND
from co2.methods.moco import SMALL
from co2.networks.heads import mlp
from co2.networks.settings import Network
from co2.views.view import View

if TYPE_CHECKING:
    from co2.networks.parts import Parts

EPSILON = 1e-5  # beside a variance, as batch normalisation has it
AGREEMENT = Metric(
    "agreement", "Correlation of the same number", "higher", "agreement", depends_on=("method.name",),
    explanation="How closely a number of one view's embedding goes with that of the other: 1 exactly, 0 not at all.",
)  # fmt: skip
REDUNDANCY = Metric(
    "redundancy", "Correlation of different numbers", "lower", "redundancy", depends_on=("method.name", "batch_size"),
    explanation="How much two different numbers of the embeddings have to do with each other: the root of the mean "
    "square of their correlations. Chance alone makes it one over the root of the batch size.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BarlowTwins(Method):
    """Settings of Barlow Twins."""

    dimension: int = 8192
    """Length of an embedding, and width of the projector's hidden layers."""
    layers: int = 3
    """Of the projector."""
    redundancy_weight: float = 0.005
    """lambda: weight of the correlations of different numbers."""
    scale: float = 1.0
    """What the loss is multiplied by. With lars, that sets the learning rate of biases and norms alone."""
    first: View = FIRST
    """How the first view is made."""
    second: View = SECOND
    """How the second view is made."""

    metrics = (AGREEMENT, REDUNDANCY)

    def __post_init__(self) -> None:
        if min(self.dimension, self.layers) < 2:
            raise UserError("method.dimension and method.layers must be at least 2.")
        if not 0 <= self.redundancy_weight < math.inf or not 0 < self.scale < math.inf:
            raise UserError("method.redundancy_weight must be a number, 0 or more, and method.scale one above 0.")

    def views(self, size: int) -> tuple[View, ...]:
        return replace(self.first, size=size), replace(self.second, size=size)

    def build(self, parts: Parts) -> nn.ModuleDict:
        return nn.ModuleDict({"encoder": parts.encoder(mlp(*[self.dimension] * self.layers, norm=True, bias=False))})

    def loss(self, nets: Nets, step: Step) -> Output:
        z = torch.stack([nets["encoder"](view) for view in step.views])  # [2, b, D], each view normalised by itself
        z = step.gather(z.transpose(0, 1).to(torch.promote_types(z.dtype, torch.float32)))  # [B, 2, D]
        z = z - z.mean(dim=0)
        one, other = (z / (z.square().mean(dim=0) + EPSILON).sqrt()).unbind(dim=1)  # [B, D] each, standardised
        with torch.autocast(z.device.type, enabled=False):  # 0.998 is 1 in bfloat16, and nothing left to learn
            correlation = one.T @ other / len(z)  # [D, D]
        same = correlation.diagonal()  # [D]
        different = (correlation - torch.diag(same)).square().sum()
        loss = (1 - same).square().sum() + self.redundancy_weight * different
        mean_square = different / (self.dimension * (self.dimension - 1))
        return Output(self.scale * loss, {"agreement": same.mean(), "redundancy": mean_square.sqrt()})


@recipe("Barlow Twins: no negatives, embeddings without redundancy; 2,048 images a step, LARS, 1,000 epochs")
def barlow_twins() -> Experiment:
    """Barlow Twins (Zbontar et al. 2021, section 2.2): batch 2,048, LARS at 0.2 for 256 images, 10 of 1,000 epochs of
    warm-up. The scale makes that 0.0048 for biases and norms; the decay of 1.5e-6 is scaled, too."""
    rate = Optimisation(optimiser="lars", base_learning_rate=0.2, weight_decay=3.6e-8, decay="matrices", warm_up=0.01)
    own = BarlowTwins(scale=0.024)
    return Experiment(epochs=1000, batch_size=2048, network=Network(groups=1), method=own, optimisation=rate)


@recipe("Barlow Twins for 32 to 64 pixel images")
def barlow_twins_small() -> Experiment:
    """Barlow Twins for small images, as lightly's benchmark of CIFAR-10 has it: two layers of 2,048, no blur, and SGD
    at 0.06 for 128 images. The views are the paper's, apart from the blur."""
    first = replace(FIRST, blur_probability=SMALL.blur_probability)
    second = replace(first, solarise_probability=SECOND.solarise_probability)
    return Experiment(
        batch_size=512,
        size=32,
        network=Network(backbone="torchvision/resnet18", stem="small", groups=1),
        method=BarlowTwins(dimension=2048, layers=2, first=first, second=second),
        optimisation=Optimisation(base_learning_rate=0.06, base_batch_size=128, weight_decay=5e-4),
    )
