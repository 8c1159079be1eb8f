import dataclasses

import numpy as np
import pytest
import torch

import co2
from co2.evaluation.semi_supervised import (
    PAPER,
    PAPER_V1,
    QUICK,
    SemiSupervisedSettings,
    evaluate,
    parameter_groups,
)

SHORT = dataclasses.replace(QUICK, fractions=(0.1,), epochs=25, milestones=(15, 20))


def test_the_papers_numbers():
    # Appendix, "Semi-Supervised Learning".
    assert (PAPER.fractions, PAPER.epochs, PAPER.batch_size) == ((0.01, 0.1), 20, 256)
    assert (PAPER.learning_rate, PAPER.head_learning_rate) == (0.01, 1.0)
    assert (PAPER.milestones, PAPER.decay, PAPER.momentum) == ((12, 16), 0.2, 0.9)
    assert (PAPER.weight_decay, PAPER_V1.weight_decay) == (1e-4, 5e-4)
    assert PAPER.crop_scale == (0.08, 1.0)


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
    tiny = dataclasses.replace(PAPER_V1, fractions=(0.02,), epochs=3, milestones=(1, 2))
    evaluate(pretrained, shapes(600), tiny)
    assert np.allclose(seen, [[0.01, 1.0], [0.002, 0.2], [0.0004, 0.04]])  # one step in each epoch
    network = pretrained.build(classes=10)
    backbone, head = parameter_groups(network, pretrained, 0.01, 1.0)
    assert {id(parameter) for parameter in head["params"]} == {id(network.fc.weight), id(network.fc.bias)}
    assert len(backbone["params"]) + 2 == len(list(network.parameters()))


def test_from_scratch_on_the_same_labels(pretrained, shapes):
    settings = dataclasses.replace(
        SHORT, fractions=(0.02, 0.05), epochs=2, milestones=(1,), baseline=True, baseline_epochs=4
    )
    result = evaluate(pretrained, shapes(300), settings)
    for share in ("2%", "5%"):
        for name in ("top1", "top5"):
            assert {f"{name}_{share}", f"scratch_{name}_{share}"} <= result.numbers.keys()
        assert len(result.details["loss_by_epoch"][f"scratch_{share}"]) == 4
    assert evaluate(pretrained, shapes(300), settings) == result
    before = {key: value.clone() for key, value in pretrained.weights.items()}
    assert all(torch.equal(before[key], pretrained.weights[key]) for key in before)


def test_bad_input_is_told_plainly(pretrained, shapes):
    shapes = shapes(600)
    with pytest.raises(co2.UserError, match=r"needs labels.*train/CLASS"):
        evaluate(pretrained, dataclasses.replace(shapes, bank=None))
    with pytest.raises(co2.UserError, match="fractions"):
        SemiSupervisedSettings(fractions=(0.0,))
    with pytest.raises(co2.UserError, match="diverged"):
        evaluate(pretrained, shapes, dataclasses.replace(SHORT, epochs=3, learning_rate=1e30))
