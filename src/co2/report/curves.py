"""The curves of the page: what methods declare, and what is measured of every network."""

from __future__ import annotations

from collections.abc import Sequence

from co2.measures.metric import EFFECTIVE_RANK, HEALTH, KNN, Metric
from co2.report.charts import LONGEST_LABEL, SERIES, Chart, Curve, describe_smoothing, draw, series_variable
from co2.report.markup import Html
from co2.report.runs import RunRecord, measured
from co2.report.story import Untrained, ending, warning


def curves_html(runs: Sequence[RunRecord], untrained: Untrained | None) -> Html:
    """All curves, with a key to their colours."""
    labelled = any(run.latest(KNN.name) is not None for run in runs)
    metrics = (*measured(runs), KNN if labelled else EFFECTIVE_RANK)
    smoothing = describe_smoothing([len(run.train) for run in runs])
    note = Html.of('<p class="note">{}</p>\n', smoothing) if smoothing else ""
    figures = Html.joined((_figure_html(metric, runs, untrained) for metric in metrics), "\n")
    return Html.of('{}{}\n<div class="charts">\n{}\n</div>', note, _key_html(runs), figures)


def swatch_html(series: int) -> Html:
    """A small sample of a run's line."""
    style, colour = "solid" if series < SERIES else "dashed", series_variable(series)
    return Html.of('<i class="swatch" style="border-top: 3px {} var({})"></i>', style, colour)


def _figure_html(metric: Metric, runs: Sequence[RunRecord], untrained: Untrained | None) -> Html:
    ended = [run.ended(metric) for run in runs]
    values = ", ".join(
        f"{run.name} {'not measured' if value is None else metric.shown(value)}"
        for run, value in zip(runs, ended, strict=True)
    )
    level = untrained.knn_top1 if untrained is not None and metric is KNN else None
    beside = "" if level is None else f"; untrained {metric.shown(level)}"
    share, kind = metric.unit == "%", "epoch" if metric in HEALTH else "train"
    y_label = metric.called if share or not metric.unit else f"{metric.called} ({metric.unit})"
    chart = Chart(
        identity=metric.name,
        y_label=y_label,
        curves=tuple(Curve(run.name, i, *run.curve(kind, metric.name)) for i, run in enumerate(runs)),
        description=f"Line chart over epochs: {y_label}. At the end: {values}{beside}.",
        percent=share,
        from_zero=share or metric.from_zero,
        smooth=kind == "train",
        level=None if level is None else ("untrained", level),
    )
    figure = "<figure>\n<h3>{}</h3>\n{}\n<figcaption>{}{}{}</figcaption>\n</figure>"
    instead = " These pictures have no labels, so this stands in for accuracy." if metric is EFFECTIVE_RANK else ""
    return Html.of(figure, ending(runs, metric, ended), draw(chart), metric.explanation, instead, warning(runs, metric))


def _key_html(runs: Sequence[RunRecord]) -> Html:
    if len(runs) <= 4 and all(len(run.name) <= LONGEST_LABEL for run in runs):
        return Html()  # the lines carry their names in full
    entries = Html.joined(Html.of("<li>{} {}</li>", swatch_html(i), run.name) for i, run in enumerate(runs))
    return Html.of('<ul class="key">{}</ul>', entries)
