"""Consistent Contrast: pre-train a vision backbone from unlabelled images.

The names below are imported when they are first used, so that `co2 --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from co2 import recipes as recipes
    from co2.checkpoint import load_backbone as load_backbone
    from co2.engine.pretrain import pretrain as pretrain
    from co2.errors import UserError as UserError
    from co2.evaluation.suite import evaluate as evaluate
    from co2.experiment import Experiment as Experiment
    from co2.export import export_backbone as export_backbone
    from co2.objective.contrast import CO2Loss as CO2Loss
    from co2.objective.contrast import Contrast as Contrast
    from co2.objective.contrast import contrast as contrast

__version__ = "0.1.0"

_HOME = {
    "CO2Loss": "co2.objective.contrast",
    "Contrast": "co2.objective.contrast",
    "contrast": "co2.objective.contrast",
    "Experiment": "co2.experiment",
    "evaluate": "co2.evaluation.suite",
    "export_backbone": "co2.export",
    "UserError": "co2.errors",
    "load_backbone": "co2.checkpoint",
    "pretrain": "co2.engine.pretrain",
}
__all__ = [*sorted(_HOME), "recipes"]


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return importlib.import_module("co2.recipes")
    if name not in _HOME:
        raise AttributeError(f"module 'co2' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found at once the next time, and not hidden by a module of the same name
    return value


def __dir__() -> list[str]:
    """What a notebook completes: the public names, imported or not, and no others."""
    return [*__all__, "__version__"]
