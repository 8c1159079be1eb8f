"""The tables of the page: the outcome of each network, and the settings of each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from co2.experiment import flatten
from co2.measures.metric import EFFECTIVE_RANK, HEALTH, KNN, Metric
from co2.measures.numbers import duration
from co2.report.curves import swatch_html
from co2.report.markup import Html
from co2.report.runs import RunRecord, measured
from co2.report.story import Untrained, differing_settings


@dataclass(frozen=True)
class Outcome:
    """A row of the table: a network and where it ended. None where a number does not exist."""

    network: str
    values: Mapping[Metric, float | None]
    """All columns but the time, in order."""
    seconds: float | None = None
    series: int | None = None
    """The run's place on the page, which decides its colour."""


_Shown = tuple[Callable[[float], str], float | None]


def outcomes(runs: Sequence[RunRecord], untrained: Untrained | None) -> list[Outcome]:
    """The rows of the table: the untrained network, where it was measured, and every run."""
    columns = (KNN, *measured(runs), EFFECTIVE_RANK)
    rows = []
    if untrained is not None:
        known = {KNN: untrained.knn_top1, EFFECTIVE_RANK: untrained.effective_rank}
        rows.append(Outcome("untrained", {metric: known.get(metric) for metric in columns}))
    for series, run in enumerate(runs):
        rows.append(Outcome(run.name, {metric: run.ended(metric) for metric in columns}, run.seconds, series))
    return rows


def outcome_table(rows: Sequence[Outcome]) -> Html:
    """The table as HTML, without the columns that nobody has a number for."""
    columns = [metric for metric in rows[0].values if any(row.values[metric] is not None for row in rows)]
    headings = [metric.called if metric in HEALTH else f"final {metric.called}" for metric in columns]
    timed = any(row.seconds is not None for row in rows)
    headings += ["time"] if timed else []
    body = []
    for row in rows:
        swatch = "" if row.series is None else Html.joined([swatch_html(row.series), " "])
        values: list[_Shown] = [(metric.shown, row.values[metric]) for metric in columns]
        values += [(duration, row.seconds)] if timed else []
        cells = Html.joined(_cell(heading, value) for heading, value in zip(headings, values, strict=True))
        body.append(Html.of('<tr><th scope="row">{}{}</th>{}</tr>', swatch, row.network, cells))
    return _table("outcome", "network", headings, body)


def settings_table(runs: Sequence[RunRecord]) -> Html:
    """Every setting of every run; those that are not the same in all of them come first and are marked."""
    flat = [flatten(run.experiment) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    differing = set(differing_settings(runs))
    same = '<tr><th scope="row">{}</th>{}</tr>'
    differs = '<tr class="differs"><th scope="row">{} <b>differs</b></th>{}</tr>'
    body = []
    for name in sorted(names, key=lambda name: name not in differing):
        cells = Html.joined(Html.of("<td>{}</td>", _setting(settings.get(name, "–"))) for settings in flat)
        body.append(Html.of(differs if name in differing else same, name, cells))
    return _table("settings", "setting", [run.name for run in runs], body)


def _table(kind: str, first: str, headings: Sequence[str], body: Sequence[Html]) -> Html:
    head = Html.joined(Html.of('<th scope="col">{}</th>', heading) for heading in (first, *headings))
    table = '<div class="scroll"><table class="{}">\n<thead><tr>{}</tr></thead>\n<tbody>\n{}\n</tbody>\n</table></div>'
    return Html.of(table, kind, head, Html.joined(body, "\n"))


def _cell(heading: str, shown_value: _Shown) -> Html:
    shown, value = shown_value
    if value is None:
        return Html.of('<td class="missing" data-label="{heading}">–</td>', heading=heading)
    return Html.of('<td data-label="{heading}">{value}</td>', heading=heading, value=shown(value))


def _setting(value: object) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(_setting(part) for part in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not set" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)
