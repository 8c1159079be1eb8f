"""BYOL against a second one, written by hand in float64, and by what its paper says of it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from steps import fresh, noise

from co2.engine.trainer import Trainer
from co2.methods.byol import BYOL
from co2.views.loader import Batch

B, S, STEPS, RATE, DECAY, MOMENTUM = 8, 16, 4, 0.05, 5e-4, 0.9


def pictures(step):
    return torch.randint(0, 256, (2, B, 3, S, S), dtype=torch.uint8, generator=torch.Generator().manual_seed(step))


def test_training_is_that_of_the_plain_method(tiny):
    experiment = tiny(
        "byol-small",
        batch_size=B,
        method={"dimension": 8, "hidden": 16, "momentum": 0.6, "final_momentum": 1.0},
        optimisation={"learning_rate": RATE, "momentum": MOMENTUM, "weight_decay": DECAY},
    )
    trainer = Trainer(experiment, images=B, steps=STEPS, device=torch.device("cpu"))
    trainer.nets.double()
    feed = trainer._feed
    trainer._feed = lambda view, loaded: feed(view, loaded).double()
    online = copy.deepcopy(torch.nn.Sequential(trainer.nets["encoder"].backbone, trainer.nets["encoder"].head))
    predictor, target = copy.deepcopy(trainer.nets["predictor"]), copy.deepcopy(online)
    weights = [*online.parameters(), *predictor.parameters()]
    velocity = [torch.zeros_like(weight) for weight in weights]
    for step in range(STEPS):
        one, other = (trainer._feed(number, view) for number, view in enumerate(pictures(step)))
        with torch.no_grad():
            aims = [F.normalize(target(view)) for view in (one, other)]
        guesses = [F.normalize(predictor(online(view))) for view in (one, other)]
        loss = ((guesses[0] - aims[1]) ** 2).sum(1).mean() + ((guesses[1] - aims[0]) ** 2).sum(1).mean()
        gradients = torch.autograd.grad(loss, weights)
        rate = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        slowness = 1 - (1 - 0.6) * (math.cos(math.pi * step / STEPS) + 1) / 2
        with torch.no_grad():
            for weight, gradient, speed in zip(weights, gradients, velocity, strict=True):
                speed.mul_(MOMENTUM).add_(gradient + DECAY * weight)
                weight.sub_(rate * speed)
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.mul_(slowness).add_((1 - slowness) * fast)
        measured, cosine = trainer.train_step(Batch(torch.arange(B), tuple(pictures(step)), [], B)).tolist()
        assert measured == pytest.approx(loss.item(), rel=1e-6)
        assert cosine == pytest.approx(1 - loss.item() / 4, rel=1e-6)
    for ours, theirs in ((trainer.nets["encoder"], online), (trainer.nets["target"].encoder, target)):
        for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-7)  # the momentum is a float32 on the device


def test_the_momentum_rises_along_half_a_cosine():
    momentum = BYOL().schedules()["momentum"]
    assert [momentum(done) for done in (0.0, 0.5, 1.0)] == pytest.approx([0.996, 0.998, 1.0])


def test_a_target_that_is_followed_from_afar_is_the_closed_form(tiny):
    ours = fresh(tiny("byol-small", method={"dimension": 8, "hidden": 16}))
    with torch.no_grad():
        for parameter in ours.nets["encoder"].parameters():
            parameter.add_(1.0)
    before = [one.clone() for one in ours.nets["target"].parameters()]
    step = ours.step(noise(2), numbers={"momentum": torch.tensor(0.75)})
    for _ in range(5):
        ours.method.update(ours.nets, step, None)
    for start, online, slow in zip(
        before, ours.nets["encoder"].parameters(), ours.nets["target"].parameters(), strict=True
    ):
        torch.testing.assert_close(slow, online + 0.75**5 * (start - online))


def test_each_view_goes_through_batch_statistics_by_itself_and_no_gradient_reaches_the_target(tiny):
    ours = fresh(tiny("byol-small", method={"dimension": 8, "hidden": 16}))
    seen = []
    ours.nets["encoder"].register_forward_hook(lambda *call: seen.append(call[-1].detach()))
    first, second, other = noise(3)
    for views in ((first, second), (first, other)):
        ours.method.loss(ours.nets, ours.step(torch.stack(views))).loss.backward()
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[1], seen[3])
    assert all(one.grad is None for one in ours.nets["target"].parameters())
    assert all(one.grad is not None for name in ("encoder", "predictor") for one in ours.nets[name].parameters())


def test_the_two_views_differ_in_blur_and_solarisation():
    first, second = BYOL().views(224)
    assert (first.blur_probability, first.solarise_probability) == (1.0, 0.0)
    assert (second.blur_probability, second.solarise_probability) == (0.1, 0.2)
    assert first.jitter == second.jitter == (0.4, 0.4, 0.2, 0.1)
