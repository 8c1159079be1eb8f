"""The tables of the page: the outcome of each network, and the settings of each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from co2.experiment import flatten
from co2.measures.numbers import duration
from co2.report.curves import swatch_html
from co2.report.markup import Html
from co2.report.runs import RunRecord
from co2.report.story import Untrained, differing_settings, percent


@dataclass(frozen=True)
class Outcome:
    """A row of the table: a network and where it ended. None where a number does not exist."""

    network: str
    knn_top1: float | None = None
    instance: float | None = None
    consistency: float | None = None
    top1: float | None = None
    effective_rank: float | None = None
    seconds: float | None = None
    series: int | None = None
    """The run's place on the page, which decides its colour."""


@dataclass(frozen=True)
class _Column:
    heading: str
    value: Callable[[Outcome], float | None]
    shown: Callable[[float], str]


_COLUMNS = (
    _Column("kNN accuracy", lambda outcome: outcome.knn_top1, percent),
    _Column("final instance loss", lambda outcome: outcome.instance, lambda value: f"{value:.3f}"),
    _Column("final consistency loss", lambda outcome: outcome.consistency, lambda value: f"{value:.3f}"),
    _Column("instance accuracy", lambda outcome: outcome.top1, percent),
    _Column("effective rank", lambda outcome: outcome.effective_rank, lambda value: f"{value:.1f}"),
    _Column("time", lambda outcome: outcome.seconds, duration),
)


def outcomes(runs: Sequence[RunRecord], untrained: Untrained | None) -> list[Outcome]:
    """The rows of the table: the untrained network, where it was measured, and every run."""
    rows = []
    if untrained is not None:
        rows.append(Outcome("untrained", untrained.knn_top1, effective_rank=untrained.effective_rank))
    for series, run in enumerate(runs):
        rows.append(
            Outcome(
                network=run.name,
                knn_top1=run.latest("knn_top1"),
                instance=run.final("instance"),
                consistency=run.final("consistency"),
                top1=run.final("top1"),
                effective_rank=run.latest("effective_rank"),
                seconds=run.seconds,
                series=series,
            )
        )
    return rows


def outcome_table(rows: Sequence[Outcome]) -> Html:
    """The table as HTML, without the columns that nobody has a number for."""
    columns = [column for column in _COLUMNS if any(column.value(row) is not None for row in rows)]
    body = []
    for row in rows:
        swatch = "" if row.series is None else Html.joined([swatch_html(row.series), " "])
        cells = Html.joined(_cell(column, row) for column in columns)
        body.append(Html.of('<tr><th scope="row">{}{}</th>{}</tr>', swatch, row.network, cells))
    return _table("outcome", "network", [column.heading for column in columns], body)


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


def _cell(column: _Column, row: Outcome) -> Html:
    value = column.value(row)
    if value is None:
        return Html.of('<td class="missing" data-label="{heading}">–</td>', heading=column.heading)
    return Html.of('<td data-label="{heading}">{value}</td>', heading=column.heading, value=column.shown(value))


def _setting(value: object) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(_setting(part) for part in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not set" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)
