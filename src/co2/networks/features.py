"""Features of plain (unaugmented) pictures, for kNN, galleries and everything that judges a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn


class PlainBatch(Protocol):
    """What `co2.views.loader.plain_batches` yields, as far as it matters here."""

    @property
    def indices(self) -> Tensor:
        """Which images of the source these are: [B]."""

    @property
    def views(self) -> tuple[Tensor, ...]:
        """One view of each, uint8: [B, 3, S, S]."""


def extract(
    network: nn.Module,
    batches: Iterable[PlainBatch],
    normalise: Callable[[Tensor], Tensor],
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Features [N, F] (float32, on `device`) and the images' indices [N] (on the CPU), in the order of the batches.

    `network` is a backbone (pooled features) or an encoder (unit features) on `device`; `normalise` turns uint8 views
    [B, 3, S, S] on the device into what the network takes. The network works in evaluation mode and is handed back
    with every sub-module in the mode it was in.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    features, indices = [], []
    with evaluation_mode(network), torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
        for batch in batches:
            images = normalise(batch.views[0].to(device, non_blocking=True))  # [B, 3, S, S]
            images = images.contiguous(memory_format=torch.channels_last)  # as convolutions want it
            features.append(network(images).float())  # [B, F]
            indices.append(batch.indices.cpu())  # [B]
    return torch.cat(features), torch.cat(indices)


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards each sub-module is back in its own mode, frozen ones included."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
