"""This process: its place among the processes of a run, and when it is to end."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from co2.errors import UserError

_TOLD_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """This process's place among the processes of a run, on all machines and on this one."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0


ALONE = Launch()


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """What torchrun, or another launcher that speaks its language, says about this process."""
    if any(name not in environment for name in _TOLD_BY_LAUNCHERS):
        return ALONE
    try:
        rank, count, local_rank = (int(environment[name]) for name in _TOLD_BY_LAUNCHERS[:3])
        # A launcher that does not say how many are on this machine has told the highest number at least.
        local_count = int(environment.get("LOCAL_WORLD_SIZE", local_rank + 1))
    except ValueError as error:
        raise UserError(f"The launcher's RANK, WORLD_SIZE or LOCAL_RANK is no number: {error}.") from error
    return Launch(rank, count, local_rank, local_count)


class Terminated(KeyboardInterrupt):
    """SIGTERM came where nothing has to be finished first."""


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, by an error: what is to be taken back is, and a word can be said."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's business
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end up in the list instead of ending the program in the middle of something."""
    requests: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests  # signals are the main thread's business
        return

    def request(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if requests:  # Ctrl-C twice: the user does not want to wait
                raise KeyboardInterrupt
            # By the one way that is safe in the middle of anything.
            with suppress(OSError):  # of a full disk, or of a reader who has left
                os.write(2, b"\nStopping, with everything kept. Ctrl-C again ends it at once.\n")
        # SIGTERM often comes twice, from a cluster and from its launcher.
        requests.append(number)

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """For a worker process: it ends when the process that started it has ended, however that happened.

    torch's workers look every few seconds whether their parent is there. But before they end they wait until all that
    they made has been fetched, and where it was much, that is for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "the main process has nobody to end with"

    def follow() -> None:
        parent.join()
        sockets = getattr(multiprocessing.current_process(), "_config", {}).get("tempdir")
        if sockets is not None:  # the folder of those by which a worker hands over tensors
            shutil.rmtree(sockets, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
