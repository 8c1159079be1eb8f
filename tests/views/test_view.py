"""The augmentations are the published ones."""

import dataclasses
import json
import math

import pytest
import torch
from presets import moco_v1_views, moco_v2_views, simclr_views, small_views

from co2 import recipes
from co2.errors import UserError
from co2.experiment import Experiment
from co2.views.parameters import draw
from co2.views.view import View, crop_and_flip, made_together


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
    growing = recipes.get("moco-v2").edit(size=32, earlier_sizes=earlier, epochs=epochs)
    assert growing.view_sizes == sizes
    for epoch, size in enumerate(sizes):
        scale = size / 32
        same = dataclasses.replace(views, size=size, blur_sigma=(0.1 * scale, 2.0 * scale))
        assert growing.views(epoch) == (same, same)
    assert growing.views(epochs - 1) == growing.views() == (views, views)


def test_blur_looks_no_further_than_the_view():
    assert View(size=224, blur_sigma=(0.1, 2.0)).blur_radius == 8
    assert View(size=4, blur_sigma=(0.1, 2.0)).blur_radius == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 2},
        {"size": 100_000},
        {"crop_scale": (0.5, 0.2)},
        {"crop_scale": (0.0, 1.0)},
        {"crop_scale": (0.2, 1.5)},
        {"crop_ratio": (0.0, 1.0)},
        {"jitter": (0.4, 0.4, -0.1, 0.1)},
        {"jitter": (0.4, 0.4, 0.4, 0.6)},
        {"blur_sigma": (2.0, 0.1)},
        {"flip_probability": 1.1},
        {"solarise_probability": -0.1},
        {"std": (0.2, 0.0, 0.2)},
        {"std": (0.2, math.nan, 0.2)},
        {"mean": (0.5, 0.5, math.inf)},
        {"jitter": (math.nan, 0.4, 0.4, 0.1)},
        {"blur_sigma": (0.1, math.inf)},
    ],
)
def test_nonsense_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match="pixels is too" if name == "size" else rf"^{name} of a view"):
        View(**wrong)


@pytest.mark.parametrize("earlier", [(16, 2), (100_000,), (256,), (128, 64)])  # the third before 224
def test_views_that_do_not_grow_are_refused(earlier):
    with pytest.raises(UserError, match="--earlier-sizes"):
        recipes.get("moco-v2").edit(earlier_sizes=earlier)


def test_nothing_but_crop_and_flip_is_left_where_labels_are_learnt():
    """What `View` gets later has a probability, which is switched off, or has to be thought about here."""
    everything = View(crop_scale=(0.3, 0.9), solarise_probability=1.0, jitter_probability=1.0, flip_probability=0.4)
    left = crop_and_flip(everything)
    names = {field.name for field in dataclasses.fields(View)}
    probabilities = {name for name in names if name.endswith("_probability")}
    assert all(getattr(left, name) == 0 for name in probabilities - {"flip_probability"})
    kept = {"size", "crop_scale", "crop_ratio", "flip_probability", "mean", "std"}
    assert all(getattr(left, name) == getattr(everything, name) for name in kept)
    idle = {"jitter", "grey_first", "blur_sigma"}  # where none of that happens
    assert names == probabilities | kept | idle | {"then"}
    images = torch.arange(1000)
    drawn = draw(left, 0, 0, images, 0, *[torch.full((1000,), 40)] * 2)
    switches = {name: value for name, value in vars(drawn).items() if value.dtype == torch.bool}
    assert {name for name, value in switches.items() if value.any()} == {"flip"}


def test_views_are_made_together_where_they_differ_in_nothing_but_what_is_drawn():
    first = View(size=32, blur_probability=0.0)
    second = View(
        size=32, crop_scale=(0.05, 0.1), jitter=(0.8, 0.1, 0.2, 0.3), grey_probability=1, blur_probability=0.1
    )
    small = dataclasses.replace(first, size=16)
    others = [{"grey_first": True}, {"jitter": (0.4, 0.4, 0.4, 0.0)}, {"blur_sigma": (0.1, 3.0)}]
    views = [first, small, second, *(dataclasses.replace(first, **other) for other in others), small]
    groups = made_together(views)
    assert [list(group) for group, _ in groups] == [[0, 2], [1, 6], [3], [4], [5]]
    assert all(group[number] == views[number] for group, _ in groups for number in group)
    how = groups[0][1]
    assert (how.size, how.blur_probability, how.grey_probability) == (32, 0.1, 1)
    assert groups[1][1] == small


def test_what_follows_a_view_is_no_setting():
    """It is put there by a method's own `views`, and no text could say what it is."""
    text = recipes.get("co2-small").edit(size=24).to_json()
    assert Experiment.from_json(text).views()[0].then is None
    for then in (5, {"cells": 3}, "turns"):
        other = json.loads(text)
        other["method"]["view"]["then"] = then
        with pytest.raises(UserError, match=r"does not know the settings method\.view\.then"):
            Experiment.from_json(json.dumps(other))
    with pytest.raises(UserError, match=r"no setting .method\.view\.then."):
        recipes.get("co2-small").edit(method={"view": {"then": None}})


def test_a_description_from_before_solarisation_is_one_without_it():
    plain = json.loads(recipes.get("co2-small").to_json())
    del plain["method"]["view"]["solarise_probability"]
    assert Experiment.from_json(json.dumps(plain)) == recipes.get("co2-small")
