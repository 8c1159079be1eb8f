"""A sitting at a study: the cells that are not done yet, one after another or several at once, until the time is up.

Each cell is a process of its own (`co2 study cell`), so that one that fails takes nothing with it, and so that stopping
it is what stops any run: SIGTERM, a checkpoint, and the next sitting goes on from there. Several sittings at the same
study, one for each GPU say, share out its cells.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from co2.checkpoint import BACKBONE, CONFIG, checkpoints, step_of
from co2.data.open import VALIDATION, open_data, validation_of
from co2.engine.pretrain import check_sizes
from co2.errors import UserError
from co2.evaluation.voc.data import read_detection, read_segmentation
from co2.experiment import differences, read_experiment
from co2.files import MissingFile, TakenError, open_regular, open_to_append, refuse_link
from co2.machine.device import choose_workers, cores, find_device
from co2.machine.process import stop_requests
from co2.measures.numbers import duration
from co2.runs.rows import last_row
from co2.study.cell import Job, images_of, is_taken, numbers_of, refuse_others_run, remove_run
from co2.study.grids import cost_of, pixels_of
from co2.study.judges import TRANSFER, portable
from co2.study.plan import CELLS, FAILED, RUNS, Cell, Plan
from co2.study.records import (
    CellRecord,
    mismatches,
    missing_protocols,
    other_data,
    read_record,
    record_path,
    write_failure,
)
from co2.study.sharing import shared_gpu

COMMAND = (sys.executable, "-m", "co2.cli", "study", "cell")
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)
_TO_STOP = 25.0  # seconds before the limit at which cells are asked to stop: a step, a measurement, a checkpoint
_TO_START = 30.0  # seconds more that a cell must have before that, to be worth its start
_SAY_EVERY = 60.0  # seconds between two lines where nobody watches
_ERROR_LENGTH = 2000


@dataclass(frozen=True)
class Circumstances:
    """Where and how a study is worked on; none of it changes a number."""

    out: Path
    runs: Path
    voc: str = ""
    device: str = "auto"
    workers: int = -1
    jobs: int = 1
    minutes: float | None = None
    redo: bool = False
    keep_checkpoints: bool = False
    began: float = field(default_factory=time.monotonic)
    """From when on the minutes count."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise UserError(f"--jobs must be at least 1; got {self.jobs}.")
        if self.minutes is not None and not self.minutes > 0:
            raise UserError(f"--time-limit is in minutes, and must be above 0; got {self.minutes}.")
        refuse_link(self.out / CELLS)
        if self.runs == self.out / RUNS:  # other folders have been named by the user, whatever they are
            refuse_link(self.runs)


@dataclass
class Outcome:
    """How a sitting went, by the names of cells."""

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Not begun, or stopped in the middle."""
    signal_number: int = 0
    """What the user stopped the sitting by."""


@dataclass(frozen=True)
class Standing:
    """How a cell stands, by its record and its run."""

    missing: list[str]
    """What it still has to be judged by."""
    other_record: list[str]
    """How its record differs from what is asked for."""
    other_run: list[str]
    """Likewise its run, if that is still of use."""


def standing(cell: Cell, plan: Plan, circumstances: Circumstances, images: Mapping[str, int] | None) -> Standing:
    """How a cell stands; `images` are the numbers of images there are now, if they are to be compared."""
    record = read_record(record_path(circumstances.out, cell.name))
    other_record = mismatches(record, cell, plan, images) if record is not None else []
    missing = missing_protocols(None if other_record else record, cell)
    if not missing:
        return Standing([], [], [])
    return Standing(missing, other_record, _other_run(cell, plan, circumstances, images, other_record))


def outstanding(cells: Sequence[Cell], plan: Plan, circumstances: Circumstances) -> tuple[list[Cell], list[str]]:
    """The cells that have something left to do, and the names of those that have not.

    Records and runs of these names with other settings are refused, or given up if the user says so, once nothing else
    is refused.
    """
    images = _count_images(data_of(plan))
    stands = {cell.name: standing(cell, plan, circumstances, images) for cell in cells}
    differing = {name: lines for name, one in stands.items() if (lines := one.other_record + one.other_run)}
    if differing and not circumstances.redo:
        raise UserError(
            "There are records or runs of these cells with other settings:\n"
            + "\n".join(f"  {name}: {'; '.join(lines[:3])}" for name, lines in list(differing.items())[:8])
            + "\nChoose another --out (and --runs), or say --redo to compute these cells again."
        )
    todo = [cell for cell in cells if stands[cell.name].missing]
    _check_what_all_need(todo, images["train"], circumstances)
    for cell in todo:
        if not stands[cell.name].other_record:
            _check_what_its_record_needs(cell, circumstances)
    _give_up({name: stands[name] for name in differing}, circumstances)
    return todo, [name for name, one in stands.items() if not one.missing]


def _give_up(cells: Mapping[str, Standing], circumstances: Circumstances) -> None:
    """Remove records and runs of cells that are to be computed again."""
    for name, one in cells.items():
        if one.other_run and is_taken(circumstances.runs / name):
            raise UserError(f"{name} is being worked on by another sitting. Stop it, or wait, and say --redo again.")
        if one.other_run:
            refuse_others_run(circumstances.runs / name)
    for name, one in cells.items():
        if one.other_record:
            print(f"{name}: its record has other settings ({one.other_record[0]}) and is computed again.")
            record_path(circumstances.out, name).unlink()
        if one.other_run:
            run = circumstances.runs / name
            print(f"{name}: the run in {run} has other settings ({one.other_run[0]}) and is removed.")
            remove_run(run)


def _check_what_all_need(cells: Sequence[Cell], images: int, circumstances: Circumstances) -> None:
    """Mistakes that every cell would run into, one after the other, after hours maybe."""
    find_device(circumstances.device)
    for cell in cells:
        try:
            check_sizes(cell.experiment, [images])
        except UserError as error:
            raise UserError(str(error).replace("--batch-size ", "--set batch_size=")) from None
    asked = {protocol: settings for cell in cells for protocol, settings in cell.protocols.items()}
    for protocol in TRANSFER:
        if protocol in asked and circumstances.voc:
            read = read_segmentation if protocol == "segmentation" else read_detection
            read(circumstances.voc, asked[protocol]["train"], asked[protocol]["test"])


def _check_what_its_record_needs(cell: Cell, circumstances: Circumstances) -> None:
    """A record is only replaced by one that says as much. Where the backbone is gone, all of it is judged again."""
    record = read_record(record_path(circumstances.out, cell.name))
    on_voc = [name for name in TRANSFER if record is not None and name in record.evaluations]
    if on_voc and not circumstances.voc and not (circumstances.runs / cell.name / BACKBONE).is_file():
        raise UserError(
            f"{cell.name} has to be trained again: its backbone is not in {circumstances.runs}. Its record has numbers "
            f"by {' and '.join(on_voc)}, which come from PASCAL VOC: give --voc with the folder that holds VOCdevkit."
        )


def data_of(plan: Plan) -> str:
    """What cells train on and are judged on: the data as named, or with a part for validation put aside."""
    return plan.base.data if plan.validate is None else validation_of(plan.base.data, plan.validate)


def _count_images(data: str) -> dict[str, int]:
    splits = open_data(data)
    if splits.bank is None:
        raise UserError(
            f"A study needs labels to judge by, and there are none in {splits.description}. Give data with a "
            "sub-folder for each class, for instance."
        )
    return numbers_of(splits)


def _other_run(
    cell: Cell,
    plan: Plan,
    circumstances: Circumstances,
    images: Mapping[str, int] | None,
    other_record: Sequence[str],
) -> list[str]:
    """How the run of a cell differs from what is asked for, a line each."""
    run = circumstances.runs / cell.name
    refuse_link(run)
    try:
        found = read_experiment(run / CONFIG)
    except MissingFile:
        return []
    except UserError as error:
        raise UserError(f"{error} Delete {run} to begin it again.") from None
    lines = [line.replace("the run folder", str(run)) for line in differences(cell.experiment, found)]
    if _put_aside(found.data) != _put_aside(data_of(plan)):
        lines.append(f"data: {found.data} in {run}, {data_of(plan)} asked for")
    trained_on = images_of(run)
    if trained_on is not None and images is not None:
        lines += other_data(trained_on, images, str(run))
    if trained_on is None:  # then it is of what its record is of
        lines += [line for line in other_record if line.startswith("data")]
    return lines


def _put_aside(data: str) -> list[str]:
    """The part of a specification that says what is put aside for validation."""
    return data.split(":")[:3] if data.startswith(f"{VALIDATION}:") else []


def sit(
    todo: Sequence[Cell], already: int, plan: Plan, circumstances: Circumstances, commands: Mapping[str, str]
) -> Outcome:
    """Work on the cells until they are done or the time is up.

    Args:
        todo: the cells, in order.
        already: how many others are done.
        plan: what they belong to.
        circumstances: where and how.
        commands: what the user typed, by the names of cells.
    """
    outcome = Outcome()
    if todo:
        _Sitting(todo, already, plan, circumstances, commands, outcome).work()
    return outcome


@dataclass
class _Process:
    """A cell that is being worked on."""

    cell: Cell
    process: subprocess.Popen[bytes]
    job_file: Path
    log: Path
    log_begins: int
    """Where in its log this sitting begins."""
    share_before: float
    """How much of its training earlier sittings have done."""
    began: float = field(default_factory=time.monotonic)
    told_to_stop: bool = False


class _Sitting:
    def __init__(
        self,
        todo: Sequence[Cell],
        already: int,
        plan: Plan,
        circumstances: Circumstances,
        commands: Mapping[str, str],
        outcome: Outcome,
    ) -> None:
        self.waiting = list(todo)
        self.already = already
        self.cells = already + len(todo)
        self.plan = plan
        self.circumstances = circumstances
        self.commands = commands
        self.outcome = outcome
        self.running: list[_Process] = []
        self.elsewhere: set[str] = set()  # what other sittings were seen to work on
        self.shared: Mapping[str, str] = {}  # what processes need to know to share a GPU
        self.cost_done = 0.0  # by processes of this sitting that have ended
        self.seconds_spent = 0.0  # by the same
        minutes = circumstances.minutes
        limit = float("inf") if minutes is None else 60 * minutes
        self.end = circumstances.began + limit
        self.stop_at = self.end - min(_TO_STOP, 0.2 * limit)  # short limits are for trying things out
        self.start_until = self.stop_at - min(_TO_START, 0.2 * limit)
        for folder in (circumstances.runs, circumstances.out / CELLS):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):  # better known now than when a cell is done
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(folder))

    def work(self) -> None:
        """Start, watch and stop processes until nothing is left to do."""
        with stop_requests() as requested, self._sharing() as self.shared, self._display() as show:
            try:
                while self.running or (self.waiting and self._may_start(requested)):
                    while len(self.running) < self.circumstances.jobs and self._may_start(requested):
                        cell = self._next()
                        if cell is None:
                            break
                        self._start(cell)
                    if requested or time.monotonic() > self.stop_at:
                        self._stop()
                    self._collect()
                    show()
                    time.sleep(0.1)
            finally:
                for one in self.running:  # only when something went wrong above
                    one.process.kill()
        self.outcome.left += [cell.name for cell in self.waiting]
        self.outcome.signal_number = requested[0] if requested else 0
        if time.monotonic() > self.start_until and self.outcome.left:
            print("The time is up. The same command goes on from here.", flush=True)

    def _sharing(self) -> AbstractContextManager[Mapping[str, str]]:
        at_once = min(self.circumstances.jobs, len(self.waiting))
        on_a_gpu = find_device(self.circumstances.device).type == "cuda"
        return shared_gpu(at_once) if on_a_gpu and at_once > 1 else nullcontext({})

    def _may_start(self, requested: Sequence[int]) -> bool:
        return not requested and time.monotonic() < self.start_until

    def _next(self) -> Cell | None:
        """The first cell that waits and that no other sitting is working on, if there is one."""
        for cell in list(self.waiting):
            if is_taken(self.circumstances.runs / cell.name):
                if cell.name not in self.elsewhere:
                    print(f"{cell.name} is being worked on by another sitting.", flush=True)
                self.elsewhere.add(cell.name)
                continue
            self.waiting.remove(cell)
            if not missing_protocols(self._record(cell), cell):
                print(f"{cell.name} has been done by another sitting.", flush=True)
                self.already += 1
                continue
            return cell
        return None

    def _record(self, cell: Cell) -> CellRecord | None:
        return read_record(record_path(self.circumstances.out, cell.name))

    def _note(self, cell: Cell) -> Path:
        return self.circumstances.out / CELLS / f"{cell.name}{FAILED}"

    def _start(self, cell: Cell) -> None:
        circumstances = self.circumstances
        run, known = circumstances.runs / cell.name, self._record(cell)
        # A record of another training is only replaced by one that says as much.
        judged = known.evaluations if known is not None else {}
        also = {name: judged[name]["settings"] for name in judged if name not in cell.protocols}
        if known is not None and not (run / BACKBONE).is_file():
            print(f"{cell.name}: the backbone of its record is not in {circumstances.runs}; it is trained again.")
        workers = circumstances.workers
        if workers < 0 and circumstances.jobs > 1:
            workers = choose_workers(-1, circumstances.jobs)
        experiment = cell.experiment.edit(
            data=data_of(self.plan), out=str(run), resume="auto", device=circumstances.device, workers=workers
        )
        job = Job(
            cell=cell.name,
            experiment=experiment.to_json(),
            protocols=dict(cell.protocols) | _only_settings(also),
            record=str(record_path(circumstances.out, cell.name)),
            data=self.plan.base.data,
            validate=self.plan.validate,
            voc=circumstances.voc,
            view_size=self.plan.view_size,
            command=self.commands[cell.name],
            keep_checkpoints=circumstances.keep_checkpoints,
        )
        self._note(cell).unlink(missing_ok=True)  # it is tried again
        job_file = run.with_name(f"{run.name}.{os.getpid()}.job.json")  # another sitting may be at it in this moment
        job.write(job_file)
        log = run.with_name(f"{run.name}.log")
        with open_to_append(log) as output:
            begins = output.tell()
            process = subprocess.Popen(
                [*COMMAND, str(job_file)],
                stdin=subprocess.PIPE,  # closed by the system when this process ends, in whatever way
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_environment(circumstances.jobs), **self.shared},
                start_new_session=True,  # Ctrl-C is ours to pass on
            )
        self.running.append(_Process(cell, process, job_file, log, begins, _share_kept(run, cell)))
        goes_on = "goes on from its last checkpoint" if checkpoints(run) else "begins"
        if (run / BACKBONE).is_file():
            goes_on = "is pre-trained, and judged next"
        begun = self.already + len(self.outcome.done) + len(self.outcome.failed) + len(self.running)
        print(f"[{begun}/{self.cells}] {cell.name} {goes_on}", flush=True)

    def _stop(self) -> None:
        for one in self.running:
            if not one.told_to_stop:
                one.process.terminate()
                one.told_to_stop = True
            elif time.monotonic() > self.end:
                one.process.kill()  # it goes on from its last checkpoint

    def _collect(self) -> None:
        """What has ended, and how."""
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            assert one.process.stdin is not None
            one.process.stdin.close()
            one.job_file.unlink(missing_ok=True)
            code, name = one.process.returncode, one.cell.name
            if code == TakenError.exit_code:  # another sitting began it in the same moment
                self.waiting.append(one.cell)
                continue
            seconds = time.monotonic() - one.began
            self.seconds_spent += seconds
            self.cost_done += (self._share(one) - one.share_before) * cost_of(one.cell.experiment)
            if code == 0:
                self.outcome.done.append(name)
                print(f"{name} done in {duration(seconds)}: {self._numbers(one.cell)}.{self._time_left()}", flush=True)
            elif code in _STOPPED or (one.told_to_stop and code == -signal.SIGKILL):
                self.outcome.left.append(name)
                share = self._share(one)
                print(f"{name} stopped at epoch {share * one.cell.experiment.epochs:.0f}; it can go on.", flush=True)
            else:
                self.outcome.failed.append(name)
                if code < 0:  # then its last words are not about that
                    error = (
                        f"It was ended by signal {-code}; most often memory ran out. The same command goes on with it."
                    )
                else:
                    said = _error_in(one.log, one.log_begins)
                    error = said or f"The process ended with code {code} and said nothing."
                write_failure(self._note(one.cell), one.cell, error, code)
                print(f"{name} failed: {error.splitlines()[-1]} All of it is in {one.log}.", flush=True)

    def _numbers(self, cell: Cell) -> str:
        record = self._record(cell)
        assert record is not None
        found = {judge: list(evaluation["numbers"].items())[:1] for judge, evaluation in record.evaluations.items()}
        first = [(judge, *pair) for judge, pairs in found.items() for pair in pairs if pair[1] is not None]
        return ", ".join(f"{judge} {name} {value:.2f}" for judge, name, value in first)

    def _share(self, one: _Process) -> float:
        return _share_done(self.circumstances.runs / one.cell.name, one.cell)

    def _epoch(self, one: _Process) -> float:
        return min(_reached(self.circumstances.runs / one.cell.name)[0], one.cell.experiment.epochs)

    def _time_left(self) -> str:
        """In words, from how fast this sitting has been; nothing as long as that says nothing."""
        running = [(one, self._share(one)) for one in self.running]
        done = self.cost_done + sum((share - one.share_before) * cost_of(one.cell.experiment) for one, share in running)
        spent = self.seconds_spent + sum(time.monotonic() - one.began for one in self.running)
        left = sum((1 - share) * cost_of(one.cell.experiment) for one, share in running)
        left += sum(
            (1 - _share_kept(self.circumstances.runs / cell.name, cell)) * cost_of(cell.experiment)
            for cell in self.waiting
        )
        if done <= 0 or not left:
            return ""
        at_once = min(self.circumstances.jobs, len(self.waiting) + len(self.running))
        return f" About {duration(spent / done * left / at_once)} left."

    def _doing(self, one: _Process) -> str:
        if (self.circumstances.runs / one.cell.name / BACKBONE).is_file():
            return "being judged"
        return f"at epoch {self._epoch(one):.0f}/{one.cell.experiment.epochs}"

    def _status(self) -> str:
        stands = ", ".join(f"{one.cell.name} {self._doing(one)}" for one in self.running)
        done = f"{self.already + len(self.outcome.done)} of {self.cells} cells done"
        done += f", {len(self.outcome.failed)} failed" if self.outcome.failed else ""
        return f"{done}; {stands or 'none running'}.{self._time_left()}"

    @contextmanager
    def _display(self) -> Iterator[Any]:
        """A status line that changes where somebody is looking, a line every minute where not."""
        if sys.stdout.isatty():
            from rich.console import Console

            console = Console(highlight=False)
            with console.status("") as line:
                yield lambda: line.update(self._status())
            return
        said = [time.monotonic()]

        def say_now_and_then() -> None:
            if time.monotonic() > said[0] + _SAY_EVERY and self.running:
                said[0] = time.monotonic()
                print(self._status(), flush=True)

        yield say_now_and_then


def _only_settings(recorded: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The settings of protocols out of a record, which has the seed and the size of views among them."""
    return {
        protocol: {name: value for name, value in portable(settings).items() if name not in ("seed", "view_size")}
        for protocol, settings in recorded.items()
    }


def _environment(jobs: int) -> dict[str, str]:
    environment = dict(os.environ)
    if jobs > 1:  # processes that share cores do more with a few threads each than with many that wait for each other
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // jobs)))
    return environment


def _share_kept(run: Path, cell: Cell) -> float:
    """How much of its training a cell that is not worked on need not do again."""
    if (run / BACKBONE).is_file():
        return _share_done(run, cell)
    newest = checkpoints(run)[-1:]
    epoch, step = _reached(run)
    if not newest or not step:
        return 0.0
    return _share_until(cell, epoch * min(1.0, step_of(newest[0]) / step))  # what is logged after it is forgotten


def _share_done(run: Path, cell: Cell) -> float:
    """How much of a cell's training is logged, from 0 to 1."""
    return _share_until(cell, _reached(run)[0])


def _share_until(cell: Cell, epoch: float) -> float:
    """How much of a cell's training is done at an epoch, from 0 to 1: of its time, where later epochs take longer."""
    return pixels_of(cell.experiment, until=epoch) / pixels_of(cell.experiment)


def _reached(run: Path) -> tuple[float, int]:
    """The epoch and the step in the last line that a run has logged."""
    row = last_row(run)
    return (0.0, 0) if row is None else (row["epoch"], row["step"])


def _error_in(log: Path, begins: int) -> str:
    """The end of what a process said."""
    with open_regular(log, most=2**40) as file:
        file.seek(begins)
        return file.read().decode("utf-8", errors="replace").strip()[-_ERROR_LENGTH:]
