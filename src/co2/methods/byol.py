"""BYOL: an online network predicts, from one view, what a slow copy of itself makes of the other (Grill et al. 2020).

    L = |q(z1) - z2'|^2 + |q(z2) - z1'|^2      unit vectors; z of the online network, z' of the target   (equation 2)
    target <- m target + (1 - m) online        m rises from 0.996 to 1 along half a cosine               (section 3.2)

There are no negatives. What keeps all images from getting the same vector is the predictor q, and that no gradient
reaches the target. Each view goes through batch statistics by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from co2.errors import UserError
from co2.experiment import Experiment, Optimisation, recipe
from co2.lazily import nn, torch
from co2.measures.metric import Metric
from co2.method import Method, Nets, Output, Schedule, Step, Trouble
from co2.methods.moco import SMALL
from co2.methods.parts import half_cosine, unit
from co2.networks.heads import mlp
from co2.networks.settings import Network
from co2.views.view import View

if TYPE_CHECKING:
    from co2.networks.parts import Parts

# Appendix B, table 6: the two views differ in how often they are blurred and solarised.
FIRST = View(crop_scale=(0.08, 1.0), jitter=(0.4, 0.4, 0.2, 0.1), blur_probability=1.0)
SECOND = replace(FIRST, blur_probability=0.1, solarise_probability=0.2)

COSINE = Metric(
    "cosine", "Agreement of prediction and target", "higher", "cosine", depends_on=("method.name",),
    explanation="The cosine of what is predicted from one view and what the target makes of the other: 1 is the same "
    "direction. It is 1, too, where all pictures look the same to the network: look at the effective rank.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BYOL(Method):
    """Settings of BYOL."""

    dimension: int = 256
    """Length of a projection, and of a prediction of it."""
    hidden: int = 4096
    """Width of the hidden layer of projector and predictor."""
    momentum: float = 0.996
    """How slowly the target follows in the first step."""
    final_momentum: float = 1.0
    """How slowly in the last one: at 1 it stands still."""
    first: View = FIRST
    """How the first view is made."""
    second: View = SECOND
    """How the second view is made."""

    metrics = (COSINE,)

    def __post_init__(self) -> None:
        if self.dimension < 1 or self.hidden < 1:
            raise UserError("method.dimension and method.hidden must be at least 1.")
        for name in ("momentum", "final_momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"method.{name} must be between 0 and 1; got {getattr(self, name)}.")

    def views(self, size: int) -> tuple[View, ...]:
        return replace(self.first, size=size), replace(self.second, size=size)

    def schedules(self) -> Mapping[str, Schedule]:
        return {"momentum": half_cosine(self.momentum, self.final_momentum)}

    def build(self, parts: Parts) -> nn.ModuleDict:
        layers = mlp(self.hidden, self.dimension, norm=True, bias=False)  # of projector and predictor
        online = parts.encoder(layers)
        predictor = parts.layers(layers, inputs=self.dimension)
        return nn.ModuleDict({"encoder": online, "predictor": predictor, "target": parts.slow_copy(online)})

    def loss(self, nets: Nets, step: Step) -> Output:
        predicted = [unit(nets["predictor"](nets["encoder"](view))) for view in step.views]  # two of [b, D]
        with torch.no_grad():
            targets = [unit(nets["target"](view)) for view in step.views]  # two of [b, D]
        there, back = ((q * z).sum(dim=1).mean() for q, z in zip(predicted, reversed(targets), strict=True))
        return Output(4 - 2 * (there + back), {"cosine": (there + back) / 2})  # |q - z|^2 = 2 - 2 q.z of unit vectors

    def update(self, nets: Nets, step: Step, output: Output) -> None:
        nets["target"].follow(nets["encoder"], step.at("momentum"))

    def remedies(self, trouble: Trouble) -> tuple[str, ...]:
        own = {
            "collapsed": ("a higher --method.momentum",),
            "memory": (f"--method.hidden {max(1, self.hidden // 2)} takes less",),
        }
        return own.get(trouble, ())


@recipe("BYOL: no negatives; 4,096 images a step, LARS, 1,000 epochs")
def byol() -> Experiment:
    """BYOL (Grill et al. 2020, section 3.3): batch 4,096, LARS at 0.2 for 256 images, 10 of 1,000 epochs of warm-up;
    neither decay nor adaptation of biases and norms."""
    rate = Optimisation(optimiser="lars", base_learning_rate=0.2, weight_decay=1.5e-6, decay="matrices", warm_up=0.01)
    return Experiment(epochs=1000, batch_size=4096, network=Network(groups=1), method=BYOL(), optimisation=rate)


@recipe("BYOL for 32 to 64 pixel images")
def byol_small() -> Experiment:
    """BYOL for small images, as lightly's benchmark of CIFAR-10 has it: BYOL's views without blur, a hidden layer of
    1,024, a momentum of 0.99 throughout, and SGD at 0.06 for 128 images."""
    first = replace(FIRST, blur_probability=SMALL.blur_probability)
    second = replace(first, solarise_probability=SECOND.solarise_probability)
    return Experiment(
        batch_size=512,
        size=32,
        network=Network(backbone="torchvision/resnet18", stem="small", groups=1),
        method=BYOL(hidden=1024, momentum=0.99, final_momentum=0.99, first=first, second=second),
        optimisation=Optimisation(base_learning_rate=0.06, base_batch_size=128, weight_decay=5e-4),
    )
