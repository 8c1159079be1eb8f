import dataclasses
import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torn_images import Listener, Torn

import co2
from co2.data.open import open_data
from co2.engine.pretrain import pretrain
from co2.errors import RunError
from co2.evaluation import features, knn, label_free, linear, semi_supervised
from co2.evaluation.features import embed
from co2.evaluation.knn import PAPER, QUICK, evaluate
from co2.evaluation.subject import open_subject
from co2.measures.knn import knn_accuracy


class Mean(torch.nn.Module):
    def forward(self, images):
        return images.mean(dim=(2, 3))


def test_the_papers_numbers():
    assert (PAPER.k, PAPER.temperature) == (200, 0.1)
    assert (PAPER.bank_images, PAPER.query_images, PAPER.best_k) == (0, 0, False)
    assert PAPER.ks == (1, 5, 10, 20, 50, 100, 200)


def test_a_saved_backbone_scores_what_its_run_measured(tiny, rows, tmp_path):
    # The run measures its encoder in memory; the evaluation sees the file it left. Both must agree.
    experiment = tiny(monitoring={"bank_images": 1000, "query_images": 10_000})
    run = pretrain(experiment, out=tmp_path / "run")
    result = evaluate(open_subject(str(run)), open_data(experiment.data), PAPER)
    assert result.numbers["top1"] == pytest.approx(100 * rows(run, "epoch")[-1]["knn_top1"])
    assert result.numbers["top5"] == pytest.approx(100 * rows(run, "epoch")[-1]["knn_top5"])
    assert result.details["leave_one_out"] is False


def test_small_views_are_read_once_for_all_who_look_at_them(monkeypatch):
    data, reads = open_data("shapes:30:16"), []
    read = type(data.train).image
    monkeypatch.setattr(type(data.train), "image", lambda self, index: reads.append(index) or read(self, index))
    first = embed(Mean(), data.train, open_subject("random:co2/resnet10-narrow", view_size=16).views)
    assert sorted(reads) == list(range(30))
    larger = open_subject("random:co2/resnet10-narrow", view_size=24).views
    assert torch.equal(embed(Mean(), data.train, dataclasses.replace(larger, size=16)).features, first.features)
    assert len(reads) == 30
    embed(Mean(), data.train, larger)  # of another size
    assert len(reads) == 60
    monkeypatch.setattr(features, "REMEMBERED_BYTES", 1000)
    other = open_data("shapes:30:16").train
    for _ in range(2):  # too large to be kept
        embed(Mean(), other, larger)
    assert len(reads) == 120


@pytest.fixture
def subject():
    return open_subject("random:co2/resnet10-narrow", view_size=16)


def test_without_a_held_out_part_each_image_asks_all_others(subject):
    data = dataclasses.replace(open_data("shapes:60:16"), test=None)
    for settings in (QUICK, dataclasses.replace(QUICK, best_k=True)):
        result = evaluate(subject, data, settings)
        assert 0 < result.numbers["top1"] < 100  # itself among the neighbours would give 100
        assert result.details["leave_one_out"] is True


def test_the_best_k_is_chosen_without_the_held_out_images(subject):
    data = open_data("shapes:120:16")
    result = evaluate(subject, data, dataclasses.replace(PAPER, best_k=True, ks=(1, 10, 100, 5000)))
    within, on_test = result.details["top1_within_bank_by_k"], result.details["top1_by_k"]
    assert list(on_test) == ["1", "10", "100", "119"]  # no more than there are others
    best = max(within, key=within.get)
    assert result.details["k"] == int(best)
    assert result.numbers["top1"] == on_test[best]


def test_at_most_so_many_images_of_every_class(subject):
    data = open_data("shapes:120:16")
    result = evaluate(subject, data, dataclasses.replace(PAPER, bank_images=50, query_images=30))
    assert (result.details["bank_images"], result.details["query_images"]) == (50, 30)


def test_neighbours_vote_at_the_temperature_that_was_asked_for(subject):
    data = open_data("shapes:120:16")
    bank, asked = (embed(subject.build(), source, subject.views) for source in (data.bank, data.test))
    found = []
    for temperature in (0.01, 10.0):
        settings = dataclasses.replace(PAPER, k=60, temperature=temperature)
        found.append(evaluate(subject, data, settings).numbers["top1"])
        by_hand = knn_accuracy(
            bank.features, bank.labels, asked.features, asked.labels, classes=10, k=60, temperature=temperature
        )
        assert found[-1] == pytest.approx(100 * by_hand.top1)
    assert found[0] != found[1]


@pytest.mark.parametrize("order", ["in turns", "sorted", "large and small"])
def test_a_part_of_the_images_has_its_share_of_every_class(order):
    source = open_data("shapes:1000:16").train
    assert source.labels[:12].tolist() == [*range(10), 0, 1]
    if order == "sorted":
        source = source.subset(np.argsort(source.labels, kind="stable"))
    if order == "large and small":
        source = source.subset(np.flatnonzero((source.labels < 5) | (np.arange(1000) % 20 < 10)))
    for most in (500, 200, 100):
        part = source.spread_over_classes(most)
        expected = np.bincount(source.labels) * most / len(source)
        assert len(part) == most
        assert np.abs(np.bincount(part.labels, minlength=10) - expected).max() <= 1
    assert source.spread_over_classes(0) is source.spread_over_classes(5000) is source


def test_features_belong_to_their_images(tiny):
    source = open_data("shapes:20:16").train
    views = tiny().plain
    embedding = embed(Mean(), source, views)
    assert embedding.images.tolist() == list(range(20))
    assert embedding.labels.tolist() == source.labels.tolist()
    pixels = source.image(7).double() / 255
    expected = (pixels.mean(dim=(1, 2)) - torch.tensor(views.mean).double()) / torch.tensor(views.std).double()
    torch.testing.assert_close(embedding.features[7].double(), expected, rtol=1e-4, atol=1e-4)


def test_features_larger_than_memory_are_the_same_features(tiny, tmp_path, monkeypatch, subject):
    source = open_data("shapes:50:16").train
    expected = embed(subject.build(), source, tiny().plain)
    monkeypatch.setattr(features, "BATCH", 4)
    monkeypatch.setattr(features, "SLAB_IMAGES", 12)
    for storage in ("", str(tmp_path)):
        found = embed(subject.build(), source, tiny().plain, storage=storage)
        torch.testing.assert_close(found.features, expected.features)
        assert found.images.tolist() == expected.images.tolist()
        assert found.labels.tolist() == expected.labels.tolist()
    assert not list(tmp_path.iterdir())  # the file has no name, and goes when it is not needed any more
    with pytest.raises(co2.UserError, match="Name another folder"):
        embed(subject.build(), source, tiny().plain, storage=str(tmp_path / "nowhere"))


def test_a_full_disk_is_told_when_the_features_are_stored(tiny, tmp_path, monkeypatch, subject):
    def refuse(file, offset, size):
        assert size == 4 * 50 * 128  # bytes of all features: 50 images, 128 numbers each
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    source = open_data("shapes:50:16").train
    with pytest.raises(co2.UserError, match=r"does not take them: No space left on device\. Make room.*--storage"):
        embed(subject.build(), source, tiny().plain, storage=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="nothing can be reserved here")
def test_the_room_for_features_is_taken_before_it_is_written_to(tmp_path):
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "from co2.evaluation.features import _room\n"
        f"_room(2**10, 2**8, {str(tmp_path)!r}).fill_(1)\n"  # as large as allowed
        f"_room(2**10, 2**9, {str(tmp_path)!r}).fill_(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1  # an exception; a mapping that cannot be written to ends by a signal
    assert "UserError: Features need 2.0 MiB" in done.stderr
    assert "line 3" not in done.stderr


class Diverged(torch.nn.Module):
    """The last image has a feature that is no number."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, images):
        features = images.flatten(1)
        features[-1, 5] = self.value
        return features


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_features_that_are_no_numbers_are_refused(tiny, value):
    source = open_data("shapes:5:16").train.subset([0, 3, 4])
    said = r"features of image shapes image 4 of 16 pixels are not finite.*diverged.*checkpoint"
    with pytest.raises(RunError, match=said):
        embed(Diverged(value), source, tiny().plain)


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        (knn, QUICK),
        (linear, linear.QUICK),
        (linear, dataclasses.replace(linear.PAPER, epochs=1)),
        (semi_supervised, dataclasses.replace(semi_supervised.QUICK, fractions=(0.5,), epochs=1)),
        (label_free, label_free.QUICK),
    ],
)
def test_every_protocol_says_that_a_backbone_has_diverged(subject, protocol, settings):
    weights = {
        name: torch.full_like(weight, torch.nan) for name, weight in subject.weights.items() if "num" not in name
    }
    broken = dataclasses.replace(subject, weights={**subject.weights, **weights})
    with pytest.raises(RunError, match=r"are not finite numbers: the run that made these weights has diverged"):
        protocol.evaluate(broken, open_data("shapes:60:16"), settings)


def test_unreadable_images_are_said_once_and_recorded(subject, tiny, monkeypatch):
    data = open_data("shapes:200:16")
    data = dataclasses.replace(data, bank=Torn(data.bank, {5, 7, 20, 21, 199}), test=Torn(data.test, {3}))
    listener = Listener()
    monkeypatch.setattr(features, "SLAB_IMAGES", 50)
    result = evaluate(subject, data, dataclasses.replace(QUICK, k=9), progress=listener)
    assert listener.lines == [
        "5 of 200 images could not be read and are left out: picture 5 (torn), picture 7 (torn), picture 20 (torn) "
        "and 2 more.",
        "1 of 1,000 images could not be read and are left out: picture 3 (torn).",
    ]
    assert result.details["unreadable"] == {f"picture {index}": "torn" for index in (5, 7, 20, 21, 199, 3)}
    assert result.details["bank_images"] == 195


def test_fewer_neighbours_than_asked_for_are_said_and_recorded(subject):
    data = open_data("shapes:120:16")
    for wanted, used in ((50, 6), (6, 6)):
        listener = Listener()
        result = evaluate(subject, data, dataclasses.replace(QUICK, k=wanted), progress=listener)
        assert result.details["k"] == used
        said = "knn: 6 neighbours vote instead of 50: no more than half of what an average class has among 120 images"
        assert [line.startswith(said) for line in listener.lines] == [True] * (wanted > used)


def test_mirrored_features_are_those_of_the_mirror_image(tiny):
    class FirstColumn(torch.nn.Module):
        def forward(self, images):
            return images[:, :, :, 0].mean(dim=2)

    class LastColumn(torch.nn.Module):
        def forward(self, images):
            return images[:, :, :, -1].mean(dim=2)

    source, views = open_data("shapes:5:16").train, tiny().plain
    mirrored = embed(FirstColumn(), source, views, mirrored=True).features
    torch.testing.assert_close(mirrored, embed(LastColumn(), source, views).features)


def test_what_cannot_be_classified_is_told_plainly(subject):
    data = open_data("shapes:20:16")
    with pytest.raises(co2.UserError, match=r"needs labels.*train/CLASS"):
        evaluate(subject, dataclasses.replace(data, bank=None))
    with pytest.raises(co2.UserError, match="single class"):
        evaluate(subject, dataclasses.replace(data, bank=data.bank.subset([0])))
    for images, problem in ((5, "none to learn from"), (1, "a single class")):
        with pytest.raises(
            co2.UserError, match=rf"{problem}.*larger --bank-images than {images}, or 0 for all 20"
        ) as told:
            evaluate(subject, data, dataclasses.replace(QUICK, bank_images=images))
        assert "Add training images" not in str(told.value)
    of_two = [index for index in range(20) if data.bank.labels[index] in (0, 1)]
    with pytest.raises(co2.UserError, match=r"none to learn from.*Add training images"):
        evaluate(
            subject,
            dataclasses.replace(data, bank=data.bank.subset(of_two)),
            dataclasses.replace(QUICK, bank_images=2),
        )
    first = int(data.bank.labels[0])
    others = {index for index in range(20) if data.bank.labels[index] != first}
    for test in (data.test, None):  # nobody votes for them; without a held-out part, nobody is left to ask
        torn = dataclasses.replace(data, bank=Torn(data.bank, others), test=test)
        with pytest.raises(co2.UserError, match=r"a single class.*cannot be read"):
            evaluate(subject, torn)
    with pytest.raises(co2.UserError, match="at least 1"):
        knn.KnnSettings(k=0)
