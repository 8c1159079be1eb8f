"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from co2.engine.specification import OptimisationSpecification


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
