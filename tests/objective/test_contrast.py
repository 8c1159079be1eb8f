"""The objective in plain PyTorch, held to closed forms and to oracles that share no code with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from co2.objective.contrast import CO2Loss, Contrast, contrast


def unit_rows(rows: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1).to(dtype)


def triple(
    b: int = 6, k: int = 11, d: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    return unit_rows(b, d, seed, dtype), unit_rows(b, d, seed + 1, dtype), unit_rows(k, d, seed + 2, dtype)


def terms(*args: Any, **kwargs: Any) -> Contrast:
    return contrast(*args, **{"backend": "reference", **kwargs})


def consistency_of(found: Contrast) -> Tensor:
    assert found.consistency is not None
    return found.consistency


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("k", [1, 7, 300])
def test_equal_embeddings_cost_log_of_the_candidates(k: int) -> None:
    row = unit_rows(1, 8, 0)
    found = terms(row.expand(4, 8), row.expand(4, 8), row.expand(k, 8))
    torch.testing.assert_close(found.instance, torch.full((4,), math.log(k + 1), dtype=torch.float64))
    torch.testing.assert_close(consistency_of(found), torch.zeros(4, dtype=torch.float64))


def test_a_query_equal_to_its_positive_is_consistent_and_at_rest() -> None:
    q, _, n = triple()
    q, p, n = q.clone().requires_grad_(), q.clone().requires_grad_(), n.requires_grad_()
    consistency = consistency_of(terms(q, p, n))
    assert consistency.abs().max() < 1e-12
    for gradient in torch.autograd.grad(consistency.sum(), (q, p, n)):
        assert gradient.abs().max() < 1e-10


def test_consistency_is_symmetric_in_query_and_positive() -> None:
    q, p, n = triple()
    torch.testing.assert_close(consistency_of(terms(q, p, n)), consistency_of(terms(p, q, n)))


def test_the_order_of_the_negatives_does_not_matter() -> None:
    q, p, n = triple()
    order = torch.randperm(len(n), generator=torch.Generator().manual_seed(5))
    for one, other in zip(terms(q, p, n), terms(q, p, n[order]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_two_negatives_by_hand() -> None:
    # a = (0.6, 0), b = (-0.8, 1), s = 0: everything can be written down.
    q, p = torch.eye(2, dtype=torch.float64).split(1)
    n = torch.tensor([[0.6, -0.8], [0.0, 1.0]], dtype=torch.float64)
    found = terms(q, p, n, tau_instance=0.5, tau_consistency=0.25)
    instance = math.log(1 + math.exp(0.6 / 0.5) + math.exp(0.0))
    on = [math.exp(0.6 / 0.25), 1.0]  # e^{a / sigma}
    off = [math.exp(-0.8 / 0.25), math.exp(1 / 0.25)]  # e^{b / sigma}
    first, second = [x / sum(on) for x in on], [x / sum(off) for x in off]
    kl = sum(x * math.log(x / y) + y * math.log(y / x) for x, y in zip(first, second, strict=True)) / 2
    assert found.instance.item() == pytest.approx(instance, abs=1e-12)
    assert consistency_of(found).item() == pytest.approx(kl, abs=1e-12)
    assert found.rank.tolist() == [1]  # only the first negative scores above s = 0


def test_rank_counts_negatives_above_the_positive() -> None:
    q = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), dim=1)
    p = F.normalize(torch.tensor([[1.0, 0.1], [1.0, 1.0]]), dim=1)
    n = F.normalize(torch.tensor([[1.0, 0.5], [1.0, 0.05], [-1.0, 0.0], [1.0, 0.2]]), dim=1)
    found = terms(q, p, n)
    assert found.rank.tolist() == [1, 3]
    assert found.rank.dtype == torch.int64


# ---------------------------------------------------------------- independent oracles


def attention_consistency(q: Tensor, p: Tensor, n: Tensor, sigma: float) -> Tensor:
    """L_con = (p - q)·(mu_P - mu_Q) / (2 sigma) where mu_u = softmax(u Nᵀ / sigma) N: two attention calls."""
    means = F.scaled_dot_product_attention(torch.stack([q, p])[:, None], n[None, None], n[None, None], scale=1 / sigma)
    mean_q, mean_p = means[:, 0]  # [B, D] each
    return ((p - q) * (mean_p - mean_q)).sum(dim=1) / (2 * sigma)


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.3, 1.0])
def test_consistency_is_two_attention_calls(sigma: float) -> None:
    q, p, n = triple(9, 33, 12)
    found = consistency_of(terms(q, p, n, tau_consistency=sigma))
    torch.testing.assert_close(found, attention_consistency(q, p, n, sigma), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_instance_is_cross_entropy(smoothing: float) -> None:
    q, p, n = triple()
    logits = torch.cat([(q * p).sum(1, keepdim=True), q @ n.T], dim=1) / 0.1
    expected = F.cross_entropy(
        logits, torch.zeros(len(q), dtype=torch.int64), reduction="none", label_smoothing=smoothing
    )
    found = terms(q, p, n, tau_instance=0.1, label_smoothing=smoothing).instance
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def torch_kl_consistency(q: Tensor, p: Tensor, n: Tensor, sigma: float) -> Tensor:
    log_q, log_p = F.log_softmax(q @ n.T / sigma, dim=1), F.log_softmax(p @ n.T / sigma, dim=1)
    forward = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)  # KL(P‖Q)
    backward = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(dim=1)  # KL(Q‖P)
    return (forward + backward) / 2


def test_consistency_is_the_symmetric_kl_of_torch_with_its_gradients() -> None:
    inputs = [x.requires_grad_() for x in triple()]
    found, expected = consistency_of(terms(*inputs)), torch_kl_consistency(*inputs, 0.05)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    ours, theirs = torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_excluded_columns_are_as_if_they_were_not_there(smoothing: float) -> None:
    q, p, n = (x.requires_grad_() for x in triple(3, 6, 4))
    exclude = torch.tensor([[1, 4, -1], [2, 2, 6], [-1, 99, -7]])  # duplicates and numbers that are no column
    keep = [[0, 2, 3, 5], [0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    found = terms(q, p, n, exclude=exclude, label_smoothing=smoothing)
    rows = [terms(q[i : i + 1], p[i : i + 1], n[keep[i]], label_smoothing=smoothing) for i in range(3)]
    expected = Contrast(*(torch.cat(column) for column in zip(*rows, strict=True)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad((found.instance + consistency_of(found)).sum(), (q, p, n))
    theirs = torch.autograd.grad((expected.instance + consistency_of(expected)).sum(), (q, p, n))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_row_that_may_see_nothing_costs_nothing() -> None:
    q, p, n = (x.requires_grad_() for x in triple(2, 3, 4))
    found = terms(q, p, n, exclude=torch.tensor([[0, 1, 2], [0, 0, 0]]), label_smoothing=0.1)
    assert found.instance[0].item() == pytest.approx(0, abs=1e-12)
    assert consistency_of(found)[0].item() == 0
    assert found.instance[1] > 0
    assert found.rank[0] == 0
    for gradient in torch.autograd.grad((found.instance + consistency_of(found)).sum(), (q, p, n)):
        assert gradient.isfinite().all()
    assert (
        torch.autograd.grad(terms(q, p, n, exclude=torch.arange(3).expand(2, 3)).instance.sum(), q)[0].abs().max() == 0
    )


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("excluding", [False, True])
def test_gradients_are_those_of_finite_differences(smoothing: float, excluding: bool) -> None:
    q, p, n = (x.requires_grad_() for x in triple(3, 5, 4, seed=3))
    exclude = torch.tensor([[0, 2], [4, 4], [-1, 1]]) if excluding else None

    def losses(q: Tensor, p: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        found = terms(q, p, n, tau_instance=0.3, tau_consistency=0.2, label_smoothing=smoothing, exclude=exclude)
        return found.instance, consistency_of(found)

    assert torch.autograd.gradcheck(losses, (q, p, n))


def test_a_detached_target_passes_gradients_to_the_query_side_alone() -> None:
    q, p, n = (x.requires_grad_() for x in triple(3, 5, 4))
    target = p.detach() @ n.detach().T / 0.05  # [B, K]
    log_target = F.log_softmax(target, dim=1)
    log_query = F.log_softmax(q @ n.T / 0.05, dim=1)
    expected = (
        F.kl_div(log_query, log_target, reduction="none", log_target=True)
        + F.kl_div(log_target, log_query, reduction="none", log_target=True)
    ).sum(dim=1) / 2
    found = consistency_of(terms(q, p, n, detach_target=True))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    ours, theirs = torch.autograd.grad(found.sum(), (q, n)), torch.autograd.grad(expected.sum(), (q, n))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    found = terms(q, p, n, detach_target=True)
    assert (
        torch.autograd.grad(consistency_of(found).sum(), p, allow_unused=True, materialize_grads=True)[0].abs().max()
        == 0
    )
    assert torch.autograd.grad(terms(q, p, n, detach_target=True).instance.sum(), p)[0].abs().max() > 0


def test_the_consistency_term_alone_moves_the_query() -> None:
    # A consistency loss that is rebuilt as a constant is symmetric and positive and trains nothing.
    q, p, n = triple()
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(consistency_of(terms(q, p, n)).sum(), q)
    assert gradient.norm(dim=1).min() > 1e-3
    stepped = F.normalize(q.detach() - 1e-4 * gradient, dim=1)
    assert consistency_of(terms(stepped, p, n)).sum() < consistency_of(terms(q, p, n)).sum()


def test_in_moco_only_the_query_has_a_gradient() -> None:
    q, p, n = triple()
    q.requires_grad_()
    found = terms(q, p, n)
    (found.instance + consistency_of(found)).mean().backward()
    assert q.grad is not None
    assert p.grad is None
    assert n.grad is None


def test_without_a_consistency_temperature_there_is_no_consistency() -> None:
    found = terms(*triple(), tau_consistency=None)
    assert found.consistency is None
    torch.testing.assert_close(found.instance, terms(*triple()).instance)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)])
@pytest.mark.parametrize("sigma", [0.04, 0.2])
def test_low_precision_inputs_are_computed_in_float32(dtype: torch.dtype, tolerance: float, sigma: float) -> None:
    low = triple(16, 64, 24, dtype=dtype)
    truth = terms(*(x.double() for x in low), tau_consistency=sigma)
    found = terms(*low, tau_consistency=sigma)
    assert found.instance.dtype == torch.float32
    torch.testing.assert_close(found.instance.double(), truth.instance, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        consistency_of(found).double(), consistency_of(truth), rtol=tolerance * 5, atol=tolerance
    )


def test_autocast_does_not_make_it_coarser() -> None:
    inputs = triple(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = terms(*inputs)
    for one, other in zip(found, terms(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("tau", [0.01, 0.05, 1.0])
def test_small_temperatures_stay_finite(tau: float) -> None:
    q, p, n = triple(5, 50, 8, dtype=torch.float32)
    q.requires_grad_()
    found = terms(q, p, n, tau_instance=tau, tau_consistency=tau)
    (found.instance + consistency_of(found)).sum().backward()
    assert found.instance.isfinite().all()
    assert consistency_of(found).isfinite().all()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_nan_stays_in_its_row_and_a_nan_negative_reaches_all() -> None:
    q, p, n = triple(4, 6, 5)
    q[1, 2] = math.nan
    found = terms(q, p, n)
    assert found.instance.isnan().tolist() == [False, True, False, False]
    assert consistency_of(found).isnan().tolist() == [False, True, False, False]
    q, p, n = triple(4, 6, 5)
    n[3, 0] = math.nan
    assert terms(q, p, n).instance.isnan().all()


# ---------------------------------------------------------------- properties

shapes = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 7))


@settings(max_examples=40)
@given(shapes, st.floats(0.02, 2.0), st.floats(0.02, 2.0), st.floats(0, 0.9), st.integers(0, 2**31), st.booleans())
def test_whatever_the_shape_it_equals_the_oracles(
    shape: tuple[int, int, int], tau: float, sigma: float, smoothing: float, seed: int, shuffle: bool
) -> None:
    q, p, n = triple(*shape, seed=seed)
    if shuffle:
        n = n[torch.randperm(len(n), generator=torch.Generator().manual_seed(seed))]
    found = terms(q, p, n, tau_instance=tau, tau_consistency=sigma, label_smoothing=smoothing)
    logits = torch.cat([(q * p).sum(1, keepdim=True), q @ n.T], dim=1) / tau
    target = torch.zeros(len(q), dtype=torch.int64)
    expected = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(found.instance, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(consistency_of(found), attention_consistency(q, p, n, sigma), rtol=1e-8, atol=1e-9)
    assert (consistency_of(found) >= -1e-12).all()
    assert found.rank.tolist() == (logits[:, 1:] > logits[:, :1]).sum(dim=1).tolist()


# ---------------------------------------------------------------- the public call


def test_the_module_is_the_call_averaged() -> None:
    q, p, n = triple()
    found = terms(q, p, n, tau_instance=0.07, tau_consistency=0.04)
    expected = (found.instance + 0.3 * consistency_of(found)).mean()
    loss = CO2Loss(alpha=0.3, tau_instance=0.07, tau_consistency=0.04, backend="reference")
    torch.testing.assert_close(loss(q, p, n), expected)
    assert "alpha=0.3" in repr(loss)
    plain = CO2Loss(alpha=0.0, tau_instance=0.07, backend="reference")
    torch.testing.assert_close(plain(q, p, n), found.instance.mean())


def test_auto_on_the_cpu_is_the_reference() -> None:
    q, p, n = triple()
    for one, other in zip(contrast(q, p, n), terms(q, p, n), strict=True):
        assert torch.equal(one, other)


def test_int32_exclude_is_int64_exclude() -> None:
    q, p, n = triple(2, 5, 4)
    exclude = torch.tensor([[1, 2], [3, -1]])
    for one, other in zip(terms(q, p, n, exclude=exclude), terms(q, p, n, exclude=exclude.int()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3)}, "query must be a matrix"),
        ({"positive": [[1.0]]}, "positive must be a matrix"),
        ({"positive": torch.zeros(6, 4).double()}, r"query and positive must have the same shape"),
        ({"negatives": torch.zeros(11, 4).double()}, r"negatives must be \[K, D\]"),
        ({"negatives": torch.zeros(0, 5).double()}, "nothing to contrast"),
        ({"query": torch.zeros(0, 5).double(), "positive": torch.zeros(0, 5).double()}, "nothing to contrast"),
        ({"negatives": torch.zeros(11, 5)}, r"the same dtype"),
        ({"query": torch.zeros(6, 5, dtype=torch.int64)}, "query must be floating point"),
        ({"negatives": torch.zeros(11, 5, dtype=torch.float64, device="meta")}, "move them to one device"),
        ({"exclude": torch.zeros(5, 1, dtype=torch.int64)}, r"exclude must be \[B, E\]"),
        ({"exclude": torch.zeros(6, dtype=torch.int64)}, r"exclude must be \[B, E\]"),
        ({"exclude": torch.zeros(6, 1)}, "must be int64 or int32"),
        ({"exclude": torch.zeros(6, 1, dtype=torch.int64, device="meta")}, "move them to one device"),
        ({"tau_instance": 0.0}, "tau_instance is a temperature"),
        ({"tau_consistency": -1.0}, "tau_consistency is a temperature"),
        ({"tau_consistency": math.nan}, "tau_consistency is a temperature"),
        ({"label_smoothing": 1.0}, "label_smoothing must be in"),
        ({"backend": "fussed"}, "Did you mean 'fused'"),
    ],
)
def test_mistakes_are_told_plainly(change: dict[str, Any], message: str) -> None:
    q, p, n = triple()
    with pytest.raises(ValueError, match=message):
        contrast(**{"query": q, "positive": p, "negatives": n, **change})


@pytest.mark.parametrize(
    "setting", [{"alpha": -1.0}, {"tau_instance": 0.0}, {"label_smoothing": 1.5}, {"backend": "no"}]
)
def test_the_module_refuses_senseless_settings(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        CO2Loss(**setting)
