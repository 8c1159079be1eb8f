"""torch, imported when it is first used: files that are also asked for settings alone answer without waiting for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Later:
    """Stands for a module, and imports it when one of its names is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._name), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import torch as torch
    import torch.nn.functional as F
    from torch import nn as nn
else:
    torch, nn, F = _Later("torch"), _Later("torch.nn"), _Later("torch.nn.functional")

__all__ = ["F", "nn", "torch"]
