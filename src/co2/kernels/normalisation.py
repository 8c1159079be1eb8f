# mypy: allow-untyped-defs, allow-incomplete-defs
"""Batch normalisation in groups, with the addition and the ReLU that follow it, as one operation in Triton kernels.

What torch does in a ResNet block's last layer, for G groups of a batch: G normalisations of a part each, a
concatenation, an addition and a ReLU, which read and write the whole activation ten times. The bytes are all that
counts here, so each kernel below reads what it needs once. With rows = every pixel of every image, in channels-last
memory, an activation is a matrix x [rows, C] whose groups are contiguous stretches of rows:

    forward   mean_g, var_g    over the rows of group g                                     one read of x
              y = relu((x - mean_g) / sqrt(var_g + eps) * weight + bias + residual)         reads x, residual; writes y
    backward  d = dy where y > 0, which is also the residual's gradient
              sum_g d, sum_g d * x̂    with x̂ = (x - mean_g) / sqrt(var_g + eps)             reads dy, x (and y)
              dx = weight / sqrt(var_g + eps) * (d - mean_g d - x̂ * mean_g (d * x̂))         reads d, x; writes dx

Without a residual the sign of y is computed again from x, so that y is not read. Sums are float32 in a fixed order:
each program adds up one stretch of rows, and a second, small kernel puts the stretches together, so that results repeat
bit for bit. Variances are sums of squares about the first row of a stretch (and merged as in Chan et al. 1979), so that
a mean that is large against the spread costs no digits.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 528  # that add up stretches of rows: four for each of an H100's 132 multiprocessors
_ROWS = 32  # of a tile
_CHANNELS = 64  # likewise, at most
_TILES = 4  # loaded at once, so that enough bytes are on their way to keep the memory busy


class Running(NamedTuple):
    """What a layer remembers of the batches it has seen, changed in place."""

    mean: Tensor  # [C]
    variance: Tensor  # [C]
    batches: Tensor  # [] int64
    momentum: float


def normalise_in_groups(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    groups: int,
    rows_per_image: int = 1,
    epsilon: float = 1e-5,
    running: Running | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """relu(batch_norm(input) + residual), where each of `groups` contiguous parts of the batch has its own statistics.

    Args:
        input: [N, C, ...], fastest in channels-last memory; float32, bfloat16 or float16.
        weight: [C], or None.
        bias: [C], or None.
        groups: how many parts, as equal as `rows_per_image` rows (views of one image) that stay together allow,
            larger ones first.
        rows_per_image: see `groups`.
        epsilon: added to variances.
        running: moved by its momentum towards the mean over the groups of their means and unbiased variances.
        residual: [N, C, ...], added after the normalisation.
        relu: whether negative results are set to zero.
    """
    output: Tensor = _NormaliseInGroups.apply(
        input, weight, bias, residual, running, groups, rows_per_image, epsilon, relu
    )
    return output


class _Layout(NamedTuple):
    """How an activation [rows, C] is cut into groups, and these into the stretches that programs add up."""

    groups: int
    images: int  # in a smaller group
    larger: int  # so many groups, the first, have one more image
    rows: int  # of an image, or of the views of an image that stay together
    channels: int

    @property
    def largest_group(self) -> int:
        return (self.images + (self.larger > 0)) * self.rows

    @property
    def width(self) -> int:
        """Channels of a tile."""
        return min(_CHANNELS, triton.next_power_of_2(self.channels))

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.channels, self.width)

    @property
    def stretches(self) -> int:
        """Into how many parts a group is cut: enough to fill a GPU, and none of them tiny."""
        return max(1, min(_PROGRAMS // (self.groups * self.blocks), self.largest_group // (_ROWS * _TILES)))

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        return self.channels, self.images, self.larger, self.rows

    @property
    def stretch(self) -> tuple[int, int]:
        """Rows of a stretch, and how many times a program loads some of them."""
        loads = triton.cdiv(triton.cdiv(self.largest_group, self.stretches), _ROWS * _TILES)
        return loads * _ROWS * _TILES, loads


class _NormaliseInGroups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running: Running | None,
        groups: int,
        rows_per_image: int,
        epsilon: float,
        relu: bool,
    ) -> Tensor:
        x = _channels_last(input)  # [N, ..., C]
        added = None if residual is None else _channels_last(residual)
        images, larger = divmod(len(x) // rows_per_image, groups)
        layout = _Layout(groups, images, larger, rows_per_image * x[0, ..., 0].numel(), x.shape[-1])
        with launching_on(x):
            mean, variance = _statistics(x, layout)
            y = torch.empty_like(x)
            _apply_kernel[_tiles(layout)](
                x, added, y, weight, bias, mean, variance, *_in_place(running), *layout.arguments, groups,
                epsilon, running.momentum if running else 0.0,
                TILES=_TILES, ROWS=_ROWS, CHANNELS=layout.width, RELU=relu,
            )  # fmt: skip
        ctx.save_for_backward(x, y if relu and added is not None else None, weight, bias, mean, variance)
        ctx.layout, ctx.epsilon, ctx.relu, ctx.has_residual = layout, epsilon, relu, added is not None
        return y.movedim(-1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, mean, variance = ctx.saved_tensors
        layout, relu = ctx.layout, ctx.relu
        dy = _channels_last(gradients[0])
        masked = torch.empty_like(x) if relu and ctx.has_residual else None
        partial = x.new_empty(2, layout.groups, layout.stretches, layout.channels, dtype=torch.float32)
        sums = x.new_empty(2, layout.groups, layout.channels, dtype=torch.float32)
        size, loads = layout.stretch
        dx = torch.empty_like(x)
        dweight, dbias = (None if of is None else torch.empty_like(of) for of in (weight, bias))
        with launching_on(x):
            _sums_kernel[layout.stretches, layout.groups, layout.blocks](
                dy, x, y, masked, weight, bias, mean, variance, partial[0], partial[1],
                *layout.arguments, layout.stretches, size, 2 * loads, ctx.epsilon,
                TILES=_TILES // 2, ROWS=_ROWS, CHANNELS=layout.width, RELU=relu,
            )  # fmt: skip
            _merge_sums_kernel[_few(layout), layout.groups](
                partial[0], partial[1], sums[0], sums[1], layout.channels, layout.stretches,
                STRETCHES=_together(layout), CHANNELS=_MERGED,
            )  # fmt: skip
            _input_gradient_kernel[_tiles(layout)](
                dy if masked is None else masked, x, dx, weight, bias, mean, variance, sums[0], sums[1], dweight, dbias,
                *layout.arguments, layout.groups, ctx.epsilon,
                TILES=_TILES, ROWS=_ROWS, CHANNELS=layout.width, RELU=relu and masked is None,
            )  # fmt: skip
        residual_gradient = None
        if ctx.has_residual:
            residual_gradient = gradients[0] if masked is None else masked.movedim(-1, 1)
        return (
            dx.movedim(-1, 1),
            dweight,
            dbias,
            residual_gradient,
            *[None] * 5,
        )


# Compiled once, not again for each layer whose sizes happen to divide by 16.
_SIZES = ["images", "larger", "rows", "groups", "stretches", "size", "loads"]
_MERGED = 16  # channels of a program that puts stretches together


def _statistics(x: Tensor, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of each channel in each group: [G, C] each."""
    partial = x.new_empty(2, layout.groups, layout.stretches, layout.channels, dtype=torch.float32)
    whole = x.new_empty(2, layout.groups, layout.channels, dtype=torch.float32)
    _statistics_kernel[layout.stretches, layout.groups, layout.blocks](
        x, partial[0], partial[1], *layout.arguments, layout.stretches, *layout.stretch,
        TILES=_TILES, ROWS=_ROWS, CHANNELS=layout.width,
    )  # fmt: skip
    _merge_statistics_kernel[_few(layout), layout.groups](
        partial[0], partial[1], whole[0], whole[1], *layout.arguments, layout.stretches, layout.stretch[0],
        STRETCHES=_together(layout), CHANNELS=_MERGED,
    )  # fmt: skip
    return whole[0], whole[1]


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, -1).contiguous()  # which copies nothing where memory is channels-last already


def _tiles(layout: _Layout) -> tuple[int, int, int]:
    """The grid of an element-wise kernel."""
    return triton.cdiv(layout.largest_group, _ROWS * _TILES), layout.groups, layout.blocks


def _few(layout: _Layout) -> int:
    return triton.cdiv(layout.channels, _MERGED)


def _together(layout: _Layout) -> int:
    """Stretches that a merging kernel is compiled for: the same for nearly all layers, so that few are compiled."""
    return max(256, triton.next_power_of_2(layout.stretches))


def _in_place(running: Running | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if running is None else (running.mean, running.variance, running.batches)


def launching_on(tensor: Tensor) -> Any:
    """Kernels go to the GPU that holds this tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def _group_rows(group, images, larger, rows):
    """Where a group begins, and how many rows it has."""
    first = (group * images + tl.minimum(group, larger)) * rows
    count = (images + tl.where(group < larger, 1, 0)) * rows
    return first, count


@triton.jit(do_not_specialize=_SIZES)
def _statistics_kernel(
    x, partial_mean, partial_squares, channels, images, larger, rows, stretches, size, loads,
    TILES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    stretch, group = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)  # [c]
    inside = column < channels
    first, count = _group_rows(group, images, larger, rows)
    begin = tl.minimum(stretch * size, count)
    end = tl.minimum(begin + size, count)
    x += first.to(tl.int64) * channels
    there = column < tl.where(begin < end, channels, 0)  # newer interpreters of triton have no `inside & (begin < end)`
    pivot = tl.load(x + begin.to(tl.int64) * channels + column, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    for load in range(loads):
        for tile in tl.static_range(TILES):
            row = begin + (load * TILES + tile) * ROWS + tl.arange(0, ROWS)  # [r]
            wanted = (row < end)[:, None] & inside[None, :]  # [r, c]
            place = row.to(tl.int64)[:, None] * channels + column[None, :]
            value = tl.load(x + place, mask=wanted, other=0.0).to(tl.float32)
            shifted = tl.where(wanted, value - pivot[None, :], 0.0)
            total += shifted
            squares += shifted * shifted
    sum_shifted, sum_squares = tl.sum(total, 0), tl.sum(squares, 0)  # [c]
    number = tl.maximum(end - begin, 1).to(tl.float32)
    place = (group * stretches + stretch) * channels + column
    tl.store(partial_mean + place, pivot + sum_shifted / number, mask=inside)
    tl.store(partial_squares + place, sum_squares - sum_shifted * sum_shifted / number, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _merge_statistics_kernel(
    partial_mean, partial_squares, mean, variance, channels, images, larger, rows, stretches, size,
    STRETCHES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)  # [c]
    stretch = tl.arange(0, STRETCHES)  # [s]
    _, count = _group_rows(group, images, larger, rows)
    begin = tl.minimum(stretch * size, count)
    number = (tl.minimum(begin + size, count) - begin).to(tl.float32)[:, None]  # [s, 1] rows in each stretch
    wanted = (stretch < stretches)[:, None] & (column < channels)[None, :]  # [s, c]
    number = tl.where((stretch < stretches)[:, None], number, 0.0)
    place = (group * stretches + stretch)[:, None] * channels + column[None, :]
    means = tl.load(partial_mean + place, mask=wanted, other=0.0)
    squares = tl.load(partial_squares + place, mask=wanted, other=0.0)
    whole = tl.sum(number * means, 0) / count  # [c]
    apart = means - whole[None, :]
    spread = tl.sum(squares + number * apart * apart, 0) / count
    tl.store(mean + group * channels + column, whole, mask=column < channels)
    tl.store(variance + group * channels + column, spread, mask=column < channels)


@triton.jit
def _scale_and_shift(weight, bias, mean, rstd, column, inside):
    """y = x * scale + shift normalises and applies the layer's own weight and bias: [c] each."""
    scale = rstd
    if weight is not None:
        scale *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = -mean * scale
    if bias is not None:
        shift += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return scale, shift


@triton.jit(do_not_specialize=_SIZES)
def _apply_kernel(
    x, residual, y, weight, bias, means, variances, running_mean, running_variance, batches,
    channels, images, larger, rows, groups, epsilon, momentum,
    TILES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)  # [c]
    inside = column < channels
    first, count = _group_rows(group, images, larger, rows)
    mean = tl.load(means + group * channels + column, mask=inside, other=0.0)
    variance = tl.load(variances + group * channels + column, mask=inside, other=0.0)
    scale, shift = _scale_and_shift(weight, bias, mean, 1 / tl.sqrt(variance + epsilon), column, inside)
    offset = first.to(tl.int64) * channels
    for step in tl.static_range(TILES):
        row = (tile * TILES + step) * ROWS + tl.arange(0, ROWS)  # [r]
        wanted = (row < count)[:, None] & inside[None, :]  # [r, c]
        place = offset + row.to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.load(x + place, mask=wanted, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if residual is not None:
            value += tl.load(residual + place, mask=wanted, other=0.0).to(tl.float32)
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # NaN stays NaN, to be noticed
        tl.store(y + place, value.to(y.dtype.element_ty), mask=wanted)

    # One program for each block of channels has this to do, too. (Two conditions: the first is known when compiling.)
    if running_mean is not None:
        if (tile == 0) & (group == 0):
            mean_over_groups = tl.zeros((CHANNELS,), tl.float32)
            variance_over_groups = tl.zeros((CHANNELS,), tl.float32)
            for other in range(groups):
                _, number = _group_rows(other, images, larger, rows)
                unbiased = number.to(tl.float32) / (number - 1)
                mean_over_groups += tl.load(means + other * channels + column, mask=inside, other=0.0)
                variance_over_groups += (
                    tl.load(variances + other * channels + column, mask=inside, other=0.0) * unbiased
                )
            old_mean = tl.load(running_mean + column, mask=inside, other=0.0)
            old_variance = tl.load(running_variance + column, mask=inside, other=0.0)
            new_mean = old_mean + momentum * (mean_over_groups / groups - old_mean)
            new_variance = old_variance + momentum * (variance_over_groups / groups - old_variance)
            tl.store(running_mean + column, new_mean, mask=inside)
            tl.store(running_variance + column, new_variance, mask=inside)
            if tl.program_id(2) == 0:
                tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=_SIZES)
def _sums_kernel(
    dy, x, y, masked, weight, bias, means, variances, partial_sum, partial_product,
    channels, images, larger, rows, stretches, size, loads, epsilon,
    TILES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    stretch, group = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)  # [c]
    inside = column < channels
    first, count = _group_rows(group, images, larger, rows)
    begin = tl.minimum(stretch * size, count)
    end = tl.minimum(begin + size, count)
    mean = tl.load(means + group * channels + column, mask=inside, other=0.0)
    rstd = 1 / tl.sqrt(tl.load(variances + group * channels + column, mask=inside, other=0.0) + epsilon)
    scale, shift = _scale_and_shift(weight, bias, mean, rstd, column, inside)
    offset = first.to(tl.int64) * channels
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    products = tl.zeros((ROWS, CHANNELS), tl.float32)
    for load in range(loads):
        for tile in tl.static_range(TILES):
            row = begin + (load * TILES + tile) * ROWS + tl.arange(0, ROWS)  # [r]
            wanted = (row < end)[:, None] & inside[None, :]  # [r, c]
            place = offset + row.to(tl.int64)[:, None] * channels + column[None, :]
            value = tl.load(x + place, mask=wanted, other=0.0).to(tl.float32)
            gradient = tl.load(dy + place, mask=wanted, other=0.0).to(tl.float32)
            if RELU:
                if masked is not None:
                    positive = tl.load(y + place, mask=wanted, other=0.0) > 0
                else:
                    positive = value * scale[None, :] + shift[None, :] > 0
                gradient = tl.where(positive, gradient, 0.0)
                if masked is not None:
                    tl.store(masked + place, gradient.to(masked.dtype.element_ty), mask=wanted)
            total += gradient
            products += gradient * (value - mean[None, :])  # zero outside, where the gradient is
    place = (group * stretches + stretch) * channels + column
    tl.store(partial_sum + place, tl.sum(total, 0), mask=inside)
    tl.store(partial_product + place, tl.sum(products, 0) * rstd, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _merge_sums_kernel(
    partial_sum, partial_product, sums, products, channels, stretches,
    STRETCHES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)  # [c]
    stretch = tl.arange(0, STRETCHES)  # [s]
    wanted = (stretch < stretches)[:, None] & (column < channels)[None, :]  # [s, c]
    place = (group * stretches + stretch)[:, None] * channels + column[None, :]
    whole_sum = tl.sum(tl.load(partial_sum + place, mask=wanted, other=0.0), 0)
    whole_product = tl.sum(tl.load(partial_product + place, mask=wanted, other=0.0), 0)
    tl.store(sums + group * channels + column, whole_sum, mask=column < channels)
    tl.store(products + group * channels + column, whole_product, mask=column < channels)


@triton.jit(do_not_specialize=_SIZES)
def _input_gradient_kernel(
    dy, x, dx, weight, bias, means, variances, sums, products, dweight, dbias,
    channels, images, larger, rows, groups, epsilon,
    TILES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)  # [c]
    inside = column < channels
    first, count = _group_rows(group, images, larger, rows)
    mean = tl.load(means + group * channels + column, mask=inside, other=0.0)
    rstd = 1 / tl.sqrt(tl.load(variances + group * channels + column, mask=inside, other=0.0) + epsilon)
    scale, shift = _scale_and_shift(weight, bias, mean, rstd, column, inside)
    mean_gradient = tl.load(sums + group * channels + column, mask=inside, other=0.0) / count
    mean_product = tl.load(products + group * channels + column, mask=inside, other=0.0) / count
    offset = first.to(tl.int64) * channels
    for step in tl.static_range(TILES):
        row = (tile * TILES + step) * ROWS + tl.arange(0, ROWS)  # [r]
        wanted = (row < count)[:, None] & inside[None, :]  # [r, c]
        place = offset + row.to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.load(x + place, mask=wanted, other=0.0).to(tl.float32)
        gradient = tl.load(dy + place, mask=wanted, other=0.0).to(tl.float32)
        if RELU:
            gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
        normalised = (value - mean[None, :]) * rstd[None, :]
        result = scale[None, :] * (gradient - mean_gradient[None, :] - normalised * mean_product[None, :])
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask=wanted)

    # The gradients of weight and bias are the sums over all groups: again for one program of each block of channels.
    if (tile == 0) & (group == 0):
        _store_sum_over_groups(products, dweight, groups, channels, column, inside)
        _store_sum_over_groups(sums, dbias, groups, channels, column, inside)


@triton.jit
def _store_sum_over_groups(of_groups, whole, groups, channels, column, inside):
    """Add up a row of `of_groups` [G, C] for each group in `whole` [C], where there is one."""
    if whole is not None:
        total = tl.zeros(column.shape, tl.float32)
        for group in range(groups):
            total += tl.load(of_groups + group * channels + column, mask=inside, other=0.0)
        tl.store(whole + column, total.to(whole.dtype.element_ty), mask=inside)
