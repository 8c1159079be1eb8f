"""Average precision of detected boxes, by VOC's own rules and by COCO's.

VOC (Everingham et al. 2010, section 4.4, and its development kit): the detections of a class are visited from the most
confident to the least. Each looks at the object of its class that it overlaps most. If the overlap reaches the
threshold, it is right when that object has not been found before and wrong when it has; if the object is difficult, the
detection counts neither way. Difficult objects need not be found. A class without any object to find has no average
precision (NaN) and is left out of means.

COCO's rules differ in which object a detection may take, and in how the area is summed up: see `coco_precision`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from co2.errors import UserError
from co2.measures.ranking import ElevenPointOrArea, from_curve

THRESHOLDS = tuple(threshold / 100 for threshold in range(50, 100, 5))
"""0.50, 0.55, ..., 0.95: the overlaps that AP is the mean over."""


@dataclass(frozen=True)
class Found:
    """What a detector says about one image."""

    boxes: np.ndarray  # [D, 4]: left, top, right, bottom; right and bottom exclusive
    labels: np.ndarray  # [D] int
    scores: np.ndarray  # [D]: higher is surer


@dataclass(frozen=True)
class Truth:
    """What there is in one image."""

    boxes: np.ndarray  # [M, 4]
    labels: np.ndarray  # [M] int
    difficult: np.ndarray  # [M] bool


@dataclass(frozen=True)
class BoxPrecision:
    """Average precisions between 0 and 1; NaN for classes that have no object to find."""

    per_class: np.ndarray  # [10, classes]: at each of THRESHOLDS
    ap: float
    """Mean over classes and over THRESHOLDS."""
    ap50: float
    ap75: float


def overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Area of the intersection over that of the union, for each pair of boxes [N, 4] and [M, 4]: float64 [N, M].

    Edges are real numbers, so that (0, 0, 10, 10) has an area of 100. It is what VOC computes from whole pixels, whose
    last one is included.
    """
    first, second = first.astype(np.float64), second.astype(np.float64)
    upper_left = np.maximum(first[:, None, :2], second[None, :, :2])  # [N, M, 2]
    lower_right = np.minimum(first[:, None, 2:], second[None, :, 2:])  # [N, M, 2]
    shared = (lower_right - upper_left).clip(min=0).prod(axis=2)  # [N, M]
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)]
    union = areas[0][:, None] + areas[1] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


@dataclass(frozen=True)
class Matches:
    """The detections of one class in all images, the surest first, at each of THRESHOLDS."""

    right: list[np.ndarray]  # each bool [D]; detections of difficult objects are left out
    to_find: int


def match(found: Sequence[Found], truth: Sequence[Truth], classes: int) -> list[Matches]:
    """For each class, which detections are right by VOC's rules, from those in each image and what there is in it."""
    if len(found) != len(truth):
        raise ValueError(f"There are detections for {len(found)} images and the truth about {len(truth)}.")
    return [_class_matches(found, truth, label) for label in range(classes)]


def voc_precision(matches: Sequence[Matches], rule: ElevenPointOrArea = "area") -> BoxPrecision:
    """AP, AP50 and AP75 over all classes that have objects to find."""
    per_class = np.full((len(THRESHOLDS), len(matches)), np.nan)  # [10, classes]
    for label, of_class in enumerate(matches):
        if of_class.to_find:
            per_class[:, label] = [average_precision(right, of_class.to_find, rule) for right in of_class.right]
    if np.isnan(per_class).all():
        raise UserError("No image has an object that counts, so that nothing can be found. Are all of them difficult?")
    at = dict(zip(THRESHOLDS, np.nanmean(per_class, axis=1), strict=True))
    return BoxPrecision(per_class, float(np.nanmean(per_class)), float(at[0.5]), float(at[0.75]))


def _class_matches(found: Sequence[Found], truth: Sequence[Truth], label: int) -> Matches:
    # Detections and objects of all images, end to end; the empty entries are for classes that have none.
    scores, best_overlaps, best_objects = [np.empty(0)], [np.empty(0)], [np.empty(0, dtype=np.int64)]
    difficult = [np.empty(0, dtype=bool)]
    objects = 0
    for in_image, there in zip(found, truth, strict=True):
        of_class = in_image.labels == label  # [D]
        wanted = there.labels == label  # [M]
        if of_class.any():
            scores.append(in_image.scores[of_class])
            if wanted.any():
                overlap = overlaps(in_image.boxes[of_class], there.boxes[wanted])  # [d, m]
                best_overlaps.append(overlap.max(axis=1))
                best_objects.append(overlap.argmax(axis=1) + objects)
            else:
                best_overlaps.append(np.full(int(of_class.sum()), -1.0))
                best_objects.append(np.full(int(of_class.sum()), -1))
        difficult.append(there.difficult[wanted])
        objects += int(wanted.sum())
    hard = np.concatenate(difficult)  # [objects] bool
    order = np.argsort(-np.concatenate(scores), kind="stable")
    overlap = np.concatenate(best_overlaps)[order]  # [D]
    met = np.concatenate(best_objects)[order]  # [D]
    return Matches([_right(overlap >= threshold, met, hard) for threshold in THRESHOLDS], int((~hard).sum()))


def _right(hit: np.ndarray, met: np.ndarray, hard: np.ndarray) -> np.ndarray:
    """Which detections are right, given whether they hit an object, which one, and which objects are difficult."""
    objects_hit = np.where(hit, met, -1)  # [D]
    _, first = np.unique(objects_hit, return_index=True)
    right = np.zeros(len(hit), dtype=bool)
    right[first] = True  # the first hit on an object finds it; every later one is a mistake
    counted = ~np.append(hard, False)[objects_hit]  # the last entry is for those that hit nothing
    return (right & hit)[counted]


def average_precision(right: np.ndarray, to_find: int, rule: ElevenPointOrArea = "area") -> float:
    """From detections in the order of their scores, bool [D], to one number; `to_find` is how many would be right."""
    hits = np.cumsum(right)  # [D]
    return from_curve(hits / np.arange(1, len(right) + 1), hits / to_find, rule)


def check_coco() -> None:
    """Say so if COCO's own program is not there."""
    if importlib.util.find_spec("pycocotools") is None:
        raise UserError(
            "COCO's average precision needs pycocotools, which is not installed. Install it with: "
            "pip install 'consistent-contrast[coco]'"
        )


def coco_precision(found: Sequence[Found], truth: Sequence[Truth], classes: int) -> dict[str, float]:
    """AP, AP50 and AP75 by COCO's own program, as a cross-check. Needs pycocotools.

    There a detection takes the best object that is still free, at most 100 detections of an image count, precision is
    taken at 101 recalls, and difficult objects are "crowds": detections that lie inside one count neither way.
    """
    check_coco()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    objects: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    for image, (in_image, there) in enumerate(zip(found, truth, strict=True), start=1):
        for box, label, difficult in zip(there.boxes, there.labels, there.difficult, strict=True):
            objects.append(_coco_entry(len(objects) + 1, image, box, label) | {"iscrowd": int(difficult)})
        for box, label, score in zip(in_image.boxes, in_image.labels, in_image.scores, strict=True):
            detections.append(_coco_entry(len(detections) + 1, image, box, label) | {"score": float(score)})
    indexed = []
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it is about to do
        for entries in (objects, detections):
            coco = COCO()
            coco.dataset = {
                "images": [{"id": image} for image in range(1, len(found) + 1)],
                "categories": [{"id": label + 1} for label in range(classes)],
                "annotations": entries,
            }
            coco.createIndex()
            indexed.append(coco)
        evaluation = COCOeval(*indexed, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(number) for name, number in zip(("AP", "AP50", "AP75"), evaluation.stats, strict=False)}


def _coco_entry(number: int, image: int, box: np.ndarray, label: int) -> dict[str, Any]:
    left, top, right, bottom = map(float, box)
    width, height = right - left, bottom - top
    place = {"bbox": [left, top, width, height], "area": width * height}
    return {"id": number, "image_id": image, "category_id": int(label) + 1, "iscrowd": 0, **place}
