"""Views made together are, bit for bit, those that torchvision's functions make one by one."""

import dataclasses

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from co2.views.batched import LARGEST_SIZE, make_views
from co2.views.parameters import ViewParameters, draw
from co2.views.transform import make_view
from co2.views.view import View, moco_v1_views, moco_v2_views, simclr_views, small_views

PLAIN = View(
    size=32, jitter_probability=0.0, grey_probability=0.0, blur_probability=0.0, flip_probability=0.0
)  # nothing but the crop
CHANGES = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def pictures(count, height=32, width=32, seed=0):
    """Noise, smooth colours, and grey: uint8 [3, H, W] each."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        if number % 3 == 0:
            picture = torch.rand(3, height, width, generator=generator)
        elif number % 3 == 1:
            corners = torch.rand(1, 3, 3, 4, generator=generator)
            picture = torch.nn.functional.interpolate(corners, (height, width), mode="bilinear")[0]
        else:
            picture = torch.rand(1, height, width, generator=generator).expand(3, -1, -1)
        made.append((picture * 255.99).to(torch.uint8))
    return made


def parameters_of(images, augmentation, seed=0):
    heights, widths = torch.tensor([image.shape[-2:] for image in images]).unbind(1)
    return draw(augmentation, seed, 3, torch.arange(len(images)), 1, heights, widths)


def one_by_one(images, parameters, augmentation):
    rows = parameters.rows()
    return torch.stack([make_view(image, row, augmentation) for image, row in zip(images, rows, strict=True)])


@pytest.mark.parametrize("recipe", [small_views, moco_v1_views, moco_v2_views, simclr_views])
@pytest.mark.parametrize(
    ("size", "height", "width"),
    [
        *[(32, 32, 32), (32, 28, 31), (33, 33, 33), (32, 90, 61), (7, 40, 40), (64, 64, 64), (LARGEST_SIZE, 80, 96)],
        (LARGEST_SIZE + 1, 80, 96),
    ],
)
def test_all_together(recipe, size, height, width):
    augmentation = dataclasses.replace(recipe(size), solarise_probability=0.4)
    images = pictures(60, height, width)
    parameters = parameters_of(images, augmentation)
    made = make_views(images, parameters, augmentation)
    assert made.dtype == torch.uint8
    assert torch.equal(made, one_by_one(images, parameters, augmentation))


def test_every_length_and_place_of_a_crop():
    """Crops of each length along each axis, at the near end, in the middle and at the far end."""
    rows = [
        (top, left, height, width)
        for length in range(1, 33)
        for place in (0, (32 - length) // 2, 32 - length)
        for top, left, height, width in ((place, 3, length, 20), (5, place, 19, length))
    ]
    images = pictures(len(rows))
    parameters = dataclasses.replace(parameters_of(images, PLAIN), crop=torch.tensor(rows))
    expected = [
        F.resized_crop(image, *row, [32, 32], interpolation=v2.InterpolationMode.BILINEAR, antialias=True)
        for image, row in zip(images, rows, strict=True)
    ]
    assert torch.equal(make_views(images, parameters, PLAIN), torch.stack(expected))


@pytest.mark.parametrize("change", range(4))
def test_each_change_of_colour_alone(change):
    """By factors over the whole range, on pictures with every colour difference and without any."""
    strengths = [0.0, 0.0, 0.0, 0.0]
    strengths[change] = 0.5 if change == 3 else 1.0
    augmentation = dataclasses.replace(PLAIN, jitter=tuple(strengths), jitter_probability=1.0)
    images = pictures(90)
    parameters = parameters_of(images, augmentation)
    whole = torch.tensor([[0, 0, 32, 32]]).repeat(90, 1)
    low, high = (-0.5, 0.5) if change == 3 else (0.0, 2.0)
    factors = parameters.jitter_factors.clone()
    factors[:, change] = torch.linspace(low, high, 90)
    parameters = dataclasses.replace(parameters, crop=whole, jitter_factors=factors)
    expected = [
        CHANGES[change](image, factor) for image, factor in zip(images, factors[:, change].tolist(), strict=True)
    ]
    assert torch.equal(make_views(images, parameters, augmentation), torch.stack(expected))


def test_companions_change_nothing():
    """Alone, among others of its size, among larger ones, or in a batch that is made in several parts."""
    augmentation = small_views(32)
    images = pictures(200) + pictures(10, 70, 50)
    parameters = parameters_of(images, augmentation)
    together = make_views(images, parameters, augmentation)
    for place in (0, 63, 64, 199, 205):
        row = ViewParameters(
            **{
                field.name: getattr(parameters, field.name)[place : place + 1]
                for field in dataclasses.fields(parameters)
            }
        )
        assert torch.equal(make_views(images[place : place + 1], row, augmentation)[0], together[place])


def test_coarse_matrix_products_change_nothing():
    """A program that allows itself products in bfloat16 still gets the same views."""
    images = pictures(20)
    parameters = parameters_of(images, PLAIN)
    exact = make_views(images, parameters, PLAIN)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(make_views(images, parameters, PLAIN), exact)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_images_are_left_as_they_were():
    images = pictures(12)
    before = [image.clone() for image in images]
    augmentation = simclr_views(32)
    make_views(images, parameters_of(images, augmentation), augmentation)
    assert all(torch.equal(image, copy) for image, copy in zip(images, before, strict=True))


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
def test_other_processors_too(monkeypatch, capability):
    """torchvision resizes in float32 where torch has no fast way for bytes."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for size in (32, 48):
        images = pictures(30, size, 40)
        augmentation = dataclasses.replace(PLAIN, crop_scale=(0.1, 1.0))
        parameters = parameters_of(images, augmentation)
        assert torch.equal(make_views(images, parameters, augmentation), one_by_one(images, parameters, augmentation))
