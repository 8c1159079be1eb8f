"""The lines of metrics.jsonl, which a run writes while it goes on, read back. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from co2.errors import UserError
from co2.files import MOST_TEXT, MissingFile, UnreadableFile, open_regular, parse_json, read_bytes
from co2.schema import Amount, Count, Line, read_as

METRICS = "metrics.jsonl"
_LONGEST_LINE = 2**16
_END = 2**12  # bytes, in which the last line is
Row = dict[str, Any]


def lines_of(run: Path) -> list[bytes]:
    """What stands in the file, line by line: nothing if there is none. The last is empty, or still being written."""
    path = run / METRICS
    try:
        return read_bytes(path, MOST_TEXT).split(b"\n")
    except MissingFile:
        return []
    except UnreadableFile as error:
        raise UserError(f"{path} cannot be read: {error}. Move it out of the run folder to go on without it.") from None


def row_of(line: bytes) -> Row:
    """A line as a run writes it: of kind train (averages over some steps), epoch (health of the network) or advice.
    Raises UserError where it is none."""
    if len(line) > _LONGEST_LINE:
        raise UserError("it is too long.")
    row: Row = read_as({"kind": Line, "epoch": Amount, "step": Count, "seconds?": Amount}, parse_json(line), "It")
    return row if row["kind"] not in ("train", "epoch") else read_as({"kind": str, Line: float | None}, row, "It")


def sound(line: bytes) -> Row | None:
    """The same; none of the unfinished last line of a killed run, and of what somebody else has added."""
    try:
        return row_of(line)
    except UserError:
        return None


def read_rows(run: Path) -> list[Row]:
    """What a run has written so far, without what is no row."""
    return [row for row in map(sound, lines_of(run)) if row is not None]


def last_row(run: Path) -> Row | None:
    """The last that a run has written, found from the end of the file: somebody watches it grow."""
    try:
        with open_regular(run / METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
            lines = file.read().splitlines()
    except UnreadableFile:
        return None
    return next((row for row in map(sound, reversed(lines)) if row is not None), None)


def at_the_end(epochs: Sequence[float], values: Sequence[float]) -> float | None:
    """Where a curve ended: its mean over the lines of the last epoch, which is less noisy than the last line alone."""
    last = [value for epoch, value in zip(epochs, values, strict=True) if epoch > epochs[-1] - 1]
    return sum(last) / len(last) if last else None
