"""What is random about a view: its parameters, drawn for a whole batch at once.

A view's parameters are a function of (seed, epoch, image, view) and of the image's size. They are drawn on the device
that holds `images`, so that every implementation of the augmentations is handed the same ones. The distributions are
those of torchvision's RandomResizedCrop, ColorJitter, RandomGrayscale, GaussianBlur and RandomHorizontalFlip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from co2.philox import uniforms
from co2.views.view import Then, View

# Each parameter has its own place among the uniform numbers of a view, used or not: switching one augmentation off or
# changing its strength leaves all the others as they were. Places are never moved; new ones go to the end.
_CROP_SCALE = slice(0, 10)  # of ten attempts, as in torchvision's RandomResizedCrop
_CROP_RATIO = slice(10, 20)
_CROP_TOP = 20
_CROP_LEFT = 21
_FLIP = 22
_JITTER = 23
_JITTER_FACTORS = slice(24, 28)
_JITTER_ORDER = 28
_GREY = 29
_BLUR = 30
_BLUR_SIGMA = 31
_SOLARISE = 32
_PLACES = 33
_THEN = 64  # of what follows a view, whatever it is; up to there is room for more of the above


class ViewRow(NamedTuple):
    """The parameters of one view, as plain numbers. See `ViewParameters`."""

    crop: tuple[int, int, int, int]
    flip: bool
    jitter: bool
    jitter_order: tuple[int, int, int, int]
    jitter_factors: tuple[float, float, float, float]
    grey: bool
    blur: bool
    blur_sigma: float
    solarise: bool


@dataclass(frozen=True)
class ViewParameters:
    """One row for each image of a batch."""

    crop: Tensor
    """int64 [B, 4]: top, left, height and width of the crop, in pixels of the image."""
    flip: Tensor
    """bool [B]: mirror left to right."""
    jitter: Tensor
    """bool [B]: change the colours."""
    jitter_order: Tensor
    """int64 [B, 4]: which change comes first, second, ...: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
    jitter_factors: Tensor
    """float32 [B, 4]: by how much to change brightness, contrast, saturation (1 is no change) and hue (0 is none)."""
    grey: Tensor
    """bool [B]: turn to grey."""
    blur: Tensor
    """bool [B]: blur."""
    blur_sigma: Tensor
    """float32 [B]: standard deviation of the blur, in pixels of the view."""
    solarise: Tensor
    """bool [B]: invert levels from 128 on."""

    def columns(self) -> tuple[Tensor, ...]:
        """The fields, in their order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def rows(self) -> list[ViewRow]:
        """The same as plain numbers, image by image."""
        columns = (map(tuple, x.tolist()) if x.ndim > 1 else x.tolist() for x in self.columns())
        return [ViewRow(*row) for row in zip(*columns, strict=True)]


def draw(
    view: View,
    seed: int,
    epoch: int | Tensor,
    images: Tensor,
    number: int | Tensor,
    heights: Tensor,
    widths: Tensor,
) -> ViewParameters:
    """The parameters of a view, the one with this number, of each image in this epoch.

    `images` [B] are indices into the data set, `heights` [B] and `widths` [B] the sizes of these images in pixels, all
    int64 and on one device. Nothing here waits for the device, and `epoch` and `number` may be tensors on it.
    """
    u = uniforms(seed, epoch, images, number, _PLACES)  # [B, 33]
    brightness, contrast, saturation, hue = view.jitter
    lows = [max(0.0, 1 - brightness), max(0.0, 1 - contrast), max(0.0, 1 - saturation), -hue]
    highs = [1 + brightness, 1 + contrast, 1 + saturation, hue]
    factors = [
        _between(low, high, uniform)
        for low, high, uniform in zip(lows, highs, u[:, _JITTER_FACTORS].unbind(1), strict=True)
    ]
    return ViewParameters(
        crop=_crop(view, u, heights, widths),
        flip=u[:, _FLIP] < view.flip_probability,
        jitter=u[:, _JITTER] < view.jitter_probability,
        jitter_order=_order_of_four(u[:, _JITTER_ORDER]),
        # Rounded to float32, as torchvision draws them: hides last-bit differences between devices.
        jitter_factors=torch.stack(factors, 1).float(),
        grey=u[:, _GREY] < view.grey_probability,
        blur=u[:, _BLUR] < view.blur_probability,
        blur_sigma=_between(*view.blur_sigma, u[:, _BLUR_SIGMA]).float(),
        solarise=u[:, _SOLARISE] < view.solarise_probability,
    )


def draw_views(
    views: Mapping[int, View], seed: int, epoch: int, images: Tensor, heights: Tensor, widths: Tensor
) -> ViewParameters:
    """The parameters of several views, by their numbers, of images [T, V, b]: rows [T * V * b], in their order.

    Of T batches at a time, because to draw takes as long for one row as for thousands.
    """
    first, *others = views
    if len(set(views.values())) == 1 and others == list(range(first + 1, first + len(views))):
        numbers = torch.arange(first, first + len(views), device=images.device)[:, None].expand_as(images)
        each = (column.flatten() for column in (images, numbers, heights, widths))  # [R] each
        return draw(views[first], seed, epoch, *each)
    drawn = []
    for place, (number, view) in enumerate(views.items()):
        of_view, *sizes = (column[:, place].flatten() for column in (images, heights, widths))  # [T * b] each
        drawn.append(draw(view, seed, epoch, of_view, number, *sizes).columns())
    batches = (len(images), images.shape[2])  # [T, b]
    stacked = (torch.stack([x.unflatten(0, batches) for x in same], dim=1) for same in zip(*drawn, strict=True))
    return ViewParameters(*(column.flatten(0, 2) for column in stacked))


def draw_then(then: Then, seed: int, epoch: int, images: Tensor, number: int) -> Tensor:
    """The uniform numbers of what follows view `number` of each of images [b]: [b, places]."""
    return uniforms(seed, epoch, images, number, _THEN + then.places)[:, _THEN:]


def _between(low: float, high: float, uniform: Tensor) -> Tensor:
    return low + (high - low) * uniform


def _crop(view: View, u: Tensor, heights: Tensor, widths: Tensor) -> Tensor:
    """Random resized crops [B, 4]: the first of ten attempts that fits, or else the largest central crop.

    Only the attempt that fits needs a position, and positions are independent of it, so that one pair of uniform
    numbers serves all ten.
    """
    low, high = view.crop_ratio
    area = (heights * widths)[:, None] * _between(*view.crop_scale, u[:, _CROP_SCALE])  # [B, 10]
    ratio = torch.exp(_between(math.log(low), math.log(high), u[:, _CROP_RATIO]))  # [B, 10]
    attempt_widths = torch.sqrt(area * ratio).round().long()  # [B, 10]
    attempt_heights = torch.sqrt(area / ratio).round().long()  # [B, 10]
    fits = (
        (attempt_widths > 0)
        & (attempt_widths <= widths[:, None])
        & (attempt_heights > 0)
        & (attempt_heights <= heights[:, None])
    )
    first = fits.int().argmax(1, keepdim=True)  # [B, 1]: the first attempt that fits, or 0 where none does
    found = fits.any(1)

    exact_heights, exact_widths = heights.double(), widths.double()
    image_ratios = exact_widths / exact_heights
    central_heights = torch.where(image_ratios < low, (exact_widths / low).round().long().clamp(min=1), heights)
    central_widths = torch.where(image_ratios > high, (exact_heights * high).round().long().clamp(min=1), widths)
    crop_heights = torch.where(found, attempt_heights.gather(1, first)[:, 0], central_heights)
    crop_widths = torch.where(found, attempt_widths.gather(1, first)[:, 0], central_widths)

    free_heights, free_widths = heights - crop_heights, widths - crop_widths
    tops = torch.where(found, (u[:, _CROP_TOP] * (free_heights + 1)).long(), free_heights // 2)
    lefts = torch.where(found, (u[:, _CROP_LEFT] * (free_widths + 1)).long(), free_widths // 2)
    return torch.stack((tops, lefts, crop_heights, crop_widths), 1)


def _order_of_four(uniform: Tensor) -> Tensor:
    """One of the 24 orders of 0, 1, 2, 3, by the digits of a number below 24 (its Lehmer code): int64 [B, 4]."""
    number = (uniform * 24).long()
    first = number // 6  # one of 4
    second = number // 2 % 3  # one of the 3 that are left, so step over the first
    second = second + (second >= first)
    third = number % 2  # one of the 2 that are left, so step over both, the smaller before the larger
    third = third + (third >= torch.minimum(first, second))
    third = third + (third >= torch.maximum(first, second))
    return torch.stack((first, second, third, 6 - first - second - third), 1)
