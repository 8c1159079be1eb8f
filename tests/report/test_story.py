"""Sentences that follow from the numbers, also when the numbers are not what one hoped for."""

from __future__ import annotations

import dataclasses
import re

import pytest

from co2.experiment import Experiment
from co2.methods.contrastive import CONSISTENCY, TOP1
from co2.report.runs import RunRecord, read_run
from co2.report.story import (
    Untrained,
    caveats,
    differing_settings,
    ending,
    findings,
    headline,
    pair_of,
    untrained_of,
    warning,
)


@pytest.fixture
def pair(make_run) -> list[RunRecord]:
    return [
        read_run(make_run("co2", alpha=1.0, knn=0.624), name="MoCo + CO2"),
        read_run(make_run("moco", knn=0.58), name="MoCo"),
    ]


def with_rows(run: RunRecord, kind: str, **values: float) -> RunRecord:
    """The run with these values in every row of a kind but the one before training."""
    rows = tuple({**row, **values} if row["epoch"] > 0 else row for row in getattr(run, kind))
    return dataclasses.replace(run, **{kind: rows})


def test_headline_when_the_term_helps(pair) -> None:
    assert headline(pair, Untrained(0.28)) == (
        "kNN accuracy went from 28.0% untrained to 58.0% with MoCo and to 62.4% with MoCo + CO2: "
        "4.4 points higher with the consistency term."
    )
    assert headline(pair, None).startswith("kNN accuracy came to 58.0% with MoCo")


def test_headline_when_it_does_not(pair) -> None:
    worse = [with_rows(pair[0], "epochs", knn_top1=0.5), pair[1]]
    assert headline(worse, None).endswith("8.0 points lower with the consistency term.")
    same = [with_rows(pair[0], "epochs", knn_top1=0.58001), pair[1]]
    assert headline(same, None).endswith("58.0% with MoCo + CO2: no difference with the consistency term.")


def test_headline_agrees_with_the_rounded_numbers(pair) -> None:
    # 50.04% and 50.16% are shown as 50.0% and 50.2%: the difference must be told as 0.2, not as 0.1.
    runs = [with_rows(pair[0], "epochs", knn_top1=0.5016), with_rows(pair[1], "epochs", knn_top1=0.5004)]
    assert "to 50.0% with MoCo and to 50.2% with MoCo + CO2: 0.2 points higher" in headline(runs, None)


def test_headline_without_labels(make_run) -> None:
    runs = [read_run(make_run("moco", labels=False)), read_run(make_run("co2", alpha=1.0, labels=False))]
    runs = [with_rows(runs[0], "train", consistency=0.4), with_rows(runs[1], "train", consistency=0.1)]
    assert headline(runs, None) == (
        "The consistency loss is at 0.100 with co2 and at 0.400 with moco: 75% lower with the consistency term."
    )
    assert re.fullmatch(
        r"moco: instance loss \d\.\d{3}, consistency loss 0\.400, instance accuracy \d\d\.\d%, effective rank 28\.0\.",
        headline(runs[:1], None),
    )


@pytest.mark.parametrize("count", [2, 3])
def test_headline_does_not_rank_runs_on_different_data(pair, make_run, count) -> None:
    other = read_run(make_run("other", knn=0.9))
    other = dataclasses.replace(other, experiment=other.experiment.edit(data="digits"))
    runs = [*pair, other][-count:]
    assert headline(runs, None) == f"{count} runs side by side, on different data."


def test_headline_of_one_and_of_three(pair, make_run) -> None:
    assert headline(pair[:1], Untrained(0.28)) == "MoCo + CO2: kNN accuracy went from 28.0% untrained to 62.4%."
    third = read_run(make_run("third", knn=0.4))
    assert caveats([*pair, third], None)[0].startswith("Every number is from a single run (seed 0).")
    assert headline([*pair, third], None) == (
        "Of 3 runs with labels, MoCo + CO2 has the highest kNN accuracy, 62.4%, and third the lowest, 40.0%."
    )


def test_findings_tell_both_directions(pair) -> None:
    runs = [
        with_rows(pair[0], "train", consistency=0.1, top1=0.6),
        with_rows(pair[1], "train", consistency=0.4, top1=0.7),
    ]
    told = findings(runs)
    loss, term, accuracy, rank = told
    assert term == (
        "The consistency loss ended at 0.100 with the term in the objective and at 0.400 without: 75% lower."
    )
    assert accuracy == (
        "The instance accuracy ended at 60.0% with the term in the objective and at 70.0% without: 10.0 points lower."
    )
    assert loss.startswith("The instance loss ended at ")
    assert rank == (
        "The effective rank ended at 28.0 with the term in the objective and at 28.0 without: no difference."
    )
    reverse = [with_rows(pair[0], "train", consistency=0.6, top1=0.8), runs[1]]
    told = findings(reverse)
    assert told[1].endswith("50% higher.")
    assert told[2].endswith("10.0 points higher.")


def test_only_a_run_without_and_one_with_the_term_are_a_pair(pair, make_run) -> None:
    found = pair_of(pair)
    assert found is not None
    assert (found.without.name, found.with_term.name) == ("MoCo", "MoCo + CO2")
    assert pair_of(pair[:1]) is None
    assert pair_of([pair[0], pair[0]]) is None
    assert pair_of([pair[1], pair[1]]) is None
    assert findings([pair[1], pair[1]]) == []


def test_how_the_weight_of_the_term_rises_is_part_of_the_term(pair, make_run) -> None:
    folder = make_run("rising", alpha=1.0)
    config = folder / "config.json"
    config.write_text(Experiment.from_json(config.read_text()).edit(method={"ramp_up": 0.5}).to_json())
    rising = [pair[1], read_run(folder)]  # MoCo, and CO2
    assert pair_of(rising) is not None
    assert "method.ramp_up" in differing_settings(rising)
    assert not any("also differ" in sentence for sentence in caveats(rising, None))


def test_caveats_name_what_else_differs(pair, make_run) -> None:
    assert differing_settings(pair) == ["method.alpha"]
    told = caveats(pair, None)
    assert len(told) == 1
    assert told[0].startswith("This is one run of each kind (seed 0).")
    other = read_run(make_run("other", alpha=1.0, seed=3, epochs=6))
    told = caveats([pair[1], other], None)
    assert "The two runs also differ in epochs and seed, so not every difference" in told[0]
    assert "(seeds 0 and 3)" in told[1]


def test_caveats_name_runs_that_are_unfinished_or_learned_nothing(make_run) -> None:
    begun = read_run(make_run("begun", epochs=12, epochs_done=5))
    assert caveats([begun], None) == ["begun has run 5 of its 12 epochs so far."]
    poor = read_run(make_run("poor", knn=0.2))
    assert caveats([poor], Untrained(0.28))[0].startswith("poor is not above the untrained network")


def test_levels_at_different_temperatures_are_not_compared(pair) -> None:
    assert warning(pair, CONSISTENCY) == ""
    assert any("consistency loss" in sentence for sentence in findings(pair))
    other = dataclasses.replace(pair[1], experiment=pair[1].experiment.edit(method={"tau_consistency": 0.07}))
    runs = [pair[0], other]
    assert "differ in method.tau_consistency" in warning(runs, CONSISTENCY)
    assert warning(runs, TOP1) == ""
    told = findings(runs)
    assert not any("consistency loss" in sentence for sentence in told)
    assert any("instance accuracy ended" in sentence for sentence in told)
    title = ending(runs, CONSISTENCY, [0.1, 0.4])
    assert title == "Consistency loss ends at 0.100 with the consistency term and at 0.400 without"


def test_without_labels_a_headline_compares_no_levels_that_mean_different_things(make_run) -> None:
    runs = [read_run(make_run("moco", labels=False)), read_run(make_run("co2", alpha=1.0, labels=False))]
    assert headline(runs, None).startswith("The consistency loss is at")
    fewer = runs[0].experiment.edit(method={"queue": 30})
    assert headline([dataclasses.replace(runs[0], experiment=fewer), runs[1]], None) == "2 runs side by side."


def test_how_often_queries_find_their_picture_is_compared_among_as_many_negatives_alone(pair) -> None:
    fewer = dataclasses.replace(pair[1], experiment=pair[1].experiment.edit(method={"queue": 30}))
    assert any("instance accuracy" in sentence for sentence in findings(pair))
    assert not any("instance accuracy" in sentence for sentence in findings([pair[0], fewer]))


def test_chart_titles(pair) -> None:
    lower = "Consistency loss ends lower with the consistency term: 0.100 against 0.400"
    assert ending(pair, CONSISTENCY, [0.1, 0.4]) == lower
    higher = "Consistency loss ends higher with the consistency term: 0.400 against 0.100"
    assert ending(pair, CONSISTENCY, [0.4, 0.1]) == higher
    same = "Consistency loss ends at 0.400 with and without the consistency term"
    assert ending(pair, CONSISTENCY, [0.4, 0.40001]) == same
    assert ending(pair, TOP1, [None, 0.4]) == "Instance accuracy ends at 40.0%"
    assert ending(pair, CONSISTENCY, [None, None]) == "Consistency loss: not measured yet"
    third = dataclasses.replace(pair[0], name="third")
    assert ending([*pair, third], CONSISTENCY, [3, 1, 2]) == "Consistency loss ends between 1.000 and 3.000"


def test_untrained_network_is_taken_where_runs_agree(pair, make_run) -> None:
    found = untrained_of(pair)
    assert found is not None
    assert found.knn_top1 == pytest.approx(0.28)
    unlabelled = read_run(make_run("unlabelled", labels=False))
    assert untrained_of([*pair, unlabelled]) == found
    other = dataclasses.replace(pair[0], epochs=({**pair[0].epochs[0], "knn_top1": 0.3, "effective_rank": 9.0},))
    assert untrained_of([pair[1], other]) is None
    assert untrained_of([read_run(make_run("late", untrained=False))]) is None
