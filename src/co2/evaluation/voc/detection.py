"""Object detection on PASCAL VOC: Faster R-CNN on a ResNet's C4 features, all layers fine-tuned.

Conv1 to conv4 are shared: a small network proposes regions on their features (stride 16 for a standard ResNet),
RoIAlign cuts each region out of them as 14 x 14 cells, and conv5, averaged, says what is in it and where exactly its
edges are. It is put together from torchvision's parts. Batch normalisation is trained, with the statistics of batches.

The paper's appendix, "Detection on PASCAL VOC": "To calibrate the small feature magnitude due to the output
normalization in the unsupervised pre-training stage, two extra batch normalization layers are introduced, one is
followed by the regional proposal head whose gradients are divided by 10 and the other is followed by the box prediction
head." Here the first normalises what the proposal head's convolution makes of the features, and what comes back through
that head to the shared layers is divided by 10; the second stands between conv5 and the box prediction, as in MoCo.

Known differences from detectron2, where the paper's numbers come from: the loss of boxes is torchvision's smooth L1
(beta 1/9, detectron2's is 0), and images without objects are trained on (detectron2 leaves them out).
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import roi_align
from torchvision.transforms.v2 import functional as F

from co2.data.source import BadImage, readable
from co2.errors import UserError
from co2.evaluation.features import REPLACED, Unreadable, check_readable, ready
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation
from co2.evaluation.subject import Subject
from co2.evaluation.voc.boxes import BoxPrecision, Found, Truth, check_coco, coco_precision, match, voc_precision
from co2.evaluation.voc.data import VocDetection, read_detection
from co2.evaluation.voc.regions import Objects, Proposals, Regions, pad_objects
from co2.evaluation.voc.spatial import (
    MOST_STRIDE,
    Preparation,
    Trunk,
    fit,
    padding_colour,
    parameter_groups,
    seeded,
    stepped_rate,
    take_statistics,
    width_of,
)
from co2.evaluation.voc.specification import DETECTION_PAPER as PAPER
from co2.evaluation.voc.specification import DETECTION_QUICK as QUICK
from co2.evaluation.voc.specification import DetectionSettings
from co2.machine.workers import in_parts, results_of
from co2.philox import Stream, permutation, uniforms

__all__ = ["PAPER", "QUICK", "DetectionSettings", "Detector", "evaluate"]

_REGION_CELLS = 14  # conv5 halves them to 7, as in classification at 224 pixels
_TEST_PIXELS = 8 * 800 * 1333  # of the images that objects are looked for in at a time


def evaluate(
    subject: Subject,
    data: str | os.PathLike[str],
    settings: DetectionSettings = QUICK,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> Evaluation:
    """AP, AP50 and AP75 of a detector that starts from the subject's weights. `data` is a folder in VOC's layout."""
    device = torch.device(device)
    if settings.coco:
        check_coco()
    train, test = read_detection(data, settings.train, settings.test)
    _check(train, test, settings, progress)
    unreadable = Unreadable(progress)
    with seeded(seed, device):
        model = ready(Detector(subject, len(train.classes), settings), device)
        curves, passed_over = train_detector(
            model, train, settings, device=device, seed=seed, workers=workers, progress=progress
        )
        unreadable.add(train.images, passed_over, REPLACED)
        found, truth, missed = detect(model, test, settings, device=device, workers=workers, progress=progress)
        unreadable.add(test.images, missed, "left out")
    progress.stage("Comparing boxes")
    matches = match(found, truth, len(test.classes))
    by_rule = {rule: voc_precision(matches, rule) for rule in ("11-point", "area")}
    details: dict[str, Any] = {
        "classes": list(test.classes),
        "per_class": _per_class(by_rule[settings.interpolation], test.classes),
        "by_rule": {rule: _numbers(result) for rule, result in by_rule.items()},
        "train_images": len(train.images),
        "test_images": len(truth),
        "boxes": {"train": train.box_counts(), "test": test.box_counts()},
        "unreadable": unreadable.reasons,
        "loss": curves,
        "stride": model.trunk.stride,
    }
    if settings.coco:
        details["coco"] = {
            name: 100 * number for name, number in coco_precision(found, truth, len(test.classes)).items()
        }
    return Evaluation(
        protocol="detection",
        subject=subject.name,
        data=os.fspath(data),
        numbers=_numbers(by_rule[settings.interpolation]),
        settings=dataclasses.asdict(settings) | {"seed": seed},
        details=details,
    )


def _check(train: VocDetection, test: VocDetection, settings: DetectionSettings, progress: Progress) -> None:
    if len(train.images) < settings.batch_size:
        raise UserError(
            f"detection: {settings.train} has {len(train.images)} images, fewer than one batch of "
            f"{settings.batch_size}. Give a smaller --batch-size, or more images."
        )
    for name, split in ((settings.train, train), (settings.test, test)):
        check_readable("detection", name, split.images, split.images.image)
        if split.clipped or split.dropped:
            progress.say(
                f"{name}: {split.clipped:,} boxes reached outside their image and were cut; {split.dropped:,} without "
                "any area in it were dropped."
            )
    if not any(len(objects.labels) for objects in train.objects):
        raise UserError(
            f"detection: no image of {settings.train} has an object in it, so that nothing can be learnt. Are these "
            "the right annotations?"
        )
    if all(objects.difficult.all() for objects in test.objects):
        raise UserError(
            f"detection: no image of {settings.test} has an object that counts, so that nothing can be found. Are the "
            "annotations empty, or all objects marked difficult?"
        )
    labels = [np.concatenate([objects.labels for objects in split.objects]) for split in (train, test)]
    unseen = [test.classes[label] for label in sorted(set(labels[1]) - set(labels[0]))]
    if unseen:
        progress.say(f"{settings.train} has no {', '.join(unseen)}, so that none can be found in {settings.test}.")


def _numbers(result: BoxPrecision) -> dict[str, float]:
    return {"AP": 100 * result.ap, "AP50": 100 * result.ap50, "AP75": 100 * result.ap75}


def _per_class(result: BoxPrecision, classes: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """The numbers of each class that has objects to find."""
    per_class = 100 * result.per_class  # [10, classes]
    return {
        name: {"AP": float(column.mean()), "AP50": float(column[0]), "AP75": float(column[5])}
        for name, column in zip(classes, per_class.T, strict=True)
        if not np.isnan(column).any()
    }


# The network.


class Detector(nn.Module):
    """Faster R-CNN with the subject's weights in conv1 to conv5, and everything else new."""

    def __init__(self, subject: Subject, classes: int, settings: DetectionSettings) -> None:
        super().__init__()
        backbone = subject.spatial()
        self.mean, self.std = subject.mean, subject.std
        self.trunk = Trunk(backbone)
        anchors = AnchorGenerator((settings.anchor_sizes,), (settings.anchor_ratios,))
        head = ProposalHead(
            self.trunk.channels,
            anchors.num_anchors_per_location()[0],
            settings.extra_norm,
            settings.proposal_gradient,
        )
        self.proposals = Proposals(
            anchors,
            head,
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=settings.anchors_per_image,
            positive_fraction=0.5,
            pre_nms_top_n={"training": settings.train_proposals[0], "testing": settings.test_proposals[0]},
            post_nms_top_n={"training": settings.train_proposals[1], "testing": settings.test_proposals[1]},
            nms_thresh=0.7,
        )
        box_head = BoxHead(backbone.layer4, self.trunk.channels, settings.extra_norm)
        self.regions = Regions(
            RegionFeatures(self.trunk.stride),
            box_head,
            BoxPrediction(box_head.channels, classes + 1),  # with the background in the first place
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=settings.regions_per_image,
            positive_fraction=0.25,
            bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
            score_thresh=settings.score_threshold,
            nms_thresh=settings.suppression,
            detections_per_img=settings.detections_per_image,
        )

    def forward(
        self, images: Tensor, sizes: list[tuple[int, int]], objects: Objects | None = None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections of each image, or the four losses where it is said what `objects` there are.

        `images` [B, 3, H, W] are padded to a common size; `sizes` are their own heights and widths. The labels of
        objects and detections count from 1: 0 is the background.
        """
        features = {"c4": self.trunk(images)}  # [B, C, H / stride, W / stride]
        # Anchors take the type of the features they belong to, and bfloat16 would round them to multiples of 8 pixels.
        exact = {"c4": features["c4"].float()}
        proposals, proposal_losses = self.proposals(ImageList(images, sizes), exact, objects)
        found, region_losses = self.regions(features, proposals, sizes, objects)
        return found, {**proposal_losses, **region_losses}


class ProposalHead(RPNHead):
    """torchvision's, with batch normalisation after its convolution, and a weaker gradient to the shared layers."""

    def __init__(self, channels: int, anchors: int, norm: bool, gradient: float) -> None:
        super().__init__(channels, anchors)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.gradient = gradient if norm else 1.0

    def forward(self, features: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        objectness, boxes = [], []
        for feature in features:  # [B, C, h, w]
            convolved = self.conv[0][0](ScaledGradient.apply(feature, self.gradient))
            hidden = torch.relu(self.norm(convolved))
            objectness.append(self.cls_logits(hidden).float())  # [B, anchors, h, w]
            boxes.append(self.bbox_pred(hidden).float())  # [B, 4 * anchors, h, w]
        return objectness, boxes


class ScaledGradient(torch.autograd.Function):
    """Nothing happens on the way forward; on the way back the gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class RegionFeatures(nn.Module):
    """RoIAlign with half-pixel offsets and as many samples as a cell needs (torchvision's module has neither)."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.scale = 1 / stride

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]) -> Tensor:
        cells: Tensor = roi_align(
            features["c4"], boxes, _REGION_CELLS, spatial_scale=self.scale, sampling_ratio=0, aligned=True
        )  # [R, C, 14, 14]
        return cells


class BoxHead(nn.Module):
    """conv5 on the cells of each region [R, C, 14, 14], perhaps normalised, and averaged: [R, channels]."""

    def __init__(self, layer4: nn.Module, channels: int, norm: bool) -> None:
        super().__init__()
        self.channels = width_of(layer4, channels)
        self.layer4 = layer4
        self.norm = nn.BatchNorm2d(self.channels) if norm else nn.Identity()

    def forward(self, cells: Tensor) -> Tensor:
        cells = cells.contiguous(memory_format=torch.channels_last)
        averaged: Tensor = self.norm(self.layer4(cells)).mean(dim=(2, 3))
        return averaged


class BoxPrediction(FastRCNNPredictor):
    """torchvision's, begun with small weights as in detectron2, and computed in single precision."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(channels, classes)
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        nn.init.zeros_(self.cls_score.bias)
        nn.init.zeros_(self.bbox_pred.bias)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(features.device.type, enabled=False):
            scores, boxes = super().forward(features.float())  # [R, classes], [R, 4 * classes]
        return scores, boxes


# Training and detecting.


def train_detector(
    model: Detector,
    data: VocDetection,
    settings: DetectionSettings,
    *,
    device: torch.device,
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> tuple[dict[str, list[float]], dict[int, str]]:
    """Fine-tune all layers. Returns the curve of each loss, and the images that could not be read, with the reason."""
    prepare = Preparation(model.mean, model.std, device)
    unreadable: dict[int, str] = {}
    samples = _TrainingSamples(data, settings, seed, model.mean)
    plan = shape_grouped_batches(
        data.sizes, settings.batch_size, settings.iterations + settings.statistics_batches, seed
    )
    batches = results_of(samples, plan, workers)

    def forward(batch: DetectionBatch) -> dict[str, Tensor]:
        unreadable.update(batch.bad)
        objects = batch.objects.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses: dict[str, Tensor] = model(prepare(batch.images), batch.sizes, objects)[1]
        return losses

    optimiser = torch.optim.SGD(
        parameter_groups(model, settings.weight_decay, settings.norm_weight_decay),
        lr=settings.learning_rate,
        momentum=settings.momentum,
    )
    rate = partial(
        stepped_rate,
        base=settings.learning_rate,
        milestones=settings.milestones,
        decay=settings.decay,
        warmup=settings.warmup,
        warmup_factor=settings.warmup_factor,
    )
    progress.stage("Training the detector", settings.iterations)
    curves = fit(model, islice(batches, settings.iterations), forward, optimiser, rate, progress)
    if settings.statistics_batches:
        take_statistics(model, progress.track(batches, "Statistics", settings.statistics_batches), forward)
    return curves, unreadable


@torch.no_grad()
def detect(
    model: Detector,
    data: VocDetection,
    settings: DetectionSettings,
    *,
    device: torch.device,
    workers: int = 0,
    progress: Progress = SILENT,
) -> tuple[list[Found], list[Truth], dict[int, str]]:
    """Detections in every image, the truth about it, both in its own pixels, and the images that cannot be read."""
    prepare = Preparation(model.mean, model.std, device)
    model.eval()
    found, truth, unreadable = [], [], {}
    size = min(64, max(1, _TEST_PIXELS // (settings.test_size * settings.longest)))
    plan = in_parts(range(len(data.images)), size)
    batches = results_of(_TestSamples(data, settings, model.mean), plan, workers)
    for batch in progress.track(batches, "Detecting", len(plan)):
        unreadable.update(batch.bad)
        if not batch.indices:
            continue
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            results, _ = model(prepare(batch.images), batch.sizes)
        for index, (height, width), result in zip(batch.indices, batch.sizes, results, strict=True):
            own_width, own_height = data.sizes[index]
            back = np.array([own_width / width, own_height / height] * 2)  # from resized pixels to the image's own
            found.append(
                Found(
                    result["boxes"].cpu().numpy() * back,
                    result["labels"].cpu().numpy() - 1,
                    result["scores"].cpu().numpy(),
                )
            )
            objects = data.objects[index]
            truth.append(Truth(objects.boxes, objects.labels, objects.difficult))
    if not truth:
        raise UserError(f"detection: none of the {len(data.images)} images of {settings.test} can be read.")
    return found, truth, unreadable


class DetectionBatch(NamedTuple):
    """Images of different sizes, padded to a common one, and the objects in them."""

    indices: list[int]
    images: Tensor  # [B, 3, H, W] uint8
    sizes: list[tuple[int, int]]  # height and width of each image without its padding
    objects: Objects  # in pixels of the resized image
    bad: dict[int, str]


def shape_grouped_batches(
    sizes: np.ndarray, batch_size: int, batches: int, seed: int
) -> list[list[tuple[int, int, int]]]:
    """Which images each batch holds, as (batch, epoch, image), given the images' widths and heights [N, 2].

    Epochs follow one another without a gap, each in an order of its own. Upright and lying images are not mixed: most
    of such a batch would be padding.
    """
    upright = (sizes[:, 1] > sizes[:, 0]).tolist()
    planned: list[list[tuple[int, int, int]]] = []
    waiting: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    epoch = 0
    while True:
        for image in permutation(seed, Stream.EPOCH_ORDER, epoch, len(sizes)).tolist():
            group = waiting[upright[image]]
            group.append((epoch, image))
            if len(group) == batch_size:
                planned.append([(len(planned), when, which) for when, which in group])
                group.clear()
                if len(planned) == batches:
                    return planned
        epoch += 1


class _TrainingSamples:
    """Batches at a size drawn for each, in which every second image, drawn for itself, is mirrored."""

    def __init__(
        self, data: VocDetection, settings: DetectionSettings, seed: int, mean: tuple[float, float, float]
    ) -> None:
        self.data = data
        self.settings = settings
        self.seed = seed
        self.mean = mean

    def __call__(self, wanted: list[tuple[int, int, int]]) -> DetectionBatch:
        settings, data = self.settings, self.data
        number = torch.tensor([wanted[0][0]])
        drawn = uniforms(self.seed, 0, number, 1, 1).item()  # the batch's; view 0 of an image is its own
        shorter = settings.train_sizes[int(drawn * len(settings.train_sizes))]
        rows, bad = [], dict[int, str]()
        for _, epoch, index in wanted:
            used, image = readable(data.images, data.images.image, index, bad)
            objects = data.objects[used]
            image, boxes = resized(image, objects.boxes, shorter, settings.longest)
            if uniforms(self.seed, epoch, torch.tensor([index]), 0, 1).item() < settings.flip_probability:
                image, boxes = mirrored(image, boxes)
            rows.append((used, image, boxes, torch.from_numpy(objects.labels)))
        return _batch(rows, self.mean, bad)


class _TestSamples:
    def __init__(self, data: VocDetection, settings: DetectionSettings, mean: tuple[float, float, float]) -> None:
        self.data = data
        self.settings = settings
        self.mean = mean

    def __call__(self, wanted: range) -> DetectionBatch:
        rows, bad = [], dict[int, str]()
        for index in wanted:
            try:
                image = self.data.images.image(index)
            except BadImage as error:
                bad[index] = str(error)
                continue
            objects = self.data.objects[index]
            image, boxes = resized(image, objects.boxes, self.settings.test_size, self.settings.longest)
            rows.append((index, image, boxes, torch.from_numpy(objects.labels)))
        return _batch(rows, self.mean, bad)


def resized(image: Tensor, boxes: np.ndarray, shorter: int, longest: int) -> tuple[Tensor, Tensor]:
    """The image [3, H, W] with its shorter side of this length (or its longer one of `longest`), and its boxes."""
    height, width = image.shape[-2:]
    factor = min(shorter / min(height, width), longest / max(height, width))
    new_height, new_width = max(1, round(height * factor)), max(1, round(width * factor))
    scale = torch.tensor([new_width / width, new_height / height] * 2)  # [4]
    if (new_height, new_width) != (height, width):
        image = F.resize(image, [new_height, new_width], antialias=True)
    return image, torch.from_numpy(boxes) * scale


def mirrored(image: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Left to right, the image [3, H, W] and its boxes [M, 4]."""
    left, top, right, bottom = boxes.unbind(dim=1)
    width = image.shape[-1]
    return image.flip(-1), torch.stack([width - right, top, width - left, bottom], dim=1)


def _batch(
    rows: list[tuple[int, Tensor, Tensor, Tensor]], mean: tuple[float, float, float], bad: dict[int, str]
) -> DetectionBatch:
    height, width = (
        -(-max((row[1].shape[side] for row in rows), default=0) // MOST_STRIDE) * MOST_STRIDE for side in (-2, -1)
    )
    images = padding_colour(mean).expand(len(rows), 3, height, width).clone()
    for place, (_, image, _, _) in enumerate(rows):
        images[place, :, : image.shape[-2], : image.shape[-1]] = image
    return DetectionBatch(
        [row[0] for row in rows],
        images,
        [(row[1].shape[-2], row[1].shape[-1]) for row in rows],
        pad_objects([row[2] for row in rows], [row[3] for row in rows]),
        bad,
    )
