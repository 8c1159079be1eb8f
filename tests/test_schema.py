"""What files of others may say, by schemas: what fits is read, and all that does not is told with its place."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2 import recipes
from co2.errors import UserError
from co2.experiment import Experiment
from co2.schema import Amount, Count, Line, PlainName, is_plain_name, read_as
from co2.study.records import EVALUATION, NUMBERS


@dataclass(frozen=True)
class Part:
    name: PlainName
    share: Annotated[float, "from 0 to 1"] | None = None

    def __post_init__(self) -> None:
        if self.name == "never":
            raise UserError("This is never so.")


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    more: Mapping[str, Part]


def test_what_fits_is_built():
    found = read_as(Whole, {"parts": [{"name": "a", "share": 1}], "more": {"x": {"name": "b"}}}, "It")
    assert found == Whole((Part("a", 1),), {"x": Part("b")})


def test_all_faults_are_told_with_their_places():
    with pytest.raises(UserError) as told:
        read_as(Whole, {"parts": [{"name": "../x"}, {"share": 2}, {"name": "never"}], "evil": 1}, "It")
    assert str(told.value) == (
        "This version does not know the settings evil. more is missing. "
        "parts.0.name cannot be ../x: it has to be a plain name. parts.1.name is missing. "
        "parts.1.share cannot be 2: it has to be a number, from 0 to 1 or null. And 1 more."
    )
    with pytest.raises(UserError, match=r"^parts\.0: This is never so\.$"):
        read_as(Whole, {"parts": [{"name": "never"}], "more": {}}, "It")
    with pytest.raises(UserError, match=r"^It is not a group of settings"):
        read_as(Whole, [], "It")


@pytest.mark.parametrize("name", ["moco", "moco-co2-a1e+06-t0.1", "x_y", "Größe", "0"])
def test_plain_names(name):
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".git", "a/b", "/a", "-a", "=a", "@a", "+a", "a b", "a\n", "a\0", "x" * 121]
)
def test_names_that_are_no_plain_ones(name):
    assert not is_plain_name(name)


STRATEGIES = {
    Count: st.integers(0, 2**62),
    Amount: st.floats(0, 1e18) | st.integers(0, 2**62),
    Line: st.text(st.characters(categories=["L", "N", "P", "Zs"], include_characters=" "), max_size=200).filter(
        str.isprintable
    ),
    str: st.text(max_size=9),
    Any: st.none() | st.integers() | st.text(max_size=5) | st.lists(st.booleans()),
}


def valid(schema):
    """Values that fit, from the schema itself."""
    if not isinstance(schema, dict):
        return STRATEGIES[schema] if schema in STRATEGIES else st.floats(0, 100) | st.none()
    named = {n: valid(part) for n, part in schema.items() if isinstance(n, str)}
    others = [
        st.dictionaries(STRATEGIES[n], valid(part), max_size=3) for n, part in schema.items() if not isinstance(n, str)
    ]
    fixed = st.fixed_dictionaries(
        {n: one for n, one in named.items() if not n.endswith("?")},
        optional={n.removesuffix("?"): one for n, one in named.items() if n.endswith("?")},
    )
    return st.tuples(fixed, *others).map(
        lambda parts: {name: one for part in reversed(parts) for name, one in part.items()}
    )


@pytest.mark.parametrize("schema", [NUMBERS, EVALUATION])
def test_whatever_a_schema_describes_is_read(schema):
    @given(valid(schema))
    def read(value):
        assert read_as(schema, value, "It") == value

    read()


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_every_experiment_is_read_as_it_was(recipe):
    experiment = recipes.get(recipe)
    assert read_as(Experiment, json.loads(experiment.to_json()), "It") == experiment
