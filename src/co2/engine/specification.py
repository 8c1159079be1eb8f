"""How a run is optimised and watched, as data. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from co2.errors import UserError


@dataclass(frozen=True)
class OptimisationSpecification:
    """Optimiser and learning-rate schedule. Shares of the run scale with the number of epochs by themselves."""

    optimiser: Literal["sgd", "lars"] = "sgd"
    """sgd, or lars for SimCLR's large batches."""
    base_learning_rate: float = 0.03
    """Learning rate at the base batch size; follows the batch size by the linear rule."""
    base_batch_size: int = 256
    """The batch size that the base learning rate is meant for."""
    learning_rate: float | None = None
    """Set this to use a learning rate as it is, whatever the batch size."""
    momentum: float = 0.9
    """Momentum of the optimiser."""
    weight_decay: float = 1e-4
    """L2 penalty on the weights."""
    schedule: Literal["step", "cosine"] = "cosine"
    """step: times `step_factor` at each milestone; cosine: down to zero along half a cosine."""
    milestones: tuple[float, ...] = ()
    """Where the step schedule drops, as shares of the run: 0.6 is epoch 120 of 200."""
    step_factor: float = 0.1
    """What the learning rate is multiplied by at each milestone."""
    warm_up: float = 0.0
    """Share of the run in which the learning rate rises linearly from zero."""

    def __post_init__(self) -> None:
        for name in ("base_learning_rate", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"optimisation.{name} must be a number above 0; got {value}.")
        if not 0 <= self.momentum < 1:
            raise UserError(f"optimisation.momentum must be in [0, 1); got {self.momentum}.")
        for name in ("weight_decay", "step_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"optimisation.{name} must be a number of 0 or more; got {getattr(self, name)}.")
        if self.base_batch_size < 1:
            raise UserError(f"optimisation.base_batch_size must be at least 1; got {self.base_batch_size}.")
        if not 0 <= self.warm_up < 1 or not all(0 < share < 1 for share in self.milestones):
            raise UserError(
                "optimisation.warm_up and optimisation.milestones are shares of the run, between 0 and 1: "
                "write 0.6 for epoch 120 of 200."
            )


Step = Literal["auto", "eager", "captured", "compiled"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class ExecutionSpecification:
    """How the work is done. What comes out does not depend on it, but for rounding."""

    step: Step = "auto"
    """eager: as written; captured: replayed as a CUDA graph; compiled: by torch.compile and then captured, which takes
    a minute to start and more memory; auto: captured on a GPU, eager elsewhere and between several processes."""
    precision: Precision = "auto"
    """What encoders compute in; weights, losses and statistics are float32 in any case. auto: bfloat16 on a GPU, where
    nothing else is to be had, and float32 on a CPU. CPUs with instructions for it (avx512_bf16, amx) are
    faster in bfloat16, 1.4 to 1.7 times where it was measured; others are slower. A run keeps what it was begun
    with."""
    input: Literal["auto", "resident", "jpeg", "workers"] = "auto"
    """resident: all images on the GPU, augmented there; jpeg: decoded and augmented on the GPU; workers: by processes
    on the CPU; auto: the first of these that the data, the memory and the device allow."""
    deterministic: bool = False
    """On a GPU: the same bits every time, also after a resume, with slower convolutions. On a CPU they always are."""
    resident_gib: float | None = None
    """GPU memory for resident images; by default a quarter of what is free."""

    def __post_init__(self) -> None:
        if self.resident_gib is not None and not 0 <= self.resident_gib < math.inf:
            raise UserError(f"execution.resident_gib must be a number, 0 or more; got {self.resident_gib}.")


@dataclass(frozen=True)
class MonitoringSpecification:
    """What is measured while a run goes on, and how often."""

    log_every: int = 20
    """Steps between two lines in metrics.jsonl."""
    evaluate_every: int = 1
    """Epochs between two measurements of label-free health and kNN accuracy; the last epoch always has one."""
    health_images: int = 2048
    """Images, in two views each, on which alignment, uniformity and effective rank are measured."""
    bank_images: int = 50_000
    """At most this many labelled images are looked up by the kNN classifier."""
    query_images: int = 10_000
    """At most this many labelled images are classified by it."""
    checkpoint_minutes: float = 15.0
    """Longest time between two checkpoints; one is also written after every epoch that is not shorter than
    checkpoint_seconds."""
    checkpoint_seconds: float = 10.0
    """Shortest time between two checkpoints: epochs may take less than a second."""
    keep_every: int = 0
    """Epochs between checkpoints that are kept for good, beside the last three; 0 keeps none."""

    def __post_init__(self) -> None:
        fewest = {"log_every": 1, "evaluate_every": 1, "health_images": 2, "bank_images": 2, "query_images": 1}
        for name, least in fewest.items():
            if getattr(self, name) < least:
                raise UserError(f"monitoring.{name} must be at least {least}; got {getattr(self, name)}.")
        for name in ("checkpoint_minutes", "checkpoint_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(
                    f"monitoring.{name} must be a number, 0 or more, a large one for hardly ever; got "
                    f"{getattr(self, name)}."
                )
        if self.keep_every < 0:
            raise UserError(f"monitoring.keep_every must be 0 or more; got {self.keep_every}.")
