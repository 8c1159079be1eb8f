"""What the version before wrote, read as this one writes it: settings, checkpoints, and options on the command line.

Before a method was a value, a run named a source of negatives, an objective and an encoder. Tensors have kept their
names.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from co2.errors import UserError
from co2.files import parse_json
from co2.schema import shown

_METHODS = {"queue": "moco", "in-batch": "simclr", "memory-bank": "insdisc"}
_SHARED = {
    **{f"objective.{name}": f"method.{name}" for name in ("alpha", "ramp_up", "tau_consistency", "label_smoothing")},
    "objective.tau_instance": "method.tau",
    "objective.backend": "method.backend",
    "views.size": "size",
    "views.earlier_sizes": "earlier_sizes",
    **{
        f"views.{name}": f"method.view.{name}"
        for name in (
            "crop_scale", "crop_ratio", "jitter", "jitter_probability", "grey_probability", "grey_first",
            "blur_probability", "blur_sigma", "solarise_probability", "flip_probability", "mean", "std",
        )
    },
    **{f"encoder.{name}": f"network.{name}" for name in ("backbone", "stem", "groups")},
    **{f"encoder.{name}": f"method.{name}" for name in ("head", "hidden", "dimension")},
}  # fmt: skip
_OWN = {
    "moco": {
        "negatives.size": "method.queue",
        "negatives.momentum": "method.momentum",
        "negatives.symmetric": "method.symmetric",
        "encoder.shuffle_keys": "method.shuffle",
    },
    "simclr": {"objective.detach_target": "method.detach_target"},
    "insdisc": {"negatives.size": "method.negatives", "negatives.momentum": "method.bank_momentum"},
}
# What each method had beside, though nothing looked at it.
_IDLE = {
    "negatives.source", "negatives.size", "negatives.momentum", "negatives.symmetric", "encoder.shuffle_keys",
    "objective.detach_target", "views.then",
}  # fmt: skip
# What was meant where nothing was said, if that is not what is meant today.
_DEFAULTS = {
    "negatives.source": "queue",
    "negatives.size": 65_536,
    "negatives.momentum": 0.999,
    "objective.tau_instance": 0.2,
    "encoder.head": "linear",
}
_GROUPS = ("objective", "negatives", "encoder", "views")


def settings(plain: Any) -> Any:
    """The settings of an experiment, nested, as they are called now."""
    if not isinstance(plain, dict) or "method" in plain or not any(group in plain for group in _GROUPS):
        return plain
    new = {name: value for name, value in plain.items() if name not in _GROUPS}
    flat = dict(_DEFAULTS)
    for group in _GROUPS:
        if not isinstance(plain.get(group, {}), dict):
            raise UserError(f"{group} is not a group of settings.")
        flat |= {f"{group}.{name}": value for name, value in plain.get(group, {}).items()}
    source = flat["negatives.source"]
    method = _METHODS.get(source) if isinstance(source, str) else None
    if method is None:
        raise UserError(f"negatives.source cannot be {shown(source)}: it has to be one of {', '.join(_METHODS)}.")
    names = _SHARED | _OWN[method]
    put(new, "method.name", method)
    for old, value in flat.items():
        if old in names:
            put(new, names[old], value)
        elif old not in _IDLE:
            new[old] = value  # an unknown one, to be refused by its name
    optimisation = new.get("optimisation")
    if isinstance(optimisation, dict) and optimisation.get("optimiser") == "lars":
        new["optimisation"] = optimisation | {"decay": "matrices"}
    return new


def changes_of(written: Any, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Changes of an experiment by dotted names, {"objective.alpha": 0.3}, as they are called now where it is `written`
    as the version before did."""
    base = settings(written)
    if base is written:
        return changes
    other = copy.deepcopy(written)
    for name, value in changes.items():
        put(other, name, value)
    ours, theirs = flattened(base), flattened(settings(other))
    return {name: value for name, value in theirs.items() if name not in ours or ours[name] != value}


def flattened(plain: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """What nested groups hold, by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        flat |= flattened(value, f"{group}{name}.") if isinstance(value, Mapping) else {group + name: value}
    return flat


def names_of(old: str) -> list[str]:
    """What a setting may be called now, by the dotted name that it had; by the name that it has, that one."""
    found = [_SHARED[old]] if old in _SHARED else [names[old] for names in _OWN.values() if old in names]
    return found or [old]


def put(plain: dict[str, Any], name: str, value: Any) -> None:
    """Set what a dotted name stands for in nested dictionaries."""
    *groups, last = name.split(".")
    for group in groups:
        plain = plain.setdefault(group, {})
    plain[last] = value


def state(kept: Any) -> Any:
    """What a checkpoint holds, as it is called now."""
    if not isinstance(kept, dict) or "mechanism" not in kept:
        return kept
    new = {name: value for name, value in kept.items() if name != "mechanism"} | {"nets": kept["mechanism"]}
    if isinstance(new.get("experiment"), str):
        new["experiment"] = json.dumps(settings(parse_json(new["experiment"])))
    return new


def renamed(option: str) -> str | None:
    """What to say of a setting by the name that it had; nothing where it never had that name.

    Args:
        option: as on the command line, `objective.no-detach-target` or `objective.alpha`.
    """
    group, _, inner = option.replace("-", "_").partition(".")
    old = f"{group}.{inner.removeprefix('no_')}"
    found = names_of(old)
    if old == "negatives.source":
        return "is decided by the recipe now: one of moco, simclr or insdisc. `co2 recipes` lists them"
    if found == [old]:
        return None
    spelt = [f"--{name.replace('_', '-')}" for name in found]
    return f"is called {' or '.join(spelt)} now"
