"""How views are made from images on the CPU, given their parameters: by torchvision's functions, one after the other.

One by one, a view of 32 pixels costs about forty calls into torch, each of which takes longer to arrive than to
compute. So small views are made all at once, each by its own parameters and with its colours changed in its own order.
Only crops of pictures that differ in size, or are larger than the view, are resized one by one, and blurred views
blurred. They are bit for bit what `make_view` makes of one image, so that a view depends on nothing but its parameters.
That rests on three things:

    resizing  torch resizes bytes with weights of 14 bits after the point when it enlarges, and rounds to bytes between
              the horizontal and the vertical pass. All of that are whole numbers below 2²⁴, exact in float32 in
              whatever order a matrix product adds them up.
    colours   torchvision computes in float32 and cuts off what is behind the point after each change. So do the
              functions below, which hold whole numbers 0 .. 255 in float32, and round where torchvision rounds.
    blur      is the same function.

Pictures stay uint8 until they are where the encoder is (a quarter of the bytes to move); `normalise` then turns them
into floating point there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from co2.views.parameters import ViewParameters, ViewRow
from co2.views.view import View

SOLARISED = 128
"""The lowest level that solarisation inverts, of 255."""
# In the order in which ViewParameters.jitter_order and .jitter_factors count them.
_COLOUR_CHANGES = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
LARGEST_SIZE = 96
"""Side of the largest view that is worth it. The size of a view alone decides how it is made, never its companions."""
_LONGEST_TO_SCALE = 16  # times the shorter side: nothing beyond is in the centre
_PIXELS_AT_ONCE = 64 * 32**2  # more do not fit into a processor's cache, and take twice as long
_WEIGHT_OF_ONE = 2**14  # with which torch resizes bytes when it enlarges
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)  # as ViewParameters.jitter_order counts them


def make_view(image: Tensor, row: ViewRow, view: View) -> Tensor:
    """One view, uint8 [3, S, S], of an image, uint8 [3, H, W]."""
    side = [view.size, view.size]
    made = F.resized_crop(image, *row.crop, size=side, interpolation=F.InterpolationMode.BILINEAR, antialias=True)
    if row.grey and view.grey_first:
        made = F.rgb_to_grayscale(made, num_output_channels=3)
    if row.jitter:
        made = _jitter(made, row, view)
    if row.grey and not view.grey_first:
        made = F.rgb_to_grayscale(made, num_output_channels=3)
    if row.blur and row.blur_sigma > 0:
        made = _blur(made, row.blur_sigma, view.blur_radius)
    if row.solarise:
        made = F.solarize(made, threshold=SOLARISED)
    if row.flip:
        made = F.horizontal_flip(made)
    return made


def _jitter(made: Tensor, row: ViewRow, view: View) -> Tensor:
    for change in row.jitter_order:
        if view.jitter[change] > 0:  # a strength of 0 switches a change off, as in torchvision's ColorJitter
            made = _COLOUR_CHANGES[change](made, row.jitter_factors[change])
    return made


def _blur(made: Tensor, sigma: float, radius: int) -> Tensor:
    """A Gaussian blur along rows and then along columns: the same as in two dimensions, in a third of the time."""
    width = 2 * radius + 1
    exact = F.gaussian_blur(made.float(), [width, 1], [sigma, sigma])
    exact = F.gaussian_blur(exact, [1, width], [sigma, sigma])
    return exact.round_().to(torch.uint8)


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
    views = _all_jittered(views, parameters, view)
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


def _all_jittered(views: Tensor, parameters: ViewParameters, view: View) -> Tensor:
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


def plain_view(image: Tensor, size: int) -> Tensor:
    """The view that evaluation sees, without randomness: uint8 [3, size, size] of an image, uint8 [3, H, W].

    The shorter side is scaled to 8/7 of the size (256 for 224, as is usual for ImageNet) and the centre cut out. Small
    images, up to 64 pixels, can spare no border: there the shorter side is scaled to the size itself.
    """
    if tuple(image.shape[-2:]) == (size, size):
        return image
    shorter = size if size <= 64 else size * 8 // 7
    longest = _LONGEST_TO_SCALE * min(image.shape[-2:])
    if max(image.shape[-2:]) > longest:  # a row of pixels would become a thousand times as large
        image = F.center_crop(image, [min(length, longest) for length in image.shape[-2:]])
    resized = F.resize(image, [shorter], interpolation=F.InterpolationMode.BILINEAR, antialias=True)
    return F.center_crop(resized, [size, size])


def normalise(pictures: Tensor, view: View, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the encoder is fed: (views / 255 - mean) / std of uint8 views [..., 3, S, S], on the device they are on."""
    exact = torch.promote_types(dtype, torch.float32)  # computed in float32 at least, rounded to bfloat16 once
    scale, shift = _scale_and_shift(view.mean, view.std, exact, pictures.device)
    return (pictures * scale + shift).to(dtype)


def normalise_for_convolutions(pictures: Tensor, view: View, precision: torch.dtype = torch.float32) -> Tensor:
    """The same of uint8 views [N, 3, S, S] in channels-last memory, as convolutions want it on either device.

    `precision` is a CPU's; on a GPU the first convolution would round everything to bfloat16 anyway.
    """
    if pictures.is_cuda:
        return normalise_for_gpu(pictures, view)
    return normalise(pictures, view, precision).contiguous(memory_format=torch.channels_last)


def normalise_for_gpu(pictures: Tensor, view: View) -> Tensor:
    """That in bfloat16, by a kernel where there is Triton."""
    try:
        from co2.views.on_gpu import normalise_views
    except ImportError:  # no Triton on this machine: five times the bytes
        return normalise(pictures, view, torch.bfloat16).contiguous(memory_format=torch.channels_last)
    scale = tuple(1 / (255 * std) for std in view.std)
    shift = tuple(-mean / std for mean, std in zip(view.mean, view.std, strict=True))
    return normalise_views(pictures, scale, shift)


@lru_cache(maxsize=16)  # so that a step copies nothing to the GPU and does not wait for it
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    means, stds = torch.tensor([mean, std], dtype=torch.float64)
    scale = (1 / (255 * stds)).to(device, dtype)[:, None, None]  # [3, 1, 1]
    shift = (-means / stds).to(device, dtype)[:, None, None]  # [3, 1, 1]
    return scale, shift
