"""SimSiam: one network, both views; each prediction follows the other view, which stands still (Chen and He 2021).

    L = -1/2 p1 . sg(z2) - 1/2 p2 . sg(z1)      unit vectors; z = f(x), p = h(z); sg: no gradient        (equation 4)

No negatives, no slow copy. What collapses without the stop is seen in `spread`: the standard deviation of a coordinate
of z over the batch, times the root of D, is about 1 where vectors point everywhere and 0 where all are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from co2.errors import UserError
from co2.experiment import Experiment, Optimisation, recipe
from co2.lazily import nn
from co2.measures.metric import Metric
from co2.method import Method, Nets, Output, Schedule, Step
from co2.methods.moco import SMALL, V2
from co2.methods.parts import constant, unit
from co2.networks.heads import mlp
from co2.networks.settings import Network
from co2.views.view import View

if TYPE_CHECKING:
    from co2.networks.parts import Parts

COSINE = Metric(
    "cosine", "Agreement of prediction and target", "higher", "cosine", depends_on=("method.name",),
    explanation="The cosine of what is predicted from one view and the projection of the other: 1 is the same "
    "direction. It is 1, too, where all pictures look the same to the network: look at the spread.",
)  # fmt: skip
SPREAD = Metric(
    "spread", "Spread of the projections", "neither", "spread",
    explanation="How much a coordinate of the unit projections differs between images: about 1 where they point "
    "everywhere, 0 where all are the same.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimSiam(Method):
    """Settings of SimSiam."""

    dimension: int = 2048
    """Length of a projection."""
    layers: int = 3
    """Of the projector: 3 for ImageNet, 2 for CIFAR-10 (appendix D)."""
    bottleneck: int = 512
    """Width of the predictor's hidden layer."""
    steady_predictor: bool = True
    """Keep the predictor's learning rate while that of the rest falls (appendix B)."""
    view: View = V2
    """How both views are made."""

    metrics = (COSINE, SPREAD)

    def __post_init__(self) -> None:
        if min(self.dimension, self.layers, self.bottleneck) < 1:
            raise UserError("method.dimension, method.layers and method.bottleneck must be at least 1.")

    def views(self, size: int) -> tuple[View, ...]:
        return (replace(self.view, size=size),) * 2

    def rates(self) -> Mapping[str, Schedule]:
        return {"predictor": constant(1.0)} if self.steady_predictor else {}

    def build(self, parts: Parts) -> nn.ModuleDict:
        encoder = parts.encoder(mlp(*[self.dimension] * self.layers, norm=True, last_norm=True))
        predictor = parts.layers(mlp(self.bottleneck, self.dimension, norm=True), inputs=self.dimension)
        return nn.ModuleDict({"encoder": encoder, "predictor": predictor})

    def loss(self, nets: Nets, step: Step) -> Output:
        z = [nets["encoder"](view) for view in step.views]  # two of [b, D]
        p = [unit(nets["predictor"](one)) for one in z]
        still = [unit(one.detach()) for one in z]
        there, back = ((a * b).sum(dim=1).mean() for a, b in zip(p, reversed(still), strict=True))
        cosine = (there + back) / 2
        everyone = step.gather(still[0])  # [B, D]: a deviation over shares is not the mean of theirs
        return Output(-cosine, {"cosine": cosine, "spread": everyone.std(dim=0).mean() * self.dimension**0.5})


@recipe("SimSiam: no negatives, no slow copy; 512 images a step, 100 epochs")
def simsiam() -> Experiment:
    """SimSiam (Chen and He 2021, section 3 and appendix A): batch 512, SGD at 0.05 for 256 images, cosine."""
    rate = Optimisation(base_learning_rate=0.05)
    return Experiment(epochs=100, batch_size=512, network=Network(groups=1), method=SimSiam(), optimisation=rate)


@recipe("SimSiam for 32 to 64 pixel images")
def simsiam_small() -> Experiment:
    """SimSiam for small images (its appendix D): two layers, no blur, SGD at 0.03 for 256 images, weight decay 5e-4."""
    return Experiment(
        epochs=800,
        batch_size=512,
        size=32,
        network=Network(backbone="torchvision/resnet18", stem="small", groups=1),
        method=SimSiam(layers=2, view=SMALL),
        optimisation=Optimisation(base_learning_rate=0.03, weight_decay=5e-4),
    )
