"""SimSiam, by what its paper says of it and as a special case of BYOL."""

import pytest
import torch
from steps import fresh, noise
from torch import nn

from co2.engine.trainer import Trainer
from co2.methods.byol import BYOL
from co2.views.loader import Batch

SMALL = {"dimension": 8, "bottleneck": 4}


def norms(loss, nets):
    trained = [one for one in nets.parameters() if one.requires_grad]
    return torch.stack([one.norm() for one in torch.autograd.grad(loss, trained)])


def test_byol_that_does_not_lag_is_four_and_four_times_simsiam(tiny):
    """In value, and in gradients: nothing comes back through SimSiam's targets."""
    byol = fresh(tiny("byol-small", method={"dimension": 8, "hidden": 16}))
    step = byol.step(noise(2), numbers={"momentum": torch.tensor(0.0)})
    with torch.no_grad():
        for parameter in byol.nets["encoder"].parameters():
            parameter.add_(0.01)
    byol.method.update(byol.nets, step, None)
    simsiam = fresh(tiny("simsiam-small", method=SMALL)).method
    own = nn.ModuleDict({name: byol.nets[name] for name in ("encoder", "predictor")})
    theirs, ours = BYOL.loss(byol.method, byol.nets, step).loss, simsiam.loss(own, step).loss
    torch.testing.assert_close(theirs, 4 + 4 * ours)
    torch.testing.assert_close(norms(theirs, own), 4 * norms(ours, own), rtol=1e-4, atol=1e-6)


def test_the_loss_is_between_minus_one_and_one_and_minus_one_where_both_views_are_predicted(tiny):
    ours = fresh(tiny("simsiam-small", method=SMALL))
    ours.nets["predictor"] = nn.Identity()
    one = noise(1)[0]
    output = ours.method.loss(ours.nets, ours.step(torch.stack([one, one])))
    assert output.loss.item() == pytest.approx(-1.0, abs=1e-5)
    assert -1 <= ours.method.loss(ours.nets, ours.step(noise(2))).loss.item() <= 1


def test_the_spread_tells_directions_from_one_point(tiny):
    ours = fresh(tiny("simsiam-small", method=SMALL))
    same = noise(1)[:, :1].expand(2, 12, -1, -1, -1)
    ours.nets["encoder"].eval()
    assert ours.method.loss(ours.nets, ours.step(same)).metrics["spread"].item() == pytest.approx(0, abs=1e-3)
    ours.nets["encoder"].train()
    assert 0.5 < ours.method.loss(ours.nets, ours.step(noise(2))).metrics["spread"].item() < 1.5


def test_the_head_is_that_of_the_paper(tiny):
    head = fresh(tiny("simsiam-small", method={"dimension": 8, "layers": 3, "bottleneck": 4})).nets["encoder"].head
    kinds = [type(layer).__name__ for layer in head]
    one = ["Linear", "BatchNorm1d", "ReLU"]
    assert kinds == [*one, *one, "Linear", "BatchNorm1d"]
    assert not any(layer.bias is not None for layer in head if isinstance(layer, nn.Linear))
    assert not head[-1].affine


@pytest.mark.parametrize("steady", [True, False])
def test_the_predictors_rate_stays_while_that_of_the_rest_falls(tiny, steady):
    experiment = tiny("simsiam-small", method={**SMALL, "steady_predictor": steady}, batch_size=12)
    trainer = Trainer(experiment, images=12, steps=4, device=torch.device("cpu"))
    rates = []
    for _ in range(4):
        views = torch.randint(0, 256, (2, 12, 3, 16, 16), dtype=torch.uint8)
        trainer.train_step(Batch(torch.arange(12), tuple(views), [], 12))
        rates.append([group["lr"] for group in trainer.optimiser.param_groups])
    assert [len(one) for one in rates] == [2 if steady else 1] * 4
    assert rates[0][0] > rates[-1][0]
    if steady:
        assert len({one[1] for one in rates}) == 1
