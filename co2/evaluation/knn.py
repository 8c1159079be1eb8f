"""kNN evaluation of a frozen backbone: no training, no hyper-parameter to tune but k."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from co2.data.open import DataSplits
from co2.data.source import ImageSource
from co2.encoders.features import extract
from co2.errors import UserError
from co2.measures.knn import KnnResult, knn_accuracy
from co2.views.loader import plain_batches
from co2.views.specification import Augmentation
from co2.views.transform import normalise


class Embedding(NamedTuple):
    """Images as a backbone sees them."""

    features: Tensor  # [N, F]
    images: Tensor  # [N] indices into the source; images that cannot be read are missing
    labels: Tensor | None  # [N]


def embed(
    backbone: nn.Module, source: ImageSource, views: Augmentation, *, device: str = "cpu", workers: int = 0
) -> Embedding:
    """Pooled features of every image, resized and cut as `views` says but not augmented."""
    batches = plain_batches(source, views.size, batch_size=256, workers=workers)
    features, images = extract(backbone.to(device), batches, lambda pixels: normalise(pixels, views), device)
    labels = None if source.labels is None else torch.from_numpy(source.labels)[images]
    return Embedding(features, images, labels)


def evaluate_knn(
    backbone: nn.Module, data: DataSplits, views: Augmentation, *, device: str = "cpu", workers: int = 0, k: int = 200
) -> KnnResult:
    """Top-1 and top-5 accuracy of the held-out images, or of each image among all others where none are held out."""
    if data.bank is None:
        raise UserError(f"kNN needs labels and finds none: {data.description}. Sort images into class sub-folders.")
    classes = len(data.bank.classes)
    bank = embed(backbone, data.bank, views, device=device, workers=workers)
    assert bank.labels is not None
    if data.test is None:
        return knn_accuracy(
            bank.features, bank.labels, bank.features, bank.labels, classes=classes, k=k, exclude_self=True
        )
    test = embed(backbone, data.test, views, device=device, workers=workers)
    assert test.labels is not None
    return knn_accuracy(bank.features, bank.labels, test.features, test.labels, classes=classes, k=k)
