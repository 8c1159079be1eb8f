"""The published settings as values, by name: print them, edit them, pass them to `co2.pretrain`.

Each stands in the file of its method. Numbers come from the CO2 paper's appendix A.1 and, for the methods it builds on,
from their own papers.
"""

from __future__ import annotations

from typing import Any

from co2.errors import UserError, did_you_mean
from co2.experiment import RECIPES as _RECIPES
from co2.experiment import Experiment
from co2.method import load_methods


def get(name: str) -> Experiment:
    """The recipe of this name."""
    load_methods()
    if name not in _RECIPES:
        raise UserError(f"There is no recipe '{name}'.{did_you_mean(name, _RECIPES)} `co2 recipes` lists them all.")
    return _RECIPES[name].build()


def __getattr__(name: str) -> Any:
    """RECIPES, or one of them by the name of its function: `recipes.co2_v2()`."""
    if name.startswith("__"):
        raise AttributeError(name)
    load_methods()
    if name == "RECIPES":
        return _RECIPES
    recipe = _RECIPES.get(name.replace("_", "-"))
    if recipe is None:
        raise AttributeError(f"co2.recipes has no recipe '{name}'")
    return recipe.build
