"""Protocols by their names: one of them, over several seeds, or all that the data allow."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from co2.checkpoint import CONFIG
from co2.config import Experiment
from co2.data.open import DataSplits, open_data
from co2.errors import UserError, did_you_mean
from co2.evaluation.presets import PROTOCOLS, Preset, protocol_called, settings_of
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation
from co2.evaluation.subject import Subject, open_subject


@dataclass(frozen=True)
class Circumstances:
    """On what, where and how often subjects are evaluated."""

    data: str = ""
    """Images with labels, as for --data of `co2 pretrain`."""
    voc: str = ""
    """A folder in PASCAL VOC's layout, for svm, detection and segmentation."""
    runs: int = 1
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    workers: int = 0
    progress: Progress = SILENT
    opened: dict[str, DataSplits] = field(default_factory=dict, repr=False, compare=False)
    """Data that have been opened already: what is remembered of their images serves all protocols and subjects."""

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise UserError(f"--runs must be at least 1; got {self.runs}.")


@dataclass
class Everything:
    """What `evaluate_all` found."""

    runs: dict[tuple[str, str], list[Evaluation]] = field(default_factory=dict)
    """By protocol and subject."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By protocol: why."""


def evaluate(
    protocol: str,
    subject: str | Path | Subject,
    *,
    data: str = "",
    voc: str = "",
    settings: Any = None,
    preset: Preset = "quick",
    runs: int = 1,
    seed: int = 0,
    device: str = "auto",
    workers: int = -1,
    progress: Progress = SILENT,
    **changes: Any,
) -> list[Evaluation]:
    """Evaluate a backbone by one protocol; a record for each run.

    Args:
        protocol: knn, linear, semi-supervised, svm, detection, segmentation or label-free.
        subject: a run folder, a file, a model's name, `random`, or an opened `Subject`.
        data: images, as for pre-training; by default those that a run folder was trained on.
        voc: a folder in PASCAL VOC's layout, for svm, detection and segmentation.
        settings: the protocol's settings; by default those of `preset`, "quick" or "paper".
        preset: see `settings`.
        runs: how often, with the seeds `seed`, `seed` + 1, ...
        seed: whatever is random follows from it.
        device: cuda, cuda:1, cpu or auto.
        workers: processes that read images; -1 takes what the machine has.
        progress: is told how far it is.
        changes: single settings, by name: `epochs=5`.
    """
    chosen = settings if settings is not None else settings_of(protocol, preset)
    opened = subject if isinstance(subject, Subject) else open_subject(str(subject), seed=seed)
    circumstances = circumstances_of(
        opened, data=data, voc=voc, runs=runs, seed=seed, device=device, workers=workers, progress=progress
    )
    return evaluate_runs(protocol, opened, _changed(chosen, changes, protocol), circumstances)


def evaluate_runs(protocol: str, subject: Subject, settings: Any, circumstances: Circumstances) -> list[Evaluation]:
    """A record for each seed. Where neither the protocol nor the subject's weights are random, one run is all."""
    known = protocol_called(protocol)
    run_protocol = importlib.import_module(f"co2.evaluation.{known.module}").evaluate
    material = _material(protocol, circumstances)
    fixed = known.nothing_random and subject.drawn_from is None
    evaluations = []
    for seed in range(circumstances.seed, circumstances.seed + (1 if fixed else circumstances.runs)):
        circumstances.progress.about(f"{protocol}, {subject.name}, seed {seed}")
        # Random weights are part of what is random: they are drawn anew for each run.
        shown = subject if subject.drawn_from is None else replace(subject.random(seed), name=subject.name)
        begun = time.perf_counter()
        evaluation: Evaluation = run_protocol(
            shown,
            material,
            settings,
            device=circumstances.device,
            seed=seed,
            workers=circumstances.workers,
            progress=circumstances.progress,
        )
        made = made_with(circumstances.device) | {"seconds": round(time.perf_counter() - begun, 2)}
        where = circumstances.voc if known.needs_voc else circumstances.data
        evaluations.append(replace(evaluation, data=where, details=evaluation.details | {"made_with": made}))
    return evaluations


def evaluate_all(
    subjects: list[Subject],
    preset: Preset,
    circumstances: Circumstances,
    done: Callable[[str, Subject, list[Evaluation]], object] = lambda *_: None,
) -> Everything:
    """Every protocol that the data allow, on every subject; and why the others are left out.

    `done` is called with the result of each protocol on each subject, as soon as it is there.
    """
    everything = Everything()
    for protocol in PROTOCOLS:
        for subject in subjects:
            try:
                evaluations = evaluate_runs(protocol, subject, settings_of(protocol, preset), circumstances)
            except UserError as reason:
                everything.left_out[protocol] = str(reason)
                break
            everything.runs[protocol, subject.name] = evaluations
            done(protocol, subject, evaluations)
    return everything


def circumstances_of(
    subject: Subject,
    *,
    data: str,
    voc: str,
    runs: int,
    seed: int,
    device: str,
    workers: int,
    progress: Progress,
) -> Circumstances:
    """What the user asked for, with what was left out filled in."""
    from co2.machine import choose_device, choose_workers

    return Circumstances(
        data=data or data_of_run(subject.name),
        voc=voc,
        runs=runs,
        seed=seed,
        device=choose_device(device),
        workers=choose_workers(workers),
        progress=progress,
    )


def data_of_run(name: str) -> str:
    """What a run folder was trained on; nothing for anything else."""
    config = Path(name) / CONFIG
    return Experiment.from_json(config.read_text(encoding="utf-8")).data if config.is_file() else ""


def made_with(device: torch.device) -> dict[str, str]:
    """The versions and the device behind a number."""
    from co2 import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"co2": __version__, "torch": torch.__version__, "device": name}


def _material(protocol: str, circumstances: Circumstances) -> DataSplits | str:
    if PROTOCOLS[protocol].needs_voc:
        if not circumstances.voc:
            raise UserError(f"{protocol} needs PASCAL VOC's layout: give --voc with the folder that holds VOCdevkit.")
        return circumstances.voc
    if not circumstances.data:
        raise UserError(f"{protocol} needs images: give --data, as for `co2 pretrain`.")
    if circumstances.data not in circumstances.opened:
        circumstances.opened[circumstances.data] = open_data(circumstances.data)
    return circumstances.opened[circumstances.data]


def _changed(settings: Any, changes: Mapping[str, Any], protocol: str) -> Any:
    known = settings.__dataclass_fields__
    for name in changes:
        if name not in known:
            raise UserError(f"{protocol} has no setting '{name}'.{did_you_mean(name, known)}")
    return replace(settings, **changes)
