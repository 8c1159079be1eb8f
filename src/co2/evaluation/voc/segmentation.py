"""Semantic segmentation on PASCAL VOC: a fully convolutional network with atrous convolutions, all layers fine-tuned.

The paper's appendix, "Segmentation on PASCAL VOC", follows MoCo (He et al. 2020, appendix): the 3x3 convolutions of
conv5 have dilation 2 and stride 1, so that the total stride is 16 for a standard ResNet; then come two 3x3 convolutions
of 256 channels with dilation 6, batch normalisation and ReLU, and a 1x1 convolution that classifies each position. It
is trained on random crops of images of random scale, and judged on whole images at their own size.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as images_functional

from co2.data.source import BadImage, readable
from co2.errors import UserError
from co2.evaluation.features import REPLACED, Unreadable, check_readable, ready
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation
from co2.evaluation.subject import Subject
from co2.evaluation.voc.data import NOT_JUDGED, VocSegmentation, read_segmentation
from co2.evaluation.voc.segments import ConfusionMatrix
from co2.evaluation.voc.spatial import (
    Preparation,
    Trunk,
    fit,
    padding_colour,
    parameter_groups,
    seeded,
    stepped_rate,
    width_of,
)
from co2.evaluation.voc.specification import SEGMENTATION_PAPER as PAPER
from co2.evaluation.voc.specification import SEGMENTATION_QUICK as QUICK
from co2.evaluation.voc.specification import SegmentationSettings
from co2.machine.workers import results_of
from co2.philox import Stream, permutation, uniforms

__all__ = ["PAPER", "QUICK", "SegmentationSettings", "Segmenter", "evaluate"]


def evaluate(
    subject: Subject,
    data: str | os.PathLike[str],
    settings: SegmentationSettings = QUICK,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> Evaluation:
    """mIoU of a segmenter that starts from the subject's weights. `data` is a folder in VOC's layout."""
    device = torch.device(device)
    train, test = read_segmentation(data, settings.train, settings.test)
    _check(train, test, settings, progress)
    _check_masks(test, progress)
    unreadable = Unreadable(progress)
    with seeded(seed, device):
        model = ready(Segmenter(subject, len(train.classes), settings), device)
        curves, passed_over = train_segmenter(
            model, train, settings, device=device, seed=seed, workers=workers, progress=progress
        )
        unreadable.add(train.images, passed_over, REPLACED)
        confusion, missed = segment(model, test, device=device, workers=workers, progress=progress)
        unreadable.add(test.images, missed, "left out")
    overlap = confusion.overlap()
    return Evaluation(
        protocol="segmentation",
        subject=subject.name,
        data=os.fspath(data),
        numbers={"mIoU": 100 * overlap.mean, "pixel_accuracy": 100 * overlap.accuracy},
        settings=dataclasses.asdict(settings) | {"seed": seed},
        details={
            "per_class": {
                name: 100 * number
                for name, number in zip(test.classes, overlap.per_class.tolist(), strict=True)
                if number == number  # not NaN: a class that does not occur has no overlap
            },
            "train_images": len(train.images),
            "test_images": len(test.images) - len(missed),
            "masks_of_another_size": train.odd_sizes + test.odd_sizes,
            "unreadable": unreadable.reasons,
            "loss": curves["loss"],
            "stride": model.trunk.stride,
        },
    )


def _check(train: VocSegmentation, test: VocSegmentation, settings: SegmentationSettings, progress: Progress) -> None:
    if len(train.images) < settings.batch_size:
        raise UserError(
            f"segmentation: {settings.train} has {len(train.images)} images, fewer than one batch of "
            f"{settings.batch_size}. Give a smaller --batch-size, or more images."
        )
    for name, split in ((settings.train, train), (settings.test, test)):
        check_readable("segmentation", name, split.images, partial(_read, split))
        if split.odd_sizes:
            progress.say(
                f"{name}: {len(split.odd_sizes):,} masks have another size than their image and are left out, the "
                f"first of them {split.odd_sizes[0]}."
            )


def _check_masks(data: VocSegmentation, progress: Progress) -> None:
    """Masks by which nothing can be judged are refused before the training that would be lost, not after it: those
    with classes that nobody knows, and all of them where none has a pixel that counts."""
    judged = False
    for index in progress.track(range(len(data.images)), "Checking the masks", len(data.images)):
        with suppress(BadImage):  # one that is left out and named when it would be judged
            judged |= bool((data.mask(index) != NOT_JUDGED).any())
    if not judged:
        raise UserError(f"segmentation: all pixels of all masks are marked {NOT_JUDGED}, not judged. Are these VOC's?")


class Segmenter(nn.Module):
    """Images [B, 3, H, W] in, scores [B, classes, H / stride, W / stride] out. Conv1 to conv5 are the subject's."""

    def __init__(self, subject: Subject, classes: int, settings: SegmentationSettings) -> None:
        super().__init__()
        backbone = subject.spatial()
        self.mean, self.std = subject.mean, subject.std
        self.trunk = Trunk(backbone)
        self.layer4 = backbone.layer4
        dilate(self.layer4, settings.conv5_dilation)
        width = width_of(self.layer4, self.trunk.channels)
        self.head = nn.Sequential(
            *self._dilated(width, settings.channels, settings.dilation),
            *self._dilated(settings.channels, settings.channels, settings.dilation),
            nn.Conv2d(settings.channels, classes, kernel_size=1),
        )
        for module in self.head:
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)

    @staticmethod
    def _dilated(inputs: int, outputs: int, dilation: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=dilation, dilation=dilation, bias=False)
        return convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer4(self.trunk(images)))
        return scores


def dilate(layer: nn.Module, dilation: int) -> None:
    """Give up the stride of a ResNet's layer, and space its 3x3 convolutions instead: each sees as far as before."""
    for module in layer.modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
            if module.kernel_size == (3, 3):
                module.dilation = module.padding = (dilation, dilation)


def scores_at(scores: Tensor, height: int, width: int) -> Tensor:
    """Scores [B, classes, h, w] at every pixel: [B, classes, height, width], in single precision."""
    return F.interpolate(scores.float(), size=(height, width), mode="bilinear", align_corners=False)


def pixel_loss(scores: Tensor, masks: Tensor) -> Tensor:
    """Mean cross entropy of scores [B, classes, H, W] over the pixels of masks [B, H, W] that are judged."""
    judged = (masks != NOT_JUDGED).sum().clamp(min=1)  # a batch of nothing but borders teaches nothing
    return F.cross_entropy(scores, masks, ignore_index=NOT_JUDGED, reduction="sum") / judged


def train_segmenter(
    model: Segmenter,
    data: VocSegmentation,
    settings: SegmentationSettings,
    *,
    device: torch.device,
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> tuple[dict[str, list[float]], dict[int, str]]:
    """Fine-tune all layers. Returns the curve of the loss, and the images that could not be read, with the reason."""
    prepare = Preparation(model.mean, model.std, device)
    unreadable: dict[int, str] = {}
    plan = whole_batches(len(data.images), settings.batch_size, settings.epochs, seed)

    def losses(batch: Crops) -> dict[str, Tensor]:
        unreadable.update(batch.bad)
        masks = batch.masks.to(device, non_blocking=True).long()  # [B, S, S]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(prepare(batch.images))  # [B, classes, h, w]
        return {"loss": pixel_loss(scores_at(scores, *masks.shape[-2:]), masks)}

    optimiser = torch.optim.SGD(
        parameter_groups(model, settings.weight_decay, settings.weight_decay),
        lr=settings.learning_rate,
        momentum=settings.momentum,
    )
    rate = partial(
        stepped_rate,
        base=settings.learning_rate,
        milestones=[share * len(plan) for share in settings.milestones],
        decay=settings.decay,
    )
    progress.stage("Training the segmenter", len(plan))
    crops = results_of(_CropSamples(data, settings, seed, model.mean), plan, workers)
    curves = fit(model, crops, losses, optimiser, rate, progress)
    return curves, unreadable


def whole_batches(images: int, batch_size: int, epochs: int, seed: int) -> list[list[tuple[int, int]]]:
    """Which images each batch holds, as (epoch, image). What does not fill a batch is left out of an epoch."""
    return [
        [(epoch, image) for image in batch.tolist()]
        for epoch in range(epochs)
        for batch in permutation(seed, Stream.EPOCH_ORDER, epoch, images).split(batch_size)[: images // batch_size]
    ]


@torch.no_grad()
def segment(
    model: Segmenter,
    data: VocSegmentation,
    *,
    device: torch.device,
    workers: int = 0,
    progress: Progress = SILENT,
) -> tuple[ConfusionMatrix, dict[int, str]]:
    """What each pixel of each image is taken for, counted, and the images that cannot be read."""
    prepare = Preparation(model.mean, model.std, device)
    confusion = ConfusionMatrix(len(data.classes), device)
    unreadable: dict[int, str] = {}
    model.eval()
    plan = [[index] for index in range(len(data.images))]  # images of different sizes, so one at a time
    for whole in progress.track(results_of(_WholeImages(data), plan, workers), "Segmenting", len(plan)):
        if whole.bad:
            unreadable.update(whole.bad)
            continue
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(prepare(whole.images))  # [1, classes, h, w]
        masks = whole.masks.to(device, non_blocking=True)  # [1, H, W]
        confusion.add(scores_at(scores, *masks.shape[-2:]).argmax(dim=1), masks)
    if len(unreadable) == len(plan):
        raise UserError(
            f"segmentation: none of the {len(plan)} images to be judged on can be read; the first is "
            f"{data.images.describe(0)} ({unreadable[0]})."
        )
    return confusion, unreadable


class Crops(NamedTuple):
    """Images and what their pixels are."""

    images: Tensor  # [B, 3, H, W] uint8
    masks: Tensor  # [B, H, W] uint8
    bad: dict[int, str]


class _CropSamples:
    def __init__(
        self, data: VocSegmentation, settings: SegmentationSettings, seed: int, mean: tuple[float, float, float]
    ) -> None:
        self.data = data
        self.settings = settings
        self.seed = seed
        self.mean = mean

    def __call__(self, wanted: list[tuple[int, int]]) -> Crops:
        settings, side = self.settings, self.settings.crop
        images = padding_colour(self.mean).expand(len(wanted), 3, side, side).clone()  # [B, 3, S, S]
        masks = torch.full((len(wanted), side, side), NOT_JUDGED, dtype=torch.uint8)
        bad: dict[int, str] = {}
        for place, (epoch, index) in enumerate(wanted):
            _, (image, mask) = readable(self.data.images, partial(_read, self.data), index, bad)
            drawn = uniforms(self.seed, epoch, torch.tensor([index]), 0, 4)[0].tolist()
            image, mask = random_crop(image, mask, drawn, settings)
            images[place, :, : image.shape[-2], : image.shape[-1]] = image
            masks[place, : mask.shape[-2], : mask.shape[-1]] = mask
        return Crops(images, masks, bad)


def random_crop(
    image: Tensor, mask: Tensor, drawn: list[float], settings: SegmentationSettings
) -> tuple[Tensor, Tensor]:
    """A part of the image [3, H, W] and its mask [H, W], at most crop x crop pixels, by four numbers in [0, 1): for the
    scale, the place from above and from the left, and whether it is mirrored."""
    low, high = settings.scales
    factor = low + drawn[0] * (high - low)
    size = [max(1, round(length * factor)) for length in image.shape[-2:]]
    top, left = (int(drawn[1 + axis] * (max(0, size[axis] - settings.crop) + 1)) for axis in (0, 1))
    image = images_functional.resize(image, size, antialias=True)
    mask = images_functional.resize(mask[None], size, interpolation=InterpolationMode.NEAREST_EXACT)[0]
    image = image[:, top : top + settings.crop, left : left + settings.crop]
    mask = mask[top : top + settings.crop, left : left + settings.crop]
    if drawn[3] < settings.flip_probability:
        image, mask = image.flip(-1), mask.flip(-1)
    return image, mask


class _WholeImages:
    def __init__(self, data: VocSegmentation) -> None:
        self.data = data

    def __call__(self, wanted: list[int]) -> Crops:
        (index,) = wanted
        try:
            image, mask = _read(self.data, index)
        except BadImage as error:
            return Crops(torch.empty(0), torch.empty(0), {index: str(error)})
        return Crops(image[None], mask[None], {})


def _read(data: VocSegmentation, index: int) -> tuple[Tensor, Tensor]:
    return data.images.image(index), data.mask(index)
