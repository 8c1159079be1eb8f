"""Records in; means, standard deviations and paired differences out, as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from co2.experiment import Experiment, flatten
from co2.measures.metric import Metric, told
from co2.measures.numbers import Spread, spread
from co2.report.markup import Markdown, csv_cells
from co2.schema import shown
from co2.study.curves import band, most_parts
from co2.study.grids import SYMBOLS, Variant
from co2.study.judges import BESIDES, LINEAR_PAPER, SEMI_SUPERVISED
from co2.study.published import ELSEWHERE, Published, published_for
from co2.study.records import CellRecord
from co2.study.settings import changed


@dataclass(frozen=True)
class Measure:
    """A number that records have, and how a table shows it."""

    name: str
    """As `CellRecord.number` takes it."""
    heading: str
    compared: bool = True
    """Whether differences to the baseline are shown."""
    factor: float = 1.0
    """100 turns the shares of the training log into percents."""
    decimals: int = 2


KNN = Measure("knn.top1", "kNN top-1 (%)")
KNN_EMBEDDING = Measure("epoch.knn_embedding_top1", "kNN top-1 of embeddings (%)", factor=100)
LINEAR = Measure("linear.top1", "linear top-1 (%)")
LINEAR_BY_SGD = Measure(f"{LINEAR_PAPER}.top1", "linear top-1, the paper's SGD (%)")
_MOST_SHARES = 10  # of the labels, each a column and a panel
TRANSFER = (
    Measure("svm.mAP_11point", "svm mAP, 11 points"),
    Measure("svm.mAP_area", "svm mAP, area"),
    Measure("detection.AP50", "detection AP50"),
    Measure("detection.AP", "detection AP"),
    Measure("detection.AP75", "detection AP75"),
    Measure("segmentation.mIoU", "segmentation mIoU"),
)
_TRAIN = "train."  # before the names of metrics of training, in those that `CellRecord.number` takes


@dataclass(frozen=True)
class Results:
    """What is there of a study: the records of each variant by seed."""

    study: str
    variants: tuple[Variant, ...]
    records: Mapping[str, Mapping[int, CellRecord]]
    """By variant and seed."""
    missing: Mapping[str, str]
    """Cells that are not there or not used, and why."""
    base: Experiment
    validate: float | None

    @property
    def found(self) -> list[CellRecord]:
        """All records."""
        return [record for by_seed in self.records.values() for record in by_seed.values()]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What is told of the training, as the methods of all that is there declare it."""
        trained = (self.base, *(record.experiment for record in self.found))
        return told(metric for experiment in trained for metric in experiment.method.metrics)

    @property
    def shown(self) -> list[Variant]:
        """The variants that stand in a table: those with a record, or all while there is none. The others are in the
        list of what is missing, and a grid of which a part is worked on has many."""
        return [variant for variant in self.variants if self.records[variant.name]] or list(self.variants)

    def values(self, variant: str, measure: Measure) -> dict[int, float]:
        """The numbers of a variant by seed, of the seeds that have it."""
        numbers = {seed: record.number(measure.name) for seed, record in self.records[variant].items()}
        return {seed: measure.factor * value for seed, value in sorted(numbers.items()) if value is not None}


def measures_of(results: Results) -> list[Measure]:
    """What the table of a study shows: what it always does, and what its cells have been judged by besides."""
    if results.study == "transfer":
        return list(TRANSFER)
    besides = [
        LINEAR_BY_SGD if judge == LINEAR_PAPER else _after_fine_tuning(number)
        for judge in BESIDES
        for number in _numbers_by(judge, results)
    ]
    if results.study == "curves":
        return [*(at_the_end(metric, compared=True) for metric in results.metrics), LINEAR, *besides]
    summarised = [at_the_end(metric) for metric in results.metrics if metric.summarised]
    return [KNN, KNN_EMBEDDING, LINEAR, *besides, *summarised]


def axis_of(metric: Metric) -> str:
    """What stands beside the axis of a metric of training."""
    return f"{metric.called} (%)" if metric.unit == "%" else metric.symbol


def at_the_end(metric: Metric, compared: bool = False) -> Measure:
    """Where a metric of training ended, as a number of records."""
    name, heading = f"{_TRAIN}{metric.name}", axis_of(metric)
    if metric.unit == "%":
        return Measure(name, heading, compared, factor=100)
    return Measure(name, f"{heading} at the end", compared, decimals=metric.digits)


def _numbers_by(judge: str, results: Results) -> list[str]:
    """Names of the top-1 accuracies that any cell has by a judge: {"top1"}, or one for each share of the labels."""
    numbers = (record.evaluations.get(judge, {}).get("numbers", {}) for record in results.found)
    return list(dict.fromkeys(name for found in numbers for name in found if name.startswith("top1")))[:_MOST_SHARES]


def _after_fine_tuning(number: str) -> Measure:
    share = number.removeprefix("top1_")  # "1%"
    return Measure(f"{SEMI_SUPERVISED}.{number}", f"top-1, fine-tuned on {share} of the labels (%)")


@dataclass(frozen=True)
class Comparison:
    """A variant against its baseline, seed by seed."""

    difference: Spread
    t: float | None
    p: float | None
    """Of the two-sided paired t-test; None where fewer than two seeds are shared or all differences are the same."""


def compare(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Comparison | None:
    """The differences over the seeds that both have; None if they share none."""
    seeds = sorted(set(ours) & set(theirs))
    difference = spread([ours[seed] - theirs[seed] for seed in seeds])
    if difference is None:
        return None
    size = max(abs(ours[seed]) for seed in seeds)
    if difference.deviation is None or difference.deviation <= 1e-9 * size:  # but for rounding, all the same
        return Comparison(difference, None, None)
    test = stats.ttest_rel([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    return Comparison(difference, float(test.statistic), float(test.pvalue))


def rows_of(results: Results) -> list[dict[str, Any]]:
    """A row for each number of each variant, with everything known about it: what the CSV file holds."""
    rows = []
    for variant in results.variants:
        for measure in measures_of(results):
            values = results.values(variant.name, measure)
            found = spread(list(values.values()))
            against = compare(values, results.values(variant.baseline, measure)) if variant.baseline else None
            rows.append(
                {
                    "study": results.study,
                    "variant": variant.name,
                    "label": variant.label,
                    "measure": measure.name,
                    "n": found.count if found else 0,
                    "mean": found.mean if found else None,
                    "deviation": found.deviation if found else None,
                    "baseline": variant.baseline,
                    "paired_n": against.difference.count if against else None,
                    "difference": against.difference.mean if against else None,
                    "difference_deviation": against.difference.deviation if against else None,
                    "t": against.t if against else None,
                    "p": against.p if against else None,
                    "seeds": " ".join(map(str, values)),
                    "values": " ".join(f"{value:.6g}" for value in values.values()),
                }
            )
    return rows


def csv_text(results: Results) -> str:
    """The table as CSV: a line for each number of each variant."""
    rows = rows_of(results)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(csv_cells, rows))
    return file.getvalue()


def markdown_text(results: Results) -> Markdown:
    """The table as Markdown: what was measured, what is published, what is missing."""
    parts = [_judged_on(results), _main_table(results)]
    if results.study == "curves":
        parts.append(_throughout(results))
    parts += [_about_the_levels(results), _about_the_test(results)]
    parts += [_published_table(results), _missing_list(results)]
    return Markdown.paragraphs(parts)


def _judged_on(results: Results) -> str:
    if results.study == "transfer":
        return "Backbones pre-trained here, judged on PASCAL VOC; one run of each protocol for each seed's backbone."
    if results.validate is None:
        if results.found and not results.found[0].content["data"]["test"]:
            return "The data have no held-out part: kNN leaves one image out at a time, linear a fifth of each class."
        return "Accuracies on the held-out images of the data (their test split)."
    return (
        f"Accuracies on {100 * results.validate:g}% of the training images, balanced over classes and put aside before "
        "pre-training; the test split was not touched. For choosing settings, not to stand beside published numbers."
    )


def _main_table(results: Results) -> Markdown:
    measures = measures_of(results)
    lines: dict[str, list[str]] = {
        variant.name: [variant.label, str(len(results.records[variant.name]))] for variant in results.shown
    }
    headings = ["variant", "seeds"]
    for measure in measures:
        headings.append(measure.heading)
        means = {}
        for variant in results.shown:
            found = spread(list(results.values(variant.name, measure).values()))
            lines[variant.name].append(found.text(measure.decimals) if found else "–")
            if found:
                means[variant.name] = found.mean
        best = max(means, key=means.__getitem__) if len(means) > 1 else None
        if best is not None and measure.compared and not measure.name.startswith(_TRAIN):
            lines[best][-1] = Markdown.of("**{number}**", number=lines[best][-1])
    for measure in measures:
        if not measure.compared:
            continue
        headings.append(f"Δ {measure.heading.replace(' (%)', '')}")
        for variant in results.shown:
            lines[variant.name].append(_difference(results, variant, measure))
    return Markdown.table(headings, list(lines.values()))


def _difference(results: Results, variant: Variant, measure: Measure) -> str:
    if not variant.baseline:
        return ""
    found = compare(results.values(variant.name, measure), results.values(variant.baseline, measure))
    if found is None:
        return "–"
    text = f"{found.difference.mean:+.{measure.decimals}f}"
    if found.difference.deviation is not None:
        text += f" ± {found.difference.deviation:.{measure.decimals}f}"
    return f"{text} (n={found.difference.count}{_p_text(found.p)})"


def _p_text(p: float | None) -> str:
    if p is None or not math.isfinite(p):
        return ""
    return ", p<0.001" if p < 0.001 else f", p={p:.3f}"


def _about_the_test(results: Results) -> str:
    baselines = {variant.baseline for variant in results.shown if variant.baseline}
    against = " and ".join(variant.label for variant in results.variants if variant.name in baselines)
    several = " (for each variant its own)" if len(baselines) > 1 else ""
    counts = {len(records) for records in results.records.values()}
    few = (
        f" With {max(counts)} seeds the test has little power and the standard deviations are rough: a large p is no "
        "evidence of no difference."
        if counts and 1 < max(counts) <= 5
        else ""
    )
    return (
        f"Mean ± standard deviation of the sample over seeds. Δ: difference to {against}{several}, seed by seed: its "
        "mean ± its standard deviation, over n seeds that both have, with the p of a two-sided paired t-test, not "
        f"corrected for the number of comparisons.{few}"
    )


def _about_the_levels(results: Results) -> str:
    """A divergence between sharper distributions is a larger number: rows at several tau_con are not on one scale."""
    measured = [variant for variant in results.variants if results.records[variant.name]]
    settings = {variant.name: flatten(changed(results.base, variant.changes)) for variant in measured}
    baselines = [variant for variant in measured if variant.name in {other.baseline for other in measured}]
    sentences = []
    for metric in results.metrics:
        for name in metric.depends_on if at_the_end(metric) in measures_of(results) else ():
            if len({one.get(name) for one in settings.values()}) < 2:
                continue
            theirs = " and ".join(f"{shown(settings[one.name].get(name))} for {one.label}" for one in baselines)
            sentences.append(
                f"{metric.symbol} is measured at each row's own {SYMBOLS.get(name, name)}"
                f"{f' ({theirs})' if theirs else ''}. It can be compared between rows that have the same, and not with "
                "others."
            )
    return " ".join(sentences)


def _throughout(results: Results) -> str:
    """How much of the training a term of the loss stays below the baseline's."""
    lines = []
    for term in (metric for metric in results.metrics if metric.weight):
        for variant in results.variants:
            if not variant.baseline:
                continue
            both = [list(results.records[name].values()) for name in (variant.name, variant.baseline)]
            parts = most_parts([*both[0], *both[1]], term.name)
            ours, theirs = (band(records, term.name, parts) for records in both)
            if ours is None or theirs is None:
                continue
            below = int((ours.mean < theirs.mean).sum())
            lines.append(
                f"Over the course of training, the mean {term.symbol} of {variant.label} is below the baseline's in "
                f"{below} of {len(ours.mean)} equal parts."
            )
    return " ".join(lines)


def _published_table(results: Results) -> str:
    measures = {measure.name: measure for measure in measures_of(results)}
    methods = {variant.published for variant in results.variants}
    classes = results.found[0].content["data"].get("classes") if results.found else None
    found = [
        one
        for one in published_for(results.base.data, frozenset(measures), classes)
        if one.method in methods or (one.method in ELSEWHERE and results.study in ("claim", "transfer"))
    ]
    if not found or results.validate is not None:
        return ""
    lines = [
        [
            one.name,
            measures[one.measure].heading,
            str(one.value),
            _here(results, one, measures[one.measure]),
            one.setting,
            one.source,
        ]
        for one in found
    ]
    if any(one.epochs is not None for one in found):
        introduction = (
            f"Published, and the same method here where it was trained as long ({results.base.epochs} epochs):"
        )
    else:  # nobody has published what is measured here
        introduction = (
            "Published of other images and networks, as the setting says, and the same method here. Differences "
            "between methods may be compared, values not:"
        )
    table = Markdown.table(["published", "measure", "value", "here", "setting", "source"], lines)
    return Markdown.paragraphs([introduction, table])


def _here(results: Results, published: Published, measure: Measure) -> str:
    if published.epochs not in (None, results.base.epochs):
        return ""
    for variant in results.variants:
        if variant.published == published.method:
            found = spread(list(results.values(variant.name, measure).values()))
            if found is None:
                return "–"
            # What a term weighs here may differ from where it was published, so such a row says which one it is.
            return found.text(measure.decimals) + (f" by {variant.label}" if variant.baseline else "")
    return ""


def _missing_list(results: Results) -> str:
    if not results.missing:
        return ""
    by_reason: dict[str, list[str]] = {}
    for name, why in results.missing.items():
        by_reason.setdefault(why, []).append(name)
    lines = [Markdown.of("- {names}: {why}", names=", ".join(names), why=why) for why, names in by_reason.items()]
    return Markdown.of("Cells still missing ({n}):\n\n{l}", n=len(results.missing), l=Markdown.joined(lines, "\n"))
