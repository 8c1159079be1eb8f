"""The one call that serves every method and every source of negatives."""

from __future__ import annotations

import os
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from co2.errors import did_you_mean
from co2.objective.blocks import in_blocks, pays
from co2.objective.reference import reference
from co2.objective.specification import Backend, Consistency, Precision

BACKENDS: tuple[Backend, ...] = ("auto", "reference", "blocks", "fused")
PRECISIONS: tuple[Precision, ...] = ("fast", "full")

# Checks the contract of `contrast` (unit rows, no NaN) on every call, at the price of waiting for the device.
DEBUG = os.environ.get("CO2_DEBUG", "0") not in ("", "0")

_told: set[str] = set()  # fallbacks that were mentioned already


class Contrast(NamedTuple):
    """What a batch of queries scores against its positives and negatives, row by row."""

    instance: Tensor  # [B] L_ins: cross entropy of finding the positive among the K + 1 candidates
    consistency: Tensor | None  # [B] L_con: how far query's and positive's similarities to the negatives are apart
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
    term: Consistency | None = None,
    target: Tensor | None = None,
    target_negatives: Tensor | None = None,
    backend: Backend = "auto",
    precision: Precision = "fast",
) -> Contrast:
    """InfoNCE and the consistency term of CO2 for each query.

    Args:
        query: [B, D] unit rows.
        positive: [B, D] unit rows; row i is another view of the image of query i.
        negatives: [K, D] unit rows, shared by all queries.
        tau_instance: temperature of instance discrimination.
        tau_consistency: temperature of the paper's consistency term, or None to leave that term out. Not looked at
            beside a `term`.
        label_smoothing: share of the instance target spread evenly over the positive and the negatives.
        exclude: [B, E] integers: columns of `negatives` that a row must not see (itself, say). An entry that is no
            column, such as -1, excludes nothing; naming a column twice is naming it once.
        detach_target: pass no gradient through the positive's similarities in the consistency term. Not looked at
            beside a `term`.
        term: the consistency term, where it is not the paper's at one temperature. `total` adds it up.
        target: [B, F] unit rows whose similarities are the target of the consistency term, in place of the positives':
            those of a weakly augmented view, or of another network.
        target_negatives: [K, F] unit rows that the target is compared with, column by column the images of
            `negatives`; by default these themselves.
        backend: "reference" (plain PyTorch), "blocks" (the same a few rows at a time, for CPUs: it holds no [B, K]
            matrix), "fused" (Triton kernels that hold none either), or "auto": fused on an NVIDIA GPU that can run it,
            blocks on CPUs where the matrix is large and negatives carry no gradient, the reference elsewhere.
        precision: how the fused kernels multiply matrices. "fast" rounds their operands to ten bits of mantissa, as
            TF32 does; "full" keeps float32 and is slower. Sums are float32 either way. The reference does not look
            at this and follows torch.set_float32_matmul_precision.

    Returns:
        `Contrast(instance, consistency, rank)`, each [B]. The losses are float32, or float64 for float64 inputs.
        A row whose columns are all excluded has nothing to be told apart from: both its losses are 0.
    """
    if term is None and tau_consistency is not None:
        _check_temperature("tau_consistency", tau_consistency)
        term = Consistency(temperature=tau_consistency, target_gradient=not detach_target)
    _check(query, positive, negatives, tau_instance, label_smoothing, exclude, backend, precision)
    _check_target(query, negatives, target, target_negatives)
    if DEBUG:
        _check_rows(query=query, positive=positive, negatives=negatives)
    arguments = (query, positive, negatives, tau_instance, term, label_smoothing, exclude)
    if _takes_fused(query, backend, why_not_streamed(term, label_smoothing, target is not None)):
        from co2.objective.fused import fused

        return Contrast(*fused(*arguments, precision == "full"))
    if backend == "blocks" or (backend == "auto" and pays(query, negatives)):
        return Contrast(*in_blocks(*arguments, target, target_negatives))
    return Contrast(*reference(*arguments, target, target_negatives))


def total(terms: Contrast, term: Consistency | None, weight: float | Tensor | None = None) -> Tensor:
    """Both terms of each row as one loss: [B].

    Args:
        terms: what `contrast` found.
        term: the consistency term it was asked for; None for the instance term alone.
        weight: the term's weight at this point of the run, where it changes; by default `term.weight`.
    """
    if term is None or terms.consistency is None:
        return terms.instance
    weight = term.weight if weight is None else weight
    if term.form == "soft-label":  # takes the place of the instance's own label as far as the weight says
        return torch.lerp(terms.instance, terms.consistency, weight)
    return terms.instance + weight * terms.consistency


def why_not_streamed(term: Consistency | None, label_smoothing: float = 0.0, other_target: bool = False) -> str | None:
    """Why a consistency term has no fused kernel and is computed with all similarities at hand, [B, K]; or None."""
    if term is None:
        return None
    if term.form in ("jsd", "mse", "mse-logits"):
        return f"the consistency term's form '{term.form}' has no kernel"
    if term.centred:
        return "the similarities of the consistency term are centred"
    if other_target:
        return "the target of the consistency term is not the positive"
    if term.form == "soft-label" and label_smoothing > 0:
        return "a soft label beside label smoothing has no kernel"
    return None


def why_not_fused(query: Tensor) -> str | None:
    """What keeps the fused kernel from taking such queries, or None."""
    try:
        from co2.objective.fused import obstacle
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return obstacle(query)


def _takes_fused(query: Tensor, backend: Backend, why_not_streamed: str | None = None) -> bool:
    if backend in ("reference", "blocks") or (backend == "auto" and query.device.type != "cuda"):
        return False
    why_not = why_not_fused(query) or why_not_streamed
    if why_not is None:
        return True
    if backend == "fused":
        raise ValueError(f"backend='fused' cannot run here: {why_not}. Use backend='auto' or 'reference'.")
    if why_not not in _told and not torch.compiler.is_compiling():
        _told.add(why_not)
        warnings.warn(f"The objective runs in plain PyTorch, not as a fused kernel: {why_not}.", stacklevel=3)
    return False


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
        precision: Precision = "fast",
    ) -> None:
        super().__init__()
        if not alpha >= 0:
            raise ValueError(f"alpha must be 0 or more; got {alpha}.")
        _check_settings(tau_instance, label_smoothing, backend, precision)
        _check_temperature("tau_consistency", tau_consistency)
        self.alpha = alpha
        self.tau_instance = tau_instance
        self.tau_consistency = tau_consistency
        self.label_smoothing = label_smoothing
        self.detach_target = detach_target
        self.backend: Backend = backend
        self.precision: Precision = precision

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
            precision=self.precision,
        )
        loss = terms.instance if terms.consistency is None else terms.instance + self.alpha * terms.consistency
        return loss.mean()

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, tau_instance={self.tau_instance}, tau_consistency={self.tau_consistency}"


def _check_temperature(name: str, tau: float) -> None:
    if not 0 < tau < float("inf"):
        raise ValueError(f"{name} is a temperature and must be a number above 0; got {tau}.")


def _check_settings(tau_instance: float, label_smoothing: float, backend: str, precision: str) -> None:
    _check_temperature("tau_instance", tau_instance)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1); got {label_smoothing}.")
    if backend not in BACKENDS:
        raise ValueError(
            f"There is no backend '{backend}': use one of {', '.join(BACKENDS)}.{did_you_mean(backend, BACKENDS)}"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"There is no precision '{precision}': use one of {', '.join(PRECISIONS)}.")


def _check_rows(**matrices: Tensor) -> None:
    for name, matrix in matrices.items():
        lengths = matrix.detach().double().norm(dim=1)  # [rows]
        if not lengths.isfinite().all():
            row = int((~lengths.isfinite()).nonzero()[0, 0])
            raise ValueError(f"{name} holds NaN or infinity, first in row {row}.")
        # Rows that were normalised and then rounded to 8 bits of mantissa are still this close to length 1.
        if (lengths - 1).abs().max() > 0.01:
            row = int((lengths - 1).abs().argmax())
            raise ValueError(
                f"{name} must have rows of length 1, and row {row} has length {lengths[row].item():.4g}: "
                f"pass torch.nn.functional.normalize({name}, dim=1)."
            )


def _check(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    tau_instance: float,
    label_smoothing: float,
    exclude: Tensor | None,
    backend: str,
    precision: str,
) -> None:
    _check_settings(tau_instance, label_smoothing, backend, precision)
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


def _check_target(query: Tensor, negatives: Tensor, target: Tensor | None, target_negatives: Tensor | None) -> None:
    if target is None:
        if target_negatives is not None:
            raise ValueError("target_negatives are what a target is compared with: give target too.")
        return
    width = (negatives if target_negatives is None else target_negatives).shape[1]
    if target.shape != (len(query), width):
        raise ValueError(f"target must be [B, F] = {[len(query), width]}; got {list(target.shape)}.")
    if target_negatives is not None and len(target_negatives) != len(negatives):
        raise ValueError(
            f"target_negatives must have a row for each of the {len(negatives)} negatives; got "
            f"{list(target_negatives.shape)}."
        )
