"""What has to hold for every method, against the real engine; and faulty methods, which show that each check can fail.

A method of the registry that has no small settings here fails the first test.
"""

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from runs_in_processes import execute, float64
from torch.fx.experimental.proxy_tensor import make_fx

from co2.checkpoint import checkpoints, read_checkpoint
from co2.engine.trainer import Trainer
from co2.method import METHODS, Output, Step, load_methods
from co2.methods.byol import BYOL
from co2.methods.simclr import SimCLR
from co2.methods.simsiam import SimSiam
from co2.schema import hints_of
from co2.views.loader import Batch
from co2.views.view import View

IMAGES, B, S, STEPS = 31, 8, 16, 6
CPU = torch.device("cpu")
# A recipe of each method, and what makes it small with all of its parts switched on.
SMALL = {
    "moco": ("demo-co2", {"ramp_up": 0.5, "label_smoothing": 0.1, "head": "mlp", "queue": 20, "momentum": 0.9}),
    "simclr": ("co2-simclr-small", {"alpha": 0.3, "ramp_up": 0.5, "label_smoothing": 0.1}),
    "insdisc": (
        "co2-insdisc-small",
        {"alpha": 0.3, "ramp_up": 0.5, "label_smoothing": 0.1, "head": "mlp", "negatives": 16},
    ),
    "byol": ("byol-small", {"dimension": 8, "hidden": 16, "momentum": 0.9}),
    "simsiam": ("simsiam-small", {"dimension": 8, "bottleneck": 4}),
    "barlowtwins": ("barlow-twins-small", {"dimension": 8}),
}
# What has to be set for a setting to have an effect.
SWITCHED_ON_BY = {"own_label": {"form": "soft-label"}}
# What belongs to a term that is switched off.
OF_THE_TERM = {"ramp_up", "detach_target", "start", "form", "tau_target", "own_label", "centred"}
# Settings that say how the work is done, and not what comes out.
CIRCUMSTANCES = {"backend"}


class FailedError(AssertionError):
    """What a check has found wrong."""


def require(condition, text):
    if not condition:
        raise FailedError(text)


def small(tiny, name, **changes):
    recipe, method = SMALL[name]
    return tiny(
        recipe, batch_size=B, network={"groups": 2}, method=method, optimisation={"learning_rate": 0.05}, **changes
    )


def trainer_of(experiment):
    """One at the start of a run of two epochs of four steps."""
    return Trainer(
        experiment, IMAGES, 8, CPU, labels=torch.arange(IMAGES) % 5 if experiment.method.needs_labels else None
    )


def batch_of(experiment, step):
    """The last of four steps has seven images."""
    generator = torch.Generator().manual_seed(step)
    images = torch.arange(IMAGES)[(step % 4) * B : (step % 4 + 1) * B]
    shape = (len(images), 3, S, S)
    views = tuple(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in experiment.views())
    return Batch(images, views, [], len(images))


def run(trainer, until=STEPS):
    """Steps up to this one, and what they measured."""
    return [trainer.train_step(batch_of(trainer.experiment, step)).tolist() for step in range(trainer.step, until)]


def leaves(thing, name=""):
    if isinstance(thing, dict | list | tuple):
        for key, value in thing.items() if isinstance(thing, dict) else enumerate(thing):
            yield from leaves(value, f"{name}/{key}")
    else:
        yield name, thing


def different(one, other):
    """Names of what is not the same to the bit."""
    left, right = dict(leaves(one)), dict(leaves(other))
    same = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b  # noqa: E731
    return sorted(left.keys() ^ right.keys()) + [n for n in left if n in right and not same(left[n], right[n])]


def state_of(trainer):
    """What a checkpoint would hold, as it is now."""
    kept = io.BytesIO()
    torch.save(trainer.state(), kept)
    kept.seek(0)
    return torch.load(kept, weights_only=True)


# The promises.


def check_gradients(experiment):
    """Gradients reach every trained parameter and nothing else, every network moves, metrics are those declared."""
    trainer = trainer_of(experiment)
    before = state_of(trainer)
    for row in run(trainer):
        require(all(map(math.isfinite, row)), f"a step measured {row}")
    for name, parameter in trainer.nets.named_parameters():
        require(not parameter.requires_grad or parameter.grad is not None, f"no gradient reaches {name}")
        require(parameter.requires_grad or parameter.grad is None, f"a gradient reaches {name}")
    followed = {name.split(".")[0] for name, one in trainer.nets.named_parameters() if not one.requires_grad}
    require(not followed & {"encoder", "predictor"}, "what is to be trained is not")
    require(
        "target" not in {n.split(".")[0] for n, one in trainer.nets.named_parameters() if one.requires_grad},
        "a target is trained",
    )
    moved = {
        name.split("/")[2].split(".")[0] for name in different(before, state_of(trainer)) if name.startswith("/nets/")
    }
    require(moved == set(trainer.nets), f"nothing moves in {set(trainer.nets) - moved}")


def check_repeatable(experiment):
    """One seed, the same bits; another seed, others."""
    first, again, other = trainer_of(experiment), trainer_of(experiment), trainer_of(experiment.edit(seed=2))
    rows = run(first), run(again), run(other)
    require(rows[0] == rows[1], "metrics differ under one seed")
    require(not different(state_of(first), state_of(again)), "states differ under one seed")
    require(rows[0] != rows[2], "the seed has no effect")


def check_resumable(experiment):
    """Stopped, saved, rebuilt and resumed: the same bits; at the edge of an epoch, before and behind it."""
    whole = trainer_of(experiment)
    rows = run(whole)
    for stop in (3, 4, 5):
        first = trainer_of(experiment)
        before = run(first, stop)
        second = trainer_of(experiment)
        second.restore(state_of(first))
        require(before + run(second) == rows, f"stopped after {stop}: metrics differ")
        require(not different(state_of(whole), state_of(second)), f"stopped after {stop}: states differ")


def plain_values(nets):
    """What modules hold that is neither parameter nor buffer."""
    hidden = ("_parameters", "_buffers", "_modules", "training")
    return {
        f"{name}.{key}": value
        for name, module in nets.named_modules()
        for key, value in vars(module).items()
        if key not in hidden and not key.endswith("_hooks") and not key.startswith("_")
    }


def check_stateless(experiment):
    """Nothing is kept outside the state dict: two trainers may share the value of a method, modules hold no tensor that
    is not saved and no plain value that changes."""
    hash(experiment.method)
    alone = trainer_of(experiment)
    run(alone, 5)
    one, other = trainer_of(experiment), trainer_of(experiment.edit(seed=2))
    before = plain_values(one.nets)
    for step in range(5):
        run(one, step + 1)
        run(other, step + 1)
    require(not different(state_of(alone), state_of(one)), "another run beside it makes a difference")
    after = plain_values(one.nets)
    changed = [n for n in after if n not in before or (before[n] is not after[n] and before[n] != after[n])]
    require(not changed, f"modules hold values that change: {changed}")
    require(
        not any(isinstance(value, torch.Tensor) for value in after.values()),
        "a module holds a tensor that is not saved",
    )


FORBIDDEN = {
    "aten._local_scalar_dense": "waits for a value",
    "aten.lift_fresh_copy": "makes a tensor of numbers on the host",
    "aten.nonzero": "has a shape that depends on values",
    "aten.masked_select": "has a shape that depends on values",
}


def check_traceable(experiment):
    """Loss, backward pass and update from tensors without values: nothing on the host depends on what is in them, no
    tensor is made on the host, and nothing is drawn. So a step can be captured in a CUDA graph."""
    trainer, method = trainer_of(experiment), experiment.method
    run(trainer, 1)
    batch = batch_of(experiment, 1)
    trainer._on_host = dict(zip(trainer._drawn_each_step, trainer._random(batch.total), strict=True))
    trainer._made, trainer._share = [()] * len(batch.views), trainer.processes.share(batch.total, 2)
    inputs = trainer._step(batch.indices, *batch.views, *trainer._on_host.values())
    trained = [one for one in trainer.nets.parameters() if one.requires_grad]

    def whole(views, images, labels, numbers, random):
        step = Step(views, inputs.made, images, labels, inputs.share, numbers, random)
        output = method.loss(trainer.nets, step)
        found = torch.autograd.grad(output.loss, trained)
        with torch.no_grad():
            kept = {name: tensor.detach() for name, tensor in output.kept.items()}
            method.update(trainer.nets, step, Output(output.loss.detach(), {}, kept))
        return [output.loss, *output.metrics.values(), *found]

    arguments = (inputs.views, inputs.images, inputs.labels, inputs.numbers, inputs.random)
    try:
        graph = make_fx(whole, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
    except Exception as error:
        raise FailedError(f"{type(error).__name__}: {str(error).splitlines()[0][:90]}") from error
    for target in (node.target for node in graph.graph.nodes if node.op == "call_function"):
        name = str(target).rsplit(".", 1)[0]
        require(name not in FORBIDDEN, f"{target} {FORBIDDEN.get(name)}")
        require(torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()), f"{target} draws random numbers")


load_methods()
OURS = sorted(
    name for name, kind in METHODS.items() if ":" not in name and not getattr(kind, "__abstractmethods__", ())
)
CHECKS = (check_gradients, check_repeatable, check_resumable, check_stateless, check_traceable)


def test_every_method_of_the_registry_is_held_to_these_promises():
    assert sorted(SMALL) == OURS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SMALL)
def test_a_method_keeps(tiny, name, check):
    check(small(tiny, name))


# Settings.


def another(hint, value):
    """A value of the same kind."""
    if isinstance(value, View):
        return replace(value, flip_probability=1 - value.flip_probability / 2)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return next(one for one in get_args(hint) if one != value)
    if value is None:
        return 24
    return value + 1 if isinstance(value, int) else 0.8 * value + 0.13


def fingerprint(experiment):
    """What a run is after three steps, and how its pictures are shown."""
    trainer = trainer_of(experiment)
    rows = run(trainer, 3)
    rates = [float(group["lr"]) for group in trainer.optimiser.param_groups]
    return experiment.views(), rows, rates, state_of(trainer)["nets"]


@pytest.mark.parametrize("name", SMALL)
def test_every_setting_has_an_effect_and_none_is_silently_idle(tiny, name):
    experiment = small(tiny, name)
    kind = type(experiment.method)
    with_all = fingerprint(experiment)
    for one in dataclasses.fields(kind):
        if one.name in CIRCUMSTANCES:
            continue
        value = another(hints_of(kind)[one.name], getattr(experiment.method, one.name))
        method = replace(experiment.method, **SWITCHED_ON_BY.get(one.name, {}))
        before = fingerprint(experiment.edit(method=method)) if one.name in SWITCHED_ON_BY else with_all
        changed = experiment.edit(method=replace(method, **{one.name: value}))
        assert different(before, fingerprint(changed)), f"{one.name} has no effect"
    plain = experiment.method
    if hasattr(plain, "alpha"):
        plain = replace(plain, alpha=0.0)
    base = fingerprint(experiment.edit(method=plain))
    for idle in plain.idle():
        value = another(hints_of(kind)[idle], getattr(plain, idle))
        other = fingerprint(experiment.edit(method=replace(plain, **{idle: value})))
        assert not different(base[-1], other[-1]), idle  # what is learnt: a term without weight is still measured
    assert set(plain.idle()) == (OF_THE_TERM & {one.name for one in dataclasses.fields(kind)})


# Two processes.


@pytest.fixture(scope="module")
def by_one_and_by_two(build_tiny, tmp_path_factory):
    """Every method, with one group of batch statistics over both processes and one in each: {processes: folder}."""
    folders = {count: tmp_path_factory.mktemp(f"contract-{count}-") for count in (1, 2)}
    plans = {}
    for count, folder in folders.items():
        plans[count] = []
        for name, (recipe, method) in SMALL.items():
            for groups in (1, 2):
                own = method | ({"shuffle": False} if name == "moco" and groups == 1 else {})
                experiment = build_tiny(
                    recipe, data="shapes:31:16", epochs=1, batch_size=B, network={"groups": groups}, method=own,
                    optimisation={"learning_rate": 0.003}, monitoring={"evaluate_every": 100},
                )  # fmt: skip
                plans[count].append({"experiment": experiment.to_json(), "out": str(folder / f"{name}-{groups}")})
    with float64():
        execute(plans[1])
    path = folders[2] / "plan.json"
    path.write_text(json.dumps(plans[2]))
    script = Path(__file__).parents[1] / "support" / "runs_in_processes.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(one for one in sys.path if one)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, str(script), str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folders


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", SMALL)
def test_two_processes_compute_what_one_does(by_one_and_by_two, rows, name, groups):
    """In float64, with a last batch that cannot be halved."""
    one, two = (folder / f"{name}-{groups}" for folder in by_one_and_by_two.values())
    for mine, theirs in zip(rows(one), rows(two), strict=True):
        for metric in ("loss", *(declared.name for declared in METHODS[name].metrics)):
            assert mine[metric] == pytest.approx(theirs[metric], rel=1e-6, abs=1e-6), metric
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-9, abs=1e-9)
    ours, others = (read_checkpoint(checkpoints(run)[-1])["nets"] for run in (one, two))
    torch.testing.assert_close(ours, others, rtol=1e-8, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_a_captured_step_is_the_step_as_written(tiny, name):
    rows = {}
    for kind in ("eager", "captured"):
        experiment = small(tiny, name, device="cuda", execution={"step": kind, "deterministic": True})
        trainer = Trainer(experiment, IMAGES, 40, torch.device("cuda"))
        rows[kind] = [trainer.train_step(batch_of(experiment, step)).cpu() for step in range(20)]
        assert trainer.kind == kind
    eager, captured = (torch.stack(one) for one in rows.values())
    torch.testing.assert_close(captured, eager, rtol=0.02, atol=0.02)


# Faulty methods: each has to fail the check beside it.


@dataclass(frozen=True, kw_only=True)
class Leaks(BYOL):
    """The target is trained."""

    def build(self, parts):
        nets = super().build(parts)
        nets["target"].requires_grad_(True)
        return nets


@dataclass(frozen=True, kw_only=True)
class Skips(SimSiam):
    """Builds what it does not train, on which parallel training would stumble."""

    def build(self, parts):
        nets = super().build(parts)
        nets["encoder"].spare = torch.nn.Linear(4, 4)
        return nets


@dataclass(frozen=True, kw_only=True)
class DrawsItself(SimSiam):
    """Random numbers from torch's own generator, of which the engine knows nothing."""

    def loss(self, nets, step):
        output = super().loss(nets, step)
        return replace(output, loss=output.loss * (1 + torch.rand((), generator=_GENERATOR)))


@dataclass(frozen=True, kw_only=True)
class Remembers(SimSiam):
    """A mean loss kept as an attribute of a module."""

    def loss(self, nets, step):
        output = super().loss(nets, step)
        mean = getattr(nets["encoder"], "mean_loss", output.loss.detach())
        nets["encoder"].mean_loss = 0.5 * (mean + output.loss.detach())
        return replace(output, loss=output.loss / nets["encoder"].mean_loss)


@dataclass(frozen=True, kw_only=True)
class Shares(SimSiam):
    """A counter that all runs of a process share."""

    def loss(self, nets, step):
        _COUNT["steps"] = _COUNT.get("steps", 0) + 1
        output = super().loss(nets, step)
        return replace(output, loss=output.loss * _COUNT["steps"])


@dataclass(frozen=True, kw_only=True)
class Looks(SimSiam):
    """A decision by a value."""

    def loss(self, nets, step):
        output = super().loss(nets, step)
        return output if output.loss < 100 else replace(output, loss=output.loss / 2)


@dataclass(frozen=True, kw_only=True)
class FromTheHost(SimSiam):
    """Weights that come from the host in every step."""

    def loss(self, nets, step):
        output = super().loss(nets, step)
        return replace(output, loss=output.loss * torch.tensor([0.5, 0.5]).sum())


@dataclass(frozen=True, kw_only=True)
class KeepsToItself(SimCLR):
    """Negatives of this process's share alone."""

    def loss(self, nets, step):
        class Alone:
            rows, total = slice(0, len(step.images)), len(step.images)

            def gather(self, mine):
                return mine

        return super().loss(nets, replace(step, share=Alone()))


_COUNT: dict[str, int] = {}
_GENERATOR = torch.Generator()
FAULTY = [
    (check_gradients, Leaks, "byol"),
    (check_gradients, Skips, "simsiam"),
    (check_repeatable, DrawsItself, "simsiam"),
    (check_resumable, Remembers, "simsiam"),
    (check_stateless, Remembers, "simsiam"),
    (check_stateless, Shares, "simsiam"),
    (check_traceable, Looks, "simsiam"),
    (check_traceable, FromTheHost, "simsiam"),
    (check_traceable, DrawsItself, "simsiam"),
]


@pytest.mark.parametrize(("check", "kind", "like"), FAULTY, ids=lambda one: getattr(one, "__name__", one))
def test_a_faulty_method_is_found(tiny, check, kind, like):
    experiment = small(tiny, like)
    settings = {one.name: getattr(experiment.method, one.name) for one in dataclasses.fields(experiment.method)}
    with pytest.raises(FailedError):
        check(experiment.edit(method=kind(**settings)))


def test_negatives_of_one_share_alone_are_found(tiny):
    """What the comparison of one process with two looks at: the loss of a share depends on the others' rows."""
    experiment = small(tiny, "simclr")
    settings = {one.name: getattr(experiment.method, one.name) for one in dataclasses.fields(experiment.method)}
    trainer = trainer_of(experiment)
    asked = []

    class Half:
        rows, total = slice(0, B // 2), B

        def gather(self, mine):
            asked.append(len(mine))
            return torch.cat([mine, mine.flip(0)])

    views = tuple(torch.randn(B // 2, 3, S, S) for _ in range(2))
    step = Step(views, ({}, {}), torch.arange(B // 2), None, Half(), {"alpha": torch.tensor(0.0)})
    experiment.method.loss(trainer.nets, step)
    assert asked == [B // 2]
    KeepsToItself(**settings).loss(trainer.nets, step)
    assert asked == [B // 2]
