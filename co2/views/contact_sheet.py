"""A picture of what an augmentation does, to look at before a long run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from co2.data.source import ImageSource
from co2.views.parameters import draw
from co2.views.specification import Augmentation
from co2.views.transform import make_view

_SMALLEST_TILE = 96  # views of 32 pixels are enlarged to this, to be seen at all
_GAP = 4
_WHITE = 255


def contact_sheet(
    source: ImageSource, augmentation: Augmentation, seed: int, images: Sequence[int], columns: int
) -> Tensor:
    """One row for each image: the image itself, then `columns` of its views. uint8 [3, height, width].

    The first views of a row are those that a run with this seed makes in its first epoch.
    """
    rows = []
    for index in images:
        image = source.image(index)
        height, width = (torch.tensor([side]) for side in image.shape[-2:])
        tiles = [_whole(image, augmentation.size)]
        for view in range(columns):
            drawn = draw(augmentation, seed, 0, torch.tensor([index]), view, height, width)
            tiles.append(make_view(image, drawn.rows()[0], augmentation))
        rows.append(torch.cat([_framed(tile) for tile in tiles], 2))  # [3, tile, (1 + columns) * tile]
    return torch.cat(rows, 1)


def _whole(image: Tensor, size: int) -> Tensor:
    """The whole image, uint8 [3, size, size], with white where it is not square."""
    height, width = image.shape[-2:]
    longer = max(height, width)
    side = [max(1, round(height * size / longer)), max(1, round(width * size / longer))]
    left, top = (size - side[1]) // 2, (size - side[0]) // 2
    borders = [left, top, size - side[1] - left, size - side[0] - top]
    return F.pad(F.resize(image, side, antialias=True), borders, fill=_WHITE)


def _framed(tile: Tensor) -> Tensor:
    enlarge = -(-_SMALLEST_TILE // tile.shape[-1])
    enlarged = tile.repeat_interleave(enlarge, 1).repeat_interleave(enlarge, 2)
    return F.pad(enlarged, [_GAP // 2], fill=_WHITE)
