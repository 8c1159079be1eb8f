"""What can be said of a backbone without any label: for people who have none, to compare runs and checkpoints by.

Every image is shown in two random views (MoCo v2's augmentation, whatever the backbone was trained with, so that all
are asked the same) and plain. On the pooled features:

alignment            mean squared distance of the two views' unit features: low is good, 0 is also what a collapse has
uniformity           how evenly unit features fill the sphere: the more negative, the better they are spread
rankme               how many directions the features use (Garrido et al. 2023): higher is better, 1 is a collapse
neighbour_agreement  on how many of their k nearest images two views agree, in percent: higher is better

None of them is accuracy. `correlations` says, over the checkpoints of one run with labels, how well each follows kNN
accuracy there: Spearman's rank correlation, 1 for the same order, -1 for the opposite one (good for alignment and
uniformity, where low is good), 0 for none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from co2.data.open import DataSplits
from co2.errors import UserError
from co2.evaluation.features import Unreadable, embed, preparation, ready
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation
from co2.evaluation.specification import LABEL_FREE_PAPER as PAPER
from co2.evaluation.specification import LABEL_FREE_QUICK as QUICK
from co2.evaluation.specification import LabelFreeSettings
from co2.evaluation.subject import Subject
from co2.measures.label_free import alignment, effective_rank, neighbour_agreement, uniformity
from co2.measures.ranking import spearman
from co2.methods.moco import V2
from co2.networks.features import extract
from co2.views.loader import ViewLoader

__all__ = ["PAPER", "QUICK", "LabelFreeSettings", "correlations", "evaluate"]


def evaluate(
    subject: Subject,
    data: DataSplits,
    settings: LabelFreeSettings = QUICK,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> Evaluation:
    """Alignment, uniformity, RankMe and the agreement of two views on their neighbours. `seed` draws the views."""
    device = torch.device(device)
    source = data.train.spread(settings.images)
    _check_enough(len(source), data)
    backbone = ready(subject.build(), device)
    views = replace(V2, size=subject.view_size, mean=subject.mean, std=subject.std)
    loader = ViewLoader(source, (views,) * 2, batch_size=min(256, len(source)), seed=seed, workers=workers, smallest=1)
    prepare = preparation(views)
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    order: list[torch.Tensor] = []
    for batch in progress.track(loader.epoch(0), "Two views", loader.batches_per_epoch):
        order.append(batch.indices)
        for view, features in enumerate(seen):
            one = replace(batch, views=batch.views[view : view + 1])
            features.append(extract(backbone, [one], prepare, device)[0])  # [B, F]
    unreadable = Unreadable(progress)
    plain = embed(
        backbone, source, subject.views, device=device, workers=workers, progress=progress, unreadable=unreadable
    )
    # The loader shuffles, and puts a neighbour in the place of an unreadable image: bring all three into one order.
    place = torch.full((len(source),), -1)
    place[torch.cat(order)] = torch.arange(len(torch.cat(order)))
    both = place[plain.images] >= 0
    rows = place[plain.images[both]].to(device)  # [N]
    first, second = (torch.cat(features)[rows] for features in seen)  # [N, F] each
    bank = plain.features[both.to(plain.features.device)].to(device)  # [N, F]
    _check_enough(len(bank), data)
    unit_first, unit_second = F.normalize(first, dim=1), F.normalize(second, dim=1)
    # Of a few images nearly all are neighbours of each other, whatever the features.
    k = min(settings.k, max(1, len(bank) // 4))
    if k < settings.k:
        progress.say(
            f"label-free: neighbours agree by the nearest {k}, not {settings.k}: there are {len(bank)} images."
        )
    return Evaluation(
        protocol="label-free",
        subject=subject.name,
        data=data.train.name,
        numbers={
            "alignment": alignment(unit_first, unit_second),
            "uniformity": uniformity(unit_first),
            "rankme": effective_rank(first),
            "neighbour_agreement": 100 * neighbour_agreement(first, second, bank, k),
        },
        settings=dataclasses.asdict(settings) | {"seed": seed, "view_size": subject.view_size},
        details={
            "images": len(bank),
            "k": k,
            "agreement_by_chance": 100 * k / (len(bank) - 1),
            "unreadable": unreadable.reasons,
        },
    )


def _check_enough(images: int, data: DataSplits) -> None:
    if images < 3:
        raise UserError(
            f"label-free compares images with each other, three at least, and only {images} can be looked at in "
            f"{data.description}. Give more images."
        )


def correlations(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Spearman's rank correlation of every measure with kNN accuracy, over the checkpoints of a run."""
    accuracy = [one.numbers["knn_top1"] for one in evaluations]
    return {
        name: spearman([one.numbers[name] for one in evaluations], accuracy)
        for name in evaluations[0].numbers
        if name != "knn_top1"
    }
