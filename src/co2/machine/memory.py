"""The memory that a process frees on a CPU: kept for what it needs next, instead of handed back and asked for again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What glibc's malloc.h calls the settings below, and what it has by itself once a program takes large pieces of memory.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_USUAL_SETTINGS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65_536}
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


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
