"""The picture shows the image and the views that a run makes."""

import numpy as np
import torch

from co2.data.source import ArraySource
from co2.views.contact_sheet import contact_sheet
from co2.views.loader import ViewLoader
from co2.views.specification import moco_v2_views


def test_a_sheet_shows_images_beside_the_views_of_a_run():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 60, 120), dtype=np.uint8)
    source = ArraySource("noise", pixels)
    augmentation = moco_v2_views(96)
    sheet = contact_sheet(source, augmentation, seed=3, images=[2, 0, 1], columns=4)
    assert sheet.dtype == torch.uint8
    assert sheet.shape == (3, 3 * 100, 5 * 100)

    (batch,) = ViewLoader(source, augmentation, views=4, batch_size=4, seed=3, workers=0).epoch(0)
    for row, index in enumerate([2, 0, 1]):
        place = batch.indices.tolist().index(index)
        for view in range(4):
            tile = sheet[:, row * 100 + 2 : row * 100 + 98, (view + 1) * 100 + 2 : (view + 1) * 100 + 98]
            assert torch.equal(tile, batch.views[view, place])

    original = sheet[:, 2:98, 2:98]  # twice as wide as high: white above and below
    assert (original[:, :24] == 255).all()
    assert (original[:, 72:] == 255).all()
    assert (original[:, 24:72] < 255).any()


def test_small_views_are_enlarged():
    source = ArraySource("noise", np.zeros((1, 3, 32, 32), dtype=np.uint8))
    assert contact_sheet(source, moco_v2_views(32), seed=0, images=[0], columns=2).shape == (3, 100, 300)
