"""One cell in a process of its own: pre-train from where it stands, judge the backbone, write the record.

The run folder is the truth: checkpoints to continue from, metrics.jsonl, the backbone, and evaluation/JUDGE.json for
each judge as soon as it is done. The record is composed of them. A process that is killed at any moment leaves nothing
that the next one cannot go on from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import signal
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision

import co2
from co2.checkpoint import BACKBONE, CHECKPOINTS, CONFIG, checkpoints
from co2.data.open import DataSplits, open_data
from co2.engine.pretrain import Stopped, pretrain
from co2.errors import UserError
from co2.evaluation.presets import PROTOCOLS
from co2.evaluation.progress import Lines
from co2.evaluation.protocol import write_json
from co2.evaluation.subject import open_subject
from co2.evaluation.suite import Circumstances, evaluate_runs
from co2.experiment import Experiment, differences, read_experiment
from co2.files import TakenError, locked, open_regular, read_json, refuse_link, remove_leftovers, write_atomically
from co2.machine.device import choose_device, choose_workers, cores
from co2.machine.provenance import commit
from co2.runs.rows import METRICS, read_rows
from co2.schema import Amount, read_as
from co2.study.judges import protocol_of, read_settings
from co2.study.records import (
    EVALUATION,
    NUMBERS,
    columns,
    read_record,
    settings_to_record,
    write_record,
)
from co2.study.settings import plain_settings

EVALUATIONS = "evaluation"
_NAMED_IF_SEVERAL = ("co2", "python", "torch", "torchvision", "numpy", "cuda", "device")  # of what a cell is made with


@dataclass(frozen=True)
class Job:
    """What a process that works on a cell is told, in a file."""

    cell: str
    experiment: str
    """As JSON: with its data, device, workers, and the run folder as `out`."""
    protocols: Mapping[str, Mapping[str, Any]]
    """What to judge the backbone by: the settings of each."""
    record: str
    """The file to write."""
    data: str
    """The data as the user named them."""
    validate: float | None
    voc: str
    view_size: int
    command: str
    keep_checkpoints: bool

    def write(self, path: Path) -> None:
        """Into a file, for the process."""
        write_json(path, dataclasses.asdict(self))

    @staticmethod
    def read(path: Path) -> Job:
        """What `write` wrote."""
        job: Job = read_as(Job, read_json(path), "The job")
        return job


def work_on(job_file: str) -> int:
    """Do what a job file says; returns the exit code. SIGTERM stops it with everything kept."""
    stop_with_the_study()
    job = Job.read(Path(job_file))
    experiment = Experiment.from_json(job.experiment)
    run = Path(experiment.out)
    device = choose_device(experiment.device)
    with _alone(run), _session(run, None if is_pretrained(run, experiment) else made_with(device)):
        for path in (Path(job.record), _images_file(run), _sessions_file(run)):
            remove_leftovers(path)
        images = numbers_of(open_data(experiment.data))
        if not is_pretrained(run, experiment):
            if not (run / CONFIG).is_file():  # one that goes on is of what it was begun with
                write_json(_images_file(run), images)
            try:
                pretrain(experiment)
            except Stopped as stop:
                print(stop, flush=True)
                return 128 + stop.signal_number
        if not job.keep_checkpoints:
            shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)  # a finished run has nothing to continue
        _judge(job, experiment, run, images, device)
    return 0


def is_pretrained(run: Path, experiment: Experiment) -> bool:
    """Whether a run folder holds the finished run of this experiment."""
    if not (run / BACKBONE).is_file() or not (run / CONFIG).is_file():
        return False
    return not differences(experiment, read_experiment(run / CONFIG))


def numbers_of(splits: DataSplits) -> dict[str, int]:
    """How many images and classes there are: by these a run and a record are told from those of other data."""
    bank, test = splits.bank, splits.test
    return {
        "train": len(splits.train),
        "bank": len(bank) if bank is not None else 0,
        "test": len(test) if test is not None else 0,
        "classes": len(bank.classes) if bank is not None else 0,
    }


def images_of(run: Path) -> dict[str, int] | None:
    """The same of what a run was trained on, if that is known."""
    try:
        found: dict[str, int] = read_as(NUMBERS, read_json(_images_file(run)), "The note")
        return found
    except UserError:
        return None


def _images_file(run: Path) -> Path:
    return run.with_name(f"{run.name}.images.json")


def remove_run(run: Path) -> None:
    """Delete a run, and what is noted about it beside its folder."""
    shutil.rmtree(run)
    for path in (_images_file(run), _sessions_file(run)):
        path.unlink(missing_ok=True)


def refuse_others_run(run: Path) -> None:
    """Say so if a run was not made by a study, which notes its sessions and images beside it."""
    if run.is_symlink() or not (_read_sessions(_sessions_file(run)) or images_of(run)):
        raise UserError(f"No study has noted that it made {run}. Remove it yourself, or choose another --runs.")


def _judge(job: Job, experiment: Experiment, run: Path, images: Mapping[str, int], device: torch.device) -> None:
    """Evaluate what is not evaluated yet, and bring the record up to date after each."""
    with open_regular(run / BACKBONE, most=2**40) as file:
        backbone = hashlib.sha256(file.read()).hexdigest()
    folder = run / EVALUATIONS
    refuse_link(folder)
    folder.mkdir(exist_ok=True)
    data = {"name": job.data, **images, "validate": job.validate}
    circumstances = Circumstances(
        data=experiment.data,
        voc=job.voc,
        seed=experiment.seed,
        device=device,
        workers=choose_workers(experiment.workers),
        progress=Lines(),
    )
    done: dict[str, Any] = {}
    for judge, plain in job.protocols.items():
        known = PROTOCOLS[protocol_of(judge)]
        settings = read_settings(judge, plain)
        path = folder / f"{judge}.json"
        data_shown = job.voc if known.needs_voc else job.data
        found = _read_evaluation(path, backbone, data_shown, settings_to_record(judge, plain, job.view_size))
        if found is None:
            print(f"Judging by {judge} ...", flush=True)
            subject = open_subject(str(run), view_size=job.view_size if known.needs_voc else None)
            (evaluation,) = evaluate_runs(protocol_of(judge), subject, settings, circumstances)
            named = {"subject": job.cell, "data": data_shown}
            write_json(path, dataclasses.asdict(evaluation) | named | {"backbone": backbone})
            found = read_json(path)  # as JSON has it: no tuples, no NaN
            numbers = "  ".join(f"{name} {value:.2f}" for name, value in evaluation.numbers.items())
            print(f"{judge}: {numbers}", flush=True)
        done[judge] = {name: found[name] for name in ("numbers", "settings", "details", "data")}
        _compose(job, experiment, run, data, done, backbone, device)


def _read_evaluation(path: Path, backbone: str, data: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """An evaluation of this very backbone on these data with these settings, if it is there. Who has nothing judged on
    VOC need not say where it is: `data` may be empty."""
    try:
        schema = {**EVALUATION, "details": {str: Any}, "data": str, "backbone": str}
        found: dict[str, Any] = read_as(schema, read_json(path), "The evaluation")
        same = found["backbone"] == backbone and found["data"] == (data or found["data"])
        same = same and all(found["settings"][n] == v for n, v in settings.items())
    except (UserError, KeyError):
        return None  # not there, or half of it from before a crash
    return found if same else None


def _compose(
    job: Job,
    experiment: Experiment,
    run: Path,
    data: Mapping[str, Any],
    evaluations: Mapping[str, Any],
    backbone: str,
    device: torch.device,
) -> None:
    """Write the record, unless the one that is there, of an earlier training, says more."""
    path = Path(job.record)
    try:
        earlier = read_record(path)
    except UserError:
        earlier = None  # damaged: it says nothing
    if earlier is not None and set(earlier.evaluations) - set(evaluations):
        return
    rows = read_rows(run)
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("train", "epoch", "advice")}
    settings = plain_settings(experiment) | {"data": job.data}
    trained_with = _trained_with(run)
    if not trained_with and earlier is not None and earlier.content.get("backbone_sha256") == backbone:
        trained_with = earlier.content["made_with"]  # the same training, before sessions noted it
    content = {
        "cell": job.cell,
        "seed": experiment.seed,
        "settings": settings,
        "data": dict(data),
        "evaluations": evaluations,
        "seconds": _seconds(run, by_kind["train"], experiment),
        "made_with": {**(trained_with or made_with(device)), "commit": _commits(run), "command": job.command},
        "backbone_sha256": backbone,
        "curves": {kind: columns(by_kind[kind]) for kind in ("train", "epoch")},
        "advice": [row["text"] for row in by_kind["advice"]],
    }
    write_record(path, content)


def made_with(device: torch.device) -> dict[str, Any]:
    """Versions and device behind a number."""
    return {
        "co2": co2.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": cores(),
        "date": time.strftime("%Y-%m-%d"),
    }


# Time, over several sittings.


_SESSION = {
    "began": Amount,
    "ended": Amount | None,
    "commit?": str | None,
    "trains_with?": Mapping[str, str | int | None],
}


def _sessions_file(run: Path) -> Path:
    return run.with_name(f"{run.name}.sessions.json")


@contextmanager
def _session(run: Path, trains_with: Mapping[str, Any] | None) -> Iterator[None]:
    """Note when work on a cell begins and ends, and with which commit: the checkout may move on while it trains. One
    that was killed ended when its last line was logged.

    Args:
        run: the run folder.
        trains_with: versions and device, if there is something to train: a later session may judge on another one.
    """
    path = _sessions_file(run)
    sessions = _read_sessions(path)
    if sessions and sessions[-1]["ended"] is None:
        metrics = run / METRICS
        last = metrics.stat().st_mtime if metrics.is_file() else sessions[-1]["began"]
        sessions[-1]["ended"] = max(last, sessions[-1]["began"])
    session: dict[str, Any] = {"began": time.time(), "ended": None, "commit": commit()}
    if trains_with is not None:
        session["trains_with"] = dict(trains_with)
        if not checkpoints(run):  # then nothing of what earlier ones have trained is left
            for earlier in sessions:
                earlier.pop("trains_with", None)
    sessions.append(session)
    _write_sessions(path, sessions)
    try:
        yield
    finally:
        sessions[-1]["ended"] = time.time()
        _write_sessions(path, sessions)


def _read_sessions(path: Path) -> list[dict[str, Any]]:
    try:
        return [read_as(_SESSION, one, "It") for one in read_json(path)]
    except (UserError, TypeError):
        return []


def _write_sessions(path: Path, sessions: list[Any]) -> None:
    write_atomically(path, (json.dumps(sessions) + "\n").encode())


def _commits(run: Path) -> str | None:
    """Of the code that worked on the cell; several where a later sitting had another."""
    found = [one.get("commit") for one in _read_sessions(_sessions_file(run))]
    return " then ".join(dict.fromkeys(filter(None, found))) or None


def _trained_with(run: Path) -> dict[str, Any]:
    """Versions and device of the sessions that trained the cell, several where they differ, and the cores and the date
    of the last. Empty where none has noted them, as none did in earlier versions."""
    found = [one["trains_with"] for one in _read_sessions(_sessions_file(run)) if "trains_with" in one]
    if not found:
        return {}
    by_name = {name: dict.fromkeys(filter(None, (one.get(name) for one in found))) for name in _NAMED_IF_SEVERAL}
    return found[-1] | {name: " then ".join(values) for name, values in by_name.items() if values}


def _seconds(run: Path, train: list[dict[str, Any]], experiment: Experiment) -> dict[str, float | int]:
    """How long the cell took in all, and how long its training steps took, by the log's images per second."""
    sessions = _read_sessions(_sessions_file(run))
    wall = sum((one["ended"] or time.time()) - one["began"] for one in sessions)
    steps, last = 0.0, 0
    for row in train:
        if row["images_per_second"]:
            steps += (row["step"] - last) * experiment.batch_size / row["images_per_second"]
        last = row["step"]
    return {"wall": round(wall, 1), "steps": round(steps, 1), "sittings": len(sessions)}


# Processes.


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Keep other processes from the same cell: one of another sitting, or one that is writing its last checkpoint."""
    run.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(locked(run.with_name(f"{run.name}.lock")))
        except TakenError:
            raise TakenError(f"Another process is working on {run}. Wait for it.") from None
        yield  # also where the file system has no locks; the run says so


def is_taken(run: Path) -> bool:
    """Whether another process is working on the cell with this run folder."""
    try:
        with _alone(run):
            return False
    except TakenError:
        return True


def stop_with_the_study() -> None:
    """Stop, as on SIGTERM, when the study that started this process is gone: then its end of our input is closed."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return  # started by hand

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
