"""Closed forms, and brute force over all pairs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from co2.measures import label_free
from co2.measures.label_free import alignment, effective_rank, mean_norm, neighbour_agreement, uniformity


def on_the_sphere(images: int, dimension: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(images, dimension, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_collapsed_features() -> None:
    same = on_the_sphere(1, 16).expand(200, 16)
    assert alignment(same, same) == 0
    assert uniformity(same) == pytest.approx(0, abs=1e-5)
    assert effective_rank(same) == pytest.approx(1, abs=1e-3)
    assert mean_norm(same) == pytest.approx(1, abs=1e-6)


def test_orthonormal_features() -> None:
    basis = torch.eye(12)
    assert uniformity(basis) == pytest.approx(-4, abs=1e-5)  # every squared distance is 2
    assert effective_rank(basis) == pytest.approx(12, rel=1e-4)
    assert effective_rank(basis[:5]) == pytest.approx(5, rel=1e-4)
    assert mean_norm(basis) == pytest.approx(1 / math.sqrt(12))


def test_opposite_features() -> None:
    poles = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert alignment(poles, poles.flip(0)) == pytest.approx(4)
    assert uniformity(poles) == pytest.approx(-8)
    assert mean_norm(poles) == 0
    assert effective_rank(poles) == pytest.approx(1, abs=1e-4)


def test_features_spread_over_the_sphere() -> None:
    # On the unit sphere in three dimensions the squared distance of two random points is uniform on [0, 4].
    expected = math.log((1 - math.exp(-8)) / 8)
    features = on_the_sphere(3000, 3)
    assert uniformity(features) == pytest.approx(expected, abs=0.02)
    assert effective_rank(features) == pytest.approx(3, rel=0.01)
    assert mean_norm(features) < 0.05


@pytest.mark.parametrize("elements", [1, 300, 2**24])
def test_uniformity_counts_every_pair_once(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_free, "BLOCK_ELEMENTS", elements)
    features = on_the_sphere(53, 7)
    expected = torch.pdist(features.double()).square().mul(-2).exp().mean().log().item()
    assert uniformity(features) == pytest.approx(expected, abs=1e-5)


def test_alignment_by_brute_force() -> None:
    first, second = on_the_sphere(20, 6, seed=1), on_the_sphere(20, 6, seed=2)
    pairs = [((a - b) ** 2).sum().item() for a, b in zip(first, second, strict=True)]
    assert alignment(first, second) == pytest.approx(sum(pairs) / len(pairs))


@pytest.mark.parametrize(("images", "dimension"), [(40, 9), (9, 40)])
def test_effective_rank_by_singular_values(images: int, dimension: int) -> None:
    scales = torch.logspace(0, -4, dimension)  # from strong to hardly used directions
    features = on_the_sphere(images, dimension) * scales
    values = torch.linalg.svdvals(features.double())
    shares = values / values.sum() + 1e-7
    assert effective_rank(features) == pytest.approx(math.exp(-(shares * shares.log()).sum().item()), rel=1e-6)


def test_effective_rank_does_not_depend_on_scale_or_rotation() -> None:
    features = on_the_sphere(50, 8) * torch.linspace(1, 2, 8)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(3))).Q
    assert effective_rank(30 * features @ rotation) == pytest.approx(effective_rank(features), rel=1e-5)


def test_features_of_a_diverged_run_give_not_a_number() -> None:
    features = on_the_sphere(5, 3)
    features[2, 1] = math.nan
    assert math.isnan(effective_rank(features))
    assert math.isnan(uniformity(features))
    assert math.isnan(mean_norm(features))


def test_uniformity_needs_a_pair() -> None:
    with pytest.raises(ValueError, match="at least two"):
        uniformity(torch.ones(1, 4))


@pytest.mark.parametrize("elements", [1, 2**24])
def test_agreement_on_neighbours_by_brute_force(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_free, "BLOCK_ELEMENTS", elements)
    bank = on_the_sphere(30, 5)
    first = bank + 0.3 * on_the_sphere(30, 5, seed=1)
    second = bank + 0.3 * on_the_sphere(30, 5, seed=2)
    common = 0
    for image in range(30):
        near = []
        for view in (first, second):
            similarity = F.cosine_similarity(view[image], bank)
            similarity[image] = -2  # itself
            near.append(set(similarity.topk(4).indices.tolist()))
        common += len(near[0] & near[1])
    assert neighbour_agreement(first, second, bank, k=4) == pytest.approx(common / (30 * 4))


def test_agreement_on_neighbours_of_the_same_and_of_unrelated_views() -> None:
    bank = on_the_sphere(400, 16)
    assert neighbour_agreement(bank, bank, bank, k=10) == 1
    unrelated = neighbour_agreement(on_the_sphere(400, 16, seed=1), on_the_sphere(400, 16, seed=2), bank, k=10)
    assert unrelated == pytest.approx(10 / 399, abs=0.01)
    with pytest.raises(ValueError, match="same images"):
        neighbour_agreement(bank, bank[:5], bank)
