"""SGD, and LARS for large batches, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from co2.engine.specification import OptimisationSpecification


def build_optimiser(
    module: nn.Module, specification: OptimisationSpecification, rate: float | Tensor
) -> torch.optim.Optimizer:
    """The optimiser for the parameters of `module` that are trained.

    The schedule sets the learning rate each step. Where `rate` is a tensor, a captured step can read it from there.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if specification.optimiser == "lars":
        return Lars(parameters, rate, specification.momentum, specification.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=rate,
        momentum=specification.momentum,
        weight_decay=specification.weight_decay,
        fused=True,
    )


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017) as SimCLR uses it: biases and the parameters of
    normalisation layers, which are vectors, are neither adapted nor decayed."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rate: float | Tensor,
        momentum: float,
        weight_decay: float,
        trust: float = 0.001,
    ) -> None:
        super().__init__(parameters, {"lr": rate, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

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
        if parameter.ndim > 1:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
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
