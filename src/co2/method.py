"""What a method is, and what a step and an epoch hand to it.

A method is a value: its fields are its settings, frozen, so that nothing can hide in it between two steps. All that is
learnt or kept is in `nets`, the modules that `build` makes; their state dict is the checkpoint. All that is random is
drawn by the engine from Philox under the names in `draws`; all that changes with time is computed by the engine from
the step number under the names in `schedules`, and lies on the device, where a captured step reads it.

This page imports nothing of the engine: what the engine has to hand over is written down here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from co2.errors import UserError, did_you_mean
from co2.lazily import torch
from co2.measures.metric import Metric
from co2.schema import shown
from co2.views.view import View

if TYPE_CHECKING:
    from torch import Tensor, nn

    from co2.networks.parts import Parts

Schedule = Callable[[float], float]
"""A number that changes with time: a function of the share of the run that is done, 0 to 1."""

Trouble = Literal["diverged", "collapsed", "narrow", "memory"]
"""What may go wrong in a run: the loss is no number any more, all embeddings are the same, they fill fewer dimensions
than before training, the device's memory does not suffice."""


class Draw(Protocol):
    """Random whole numbers, a function of (seed, name, time). They are the same in every process."""

    @property
    def every(self) -> Literal["step", "epoch"]:
        """Which time they belong to, and so whether `Step.drawn` or `Epoch.drawn` gives them."""

    @property
    def stream(self) -> int | None:
        """Philox's stream; none: one that is made from the name."""

    def numbers(self, seed: int, stream: int, times: Tensor, batch: int, images: int) -> Tensor:
        """For each of the times [T] a row: int64 [T, X], of a batch of `batch` out of `images` images."""
        ...


class Share(Protocol):
    """The rows of a batch that this process works on: b of B."""

    @property
    def rows(self) -> slice:
        """Which of the whole batch they are."""

    @property
    def total(self) -> int:
        """B."""

    def gather(self, mine: Tensor) -> Tensor:
        """Rows [b, ...] of this process in, those of the whole batch [B, ...] out, with gradients."""
        ...

    def shuffle(self, mine: Tensor, order: Tensor) -> Tensor:
        """Rows [b, ...] of this process in; out come those that it has in the batch in the new `order` [B]."""
        ...

    def put_back(self, mine: Tensor, order: Tensor) -> Tensor:
        """Rows [b, ...] of the batch in the `order` [B] in, those of the whole batch in its own order out."""
        ...


@dataclass(frozen=True)
class Step:
    """What a step hands to a method."""

    views: tuple[Tensor, ...]
    """One for each `View`: [b, 3, S, S] of numbers, or [b, k, 3, s, s] where its `then` makes k of one."""
    made: tuple[Mapping[str, Tensor], ...]
    """What `then` drew for each view: {"turn": [b, 4]}, {"order": [b, 9]}."""
    images: Tensor
    """int64 [b]: which images of the data set they show."""
    labels: Tensor | None
    """int64 [b], where the method needs them."""
    share: Share
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """[] each, of `schedules`."""
    random: Mapping[str, Tensor] = field(default_factory=dict)
    """int64 [X] each, of `draws`."""
    loaded: tuple[Tensor, ...] = ()
    """The views as they came, uint8: what travels between processes is a quarter of the numbers."""
    feed: Callable[[int, Tensor], Tensor] | None = None
    """Makes numbers of these, for the view of this number; none: there is nothing to send."""
    on_host: Mapping[str, Tensor] = field(default_factory=dict)
    """`random`, where the CPU has to know it to say which process sends what to which."""

    def at(self, name: str) -> Tensor:
        """What `schedules` says of this step: [], on the device."""
        return self.numbers[name]

    def drawn(self, name: str) -> Tensor | None:
        """What `draws` names, for this step: int64 [X]; none where nothing of that name is drawn."""
        return self.random.get(name)

    @property
    def rows(self) -> slice:
        """Which rows of the whole batch are this process's."""
        return self.share.rows

    def gather(self, mine: Tensor) -> Tensor:
        """Rows [b, ...] of this process in, those of the whole batch [B, ...] out, with gradients."""
        return self.share.gather(mine)

    def keys(self, network: nn.Module, view: int, order: str = "") -> Tensor:
        """Rows [B, D] of the whole batch, without gradient. The network sees the images in the order that is drawn
        under the name `order`, in that of the batch where nothing is."""
        places = self.on_host.get(order, self.random.get(order))  # [B]
        with torch.no_grad():  # not as a decorator: the compiler does not take one on a value that it has seen made
            if places is None:
                return self.share.gather(network(self.views[view]))
            if self.feed is None:
                pictures = self.share.shuffle(self.views[view], places)  # [b, 3, S, S]
            else:
                pictures = self.feed(view, self.share.shuffle(self.loaded[view], places))
            return self.share.put_back(network(pictures), places)


class Epoch(Protocol):
    """What is handed to a method before the first step of an epoch. Nothing is captured: values may be looked at."""

    number: int
    """Counted from 0."""

    def at(self, name: str) -> float:
        """What `schedules` says of the epoch's first step."""
        ...

    def drawn(self, name: str) -> Tensor:
        """What `draws` names, of those made every epoch: int64 [X]."""
        ...

    def features(self, network: Callable[[Tensor], Tensor]) -> Tensor:
        """What a network in evaluation mode makes of the plain view of all images: [N, D], in order."""
        ...


@dataclass(frozen=True)
class Output:
    """What a step of a method gives back."""

    loss: Tensor
    """[], the mean over this process's images."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """[] each, by the names in `Method.metrics`."""
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """For `update`, without gradient; never leaves the step."""


@dataclass(frozen=True)
class Seen:
    """What a run has measured, for a method that has something to say about it."""

    step: int
    """How many have been made."""
    done: float
    """Share of the run that they are."""
    values: Mapping[str, float]
    """What was measured just now: the averages of some steps, or the health at the end of an epoch."""
    lowest: Mapping[str, float]
    """The lowest that each of these has been before; nothing where it has not been measured."""
    batch_size: int
    batch_norm: bool
    """Whether the networks have batch statistics."""


Nets = Any
"""An `nn.ModuleDict` of networks, queues and banks; Any, because each of these has methods of its own."""

METHODS: dict[str, type[Method]] = {}
"""Every method whose file has been imported, by its name."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to learn from views of images."""

    name: ClassVar[str] = ""
    """What it is called in config.json: that of its class in small letters, behind its file where it is not ours."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """What a step reports beside the loss: logs, advice, curves and tables are made from these declarations."""
    needs_labels: ClassVar[bool] = False
    """Whether `Step.labels` is asked for. The run says so, and so does every table."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        own = cls.__module__.startswith("co2.methods.")
        cls.name = cls.__qualname__.lower() if own else f"{_file_of(cls)}:{cls.__qualname__}"
        METHODS[cls.name] = cls

    @classmethod
    def as_read(cls, plain: Any) -> tuple[Any, Any]:
        """For `co2.schema`: what is read in place of what was written, and as what: the method that it names.

        Its code is never looked for: what names it may come from anywhere.
        """
        name = plain.get("name") if isinstance(plain, dict) else None
        if not isinstance(name, str):
            raise UserError("The method is not named.")
        if ":" not in name:
            load_methods()
        if name in METHODS:
            return METHODS[name], {key: value for key, value in plain.items() if key != "name"}
        if ":" in name:
            raise UserError(
                f"This run was trained by a method of somebody's own, {shown(name)}. What is in a run folder is never "
                "imported: name the file again, as in `co2 pretrain path/to/file.py:Method`, or import it first."
            )
        raise UserError(f"This version does not know the method {shown(name)}.")

    @abstractmethod
    def views(self, size: int) -> tuple[View, ...]:
        """How each view of an image is made, one `View` for each; they may differ in size and in everything else."""

    def plain(self, size: int) -> View:
        """What `epoch.features`, the monitor and whoever takes over the backbone show it: colours, scale, no chance."""
        return replace(self.views(size)[0], size=size)

    @abstractmethod
    def build(self, parts: Parts) -> nn.ModuleDict:
        """Networks, queues and banks, fresh from the seed. `nets["encoder"].features(plain views)` [N, F] is what is
        monitored and handed over."""

    @abstractmethod
    def loss(self, nets: Nets, step: Step) -> Output:
        """The forward pass of this process's share of a batch: tensors in, tensors out, so that it can be captured."""

    def update(self, nets: Nets, step: Step, output: Output) -> None:  # noqa: B027 - most change nothing
        """Change in place what the optimiser does not. Called after it, without gradients, inside the capture."""

    def before_epoch(self, nets: Nets, epoch: Epoch) -> None:  # noqa: B027 - likewise
        """Change in place what needs all images, clusters, say. A part of the epoch's first step: no checkpoint lies
        between the two."""

    def schedules(self) -> Mapping[str, Schedule]:
        """What changes with time, by name."""
        return {}

    def rates(self) -> Mapping[str, Schedule]:
        """By the name of a network: what the highest learning rate is multiplied by, where that is not as for the
        others."""
        return {}

    def draws(self) -> Mapping[str, Draw]:
        """What is random in a step or an epoch beside the views, by name."""
        return {}

    @property
    def encoded(self) -> int:
        """How many views of an image go through the encoder with gradients: what a step costs, as far as anyone can
        say who has not measured it."""
        return len(self.views(224))

    # What it says to the user.

    def check(self, batch_size: int, groups: int) -> None:  # noqa: B027 - most work with any
        """Refuse, with a remedy, a batch size or a number of groups of batch statistics that cannot work."""

    def idle(self) -> Mapping[str, str]:
        """Settings that change nothing that is learnt, as the others are; and how a sentence about each ends: `option`
        would do nothing ..."""
        return {}

    def notes(self, images: int) -> tuple[str, ...]:
        """What somebody who trains on so many images should know before the first step."""
        return ()

    def advice(self, seen: Seen) -> Mapping[str, str]:
        """What the numbers of a run show, in plain words, by a key: each is told once."""
        return {}

    def remedies(self, trouble: Trouble) -> tuple[str, ...]:
        """What of its own settings helps: ends of the sentence `What helps is ...`; with memory, a setting and what it
        frees."""
        return ()


def load_methods() -> None:
    """Import every method there is: ours, each a file beside the others, and those of installed packages."""
    if "loaded" in _loaded:
        return
    package = importlib.import_module("co2.methods")
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda one: (one.name != "moco", one.name)):
        importlib.import_module(f"co2.methods.{module.name}")
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # somebody else's code, which may fail in any way
            raise UserError(
                f"The method '{point.name}' of an installed package ({point.value}) cannot be imported: {error}. "
                "Repair that package, or uninstall it."
            ) from error
    _loaded.add("loaded")


def load_from_file(words: str) -> type[Method]:
    """The method that `path/to/file.py:Method` names, whose file is run. What may be wrong is said in a sentence."""
    text, _, name = words.rpartition(":")
    path = Path(text).expanduser()
    if not path.is_file():
        raise UserError(f"There is no file {text}. Name a method of your own as path/to/file.py:Method.")
    module_name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_a_method"
    specification = importlib.util.spec_from_file_location(module_name, path)
    if specification is None or specification.loader is None:
        raise UserError(f"{text} is no Python file. Name a method of your own as path/to/file.py:Method.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module  # where a dataclass looks up what its fields are declared as
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # somebody else's code, which may fail in any way
        del sys.modules[module_name]
        raise UserError(f"{text} cannot be imported: {type(error).__name__}: {error}. Put that right first.") from error
    found = getattr(module, name, None)
    own = [one for one, value in vars(module).items() if isinstance(value, type) and issubclass(value, Method)]
    own = [one for one in own if vars(module)[one].__module__ == module_name]
    if found is None:
        there = f" It has {', '.join(own)}." if own else " It has no method at all: inherit from co2.method.Method."
        raise UserError(f"{text} has no {name}.{did_you_mean(name, own)}{there}")
    if not isinstance(found, type) or not issubclass(found, Method):
        raise UserError(f"{name} in {text} is no method: let it inherit from co2.method.Method.")
    check_method(found)
    return found


def check_method(kind: type[Method]) -> None:
    """Whether a class keeps to the contract, as far as that can be seen before it is used."""
    where = f"{kind.__name__} in {_file_of(kind)}"
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}. What a method has to have is in co2.method.Method.")
    if "__dataclass_params__" not in vars(kind):
        raise UserError(f"{where} is no frozen dataclass: write @dataclass(frozen=True, kw_only=True) above it.")


def check_output(method: Method, output: Any) -> None:
    """Whether what `loss` gave back is what it says of itself."""
    where = f"{type(method).__name__}.loss in {_file_of(type(method))}"
    if not isinstance(output, Output):
        raise UserError(f"{where} gives back a {type(output).__name__}: let it give back a co2.method.Output.")
    if not isinstance(output.loss, torch.Tensor) or output.loss.dim():
        shape = list(output.loss.shape) if isinstance(output.loss, torch.Tensor) else type(output.loss).__name__
        raise UserError(f"{where} gives back a loss that is no single number but {shape}: take its mean.")
    lacking = [metric.name for metric in method.metrics if metric.name not in output.metrics]
    if lacking:
        raise UserError(
            f"{where} does not give back {', '.join(lacking)}, which its metrics declare. Give it back in "
            "Output.metrics, or leave the declaration out."
        )


ENTRY_POINTS = "co2.methods"
"""Under which a package offers methods of its own: each entry names a module, or a method in it."""
_loaded: set[str] = set()


def _file_of(cls: type) -> str:
    """The file in which a class is written, or what stands for it in a notebook."""
    try:
        return PurePath(inspect.getfile(cls)).name
    except (TypeError, OSError):
        return cls.__module__
