"""The reference in blocks of rows: the same numbers and gradients as all at once, without its matrices."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from co2.objective import blocks
from co2.objective.contrast import contrast
from co2.objective.specification import Consistency, Form

NEEDED = [(True, False, False), (False, True, False), (True, True, False), (True, True, True), (False, False, True)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "FEWEST_ROWS", 3)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 100)


def unit_rows(rows: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1)


def found(backend: str, needed: tuple[bool, ...], terms: str, **options: object) -> list[Tensor]:
    leaves = [x.requires_grad_(need) for x, need in zip(
        (unit_rows(10, 6, 0), unit_rows(10, 6, 1), unit_rows(31, 6, 2)), needed, strict=True)]  # fmt: skip
    result = contrast(*leaves, backend=backend, **options)  # type: ignore[arg-type]
    weights = torch.linspace(0.5, 1.5, 10, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    if "instance" in terms:
        loss = loss + (weights * result.instance).sum()
    if "consistency" in terms and result.consistency is not None:
        loss = loss + (weights.flip(0) * result.consistency).sum()
    gradients = torch.autograd.grad(
        loss, [x for x in leaves if x.requires_grad], allow_unused=True, materialize_grads=True
    )
    return [x for x in (*result, *gradients) if x is not None]


def check(
    needed: tuple[bool, ...] = (True, False, False), terms: str = "instance, consistency", **options: object
) -> None:
    ours, expected = (found(backend, needed, terms, **options) for backend in ("blocks", "reference"))
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("needed", NEEDED, ids=str)
@pytest.mark.parametrize("terms", ["instance", "consistency", "instance, consistency"])
def test_gradients_for_whatever_asks_for_them(needed: tuple[bool, ...], terms: str) -> None:
    check(needed, terms)


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("needed", [(True, False, False), (True, True, True)], ids=str)
def test_every_form(form: Form, needed: tuple[bool, ...]) -> None:
    check(needed, term=Consistency(form, 1.0, temperature=0.2, target_temperature=0.1))
    check(needed, term=Consistency(form, 1.0, temperature=0.2, centred=True, target_gradient=False))


def test_excluded_columns_smoothing_another_target_and_no_term() -> None:
    exclude = torch.randint(-1, 31, (10, 2), generator=torch.Generator().manual_seed(1))
    for needed in NEEDED:
        check(needed, exclude=exclude, label_smoothing=0.2)
        check(needed, "instance", tau_consistency=None)
    target, target_negatives = unit_rows(10, 4, 5), unit_rows(31, 4, 6)
    check(term=Consistency("kl", temperature=0.2), target=target, target_negatives=target_negatives)


def test_without_gradients_it_only_counts() -> None:
    with torch.no_grad():
        q, p, n = unit_rows(10, 6, 0), unit_rows(10, 6, 1), unit_rows(31, 6, 2)
        for one, other in zip(contrast(q, p, n, backend="blocks"), contrast(q, p, n), strict=True):
            torch.testing.assert_close(one, other)
            assert not one.requires_grad


def test_changing_the_negatives_before_backward_is_noticed() -> None:
    q, p, n = unit_rows(10, 6, 0).requires_grad_(), unit_rows(10, 6, 1), unit_rows(31, 6, 2)
    loss = contrast(q, p, n, backend="blocks").instance.sum()
    n[0] = n[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_auto_takes_blocks_where_the_matrix_is_large_and_negatives_have_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, p, n = unit_rows(10, 6, 0), unit_rows(10, 6, 1), unit_rows(31, 6, 2)
    assert not blocks.pays(q, n)
    monkeypatch.setattr(blocks, "LARGE", 310)
    assert blocks.pays(q, n)
    assert not blocks.pays(q[1:], n)
    assert not blocks.pays(q, n.clone().requires_grad_())
    taken: list[int] = []
    original = blocks._of_rows
    monkeypatch.setattr(blocks, "_of_rows", lambda *arguments: taken.append(1) or original(*arguments))
    contrast(q, p, n)
    assert len(taken) == 4  # of three rows each, and one
