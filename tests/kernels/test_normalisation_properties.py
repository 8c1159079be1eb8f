"""Batches of any shape through the kernels of `co2.kernels.normalisation`."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from test_normalisation import Case


@settings(max_examples=10)
@given(
    images=st.integers(2, 9), groups=st.integers(1, 4), channels=st.integers(1, 40), side=st.integers(1, 6),
    residual=st.booleans(), relu=st.booleans(),
)  # fmt: skip
def test_any_shape(images: int, groups: int, channels: int, side: int, residual: bool, relu: bool) -> None:
    # Of two or three values the gradient is nearly nothing, and all that is left of it rounding.
    assume(images >= 2 * groups and images // groups * side * side >= 8)
    Case((images, channels, side, side), groups, residual=residual, relu=relu, offset=0.5).check(1e-5)
