"""Experiment: a method with what it is trained on and how; and recipes, which are experiments with a name."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from co2.errors import UserError, did_you_mean
from co2.files import MOST_JSON, UnreadableFile, parse_json, read_text
from co2.machine.device import check_workers
from co2.method import Method
from co2.networks.settings import Network
from co2.runs import upgrade
from co2.schema import as_settings_are, fits, hints_of, read_as, shown, wanted
from co2.views.view import VIEW_SIZES, View

# What may change between a run and its continuation: where it stands and what it runs on, not what it is. The precision
# is part of how the work is done, but half a run in each would be neither.
CIRCUMSTANCES = ("data", "out", "resume", "device", "workers", "execution")
_NO_CIRCUMSTANCE = "execution.precision"
_MOST_EPOCHS = 1_000_000  # each has a size of views

StepKind = Literal["auto", "eager", "captured", "compiled"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Optimisation:
    """Optimiser and learning-rate schedule. Shares of the run scale with the number of epochs by themselves."""

    optimiser: Literal["sgd", "lars", "adamw"] = "sgd"
    """sgd; lars for large batches; adamw, whose decay is apart from the gradient, for transformers."""
    base_learning_rate: float = 0.03
    """Learning rate at the base batch size; follows the batch size by the linear rule."""
    base_batch_size: int = 256
    """The batch size that the base learning rate is meant for."""
    learning_rate: float | None = None
    """Set this to use a learning rate as it is, whatever the batch size."""
    momentum: float = 0.9
    """Momentum of the optimiser; of adamw the first beta."""
    beta2: float = 0.999
    """adamw: how slowly the mean of the squared gradients follows."""
    weight_decay: float = 1e-4
    """L2 penalty on the weights."""
    decay: Literal["all", "matrices"] = "all"
    """What the penalty is on: everything, or matrices and kernels alone, without biases and the parameters of
    normalisation layers."""
    adapt: Literal["all", "matrices"] = "matrices"
    """lars: whose rate follows their norms; likewise."""
    clip: float | None = None
    """Longest gradient, of all parameters together; a longer one is shortened to it."""
    schedule: Literal["step", "cosine", "constant"] = "cosine"
    """step: times `step_factor` at each milestone; cosine: down to zero along half a cosine; constant: as it is."""
    milestones: tuple[float, ...] = ()
    """Where the step schedule drops, as shares of the run: 0.6 is epoch 120 of 200."""
    step_factor: float = 0.1
    """What the learning rate is multiplied by at each milestone."""
    warm_up: float = 0.0
    """Share of the run in which the learning rate rises linearly from zero."""

    def __post_init__(self) -> None:
        for name in ("base_learning_rate", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"optimisation.{name} must be a number above 0; got {value}.")
        for name in ("momentum", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimisation.{name} must be in [0, 1); got {getattr(self, name)}.")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise UserError(f"optimisation.clip must be a number above 0; got {self.clip}.")
        for name in ("weight_decay", "step_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"optimisation.{name} must be a number of 0 or more; got {getattr(self, name)}.")
        if self.base_batch_size < 1:
            raise UserError(f"optimisation.base_batch_size must be at least 1; got {self.base_batch_size}.")
        if not 0 <= self.warm_up < 1 or not all(0 < share < 1 for share in self.milestones):
            raise UserError(
                "optimisation.warm_up and optimisation.milestones are shares of the run, between 0 and 1: "
                "write 0.6 for epoch 120 of 200."
            )


@dataclass(frozen=True)
class Execution:
    """How the work is done. What comes out does not depend on it, but for rounding."""

    step: StepKind = "auto"
    """eager: as written; captured: replayed as a CUDA graph; compiled: by torch.compile and then captured, which takes
    a minute to start and more memory; auto: captured on a GPU, eager elsewhere and between several processes."""
    precision: Precision = "auto"
    """What encoders compute in; weights, losses and statistics are float32 in any case. auto: bfloat16 on a GPU, where
    nothing else is to be had, and float32 on a CPU. CPUs with instructions for it (avx512_bf16, amx) are
    faster in bfloat16, 1.4 to 1.7 times where it was measured; others are slower. A run keeps what it was begun
    with."""
    input: Literal["auto", "resident", "jpeg", "workers"] = "auto"
    """resident: all images on the GPU, augmented there; jpeg: decoded and augmented on the GPU; workers: by processes
    on the CPU; auto: the first of these that the data, the memory and the device allow."""
    deterministic: bool = False
    """On a GPU: the same bits every time, also after a resume, with slower convolutions. On a CPU they always are."""
    resident_gib: float | None = None
    """GPU memory for resident images; by default a quarter of what is free."""

    def __post_init__(self) -> None:
        if self.resident_gib is not None and not 0 <= self.resident_gib < math.inf:
            raise UserError(f"execution.resident_gib must be a number, 0 or more; got {self.resident_gib}.")


@dataclass(frozen=True)
class Monitoring:
    """What is measured while a run goes on, and how often."""

    log_every: int = 20
    """Steps between two lines in metrics.jsonl."""
    evaluate_every: int = 1
    """Epochs between two measurements of label-free health and kNN accuracy; the last epoch always has one."""
    health_images: int = 2048
    """Images, in two views each, on which alignment, uniformity and effective rank are measured."""
    bank_images: int = 50_000
    """At most this many labelled images are looked up by the kNN classifier."""
    query_images: int = 10_000
    """At most this many labelled images are classified by it."""
    checkpoint_minutes: float = 15.0
    """Longest time between two checkpoints; one is also written after every epoch that is not shorter than
    checkpoint_seconds."""
    checkpoint_seconds: float = 10.0
    """Shortest time between two checkpoints: epochs may take less than a second."""
    keep_every: int = 0
    """Epochs between checkpoints that are kept for good, beside the last three; 0 keeps none."""

    def __post_init__(self) -> None:
        fewest = {"log_every": 1, "evaluate_every": 1, "health_images": 2, "bank_images": 2, "query_images": 1}
        for name, least in fewest.items():
            if getattr(self, name) < least:
                raise UserError(f"monitoring.{name} must be at least {least}; got {getattr(self, name)}.")
        for name in ("checkpoint_minutes", "checkpoint_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(
                    f"monitoring.{name} must be a number, 0 or more, a large one for hardly ever; got "
                    f"{getattr(self, name)}."
                )
        if self.keep_every < 0:
            raise UserError(f"monitoring.keep_every must be 0 or more; got {self.keep_every}.")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A pre-training run. Recipes are values of this type; every field can be set on the command line."""

    recipe: Annotated[str, tyro.conf.Suppress] = "own"  # not a flag: it is the command line's first word
    """Name of the recipe this experiment started from."""
    version: Annotated[int, tyro.conf.Suppress] = 1
    """Which of that recipe: one whose meaning changes gets the next number, and a run keeps the one it began with."""
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
    size: int = 224
    """Side of the square views, in pixels."""
    earlier_sizes: tuple[int, ...] = ()
    """Sides of smaller, faster views with which a run begins, in pixels: 112 160 gives a third of the run to each of
    them, and the last third to `size`."""
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
    network: Network = field(default_factory=Network)
    method: Method
    optimisation: Optimisation = field(default_factory=Optimisation)
    monitoring: Monitoring = field(default_factory=Monitoring)
    execution: Execution = field(default_factory=Execution)

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
        for name, sizes in (("size", (self.size,)), ("earlier-sizes", self.earlier_sizes)):
            for size in sizes:
                if size not in VIEW_SIZES:
                    raise UserError(
                        f"A view of {size} pixels is too small or too large: give --{name} from {VIEW_SIZES[0]} to "
                        f"{VIEW_SIZES[-1]}."
                    )
        for earlier, later in pairwise((*self.earlier_sizes, self.size)):
            if earlier > later:
                raise UserError(
                    f"Views grow: --earlier-sizes cannot have {earlier} before {later} pixels. Give them from small to "
                    f"large, none above --size, {self.size}."
                )
        if len(self.earlier_sizes) >= self.epochs:
            raise UserError(
                f"A run of {self.epochs} epochs has no room for {len(self.earlier_sizes) + 1} sizes of views one "
                "after the other. Give fewer --earlier-sizes, or more --epochs."
            )
        groups = self.network.groups
        self.method.check(self.batch_size, groups)
        if groups * 2 > self.batch_size:
            raise UserError(
                f"A batch of {self.batch_size} cannot be split into {groups} groups of batch statistics of at least 2 "
                f"images. Use --network.groups {max(1, self.batch_size // 2)} or fewer, or --batch-size {groups * 2} "
                "or more."
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
        sizes = (*self.earlier_sizes, self.size)
        return [sizes[number * len(sizes) // self.epochs] for number in range(self.epochs)]

    def views(self, epoch: int | None = None) -> tuple[View, ...]:
        """How views are made; where they grow, in an epoch counted from 0. Blur is measured in pixels, and follows the
        size: the same view, smaller."""
        views = self.method.views(self.size)
        size = self.size if epoch is None else self.view_sizes[epoch]
        return views if size == self.size else tuple(view.scaled(size / self.size) for view in views)

    @property
    def plain(self) -> View:
        """How pictures are shown to a network that is judged: of its method's colours and scale, without chance."""
        return self.method.plain(self.size)

    def edit(self, **changes: Any) -> Experiment:
        """A copy with changes; a dict edits a nested part: `recipe.edit(epochs=100, method={"alpha": 1.0})`."""
        edited: Experiment = _edited(self, changes)
        return edited

    def to_json(self) -> str:
        """The whole experiment as text; `from_json` reads it back."""
        return json.dumps(_plain(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Experiment:
        """The experiment that `to_json` wrote. Settings that are unknown, of a newer version say, or of the wrong kind
        are refused by name; whatever the text is, nothing but a UserError comes of it."""
        try:
            plain = parse_json(text)
        except UnreadableFile as error:
            raise UserError(f"The configuration does not describe an experiment: {error}.") from None
        return Experiment.from_plain(plain)

    @staticmethod
    def from_plain(plain: Any) -> Experiment:
        """The same from what JSON has become: nested dictionaries, of this version or of the one before."""
        experiment: Experiment = read_as(Experiment, plain, "The configuration does not describe an experiment: it")
        return experiment

    @classmethod
    def as_read(cls, plain: Any) -> tuple[Any, Any]:
        """For `co2.schema`: what is read in place of what was written, and as what."""
        return cls, upgrade.settings(plain)


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
    names = {one.name for one in dataclasses.fields(settings) if not one.metadata.get("no_setting")}
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
    if not isinstance(value, Method if isinstance(before, Method) else type(before)):
        raise UserError(f"{name} is a group of settings. Give those that change by name: {name}={{...}}.")
    return value


def differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """What differs between two experiments, a line each, leaving aside the circumstances that may."""
    lines = []
    flat_ours, flat_theirs = flatten(ours), flatten(theirs)
    for name in {**flat_ours, **flat_theirs}:
        may_differ = name.split(".")[0] in CIRCUMSTANCES and name != _NO_CIRCUMSTANCE
        if not may_differ and flat_ours.get(name) != flat_theirs.get(name):
            theirs_shown, ours_shown = (
                shown(flat[name]) if name in flat else "nothing" for flat in (flat_theirs, flat_ours)
            )
            lines.append(f"{name}: {theirs_shown} in the run folder, {ours_shown} asked for")
    return lines


def refuse_idle(experiment: Experiment, recipe: Experiment) -> None:
    """Refuse what was changed of a recipe though nothing looks at it: whoever gives a setting expects it to be used."""
    asked, had = flatten(experiment), flatten(recipe)
    for name, why in _idle(experiment).items():
        if asked[name] != had[name]:
            group, _, inner = name.replace("_", "-").rpartition(".")
            option = f"--{group}.{'no-' if asked[name] is False else ''}{inner}"
            raise UserError(f"{option} would do nothing {why}")


def _idle(experiment: Experiment) -> dict[str, str]:
    """Settings that nothing looks at, as the others are, by their dotted names; and how a sentence about them ends."""
    optimisation, execution = experiment.optimisation, experiment.execution
    idle: dict[str, str] = {}
    if optimisation.schedule != "step":
        why = f"on a {optimisation.schedule} schedule, which has no steps."
        why += " Give --optimisation.schedule step too, or leave it out."
        idle |= {"optimisation.milestones": why, "optimisation.step_factor": why}
    elif not optimisation.milestones:
        idle["optimisation.step_factor"] = "without --optimisation.milestones to take a step at. Give them too."
    if optimisation.learning_rate is not None:
        why = "beside --optimisation.learning-rate, which is taken as it is. Leave one of them out."
        idle |= {"optimisation.base_learning_rate": why, "optimisation.base_batch_size": why}
    if optimisation.optimiser != "lars":
        idle["optimisation.adapt"] = "without --optimisation.optimiser lars. Give that too, or leave it out."
    if optimisation.optimiser != "adamw":
        idle["optimisation.beta2"] = "without --optimisation.optimiser adamw. Give that too, or leave it out."
    if optimisation.weight_decay == 0:
        idle["optimisation.decay"] = "without --optimisation.weight-decay. Give that too, or leave it out."
    for name, view in views_in(experiment.method).items():
        idle |= {
            f"method.{name}.{inner}": why for inner, why in view.idle(f"--method.{name.replace('_', '-')}").items()
        }
    idle |= {f"method.{name}": why for name, why in experiment.method.idle().items()}
    if execution.input in ("jpeg", "workers"):
        idle["execution.resident_gib"] = f"with --execution.input {execution.input}. Leave one of them out."
    return idle


def views_in(method: Method) -> dict[str, View]:
    """The settings of a method that say how views are made, by their names."""
    values = {one.name: getattr(method, one.name) for one in dataclasses.fields(method)}
    return {name: value for name, value in values.items() if isinstance(value, View)}


def flatten(experiment: Experiment) -> dict[str, Any]:
    """The settings by their dotted names: {"method.alpha": 0.3, ...}."""
    return upgrade.flattened(_plain(experiment))


def _plain(settings: Any) -> Any:
    """Settings as nested dictionaries. A method is named; what a view gets from the run (its size) is left out."""
    if not dataclasses.is_dataclass(settings):
        return settings
    named = {"name": settings.name} if isinstance(settings, Method) else {}
    fields = [one.name for one in dataclasses.fields(settings) if not one.metadata.get("no_setting")]
    return {**named, **{name: _plain(getattr(settings, name)) for name in fields}}


@dataclass(frozen=True)
class Recipe:
    """An experiment with a name, and one line about it."""

    name: str
    summary: str
    version: int
    make: Callable[[], Experiment]

    def build(self) -> Experiment:
        """The experiment, under its name."""
        return self.make().edit(recipe=self.name, version=self.version)


RECIPES: dict[str, Recipe] = {}
"""Of every method whose file has been imported, by name."""


def recipe(summary: str, version: int = 1) -> Callable[[Callable[[], Experiment]], Callable[[], Experiment]]:
    """Registers an experiment under the name of its function; `summary` is what a list of recipes says about it."""

    def register(make: Callable[[], Experiment]) -> Callable[[], Experiment]:
        one = Recipe(make.__name__.replace("_", "-"), summary, version, make)
        RECIPES[one.name] = one

        @functools.wraps(make)
        def build() -> Experiment:
            return one.build()

        return build

    return register
