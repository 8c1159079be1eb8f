"""Whoever reads what is printed. They may leave, or have no room for more, before the work is done, which is no reason
to stop it."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

_NOBODY_THERE = (errno.EPIPE, errno.EIO)  # `head` has seen enough; the terminal was closed
_NARROWEST = 20  # columns; for fewer than five the printers of help compute for minutes


class Lasting:
    """A stream of text that may lose its reader: what is written from then on is lost, and nothing else happens."""

    failed: OSError | None = None
    """Why somebody who is still there has not got everything, a full disk for instance."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._go_quiet(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._go_quiet(error)

    def _go_quiet(self, error: OSError) -> None:
        if error.errno not in _NOBODY_THERE:
            self.failed = error
        # In the place of the reader, because what waits in the buffer would fail again, when Python ends at the latest.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[Lasting]:
    """Whatever is printed in the block, by anybody, to the standard streams, may lose its readers."""
    stdout, stderr = (Lasting(stream or open(os.devnull, "w")) for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            yield stdout
        finally:
            stdout.flush()
            stderr.flush()


def not_too_narrow() -> None:
    """Print as if the terminal had some columns at least."""
    if shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)
