"""Steps of a method without a run: fresh networks, batches of noise, one process."""

from dataclasses import dataclass

import torch

from co2.engine.distributed import ALONE
from co2.engine.trainer import build_networks, stream_of
from co2.method import Method, Step

B, S = 12, 16
IMAGES = torch.arange(B)


@dataclass
class Fresh:
    """A method with its networks."""

    method: Method
    nets: torch.nn.ModuleDict
    seed: int
    images: int

    def step(self, views, number=0, numbers=None):
        """What a step shows the method: views [V, B, 3, S, S]."""
        drawn = {
            name: draw.numbers(self.seed, stream_of(name, draw), torch.tensor([number]), len(views[0]), self.images)[0]
            for name, draw in self.method.draws().items()
            if draw.every == "step"
        }
        schedules = {name: torch.tensor(one(0.0)) for name, one in self.method.schedules().items()}
        count = len(views[0])
        images = torch.arange(count) % self.images
        share = ALONE.share(count, 1)
        return Step(
            tuple(views), ({},) * len(views), images, images % 5 if self.method.needs_labels else None, share,
            schedules | (numbers or {}), drawn,
        )  # fmt: skip


def fresh(experiment, images=40):
    """The method of an experiment with the networks that a run begins with, in training mode."""
    nets = build_networks(experiment, images, 5 if experiment.method.needs_labels else None)
    ALONE.divide_statistics(nets, experiment.network.groups)
    return Fresh(experiment.method, nets.train(), experiment.seed, images)


def noise(count, seed=0, size=S):
    """Views as numbers [V, B, 3, S, S]."""
    return torch.randn(count, B, 3, size, size, generator=torch.Generator().manual_seed(seed))
