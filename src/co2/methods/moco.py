"""MoCo: keys from a slowly moving copy of the encoder, negatives from a queue of past keys (He et al. 2020).

    key <- m key + (1 - m) query      (equation 2); keys are shuffled between groups of batch statistics (section 3.3)

With `alpha` it is CO2 (Wei et al. 2021); with `symmetric` each view is query and key in turn (the authors' notebook).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from co2.errors import UserError
from co2.experiment import Experiment, Monitoring, Optimisation, recipe
from co2.lazily import nn, torch
from co2.method import Draw, Nets, Output, Seen, Step, Trouble
from co2.methods.contrastive import Contrastive
from co2.methods.parts import Permutation, unit
from co2.networks.heads import Head, head
from co2.networks.settings import Network
from co2.philox import Stream
from co2.views.view import View

if TYPE_CHECKING:
    from torch import Tensor

    from co2.networks.parts import Parts

# Grey before a colour jitter that is always applied, as InsDisc has it; weaker hue and blur; for 32 to 64 pixels crops
# from 8% of the area, torchvision's default, and no blur (the authors' CIFAR-10 notebook).
V1 = View(jitter=(0.4, 0.4, 0.4, 0.4), jitter_probability=1.0, grey_first=True, blur_probability=0.0)
V2 = View(jitter=(0.4, 0.4, 0.4, 0.1), blur_probability=0.5)
SMALL = View(crop_scale=(0.08, 1.0), blur_probability=0.0)


@dataclass(frozen=True, kw_only=True)
class MoCo(Contrastive):
    """Settings of MoCo."""

    view: View = V2
    """How both views are made."""
    head: Head = "mlp"
    """What projects features: one layer (v1), or mlp: one hidden layer with ReLU (v2)."""
    hidden: int | None = None
    """Width of the mlp's hidden layer; by default as wide as the backbone's features."""
    dimension: int = 128
    """Length of the unit vectors that are contrasted."""
    queue: int = 65_536
    """How many past keys are the negatives."""
    momentum: float = 0.999
    """How slowly the key encoder follows."""
    shuffle: bool = True
    """Shuffle keys across the groups of batch statistics before the key encoder, so that these do not give away the
    positive."""
    symmetric: bool = False
    """Let each of the two views be query and key in turn, and add up the two losses, as the MoCo authors do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.head, self.hidden, self.dimension)
        if self.queue < 1:
            raise UserError(f"method.queue must be at least 1; got {self.queue}.")
        if not 0 <= self.momentum < 1:
            raise UserError(f"method.momentum must be in [0, 1); got {self.momentum}.")

    def views(self, size: int) -> tuple[View, ...]:
        return (replace(self.view, size=size),) * 2

    def draws(self) -> Mapping[str, Draw]:
        return {"order": Permutation(stream=Stream.KEY_SHUFFLE)} if self.shuffle else {}

    def build(self, parts: Parts) -> nn.ModuleDict:
        encoder = parts.encoder(head(self.head, self.dimension, self.hidden))
        queue = parts.queue(self.queue, self.dimension)
        return nn.ModuleDict({"encoder": encoder, "key_encoder": parts.slow_copy(encoder), "queue": queue})

    def loss(self, nets: Nets, step: Step) -> Output:
        query, positive, keys = self.encode(nets, step)
        compared = self.compare(query, positive, nets["queue"].rows)
        output = self.objective(step, (2 if self.symmetric else 1, compared))  # two directions are a sum, not a mean
        return replace(output, kept={"keys": keys})

    def encode(self, nets: Nets, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, D], their keys [b, D] (both [2b, D] where symmetric), and all keys of the batch [B, D]."""
        ways = ((0, 1), (1, 0)) if self.symmetric else ((0, 1),)
        keys = [unit(step.keys(nets["key_encoder"], view=key, order="order")) for _, key in ways]  # [B, D]
        query = torch.cat([unit(nets["encoder"](step.views[view])) for view, _ in ways])
        return query, torch.cat([key[step.rows] for key in keys]), torch.cat(keys)

    def update(self, nets: Nets, step: Step, output: Output) -> None:
        nets["key_encoder"].follow(nets["encoder"], self.momentum)
        nets["queue"].push(output.kept["keys"])

    @property
    def encoded(self) -> int:
        return 2 if self.symmetric else 1

    # What it says to the user.

    def check(self, batch_size: int, groups: int) -> None:
        if self.shuffle and groups == 1:
            raise UserError(
                "Shuffled keys with one group of batch statistics do nothing: every key would still be normalised "
                "with the same companions as its query, and the network could cheat. Use --network.groups 4 (or more), "
                "or --method.no-shuffle if the backbone has no BatchNorm."
            )

    def notes(self, images: int) -> tuple[str, ...]:
        if self.queue <= images:
            return ()
        return (
            f"Note: the queue holds {self.queue:,} keys and the data set only {images:,} images, so every image meets "
            f"older keys of itself as negatives. --method.queue {max(1, images // 2)} or less avoids it.",
        )

    def advice(self, seen: Seen) -> Mapping[str, str]:
        full_at = -(-self.queue // (seen.batch_size * (2 if self.symmetric else 1)))
        advice = dict(super().advice(seen))
        if seen.step <= full_at or self.queue < 256:
            advice.pop("leak", None)  # few or random keys are easy to tell apart
        if seen.step <= full_at and seen.values.get("loss", 0.0) > seen.lowest.get("loss", float("inf")):
            advice["queue fills"] = (
                "The loss is rising. That is expected: the queue starts with random vectors, which are easy to tell "
                f"apart, and real keys replace them until step {full_at:,}. It falls again after that."
            )
        return advice

    def short_cut(self, seen: Seen) -> str:
        if seen.batch_norm and not self.shuffle:
            return (
                "Batch statistics give away which key belongs to which query: use --method.shuffle with "
                "--network.groups 4 or more."
            )
        return (
            "Most often the encoder changes so fast that the older keys in the queue look different from any new one: "
            "raise --method.momentum, lower the learning rate, or shorten the queue (--method.queue)."
        )

    def remedies(self, trouble: Trouble) -> tuple[str, ...]:
        shorter, freed = max(1, self.queue // 2), self.queue * self.dimension * 4 / 2 / 2**30  # float32
        queue = f"--method.queue {shorter} frees about {freed:.2f} GiB"
        own = {"collapsed": ("a higher --method.momentum",), "memory": (queue,)}
        return (*super().remedies(trouble), *own.get(trouble, ()))


def check_head(kind: Head, hidden: int | None, dimension: int) -> None:
    """Refuse a head that cannot be."""
    if dimension < 1 or (hidden is not None and hidden < 1):
        raise UserError("method.dimension and method.hidden must be at least 1.")
    if hidden is not None and kind == "linear":
        raise UserError("A linear head has no hidden layer: leave method.hidden out, or give method.head mlp.")


@recipe("MoCo: ResNet-50, queue of 65,536, linear head, 200 epochs")
def moco_v1() -> Experiment:
    """MoCo (He et al. 2020), as the CO2 paper runs it: batch 256 in 4 groups of batch statistics.

    The consistency term is only measured here (alpha 0), at the temperature that CO2 trains with. Learning rate 0.03,
    times 0.1 after 120 and 160 of 200 epochs.
    """
    method = MoCo(tau=0.07, tau_consistency=0.04, view=V1, head="linear")
    return Experiment(method=method, optimisation=Optimisation(schedule="step", milestones=(0.6, 0.8)))


@recipe("MoCo with the consistency term: the paper's main result")
def co2_v1() -> Experiment:
    """MoCo with CO2 (paper, section 3.1): alpha 10, tau_con 0.04."""
    return moco_v1().edit(method={"alpha": 10.0})


@recipe("MoCo v2: MLP head, blur, cosine schedule")
def moco_v2() -> Experiment:
    """MoCo v2 (Chen et al. 2020): MLP head, stronger augmentation, cosine schedule."""
    return Experiment(method=MoCo(), optimisation=Optimisation(schedule="cosine"))


@recipe("MoCo v2 with the consistency term")
def co2_v2() -> Experiment:
    """MoCo v2 with CO2 (paper, section 3.1): alpha 0.3, tau_con 0.05."""
    return moco_v2().edit(method={"alpha": 0.3})


@recipe("MoCo with label smoothing: the paper's ablation")
def moco_label_smoothing() -> Experiment:
    """MoCo with label smoothing instead of consistency (paper, section 3.5), which does worse than MoCo alone.

    The paper says "a small constant" without a number; 0.1 is the usual choice (Szegedy et al. 2016).
    """
    return moco_v1().edit(method={"label_smoothing": 0.1})


@recipe("MoCo for 32 to 64 pixel images: ResNet-18, small stem")
def moco_small() -> Experiment:
    """MoCo for images of 32 to 64 pixels, after the MoCo authors' CIFAR-10 notebook.

    The learning rate is twice the notebook's, and warmed up: without, the embeddings collapse onto a few dimensions in
    the first epochs. Both were chosen on a part of CIFAR-10's training images, by MoCo alone as much as by CO2
    (docs/SETTINGS.md).
    """
    return Experiment(
        batch_size=512,
        size=32,
        network=Network(backbone="torchvision/resnet18", stem="small"),
        method=MoCo(tau=0.1, tau_consistency=0.2, view=SMALL, head="linear", queue=4096, momentum=0.99),
        optimisation=Optimisation(base_learning_rate=0.12, base_batch_size=512, weight_decay=5e-4, warm_up=0.05),
    )


@recipe("The same with the consistency term")
def co2_small() -> Experiment:
    """MoCo with CO2 for small images.

    alpha and tau_con were chosen on a part of CIFAR-10's training images, in runs of 200 epochs (docs/SETTINGS.md). The
    paper's own, 10 and 0.04, are far too strong at this scale: what counts is about alpha / tau_con^2. With a hundred
    classes in place of ten (Tiny-ImageNet-100) a weight that rises over the whole run did better (`ramp_up` 1), in
    the runs there are, of one seed each.
    """
    return moco_small().edit(method={"alpha": 20.0})


@recipe("The same with label smoothing instead")
def moco_label_smoothing_small() -> Experiment:
    """MoCo with label smoothing for small images."""
    return moco_small().edit(method={"label_smoothing": 0.1})


@recipe("A minute on one CPU core: MoCo on rendered shapes")
def demo_moco() -> Experiment:
    """A network and a schedule small enough for a minute or two on one CPU core, on pictures that co2 renders itself.

    Grey views in seven of ten cases, and none with another hue: telling these pictures apart by colour is easy and
    teaches little about shape. The warm-up, alpha and tau_con were chosen on pictures put aside
    (results/LOG.md, demo-shapes).
    """
    view = replace(SMALL, crop_scale=(0.5, 1.0), jitter=(0.6, 0.6, 0.4, 0.0), grey_probability=0.7)
    return Experiment(
        data="shapes:3000:32",
        epochs=20,
        batch_size=64,
        workers=0,
        size=32,
        network=Network(backbone="co2/resnet10-narrow", stem="small-stride-2"),
        method=MoCo(tau=0.1, tau_consistency=0.4, view=view, head="linear", queue=512, momentum=0.99),
        optimisation=Optimisation(base_learning_rate=0.03, base_batch_size=64, weight_decay=5e-4, warm_up=0.1),
        monitoring=Monitoring(log_every=10, evaluate_every=4, health_images=512),
    )


@recipe("The same with the consistency term")
def demo_co2() -> Experiment:
    """The demo with the consistency term."""
    return demo_moco().edit(method={"alpha": 3.0, "ramp_up": 1.0})
