"""Semi-supervised classification: the whole network, fine-tuned on 1% and 10% of the labels.

The paper's appendix, "Semi-Supervised Learning". Which images the seed chose is in the record. For comparison, the same
architecture can be trained from scratch on the same labels (`baseline`); the paper does not say how, so that the
settings of that are ours.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from co2.data.open import DataSplits
from co2.data.source import ImageSource
from co2.evaluation.features import (
    REPLACED,
    NotFinite,
    Unreadable,
    check_finite,
    embed,
    preparation,
    random_views,
    ready,
)
from co2.evaluation.labels import LabelledSplit, accuracies, balanced_subset, labelled_split
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation, diverged, finite
from co2.evaluation.specification import SEMI_SUPERVISED_PAPER as PAPER
from co2.evaluation.specification import SEMI_SUPERVISED_PAPER_V1 as PAPER_V1
from co2.evaluation.specification import SEMI_SUPERVISED_QUICK as QUICK
from co2.evaluation.specification import SemiSupervisedSettings
from co2.evaluation.subject import Subject

MORE_THAN_ASKED = 1.1  # times: from here on it is said that a share of the labels is a larger one

__all__ = ["PAPER", "PAPER_V1", "QUICK", "SemiSupervisedSettings", "evaluate", "parameter_groups"]


def evaluate(
    subject: Subject,
    data: DataSplits,
    settings: SemiSupervisedSettings = QUICK,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> Evaluation:
    """Top-1 and top-5 accuracy after fine-tuning on each share of the labels: {"top1_1%": ..., "top5_1%": ...}."""
    split = labelled_split(data, "semi-supervised", seed)
    numbers: dict[str, float] = {}
    subsets: dict[str, Any] = {}
    curves: dict[str, list[float]] = {}
    unreadable = Unreadable(progress)
    tuning = _Training(
        settings.epochs, settings.milestones, settings.learning_rate, settings.head_learning_rate, settings
    )
    scratch = _Training(
        settings.baseline_epochs,
        tuple(round(epoch * settings.baseline_epochs / settings.epochs) for epoch in settings.milestones),
        settings.baseline_learning_rate,
        settings.baseline_learning_rate,
        settings,
    )
    for fraction in settings.fractions:
        share = f"{100 * fraction:g}%"
        chosen = balanced_subset(split.train_labels, fraction, seed)  # [n]
        subset = split.train.subset(chosen)
        subsets[share] = {"images": len(subset), "of": len(split.train), "indices": chosen.tolist()}
        if len(subset) > MORE_THAN_ASKED * fraction * len(split.train):
            progress.say(
                f"semi-supervised: {share} of the labels are {len(subset):,} of {len(split.train):,} images here, "
                f"{len(subset) / len(split.train):.1%}: at least one of each class."
            )
        kinds = [("", subject, tuning)]
        if settings.baseline:
            kinds.append(("scratch_", subject.random(seed), scratch))
        for prefix, start, training in kinds:
            network, losses = training.run(
                start, subset, len(split.classes), device, seed, workers, share, progress, unreadable
            )
            result, judged = _judge(network, start, split, device, workers, progress, unreadable)
            numbers |= {f"{prefix}{name}_{share}": value for name, value in result.items()}
            curves[f"{prefix}{share}"] = losses
    return Evaluation(
        protocol="semi-supervised",
        subject=subject.name,
        data=data.train.name,
        numbers=numbers,
        settings=dataclasses.asdict(settings) | {"seed": seed, "view_size": subject.view_size},
        details={
            "subsets": subsets,
            "loss_by_epoch": curves,
            "test_images": judged,
            "held_out_by_seed": split.divided,
            "unreadable": unreadable.reasons,
        },
    )


@dataclass(frozen=True)
class _Training:
    """SGD on a labelled subset; the learning rates of backbone and classifier drop together."""

    epochs: int
    milestones: tuple[int, ...]
    learning_rate: float
    head_learning_rate: float
    settings: SemiSupervisedSettings

    def run(
        self,
        subject: Subject,
        subset: ImageSource,
        classes: int,
        device: torch.device | str,
        seed: int,
        workers: int,
        share: str,
        progress: Progress,
        unreadable: Unreadable,
    ) -> tuple[nn.Module, list[float]]:
        """The network that classifies, and the mean loss of each epoch."""
        settings, device = self.settings, torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # for the new classifier
            network = ready(subject.build(classes), device).train()
        optimiser = torch.optim.SGD(
            parameter_groups(network, subject, self.learning_rate, self.head_learning_rate),
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, list(self.milestones), settings.decay)
        views = replace(subject.views, crop_scale=settings.crop_scale)
        loader = random_views(subset, views, batch_size=settings.batch_size, seed=seed, device=device, workers=workers)
        assert subset.labels is not None
        labels = torch.from_numpy(np.asarray(subset.labels)).to(device)  # [n]
        prepare = preparation(views)
        losses = []
        progress.stage(f"Fine-tuning on {share}", self.epochs * loader.batches_per_epoch)
        for epoch in range(self.epochs):
            total = torch.zeros((), device=device)
            bad: dict[int, str] = {}
            for step, batch in enumerate(loader.epoch(epoch)):
                bad.update(batch.bad)
                targets = labels[batch.indices.to(device, non_blocking=True)]  # [B]
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    scores = network(prepare(batch.views[0].to(device, non_blocking=True)))  # [B, classes]
                if epoch == step == 0:  # or the learning rate would be blamed for a backbone that has diverged
                    check_finite(scores.detach().float(), batch.indices.cpu(), subset)
                loss = F.cross_entropy(scores.float(), targets)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total += loss.detach()
                progress.advance()
            unreadable.add(subset, bad, REPLACED)
            schedule.step()
            losses.append(total / loader.batches_per_epoch)
        return network, finite(torch.stack(losses).tolist(), "semi-supervised")


def parameter_groups(
    network: nn.Module, subject: Subject, learning_rate: float, head_learning_rate: float
) -> list[dict[str, Any]]:
    """What the subject brought along, and the new classifier, each with its learning rate."""
    old = [parameter for name, parameter in network.named_parameters() if name in subject.weights]
    new = [parameter for name, parameter in network.named_parameters() if name not in subject.weights]
    return [{"params": old, "lr": learning_rate}, {"params": new, "lr": head_learning_rate}]


def _judge(
    network: nn.Module,
    subject: Subject,
    split: LabelledSplit,
    device: torch.device | str,
    workers: int,
    progress: Progress,
    unreadable: Unreadable,
) -> tuple[dict[str, float], int]:
    """Accuracies on the test images, and how many of them could be read."""
    try:
        test = embed(
            network,
            split.test,
            subject.views,
            device=device,
            workers=workers,
            progress=progress,
            unreadable=unreadable,
        )
    except NotFinite as error:  # only the last step can have done it: before it, losses were numbers
        raise diverged("semi-supervised") from error
    assert test.labels is not None
    scores = test.features  # [M, classes]
    ranked = scores.topk(min(5, scores.shape[1]), dim=1).indices.cpu().numpy()
    return accuracies(ranked, test.labels.numpy()), len(test.labels)
