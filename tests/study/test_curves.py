"""Curves of several runs, part by part."""

import math

import numpy as np

from co2.study.curves import band
from co2.study.report import gather
from co2.study.tables import markdown_text


def test_curves_are_averaged_part_by_part(planned, log, fill, table_of):
    folder, plan = planned("curves", seeds=(0, 1))
    co2 = plan.grids["curves"].variants[1].name
    curves = {"moco": lambda seed: log(seed, 0.5), co2: lambda seed: log(seed, 0.2)}
    fill(folder, plan, "curves", {"moco": {0: 11.0, 1: 12.0}, co2: {0: 11.0, 1: 12.0}}, curves)
    results = gather(folder, plan, "curves")
    found = band(list(results.records["moco"].values()), "consistency")
    ends = np.linspace(0, 4, 11)[1:]
    np.testing.assert_allclose(found.mean, 0.5 + 0.05 + 0.05 * ends, atol=1e-4)
    np.testing.assert_allclose(found.deviation, 0.1 / math.sqrt(2), atol=1e-4)
    np.testing.assert_allclose(found.epochs, ends - 0.2)
    text = markdown_text(results)
    assert "is below the baseline's in 10 of 10 equal parts" in text
    # The end of a curve is the mean over the lines of the last epoch: those after epoch 3.
    last = ends[ends > 3]
    row = table_of(text)["MoCo"]
    assert row["L_ins at the end"].startswith(f"{(5 - last + 0.05).mean():.3f}")
    assert row["instance accuracy (%)"].startswith(f"{20 * last.mean():.2f}")


def test_parts_without_a_log_line_are_filled_in():
    class Run:
        def __init__(self, epochs, values):
            self.curve = lambda name: (epochs, values)

    found = band(
        [Run([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]), Run([1.0, 1.5, 2.0, 4.0], [1.0, 2.0, 3.0, 5.0])], "x"
    )
    np.testing.assert_allclose(found.mean, [1.0, 2.25, 3.375, 4.5])
    assert band([], "x") is None


def test_an_interrupted_run_logs_more_lines_and_is_compared_all_the_same(planned, write_cell, log):
    folder, plan = planned("curves", seeds=(0,))
    ours, theirs = plan.grids["curves"].variants[1].name, plan.grids["curves"].variants[0].name
    numbers = {"knn.top1": 1.0, "linear.top1": 2.0}
    write_cell(folder, plan, "curves", theirs, 0, numbers, log(0, 0.5))
    write_cell(folder, plan, "curves", ours, 0, numbers, log(0, 0.2, lines=11))
    assert "is below the baseline's in 10 of 10 equal parts" in markdown_text(gather(folder, plan, "curves"))
