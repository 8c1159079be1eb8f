"""One step, by its effect on the weights."""

import torch

from co2.engine.trainer import MEASURED, Trainer
from co2.views.loader import Batch

CPU = torch.device("cpu")
B = 12


def change_by_a_step(experiment, views):
    """How one step of plain gradient descent changes the encoder, and what the step reported."""
    plain = {"optimiser": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.1}
    trainer = Trainer(experiment.edit(optimisation=plain), 40, 10, CPU)
    before = {name: weight.detach().clone() for name, weight in trainer.mechanism.encoder.named_parameters()}
    measured = trainer.train_step(Batch(torch.arange(B), views, [], B))
    after = dict(trainer.mechanism.encoder.named_parameters())
    change = {name: after[name].detach() - before[name] for name in before}
    return change, dict(zip(MEASURED, measured.tolist(), strict=True))


def test_a_symmetric_step_adds_up_both_directions(tiny):
    """As in the MoCo authors' notebook, which is twice the mean: their learning rate is for the sum."""
    views = torch.randint(0, 256, (2, B, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    one_way = tiny(encoder={"groups": 1, "shuffle_keys": False})
    there, reported_there = change_by_a_step(one_way, views)
    back, reported_back = change_by_a_step(one_way, views.flip(0))
    both, reported = change_by_a_step(one_way.edit(negatives={"symmetric": True}), views)
    for name in both:
        torch.testing.assert_close(both[name], there[name] + back[name], rtol=1e-3, atol=1e-6)
    assert abs(reported["loss"] - reported_there["loss"] - reported_back["loss"]) < 1e-4
    mean = (reported_there["instance"] + reported_back["instance"]) / 2
    assert abs(reported["instance"] - mean) < 1e-5
