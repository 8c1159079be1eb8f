"""The run folder while a run is writing to it: settings, metrics, TensorBoard events, bad images."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from co2.checkpoint import CONFIG, write_atomically
from co2.config import Experiment, differences
from co2.data.source import ImageSource
from co2.errors import UserError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
BAD_IMAGES = "bad_images.txt"
LOCK = ".lock"


@contextmanager
def claim_folder(run: Path, experiment: Experiment) -> Iterator[None]:
    """Make the run folder ready and keep other processes from writing to it while the block runs.

    A folder that holds a run is claimed only to continue it, and one that holds anything else never.
    """
    if run.exists() and not run.is_dir():
        raise UserError(f"--out {run} is a file. Give the name of a folder.")
    occupied = run.is_dir() and any(path.name != LOCK for path in run.iterdir())
    config = run / CONFIG
    if occupied and not experiment.resume:
        raise UserError(
            f"{run} is not empty. Continue the run in it with --resume, or choose another folder with --out."
        )
    if occupied and not config.is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG}. Choose another folder with --out.")
    if not occupied and experiment.resume is True:
        raise UserError(f"There is no run to resume in {run}. Leave out --resume to start one.")
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = open(run / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, at the end of the run
    except OSError as error:
        raise UserError(f"The run folder {run} cannot be made: {error.strerror}. Choose another --out.") from error
    with lock:
        _take(lock, run)
        if occupied:
            _refuse_other_settings(run, experiment)
        else:
            write_atomically(config, lambda file: file.write(experiment.to_json().encode()))
        yield


def _take(lock: TextIO, run: Path) -> None:
    try:
        # The system lets go of it when the process ends, however that happens. Not flock: the workers of a loader would
        # inherit it, and hold on to it for seconds after their parent was killed.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        raise UserError(
            f"Another process is writing to {run} ({owner}). Wait for it, end it, or choose another folder with --out."
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def _refuse_other_settings(run: Path, experiment: Experiment) -> None:
    differ = differences(experiment, Experiment.from_json((run / CONFIG).read_text(encoding="utf-8", errors="replace")))
    if differ:
        raise UserError(
            f"The run in {run} was started with other settings:\n  "
            + "\n  ".join(differ)
            + "\nResume with the run's own settings, or start a new run with another --out."
        )


class Records:
    """Appends to metrics.jsonl and TensorBoard, and keeps the list of bad images."""

    def __init__(self, run: Path, first_step: int) -> None:
        self.run = run
        self.bad: dict[int, str] = {}
        # Seconds of work go on from where the last line that is kept stands.
        self._began = time.monotonic() - _drop_after(run / METRICS, first_step)
        self._metrics = open(run / METRICS, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run
        self._first_step = first_step
        self._events: SummaryWriter | None = None

    def write(self, kind: str, step: int, epoch: float, values: Mapping[str, float | str]) -> None:
        """One line of metrics.jsonl, and a point in each curve of TensorBoard."""
        # JSON has no NaN; null keeps the line readable for every tool.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        seconds = round(time.monotonic() - self._began, 2)
        row = {"kind": kind, "step": step, "epoch": round(epoch, 4), "seconds": seconds, **finite}
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            if not isinstance(value, str):
                self._writer().add_scalar(f"{kind}/{name}", value, step)

    def note_bad(self, bad: list[tuple[int, str]], source: ImageSource) -> int:
        """Remember unreadable images (index, reason); returns how many of them are new."""
        new = {index: reason for index, reason in bad if index not in self.bad}
        if new:
            self.bad |= new
            with open(self.run / BAD_IMAGES, "a", encoding="utf-8") as file:
                for index, reason in new.items():
                    file.write(f"{source.describe(index)}\t{reason}\n")
        return len(new)

    def close(self) -> None:
        """Finish both files."""
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    def _writer(self) -> SummaryWriter:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            # Events of steps after the checkpoint, written before an interruption, are hidden by purge_step.
            self._events = SummaryWriter(str(self.run), purge_step=self._first_step or None)
        return self._events


class Unwritten(Records):
    """Of several processes that train together, what those have that do not write."""

    def __init__(self) -> None:
        pass

    def write(self, kind: str, step: int, epoch: float, values: Mapping[str, float | str]) -> None:
        pass

    def close(self) -> None:
        pass


def _drop_after(path: Path, step: int) -> float:
    """Forget lines about steps that the checkpoint does not know: they will be run, and written, again.

    Returns the seconds of work at the last line that stays.
    """
    if not path.is_file():
        return 0.0
    kept = []
    seconds = 0.0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the unfinished last line of a killed run
        if row["step"] <= step:
            kept.append(line + "\n")
            seconds = row.get("seconds", seconds)
    write_atomically(path, lambda file: file.write("".join(kept).encode()))
    return seconds
