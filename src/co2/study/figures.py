"""The figures of the studies, like the paper's: SVG and PNG, drawn by matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from co2.files import appearing_when_whole
from co2.measures.numbers import spread
from co2.study.curves import band
from co2.study.grids import Variant, method_settings
from co2.study.settings import changed
from co2.study.tables import KNN, KNN_EMBEDDING, LINEAR, Measure, Results, axis_of, measures_of

# The colours of the report's light page, in its order.
COLOURS = ("#b8560b", "#1f5fc4", "#0b7a5e", "#a0327d", "#7a6100", "#5b4bb3")
MARKERS = "osD^"  # another one when the colours begin again
INK, MUTED, GRID = "#1d2430", "#5d6775", "#dde1e7"
_LENGTHS_BELOW = 3  # from the best to the median, below it


def draw(results: Results, folder: Path) -> list[Path]:
    """The figure of a study as STUDY.svg and STUDY.png; none, and no earlier one, if there is nothing to see."""
    paths = [folder / f"{results.study}.{ending}" for ending in ("svg", "png")]
    panels = {"alpha": _over_setting, "tau": _over_setting, "alpha-tau": _over_setting, "curves": _curves}.get(
        results.study, _dots
    )
    style: dict[Any, Any] = {
        "font.size": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": results.study,  # the same records give the same file
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        figure = panels(results)
        if figure is None:
            for path in paths:
                path.unlink(missing_ok=True)
            return []
        for path in paths:
            kind = path.suffix.removeprefix(".")
            metadata = {"Date": None} if kind == "svg" else None
            with appearing_when_whole(path) as file:
                figure.savefig(file, format=kind, dpi=150, bbox_inches="tight", facecolor="white", metadata=metadata)
    return paths


def _furnish(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _same_span(panels: Sequence[Axes], direction: Literal["x", "y"]) -> None:
    """A point is as long in every panel: else those with the least to show would look like those with the most."""
    limits: list[tuple[float, float]] = [getattr(axes, f"get_{direction}lim")() for axes in panels]
    span = max(high - low for low, high in limits)
    for axes, (low, high) in zip(panels, limits, strict=True):
        middle = (low + high) / 2
        axes.set(**{f"{direction}lim": (middle - span / 2, middle + span / 2)})


# Accuracy over alpha or tau (the paper's figure on hyper-parameters), or over alpha with a line for each tau.


def _over_setting(results: Results) -> Figure | None:
    placed = [variant for variant in results.variants if variant.place]
    measures = [m for m in (LINEAR, KNN, KNN_EMBEDDING) if any(results.values(v.name, m) for v in placed)]
    if not measures:
        return None
    figure = Figure(figsize=(1.8 + 3.6 * len(measures), 3.4), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(measures), squeeze=False).ravel())
    lines = _lines(results, [v for v in placed if any(results.values(v.name, m) for m in measures)])
    for axes, measure in zip(panels, measures, strict=True):
        _furnish(axes)
        floor = _floor(results, measure)
        for number, (label, variants) in enumerate(lines.items()):
            turn, place = divmod(number, len(COLOURS) - 1)  # the first colour is the baseline's
            style = COLOURS[1 + place], MARKERS[turn % len(MARKERS)]
            _one_line(axes, results, measure, variants, style, label, floor)
        _baseline_line(axes, results, measure, placed[0].baseline)
        _scale(axes, results, placed)
        axes.set_ylabel(measure.heading)
    _same_span(panels, "y")
    panels[-1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _lines(results: Results, placed: Sequence[Variant]) -> dict[str, list[Variant]]:
    """What belongs on one line, by what the line is called."""
    if results.study != "alpha-tau":
        return {f"{type(results.base.method).__name__} + CO2": list(placed)}
    found: dict[str, list[Variant]] = {}
    for variant in placed:
        tau = method_settings(changed(results.base, variant.changes))["tau_consistency"]
        found.setdefault(f"τ_con = {tau:g}", []).append(variant)
    return found


def _floor(results: Results, measure: Measure) -> float:
    """Below this the axis ends: a setting that learns nothing would press all others together at the top."""
    means = [found.mean for v in results.variants if (found := spread(list(results.values(v.name, measure).values())))]
    usual, best = statistics.median(means), max(means)
    return usual - _LENGTHS_BELOW * max(best - usual, 1.0)


def _one_line(
    axes: Axes,
    results: Results,
    measure: Measure,
    variants: Sequence[Variant],
    style: tuple[str, str],
    label: str,
    floor: float,
) -> None:
    colour, marker = style
    places, means, deviations = [], [], []
    for variant in variants:
        values = list(results.values(variant.name, measure).values())
        found = spread(values)
        if found is None:
            continue
        assert variant.place is not None
        places.append(variant.place)
        means.append(max(found.mean, floor))
        if found.mean < floor:
            deviations.append(0.0)
            axes.plot([variant.place], [floor], "v", color=colour, markersize=8)
            axes.annotate(
                f"{found.mean:.1f}",
                (variant.place, floor),
                xytext=(5, 3),
                textcoords="offset points",
                color=colour,
                fontsize=9,
            )
            continue
        deviations.append(found.deviation or 0.0)
        axes.plot([variant.place] * len(values), values, marker, color=colour, alpha=0.35, markersize=3.5, linewidth=0)
    axes.errorbar(
        places, means, deviations, color=colour, linewidth=2, marker=marker, markersize=5, capsize=3, label=label
    )


def _scale(axes: Axes, results: Results, placed: Sequence[Variant]) -> None:
    axes.set_xscale("log")
    marks = sorted({variant.place for variant in placed if variant.place is not None})
    axes.xaxis.set_major_locator(FixedLocator(marks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    method = method_settings(results.base)
    axes.set_xlabel(
        {
            "alpha": f"α (log scale), at τ_con = {method['tau_consistency']:g}",
            "tau": f"τ_con (log scale), at α = {method['alpha']:g}",
            "alpha-tau": "α (log scale)",
        }[results.study]
    )


def _baseline_line(axes: Axes, results: Results, measure: Measure, baseline: str) -> None:
    found = spread(list(results.values(baseline, measure).values()))
    if found is None:
        return
    label = next(variant.label for variant in results.variants if variant.name == baseline)
    axes.axhline(found.mean, color=COLOURS[0], linewidth=1.6, linestyle=(0, (5, 3)), label=label)
    if found.deviation:
        low, high = found.mean - found.deviation, found.mean + found.deviation
        axes.axhspan(low, high, color=COLOURS[0], alpha=0.12, linewidth=0)


# Curves over training (the paper's figure on training curves).


def _curves(results: Results) -> Figure | None:
    panels = results.metrics
    shown = [
        variant
        for variant in results.variants
        if any(record.curve(one.name)[0] for record in results.records[variant.name].values() for one in panels)
    ]
    if not shown:
        return None
    figure = Figure(figsize=(11.0 * len(panels) / 3, 3.4), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(panels), squeeze=False).ravel(), panels, strict=True):
        _furnish(axes)
        factor = 100.0 if metric.unit == "%" else 1.0
        for variant in shown:
            found = band(list(results.records[variant.name].values()), metric.name)
            if found is None:
                continue
            colour = COLOURS[list(results.variants).index(variant) % len(COLOURS)]
            mean, deviation = factor * found.mean, factor * found.deviation
            axes.fill_between(found.epochs, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
            count = len(results.records[variant.name])
            label = f"{variant.label}, {count} seed{'s' if count > 1 else ''}"
            axes.plot(found.epochs, mean, color=colour, linewidth=2, label=label)
        axes.set_xlabel("epoch")
        axes.set_ylabel(axis_of(metric))
        axes.set_xlim(left=0)
        if metric.from_zero:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    # Above the panels: the name of a variant may be longer than a panel is wide.
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside upper center", ncols=2)
    return figure


# Everything else: a dot for each seed, and the mean, in a row for each variant.


_COLUMNS = 3


def _dots(results: Results) -> Figure | None:
    measures = [measure for measure in measures_of(results) if measure.compared]
    measures = [one for one in measures if any(results.values(v.name, one) for v in results.variants)]
    if not measures:
        return None
    # What has no record yet is in the table; an empty row would only press the others together.
    shown = [v for v in results.variants if any(results.values(v.name, one) for one in measures)]
    columns = min(_COLUMNS, len(measures))
    rows = -(-len(measures) // columns)
    height = 0.7 + 0.36 * len(shown)
    figure = Figure(figsize=(3.4 + 2.9 * columns, rows * height), layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, columns, sharey=True, squeeze=False).ravel())
    for unused in panels[len(measures) :]:
        unused.set_visible(False)
    labels = [variant.label for variant in shown]
    for axes, measure in zip(panels, measures, strict=False):
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        for place, variant in enumerate(shown):
            values = list(results.values(variant.name, measure).values())
            found = spread(values)
            if found is None:
                continue
            colour = _colour(results, variant)
            axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.4, markersize=4)
            axes.errorbar(
                found.mean, place, xerr=found.deviation or 0.0, color=colour, marker="D", markersize=6, capsize=3
            )
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(measure.heading)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    _same_span(panels[: len(measures)], "x")
    return figure


def _colour(results: Results, variant: Variant) -> str:
    """One for baselines, one for what is put beside them; label smoothing, the paper's other remedy, has its own."""
    if not variant.baseline:
        return COLOURS[0]
    return COLOURS[2] if method_settings(changed(results.base, variant.changes)).get("label_smoothing") else COLOURS[1]
