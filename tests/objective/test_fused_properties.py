"""The fused kernels against the float64 truth on whatever shapes, temperatures and options are drawn."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_fused import check, interpreted, triple


@interpreted
# Without shrinking: the interpreter is slow, and the drawn case names itself.
@settings(
    max_examples=12,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    st.tuples(st.integers(1, 80), st.integers(1, 150), st.integers(1, 40)),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_whatever_the_shape_and_temperature(
    shape: tuple[int, int, int], tau: float, sigma: float, smoothing: float, entries: int, detached: bool, seed: int
) -> None:
    b, k, _ = shape
    exclude = torch.randint(-1, k + 1, (b, entries), generator=torch.Generator().manual_seed(seed))
    check(
        triple(*shape, seed=seed),
        precision="full",
        tau_instance=tau,
        tau_consistency=sigma,
        label_smoothing=smoothing,
        exclude=exclude if entries else None,
        detach_target=detached,
    )
