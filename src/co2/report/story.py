"""What the numbers of some runs say, in sentences that claim no more than the numbers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from co2.experiment import flatten
from co2.measures.metric import HEALTH
from co2.report.runs import RunRecord

# Settings that say where a run was made and what it is called, not what it is.
NAMES_AND_PLACES = ("recipe", "out", "resume", "device", "workers")


@dataclass(frozen=True)
class Untrained:
    """The network before its first step."""

    knn_top1: float | None = None
    effective_rank: float | None = None


@dataclass(frozen=True)
class Pair:
    """A run without the consistency term and one with it."""

    without: RunRecord
    with_term: RunRecord


def untrained_of(runs: Sequence[RunRecord]) -> Untrained | None:
    """The untrained network, as far as runs measured it and agree about it."""
    agreed: dict[str, float | None] = {}
    for measure in ("knn_top1", "effective_rank"):
        found = {value for run in runs if (value := run.untrained(measure)) is not None}
        agreed[measure] = found.pop() if len(found) == 1 else None
    untrained = Untrained(**agreed)
    return untrained if untrained != Untrained() else None


def pair_of(runs: Sequence[RunRecord]) -> Pair | None:
    """The two runs as a comparison of without and with the consistency term, if that is what they are."""
    if len(runs) != 2:
        return None
    without, with_term = sorted(runs, key=_alpha)
    if _alpha(without) > 0 or _alpha(with_term) == 0:
        return None
    return Pair(without, with_term)


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """The names of settings that are not the same in all runs, names and places aside."""
    flat = [flatten(run.experiment) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings if name not in NAMES_AND_PLACES)
    return [name for name in names if any(name not in one or one[name] != flat[0].get(name) for one in flat)]


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _level_depends_on(runs: Sequence[RunRecord], name: str) -> set[str]:
    """Settings without which two values of a measure cannot be compared, as methods declare it."""
    declared = [metric for run in runs for metric in (*run.experiment.method.metrics, *HEALTH) if metric.name == name]
    return {setting for metric in declared for setting in metric.depends_on}


def _alpha(run: RunRecord) -> float:
    """The weight of the consistency term, 0 where a method has none."""
    return float(flatten(run.experiment).get("method.alpha", 0.0))


def headline(runs: Sequence[RunRecord], untrained: Untrained | None) -> str:
    """The outcome in a sentence."""
    if "data" in differing_settings(runs):
        return f"{len(runs)} runs side by side, on different data."
    pair = pair_of(runs)
    accuracies = {run.name: run.latest("knn_top1") for run in runs}
    known = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
    start = untrained.knn_top1 if untrained is not None else None
    origin = f" from {percent(start)} untrained" if start is not None else ""
    if pair is not None and len(known) == 2:
        before, after = known[pair.without.name], known[pair.with_term.name]
        verb = f"went{origin}" if origin else "came"
        return (
            f"kNN accuracy {verb} to {percent(before)} with {pair.without.name} and to {percent(after)} with "
            f"{pair.with_term.name}: {_points(before, after, 'with the consistency term')}."
        )
    if pair is not None and comparable(runs, "consistency"):
        before_term, after_term = pair.without.final("consistency"), pair.with_term.final("consistency")
        if before_term is not None and after_term is not None:
            return (
                f"The consistency loss is at {after_term:.3f} with {pair.with_term.name} and at {before_term:.3f} with "
                f"{pair.without.name}: {_relative(before_term, after_term, 'with the consistency term')}."
            )
    if len(runs) == 1:
        return _headline_of_one(runs[0], known.get(runs[0].name), origin)
    if len(known) > 1:
        best, worst = max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])
        return (
            f"Of {len(known)} runs with labels, {best} has the highest kNN accuracy, {percent(known[best])}, and "
            f"{worst} the lowest, {percent(known[worst])}."
        )
    return f"{len(runs)} runs side by side."


def findings(runs: Sequence[RunRecord]) -> list[str]:
    """What the consistency term changed, a sentence each; nothing if the runs are no such comparison."""
    pair = pair_of(runs)
    if pair is None:
        return []
    sentences = []
    before, after = pair.without.final("consistency"), pair.with_term.final("consistency")
    if before is not None and after is not None and comparable(runs, "consistency"):
        sentences.append(
            f"The consistency loss ended at {after:.3f} with the term in the objective and at {before:.3f} without: "
            f"{_relative(before, after)}."
        )
    before, after = pair.without.final("top1"), pair.with_term.final("top1")
    if before is not None and after is not None and comparable(runs, "top1"):
        sentence = (
            f"Queries picked out their own picture in {percent(after)} of cases with the term and in {percent(before)} "
            f"without: {_points(before, after)}."
        )
        if after < before:
            sentence += " The paper saw the same direction on ImageNet-100, from 97.57% to 95.26%."
        sentences.append(sentence)
    before, after = pair.without.latest("effective_rank"), pair.with_term.latest("effective_rank")
    if before is not None and after is not None and comparable(runs, "effective_rank"):
        sentences.append(
            f"The embeddings use {after:.1f} directions effectively with the term and {before:.1f} without "
            "(effective rank)."
        )
    return sentences


def caveats(runs: Sequence[RunRecord], untrained: Untrained | None) -> list[str]:
    """What a reader must know before believing the numbers."""
    sentences = []
    for run in runs:
        if run.epochs_done < run.experiment.epochs:
            sentences.append(f"{run.name} has run {run.epochs_done:.3g} of its {run.experiment.epochs} epochs so far.")
    start = untrained.knn_top1 if untrained is not None else None
    for run in runs:
        accuracy = run.latest("knn_top1")
        if start is not None and accuracy is not None and accuracy <= start:
            sentences.append(
                f"{run.name} is not above the untrained network in kNN accuracy: it has learned nothing "
                "that this measure sees."
            )
    others = [name for name in differing_settings(runs) if name not in ("method.alpha", "method.ramp_up")]
    if pair_of(runs) is not None and others:
        sentences.append(
            f"The two runs also differ in {_listed(others)}, so not every difference is due to the consistency term."
        )
    if len(runs) > 1:
        seeds = sorted({run.experiment.seed for run in runs})
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {_listed([str(seed) for seed in seeds])}"
        single = "This is one run of each kind" if pair_of(runs) is not None else "Every number is from a single run"
        sentences.append(
            f"{single} ({which}). Differences of a few points may come from the seed alone: repeat "
            "with other seeds before drawing conclusions."
        )
    return sentences


def comparable(runs: Sequence[RunRecord], name: str) -> bool:
    """Whether the levels of a measure, by its name in metrics.jsonl, mean the same in all runs."""
    return not _level_depends_on(runs, name) & set(differing_settings(runs))


def warning(runs: Sequence[RunRecord], name: str) -> str:
    """Says so where they do not."""
    if comparable(runs, name):
        return ""
    differing = [setting for setting in differing_settings(runs) if setting in _level_depends_on(runs, name)]
    return f" The runs differ in {_listed(differing)}, so their levels cannot be compared."


def ending(runs: Sequence[RunRecord], name: str, measure: str, values: Sequence[float | None], shown: str) -> str:
    """A chart's title: what it says about where the runs ended. `shown` formats a value: '.3f' or '.1%'."""
    known = {run.name: value for run, value in zip(runs, values, strict=True) if value is not None}
    if not known:
        return f"{measure}: not measured yet"
    if len(known) == 1:
        return f"{measure} ends at {next(iter(known.values())):{shown}}"
    pair = pair_of(runs)
    if pair is not None:
        before, after = f"{known[pair.without.name]:{shown}}", f"{known[pair.with_term.name]:{shown}}"
        if before == after:
            return f"{measure} ends at {after} with and without the consistency term"
        if not comparable(runs, name):
            return f"{measure} ends at {after} with the consistency term and at {before} without"
        direction = "lower" if known[pair.with_term.name] < known[pair.without.name] else "higher"
        return f"{measure} ends {direction} with the consistency term: {after} against {before}"
    low, high = min(known.values()), max(known.values())
    return f"{measure} ends between {low:{shown}} and {high:{shown}}"


def _headline_of_one(run: RunRecord, accuracy: float | None, origin: str) -> str:
    if accuracy is not None:
        return (
            f"{run.name}: kNN accuracy went{origin} to {percent(accuracy)}."
            if origin
            else (f"{run.name}: kNN accuracy is {percent(accuracy)}.")
        )
    top1, rank = run.final("top1"), run.latest("effective_rank")
    parts = [] if top1 is None else [f"queries pick out their own picture in {percent(top1)} of cases"]
    parts += [] if rank is None else [f"the effective rank of the embeddings is {rank:.1f}"]
    return f"{run.name}: " + "; ".join(parts or [f"epoch {run.epochs_done:.3g}"]) + "."


def _points(before: float, after: float, where: str = "") -> str:
    change = round(100 * after, 1) - round(100 * before, 1)
    where = f" {where}" if where else ""
    if abs(change) < 0.05:
        return f"no difference{where}"
    return f"{abs(change):.1f} points {'higher' if change > 0 else 'lower'}{where}"


def _relative(before: float, after: float, where: str = "") -> str:
    where = f" {where}" if where else ""
    if f"{before:.3f}" == f"{after:.3f}":
        return f"no difference{where}"
    amount = f"{abs(after / before - 1):.0%} " if before > 0 else ""
    return f"{amount}{'higher' if after > before else 'lower'}{where}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
