"""The folder that images are written to: whose it is, and what was begun in it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator

from co2.data.source import in_words, printable
from co2.errors import UserError
from co2.files import TakenError, locked, write_atomically

_LOCK = ".lock"


def names_in(folder: str) -> set[str]:
    """Make the folder, if it is not there, so that it can be written to; what lies in it and is not hidden."""
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return {name for name in os.listdir(folder) if not name.startswith(".")}
    except FileExistsError:
        raise UserError(f"'{printable(folder)}' is a file. Name a new folder.") from None
    except OSError as error:
        raise UserError(
            f"'{printable(folder)}' cannot be written to: {in_words(error)}. Name another folder."
        ) from None


@contextlib.contextmanager
def claimed(folder: str, foreign: Callable[[set[str]], set[str]]) -> Iterator[None]:
    """Make the folder, or make sure that nothing else lies in it, and keep other processes out.

    Args:
        folder: what is to be written to.
        foreign: told the names in it that are not hidden; returns those that no earlier attempt has put there.
    """
    strangers = foreign(names_in(folder))
    if strangers:
        raise UserError(
            f"'{printable(folder)}' holds something else ('{printable(min(strangers))}'), and nothing in it is "
            "overwritten. Empty it or name a new folder."
        )
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(os.path.join(folder, _LOCK)))
        except TakenError:
            raise UserError(
                f"Another process is writing to '{printable(folder)}'. Wait for it, end it, or name another folder."
            ) from None
        yield


def write_json(path: str, value: object) -> None:
    """A file that is there as a whole or not at all, also after the power has failed."""
    write_atomically(path, json.dumps(value, indent=1).encode())
