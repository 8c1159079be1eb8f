"""Files that are there as a whole or not at all, even if the process is killed or the power fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

WRITING = ".writing"  # after the name of a file that is not whole yet


@contextmanager
def appearing_when_whole(path: str | Path, before_rename: Callable[[Path], object] | None = None) -> Iterator[BinaryIO]:
    """A file to write to that has its name only once it is complete and on the disk."""
    path = Path(path)
    temporary = path.with_name(path.name + WRITING)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # the first error tells more
            temporary.unlink()  # of no use to anybody, and on a full disk in the way
        if isinstance(error, OSError) and error.filename in (temporary, str(temporary)):
            error.filename, error.filename2 = str(path), None  # the name that its owner knows it by
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file at once."""
    with appearing_when_whole(path) as file:
        file.write(content)
