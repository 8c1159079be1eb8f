"""Barlow Twins against a second one, written by hand in float64, by closed forms, and in a run."""

import pytest
import torch
from steps import fresh
from torch import nn

import co2
from co2.cli import main
from co2.engine.trainer import Trainer
from co2.methods.barlow_twins import EPSILON, BarlowTwins
from co2.views.loader import Batch

# Eight images, four numbers each: of mean 0 and length 1, and none has to do with another.
INDEPENDENT = torch.tensor([[(-1.0) ** (image & bits).bit_count() for bits in (1, 2, 4, 7)] for image in range(8)])


def compared(tiny, first, second, **method):
    """Loss and metrics of embeddings [B, D] of two views."""
    given = fresh(tiny("barlow-twins-small", method={"dimension": first.shape[1], **method}))
    return given.method.loss({"encoder": nn.Identity()}, given.step(torch.stack([first, second])))


def by_hand(first, second, weight):
    """Equations 1 and 2, number by number."""
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(first.shape[1]):
        for j in range(first.shape[1]):
            a, b = first[:, i] - first[:, i].mean(), second[:, j] - second[:, j].mean()
            together = (a * b).mean() / ((a.pow(2).mean() + EPSILON) * (b.pow(2).mean() + EPSILON)) ** 0.5
            loss = loss + ((1 - together) ** 2 if i == j else weight * together**2)
    return loss


def test_loss_and_gradients_are_those_of_the_equations(tiny):
    generator = torch.Generator().manual_seed(0)
    views = torch.randn(2, 12, 5, dtype=torch.float64, generator=generator) * 3 + 1
    views.requires_grad_()
    ours = compared(tiny, *views, redundancy_weight=0.3, scale=0.5).loss
    theirs = 0.5 * by_hand(*views, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(one, views) for one in (ours, theirs)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("first", "second", "loss", "agreement", "redundancy"),
    [
        (INDEPENDENT, INDEPENDENT, 0, 1, 0),
        (INDEPENDENT, -INDEPENDENT, 4 * 4, -1, 0),
        (INDEPENDENT, INDEPENDENT[:, [1, 0, 3, 2]], 4 + 0.01 * 4, 0, (4 / 12) ** 0.5),
        (INDEPENDENT[:, :1].expand(8, 4), INDEPENDENT[:, :1].expand(8, 4), 0.01 * 12, 1, 1),
        (torch.ones(8, 4), torch.ones(8, 4), 4, 0, 0),
    ],
    ids=["independent", "opposite", "exchanged", "repeated", "collapsed"],
)
def test_closed_forms(tiny, first, second, loss, agreement, redundancy):
    found = compared(tiny, first, second, redundancy_weight=0.01)
    assert found.loss.item() == pytest.approx(loss, abs=2e-4)
    assert found.metrics["agreement"].item() == pytest.approx(agreement, abs=1e-4)
    assert found.metrics["redundancy"].item() == pytest.approx(redundancy, abs=1e-4)


def test_what_a_number_is_measured_in_makes_no_difference(tiny):
    first, second = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0))
    unit = torch.tensor([0.5, 1.0, 2.0, 30.0, 400.0])
    torch.testing.assert_close(
        compared(tiny, first, second).loss, compared(tiny, unit * first + unit, second).loss, rtol=1e-3, atol=1e-4
    )


def test_bfloat16_outside_does_not_round_the_correlations(tiny):
    views = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        inside = compared(tiny, *views).loss
    assert torch.equal(inside, compared(tiny, *views).loss)


def test_the_recipe_is_that_of_the_paper():
    whole = co2.recipes.barlow_twins()
    rate, method = whole.optimisation, whole.method
    assert (whole.epochs, whole.batch_size, method.dimension, method.layers) == (1000, 2048, 8192, 3)
    assert method.scale * rate.base_learning_rate == pytest.approx(0.0048)  # of biases and norms
    assert rate.weight_decay == pytest.approx(method.scale * 1.5e-6)
    assert [view.solarise_probability for view in method.views(224)] == [0.0, 0.2]


def test_with_lars_the_scale_is_a_learning_rate_of_biases_and_norms_alone(tiny):
    moved = []
    for scale in (1.0, 0.25):
        trainer = Trainer(
            tiny(
                "barlow-twins-small",
                method={"dimension": 8, "scale": scale},
                optimisation={
                    "optimiser": "lars", "learning_rate": 0.2, "weight_decay": 0.1 * scale, "decay": "matrices",
                },
            ),
            images=16, steps=4, device=torch.device("cpu"),
        )  # fmt: skip
        before = [one.detach().clone() for one in trainer.nets.parameters()]
        views = torch.randint(0, 256, (2, 16, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        trainer.train_step(Batch(torch.arange(16), tuple(views), [], 16))
        moved.append([one.detach() - old for one, old in zip(trainer.nets.parameters(), before, strict=True)])
    for whole, scaled in zip(*moved, strict=True):
        expected = whole if whole.dim() > 1 else 0.25 * whole
        torch.testing.assert_close(scaled, expected, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"dimension": 1}, {"layers": 1}, {"scale": 0.0}, {"redundancy_weight": -1.0}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(co2.UserError, match=next(iter(wrong))):
        BarlowTwins(**wrong)


def test_a_run_agrees_more_and_does_not_collapse(tmp_path, rows):
    out = tmp_path / "run"
    words = "--data shapes:96:16 --epochs 8 --batch-size 32 --size 16 --device cpu --workers 0 --method.dimension 16"
    words += " --network.backbone co2/resnet10-narrow --monitoring.log-every 1 --monitoring.evaluate-every 8"
    assert main(["pretrain", "barlow-twins-small", "--out", str(out), *words.split()]) == 0
    steps = rows(out)
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert steps[-1]["agreement"] > steps[0]["agreement"] + 0.1
    start, end = rows(out, "epoch")
    assert end["effective_rank"] >= start["effective_rank"]
    assert end["mean_norm"] < 0.6 < start["mean_norm"]
