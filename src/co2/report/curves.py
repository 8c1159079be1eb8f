"""The curves of the page: which measures are drawn, what they mean in plain words, and what they say here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from co2.report.charts import LONGEST_LABEL, SERIES, Chart, Curve, describe_smoothing, draw, series_variable
from co2.report.markup import Html
from co2.report.runs import RunRecord
from co2.report.story import Untrained, ending, warning


@dataclass(frozen=True)
class Measure:
    """Something that a run writes down again and again."""

    name: str
    """Its key in metrics.jsonl."""
    kind: str
    """The kind of rows that it is found in: train or epoch."""
    title: str
    """As it begins a sentence."""
    y_label: str
    explanation: str
    """What it is."""
    shown: str
    """How a value is written."""
    percent: bool = False
    from_zero: bool = True

    def ended(self, run: RunRecord) -> float | None:
        """Where a run stands."""
        return run.final(self.name) if self.kind == "train" else run.latest(self.name)


INSTANCE = Measure(
    name="instance",
    kind="train",
    title=Html("The instance loss L<sub>ins</sub>"),
    y_label="instance loss L_ins (nats)",
    explanation="How hard it is for a view of a picture to find another view of the same picture among the negatives. "
    "It can rise at first, while the queue fills with real features.",
    shown=".3f",
    from_zero=False,
)
CONSISTENCY = Measure(
    name="consistency",
    kind="train",
    title=Html("The consistency loss L<sub>con</sub>"),
    y_label="consistency loss L_con (nats)",
    explanation=Html(
        "How much two views of a picture disagree about which other pictures are similar to it. A run without CO2 only "
        "measures it. In the paper, L<sub>con</sub> of MoCo jumps at the beginning and stays higher, while CO2 keeps "
        "it low throughout."
    ),
    shown=".3f",
)
INSTANCE_ACCURACY = Measure(
    name="top1",
    kind="train",
    title="Instance accuracy",
    y_label="queries that find their own picture",
    explanation="How often the other view of the same picture is closer than all negatives. It measures the training "
    "task itself, and higher is not always better: in the paper CO2 lowers it while the features improve.",
    shown=".1%",
    percent=True,
)
KNN_ACCURACY = Measure(
    name="knn_top1",
    kind="epoch",
    title="kNN accuracy",
    y_label="pictures classified correctly",
    explanation="How often the nearest neighbours of a picture vote for its class, which the training never saw. "
    "This is what tells whether the features are useful.",
    shown=".1%",
    percent=True,
)
EFFECTIVE_RANK = Measure(
    name="effective_rank",
    kind="epoch",
    title="Effective rank",
    y_label="effective rank of the embeddings (directions)",
    explanation="How many directions the embeddings, what comes out of the head, spread over. Towards 1, they have "
    "collapsed: all pictures look the same to the network. These pictures have no labels, so this stands in for "
    "accuracy.",
    shown=".1f",
)


def curves_html(runs: Sequence[RunRecord], untrained: Untrained | None) -> Html:
    """All curves, with a key to their colours."""
    labelled = any(run.latest("knn_top1") is not None for run in runs)
    measures = [INSTANCE, CONSISTENCY, INSTANCE_ACCURACY, KNN_ACCURACY if labelled else EFFECTIVE_RANK]
    smoothing = describe_smoothing([len(run.train) for run in runs])
    note = Html.of('<p class="note">{}</p>\n', smoothing) if smoothing else ""
    figures = Html.joined((_figure_html(measure, runs, untrained) for measure in measures), "\n")
    return Html.of('{}{}\n<div class="charts">\n{}\n</div>', note, _key_html(runs), figures)


def swatch_html(series: int) -> Html:
    """A small sample of a run's line."""
    style, colour = "solid" if series < SERIES else "dashed", series_variable(series)
    return Html.of('<i class="swatch" style="border-top: 3px {} var({})"></i>', style, colour)


def _figure_html(measure: Measure, runs: Sequence[RunRecord], untrained: Untrained | None) -> Html:
    ended = [measure.ended(run) for run in runs]
    title = ending(runs, measure.name, "{measure}", ended, measure.shown)
    values = ", ".join(
        f"{run.name} {'not measured' if value is None else format(value, measure.shown)}"
        for run, value in zip(runs, ended, strict=True)
    )
    level = untrained.knn_top1 if untrained is not None and measure is KNN_ACCURACY else None
    beside = "" if level is None else f"; untrained {level:.1%}"
    chart = Chart(
        identity=measure.name,
        y_label=measure.y_label,
        curves=tuple(Curve(run.name, i, *run.curve(measure.kind, measure.name)) for i, run in enumerate(runs)),
        description=f"Line chart over epochs: {measure.y_label}. At the end: {values}{beside}.",
        percent=measure.percent,
        from_zero=measure.from_zero,
        smooth=measure.kind == "train",
        level=None if level is None else ("untrained", level),
    )
    figure = "<figure>\n<h3>{}</h3>\n{}\n<figcaption>{}{}</figcaption>\n</figure>"
    heading = Html.of(title, measure=measure.title)
    return Html.of(figure, heading, draw(chart), measure.explanation, warning(runs, measure.name))


def _key_html(runs: Sequence[RunRecord]) -> Html:
    if len(runs) <= 4 and all(len(run.name) <= LONGEST_LABEL for run in runs):
        return Html()  # the lines carry their names in full
    entries = Html.joined(Html.of("<li>{} {}</li>", swatch_html(i), run.name) for i, run in enumerate(runs))
    return Html.of('<ul class="key">{}</ul>', entries)
