"""The training step, and the state that it carries from one step to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from co2.config import Experiment
from co2.engine.distributed import ALONE, Processes
from co2.engine.mechanisms import build_mechanism
from co2.engine.optimisers import build_optimiser
from co2.engine.schedule import learning_rate
from co2.objective.contrast import contrast
from co2.views.loader import Batch
from co2.views.transform import normalise

# What a step reports, in this order.
MEASURED = ("loss", "instance", "consistency", "top1", "top5")


class Trainer:
    """Everything that changes during a run."""

    def __init__(
        self, experiment: Experiment, images: int, steps: int, device: torch.device, processes: Processes = ALONE
    ) -> None:
        self.experiment = experiment
        self.steps = steps
        self.device = device
        self.processes = processes
        on_gpu = device.type == "cuda"
        self.mechanism = processes.each(lambda: build_mechanism(experiment, images)).to(device)
        if on_gpu:  # where convolutions want channels last
            self.mechanism.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        processes.divide_statistics(self.mechanism, experiment.encoder.groups)
        self.compare = processes.data_parallel(self.mechanism)
        self.optimiser = build_optimiser(self.mechanism, experiment.optimisation)
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu)
        self.step = 0
        self.images = images
        self.mechanism.train()

    def learning_rate(self) -> float:
        """The learning rate of the coming step."""
        return learning_rate(self.experiment.optimisation, self.experiment.learning_rate, self.step, self.steps)

    def train_step(self, batch: Batch) -> Tensor:
        """One step of the method. Returns what `MEASURED` names, [5], still on the device.

        Of several processes each has b of the B images; the mean of what they return is that of the batch.
        """
        objective = self.experiment.objective
        share = self.processes.share(batch.total, self.experiment.encoder.groups)
        images = batch.indices.to(self.device, non_blocking=True)  # [b]
        views = self.mechanism.arrange(batch.views.to(self.device, non_blocking=True), share, self.step)
        views = self._numbers(views)  # [V, b, 3, S, S]
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()

        with self.autocast:
            comparison = self.compare(views, images, share, self.step)
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
        loss = instance + objective.alpha * consistency if objective.alpha > 0 else instance
        self.optimiser.zero_grad(set_to_none=True)
        (loss * share.weight).backward()
        self.optimiser.step()
        self.mechanism.update(comparison, images, share)
        self.step += 1

        top1, top5 = (terms.rank < 1).float().mean(), (terms.rank < 5).float().mean()
        return torch.stack([loss.detach(), instance.detach(), consistency.detach(), top1, top5]) * share.weight

    def settle(self) -> None:
        """Make the networks the same in all processes, down to running statistics, before one is looked at."""
        self.processes.average_statistics(self.mechanism)

    def _numbers(self, views: Tensor) -> Tensor:
        # uint8 travels to the device, and between processes: a quarter of the bytes of the numbers it becomes here.
        numbers = normalise(views, self.experiment.views, torch.float32)
        if self.device.type != "cuda":
            return numbers
        return numbers.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, views.shape[:2])

    def state(self) -> dict[str, Any]:
        """Everything that a continued run needs: tensors and plain values only."""
        return {
            "experiment": self.experiment.to_json(),
            "images": self.images,
            "step": self.step,
            "mechanism": self.mechanism.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            # Views, orders and shuffles are functions of the seed; these are for layers that draw, such as dropout.
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.step = state["step"]
        self.mechanism.load_state_dict(state["mechanism"])
        self.optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
