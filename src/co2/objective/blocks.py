# mypy: allow-untyped-defs
"""The reference a few rows at a time, for CPUs: its [B, K] matrices fit into the cache, and are gone with their rows.

Where negatives carry no gradient, as in a queue or a bank, the gradients of both terms are found in the forward pass,
while the similarities are at hand, and only weighted in the backward pass. Where they do, as in SimCLR, the backward
pass computes each block again, because what a negative gets depends on how its rows are weighted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from co2.objective.reference import reference
from co2.objective.specification import Consistency

BLOCK_ELEMENTS = 2**20  # similarities of a block: a few matrices of 4 MiB
FEWEST_ROWS, MOST_ROWS = 16, 128
LARGE = 2**22  # similarities of a batch from which on blocks pay: 256 queries with 16,384 negatives


def pays(query: Tensor, negatives: Tensor) -> bool:
    """Whether blocks are faster than all rows at once, or as fast with less memory."""
    large = query.device.type == "cpu" and len(query) * len(negatives) >= LARGE
    return large and not negatives.requires_grad and not torch.compiler.is_compiling()


def in_blocks(
    query: Tensor,  # [B, D]
    positive: Tensor,  # [B, D]
    negatives: Tensor,  # [K, D]
    tau_instance: float,
    term: Consistency | None,
    label_smoothing: float,
    exclude: Tensor | None,  # [B, E]
    target: Tensor | None = None,  # [B, F]
    target_negatives: Tensor | None = None,  # [K, F]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What `reference` gives, but for rounding. No gradient reaches a `target` that is not the positive."""
    others = (term, label_smoothing, exclude, target, target_negatives)
    instance, consistency, rank = _InBlocks.apply(query, positive, negatives, tau_instance, others)
    return instance, None if term is None else consistency, rank


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, positive, negatives, tau_instance, others):
        term = others[0]
        ctx.tau_instance, ctx.others = tau_instance, others
        on_rows, on_negatives = ctx.needs_input_grad[:2], ctx.needs_input_grad[2]
        ctx.kept = any(on_rows) and not on_negatives
        found: list[list[Tensor]] = [[], [], []]
        gradients: list[list[Tensor]] = [[], [], [], []]  # of both terms for queries, and for positives
        for rows in _blocks(query, negatives):
            with torch.set_grad_enabled(ctx.kept):
                leaves = [x[rows].detach().requires_grad_(ctx.kept) for x in (query, positive)]
                instance, consistency, rank = _of_rows(*leaves, negatives.detach(), tau_instance, others, rows)
            for kept, part in zip(found, (instance, consistency, rank), strict=True):
                kept.append(rank.new_empty(0, dtype=instance.dtype) if part is None else part.detach())
            for place, loss in enumerate((instance, consistency) if ctx.kept else ()):
                if loss is not None:
                    again = place == 0 and term is not None
                    weights = torch.ones_like(loss)
                    parts = torch.autograd.grad(loss, leaves, weights, retain_graph=again, materialize_grads=True)
                    gradients[place].append(parts[0])
                    gradients[2 + place].append(parts[1])
        ctx.save_for_backward(query, positive, negatives, *(torch.cat(g) for g in gradients if g))
        ctx.set_materialize_grads(False)
        outcome = [torch.cat(parts) for parts in found]
        ctx.mark_non_differentiable(outcome[2])
        return tuple(outcome)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_instance, grad_consistency, _):
        query, positive, negatives, *kept = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        weights = [grad_instance, grad_consistency if ctx.others[0] is not None else None]
        if ctx.kept:
            terms = len(kept) // 2
            sums = []
            for place in (0, terms):
                weighted = (w[:, None] * g for w, g in zip(weights, kept[place : place + terms], strict=False)
                            if w is not None)  # fmt: skip
                sums.append(sum(weighted, torch.zeros_like(query)).to(query.dtype))
            return *(total if need else None for total, need in zip(sums, needed[:2], strict=True)), None, None, None
        totals = [torch.zeros_like(x) for x in (query, positive, negatives)]
        for rows in _blocks(query, negatives):
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (query[rows], positive[rows], negatives)]
                losses = _of_rows(*leaves, ctx.tau_instance, ctx.others, rows)[:2]
                asked = [(x, w[rows]) for x, w in zip(losses, weights, strict=True) if x is not None and w is not None]
                if not asked:
                    continue
                parts = torch.autograd.grad([x for x, _ in asked], leaves, [w for _, w in asked], allow_unused=True)
            for total, part, place in zip(totals, parts, (rows, rows, slice(None)), strict=True):
                if part is not None:
                    total[place] += part
        return *(total if need else None for total, need in zip(totals, needed, strict=True)), None, None


def _blocks(query: Tensor, negatives: Tensor) -> list[slice]:
    rows = max(FEWEST_ROWS, min(MOST_ROWS, BLOCK_ELEMENTS // len(negatives)))
    return [slice(first, first + rows) for first in range(0, len(query), rows)]


def _of_rows(
    query: Tensor, positive: Tensor, negatives: Tensor, tau_instance: float, others: tuple[Any, ...], rows: slice
) -> tuple[Tensor, Tensor | None, Tensor]:
    term, label_smoothing, exclude, target, target_negatives = others
    return reference(
        query,
        positive,
        negatives,
        tau_instance,
        term,
        label_smoothing,
        None if exclude is None else exclude[rows],
        None if target is None else target[rows].detach(),
        None if target_negatives is None else target_negatives.detach(),
    )
