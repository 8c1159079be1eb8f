"""Linear classification: how much of the classes a single linear layer reads off a frozen backbone.

Two ways to the same number. The paper's trains the layer by SGD on random crops for 100 epochs; every crop passes the
backbone. The quick one passes a few random crops of every image, and solves a regularised multinomial logistic
regression on their features to its optimum, which takes seconds. On CIFAR-10 they are a third of a point apart
(docs/EVALUATION.md); on data of your own:

    co2 evaluate linear RUN --data PATH --protocol paper
    co2 evaluate linear RUN --data PATH --protocol quick

Crops matter more than the solver: trained on whole images, the layer does better by points on the whole images that it
is judged on (--crops 0 --plain). And SGD is only as good as its learning rate, whose best value goes with one over the
squared length of the features: the paper's 15 suits MoCo's on ImageNet, which are short. Where features are longer, as
after a short pre-training (the record has their length), a tenth or a hundredth of it does better.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from co2.data.open import DataSplits
from co2.evaluation.features import (
    REPLACED,
    Embedding,
    Unreadable,
    batch_size,
    check_finite,
    embed,
    embed_crops,
    preparation,
    random_views,
    ready,
)
from co2.evaluation.labels import LabelledSplit, accuracies, balanced_subset, labelled_split, not_alone
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation, finite
from co2.evaluation.regression import LogisticRegression, choose_strength, fit
from co2.evaluation.specification import LINEAR_PAPER as PAPER
from co2.evaluation.specification import LINEAR_QUICK as QUICK
from co2.evaluation.specification import LinearSettings
from co2.evaluation.subject import Subject
from co2.views.view import View

__all__ = ["PAPER", "QUICK", "LinearSettings", "evaluate"]


def evaluate(
    subject: Subject,
    data: DataSplits,
    settings: LinearSettings = QUICK,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> Evaluation:
    """Top-1 and top-5 accuracy of a linear classifier on the frozen backbone."""
    device = torch.device(device)
    split = labelled_split(data, "linear", seed)
    backbone = ready(subject.build(), device).eval()  # batch statistics frozen; no gradient is ever asked of it
    unreadable = Unreadable(progress)
    details: dict[str, Any] = {
        "train_images": len(split.train),
        "held_out_by_seed": split.divided,
    }
    if settings.solver == "sgd":
        head, more = _by_sgd(backbone, subject, split, settings, device, seed, workers, progress, unreadable)
    else:
        head, more = _by_regression(backbone, subject, split, settings, device, seed, workers, progress, unreadable)
    test = embed(
        backbone,
        split.test,
        subject.views,
        device=device,
        workers=workers,
        progress=progress,
        unreadable=unreadable,
    )
    assert test.labels is not None
    with torch.no_grad():
        scores = torch.cat([head(part.to(device)) for part in test.features.split(8192)])  # [M, classes]
    ranked = scores.topk(min(5, scores.shape[1]), dim=1).indices.cpu().numpy()
    return Evaluation(
        protocol="linear",
        subject=subject.name,
        data=data.train.name,
        numbers=accuracies(ranked, test.labels.numpy()),
        settings=dataclasses.asdict(settings) | {"seed": seed, "view_size": subject.view_size},
        details=details
        | more
        | {
            "test_images": len(test.labels),
            "unreadable": unreadable.reasons,
            "mean_length_of_features": test.features.norm(dim=1).mean().item(),
        },
    )


def _by_sgd(
    backbone: nn.Module,
    subject: Subject,
    split: LabelledSplit,
    settings: LinearSettings,
    device: torch.device,
    seed: int,
    workers: int,
    progress: Progress,
    unreadable: Unreadable,
) -> tuple[nn.Module, dict[str, Any]]:
    """The paper's appendix, "Linear Classification"; the layer starts as in the MoCo authors' main_lincls.py."""
    head = nn.Linear(subject.width, len(split.classes)).to(device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(0.01 * torch.randn(head.weight.shape, generator=generator))
        head.bias.zero_()
    optimiser = torch.optim.SGD(
        head.parameters(), settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, list(settings.milestones), settings.decay)
    views = _views(subject, settings)
    # Small views pass the backbone for several steps of the layer at once: each has the same features as alone.
    at_once = max(1, batch_size(views.size, device) // settings.batch_size)
    loader = random_views(
        split.train,
        views,
        batch_size=at_once * settings.batch_size,
        seed=seed,
        device=device,
        workers=workers,
        smallest=1,
    )
    labels = torch.from_numpy(split.train_labels).to(device)  # [N]
    prepare = preparation(views)
    losses = []
    steps = math.ceil(len(split.train) / settings.batch_size)
    progress.stage("Linear", settings.epochs * steps)
    for epoch in range(settings.epochs):
        total = torch.zeros((), device=device)
        bad: dict[int, str] = {}
        for number, batch in enumerate(loader.epoch(epoch)):
            bad.update(batch.bad)
            targets = labels[batch.indices.to(device, non_blocking=True)]  # [at_once * B]
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                features = backbone(prepare(batch.views[0].to(device, non_blocking=True))).float()  # [at_once * B, F]
            if epoch == number == 0:  # or the learning rate would be blamed for a backbone that has diverged
                check_finite(features, batch.indices.cpu(), split.train)
            of_each_step = zip(features.split(settings.batch_size), targets.split(settings.batch_size), strict=True)
            for shown, wanted in of_each_step:  # [B, F], [B]
                loss = F.cross_entropy(head(shown), wanted)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total += loss.detach()
                progress.advance()
        unreadable.add(split.train, bad, REPLACED)
        schedule.step()
        losses.append(total / steps)
    return head, {"loss_by_epoch": finite(torch.stack(losses).tolist(), "linear")}


def _views(subject: Subject, settings: LinearSettings) -> View:
    """What the layer learns from: random crops, mirrored half of the time."""
    return replace(subject.views, crop_scale=settings.crop_scale, flip_probability=0.5 if settings.flips else 0.0)


def _by_regression(
    backbone: nn.Module,
    subject: Subject,
    split: LabelledSplit,
    settings: LinearSettings,
    device: torch.device,
    seed: int,
    workers: int,
    progress: Progress,
    unreadable: Unreadable,
) -> tuple[LogisticRegression, dict[str, Any]]:
    """The strength of the regularisation is chosen on a held-out part of the images; then all are fitted with it."""
    show = partial(
        embed,
        backbone,
        views=subject.views,
        device=device,
        workers=workers,
        progress=progress,
        unreadable=unreadable,
    )
    views = _views(subject, settings)
    shown = embed_crops(
        backbone,
        split.train,
        views,
        count=settings.crops,
        seed=seed,
        device=device,
        workers=workers,
        progress=progress,
        unreadable=unreadable,
    )
    if settings.plain:
        shown += [show(split.train), *([show(split.train, mirrored=True)] if settings.flips else [])]
    labels = np.concatenate([_labels(one) for one in shown])  # [V * N]
    images = torch.cat([one.images for one in shown]).numpy()  # [V * N]
    features = torch.cat([one.features.to(device) for one in shown])  # [V * N, F]
    del shown  # a second copy of what may be most of the memory
    classes = len(split.classes)

    read = np.unique(images)
    several = read[not_alone(split.train_labels[read])]
    pool = several if len(several) else read
    aside = pool[balanced_subset(split.train_labels[pool], settings.held_out, seed)]
    learnt = ~np.isin(images, aside)  # no view of a held-out image
    if not len(several):
        learnt[:] = True  # nothing but classes of one image: the strength is judged on what it is fitted to
    judged = show(split.train.subset(aside))  # whole images, as in the end
    on_device = torch.from_numpy(labels).to(device)
    kept = torch.from_numpy(learnt).to(device)
    choice = choose_strength(
        features[kept],
        on_device[kept],
        judged.features.to(device),
        torch.from_numpy(_labels(judged)).to(device),
        classes,
        settings.strengths,
        settings.iterations,
        progress,
    )
    model = fit(features, on_device, classes, choice.strength, settings.iterations, choice.model)
    return model, {"strength": choice.strength, "held_out_top1_by_strength": choice.tried}


def _labels(seen: Embedding) -> np.ndarray:
    assert seen.labels is not None
    return seen.labels.numpy()
