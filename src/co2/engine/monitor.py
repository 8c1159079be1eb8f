"""How a run is doing, measured at the end of an epoch: label-free health always, kNN accuracy where labels exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.data.open import DataSplits
from co2.data.source import ImageSource
from co2.experiment import Experiment
from co2.measures.knn import knn_accuracy
from co2.measures.label_free import alignment, effective_rank, mean_norm, uniformity
from co2.networks.encoder import Encoder
from co2.networks.features import evaluation_mode, extract
from co2.views.loader import Batch, ViewLoader, plain_batches
from co2.views.transform import normalise_for_convolutions

# Decoded pictures up to this size stay in memory from one measurement to the next: so many bytes, or this share of a
# large GPU. With ten runs on 16 cores, decoding 50,000 of 64 pixels anew took as long as two epochs of training.
KEPT_BYTES, KEPT_SHARE = 2**29, 1 / 32


class Monitor:
    """Measures an encoder on the same images, in the same views, every time."""

    def __init__(self, experiment: Experiment, splits: DataSplits, device: torch.device, workers: int) -> None:
        limits = experiment.monitoring
        self.experiment = experiment
        self.device = device
        self.workers = workers
        self.health = splits.train.spread(limits.health_images)
        # Among pictures of one class every answer is right.
        bank = splits.bank
        several = bank is not None and bank.labels is not None and len(np.unique(bank.labels)) > 1
        self.bank = bank.spread_over_classes(limits.bank_images) if bank is not None and several else None
        self.queries = splits.test.spread_over_classes(limits.query_images) if splits.test is not None else None
        # Small pictures keep a GPU busy only in large batches.
        self.batch_size = 2048 if device.type == "cuda" and experiment.size <= 64 else 256
        self._kept: dict[str, list[Batch]] = {}
        self._keeps = KEPT_BYTES  # bytes of each kind
        if device.type == "cuda":
            self._keeps = max(KEPT_BYTES, int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory))

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Named numbers about the encoder, which is left as it was."""
        return self._label_free(encoder) | self._knn(encoder)

    def _label_free(self, encoder: Encoder) -> dict[str, float]:
        # Two views of each image, always those of one fixed epoch, so that only the encoder changes between two calls.
        batches = list(self._once("health", self.health, lambda: self._health_views().epoch(0)))
        one_view = ((replace(batch, views=batch.views[view : view + 1]) for batch in batches) for view in (0, 1))
        first, second = (F.normalize(self._extract(encoder, some)[0], dim=1) for some in one_view)  # [N, D] each
        return {
            "alignment": alignment(first, second),
            "uniformity": uniformity(first),
            "effective_rank": effective_rank(first),
            "mean_norm": mean_norm(first),
        }

    def _health_views(self) -> ViewLoader:
        return ViewLoader(
            self.health,
            (self.experiment.views()[0],) * 2,
            batch_size=min(self.batch_size, len(self.health)),
            seed=self.experiment.seed,
            workers=self.workers,
        )

    def _knn(self, encoder: Encoder) -> dict[str, float]:
        if self.bank is None:
            return {}
        bank, bank_labels = self._labelled_features(encoder, "bank", self.bank)
        if self.queries is None:  # nothing is held out: each image asks all the others
            queries, labels = bank, bank_labels
        else:
            queries, labels = self._labelled_features(encoder, "queries", self.queries)
        judge = partial(knn_accuracy, classes=len(self.bank.classes), exclude_self=self.queries is None)
        result = judge(bank, bank_labels, queries, labels)
        # The MoCo authors' notebook, whose numbers people compare with, judges what the head makes of the features.
        embedded = judge(_project(encoder, bank), bank_labels, _project(encoder, queries), labels)
        return {"knn_top1": result.top1, "knn_top5": result.top5, "knn_embedding_top1": embedded.top1}

    def _labelled_features(self, encoder: Encoder, name: str, source: ImageSource) -> tuple[Tensor, Tensor]:
        assert source.labels is not None
        size = self.experiment.size
        batches = self._once(name, source, lambda: plain_batches(source, size, self.batch_size, self.workers))
        features, images = self._extract(encoder.backbone, batches)  # [N, F], [N]
        return features, torch.from_numpy(source.labels)[images]

    def _once(self, name: str, source: ImageSource, make: Callable[[], Iterator[Batch]]) -> Iterable[Batch]:
        """The batches that `make` makes, kept for the next time if they take little memory."""
        if name in self._kept:
            return self._kept[name]
        if 2 * len(source) * 3 * self.experiment.size**2 > self._keeps:
            return make()
        self._kept[name] = [batch.each(lambda tensor: tensor.to(self.device)) for batch in make()]
        return self._kept[name]

    def _extract(self, network: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        plain = self.experiment.plain
        return extract(network, batches, lambda pixels: normalise_for_convolutions(pixels, plain), self.device)


@torch.no_grad()
def _project(encoder: Encoder, features: Tensor) -> Tensor:
    """What the encoder's head makes of pooled features [N, F]: [N, D]."""
    precision = next(encoder.head.parameters()).dtype
    with evaluation_mode(encoder.head):
        projected: Tensor = encoder.head(features.to(precision))
    return projected
