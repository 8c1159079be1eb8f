"""The folder that packs or shards are written to: whose it is, and what was begun in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator

from co2.data.source import printable
from co2.errors import UserError

_LOCK = ".lock"


@contextlib.contextmanager
def claimed(folder: str, foreign: Callable[[set[str]], set[str]]) -> Iterator[None]:
    """Make the folder, or make sure that nothing else lies in it, and keep other processes out.

    Args:
        folder: what is to be written to.
        foreign: told the names in it that are not hidden; returns those that no earlier attempt has put there.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        raise UserError(f"'{printable(folder)}' is a file. Name a new folder.") from None
    strangers = foreign({name for name in os.listdir(folder) if not name.startswith(".")})
    if strangers:
        raise UserError(
            f"'{printable(folder)}' holds something else ('{printable(min(strangers))}'), and nothing in it is "
            "overwritten. Empty it or name a new folder."
        )
    path = os.path.join(folder, _LOCK)
    with open(path, "ab") as lock:
        try:
            # The system lets go of it when this process ends, however that happens. Not flock: the workers would
            # inherit it, and hold on to it for a moment after their parent was killed.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"Another process is writing to '{printable(folder)}'. Wait for it, end it, or name another folder."
            ) from None
        except OSError:
            pass  # there are file systems without locks
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.remove(path)
