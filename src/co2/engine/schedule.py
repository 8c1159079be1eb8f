"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from co2.experiment import Optimisation
from co2.method import Schedule


def learning_rate(settings: Optimisation, peak: float, step: int, steps: int, own: Schedule | None = None) -> float:
    """Learning rate of step 0..steps-1 of a run that has `steps` of them; `own` is what a network has in place of the
    schedule of the others."""
    progress = step / steps  # share of the run that lies behind this step
    if own is not None:
        return peak * own(progress)
    if progress < settings.warm_up:
        return peak * (step + 1) / math.ceil(settings.warm_up * steps)
    if settings.schedule == "constant":
        return peak
    if settings.schedule == "step":
        passed = sum(progress >= milestone for milestone in settings.milestones)
        return peak * float(settings.step_factor**passed)
    after_warm_up = (progress - settings.warm_up) / (1 - settings.warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * after_warm_up))
