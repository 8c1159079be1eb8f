"""What the numbers of some runs say, in sentences that claim no more than the numbers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from co2.experiment import flatten
from co2.measures.metric import EFFECTIVE_RANK, KNN, Metric
from co2.report.runs import RunRecord, measured

# Settings that say where a run was made and what it is called, not what it is.
NAMES_AND_PLACES = ("recipe", "out", "resume", "device", "workers")


@dataclass(frozen=True)
class Untrained:
    """The network before its first step."""

    knn_top1: float | None = None
    effective_rank: float | None = None


@dataclass(frozen=True)
class Pair:
    """A run without a term of the objective, the consistency term say, and one with it."""

    term: Metric
    without: RunRecord
    with_term: RunRecord


def untrained_of(runs: Sequence[RunRecord]) -> Untrained | None:
    """The untrained network, as far as runs measured it and agree about it."""
    agreed: dict[str, float | None] = {}
    for measure in (KNN.name, EFFECTIVE_RANK.name):
        found = {value for run in runs if (value := run.untrained(measure)) is not None}
        agreed[measure] = found.pop() if len(found) == 1 else None
    untrained = Untrained(**agreed)
    return untrained if untrained != Untrained() else None


def pair_of(runs: Sequence[RunRecord]) -> Pair | None:
    """The two runs as a comparison of without and with a term, if that is what they are."""
    for term in measured(runs) if len(runs) == 2 else ():
        weights = [float(flatten(run.experiment).get(term.weight, 0)) if term.weight else 0.0 for run in runs]
        if min(weights) == 0 < max(weights):
            return Pair(term, runs[weights.index(0)], runs[1 - weights.index(0)])
    return None


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """The names of settings that are not the same in all runs, names and places aside."""
    flat = [flatten(run.experiment) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings if name not in NAMES_AND_PLACES)
    return [name for name in names if any(name not in one or one[name] != flat[0].get(name) for one in flat)]


def headline(runs: Sequence[RunRecord], untrained: Untrained | None) -> str:
    """The outcome in a sentence."""
    if "data" in differing_settings(runs):
        return f"{len(runs)} runs side by side, on different data."
    pair = pair_of(runs)
    accuracies = {run.name: run.ended(KNN) for run in runs}
    known = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
    start = untrained.knn_top1 if untrained is not None else None
    origin = f" from {KNN.shown(start)} untrained" if start is not None else ""
    if pair is not None:
        names = [pair.without.name, pair.with_term.name]
        where = f"with the {pair.term.term}"
        if len(known) == 2:
            before, after = (known[name] for name in names)
            verb = f"went{origin}" if origin else "came"
            return (
                f"{KNN.title} {verb} to {KNN.shown(before)} with {names[0]} and to {KNN.shown(after)} with {names[1]}: "
                f"{_change(KNN, before, after)} {where}."
            )
        ended = _ended(pair, pair.term)
        if ended is not None:
            shown = [pair.term.shown(value) for value in ended]
            return (
                f"The {pair.term.called} is at {shown[1]} with {names[1]} and at {shown[0]} with {names[0]}: "
                f"{_change(pair.term, *ended)} {where}."
            )
    if len(runs) == 1:
        return _headline_of_one(runs[0], known.get(runs[0].name), origin)
    if len(known) > 1:
        best, worst = max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])
        return (
            f"Of {len(known)} runs with labels, {best} has the highest {KNN.called}, {KNN.shown(known[best])}, and "
            f"{worst} the lowest, {KNN.shown(known[worst])}."
        )
    return f"{len(runs)} runs side by side."


def findings(runs: Sequence[RunRecord]) -> list[str]:
    """What a term changed, a sentence each; nothing if the runs are no such comparison."""
    pair = pair_of(runs)
    if pair is None:
        return []
    sentences = []
    for metric in (*measured(runs), EFFECTIVE_RANK):
        ended = _ended(pair, metric)
        if ended is not None:
            before, after = (metric.shown(value) for value in ended)
            sentences.append(
                f"The {metric.called} ended at {after} with the term in the objective and at {before} without: "
                f"{_change(metric, *ended)}."
            )
    return sentences


def _ended(pair: Pair, metric: Metric) -> tuple[float, float] | None:
    """Where both ended, without the term and with it, if that can be compared."""
    runs = (pair.without, pair.with_term)
    before, after = (run.ended(metric) for run in runs)
    return (before, after) if before is not None and after is not None and comparable(runs, metric) else None


def caveats(runs: Sequence[RunRecord], untrained: Untrained | None) -> list[str]:
    """What a reader must know before believing the numbers."""
    sentences = []
    for run in runs:
        if run.epochs_done < run.experiment.epochs:
            sentences.append(f"{run.name} has run {run.epochs_done:.3g} of its {run.experiment.epochs} epochs so far.")
    start = untrained.knn_top1 if untrained is not None else None
    for run in runs:
        accuracy = run.ended(KNN)
        if start is not None and accuracy is not None and accuracy <= start:
            sentences.append(
                f"{run.name} is not above the untrained network in {KNN.called}: it has learned nothing "
                "that this measure sees."
            )
    pair = pair_of(runs)
    of_the_term = () if pair is None else (pair.term.weight, "method.ramp_up", "method.start")
    others = [name for name in differing_settings(runs) if name not in of_the_term]
    if pair is not None and others:
        sentences.append(
            f"The two runs also differ in {_listed(others)}, so not every difference is due to the {pair.term.term}."
        )
    if len(runs) > 1:
        seeds = sorted({run.experiment.seed for run in runs})
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {_listed([str(seed) for seed in seeds])}"
        single = "This is one run of each kind" if pair is not None else "Every number is from a single run"
        sentences.append(
            f"{single} ({which}). Differences of a few points may come from the seed alone: repeat "
            "with other seeds before drawing conclusions."
        )
    return sentences


def comparable(runs: Sequence[RunRecord], metric: Metric) -> bool:
    """Whether the levels of a metric mean the same in all runs."""
    return not set(metric.depends_on) & set(differing_settings(runs))


def warning(runs: Sequence[RunRecord], metric: Metric) -> str:
    """Says so where they do not."""
    differing = [setting for setting in differing_settings(runs) if setting in metric.depends_on]
    return f" The runs differ in {_listed(differing)}, so their levels cannot be compared." if differing else ""


def ending(runs: Sequence[RunRecord], metric: Metric, values: Sequence[float | None]) -> str:
    """A chart's title: what it says about where the runs ended."""
    known = {run.name: value for run, value in zip(runs, values, strict=True) if value is not None}
    title = metric.title
    if not known:
        return f"{title}: not measured yet"
    if len(known) == 1:
        return f"{title} ends at {metric.shown(next(iter(known.values())))}"
    pair = pair_of(runs)
    if pair is not None:
        before, after = metric.shown(known[pair.without.name]), metric.shown(known[pair.with_term.name])
        if before == after:
            return f"{title} ends at {after} with and without the {pair.term.term}"
        if not comparable(runs, metric):
            return f"{title} ends at {after} with the {pair.term.term} and at {before} without"
        direction = "lower" if known[pair.with_term.name] < known[pair.without.name] else "higher"
        return f"{title} ends {direction} with the {pair.term.term}: {after} against {before}"
    return f"{title} ends between {metric.shown(min(known.values()))} and {metric.shown(max(known.values()))}"


def _headline_of_one(run: RunRecord, accuracy: float | None, origin: str) -> str:
    if accuracy is not None:
        return f"{run.name}: {KNN.called} {f'went{origin} to' if origin else 'is'} {KNN.shown(accuracy)}."
    values = {metric: run.ended(metric) for metric in (*measured([run]), EFFECTIVE_RANK)}
    parts = [f"{metric.called} {metric.shown(value)}" for metric, value in values.items() if value is not None]
    return f"{run.name}: " + ", ".join(parts or [f"epoch {run.epochs_done:.3g}"]) + "."


def _change(metric: Metric, before: float, after: float) -> str:
    """In points of a share, else in percent of what it was, and none where both are shown as the same."""
    if metric.shown(before) == metric.shown(after):
        return "no difference"
    direction = "higher" if after > before else "lower"
    if metric.unit == "%":
        return f"{abs(round(100 * after, 1) - round(100 * before, 1)):.1f} points {direction}"
    return f"{abs(after / before - 1):.0%} {direction}" if before > 0 else direction


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
