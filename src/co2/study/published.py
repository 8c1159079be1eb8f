"""Numbers that others have published, as data, to stand beside ours. Nothing is computed from them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from co2.methods.contrastive import TOP1


@dataclass(frozen=True)
class Published:
    """One published number."""

    data: str
    """What was pre-trained on: cifar-10, imagenet-100 or imagenet-1k."""
    method: str
    """As `co2.study.grids.method_of` names it; others stand beside no variant."""
    name: str
    """What its authors call it."""
    measure: str
    """As records name it: knn.top1, linear.top1, svm.mAP_11point, ..."""
    value: float
    setting: str
    source: str
    epochs: int | None = None
    """How long was trained, where that is to be the same for a comparison."""


_CIFAR_KNN = "ResNet-18, {} epochs, batch 512, kNN{} with k=200, t=0.1"
_NOTEBOOK, _LIGHTLY, _WIRTH = "MoCo authors' CIFAR-10 notebook", "lightly's benchmarks", "philippmwirth/co2, one seed"
_PAPER = "CO2 paper, section 3.5"
_IMAGENET_100 = "ResNet-18, ImageNet-100"
_VOC = "ResNet-50, ImageNet-1K, VOC 2007 (classification, detection) and 2012 (segmentation)"
_VOC_PAPER = "CO2 paper, table of transfer"


def _cifar(method: str, name: str, value: float, source: str, epochs: int = 200) -> Published:
    # The notebook's kNN sees what the head makes of the features, the others' the features.
    measure, of = ("epoch.knn_embedding_top1", " of embeddings") if source == _NOTEBOOK else ("knn.top1", "")
    return Published("cifar-10", method, name, measure, value, _CIFAR_KNN.format(epochs, of), source, epochs)


def _voc(method: str, name: str, *values: float) -> list[Published]:
    measures = ("svm.mAP_11point", "detection.AP50", "detection.AP", "detection.AP75", "segmentation.mIoU")
    return [
        Published("imagenet-1k", method, name, measure, value, _VOC, _VOC_PAPER)
        for measure, value in zip(measures, values, strict=True)
    ]


PUBLISHED: tuple[Published, ...] = (
    _cifar("moco", "MoCo, asymmetric", 82.6, _NOTEBOOK),
    _cifar("moco-symmetric", "MoCo, symmetric", 85.3, _NOTEBOOK),
    _cifar("moco", "MoCo, asymmetric", 88.7, _NOTEBOOK, 800),
    _cifar("moco-symmetric", "MoCo, symmetric", 89.7, _NOTEBOOK, 800),
    _cifar("moco", "MoCo", 84.7, _LIGHTLY),
    _cifar("simclr", "SimCLR", 84.8, _LIGHTLY),
    _cifar("byol", "BYOL", 86.8, _LIGHTLY),
    _cifar("byol", "BYOL", 91.0, f"{_LIGHTLY}, best of all, 401 minutes", 800),
    _cifar("moco", "MoCo", 84.2, _WIRTH),
    _cifar("co2", "MoCo + CO2", 84.5, _WIRTH),
    _cifar("simclr", "SimCLR", 83.4, _WIRTH),
    _cifar("co2-simclr", "SimCLR + CO2", 84.0, _WIRTH),
    Published("imagenet-100", "moco", "MoCo", "linear.top1", 63.6, _IMAGENET_100, _PAPER),
    Published("imagenet-100", "co2", "MoCo + CO2 (α=10, τ=0.04)", "linear.top1", 69.2, _IMAGENET_100, _PAPER),
    Published("imagenet-100", "moco-smoothing", "MoCo + label smoothing", "linear.top1", 61.2, _IMAGENET_100, _PAPER),
    Published("imagenet-100", "moco", "MoCo", f"train.{TOP1.name}", 97.57, _IMAGENET_100, _PAPER),
    Published("imagenet-100", "co2", "MoCo + CO2 (α=10, τ=0.04)", f"train.{TOP1.name}", 95.26, _IMAGENET_100, _PAPER),
    *_voc("moco", "MoCo (the paper's implementation)", 79.7, 81.6, 56.2, 62.4, 72.6),
    *_voc("co2", "MoCo + CO2", 82.6, 81.9, 56.0, 62.6, 73.3),
    *_voc("moco-v2", "MoCo v2", 85.0, 82.4, 57.0, 63.6, 74.2),
    *_voc("co2-v2", "MoCo v2 + CO2", 85.2, 82.7, 57.2, 64.1, 74.7),
)


ELSEWHERE = ("byol", "moco-v2", "co2-v2")
"""Methods that are not trained here, and stand in the tables for orientation."""


def published_for(data: str, measures: frozenset[str], classes: int | None = None) -> list[Published]:
    """The numbers to show beside a study of this data, with so many classes where that is known: those on the same or
    the nearest data, of what it measures.

    Transfer to VOC was published from ImageNet-1K alone; it stands beside whatever the backbones here saw.
    """
    kind = _kind_of(data, classes)
    return [
        one
        for one in PUBLISHED
        if one.measure in measures
        and (one.data == kind or one.measure.split(".")[0] in ("svm", "detection", "segmentation"))
    ]


def _kind_of(data: str, classes: int | None) -> str:
    """Which published data a path stands for, by its name; nothing for data of one's own."""
    name = data.lower()
    if "cifar" in name:  # the innermost folder says which of the two; where none does, only the classes do
        called = [str(classes), *re.findall(r"cifar[-_]?(\d+)", name)][-1]
        return "cifar-10" if called == "10" and classes in (10, None) else ""
    return "imagenet-100" if re.search(r"imagenet[-_]?100(?!0)", name) else ""
