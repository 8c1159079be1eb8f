"""The views of the methods, described as data: a tuple of `View`, one for each view of an image.

`co2.views.parameters` draws what is random about them, `co2.views.transform` carries them out on the CPU. Nothing here
imports torch, so that the command line answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import tyro

from co2.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

VIEW_SIZES = range(4, 4097)  # side of a view in pixels; a larger one would fit nowhere


class Then(Protocol):
    """What may follow a view, last of all: a grid of its patches, say, or quarter turns. A frozen dataclass."""

    @property
    def places(self) -> int:
        """How many uniform numbers it takes for a view of an image."""

    def apply(self, views: Tensor, uniforms: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Views, uint8 [b, 3, S, S], and numbers in [0, 1), float64 [b, places], in. Out come k pictures of each, uint8
        [b, k, 3, s, s], and by name what was drawn, [b, ...] each. On any device, without waiting for it."""


@dataclass(frozen=True)
class View:
    """How one view is made from an image. The fields stand in the order in which they are applied, but for
    `grey_first`: crop, colour jitter, greyscale, blur, solarisation, flip, normalise.

    Whatever is random beside the crop has a field that ends in `_probability`; where all of these are 0, nothing
    happens to an image but the crop (`crop_and_flip`)."""

    size: Annotated[int, tyro.conf.Suppress] = field(default=224, metadata={"no_setting": True})
    """Side of the square view, in pixels: the run's, or what the method makes of it."""
    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Smallest and largest share of the image's area that a random resized crop covers."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Narrowest and widest aspect ratio of a crop."""
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    """Strength of colour jitter: brightness, contrast, saturation, hue (applied in random order)."""
    jitter_probability: float = 0.8
    """How often a view's colours are jittered."""
    grey_probability: float = 0.2
    """How often a view is turned to grey."""
    grey_first: bool = False
    """Turn to grey before the colour jitter, as MoCo v1 does, instead of after it."""
    blur_probability: float = 0.5
    """How often a view is blurred."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the Gaussian blur, in pixels of the view."""
    solarise_probability: float = 0.0
    """How often a view is solarised: levels from 128 on, of 255, are inverted, as in a negative."""
    flip_probability: float = 0.5
    """How often a view is mirrored left to right."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted from each channel (in 0..1) at the end."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Each channel is divided by this at the end."""
    then: Annotated[Then | None, tyro.conf.Suppress] = field(default=None, metadata={"no_setting": True})
    """What follows. Not a setting, which could be edited and written down: a method's own `views` puts it there."""

    def __post_init__(self) -> None:
        if self.size not in VIEW_SIZES:
            raise UserError(
                f"A view of {self.size} pixels is too small or too large: give {VIEW_SIZES[0]} to {VIEW_SIZES[-1]}."
            )
        for name in ("crop_scale", "crop_ratio", "jitter", "blur_sigma", "mean", "std"):
            if not all(map(math.isfinite, getattr(self, name))):
                raise UserError(f"{name} of a view must be finite numbers; got {getattr(self, name)}.")
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise UserError(f"{name} of a view must be two numbers with 0 < first <= second; got {low} {high}.")
        if self.crop_scale[1] > 1:
            raise UserError(f"crop_scale of a view is a share of the area, at most 1; got {self.crop_scale[1]}.")
        if min(self.jitter) < 0 or self.jitter[3] > 0.5:
            raise UserError(f"jitter of a view must not be negative, and hue at most 0.5; got {self.jitter}.")
        if not 0 <= self.blur_sigma[0] <= self.blur_sigma[1]:
            raise UserError(f"blur_sigma of a view must be 0 <= first <= second; got {self.blur_sigma}.")
        for name in _PROBABILITIES:
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} of a view is a probability between 0 and 1; got {getattr(self, name)}.")
        if min(self.std) <= 0:
            raise UserError(f"std of a view must be positive; got {self.std}.")

    def scaled(self, share: float) -> View:
        """The same view, smaller: blur is measured in pixels, and follows the size."""
        weakest, strongest = self.blur_sigma
        return replace(self, size=round(share * self.size), blur_sigma=(share * weakest, share * strongest))

    def idle(self, option: str) -> dict[str, str]:
        """Fields that nothing looks at, as the others are, and how a sentence about them ends where the options on the
        command line begin with `option`."""
        idle = {}
        if self.blur_probability == 0:
            idle["blur_sigma"] = f"where no view is blurred. Give {option}.blur-probability too."
        if self.jitter_probability == 0:
            idle["jitter"] = f"where no view has its colours changed. Give {option}.jitter-probability too."
        if not any(self.jitter):
            idle["jitter_probability"] = f"without a strength of the changes. Give {option}.jitter too."
        if self.grey_probability == 0:
            idle["grey_first"] = f"where no view is grey. Give {option}.grey-probability too, or leave it out."
        return idle

    @property
    def blur_radius(self) -> int:
        """How many neighbours on either side the blur looks at: four standard deviations of the strongest blur, and
        fewer than the view has pixels. The same for every view, so that a batch can be blurred at once."""
        return min(math.ceil(4 * self.blur_sigma[1]), self.size - 1)


_PROBABILITIES = tuple(one.name for one in fields(View) if one.name.endswith("_probability"))


def crop_and_flip(view: View) -> View:
    """The same view of which nothing is random but its crop and on which side it is mirrored: for training on labels.

    What is switched off is everything that has a probability, whatever is added to `View` later."""
    off: dict[str, Any] = dict.fromkeys(set(_PROBABILITIES) - {"flip_probability"}, 0.0)
    return replace(view, **off)


def made_together(views: Sequence[View]) -> list[tuple[dict[int, View], View]]:
    """Which views can be made at once, by their numbers, and a `View` that says how: those of one size that differ in
    nothing but what is drawn for each of them. On a GPU that saves launches."""
    groups: dict[object, dict[int, View]] = {}
    for number, view in enumerate(views):
        changes = tuple(strength > 0 for strength in view.jitter)
        alike = (view.size, view.grey_first, changes, view.blur_radius)
        groups.setdefault(alike, {})[number] = view
    return [(group, _anything_of(list(group.values()))) for group in groups.values()]


def _anything_of(views: list[View]) -> View:
    """What happens to any of these may happen to this one; to which row it does is drawn."""
    highest: dict[str, Any] = {name: max(getattr(view, name) for view in views) for name in _PROBABILITIES}
    return replace(views[0], **highest)
