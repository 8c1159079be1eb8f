import dataclasses
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torn_images import Listener, Torn

import co2
from co2.checkpoint import checkpoints
from co2.evaluation import knn
from co2.evaluation.label_free import PAPER, QUICK, LabelFreeSettings, correlations, evaluate
from co2.evaluation.subject import Subject, open_subject
from co2.evaluation.suite import Circumstances, evaluate_checkpoints
from co2.measures.ranking import spearman

SMALL = LabelFreeSettings(images=120, k=10)


def on(data):
    return Circumstances(data="given", opened={"given": data})


def test_presets():
    assert (PAPER.images, QUICK.images) == (10_000, 4096)
    assert PAPER.k == QUICK.k == 20


def test_no_labels_are_needed_and_none_are_used(pretrained, shapes):
    shapes = shapes(200)
    unlabelled = dataclasses.replace(shapes, bank=None, test=None)
    result = evaluate(pretrained, unlabelled, SMALL)
    assert result == evaluate(pretrained, shapes, SMALL)
    numbers = result.numbers
    assert 0 < numbers["alignment"] < 4
    assert -4.5 < numbers["uniformity"] < 0
    assert 1 < numbers["rankme"] < 120
    assert result.details["agreement_by_chance"] < numbers["neighbour_agreement"] < 100
    assert result.details["images"] == 120


def test_a_collapsed_backbone_is_seen(pretrained, shapes, monkeypatch):
    shapes = shapes(200)

    class Constant(torch.nn.Module):
        def forward(self, images):
            return torch.ones(len(images), 16) + 1e-6 * images.mean(dim=(1, 2, 3))[:, None]

    monkeypatch.setattr(Subject, "build", lambda self, classes=0: Constant())
    numbers = evaluate(pretrained, shapes, SMALL).numbers
    assert numbers["alignment"] == pytest.approx(0, abs=1e-6)
    assert numbers["uniformity"] == pytest.approx(0, abs=1e-5)
    assert numbers["rankme"] == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("count", [10, 22])
def test_few_images_have_neighbours_to_disagree_about(pretrained, shapes, count):
    listener = Listener()
    result = evaluate(pretrained, shapes(count), SMALL, progress=listener)
    assert result.details["agreement_by_chance"] < 30
    assert any(
        line.startswith(f"label-free: neighbours agree by the nearest {count // 4}, ") for line in listener.lines
    )


def test_views_and_plain_pictures_belong_to_the_same_images(pretrained, shapes, monkeypatch):
    shapes = shapes(200)

    # A backbone that sees only which picture it is: both views of an image must meet its plain picture.
    class MeanColour(torch.nn.Module):
        def forward(self, images):
            return F.normalize(images.mean(dim=(2, 3)), dim=1)

    monkeypatch.setattr(Subject, "build", lambda self, classes=0: MeanColour())
    result = evaluate(pretrained, shapes, SMALL)
    assert result.numbers["neighbour_agreement"] > 2 * result.details["agreement_by_chance"]


def test_over_the_checkpoints_of_a_run(pretrained_run, tmp_path, shapes):
    shapes = shapes(200)
    run = tmp_path / "run"
    shutil.copytree(pretrained_run, run)
    [last] = checkpoints(run)[-1:]
    state = torch.load(last, weights_only=True)
    for old in checkpoints(run):
        old.unlink()
    for step, blend in enumerate((1.0, 0.5, 0.0)):  # from random weights to the trained ones
        mixed = dict(state["nets"])
        random = open_subject(str(run)).random(seed=1)
        for key, value in random.weights.items():
            trained = state["nets"][f"encoder.backbone.{key}"]
            mixed[f"encoder.backbone.{key}"] = torch.lerp(trained, value, blend) if value.is_floating_point() else value
        torch.save(state | {"nets": mixed, "step": step}, run / "checkpoints" / f"step-{step:09d}.pt")
    results = evaluate_checkpoints(run, SMALL, on(shapes), "quick")
    assert [one.subject.split("step-")[1] for one in results] == [f"{step:09d}.pt" for step in range(3)]
    for one, path in zip(results, checkpoints(run), strict=True):
        assert one.numbers["knn_top1"] == knn.evaluate(open_subject(str(path)), shapes).numbers["top1"]
    followed = correlations(results)
    assert followed.keys() == {"alignment", "uniformity", "rankme", "neighbour_agreement"}
    accuracy = [one.numbers["knn_top1"] for one in results]
    assert followed["rankme"] == spearman([one.numbers["rankme"] for one in results], accuracy)
    for one in results:
        assert (one.data, one.preset, one.architecture["view_size"]) == ("given", "quick", 32)
        assert {"co2", "torch", "device", "seconds"} <= one.details["made_with"].keys()
    larger = evaluate_checkpoints(run, SMALL, on(dataclasses.replace(shapes, bank=None)), view_size=48)
    assert all(one.settings["view_size"] == 48 and "knn_top1" not in one.numbers for one in larger)


def test_checkpoints_are_judged_without_labels_where_knn_cannot_do_with_them(pretrained_run, tmp_path, shapes):
    data = shapes(200)
    run = tmp_path / "run"
    shutil.copytree(pretrained_run, run)
    [last] = checkpoints(run)[-1:]
    for step in range(3):
        shutil.copy(last, run / "checkpoints" / f"step-{step:09d}.pt")
    some = data.bank.subset(np.flatnonzero(data.bank.labels != 3))  # but held-out images of that class
    listener, seen = Listener(), []
    circumstances = dataclasses.replace(on(dataclasses.replace(data, bank=some)), progress=listener)
    results = evaluate_checkpoints(run, SMALL, circumstances, done=seen.append)
    assert len(results) >= 3
    assert seen == results
    assert all("knn_top1" not in one.numbers for one in results)
    assert [line for line in listener.lines if line.startswith("Without kNN accuracy: knn")]


def test_bad_input_is_told_plainly(pretrained, pretrained_run, tmp_path, shapes):
    shapes = shapes(200)
    with pytest.raises(co2.UserError, match="0 of the 3 checkpoints"):
        evaluate_checkpoints(tmp_path, SMALL, on(shapes))
    few = dataclasses.replace(shapes, train=shapes.train.subset([0, 1]))
    with pytest.raises(co2.UserError, match="only 2"):
        evaluate(pretrained, few, SMALL)
    torn = dataclasses.replace(shapes, train=Torn(shapes.train.subset(range(30)), set(range(2, 30))))
    with pytest.raises(co2.UserError, match=r"only 2 .*Give more images"):
        evaluate(pretrained, torn, SMALL)
    with pytest.raises(co2.UserError, match="at least"):
        LabelFreeSettings(k=0)


def test_unreadable_images_are_said_once_and_recorded(pretrained, shapes):
    shapes = shapes(30)
    listener = Listener()
    torn = dataclasses.replace(shapes, train=Torn(shapes.train, {4}))
    result = evaluate(pretrained, torn, dataclasses.replace(QUICK, k=5), progress=listener)
    assert listener.lines == ["1 of 30 images could not be read and are left out: picture 4 (torn)."]
    assert result.details["unreadable"] == {"picture 4": "torn"}
    assert result.details["images"] == 29
