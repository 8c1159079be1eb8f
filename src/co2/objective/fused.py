# mypy: allow-untyped-defs
"""The fused objective: how its kernels are cut up for a GPU and launched, and what autograd and torch.compile see.

What they compute, and why it is right, heads `kernels.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from co2.kernels.contrast import (
    PARTIALS,
    STATISTICS,
    backward_negatives_kernel,
    backward_rows_kernel,
    forward_kernel,
    merge_backward_kernel,
    merge_forward_kernel,
    prepare_kernel,
)
from co2.objective.specification import Consistency

LOG2_E = math.log2(math.e)

# From this temperature on, e^{(a − 1)/τ} of unit rows is a normal float32 for every a, and needs no running maximum.
UNIT_ROWS_SUFFICE = 0.03

LARGEST_DIM = 1024
OLDEST_CAPABILITY = (8, 0)  # Ampere. Measured on 9.0 (H200).

# With this many rows the negatives are rounded once, ahead of the kernels, and not by every tile of rows; but a copy
# larger than this many bytes is never made.
ROUND_ONCE_ROWS = 2048
ROUND_ONCE_BYTES = 128 * 2**20


class Tiles(NamedTuple):
    """How a kernel is cut up."""

    rows: int
    negatives: int
    warps: int
    stages: int  # tiles of negatives in flight
    programs: int  # programs that share one multiprocessor: with the number of those, it sets the number of splits


def forward_tiles(full: bool, rows: int, negatives: Tensor) -> Tiles:
    """Tiles of the forward kernel for so many rows.

    What float32 negatives cost is reading and rounding, which is done once for every tile of rows: taller ones save
    that. They pay where there are rows to fill them and where queries and positives stay on the chip; in blocks of
    dimensions three stages of 256 operands would not fit.
    """
    device = negatives.device
    if full:
        return Tiles(rows=32, negatives=32, warps=4, stages=2, programs=2)
    if not _roomy(device):
        return Tiles(rows=64, negatives=32, warps=4, stages=2, programs=1)
    dim = negatives.shape[1]
    if negatives.dtype == torch.float32 and rows > 64 and dim <= _block_d(dim):
        return Tiles(rows=128, negatives=32, warps=8, stages=3, programs=2)
    return Tiles(rows=64, negatives=64, warps=4, stages=3, programs=2)


def backward_tiles(full: bool, target: bool, device: torch.device) -> Tiles:
    """Tiles of the kernel for queries and positives. With `target` it keeps two sums for each row."""
    if full:
        return Tiles(rows=32, negatives=32, warps=4, stages=2, programs=2)
    if not _roomy(device):
        return Tiles(rows=64, negatives=32, warps=4, stages=2, programs=1)
    return Tiles(rows=64, negatives=32 if target else 64, warps=4, stages=3, programs=2)


def backward_negatives_tiles(full: bool, device: torch.device) -> Tiles:
    """Tiles of the kernel for negatives: 64 of them at least, or its product misses Hopper's matrix instructions."""
    if full:
        return Tiles(rows=32, negatives=32, warps=4, stages=2, programs=2)
    return Tiles(rows=64, negatives=64 if _roomy(device) else 32, warps=4, stages=2, programs=2)


@functools.cache
def _roomy(device: torch.device) -> bool:
    """Whether a program may hold 160 KiB of shared memory, as on A100, H100 and B200 but not on GeForce cards."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return properties.major in (9, 10) or (properties.major, properties.minor) == (8, 0)


# TRITON_INTERPRET=1, set before Triton is imported, runs the kernels on the CPU: slowly, and good for tests.
INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)


FORMS = ("symmetric-kl", "kl", "reverse-kl", "soft-label")  # by the numbers that the kernels have for them


class Settings(NamedTuple):
    """What a call fixes besides its tensors."""

    tau_instance: float
    tau_consistency: float | None
    tau_target: float | None  # of the target, where it is another
    form: int
    label_smoothing: float
    full: bool  # float32 matrix products


def forward(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    exclude: Tensor | None,
    settings: Settings,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """L_ins [B], L_con [B] (empty without its temperature), rank [B]; operands and statistics for backward."""
    (b, d), k, device = query.shape, len(negatives), query.device
    negatives = _row_major(negatives)
    tiles = tiles or forward_tiles(settings.full, b, negatives)
    consistency, smoothing = settings.tau_consistency is not None, settings.label_smoothing > 0
    row_tiles, splits, tiles_per_split = _schedule(b, k, tiles, device)
    floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
    operands = torch.empty(2, b, d, dtype=torch.float32 if settings.full else torch.float16, device=device)
    similarity, partial, statistics = floats(b), floats(PARTIALS, splits, b), floats(STATISTICS, b)
    instance, consistencies = floats(b), floats(b if consistency else 0)
    rank = torch.empty(b, dtype=torch.int64, device=device)
    shape = _shape_of_tiles(k, d, tiles)
    prepare_kernel[(b,)](
        query, positive, operands, similarity, b, d, *query.stride(), *positive.stride(), BLOCK_D=shape["BLOCK_D"],
        num_warps=1,
    )  # fmt: skip
    forward_kernel[(row_tiles, splits)](
        operands, negatives, exclude, similarity, partial,
        b, k, d, *_entries(exclude, negatives), tiles_per_split, *_rates(settings),
        CONSISTENCY=consistency, FORM=settings.form, SMOOTHING=smoothing, EXCLUDE=exclude is not None,
        SQUARINGS=_squarings(settings), RUNNING=_lowest_temperature(settings) < UNIT_ROWS_SUFFICE, **shape,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    merged_rows = 8
    merge_forward_kernel[(triton.cdiv(b, merged_rows),)](
        similarity, partial, instance, consistencies, rank, statistics,
        b, splits, *_rates(settings), settings.label_smoothing,
        CONSISTENCY=consistency, FORM=settings.form, SMOOTHING=smoothing,
        BLOCK_SPLIT=triton.next_power_of_2(splits), BLOCK_B=merged_rows,
    )  # fmt: skip
    return instance, consistencies, rank, operands, statistics


def backward(
    grad_instance: Tensor | None,
    grad_consistency: Tensor | None,
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    exclude: Tensor | None,
    operands: Tensor,
    statistics: Tensor,
    settings: Settings,
    target: bool,
    needed: tuple[bool, ...],
    rounded: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients for query, positive and negatives where `needed`; with `target` through the positive's similarities."""
    (b, d), k = query.shape, len(negatives)
    instance, smoothing = grad_instance is not None, settings.label_smoothing > 0
    target = target and grad_consistency is not None
    block_d = _block_d(d)
    dim_tiles = triton.cdiv(d, block_d)
    need_query, need_positive, need_negatives = needed
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
                 for x, need in zip((query, positive, negatives), needed, strict=True)]  # fmt: skip
    query, positive = _row_major(query), _row_major(positive)
    negatives = _row_major(negatives if rounded is None else rounded)
    tensors = (operands, negatives, exclude, grad_instance, grad_consistency, statistics)
    strides = [0 if gradient is None else gradient.stride(0) for gradient in (grad_instance, grad_consistency)]
    sizes = (b, k, d, *_entries(exclude, negatives), *strides)
    rates = (*_rates(settings), settings.label_smoothing)
    terms = {
        "INSTANCE": instance, "CONSISTENCY": grad_consistency is not None, "FORM": settings.form,
        "SMOOTHING": smoothing,
        "EXCLUDE": exclude is not None, "SQUARINGS": _squarings(settings),
    }  # fmt: skip

    partials: list[Tensor | None] = [None, None]
    splits = 0
    if need_query or (need_positive and target):
        sums = 2 if need_positive and target else 1
        tiles = tiles or backward_tiles(settings.full, sums == 2, query.device)
        row_tiles, splits, tiles_per_split = _schedule(b, k, tiles, query.device)
        partial = torch.empty(sums, splits, b, d, dtype=torch.float32, device=query.device)
        partials = [partial[0], partial[1] if sums == 2 else None]
        backward_rows_kernel[(row_tiles, splits, dim_tiles)](
            *tensors, partial, *sizes, tiles_per_split, *rates, TARGET=sums == 2, **terms,
            **_shape_of_tiles(k, d, tiles), num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    for gradient, summed, other in zip(gradients, partials, (positive, query), strict=False):
        if gradient is not None:
            merge_backward_kernel[(b, dim_tiles)](
                summed, other, grad_instance, grad_consistency, statistics, gradient,
                b, d, splits, other.stride(0), *strides, rates[0], settings.label_smoothing,
                SUMMED=summed is not None, INSTANCE=instance, SMOOTHING=smoothing,
                RELATED=grad_consistency is not None and FORMS[settings.form] == "soft-label",
                BLOCK_SPLIT=min(32, triton.next_power_of_2(max(1, splits))), BLOCK_D=block_d,
            )  # fmt: skip
    if need_negatives:
        tiles = backward_negatives_tiles(settings.full, query.device)
        backward_negatives_kernel[(triton.cdiv(k, tiles.negatives), dim_tiles)](
            *tensors, gradients[2], *sizes, *rates, TARGET=target, **terms,
            **_shape_of_tiles(k, d, tiles), num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def round_once(rows: int, negatives: Tensor, full: bool) -> bool:
    """Whether a float16 copy of the negatives pays."""
    small = negatives.numel() * 2 <= ROUND_ONCE_BYTES
    return not full and rows >= ROUND_ONCE_ROWS and small and negatives.dtype != torch.float16


def _row_major(matrix: Tensor) -> Tensor:
    """The matrix with its rows' numbers side by side; rows may be any distance apart."""
    tidy = matrix.stride(1) == 1 or matrix.shape[1] == 1
    return matrix if tidy and matrix.stride(0) * 256 < 2**31 else matrix.contiguous()


def _rates(settings: Settings) -> tuple[float, float, float]:
    """What turns a similarity into an exponent of 2: of the instance term, of the prediction, of the target."""
    sigma = settings.tau_consistency or settings.tau_instance
    return LOG2_E / settings.tau_instance, LOG2_E / sigma, LOG2_E / (settings.tau_target or sigma)


def _lowest_temperature(settings: Settings) -> float:
    given = (settings.tau_instance, settings.tau_consistency, settings.tau_target)
    return min(tau for tau in given if tau is not None)


def _squarings(settings: Settings) -> int:
    """How often e^{a/τ} is squared to give e^{a/σ}, or -1 where that does not give it."""
    if settings.tau_consistency is not None:
        for count in range(4):
            if math.isclose(settings.tau_instance, settings.tau_consistency * 2**count, rel_tol=1e-9):
                return count
    return -1


def _entries(exclude: Tensor | None, negatives: Tensor) -> tuple[int, int, int, int]:
    """How many columns a row may exclude, and the strides of negatives and exclude."""
    if exclude is None:
        return 0, negatives.stride(0), 0, 0
    return exclude.shape[1], negatives.stride(0), exclude.stride(0), exclude.stride(1)


def _block_d(d: int) -> int:
    return max(16, min(128, triton.next_power_of_2(d)))


def _shape_of_tiles(k: int, d: int, tiles: Tiles) -> dict[str, int]:
    block_d = _block_d(d)
    return {
        "EVEN_K": k % tiles.negatives == 0,
        "EVEN_D": d % block_d == 0,
        "ONE_D": d <= block_d,
        "BLOCK_B": tiles.rows,
        "BLOCK_K": tiles.negatives,
        "BLOCK_D": block_d,
    }


def _schedule(b: int, k: int, tiles: Tiles, device: torch.device) -> tuple[int, int, int]:
    """How many tiles of rows, how many splits of the negatives, and how many tiles of negatives in a split."""
    row_tiles, negative_tiles = triton.cdiv(b, tiles.rows), triton.cdiv(k, tiles.negatives)
    seats = _multiprocessors(device) * tiles.programs
    splits, best = 1, 0.0
    for waves in range(1, 5):
        candidate = max(1, waves * seats // row_tiles)
        busy = row_tiles * candidate / (seats * triton.cdiv(row_tiles * candidate, seats))
        if busy > best + 0.05:  # another wave must earn its partial sums
            splits, best = candidate, busy
    tiles_per_split = triton.cdiv(negative_tiles, min(splits, negative_tiles))
    return row_tiles, triton.cdiv(negative_tiles, tiles_per_split), tiles_per_split


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # The interpreter has none; a few make it split the negatives as a GPU would.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# Opaque operators: torch.compile takes each as one node of its graph and never looks inside.
_library = torch.library.Library("co2", "FRAGMENT")
_SETTINGS = "float tau_instance, float? tau_consistency, float? tau_target, int form, float label_smoothing, bool full"
_library.define(
    f"contrast_forward(Tensor query, Tensor positive, Tensor negatives, Tensor? exclude, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "contrast_backward(Tensor? grad_instance, Tensor? grad_consistency, Tensor query, Tensor positive, "
    f"Tensor negatives, Tensor? exclude, Tensor operands, Tensor statistics, Tensor rounded, {_SETTINGS}, bool target, "
    "bool need_query, bool need_positive, bool need_negatives) -> Tensor[]"
)


def _launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _forward_operator(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    exclude: Tensor | None,
    tau_instance: float,
    tau_consistency: float | None,
    tau_target: float | None,
    form: int,
    label_smoothing: float,
    full: bool,
) -> tuple[Tensor, ...]:
    settings = Settings(tau_instance, tau_consistency, tau_target, form, label_smoothing, full)
    once = round_once(len(query), negatives, full)
    rounded = negatives.to(torch.float16) if once else negatives.new_empty(0)
    with _launching_on(query.device):
        return *forward(query, positive, rounded if once else negatives, exclude, settings), rounded


def _forward_shapes(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    exclude: Tensor | None,
    tau_instance: float,
    tau_consistency: float | None,
    tau_target: float | None,
    form: int,
    label_smoothing: float,
    full: bool,
) -> tuple[Tensor, ...]:
    b, d = query.shape
    once = round_once(b, negatives, full)
    return (
        query.new_empty(b, dtype=torch.float32),
        query.new_empty(0 if tau_consistency is None else b, dtype=torch.float32),
        query.new_empty(b, dtype=torch.int64),
        query.new_empty(2, b, d, dtype=torch.float32 if full else torch.float16),
        query.new_empty(STATISTICS, b, dtype=torch.float32),
        negatives.new_empty(negatives.shape, dtype=torch.float16) if once else negatives.new_empty(0),
    )


def _backward_operator(
    grad_instance: Tensor | None,
    grad_consistency: Tensor | None,
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    exclude: Tensor | None,
    operands: Tensor,
    statistics: Tensor,
    rounded: Tensor,
    tau_instance: float,
    tau_consistency: float | None,
    tau_target: float | None,
    form: int,
    label_smoothing: float,
    full: bool,
    target: bool,
    *needed: bool,
) -> list[Tensor]:
    settings = Settings(tau_instance, tau_consistency, tau_target, form, label_smoothing, full)
    with _launching_on(query.device):
        found = backward(
            grad_instance, grad_consistency, query, positive, negatives, exclude, operands, statistics, settings,
            target, needed, rounded if rounded.numel() else None,
        )  # fmt: skip
    return [gradient for gradient in found if gradient is not None]


def _backward_shapes(
    grad_instance: Tensor | None,
    grad_consistency: Tensor | None,
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    *rest: object,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, need in zip((query, positive, negatives), rest[-3:], strict=True) if need]


_library.impl("contrast_forward", _forward_operator, "CompositeExplicitAutograd")
_library.impl("contrast_backward", _backward_operator, "CompositeExplicitAutograd")
torch.library.register_fake("co2::contrast_forward", _forward_shapes, lib=_library)
torch.library.register_fake("co2::contrast_backward", _backward_shapes, lib=_library)


class _Contrast(torch.autograd.Function):
    """L_ins, L_con and rank with their gradients, for exactly the inputs that ask for one."""

    @staticmethod
    def forward(ctx, query, positive, negatives, exclude, settings, target):
        instance, consistency, rank, operands, statistics, rounded = torch.ops.co2.contrast_forward(
            query, positive, negatives, exclude, *settings
        )
        # The inputs themselves are saved, so that autograd notices when somebody changes them before backward.
        ctx.save_for_backward(query, positive, negatives, exclude, operands, statistics, rounded)
        ctx.settings, ctx.target = settings, target
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rank)
        return instance, consistency, rank

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_instance, grad_consistency, _):
        needed = ctx.needs_input_grad[:3]
        if ctx.settings[1] is None:
            grad_consistency = None
        if grad_instance is None and grad_consistency is None:
            return (None,) * 6
        found = iter(
            torch.ops.co2.contrast_backward(
                grad_instance, grad_consistency, *ctx.saved_tensors, *ctx.settings, ctx.target, *needed
            )
        )
        return *(next(found) if need else None for need in needed), *(None,) * 3


def fused(
    query: Tensor,  # [B, D]
    positive: Tensor,  # [B, D]
    negatives: Tensor,  # [K, D]
    tau_instance: float,
    term: Consistency | None,
    label_smoothing: float,
    exclude: Tensor | None,  # [B, E]
    full: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """L_ins [B], L_con [B] (None without a `term`) and the positive's rank [B]. Inputs are already checked."""
    target = term is not None and term.target_gradient
    if term is None:
        settings = Settings(tau_instance, None, None, 0, label_smoothing, full)
    else:
        soft = term.form == "soft-label"
        sigma = tau_instance if soft else term.temperature
        settings = Settings(tau_instance, sigma, term.sharpness, FORMS.index(term.form), label_smoothing, full)
    instance, consistency, rank = _Contrast.apply(query, positive, negatives, exclude, settings, target)
    if term is None:
        return instance, None, rank
    if term.form == "soft-label":  # the kernels give what cross entropy with the relation has more than L_ins
        consistency = instance + (1 - term.own_label) * consistency
    return instance, consistency, rank


def obstacle(query: Tensor) -> str | None:
    """Why the kernels cannot take such inputs, or None where they can."""
    if query.dtype == torch.float64:
        return "it computes in float32 at most, and the inputs are float64"
    if query.shape[1] > LARGEST_DIM:
        return f"it takes embeddings of up to {LARGEST_DIM} numbers, and these have {query.shape[1]}"
    if INTERPRETED:
        return None
    if query.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, and the inputs are on '{query.device}'"
    name, capability = _name_and_capability(query.device.index)
    if capability < OLDEST_CAPABILITY:
        return f"it needs an NVIDIA GPU of compute capability 8.0 or later, and {name} is older"
    return None


@torch.compiler.assume_constant_result
def _name_and_capability(index: int | None) -> tuple[str, tuple[int, int]]:
    properties = torch.cuda.get_device_properties(index)
    return properties.name, (properties.major, properties.minor)
