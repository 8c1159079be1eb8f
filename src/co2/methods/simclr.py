"""SimCLR: the other images of the batch are the negatives, and gradients reach everything (Chen et al. 2020).

    l(i, j) = -log( exp(s_ij / tau) / sum_{k != i} exp(s_ik / tau) )      over all 2B embeddings        (equation 1)

The batch is that of all processes together: embeddings are gathered with their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from co2.experiment import Experiment, Optimisation, recipe
from co2.lazily import nn, torch
from co2.method import Nets, Output, Step
from co2.methods.contrastive import Contrastive
from co2.methods.moco import SMALL, check_head
from co2.methods.parts import several, unit
from co2.networks.heads import Head, head
from co2.networks.settings import Network
from co2.views.view import View

if TYPE_CHECKING:
    from co2.networks.parts import Parts

# Appendix A: crops from 8% of the area, colours of strength 1, blur in every second view.
VIEW = View(crop_scale=(0.08, 1.0), jitter=(0.8, 0.8, 0.8, 0.2))


@dataclass(frozen=True, kw_only=True)
class SimCLR(Contrastive):
    """Settings of SimCLR."""

    tau: float = 0.1
    """Temperature of instance discrimination (InfoNCE)."""
    view: View = VIEW
    """How both views are made."""
    head: Head = "mlp"
    """What projects features: one layer, or mlp: one hidden layer with ReLU."""
    hidden: int | None = None
    """Width of the mlp's hidden layer; by default as wide as the backbone's features."""
    dimension: int = 128
    """Length of the unit vectors that are contrasted."""
    detach_target: bool = False
    """Take the positive's similarities as a fixed target in the consistency term."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.head, self.hidden, self.dimension)

    def views(self, size: int) -> tuple[View, ...]:
        return (replace(self.view, size=size),) * 2

    def build(self, parts: Parts) -> nn.ModuleDict:
        return nn.ModuleDict({"encoder": parts.encoder(head(self.head, self.dimension, self.hidden))})

    def loss(self, nets: Nets, step: Step) -> Output:
        both = unit(several(nets["encoder"], torch.stack(step.views, dim=1)))  # [b, 2, D], normalised together
        everyone = step.gather(both).flatten(0, 1)  # [2B, D]; rows 2i and 2i + 1 are the views of image i
        own = torch.arange(len(everyone), device=both.device).view(-1, 2)[step.rows].flatten()  # [2b]
        partner = own ^ 1  # 0 <-> 1, 2 <-> 3, ...
        hidden = torch.stack([own, partner], dim=1)  # [2b, 2]
        compared = self.compare(everyone[own], everyone[partner], everyone, exclude=hidden, detach=self.detach_target)
        return self.objective(step, (1, compared))

    def idle(self) -> Mapping[str, str]:
        term = super().idle()
        return {**term, "detach_target": term["ramp_up"]} if "ramp_up" in term else term


@recipe("SimCLR: negatives from the batch, 4,096 images a step, LARS")
def simclr() -> Experiment:
    """SimCLR (Chen et al. 2020, section 2 and appendix B): batch 4,096, LARS, 100 epochs with 10 of warm-up."""
    return Experiment(
        epochs=100,
        batch_size=4096,
        network=Network(groups=1),  # batch statistics over all of it
        method=SimCLR(tau_consistency=0.05),
        optimisation=Optimisation(
            optimiser="lars", base_learning_rate=0.3, weight_decay=1e-6, decay="matrices", warm_up=0.1
        ),
    )


@recipe("SimCLR with the consistency term")
def co2_simclr() -> Experiment:
    """SimCLR with CO2. The paper gives no numbers for it; these are its MoCo v2 settings."""
    return simclr().edit(method={"alpha": 0.3})


@recipe("SimCLR for 32 to 64 pixel images")
def simclr_small() -> Experiment:
    """SimCLR for small images (its appendix B.9): no blur, colour strength 0.5, temperature 0.5. The learning rate was
    chosen with a narrow network on a part of CIFAR-10's training images (docs/SETTINGS.md)."""
    return Experiment(
        batch_size=512,
        size=32,
        network=Network(backbone="torchvision/resnet18", stem="small", groups=1),
        method=SimCLR(tau=0.5, tau_consistency=0.2, view=SMALL),
        optimisation=Optimisation(base_learning_rate=0.24, base_batch_size=512, weight_decay=5e-4, warm_up=0.05),
    )


@recipe("The same with the consistency term")
def co2_simclr_small() -> Experiment:
    """SimCLR with CO2 for small images. alpha and tau_con were chosen with a narrow network on a part of CIFAR-10's
    training images (docs/SETTINGS.md): with an instance temperature of 0.5 the term has to be soft."""
    return simclr_small().edit(method={"alpha": 1.0})
