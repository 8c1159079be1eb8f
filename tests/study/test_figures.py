"""What is drawn is where the records say, on scales that can be compared."""

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from co2.study import figures
from co2.study.report import gather, report_study
from co2.study.tables import KNN, KNN_EMBEDDING, LINEAR

MOCO = {0: 60.0, 1: 62.0, 2: 61.0}
CO2 = {0: 63.0, 1: 64.0, 2: 65.5}


def test_every_study_has_a_figure_and_the_same_records_give_the_same_one(planned, write_cell, log):
    folder, plan = planned("alpha", "tau", "curves", "claim", seeds=(0, 1))
    for study in ("alpha", "tau", "claim"):
        for place, variant in enumerate(plan.grids[study].variants):
            for seed in (0, 1):
                write_cell(
                    folder,
                    plan,
                    study,
                    variant.name,
                    seed,
                    {"knn.top1": 50 + place, "linear.top1": 60 + place + seed},
                    log(seed, 0.5 if variant.name == "moco" else 0.2),
                )
    for study in plan.grids:
        results = report_study(folder, plan, study)
        assert not results.missing
        picture = np.asarray(Image.open(folder / f"{study}.png").convert("L"))
        assert picture.shape[0] > 200
        assert (picture < 128).mean() > 0.002  # there is ink on it
        drawing = ElementTree.parse(folder / f"{study}.svg").getroot()
        words = {"".join(node.itertext()).strip() for node in drawing.iter() if node.tag.endswith("text")}
        assert any(word.startswith("MoCo") for word in words)
        assert (folder / f"{study}.csv").stat().st_size > 200
    words = (folder / "alpha.svg").read_text()
    for mark in (">0.1<", ">0.3<", ">1<", ">3<", ">10<", ">30<"):
        assert mark in words
    first = (folder / "alpha.svg").read_bytes()
    report_study(folder, plan, "alpha")
    assert (folder / "alpha.svg").read_bytes() == first  # the same records, the same file


def test_curves_are_drawn_at_each_variants_mean_with_a_band_of_its_deviation(planned, write_cell):
    folder, plan = planned("curves", seeds=(0, 1))
    ends = np.array([1.0, 2.0, 3.0, 4.0])
    expected = {}
    for number, variant in enumerate(plan.grids["curves"].variants):
        means = {
            "instance": 5 + number - ends,
            "consistency": (2 - number) / ends,
            "top1": (0.1 + 0.05 * number) * ends,
        }
        around = {"instance": 0.5 - 0.1 * number, "consistency": 0.2 - 0.05 * number, "top1": 0.03 + 0.01 * number}
        for seed, side in ((0, -1), (1, 1)):
            curve = {name: (mean + side * around[name]).tolist() for name, mean in means.items()}
            numbers = {"knn.top1": 1.0, "linear.top1": 2.0}
            write_cell(folder, plan, "curves", variant.name, seed, numbers, {"epoch": ends.tolist()} | curve)
        expected[f"{variant.label}, 2 seeds"] = means, around
    panels = figures._curves(gather(folder, plan, "curves")).axes
    measures = {"L_ins": ("instance", 1), "L_con": ("consistency", 1), "instance accuracy (%)": ("top1", 100)}
    assert [axes.get_ylabel() for axes in panels] == list(measures)
    for axes in panels:
        name, factor = measures[axes.get_ylabel()]
        assert [line.get_label() for line in axes.lines] == list(expected)
        for line, around_it in zip(axes.lines, axes.collections, strict=True):
            means, around = expected[line.get_label()]
            mean, deviation = factor * means[name], factor * around[name] * math.sqrt(2)
            np.testing.assert_allclose(line.get_xdata(), ends - 0.5)
            np.testing.assert_allclose(line.get_ydata(), mean)
            (outline,) = around_it.get_paths()
            for end, level in zip(ends, mean, strict=True):
                edges = outline.vertices[outline.vertices[:, 0] == end - 0.5, 1]
                assert (edges.min(), edges.max()) == pytest.approx((level - deviation, level + deviation))
            np.testing.assert_allclose(around_it.get_facecolor()[0, :3], to_rgb(line.get_color()))


def test_label_smoothing_is_not_drawn_in_the_colour_of_co2(planned, write_cell):
    folder, plan = planned("claim")
    numbers = {"knn.top1": 50.0, "linear.top1": 60.0}
    drawn = {}
    for variant in plan.grids["claim"].variants[:3]:  # the baseline, CO2, label smoothing
        write_cell(folder, plan, "claim", variant.name, 0, numbers)
        report_study(folder, plan, "claim")
        colours = set(re.findall(r"stroke: (#\w{6})", (folder / "claim.svg").read_text()))
        drawn[variant.name] = colours - set().union(*drawn.values())
    assert list(drawn)[2].startswith("moco-smoothing")
    assert all(drawn.values())  # each brings a colour that was not there


def test_the_baseline_is_a_line_at_its_mean(planned, write_cell):
    folder, plan = planned("alpha", seeds=(0, 1))
    for variant in plan.grids["alpha"].variants:
        for seed in (0, 1):
            write_cell(
                folder, plan, "alpha", variant.name, seed, {"knn.top1": 50.0, "linear.top1": 60 + variant.place + seed}
            )
    figure = figures._over_setting(gather(folder, plan, "alpha"))
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_ylabel() == LINEAR.heading
    level = [line for line in axes.lines if len(set(line.get_ydata())) == 1 and list(line.get_xdata()) == [0, 1]]
    assert level[0].get_ydata()[0] == 60.5
    (curve,) = [container[0] for container in axes.containers]
    np.testing.assert_allclose(np.asarray(curve.get_xdata(), dtype=float), [0.1, 0.3, 1, 3, 10, 30])
    np.testing.assert_allclose(np.asarray(curve.get_ydata(), dtype=float), [60.6, 60.8, 61.5, 63.5, 70.5, 90.5])


def test_a_figure_over_a_setting_has_a_panel_for_each_accuracy_on_one_scale(planned, write_cell, log):
    folder, plan = planned("alpha", seeds=(0,))
    for place, variant in enumerate(plan.grids["alpha"].variants):
        numbers = {"knn.top1": 50.0 + 0.1 * place, "linear.top1": 60.0 + 2 * place}
        curves = {"train": log(0, 0.5), "epoch": {"epoch": [4.0], "knn_embedding_top1": [0.7 - 0.01 * place]}}
        write_cell(folder, plan, "alpha", variant.name, 0, numbers, curves=curves)
    panels = {axes.get_ylabel(): axes for axes in figures._over_setting(gather(folder, plan, "alpha")).axes}
    assert list(panels) == [LINEAR.heading, "kNN top-1 (%)", "kNN top-1 of embeddings (%)"]
    (embeddings,) = [container[0] for container in panels["kNN top-1 of embeddings (%)"].containers]
    np.testing.assert_allclose(np.asarray(embeddings.get_ydata(), dtype=float), [69, 68, 67, 66, 65, 64])
    spans = [high - low for low, high in (axes.get_ylim() for axes in panels.values())]
    assert spans == pytest.approx([spans[0]] * 3)


def test_every_panel_over_a_setting_has_its_own_means_with_bars_and_the_baseline_a_band(planned, write_cell, log):
    folder, plan = planned("alpha", seeds=(0, 1))
    numbers = np.arange(7)
    means = {LINEAR: 60.0 + numbers, KNN: 50.0 - numbers, KNN_EMBEDDING: 70.0 + numbers % 3}
    around = {LINEAR: 0.5 + 0.1 * numbers, KNN: 0.9 - 0.1 * numbers, KNN_EMBEDDING: 0.2 + 0.05 * numbers}
    baseline, *placed = plan.grids["alpha"].variants
    assert (baseline.name, len(placed)) == ("moco", 6)
    for number, variant in enumerate((baseline, *placed)):
        for seed, side in ((0, -1), (1, 1)):
            value = {measure: means[measure][number] + side * around[measure][number] for measure in means}
            curves = {"train": log(0, 0.5), "epoch": {"knn_embedding_top1": [value[KNN_EMBEDDING] / 100]}}
            accuracies = {measure.name: value[measure] for measure in (LINEAR, KNN)}
            write_cell(folder, plan, "alpha", variant.name, seed, accuracies, curves=curves)
    panels = figures._over_setting(gather(folder, plan, "alpha")).axes
    for axes, measure in zip(panels, means, strict=True):
        assert axes.get_ylabel() == measure.heading
        mean, deviation = means[measure], math.sqrt(2) * around[measure]
        (container,) = axes.containers
        curve, _caps, (bars,) = container
        np.testing.assert_allclose(np.asarray(curve.get_xdata(), dtype=float), [variant.place for variant in placed])
        np.testing.assert_allclose(np.asarray(curve.get_ydata(), dtype=float), mean[1:])
        ends = np.array([[low, high] for (_, low), (_, high) in bars.get_segments()])
        np.testing.assert_allclose(ends, np.stack([mean - deviation, mean + deviation], axis=1)[1:])
        (level,) = [line for line in axes.lines if line.get_label() == baseline.label]
        np.testing.assert_allclose(level.get_ydata(), mean[0])
        (around_it,) = axes.patches
        assert (around_it.get_y(), around_it.get_height()) == pytest.approx((mean[0] - deviation[0], 2 * deviation[0]))


def test_a_figure_over_a_setting_has_no_panel_for_what_nobody_measured(planned, write_cell):
    folder, plan = planned("alpha", seeds=(0,))
    for place, variant in enumerate(plan.grids["alpha"].variants):
        write_cell(folder, plan, "alpha", variant.name, 0, {"linear.top1": 60.0 + place})
    (axes,) = figures._over_setting(gather(folder, plan, "alpha")).axes
    assert axes.get_ylabel() == LINEAR.heading
    (curve,) = [container[0] for container in axes.containers]
    assert list(curve.get_ydata()) == [61, 62, 63, 64, 65, 66]
    report_study(folder, plan, "alpha")
    assert (folder / "alpha.png").is_file()


def test_both_settings_together_are_a_line_for_each_tau(planned, write_cell):
    folder, plan = planned("alpha-tau", seeds=(0,))
    variants = plan.grids["alpha-tau"].variants
    for place, variant in enumerate(variants[:-1]):  # the last point of the last line is still missing
        write_cell(folder, plan, "alpha-tau", variant.name, 0, {"knn.top1": 50.0, "linear.top1": 60.0 + place})
    axes = figures._over_setting(gather(folder, plan, "alpha-tau")).axes[0]
    curves = {container.get_label(): container[0] for container in axes.containers}
    assert list(curves) == ["τ_con = 0.02", "τ_con = 0.04", "τ_con = 0.07", "τ_con = 0.1", "τ_con = 0.2", "τ_con = 0.4"]
    assert list(curves["τ_con = 0.04"].get_ydata()) == [67, 68, 69, 70, 71, 72]
    assert list(curves["τ_con = 0.4"].get_xdata()) == [0.1, 0.3, 1, 3, 10]
    assert len({curve.get_color() for curve in list(curves.values())[:5]}) == 5
    assert len({(curve.get_color(), curve.get_marker()) for curve in curves.values()}) == 6


def test_a_setting_that_learns_nothing_does_not_press_the_others_together(planned, write_cell):
    folder, plan = planned("alpha", seeds=(0,))
    for variant, linear in zip(plan.grids["alpha"].variants, (60.0, 61.0, 62.0, 63.0, 63.0, 62.0, 10.0), strict=True):
        write_cell(folder, plan, "alpha", variant.name, 0, {"knn.top1": 50.0, "linear.top1": linear})
    axes = figures._over_setting(gather(folder, plan, "alpha")).axes[0]
    assert axes.get_ylim()[0] > 55
    (curve,) = [container[0] for container in axes.containers]
    assert list(curve.get_ydata())[:5] == [61, 62, 63, 63, 62]
    assert "10.0" in [text.get_text() for text in axes.texts]  # said where the arrow is


def test_a_figure_has_rows_for_what_was_measured_alone(planned, write_cell):
    folder, plan = planned("claim", seeds=(0,))
    first, *_, last = plan.grids["claim"].variants
    for variant, accuracy in ((first, 30.0), (last, 40.0)):
        write_cell(folder, plan, "claim", variant.name, 0, {"knn.top1": 1.0, "linear.top1": accuracy})
    panels = figures._dots(gather(folder, plan, "claim")).axes
    assert [text.get_text() for text in panels[0].get_yticklabels()] == [first.label, last.label]
    linear = next(axes for axes in panels if axes.get_xlabel() == "linear top-1 (%)")
    dots = {float(x): float(y) for line in linear.lines for x, y in zip(*line.get_data(), strict=True)}
    assert dots == {30.0: 0.0, 40.0: 1.0}


def test_a_row_of_a_figure_has_a_dot_for_each_seed_and_their_mean_with_a_bar(planned, write_cell):
    folder, plan = planned("claim", seeds=(0, 1))
    for number, variant in enumerate(plan.grids["claim"].variants[:2]):
        for seed in (0, 1):
            accuracies = {"knn.top1": 50.0 + number + 3 * seed, "linear.top1": 60.0 + 2 * number + (1 + number) * seed}
            write_cell(folder, plan, "claim", variant.name, seed, accuracies)
    expected = {"kNN top-1 (%)": [(50.0, 53.0), (51.0, 54.0)], LINEAR.heading: [(60.0, 61.0), (62.0, 64.0)]}
    panels = {axes.get_xlabel(): axes for axes in figures._dots(gather(folder, plan, "claim")).axes if axes.lines}
    assert list(panels) == list(expected)
    for heading, axes in panels.items():
        for row, (low, high) in enumerate(expected[heading]):
            dots = [tuple(line.get_xdata()) for line in axes.lines if list(line.get_ydata()) == [row, row]]
            assert dots == [(low, high)]
            mean, _caps, (bar,) = axes.containers[row]
            assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([(low + high) / 2], [row])
            ((left, right),) = bar.get_segments()
            deviation = (high - low) / math.sqrt(2)
            assert (left[0], right[0]) == pytest.approx(((low + high) / 2 - deviation, (low + high) / 2 + deviation))


def test_a_point_is_as_long_in_every_panel_of_a_figure(planned, write_cell):
    folder, plan = planned("claim", seeds=(0,))
    for number, variant in enumerate(plan.grids["claim"].variants[:2]):
        accuracies = {"knn.top1": 50.0 + 0.1 * number, "linear.top1": 60.0 + 5 * number}
        write_cell(folder, plan, "claim", variant.name, 0, accuracies)
    panels = {axes.get_xlabel(): axes.get_xlim() for axes in figures._dots(gather(folder, plan, "claim")).axes}
    (knn_low, knn_high), (linear_low, linear_high) = panels["kNN top-1 (%)"], panels["linear top-1 (%)"]
    assert knn_high - knn_low == pytest.approx(linear_high - linear_low)
    assert knn_low < 50.0 < 50.1 < knn_high
    assert linear_low < 60.0 < 65.0 < linear_high < 70.0


def test_no_curve_runs_through_the_legend(planned, write_cell, log):
    folder, plan = planned("curves", seeds=(0,))
    for variant in plan.grids["curves"].variants:
        write_cell(folder, plan, "curves", variant.name, 0, {"knn.top1": 1.0, "linear.top1": 2.0}, log(0, 0.5))
    figure = figures._curves(gather(folder, plan, "curves"))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"{variant.label}, 1 seed" for variant in plan.grids["curves"].variants
    ]
    box = legend.get_window_extent()
    assert box.x0 >= figure.bbox.x0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1
    assert not any(axes.get_legend() or axes.get_tightbbox().overlaps(box) for axes in figure.axes)


def test_a_figure_or_table_that_cannot_be_finished_leaves_the_old_one(planned, write_cell, log, monkeypatch):
    folder, plan = planned("claim", seeds=(0,))
    write_cell(folder, plan, "claim", "moco", 0, {"knn.top1": 60.0, "linear.top1": 61.0}, log(0, 0.5))
    report_study(folder, plan, "claim")
    names = [f"claim.{ending}" for ending in ("md", "csv", "svg", "png")]
    before = {name: (folder / name).read_bytes() for name in names}

    def disk_full(self, file, **how):
        file.write(b"half of ")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", disk_full)
    with pytest.raises(OSError, match="No space left"):
        report_study(folder, plan, "claim")
    assert {name: (folder / name).read_bytes() for name in names} == before
    assert not list(folder.glob("*.writing"))
