"""PASCAL VOC classification: a linear support vector machine for each class, on frozen pooled features.

The paper follows Goyal et al. 2019 ("Scaling and Benchmarking Self-Supervised Visual Representation Learning"):
features of unit length, scikit-learn's LinearSVC (liblinear, squared hinge loss) with positives weighing 2 and
negatives 1, and for each class the cost C that does best by average precision on a held-out part of the training set.
The machine is then trained on all of it. liblinear's primal and dual solvers have the same solution; the one with the
smaller problem is used (Goyal et al. use the dual, which for high costs gives up before it gets there). As VOC does, an
image that shows a class only in objects marked difficult counts neither for nor against it, in training and in testing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from typing import NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC
from sklearn.utils.parallel import Parallel, delayed

from co2.errors import UserError
from co2.evaluation.features import Unreadable, embed
from co2.evaluation.labels import balanced_subset
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation
from co2.evaluation.specification import SVM_PAPER as PAPER
from co2.evaluation.specification import SVM_QUICK as QUICK
from co2.evaluation.specification import SvmSettings
from co2.evaluation.subject import Subject
from co2.evaluation.voc.data import VocDetection, read_detection
from co2.measures.ranking import average_precision

__all__ = ["PAPER", "QUICK", "SvmSettings", "evaluate"]


def evaluate(
    subject: Subject,
    voc: str | os.PathLike[str],
    settings: SvmSettings = QUICK,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> Evaluation:
    """Mean average precision over classes, in percent: 11-point as in VOC 2007, and area as in VOC since 2010."""
    train, test = read_detection(voc, settings.train, settings.test)
    for name, part in ((settings.train, train), (settings.test, test)):
        if part.dropped:
            progress.say(
                f"{name}: {part.dropped:,} objects have a box without any area in their image; their classes count all "
                "the same, because an image is classified as a whole."
            )
    backbone = subject.build()
    unreadable = Unreadable(progress)

    def features_and_labels(part: VocDetection) -> tuple[np.ndarray, np.ndarray]:
        seen = embed(
            backbone,
            part.images,
            subject.views,
            device=device,
            workers=workers,
            progress=progress,
            unreadable=unreadable,
        )
        features = seen.features.double().cpu().numpy()  # [N, F]
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        return features / (lengths + 1e-5), part.image_labels()[seen.images.numpy()]  # [N, classes] in -1, 0, 1

    train_features, train_labels = features_and_labels(train)
    test_features, test_labels = features_and_labels(test)
    learnable = [
        place
        for place in range(len(train.classes))
        if {-1, 1} <= set(train_labels[:, place].tolist()) and (test_labels[:, place] == 1).any()
    ]
    if not learnable:
        raise UserError(
            f"svm: no class has images with it and images without it in {settings.train}, and images with it in "
            f"{settings.test}. Are these the right splits of {os.fspath(voc)}?"
        )
    one_class = delayed(_one_class)
    results = Parallel(n_jobs=workers or 1, return_as="generator")(
        one_class(train_features, train_labels[:, place], test_features, test_labels[:, place], settings, seed)
        for place in learnable
    )
    by_class: dict[str, _ClassResult] = {
        train.classes[place]: result
        for place, result in zip(learnable, progress.track(results, "SVM", len(learnable)), strict=True)
    }
    found = list(by_class.values())
    return Evaluation(
        protocol="svm",
        subject=subject.name,
        data=os.fspath(voc),
        numbers={
            "mAP_11point": float(np.mean([result.eleven_point for result in found])),
            "mAP_area": float(np.mean([result.area for result in found])),
        },
        settings=dataclasses.asdict(settings) | {"seed": seed, "view_size": subject.view_size},
        details={
            "classes": {name: result._asdict() for name, result in by_class.items()},
            "classes_left_out": [name for name in train.classes if name not in by_class],
            "train_images": len(train_features),
            "test_images": len(test_features),
            "boxes": {"train": train.box_counts(), "test": test.box_counts()},
            "unreadable": unreadable.reasons,
        },
    )


class _ClassResult(NamedTuple):
    eleven_point: float  # average precision, in percent
    area: float
    cost: float
    held_out_area: dict[str, float]  # by cost
    converged: bool


def _one_class(
    train: np.ndarray,  # [N, F]
    train_labels: np.ndarray,  # [N] in -1, 0, 1
    test: np.ndarray,  # [M, F]
    test_labels: np.ndarray,  # [M]
    settings: SvmSettings,
    seed: int,
) -> _ClassResult:
    judged = train_labels != 0
    features, labels = train[judged], train_labels[judged]
    cost, tried = _best_cost(features, labels, settings, seed)
    machine = _fitted(features, labels, cost, settings, seed)
    judged = test_labels != 0
    scores, positives = machine.decision_function(test[judged]), test_labels[judged] == 1
    return _ClassResult(
        100 * average_precision(scores, positives, "11-point"),
        100 * average_precision(scores, positives, "area"),
        cost,
        tried,
        bool(machine.n_iter_ < settings.iterations),
    )


def _best_cost(
    features: np.ndarray, labels: np.ndarray, settings: SvmSettings, seed: int
) -> tuple[float, dict[str, float]]:
    """The cost with the best average precision on held-out images, the lowest of equals; and what each one had."""
    costs = sorted(settings.costs)
    aside = np.zeros(len(labels), dtype=bool)
    aside[balanced_subset(labels, settings.held_out, seed)] = True
    if len(costs) == 1 or len(np.unique(labels[~aside])) < 2:  # a class with a single image: nothing to hold out
        return costs[len(costs) // 2], {}
    tried = {}
    for cost in costs:
        machine = _fitted(features[~aside], labels[~aside], cost, settings, seed)
        precision = average_precision(machine.decision_function(features[aside]), labels[aside] == 1, "area")
        assert not math.isnan(precision), "a balanced part has an image with the class"
        tried[cost] = 100 * precision
    return max(tried, key=lambda cost: tried[cost]), {f"{cost:g}": value for cost, value in tried.items()}


def _fitted(features: np.ndarray, labels: np.ndarray, cost: float, settings: SvmSettings, seed: int) -> LinearSVC:
    machine = LinearSVC(
        C=cost,
        class_weight={1: settings.positive_weight, -1: 1.0},
        penalty="l2",
        loss="squared_hinge",
        dual=len(features) < features.shape[1],
        tol=1e-4,
        max_iter=settings.iterations,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # told by the record, for each class
        return machine.fit(features, labels)
