"""The device that a process works on, its CPU cores, and how many workers those can feed.

torch is imported where it is needed, so that the command line can ask and answer at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from co2.errors import UserError
from co2.machine.process import ALONE, Launch

if TYPE_CHECKING:
    import torch

MOST_WORKERS = 1024  # for one training process; nobody has as many cores for them
# A GPU has so many queues for streams to share. With CUDA's usual 8, most of the JPEG decoder's streams would stand in
# line behind whole training steps. Read when CUDA starts; the user's own choice stays.
_GPU_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")


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


def why_no_import(error: Exception) -> str | None:
    """In a sentence that a limit on addresses (`ulimit -v`) keeps libraries from being loaded, if it does."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY or not (isinstance(error, MemoryError) or "failed to map" in str(error)):
        return None
    return (
        f"torch and what it needs do not fit into the {most / 2**30:.1f} GiB of addresses that a process may have here "
        "(ulimit -v). Raise that limit: 4 GiB are enough for small networks on a CPU."
    )


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
