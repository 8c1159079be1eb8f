"""The pooling kernels against torch's: in the interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from co2.kernels.pooling import max_pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(input: Tensor) -> None:
    ours, theirs = (input.clone().requires_grad_() for _ in range(2))
    found, truth = max_pool(ours), F.max_pool2d(theirs, 3, stride=2, padding=1)
    assert torch.equal(found, truth)
    upstream = torch.randint(-8, 9, truth.shape, device=input.device).to(input.dtype)  # whole numbers add up exactly
    found.backward(upstream)
    truth.backward(upstream)
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 5), (8, 8), (7, 6)])
@pytest.mark.parametrize("channels", [1, 5, 70])
def test_equals_torchs(size: tuple[int, int], channels: int) -> None:
    generator = torch.Generator().manual_seed(sum(size))
    check(torch.randn(3, channels, *size, generator=generator).to(DEVICE))


def test_of_equal_maxima_the_first_counts() -> None:
    check(torch.zeros(2, 3, 6, 6, device=DEVICE))
    check(torch.randint(0, 2, (2, 3, 9, 9), generator=torch.Generator().manual_seed(0)).float().to(DEVICE))


def test_a_nan_is_not_lost() -> None:
    input = torch.zeros(1, 1, 4, 4, device=DEVICE)
    input[0, 0, 1, 1] = torch.nan
    assert torch.equal(max_pool(input).isnan(), F.max_pool2d(input, 3, stride=2, padding=1).isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes_on_a_gpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    input = torch.randint(-50, 50, (64, 64, 112, 112), generator=generator).to("cuda", dtype)
    check(input.contiguous(memory_format=torch.channels_last))
