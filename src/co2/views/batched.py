"""How the views of a batch are made on the CPU when they are small: bit for bit what `co2.views.transform` makes.

One by one, a view of 32 pixels costs about forty calls into torch, each of which takes longer to arrive than to
compute. Here all views are made at once, each by its own parameters and with its colours changed in its own order. Only
crops of pictures that differ in size, or are larger than the view, are resized one by one, and blurred views blurred.

Equality to the bit is what lets a view depend on nothing but its parameters, and rests on three things:

    resizing  torch resizes bytes with weights of 14 bits after the point when it enlarges, and rounds to bytes between
              the horizontal and the vertical pass. All of that are whole numbers below 2²⁴, exact in float32 in
              whatever order a matrix product adds them up.
    colours   torchvision computes in float32 and cuts off what is behind the point after each change. So do the
              functions below, which hold whole numbers 0 .. 255 in float32, and round where torchvision rounds.
    blur      is `co2.views.transform`'s own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from co2.views.parameters import ViewParameters
from co2.views.transform import SOLARISED, _blur, make_view
from co2.views.view import View

LARGEST_SIZE = 96
"""Side of the largest view that is worth it. The size of a view alone decides how it is made, never its companions."""
_PIXELS_AT_ONCE = 64 * 32**2  # more do not fit into a processor's cache, and take twice as long
_WEIGHT_OF_ONE = 2**14  # with which torch resizes bytes when it enlarges
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)  # as ViewParameters.jitter_order counts them


def make_views(images: Sequence[Tensor], parameters: ViewParameters, view: View) -> Tensor:
    """The view, uint8 [N, 3, S, S], of each image, uint8 [3, H, W], by its row of `parameters`."""
    size = view.size
    views = torch.empty(len(images), 3, size, size, dtype=torch.uint8)
    if size > LARGEST_SIZE:
        for place, (image, row) in enumerate(zip(images, parameters.rows(), strict=True)):
            views[place] = make_view(image, row, view)
        return views
    at_once = max(1, _PIXELS_AT_ONCE // size**2)
    for first in range(0, len(images), at_once):
        rows = slice(first, first + at_once)
        part = ViewParameters(*(column[rows] for column in parameters.columns()))
        views[rows] = _finished(_crops(images[rows], part.crop, size), part, view)
    return views


def _finished(views: Tensor, parameters: ViewParameters, view: View) -> Tensor:
    """What becomes of resized crops, float32 [N, 3, S, S]: uint8 [N, 3, S, S]."""
    if view.grey_first:
        views = _some_to_grey(views, parameters.grey)
    views = _jitter(views, parameters, view)
    if not view.grey_first:
        views = _some_to_grey(views, parameters.grey)
    finished = views.to(torch.uint8)  # [N, 3, S, S]
    if view.blur_probability > 0:
        sigmas = parameters.blur_sigma.tolist()
        for row in (parameters.blur & (parameters.blur_sigma > 0)).nonzero()[:, 0].tolist():
            finished[row] = _blur(finished[row], sigmas[row], view.blur_radius)
    solarised = parameters.solarise.nonzero()[:, 0]  # [n]
    finished[solarised] = F.solarize(finished[solarised], SOLARISED)
    flipped = parameters.flip.nonzero()[:, 0]  # [n]
    finished[flipped] = finished[flipped].flip(-1)
    return finished


def _crops(images: Sequence[Tensor], crops: Tensor, size: int) -> Tensor:
    """Resized crops as whole numbers in float32, [N, 3, S, S]: torchvision's resized_crop without its detours."""
    # torchvision resizes bytes where torch has a fast way to, and numbers in float32 elsewhere.
    in_bytes = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    exact_products = torch.get_float32_matmul_precision() == "highest"
    shapes = {image.shape for image in images}
    if in_bytes and exact_products and len(shapes) == 1 and max(images[0].shape) <= size:
        return _enlarged_crops(torch.stack(tuple(images)), crops, size)
    resized = torch.empty(len(images), 3, size, size, dtype=torch.uint8 if in_bytes else torch.float32)
    for place, (image, (top, left, height, width)) in enumerate(zip(images, crops.tolist(), strict=True)):
        crop = image[None, :, top : top + height, left : left + width]  # [1, 3, h, w]
        to = resized[place : place + 1]  # [1, 3, S, S]
        torch.ops.aten._upsample_bilinear2d_aa.out(crop.to(to.dtype), [size, size], False, None, None, out=to)
    return resized.float().round_()


def _enlarged_crops(images: Tensor, crops: Tensor, size: int) -> Tensor:
    """The same for images [N, 3, H, W] that are all no larger than the view: two products with sparse matrices."""
    rows, _, height, width = images.shape
    tops, lefts, heights, widths = crops.unbind(1)  # [N] each
    across = _weight_matrices(lefts, widths, width, size).transpose(1, 2)  # [N, W, S]
    views = torch.bmm(images.float().view(rows, 3 * height, width), across)  # [N, 3 * H, S]
    _round_weighted(views)
    down = _weight_matrices(tops, heights, height, size)  # [N, S, H]
    views = torch.matmul(down[:, None], views.view(rows, 3, height, size))  # [N, 3, S, S]
    return _round_weighted(views)


def _round_weighted(sums: Tensor) -> Tensor:
    return sums.add_(_WEIGHT_OF_ONE / 2).mul_(1 / _WEIGHT_OF_ONE).floor_()


def _weight_matrices(starts: Tensor, lengths: Tensor, pixels: int, size: int) -> Tensor:
    """By how much each pixel of an axis counts for each of the view, [N, S, pixels], for crops along that axis."""
    first_pixels, weights = _weights_of_two(pixels, size)
    firsts = first_pixels[lengths] + starts[:, None]  # [N, S]
    matrices = torch.zeros(len(starts), size, pixels + 1)  # the last column belongs to no pixel
    matrices.scatter_(2, torch.stack((firsts, firsts + 1), dim=2), weights[lengths])
    return matrices[:, :, :pixels]


@lru_cache(maxsize=8)
def _weights_of_two(longest: int, size: int) -> tuple[Tensor, Tensor]:
    """The pixels of a crop that make up each pixel of the view, for every length of the crop up to `longest`.

    Enlarged, a pixel is a mean of two neighbours at most: number of the first, [longest + 1, S], and the weights of
    both, [longest + 1, S, 2]. In double precision and rounded as torch does it.
    """
    firsts = torch.zeros(longest + 1, size, dtype=torch.int64)
    weights = torch.zeros(longest + 1, size, 2)
    for length in range(1, longest + 1):
        for place in range(size):
            centre = length / size * (place + 0.5)
            first = max(int(centre - 0.5), 0)
            pixels = range(first, min(int(centre + 1.5), first + 2, length))
            closeness = [max(0.0, 1 - abs(pixel - centre + 0.5)) for pixel in pixels]
            firsts[length, place] = first
            for neighbour, value in enumerate(closeness):
                weights[length, place, neighbour] = int(0.5 + value / sum(closeness) * _WEIGHT_OF_ONE)
    return firsts, weights


def _jitter(views: Tensor, parameters: ViewParameters, view: View) -> Tensor:
    """All changes of colour of views [N, 3, S, S], each view's in its own order."""
    enabled = torch.tensor(view.jitter) > 0  # [4]: a strength of 0 switches a change off
    orders = parameters.jitter_order[enabled[parameters.jitter_order]].view(len(views), -1)  # [N, changes]
    for change in orders.unbind(1):  # [N]: what each view's first change is, its second, ...
        factors = parameters.jitter_factors.gather(1, change[:, None])[:, 0]  # [N]
        turned = ((change == _HUE) & parameters.jitter).nonzero()[:, 0]  # [n]
        hues = _with_hue_turned(views[turned], factors[turned]) if len(turned) else None  # [n, 3, S, S]
        unchanged = (change == _HUE) | ~parameters.jitter
        views = _blended(views, change, factors.masked_fill(unchanged, 1))
        if hues is not None:
            views[turned] = hues
    return views


def _blended(views: Tensor, change: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast or saturation, by `change` [N]: factor * view + (1 - factor) * another picture.

    The other picture is black for brightness, evenly grey for contrast, and the view in grey for saturation. torch adds
    a product in one go, without rounding it first. That matters here: where both pictures are equal, the sum is a whole
    number or just below it, and is then cut off. A product of float32 numbers is exact in float64.
    """
    grey = _grey(views)  # [N, 1, S, S]
    mean = grey.mean(dim=(1, 2, 3), keepdim=True)  # [N, 1, 1, 1]: a sum of whole numbers below 2²⁴ has no rounding
    change, factors = change[:, None, None, None], factors[:, None, None, None]  # [N, 1, 1, 1] each
    other = grey.mul_(change == _SATURATION).add_(mean * (change == _CONTRAST))  # [N, 1, S, S]
    products = other.double().mul_((1 - factors.double()).float())  # [N, 1, S, S]
    return views.mul_(factors).double().add_(products).float().clamp_(0, 255).floor_()


def _grey(views: Tensor) -> Tensor:
    """[N, 1, S, S]"""
    red, green, blue = views.split(1, dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def _some_to_grey(views: Tensor, which: Tensor) -> Tensor:
    return torch.where(which[:, None, None, None], _grey(views), views)


def _with_hue_turned(views: Tensor, turns: Tensor) -> Tensor:
    """Through hue (0 .. 1 around the circle), saturation and value, step by step as in torchvision."""
    colours = views.mul_(1 / 255)  # [n, 3, S, S]
    red, green, _ = colours.split(1, dim=1)  # [n, 1, S, S], as all that follow
    least, value = torch.aminmax(colours, dim=1, keepdim=True)
    spread = value - least
    colourless = spread == 0
    saturation = spread / value.masked_fill(colourless, 1)
    # How far each channel is below the value, in parts of the spread.
    below_red, below_green, below_blue = ((value - colours) / spread.masked_fill(colourless, 1)).split(1, dim=1)
    sixths = torch.where(
        value == red,
        below_blue - below_green,
        torch.where(value == green, below_red + 2 - below_blue, below_green + 4 - below_red),
    )
    hue = sixths.mul_(1 / 6).add_(1).fmod_(1).add_(turns[:, None, None, None]).remainder_(1)

    sixths = hue.mul_(6)
    sector = sixths.floor()
    part = saturation * (sixths - sector)
    rest = 1 - saturation
    falling = (1 - part).mul_(value).clamp_(0, 1)
    rising = (part + rest).mul_(value).clamp_(0, 1)
    lowest = rest.mul_(value).clamp_(0, 1)
    choices = torch.cat((value, lowest, falling, rising), dim=1)  # [n, 4, S, S]
    chosen = _CHOICE_OF_EACH_SECTOR[sector.long().remainder_(6)[:, 0]].movedim(-1, 1)  # [n, 3, S, S]
    return choices.gather(1, chosen).mul_(255.999).floor_()  # 256 less torchvision's thousandth


# For red, green and blue in each sixth of the circle: 0 the value, 1 the lowest, 2 falling, 3 rising.
_CHOICE_OF_EACH_SECTOR = torch.tensor([[0, 3, 1], [2, 0, 1], [1, 0, 3], [1, 2, 0], [3, 1, 0], [0, 1, 2]])
