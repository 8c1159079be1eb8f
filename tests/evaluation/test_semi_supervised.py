import dataclasses

import numpy as np
import pytest
import torch
from torn_images import Listener, Torn

import co2
from co2.evaluation import semi_supervised
from co2.evaluation.features import random_views
from co2.evaluation.semi_supervised import (
    PAPER,
    PAPER_V1,
    QUICK,
    SemiSupervisedSettings,
    _judge,
    evaluate,
    parameter_groups,
)

SHORT = dataclasses.replace(QUICK, fractions=(0.1,), epochs=25, milestones=(15, 20))


def test_the_papers_numbers():
    # Appendix, "Semi-Supervised Learning"; how to train from scratch it does not say.
    assert dataclasses.asdict(PAPER) == {
        "fractions": (0.01, 0.1),
        "epochs": 20,
        "learning_rate": 0.01,
        "head_learning_rate": 1.0,
        "milestones": (12, 16),
        "decay": 0.2,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "batch_size": 256,
        "crop_scale": (0.08, 1.0),
        "baseline": True,
        "baseline_epochs": 100,
        "baseline_learning_rate": 0.1,
    }
    assert dataclasses.replace(PAPER, weight_decay=5e-4) == PAPER_V1


def test_pretraining_helps_and_the_subset_is_in_the_record(pretrained, untrained, shapes):
    shapes = shapes(600)
    learnt, not_learnt = (evaluate(subject, shapes, SHORT) for subject in (pretrained, untrained))
    assert learnt.numbers["top1_10%"] > not_learnt.numbers["top1_10%"] + 3
    assert learnt.numbers["top5_10%"] > not_learnt.numbers["top5_10%"]
    subset = learnt.details["subsets"]["10%"]
    assert subset == not_learnt.details["subsets"]["10%"]  # the same labels for both
    assert subset["images"] == len(subset["indices"]) == 60
    counts = np.bincount(shapes.train.labels[subset["indices"]])
    per_class = np.bincount(shapes.train.labels)
    assert counts.tolist() == np.round(per_class * 0.1).astype(int).tolist()
    curve = learnt.details["loss_by_epoch"]["10%"]
    assert len(curve) == 25


def test_backbone_and_head_learn_at_rates_of_their_own(pretrained, shapes, monkeypatch):
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([group["lr"] for group in self.param_groups])
            assert {(group["momentum"], group["weight_decay"]) for group in self.param_groups} == {(0.9, 5e-4)}
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "SGD", Watched)
    tiny = dataclasses.replace(PAPER_V1, fractions=(0.02,), epochs=3, milestones=(1, 2), baseline=False)
    evaluate(pretrained, shapes(600), tiny)
    assert np.allclose(seen, [[0.01, 1.0], [0.002, 0.2], [0.0004, 0.04]])  # one step in each epoch
    network = pretrained.build(classes=10)
    backbone, head = parameter_groups(network, pretrained, 0.01, 1.0)
    assert {id(parameter) for parameter in head["params"]} == {id(network.fc.weight), id(network.fc.bias)}
    assert len(backbone["params"]) + 2 == len(list(network.parameters()))


def test_all_of_the_network_is_tuned_on_random_crops_and_their_mirror_images(pretrained, shapes, monkeypatch):
    shown = []

    def watched(source, views, **rest):
        shown.append(views)
        return random_views(source, views, **rest)

    networks = []

    def judge(network, *rest):
        networks.append(network)
        return _judge(network, *rest)

    monkeypatch.setattr(semi_supervised, "random_views", watched)
    monkeypatch.setattr(semi_supervised, "_judge", judge)
    evaluate(pretrained, shapes(300), dataclasses.replace(SHORT, epochs=1, crop_scale=(0.3, 0.9)))
    assert shown == [dataclasses.replace(pretrained.views, crop_scale=(0.3, 0.9))]
    assert shown[0].flip_probability == 0.5
    [network] = networks
    tuned = network.state_dict()
    moved = [key for key, value in pretrained.weights.items() if not torch.equal(value, tuned[key])]
    assert moved == list(pretrained.weights)  # every weight, and the batch statistics too


def test_from_scratch_on_the_same_labels(pretrained, shapes, monkeypatch):
    settings = dataclasses.replace(
        SHORT, fractions=(0.02, 0.05), epochs=2, milestones=(1,), baseline=True, baseline_epochs=4
    )
    before = {key: value.clone() for key, value in pretrained.weights.items()}
    result = evaluate(pretrained, shapes(300), settings)
    assert all(torch.equal(before[key], pretrained.weights[key]) for key in before)
    for share in ("2%", "5%"):
        for name in ("top1", "top5"):
            assert {f"{name}_{share}", f"scratch_{name}_{share}"} <= result.numbers.keys()
        assert len(result.details["loss_by_epoch"][f"scratch_{share}"]) == 4

    begun = []

    def watched(training, subject, subset, *rest):
        labelled = [subset.describe(index) for index in range(len(subset))]
        begun.append((training, subject.drawn_from, labelled))
        return run(training, subject, subset, *rest)

    run = semi_supervised._Training.run
    monkeypatch.setattr(semi_supervised._Training, "run", watched)
    assert evaluate(pretrained, shapes(300), settings, seed=3) == evaluate(pretrained, shapes(300), settings, seed=3)
    tuning, scratch = begun[:2]
    assert (tuning[1], scratch[1]) == (None, 3)  # weights drawn from the seed
    assert tuning[2] == scratch[2]
    rates = [(one.learning_rate, one.head_learning_rate, one.milestones) for one, _, _ in (tuning, scratch)]
    assert rates == [(0.0025, 0.25, (1,)), (0.1, 0.1, (2,))]


def test_unreadable_images_are_said_once_and_recorded(pretrained, shapes):
    data = shapes(100)
    data = dataclasses.replace(data, bank=Torn(data.bank, set(range(0, 100, 9))), test=Torn(data.test, {3}))
    settings = dataclasses.replace(
        SHORT, fractions=(0.1, 1.0), epochs=2, milestones=(1,), baseline=True, baseline_epochs=2
    )
    listener = Listener()
    result = evaluate(pretrained, data, settings, progress=listener)
    few = [index for index in result.details["subsets"]["10%"]["indices"] if index % 9 == 0]
    assert 0 < len(few) < 12
    assert [line.partition(": ")[0] for line in listener.lines] == [
        f"{len(few)} of 10 images could not be read and are replaced by others",
        "1 of 300 images could not be read and are left out",
        f"{12 - len(few)} of 100 images could not be read and are replaced by others",  # those that are new
    ]
    assert result.details["unreadable"] == {f"picture {index}": "torn" for index in [3, *range(0, 100, 9)]}


def test_that_a_share_of_the_labels_is_a_larger_one_is_said(pretrained, shapes):
    """Of ten classes a hundredth of a hundred images would be one image."""
    listener = Listener()
    settings = dataclasses.replace(SHORT, fractions=(0.01, 0.2), epochs=1, milestones=())
    evaluate(pretrained, shapes(100), settings, progress=listener)
    (line,) = listener.lines
    assert line == "semi-supervised: 1% of the labels are 10 of 100 images here, 10.0%: at least one of each class."


def test_the_only_image_of_a_class_is_not_put_aside(pretrained, shapes):
    data = shapes(60)
    labels = data.bank.labels
    one_of_the_first_class = [np.flatnonzero(labels == 0)[0], *np.flatnonzero(labels != 0)]
    data = dataclasses.replace(data, bank=data.bank.subset(one_of_the_first_class), test=None)
    result = evaluate(pretrained, data, dataclasses.replace(SHORT, epochs=1))
    assert result.details["held_out_by_seed"] is True


def test_bad_input_is_told_plainly(pretrained, shapes):
    shapes = shapes(600)
    with pytest.raises(co2.UserError, match=r"needs labels.*train/CLASS"):
        evaluate(pretrained, dataclasses.replace(shapes, bank=None))
    source = shapes.bank
    of_one = source.subset(np.flatnonzero(source.labels == 2))
    with pytest.raises(co2.UserError, match=r"semi-supervised.*a single class \('"):
        evaluate(pretrained, dataclasses.replace(shapes, bank=of_one))
    not_nine = source.subset(np.flatnonzero(source.labels != 9))
    with pytest.raises(co2.UserError, match=rf"held-out images of '{source.classes[9]}', but none to learn from"):
        evaluate(pretrained, dataclasses.replace(shapes, bank=not_nine))
    with pytest.raises(co2.UserError, match="fractions"):
        SemiSupervisedSettings(fractions=(0.0,))
    with pytest.raises(co2.UserError, match="diverged"):
        evaluate(pretrained, shapes, dataclasses.replace(SHORT, epochs=3, learning_rate=1e30))
    one_step = dataclasses.replace(SHORT, fractions=(0.1,), epochs=1, batch_size=600, learning_rate=1e30)
    with pytest.raises(co2.UserError, match=r"the training diverged.*lower --learning-rate"):
        evaluate(pretrained, shapes, one_step)
