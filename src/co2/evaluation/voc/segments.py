"""How well the pixels of images are told apart: intersection over union of each class, from a confusion matrix.

VOC (Everingham et al. 2010, section 4.3): pixels of all images are counted together. Those that are marked as not
judged count for nothing, whatever is predicted there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from co2.errors import UserError
from co2.evaluation.voc.data import NOT_JUDGED


@dataclass(frozen=True)
class Overlap:
    """Intersections over unions, between 0 and 1."""

    per_class: Tensor  # [classes] float64; NaN for a class that is neither there nor predicted
    mean: float
    """Over the classes that are there or predicted."""
    accuracy: float
    """Share of the judged pixels that are right."""


class ConfusionMatrix:
    """Counts, image by image, how many pixels of each class are taken for which."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)  # [true, predicted]

    def add(self, predicted: Tensor, true: Tensor) -> None:
        """Add images, or parts of them: whole numbers of the same shape, `true` being 255 where nothing is judged."""
        if predicted.shape != true.shape:
            raise ValueError(f"{tuple(predicted.shape)} pixels were predicted where there are {tuple(true.shape)}.")
        classes = len(self.counts)
        judged = true != NOT_JUDGED
        predicted, true = predicted[judged].long(), true[judged].long()  # [P] each
        for numbers in (predicted, true):
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < classes:
                raise ValueError(f"There are pixels of class {int(numbers.max())}, and only {classes} classes.")
        self.counts += torch.bincount(true * classes + predicted, minlength=classes**2).view(classes, classes)

    def overlap(self) -> Overlap:
        """Intersection over union of what has been added so far."""
        counts = self.counts.double().cpu()
        if not counts.sum():
            raise UserError("No pixel of any mask is judged: all are marked 255. Are these VOC's masks?")
        right = counts.diagonal()  # [classes]
        union = counts.sum(dim=0) + counts.sum(dim=1) - right  # [classes]
        per_class = right / union  # 0 / 0 = NaN where a class does not occur
        return Overlap(per_class, per_class.nanmean().item(), (right.sum() / counts.sum()).item())
