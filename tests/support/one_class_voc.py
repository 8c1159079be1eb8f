"""Rendered shapes in VOC's layout, all called the same: a task that a small network learns in seconds."""

import re
from pathlib import Path

import numpy as np
from PIL import Image

from co2.data.shapes import write_shapes
from co2.evaluation.subject import Subject, open_subject
from co2.networks.backbones import NARROW_RESNET, build_backbone


def write_one_class_voc(root, count=60, size=64) -> Path:
    """Returns the folder of the year."""
    write_shapes(root, "voc", count=count, size=size)
    year = Path(root) / "VOCdevkit" / "VOC2012"
    for path in (year / "Annotations").iterdir():
        path.write_text(re.sub(r"<name>\w+</name>", "<name>shape</name>", path.read_text()))
    for path in (year / "SegmentationClass").iterdir():
        numbers = np.array(Image.open(path))
        numbers[(numbers > 0) & (numbers < 255)] = 1
        Image.fromarray(numbers).save(path)
    return year


def narrow_subject(stem="small-stride-2", seed=0) -> Subject:
    fresh = open_subject(NARROW_RESNET, seed=seed)
    if stem == "standard":
        return fresh
    weights = {**build_backbone(NARROW_RESNET, stem=stem, view_size=64).state_dict()}
    weights |= {name: tensor for name, tensor in fresh.weights.items() if name != "conv1.weight"}
    # The first convolution of the stem is 3x3: the middle of the 7x7 one, so that it depends on the seed alone.
    weights["conv1.weight"] = fresh.weights["conv1.weight"][:, :, 2:5, 2:5].clone()
    return Subject("narrow", NARROW_RESNET, weights, stem=stem, view_size=64)
