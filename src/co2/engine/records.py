"""The run folder while a run is writing to it: settings, metrics, TensorBoard events, bad images."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from co2.checkpoint import BACKBONE, CHECKPOINTS, CONFIG, remove_unfinished
from co2.data.source import ImageSource
from co2.errors import RunError, UserError
from co2.experiment import Experiment, differences, read_experiment
from co2.files import (
    MissingFile,
    TakenError,
    UnreadableFile,
    locked,
    open_to_append,
    read_text,
    refuse_link,
    remove_leftovers,
    unfinished,
    write_atomically,
)
from co2.runs.rows import METRICS, lines_of, sound

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BAD_IMAGES = "bad_images.txt"
LOCK = ".lock"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says of one, or of one's share of it


@contextmanager
def claim_folder(run: Path, experiment: Experiment) -> Iterator[None]:
    """Make the run folder ready and keep other processes from writing to it while the block runs.

    A folder that holds a run is claimed only to continue it, and one that holds anything else never.
    """
    with ExitStack() as held:
        try:
            occupied = _is_occupied(run, experiment)
            run.mkdir(parents=True, exist_ok=True)
            _take(run, held)
            if occupied:
                _refuse_other_settings(run, experiment)
                refuse_link(run / CHECKPOINTS)
                remove_unfinished(run)
            for name in (CONFIG, METRICS, BAD_IMAGES, BACKBONE):
                remove_leftovers(run / name)
            if not occupied:
                write_atomically(run / CONFIG, experiment.to_json().encode())
        except OSError as error:
            if error.errno in DISK_FULL:
                raise RunError(
                    f"The disk with {run} is full ({error.strerror}). Make room, or choose another --out."
                ) from error
            raise UserError(
                f"The run folder {run} cannot be made or written to: {error.strerror}. Choose another --out."
            ) from error
        yield


def _is_occupied(run: Path, experiment: Experiment) -> bool:
    """Whether there is a run in the folder. Says so if that, or what else there is, is not what was asked for."""
    if run.exists() and not run.is_dir():
        raise UserError(f"--out {run} is a file. Give the name of a folder.")
    names = os.listdir(run) if run.is_dir() else []  # of a run that was killed before it was one there is only:
    occupied = any(name != LOCK and unfinished(name) != CONFIG for name in names)
    if occupied and not (run / CONFIG).is_file():
        raise UserError(f"{run} is not empty and not a run folder: it has no {CONFIG}. Choose another --out.")
    if occupied and not experiment.resume:
        raise UserError(
            f"{run} is not empty. Continue the run in it with --resume, or choose another folder with --out."
        )
    if not occupied and experiment.resume is True:
        raise UserError(f"There is no run to resume in {run}. Leave out --resume to start one.")
    return occupied


def _take(run: Path, held: ExitStack) -> None:
    try:
        trouble = held.enter_context(locked(run / LOCK))
    except TakenError as owner:
        raise UserError(
            f"Another process is writing to {run} ({owner}). Wait for it, end it, or choose another folder with --out."
        ) from None
    if trouble:  # there are file systems without locks
        print(f"{run} cannot be locked ({trouble}): take care that no other run writes to it.")


def _refuse_other_settings(run: Path, experiment: Experiment) -> None:
    try:
        begun_with = read_experiment(run / CONFIG)
    except UserError as error:
        raise UserError(
            f"{error} So nobody knows what run it is. Make it readable, or choose another --out."
        ) from error
    differ = differences(experiment, begun_with)
    if differ:
        raise UserError(
            f"The run in {run} was started with other settings:\n  "
            + "\n  ".join(differ)
            + "\nResume with the run's own settings, or start a new run with another --out."
        )


class Records:
    """Appends to metrics.jsonl and TensorBoard, and keeps the list of bad images.

    A list of more than `most_bad` has stopped the run, and who continues it has seen to them: it begins anew.
    """

    def __init__(self, run: Path, first_step: int, most_bad: float = math.inf) -> None:
        self.run = run
        self.bad = _names_in_order(run / BAD_IMAGES)  # what those are called that cannot be read
        if len(self.bad) > most_bad:
            self.bad.clear()
            (run / BAD_IMAGES).unlink()
        # Seconds of work go on from where the last line that is kept stands.
        self._began = time.monotonic() - _drop_after(run, first_step)
        self._metrics = open_to_append(run / METRICS)
        self._first_step = first_step
        self._events: SummaryWriter | None = None

    def write(self, kind: str, step: int, epoch: float, values: Mapping[str, float | str]) -> None:
        """One line of metrics.jsonl, and a point in each curve of TensorBoard."""
        # JSON has no NaN; null keeps the line readable for every tool.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        seconds = round(time.monotonic() - self._began, 2)
        row = {"kind": kind, "step": step, "epoch": round(epoch, 4), "seconds": seconds, **finite}
        os.stat(self.run)  # fails if the folder has gone, where writing to open files in it does not
        self._metrics.write((json.dumps(row) + "\n").encode())
        self._metrics.flush()
        for name, value in values.items():
            if not isinstance(value, str):
                self._writer().add_scalar(f"{kind}/{name}", value, step)

    def note_bad(self, bad: list[tuple[int, str]], source: ImageSource) -> int:
        """Remember unreadable images (index, reason); returns how many of them are new."""
        named = {source.describe(index): reason for index, reason in bad}
        new = {name: reason for name, reason in named.items() if name not in self.bad}
        if new:
            self.bad |= new.keys()
            with open_to_append(self.run / BAD_IMAGES) as file:
                file.write("".join(f"{name}\t{reason}\n" for name, reason in new.items()).encode())
        return len(new)

    def close(self) -> None:
        """Finish both files."""
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    def _writer(self) -> SummaryWriter:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            # Events from this step on, written before an interruption, are hidden: those that _drop_after forgets.
            self._events = SummaryWriter(str(self.run), purge_step=self._first_step + 1 if self._first_step else 0)
        return self._events


class Unwritten(Records):
    """Of several processes that train together, what those have that do not write."""

    def __init__(self) -> None:
        pass

    def write(self, kind: str, step: int, epoch: float, values: Mapping[str, float | str]) -> None:
        pass

    def close(self) -> None:
        pass


def _drop_after(run: Path, step: int) -> float:
    """Forget lines about steps that the checkpoint does not know: they will be run, and written, again. Before the
    first step there is nothing to go on from, and everything will.

    Returns the seconds of work at the last line that stays.
    """
    kept = []
    seconds = 0.0
    lines = lines_of(run)
    for line in lines:
        row = sound(line)
        if row is not None and step > 0 and row["step"] <= step:
            kept.append(line + b"\n")
            seconds = row.get("seconds", seconds)
    if lines:
        write_atomically(run / METRICS, b"".join(kept))
    return seconds


def _text(path: Path) -> str:
    """What stands in a file of the run folder, nothing if there is none."""
    try:
        return read_text(path, errors="replace")
    except MissingFile:
        return ""
    except UnreadableFile as error:
        raise UserError(f"{path} cannot be read: {error}. Move it out of the run folder to go on without it.") from None


def _names_in_order(path: Path) -> set[str]:
    """The names in a list of bad images, which is put in order: a whole line for each image."""
    text = _text(path)
    reasons: dict[str, str] = {}
    for line in text.split("\n")[:-1]:  # after the last line end there is at most a piece of a line
        name, tab, reason = line.partition("\t")
        if tab:
            reasons.setdefault(name, reason)
    in_order = "".join(f"{name}\t{reason}\n" for name, reason in reasons.items())
    if in_order != text:
        write_atomically(path, in_order.encode())
    return set(reasons)
