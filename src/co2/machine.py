"""What this process has to work with: its place among the processes of a run, a device, CPU cores, and which commit of
the code; and when to end.

torch is imported where it is needed, so that the command line can ask about the launcher and answer at once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from co2.errors import UserError

MOST_WORKERS = 1024  # for one training process; nobody has as many cores for them

if TYPE_CHECKING:
    import torch

# A GPU has so many queues for streams to share. With CUDA's usual 8, most of the JPEG decoder's streams would stand in
# line behind whole training steps. Read when CUDA starts; the user's own choice stays.
_GPU_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# What glibc's malloc.h calls the settings below, and what it has by itself once a program takes large pieces of memory.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_USUAL_SETTINGS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65_536}
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
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


def choose_device(name: str, launch: Launch = ALONE) -> torch.device:
    """The device that the user named, for this process to work on."""
    import torch

    os.environ.setdefault(*_GPU_QUEUES)
    device = find_device(name, launch)
    if name.startswith("cuda:"):
        torch.cuda.set_device(device)  # streams, and questions about memory, are by default the current device's
    return device


def find_device(name: str, launch: Launch = ALONE) -> torch.device:
    """The device that the user named, if it is there; of several processes on a machine each gets a GPU of its own."""
    import torch

    if launch.count > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        if launch.local_count > torch.cuda.device_count():
            raise UserError(
                f"{launch.local_count} processes were started on a machine with {torch.cuda.device_count()} GPU(s), "
                f"and each needs one of its own. Use torchrun --nproc-per-node {torch.cuda.device_count()}."
            )
        return torch.device("cuda", launch.local_rank)
    if launch.local_count > 1 and name.startswith("cuda:"):
        raise UserError(
            f"{launch.local_count} processes cannot share --device {name}. Use cuda, and each gets its own."
        )
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"There is no device '{name}'. Use cpu, cuda, cuda:1 or auto.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"The device '{name}' is not supported. Use cpu, cuda, cuda:1 or auto.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("No CUDA GPU is available to torch. Use --device cpu, or leave --device out.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"There is no {name}: this machine has {torch.cuda.device_count()} GPU(s), counted from 0.")
    return device


def choose_workers(asked: int, local_processes: int = 1) -> int:
    """Processes that prepare images; on the machine's own advice, one core is left for each training loop."""
    check_workers(asked)
    if asked >= 0:
        return asked
    return min(16, max(0, cores() // local_processes - 1))


def ran_out_of_memory(error: Exception) -> bool:
    """Whether that is what an error says, of a GPU or of the machine, for which torch has no error of its own."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def check_workers(asked: int) -> None:
    """Whether so many processes can be meant."""
    if not -1 <= asked <= MOST_WORKERS:
        raise UserError(f"--workers must be -1 (automatic) or from 0 to {MOST_WORKERS:,}; got {asked:,}.")


def cores() -> int:
    """CPU cores that this process may use, which on a shared machine need not be all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16 numbers; without, those take longer."""
    import torch

    can = torch.cpu.get_capabilities()
    return any(can.get(name, False) for name in ("avx512_bf16", "amx_bf16", "sve_bf16"))


def commit(home: Path = Path(__file__).parents[2]) -> str | None:
    """Of the checkout that the code is run from, for records: with "-modified" where the package is not as committed.

    None where it is no checkout, but installed: the repository around it, if there is one, is somebody else's.
    """
    if not (home / ".git").exists():
        return None

    def ask_git(*question: str) -> str:
        return subprocess.run(["git", "-C", str(home), *question], capture_output=True, text=True).stdout.strip()

    try:
        head, changes = ask_git("rev-parse", "HEAD"), ask_git("status", "--porcelain", "--", "src/co2")
    except OSError:  # there is no git
        return None
    return f"{head}-modified" if head and changes else head or None


@contextmanager
def stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Give a GPU the work of this thread on another stream than its default one.

    Streams of libraries, such as those of the JPEG decoder, take turns with the default stream: what is decoded in
    another thread would wait for whole training steps, and they for it.
    """
    if device.type != "cuda":
        yield
        return
    import torch

    stream, default = torch.cuda.Stream(device), torch.cuda.default_stream(device)
    stream.wait_stream(default)
    with torch.cuda.stream(stream):
        yield
    default.wait_stream(stream)


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """On a CPU: let this process keep the memory that it frees for what it needs next, until the block ends.

    Else malloc hands back to the system what is large, which every activation is, and the next step waits while the
    system fills the same pages with zeros, one by one: a tenth of the time of a small network's step, and half of that
    of its features. GPUs have torch's own allocator, which does this; libraries other than glibc, and users who have
    chosen for themselves, are left alone.
    """
    library = ctypes.CDLL(None) if os.name == "posix" else None
    chosen = any(name in os.environ for name in _OF_THE_USER) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if device.type != "cpu" or chosen or not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        yield
        return
    assert library is not None
    library.mallopt(_TRIM_THRESHOLD, -1)  # never
    library.mallopt(_MMAP_MAX, 0)  # such pieces are always handed back
    try:
        yield
    finally:
        for setting, value in _USUAL_SETTINGS.items():
            library.mallopt(setting, value)
        library.malloc_trim(0)


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
