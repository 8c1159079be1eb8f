"""Curves of several runs as inline SVG, in colours that the page's style sheet sets for light and dark.

matplotlib draws with placeholder colours, which are then replaced by the style sheet's variables. Text stays text.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from co2.report.markup import Html

SERIES = 6  # colours that the style sheet knows; further runs take them again, dashed
MOST_POINTS = 400  # in a curve: more cannot be told apart at this size
LONGEST_LABEL = 14
_WIDTH, _HEIGHT = 440, 270  # units of the drawing: pixels, where it is shown at its natural size
_FONT_SIZE = 12
_LETTER = 8.0  # width of a bold letter in a wide font
_LABEL_DISTANCE = 14.0
_INK, _MUTED, _GRID = "#010203", "#010204", "#010205"


@dataclass(frozen=True)
class Curve:
    """One run's values over epochs."""

    name: str
    series: int
    """The run's place on the page, which decides its colour."""
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """What to draw."""

    identity: str
    """Distinguishes the drawing from the others on the page."""
    y_label: str
    """What is measured, and its unit."""
    curves: tuple[Curve, ...]
    description: str
    """What the chart shows, in words with the final values, for those who cannot see it."""
    percent: bool = False
    from_zero: bool = True
    smooth: bool = True
    """Draw a running mean over the values, which are shown faintly behind it."""
    level: tuple[str, float] | None = None
    """A name and a value for a dashed line across the chart."""


def smoothing_window(points: int) -> int:
    """Over how many neighbouring values a curve of so many points is averaged: an odd number, about a fifteenth."""
    return max(1, points // 15) // 2 * 2 + 1


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred means over `window` values, fewer towards both ends: no lag, and the first and last value stay."""
    reach = np.minimum(window // 2, np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    middle = np.arange(len(values))
    return (sums[middle + reach + 1] - sums[middle - reach]) / (2 * reach + 1)


def thin_out(values: np.ndarray) -> np.ndarray:
    """At most `MOST_POINTS` values: means over groups of equal length, the last perhaps shorter."""
    group = -(-len(values) // MOST_POINTS)
    if group <= 1:
        return values
    starts = np.arange(0, len(values), group)
    return np.add.reduceat(values, starts) / np.diff([*starts, len(values)])


def describe_smoothing(lengths: Sequence[int]) -> str:
    """What is done to curves of so many values before they are drawn; nothing if they are drawn as they are."""
    groups = sorted({-(-length // MOST_POINTS) for length in lengths if length})
    windows = sorted({-(-length // MOST_POINTS) * smoothing_window(len_thinned(length)) for length in lengths})
    if not windows or windows[-1] == 1:
        return ""
    over = f"{windows[0]}" if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
    faint = "the values themselves" if groups[-1] == 1 else f"means over up to {groups[-1]}"
    return f"Strong lines are running means over {over} log lines, faint lines {faint}."


def len_thinned(length: int) -> int:
    """How many values `thin_out` leaves of so many."""
    group = -(-length // MOST_POINTS)
    return -(-length // group) if group else 0


def draw(chart: Chart) -> Html:
    """The chart as an <svg> element to place in a page."""
    figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.identity,
        "font.size": _FONT_SIZE,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's browser has the fonts
        names = [curve.name for curve in chart.curves] + ([chart.level[0]] if chart.level else [])
        longest = max((min(len(name), LONGEST_LABEL) for name in names), default=0)
        right = 1 - (_LETTER * longest + 10) / _WIDTH
        axes = figure.add_axes((0.105, 0.165, right - 0.105, 0.705))
        ends = [end for curve in chart.curves if (end := _draw_curve(axes, curve, chart)) is not None]
        if chart.level is not None:
            name, value = chart.level
            axes.axhline(value, color=_MUTED, linewidth=1.3, linestyle=(0, (5, 4)))
            ends.append((value, name, _MUTED))
        _furnish(axes, chart)
        axes.autoscale_view()  # the labels need to know where the lines end up
        _label_ends(axes, ends)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(file.getvalue(), chart)


def series_variable(series: int) -> str:
    """The style sheet's name for a run's colour."""
    return f"--series-{series % SERIES + 1}"


def _draw_curve(axes: matplotlib.axes.Axes, curve: Curve, chart: Chart) -> tuple[float, str, str] | None:
    if len(curve.y) == 0:
        return None
    x, y = (thin_out(np.asarray(values, dtype=float)) for values in (curve.x, curve.y))
    colour = _series_placeholder(curve.series)
    style = "solid" if curve.series < SERIES else (0, (4, 2))
    window = smoothing_window(len(y)) if chart.smooth else 1
    if window > 1:
        axes.plot(x, y, color=colour, linewidth=1.0, alpha=0.3)
    shown = running_mean(y, window)
    marker = "o" if len(y) == 1 or (len(y) <= 40 and not chart.smooth) else None
    axes.plot(x, shown, color=colour, linewidth=2.2, linestyle=style, marker=marker, markersize=3.6)
    return float(shown[-1]), curve.name, colour


def _furnish(axes: matplotlib.axes.Axes, chart: Chart) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=_INK, pad=5)
    axes.margins(y=0.06)
    last = max((x for curve in chart.curves for x in curve.x), default=0.0) or 1.0  # 0: only the untrained network yet
    axes.set_xlim(-0.02 * last, 1.02 * last)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if chart.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.set_xlabel("epochs trained", color=_INK, labelpad=5)
    axes.text(0.0, 0.95, chart.y_label, transform=axes.figure.transFigure, color=_INK, va="center", ha="left")


def _label_ends(axes: matplotlib.axes.Axes, ends: list[tuple[float, str, str]]) -> None:
    """The names of the lines at their right ends, pushed apart where they would overlap."""
    to_pixels = axes.transData.transform
    ends = sorted(ends, key=lambda end: end[0])
    places = [float(to_pixels((0, value))[1]) for value, _, _ in ends]
    scale = axes.figure.dpi / 72
    places = spread([place / scale for place in places], _LABEL_DISTANCE)
    for place, (_, name, colour) in zip(places, ends, strict=True):
        text = name if len(name) <= LONGEST_LABEL else name[: LONGEST_LABEL - 1] + "…"
        x = axes.get_position().x1 + 0.012
        axes.figure.text(x, place / _HEIGHT, text, color=colour, va="center_baseline", ha="left", weight="bold")


def spread(places: Sequence[float], distance: float) -> list[float]:
    """Rising places moved as little as possible so that neighbours are at least `distance` apart."""
    # Clusters of labels that touch are centred where their members wanted to be, and merge when they meet.
    clusters: list[tuple[list[float], float]] = []  # wanted places, and where the lowest member goes
    for place in places:
        members, start = [place], place
        while clusters and clusters[-1][1] + distance * len(clusters[-1][0]) > start:
            members = clusters.pop()[0] + members
            start = sum(wanted - distance * i for i, wanted in enumerate(members)) / len(members)
        clusters.append((members, start))
    return [start + distance * i for members, start in clusters for i in range(len(members))]


def _series_placeholder(series: int) -> str:
    return f"#0102{series % SERIES + 16:02x}"


def _for_page(svg: str, chart: Chart) -> Html:
    body = svg[svg.index("<svg") :]
    body = body[body.index(">") + 1 :]
    for unneeded in (r"<metadata>.*?</metadata>", r"<style[^>]*>.*?</style>", r"<!--.*?-->", r"<defs>\s*</defs>"):
        body = re.sub(unneeded, "", body, flags=re.DOTALL)
    body = re.sub(r"<[^>]*>", lambda tag: _tag_for_page(tag.group(), chart.identity), body)  # text stays as it is
    body = re.sub(r"\n\s*", "\n", body)
    begins = '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}'
    return Html.of(begins, _WIDTH, _HEIGHT, chart.description, Html(body))  # matplotlib has escaped the names in it


def _tag_for_page(tag: str, identity: str) -> str:
    colours = {_INK: "--ink", _MUTED: "--muted", _GRID: "--line"}
    colours |= {_series_placeholder(series): series_variable(series) for series in range(SERIES)}
    for placeholder, variable in colours.items():
        tag = tag.replace(placeholder, f"var({variable})")
    # Several drawings share a page: their identifiers must not meet.
    tag = re.sub(r'\bid="', f'id="{identity}-', tag)
    tag = re.sub(r'\b(?:xlink:)?href="#', f'href="#{identity}-', tag)
    tag = tag.replace("url(#", f"url(#{identity}-")
    return re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", tag)
