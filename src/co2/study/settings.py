"""Settings by their dotted names: `method.alpha=0.3` as text, and an experiment with it changed. No torch here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from co2.errors import UserError, did_you_mean
from co2.experiment import Experiment, flatten
from co2.files import parse_json
from co2.method import METHODS
from co2.runs import upgrade
from co2.schema import shown

# What a study decides for each of its cells, and the option with which the user decides it.
_DECIDED = {"data": "--data", "out": "--out", "seed": "--seeds", "resume": "", "device": "--device"}
_DECIDED |= {"workers": "--workers", "recipe": "--base", "version": "--base"}


def parse_assignments(texts: Sequence[str], option: str) -> dict[str, Any]:
    """`NAME=VALUE` texts as a dictionary. Values are JSON (0.3, true, [0.08, 1]), `0.08,1` for short, or plain text;
    lists of words need no quotation marks, which shells take away: [step,cosine]."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UserError(f"{option} {text} is not understood. Write {option} method.alpha=0.3, for instance.")
        found[name.strip().replace("-", "_")] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    for spelling in (text, text.lower()):  # 0.3, [0.08,1]; True
        try:
            return parse_json(spelling)
        except ValueError:
            continue
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if (bare == text and "," not in text) or "[" in bare:
        return text
    return [_value(part.strip()) for part in bare.split(",")]


def changed(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """The experiment with settings changed by their dotted names; unknown ones and wrong kinds are refused by name."""
    plain = json.loads(experiment.to_json())
    wanted = changes.get("method.name", experiment.method.name)
    if wanted != experiment.method.name and wanted in METHODS:  # which keeps of the settings those that it has, too
        own = {one.name for one in dataclasses.fields(METHODS[wanted])}
        plain["method"] = {name: value for name, value in plain["method"].items() if name in own} | {"name": wanted}
        known = {*upgrade.flattened(plain), *(f"method.{name}" for name in own), *changes}
    else:
        known = {*upgrade.flattened(plain)}
    for name, value in changes.items():
        if name not in known:
            words = upgrade.renamed(name)
            hint = f" It {words}." if words else did_you_mean(name, known)
            raise UserError(f"An experiment has no setting '{shown(name)}'.{hint}")
        upgrade.put(plain, name, value)
    return Experiment.from_plain(plain)


def refuse_decided(changes: Mapping[str, Any], option: str) -> None:
    """A study fills in some settings itself; they cannot be edited as well."""
    for name in changes:
        if name in _DECIDED:
            instead = f" Use {_DECIDED[name]}." if _DECIDED[name] else ""
            raise UserError(f"{option} cannot change {name}, which a study decides for each cell.{instead}")


def changes_between(base: Experiment, other: Experiment) -> dict[str, Any]:
    """By dotted names, what has to be changed in `base` to make it `other`, leaving aside what a study decides."""
    ours, theirs = flatten(base), flatten(other)
    return {
        name: value
        for name, value in theirs.items()
        if name not in _DECIDED and (name not in ours or ours[name] != value)
    }


def plain_settings(experiment: Experiment) -> dict[str, Any]:
    """The experiment as JSON has it, without the circumstances that differ from one sitting to the next."""
    plain: dict[str, Any] = json.loads(experiment.to_json())
    return {name: value for name, value in plain.items() if name not in ("out", "resume", "device", "workers")}


def changed_settings(settings: Any, changes: Mapping[str, Any], protocol: str) -> Any:
    """The settings of a protocol, a dataclass, with some changed by name: at once, since each is checked with the
    others."""
    known, fitting = settings.__dataclass_fields__, {}
    for name, value in changes.items():
        if name not in known:
            raise UserError(
                f"{protocol} has no setting '{name}'.{did_you_mean(name, known)} It has {', '.join(known)}."
            )
        default = getattr(settings, name)
        value = tuple(value) if isinstance(value, list) else value
        if isinstance(default, tuple) and not isinstance(value, tuple):
            value = (value,)
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise UserError(f"{protocol}.{name} cannot be {value!r}: it is {default!r} by default.")
        fitting[name] = value
    return dataclasses.replace(settings, **fitting)
