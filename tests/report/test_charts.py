"""Curves: what is drawn, where the labels go, and that the drawing fits into a page."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2.report.charts import (
    MOST_POINTS,
    Chart,
    Curve,
    describe_smoothing,
    draw,
    len_thinned,
    running_mean,
    smoothing_window,
    spread,
    thin_out,
)


def chart(*names: str, points: int = 60, identity: str = "loss", **changes) -> Chart:
    x = np.linspace(0.1, 12, points)
    curves = tuple(Curve(name, i, x, 2 + i + np.sin(x)) for i, name in enumerate(names))
    return Chart(identity, "loss (nats)", curves, "what it shows", **changes)


def test_running_mean_against_a_plain_loop() -> None:
    values = np.random.default_rng(0).normal(size=23)
    expected = []
    for i in range(23):
        reach = min(3, i, 22 - i)
        expected.append(values[i - reach : i + reach + 1].mean())
    np.testing.assert_allclose(running_mean(values, 7), expected, rtol=1e-12)
    np.testing.assert_array_equal(running_mean(values, 1).round(12), values.round(12))


def test_thinning_keeps_the_mean_and_the_limit() -> None:
    values = np.arange(3 * MOST_POINTS, dtype=float)
    thinned = thin_out(values)
    assert len(thinned) == MOST_POINTS
    assert thinned[0] == 1.0
    assert thinned.mean() == pytest.approx(values.mean())
    np.testing.assert_array_equal(thin_out(values[:10]), values[:10])
    ragged = thin_out(np.ones(MOST_POINTS + 1))
    assert len(ragged) == len_thinned(MOST_POINTS + 1)
    np.testing.assert_array_equal(ragged, 1.0)


def test_smoothing_is_stated_as_it_is_done() -> None:
    assert describe_smoothing([5, 8]) == ""
    assert smoothing_window(69) == 5
    assert describe_smoothing([69, 69]).startswith("Strong lines are running means over 5 log lines")
    assert "over 3 to 5 log lines" in describe_smoothing([30, 69])
    assert "means over up to 2" in describe_smoothing([2 * MOST_POINTS])
    assert f"over {2 * smoothing_window(MOST_POINTS)} log lines" in describe_smoothing([2 * MOST_POINTS])


@given(st.lists(st.floats(0, 300), max_size=8).map(sorted))
def test_labels_are_pushed_apart(places: list[float]) -> None:
    moved = spread(places, 14)
    assert all(after - before >= 14 - 1e-6 for before, after in pairwise(moved))
    if all(after - before > 14 for before, after in pairwise(places)):
        assert moved == places  # nothing overlaps, nothing moves
    assert sum(moved) == pytest.approx(sum(places), abs=1e-6)  # and groups stay around where they were


def test_the_drawing_is_an_element_that_needs_nothing_else() -> None:
    svg = draw(chart("MoCo", "CO2", level=("untrained", 1.0)))
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "what it shows"
    assert "http" not in svg
    assert "<style" not in svg
    texts = {element.text for element in root.iter("text")}
    assert {"MoCo", "CO2", "untrained", "loss (nats)", "epochs trained"} <= texts


def test_colours_come_from_the_style_sheet() -> None:
    svg = draw(chart("MoCo", "CO2", level=("untrained", 1.0)))
    assert set(re.findall(r"var\((--[\w-]+)\)", svg)) == {"--ink", "--muted", "--line", "--series-1", "--series-2"}
    assert not re.search(r"#[0-9a-f]{6}", svg)


def test_identifiers_of_two_drawings_do_not_meet() -> None:
    first, second = draw(chart("MoCo", identity="first")), draw(chart("MoCo", identity="second"))
    identifiers = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (first, second)]
    assert not identifiers[0] & identifiers[1]
    for svg, known in zip((first, second), identifiers, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', svg)) <= known


@pytest.mark.parametrize("name", ["<b>", "$x_1$", 'id="a"', "#010203", "名前"])
def test_names_are_drawn_as_they_are(name: str) -> None:
    root = ElementTree.fromstring(draw(chart(name)))
    assert name in {element.text for element in root.iter("text")}


def test_long_names_are_shortened_and_stay_inside_the_drawing() -> None:
    root = ElementTree.fromstring(draw(chart("a-very-long-name-of-a-run")))
    label = next(element for element in root.iter("text") if element.text == "a-very-long-n…")
    assert float(label.attrib["x"]) < 440 - 14 * 7


def test_labels_stand_where_the_lines_end() -> None:
    # Drawn from the bottom (0) to the top: the end of the rising line is high, that of the falling one is low.
    x = [0.0, 1.0, 2.0]
    rising, falling = Curve("rising", 0, x, [0, 5, 10]), Curve("falling", 1, x, [10, 5, 0])
    root = ElementTree.fromstring(draw(Chart("ends", "y", (rising, falling), "d", smooth=False, from_zero=False)))
    height = {element.text: float(element.attrib["y"]) for element in root.iter("text")}
    assert height["rising"] < 60
    assert height["falling"] > 200


@pytest.mark.parametrize("points", [0, 1, 2])
def test_hardly_any_points(points: int) -> None:
    ElementTree.fromstring(draw(chart("MoCo", points=points)))


def test_the_same_chart_is_drawn_the_same() -> None:
    assert draw(chart("MoCo")) == draw(chart("MoCo"))
