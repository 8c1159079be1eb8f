# mypy: allow-untyped-defs, allow-incomplete-defs
"""The max pooling at the entrance of a ResNet (3x3, stride 2, padding 1) in Triton kernels, for channels-last memory.

It takes torch 3.5 of the 51 ms of a ResNet-50 step, mostly because its backward pass scatters. Here every pixel of the
input asks the (at most four) windows that it lies in whether it was their maximum, which they have written down in one
byte each: no atomics, the same bits every time, and each byte of memory touched once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from co2.kernels.normalisation import launching_on

_CHANNELS = 64  # of a tile, at most
_PIXELS = 32  # of a tile


def max_pool(input: Tensor) -> Tensor:
    """`F.max_pool2d(input, 3, stride=2, padding=1)` of [N, C, H, W]. Of equal maxima the first counts, as in torch."""
    output: Tensor = _MaxPool.apply(input)
    return output


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        x = input.movedim(1, -1).contiguous()  # [N, H, W, C]
        images, height, width, channels = x.shape
        out_height, out_width = (height + 1) // 2, (width + 1) // 2
        y = x.new_empty(images, out_height, out_width, channels)
        winner = torch.empty_like(y, dtype=torch.uint8)
        with launching_on(x):
            _forward_kernel[_grid(y)](x, y, winner, *x.shape[1:], out_height, out_width, y[..., 0].numel(), **_tile(y))
        ctx.save_for_backward(winner)
        ctx.shape = x.shape
        return y.movedim(-1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (winner,) = ctx.saved_tensors
        dy = gradients[0].movedim(1, -1).contiguous()  # [N, H', W', C]
        dx = dy.new_empty(ctx.shape)
        with launching_on(dy):
            _backward_kernel[_grid(dx)](dy, winner, dx, *ctx.shape[1:], *dy.shape[1:3], dx[..., 0].numel(), **_tile(dx))
        return dx.movedim(-1, 1)


def _grid(output: Tensor) -> tuple[int, int]:
    return triton.cdiv(output[..., 0].numel(), _PIXELS), triton.cdiv(output.shape[-1], _tile(output)["CHANNELS"])


def _tile(output: Tensor) -> dict[str, int]:
    return {"PIXELS": _PIXELS, "CHANNELS": min(_CHANNELS, triton.next_power_of_2(output.shape[-1]))}


@triton.jit
def _forward_kernel(
    x, y, winner, height, width, channels, out_height, out_width, pixels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)  # [p] of the output, of all images
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)  # [c]
    wanted = (pixel < pixels)[:, None] & (column < channels)[None, :]  # [p, c]
    image = pixel // (out_height * out_width)
    top = pixel // out_width % out_height * 2 - 1
    left = pixel % out_width * 2 - 1
    best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
    place = tl.zeros((PIXELS, CHANNELS), tl.uint8)
    for window in tl.static_range(9):
        row, column_of_pixels = top + window // 3, left + window % 3  # [p]
        there = (row >= 0) & (row < height) & (column_of_pixels >= 0) & (column_of_pixels < width)
        source = ((image * height + row) * width + column_of_pixels).to(tl.int64)
        value = tl.load(
            x + source[:, None] * channels + column[None, :], mask=wanted & there[:, None], other=float("-inf")
        ).to(tl.float32)
        better = (value > best) | (value != value)  # NaN wins, to be noticed
        best = tl.where(better, value, best)
        place = tl.where(better, window, place).to(tl.uint8)
    target = pixel.to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(y + target, best.to(y.dtype.element_ty), mask=wanted)
    tl.store(winner + target, place, mask=wanted)


@triton.jit
def _backward_kernel(
    dy, winner, dx, height, width, channels, out_height, out_width, pixels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)  # [p] of the input, of all images
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)  # [c]
    wanted = (pixel < pixels)[:, None] & (column < channels)[None, :]  # [p, c]
    image = pixel // (height * width)
    row = pixel // width % height
    column_of_pixels = pixel % width
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for window in tl.static_range(4):
        out_row = (row + 1) // 2 - window // 2  # [p] of a window that may hold this pixel,
        out_column = (column_of_pixels + 1) // 2 - window % 2
        within_row = row - (2 * out_row - 1)  # and where in that window it is
        within_column = column_of_pixels - (2 * out_column - 1)
        there = (
            (out_row >= 0) & (out_row < out_height) & (within_row < 3)
            & (out_column >= 0) & (out_column < out_width) & (within_column < 3)
        )  # fmt: skip
        source = ((image * out_height + out_row) * out_width + out_column).to(tl.int64)
        source = source[:, None] * channels + column[None, :]
        won = tl.load(winner + source, mask=wanted & there[:, None], other=9)
        own = (within_row * 3 + within_column)[:, None] == won
        total += tl.where(own, tl.load(dy + source, mask=wanted & there[:, None], other=0.0).to(tl.float32), 0.0)
    tl.store(dx + pixel.to(tl.int64)[:, None] * channels + column[None, :], total.to(dx.dtype.element_ty), mask=wanted)
