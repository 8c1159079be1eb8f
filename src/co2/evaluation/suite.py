"""Protocols by their names: one of them, over several seeds, or all that the data allow."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from co2.checkpoint import CONFIG, checkpoints
from co2.data.open import DataSplits, is_address, open_data
from co2.errors import RunError, UserError, did_you_mean
from co2.evaluation.presets import AFTER_STEPS, ALL, PROTOCOLS, Preset, check_given, protocol_called, settings_of
from co2.evaluation.progress import SILENT, Progress
from co2.evaluation.protocol import Evaluation
from co2.evaluation.subject import SEEDS, Subject, open_subject
from co2.experiment import read_experiment
from co2.files import MissingFile
from co2.machine.device import ran_out_of_memory
from co2.machine.memory import freed_memory_kept
from co2.schema import shown

_FEWEST_CHECKPOINTS = 3  # fewer have no order to speak of


@dataclass(frozen=True)
class Circumstances:
    """On what, where and how often subjects are evaluated."""

    data: str = ""
    """Images with labels, as for --data of `co2 pretrain`."""
    told_by: str = ""
    """The file that names the data, where the user did not."""
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
        if not 0 <= self.seed <= SEEDS - self.runs:
            raise UserError(f"--seed must be a whole number from 0 to 2^63 - 1; got {self.seed}.")


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
    data: str | Path = "",
    voc: str | Path = "",
    settings: Any = None,
    preset: Preset = "quick",
    runs: int = 1,
    seed: int = 0,
    view_size: int | None = None,
    embeddings: bool = False,
    device: str = "auto",
    workers: int = -1,
    progress: Progress = SILENT,
    **changes: Any,
) -> list[Evaluation]:
    """Evaluate a backbone by one protocol; a record for each run.

    Args:
        protocol: knn, linear, semi-supervised, svm, detection, segmentation or label-free; or all, for every one that
            the data allow (`progress` is told which are left out and why).
        subject: a run folder, a file, a model's name, `random`, or an opened `Subject`.
        data: images, as for pre-training; by default those that a run folder was trained on.
        voc: a folder in PASCAL VOC's layout, for svm, detection and segmentation.
        settings: the protocol's settings; by default those of `preset`, "quick" or "paper".
        preset: see `settings`.
        runs: how often, with the seeds `seed`, `seed` + 1, ...
        seed: whatever is random follows from it.
        view_size: side of the views in pixels; by default what the subject was trained with, or 224. An opened
            `Subject` has its own.
        embeddings: knn, linear, svm, label-free: judge what comes out of the head instead of the features before it.
            An opened `Subject` has a head or has none.
        device: cuda, cuda:1, cpu or auto.
        workers: processes that read images; -1 takes what the machine has.
        progress: is told how far it is.
        changes: single settings, by name: `epochs=5`.
    """
    if protocol != ALL:
        chosen = _changed(settings if settings is not None else settings_of(protocol, preset), changes, protocol)
    elif settings is not None or changes:
        raise UserError("all has the settings of its preset. Give others to one protocol at a time.")
    opened = subject
    if not isinstance(opened, Subject):
        opened = open_subject(str(opened), view_size=view_size, seed=seed, embeddings=embeddings)
    circumstances = circumstances_of(
        opened, data=str(data), voc=str(voc), runs=runs, seed=seed, device=device, workers=workers, progress=progress
    )
    if protocol == ALL:
        everything = evaluate_all([opened], preset, circumstances)
        for name, why in everything.left_out.items():
            progress.say(f"Left out: {name}. {why}")
        return [one for runs_of_one in everything.runs.values() for one in runs_of_one]
    if settings is not None:
        return evaluate_runs(protocol, opened, chosen, circumstances)
    chosen = suited(protocol, preset, opened, chosen, changes, progress)
    return evaluate_runs(protocol, opened, chosen, circumstances, preset)


def suited(
    protocol: str, preset: Preset, subject: Subject, settings: Any, given: Collection[str], progress: Progress
) -> Any:
    """The settings with those that the preset has for backbones such as this one, but for what the user has given."""
    usual, own = settings_of(protocol, preset), settings_of(protocol, preset, subject.recipe)
    for name in usual.__dataclass_fields__:
        value = getattr(own, name)
        if value != getattr(usual, name) and name not in given:
            settings = replace(settings, **{name: value})
            progress.say(f"{protocol}: {name} is {value:g}, as the paper has it for backbones like {subject.recipe}.")
    return settings


def evaluate_runs(
    protocol: str,
    subject: Subject,
    settings: Any,
    circumstances: Circumstances,
    preset: str = "",
    done: Callable[[Evaluation], object] = lambda _: None,
) -> list[Evaluation]:
    """A record for each seed. Where neither the protocol nor the subject's weights are random, one run is all.

    `done` is called with each as soon as it is there.
    """
    known = protocol_called(protocol)
    if subject.head and known.trains_backbone:
        able = ", ".join(name for name, other in PROTOCOLS.items() if not other.trains_backbone)
        raise UserError(
            f"{protocol} trains the backbone, without the head that embeddings come out of. Embeddings are judged by "
            f"{able}."
        )
    run_protocol = importlib.import_module(f"co2.evaluation.{known.module}").evaluate
    material = _material(protocol, circumstances)
    late = late_milestones(protocol, settings)
    if late:
        circumstances.progress.say(
            f"{protocol}: training is over before it comes to {' and '.join(map(str, late))} of its milestones, where "
            "the learning rate would drop. Give --milestones that suit it."
        )
    fixed = known.nothing_random and subject.drawn_from is None
    evaluations = []
    seeds = range(circumstances.seed, circumstances.seed + (1 if fixed else circumstances.runs))
    if seeds[-1] >= known.seeds:
        raise UserError(f"{protocol} takes a --seed from 0 to {known.seeds - 1}; got {seeds[-1]}.")
    for seed in seeds:
        circumstances.progress.about(f"{protocol}, {subject.name}, seed {seed}")
        # Random weights are part of what is random: they are drawn anew for each run.
        shown = subject if subject.drawn_from is None else replace(subject.random(seed), name=subject.name)
        begun = time.perf_counter()
        try:
            with freed_memory_kept(circumstances.device):
                evaluation: Evaluation = run_protocol(
                    shown,
                    material,
                    settings,
                    device=circumstances.device,
                    seed=seed,
                    workers=circumstances.workers,
                    progress=circumstances.progress,
                )
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            raise RunError(f"{protocol}: the memory is not enough. {_remedy(protocol, settings)}") from error
        made = made_with(circumstances.device) | {"seconds": round(time.perf_counter() - begun, 2)}
        where = circumstances.voc if known.needs_voc else circumstances.data
        trained = {} if shown.steps is None else {AFTER_STEPS: shown.steps}
        evaluation = replace(
            evaluation,
            data=where,
            details=evaluation.details | trained | {"made_with": made},
            preset=preset,
            architecture=shown.architecture,
        )
        evaluations.append(evaluation)
        done(evaluation)
    return evaluations


def late_milestones(protocol: str, settings: Any) -> list[float]:
    """Milestones that the training never comes to: a user who made it shorter may not have thought of them."""
    ends = {"linear": "epochs", "semi-supervised": "epochs", "detection": "iterations"}
    end = getattr(settings, ends[protocol]) if protocol in ends else 1  # those of segmentation are shares of it
    return [milestone for milestone in getattr(settings, "milestones", ()) if milestone >= end]


def _remedy(protocol: str, settings: Any) -> str:
    """What makes a protocol need less memory."""
    if protocol == "knn":
        return "Give --storage FOLDER, which keeps features in a file, or fewer --bank-images."
    if protocol == "linear" and settings.solver == "lbfgs":
        return "Give fewer --crops, or --solver sgd, which keeps no features."
    if hasattr(settings, "batch_size"):
        smaller = {"detection": "smaller --train-sizes and --test-size", "segmentation": "a smaller --crop"}
        size = smaller.get(protocol, "a smaller --view-size")
        return f"Give a smaller --batch-size than {settings.batch_size}, or {size}."
    return (
        "Give fewer --images, or a smaller --view-size." if protocol == "label-free" else "Give a smaller --view-size."
    )


def evaluate_checkpoints(
    run: str | Path,
    settings: Any,
    circumstances: Circumstances,
    preset: str = "",
    view_size: int | None = None,
    embeddings: bool = False,
    done: Callable[[Evaluation], object] = lambda _: None,
) -> list[Evaluation]:
    """label-free of every checkpoint of a run, the oldest first, with `knn_top1` where the data have labels that kNN
    can do with.

    `done` is called with each as soon as it is there.
    """
    found = checkpoints(Path(run).expanduser())
    if len(found) < _FEWEST_CHECKPOINTS:
        raise UserError(
            f"{run} has {len(found)} of the {_FEWEST_CHECKPOINTS} checkpoints that it takes to speak of a correlation. "
            "Give a run folder that has kept more of them: `co2 pretrain` does with --monitoring.keep-every 1."
        )
    material = _material("label-free", circumstances)
    assert isinstance(material, DataSplits)
    evaluations: list[Evaluation] = []
    labelled = material.bank is not None
    for path in found:
        circumstances.progress.say(path.name)
        subject = open_subject(str(path), view_size=view_size, embeddings=embeddings)
        [one] = evaluate_runs("label-free", subject, settings, circumstances, preset)
        if labelled:
            try:
                [accuracy] = evaluate_runs("knn", subject, settings_of("knn", "quick"), circumstances)
                one = replace(one, numbers=one.numbers | {"knn_top1": accuracy.numbers["top1"]})
            except UserError as error:
                if evaluations:
                    raise
                labelled = False
                circumstances.progress.say(f"Without kNN accuracy: {error}")
        evaluations.append(one)
        done(one)
    return evaluations


def evaluate_all(
    subjects: list[Subject],
    preset: Preset,
    circumstances: Circumstances,
    each: Callable[[Evaluation], object] = lambda _: None,
    done: Callable[[str, Subject, list[Evaluation]], object] = lambda *_: None,
) -> Everything:
    """Every protocol that the data allow, on every subject; and why the others are left out.

    `each` is called with every evaluation, `done` with all of a protocol on a subject, as soon as they are there.
    """
    everything = Everything()
    for protocol in PROTOCOLS:
        for subject in subjects:
            settings = suited(protocol, preset, subject, settings_of(protocol, preset), (), circumstances.progress)
            try:
                evaluations = evaluate_runs(protocol, subject, settings, circumstances, preset, each)
            except UserError as reason:
                everything.left_out[protocol] = str(reason)
                break
            everything.runs[protocol, subject.name] = evaluations
            done(protocol, subject, evaluations)
    if not everything.runs:
        reasons = "\n".join(f"  {protocol}: {why}" for protocol, why in everything.left_out.items())
        raise UserError(f"Nothing could be evaluated.\n{reasons}")
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
    from co2.machine.device import choose_device, choose_workers

    return Circumstances(
        data=data or data_of_run(subject.name),
        told_by="" if data else str(Path(subject.name) / CONFIG),
        voc=voc,
        runs=runs,
        seed=seed,
        device=choose_device(device),
        workers=choose_workers(workers),
        progress=progress,
    )


def data_of_run(name: str) -> str:
    """What a run folder was trained on; nothing for anything else."""
    try:
        return read_experiment(Path(name).expanduser() / CONFIG).data
    except MissingFile:
        return ""


def made_with(device: torch.device) -> dict[str, str]:
    """The versions and the device behind a number."""
    from co2 import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"co2": __version__, "torch": torch.__version__, "device": name}


def _material(protocol: str, circumstances: Circumstances) -> DataSplits | str:
    if PROTOCOLS[protocol].needs_voc:
        if not circumstances.voc:
            raise UserError(f"{protocol} needs PASCAL VOC's layout: give --voc with the folder that holds VOCdevkit.")
        return os.path.expanduser(circumstances.voc)
    if not circumstances.data:
        raise UserError(f"{protocol} needs images: give --data, as for `co2 pretrain`.")
    if circumstances.told_by and is_address(circumstances.data):
        raise UserError(
            f"The run was trained on {shown(circumstances.data)}, by {circumstances.told_by}. An address that a file "
            "names is not opened: if you know it, or have the images elsewhere, give --data."
        )
    if circumstances.data not in circumstances.opened:
        try:
            circumstances.opened[circumstances.data] = open_data(circumstances.data)
        except UserError as error:
            if not circumstances.told_by:
                raise
            raise type(error)(
                f"{error} That is what the run was trained on, by {circumstances.told_by}: if it lies elsewhere, seen "
                "from here, give --data."
            ) from error
    return circumstances.opened[circumstances.data]


def _changed(settings: Any, changes: Mapping[str, Any], protocol: str) -> Any:
    known = settings.__dataclass_fields__
    for name in changes:
        if name not in known:
            raise UserError(f"{protocol} has no setting '{name}'.{did_you_mean(name, known)}")
    changed = replace(settings, **changes)
    check_given(protocol, changed, changes)
    return changed
