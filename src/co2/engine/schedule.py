"""The learning rate, and the weight of the consistency term, as pure functions of the step."""

from __future__ import annotations

import math

from co2.engine.specification import OptimisationSpecification
from co2.objective.specification import ObjectiveSpecification


def learning_rate(specification: OptimisationSpecification, peak: float, step: int, steps: int) -> float:
    """Learning rate of step 0..steps-1 of a run that has `steps` of them."""
    progress = step / steps  # share of the run that lies behind this step
    if progress < specification.warm_up:
        return peak * (step + 1) / math.ceil(specification.warm_up * steps)
    if specification.schedule == "step":
        passed = sum(progress >= milestone for milestone in specification.milestones)
        return peak * float(specification.step_factor**passed)
    after_warm_up = (progress - specification.warm_up) / (1 - specification.warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * after_warm_up))


def consistency_weight(specification: ObjectiveSpecification, step: int, steps: int) -> float:
    """alpha of step 0..steps-1: risen to its value after `ramp_up` of the run (Laine and Aila 2017, appendix A)."""
    progress = step / steps
    if progress >= specification.ramp_up:
        return specification.alpha
    return specification.alpha * math.exp(-5 * (1 - progress / specification.ramp_up) ** 2)
