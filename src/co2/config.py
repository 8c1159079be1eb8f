"""Experiment: everything that defines a run, nesting the specification that each room keeps beside its code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from co2.engine.specification import ExecutionSpecification, MonitoringSpecification, OptimisationSpecification
from co2.errors import UserError, did_you_mean
from co2.files import MOST_JSON, UnreadableFile, parse_json, read_text
from co2.machine.device import check_workers
from co2.networks.specification import EncoderSpecification
from co2.objective.specification import NegativesSpecification, ObjectiveSpecification
from co2.schema import as_settings_are, fits, hints_of, read_as, shown, wanted
from co2.views.view import View

# What may change between a run and its continuation: where it stands and what it runs on, not what it is. The precision
# is part of how the work is done, but half a run in each would be neither.
CIRCUMSTANCES = ("data", "out", "resume", "device", "workers", "execution")
_NO_CIRCUMSTANCE = "execution.precision"
_MOST_EPOCHS = 1_000_000  # each has a size of views


@dataclass(frozen=True)
class Experiment:
    """A pre-training run. Recipes are values of this type; every field can be set on the command line."""

    recipe: Annotated[str, tyro.conf.Suppress] = "moco-v2"  # not a flag: it is the command line's first word
    """Name of the recipe this experiment started from."""
    data: str = "shapes"
    """A folder of images (with or without class sub-folders), a text file that lists them, tar shards (a folder of
    them, or 'train-{000000..000012}.tar'), a pack, a CIFAR-10/100 or STL-10 folder, 'digits', or
    'shapes[:COUNT[:SIZE]]', the pictures that co2 renders itself."""
    out: str = ""
    """Run folder to write; by default runs/RECIPE-sSEED."""
    epochs: int = 200
    """How often every image is seen. Milestones and warm-up scale with it."""
    batch_size: int = 256
    """Images in a step, of all processes together. The learning rate follows it unless optimisation.learning_rate is
    set."""
    seed: int = 0
    """Everything random in a run follows from it."""
    resume: bool | Literal["auto"] = False
    """Continue the run in --out from its last checkpoint; auto: if there is one, and start otherwise, for jobs that are
    pre-empted and started again."""
    device: str = "auto"
    """cuda, cuda:1, cpu, or auto: the first GPU if there is one. Of several processes each takes a GPU of its own."""
    workers: int = -1
    """Processes that read and augment images, for each that trains; -1 takes what the machine has, 0 works in the main
    process. The result does not depend on it."""
    views: View = field(default_factory=View)
    encoder: EncoderSpecification = field(default_factory=EncoderSpecification)
    negatives: NegativesSpecification = field(default_factory=NegativesSpecification)
    objective: ObjectiveSpecification = field(default_factory=ObjectiveSpecification)
    optimisation: OptimisationSpecification = field(default_factory=OptimisationSpecification)
    monitoring: MonitoringSpecification = field(default_factory=MonitoringSpecification)
    execution: ExecutionSpecification = field(default_factory=ExecutionSpecification)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UserError(f"--epochs must be at least 1; got {self.epochs}.")
        if self.epochs > _MOST_EPOCHS:
            raise UserError(f"--epochs must be at most {_MOST_EPOCHS:,}; got {self.epochs}.")
        if self.batch_size < 2:
            raise UserError(f"--batch-size must be at least 2, since batch statistics need it; got {self.batch_size}.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed must be a whole number from 0 to 2^63 - 1; got {self.seed}.")
        check_workers(self.workers)
        if len(self.views.earlier_sizes) >= self.epochs:
            raise UserError(
                f"A run of {self.epochs} epochs has no room for {len(self.views.earlier_sizes) + 1} sizes of views one "
                "after the other. Give fewer --views.earlier-sizes, or more --epochs."
            )
        if self.negatives.source == "queue" and self.encoder.shuffle_keys and self.encoder.groups == 1:
            raise UserError(
                "Shuffled keys with one group of batch statistics do nothing: every key would still be normalised "
                "with the same companions as its query, and the network could cheat. Use --encoder.groups 4 (or more), "
                "or --encoder.no-shuffle-keys if the backbone has no BatchNorm."
            )
        if self.encoder.groups * 2 > self.batch_size:
            raise UserError(
                f"A batch of {self.batch_size} cannot be split into {self.encoder.groups} groups of batch statistics "
                f"of at least 2 images. Use --encoder.groups {max(1, self.batch_size // 2)} or fewer, "
                f"or --batch-size {self.encoder.groups * 2} or more."
            )

    @property
    def learning_rate(self) -> float:
        """The peak learning rate: as set, or by the linear rule (Goyal et al. 2017)."""
        optimisation = self.optimisation
        if optimisation.learning_rate is not None:
            return optimisation.learning_rate
        return optimisation.base_learning_rate * self.batch_size / optimisation.base_batch_size

    @property
    def view_sizes(self) -> list[int]:
        """Side of the views in each epoch, in pixels."""
        return [self.views.in_epoch(number, self.epochs).size for number in range(self.epochs)]

    def edit(self, **changes: Any) -> Experiment:
        """A copy with changes; a dict edits a nested part: `recipe.edit(epochs=100, objective={"alpha": 1.0})`."""
        edited: Experiment = _edited(self, changes)
        return edited

    def to_json(self) -> str:
        """The whole experiment as text; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Experiment:
        """The experiment that `to_json` wrote. Settings that are unknown, of a newer version say, or of the wrong kind
        are refused by name; whatever the text is, nothing but a UserError comes of it."""
        try:
            plain = parse_json(text)
        except UnreadableFile as error:
            raise UserError(f"The configuration does not describe an experiment: {error}.") from None
        experiment: Experiment = read_as(Experiment, plain, "The configuration does not describe an experiment: it")
        return experiment


def read_experiment(path: Path) -> Experiment:
    """The experiment in a file that `to_json` has filled, a run's config.json say. Raises MissingFile, or another
    UserError that names the file."""
    try:
        return Experiment.from_json(read_text(path, MOST_JSON, errors="replace"))
    except UnreadableFile as error:
        raise type(error)(f"{path} cannot be read: {error}.") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _edited(settings: Any, changes: Mapping[str, Any], group: str = "") -> Any:
    names = {f.name for f in dataclasses.fields(settings)}
    for name in changes:
        if name not in names:
            raise UserError(f"An experiment has no setting '{group}{name}'.{did_you_mean(name, names)}")
    hints = hints_of(settings.__class__)
    return dataclasses.replace(
        settings,
        **{
            name: _new_value(hints[name], getattr(settings, name), value, group + name)
            for name, value in changes.items()
        },
    )


def _new_value(hint: Any, before: Any, value: Any, name: str) -> Any:
    """What a setting becomes that was `before`, once it is known to be of the right kind."""
    if not dataclasses.is_dataclass(before):
        if isinstance(value, float) and fits(hint, 0.5):
            return value  # what may be wrong with one that is infinite, say, its own specification says best
        value = as_settings_are(value)
        if not fits(hint, value):
            raise UserError(f"{name} cannot be {shown(value)}: it has to be {wanted(hint)}.")
        return value
    if isinstance(value, Mapping):
        return _edited(before, value, f"{name}.")
    if not isinstance(value, type(before)):
        raise UserError(f"{name} is a group of settings. Give those that change by name: {name}={{...}}.")
    return value


def differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """What differs between two experiments, a line each, leaving aside the circumstances that may."""
    lines = []
    flat_ours, flat_theirs = flatten(ours), flatten(theirs)
    for name in flat_ours:
        may_differ = name.split(".")[0] in CIRCUMSTANCES and name != _NO_CIRCUMSTANCE
        if not may_differ and flat_ours[name] != flat_theirs[name]:
            theirs_shown, ours_shown = shown(flat_theirs[name]), shown(flat_ours[name])
            lines.append(f"{name}: {theirs_shown} in the run folder, {ours_shown} asked for")
    return lines


def refuse_idle(experiment: Experiment, recipe: Experiment) -> None:
    """Refuse what was changed of a recipe though nothing looks at it: whoever gives a setting expects it to be used."""
    asked, had = flatten(experiment), flatten(recipe)
    for name, why in _idle(experiment).items():
        if asked[name] != had[name]:
            group, _, inner = name.replace("_", "-").partition(".")
            option = f"--{group}.{'no-' if asked[name] is False else ''}{inner}"
            raise UserError(f"{option} would do nothing {why}")


def _idle(experiment: Experiment) -> dict[str, str]:
    """Settings that nothing looks at, as the others are, by their dotted names; and how a sentence about them ends."""
    negatives, objective = experiment.negatives, experiment.objective
    optimisation, execution = experiment.optimisation, experiment.execution
    idle: dict[str, str] = {}
    if optimisation.schedule == "cosine":
        why = "on a cosine schedule, which has no steps. Give --optimisation.schedule step too, or leave it out."
        idle |= {"optimisation.milestones": why, "optimisation.step_factor": why}
    elif not optimisation.milestones:
        idle["optimisation.step_factor"] = "without --optimisation.milestones to take a step at. Give them too."
    if optimisation.learning_rate is not None:
        why = "beside --optimisation.learning-rate, which is taken as it is. Leave one of them out."
        idle |= {"optimisation.base_learning_rate": why, "optimisation.base_batch_size": why}
    idle |= {f"views.{name}": why for name, why in experiment.views.idle("--views").items()}
    if negatives.source == "in-batch":
        why = "with in-batch negatives, which are the other images of the batch. Leave it out."
        idle |= {"negatives.size": why, "negatives.momentum": why}
    else:
        idle["objective.detach_target"] = "where positives carry no gradient anyway, as in a queue or a memory bank."
    if negatives.source != "queue":
        idle["encoder.shuffle_keys"] = "without a key encoder, which only the queue has. Leave it out."
    if objective.alpha == 0:
        why = "without the consistency term. Give --objective.alpha too, or leave it out."
        idle |= {"objective.ramp_up": why, "objective.detach_target": why}
    if execution.input in ("jpeg", "workers"):
        idle["execution.resident_gib"] = f"with --execution.input {execution.input}. Leave one of them out."
    return idle


def flatten(experiment: Experiment) -> dict[str, Any]:
    """The settings by their dotted names: {"objective.alpha": 0.3, ...}."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(experiment).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[name] = value
    return flat
