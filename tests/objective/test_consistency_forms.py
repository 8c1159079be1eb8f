"""The forms of the consistency term, each against its definition in NumPy and SciPy's numbers, and to closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from co2.errors import UserError
from co2.objective.contrast import Contrast, contrast, total
from co2.objective.reference import divergence
from co2.objective.specification import CONSISTENCY_PRESETS, Consistency, Form

FORMS: tuple[Form, ...] = get_args(Form)
DIVERGENCES = tuple(form for form in FORMS if form != "soft-label")
SYMMETRIC = ("symmetric-kl", "jsd", "mse", "mse-logits")  # with one temperature
SOFT = Consistency("soft-label", weight=1.0, target_temperature=0.08)


def unit_rows(rows: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1)


def triple(b: int = 5, k: int = 9, d: int = 4, seed: int = 0) -> list[Tensor]:
    return [unit_rows(b, d, seed), unit_rows(b, d, seed + 1), unit_rows(k, d, seed + 2)]


def terms(*args: Any, **kwargs: Any) -> Contrast:
    return contrast(*args, **{"backend": "reference", **kwargs})


def loss_of(*args: Any, **kwargs: Any) -> Tensor:
    found = terms(*args, **kwargs).consistency
    assert found is not None
    return found


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def defined(form: Form, a: np.ndarray, b: np.ndarray, sigma: float, sharpness: float) -> float:
    """Each form as its formula is written, for one row of similarities."""
    q, p = softmax(a / sigma), softmax(b / sharpness)
    middle = (p + q) / 2
    return {
        "symmetric-kl": (kl(p, q) + kl(q, p)) / 2,
        "kl": kl(p, q),
        "reverse-kl": kl(q, p),
        "jsd": (kl(p, middle) + kl(q, middle)) / 2,
        "mse": float(((p - q) ** 2).sum()),
        "mse-logits": float(np.var(b / sharpness - a / sigma)),
    }[form]


# ---------------------------------------------------------------- definitions


@pytest.mark.parametrize("form", DIVERGENCES)
@pytest.mark.parametrize("sharpness", [None, 0.1, 0.5])
@pytest.mark.parametrize("excluding", [False, True])
def test_each_form_is_its_definition(form: Form, sharpness: float | None, excluding: bool) -> None:
    q, p, n = triple()
    exclude = torch.tensor([[0, 3], [2, 2], [-1, 8], [9, -4], [1, 5]]) if excluding else None
    found = loss_of(q, p, n, term=Consistency(form, temperature=0.2, target_temperature=sharpness), exclude=exclude)
    for row in range(len(q)):
        seen = sorted(set(range(len(n))) - (set(exclude[row].tolist()) if exclude is not None else set()))
        a, b = ((x[row] @ n[seen].T).numpy() for x in (q, p))
        assert found[row].item() == pytest.approx(defined(form, a, b, 0.2, sharpness or 0.2), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("own_label", [0.0, 0.3, 1.0])
def test_a_soft_label_is_cross_entropy_with_mixed_probabilities(own_label: float) -> None:
    q, p, n = triple()
    found = loss_of(q, p, n, tau_instance=0.3, term=replace(SOFT, own_label=own_label))
    logits = torch.cat([(q * p).sum(1, keepdim=True), q @ n.T], dim=1) / 0.3
    relation = torch.softmax(p @ n.T / 0.08, dim=1)
    label = torch.cat([torch.full((len(q), 1), own_label, dtype=torch.float64), (1 - own_label) * relation], dim=1)
    torch.testing.assert_close(found, F.cross_entropy(logits, label, reduction="none"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("target_gradient", [False, True])
def test_gradients_are_those_of_finite_differences(form: Form, centred: bool, target_gradient: bool) -> None:
    q, p, n = (x.requires_grad_() for x in triple(3, 6, 4, seed=7))
    still = (p.detach().clone(), n.detach().clone())
    term = Consistency(
        form, 1.0, temperature=0.4, target_temperature=0.25, centred=centred, target_gradient=target_gradient
    )

    def losses(q: Tensor, p: Tensor, n: Tensor) -> Tensor:
        # Finite differences would move a target that gradients do not reach, and the mean of centred negatives.
        kept = {} if target_gradient else {"target": still[0], "target_negatives": still[1]}
        exclude = torch.tensor([[0], [-1], [5]])
        return loss_of(q, p, n, tau_instance=0.3, term=term, exclude=exclude, **kept)

    if centred:
        assert torch.autograd.gradcheck(lambda q: losses(q, p.detach(), n.detach()), (q,))
    else:
        assert torch.autograd.gradcheck(losses, (q, p, n))


# ---------------------------------------------------------------- today's call


@pytest.mark.parametrize("detached", [False, True])
def test_the_papers_form_is_the_call_without_a_term_to_the_bit(detached: bool) -> None:
    inputs = [[x.float().requires_grad_() for x in triple(7, 31, 6)] for _ in range(2)]
    term = Consistency("symmetric-kl", temperature=0.07, target_gradient=not detached)
    with_term = terms(*inputs[0], term=term)
    without = terms(*inputs[1], tau_consistency=0.07, detach_target=detached)
    assert with_term.consistency is not None
    assert without.consistency is not None
    assert torch.equal(with_term.consistency, without.consistency)
    ours = torch.autograd.grad(with_term.consistency.sum(), inputs[0], allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(without.consistency.sum(), inputs[1], allow_unused=True, materialize_grads=True)
    assert all(map(torch.equal, ours, theirs))


def test_both_terms_together_are_instance_plus_weight_times_consistency() -> None:
    found = terms(*triple(), term=Consistency("kl", weight=0.7))
    assert found.consistency is not None
    assert torch.equal(total(found, Consistency("kl", weight=0.7)), found.instance + 0.7 * found.consistency)
    assert torch.equal(total(found, Consistency("kl"), 0.0), found.instance)
    assert torch.equal(total(found, None), found.instance)


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("form", DIVERGENCES)
def test_what_is_equal_is_consistent_and_at_rest(form: Form) -> None:
    q, _, n = triple()
    q, p = q.clone().requires_grad_(), q.clone().requires_grad_()
    found = loss_of(q, p, n, term=Consistency(form, temperature=0.1))
    assert found.abs().max() < 1e-12
    for gradient in torch.autograd.grad(found.sum(), (q, p)):
        assert gradient.abs().max() < 1e-9


@pytest.mark.parametrize("form", DIVERGENCES)
def test_a_number_added_to_a_row_changes_nothing_and_one_negative_leaves_nothing_to_compare(form: Form) -> None:
    q, p, n = triple()
    a, b, term = q @ n.T, p @ n.T, Consistency(form, temperature=0.1, target_temperature=0.06)
    moved = divergence(a + 0.3, b - 0.2, term)
    torch.testing.assert_close(moved, divergence(a, b, term), rtol=1e-9, atol=1e-12)
    assert (divergence(a, b, term) > 1e-6).all()
    assert divergence(a[:, :1], b[:, :1], term).abs().max() < 1e-12


@pytest.mark.parametrize("form", SYMMETRIC)
def test_symmetric_forms_do_not_care_which_is_the_target(form: Form) -> None:
    q, p, n = triple()
    term = Consistency(form, temperature=0.1)
    torch.testing.assert_close(loss_of(q, p, n, term=term), loss_of(p, q, n, term=term), rtol=1e-10, atol=1e-12)


def test_one_sided_forms_are_each_other_with_the_sides_exchanged_and_their_mean_is_the_symmetric() -> None:
    q, p, n = triple()
    there, back, both = (
        loss_of(q, p, n, term=Consistency(form, temperature=0.1)) for form in ("kl", "reverse-kl", "symmetric-kl")
    )
    torch.testing.assert_close(loss_of(p, q, n, term=Consistency("kl", temperature=0.1)), back)
    torch.testing.assert_close((there + back) / 2, both)


def test_near_each_other_the_forms_are_multiples_of_one_another() -> None:
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    b = a + 1e-4 * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    symmetric, one, other, jsd = (
        divergence(a, b, Consistency(form, temperature=1.0)) for form in ("symmetric-kl", "kl", "reverse-kl", "jsd")
    )
    torch.testing.assert_close(symmetric / jsd, torch.full((6,), 4.0, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(one, symmetric, rtol=1e-3, atol=0)
    torch.testing.assert_close(other, symmetric, rtol=1e-3, atol=0)
    p = torch.softmax(b, dim=1)
    mean = (p * (b - a)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(symmetric, 0.5 * (p * (b - a - mean) ** 2).sum(dim=1), rtol=1e-3, atol=0)


def test_bounds_of_the_bounded_forms() -> None:
    a = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    assert divergence(a, -a, Consistency("jsd", temperature=0.01)).item() == pytest.approx(math.log(2))
    assert divergence(a, -a, Consistency("mse", temperature=0.01)).item() == pytest.approx(2)


def test_gradients_on_the_scaled_similarities_are_the_written_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(4, 9, generator=generator, dtype=torch.float64).requires_grad_()
    b = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    q, p = torch.softmax(a, dim=1).detach(), torch.softmax(b, dim=1)
    ratio = q.log() - p.log()
    written = {
        "kl": q - p,
        "reverse-kl": q * (ratio - (q * ratio).sum(dim=1, keepdim=True)),
        "mse": -2 * q * ((p - q) - ((p - q) * q).sum(dim=1, keepdim=True)),
    }
    for form, expected in written.items():
        loss = divergence(a, b, Consistency(form, temperature=1.0))  # type: ignore[arg-type]
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), a)[0], expected, rtol=1e-10, atol=1e-12)


def test_a_soft_label_that_is_all_the_instances_own_is_the_instance_term_to_the_bit() -> None:
    inputs = [[x.float().requires_grad_() for x in triple(7, 31, 6)] for _ in range(2)]
    term = replace(SOFT, own_label=1.0)
    soft, plain = terms(*inputs[0], term=term), terms(*inputs[1], tau_consistency=None)
    assert soft.consistency is not None
    assert torch.equal(soft.consistency, plain.instance)
    assert torch.equal(total(soft, term), plain.instance)
    ours = torch.autograd.grad(total(soft, term).sum(), inputs[0])
    theirs = torch.autograd.grad(plain.instance.sum(), inputs[1])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_soft_label_of_weight_0_is_the_instance_term_and_between_they_are_mixed() -> None:
    found = terms(*triple(), term=SOFT)
    assert found.consistency is not None
    assert torch.equal(total(found, SOFT, 0.0), found.instance)
    assert torch.equal(total(found, SOFT, 1.0), found.consistency)
    torch.testing.assert_close(total(found, SOFT, torch.tensor(0.25)), 0.75 * found.instance + 0.25 * found.consistency)
    # A weight of w leaves as much of the instance's own label as one whose own share is 1 - w (1 - own).
    same = terms(*triple(), term=replace(SOFT, own_label=0.875)).consistency
    torch.testing.assert_close(total(found, SOFT, 0.25), same)


def test_a_soft_label_without_the_instance_is_one_sided_kl_and_what_has_no_gradient_on_the_relation() -> None:
    # Cross entropy among K + 1 is that among the K negatives, and the price of looking there at all (the chain rule).
    q, p, n = triple()
    found = loss_of(q, p, n, tau_instance=0.3, term=replace(SOFT, own_label=0.0))
    relation = torch.softmax(p @ n.T / 0.08, dim=1)
    entropy = -(relation * relation.log()).sum(dim=1)
    logits = torch.cat([(q * p).sum(1, keepdim=True), q @ n.T], dim=1) / 0.3
    elsewhere = -torch.log(1 - torch.softmax(logits, dim=1)[:, 0])
    one_sided = loss_of(q, p, n, term=Consistency("kl", temperature=0.3, target_temperature=0.08))
    torch.testing.assert_close(found, one_sided + entropy + elsewhere, rtol=1e-10, atol=1e-10)


def test_a_uniform_target_smooths_the_label_over_the_negatives_alone() -> None:
    q, p, n = triple()
    found = loss_of(q, p, n, tau_instance=0.3, term=replace(SOFT, target_temperature=1e9, own_label=0.8))
    logits = torch.cat([(q * p).sum(1, keepdim=True), q @ n.T], dim=1) / 0.3
    label = torch.full((1, len(n) + 1), 0.2 / len(n), dtype=torch.float64)
    label[0, 0] = 0.8
    expected = F.cross_entropy(logits, label.expand(len(q), -1), reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_the_sharpest_target_is_the_nearest_negative() -> None:
    q, p, n = triple()
    found = loss_of(q, p, n, tau_instance=0.3, term=replace(SOFT, target_temperature=1e-6, own_label=0.0))
    logits = torch.cat([(q * p).sum(1, keepdim=True), q @ n.T], dim=1) / 0.3
    torch.testing.assert_close(found, F.cross_entropy(logits, 1 + (p @ n.T).argmax(dim=1), reduction="none"))


def test_the_gradient_of_a_soft_label_is_prediction_minus_label() -> None:
    q, p, n = triple(2, 4, 4)
    q.requires_grad_()
    found = loss_of(q, p, n, tau_instance=0.3, term=SOFT)
    prediction = torch.softmax(torch.cat([(q * p).sum(1, keepdim=True), q @ n.T], dim=1) / 0.3, dim=1).detach()
    label = torch.cat([torch.full((2, 1), 0.5), 0.5 * torch.softmax(p @ n.T / 0.08, dim=1)], dim=1)
    off = (prediction - label) / 0.3  # [B, K + 1]
    expected = off[:, :1] * p + off[:, 1:] @ n
    torch.testing.assert_close(torch.autograd.grad(found.sum(), q)[0], expected, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- sides, views, centres


@pytest.mark.parametrize("form", FORMS)
def test_without_a_gradient_the_target_stands_still(form: Form) -> None:
    q, p, n = (x.requires_grad_() for x in triple())
    term = Consistency(form, 1.0, temperature=0.2, target_temperature=0.1, target_gradient=False, own_label=0.0)
    found = terms(q, p, n, tau_instance=0.3, term=term)
    assert found.consistency is not None
    there = torch.autograd.grad(found.consistency.sum(), p, allow_unused=True, materialize_grads=True)[0]
    if form == "soft-label":  # the positive is still among the candidates of the prediction
        prediction = torch.softmax(torch.cat([(q * p).sum(1, keepdim=True), q @ n.T], dim=1) / 0.3, dim=1)[:, :1]
        torch.testing.assert_close(there, (prediction / 0.3 * q).detach())
    else:
        assert there.abs().max() == 0


@pytest.mark.parametrize("form", FORMS)
def test_another_view_can_be_the_target(form: Form) -> None:
    q, p, n = triple()
    weak, weak_negatives = unit_rows(len(q), 7, 20), unit_rows(len(n), 7, 21)  # of another network, of another width
    term = Consistency(form, 1.0, temperature=0.2, target_temperature=0.1)
    found = terms(q, p, n, term=term, target=weak, target_negatives=weak_negatives)
    assert torch.equal(found.instance, terms(q, p, n, term=term).instance)
    assert found.consistency is not None
    if form != "soft-label":
        expected = divergence(q @ n.T, weak @ weak_negatives.T, term)
        torch.testing.assert_close(found.consistency, expected)
    assert torch.equal(loss_of(q, p, n, term=term, target=p), loss_of(q, p, n, term=term))


def test_centred_similarities_do_not_see_where_the_embeddings_lie_together() -> None:
    q, p, n = triple(6, 50, 8)
    far = 4 * unit_rows(1, 8, 99)
    term = Consistency(temperature=0.2, centred=True)
    here = loss_of(q, p, n, term=term)

    def together(x: Tensor) -> Tensor:  # moved away, towards one direction, and not put back onto the sphere
        return x + far

    moved = loss_of(*(together(x) for x in (q, p, n)), term=term)
    torch.testing.assert_close(moved, here, rtol=1e-9, atol=1e-9)
    plain = replace(term, centred=False)
    on_the_sphere = [F.normalize(together(x), dim=1) for x in (q, p, n)]
    assert loss_of(*on_the_sphere, term=plain).mean() < 0.1 * loss_of(q, p, n, term=plain).mean()
    assert loss_of(*on_the_sphere, term=term).mean() > 0.5 * here.mean()


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_may_see_nothing_costs_nothing(form: Form) -> None:
    q, p, n = (x.requires_grad_() for x in triple(2, 3, 4))
    term = Consistency(form, 1.0, temperature=0.2, target_temperature=0.1)
    found = loss_of(q, p, n, term=term, exclude=torch.tensor([[0, 1, 2], [0, 0, 0]]))
    assert found[0].item() == pytest.approx(0, abs=1e-12)
    assert found[1] > 1e-6
    for gradient in torch.autograd.grad(found.sum(), (q, p, n)):
        assert gradient.isfinite().all()
    # And excluded columns are as if they were not there.
    torch.testing.assert_close(found[1:], loss_of(q[1:], p[1:], n[1:], term=term))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_temperatures_stay_finite_in_low_precision(form: Form, dtype: torch.dtype) -> None:
    q, p, n = (x.to(dtype).requires_grad_() for x in triple(4, 40, 8))
    found = loss_of(q, p, n, tau_instance=0.05, term=Consistency(form, 1.0, temperature=0.02, target_temperature=0.01))
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    for gradient in torch.autograd.grad(found.sum(), (q, p, n)):
        assert gradient.isfinite().all()


# ---------------------------------------------------------------- the value


def test_the_weight_rises_from_its_start() -> None:
    term = Consistency(weight=2.0, start=0.25, ramp_up=0.5)
    assert term.weight_at(0.2) == 0
    assert term.weight_at(0.25) == pytest.approx(2 * math.exp(-5))
    assert term.weight_at(0.5) == pytest.approx(2 * math.exp(-5 / 4))
    assert term.weight_at(0.75) == term.weight_at(1.0) == 2
    assert Consistency(weight=2.0).weight_at(0) == 2


def test_sharpness_is_the_targets_temperature_or_the_predictions() -> None:
    assert Consistency(temperature=0.1).sharpness == 0.1
    assert Consistency(temperature=0.1, target_temperature=0.04).sharpness == 0.04


@pytest.mark.parametrize("name", CONSISTENCY_PRESETS)
def test_presets_can_be_computed(name: str) -> None:
    term = CONSISTENCY_PRESETS[name]
    found = terms(*triple(), term=term)
    assert (total(found, term) > found.instance - 10).all()


def test_weights_of_the_papers_ablations_are_of_equal_strength_near_the_target() -> None:
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(6, 40, generator=generator, dtype=torch.float64) * 0.1
    b = a + 1e-5 * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    strengths = [
        CONSISTENCY_PRESETS[name].weight * divergence(a, b, CONSISTENCY_PRESETS[name])
        for name in ("paper-v2", "paper-kl", "paper-jsd")
    ]
    torch.testing.assert_close(strengths[0], strengths[1], rtol=1e-3, atol=0)
    torch.testing.assert_close(strengths[0], strengths[2], rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "kk"}, "no consistency term 'kk'"),
        ({"weight": -1.0}, "0 or more"),
        ({"weight": math.nan}, "0 or more"),
        ({"form": "soft-label", "weight": 1.5}, "at most 1"),
        ({"temperature": 0.0}, "above 0"),
        ({"target_temperature": math.inf}, "above 0"),
        ({"own_label": 1.2}, "between 0 and 1"),
        ({"start": -0.1}, "between 0 and 1"),
        ({"ramp_up": 2.0}, "between 0 and 1"),
    ],
)
def test_senseless_terms_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Consistency(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(4, 4).double()}, "target must be"),
        ({"target": torch.zeros(5, 3).double()}, "target must be"),
        ({"target_negatives": torch.zeros(9, 4).double()}, "give target too"),
        ({"target": torch.zeros(5, 3).double(), "target_negatives": torch.zeros(8, 3).double()}, "a row for each"),
        ({"term": Consistency("mse"), "backend": "fused"}, "backend='fused' cannot run here"),
    ],
)
def test_mistakes_are_told_plainly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        contrast(*triple(), **change)
