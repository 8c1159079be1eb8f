"""The settings of the objective, as data. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from co2.errors import UserError

Backend = Literal["auto", "reference", "blocks", "fused"]
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
