"""Parameters have the distributions of torchvision's own transforms, and are keyed by seed, epoch, image and view."""

import dataclasses
import hashlib
import itertools
import math

import pytest
import torch
from inputs import QuarterTurn
from presets import moco_v1_views, moco_v2_views, simclr_views, small_views
from torchvision.transforms import ColorJitter, GaussianBlur, RandomResizedCrop

from co2.philox import uniforms
from co2.views.parameters import ViewParameters, draw, draw_then, draw_views
from co2.views.view import View

FIELDS = [field.name for field in dataclasses.fields(ViewParameters)]


def draw_square(augmentation, seed=0, epoch=0, images=range(50), view=0, height=60, width=80):
    images = torch.tensor(list(images))
    return draw(
        augmentation, seed, epoch, images, view, torch.full_like(images, height), torch.full_like(images, width)
    )


def assert_same_distribution(ours, theirs):
    """Two-sample Kolmogorov-Smirnov test at the level 0.001."""
    ours, theirs = ours.double().sort().values, theirs.double().sort().values
    points = torch.cat([ours, theirs])
    below = [torch.searchsorted(one, points, right=True) / len(one) for one in (ours, theirs)]
    distance = (below[0] - below[1]).abs().max().item()
    assert distance < 1.95 * math.sqrt(1 / len(ours) + 1 / len(theirs))


def assert_share(on, probability):
    """A binomial test at four standard deviations."""
    allowed = 4 * math.sqrt(probability * (1 - probability) / len(on))
    assert abs(on.double().mean().item() - probability) <= allowed


@pytest.mark.parametrize("size", [(60, 80), (32, 32), (100, 37), (20, 90)])  # the last falls back to the centre often
@pytest.mark.parametrize("augmentation", [moco_v2_views(), simclr_views()])
def test_crops_are_distributed_as_torchvision_s(size, augmentation):
    torch.manual_seed(0)
    picture = torch.empty(3, *size)
    scale, ratio = list(augmentation.crop_scale), list(augmentation.crop_ratio)
    theirs = torch.tensor([RandomResizedCrop.get_params(picture, scale, ratio) for _ in range(2500)])
    ours = draw_square(augmentation, images=range(20_000), height=size[0], width=size[1]).crop
    for column in range(4):
        assert_same_distribution(ours[:, column], theirs[:, column])
    assert_same_distribution(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3])
    assert_same_distribution(ours[:, 3] / ours[:, 2], theirs[:, 3] / theirs[:, 2])
    assert_same_distribution(ours[:, 0] + ours[:, 1] * 0.37, theirs[:, 0] + theirs[:, 1] * 0.37)  # and jointly


@pytest.mark.parametrize("size", [(5, 400), (400, 5), (1, 1), (1, 50), (7, 7)])
def test_crops_lie_inside_images_of_any_shape(size):
    top, left, height, width = draw_square(simclr_views(), images=range(500), height=size[0], width=size[1]).crop.T
    assert (height > 0).all()
    assert (width > 0).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= size[0]).all()
    assert (left + width <= size[1]).all()


@pytest.mark.parametrize("size", [(1000, 3000), (3000, 1000), (30, 35), (101, 333)])
def test_the_fall_back_is_torchvision_s(size):
    scale, ratio = (1.0, 1.0), (3 / 4, 4 / 3)
    if size == (30, 35):
        ratio = (0.5, 0.51)  # no crop of the whole area has this shape
    expected = RandomResizedCrop.get_params(torch.empty(3, *size), list(scale), list(ratio))
    augmentation = View(crop_scale=scale, crop_ratio=ratio)
    drawn = draw_square(augmentation, images=range(5), height=size[0], width=size[1]).crop
    assert drawn.tolist() == [list(expected)] * 5


@pytest.mark.parametrize(
    "augmentation", [moco_v1_views(), moco_v2_views(), simclr_views(), View(jitter=(1.5, 0.1, 0.2, 0.5))]
)
def test_colours_are_jittered_as_by_torchvision(augmentation):
    torch.manual_seed(0)
    theirs = ColorJitter(*augmentation.jitter)
    ranges = (theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue)
    factors = torch.tensor([theirs.get_params(*ranges)[1:] for _ in range(2500)])
    ours = draw_square(augmentation, images=range(20_000))
    for column in range(4):
        assert_same_distribution(ours.jitter_factors[:, column], factors[:, column])
        assert ours.jitter_factors[:, column].min() >= ranges[column][0] - 1e-6
        assert ours.jitter_factors[:, column].max() <= ranges[column][1] + 1e-6


def test_every_order_of_the_colour_changes_is_equally_likely():
    orders = draw_square(moco_v2_views(), images=range(24_000)).jitter_order
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for order in orders.tolist():
        counts[tuple(order)] += 1  # a KeyError is an order that is none
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi_square < 23 + 4 * math.sqrt(2 * 23)


def test_blur_is_distributed_as_torchvision_s():
    torch.manual_seed(0)
    theirs = torch.tensor([GaussianBlur.get_params(0.1, 2.0) for _ in range(2500)])
    assert_same_distribution(draw_square(moco_v2_views(), images=range(20_000)).blur_sigma, theirs)


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_how_often_each_augmentation_is_applied(probability):
    names = ("flip", "jitter", "grey", "blur", "solarise")
    drawn = draw_square(View(**{f"{name}_probability": probability for name in names}), images=range(20_000))
    for name in names:
        assert_share(getattr(drawn, name), probability)


def test_augmentations_are_independent_of_each_other():
    drawn = draw_square(dataclasses.replace(moco_v2_views(), solarise_probability=0.3), images=range(20_000))
    columns = [getattr(drawn, name).double().view(20_000, -1) for name in FIELDS if name != "jitter_order"]
    columns.append(drawn.jitter_order[:, :1].double())
    together = torch.cat(columns, 1).T
    correlations = torch.corrcoef(together) - torch.eye(len(together))
    correlations[:4, :4] = 0  # the four numbers of a crop depend on each other
    assert correlations.abs().max() < 4.5 / math.sqrt(20_000)


def test_parameters_are_drawn_for_each_view_of_each_image():
    first = draw_square(moco_v2_views())
    for name in ("jitter_factors", "blur_sigma"):
        values = getattr(first, name).flatten()
        assert values.unique().numel() == values.numel()  # not once for a batch
    changes = [{"seed": 1}, {"epoch": 1}, {"view": 1}, {"images": range(50, 100)}]
    for change in changes:
        other = draw_square(moco_v2_views(), **change)
        assert not torch.isclose(first.jitter_factors, other.jitter_factors).all(1).any()
        assert not torch.equal(first.crop, other.crop)


def test_the_rest_of_the_batch_does_not_matter():
    together = draw_square(simclr_views())
    alone = draw_square(simclr_views(), images=[17])
    for name in FIELDS:
        assert torch.equal(getattr(together, name)[17:18], getattr(alone, name))


def test_images_of_different_sizes_share_a_batch():
    images, heights, widths = torch.tensor([3, 4]), torch.tensor([30, 200]), torch.tensor([90, 40])
    together = draw(simclr_views(), 0, 0, images, 0, heights, widths)
    for place, (image, height, width) in enumerate([(3, 30, 90), (4, 200, 40)]):
        alone = draw_square(simclr_views(), images=[image], height=height, width=width)
        assert torch.equal(together.crop[place], alone.crop[0])


@pytest.mark.parametrize(
    ("change", "touched"),
    [
        ({"flip_probability": 0.0}, {"flip"}),
        ({"jitter_probability": 0.0}, {"jitter"}),
        ({"jitter": (0.0, 0.4, 0.4, 0.1)}, {"jitter_factors"}),
        ({"grey_probability": 0.0}, {"grey"}),
        ({"blur_probability": 0.0}, {"blur"}),
        ({"blur_sigma": (0.5, 1.0)}, {"blur_sigma"}),
        ({"solarise_probability": 0.5}, {"solarise"}),
        ({"crop_scale": (0.08, 1.0)}, {"crop"}),
    ],
)
def test_changing_one_augmentation_leaves_the_others(change, touched):
    before = draw_square(moco_v2_views())
    after = draw_square(dataclasses.replace(moco_v2_views(), **change))
    for name in FIELDS:
        assert torch.equal(getattr(before, name), getattr(after, name)) == (name not in touched), name


def test_rows_are_the_same_as_plain_numbers():
    drawn = draw_square(moco_v2_views(), images=range(7))
    rows = drawn.rows()
    assert len(rows) == 7
    for name in FIELDS:
        plain = torch.tensor([getattr(row, name) for row in rows])
        assert torch.equal(plain, getattr(drawn, name))


@pytest.mark.gpu
def test_the_gpu_draws_the_same_parameters():
    images = torch.arange(5000)
    heights, widths = 20 + images % 300, 20 + images * 7 % 300
    here = draw(moco_v2_views(), 3, 4, images, 1, heights, widths)
    there = draw(moco_v2_views(), 3, 4, images.cuda(), 1, heights.cuda(), widths.cuda())
    for name in FIELDS:
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name


@pytest.mark.gpu
def test_a_captured_graph_draws_the_parameters_of_the_epoch_it_is_told():
    images = torch.arange(64, device="cuda")
    size = torch.full_like(images, 48)
    epoch = torch.zeros((), dtype=torch.int64, device="cuda")
    draw(moco_v2_views(), 0, epoch, images, 0, size, size)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = draw(moco_v2_views(), 0, epoch, images, 0, size, size)
    for number in (0, 5):
        epoch.fill_(number)
        graph.replay()
        expected = draw(moco_v2_views(), 0, number, images, 0, size, size)
        for name in FIELDS:
            assert torch.equal(getattr(drawn, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (moco_v1_views, "e3a635f1b8166d77"),
        (moco_v2_views, "37b276ef174101d3"),
        (simclr_views, "dea5aca34902d0f4"),
        (small_views, "959236183dc0257e"),
    ],
)
def test_what_was_drawn_before_views_could_be_solarised_is_drawn_again(preset, expected):
    """And after whatever is added later: its numbers go behind those that are there."""
    images = torch.arange(500)
    drawn = draw(preset(), 3, 7, images, images % 2, 32 + images % 300, 32 + images * 7 % 400)
    digest = hashlib.sha256()
    for name in ("crop", "flip", "jitter", "jitter_order", "jitter_factors", "grey", "blur", "blur_sigma"):
        digest.update(getattr(drawn, name).numpy().tobytes())
    assert digest.hexdigest()[:16] == expected


def test_solarisation_has_the_number_behind_the_first_32():
    number = uniforms(3, 7, torch.arange(1000), 1, 33)[:, 32]
    drawn = draw_square(View(solarise_probability=0.2), seed=3, epoch=7, images=range(1000), view=1)
    assert torch.equal(drawn.solarise, number < 0.2)


@pytest.mark.parametrize(
    "views",
    [
        {0: moco_v2_views(), 1: moco_v2_views()},
        {1: moco_v2_views(), 2: moco_v2_views(), 3: moco_v2_views()},
        {0: moco_v2_views(), 2: moco_v2_views()},  # another stands between them
        {0: View(blur_probability=1.0), 3: simclr_views(), 4: View(solarise_probability=0.2)},
    ],
    ids=["alike", "later ones", "apart", "different"],
)
def test_several_views_of_several_batches_are_drawn_as_one_by_one(views):
    images = torch.arange(12).view(3, 1, 4).expand(3, len(views), 4)  # [T, V, b]
    heights, widths = 30 + images * 7, 90 - images * 3
    drawn = draw_views(views, 5, 2, images, heights, widths)
    for name in FIELDS:
        together = getattr(drawn, name).unflatten(0, images.shape)
        for place, (number, view) in enumerate(views.items()):
            for batch in range(3):
                here = (column[batch, place] for column in (images, heights, widths))
                of_images, *sizes = here
                alone = draw(view, 5, 2, of_images, number, *sizes)
                assert torch.equal(together[batch, place], getattr(alone, name)), name


def test_what_follows_a_view_has_numbers_that_nothing_else_has():
    images = torch.arange(20)
    numbers = draw_then(QuarterTurn(places=70), 1, 2, images, 3)
    assert torch.equal(numbers, uniforms(1, 2, images, 3, 64 + 70)[:, 64:])
