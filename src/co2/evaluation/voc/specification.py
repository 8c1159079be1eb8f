"""The settings of detection and segmentation as plain data, and two values of each: the paper's, and a quick one.

The paper's appendix ("Detection on PASCAL VOC", "Segmentation on PASCAL VOC") follows MoCo. What it leaves open is from
there: for detection from facebookresearch/moco (detection/configs/pascal_voc_R_50_C4_24k_moco.yaml and the files that
it is based on, and detectron2's defaults where they say nothing), for segmentation from the appendix of He et al. 2020.
The quick ones are for images of about 224 pixels and a few minutes on one GPU. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from co2.errors import UserError
from co2.evaluation.specification import Idle, ProtocolSettings, check, check_sgd


@dataclass(frozen=True)
class DetectionSettings(ProtocolSettings):
    """Faster R-CNN on a ResNet's C4 features, all layers fine-tuned."""

    train: str = "trainval07+12"
    """Split to train on, by VOC's names: several years are joined by +."""
    test: str = "test2007"
    """Split to find objects in."""
    iterations: int = 24_000
    batch_size: int = 16
    learning_rate: float = 0.02
    milestones: tuple[int, ...] = (18_000, 22_000)
    """Iterations after which the learning rate drops."""
    decay: float = 0.1
    """By which factor it drops."""
    warmup: int = 100
    """Iterations in which the learning rate rises in a line."""
    warmup_factor: float = 0.001
    """Share of the learning rate at which it begins to rise."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    norm_weight_decay: float = 0.0
    """Of the scales and shifts of batch normalisation."""
    train_sizes: tuple[int, ...] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    """Lengths of the shorter side to choose from, in pixels. One is drawn for each batch, so that little of it is
    padding, which would enter the batch statistics (detectron2 draws for each image, and has two to a GPU)."""
    test_size: int = 800
    """Length of the shorter side when objects are looked for."""
    longest: int = 1333
    """The longer side is never longer than this."""
    flip_probability: float = 0.5
    anchor_sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Sides of the boxes that proposals start from, in pixels of the resized image."""
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Their heights over widths."""
    anchors_per_image: int = 256
    """Anchors that the proposal network learns from, in each image."""
    regions_per_image: int = 512
    """Proposals that the box head learns from, in each image; at most a quarter of them are objects."""
    train_proposals: tuple[int, int] = (12_000, 2000)
    """The best proposals of an image, before and after those that overlap others are removed."""
    test_proposals: tuple[int, int] = (6000, 1000)
    extra_norm: bool = True
    """Batch normalisation in the proposal head and after conv5, for backbones whose features are small."""
    proposal_gradient: float = 0.1
    """Share of the proposal head's gradient that reaches the features it has in common with the box head."""
    statistics_batches: int = 200
    """Batches from which the statistics of batch normalisation are taken once training is over."""
    score_threshold: float = 0.05
    """Less sure detections are not reported."""
    suppression: float = 0.5
    """Of two detections of a class that overlap by more than this, only the surer is reported."""
    detections_per_image: int = 100
    interpolation: Literal["11-point", "area"] = "11-point"
    """How VOC sums up precision: 11-point until 2009 (as MoCo and the paper on the test set of 2007), area since."""
    coco: bool = False
    """Also judge by COCO's rules (needs pycocotools)."""

    def __post_init__(self) -> None:
        check("detection", self, "at least 1", "iterations", "batch_size", "anchors_per_image", "regions_per_image")
        check("detection", self, "at least 1", "train_proposals", "test_proposals", "detections_per_image")
        check("detection", self, "at least 0", "statistics_batches", "warmup", "norm_weight_decay", "proposal_gradient")
        check("detection", self, "from 0 to 1", "flip_probability", "score_threshold", "suppression", "warmup_factor")
        check_sgd("detection", self)
        if not self.train_sizes or min(*self.train_sizes, self.test_size) < 32:
            raise UserError("detection: train_sizes and test_size must be at least 32 pixels.")
        if self.longest < max(*self.train_sizes, self.test_size):
            raise UserError("detection: longest must not be less than the sizes of the shorter side.")
        check("detection", self, "above 0", "anchor_sizes", "anchor_ratios")

    def idle(self) -> tuple[Idle, ...]:
        no_warmup = Idle(("warmup_factor",), "with --warmup 0. Give more iterations of it.")
        no_norm = Idle(("proposal_gradient",), "with --no-extra-norm. Leave one of them out.")
        return (*([] if self.warmup else [no_warmup]), *([] if self.extra_norm else [no_norm]))


@dataclass(frozen=True)
class SegmentationSettings(ProtocolSettings):
    """A fully convolutional network with atrous conv5 and two dilated layers, all layers fine-tuned."""

    train: str = "train_aug2012"
    """Split to train on: train_aug2012 with the masks of Hariharan et al. 2011, or train2012."""
    test: str = "val2012"
    """Split whose pixels are told apart."""
    epochs: int = 50
    batch_size: int = 16
    learning_rate: float = 0.003
    milestones: tuple[float, ...] = (0.7, 0.9)
    """Shares of the training after which the learning rate drops."""
    decay: float = 0.1
    """By which factor it drops."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    scales: tuple[float, float] = (0.5, 2.0)
    """Smallest and largest factor by which an image is resized."""
    crop: int = 513
    """Side of the square that is cut out of it, in pixels."""
    flip_probability: float = 0.5
    conv5_dilation: int = 2
    """Spacing of the 3x3 convolutions in conv5, instead of its stride."""
    channels: int = 256
    """Of the two 3x3 convolutions after it."""
    dilation: int = 6
    """Their spacing."""

    def __post_init__(self) -> None:
        check("segmentation", self, "at least 1", "epochs", "batch_size", "channels", "dilation", "conv5_dilation")
        check("segmentation", self, "from 0 to 1", "flip_probability")
        check_sgd("segmentation", self)
        if self.crop < 32:
            raise UserError(f"segmentation: crop must be at least 32 pixels; got {self.crop}.")
        smallest, largest = self.scales
        if not 0.1 <= smallest <= largest <= 10:  # beyond, an image is a dot, or does not fit into memory
            raise UserError(
                "segmentation: scales must be two numbers from 0.1 to 10, the smaller one first; "
                f"got {smallest} {largest}."
            )


DETECTION_PAPER = DetectionSettings()
# A tenth of the iterations, images a quarter of the size, fewer proposals of each; VOC 2012 has no labels for test.
DETECTION_QUICK = DetectionSettings(
    train="train2012",
    test="val2012",
    iterations=2400,
    milestones=(1800, 2200),
    train_sizes=(192, 208, 224, 240, 256),
    test_size=224,
    longest=384,
    anchor_sizes=(16, 32, 64, 128, 192),
    regions_per_image=64,
    train_proposals=(1000, 300),
    test_proposals=(1000, 300),
    statistics_batches=50,
    interpolation="area",
)

SEGMENTATION_PAPER = SegmentationSettings()
# Shorter training on fewer images takes larger steps (MoCo's for Cityscapes).
SEGMENTATION_QUICK = SegmentationSettings(train="train2012", epochs=30, learning_rate=0.01, crop=225)
