"""Processes that prepare images: for training, for evaluations, for packs."""

from __future__ import annotations

import atexit
import copy
import mmap
import multiprocessing
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, dataloader
from torch.utils.data._utils import signal_handling

from co2.errors import RunError, UserError
from co2.machine.process import end_with_parent

Entry = TypeVar("Entry")
Result = TypeVar("Result")

_TO_LOSE = 3  # and to replace without ado, in the life of a `Workers`


class WorkerLost(RunError):  # noqa: N818 - it names what happened, in the user's words
    """A process that prepares images was ended by the system."""


class Workers(Generic[Entry, Result]):
    """Processes that make something of entries; where `count` is 0, this process does it itself.

    They begin when results are first wanted, and serve whoever wants some, one after the other, until `end`.
    """

    def __init__(self, make: Callable[[Entry], Result], count: int, *, tensors: bool = True) -> None:
        """`make` is copied into each process. `tensors`: they are handed over in shared memory, and wait where a GPU
        can read them, if there is one; other results are sent through a pipe."""
        self._wanted: _Wanted[Entry] = _Wanted()
        self._loader: DataLoader[Any] = DataLoader(
            _Made(make, packed=tensors and count > 0),
            sampler=self._wanted,
            batch_size=None,  # an entry is a batch already
            num_workers=count,
            collate_fn=_as_it_is,
            worker_init_fn=_begin_worker,
            multiprocessing_context=_context() if count > 0 else None,
            persistent_workers=count > 0,
            pin_memory=tensors and torch.cuda.is_available(),
            generator=torch.Generator(),  # of its own: from torch's it would take a number for each epoch
        )
        self._by_pipe = count > 0 and not tensors
        self.lost = 0
        """How many the system has ended so far. A few are replaced; more than that are no accident."""
        _all_workers.add(self)

    def results(self, wanted: Sequence[Entry]) -> Generator[Result, None, None]:
        """What is made of each of these entries, in order."""
        done = 0
        while done < len(wanted):
            self._wanted.entries = wanted[done:]
            try:
                for result in _checked(self._loader, self._by_pipe):
                    yield result
                    done += 1
            except WorkerLost:
                self.end()  # workers keep no state: new ones go on where these were
                self.lost += 1
                if self.lost > _TO_LOSE:
                    raise

    def end(self) -> None:
        """End the processes. New ones begin when results are wanted again."""
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


def results_of(
    make: Callable[[Entry], Result], wanted: Sequence[Entry], workers: int, *, tensors: bool = True
) -> Iterator[Result]:
    """What is made of each of these entries, in order, by processes that end with the last one, or with the wish for
    more."""
    making = Workers(make, workers, tensors=tensors)
    try:
        yield from making.results(wanted)
    finally:
        # Not when nobody knows them any more: whoever keeps an error keeps them with it, and a process does not end
        # while it has workers.
        making.end()


def in_parts(numbers: range, size: int) -> list[range]:
    """The numbers, so many to an entry; the last one may have fewer."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


class _Flag:
    """What torch needs of multiprocessing's Event, by which it tells workers to end, but without a lock.

    Every worker looks at it before each entry. One that is killed while it holds the Event's lock keeps it for ever,
    and whoever looks next waits as long: a run would stand still instead of replacing the worker.
    """

    def __init__(self) -> None:
        self._raised = multiprocessing.RawValue("b", 0)

    def set(self) -> None:
        self._raised.value = 1

    def is_set(self) -> bool:
        return bool(self._raised.value)


def _context() -> Any:
    """How processes are started: as usual, but for the flag."""
    context: Any = copy.copy(multiprocessing.get_context())
    context.Event = _Flag
    return context


class _Wanted(Sampler[Entry]):
    """Tells workers what to do next."""

    entries: Sequence[Entry] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


class _Made(Dataset[Any]):
    """What workers do."""

    def __init__(self, make: Callable[[Any], Any], packed: bool) -> None:
        self.make = make
        self.packed = packed

    def __getitem__(self, entry: Any) -> Any:
        try:
            result = self.make(entry)
            return _Packed(result) if self.packed else result
        except UserError as error:
            return error  # as a value, because torch wraps what a worker raises in a page of traceback


class _Packed:
    """A result that a worker is about to hand over; it arrives as what it was.

    It is packed where a failure can still be told. The queue does so in a thread of its own, which would lose the
    result, and whoever wants it would wait for ever.
    """

    def __init__(self, result: Any) -> None:
        try:
            self._message = bytes(ForkingPickler.dumps(result))
        except OSError as error:
            raise RunError(
                f"A process that prepares images cannot hand them over ({error.strerror}). Try fewer --workers, or 0."
            ) from error

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return ForkingPickler.loads, (self._message,)


def _shared(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """How a worker hands over a tensor: in memory that has no name.

    torch takes memory from /dev/shm. Containers have 64 MiB there, which two batches may fill; memory without a name is
    bounded by nothing but the machine's.
    """
    with os.fdopen(os.memfd_create("images"), "wb") as file:
        file.truncate(max(1, tensor.nbytes))
        _mapped(file.fileno(), tensor.shape, tensor.dtype).copy_(tensor)
        return _received, (DupFd(file.fileno()), tensor.shape, tensor.dtype)


def _mapped(file: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The tensor in a piece of memory, which is there for as long as the tensor is."""
    memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _received(handle: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    with os.fdopen(handle.detach(), "rb") as file:
        return _mapped(file.fileno(), shape, dtype)


def _as_it_is(result: Any) -> Any:  # by name, because a worker that is not forked cannot be sent a lambda
    return result


def _checked(loader: DataLoader[Any], by_pipe: bool) -> Iterator[Any]:
    """What a loader gives; what went wrong in a worker is told in a plain sentence."""
    try:
        with _signals_held_back():  # from workers that are just beginning
            results = iter(loader)
    except OSError as error:
        raise RunError(
            f"Processes that prepare images cannot be started ({error.strerror}). Try fewer --workers, or 0."
        ) from error
    try:
        if by_pipe:
            _end_half_messages(results)
        for result in results:
            if isinstance(result, UserError):
                # A new one: an error that is also a variable of the frame it remembers is only freed by the garbage
                # collector, and with it the loader, whose workers then take seconds to end.
                raise type(result)(str(result))
            yield result
    except (RuntimeError, OSError, EOFError) as error:
        # The connection to a worker breaks when it is ended in the middle of handing something over. An OSError without
        # a number is not the system's: multiprocessing tells of half a message with one.
        half = isinstance(error, OSError) and error.errno is None
        broken = loader.num_workers > 0 and (half or isinstance(error, ConnectionError | EOFError))
        if not broken and "DataLoader worker" not in str(error):
            raise
        raise WorkerLost(
            f"A process that prepares images was ended by the system ({error}). Most often memory ran out: try fewer "
            "--workers, or 0."
        ) from error


def _end_half_messages(iterator: Any) -> None:
    """Let a worker's death end what it was just sending.

    Whoever reads a large message waits for the rest of it until nobody holds the writing end of the pipe any more. This
    process does, and so do the other workers.
    """
    pipe = iterator._worker_result_queue._writer
    if not pipe.closed:  # else these are workers from before, which are watched
        pipe.close()
        about = (list(iterator._workers), iterator._workers_done_event)  # not itself: who knows it keeps it
        threading.Thread(target=_end_with_the_first, args=about, daemon=True).start()


def _end_with_the_first(workers: list[Any], to_end: _Flag) -> None:
    connection.wait([worker.sentinel for worker in workers])
    if not to_end.is_set():
        for worker in workers:
            worker.kill()


# More of them than cores is what the user asked for, and torch would say so at length, in its own words.
warnings.filterwarnings("ignore", message="This DataLoader will create", module=r"torch\.utils\.data")

# When a worker dies, torch raises an error in the main thread, wherever that is just then: in the middle of a step,
# say. Without its signal handler the death is noticed where the next result is waited for, a few seconds later.
signal_handling._SIGCHLD_handler_set = True

# An iterator that could not even be made complains when it is cleared up unless it has this.
dataloader._MultiProcessingDataLoaderIter._shutdown = True

_all_workers: weakref.WeakSet[Workers[Any, Any]] = weakref.WeakSet()


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
    if hasattr(os, "memfd_create"):  # else torch's own way stays
        ForkingPickler.register(Tensor, _shared)
    end_with_parent()
