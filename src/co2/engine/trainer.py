"""The training step, and the state that it carries from one step to the next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from co2 import philox
from co2.checkpoint import load_weights
from co2.config import Experiment
from co2.engine.capture import CapturedStep
from co2.engine.distributed import ALONE, Processes
from co2.engine.mechanisms import build_mechanism
from co2.engine.optimisers import build_optimiser
from co2.engine.schedule import consistency_weight, learning_rate
from co2.engine.specification import ExecutionSpecification, Precision, Step
from co2.errors import UserError
from co2.objective.contrast import contrast
from co2.views.loader import Batch
from co2.views.transform import normalise_for_convolutions

# What a step reports, in this order.
MEASURED = ("loss", "instance", "consistency", "top1", "top5")

# torch 2.11's compiler fails on statistics in groups when it also tries to join sums along different axes.
_COMPILER: dict[str, str | int | bool | Callable[..., Any]] = {"triton.mix_order_reduction": False}
_STEPS_DRAWN = 256  # ahead, of what is random about them


def check_execution(execution: ExecutionSpecification, device: torch.device) -> None:
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
    ) -> None:
        self.experiment = experiment
        self.steps = steps
        self.device = device
        self.processes = processes
        on_gpu = device.type == "cuda"
        self.mechanism = processes.each(lambda: build_mechanism(experiment, images)).to(device)
        self.mechanism.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as convolutions want it
        if on_gpu:
            # Shapes do not change, so the fastest algorithm is worth a search; but it may add up in any order.
            torch.backends.cudnn.benchmark = not experiment.execution.deterministic
            torch.backends.cudnn.deterministic = experiment.execution.deterministic
        processes.divide_statistics(self.mechanism, experiment.encoder.groups)
        self.compare = processes.data_parallel(self.mechanism)
        # Where a captured step reads them: what changes from step to step.
        self.rate = torch.zeros((), device=device) if on_gpu else 0.0
        self.alpha = torch.zeros((), device=device)
        self.optimiser = build_optimiser(self.mechanism, experiment.optimisation, self.rate)
        self.precision = precision_on(device, experiment.execution.precision)
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == torch.bfloat16)
        self.step = 0
        self.images = images
        self._generators = _generators(device)
        self._layers_draw: bool | None = None  # dropout, say; the first step shows it
        self._chances: dict[int, tuple[int, Tensor]] = {}  # by size of the batch: the first step, and [T, X]
        self.kind = self._kind_of_step()
        if self.kind == "compiled":
            self.mechanism.compile(options=_COMPILER)
        self._captured = None if self.kind == "eager" else CapturedStep(self._advance, tell)
        self._tell = tell
        self.mechanism.train()

    def _kind_of_step(self) -> Step:
        """Captured on a GPU that works alone; between processes, and on CPUs, as it is written."""
        if self.device.type != "cuda" or self.processes.count > 1:
            return "eager"
        wanted = self.experiment.execution.step
        return "captured" if wanted == "auto" else wanted

    def learning_rate(self) -> float:
        """The learning rate of the coming step."""
        return learning_rate(self.experiment.optimisation, self.experiment.learning_rate, self.step, self.steps)

    def train_step(self, batch: Batch) -> Tensor:
        """One step of the method. Returns what `MEASURED` names, [5], still on the device.

        Of several processes each has b of the B images; the mean of what they return is that of the batch.
        """
        self._set_rate(self.learning_rate())
        self.alpha.fill_(consistency_weight(self.experiment.objective, self.step, self.steps))
        moved = [view.to(self.device, non_blocking=True) for view in batch.views]  # [b, 3, S, S] uint8 each
        views = torch.stack(moved)  # [V, b, 3, S, S]
        images = batch.indices.to(self.device, non_blocking=True)  # [b]
        self._share = self.processes.share(batch.total, self.experiment.encoder.groups)
        with self._layers_seeded():
            take_step = self._captured or self._advance
            measured = take_step(views, images, self._chance(batch.total))
        self.step += 1
        return measured

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

    def _advance(self, views: Tensor, images: Tensor, chance: Tensor) -> Tensor:
        """The step itself, from tensors alone, so that it can be captured."""
        objective, share, lap = self.experiment.objective, self._share, self.mechanism.lap
        lap("start")
        numbers = self._numbers(self.mechanism.arrange(views, share, chance))  # [V, b, 3, S, S]
        lap("views")
        with self.autocast:
            comparison = self.compare(numbers, images, share, chance)
        terms = contrast(
            *comparison[:3],
            exclude=comparison.exclude,
            tau_instance=objective.tau_instance,
            tau_consistency=objective.tau_consistency,
            label_smoothing=objective.label_smoothing,
            detach_target=objective.detach_target,
            backend=objective.backend,
        )
        assert terms.consistency is not None
        instance, consistency = terms.instance.mean(), terms.consistency.mean()
        # Without CO2 the consistency term is still measured, as in the paper's training curves, but not trained on.
        loss = instance + self.alpha * consistency if objective.alpha > 0 else instance
        loss = self.mechanism.directions * loss
        lap("loss")
        self.optimiser.zero_grad(set_to_none=True)
        (loss * share.weight).backward()
        lap("backward")
        self.optimiser.step()
        lap("optimiser")
        self.mechanism.update(comparison, images, share)
        lap("momentum encoder and negatives")

        top1, top5 = (terms.rank < 1).float().mean(), (terms.rank < 5).float().mean()
        return torch.stack([loss.detach(), instance.detach(), consistency.detach(), top1, top5]) * share.weight

    def _chance(self, total: int) -> Tensor:
        """What is random about the coming step beside the views: [X]. For a process alone on the device it works on."""
        first, drawn = self._chances.get(total, (0, torch.empty(0)))
        if not first <= self.step < first + len(drawn):
            device = self.device if self.processes.count == 1 else "cpu"
            steps = torch.arange(self.step, self.step + _STEPS_DRAWN, device=device)
            first, drawn = self._chances[total] = self.step, self.mechanism.chances(steps, total)
        return drawn[self.step - first]

    def _set_rate(self, rate: float) -> None:
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)  # where a captured step reads it
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate

    def rehearse(self, batch: Batch) -> None:
        """Take a step and take it back, to see now and not in the middle of the run whether there is memory for it."""
        before = copy.deepcopy(self.state())
        self.train_step(batch)
        self.restore(before)

    def is_finite(self) -> bool:
        """Whether all that the method has learnt or keeps is numbers: weights, statistics, queue, bank."""
        tensors = self.mechanism.state_dict().values()
        numbers = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        largest = torch._foreach_norm(numbers, torch.inf)  # of each tensor; NaN if there is one in it
        return bool(torch.stack([number.isfinite() for number in largest]).all())  # waits for the device once

    def settle(self) -> None:
        """Make the networks the same in all processes, down to running statistics, before one is looked at."""
        self.processes.average_statistics(self.mechanism)

    def _numbers(self, views: Tensor) -> Tensor:
        """What the encoders are fed: normalised views [V, b, 3, S, S], each view in channels-last memory."""
        # uint8 travels to the device, and between processes: a quarter of the bytes of the numbers it becomes here.
        numbers = normalise_for_convolutions(views.flatten(0, 1), self.experiment.views, self.precision)
        return numbers.unflatten(0, views.shape[:2])

    def state(self) -> dict[str, Any]:
        """Everything that a continued run needs: tensors and plain values only."""
        optimiser = self.optimiser.state_dict()
        groups = [group | {"lr": 0.0} for group in optimiser["param_groups"]]  # which the schedule sets anew each step
        return {
            "experiment": self.experiment.to_json(),
            "images": self.images,
            "step": self.step,
            "mechanism": self.mechanism.state_dict(),
            "optimiser": optimiser | {"param_groups": groups},
        }  # and nothing random: that is a function of the seed and the step

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.step = state["step"]
        load_weights(self.mechanism, state["mechanism"])
        own = [(group["lr"], group.get("fused")) for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict(state["optimiser"])
        for group, (rate, fused) in zip(self.optimiser.param_groups, own, strict=True):
            group.update(lr=rate, fused=fused)  # these belong to the device, not to the run
