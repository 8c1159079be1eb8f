"""The forward passes that tell the methods apart: images in, a `Comparison` for the objective out.

Each mechanism is a module, so that its state dict is everything the method has learnt or keeps: encoders, queue, bank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from co2 import philox
from co2.config import Experiment
from co2.engine.distributed import Share
from co2.networks.backbones import UnsuitableViewSizeError, check_view_size
from co2.networks.batch_statistics import keep_views_together
from co2.networks.encoder import Encoder, build_encoder
from co2.networks.momentum import MomentumEncoder
from co2.networks.negatives import Comparison, MemoryBank, MomentumQueue, compare_in_batch, spread_sample


class Mechanism(nn.Module):
    """An encoder and its source of negatives.

    Where several processes train together, each sees its `Share` of a batch: b of B images. Alone, b = B.
    """

    encoder: Encoder
    lap: Callable[[str], None] = staticmethod(lambda part: None)
    """Called after each part of a step with its name; a stopwatch may stand here."""

    @property
    def directions(self) -> int:
        """How many losses are added up: 2 where each view is compared with the other, as the MoCo authors do it."""
        return 1

    def chances(self, steps: Tensor, images: int) -> Tensor:
        """What is random about these steps [T], of `images` images each, beside the views: [T, X], for each step a row.

        For many steps at once, because on a GPU the hundreds of small operations cost more than a step.
        """
        return steps.new_empty(len(steps), 0)

    def arrange(self, views: Tensor, share: Share, chance: Tensor) -> Tensor:
        """Views [V, b, 3, S, S] as they were loaded in, what `compare` takes out; both uint8."""
        return views

    def compare(self, views: Tensor, images: Tensor, share: Share, chance: Tensor) -> Comparison:
        """Encode arranged views [V, b, 3, S, S] of images [b] and say who is compared with whom."""
        raise NotImplementedError

    def forward(self, views: Tensor, images: Tensor, share: Share, chance: Tensor) -> Comparison:
        """What torch calls."""
        return self.compare(views, images, share, chance)

    def update(self, comparison: Comparison, images: Tensor, share: Share) -> None:
        """Change what the optimiser does not: called once a step, after it."""
        raise NotImplementedError


class MomentumContrast(Mechanism):
    """MoCo: keys from a slowly moving copy of the encoder, negatives from a queue of past keys."""

    def __init__(self, experiment: Experiment, encoder: Encoder, generator: torch.Generator) -> None:
        super().__init__()
        self.seed = experiment.seed
        self.shuffle = experiment.encoder.shuffle_keys
        self.momentum = experiment.negatives.momentum
        self.symmetric = experiment.negatives.symmetric
        self.encoder = encoder
        self.key_encoder = MomentumEncoder(encoder)
        self.queue = MomentumQueue(experiment.negatives.size, experiment.encoder.dimension, generator)

    @property
    def directions(self) -> int:
        return 2 if self.symmetric else 1

    def chances(self, steps: Tensor, images: int) -> Tensor:
        """In which order the key encoder sees the images of a batch: [T, B]."""
        return philox.permutations(self.seed, philox.Stream.KEY_SHUFFLE, steps, images)

    def arrange(self, views: Tensor, share: Share, chance: Tensor) -> Tensor:
        """Views for queries, then views for keys; these of other images, where keys are shuffled."""
        queries, keys = (views, views.flip(0)) if self.symmetric else views.split(1)  # [1 or 2, b, 3, S, S] each
        if self.shuffle:
            keys = share.shuffle(keys, chance)
        return torch.cat([queries, keys])  # [2 or 4, b, 3, S, S]

    def compare(self, views: Tensor, images: Tensor, share: Share, chance: Tensor) -> Comparison:
        queries, keys = views.chunk(2)
        all_keys = [self._keys(view, share, chance) for view in keys]  # [B, D] for each direction
        self.lap("key forward")
        query = torch.cat([self.encoder(view) for view in queries])  # [b, D], or both directions: [2b, D]
        positive = torch.cat([keys_of_one[share.rows] for keys_of_one in all_keys])  # likewise
        self.lap("query forward")
        return self.queue.compare(query, positive, fresh=torch.cat(all_keys))

    def _keys(self, views: Tensor, share: Share, chance: Tensor) -> Tensor:
        """Keys of the whole batch [B, D], in its order, of which this process encodes views [b, 3, S, S]."""
        features = self.key_encoder.encode(views)  # [b, D]
        return share.put_back(features, chance) if self.shuffle else share.gather(features)

    def update(self, comparison: Comparison, images: Tensor, share: Share) -> None:
        assert comparison.fresh is not None
        self.key_encoder.update(self.encoder, self.momentum)
        self.queue.update(comparison.fresh)


class EndToEnd(Mechanism):
    """SimCLR: the other images of the batch are the negatives, and gradients reach everything."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        keep_views_together(encoder, 2)

    def compare(self, views: Tensor, images: Tensor, share: Share, chance: Tensor) -> Comparison:
        # Both views of an image side by side, so that a group of batch statistics holds whole images.
        both = views.transpose(0, 1).flatten(0, 1)  # [2b, 3, S, S]
        embeddings = self.encoder(both).unflatten(0, (-1, 2))  # [b, 2, D]
        self.lap("query forward")
        return compare_in_batch(share.gather(embeddings).flatten(0, 1), share.rows)

    def update(self, comparison: Comparison, images: Tensor, share: Share) -> None:
        pass


class MemoryBankContrast(Mechanism):
    """InsDisc: the positive is the image's own row of a memory bank, the negatives are sampled rows."""

    def __init__(self, experiment: Experiment, encoder: Encoder, images: int, generator: torch.Generator) -> None:
        super().__init__()
        self.seed = experiment.seed
        self.sampled = experiment.negatives.size
        self.encoder = encoder
        self.bank = MemoryBank(images, experiment.encoder.dimension, experiment.negatives.momentum, generator)

    def chances(self, steps: Tensor, images: int) -> Tensor:
        """For each of K equal stretches of the bank the place of the row that serves as a negative: [T, K]."""
        return philox.samples(self.seed, philox.Stream.BANK_SAMPLE, steps, 2**31, self.sampled)

    def compare(self, views: Tensor, images: Tensor, share: Share, chance: Tensor) -> Comparison:
        sampled = spread_sample(chance, len(self.bank.rows)).to(views.device)  # [K]
        query = self.encoder(views[0])  # [b, D]
        self.lap("query forward")
        return self.bank.compare(query, images, sampled)

    def update(self, comparison: Comparison, images: Tensor, share: Share) -> None:
        self.bank.update(share.gather(comparison.query.detach()), share.gather(images))


def build_mechanism(experiment: Experiment, images: int) -> Mechanism:
    """The mechanism of an experiment on a data set of `images` images, freshly initialised from its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        encoder = build_encoder(experiment.encoder, experiment.views.size)
        for size in experiment.views.earlier_sizes:
            try:
                check_view_size(encoder.backbone, experiment.encoder.backbone, size)
            except UnsuitableViewSizeError as error:
                raise error.by("--views.earlier-sizes") from error
    generator = torch.Generator().manual_seed(experiment.seed)
    if experiment.negatives.source == "queue":
        return MomentumContrast(experiment, encoder, generator)
    if experiment.negatives.source == "in-batch":
        return EndToEnd(encoder)
    return MemoryBankContrast(experiment, encoder, images, generator)
