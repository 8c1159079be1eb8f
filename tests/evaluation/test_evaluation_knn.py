import dataclasses

import pytest
import torch

import co2
from co2.data.open import open_data
from co2.engine.pretrain import pretrain
from co2.evaluation import features, knn
from co2.evaluation.knn import PAPER, QUICK, embed, evaluate
from co2.evaluation.subject import open_subject


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


def test_features_belong_to_their_images(tiny):
    source = open_data("shapes:20:16").train
    views = tiny().views
    embedding = embed(Mean(), source, views)
    assert embedding.images.tolist() == list(range(20))
    assert embedding.labels.tolist() == source.labels.tolist()
    pixels = source.image(7).double() / 255
    expected = (pixels.mean(dim=(1, 2)) - torch.tensor(views.mean).double()) / torch.tensor(views.std).double()
    torch.testing.assert_close(embedding.features[7].double(), expected, rtol=1e-4, atol=1e-4)


def test_features_larger_than_memory_are_the_same_features(tiny, tmp_path, monkeypatch, subject):
    source = open_data("shapes:50:16").train
    expected = embed(subject.build(), source, tiny().views)
    monkeypatch.setattr(features, "BATCH", 4)
    monkeypatch.setattr(features, "SLAB_IMAGES", 12)
    for storage in ("", str(tmp_path)):
        found = embed(subject.build(), source, tiny().views, storage=storage)
        torch.testing.assert_close(found.features, expected.features)
        assert found.images.tolist() == expected.images.tolist()
        assert found.labels.tolist() == expected.labels.tolist()
    assert not list(tmp_path.iterdir())  # the file has no name, and goes when it is not needed any more
    with pytest.raises(co2.UserError, match="Name another folder"):
        embed(subject.build(), source, tiny().views, storage=str(tmp_path / "nowhere"))


def test_mirrored_features_are_those_of_the_mirror_image(tiny):
    class FirstColumn(torch.nn.Module):
        def forward(self, images):
            return images[:, :, :, 0].mean(dim=2)

    class LastColumn(torch.nn.Module):
        def forward(self, images):
            return images[:, :, :, -1].mean(dim=2)

    source, views = open_data("shapes:5:16").train, tiny().views
    mirrored = embed(FirstColumn(), source, views, mirrored=True).features
    torch.testing.assert_close(mirrored, embed(LastColumn(), source, views).features)


def test_what_cannot_be_classified_is_told_plainly(subject):
    data = open_data("shapes:20:16")
    with pytest.raises(co2.UserError, match=r"needs labels.*train/CLASS"):
        evaluate(subject, dataclasses.replace(data, bank=None))
    with pytest.raises(co2.UserError, match="single class"):
        evaluate(subject, dataclasses.replace(data, bank=data.bank.subset([0])))
    of_two = [index for index in range(20) if data.bank.labels[index] in (0, 1)]
    with pytest.raises(co2.UserError, match="none to learn from"):
        evaluate(subject, dataclasses.replace(data, bank=data.bank.subset(of_two)))
    with pytest.raises(co2.UserError, match="at least 1"):
        knn.KnnSettings(k=0)
