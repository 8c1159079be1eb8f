"""kNN against a loop over images, and against scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from co2.measures import knn
from co2.measures.knn import knn_accuracies, knn_accuracy, nearest, neighbour_count

CLASSES = 6
Labelled = tuple[Tensor, Tensor]  # features [N, F] and labels [N]


def clouds(images: int, seed: int) -> Labelled:
    """Overlapping clouds of points, one for each class, around the same centres for every seed."""
    centres = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(images) % CLASSES
    return centres[labels] + 1.5 * torch.randn(images, 8, generator=torch.Generator().manual_seed(seed)), labels


@pytest.fixture
def bank() -> Labelled:
    return clouds(120, seed=1)


@pytest.fixture
def queries() -> Labelled:
    return clouds(50, seed=2)


def loop(bank: Tensor, labels: Tensor, queries: Tensor, k: int, temperature: float, leave_out: bool) -> list[list[int]]:
    """Every query by itself, in plain Python."""
    ranked = []
    for number, query in enumerate(queries.double()):
        scored = []
        for row, (feature, label) in enumerate(zip(bank.double(), labels.tolist(), strict=True)):
            if not (leave_out and row == number):
                cosine = (feature @ query / (feature.norm() * query.norm())).item()
                scored.append((cosine, label))
        votes = [0.0] * CLASSES
        for cosine, label in sorted(scored, reverse=True)[:k]:
            votes[label] += math.exp(cosine / temperature)
        ranked.append(sorted(range(CLASSES), key=lambda label: -votes[label]))
    return ranked


def assert_ranked(bank: Tensor, labels: Tensor, queries: Tensor, expected: Tensor, **settings: Any) -> None:
    """Of every query the class with the most votes, and the first five, are those of `expected` [M, classes]."""
    for place in range(CLASSES):
        result = knn_accuracy(bank, labels, queries, expected[:, place], **settings)
        assert (result.top1, result.top5) == (float(place == 0), float(place < 5))


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("k", [1, 7])
def test_equals_a_loop_in_blocks_of_any_size(
    bank: Labelled,
    queries: Labelled,
    k: int,
    leave_out: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, truth = bank if leave_out else queries
    expected = torch.tensor(loop(*bank, asked, k, 0.1, leave_out))
    for elements in (1, 1000, 2**25):  # one query at a time; blocks of eight with a ragged last one; all at once
        monkeypatch.setattr(knn, "BLOCK_ELEMENTS", elements)
        assert_ranked(*bank, asked, expected, classes=CLASSES, k=k, temperature=0.1, exclude_self=leave_out)
        result = knn_accuracy(*bank, asked, truth, classes=CLASSES, k=k, temperature=0.1, exclude_self=leave_out)
        assert result.top1 == pytest.approx((expected[:, 0] == truth).double().mean().item())
        assert result.top5 == pytest.approx((expected[:, :5] == truth[:, None]).any(dim=1).double().mean().item())
        assert result.k == k


@pytest.mark.parametrize("leave_out", [False, True])
def test_a_bank_in_blocks_gives_the_same_neighbours(
    bank: Labelled, queries: Labelled, leave_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, truth = bank if leave_out else queries
    expected = torch.tensor(loop(*bank, asked, 7, 0.1, leave_out))
    rows = nearest(bank[0], asked, 7, exclude_self=leave_out)
    for bank_rows, query_rows, elements in ((5, 13, 40), (50, 2**16, 1000), (119, 1, 1)):  # ragged, and smaller than k
        monkeypatch.setattr(knn, "BANK_ROWS", bank_rows)
        monkeypatch.setattr(knn, "QUERY_ROWS", query_rows)
        monkeypatch.setattr(knn, "BLOCK_ELEMENTS", elements)
        assert_ranked(*bank, asked, expected, classes=CLASSES, k=7, exclude_self=leave_out)
        assert torch.equal(nearest(bank[0], asked, 7, exclude_self=leave_out), rows)
        result = knn_accuracy(*bank, asked, truth, classes=CLASSES, k=7, exclude_self=leave_out)
        assert result.top1 == pytest.approx((expected[:, 0] == truth).double().mean().item())


def test_several_k_from_one_search(bank: Labelled, queries: Labelled) -> None:
    results = knn_accuracies(*bank, *queries, classes=CLASSES, ks=[1, 5, 60], temperature=0.2)
    for k, result in zip([1, 5, 60], results, strict=True):
        ranked = torch.tensor(loop(*bank, queries[0], k, 0.2, leave_out=False))
        assert result.k == k  # exactly as many as asked for
        assert result.top1 == pytest.approx((ranked[:, 0] == queries[1]).double().mean().item())


def test_some_rows_of_the_bank_ask_all_others(bank: Labelled) -> None:
    rows = torch.tensor([3, 40, 41, 119])
    [some] = knn_accuracies(*bank, bank[0][rows], bank[1][rows], classes=CLASSES, ks=[3], own=rows)
    ranked = torch.tensor(loop(*bank, bank[0], 3, 0.1, leave_out=True))[rows]
    assert some.top1 == pytest.approx((ranked[:, 0] == bank[1][rows]).double().mean().item())


def test_agrees_with_scikit_learn(bank: Labelled, queries: Labelled) -> None:
    features, labels = bank
    for k, temperature in ((3, 0.07), (10, 0.5)):
        theirs = KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda distance, t=temperature: np.exp((1 - distance) / t)
        ).fit(features.numpy(), labels.numpy())
        expected = torch.from_numpy(theirs.predict(queries[0].numpy()))
        ours = knn_accuracy(*bank, queries[0], expected, classes=CLASSES, k=k, temperature=temperature)
        assert ours.top1 == 1.0  # every single prediction is the same
        accuracy = knn_accuracy(*bank, *queries, classes=CLASSES, k=k, temperature=temperature).top1
        assert accuracy == pytest.approx(theirs.score(queries[0].numpy(), queries[1].numpy()))


@pytest.mark.parametrize("temperature", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("leave_out", [False, True])
def test_no_temperature_is_too_small(bank: Labelled, queries: Labelled, temperature: float, leave_out: bool) -> None:
    bank = (bank[0] + 2, bank[1])  # all rather similar: exp(similarity / 0.01) is more than single precision holds
    asked, truth = bank if leave_out else (queries[0] + 2, queries[1])
    similarities = F.normalize(asked.double(), dim=1) @ F.normalize(bank[0].double(), dim=1).T  # [M, N]
    if leave_out:
        similarities.fill_diagonal_(-torch.inf)
    near, rows = similarities.topk(10, dim=1)
    assert near[:, 0].median() > 0.89
    of_class = bank[1][rows][:, None] == torch.arange(CLASSES)[:, None]  # [M, classes, 10]
    log_votes = torch.where(of_class, near[:, None] / temperature, -torch.inf).logsumexp(dim=2)  # [M, classes]
    expected = log_votes.argsort(dim=1, descending=True, stable=True)
    settings = {"classes": CLASSES, "k": 10, "temperature": temperature, "exclude_self": leave_out}
    assert_ranked(*bank, asked, expected, **settings)
    result = knn_accuracy(*bank, asked, truth, **settings)
    assert result.top1 == pytest.approx((expected[:, 0] == truth).double().mean().item())
    assert result.top5 == pytest.approx((expected[:, :5] == truth[:, None]).any(dim=1).double().mean().item())


def test_leaving_one_out_matters(bank: Labelled) -> None:
    assert knn_accuracy(*bank, *bank, classes=CLASSES, k=1).top1 == 1.0
    assert knn_accuracy(*bank, *bank, classes=CLASSES, k=1, exclude_self=True).top1 < 0.9


def test_fewer_neighbours_vote_in_small_sets() -> None:
    assert neighbour_count(50_000, 10) == 200  # CIFAR-10
    assert neighbour_count(50_000, 100) == 200  # CIFAR-100
    assert neighbour_count(1_281_167, 1000) == 200  # ImageNet
    assert neighbour_count(1000, 10) == 50
    assert neighbour_count(20, 10) == 1
    assert neighbour_count(3, 10) == 1
    assert neighbour_count(50_000, 10, k=20) == 20


def test_small_separable_set_is_solved_with_the_default_k() -> None:
    labels = torch.arange(40) % 4
    features = F.one_hot(labels, 4).float() + 0.01 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    result = knn_accuracy(features, labels, features, labels, classes=4, exclude_self=True)
    assert result == (1.0, 1.0, 5)


def test_nearest_rows_in_order() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3, 0.7, 3.0])
    points = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor([1, 5, 0.1, 2, 9])[:, None]
    assert nearest(points, points[:1], 3).tolist() == [[0, 1, 2]]
    assert nearest(points, points, 2, exclude_self=True).tolist() == [[1, 2], [0, 2], [1, 0], [2, 1], [3, 2]]


def test_impossible_requests_are_refused() -> None:
    points = torch.randn(4, 3)
    with pytest.raises(ValueError, match="bank of 4"):
        nearest(points, points, 5)
    with pytest.raises(ValueError, match="bank of 4"):
        nearest(points, points, 4, exclude_self=True)
    with pytest.raises(ValueError, match="exclude_self"):
        nearest(points, points[:2], 1, exclude_self=True)
    with pytest.raises(ValueError, match="no queries"):
        nearest(points, points[:0], 1)
