"""The proposal network and the box head for whole batches, against torchvision's for one image after the other."""

import pytest
import torch
from torch import nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import box_iou, nms, roi_align

from co2.evaluation.voc.regions import (
    Proposals,
    Regions,
    draw,
    not_suppressed,
    overlaps,
    pad_objects,
    suppress_together,
)

SIZES = [(96, 120), (88, 128), (96, 128)]  # one image in each, with 0, 1 and 3 objects
BOXES = [
    torch.zeros(0, 4),
    torch.tensor([[5.0, 8, 50, 70]]),
    torch.tensor([[10.0, 10, 30, 34], [0, 0, 128, 96], [60, 40, 63, 43]]),
]
LABELS = [torch.zeros(0, dtype=torch.int64), torch.tensor([2]), torch.tensor([0, 1, 2])]
TARGETS = [{"boxes": boxes, "labels": labels + 1} for boxes, labels in zip(BOXES, LABELS, strict=True)]
OBJECTS = pad_objects(BOXES, LABELS)


def random_boxes(*shape, generator):
    corners = 100 * torch.rand(*shape, 2, generator=generator)
    return torch.cat([corners, corners + 1 + 60 * torch.rand(*shape, 2, generator=generator)], dim=-1)


def test_overlaps_are_torchvisions():
    generator = torch.Generator().manual_seed(0)
    first, second = random_boxes(3, 7, generator=generator), random_boxes(3, 11, generator=generator)
    expected = torch.stack([box_iou(*pair) for pair in zip(first, second, strict=True)])
    torch.testing.assert_close(overlaps(first, second), expected)
    assert overlaps(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)).item() == 0


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.7])
@pytest.mark.parametrize("suppress", [suppress_together, not_suppressed])
def test_suppression_keeps_what_going_from_best_to_worst_keeps(threshold, suppress):
    generator = torch.Generator().manual_seed(1)
    boxes = random_boxes(5, 300, generator=generator)
    boxes[0] = torch.tensor([0.0, 0, 10, 10]) + torch.arange(300)[:, None]  # a chain: each overlaps with the next
    valid = torch.rand(5, 300, generator=generator) < 0.8
    valid[4] = False
    kept = suppress(boxes, valid, threshold)
    for image in range(5):
        places = valid[image].nonzero()[:, 0]
        best_first = torch.arange(len(places), 0, -1.0)
        expected = places[nms(boxes[image, places], best_first, threshold)]
        assert kept[image].nonzero()[:, 0].tolist() == sorted(expected.tolist())


@pytest.mark.gpu
def test_suppression_on_a_gpu():
    boxes = random_boxes(16, 1000, generator=torch.Generator().manual_seed(4))
    valid = torch.rand(16, 1000) < 0.9
    expected = not_suppressed(boxes, valid, 0.7)
    assert torch.equal(not_suppressed(boxes.cuda(), valid.cuda(), 0.7).cpu(), expected)


def test_drawing_takes_its_share_and_no_more_than_there_are():
    fits = torch.zeros(4, 200, dtype=torch.bool)
    misses = torch.zeros(4, 200, dtype=torch.bool)
    fits[0, :50], misses[0, 50:] = True, True  # plenty of both
    fits[1, :3], misses[1, 50:] = True, True  # few that fit
    misses[2, :7] = True  # few altogether
    places, counted = draw(fits, misses, 40, 0.25)
    taken = [row[its].tolist() for row, its in zip(places, counted, strict=True)]
    assert [len(row) for row in taken] == [40, 40, 7, 0]
    assert all(len(set(row)) == len(row) for row in taken)
    assert [int(fits[image, row].sum()) for image, row in enumerate(taken)] == [10, 3, 0, 0]
    assert all((fits | misses)[image, row].all() for image, row in enumerate(taken))
    again = draw(fits, misses, 40, 0.25)[0]
    assert not torch.equal(again[0], places[0])


def proposal_networks(everything):
    """torchvision's and ours with the same weights; where `everything` is learnt from, nothing is left to chance."""
    torch.manual_seed(0)
    anchors = AnchorGenerator(((16, 32, 64),), ((0.5, 1.0, 2.0),))
    head = RPNHead(8, 9)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    count = 10**6 if everything else 64
    settings = {
        "fg_iou_thresh": 0.7,
        "bg_iou_thresh": 0.3,
        "batch_size_per_image": count,
        "positive_fraction": 0.5,
        "pre_nms_top_n": {"training": 300, "testing": 200},
        "post_nms_top_n": {"training": 80, "testing": 30},
        "nms_thresh": 0.7,
    }
    return RegionProposalNetwork(anchors, head, **settings), Proposals(anchors, head, **settings)


@pytest.mark.parametrize("training", [True, False])
def test_proposals_and_their_losses_are_torchvisions(training):
    theirs, ours = (network.train(training) for network in proposal_networks(everything=True))
    images, features = ImageList(torch.zeros(3, 3, 96, 128), SIZES), {"c4": torch.randn(3, 8, 12, 16)}
    expected, expected_losses = theirs(images, features, TARGETS if training else None)
    found, losses = ours(images, features, OBJECTS if training else None)
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert losses.keys() == expected_losses.keys()
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected_losses[name])


def test_losses_of_a_sample_are_those_of_all_on_average():
    _, ours = proposal_networks(everything=False)
    images, features = ImageList(torch.zeros(3, 3, 96, 128), SIZES), {"c4": torch.randn(3, 8, 12, 16)}
    losses = torch.stack([ours(images, features, OBJECTS)[1]["loss_objectness"] for _ in range(20)])
    assert losses.std() > 0
    assert losses.isfinite().all()


class Cells(nn.Module):
    def forward(self, features, boxes, sizes):
        return roi_align(features["c4"], boxes, 3, spatial_scale=1 / 8, sampling_ratio=2, aligned=True)


def box_heads(everything):
    torch.manual_seed(1)
    predictor = FastRCNNPredictor(72, 4)
    arguments = (Cells(), nn.Flatten(), predictor, 0.5, 0.5, 10**6 if everything else 16, 0.25, None, 0.05, 0.5, 20)
    return RoIHeads(*arguments), Regions(*arguments)


def test_regions_and_their_losses_are_torchvisions():
    theirs, ours = box_heads(everything=True)
    features = {"c4": torch.randn(3, 8, 12, 16)}
    generator = torch.Generator().manual_seed(2)
    proposals = [random_boxes(count, generator=generator).clamp(max=96) for count in (40, 25, 33)]
    _, expected = theirs(features, proposals, SIZES, TARGETS)
    found, losses = ours(features, proposals, SIZES, OBJECTS)
    assert found == []
    assert losses.keys() == expected.keys()
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected[name])
    expected_found, _ = theirs.eval()(features, proposals, SIZES)
    found, losses = ours.eval()(features, proposals, SIZES)
    assert losses == {}
    for one, other in zip(found, expected_found, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name])


def test_a_quarter_of_the_regions_are_objects_and_an_image_without_any_has_none():
    _, ours = box_heads(everything=False)
    generator = torch.Generator().manual_seed(3)
    near = [torch.cat([boxes.repeat(9, 1) + torch.rand(9 * len(boxes), 4, generator=generator),
                       random_boxes(60, generator=generator)]) for boxes in BOXES]  # fmt: skip
    regions, labels, matched = ours._drawn(near, OBJECTS)
    assert [len(one) for one in regions] == [16, 16, 16]
    first, second, third = labels.split(16)
    assert (first == 0).all()
    assert sorted(second.tolist()) == [0] * 12 + [3] * 4
    assert (third > 0).sum() == 4
    assert (matched.split(16)[1][second > 0] == BOXES[1]).all()
