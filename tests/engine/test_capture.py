"""A captured step gives what the step as written gives. All of it needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from co2 import recipes
from co2.data.source import ArraySource
from co2.engine.capture import WARM_UP, CapturedStep
from co2.engine.trainer import Trainer
from co2.experiment import Experiment
from co2.views.choose_input import choose_input
from co2.views.loader import Batch
from co2.views.view import View

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
IMAGES, BATCH = 200, 64


def small(recipe: str, step: str, **changes: object) -> Experiment:
    """The recipe with a term that counts from the first step on, and steps small enough to compare."""
    experiment = recipes.get(recipe).edit(
        batch_size=BATCH,
        epochs=5,
        execution={"step": step},
        method={"ramp_up": 0.0},
        optimisation={"base_learning_rate": 0.06},
    )
    return experiment.edit(**changes)


def train(experiment: Experiment, epochs: int = 4) -> tuple[Tensor, Trainer]:
    """Epochs of four steps each, the last of them a short one: what each step reports [steps, 5], and the trainer."""
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)
    loader, _ = choose_input(
        ArraySource("noise", pixels),
        experiment.views(),
        batch_size=BATCH,
        seed=experiment.seed,
        workers=0,
        device=DEVICE,
        smallest=2 * experiment.network.groups,
    )

    def views(epoch: int) -> tuple[View, ...]:
        return experiment.views(epoch)

    told: list[str] = []
    trainer = Trainer(experiment, IMAGES, 100, DEVICE, tell=told.append)
    measured = [
        trainer.train_step(batch) for epoch in range(epochs) for batch in loader.epoch(epoch, views=views(epoch))
    ]
    assert not told
    return torch.stack(measured).cpu(), trainer


@pytest.mark.parametrize("recipe", ["co2-small", "co2-simclr-small", "co2-insdisc-small"])
@pytest.mark.parametrize("optimiser", ["sgd", "lars"])
def test_the_same_curve_as_the_step_as_written(recipe: str, optimiser: str) -> None:
    changes = {"optimisation": {"optimiser": optimiser, "warm_up": 0.5}}
    eager, one = train(small(recipe, "eager", **changes))
    captured, other = train(small(recipe, "captured", **changes))
    again, _ = train(small(recipe, "eager", **changes))
    assert len(captured) == 16
    # bfloat16 and the order of sums inside a library's kernels are the only differences; they grow from step to step.
    noise = (eager - again).abs()[:, :3]
    apart = (eager - captured).abs()[:, :3]
    torch.testing.assert_close(captured[:, :3], eager[:, :3], rtol=0.01, atol=0.01 + 2 * float(noise.max()))
    assert apart[:WARM_UP].max() <= noise[:WARM_UP].max() + 1e-3
    assert other.step == one.step == 16
    if recipe == "co2-small":
        assert other.nets["queue"].written == one.nets["queue"].written == 4 * IMAGES


def test_views_that_grow_are_captured_size_by_size() -> None:
    changes = {"epochs": 6, "earlier_sizes": (16, 24)}
    eager, _ = train(small("co2-small", "eager", **changes), epochs=6)
    captured, trainer = train(small("co2-small", "captured", **changes), epochs=6)
    again, _ = train(small("co2-small", "eager", **changes), epochs=6)
    noise = float((eager - again).abs()[:, :3].max())
    torch.testing.assert_close(captured[:, :3], eager[:, :3], rtol=0.01, atol=0.01 + 2 * noise)
    assert trainer._captured is not None
    recorded = {shapes[1:3] for shapes in trainer._captured._recorded}  # of the views; short batches come too seldom
    assert recorded == {((BATCH, 3, size, size),) * 2 for size in (16, 24, 32)}


def test_a_rehearsed_step_leaves_no_trace_on_a_gpu() -> None:
    experiment = small("co2-small", "captured", execution={"step": "captured", "deterministic": True})
    pixels = np.random.default_rng(0).integers(0, 256, (2, BATCH, 3, 32, 32), dtype=np.uint8)
    batch = Batch(torch.arange(BATCH), torch.from_numpy(pixels), [], BATCH)
    larger = Batch(torch.arange(BATCH), torch.zeros(2, BATCH, 3, 48, 48, dtype=torch.uint8), [], BATCH)
    ours, theirs = (Trainer(experiment, IMAGES, 100, DEVICE) for _ in range(2))
    ours.rehearse(larger)
    for _ in range(2 * WARM_UP):  # as written, and captured
        assert torch.equal(ours.train_step(batch), theirs.train_step(batch))
    ours_now, theirs_now = ours.nets.state_dict(), theirs.nets.state_dict()
    assert all(torch.equal(ours_now[name], theirs_now[name]) for name in theirs_now)


def test_the_learning_rate_reaches_a_captured_step() -> None:
    """A rate of nothing changes nothing, although the step was recorded with another."""
    _, trainer = train(small("moco-small", "captured"), epochs=2)
    before = trainer.nets["encoder"].backbone.conv1.weight.clone()
    trainer.learning_rate = lambda network="": 0.0
    batch_of = train(small("moco-small", "eager"), epochs=1)  # another trainer, only to use the GPU in between
    assert batch_of[1].step == 4
    pixels = torch.randint(0, 256, (2, BATCH, 3, 32, 32), dtype=torch.uint8, device=DEVICE)
    from co2.views.loader import Batch

    trainer.train_step(Batch(torch.arange(BATCH, device=DEVICE), pixels, [], BATCH))
    assert torch.equal(trainer.nets["encoder"].backbone.conv1.weight, before)


def test_the_weight_of_the_consistency_term_reaches_a_captured_step() -> None:
    """It rises from step to step, although the step was recorded with the weight of one of them."""
    experiment = small("co2-small", "captured", method={"ramp_up": 0.2})
    measured, trainer = train(experiment)
    assert trainer._captured is not None
    loss, instance, consistency = measured[:, :3].unbind(1)  # [16] each
    weights = [experiment.method.schedules()["alpha"](step / trainer.steps) for step in range(16)]
    torch.testing.assert_close(loss, instance + torch.tensor(weights) * consistency, rtol=1e-4, atol=1e-4)
    assert len(set(weights)) == 16


def test_a_state_goes_from_captured_to_eager_and_back() -> None:
    _, trainer = train(small("co2-small", "captured"))
    state = trainer.state()
    for step in ("eager", "captured"):
        other = Trainer(small("co2-small", step), IMAGES, 100, DEVICE)
        other.restore(state)
        assert other.step == trainer.step
        assert other.optimiser.param_groups[0]["lr"] is other.rates[""]


def test_a_step_that_cannot_be_captured_is_taken_as_it_is() -> None:
    told: list[str] = []

    def waits_for_the_gpu(numbers: Tensor) -> Tensor:
        return numbers * numbers.sum().item()

    step = CapturedStep(waits_for_the_gpu, told.append)
    for number in range(WARM_UP + 3):
        numbers = torch.full((2,), float(number), device=DEVICE)
        assert step(numbers).tolist() == [2.0 * number * number] * 2
    assert len(told) == 1
    assert "cannot be captured" in told[0]


def test_each_shape_has_its_own_recording() -> None:
    step = CapturedStep(lambda numbers: numbers * 2)
    for number in range(2 * WARM_UP + 2):
        for size in (2, 3):
            numbers = torch.full((size,), float(number), device=DEVICE)
            assert step(numbers).tolist() == [2.0 * number] * size
    assert len(step._recorded) == 2
