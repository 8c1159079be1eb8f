"""The settings of the objective and of where its negatives come from, as data. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from co2.errors import UserError

Backend = Literal["auto", "reference", "fused"]
Precision = Literal["fast", "full"]


Form = Literal["symmetric-kl", "kl", "reverse-kl", "jsd", "mse", "mse-logits", "soft-label"]
TargetView = Literal["key", "weak"]


@dataclass(frozen=True)
class Consistency:
    """The consistency term as one value: what is compared, how sharply, how strongly and when.

    The target P is the softmax of the positive's similarities to the negatives, the prediction Q that of the query's.
    The defaults are the paper's term for MoCo v2 (section 3.1).
    """

    form: Form = "symmetric-kl"
    """symmetric-kl: half of KL(P|Q) and half of KL(Q|P), as in the paper. kl: KL(P|Q) alone, P as a pseudo-label.
    reverse-kl: KL(Q|P). jsd: Jensen-Shannon, a quarter of the paper's form where P and Q are close. mse: squared
    differences of probabilities, summed. mse-logits: variance of the differences of the scaled similarities.
    soft-label: cross entropy of the instance term's own prediction with a label that is mixed of the instance
    (`own_label`) and of P (the rest), as in SCE (Denize et al. 2023)."""
    weight: float = 0.3
    """How much the term counts beside the instance term (alpha in the paper). Of a soft label: how far the label of the
    instance term is replaced by the soft one, 1 for all the way."""
    temperature: float = 0.05
    """Temperature of the prediction Q. A soft label's prediction is the instance term's, with its temperature."""
    target_temperature: float | None = None
    """Temperature of the target P; below that of the prediction, the target is the sharper. None: the same."""
    own_label: float = 0.5
    """Share of a soft label that the instance itself keeps: at 1 it is the instance term, at 0 the target alone."""
    start: float = 0.0
    """Share of the run before the term begins to count."""
    ramp_up: float = 0.0
    """Share of the run, from `start` on, over which the weight rises from 0.7% of its value to all of it, as
    consistency terms do elsewhere (Laine and Aila 2017)."""
    target_gradient: bool = True
    """Let gradients through the target. Changes nothing where it has none anyway: in a queue or a memory bank."""
    centred: bool = False
    """Compare directions as seen from the mean of the negatives, and not from the origin: embeddings that all lie close
    together have similarities that are all alike, and a term that is small for no merit of theirs. Of a soft label,
    whose prediction is the instance term's, only the target is centred."""
    target_view: TargetView = "key"
    """Which view the target comes from: the key's, as in the paper, or a weakly augmented one."""

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise UserError(f"There is no consistency term '{self.form}': give one of {', '.join(get_args(Form))}.")
        if not 0 <= self.weight < math.inf:
            raise UserError(f"The weight of the consistency term must be a number, 0 or more; got {self.weight}.")
        if self.form == "soft-label" and self.weight > 1:
            raise UserError(
                f"The weight of a soft label is how far it replaces the instance's own, at most 1; got {self.weight}."
            )
        for name in ("temperature", "target_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} of the consistency term must be a number above 0; got {value}.")
        for name in ("own_label", "start", "ramp_up"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(
                    f"{name} of the consistency term is a share, between 0 and 1; got {getattr(self, name)}."
                )

    @property
    def sharpness(self) -> float:
        """The temperature of the target."""
        return self.temperature if self.target_temperature is None else self.target_temperature

    def weight_at(self, progress: float) -> float:
        """The weight where a share `progress` of the run lies behind: the square of the way to go, in an exponent."""
        if progress < self.start:
            return 0.0
        if progress >= self.start + self.ramp_up:
            return self.weight
        return self.weight * math.exp(-5 * (1 - (progress - self.start) / self.ramp_up) ** 2)


# The paper's own terms, the ablations that its LaTeX source has commented out (weights of equal strength where P and Q
# are close; MSE has no such weight, since how flat P is decides), and what came of the idea later.
CONSISTENCY_PRESETS = {
    "paper-v1": Consistency(weight=10.0, temperature=0.04),
    "paper-v2": Consistency(weight=0.3, temperature=0.05),
    "paper-kl": Consistency("kl", weight=0.3, temperature=0.05, target_gradient=False),
    "paper-jsd": Consistency("jsd", weight=1.2, temperature=0.05),
    "paper-mse": Consistency("mse", weight=30.0, temperature=0.05),
    "sce": Consistency(
        "soft-label", weight=1.0, target_temperature=0.05, own_label=0.5, target_gradient=False, target_view="weak"
    ),
    "eir": Consistency(
        "kl", weight=1.0, temperature=0.1, target_temperature=0.04, target_gradient=False, target_view="weak"
    ),
}


@dataclass(frozen=True)
class ObjectiveSpecification:
    """L = L_ins + alpha * L_con (paper, section 2.2)."""

    alpha: float = 0.0
    """Weight of the consistency term. At 0 the term is measured but not trained on: plain MoCo, SimCLR or InsDisc."""
    ramp_up: float = 0.0
    """Share of the run over which alpha rises from 0.7% of its value to all of it, as consistency terms do elsewhere
    (Laine and Aila 2017). At 0, as in the paper, it has its value from the first step on."""
    tau_instance: float = 0.2
    """Temperature of instance discrimination (InfoNCE)."""
    tau_consistency: float = 0.05
    """Temperature of the two similarity distributions that the consistency term compares."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the positive and all negatives (the paper's ablation)."""
    detach_target: bool = False
    """Take the positive's similarities as a fixed target in the consistency term. Changes nothing for a queue or a
    memory bank, whose positives carry no gradient anyway."""
    backend: Backend = "auto"
    """Which implementation computes it: the plain one, the fused kernel, or whichever fits the device."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise UserError(f"objective.alpha must be a number, 0 or more; got {self.alpha}.")
        if not 0 <= self.ramp_up <= 1:
            raise UserError(f"objective.ramp_up is a share of the run, between 0 and 1; got {self.ramp_up}.")
        for name in ("tau_instance", "tau_consistency"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(
                    f"objective.{name} is a temperature and must be a number above 0; got {getattr(self, name)}."
                )
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"objective.label_smoothing must be in [0, 1); got {self.label_smoothing}.")


@dataclass(frozen=True)
class NegativesSpecification:
    """Where the negatives come from: the mechanism that makes the method."""

    source: Literal["queue", "in-batch", "memory-bank"] = "queue"
    """queue (MoCo), in-batch (SimCLR) or memory-bank (InsDisc)."""
    size: int = 65536
    """Negatives per query: the length of the queue, or how many rows are sampled from the memory bank. In-batch
    negatives are as many as the batch holds."""
    momentum: float = 0.999
    """Queue: how slowly the key encoder follows. Memory bank: how slowly a row follows its image's feature."""
    symmetric: bool = False
    """Queue: let each of the two views be query and key in turn, and add up the two losses, as the MoCo authors do."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"negatives.size must be at least 1; got {self.size}.")
        if not 0 <= self.momentum < 1:
            raise UserError(f"negatives.momentum must be in [0, 1); got {self.momentum}.")
        if self.symmetric and self.source != "queue":
            raise UserError(f"negatives.symmetric is for the queue; '{self.source}' has no key encoder. Leave it out.")

    @property
    def views_per_image(self) -> int:
        """How many views of an image a step needs: the other one may be remembered."""
        return 1 if self.source == "memory-bank" else 2
