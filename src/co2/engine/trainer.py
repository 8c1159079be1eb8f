"""The training step, and the state that it carries from one step to the next."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from co2 import philox
from co2.checkpoint import load_weights
from co2.data.source import ImageSource
from co2.engine.capture import CapturedStep
from co2.engine.distributed import ALONE, Processes
from co2.engine.optimisers import build_optimiser
from co2.engine.schedule import learning_rate
from co2.errors import UserError
from co2.experiment import Execution, Experiment, Precision, StepKind
from co2.method import Draw, Method, Output, Step, check_method, check_output
from co2.networks.backbones import UnsuitableViewSizeError, build_backbone, check_view_size
from co2.networks.features import evaluation_mode
from co2.networks.parts import Parts
from co2.views.loader import Batch, plain_batches
from co2.views.transform import normalise_for_convolutions

# torch 2.11's compiler fails on statistics in groups when it also tries to join sums along different axes.
_COMPILER: dict[str, str | int | bool | Callable[..., Any]] = {"triton.mix_order_reduction": False}
_STEPS_DRAWN = 256  # ahead, of what is random about them


def check_execution(execution: Execution, device: torch.device) -> None:
    """Steps are only captured or compiled on GPUs, and only in bfloat16 there."""
    if execution.step in ("captured", "compiled") and device.type != "cuda":
        raise UserError(f"A step is only {execution.step} on a GPU. Use eager or auto on this device, {device}.")
    if execution.precision == "float32" and device.type == "cuda":
        raise UserError("On a GPU encoders compute in bfloat16. Use --execution.precision auto, or --device cpu.")


def precision_on(device: torch.device, wanted: Precision) -> torch.dtype:
    """What encoders compute in on a device."""
    return torch.bfloat16 if device.type == "cuda" or wanted == "bfloat16" else torch.float32


def _generators(device: torch.device) -> list[torch.Generator]:
    """Those from which layers on this device draw, or may draw."""
    if device.type != "cuda":
        return [torch.default_generator]
    number = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[number]]


def measured(method: Method) -> tuple[str, ...]:
    """What a step of a method reports, in this order."""
    return ("loss", *(metric.name for metric in method.metrics))


@contextmanager
def _kept_to_itself(method: Method) -> Iterator[None]:
    """Says in a sentence that a method tries to keep something in itself."""
    try:
        yield
    except dataclasses.FrozenInstanceError as error:
        raise UserError(
            f"The method {method.name} keeps something in itself ({error}), which no checkpoint would have. Keep it in "
            "a buffer of one of its networks, and change it in `update`."
        ) from error


def build_networks(experiment: Experiment, images: int, classes: int | None = None) -> Any:
    """All that the method of an experiment learns or keeps on a data set of `images` images, fresh from the seed."""
    network, size = experiment.network, experiment.size
    generator = torch.Generator().manual_seed(experiment.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        backbone = lambda: build_backbone(network.backbone, network.stem, size)  # noqa: E731
        nets: Any = experiment.method.build(Parts(backbone, images, classes, generator))
        for smaller in experiment.earlier_sizes:
            try:
                check_view_size(nets["encoder"].backbone, network.backbone, smaller)
            except UnsuitableViewSizeError as error:
                raise error.by("--earlier-sizes") from error
    return nets


def stream_of(name: str, draw: Draw) -> int:
    """Philox's stream of what a method draws: its own, or one made from the name, above all that have numbers."""
    if draw.stream is not None:
        return int(draw.stream)
    return 1 << 31 | int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


class _Forward(nn.Module):
    """The loss of a method as a module of its networks, which is what can be made parallel."""

    def __init__(self, method: Method, nets: nn.ModuleDict) -> None:
        super().__init__()
        self.method = method
        self.nets = nets

    def forward(self, step: Step) -> Output:
        return self.method.loss(self.nets, step)


class Trainer:
    """Everything that changes during a run."""

    def __init__(
        self,
        experiment: Experiment,
        images: int,
        steps: int,
        device: torch.device,
        processes: Processes = ALONE,
        tell: Callable[[str], None] = lambda text: None,
        labels: Tensor | None = None,
        lap: Callable[[str], None] = lambda part: None,
    ) -> None:
        """
        Args:
            tell: takes sentences for the user.
            labels: int64 [N], of the images, where the method needs them.
            lap: called after each part of a step with its name; a stopwatch may stand here.
        """
        self.experiment, self.method = experiment, experiment.method
        check_method(type(self.method))
        self.steps = steps
        self.device = device
        self.processes = processes
        on_gpu = device.type == "cuda"
        classes = None if labels is None else int(labels.max()) + 1
        self.labels = None if labels is None else labels.to(device)
        self.nets: Any = processes.each(lambda: build_networks(experiment, images, classes)).to(device)
        self.nets.to(memory_format=torch.channels_last)  # as convolutions want it
        if on_gpu:
            # Shapes do not change, so the fastest algorithm is worth a search; but it may add up in any order.
            torch.backends.cudnn.benchmark = not experiment.execution.deterministic
            torch.backends.cudnn.deterministic = experiment.execution.deterministic
        processes.divide_statistics(self.nets, experiment.network.groups)
        self.forward = processes.data_parallel(_Forward(self.method, self.nets))
        self._views = experiment.views()
        self.schedules, self.draws, self.own_rates = self.method.schedules(), self.method.draws(), self.method.rates()
        self._drawn_each_step = [name for name, draw in self.draws.items() if draw.every == "step"]
        # What changes from step to step lies where a captured step reads it.
        self.numbers = {name: torch.zeros((), device=device) for name in self.schedules}
        self.rates: dict[str, Tensor | float] = {
            name: torch.zeros((), device=device) if on_gpu else 0.0 for name in ("", *self.own_rates)
        }
        self.optimiser, self._rate_of_group = build_optimiser(self.nets, experiment.optimisation, self.rates)
        self.precision = precision_on(device, experiment.execution.precision)
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == torch.bfloat16)
        self.step = 0
        self.images = images
        self._generators = _generators(device)
        self._layers_draw: bool | None = None  # dropout, say; the first step shows it
        self._drawn: dict[tuple[str, int], tuple[int, Tensor]] = {}  # by name and size of the batch: first step, [T, X]
        self._lap = lap
        self.kind = self._kind_of_step()
        if self.kind == "compiled":
            for network in self.nets.values():
                network.compile(options=_COMPILER)
        self._captured = None if self.kind == "eager" else CapturedStep(self._advance, tell)
        self._tell = tell
        self.nets.train()

    def _kind_of_step(self) -> StepKind:
        """Captured on a GPU that works alone; between processes, and on CPUs, as it is written."""
        if self.device.type != "cuda" or self.processes.count > 1:
            return "eager"
        wanted = self.experiment.execution.step
        return "captured" if wanted == "auto" else wanted

    def learning_rate(self, network: str = "") -> float:
        """The learning rate of the coming step, of a network that has one of its own or of all others."""
        settings, peak = self.experiment.optimisation, self.experiment.learning_rate
        return learning_rate(settings, peak, self.step, self.steps, self.own_rates.get(network))

    @property
    def done(self) -> float:
        """Share of the run that lies behind the coming step."""
        return self.step / self.steps

    def train_step(self, batch: Batch) -> Tensor:
        """One step of the method. Returns what `measured` names, [M], still on the device.

        Of several processes each has b of the B images; the mean of what they return is that of the batch.
        """
        self._set_rates()
        for name, schedule in self.schedules.items():
            self.numbers[name].fill_(schedule(self.done))
        made = batch.made or ({},) * len(batch.views)
        self._made = [tuple(drawn) for drawn in made]  # the names, of each view
        inputs = (batch.indices, *batch.views, *(one for drawn in made for one in drawn.values()))
        on_device = [one.to(self.device, non_blocking=True) for one in inputs]
        self._share = self.processes.share(batch.total, self.experiment.network.groups)
        with self._layers_seeded():
            take_step = self._captured or self._advance
            self._on_host = dict(zip(self._drawn_each_step, self._random(batch.total), strict=True))
            found = take_step(*on_device, *(one.to(self.device, non_blocking=True) for one in self._on_host.values()))
        self.step += 1
        return found

    @contextmanager
    def _layers_seeded(self) -> Iterator[None]:
        """What layers draw in the coming step is a function of (seed, step, process), as everything else is.

        They draw from torch's own generators, which a captured step would read in a way of its own.
        """
        if self._layers_draw is False:  # as in most networks
            yield
            return
        rank, time = self.processes.launch.rank, torch.tensor([self.step])
        seeds = philox.samples(self.experiment.seed, philox.Stream.LAYERS, time, 2**63 - 1, rank + 1)  # [1, processes]
        for generator in self._generators:
            generator.manual_seed(int(seeds[0, rank]))
        seeded = [generator.get_state() for generator in self._generators]
        yield
        if self._layers_draw is None:
            states = [generator.get_state() for generator in self._generators]
            self._layers_draw = not all(map(torch.equal, states, seeded))
            if self._layers_draw and self._captured is not None:
                self._captured = None  # which has recorded nothing yet
                self.kind = "eager" if self.kind == "captured" else self.kind
                self._tell(
                    "Layers of this network draw random numbers, as dropout does. So that they repeat under the seed, "
                    "steps are not captured in a CUDA graph but run as they are, more slowly."
                )

    def _advance(self, images: Tensor, *loaded: Tensor) -> Tensor:
        """The step itself, from tensors alone, so that it can be captured: images [b], views, and what is drawn."""
        self._lap("start")
        step = self._step(images, *loaded)
        self._lap("views")
        with self.autocast, _kept_to_itself(self.method):
            output = self.forward(step)
        if not self.step:
            check_output(self.method, output)
        self._lap("forward")
        self.optimiser.zero_grad(set_to_none=True)
        (output.loss * self._share.weight).backward()
        self._lap("backward")
        self._clip()
        self.optimiser.step()
        self._lap("optimiser")
        with torch.no_grad():
            kept = {name: tensor.detach() for name, tensor in output.kept.items()}
            self.method.update(self.nets, step, Output(output.loss.detach(), {}, kept))
        self._lap("update")
        reported = [output.loss, *(output.metrics[metric.name] for metric in self.method.metrics)]
        return torch.stack([one.detach() for one in reported]) * self._share.weight

    def _step(self, images: Tensor, *loaded: Tensor) -> Step:
        """What the method gets to see of a batch."""
        views, rest = loaded[: len(self._made)], iter(loaded[len(self._made) :])
        made = tuple({name: next(rest) for name in names} for names in self._made)
        random = {name: next(rest) for name in self._drawn_each_step}
        return Step(
            views=tuple(self._feed(number, pictures) for number, pictures in enumerate(views)),
            made=made,
            images=images,
            labels=None if self.labels is None else self.labels[images],
            share=self._share,
            numbers=self.numbers,
            random=random,
            loaded=views,
            feed=self._feed if self.processes.count > 1 else None,
            on_host=self._on_host if self.processes.count > 1 else {},
        )

    def _feed(self, view: int, pictures: Tensor) -> Tensor:
        """What networks are fed: uint8 pictures [b, 3, S, S] or [b, k, 3, s, s] of a view as numbers."""
        fed = normalise_for_convolutions(pictures.flatten(0, -4), self._views[view], self.precision)
        return fed if pictures.dim() == 4 else fed.unflatten(0, pictures.shape[:-3])

    def _clip(self) -> None:
        longest = self.experiment.optimisation.clip
        if longest is not None:
            torch.nn.utils.clip_grad_norm_((one for one in self.nets.parameters() if one.grad is not None), longest)

    def _random(self, total: int) -> list[Tensor]:
        """What is random about the coming step beside the views: [X] each. For a process alone on the device it works
        on; for many steps at once, because on a GPU the hundreds of small operations cost more than a step."""
        device = self.device if self.processes.count == 1 else "cpu"
        rows = []
        for name in self._drawn_each_step:
            first, drawn = self._drawn.get((name, total), (0, torch.empty(0)))
            if not first <= self.step < first + len(drawn):
                steps = torch.arange(self.step, self.step + _STEPS_DRAWN, device=device)
                stream = stream_of(name, self.draws[name])
                drawn = self.draws[name].numbers(self.experiment.seed, stream, steps, total, self.images)
                first, _ = self._drawn[name, total] = self.step, drawn
            rows.append(drawn[self.step - first])
        return rows

    def _set_rates(self) -> None:
        for name, rate in self.rates.items():
            now = self.learning_rate(name)
            self.rates[name] = rate.fill_(now) if isinstance(rate, Tensor) else now
        for group, name in zip(self.optimiser.param_groups, self._rate_of_group, strict=True):
            group["lr"] = self.rates[name]

    def rehearse(self, batch: Batch) -> None:
        """Take a step and take it back, to see now and not in the middle of the run whether there is memory for it."""
        before = copy.deepcopy(self.state())
        self.train_step(batch)
        self.restore(before)

    def is_finite(self) -> bool:
        """Whether all that the method has learnt or keeps is numbers: weights, statistics, queue, bank."""
        tensors = self.nets.state_dict().values()
        numbers = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        largest = torch._foreach_norm(numbers, torch.inf)  # of each tensor; NaN if there is one in it
        return bool(torch.stack([number.isfinite() for number in largest]).all())  # waits for the device once

    def settle(self) -> None:
        """Make the networks the same in all processes, down to running statistics, before one is looked at."""
        self.processes.average_statistics(self.nets)

    def state(self) -> dict[str, Any]:
        """Everything that a continued run needs: tensors and plain values only."""
        optimiser = self.optimiser.state_dict()
        groups = [group | {"lr": 0.0} for group in optimiser["param_groups"]]  # which the schedule sets anew each step
        return {
            "experiment": self.experiment.to_json(),
            "images": self.images,
            "step": self.step,
            "nets": self.nets.state_dict(),
            "optimiser": optimiser | {"param_groups": groups},
        }  # and nothing random: that is a function of the seed and the step

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.step = state["step"]
        load_weights(self.nets, state["nets"])
        own = [(group["lr"], group.get("fused")) for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict(state["optimiser"])
        for group, (rate, fused) in zip(self.optimiser.param_groups, own, strict=True):
            group.update(lr=rate, fused=fused)  # these belong to the device, not to the run


class Epoch:
    """What a method sees of all images before an epoch: `co2.method.Epoch`."""

    def __init__(self, trainer: Trainer, number: int, source: ImageSource, workers: int) -> None:
        self.number = number
        self._trainer, self._source, self._workers = trainer, source, workers

    def at(self, name: str) -> float:
        """What `schedules` says of the epoch's first step."""
        return self._trainer.schedules[name](self._trainer.done)

    def drawn(self, name: str) -> Tensor:
        """What `draws` names, of those made every epoch: int64 [X]."""
        trainer = self._trainer
        draw, times = trainer.draws[name], torch.tensor([self.number])
        rows = draw.numbers(trainer.experiment.seed, stream_of(name, draw), times, 0, trainer.images)
        return rows[0].to(trainer.device)

    def features(self, network: Callable[[Tensor], Tensor]) -> Tensor:
        """What a network in evaluation mode makes of the plain view of all images: [N, D], in order. Each process has
        a part of them, and all get the whole. The row of an image that cannot be read is zeros."""
        trainer, plain = self._trainer, self._trainer.experiment.plain
        share = trainer.processes.share(len(self._source), trainer.processes.count)
        own = range(share.rows.start, share.rows.stop)
        rows, places = [], []
        with evaluation_mode(trainer.nets), torch.no_grad(), trainer.autocast:
            for batch in plain_batches(self._source.subset(own), plain.size, 256, self._workers):
                pictures = batch.views[0].to(trainer.device, non_blocking=True)
                rows.append(network(normalise_for_convolutions(pictures, plain, trainer.precision)).float())
                places.append(batch.indices)
        found = torch.cat(rows)
        whole = found.new_zeros(len(own), *found.shape[1:])  # [n, D]
        whole[torch.cat(places).to(trainer.device)] = found
        return share.gather(whole)
