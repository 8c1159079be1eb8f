"""The forward passes that tell the methods apart: images in, a `Comparison` for the objective out.

Each mechanism is a module, so that its state dict is everything the method has learnt or keeps: encoders, queue, bank.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from co2 import philox
from co2.config import Experiment
from co2.encoders.batch_statistics import keep_views_together
from co2.encoders.encoder import Encoder, build_encoder
from co2.encoders.momentum import MomentumEncoder
from co2.engine.distributed import Share
from co2.objective.negatives import Comparison, MemoryBank, MomentumQueue, compare_in_batch, spread_sample


class Mechanism(nn.Module):
    """An encoder and its source of negatives.

    Where several processes train together, each sees its `Share` of a batch: b of B images. Alone, b = B.
    """

    views_per_image: int  # how many views of each image a step needs
    encoder: Encoder

    def arrange(self, views: Tensor, share: Share, step: int) -> Tensor:
        """Views [V, b, 3, S, S] as they were loaded in, what `compare` takes out; both uint8."""
        return views

    def compare(self, views: Tensor, images: Tensor, share: Share, step: int) -> Comparison:
        """Encode arranged views [V, b, 3, S, S] of images [b] and say who is compared with whom."""
        raise NotImplementedError

    def forward(self, views: Tensor, images: Tensor, share: Share, step: int) -> Comparison:
        """What torch calls."""
        return self.compare(views, images, share, step)

    def update(self, comparison: Comparison, images: Tensor, share: Share) -> None:
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

    def arrange(self, views: Tensor, share: Share, step: int) -> Tensor:
        """Views for queries, then views for keys; these of other images, where keys are shuffled."""
        queries, keys = (views, views.flip(0)) if self.symmetric else views.split(1)  # [1 or 2, b, 3, S, S] each
        if self.shuffle:
            keys = share.shuffle(keys, _key_order(self.seed, step, share.total))
        return torch.cat([queries, keys])  # [2 or 4, b, 3, S, S]

    def compare(self, views: Tensor, images: Tensor, share: Share, step: int) -> Comparison:
        queries, keys = views.chunk(2)
        all_keys = [self._keys(view, share, step) for view in keys]  # [B, D] for each direction
        query = torch.cat([self.encoder(view) for view in queries])  # [b, D], or both directions: [2b, D]
        positive = torch.cat([keys_of_one[share.rows] for keys_of_one in all_keys])  # likewise
        return self.queue.compare(query, positive, fresh=torch.cat(all_keys))

    def _keys(self, views: Tensor, share: Share, step: int) -> Tensor:
        """Keys of the whole batch [B, D], in its order, of which this process encodes views [b, 3, S, S]."""
        features = self.key_encoder.encode(views)  # [b, D]
        if self.shuffle:
            return share.put_back(features, _key_order(self.seed, step, share.total))
        return share.gather(features)

    def update(self, comparison: Comparison, images: Tensor, share: Share) -> None:
        assert comparison.fresh is not None
        self.key_encoder.update(self.encoder, self.momentum)
        self.queue.update(comparison.fresh)


@lru_cache(maxsize=1)
def _key_order(seed: int, step: int, images: int) -> Tensor:
    """In which order the key encoder sees the images of a batch: [B], on the CPU."""
    return philox.permutation(seed, philox.Stream.KEY_SHUFFLE, step, images)


class EndToEnd(Mechanism):
    """SimCLR: the other images of the batch are the negatives, and gradients reach everything."""

    views_per_image = 2

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        keep_views_together(encoder, self.views_per_image)

    def compare(self, views: Tensor, images: Tensor, share: Share, step: int) -> Comparison:
        # Both views of an image side by side, so that a group of batch statistics holds whole images.
        both = views.transpose(0, 1).flatten(0, 1)  # [2b, 3, S, S]
        embeddings = self.encoder(both).unflatten(0, (-1, 2))  # [b, 2, D]
        return compare_in_batch(share.gather(embeddings).flatten(0, 1), share.rows)

    def update(self, comparison: Comparison, images: Tensor, share: Share) -> None:
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

    def compare(self, views: Tensor, images: Tensor, share: Share, step: int) -> Comparison:
        draws = philox.sample(self.seed, philox.Stream.BANK_SAMPLE, step, 2**31, self.sampled)  # [K]
        sampled = spread_sample(draws, len(self.bank.rows)).to(views.device)  # [K]
        return self.bank.compare(self.encoder(views[0]), images, sampled)

    def update(self, comparison: Comparison, images: Tensor, share: Share) -> None:
        self.bank.update(share.gather(comparison.query.detach()), share.gather(images))


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
