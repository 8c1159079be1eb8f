"""The one call that serves every method and every source of negatives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from co2.errors import did_you_mean
from co2.objective.reference import reference
from co2.objective.specification import Backend

BACKENDS: tuple[Backend, ...] = ("auto", "reference", "fused")


class Contrast(NamedTuple):
    """What a batch of queries scores against its positives and negatives, row by row."""

    instance: Tensor  # [B] L_ins: cross entropy of finding the positive among the K + 1 candidates
    consistency: Tensor | None  # [B] L_con: symmetric KL of query's and positive's similarities to the negatives
    rank: Tensor  # [B] int64: how many negatives score above the positive; 0 is a query that found its instance


def contrast(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    *,
    tau_instance: float = 0.2,
    tau_consistency: float | None = 0.05,
    label_smoothing: float = 0.0,
    exclude: Tensor | None = None,
    detach_target: bool = False,
    backend: Backend = "auto",
) -> Contrast:
    """InfoNCE and the consistency term of CO2 for each query.

    Args:
        query: [B, D] unit rows.
        positive: [B, D] unit rows; row i is another view of the image of query i.
        negatives: [K, D] unit rows, shared by all queries.
        tau_instance: temperature of instance discrimination.
        tau_consistency: temperature of the consistency term, or None to leave that term out.
        label_smoothing: share of the instance target spread evenly over the positive and the negatives.
        exclude: [B, E] integers: columns of `negatives` that a row must not see (itself, say). An entry that is no
            column, such as -1, excludes nothing; naming a column twice is naming it once.
        detach_target: pass no gradient through the positive's similarities in the consistency term.
        backend: "reference" (plain PyTorch), "fused" (one kernel, CUDA), or "auto" for whichever fits.

    Returns:
        `Contrast(instance, consistency, rank)`, each [B]. The losses are float32, or float64 for float64 inputs.
        A row whose columns are all excluded has nothing to be told apart from: both its losses are 0.
    """
    _check(query, positive, negatives, tau_instance, tau_consistency, label_smoothing, exclude, backend)
    if backend == "fused":
        raise ValueError("backend='fused' is not available in this version. Use backend='auto' or 'reference'.")
    return Contrast(
        *reference(query, positive, negatives, tau_instance, tau_consistency, label_smoothing, exclude, detach_target)
    )


class CO2Loss(nn.Module):
    """L = L_ins + alpha * L_con, averaged over the batch: `contrast` as a module for somebody else's training loop."""

    def __init__(
        self,
        alpha: float = 0.3,
        tau_instance: float = 0.2,
        tau_consistency: float = 0.05,
        label_smoothing: float = 0.0,
        detach_target: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if not alpha >= 0:
            raise ValueError(f"alpha must be 0 or more; got {alpha}.")
        _check_settings(tau_instance, tau_consistency, label_smoothing, backend)
        self.alpha = alpha
        self.tau_instance = tau_instance
        self.tau_consistency = tau_consistency
        self.label_smoothing = label_smoothing
        self.detach_target = detach_target
        self.backend: Backend = backend

    def forward(self, query: Tensor, positive: Tensor, negatives: Tensor, exclude: Tensor | None = None) -> Tensor:
        """The scalar loss of [B, D] queries with their [B, D] positives against [K, D] negatives."""
        terms = contrast(
            query,
            positive,
            negatives,
            tau_instance=self.tau_instance,
            tau_consistency=self.tau_consistency if self.alpha > 0 else None,
            label_smoothing=self.label_smoothing,
            exclude=exclude,
            detach_target=self.detach_target,
            backend=self.backend,
        )
        loss = terms.instance if terms.consistency is None else terms.instance + self.alpha * terms.consistency
        return loss.mean()

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, tau_instance={self.tau_instance}, tau_consistency={self.tau_consistency}"


def _check_settings(tau_instance: float, tau_consistency: float | None, label_smoothing: float, backend: str) -> None:
    for name, tau in (("tau_instance", tau_instance), ("tau_consistency", tau_consistency)):
        if tau is not None and not 0 < tau < float("inf"):
            raise ValueError(f"{name} is a temperature and must be a number above 0; got {tau}.")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1); got {label_smoothing}.")
    if backend not in BACKENDS:
        raise ValueError(
            f"There is no backend '{backend}': use one of {', '.join(BACKENDS)}.{did_you_mean(backend, BACKENDS)}"
        )


def _check(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    tau_instance: float,
    tau_consistency: float | None,
    label_smoothing: float,
    exclude: Tensor | None,
    backend: str,
) -> None:
    _check_settings(tau_instance, tau_consistency, label_smoothing, backend)
    for name, tensor in (("query", query), ("positive", positive), ("negatives", negatives)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a matrix with one embedding in each row; got {shape}.")
        if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} must be floating point; got {tensor.dtype}.")
        if tensor.dtype != query.dtype:
            raise ValueError(
                f"query is {query.dtype} and {name} is {tensor.dtype}: give all three the same dtype, "
                f"for instance {name}.to(query.dtype)."
            )
        if tensor.device != query.device:
            raise ValueError(f"query is on {query.device} and {name} on {tensor.device}: move them to one device.")
    if positive.shape != query.shape:
        raise ValueError(
            f"query and positive must have the same shape [B, D]; got {list(query.shape)} and {list(positive.shape)}."
        )
    if negatives.shape[1] != query.shape[1]:
        raise ValueError(
            f"negatives must be [K, D] with the queries' D = {query.shape[1]}; got {list(negatives.shape)}."
        )
    if 0 in query.shape or 0 in negatives.shape:
        raise ValueError(
            f"There is nothing to contrast: query is {list(query.shape)} and negatives {list(negatives.shape)}."
        )
    if exclude is not None:
        if exclude.dim() != 2 or len(exclude) != len(query):
            raise ValueError(
                f"exclude must be [B, E] with one row for each of the {len(query)} queries; got {list(exclude.shape)}."
            )
        if exclude.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"exclude holds column numbers and must be int64 or int32; got {exclude.dtype}.")
        if exclude.device != query.device:
            raise ValueError(f"query is on {query.device} and exclude on {exclude.device}: move them to one device.")
