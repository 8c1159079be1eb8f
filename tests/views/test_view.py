"""The augmentations are the published ones."""

import dataclasses
import math

import pytest

from co2.errors import UserError
from co2.views.view import View, moco_v1_views, moco_v2_views, simclr_views, small_views


def test_moco_v1_is_that_of_its_paper():
    views = moco_v1_views()
    assert (views.size, views.crop_scale, views.grey_probability) == (224, (0.2, 1.0), 0.2)
    assert (views.jitter, views.jitter_probability, views.grey_first) == ((0.4, 0.4, 0.4, 0.4), 1.0, True)
    assert (views.blur_probability, views.flip_probability) == (0.0, 0.5)


def test_moco_v2_is_that_of_its_paper():
    views = moco_v2_views()
    assert (views.size, views.crop_scale, views.grey_probability) == (224, (0.2, 1.0), 0.2)
    assert (views.jitter, views.jitter_probability, views.grey_first) == ((0.4, 0.4, 0.4, 0.1), 0.8, False)
    assert (views.blur_probability, views.blur_sigma, views.flip_probability) == (0.5, (0.1, 2.0), 0.5)


def test_simclr_is_that_of_its_paper():
    views = simclr_views()
    assert (views.crop_scale, views.jitter, views.jitter_probability) == ((0.08, 1.0), (0.8, 0.8, 0.8, 0.2), 0.8)


def test_small_images_are_not_blurred_and_cropped_further():
    notebook = dataclasses.replace(moco_v2_views(32), blur_probability=0.0, crop_scale=(0.08, 1.0))
    assert small_views() == notebook


@pytest.mark.parametrize(
    ("earlier", "epochs", "sizes"),
    [
        ((), 2, [32, 32]),
        ((16, 24), 3, [16, 24, 32]),
        ((16, 24), 7, [16, 16, 16, 24, 24, 32, 32]),
        ((16, 24, 32), 8, [16, 16, 24, 24, 32, 32, 32, 32]),
    ],
)
def test_a_run_is_divided_among_the_sizes_of_views_and_ends_with_the_last(earlier, epochs, sizes):
    views = moco_v2_views(32)
    growing = dataclasses.replace(views, earlier_sizes=earlier)
    for epoch, size in enumerate(sizes):
        scale = size / 32
        same = dataclasses.replace(views, size=size, blur_sigma=(0.1 * scale, 2.0 * scale))
        assert growing.in_epoch(epoch, epochs) == same
    assert growing.in_epoch(epochs - 1, epochs) == views


def test_blur_looks_no_further_than_the_view():
    assert View(size=224, blur_sigma=(0.1, 2.0)).blur_radius == 8
    assert View(size=4, blur_sigma=(0.1, 2.0)).blur_radius == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 2},
        {"size": 100_000},
        {"earlier_sizes": (16, 2)},
        {"earlier_sizes": (100_000,)},
        {"earlier_sizes": (256,)},  # before 224
        {"earlier_sizes": (128, 64)},
        {"crop_scale": (0.5, 0.2)},
        {"crop_scale": (0.0, 1.0)},
        {"crop_scale": (0.2, 1.5)},
        {"crop_ratio": (0.0, 1.0)},
        {"jitter": (0.4, 0.4, -0.1, 0.1)},
        {"jitter": (0.4, 0.4, 0.4, 0.6)},
        {"blur_sigma": (2.0, 0.1)},
        {"flip_probability": 1.1},
        {"std": (0.2, 0.0, 0.2)},
        {"std": (0.2, math.nan, 0.2)},
        {"mean": (0.5, 0.5, math.inf)},
        {"jitter": (math.nan, 0.4, 0.4, 0.1)},
        {"blur_sigma": (0.1, math.inf)},
    ],
)
def test_nonsense_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=rf"views\.{name}"):
        View(**wrong)
