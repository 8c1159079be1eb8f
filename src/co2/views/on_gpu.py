# mypy: allow-untyped-defs, allow-incomplete-defs
"""How the views of a whole batch are made at once on a GPU, given their parameters: `co2.views.transform` as kernels.

Pictures of any sizes lie one after the other in one buffer of bytes, and each row of a batch names one of them and has
parameters of its own. Nothing waits for the GPU or depends on values that only it knows, so that a CUDA graph can hold
all of it, and there are no atomics, so that the same inputs give the same bits.

Launches. A view of up to 64 pixels is one program's work, but for the blur. A larger one is cut into tiles:

    _crop_kernel    crop, resize and flip; and, because contrast needs the mean of a whole picture, carry out the
                    changes of colour that come before it and leave the sum of the grey values of each tile
    _colour_kernel  add up these sums; carry out all changes of colour
    _blur_kernel    blur the rows that are to be blurred. Not launched where a view has no blur.

Solarisation is the last to touch a level, in whichever of these kernels writes a row for good.

Resizing. With antialiasing and n pixels of the crop for S of the view, pixel i of the view is the mean of the pixels x
of the crop weighted by a triangle of half-width max(n/S, 1) around n/S·(i + ½). In units of 1/(2S) all of that is whole
numbers, and the weight of x is exactly

    d(x) / Σ d,    d(x) = max(0, 2·max(n, S) − |2S·x + S − n(2i + 1)|)    over 0 <= x < n

On a CPU torch rounds these weights to 15 bits and the picture to 8 bits between the horizontal and the vertical pass,
and so do the kernels. Each pixel sums over its own window of both axes; for the scales of augmentations the few pixels
that are summed twice cost less than keeping an intermediate picture.

Colours are torchvision's operations in float32 in the same order, rounded down to whole levels after each; sums and
products are fused where torch's are, and nowhere else. The sum of grey values is an integer, hence exact.

Blur multiplies a window of the view by a band matrix of Gaussian weights from the right and from the left. The view's
levels are exact in float16, and what is not is the sum of two float16 numbers: errors below a thousandth of a level.

Tolerance. Against `make_view` with the same parameters on a CPU with AVX2:

    crop and resize     at most 1 level, for at most 1 of 1,000 pixels (weights that round the other way)
    each other change   at most 1 level, for at most 1 of 1,000 pixels (blur: 1 of 100)
    all together        more than 2 levels for at most 1 of 1,000 pixels, and 0.01 levels in the mean

On other CPUs torchvision keeps the resized picture in float32 up to the end, and 1 level is common.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from co2.views import transform
from co2.views.parameters import ViewParameters
from co2.views.view import View

# As ViewParameters.jitter_order counts them.
BRIGHTNESS = tl.constexpr(0)
CONTRAST = tl.constexpr(1)
SATURATION = tl.constexpr(2)
HUE = tl.constexpr(3)
NO_CHANGE = tl.constexpr(4)

SOLARISED = tl.constexpr(transform.SOLARISED)

LARGEST_WHOLE = 64  # side of the largest view that one program makes alone
TILE = 32  # side of the tiles of larger views; divides 96, 160 and 224
COLOUR_BLOCK = 1024  # pixels
BLUR_WINDOW = 64  # side of the window that is blurred at once, borders included

# Rows of a batch may be a slice that begins anywhere. Without this every new alignment would be compiled for anew.
_ANYWHERE = [
    "pixels", "offsets", "heights", "widths", "crops", "jitters", "orders", "factors", "greys", "flips", "blurs",
    "sigmas", "solarises",
]  # fmt: skip


@dataclass(frozen=True)
class Pictures:
    """The picture of each row of a batch. A picture may serve many rows."""

    pixels: Tensor
    """uint8, flat: pictures [3, H, W] one after the other."""
    offsets: Tensor
    """int64 [R]: where each row's picture begins in `pixels`."""
    heights: Tensor
    """int64 [R]"""
    widths: Tensor
    """int64 [R]"""


def make_views(pictures: Pictures, parameters: ViewParameters, view: View) -> Tensor:
    """One view per row, uint8 [R, 3, S, S]. Row r of `parameters` belongs to row r of `pictures`, on the same GPU."""
    size, rows, device = view.size, len(pictures.offsets), pictures.pixels.device
    views = torch.empty(rows, 3, size, size, dtype=torch.uint8, device=device)
    if rows == 0:
        return views
    picture = (pictures.pixels, *_packed(pictures.offsets, pictures.heights, pictures.widths, parameters.crop))
    colours = _packed(parameters.jitter, parameters.jitter_order, parameters.jitter_factors, parameters.grey)
    flip, *last = _packed(parameters.flip, parameters.blur, parameters.blur_sigma, parameters.solarise)
    blurs, solarises = view.blur_probability > 0, view.solarise_probability > 0
    brightness, contrast, saturation, hue = (strength > 0 for strength in view.jitter)
    constants = {
        "S": size, "HALF": triton.next_power_of_2(triton.cdiv(size, 2)), "GREY_FIRST": view.grey_first,
        "BRIGHTNESS_ON": brightness, "CONTRAST_ON": contrast, "SATURATION_ON": saturation, "HUE_ON": hue,
        # Otherwise the compiler would fuse sums and products that torch rounds one by one.
        "enable_fp_fusion": False,
    }  # fmt: skip

    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        if size <= LARGEST_WHOLE:
            unfinished = torch.empty_like(views) if blurs else views  # [R, 3, S, S]: what is still to be blurred
            side = triton.next_power_of_2(size)
            _whole_kernel[(rows,)](
                *picture, *colours, flip, *last, unfinished, views,
                **constants, BLURS=blurs, SOLARISES=solarises, SIDE=side, num_warps=max(1, side * side // 256),
            )  # fmt: skip
        else:
            unfinished = torch.empty_like(views)  # [R, 3, S, S]
            across = triton.cdiv(size, TILE)
            sums = torch.empty(rows, across * across, dtype=torch.int32, device=device)
            _crop_kernel[(rows * across * across,)](
                *picture, *colours, flip, unfinished, sums, **constants, ACROSS=across, SIDE=TILE, num_warps=4
            )
            blocks = triton.cdiv(size * size, COLOUR_BLOCK)
            del constants["HALF"]
            _colour_kernel[(rows * blocks,)](
                *colours, *last, unfinished, sums, views,
                **constants, BLURS=blurs, SOLARISES=solarises, TILES=across * across,
                LANES=triton.next_power_of_2(across * across), BLOCK=COLOUR_BLOCK, num_warps=4,
            )  # fmt: skip
        if blurs:
            radius = view.blur_radius
            # As many windows side by side as leave at least half a window between the borders.
            windows = triton.cdiv(BLUR_WINDOW // 2 + 2 * radius, BLUR_WINDOW)
            useful = min(BLUR_WINDOW, windows * BLUR_WINDOW - 2 * radius)
            across = triton.cdiv(size, useful)
            _blur_kernel[(rows * 3 * across * across,)](
                *last, unfinished, views,
                S=size, SOLARISES=solarises, RADIUS=radius, LANES=triton.next_power_of_2(2 * radius + 1),
                WINDOWS=windows, WINDOW=BLUR_WINDOW, USEFUL=useful, ACROSS=across, num_warps=4,
            )  # fmt: skip
    return views


def normalise_views(views: Tensor, scale: tuple[float, ...], shift: tuple[float, ...]) -> Tensor:
    """views * scale + shift for each channel: bfloat16 [N, 3, S, S] in channels-last memory of uint8 [N, 3, S, S]."""
    numbers = torch.empty(views.shape, dtype=torch.bfloat16, device=views.device, memory_format=torch.channels_last)
    pixels = views.shape[-2] * views.shape[-1]
    with torch.cuda.device(views.device) if views.is_cuda else contextlib.nullcontext():
        _normalise_kernel[len(views), triton.cdiv(3 * pixels, _NORMALISED)](
            views.contiguous(), numbers, pixels, *scale, *shift, BLOCK=_NORMALISED
        )
    return numbers


_NORMALISED = 2048  # numbers that one program writes


def _packed(*tensors: Tensor) -> list[Tensor]:
    """Rows without gaps, and bytes for truth values. Copies nothing where rows have none."""
    return [(x.view(torch.uint8) if x.dtype == torch.bool else x).contiguous() for x in tensors]


@triton.jit
def _first_in_window(place, n, S: tl.constexpr):
    """The first pixel of the crop that counts for the view's pixel `place`."""
    # Whole-number division rounds towards 0, hence the maximum first.
    return tl.maximum(n * (2 * place + 1) - 2 * tl.maximum(n, S) + S, 0) // (2 * S)


@triton.jit
def _closeness(place, x, n, S: tl.constexpr):
    """d(x) of the formula above: by how much pixel `x` of the crop counts, before division by the sum."""
    d = 2 * tl.maximum(n, S) - tl.abs(2 * S * x + S - n * (2 * place + 1))
    return tl.where(x < n, tl.maximum(d, 0), 0)


@triton.jit
def _peak(place, n, S: tl.constexpr):
    """The last pixel of the crop up to the centre of the window; -1 where all pixels lie after it."""
    return (n * (2 * place + 1) + S) // (2 * S) - 1


@triton.jit
def _sum_of_closeness(place, first, n, S: tl.constexpr):
    """Σ d: d rises evenly up to the peak and falls evenly after it, so that each part is its length times its mean."""
    reach = 2 * tl.maximum(n, S)
    centre = n * (2 * place + 1) - S
    peak = _peak(place, n, S)
    last = tl.minimum((centre + reach) // (2 * S), n - 1)
    rising = (peak - first + 1) * (reach - centre + S * (first + peak))
    falling = (last - peak) * (reach + centre - S * (peak + 1 + last))
    return rising + falling


@triton.jit
def _window(n, S: tl.constexpr):
    """How many pixels of the crop a window holds at most."""
    return (2 * tl.maximum(n, S) + S - 1) // S


@triton.jit
def _bits(n, S: tl.constexpr, HALF: tl.constexpr):
    """How many bits after the point the weights of one axis have: as many as fit into 15 bits for the largest weight.

    The weights of the second half of an axis mirror those of the first, so that HALF of the places are enough.
    """
    place = tl.minimum(tl.arange(0, HALF), S - 1)
    peak = _peak(place, n, S)
    closest = tl.maximum(_closeness(place, peak, n, S), _closeness(place, peak + 1, n, S))
    total = _sum_of_closeness(place, _first_in_window(place, n, S), n, S)
    share = closest.to(tl.float32) / total.to(tl.float32)
    largest = tl.max(share, axis=0)
    bits = 14  # enough for a weight of 1, which every axis that is enlarged has
    for more in tl.static_range(8):
        bits += tl.where(largest * (1 << (15 + more)) + 0.5 < (1 << 15), 1, 0)
    return bits


@triton.jit
def _weight_unit(place, first, n, bits, S: tl.constexpr):
    """What d(x) is multiplied by to become a weight with that many bits after the point."""
    total = _sum_of_closeness(place, first, n, S).to(tl.float32)
    return tl.div_rn(tl.zeros_like(total) + (1 << bits), total)


@triton.jit
def _weight(place, x, n, unit, S: tl.constexpr):
    return (tl.fma(_closeness(place, x, n, S).to(tl.float32), unit, 0.5)).to(tl.int32)


@triton.jit
def _resized_crop(
    pixels, offsets, heights, widths, crops, row, y, x, S: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Red, green and blue of the view's pixels in rows `y` [N] and columns `x` [N]: float32 [N], whole numbers."""
    width = tl.load(widths + row)
    plane = tl.load(heights + row) * width
    # Only the beginning of a picture needs 64 bits.
    red = pixels + tl.load(offsets + row) + tl.load(crops + row * 4) * width + tl.load(crops + row * 4 + 1)
    green = red + plane
    blue = green + plane
    width = width.to(tl.int32)
    crop_height = tl.load(crops + row * 4 + 2).to(tl.int32)
    crop_width = tl.load(crops + row * 4 + 3).to(tl.int32)

    y = tl.minimum(y, S - 1)  # pixels past the edge repeat the last one
    x = tl.minimum(x, S - 1)
    y_bits = _bits(crop_height, S, HALF)
    x_bits = _bits(crop_width, S, HALF)
    first_y = _first_in_window(y, crop_height, S)  # [N], as all that follows
    first_x = _first_in_window(x, crop_width, S)
    y_unit = _weight_unit(y, first_y, crop_height, y_bits, S)
    x_unit = _weight_unit(x, first_x, crop_width, x_bits, S)

    # Half a level first, so that cutting off the bits after the point rounds.
    r = tl.zeros_like(y) + (1 << (y_bits - 1))
    g = r
    b = r
    for y_step in range(_window(crop_height, S)):
        y_weight = _weight(y, first_y + y_step, crop_height, y_unit, S)
        line = tl.minimum(first_y + y_step, crop_height - 1) * width
        line_r = tl.zeros_like(x) + (1 << (x_bits - 1))
        line_g = line_r
        line_b = line_r
        for x_step in range(_window(crop_width, S)):
            x_weight = _weight(x, first_x + x_step, crop_width, x_unit, S)
            at = line + tl.minimum(first_x + x_step, crop_width - 1)
            line_r += x_weight * tl.load(red + at).to(tl.int32)
            line_g += x_weight * tl.load(green + at).to(tl.int32)
            line_b += x_weight * tl.load(blue + at).to(tl.int32)
        r += y_weight * (line_r >> x_bits)
        g += y_weight * (line_g >> x_bits)
        b += y_weight * (line_b >> x_bits)
    return (r >> y_bits).to(tl.float32), (g >> y_bits).to(tl.float32), (b >> y_bits).to(tl.float32)


@triton.jit
def _square(SIDE: tl.constexpr):
    """Rows and columns of the pixels of a square, line by line: neighbouring threads read neighbouring pixels.

    In one dimension, because in two it is up to the compiler which one the threads of a warp lie along. SIDE being a
    power of 2, it sees that the pixels of a thread share a column, and computes a column's weights once.
    """
    pixel = tl.arange(0, SIDE * SIDE)
    return pixel // SIDE, pixel % SIDE


@triton.jit
def _grey(r, g, b):
    return tl.floor(tl.fma(b, 0.114, tl.fma(g, 0.587, r * 0.2989)))


@triton.jit
def _level(x):
    """Within 0 .. 255 and rounded down, as converting to uint8 does."""
    return tl.floor(tl.minimum(tl.maximum(x, 0.0), 255.0))


@triton.jit
def _blend(x, other, factor):
    return _level(tl.fma(x * 0.0 + other, 1.0 - factor, x * factor))


@triton.jit
def _turn_hue(r, g, b, turn):
    """Through hue (0 .. 1 around the circle), saturation and value, as torchvision does it."""
    r = r * (1.0 / 255.0)
    g = g * (1.0 / 255.0)
    b = b * (1.0 / 255.0)
    value = tl.maximum(tl.maximum(r, g), b)
    spread = value - tl.minimum(tl.minimum(r, g), b)
    colourless = spread == 0.0
    saturation = tl.div_rn(spread, tl.where(colourless, 1.0, value))
    # Hue by the strongest channel: (b - g), 2 + (r - b) or 4 + (g - r) sixths, of distances from the value.
    red = value == r
    green = value == g
    plus = tl.where(red, b, tl.where(green, r, g))
    minus = tl.where(red, g, tl.where(green, b, r))
    sixths = tl.where(red, 0.0, tl.where(green, 2.0, 4.0))
    divisor = tl.where(colourless, 1.0, spread)
    sixths = tl.div_rn(value - plus, divisor) + sixths - tl.div_rn(value - minus, divisor)
    hue = sixths * (1.0 / 6.0) + 1.0
    hue = hue - tl.floor(hue) + turn
    hue = hue - tl.floor(hue)

    sixths = hue * 6.0
    sector = tl.floor(sixths)
    within = sixths - sector
    sector = tl.where(sector == 6.0, 0.0, sector)
    part = saturation * within
    rest = 1.0 - saturation
    falling = (1.0 - part) * value
    rising = (part + rest) * value
    low = rest * value
    odd = tl.where((sector == 1.0) | (sector == 3.0) | (sector == 5.0), falling, rising)
    # In every sector one channel has the value, one is low, and the third rises or falls.
    r = tl.where((sector == 0.0) | (sector == 5.0), value, tl.where((sector == 2.0) | (sector == 3.0), low, odd))
    g = tl.where((sector == 1.0) | (sector == 2.0), value, tl.where(sector >= 4.0, low, odd))
    b = tl.where((sector == 3.0) | (sector == 4.0), value, tl.where(sector <= 1.0, low, odd))
    return tl.floor(r * 255.999), tl.floor(g * 255.999), tl.floor(b * 255.999)  # 256 less torchvision's thousandth


@triton.jit
def _change(
    r, g, b, change, factor, mean,
    BRIGHTNESS_ON: tl.constexpr, CONTRAST_ON: tl.constexpr, SATURATION_ON: tl.constexpr, HUE_ON: tl.constexpr,
):  # fmt: skip
    """One change of colour; `mean` is the mean grey value that contrast needs. A strength of 0 switches one off."""
    if BRIGHTNESS_ON and change == BRIGHTNESS:
        r = _level(r * factor)
        g = _level(g * factor)
        b = _level(b * factor)
    if CONTRAST_ON and change == CONTRAST:
        r = _blend(r, mean, factor)
        g = _blend(g, mean, factor)
        b = _blend(b, mean, factor)
    if SATURATION_ON and change == SATURATION:
        grey = _grey(r, g, b)
        r = _blend(r, grey, factor)
        g = _blend(g, grey, factor)
        b = _blend(b, grey, factor)
    if HUE_ON and change == HUE:
        r, g, b = _turn_hue(r, g, b, factor)
    return r, g, b


@triton.jit
def _to_grey(r, g, b, wanted):
    if wanted:
        r = _grey(r, g, b)
        g = r
        b = r
    return r, g, b


@triton.jit
def _sum_of_grey(r, g, b, inside):
    """Of the pixels inside the view: an integer, so that the order of adding does not matter."""
    return tl.sum(tl.where(inside, _grey(r, g, b), 0.0).to(tl.int32), axis=0)


@triton.jit
def _mean_of_grey(total, S: tl.constexpr):
    return tl.div_rn(total.to(tl.float32), 1.0 * S * S)


@triton.jit
def _store(pointer, at, r, g, b, inside, S: tl.constexpr):
    tl.store(pointer + at, r.to(tl.uint8), mask=inside)
    tl.store(pointer + at + S * S, g.to(tl.uint8), mask=inside)
    tl.store(pointer + at + 2 * S * S, b.to(tl.uint8), mask=inside)


@triton.jit
def _flipped(flips, row, x, S: tl.constexpr):
    """Where column `x` goes. What follows the crop does not mind on which side a picture is flipped."""
    return tl.where(tl.load(flips + row) != 0, S - 1 - x, x)


@triton.jit
def _to_blur(blurs, sigmas, row):
    return (tl.load(blurs + row) != 0) & (tl.load(sigmas + row) > 0)


@triton.jit
def _solarised(level, wanted):
    return tl.where(wanted & (level >= SOLARISED), 255.0 - level, level)


@triton.jit
def _store_for_good(solarises, views, row, at, r, g, b, inside, S: tl.constexpr, SOLARISES: tl.constexpr):
    if SOLARISES:
        wanted = tl.load(solarises + row) != 0
        r = _solarised(r, wanted)
        g = _solarised(g, wanted)
        b = _solarised(b, wanted)
    _store(views, at, r, g, b, inside, S)


@triton.jit
def _store_for_blur_or_for_good(
    blurs, sigmas, solarises, unfinished, views, row, at, r, g, b, inside,
    S: tl.constexpr, BLURS: tl.constexpr, SOLARISES: tl.constexpr,
):  # fmt: skip
    if BLURS:
        if _to_blur(blurs, sigmas, row):
            _store(unfinished, at, r, g, b, inside, S)
        else:
            _store_for_good(solarises, views, row, at, r, g, b, inside, S, SOLARISES)
    else:
        _store_for_good(solarises, views, row, at, r, g, b, inside, S, SOLARISES)


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _whole_kernel(
    pixels, offsets, heights, widths, crops, jitters, orders, factors, greys, flips, blurs, sigmas, solarises,
    unfinished, views,
    S: tl.constexpr, HALF: tl.constexpr, GREY_FIRST: tl.constexpr,
    BRIGHTNESS_ON: tl.constexpr, CONTRAST_ON: tl.constexpr, SATURATION_ON: tl.constexpr, HUE_ON: tl.constexpr,
    BLURS: tl.constexpr, SOLARISES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A small view, but for the blur."""
    row = tl.program_id(0).to(tl.int64)
    y, x = _square(SIDE)
    inside = (y < S) & (x < S)
    r, g, b = _resized_crop(pixels, offsets, heights, widths, crops, row, y, x, S, HALF)
    grey = tl.load(greys + row) != 0
    if GREY_FIRST:
        r, g, b = _to_grey(r, g, b, grey)
    for turn in range(tl.load(jitters + row).to(tl.int32) * 4):
        change = tl.load(orders + row * 4 + turn).to(tl.int32)
        mean = 0.0
        if CONTRAST_ON and change == CONTRAST:
            mean = _mean_of_grey(_sum_of_grey(r, g, b, inside), S)
        factor = tl.load(factors + row * 4 + change)
        r, g, b = _change(r, g, b, change, factor, mean, BRIGHTNESS_ON, CONTRAST_ON, SATURATION_ON, HUE_ON)
    if not GREY_FIRST:
        r, g, b = _to_grey(r, g, b, grey)
    first = row * (3 * S * S)
    at = y * S + _flipped(flips, row, x, S)
    _store_for_blur_or_for_good(
        blurs, sigmas, solarises, unfinished + first, views + first, row, at, r, g, b, inside, S, BLURS, SOLARISES
    )


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _crop_kernel(
    pixels, offsets, heights, widths, crops, jitters, orders, factors, greys, flips, unfinished, sums,
    S: tl.constexpr, HALF: tl.constexpr, GREY_FIRST: tl.constexpr,
    BRIGHTNESS_ON: tl.constexpr, CONTRAST_ON: tl.constexpr, SATURATION_ON: tl.constexpr, HUE_ON: tl.constexpr,
    ACROSS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One tile of a view after crop and flip, and the sum of its grey values at the moment when contrast is changed."""
    program = tl.program_id(0)
    row = (program // (ACROSS * ACROSS)).to(tl.int64)
    tile = program % (ACROSS * ACROSS)
    y, x = _square(SIDE)
    y += tile // ACROSS * SIDE
    x += tile % ACROSS * SIDE
    inside = (y < S) & (x < S)
    r, g, b = _resized_crop(pixels, offsets, heights, widths, crops, row, y, x, S, HALF)
    _store(unfinished + row * (3 * S * S), y * S + _flipped(flips, row, x, S), r, g, b, inside, S)
    if CONTRAST_ON:
        jitter = tl.load(jitters + row).to(tl.int32)
        if jitter != 0:
            if GREY_FIRST:
                r, g, b = _to_grey(r, g, b, tl.load(greys + row) != 0)
            before = jitter
            for turn in range(4):
                change = tl.load(orders + row * 4 + turn).to(tl.int32)
                before = tl.where(change == CONTRAST, 0, before)
                factor = tl.load(factors + row * 4 + change)
                change = tl.where(before != 0, change, NO_CHANGE)
                r, g, b = _change(r, g, b, change, factor, 0.0, BRIGHTNESS_ON, False, SATURATION_ON, HUE_ON)
            tl.store(sums + program, _sum_of_grey(r, g, b, inside))


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _colour_kernel(
    jitters, orders, factors, greys, blurs, sigmas, solarises, unfinished, sums, views,
    S: tl.constexpr, GREY_FIRST: tl.constexpr,
    BRIGHTNESS_ON: tl.constexpr, CONTRAST_ON: tl.constexpr, SATURATION_ON: tl.constexpr, HUE_ON: tl.constexpr,
    BLURS: tl.constexpr, SOLARISES: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some pixels of a view after the crop, but for the blur."""
    BLOCKS: tl.constexpr = (S * S + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    pixel = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < S * S
    first = row * (3 * S * S)
    r = tl.load(unfinished + first + pixel, mask=inside, other=0).to(tl.float32)
    g = tl.load(unfinished + first + pixel + S * S, mask=inside, other=0).to(tl.float32)
    b = tl.load(unfinished + first + pixel + 2 * S * S, mask=inside, other=0).to(tl.float32)
    grey = tl.load(greys + row) != 0
    if GREY_FIRST:
        r, g, b = _to_grey(r, g, b, grey)
    jitter = tl.load(jitters + row).to(tl.int32)
    if jitter != 0:
        mean = 0.0
        if CONTRAST_ON:
            tile = tl.arange(0, LANES)
            mean = _mean_of_grey(tl.sum(tl.load(sums + row * TILES + tile, mask=tile < TILES, other=0), axis=0), S)
        for turn in range(4):
            change = tl.load(orders + row * 4 + turn).to(tl.int32)
            factor = tl.load(factors + row * 4 + change)
            r, g, b = _change(r, g, b, change, factor, mean, BRIGHTNESS_ON, CONTRAST_ON, SATURATION_ON, HUE_ON)
    if not GREY_FIRST:
        r, g, b = _to_grey(r, g, b, grey)
    _store_for_blur_or_for_good(
        blurs, sigmas, solarises, unfinished + first, views + first, row, pixel, r, g, b, inside, S, BLURS, SOLARISES
    )


@triton.jit
def _halves(x):
    """Two float16 numbers whose sum is x, to 22 bits."""
    upper = x.to(tl.float16)
    return upper, (x - upper.to(tl.float32)).to(tl.float16)


@triton.jit
def _gaussian(distance, sigma, RADIUS: tl.constexpr):
    scaled = distance.to(tl.float32) / sigma
    return tl.where(tl.abs(distance) <= RADIUS, tl.exp(-0.5 * scaled * scaled), 0.0)


@triton.jit
def _reflected(place, S: tl.constexpr):
    """Beyond the edge, the pixels inside it in reverse order. Places that nobody needs only have to exist."""
    place = tl.abs(place)
    return tl.maximum(S - 1 - tl.abs(S - 1 - place), 0)


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _blur_kernel(
    blurs, sigmas, solarises, unfinished, views,
    S: tl.constexpr, SOLARISES: tl.constexpr, RADIUS: tl.constexpr, LANES: tl.constexpr,
    WINDOWS: tl.constexpr, WINDOW: tl.constexpr, USEFUL: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """USEFUL × USEFUL blurred pixels of one channel, from WINDOWS × WINDOWS windows of its neighbourhood."""
    program = tl.program_id(0)
    tile = program % (ACROSS * ACROSS)
    plane = (program // (ACROSS * ACROSS)).to(tl.int64)
    row = plane // 3
    if _to_blur(blurs, sigmas, row):
        sigma = tl.load(sigmas + row)
        lane = tl.arange(0, LANES)
        total = tl.sum(_gaussian(lane - RADIUS, sigma, RADIUS), axis=0)
        source = unfinished + plane * (S * S)
        first_y = tile // ACROSS * USEFUL
        first_x = tile % ACROSS * USEFUL
        window_y, window_x = _square(WINDOW)  # [WINDOW²]
        inner = tl.arange(0, WINDOW)
        outer = tl.arange(0, WINDOW)

        blurred = tl.zeros([WINDOW, WINDOW], tl.float32)
        for y_window in range(WINDOWS):
            y_border = y_window * WINDOW - RADIUS  # where the window begins, seen from the first blurred pixel
            line = _reflected(first_y + y_border + window_y, S) * S  # [WINDOW²]
            along_x = tl.zeros([WINDOW, WINDOW], tl.float32)  # blurred along x only: rows of the window
            for x_window in range(WINDOWS):
                x_border = x_window * WINDOW - RADIUS
                levels = tl.load(source + line + _reflected(first_x + x_border + window_x, S)).to(tl.float16)
                levels = tl.reshape(levels, [WINDOW, WINDOW])
                upper, lower = _halves(_gaussian(x_border + inner[:, None] - outer[None, :], sigma, RADIUS) / total)
                along_x = tl.dot(levels, lower, along_x)
                along_x = tl.dot(levels, upper, along_x)
            upper, lower = _halves(_gaussian(y_border + inner[None, :] - outer[:, None], sigma, RADIUS) / total)
            upper_x, lower_x = _halves(along_x)
            blurred = tl.dot(lower, upper_x, blurred)
            blurred = tl.dot(upper, lower_x, blurred)
            blurred = tl.dot(upper, upper_x, blurred)

        y = (first_y + outer)[:, None]
        x = (first_x + outer)[None, :]
        inside = (outer < USEFUL)[:, None] & (outer < USEFUL)[None, :] & (y < S) & (x < S)
        level = tl.floor(blurred + 0.5)
        if SOLARISES:
            level = _solarised(level, tl.load(solarises + row) != 0)
        tl.store(views + plane * (S * S) + y * S + x, level.to(tl.uint8), mask=inside)


@triton.jit
def _normalise_kernel(
    views, numbers, pixels, scale_r, scale_g, scale_b, shift_r, shift_g, shift_b,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # in the order in which they are written: channels last
    channel = place % 3
    level = tl.load(views + row * pixels * 3 + channel * pixels + place // 3, mask=place < 3 * pixels, other=0)
    scale = tl.where(channel == 0, scale_r, tl.where(channel == 1, scale_g, scale_b))
    shift = tl.where(channel == 0, shift_r, tl.where(channel == 1, shift_g, shift_b))
    number = level.to(tl.float32) * scale + shift
    tl.store(numbers + row * pixels * 3 + place, number.to(tl.bfloat16), mask=place < 3 * pixels)
