"""InsDisc: each image is a class, and its row in a memory bank stands for the class (Wu et al. 2018).

    L = -log( exp(v_i . f / tau) / sum_j exp(v_j . f / tau) )      j over i and sampled rows             (equation 2)
    v_i <- unit(m v_i + (1 - m) f)                                                                   (section 3.2)

The loss is InfoNCE over the sampled rows, as in the memory-bank comparison of the MoCo paper, in place of InsDisc's
noise-contrastive estimate of the same softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from co2.errors import UserError
from co2.experiment import Experiment, Optimisation, recipe
from co2.lazily import nn
from co2.method import Draw, Nets, Output, Seen, Step
from co2.methods.contrastive import Contrastive
from co2.methods.moco import SMALL, V1, check_head
from co2.methods.parts import SpreadSample, unit
from co2.networks.heads import Head, head
from co2.networks.settings import Network
from co2.philox import Stream
from co2.views.view import View

if TYPE_CHECKING:
    from co2.networks.parts import Parts


@dataclass(frozen=True, kw_only=True)
class InsDisc(Contrastive):
    """Settings of InsDisc."""

    tau: float = 0.07
    """Temperature of instance discrimination (InfoNCE)."""
    view: View = V1
    """How the view is made."""
    head: Head = "linear"
    """What projects features: one layer, or mlp: one hidden layer with ReLU."""
    hidden: int | None = None
    """Width of the mlp's hidden layer; by default as wide as the backbone's features."""
    dimension: int = 128
    """Length of the unit vectors that are contrasted."""
    negatives: int = 4096
    """How many rows of the memory bank a step compares with."""
    bank_momentum: float = 0.5
    """How slowly a row follows its image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.head, self.hidden, self.dimension)
        if self.negatives < 1:
            raise UserError(f"method.negatives must be at least 1; got {self.negatives}.")
        if not 0 <= self.bank_momentum < 1:
            raise UserError(f"method.bank_momentum must be in [0, 1); got {self.bank_momentum}.")

    def views(self, size: int) -> tuple[View, ...]:
        return (replace(self.view, size=size),)

    def draws(self) -> Mapping[str, Draw]:
        return {"negatives": SpreadSample(self.negatives, stream=Stream.BANK_SAMPLE)}

    def build(self, parts: Parts) -> nn.ModuleDict:
        encoder = parts.encoder(head(self.head, self.dimension, self.hidden))
        return nn.ModuleDict({"encoder": encoder, "bank": parts.bank(self.dimension)})

    def loss(self, nets: Nets, step: Step) -> Output:
        f = unit(nets["encoder"](step.views[0]))  # [b, D]
        own, others, hidden = nets["bank"].look_up(step.images, step.drawn("negatives"))  # [b, D], [K, D], [b, 1]
        compared = self.compare(f, own, others, exclude=hidden)
        return replace(self.objective(step, (1, compared)), kept={"rows": f})

    def update(self, nets: Nets, step: Step, output: Output) -> None:
        nets["bank"].follow(step.gather(step.images), step.gather(output.kept["rows"]), self.bank_momentum)

    def advice(self, seen: Seen) -> Mapping[str, str]:
        advice = dict(super().advice(seen))
        if self.negatives < 256:
            advice.pop("leak", None)  # few rows are easy to tell apart
        return advice


@recipe("InsDisc: negatives from a memory bank, one view of each image")
def insdisc() -> Experiment:
    """InsDisc (Wu et al. 2018): 4,096 rows of a memory bank with momentum 0.5, one view of each image."""
    return Experiment(
        network=Network(groups=1),
        method=InsDisc(tau_consistency=0.04),
        optimisation=Optimisation(schedule="step", milestones=(0.6, 0.8)),
    )


@recipe("InsDisc with the consistency term")
def co2_insdisc() -> Experiment:
    """InsDisc with CO2. The paper gives no numbers for it; these are its MoCo v1 settings."""
    return insdisc().edit(method={"alpha": 10.0})


@recipe("InsDisc for 32 to 64 pixel images")
def insdisc_small() -> Experiment:
    """InsDisc for small images. Its bank is an epoch old, and takes smaller steps than MoCo's queue: half the learning
    rate, chosen with a narrow network on a part of CIFAR-10's training images (results/LOG.md, insdisc-small)."""
    return Experiment(
        batch_size=512,
        size=32,
        network=Network(backbone="torchvision/resnet18", stem="small", groups=1),
        method=InsDisc(tau=0.1, tau_consistency=0.1, view=SMALL),
        optimisation=Optimisation(base_learning_rate=0.06, base_batch_size=512, weight_decay=5e-4, warm_up=0.05),
    )


@recipe("The same with the consistency term")
def co2_insdisc_small() -> Experiment:
    """InsDisc with CO2 for small images. alpha, which rises over the whole run, and tau_con were chosen with a narrow
    network on a part of CIFAR-10's training images (docs/SETTINGS.md)."""
    return insdisc_small().edit(method={"alpha": 3.0, "ramp_up": 1.0})
