"""The fused kernels against the float64 truth: in Triton's interpreter on the CPU, and for real where there is a GPU.

The rule: on the same inputs the kernels' error may exceed that of the reference in the same dtype by what an error of
`SIMILARITY_ERROR` in every similarity would cause. Divided by a temperature it is an error of a loss, and divided by it
once more an error of a gradient.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported and when kernels are defined

from co2.objective import contrast as contrast_module
from co2.objective import fused as fused_module
from co2.objective.contrast import Contrast, contrast

interpreted = pytest.mark.skipif(not fused_module.INTERPRETED, reason="Triton was imported without its interpreter")
gpu = pytest.mark.gpu
on_gpu = torch.cuda.is_available() and not fused_module.INTERPRETED

# Rounding operands to 11 significant bits, as TF32 does, or to float32's 24 with some to spare for long sums.
SIMILARITY_ERROR = {"fast": 2.0**-12, "full": 2.0**-20}


def unit_rows(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(rows, dim, generator=generator), dim=1)


def triple(
    b: int, k: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries with positives that resemble them, as in training, and unrelated negatives."""
    generator = torch.Generator().manual_seed(seed)
    query, negatives = unit_rows(b, d, generator), unit_rows(k, d, generator)
    positive = F.normalize(query + 0.7 * unit_rows(b, d, generator), dim=1)
    return tuple(x.to(device=device, dtype=dtype) for x in (query, positive, negatives))  # type: ignore[return-value]


def evaluate(
    inputs: tuple[Tensor, ...], needed: tuple[bool, ...], terms: str, **options: Any
) -> tuple[Contrast, list[Tensor | None]]:
    """The terms, and the gradients of a loss that weights every row differently."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
    found = contrast(*leaves, **options)
    weights = torch.linspace(0.5, 1.5, len(found.instance), device=found.instance.device, dtype=torch.float64)
    loss = torch.zeros((), device=weights.device, dtype=torch.float64)
    if "instance" in terms:
        loss = loss + (found.instance.double() * weights).sum()
    if "consistency" in terms and found.consistency is not None:
        loss = loss + (found.consistency.double() * weights.flip(0)).sum()
    if any(needed):
        loss.backward()
    return found, [x.grad for x in leaves]


def error(found: Tensor, truth: Tensor) -> float:
    difference = found.detach().double() - truth.detach()
    assert not difference.isnan().any()
    return difference.norm().item()


def check(
    inputs: tuple[Tensor, Tensor, Tensor],
    needed: tuple[bool, ...] = (True, True, True),
    terms: str = "instance, consistency",
    precision: str = "fast",
    **options: Any,
) -> None:
    """Holds the kernels to the rule at the head of this file."""
    exact = tuple(x.double() for x in inputs)
    truth, true_gradients = evaluate(exact, needed, terms, backend="reference", **options)
    plain, plain_gradients = evaluate(inputs, needed, terms, backend="reference", **options)
    found, gradients = evaluate(inputs, needed, terms, backend="fused", precision=precision, **options)
    tau, sigma = options.get("tau_instance", 0.2), options.get("tau_consistency", 0.05) or math.inf
    wrong = SIMILARITY_ERROR[precision] * math.sqrt(len(inputs[0]))  # norm over the rows
    spread = 1 if truth.consistency is None else 1 + truth.consistency.abs().max().item()  # of d, in a sense
    assert found.instance.dtype == torch.float32
    assert error(found.instance, truth.instance) <= error(plain.instance, truth.instance) + wrong / tau
    assert (found.consistency is None) == (truth.consistency is None)
    if truth.consistency is not None and plain.consistency is not None and found.consistency is not None:
        tolerated = error(plain.consistency, truth.consistency) + wrong * spread / sigma
        assert error(found.consistency, truth.consistency) <= tolerated
    for need, true, same, ours, original in zip(
        needed, true_gradients, plain_gradients, gradients, inputs, strict=True
    ):
        assert (ours is not None) == need
        if true is not None and same is not None and ours is not None:
            assert (ours.dtype, ours.shape) == (original.dtype, original.shape)
            assert error(ours, true) <= error(same, true) + wrong * (tau**-2 + spread * sigma**-2)
    # The rank may differ by the negatives that score almost as the positive does.
    lead = (exact[0] * exact[1]).sum(dim=1, keepdim=True) - exact[0] @ exact[2].T  # [B, K]
    near = (lead.abs() < 4 * SIMILARITY_ERROR[precision]).sum(dim=1)
    assert found.rank.dtype == torch.int64
    assert ((found.rank - truth.rank).abs() <= near).all()


QUERY_ALONE, ALL = (True, False, False), (True, True, True)

# ---------------------------------------------------------------- in the interpreter


@interpreted
@pytest.mark.parametrize("shape", [(64, 128, 32), (25, 51, 12), (3, 200, 130), (70, 5, 16), (130, 70, 24), (1, 1, 1)])
@pytest.mark.parametrize("precision", ["fast", "full"])
def test_ragged_shapes(shape: tuple[int, int, int], precision: str) -> None:
    check(triple(*shape), precision=precision)


@interpreted
@pytest.mark.parametrize(
    "needed", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)], ids=str
)
def test_gradients_exist_for_exactly_what_requires_them(needed: tuple[bool, bool, bool]) -> None:
    check(triple(9, 40, 16), needed)


@interpreted
@pytest.mark.parametrize("terms", ["instance", "consistency"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_one_term_alone_in_the_loss(terms: str, smoothing: float) -> None:
    check(triple(9, 40, 16), terms=terms, label_smoothing=smoothing)


@interpreted
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_excluded_columns(smoothing: float) -> None:
    inputs = triple(9, 40, 16)
    exclude = torch.randint(-1, 40, (9, 3), generator=torch.Generator().manual_seed(1))
    exclude[0] = torch.tensor([7, 7, -1])  # twice the same, and no column
    exclude[1] = torch.tensor([40, 99, -5])  # no columns at all
    check(inputs, exclude=exclude, label_smoothing=smoothing)
    check(inputs, exclude=exclude.int()[:, ::2], label_smoothing=smoothing, precision="full")


@interpreted
def test_a_row_that_may_see_nothing_costs_nothing() -> None:
    inputs = triple(3, 5, 16)
    exclude = torch.tensor([[0, 1, 2, 3, 4], [1, 1, 1, 1, 1], [4, 3, 2, 1, 0]])
    for tau in (0.2, 0.01):  # with and without a running maximum
        options = {"exclude": exclude, "tau_instance": tau, "tau_consistency": tau, "label_smoothing": 0.1}
        check(inputs, **options)
        found, gradients = evaluate(inputs, ALL, "instance, consistency", backend="fused", **options)
        assert found.consistency is not None
        assert found.instance[[0, 2]].abs().max() < 1e-6
        assert found.consistency[[0, 2]].abs().max() == 0
        assert found.rank[[0, 2]].tolist() == [0, 0]
        for gradient in gradients[:2]:
            assert gradient is not None
            assert gradient[[0, 2]].abs().max() < 1e-5
            assert gradient[1].abs().max() > 1e-3


@interpreted
def test_a_detached_target() -> None:
    check(triple(9, 40, 16), detach_target=True)
    check(triple(9, 40, 16), (False, True, True), terms="consistency", detach_target=True)


@interpreted
def test_without_consistency() -> None:
    check(triple(9, 40, 16), tau_consistency=None)
    check(triple(9, 40, 16), tau_consistency=None, label_smoothing=0.2, exclude=torch.zeros(9, 1, dtype=torch.int64))


@interpreted
@pytest.mark.parametrize("tau", [0.01, 0.03, 0.2, 1.0])
@pytest.mark.parametrize("sigma", [0.01, 0.025, 0.05, 1.0])
def test_temperatures(tau: float, sigma: float) -> None:
    inputs = triple(9, 40, 16, seed=4)
    check(inputs, precision="full", tau_instance=tau, tau_consistency=sigma)
    check(inputs, tau_instance=tau, tau_consistency=sigma)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype: torch.dtype) -> None:
    check(triple(25, 51, 24, dtype=dtype))


@interpreted
def test_non_contiguous_inputs() -> None:
    q, p, n = triple(9, 40, 16)
    wide = torch.zeros(9, 32)
    wide[:, ::2] = p
    options = {"backend": "fused", "exclude": torch.arange(18).view(2, 9).T}
    spread = (q.T.contiguous().T, wide[:, ::2], torch.cat([n, n], dim=1)[:, :16])
    for gradients in (QUERY_ALONE, ALL):
        tidy, tidy_gradients = evaluate((q, p, n), gradients, "instance, consistency", **options)
        found, found_gradients = evaluate(spread, gradients, "instance, consistency", **options)
        for one, other in zip([*tidy, *tidy_gradients], [*found, *found_gradients], strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    row = unit_rows(1, 16, torch.Generator())
    found = contrast(row.expand(9, 16), row.expand(9, 16), row.expand(40, 16), backend="fused")
    torch.testing.assert_close(found.instance, torch.full((9,), math.log(41)), rtol=1e-4, atol=1e-4)


@interpreted
def test_a_query_equal_to_its_positive_is_exactly_consistent() -> None:
    q, _, n = triple(9, 40, 16)
    found, (gradient, _, _) = evaluate((q, q, n), QUERY_ALONE, "consistency", backend="fused")
    assert found.consistency is not None
    assert found.consistency.abs().max() < 1e-6
    assert gradient is not None
    assert gradient.abs().max() < 1e-3


@interpreted
def test_nan_stays_in_its_row_and_a_nan_negative_reaches_all() -> None:
    q, p, n = triple(70, 40, 16)
    q[3, 5] = math.nan
    p[66, 0] = math.nan
    found, (gradient, _, _) = evaluate((q, p, n), QUERY_ALONE, "instance, consistency", backend="fused")
    assert found.consistency is not None
    assert gradient is not None
    for rows in (found.instance.isnan(), found.consistency.isnan(), gradient.isnan().any(dim=1)):
        assert rows.nonzero().flatten().tolist() == [3, 66]
    q, p, n = triple(70, 40, 16)
    n[30, 2] = math.nan
    found, (gradient, _, _) = evaluate((q, p, n), QUERY_ALONE, "instance, consistency", backend="fused")
    assert found.instance.isnan().all()
    assert gradient is not None
    assert gradient.isnan().any(dim=1).all()


@interpreted
def test_the_same_inputs_give_the_same_bits() -> None:
    runs = [evaluate(triple(25, 300, 24), ALL, "instance, consistency", backend="fused") for _ in range(2)]
    for one, other in zip([*runs[0][0], *runs[0][1]], [*runs[1][0], *runs[1][1]], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@interpreted
def test_rounding_the_negatives_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = triple(25, 51, 24)
    before = evaluate(inputs, ALL, "instance, consistency", backend="fused")
    monkeypatch.setattr(fused_module, "ROUND_ONCE_ROWS", 1)
    after = evaluate(inputs, ALL, "instance, consistency", backend="fused")
    for one, other in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def descend(backend: str, device: str, steps: int) -> list[float]:
    """The losses of a small encoder that learns to find the noisy copies of vectors among other directions."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(32, 24, generator=generator).to(device)
    weight = (0.3 * torch.randn(24, 16, generator=generator)).to(device).requires_grad_()
    negatives = unit_rows(96, 16, generator).to(device)
    losses = []
    for _ in range(steps):
        noise = 0.8 * torch.randn(2, 32, 24, generator=generator).to(device)
        query = F.normalize((data + noise[0]) @ weight, dim=1)
        with torch.no_grad():
            key = F.normalize((data + noise[1]) @ weight, dim=1)
        found = contrast(query, key, negatives, backend=backend)  # type: ignore[arg-type]
        assert found.consistency is not None
        loss = (found.instance + 0.3 * found.consistency).mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= 1.0 * gradient
        losses.append(loss.item())
    return losses


@interpreted
def test_training_follows_the_same_curve() -> None:
    plain, ours = descend("reference", "cpu", 12), descend("fused", "cpu", 12)
    assert plain[-1] < 0.85 * plain[0]
    assert ours == pytest.approx(plain, rel=2e-3)


@interpreted
def test_torch_compile_takes_it_whole() -> None:
    q, p, n = triple(9, 40, 16)
    q.requires_grad_()

    def loss(q: Tensor) -> Tensor:
        found = contrast(q, p, n, backend="fused")
        assert found.consistency is not None
        return (found.instance + found.consistency).mean()

    (expected,) = torch.autograd.grad(loss(q), q)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q), q)
    assert torch.equal(expected, compiled)


@interpreted
def test_changing_the_negatives_before_backward_is_noticed() -> None:
    q, p, n = triple(9, 40, 16)
    loss = contrast(q.requires_grad_(), p, n, backend="fused").instance.sum()
    n[0] = n[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@interpreted
def test_autocast_does_not_make_it_coarser() -> None:
    inputs = triple(9, 40, 16)
    expected = contrast(*inputs, backend="fused")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = contrast(*inputs, backend="fused")
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


# ---------------------------------------------------------------- without a GPU


def test_every_kind_of_kernel_compiles_for_a_gpu() -> None:
    # Not in this process: here Triton may be interpreting.
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, script, "90", "--few"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    for kernel in [name for name in vars(fused_module) if name.endswith("_kernel")]:
        assert kernel in run.stdout


@pytest.mark.skipif(fused_module.INTERPRETED, reason="runs in this process already")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
def test_all_of_this_in_a_process_of_its_own() -> None:
    # Some other test imported Triton first, and it is too late for the interpreter here.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    files = [__file__, Path(__file__).with_name("test_fused_properties.py")]
    run = subprocess.run([sys.executable, "-m", "pytest", *files], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]


def test_fused_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="inputs are float64"):
        contrast(*triple(2, 3, 4, dtype=torch.float64), backend="fused")
    with pytest.raises(ValueError, match="up to 1024 numbers"):
        contrast(*triple(2, 3, 1025), backend="fused")
    monkeypatch.setattr(fused_module, "INTERPRETED", False)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, and the inputs are on 'cpu'"):
        contrast(*triple(2, 3, 4), backend="fused")
    monkeypatch.setitem(sys.modules, "co2.objective.fused", None)
    with pytest.raises(ValueError, match="Triton cannot be imported"):
        contrast(*triple(2, 3, 4), backend="fused")


def test_auto_falls_back_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrast_module, "_told", set())
    monkeypatch.setattr(fused_module, "obstacle", lambda query: "it is too old")

    class OnCuda:
        device = torch.device("cuda")

    with pytest.warns(UserWarning, match="plain PyTorch, not as a fused kernel: it is too old"):
        assert not contrast_module._takes_fused(OnCuda(), "auto")  # type: ignore[arg-type]
    assert not contrast_module._takes_fused(OnCuda(), "auto")  # type: ignore[arg-type]  # silent: warnings would raise
    with pytest.raises(ValueError, match="cannot run here: it is too old"):
        contrast_module._takes_fused(OnCuda(), "fused")  # type: ignore[arg-type]


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        major, minor, name = 7, 5, "Tesla T4"

    class Query:
        dtype, shape, device = torch.float32, (4, 8), torch.device("cuda")

    monkeypatch.setattr(fused_module, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Old)
    assert "Tesla T4 is older" in str(fused_module.obstacle(Query()))  # type: ignore[arg-type]


def test_debug_mode_checks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    q, p, n = triple(4, 6, 8)
    contrast(2 * q, p, n)  # costs nothing and says nothing
    monkeypatch.setattr(contrast_module, "DEBUG", True)
    contrast(q.bfloat16(), p.bfloat16(), n.bfloat16())  # rounding is no mistake
    with pytest.raises(ValueError, match=r"query must have rows of length 1, and row \d has length 2"):
        contrast(2 * q, p, n)
    n[5, 0] = math.nan
    with pytest.raises(ValueError, match=r"negatives holds NaN or infinity, first in row 5"):
        contrast(q, p, n)


def test_the_schedule_fills_the_chip_and_covers_all_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_module, "_multiprocessors", lambda device: 132)
    tiles = fused_module.Tiles(rows=64, negatives=64, warps=4, stages=3, programs=2)
    for b, k in [(256, 65536), (4096, 65536), (1, 2**24), (1000, 65000), (7000, 4096), (3, 5), (65536, 65536)]:
        rows, splits, per_split = fused_module._schedule(b, k, tiles, torch.device("cpu"))
        negative_tiles = -(-k // 64)
        assert rows == -(-b // 64)
        assert (splits - 1) * per_split < negative_tiles <= splits * per_split  # all covered, none empty
        if rows * negative_tiles >= 264:
            programs = rows * splits
            assert programs / (264 * -(-programs // 264)) > 0.8


def test_tall_tiles_are_for_float32_negatives_that_stay_on_the_chip() -> None:
    def rows(count: int, dim: int, dtype: torch.dtype = torch.float32, full: bool = False) -> int:
        return fused_module.forward_tiles(full, count, torch.empty(64, dim, dtype=dtype)).rows

    assert rows(256, 128) == rows(65, 24) == 128
    assert rows(64, 128) == 64  # half of a tall one would be empty
    assert rows(256, 129) == rows(256, 1024) == 64  # in blocks of dimensions: it would not fit
    assert rows(256, 128, torch.float16) == rows(256, 128, torch.bfloat16) == 64
    assert rows(256, 128, full=True) == 32


# ---------------------------------------------------------------- on a GPU


@gpu
@pytest.mark.parametrize(
    "shape",
    [(252, 507, 123), (256, 4096, 128), (1024, 65536, 128), (100, 3000, 1000), (33, 100, 512), (1, 1, 1)],
    ids=str,
)
def test_on_the_gpu(shape: tuple[int, int, int]) -> None:
    check(triple(*shape, device="cuda"))
    check(triple(*shape, seed=1, device="cuda"), QUERY_ALONE)


@gpu
@pytest.mark.parametrize("shape", [(252, 507, 123), (256, 65536, 128), (100, 3000, 300)], ids=str)
def test_full_precision_on_the_gpu(shape: tuple[int, int, int]) -> None:
    check(triple(*shape, device="cuda"), precision="full")


@gpu
@pytest.mark.parametrize(
    ("dtype", "sigma", "smoothing", "entries", "detached"),
    [
        (torch.float32, 0.01, 0.0, 0, False),
        (torch.float32, 0.04, 0.1, 2, False),
        (torch.float32, 1.0, 0.1, 0, True),
        (torch.float32, None, 0.1, 2, False),
        (torch.bfloat16, 0.05, 0.0, 2, False),
        (torch.bfloat16, 0.02, 0.1, 0, True),
        (torch.float16, 0.05, 0.0, 0, False),
        (torch.float16, 0.2, 0.1, 1, True),
    ],
)
def test_options_on_the_gpu(
    dtype: torch.dtype, sigma: float | None, smoothing: float, entries: int, detached: bool
) -> None:
    exclude = torch.randint(-1, 1000, (252, entries), device="cuda") if entries else None
    check(
        triple(252, 1000, 96, dtype=dtype, device="cuda"),
        tau_consistency=sigma,
        label_smoothing=smoothing,
        exclude=exclude,
        detach_target=detached,
    )


@gpu
@pytest.mark.parametrize("terms", ["instance", "consistency"])
def test_one_term_alone_on_the_gpu(terms: str) -> None:
    check(triple(252, 1000, 128, device="cuda"), terms=terms)


@gpu
def test_rounding_once_on_the_gpu() -> None:
    check(triple(fused_module.ROUND_ONCE_ROWS, 8192, 128, device="cuda"), QUERY_ALONE)


@gpu
def test_nan_on_the_gpu() -> None:
    q, p, n = triple(252, 1000, 128, device="cuda")
    q[3, 5] = math.nan
    found, (gradient, _, _) = evaluate((q, p, n), QUERY_ALONE, "instance, consistency", backend="fused")
    assert gradient is not None
    assert found.instance.isnan().nonzero().flatten().tolist() == [3]
    assert gradient.isnan().any(dim=1).nonzero().flatten().tolist() == [3]
    n[7] = math.nan
    found, (gradient, _, _) = evaluate((q, p, n), QUERY_ALONE, "instance, consistency", backend="fused")
    assert found.instance.isnan().all()


@gpu
def test_bits_do_not_change_between_runs_on_the_gpu() -> None:
    inputs = triple(512, 65536, 128, device="cuda")
    first, gradients = evaluate(inputs, ALL, "instance, consistency", backend="fused")
    for _ in range(20):
        again, again_gradients = evaluate(inputs, ALL, "instance, consistency", backend="fused")
        for one, other in zip([*first, *gradients], [*again, *again_gradients], strict=True):
            assert torch.equal(one, other)  # type: ignore[arg-type]


@gpu
def test_torch_compile_on_the_gpu() -> None:
    q, p, n = triple(256, 4096, 128, device="cuda")
    q.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        found = contrast(F.normalize(x, dim=1), p, n)
        assert found.consistency is not None
        return (found.instance + found.consistency).mean()

    (expected,) = torch.autograd.grad(loss(q), q)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q), q)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-6)


@gpu
def test_a_captured_graph_replays_on_new_inputs() -> None:
    q, p, n = triple(256, 4096, 128, device="cuda")
    q.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        found = contrast(q, p, n, backend="fused")
        assert found.consistency is not None
        loss = (found.instance + found.consistency).mean()
        return loss, torch.autograd.grad(loss, q)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradient = step()
    for seed in (1, 2):
        with torch.no_grad():
            for old, new in zip((q, p, n), triple(256, 4096, 128, seed=seed, device="cuda"), strict=True):
                old.copy_(new)
        graph.replay()
        expected_loss, expected_gradient = step()
        assert torch.equal(loss, expected_loss)
        assert torch.equal(gradient, expected_gradient)


@gpu
def test_autocast_and_no_host_synchronisation() -> None:
    q, p, n = triple(256, 4096, 128, device="cuda")
    q.requires_grad_()

    def step() -> Contrast:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = contrast(q, p, n)
            assert found.consistency is not None
            (found.instance + found.consistency).mean().backward()
        return found

    step()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = contrast(q, p, n)
    assert torch.equal(found.instance, expected.instance)


@gpu
def test_a_million_negatives_need_little_more_than_themselves() -> None:
    q, p, n = triple(1024, 2**20, 128, device="cuda")
    q.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = contrast(q, p, n, backend="fused")
    assert found.consistency is not None
    (found.instance + found.consistency).mean().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 256 * 2**20
    few = torch.arange(0, 1024, 128, device="cuda")  # the truth of some rows, in chunks
    truth = contrast(q[few].detach().double(), p[few].double(), n.double(), backend="reference")
    torch.testing.assert_close(found.instance[few].double(), truth.instance, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.consistency[few].double(), truth.consistency, rtol=3e-3, atol=1e-4)


@gpu
def test_more_than_two_to_the_31_numbers() -> None:
    k, d = 2**24 + 64, 128  # 4.3 GB of bfloat16
    q, p, few = triple(64, 4096, d, dtype=torch.bfloat16, device="cuda")
    n = few[torch.arange(k, device="cuda") % 4096]
    n[-1] = q[5]  # behind the 2^31st number: an index that wrapped around would not see it
    q.requires_grad_()
    found = contrast(q, p, n, backend="fused")
    assert found.consistency is not None
    (found.instance + found.consistency).sum().backward()
    similarities = q.double() @ few.double().T  # [64, 4096], each of them k / 4096 times
    s = (q.double() * p.double()).sum(dim=1)
    logits = torch.cat([s[:, None] / 0.2, similarities / 0.2 + math.log(k / 4096)], dim=1)
    expected = torch.logsumexp(logits, dim=1) - logits[:, 0]
    others = torch.arange(64, device="cuda") != 5
    torch.testing.assert_close(found.instance[others].double(), expected[others].detach(), rtol=1e-3, atol=1e-3)
    assert q.grad is not None
    assert q.grad.isfinite().all()
    alone = contrast(q.detach(), p, n[:-1], backend="fused")
    assert (found.rank - alone.rank)[5] == 1
    assert (found.rank - alone.rank)[others].sum() == 0


@gpu
def test_training_follows_the_same_curve_on_the_gpu() -> None:
    plain, ours = descend("reference", "cuda", 100), descend("fused", "cuda", 100)
    assert plain[-1] < 0.5 * plain[0]
    assert ours == pytest.approx(plain, rel=5e-2)
