"""SGD and AdamW as torch has them, and LARS for large batches, which it does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from co2.experiment import Optimisation


def build_optimiser(
    nets: nn.ModuleDict, settings: Optimisation, rates: Mapping[str, float | Tensor]
) -> tuple[torch.optim.Optimizer, list[str]]:
    """The optimiser for the parameters of `nets` that are trained, and whose rate each of its groups has.

    Args:
        rates: the learning rate of each network that has one of its own, by its name, and under "" that of all others.
            The engine sets them each step; where they are tensors, a captured step can read them from there.
    """
    groups, names = [], []
    for name, rate in rates.items():
        networks = [net for key, net in nets.items() if (key if key in rates else "") == name]
        trained = [one for net in networks for one in net.parameters() if one.requires_grad]
        parts = [(trained, settings.weight_decay)]
        if settings.decay == "matrices" and settings.optimiser != "lars":
            parts = [([one for one in trained if one.ndim > 1], settings.weight_decay)]
            parts += [([one for one in trained if one.ndim <= 1], 0.0)]
        for some, decay in parts:
            if some:
                groups.append({"params": some, "lr": rate, "weight_decay": decay})
                names.append(name)
    optimiser: torch.optim.Optimizer
    if settings.optimiser == "lars":
        optimiser = Lars(groups, settings.momentum, settings.decay == "all", settings.adapt == "all")
    elif settings.optimiser == "adamw":
        on_device = any(isinstance(rate, Tensor) for rate in rates.values())
        betas = (settings.momentum, settings.beta2)
        optimiser = torch.optim.AdamW(groups, betas=betas, fused=True, capturable=on_device)
    else:
        optimiser = torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=True)
    return optimiser, names


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017). Biases and the parameters of normalisation layers are
    vectors; as SimCLR and BYOL use it, they are neither adapted nor decayed."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        momentum: float,
        decay_vectors: bool = False,
        adapt_vectors: bool = False,
        trust: float = 0.001,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0, "trust": trust})
        self.decay_vectors, self.adapt_vectors = decay_vectors, adapt_vectors

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update from the gradients that are there."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad
        if parameter.ndim > 1 or self.decay_vectors:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if parameter.ndim > 1 or self.adapt_vectors:
            weight_norm, gradient_norm = parameter.norm(), gradient.norm()
            # Where either norm is zero the rate stays as it is; on the device, so that nothing waits for it.
            rate = torch.where(
                (weight_norm > 0) & (gradient_norm > 0), group["trust"] * weight_norm / gradient_norm, 1.0
            )
            gradient = gradient * rate
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.mul_(group["momentum"]).add_(gradient * group["lr"])  # the rate inside, as in SimCLR's own code
        parameter.sub_(buffer)
