"""Multinomial logistic regression on features that fit on one device, solved by L-BFGS to its optimum.

Minimised is the mean cross entropy plus strength / 2 times the squared weights, on features that are standardised
(mean 0 and standard deviation 1 in each dimension of the training images); the intercept is not regularised. The
problem is convex: there is one optimum, no learning rate and nothing random. scikit-learn's LogisticRegression finds
the same with C = 1 / (strength * N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.evaluation.progress import SILENT, Progress

_BLOCK_ELEMENTS = 2**27  # class scores held at a time
_PATIENCE = 3  # weaker regularisations in a row that do no better end the search


class LogisticRegression(nn.Module):
    """Class scores [N, classes] of features [N, F]."""

    def __init__(self, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.mean = mean  # [F]
        self.scale = scale  # [F]
        self.weight = weight  # [classes, F], for standardised features
        self.bias = bias  # [classes]

    def forward(self, features: Tensor) -> Tensor:
        return F.linear((features.float() - self.mean) * self.scale, self.weight, self.bias)


class Choice(NamedTuple):
    """The strength that does best on held-out images."""

    strength: float
    model: LogisticRegression  # fitted with it, without the held-out images
    tried: dict[str, float]  # accuracy in percent by strength


def choose_strength(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    held_out_labels: Tensor,
    classes: int,
    strengths: tuple[float, ...],
    iterations: int,
    progress: Progress = SILENT,
) -> Choice:
    """From strong to weak, each beginning where the last one ended. Among equals the lower loss wins."""
    tried: dict[str, float] = {}
    best: tuple[tuple[float, float], float, LogisticRegression] | None = None
    model: LogisticRegression | None = None
    worse = 0
    for strength in progress.track(sorted(strengths, reverse=True), "Regularisation", len(strengths)):
        model = fit(features, labels, classes, strength, iterations, model)
        scores = model(held_out)  # [M, classes]
        accuracy = 100 * (scores.argmax(dim=1) == held_out_labels).double().mean().item()
        quality = (accuracy, -F.cross_entropy(scores, held_out_labels).item())
        tried[f"{strength:g}"] = accuracy
        if best is None or quality > best[0]:
            best, worse = (quality, strength, model), 0
        else:
            worse += 1
            if worse == _PATIENCE:
                break
    assert best is not None
    return Choice(best[1], best[2], tried)


@torch.no_grad()
def fit(
    features: Tensor,
    labels: Tensor,
    classes: int,
    strength: float,
    iterations: int = 200,
    start: LogisticRegression | None = None,
) -> LogisticRegression:
    """The optimum for features [N, F] and labels [N]; `start` is where to begin to look for it."""
    mean = features.mean(dim=0)  # [F]
    deviation = features.std(dim=0, correction=0)
    scale = torch.where(deviation > 1e-6 * deviation.max(), 1 / deviation, 0.0)  # a constant feature tells nothing
    standardised = (features - mean).mul_(scale)  # [N, F]; in place, because features may be most of the memory
    rows = max(1, _BLOCK_ELEMENTS // classes)

    parameters = features.new_zeros(classes, features.shape[1] + 1).requires_grad_()  # weights and, last, intercept
    if start is not None:
        parameters.copy_(torch.cat([start.weight, start.bias[:, None]], dim=1))
    optimiser = torch.optim.LBFGS(
        [parameters],
        max_iter=iterations,
        max_eval=2 * iterations,
        history_size=20,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()  # once more: L-BFGS allows gradients in it, and a graph would keep the scores of every block
    def closure() -> Tensor:
        """The loss, and its gradient in `parameters.grad`: X^T (softmax(X W) - Y) / N + strength W."""
        weight, bias = parameters[:, :-1], parameters[:, -1]
        gradient = torch.zeros_like(parameters)
        gradient[:, :-1] = strength * weight
        loss = 0.5 * strength * weight.square().sum()
        for part, truth in zip(standardised.split(rows), labels.split(rows), strict=True):
            log_shares = F.log_softmax(part @ weight.T + bias, dim=1)  # [b, classes]
            loss = loss + F.nll_loss(log_shares, truth, reduction="sum") / len(labels)
            excess = log_shares.exp_()
            excess[torch.arange(len(part), device=excess.device), truth] -= 1
            excess /= len(labels)
            gradient[:, :-1] += excess.T @ part
            gradient[:, -1] += excess.sum(dim=0)
        parameters.grad = gradient
        return loss

    optimiser.step(closure)
    solution = parameters.detach()
    return LogisticRegression(mean, scale, solution[:, :-1].clone(), solution[:, -1].clone())
