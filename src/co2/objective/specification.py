"""The settings of the objective and of where its negatives come from, as data. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from co2.errors import UserError

Backend = Literal["auto", "reference", "fused"]
Precision = Literal["fast", "full"]


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
