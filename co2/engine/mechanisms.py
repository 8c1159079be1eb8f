"""The forward passes that tell the methods apart: images in, a `Comparison` for the objective out.

Each mechanism is a module, so that its state dict is everything the method has learnt or keeps: encoders, queue, bank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from co2 import philox
from co2.config import Experiment
from co2.encoders.encoder import Encoder, build_encoder
from co2.encoders.momentum import MomentumEncoder
from co2.objective.negatives import Comparison, MemoryBank, MomentumQueue, compare_in_batch, spread_sample


class Mechanism(nn.Module):
    """An encoder and its source of negatives."""

    views_per_image: int  # how many views of each image a step needs
    encoder: Encoder

    def compare(self, views: Tensor, images: Tensor, step: int) -> Comparison:
        """Encode views [V, B, 3, S, S] of images [B] and say who is compared with whom."""
        raise NotImplementedError

    def update(self, comparison: Comparison, images: Tensor) -> None:
        """Change what the optimiser does not: called once a step, after it."""
        raise NotImplementedError


class MomentumContrast(Mechanism):
    """MoCo: keys from a slowly moving copy of the encoder, negatives from a queue of past keys."""

    views_per_image = 2

    def __init__(self, experiment: Experiment, encoder: Encoder, generator: torch.Generator) -> None:
        super().__init__()
        self.seed = experiment.seed
        self.shuffle = experiment.encoder.shuffle_keys
        self.momentum = experiment.negatives.momentum
        self.symmetric = experiment.negatives.symmetric
        self.encoder = encoder
        self.key_encoder = MomentumEncoder(encoder)
        self.queue = MomentumQueue(experiment.negatives.size, experiment.encoder.dimension, generator)

    def compare(self, views: Tensor, images: Tensor, step: int) -> Comparison:
        keys = self._keys(views[1], step)  # [B, D]
        query = self.encoder(views[0])  # [B, D]
        if self.symmetric:  # both directions at once: [2B, D]
            keys = torch.cat([keys, self._keys(views[0], step)])
            query = torch.cat([query, self.encoder(views[1])])
        return self.queue.compare(query, keys)

    def _keys(self, views: Tensor, step: int) -> Tensor:
        order = None
        if self.shuffle:
            order = philox.permutation(self.seed, philox.Stream.KEY_SHUFFLE, step, len(views)).to(views.device)  # [B]
        return self.key_encoder.encode(views, order)

    def update(self, comparison: Comparison, images: Tensor) -> None:
        self.key_encoder.update(self.encoder, self.momentum)
        self.queue.update(comparison.positive)


class EndToEnd(Mechanism):
    """SimCLR: the other images of the batch are the negatives, and gradients reach everything."""

    views_per_image = 2

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def compare(self, views: Tensor, images: Tensor, step: int) -> Comparison:
        # Both views of an image side by side, so that a group of batch statistics holds whole images.
        both = views.transpose(0, 1).flatten(0, 1)  # [2B, 3, S, S]
        return compare_in_batch(self.encoder(both))

    def update(self, comparison: Comparison, images: Tensor) -> None:
        pass


class MemoryBankContrast(Mechanism):
    """InsDisc: the positive is the image's own row of a memory bank, the negatives are sampled rows."""

    views_per_image = 1

    def __init__(self, experiment: Experiment, encoder: Encoder, images: int, generator: torch.Generator) -> None:
        super().__init__()
        self.seed = experiment.seed
        self.sampled = experiment.negatives.size
        self.encoder = encoder
        self.bank = MemoryBank(images, experiment.encoder.dimension, experiment.negatives.momentum, generator)

    def compare(self, views: Tensor, images: Tensor, step: int) -> Comparison:
        draws = philox.sample(self.seed, philox.Stream.BANK_SAMPLE, step, 2**31, self.sampled)  # [K]
        sampled = spread_sample(draws, len(self.bank.rows)).to(views.device)  # [K]
        return self.bank.compare(self.encoder(views[0]), images, sampled)

    def update(self, comparison: Comparison, images: Tensor) -> None:
        self.bank.update(comparison.query, images)


def build_mechanism(experiment: Experiment, images: int) -> Mechanism:
    """The mechanism of an experiment on a data set of `images` images, freshly initialised from its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        encoder = build_encoder(experiment.encoder, experiment.views.size)
    generator = torch.Generator().manual_seed(experiment.seed)
    if experiment.negatives.source == "queue":
        return MomentumContrast(experiment, encoder, generator)
    if experiment.negatives.source == "in-batch":
        return EndToEnd(encoder)
    return MemoryBankContrast(experiment, encoder, images, generator)
