"""Given its parameters, a view is what torchvision's functions make of the image, in the stated order; and so are, bit
for bit, views that are made together."""

import dataclasses

import pytest
import torch
from presets import moco_v1_views, moco_v2_views, simclr_views, small_views
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from co2.views import transform
from co2.views.parameters import ViewParameters, ViewRow, draw
from co2.views.transform import (
    LARGEST_SIZE,
    make_view,
    make_views,
    normalise,
    normalise_for_convolutions,
    plain_view,
)
from co2.views.view import View

NOTHING = ViewRow(
    crop=(0, 0, 40, 50),
    flip=False,
    jitter=False,
    jitter_order=(0, 1, 2, 3),
    jitter_factors=(1.3, 0.7, 1.2, 0.08),
    grey=False,
    blur=False,
    blur_sigma=1.1,
    solarise=False,
)
EVERYTHING = NOTHING._replace(
    crop=(3, 7, 30, 25), flip=True, jitter=True, jitter_order=(3, 1, 0, 2), grey=True, blur=True
)
PLAIN = View(
    size=32, jitter_probability=0.0, grey_probability=0.0, blur_probability=0.0, flip_probability=0.0
)  # nothing but the crop
CHANGES = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


@pytest.fixture
def image():
    """A picture with smooth parts, edges and noise: uint8 [3, 40, 50]."""
    generator = torch.Generator().manual_seed(0)
    smooth = torch.rand(3, 5, 6, generator=generator)
    picture = torch.nn.functional.interpolate(smooth[None], (40, 50), mode="bicubic")[0]
    picture[:, 10:20, 15:30] = smooth[:, :1, :1]
    picture += 0.1 * torch.randn(3, 40, 50, generator=generator)
    return (picture.clamp(0, 1) * 255).to(torch.uint8)


def crop(image, row, size):
    return F.resized_crop(image, *row.crop, [size, size], interpolation=v2.InterpolationMode.BILINEAR, antialias=True)


def by_hand(image, row, augmentation):
    view = crop(image, row, augmentation.size)
    if augmentation.grey_first:
        view = F.rgb_to_grayscale(view, 3)
    for change in row.jitter_order:
        view = CHANGES[change](view, row.jitter_factors[change])
    if not augmentation.grey_first:
        view = F.rgb_to_grayscale(view, 3)
    width = 2 * augmentation.blur_radius + 1
    return F.horizontal_flip(F.gaussian_blur(view, [width, width], [row.blur_sigma, row.blur_sigma]))


def assert_equal_but_for_rounding(view, expected):
    """Blurring along one axis and then the other may round a few pixels to the neighbouring value."""
    difference = (view.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.01


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("grey_first", [False, True])
def test_all_together_in_the_stated_order(image, grey_first, order):
    augmentation = View(size=24, grey_first=grey_first)
    row = EVERYTHING._replace(jitter_order=order)
    view = make_view(image, row, augmentation)
    assert view.dtype == torch.uint8
    assert view.shape == (3, 24, 24)
    assert_equal_but_for_rounding(view, by_hand(image, row, augmentation))


def test_grey_before_jitter_leaves_another_picture_than_grey_after_it(image):
    row = NOTHING._replace(jitter=True, grey=True)
    first = make_view(image, row, moco_v1_views(24))
    after = make_view(image, row, dataclasses.replace(moco_v1_views(24), grey_first=False))
    assert torch.equal(after[0], after[1])
    assert not torch.equal(first, after)


def test_one_at_a_time(image):
    augmentation = moco_v2_views(24)
    cropped = crop(image, NOTHING, 24)
    assert torch.equal(make_view(image, NOTHING, augmentation), cropped)
    assert torch.equal(make_view(image, NOTHING._replace(flip=True), augmentation), cropped.flip(-1))
    assert torch.equal(make_view(image, NOTHING._replace(grey=True), augmentation), F.rgb_to_grayscale(cropped, 3))
    blurred = F.gaussian_blur(cropped, [17, 17], [1.1, 1.1])
    assert_equal_but_for_rounding(make_view(image, NOTHING._replace(blur=True), augmentation), blurred)
    for change, function in enumerate(CHANGES):
        strengths = [0.0, 0.0, 0.0, 0.0]
        strengths[change] = 0.4
        only = dataclasses.replace(augmentation, jitter=tuple(strengths))
        expected = function(cropped, NOTHING.jitter_factors[change])
        assert torch.equal(make_view(image, NOTHING._replace(jitter=True), only), expected)


def test_blur_of_no_width_changes_nothing(image):
    blurred = make_view(image, NOTHING._replace(blur=True, blur_sigma=0.0), moco_v2_views(24))
    assert torch.equal(blurred, make_view(image, NOTHING, moco_v2_views(24)))


def test_the_image_itself_is_left_alone(image):
    before = image.clone()
    augmentation = View(size=40)
    make_view(image, EVERYTHING._replace(crop=(0, 0, 40, 40)), augmentation)
    assert torch.equal(image, before)


def test_the_smallest_view_can_be_blurred(image):
    assert make_view(image, EVERYTHING, View(size=4)).shape == (3, 4, 4)


@pytest.mark.parametrize(("size", "shorter"), [(32, 32), (64, 64), (112, 128), (224, 256)])
def test_plain_view(image, size, shorter):
    expected = F.center_crop(F.resize(image, [shorter], antialias=True), [size, size])
    assert torch.equal(plain_view(image, size), expected)
    assert plain_view(image, size).shape == (3, size, size)


@pytest.mark.parametrize("shape", [(3, 1, 65_535), (3, 65_535, 2)])
def test_a_plain_view_of_a_row_of_pixels_enlarges_its_middle_alone(shape, monkeypatch):
    image = torch.zeros(shape, dtype=torch.uint8)
    image[:, shape[1] // 2 - 8 : shape[1] // 2 + 9, shape[2] // 2 - 8 : shape[2] // 2 + 9] = 200
    resize, enlarged = transform.F.resize, []

    def resize_what_is_not_too_long(image, *others, **options):
        enlarged.append(max(image.shape[-2:]) / min(image.shape[-2:]))
        assert enlarged[-1] <= 16
        return resize(image, *others, **options)

    monkeypatch.setattr(transform.F, "resize", resize_what_is_not_too_long)
    assert torch.equal(plain_view(image, 224), torch.full((3, 224, 224), 200, dtype=torch.uint8))
    assert len(enlarged) == 1


@pytest.mark.parametrize("size", [40, 96])
def test_an_image_that_has_the_size_is_its_own_plain_view(size):
    square = torch.randint(0, 256, (3, size, size), dtype=torch.uint8)
    assert torch.equal(plain_view(square, size), square)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normalise_is_torchvision_s(image, dtype):
    augmentation = moco_v2_views()
    views = torch.stack([image, image.flip(-1)]).expand(3, 2, 3, 40, 50)  # [V, B, 3, H, W]
    normalised = normalise(views, augmentation, dtype)
    assert normalised.dtype == dtype
    assert normalised.shape == views.shape
    expected = F.normalize(views.flatten(0, 1).double() / 255, augmentation.mean, augmentation.std).view(views.shape)
    if dtype == torch.bfloat16:
        assert torch.equal(normalised, normalise(views, augmentation).to(dtype))  # rounded once
    else:
        torch.testing.assert_close(normalised, expected.to(dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_on_a_cpu_get_the_same_numbers_in_the_memory_that_they_are_fastest_with(image, dtype):
    views = torch.stack([image, image.flip(-1)])  # [B, 3, H, W]
    numbers = normalise_for_convolutions(views, moco_v2_views(), dtype)
    assert torch.equal(numbers, normalise(views, moco_v2_views(), dtype))
    assert numbers.dtype == dtype
    assert numbers.is_contiguous(memory_format=torch.channels_last)


def test_solarisation_inverts_the_upper_half_of_all_levels():
    levels = torch.arange(256).to(torch.uint8).view(1, 16, 16).expand(3, 16, 16)
    whole = NOTHING._replace(crop=(0, 0, 16, 16), solarise=True)
    solarised = make_view(levels, whole, View(size=16))
    expected = [level if level < 128 else 255 - level for level in range(256)]
    assert solarised.flatten(1).tolist() == [expected] * 3


def test_solarisation_comes_after_everything_that_changes_levels(image):
    view = View(size=24)
    unsolarised = make_view(image, EVERYTHING, view)
    expected = torch.where(unsolarised >= 128, 255 - unsolarised, unsolarised)
    assert torch.equal(make_view(image, EVERYTHING._replace(solarise=True), view), expected)
    assert not torch.equal(expected, unsolarised)


# Made together.


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
