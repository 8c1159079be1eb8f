"""What others wrote, compared with what it has to be. A schema is a type, `Annotated[float, "from 0 to 1"]` with what
is asked of it besides; a dataclass, which is built; or a dictionary of schemas by names: `"name?"` may be missing, a
type stands for all names that are not known before, and what is not named is not looked at. A class with `as_read` says
what is read in place of what was written, and as what.

Everything that is wrong with a file is told at once, each with its place.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from os import PathLike, fspath
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from co2.errors import UserError

# What can be asked of a setting, in the words for it. NaN is no number of any kind.
RANGES = {
    "at least 0": lambda value: 0 <= value < math.inf,
    "at least 1": lambda value: 1 <= value < math.inf,
    "at least 2": lambda value: 2 <= value < math.inf,
    "at least 3": lambda value: 3 <= value < math.inf,
    "above 0": lambda value: 0 < value < math.inf,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "from 0 to below 1": lambda value: 0 <= value < 1,
    "from 0 to 1": lambda value: 0 <= value <= 1,
    "between 0 and 1": lambda value: 0 < value < 1,
    "from 0 to 100": lambda value: 0 <= value <= 100,
}

_FAULTS_TOLD = 5
_LONGEST_NAME = 120  # of files that are called by it, with room for what is put after it


def is_plain_name(text: str) -> bool:
    """Whether a file may be called by this name: letters, digits and `_.+-`, a letter or digit first. It is no path, no
    hidden file, no option of a command and no formula."""
    return bool(re.fullmatch(r"\w[\w.+-]*", text)) and len(text.encode(errors="replace")) <= _LONGEST_NAME


_ASKED: dict[str, Callable[[Any], bool]] = RANGES | {
    "a plain name": is_plain_name,
    "a line of at most 200 characters": lambda text: text.isprintable() and len(text) <= 200,
}
PlainName = Annotated[str, "a plain name"]
Line = Annotated[str, "a line of at most 200 characters"]
Amount = Annotated[float, "at least 0"]
Count = Annotated[int, "at least 0"]


def read_as(schema: Any, plain: Any, it: str) -> Any:
    """A value as JSON has it, checked through and through, and built where the schema has dataclasses. Raises
    UserError, and nothing else, with all that is wrong; `it` is what the whole is called in a sentence."""
    faults: list[str] = []
    value = _read(schema, plain, "", faults)
    if faults:
        more = f" And {len(faults) - _FAULTS_TOLD} more." if len(faults) > _FAULTS_TOLD else ""
        raise UserError(" ".join(faults[:_FAULTS_TOLD]).replace("\0", it) + more)
    return value


def _read(schema: Any, value: Any, place: str, faults: list[str]) -> Any:
    def at(name: object) -> str:
        return f"{place}.{name}" if place else str(name)

    if hasattr(schema, "as_read"):
        try:
            schema, value = schema.as_read(value)
        except UserError as error:
            faults.append(f"{place}: {error}" if place else str(error))
            return value
    kind, inner = get_origin(schema), get_args(schema)
    if kind is tuple and inner[-1] is ... and dataclasses.is_dataclass(inner[0]) and isinstance(value, list):
        return tuple(_read(inner[0], one, at(number), faults) for number, one in enumerate(value))
    named = isinstance(schema, dict)
    if not named and not dataclasses.is_dataclass(schema) and kind is not Mapping:
        value = value if schema is Any or kind is list else as_settings_are(value)
        if not fits(schema, value):
            faults.append(f"{shown(place)} cannot be {shown(value)}: it has to be {wanted(schema)}.")
        return value
    if not isinstance(value, dict):
        faults.append(f"{shown(place) if place else chr(0)} is not a group of settings.")
        return value
    if kind is Mapping:
        schema, named = {inner[0]: inner[1]}, True
    parts: Mapping[Any, Any] = _named(schema) if named else _settings(schema)
    others = next((name for name in parts if not isinstance(name, str)), None)
    known = len(faults)
    if unknown := sorted(value.keys() - parts.keys() if not named else ()):
        faults.append(f"This version does not know the settings {', '.join(shown(at(name)) for name in unknown[:5])}.")
    needed = [name for name in schema if f"{name}" in parts] if named else _needed(schema)
    faults += [f"{shown(at(name))} is missing." for name in needed if name not in value]
    if others is not None:
        strange = [name for name in value if name not in parts and not fits(others, name)]
        faults += [f"{shown(at(name))} has to be called by {wanted(others)}." for name in strange]
    read = {n: _read(parts.get(n, parts.get(others, Any)), one, at(n), faults) for n, one in value.items()}
    try:
        return read if named or len(faults) > known else schema(**read)
    except UserError as error:  # what its parts have to be together
        faults.append(f"{place}: {error}" if place else str(error))


def _named(schema: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name.removesuffix("?") if isinstance(name, str) else name: part for name, part in schema.items()}


@cache
def _settings(kind: Any) -> Mapping[str, Any]:
    """The fields of a dataclass that are settings, and what they are declared as."""
    return {one.name: hints_of(kind)[one.name] for one in dataclasses.fields(kind) if "no_setting" not in one.metadata}


@cache
def _needed(kind: Any) -> list[str]:
    return [one.name for one in dataclasses.fields(kind) if one.default is one.default_factory is dataclasses.MISSING]


@cache
def hints_of(kind: Hashable) -> Mapping[str, Any]:
    """The types of a class's fields, with what is asked of them besides."""
    return get_type_hints(kind, include_extras=True)


def wanted(hint: Any) -> str:
    """What can stand where a field is declared as `hint`, in words."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        asked = [text for text in inner[1:] if text in _ASKED]
        return asked[0] if inner[0] is str and asked else ", ".join([wanted(inner[0]), *asked])
    if kind is Literal:
        return f"one of {', '.join(inner)}"
    if kind in (Union, UnionType):
        return " or ".join(wanted(one) for one in inner if not getattr(one, "_is_protocol", False))  # no file has one
    if kind in (tuple, list):
        count = "" if inner[-1] is ... or kind is list else f" of {len(inner)}"
        return f"a list{count}, each {wanted(inner[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(hint, "a group of settings")


def fits(hint: Any, value: Any) -> bool:
    """Whether a value can stand where a field is declared as `hint`."""
    return _test(hint)(value)


@cache
def _test(hint: Any) -> Callable[[Any], bool]:
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda _: True
    if kind is Annotated:
        asked = [_ASKED[text] for text in inner[1:] if text in _ASKED]
        return lambda value: fits(inner[0], value) and all(test(value) for test in asked)
    if kind is Literal:
        return lambda value: isinstance(value, str) and value in inner
    if kind in (Union, UnionType):
        first, *others = map(_test, inner)
        return lambda value: first(value) or any(test(value) for test in others)
    if kind is list or (kind is tuple and inner[-1] is ...):
        each = _test(inner[0])
        return lambda value: isinstance(value, kind) and all(map(each, value))
    if kind is tuple:
        return lambda value: isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, inner, value))
    if hint in (int, float):  # a bool is no number, and no NaN or infinity is in the range
        types = (int, float) if hint is float else (int,)
        return lambda value: type(value) in types and abs(value) < 2**63
    return lambda value: type(value) is hint


def as_settings_are(value: Any) -> Any:
    """Lists are tuples in settings, and not equal to them; numbers of NumPy and torch are plain ones, paths text."""
    if isinstance(value, list | tuple):
        return tuple(map(as_settings_are, value))
    if isinstance(value, PathLike):
        return fspath(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def shown(value: object) -> str:
    """Something from outside in a line that is not too long."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 60 else text[:60] + "..."
