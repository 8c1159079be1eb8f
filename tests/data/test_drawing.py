"""The rendered pictures: a function of their number, told apart by shape alone."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from co2.data.drawing import CLASSES, Picture, render


def test_a_picture_is_a_function_of_its_number() -> None:
    first = [render(index, 32, seed=3).image for index in range(12)]
    again = [render(index, 32, seed=3).image for index in reversed(range(12))][::-1]
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


def test_seed_split_number_and_kind_all_make_other_pictures() -> None:
    pictures = [
        render(0, 96).image,
        render(0, 96, seed=1).image,
        render(0, 96, seed=-1).image,
        render(10, 96).image,
        render(0, 96, split="test").image,
        render(0, 96, several=True).image,
    ]
    for position, one in enumerate(pictures):
        for other in pictures[:position]:
            assert np.abs(one.astype(int) - other).mean() > 5


@pytest.mark.parametrize("size", [8, 33, 64])
def test_the_same_scene_at_every_size(size: int) -> None:
    large = render(4, 224)
    small = render(4, size)
    assert small.image.shape == (size, size, 3)
    shrunk = Image.fromarray(large.masks[0]).convert("L").resize((size, size), Image.Resampling.BOX)
    assert np.mean((np.asarray(shrunk) >= 128) == small.masks[0]) > 0.94
    assert np.allclose(small.boxes / size, large.boxes / 224, atol=1.5 / size)


@pytest.mark.parametrize(("size", "several"), [(32, False), (64, True), (96, True), (224, True)])
def test_boxes_are_tight_around_the_visible_pixels(size: int, several: bool) -> None:
    for index in range(30):
        picture = render(index, size, several=several)
        assert len(picture.labels) == len(picture.boxes) == len(picture.masks)
        assert picture.labels[0] == index % 10
        assert not (picture.masks.sum(0) > 1).any()  # a pixel shows one object
        for (left, top, right, bottom), mask in zip(picture.boxes, picture.masks, strict=True):
            assert mask.sum() > 0.005 * size * size
            inside = mask[top:bottom, left:right]
            assert inside.sum() == mask.sum()
            assert inside[0].any()
            assert inside[-1].any()
            assert inside[:, 0].any()
            assert inside[:, -1].any()


def test_scenes_hold_one_to_four_objects_where_there_is_room() -> None:
    assert {len(render(index, 128, several=True).labels) for index in range(60)} == {1, 2, 3, 4}
    assert {len(render(index, 64, several=True).labels) for index in range(60)} == {1}
    assert {len(render(index, 128).labels) for index in range(60)} == {1}


def test_the_mask_is_where_the_object_is() -> None:
    """One family of colours is light and the other dark, so the object and its ground differ in brightness."""
    for index in range(50):
        picture = render(index, 64)
        brightness = picture.image.max(-1).astype(float)
        mask = picture.masks[0]
        assert abs(brightness[mask].mean() - brightness[~mask].mean()) > 50


def pictures(split: str, count: int) -> list[Picture]:
    return [render(index, 32, split=split) for index in range(count)]


def nearest_mean_accuracy(train: np.ndarray, test: np.ndarray, labels: np.ndarray) -> float:
    means = np.stack([train[labels == number].mean(0) for number in range(len(CLASSES))])
    scale = train.std(0) + 1e-9
    distances = (((test[:, None] - means) / scale) ** 2).sum(-1)  # [N, 10]
    return float((distances.argmin(1) == labels).mean())


def test_colour_does_not_give_the_class_away_but_shape_does() -> None:
    count = 600
    labels = np.arange(count) % len(CLASSES)
    train, test = pictures("train", count), pictures("test", count)

    def colours(drawn: list[Picture]) -> np.ndarray:
        return np.stack([np.r_[p.image.mean((0, 1)), p.image[p.masks[0]].mean(0)] for p in drawn])  # [N, 6]

    chance = 1 / len(CLASSES)
    noise = np.sqrt(chance * (1 - chance) / count)
    assert nearest_mean_accuracy(colours(train), colours(test), labels) < chance + 4 * noise

    def outlines(drawn: list[Picture]) -> np.ndarray:
        cut = [Image.fromarray(p.masks[0]).convert("L").crop(tuple(p.boxes[0])).resize((12, 12)) for p in drawn]
        return np.stack([np.asarray(image, dtype=float).ravel() for image in cut])  # [N, 144]

    known, asked = outlines(train), outlines(test)
    distances = (known**2).sum(1) - 2 * asked @ known.T  # [N, N], less what is the same for a whole row
    assert (labels[distances.argmin(1)] == labels).mean() > 0.9
