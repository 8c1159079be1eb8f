"""torchvision's proposal network and box head, for all images of a batch at once.

torchvision looks at one image after the other, dozens of small steps for each: on a fast GPU a batch of sixteen then
waits longer for the program than for the arithmetic. Here the same is computed on padded batches. What is drawn at
random, the anchors and regions that are learnt from, is drawn with the same odds but not by the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, concat_box_prediction_layers
from torchvision.ops import nms

_SMOOTH = 1 / 9  # where the loss of boxes turns from a parabola into a line
_MOST_TOGETHER = 4096  # proposals of an image that are compared each with each; more would take too much memory


class Objects(NamedTuple):
    """What there is to find in the images of a batch, padded to the same number for each."""

    boxes: Tensor  # [B, M, 4] float32
    labels: Tensor  # [B, M] int64, counted from 1; 0 where there is no object

    def to(self, device: torch.device) -> Objects:
        """The same on another device."""
        return Objects(*(part.to(device, non_blocking=True) for part in self))


def pad_objects(boxes: list[Tensor], labels: list[Tensor]) -> Objects:
    """The objects of each image, [M_i, 4] and [M_i] counted from 0, as one batch."""
    most = max([1, *map(len, labels)])
    padded = Objects(torch.zeros(len(boxes), most, 4), torch.zeros(len(boxes), most, dtype=torch.int64))
    for image, (its_boxes, its_labels) in enumerate(zip(boxes, labels, strict=True)):
        padded.boxes[image, : len(its_boxes)] = its_boxes
        padded.labels[image, : len(its_labels)] = its_labels + 1
    return padded


class Proposals(RegionProposalNetwork):
    """Where an object might be, whatever it is."""

    def forward(
        self, images: ImageList, features: dict[str, Tensor], objects: Objects | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The proposals of each image, [P_i, 4], and in training the two losses."""
        levels = list(features.values())
        scores_of_levels, moves_of_levels = self.head(levels)
        anchors = self.anchor_generator(images, levels)  # for each image the same [A, 4]
        scores, moves = concat_box_prediction_layers(scores_of_levels, moves_of_levels)  # [B * A, 1], [B * A, 4]
        moved = self.box_coder.decode(moves.detach(), anchors).view(len(anchors), -1, 4)  # [B, A, 4]
        scores = scores.view(len(anchors), -1)  # [B, A]
        proposals = self._best(moved, scores.detach(), images.image_sizes)
        if objects is None:
            return proposals, {}
        return proposals, self._losses(scores, moves.view_as(moved), anchors[0], objects)

    def _best(self, boxes: Tensor, scores: Tensor, sizes: list[tuple[int, int]]) -> list[Tensor]:
        """The boxes [B, A, 4] with the best scores [B, A] that lie apart from each other."""
        scores, places = scores.topk(min(self.pre_nms_top_n(), scores.shape[1]), dim=1)  # [B, n], the best first
        boxes = boxes.gather(1, places[..., None].expand(-1, -1, 4))  # [B, n, 4]
        limits = boxes.new_tensor([(width, height, width, height) for height, width in sizes])[:, None]  # [B, 1, 4]
        boxes = torch.minimum(boxes.clamp(min=0), limits)
        sides = boxes[..., 2:] - boxes[..., :2]  # [B, n, 2]
        kept = not_suppressed(boxes, (sides >= self.min_size).all(dim=2), self.nms_thresh)  # [B, n]
        kept &= kept.cumsum(dim=1) <= self.post_nms_top_n()
        counts: list[int] = kept.sum(dim=1).tolist()  # waits for the device
        return list(boxes[kept].split(counts))

    def _losses(self, scores: Tensor, moves: Tensor, anchors: Tensor, objects: Objects) -> dict[str, Tensor]:
        """How far scores [B, A] and moves [B, A, 4] of the anchors [A, 4] are from the truth, on some of them."""
        shares = overlaps(objects.boxes, anchors.expand(len(scores), -1, -1))  # [B, M, A]
        there = objects.labels > 0  # [B, M]
        shares = torch.where(there[..., None], shares, -1.0)
        best, nearest = shares.max(dim=1)  # [B, A] each
        # An object that no anchor fits well is learnt from those that fit it best.
        own = shares.amax(dim=2, keepdim=True)  # [B, M, 1]
        fits = (best >= self.proposal_matcher.high_threshold) | ((shares == own) & (own > 0)).any(dim=1)
        misses = (best < self.proposal_matcher.low_threshold) & ~fits
        sampler = self.fg_bg_sampler
        drawn, counted = draw(fits, misses, sampler.batch_size_per_image, sampler.positive_fraction)  # [B, S] each
        fitting = fits.gather(1, drawn)
        matched = objects.boxes.gather(1, nearest.gather(1, drawn)[..., None].expand(-1, -1, 4))  # [B, S, 4]
        wanted = self.box_coder.encode_single(matched.flatten(0, 1), anchors[drawn].flatten(0, 1)).view_as(matched)
        total = counted.sum()
        wrong = F.binary_cross_entropy_with_logits(scores.gather(1, drawn), fitting.float(), reduction="none")
        off = F.smooth_l1_loss(
            moves.gather(1, drawn[..., None].expand(-1, -1, 4)), wanted, beta=_SMOOTH, reduction="none"
        )
        nothing = wrong.new_zeros(())  # where, not times 0: the box of an anchor that fits nothing may be infinite
        return {
            "loss_objectness": torch.where(counted, wrong, nothing).sum() / total,
            "loss_rpn_box_reg": torch.where((counted & fitting)[..., None], off, nothing).sum() / total,
        }


class Regions(RoIHeads):
    """What is in each proposal, and where exactly."""

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: list[tuple[int, int]],
        objects: Objects | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """The detections of each image, or in training the two losses."""
        if objects is None:
            scores, moves = self.box_predictor(self.box_head(self.box_roi_pool(features, proposals, sizes)))
            found = zip(*self.postprocess_detections(scores, moves, proposals, sizes), strict=True)
            return [{"boxes": boxes, "scores": sure, "labels": labels} for boxes, sure, labels in found], {}
        regions, labels, matched = self._drawn(proposals, objects)  # R of them in all
        scores, moves = self.box_predictor(self.box_head(self.box_roi_pool(features, regions, sizes)))
        wanted = self.box_coder.encode_single(matched, torch.cat(regions))  # [R, 4]
        own_moves = moves.view(len(labels), -1, 4)[torch.arange(len(labels), device=labels.device), labels]  # [R, 4]
        off = F.smooth_l1_loss(own_moves, wanted, beta=_SMOOTH, reduction="none")
        return [], {
            "loss_classifier": F.cross_entropy(scores, labels),
            "loss_box_reg": torch.where((labels > 0)[:, None], off, off.new_zeros(())).sum() / len(labels),
        }

    @torch.no_grad()
    def _drawn(self, proposals: list[Tensor], objects: Objects) -> tuple[list[Tensor], Tensor, Tensor]:
        """Some proposals of each image, [R_i, 4], to learn from; what is in them [R], and the box of that [R, 4]."""
        there = objects.labels > 0  # [B, M]
        boxes = torch.nn.utils.rnn.pad_sequence(proposals, batch_first=True)  # [B, P, 4]
        lengths = torch.tensor([len(one) for one in proposals], device=boxes.device)
        given = torch.arange(boxes.shape[1], device=boxes.device) < lengths[:, None]  # [B, P]
        boxes = torch.cat([boxes, objects.boxes], dim=1)  # the objects themselves are good proposals: [B, P + M, 4]
        given = torch.cat([given, there], dim=1)
        shares = torch.where(there[..., None], overlaps(objects.boxes, boxes), -1.0)  # [B, M, P + M]
        best, nearest = shares.max(dim=1)  # [B, P + M] each
        fits = given & (best >= self.proposal_matcher.high_threshold)
        sampler = self.fg_bg_sampler
        drawn, counted = draw(fits, given & ~fits, sampler.batch_size_per_image, sampler.positive_fraction)
        chosen = nearest.gather(1, drawn)  # [B, S]
        labels = torch.where(fits.gather(1, drawn), objects.labels.gather(1, chosen), 0)[counted]  # [R]
        matched = objects.boxes.gather(1, chosen[..., None].expand(-1, -1, 4))[counted]  # [R, 4]
        regions = boxes.gather(1, drawn[..., None].expand(-1, -1, 4))[counted]  # [R, 4]
        return list(regions.split(counted.sum(dim=1).tolist())), labels, matched


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of each box of `first` [B, M, 4] with each of `second` [B, N, 4]: [B, M, N].

    0 for boxes without area.
    """
    one, other = first[:, :, None], second[:, None]
    sides = torch.minimum(one[..., 2:], other[..., 2:]) - torch.maximum(one[..., :2], other[..., :2])
    shared = sides.clamp(min=0).prod(dim=-1)  # [B, M, N]
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(dim=-1) for boxes in (one, other)]
    return shared / (areas[0] + areas[1] - shared).clamp(min=1e-9)


def draw(fits: Tensor, misses: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """`count` places of each row at random, at most this share of them from `fits` [B, N], the others from `misses`.

    Returns places [B, S], those that fit first, and which of them count [B, S]: there may be fewer than asked for.
    """
    order = torch.rand(fits.shape, device=fits.device)
    most = min(int(count * share), fits.shape[1])
    keys, fitting = torch.where(fits, order, -1.0).topk(most, dim=1)  # [B, most]
    fitting_count = keys >= 0
    rest = count - fitting_count.sum(dim=1, keepdim=True)  # [B, 1]
    keys, missing = torch.where(misses, order, -1.0).topk(min(count, fits.shape[1]), dim=1)
    missing_count = (keys >= 0) & (torch.arange(keys.shape[1], device=keys.device) < rest)
    return torch.cat([fitting, missing], dim=1), torch.cat([fitting_count, missing_count], dim=1)


def not_suppressed(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Which boxes [B, n, 4], sorted from the best to the worst, overlap with no better one that is kept: bool [B, n].

    Of those that are not `valid` [B, n] none is kept.
    """
    if boxes.is_cuda and boxes.shape[1] <= _MOST_TOGETHER:
        return suppress_together(boxes, valid, threshold)
    kept = torch.zeros_like(valid)
    descending = torch.arange(boxes.shape[1], 0, -1, dtype=boxes.dtype, device=boxes.device)
    for image, (own, its_valid) in enumerate(zip(boxes, valid, strict=True)):
        places = its_valid.nonzero()[:, 0]
        kept[image, places[nms(own[places], descending[places], threshold)]] = True
    return kept


def suppress_together(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """`not_suppressed` for all images at once.

    A box is kept if no kept box before it overlaps with it. That has one solution, which going from the best to the
    worst finds. So does repeating it for all boxes at the same time until nothing changes: after t rounds the first t
    are right, and mostly all of them are after a dozen.
    """
    count = boxes.shape[1]
    at_once = max(1, 2**26 // max(1, count * count))  # images, so that a matrix of each with each fits
    kept = []
    for some, some_valid in zip(boxes.split(at_once), valid.split(at_once), strict=True):
        close = overlaps(some, some) > threshold  # [b, n, n]: symmetric
        before = close.tril(diagonal=-1).to(torch.float16 if boxes.is_cuda else torch.float32)
        found = some_valid
        while True:
            disturbed = torch.bmm(before, found[..., None].to(before.dtype))[..., 0] > 0  # [b, n]
            following = some_valid & ~disturbed
            if torch.equal(following, found):  # waits for the device
                break
            found = following
        kept.append(found)
    return torch.cat(kept)
