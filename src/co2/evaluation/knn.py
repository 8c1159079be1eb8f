"""kNN evaluation of a frozen backbone: no training, no hyper-parameter to tune but k."""

from __future__ import annotations

import dataclasses

import torch

from co2.data.open import DataSplits
from co2.data.source import evenly_by_class
from co2.evaluation.features import Unreadable, embed
from co2.evaluation.labels import check_classes, no_labels
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation
from co2.evaluation.specification import KNN_PAPER as PAPER
from co2.evaluation.specification import KNN_QUICK as QUICK
from co2.evaluation.specification import KnnSettings
from co2.evaluation.subject import Subject
from co2.measures.knn import knn_accuracies, neighbour_count

__all__ = ["PAPER", "QUICK", "KnnSettings", "evaluate"]

_SEARCH_IMAGES = 10_000  # of the bank that ask all the others, to find the best k


def evaluate(
    subject: Subject,
    data: DataSplits,
    settings: KnnSettings = QUICK,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    workers: int = 0,
    progress: Progress = SILENT,
) -> Evaluation:
    """Top-1 and top-5 accuracy of the held-out images, or of each image among all others where none are held out.

    Nothing is random here: `seed` is only written down. The record says how many neighbours voted.
    """
    if data.bank is None or data.bank.labels is None:
        raise no_labels("knn", data)
    bank_source = data.bank.spread_over_classes(settings.bank_images)
    held_out = data.test is not None and data.test.labels is not None
    query_source = bank_source
    if held_out and data.test is not None:
        query_source = data.test.spread_over_classes(settings.query_images)
    assert bank_source.labels is not None
    assert query_source.labels is not None
    check_classes("knn", data.bank.labels, query_source.labels, bank_source.classes)
    check_classes(
        "knn",
        bank_source.labels,
        query_source.labels,
        bank_source.classes,
        remedy=f"Give a larger --bank-images than {settings.bank_images}, or 0 for all {len(data.bank):,}.",
    )
    backbone = subject.build()
    unreadable = Unreadable(progress)
    bank = embed(
        backbone,
        bank_source,
        subject.views,
        device=device,
        workers=workers,
        storage=settings.storage,
        progress=progress,
        unreadable=unreadable,
    )
    queries = bank
    if held_out:
        queries = embed(
            backbone,
            query_source,
            subject.views,
            device=device,
            workers=workers,
            progress=progress,
            unreadable=unreadable,
        )
    assert bank.labels is not None
    assert queries.labels is not None
    check_classes(
        "knn",
        bank.labels.numpy(),
        queries.labels.numpy(),
        bank_source.classes,
        remedy="Those of other classes cannot be read: repair or replace them.",
    )
    classes = len(bank_source.classes)
    progress.stage("Neighbours")

    def accuracies_of(rows: torch.Tensor | None, ks: list[int]) -> list[tuple[float, float]]:
        """Top-1 and top-5 with each k: of the queries, or of these rows of the bank among all others."""
        assert bank.labels is not None
        assert queries.labels is not None
        asked, labels = (queries.features, queries.labels) if rows is None else (bank.features[rows], bank.labels[rows])
        own = torch.arange(len(bank.features)) if rows is None and not held_out else rows
        results = knn_accuracies(
            bank.features,
            bank.labels,
            asked.to(device),
            labels,
            classes=classes,
            ks=ks,
            temperature=settings.temperature,
            own=own,
        )
        return [(100 * result.top1, 100 * result.top5) for result in results]

    details: dict[str, object] = {
        "bank_images": len(bank.features),
        "query_images": len(queries.features),
        "leave_one_out": not held_out,
        "unreadable": unreadable.reasons,
    }
    if settings.best_k:
        ks = sorted({min(k, len(bank.features) - 1) for k in settings.ks})
        rows = torch.from_numpy(evenly_by_class(bank.labels.numpy(), _SEARCH_IMAGES))
        within_bank = accuracies_of(rows, ks)
        best = max(range(len(ks)), key=lambda place: within_bank[place][0])
        by_k = accuracies_of(None, ks)
        k, (top1, top5) = ks[best], by_k[best]
        details["top1_by_k"] = {str(tried): top for tried, (top, _) in zip(ks, by_k, strict=True)}
        details["top1_within_bank_by_k"] = {str(tried): top for tried, (top, _) in zip(ks, within_bank, strict=True)}
    else:
        k = neighbour_count(len(bank.features), classes, settings.k)
        if k < settings.k:
            progress.say(
                f"knn: {k} neighbours vote instead of {settings.k}: no more than half of what an average class has "
                f"among {len(bank.features):,} images of {classes:,} classes."
            )
        [(top1, top5)] = accuracies_of(None, [k])
    details["k"] = k
    return Evaluation(
        protocol="knn",
        subject=subject.name,
        data=data.train.name,
        numbers={"top1": top1, "top5": top5},
        settings=dataclasses.asdict(settings) | {"seed": seed, "view_size": subject.view_size},
        details=details,
    )
