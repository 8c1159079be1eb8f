"""The numbers that say why, by closed forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from co2.objective.contrast import contrast, total
from co2.objective.relations import relations
from co2.objective.specification import Consistency


def unit_rows(rows: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1)


def test_equal_negatives_share_the_target_and_lie_in_one_point() -> None:
    q, p, n = unit_rows(5, 4, 0), unit_rows(5, 4, 1), unit_rows(1, 4, 2).expand(30, 4)
    found = relations(q, p, n, Consistency(temperature=0.1))
    assert found.target_neighbours.item() == pytest.approx(30)
    assert found.prediction_neighbours.item() == pytest.approx(30)
    assert found.mean_length.item() == pytest.approx(1)
    assert found.gradient_ratio.item() == pytest.approx(0, abs=1e-9)
    assert found.own_class_mass is None


def test_two_groups_of_negatives_by_hand() -> None:
    # Four negatives in the key's direction, eight in the opposite one: the target lies on the four.
    key = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    n = torch.cat([key.expand(4, 2), -key.expand(8, 2)])
    labels, negative_labels = torch.tensor([3]), torch.tensor([3] * 3 + [5] * 9)
    term = Consistency(temperature=1e9, target_temperature=0.01)
    found = relations(key, key, n, term, labels=labels, negative_labels=negative_labels)
    assert found.target_neighbours.item() == pytest.approx(4)
    assert found.prediction_neighbours.item() == pytest.approx(12)
    assert found.mean_length.item() == pytest.approx(4 / 12)
    assert found.own_class_mass is not None
    assert found.own_class_chance is not None
    assert found.own_class_mass.item() == pytest.approx(3 / 4)
    assert found.own_class_chance.item() == pytest.approx(3 / 12)
    # Columns that the row may not see, and negatives of unknown class, do not count.
    negative_labels[3] = -1
    found = relations(
        key, key, n, term, labels=labels, negative_labels=negative_labels, exclude=torch.tensor([[0, 11, -1]])
    )
    assert found.own_class_mass is not None
    assert found.own_class_chance is not None
    assert found.target_neighbours.item() == pytest.approx(3)
    assert found.own_class_mass.item() == pytest.approx(1)
    assert found.own_class_chance.item() == pytest.approx(2 / 9)


@pytest.mark.parametrize("form", ["symmetric-kl", "kl", "soft-label"])
def test_the_ratio_is_that_of_the_gradients_that_training_sees(form: str) -> None:
    q, p, n = unit_rows(6, 8, 0).requires_grad_(), unit_rows(6, 8, 1), unit_rows(40, 8, 2)
    term = Consistency(form, weight=0.6, temperature=0.2, target_temperature=0.1)  # type: ignore[arg-type]
    found = contrast(q, p, n, tau_instance=0.3, term=term, backend="reference")
    alone = torch.autograd.grad(found.instance.sum(), q, retain_graph=True)[0]
    together = torch.autograd.grad(total(found, term).sum(), q)[0]
    expected = (together - alone).norm(dim=1).mean() / alone.norm(dim=1).mean()
    ratio = relations(q, p, n, term, tau_instance=0.3).gradient_ratio
    torch.testing.assert_close(ratio, expected)
    assert relations(q, p, n, term, tau_instance=0.3, weight=0.0).gradient_ratio == 0
    assert not ratio.requires_grad


def test_only_the_first_rows_are_looked_at_and_nothing_is_changed() -> None:
    q, p, n = unit_rows(200, 8, 0).requires_grad_(), unit_rows(200, 8, 1), unit_rows(40, 8, 2)
    term = Consistency(temperature=0.2)
    found = relations(q, p, n, term, rows=10)
    expected = relations(q[:10], p[:10], n, term)
    assert all(map(torch.equal, found[:4], expected[:4]))
    assert q.grad is None


def test_the_target_may_be_another_view_with_negatives_of_its_own() -> None:
    q, p, n = unit_rows(6, 8, 0), unit_rows(6, 8, 1), unit_rows(40, 8, 2)
    weak, weak_negatives = unit_rows(6, 3, 3), unit_rows(40, 3, 4)
    term = Consistency("kl", temperature=0.2, target_temperature=0.1)
    found = relations(q, p, n, term, target=weak, target_negatives=weak_negatives)
    shares = torch.softmax(weak @ weak_negatives.T / 0.1, dim=1)
    expected = torch.exp(-(shares * shares.log()).sum(dim=1)).mean()
    torch.testing.assert_close(found.target_neighbours, expected)
