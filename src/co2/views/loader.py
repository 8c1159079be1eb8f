"""Batches of views: images are read and views are made by worker processes, in an order that only the seed decides.

A view depends on (seed, epoch, image, view) alone, so that the number of workers, the batch size and a start in the
middle of an epoch change nothing about it. An image that cannot be read never stops a run: it is passed over and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from co2.data.source import BadImage, ImageSource, readable
from co2.errors import UserError
from co2.machine.workers import Workers, in_parts, results_of
from co2.philox import Stream, permutation
from co2.views.parameters import draw_then, draw_views
from co2.views.transform import make_views, plain_view
from co2.views.view import View, made_together

_BYTES_HELD = 64 << 20  # a batch of photographs can be gigabytes: only so much of it is decoded at a time


@dataclass(frozen=True)
class Batch:
    """Some images, and their views."""

    indices: Tensor
    """int64 [B]: which images of the source these are."""
    views: tuple[Tensor, ...]
    """uint8 [B, 3, S, S], one for each `View`, of its size"""
    bad: list[tuple[int, str]]
    """Index of each image that could not be read, and why."""
    total: int
    """Images in the whole batch, where several processes hold a part of it each."""
    made: tuple[Mapping[str, Tensor], ...] = ()
    """For each view what was drawn for what follows it, [B, ...] each, and none at all where nothing does. What follows
    (`View.then`) makes several pictures of a view: [B, k, 3, s, s]."""

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader, to copy to a GPU without waiting."""
        return self.each(Tensor.pin_memory)

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor in it changed."""
        made = tuple({name: change(drawn) for name, drawn in view.items()} for view in self.made)
        return replace(self, indices=change(self.indices), views=tuple(map(change, self.views)), made=made)


class ViewLoader:
    """Augmented views of the images of a source, epoch by epoch, in batches: for each image one of each of `views`.

    An epoch visits every image once, in an order that is a function of (seed, epoch). The last batch of an epoch may
    be shorter; one with fewer than `smallest` images is left out, because batch statistics need two in each group. An
    image that cannot be read is replaced by the next one in the source that can, so that batches keep their size.

    Several processes load the same batches together: `share` tells each which rows of a batch of so many are its own.

    With `workers` = 0 the views are made in this process. Otherwise the workers live as long as the loader, and serve
    one epoch at a time.
    """

    def __init__(
        self,
        source: ImageSource,
        views: Sequence[View],
        *,
        batch_size: int,
        seed: int,
        workers: int = 0,
        smallest: int = 2,
        share: Callable[[int], slice] = slice,
    ) -> None:
        if batch_size < 2:
            raise UserError(f"A batch of {batch_size} has nothing to contrast: give --batch-size at least 2.")
        if batch_size > len(source):
            raise UserError(
                f"A batch of {batch_size} is larger than the data set of {len(source)} images: "
                f"give --batch-size at most {len(source)}, or more images."
            )
        self._views = tuple(views)
        self._length = len(source)
        self._batch_size = batch_size
        self._seed = seed
        self._smallest = smallest
        self._share = share
        self.workers: Workers[Any, Any] = Workers(self._work(source), workers)

    def _work(self, source: ImageSource) -> Callable[[Any], Any]:
        """What workers do."""
        return _AugmentedViews(source, self._seed)

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(self._length, self._batch_size)
        return whole + (rest >= self._smallest)

    def epoch(self, number: int, first_batch: int = 0, views: Sequence[View] = ()) -> Iterator[Batch]:
        """The batches of an epoch, from number `first_batch` on, with other views than the loader's if given: they may
        be smaller in earlier epochs."""
        wholes, own = self._batches(number, first_batch)
        # As arrays, which travel to the workers in a message; tensors would each take a piece of shared memory.
        made = self.workers.results([(number, images.numpy(), views or self._views) for images in own])
        for batch, whole in zip(made, wholes, strict=True):
            yield replace(batch, total=len(whole))

    def _batches(self, epoch: int, first: int) -> tuple[list[Tensor], list[Tensor]]:
        """The images [B] of each batch from number `first` on, and those of them [b] that are this process's."""
        order = permutation(self._seed, Stream.EPOCH_ORDER, epoch, self._length)  # [N]
        wholes = list(order.split(self._batch_size)[first : self.batches_per_epoch])
        return wholes, [whole[self._share(len(whole))] for whole in wholes]


def plain_batches(source: ImageSource, size: int, batch_size: int, workers: int) -> Iterator[Batch]:
    """Every image once, in the order of the source, without augmentation: for features and evaluation.

    There is one view, [B, 3, size, size]. An image that cannot be read is left out and named, so that a batch may be
    shorter than the others; none is empty.
    """
    ready: Batch | None = None  # given out when the next one is there, so that it can report for empty ones after it
    for batch in results_of(_PlainViews(source, size), in_parts(range(len(source)), batch_size), workers):
        if ready is None:
            ready = batch
        elif len(ready.indices) == 0 or len(batch.indices) == 0:
            fuller = max(ready, batch, key=lambda one: len(one.indices))
            ready = replace(fuller, bad=ready.bad + batch.bad)
        else:
            yield ready
            ready = batch
    if ready is None or len(ready.indices) == 0:
        raise UserError(f"None of the {len(source)} images could be read. Are the files where they were?")
    yield ready


class _AugmentedViews:
    def __init__(self, source: ImageSource, seed: int) -> None:
        self.source = source
        self.seed = seed

    def __call__(self, entry: tuple[int, np.ndarray, Sequence[View]]) -> Batch:
        epoch, wanted, views = entry
        made = tuple(torch.empty(len(wanted), 3, view.size, view.size, dtype=torch.uint8) for view in views)
        indices: list[int] = []
        bad: dict[int, str] = {}
        held: list[Tensor] = []  # decoded images, the last of `indices`, whose views are still to be made
        bytes_held = 0

        with _one_thread():
            for index in wanted.tolist():
                used, image = readable(self.source, self.source.image, index, bad)
                indices.append(used)
                held.append(image)
                bytes_held += image.numel()
                if len(indices) == len(wanted) or bytes_held > _BYTES_HELD:
                    done = len(indices) - len(held)
                    write_views([one[done:] for one in made], held, indices[done:], views, self.seed, epoch)
                    held, bytes_held = [], 0
        batch = Batch(torch.tensor(indices), made, list(bad.items()), len(indices))
        return followed(batch, views, self.seed, epoch)


def followed(batch: Batch, views: Sequence[View], seed: int, epoch: int) -> Batch:
    """The batch with what follows its views, where something does."""
    if all(view.then is None for view in views):
        return batch
    made: list[tuple[Tensor, Mapping[str, Tensor]]] = []
    for number, (view, pictures) in enumerate(zip(views, batch.views, strict=True)):
        if view.then is None:
            made.append((pictures, {}))
        else:
            made.append(view.then.apply(pictures, draw_then(view.then, seed, epoch, batch.indices, number)))
    all_pictures, drawn = zip(*made, strict=True)
    return replace(batch, views=all_pictures, made=drawn)


def write_views(
    into: Sequence[Tensor], images: list[Tensor], indices: list[int], views: Sequence[View], seed: int, epoch: int
) -> None:
    """Write the views of these images, uint8 [3, H, W] each, into the first places of `into`, [B, 3, S, S] each."""
    heights, widths = torch.tensor([image.shape[-2:] for image in images]).unbind(1)  # [n] each
    for together, how in made_together(views):
        shape = (1, len(together), len(images))
        columns = (column.expand(shape) for column in (torch.tensor(indices), heights, widths))
        made = make_views(images * len(together), draw_views(together, seed, epoch, *columns), how)  # [V * n, 3, S, S]
        for number, view in zip(together, made.split(len(images)), strict=True):
            into[number][: len(images)] = view


class _PlainViews:
    def __init__(self, source: ImageSource, size: int) -> None:
        self.source = source
        self.size = size

    def __call__(self, wanted: range) -> Batch:
        views = torch.empty(len(wanted), 3, self.size, self.size, dtype=torch.uint8)
        indices: list[int] = []
        bad: list[tuple[int, str]] = []
        with _one_thread():
            for index in wanted:
                try:
                    image = self.source.image(index)
                except BadImage as error:
                    bad.append((index, str(error)))
                    continue
                views[len(indices)] = plain_view(image, self.size)
                indices.append(index)
        return Batch(torch.tensor(indices, dtype=torch.int64), (views[: len(indices)],), bad, len(indices))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over an image come out the same with any number of workers only if one thread adds them up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
