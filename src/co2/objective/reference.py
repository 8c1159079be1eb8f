"""The objective in plain PyTorch: the truth that every other implementation is held to.

Readable first. It holds a few [B, K] matrices, which `fused` does not; tests and benchmarks import it from here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    query: Tensor,  # [B, D]
    positive: Tensor,  # [B, D]
    negatives: Tensor,  # [K, D]
    tau_instance: float,
    tau_consistency: float | None,
    label_smoothing: float,
    exclude: Tensor | None,  # [B, E]
    detach_target: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """L_ins [B], L_con [B] (None without `tau_consistency`) and the positive's rank [B]. Inputs are already checked."""
    # Half-precision similarities divided by a small temperature are too coarse, so everything is at least float32.
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        query, positive, negatives = query.to(dtype), positive.to(dtype), negatives.to(dtype)
        s = (query * positive).sum(dim=1)  # [B]
        a = query @ negatives.T  # [B, K]
        hidden = hidden_columns(exclude, len(negatives))  # [B, K] or None

        # Instance discrimination: cross entropy of the positive among the K + 1 candidates (paper, equation 1).
        logits = _hide(a / tau_instance, hidden)  # [B, K]
        z = torch.logsumexp(torch.cat([s[:, None] / tau_instance, logits], dim=1), dim=1)  # [B]
        instance = z - s / tau_instance
        if label_smoothing > 0:
            seen = a if hidden is None else a.masked_fill(hidden, 0)  # [B, K]
            count = len(negatives) if hidden is None else (~hidden).sum(dim=1)
            even = (s + seen.sum(dim=1)) / (count + 1) / tau_instance  # [B] mean logit of the candidates
            instance = (1 - label_smoothing) * instance + label_smoothing * (z - even)
        above = a > s[:, None]  # [B, K]
        rank = (above if hidden is None else above & ~hidden).sum(dim=1)
        if tau_consistency is None:
            return instance, None, rank

        # Consistency: ½KL(P‖Q) + ½KL(Q‖P) over the negatives alone (paper, equations 2 to 4). Since log P − log Q is
        # d up to a constant in each row, and P − Q sums to zero, it is ½ Σ (P − Q) d: the normalisers cancel.
        b = positive @ negatives.T  # [B, K]
        if detach_target:
            b = b.detach()
        d = (b - a) / tau_consistency  # [B, K]
        if hidden is not None:
            d = d.masked_fill(hidden, 0)
        q = torch.softmax(_hide(a / tau_consistency, hidden), dim=1)  # [B, K]
        p = torch.softmax(_hide(b / tau_consistency, hidden), dim=1)  # [B, K]
        consistency = 0.5 * ((p - q) * d).sum(dim=1)  # [B]
        return instance, consistency, rank


def hidden_columns(exclude: Tensor | None, count: int) -> Tensor | None:
    """Which of `count` columns each row must not see, [B, count]. Entries outside 0..count-1 name no column."""
    if exclude is None:
        return None
    columns = torch.arange(count, device=exclude.device)  # [K]
    hidden = torch.zeros(len(exclude), count, dtype=torch.bool, device=exclude.device)
    for column in exclude.unbind(dim=1):
        hidden |= column[:, None] == columns
    return hidden


def _hide(logits: Tensor, hidden: Tensor | None) -> Tensor:
    # The smallest finite number instead of -inf: a row that may see nothing then has P = Q and loses nothing,
    # where -inf would turn it, and its gradient, into NaN.
    return logits if hidden is None else logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
