"""One step, by its effect on the weights."""

import copy
import math

import pytest
import torch

from co2.checkpoint import CheckpointWriter, checkpoints, read_checkpoint
from co2.engine.distributed import Processes
from co2.engine.trainer import Trainer, check_execution, measured, precision_on
from co2.errors import UserError
from co2.experiment import Execution
from co2.machine.process import Launch
from co2.networks.parts import Parts
from co2.views.loader import Batch

CPU = torch.device("cpu")
B = 12


def change_by_a_step(experiment, views):
    """How one step of plain gradient descent changes the encoder, and what the step reported."""
    plain = {"optimiser": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.1}
    trainer = Trainer(experiment.edit(optimisation=plain), 40, 10, CPU)
    before = {name: weight.detach().clone() for name, weight in trainer.nets["encoder"].named_parameters()}
    found = trainer.train_step(Batch(torch.arange(B), views[: len(experiment.views())], [], B))
    after = dict(trainer.nets["encoder"].named_parameters())
    change = {name: after[name].detach() - before[name] for name in before}
    return change, dict(zip(measured(experiment.method), found.tolist(), strict=True))


def test_a_symmetric_step_adds_up_both_directions(tiny):
    """As in the MoCo authors' notebook, which is twice the mean: their learning rate is for the sum."""
    views = torch.randint(0, 256, (2, B, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    one_way = tiny(network={"groups": 1}, method={"shuffle": False})
    there, reported_there = change_by_a_step(one_way, views)
    back, reported_back = change_by_a_step(one_way, views.flip(0))
    both, reported = change_by_a_step(one_way.edit(method={"symmetric": True}), views)
    for name in both:
        torch.testing.assert_close(both[name], there[name] + back[name], rtol=1e-3, atol=1e-6)
    assert abs(reported["loss"] - reported_there["loss"] - reported_back["loss"]) < 1e-4
    mean = (reported_there["instance"] + reported_back["instance"]) / 2
    assert abs(reported["instance"] - mean) < 1e-5


@pytest.mark.parametrize(
    ("recipe", "objective"),
    [("co2-simclr-small", {"detach_target": True}), ("demo-moco", {"label_smoothing": 0.1})],
    ids=["detached target", "label smoothing"],
)
def test_what_the_objective_is_told_has_an_effect_on_a_step(tiny, recipe, objective):
    views = torch.randint(0, 256, (2, B, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    strong = {"alpha": 1.0} if "co2" in recipe else {}
    (plain, _), (told, _) = (
        change_by_a_step(tiny(recipe, method={**strong, **more}), views) for more in ({}, objective)
    )
    assert any(not torch.allclose(plain[name], told[name], rtol=1e-3, atol=1e-8) for name in plain)


@pytest.mark.parametrize("recipe", ["demo-co2", "co2-simclr-small", "co2-insdisc-small"])
def test_in_bfloat16_encoders_compute_in_it_and_everything_else_does_not(tiny, recipe):
    """And it is the same step but for rounding: the weights change nearly alike. (In one group of batch statistics:
    among three images of noise variances are so small that rounding makes a large difference.)"""
    views = torch.randint(0, 256, (2, B, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    together = {"network": {"groups": 1}, "method": {"shuffle": False} if recipe == "demo-co2" else {}}
    changes = {}
    for precision in ("float32", "bfloat16"):
        experiment = tiny(recipe, negatives=30, execution={"precision": precision}, **together)
        change, reported = change_by_a_step(experiment, views)
        changes[precision] = torch.cat([one.flatten() for one in change.values()]), reported["loss"]

        trainer = Trainer(experiment, 40, 10, CPU)
        computed_in = set()
        first_layer = trainer.nets["encoder"].backbone.conv1
        first_layer.register_forward_hook(lambda *call, seen=computed_in: seen.add(call[-1].dtype))
        trainer.train_step(Batch(torch.arange(B), views[: len(experiment.views())], [], B))
        assert computed_in == {getattr(torch, precision)}
        kept = trainer.nets.state_dict().values()
        assert {tensor.dtype for tensor in kept if tensor.is_floating_point()} == {torch.float32}
    (exact, exact_loss), (rounded, rounded_loss) = changes.values()
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.95
    assert not torch.equal(exact, rounded)
    assert rounded_loss == pytest.approx(exact_loss, rel=0.02)


def test_in_which_precision_a_device_computes():
    gpu = torch.device("cuda")
    assert precision_on(CPU, "auto") == precision_on(CPU, "float32") == torch.float32
    assert precision_on(CPU, "bfloat16") == precision_on(gpu, "auto") == precision_on(gpu, "bfloat16") == torch.bfloat16
    check_execution(Execution(precision="bfloat16"), gpu)
    with pytest.raises(UserError, match="On a GPU encoders compute in bfloat16"):
        check_execution(Execution(precision="float32"), gpu)


@pytest.mark.parametrize("ramp_up", [0.0, 0.5])
def test_the_consistency_term_weighs_what_its_schedule_says_in_every_step(tiny, ramp_up):
    objective = {"alpha": 2.0, "ramp_up": ramp_up}
    trainer = Trainer(tiny(method=objective), 40, 6, CPU)
    views = torch.randint(0, 256, (2, B, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for step in range(6):
        risen = step / 6 / ramp_up if step < 6 * ramp_up else 1.0
        found = trainer.train_step(Batch(torch.arange(B), views, [], B))
        loss, instance, consistency = found[:3].tolist()
        assert consistency > 0
        assert loss - instance == pytest.approx(2.0 * math.exp(-5 * (1 - risen) ** 2) * consistency, rel=1e-4, abs=1e-5)


def assert_same_state(ours, theirs):
    """Bit for bit what a checkpoint would hold."""
    (ours, our_optimiser), (theirs, their_optimiser) = ((state, state["optimiser"]) for state in (ours, theirs))
    assert all(ours[name] == theirs[name] for name in ("experiment", "images", "step"))
    assert our_optimiser["param_groups"] == their_optimiser["param_groups"]
    for one, other in ((ours["nets"], theirs["nets"]), (our_optimiser["state"], their_optimiser["state"])):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["demo-co2", "co2-insdisc-small"])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_rehearsed_step_leaves_no_trace(tiny, recipe, taken):
    """Neither in what is saved nor in what comes after: at the start of a run, and of one that goes on."""
    experiment = tiny(recipe, negatives=30)
    count = len(experiment.views())
    generator = torch.Generator().manual_seed(0)
    batches = [
        Batch(
            torch.arange(B), torch.randint(0, 256, (count, B, 3, 16, 16), dtype=torch.uint8, generator=generator), [], B
        )
        for _ in range(4)
    ]
    larger = Batch(torch.arange(B), torch.zeros(count, B, 3, 24, 24, dtype=torch.uint8), [], B)
    ours, theirs = (Trainer(experiment, 40, 10, CPU) for _ in range(2))
    for step, batch in enumerate(batches):
        if step == taken:
            before = copy.deepcopy(ours.state())
            ours.rehearse(larger)
            assert_same_state(ours.state(), before)
        assert torch.equal(ours.train_step(batch), theirs.train_step(batch))
    assert_same_state(ours.state(), theirs.state())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["encoder.head.weight", "key_encoder.encoder.backbone.bn1.running_var", "queue.rows"])
def test_anything_that_is_no_number_is_noticed(tiny, name, bad):
    trainer = Trainer(tiny(), 40, 10, CPU)
    tensor = trainer.nets.state_dict()[name]
    tensor.view(-1)[-1] = torch.finfo(tensor.dtype).max
    assert trainer.is_finite()
    tensor.view(-1)[-1] = bad
    assert not trainer.is_finite()


def test_a_network_that_asks_for_its_version_is_taken_up_again(tiny, tmp_path):
    experiment = tiny(network={"backbone": "torchvision/mnasnet0_5", "stem": "standard"}, size=32)
    trainer, again = (Trainer(experiment.edit(seed=seed), 40, 10, CPU) for seed in (0, 1))
    writer = CheckpointWriter(tmp_path)
    writer.write(trainer.state(), 0)
    writer.close()
    again.restore(read_checkpoint(checkpoints(tmp_path)[-1]))
    for name, tensor in trainer.nets.state_dict().items():
        assert torch.equal(tensor, again.nets.state_dict()[name]), name


def drawn(trainer, step):
    """What layers draw in a step."""
    trainer.step = step
    with trainer._layers_seeded():
        return torch.rand(3).tolist()


def test_what_layers_draw_is_a_function_of_seed_step_and_process(tiny):
    first, again, other = (Trainer(tiny(seed=seed), 40, 10, CPU) for seed in (0, 0, 1))
    numbers = [drawn(first, step) for step in range(4)]
    assert [drawn(again, step) for step in (3, 1)] == [numbers[3], numbers[1]]
    second_process = Trainer(tiny(), 40, 10, CPU)
    second_process.processes = Processes(Launch(1, 2))
    assert len({tuple(one) for one in [*numbers, drawn(other, 0), drawn(second_process, 0)]}) == 6


def test_where_no_layer_draws_the_generators_are_left_alone_after_the_first_step(tiny):
    trainer = Trainer(tiny(), 40, 10, CPU)
    views = torch.randint(0, 256, (2, B, 3, 16, 16), dtype=torch.uint8)
    trainer.train_step(Batch(torch.arange(B), views, [], B))
    before = torch.get_rng_state()
    trainer.train_step(Batch(torch.arange(B), views, [], B))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_that_draws_is_not_captured_and_says_so(tiny, monkeypatch):
    """With a stand-in for the CUDA graph."""
    build, told = Parts.encoder, []

    def with_dropout(*arguments):
        encoder = build(*arguments)
        encoder.head = torch.nn.Sequential(torch.nn.Dropout(0.3), encoder.head)
        return encoder

    monkeypatch.setattr("co2.engine.trainer.CapturedStep", lambda step, tell: step)
    monkeypatch.setattr(Trainer, "_kind_of_step", lambda self: "captured")
    for expected in (0, 1):
        trainer = Trainer(tiny(), 40, 10, CPU, tell=told.append)
        for _ in range(2):
            views = torch.randint(0, 256, (2, B, 3, 16, 16), dtype=torch.uint8)
            trainer.train_step(Batch(torch.arange(B), views, [], B))
        assert trainer.kind == ("eager" if expected else "captured")
        assert (trainer._captured is None) == bool(expected)
        assert len(told) == expected
        monkeypatch.setattr(Parts, "encoder", with_dropout)
    assert "not captured" in told[0]
