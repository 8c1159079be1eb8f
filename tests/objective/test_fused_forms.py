"""The fused kernels for the other forms of the consistency term, held to the rule of `test_fused`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fused import ALL, QUERY_ALONE, check, evaluate, gpu, interpreted, triple

from co2.objective.contrast import contrast, why_not_streamed
from co2.objective.specification import Consistency, Form

STREAMED: tuple[Form, ...] = ("symmetric-kl", "kl", "reverse-kl", "soft-label")


def check_term(inputs: Any, term: Consistency, needed: tuple[bool, ...] = ALL, **options: Any) -> None:
    """Beside a term the temperature of the call is not looked at, and says here what is tolerated."""
    check(inputs, needed, term=term, tau_consistency=min(term.temperature, term.sharpness), **options)


@interpreted
@pytest.mark.parametrize("form", STREAMED)
@pytest.mark.parametrize("precision", ["fast", "full"])
def test_each_form_with_two_temperatures_and_excluded_columns(form: Form, precision: str) -> None:
    exclude = torch.randint(-1, 51, (25, 2), generator=torch.Generator().manual_seed(1))
    term = Consistency(form, 1.0, temperature=0.1, target_temperature=0.05)
    check_term(triple(25, 51, 12), term, precision=precision)
    check_term(triple(25, 51, 12), term, QUERY_ALONE, precision=precision, exclude=exclude)
    check_term(triple(9, 200, 16), replace(term, target_temperature=0.3), precision=precision, terms="consistency")


@interpreted
@pytest.mark.parametrize("form", STREAMED)
@pytest.mark.parametrize("temperatures", [(0.2, 0.02), (0.02, 0.2), (0.01, 0.01), (0.2, 0.2)])
def test_small_temperatures_and_a_target_that_stands_still(form: Form, temperatures: tuple[float, float]) -> None:
    sigma, rho = temperatures
    term = Consistency(form, 1.0, temperature=sigma, target_temperature=rho)
    check_term(triple(9, 40, 16, seed=4), term, precision="full")
    check_term(triple(9, 40, 16, seed=4), replace(term, target_gradient=False), precision="full")


@interpreted
@pytest.mark.parametrize("form", STREAMED)
def test_embeddings_in_blocks_of_dimensions_and_half_precision(form: Form) -> None:
    term = Consistency(form, 1.0, temperature=0.1, target_temperature=0.05)
    check_term(triple(5, 70, 140), term)
    check_term(triple(25, 51, 24, dtype=torch.bfloat16), term)


@interpreted
@pytest.mark.parametrize("form", STREAMED)
def test_a_row_that_may_see_nothing_costs_nothing(form: Form) -> None:
    exclude = torch.tensor([[0, 1, 2, 3, 4], [1, 1, 1, 1, 1], [4, 3, 2, 1, 0]])
    for sigma in (0.2, 0.01):  # with and without a running maximum
        term = Consistency(form, 1.0, temperature=sigma, target_temperature=sigma / 2, own_label=0.4)
        found, gradients = evaluate(
            triple(3, 5, 16), ALL, "instance, consistency", backend="fused", exclude=exclude, term=term
        )
        assert found.consistency is not None
        assert found.consistency[1].abs() > 0
        assert found.consistency[[0, 2]].abs().max() < 1e-6
        for gradient in gradients:
            assert gradient is not None
            assert gradient.isfinite().all()


@interpreted
def test_a_soft_label_that_is_all_the_instances_own_is_the_instance_term_to_the_bit() -> None:
    inputs = triple(9, 40, 16)
    soft = contrast(*inputs, backend="fused", term=Consistency("soft-label", 1.0, own_label=1.0))
    assert soft.consistency is not None
    assert torch.equal(soft.consistency, contrast(*inputs, backend="fused", tau_consistency=None).instance)


@interpreted
@pytest.mark.parametrize("form", STREAMED)
def test_torch_compile_takes_it_whole(form: Form) -> None:
    q, p, n = triple(9, 40, 16)
    q.requires_grad_()
    term = Consistency(form, 1.0, temperature=0.1, target_temperature=0.05, target_gradient=False)

    def loss(q: torch.Tensor) -> torch.Tensor:
        found = contrast(q, p, n, backend="fused", term=term)
        assert found.consistency is not None
        return (found.instance + found.consistency).mean()

    (expected,) = torch.autograd.grad(loss(q), q)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q), q)
    torch.testing.assert_close(expected, compiled, rtol=1e-6, atol=1e-7)


def test_what_does_not_stream_says_so() -> None:
    assert why_not_streamed(None) is None
    assert all(why_not_streamed(Consistency(form, 1.0)) is None for form in STREAMED)
    assert "no kernel" in str(why_not_streamed(Consistency("jsd")))
    assert "centred" in str(why_not_streamed(Consistency(centred=True)))
    assert "not the positive" in str(why_not_streamed(Consistency(), other_target=True))
    assert "label smoothing" in str(why_not_streamed(Consistency("soft-label", 1.0), label_smoothing=0.1))
    q, p, n = triple(2, 3, 4)
    with pytest.raises(ValueError, match="cannot run here: the consistency term's form 'mse' has no kernel"):
        contrast(q, p, n, term=Consistency("mse"), backend="fused")


@gpu
@pytest.mark.parametrize("form", STREAMED)
@pytest.mark.parametrize("shape", [(252, 507, 123), (512, 4096, 128), (256, 65536, 128), (33, 100, 512)], ids=str)
def test_on_the_gpu(form: Form, shape: tuple[int, int, int]) -> None:
    term = Consistency(form, 1.0, temperature=0.1, target_temperature=0.05)
    check_term(triple(*shape, device="cuda"), term)
    check_term(triple(*shape, seed=1, device="cuda"), replace(term, target_temperature=0.02), QUERY_ALONE)
    check_term(triple(*shape, seed=1, device="cuda"), term, precision="full")


@gpu
@pytest.mark.parametrize("form", STREAMED)
def test_it_can_be_recorded_on_the_gpu(form: Form) -> None:
    q, p, n = triple(256, 4096, 128, device="cuda")
    q.requires_grad_()
    term = Consistency(form, 1.0, temperature=0.1, target_temperature=0.05, target_gradient=False)

    def step() -> torch.Tensor:
        found = contrast(F.normalize(q, dim=1), p, n, backend="fused", term=term)
        assert found.consistency is not None
        return torch.autograd.grad((found.instance + found.consistency).mean(), q)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
