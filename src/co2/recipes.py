"""The published settings as values: print them, edit them, pass them to `co2.pretrain`.

Numbers come from the CO2 paper's appendix A.1 and, for the methods it builds on, from their own papers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from co2.config import Experiment
from co2.engine.specification import MonitoringSpecification, OptimisationSpecification
from co2.errors import UserError, did_you_mean
from co2.networks.specification import EncoderSpecification
from co2.objective.specification import NegativesSpecification, ObjectiveSpecification
from co2.views.view import moco_v1_views, moco_v2_views, simclr_views, small_views


@dataclass(frozen=True)
class Recipe:
    """A named experiment and one line about it."""

    name: str
    summary: str
    build: Callable[[], Experiment]


def moco_v1() -> Experiment:
    """MoCo (He et al. 2020), as the CO2 paper runs it: batch 256 in 4 groups of batch statistics."""
    return Experiment(
        recipe="moco-v1",
        views=moco_v1_views(),
        encoder=EncoderSpecification(head="linear"),
        negatives=NegativesSpecification(source="queue", size=65_536, momentum=0.999),
        # The consistency term is only measured here (alpha 0), at the temperature that CO2 trains with.
        objective=ObjectiveSpecification(tau_instance=0.07, tau_consistency=0.04),
        # Learning rate 0.03, times 0.1 after 120 and 160 of 200 epochs.
        optimisation=OptimisationSpecification(schedule="step", milestones=(0.6, 0.8)),
    )


def co2_v1() -> Experiment:
    """MoCo with CO2 (paper, section 3.1): alpha 10, tau_con 0.04."""
    return moco_v1().edit(recipe="co2-v1", objective={"alpha": 10.0})


def moco_v2() -> Experiment:
    """MoCo v2 (Chen et al. 2020): MLP head, stronger augmentation, cosine schedule."""
    return Experiment(
        recipe="moco-v2",
        views=moco_v2_views(),
        encoder=EncoderSpecification(head="mlp"),
        negatives=NegativesSpecification(source="queue", size=65_536, momentum=0.999),
        objective=ObjectiveSpecification(tau_instance=0.2, tau_consistency=0.05),
        optimisation=OptimisationSpecification(schedule="cosine"),
    )


def co2_v2() -> Experiment:
    """MoCo v2 with CO2 (paper, section 3.1): alpha 0.3, tau_con 0.05."""
    return moco_v2().edit(recipe="co2-v2", objective={"alpha": 0.3})


def moco_label_smoothing() -> Experiment:
    """MoCo with label smoothing instead of consistency (paper, section 3.5), which does worse than MoCo alone.

    The paper says "a small constant" without a number; 0.1 is the usual choice (Szegedy et al. 2016).
    """
    return moco_v1().edit(recipe="moco-label-smoothing", objective={"label_smoothing": 0.1})


def simclr() -> Experiment:
    """SimCLR (Chen et al. 2020, section 2 and appendix B): batch 4,096, LARS, 100 epochs with 10 of warm-up."""
    return Experiment(
        recipe="simclr",
        epochs=100,
        batch_size=4096,
        views=simclr_views(),
        encoder=EncoderSpecification(head="mlp", groups=1, shuffle_keys=False),  # batch statistics over all of it
        negatives=NegativesSpecification(source="in-batch"),
        objective=ObjectiveSpecification(tau_instance=0.1, tau_consistency=0.05),
        optimisation=OptimisationSpecification(
            optimiser="lars", base_learning_rate=0.3, weight_decay=1e-6, schedule="cosine", warm_up=0.1
        ),
    )


def co2_simclr() -> Experiment:
    """SimCLR with CO2. The paper gives no numbers for it; these are its MoCo v2 settings."""
    return simclr().edit(recipe="co2-simclr", objective={"alpha": 0.3})


def insdisc() -> Experiment:
    """InsDisc (Wu et al. 2018): 4,096 rows of a memory bank with momentum 0.5, one view of each image.

    The loss is InfoNCE over the sampled rows, as in the memory-bank comparison of the MoCo paper, in place of
    InsDisc's noise-contrastive estimate of the same softmax.
    """
    return Experiment(
        recipe="insdisc",
        views=moco_v1_views(),
        encoder=EncoderSpecification(head="linear", groups=1, shuffle_keys=False),
        negatives=NegativesSpecification(source="memory-bank", size=4096, momentum=0.5),
        objective=ObjectiveSpecification(tau_instance=0.07, tau_consistency=0.04),
        optimisation=OptimisationSpecification(schedule="step", milestones=(0.6, 0.8)),
    )


def co2_insdisc() -> Experiment:
    """InsDisc with CO2. The paper gives no numbers for it; these are its MoCo v1 settings."""
    return insdisc().edit(recipe="co2-insdisc", objective={"alpha": 10.0})


def moco_small() -> Experiment:
    """MoCo for images of 32 to 64 pixels, after the MoCo authors' CIFAR-10 notebook.

    The learning rate is twice the notebook's, and warmed up: without, the embeddings collapse onto a few dimensions in
    the first epochs. Both were chosen on a part of CIFAR-10's training images, by MoCo alone as much as by CO2
    (docs/SETTINGS.md).
    """
    return Experiment(
        recipe="moco-small",
        batch_size=512,
        views=small_views(32),
        encoder=EncoderSpecification(backbone="torchvision/resnet18", stem="small", head="linear"),
        negatives=NegativesSpecification(source="queue", size=4096, momentum=0.99),
        objective=ObjectiveSpecification(tau_instance=0.1, tau_consistency=0.2),
        optimisation=OptimisationSpecification(
            base_learning_rate=0.12, base_batch_size=512, weight_decay=5e-4, warm_up=0.05
        ),
    )


def co2_small() -> Experiment:
    """MoCo with CO2 for small images.

    alpha and tau_con were chosen on a part of CIFAR-10's training images, in runs of 200 epochs (docs/SETTINGS.md). The
    paper's own, 10 and 0.04, are far too strong at this scale: what counts is about alpha / tau_con^2. With a hundred
    classes in place of ten (Tiny-ImageNet-100) a weight that rises over the whole run did better (`ramp_up` 1), in
    the runs there are, of one seed each.
    """
    return moco_small().edit(recipe="co2-small", objective={"alpha": 20.0})


def moco_label_smoothing_small() -> Experiment:
    """MoCo with label smoothing for small images."""
    return moco_small().edit(recipe="moco-label-smoothing-small", objective={"label_smoothing": 0.1})


def simclr_small() -> Experiment:
    """SimCLR for small images (its appendix B.9): no blur, colour strength 0.5, temperature 0.5. The learning rate was
    chosen with a narrow network on a part of CIFAR-10's training images (docs/SETTINGS.md)."""
    return Experiment(
        recipe="simclr-small",
        batch_size=512,
        views=small_views(32),
        encoder=EncoderSpecification(
            backbone="torchvision/resnet18", stem="small", head="mlp", groups=1, shuffle_keys=False
        ),
        negatives=NegativesSpecification(source="in-batch"),
        objective=ObjectiveSpecification(tau_instance=0.5, tau_consistency=0.2),
        optimisation=OptimisationSpecification(
            base_learning_rate=0.24, base_batch_size=512, weight_decay=5e-4, warm_up=0.05
        ),
    )


def co2_simclr_small() -> Experiment:
    """SimCLR with CO2 for small images. alpha and tau_con were chosen with a narrow network on a part of CIFAR-10's
    training images (docs/SETTINGS.md): with an instance temperature of 0.5 the term has to be soft."""
    return simclr_small().edit(recipe="co2-simclr-small", objective={"alpha": 1.0})


def insdisc_small() -> Experiment:
    """InsDisc for small images. Its bank is an epoch old, and takes smaller steps than MoCo's queue: half the learning
    rate, chosen with a narrow network on a part of CIFAR-10's training images (results/LOG.md, insdisc-small)."""
    return moco_small().edit(
        recipe="insdisc-small",
        encoder={"groups": 1, "shuffle_keys": False},
        negatives={"source": "memory-bank", "momentum": 0.5},
        objective={"tau_consistency": 0.1},
        optimisation={"base_learning_rate": 0.06},
    )


def co2_insdisc_small() -> Experiment:
    """InsDisc with CO2 for small images. alpha, which rises over the whole run, and tau_con were chosen with a narrow
    network on a part of CIFAR-10's training images (docs/SETTINGS.md)."""
    return insdisc_small().edit(recipe="co2-insdisc-small", objective={"alpha": 3.0, "ramp_up": 1.0})


def demo_moco() -> Experiment:
    """A network and a schedule small enough for a minute or two on one CPU core, on pictures that co2 renders itself.

    Grey views in seven of ten cases, and none with another hue: telling these pictures apart by colour is easy and
    teaches little about shape. The warm-up, alpha and tau_con were chosen on pictures put aside
    (results/LOG.md, demo-shapes).
    """
    return Experiment(
        recipe="demo-moco",
        data="shapes:3000:32",
        epochs=20,
        batch_size=64,
        workers=0,
        views=dataclasses.replace(
            small_views(32), crop_scale=(0.5, 1.0), jitter=(0.6, 0.6, 0.4, 0.0), grey_probability=0.7
        ),
        encoder=EncoderSpecification(backbone="co2/resnet10-narrow", stem="small-stride-2", head="linear"),
        negatives=NegativesSpecification(source="queue", size=512, momentum=0.99),
        objective=ObjectiveSpecification(tau_instance=0.1, tau_consistency=0.4),
        optimisation=OptimisationSpecification(
            base_learning_rate=0.03, base_batch_size=64, weight_decay=5e-4, warm_up=0.1
        ),
        monitoring=MonitoringSpecification(log_every=10, evaluate_every=4, health_images=512),
    )


def demo_co2() -> Experiment:
    """The demo with the consistency term."""
    return demo_moco().edit(recipe="demo-co2", objective={"alpha": 3.0, "ramp_up": 1.0})


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("moco-v1", "MoCo: ResNet-50, queue of 65,536, linear head, 200 epochs", moco_v1),
        Recipe("co2-v1", "MoCo with the consistency term: the paper's main result", co2_v1),
        Recipe("moco-v2", "MoCo v2: MLP head, blur, cosine schedule", moco_v2),
        Recipe("co2-v2", "MoCo v2 with the consistency term", co2_v2),
        Recipe("moco-label-smoothing", "MoCo with label smoothing: the paper's ablation", moco_label_smoothing),
        Recipe("simclr", "SimCLR: negatives from the batch, 4,096 images a step, LARS", simclr),
        Recipe("co2-simclr", "SimCLR with the consistency term", co2_simclr),
        Recipe("insdisc", "InsDisc: negatives from a memory bank, one view of each image", insdisc),
        Recipe("co2-insdisc", "InsDisc with the consistency term", co2_insdisc),
        Recipe("moco-small", "MoCo for 32 to 64 pixel images: ResNet-18, small stem", moco_small),
        Recipe("co2-small", "The same with the consistency term", co2_small),
        Recipe("moco-label-smoothing-small", "The same with label smoothing instead", moco_label_smoothing_small),
        Recipe("simclr-small", "SimCLR for 32 to 64 pixel images", simclr_small),
        Recipe("co2-simclr-small", "The same with the consistency term", co2_simclr_small),
        Recipe("insdisc-small", "InsDisc for 32 to 64 pixel images", insdisc_small),
        Recipe("co2-insdisc-small", "The same with the consistency term", co2_insdisc_small),
        Recipe("demo-moco", "A minute on one CPU core: MoCo on rendered shapes", demo_moco),
        Recipe("demo-co2", "The same with the consistency term", demo_co2),
    )
}


def get(name: str) -> Experiment:
    """The recipe of this name."""
    if name not in RECIPES:
        raise UserError(f"There is no recipe '{name}'.{did_you_mean(name, RECIPES)} `co2 recipes` lists them all.")
    return RECIPES[name].build()
