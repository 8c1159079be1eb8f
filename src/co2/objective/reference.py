"""The objective in plain PyTorch: the truth that every other implementation is held to.

Readable first. It holds a few [B, K] matrices, which `fused` does not; tests and benchmarks import it from here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from co2.objective.specification import Consistency


def reference(
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
    """L_ins [B], L_con [B] (None without a `term`) and the positive's rank [B]. Inputs are already checked."""
    # Half-precision similarities divided by a small temperature are too coarse, so everything is at least float32.
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast("cuda" if query.is_cuda else "cpu", enabled=False):
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
        if term is None:
            return instance, None, rank

        # The relations of query and target to the negatives, over the negatives alone (paper, equations 2 and 3).
        target = positive if target is None else target.to(dtype)
        target_negatives = negatives if target_negatives is None else target_negatives.to(dtype)
        if not term.target_gradient:
            target, target_negatives = target.detach(), target_negatives.detach()
        b = similarities(target, target_negatives, term.centred)  # [B, K]
        if term.form == "soft-label":
            p = torch.softmax(_hide(b / term.sharpness, hidden), dim=1)  # [B, K]
            if hidden is not None:
                p = p.masked_fill(hidden, 0)  # of a row that sees nothing
            others = (p * (z[:, None] - logits)).sum(dim=1)  # [B] cross entropy with P
            return instance, term.own_label * instance + (1 - term.own_label) * others, rank
        if term.centred:
            a = similarities(query, negatives, centred=True)
        return instance, divergence(a, b, term, hidden), rank


def divergence(a: Tensor, b: Tensor, term: Consistency, hidden: Tensor | None = None) -> Tensor:
    """How far the relation of similarities `a` [B, K] is from that of `b` [B, K], row by row: [B].

    Every form is 0 where the two relations are the same and does not change when a number is added to a row.
    """
    sigma, sharpness = term.temperature, term.sharpness
    # The scaled differences of the similarities; log P - log Q up to a number in each row.
    d = (b - a) / sigma if sharpness == sigma else b / sharpness - a / sigma  # [B, K]
    if hidden is not None:
        d = d.masked_fill(hidden, 0)
    if term.form == "mse-logits":
        if hidden is None:
            return d.var(dim=1, correction=0)
        count = (~hidden).sum(dim=1).clamp_min(1)  # [B]
        off = (d - (d.sum(dim=1) / count)[:, None]).masked_fill(hidden, 0)
        return off.square().sum(dim=1) / count
    if term.form == "symmetric-kl":
        q = torch.softmax(_hide(a / sigma, hidden), dim=1)  # [B, K]
        p = torch.softmax(_hide(b / sharpness, hidden), dim=1)  # [B, K]
        # ½KL(P‖Q) + ½KL(Q‖P) (paper, equation 4): since P − Q sums to zero, the normalisers in log P − log Q cancel.
        return 0.5 * ((p - q) * d).sum(dim=1)
    log_q = F.log_softmax(_hide(a / sigma, hidden), dim=1)  # [B, K]
    log_p = F.log_softmax(_hide(b / sharpness, hidden), dim=1)  # [B, K]
    if term.form == "kl":
        return _mean_ratio(log_p, log_q, hidden)
    if term.form == "reverse-kl":
        return _mean_ratio(log_q, log_p, hidden)
    if term.form == "jsd":
        log_middle = torch.logaddexp(log_p, log_q) - math.log(2)  # [B, K]
        return 0.5 * (_mean_ratio(log_p, log_middle, hidden) + _mean_ratio(log_q, log_middle, hidden))
    assert term.form == "mse"
    return (log_p.exp() - log_q.exp()).square().sum(dim=1)


def _mean_ratio(log_p: Tensor, log_q: Tensor, hidden: Tensor | None) -> Tensor:
    """KL(P‖Q) of each row: [B]."""
    ratio = log_p - log_q  # [B, K]
    if hidden is not None:
        ratio = ratio.masked_fill(hidden, 0)
    return (log_p.exp() * ratio).sum(dim=1)


def similarities(rows: Tensor, negatives: Tensor, centred: bool) -> Tensor:
    """Cosines of [B, F] and [K, F] unit rows, [B, K]; if `centred`, as seen from the mean of the negatives."""
    if centred:
        mean = negatives.detach().mean(dim=0)  # [F]
        rows, negatives = F.normalize(rows - mean, dim=1), F.normalize(negatives - mean, dim=1)
    return rows @ negatives.T


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
