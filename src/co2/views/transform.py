"""How a view is made from an image, given its parameters: torchvision's functions, one image at a time on the CPU.

Pictures stay uint8 until they are where the encoder is (a quarter of the bytes to move); `normalise` then turns them
into floating point there.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from co2.views.parameters import ViewRow
from co2.views.view import View

SOLARISED = 128
"""The lowest level that solarisation inverts, of 255."""
# In the order in which ViewParameters.jitter_order and .jitter_factors count them.
_COLOUR_CHANGES = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


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


_LONGEST_TO_SCALE = 16  # times the shorter side: nothing beyond is in the centre


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
