"""Batches of views: images are read and views are made by worker processes, in an order that only the seed decides.

A view depends on (seed, epoch, image, view) alone, so that the number of workers, the batch size and a start in the
middle of an epoch change nothing about it. An image that cannot be read never stops a run: it is passed over and named.
"""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling

from co2.data.source import BadImage, ImageSource
from co2.errors import RunError, UserError
from co2.machine import end_with_parent
from co2.philox import Stream, permutation
from co2.views.batched import LARGEST_SIZE, make_views
from co2.views.parameters import draw
from co2.views.specification import Augmentation
from co2.views.transform import make_view, plain_view

BAD_IN_A_ROW = 50  # so many unreadable images one after the other are no accident
_WORKERS_TO_LOSE = 3  # and to replace without ado, in the life of a loader
_BYTES_HELD = 64 << 20  # a batch of photographs can be gigabytes: only so much of it is decoded at a time


class WorkerLost(RunError):  # noqa: N818 - it names what happened, in the user's words
    """A process that prepares images was ended by the system."""


@dataclass(frozen=True)
class Batch:
    """Some images, and their views."""

    indices: Tensor
    """int64 [B]: which images of the source these are."""
    views: Tensor
    """uint8 [V, B, 3, S, S]"""
    bad: list[tuple[int, str]]
    """Index of each image that could not be read, and why."""
    total: int
    """Images in the whole batch, where several processes hold a part of it each."""

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader, to copy to a GPU without waiting."""
        return replace(self, indices=self.indices.pin_memory(), views=self.views.pin_memory())


class ViewLoader:
    """Augmented views of the images of a source, epoch by epoch, in batches.

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
        augmentation: Augmentation,
        *,
        views: int,
        batch_size: int,
        seed: int,
        workers: int,
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
        self._length = len(source)
        self._batch_size = batch_size
        self._seed = seed
        self._smallest = smallest
        self._share = share
        self.workers = Workers(self._work(source, augmentation, views, seed), workers)

    @staticmethod
    def _work(source: ImageSource, augmentation: Augmentation, views: int, seed: int) -> Dataset[Any]:
        """What workers do."""
        return _AugmentedViews(source, augmentation, views, seed)

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(self._length, self._batch_size)
        return whole + (rest >= self._smallest)

    def epoch(self, number: int, first_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `first_batch` on."""
        wholes, own = self._batches(number, first_batch)
        for batch, whole in zip(self.workers.results(own, number), wholes, strict=True):
            yield replace(batch, total=len(whole))

    def _batches(self, epoch: int, first: int) -> tuple[list[Tensor], list[Tensor]]:
        """The images [B] of each batch from number `first` on, and those of them [b] that are this process's."""
        order = permutation(self._seed, Stream.EPOCH_ORDER, epoch, self._length)  # [N]
        wholes = list(order.split(self._batch_size)[first : self.batches_per_epoch])
        return wholes, [whole[self._share(len(whole))] for whole in wholes]


def plain_batches(source: ImageSource, size: int, batch_size: int, workers: int) -> Iterator[Batch]:
    """Every image once, in the order of the source, without augmentation: for features and evaluation.

    Views are [1, B, 3, size, size]. An image that cannot be read is left out and named, so that a batch may be shorter
    than the others; none is empty.
    """
    ready: Batch | None = None  # given out when the next one is there, so that it can report for empty ones after it
    for batch in Workers(_PlainViews(source, size), workers).results(torch.arange(len(source)).split(batch_size)):
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


class Workers:
    """Processes that prepare images; where `count` is 0, this process does it itself.

    They begin when results are first wanted, and serve whoever wants some, one after the other, until `end`.
    """

    def __init__(self, work: Dataset[Any], count: int) -> None:
        """`work.__getitems__` makes one result of a list of (epoch, index)."""
        self._batches = _BatchesOfAnEpoch()
        self._loader: DataLoader[Any] = DataLoader(
            work,
            batch_sampler=self._batches,
            num_workers=count,
            collate_fn=_as_it_is,
            worker_init_fn=_begin_worker,
            persistent_workers=count > 0,
            pin_memory=torch.cuda.is_available(),
        )
        self.lost = 0
        """How many the system has ended so far. A few are replaced; more than that are no accident."""
        _all_workers.add(self)

    def results(self, wanted: Sequence[Tensor], epoch: int = 0) -> Generator[Any, None, None]:
        """What is made of each of these lists of images [b], in order."""
        done = 0
        while done < len(wanted):
            self._batches.epoch = epoch
            self._batches.batches = wanted[done:]
            try:
                for result in _checked(self._loader):
                    yield result
                    done += 1
            except WorkerLost:
                self.end()  # workers keep no state: new ones go on where these were
                self.lost += 1
                if self.lost > _WORKERS_TO_LOSE:
                    raise

    def end(self) -> None:
        """End the processes. New ones begin when results are wanted again."""
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class _BatchesOfAnEpoch(Sampler[list[tuple[int, int]]]):
    """Tells workers what to do next: a list of (epoch, index). Set before each epoch; workers keep no state."""

    epoch = 0
    batches: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        return ([(epoch, index) for index in indices.tolist()] for indices in self.batches)


class _AugmentedViews(Dataset[Any]):
    def __init__(self, source: ImageSource, augmentation: Augmentation, views: int, seed: int) -> None:
        self.source = source
        self.augmentation = augmentation
        self.views = views
        self.seed = seed

    def __getitems__(self, wanted: list[tuple[int, int]]) -> Batch | UserError:
        epoch = wanted[0][0]
        size = self.augmentation.size
        views = torch.empty(self.views, len(wanted), 3, size, size, dtype=torch.uint8)
        indices: list[int] = []
        bad: dict[int, str] = {}
        held: list[Tensor] = []  # decoded images, the last of `indices`, whose views are still to be made
        bytes_held = 0

        with _one_thread():
            for _, index in wanted:
                try:
                    used, image = readable(self.source, index, bad)
                except UserError as error:
                    return error  # as a value, because torch wraps what a worker raises in a page of traceback
                indices.append(used)
                held.append(image)
                bytes_held += image.numel()
                if len(indices) == len(wanted) or bytes_held > _BYTES_HELD:
                    done = len(indices) - len(held)
                    self._make(epoch, indices[done:], held, views[:, done:])
                    held, bytes_held = [], 0
        return Batch(torch.tensor(indices), views, list(bad.items()), len(indices))

    def _make(self, epoch: int, indices: list[int], images: list[Tensor], views: Tensor) -> None:
        """Write the views of these images into the first places of `views` [V, B, 3, S, S]."""
        augmentation, count = self.augmentation, len(images)
        numbers = torch.arange(self.views).repeat_interleave(count)  # [V * B]
        heights, widths = torch.tensor([image.shape[-2:] for image in images] * self.views).unbind(1)  # [V * B] each
        drawn = draw(augmentation, self.seed, epoch, torch.tensor(indices * self.views), numbers, heights, widths)
        made = views[:, :count]  # [V, B, 3, S, S]
        if augmentation.size <= LARGEST_SIZE:
            made.copy_(make_views(images * self.views, drawn, augmentation).view_as(made))
            return
        for place, row in enumerate(drawn.rows()):
            view, image = divmod(place, count)
            made[view, image] = make_view(images[image], row, augmentation)


class _PlainViews(Dataset[Any]):
    def __init__(self, source: ImageSource, size: int) -> None:
        self.source = source
        self.size = size

    def __getitems__(self, wanted: list[tuple[int, int]]) -> Batch:
        views = torch.empty(1, len(wanted), 3, self.size, self.size, dtype=torch.uint8)
        indices: list[int] = []
        bad: list[tuple[int, str]] = []
        with _one_thread():
            for _, index in wanted:
                try:
                    image = self.source.image(index)
                except BadImage as error:
                    bad.append((index, str(error)))
                    continue
                views[0, len(indices)] = plain_view(image, self.size)
                indices.append(index)
        return Batch(torch.tensor(indices, dtype=torch.int64), views[:, : len(indices)], bad, len(indices))


def readable(source: ImageSource, index: int, bad: dict[int, str]) -> tuple[int, Tensor]:
    """The image at `index`, or the next one that can be read: a function of `index`, whichever worker asks.

    Writes down in `bad` what was passed over on the way.
    """
    for step in range(min(BAD_IN_A_ROW, len(source))):
        used = (index + step) % len(source)
        try:
            return used, source.image(used)
        except BadImage as error:
            bad[used] = str(error)
    raise too_many_in_a_row(source, step + 1, used, bad[used])


def too_many_in_a_row(source: ImageSource, count: int, last: int, reason: str) -> RunError:
    """To be raised when `count` images up to number `last` could not be read, that one for this reason."""
    return RunError(
        f"{count} images in a row could not be read, the last one being {source.describe(last)} ({reason}). "
        "Is the folder with the images still there? A training run can be continued with --resume."
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over an image come out the same with any number of workers only if one thread adds them up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# When a worker dies, torch raises an error in the main thread, wherever that is just then: in the middle of a step,
# say. Without its signal handler the death is noticed where the next batch is waited for, a few seconds later.
signal_handling._SIGCHLD_handler_set = True

_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _end_all_workers() -> None:
    """Python ends with a SIGTERM for workers that are still there, and waits; but they do not listen to it."""
    for workers in list(_all_workers):
        workers.end()


# Ctrl-C, and a launcher's SIGTERM, reach a run's workers too. The run finishes its step, for which it needs them.
_NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes that are started in here take over that these signals wait. In this one they arrive afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(worker: int) -> None:
    for number in _NOT_FOR_WORKERS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def _as_it_is(batch: Any) -> Any:  # by name, because a worker that is not forked cannot be sent a lambda
    return batch


def _checked(loader: DataLoader[Any]) -> Iterator[Any]:
    """What a loader gives; what went wrong in a worker is told in a plain sentence."""
    try:
        with _signals_held_back():  # from workers that are just beginning
            results = iter(loader)
        for result in results:
            if isinstance(result, UserError):
                # A new one: an error that is also a variable of the frame it remembers is only freed by the garbage
                # collector, and with it the loader, whose workers then take seconds to end.
                raise type(result)(str(result))
            yield result
    except (RuntimeError, ConnectionError, EOFError) as error:
        # The connection to a worker breaks when it is ended in the middle of handing something over.
        broken = loader.num_workers > 0 and isinstance(error, ConnectionError | EOFError)
        if not broken and "DataLoader worker" not in str(error):
            raise
        raise WorkerLost(
            f"A process that prepares images was ended by the system ({error}). Most often memory ran out, or "
            "shared memory (/dev/shm) is too small: try fewer --workers, or 0."
        ) from error
