"""What is seen of an evaluation while it runs: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as RichProgress

T = TypeVar("T")


class Progress:
    """Tells nobody."""

    def about(self, words: str) -> None:
        """What the following stages are parts of."""

    def stage(self, words: str, total: int | None = None) -> None:
        """From now on this is being done, in so many steps."""

    def advance(self, steps: int = 1) -> None:
        """Some of the steps are done."""

    def track(self, things: Iterable[T], words: str, total: int | None = None) -> Iterator[T]:
        """The things, one by one, each a step."""
        self.stage(words, total)
        for thing in things:
            yield thing
            self.advance()

    def say(self, words: str) -> None:
        """A line that stays."""


class Bar(Progress):
    """Shows the current stage to people at a terminal."""

    def __init__(self, bar: RichProgress) -> None:
        self.bar = bar
        self.task = bar.add_task("Evaluating", total=None)
        self.heading = ""

    def about(self, words: str) -> None:
        self.heading = f"{escape(words)}: "

    def stage(self, words: str, total: int | None = None) -> None:
        self.bar.reset(self.task, description=self.heading + words, total=total)

    def advance(self, steps: int = 1) -> None:
        self.bar.advance(self.task, steps)

    def say(self, words: str) -> None:
        self.bar.console.print(words, highlight=False, markup=False)


class Lines(Progress):
    """For log files: only the lines that stay."""

    def say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)


@contextmanager
def shown() -> Iterator[Progress]:
    """A bar on the standard error stream where somebody is looking, and lines where not."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    with RichProgress(console=Console(stderr=True), transient=True) as bar:
        yield Bar(bar)


SILENT = Progress()
