"""Given its parameters, a view is what torchvision's functions make of the image, in the stated order."""

import dataclasses

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from co2.views import transform
from co2.views.parameters import ViewRow
from co2.views.transform import make_view, normalise, normalise_for_convolutions, plain_view
from co2.views.view import View, moco_v1_views, moco_v2_views

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
