"""What a run measures about itself."""

import dataclasses

import numpy as np
import pytest
import torch
from fresh import encoder_of
from torch import nn

from co2 import recipes
from co2.data.open import open_data
from co2.engine import monitor
from co2.engine.monitor import Monitor
from co2.measures.knn import knn_accuracy
from co2.networks.encoder import Embedder
from co2.views.transform import normalise

CPU = torch.device("cpu")


def measured(head: nn.Module | None = None) -> tuple[dict[str, float], nn.Module]:
    experiment = recipes.get("demo-co2").edit(data="shapes:60:32", monitoring={"health_images": 16})
    torch.manual_seed(1)
    encoder = encoder_of(experiment)
    if head is not None:
        encoder.head = head
    encoder.train()
    splits = open_data(experiment.data)
    return Monitor(experiment, splits, CPU, workers=0).measure(encoder), encoder


def test_embeddings_are_judged_as_the_whole_encoder_makes_them():
    """The oracle passes each picture through the encoder, where the monitor passes features through the head."""
    numbers, encoder = measured()
    splits = open_data("shapes:60:32")
    views = recipes.get("demo-co2").plain
    assert encoder.training
    assert encoder.head.training
    encoder.eval()
    embed = Embedder(encoder.backbone, encoder.head)
    bank, queries = (
        torch.cat([embed(normalise(source.image(i)[None], views)).detach() for i in range(len(source))])
        for source in (splits.bank, splits.test)
    )
    labels = [torch.from_numpy(source.labels) for source in (splits.bank, splits.test)]
    expected = knn_accuracy(bank, labels[0], queries, labels[1], classes=len(splits.bank.classes))
    assert numbers["knn_embedding_top1"] == expected.top1


def test_features_are_judged_without_the_head():
    """A head that makes all pictures alike costs the embeddings everything, and the features nothing."""
    flat = nn.Linear(128, 8)
    nn.init.zeros_(flat.weight)
    numbers, _ = measured()
    flattened, _ = measured(flat)
    assert flattened["knn_top1"] == numbers["knn_top1"]
    assert flattened["knn_embedding_top1"] < numbers["knn_embedding_top1"]


def test_without_held_out_images_no_image_votes_for_itself():
    experiment = recipes.get("demo-co2").edit(data="shapes:60:32", monitoring={"health_images": 16})
    encoder = encoder_of(experiment)
    splits = open_data(experiment.data)
    splits.bank.labels = np.random.default_rng(0).permutation(splits.bank.labels)  # which nothing can be learnt from
    alone = dataclasses.replace(splits, test=None)
    assert Monitor(experiment, alone, CPU, workers=0).measure(encoder)["knn_top1"] < 0.4


def test_where_all_pictures_are_of_one_class_nothing_is_classified():
    """Every answer would be right."""
    experiment = recipes.get("demo-co2").edit(data="shapes:60:32", monitoring={"health_images": 16})
    encoder = encoder_of(experiment)
    splits = open_data(experiment.data)
    splits.bank.labels = np.zeros_like(splits.bank.labels)
    numbers = Monitor(experiment, splits, CPU, workers=0).measure(encoder)
    assert "effective_rank" in numbers
    assert not any(name.startswith("knn") for name in numbers)


def readings(monkeypatch, device):
    """How often pictures are read in two measurements, both of which give the same."""
    experiment = recipes.get("demo-co2").edit(data="shapes:60:32", monitoring={"health_images": 16})
    encoder = encoder_of(experiment).to(device)
    read, plain_batches = [], monitor.plain_batches

    def counted(source, *how):
        read.append(source)
        return plain_batches(source, *how)

    monkeypatch.setattr(monitor, "plain_batches", counted)
    judge = Monitor(experiment, open_data(experiment.data), device, workers=0)
    assert judge.measure(encoder) == judge.measure(encoder)
    return len(read)


def test_pictures_are_read_once_if_they_fit_into_memory(monkeypatch):
    assert readings(monkeypatch, CPU) == 2  # the bank and the queries


def test_pictures_that_do_not_fit_are_read_for_each_measurement(monkeypatch):
    monkeypatch.setattr(monitor, "KEPT_BYTES", 1000)
    assert readings(monkeypatch, CPU) == 4


@pytest.mark.gpu
@pytest.mark.parametrize(("share", "times"), [(1 / 32, 2), (0.0, 4)])
def test_a_gpu_keeps_what_fits_into_a_share_of_it(monkeypatch, share, times):
    monkeypatch.setattr(monitor, "KEPT_BYTES", 1000)
    monkeypatch.setattr(monitor, "KEPT_SHARE", share)
    assert readings(monkeypatch, torch.device("cuda")) == times
