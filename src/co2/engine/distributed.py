"""Many processes that train as one. The only file that imports torch.distributed.

A batch is shared out: each process takes the rows of the groups of batch statistics that it computes, so that W
processes with G / W groups each compute what one process with G groups computes, image for image and view for view.
What has to be exchanged on the way is here: shuffled key views, features, statistics and gradients; and, because only
the first process writes and prints, what it has decided or found wrong.

Two roads lead from process to process. Tensors of the training step take the fast one (NCCL between GPUs). Words, such
as errors, requests to stop and checkpoints, take gloo, which has patience and does not make the CPU wait for a GPU.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import itertools
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from co2.errors import RunError, UserError
from co2.machine.process import Launch, read_launch
from co2.networks.batch_statistics import group_batch_statistics, nearly_equal, synchronise_batch_statistics
from co2.views.loader import Batch

# The others wait this long while the first process measures or writes. One that has died is noticed at once all the
# same: its connections close, and the launcher ends the rest.
PATIENCE = timedelta(hours=4)

Result = TypeVar("Result")
Mistake = tuple[str, int]  # what to tell the user, and the exit code


@dataclass
class Processes:
    """The processes that train together, seen from one of them."""

    launch: Launch
    fast_group: dist.ProcessGroup | None = None  # for tensors on the device; none where there is nobody to talk to

    @property
    def count(self) -> int:
        return self.launch.count

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.launch.is_first

    def use(self, device: torch.device) -> None:
        """Exchange tensors of the training step on this device from now on."""
        if self.count == 1:
            return
        if len(set(self._everyone(device.type))) > 1:
            raise SharedError("Some processes have a GPU and others have none. Use --device cpu for all, or GPUs.", 2)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.fast_group = dist.new_group(backend="nccl") if device.type == "cuda" else dist.group.WORLD

    # What the processes tell each other.

    def first(self, work: Callable[[], Result]) -> Result:
        """Something that the first process does alone while the others wait. All get its result, or its mistake."""
        if self.count == 1:
            return work()
        outcome: list[Any] = [*_attempt(work)] if self.is_first else [None, None]
        dist.broadcast_object_list(outcome, src=0)
        result, mistake = outcome
        if mistake is not None:
            raise SharedError(*mistake)
        return cast(Result, result)

    def each(self, work: Callable[[], Result]) -> Result:
        """Something that every process does. What one of them finds wrong, all raise."""
        if self.count == 1:
            return work()
        result, mistake = _attempt(work)
        if self.largest(mistake is not None)[0]:
            self._raise_together(mistake)
        return cast(Result, result)  # there was no mistake, so there is a result

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, each when all processes have their part of it; `bad` names the bad images of all parts."""
        if self.count == 1:
            yield from batches
            return
        while True:
            batch, mistake = _attempt(lambda: next(batches, None))
            failed, bad_images = self.largest(mistake is not None, len(batch.bad) if batch else 0)
            if failed:
                self._raise_together(mistake)
            if batch is None:
                return
            yield replace(batch, bad=self.joined(batch.bad)) if bad_images else batch

    def joined(self, items: list[Result]) -> list[Result]:
        """The lists of all processes, one after the other."""
        return [item for items_of_one in self._everyone(items) for item in items_of_one]

    def largest(self, *numbers: int) -> list[int]:
        """Of each number the largest that any process gives."""
        if self.count == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return [int(value) for value in values]

    def _raise_together(self, mistake: Mistake | None) -> NoReturn:
        raise SharedError(*next(found for found in self._everyone(mistake) if found is not None))

    def _everyone(self, thing: Result) -> list[Result]:
        """What each of the processes gives."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        dist.all_gather_object(things, thing)
        return things

    # What they compute together.

    def share(self, images: int, groups: int) -> Share:
        """Which part of a batch of `images` images, in `groups` groups of batch statistics, this process works on."""
        bounds = nearly_equal(images, max(groups, self.count))
        return Share(self, tuple(bounds[:: max(groups, self.count) // self.count]))

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes."""
        return self._sum(tensor) / self.count

    def divide_statistics(self, module: nn.Module, groups: int) -> None:
        """Leave to this process its part of the groups of batch statistics; one group is computed by all together."""
        if groups > 1:
            group_batch_statistics(module, groups // self.count)
        elif self.count > 1:
            synchronise_batch_statistics(module, self._rows_with_gradients)

    @torch.no_grad()
    def average_statistics(self, module: nn.Module) -> None:
        """Make the running statistics of BatchNorm the mean over all groups, as one process would have them.

        Each process moves its own towards the mean over its own groups. That is linear, and all have the same number
        of groups, so the mean over processes at any later time is what one process has then.
        """
        if self.count == 1:
            return
        layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var) if b is not None]
        if buffers:
            flat = self.mean(torch.cat(buffers))
            for buffer, mean in zip(buffers, flat.split([len(buffer) for buffer in buffers]), strict=True):
                buffer.copy_(mean)

    def data_parallel(self, module: nn.Module) -> nn.Module:
        """The module with gradients that are the mean over all processes."""
        if self.count == 1:
            return module
        # Buffers are no business of it: queues are equal everywhere by construction, running statistics averaged later.
        known = inspect.signature(DistributedDataParallel).parameters  # newer releases of torch have another name
        left_alone: Any = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
        return DistributedDataParallel(
            module, process_group=self.fast_group, gradient_as_bucket_view=True, **left_alone
        )

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.count > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=self.fast_group)
        return tensor

    def _rows_with_gradients(self, row: Tensor) -> Tensor:
        """A row [X] of each process: [processes, X]."""
        rank = torch.tensor([self.launch.rank], device=row.device)
        whole: Tensor = _Whole.apply(self, row[None], rank, self.count)
        return whole


ALONE = Processes(Launch())


@dataclass(frozen=True)
class Share:
    """The rows of a batch that one process works on, and how it comes by what the others have."""

    processes: Processes
    bounds: tuple[int, ...]  # process r has the rows bounds[r] to bounds[r + 1]

    @property
    def total(self) -> int:
        """Images in the whole batch."""
        return self.bounds[-1]

    @property
    def rows(self) -> slice:
        """Which of them are this process's."""
        rank = self.processes.launch.rank
        return slice(self.bounds[rank], self.bounds[rank + 1])

    @property
    def weight(self) -> float:
        """What the mean over this share counts for: with it, the mean over processes is the mean over the batch."""
        return (self.rows.stop - self.rows.start) * self.processes.count / self.total

    @property
    def _sizes(self) -> list[int]:
        return [stop - start for start, stop in itertools.pairwise(self.bounds)]

    def shuffle(self, mine: Tensor, order: Tensor) -> Tensor:
        """Rows [b, ...] of this process's images in; out come those that it has in the batch in the new `order`.

        They go straight from the process that has them to the one that needs them, as they are: views as uint8.

        Args:
            order: a permutation [N] of the whole batch, on the CPU, the same for all processes.
        """
        if self.processes.count == 1:
            return mine[order.to(mine.device)]
        rank = self.processes.launch.rank
        owner = torch.bucketize(order, torch.tensor(self.bounds[1:]), right=True)  # [N] who has each of them now
        whose = order.split(self._sizes)  # what each process is to have; and who has it now:
        from_whom = owner.split(self._sizes)
        to_send = [wanted[holder == rank] for wanted, holder in zip(whose, from_whom, strict=True)]
        places = torch.cat(to_send) - self.rows.start  # [b] of this process's rows, by who gets them
        sent = mine[places.to(mine.device)]  # [b, ...]
        received = torch.empty_like(sent)
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=torch.bincount(from_whom[rank], minlength=len(whose)).tolist(),
            input_split_sizes=[len(part) for part in to_send],
            group=self.processes.fast_group,
        )
        by_holder = torch.argsort(from_whom[rank], stable=True)  # [b] the places of what was received
        arranged = torch.empty_like(received)
        arranged[by_holder.to(mine.device)] = received
        return arranged

    def put_back(self, mine: Tensor, order: Tensor) -> Tensor:
        """Rows [b, D] of what `shuffle` gave to this process in; out come those of the whole batch [N, D], in its own
        order, for every process."""
        return self._whole(mine, order[self.rows])

    def gather(self, features: Tensor) -> Tensor:
        """Features [b, ...] of this process's images in, those of the whole batch [N, ...] out, with gradients."""
        if self.processes.count == 1:
            return features
        return self._whole(features, torch.arange(self.rows.start, self.rows.stop))

    def _whole(self, features: Tensor, places: Tensor) -> Tensor:
        whole: Tensor = _Whole.apply(self.processes, features, places.to(features.device), self.total)
        return whole


class _Whole(torch.autograd.Function):
    """Rows [b, ...] of each process at their places [b] in the whole [N, ...].

    By adding up what each has, with zeros elsewhere: exact, in any order, for parts of any size.
    """

    @staticmethod
    def forward(ctx: Any, processes: Processes, rows: Tensor, places: Tensor, total: int) -> Tensor:
        ctx.processes = processes
        ctx.save_for_backward(places)
        whole = rows.new_zeros(total, *rows.shape[1:])
        whole[places] = rows
        return processes._sum(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        # Every process's loss depends on every row.
        (places,) = ctx.saved_tensors
        return None, ctx.processes._sum(gradient)[places], None, None


@contextmanager
def join_processes() -> Iterator[Processes]:
    """The processes that were launched together; without a launcher, this one alone."""
    launch = read_launch()
    if launch.count == 1:
        yield ALONE
        return
    if not dist.is_initialized():  # once and for all: a second time, old addresses would still be where new ones belong
        store, rank, count = next(rendezvous("env://", timeout=PATIENCE))
        store = _unwritten(store, rank, count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
        atexit.register(_leave)
    try:
        yield Processes(launch)
    except SharedError:
        raise
    except UserError as error:
        if not launch.is_first:  # which alone speaks, as a rule; but of this only this process knows
            print(f"co2: process {launch.rank} of {launch.count}: {error}", file=sys.stderr)
        raise
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RunError(
            f"Another of the {launch.count} processes of this run has ended, and so this one does too. Its own message "
            "is above, if it had time for one. Nothing is lost but the steps since the last checkpoint: go on with "
            "--resume."
        ) from error


def _leave() -> None:
    """At the end of the process. What still holds on to the group goes first: a group that outlives Python takes the
    process down with it, now and then."""
    gc.collect()
    dist.destroy_process_group()


def _unwritten(store: Any, rank: int, count: int) -> Any:
    """A part of the launcher's store that these processes share with nobody who came before them.

    When torchrun starts processes again it hands them the store of those that have died, where old addresses still
    stand in the place of new ones. So each process writes down who it is, and all go on in a part of the store that is
    named after everyone who is there, once all have said that they see the same names.
    """
    store.set(f"process {rank}", uuid.uuid4().hex)
    while True:
        present = " ".join(store.get(f"process {other}").decode() for other in range(count))  # or dead, for a moment
        store.set(f"{present} seen by {rank}", "")
        with suppress(dist.DistStoreError):  # somebody has seen others: look again
            store.wait([f"{present} seen by {other}" for other in range(count)], timedelta(seconds=1))
            return dist.PrefixStore(present, store)  # type: ignore[attr-defined]


class SharedError(UserError):
    """A mistake that one process has found and all raise."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, Mistake | None]:
    try:
        return work(), None
    except UserError as error:
        return None, (str(error), error.exit_code)
