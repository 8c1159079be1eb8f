"""Numbers that say why a consistency term helps or not: what its target knows, and how much it is listened to.

A target that is spread over all negatives alike, or that knows no more of classes than chance does, cannot teach; a
term whose gradient is a hundredth of the other's does not, whatever its target knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from co2.objective.reference import hidden_columns, reference, similarities
from co2.objective.specification import Consistency

ROWS = 64  # that are looked at: what they cost is their share of a batch, and their mean moves little from step to step


class Relations(NamedTuple):
    """Means over the rows that were looked at, scalars on the device; None where nothing says what they are."""

    target_neighbours: Tensor
    """Effective number of negatives that share the target's mass: e to its entropy, between 1 and K."""
    prediction_neighbours: Tensor
    """The same of the prediction, at its own temperature."""
    mean_length: Tensor
    """Length of the mean of the negatives: 1 where all are one point, and all similarities alike."""
    gradient_ratio: Tensor
    """Length of the weighted consistency term's gradient at the query, over that of the instance term's."""
    own_class_mass: Tensor | None
    """Share of the target's mass on negatives of the query's own class, where labels exist."""
    own_class_chance: Tensor | None
    """Share of the negatives that are of the query's own class: what a target that knows nothing would have."""


def relations(
    query: Tensor,  # [B, D]
    positive: Tensor,  # [B, D]
    negatives: Tensor,  # [K, D]
    term: Consistency,
    *,
    tau_instance: float = 0.2,
    weight: float | Tensor | None = None,
    exclude: Tensor | None = None,  # [B, E]
    target: Tensor | None = None,  # [B, F]
    target_negatives: Tensor | None = None,  # [K, F]
    labels: Tensor | None = None,  # [B]
    negative_labels: Tensor | None = None,  # [K]; -1 where it is not known
    rows: int = ROWS,
) -> Relations:
    """What the term does to the first `rows` queries. Nothing here carries a gradient.

    `weight` is the term's at this point of the run, by default `term.weight`; the rest is as for `contrast`. A soft
    label has no instance term beside it: its ratio is that of what the target adds to the instance term's gradient.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, positive = (x[:rows].detach().to(dtype) for x in (query, positive))
    negatives = negatives.detach().to(dtype)
    exclude = None if exclude is None else exclude[:rows]
    target = positive if target is None else target[:rows].detach().to(dtype)
    target_negatives = negatives if target_negatives is None else target_negatives.detach().to(dtype)
    weight = term.weight if weight is None else weight
    with torch.autocast(query.device.type, enabled=False), torch.enable_grad():
        leaf = query.requires_grad_()
        still = replace(term, target_gradient=False)
        instance, consistency, _ = reference(
            leaf, positive, negatives, tau_instance, still, 0.0, exclude, target, target_negatives
        )
        assert consistency is not None
        on_instance, on_consistency = (
            torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0] for loss in (instance, consistency)
        )  # [b, D] each
    if term.form == "soft-label":
        on_consistency = on_consistency - on_instance
    own = term.form == "soft-label"  # the prediction is the instance term's
    hidden = hidden_columns(exclude, len(negatives))
    with torch.no_grad():
        a = similarities(query, negatives, term.centred and not own) / (tau_instance if own else term.temperature)
        b = similarities(target, target_negatives, term.centred) / term.sharpness
        if hidden is not None:
            a, b = (x.masked_fill(hidden, torch.finfo(dtype).min) for x in (a, b))
        p = torch.softmax(b, dim=1)  # [b, K]
        mass = chance = None
        if labels is not None and negative_labels is not None:
            same = labels[:rows, None] == negative_labels  # [b, K]
            known = (negative_labels >= 0).expand_as(same)
            if hidden is not None:
                same, known = same & ~hidden, known & ~hidden
            mass = ((p * same).sum(dim=1) / (p * known).sum(dim=1).clamp_min(1e-30)).mean()
            chance = (same.sum(dim=1) / known.sum(dim=1).clamp_min(1)).mean()
        return Relations(
            _effective_number(p).mean(),
            _effective_number(torch.softmax(a, dim=1)).mean(),
            negatives.mean(dim=0).norm(),
            weight * on_consistency.norm(dim=1).mean() / on_instance.norm(dim=1).mean(),
            mass,
            chance,
        )


def _effective_number(shares: Tensor) -> Tensor:
    """e to the entropy of each row of shares [B, K]: [B]."""
    return torch.exp(torch.special.entr(shares).sum(dim=1))
