"""Means, deviations and paired tests against what one computes by hand and with scipy; tables, figures and the page."""

import csv
import io
import math
import re
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from scipy import stats

from co2 import recipes
from co2.cli import main
from co2.errors import UserError
from co2.study import figures
from co2.study.curves import band
from co2.study.published import PUBLISHED, published_for
from co2.study.records import columns, read_record, write_record
from co2.study.report import gather, report_study, write_page
from co2.study.tables import KNN, KNN_EMBEDDING, LINEAR, compare, csv_text, markdown_text, rows_of, spread

MOCO = {0: 60.0, 1: 62.0, 2: 61.0}
CO2 = {0: 63.0, 1: 64.0, 2: 65.5}


def fill(write_cell, folder, plan, study, accuracies, curves=None):
    """Records with these linear accuracies, by variant and seed; kNN is five lower."""
    for variant, by_seed in accuracies.items():
        for seed, value in by_seed.items():
            curve = (curves or {}).get(variant, lambda seed: None)(seed)
            write_cell(
                folder,
                plan,
                study,
                variant,
                seed,
                {"knn.top1": value - 5, "linear.top1": value, "knn.top5": 99.0},
                curve,
            )


def table_of(text):
    """The first table of a Markdown text, by the first column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    end = next((i for i, line in enumerate(text.splitlines()) if line.startswith("|")), 0)
    length = next((i for i, line in enumerate(text.splitlines()[end:]) if not line.startswith("|")), len(lines))
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:length]}


def test_mean_and_deviation_by_hand():
    found = spread([1.0, 2.0, 6.0])
    assert (found.mean, found.count) == (3.0, 3)
    assert found.deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert spread([5.0]).text() == "5.00"
    assert spread([1.0, 3.0]).text(1) == "2.0 ± 1.4"
    assert spread([]) is None


def test_the_paired_test_by_hand_and_against_scipy():
    found = compare(CO2, MOCO)
    differences = np.array([3.0, 2.0, 4.5])
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(3))
    assert found.difference.mean == pytest.approx(differences.mean())
    assert found.difference.deviation == pytest.approx(differences.std(ddof=1))
    assert found.t == pytest.approx(t)
    assert found.p == pytest.approx(2 * stats.t.sf(t, df=2))
    assert found.p == pytest.approx(stats.ttest_1samp(differences, 0.0).pvalue)


def test_only_seeds_that_both_have_are_compared():
    found = compare({0: 5.0, 1: 7.0, 9: 100.0}, {1: 6.0, 0: 3.0, 5: -100.0})
    assert (found.difference.mean, found.difference.count) == (1.5, 2)
    assert compare({0: 1.0}, {1: 1.0}) is None
    single = compare({0: 2.0}, {0: 1.0})
    assert (single.difference.mean, single.difference.deviation, single.p) == (1.0, None, None)
    equal = compare({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})  # a deviation of zero: no test
    assert (equal.difference.mean, equal.p) == (1.0, None)


def test_the_tables_of_a_study(planned, write_cell):
    folder, plan = planned("claim", seeds=(0, 1, 2))
    co2 = plan.grids["claim"].variants[1].name
    fill(write_cell, folder, plan, "claim", {"moco": MOCO, co2: CO2})
    results = gather(folder, plan, "claim")
    table = table_of(markdown_text(results))
    row = table["MoCo + CO2 (α=0.3, τ=0.1)"]
    assert row["seeds"] == "3"
    assert row["linear top-1 (%)"] == "**64.17 ± 1.26**"  # 64.1667 and 1.2583
    p = stats.ttest_rel(list(CO2.values()), list(MOCO.values())).pvalue
    assert row["Δ linear top-1"] == f"+3.17 ± 1.26 (n=3, p={p:.3f})"
    assert table["MoCo"]["linear top-1 (%)"] == "61.00 ± 1.00"
    assert table["MoCo"]["kNN top-1 (%)"] == "56.00 ± 1.00"
    assert table["MoCo"]["Δ linear top-1"] == ""
    assert table["MoCo + label smoothing 0.1"]["linear top-1 (%)"] == "–"
    text = markdown_text(results)
    assert "With 3 seeds the test has little power" in text
    assert f"Cells still missing ({3 * 5})" in text
    assert "moco-smoothing-0.1-s0" in text

    (line,) = [
        line
        for line in csv.DictReader(io.StringIO(csv_text(results)))
        if line["variant"] == co2 and line["measure"] == "linear.top1"
    ]
    assert float(line["mean"]) == pytest.approx(np.mean(list(CO2.values())))
    assert float(line["deviation"]) == pytest.approx(np.std(list(CO2.values()), ddof=1))
    assert float(line["p"]) == pytest.approx(p)
    assert (line["baseline"], line["n"], line["seeds"], line["values"]) == ("moco", "3", "0 1 2", "63 64 65.5")


def test_what_cells_are_judged_by_besides_has_columns_where_it_was_measured(planned, write_cell):
    folder, plan = planned("claim", "curves", also=("linear-paper", "semi-supervised"))
    numbers = {"knn.top1": 50.0, "linear.top1": 60.0}
    more = {"linear-paper.top1": 61.5, "semi-supervised.top1_1%": 20.0, "semi-supervised.top5_1%": 40.0}
    more |= {"semi-supervised.scratch_top1_1%": 5.0}
    usual = list(table_of(markdown_text(gather(folder, plan, "claim")))["MoCo"])
    write_cell(folder, plan, "claim", "moco", 0, numbers | more)
    write_cell(folder, plan, "claim", "moco-co2-a0.3-t0.1", 0, numbers | {"linear-paper.top1": 63.0})
    results = gather(folder, plan, "claim")
    table = table_of(markdown_text(results))
    by_sgd, tuned = "linear top-1, the paper's SGD (%)", "top-1, fine-tuned on 1% of the labels (%)"
    assert set(table["MoCo"]) - set(usual) == {by_sgd, tuned, f"Δ {by_sgd[:-4]}", f"Δ {tuned[:-4]}"}
    assert (table["MoCo"][by_sgd], table["MoCo"][tuned]) == ("61.50", "20.00")
    row = table["MoCo + CO2 (α=0.3, τ=0.1)"]
    assert (row[by_sgd], row[tuned], row[f"Δ {by_sgd[:-4]}"]) == ("**63.00**", "–", "+1.50 (n=1)")
    assert "moco-co2-a0.3-t0.1-s0: not yet judged by semi-supervised" in markdown_text(results)
    assert by_sgd in table_of(markdown_text(gather(folder, plan, "curves")))["MoCo"]
    assert by_sgd in "".join(axes.get_xlabel() for axes in figures._dots(results).axes)


def test_records_dropped_in_from_elsewhere_are_picked_up_and_others_left_out(planned, write_cell, read_json):
    folder, plan = planned("curves", seeds=(0, 1))
    co2 = plan.grids["curves"].variants[1].name
    fill(write_cell, folder, plan, "curves", {"moco": MOCO, co2: {0: 63.0, 7: 66.0}})
    other = plan.cell("curves", plan.grids["curves"].variants[0], 1).experiment.edit(epochs=9)
    settings = read_json(folder / "cells" / "moco-s1.json")["settings"] | {"epochs": other.epochs}
    write_cell(folder, plan, "curves", "moco", 1, {"linear.top1": 1.0, "knn.top1": 1.0}, settings=settings)
    (folder / "cells" / "moco-s2.json").write_text('{"settings": 3')
    results = gather(folder, plan, "curves")
    assert sorted(results.records[co2]) == [0, 7]
    assert sorted(results.records["moco"]) == [0]
    assert "epochs: 9 in the record, 2 asked for" in results.missing["moco-s1"]
    assert results.missing[f"{co2}-s1"] == "not computed yet"
    assert f"{co2}-s2" not in results.missing  # nobody planned it


def test_a_record_nobody_planned_is_named_if_it_cannot_be_used(planned, write_cell, read_json):
    folder, plan = planned("curves", seeds=(0,))
    co2 = plan.grids["curves"].variants[1].name
    fill(write_cell, folder, plan, "curves", {"moco": {0: 60.0, 5: 61.0}, co2: {0: 63.0}})
    settings = read_json(folder / "cells" / "moco-s5.json")["settings"] | {"epochs": 9}
    write_cell(folder, plan, "curves", "moco", 5, {"linear.top1": 1.0, "knn.top1": 1.0}, settings=settings)
    (folder / "cells" / f"{co2}-s6.json").write_text('{"settings": 3')
    results = gather(folder, plan, "curves")
    assert {name: sorted(by_seed) for name, by_seed in results.records.items()} == {"moco": [0], co2: [0]}
    assert sorted(results.missing) == sorted(["moco-s5", f"{co2}-s6"])
    assert results.missing["moco-s5"].startswith("left out: ")
    assert "epochs: 9 in the record, 2 asked for" in results.missing["moco-s5"]
    assert results.missing[f"{co2}-s6"].startswith("left out: ")
    assert f"{co2}-s6.json is damaged" in results.missing[f"{co2}-s6"]
    assert all(name in markdown_text(results) for name in results.missing)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("seconds"),
        lambda content: content.pop("made_with"),
        lambda content: content.pop("evaluations"),
        lambda content: content["data"].pop("test"),
        lambda content: content["evaluations"]["knn"].pop("settings"),
        lambda content: content["evaluations"]["knn"].update(numbers={"top1": "much"}),
        lambda content: content["curves"].update(train=[1, 2]),
        lambda content: content["curves"].update(train={"epoch": ["a"], "instance": ["b"]}),
        lambda content: content["curves"].update(epoch=3),
    ],
)
def test_a_record_with_a_part_missing_or_wrong_is_left_out_and_named(planned, write_cell, read_json, damage):
    folder, plan = planned("curves")
    write_cell(folder, plan, "curves", "moco", 0, {"linear.top1": 1.0, "knn.top1": 1.0})
    path = folder / "cells" / "moco-s0.json"
    content = read_json(path)
    damage(content)
    write_record(path, content)
    assert "moco-s0.json is damaged" in gather(folder, plan, "curves").missing["moco-s0"]


def test_records_of_other_data_are_left_out(planned, write_cell):
    folder, plan = planned("curves", seeds=(0, 1, 2))
    fill(write_cell, folder, plan, "curves", {"moco": MOCO})
    other = {"name": "other", "train": 50000, "bank": 50000, "test": 10000, "classes": 100, "validate": None}
    write_cell(folder, plan, "curves", "moco", 2, {"linear.top1": 1.0, "knn.top1": 1.0}, data=other)
    results = gather(folder, plan, "curves")
    assert sorted(results.records["moco"]) == [0, 1]
    assert "other data than most (train 50000, bank 50000" in results.missing["moco-s2"]


@pytest.mark.parametrize(
    ("asked", "share", "recorded"),
    [({}, None, 0.1), ({"validate": True}, 0.1, None), ({"validate": True, "validate_share": 0.3}, 0.3, 0.1)],
)
def test_a_record_with_another_share_held_out_is_left_out_and_said_to_be(planned, write_cell, asked, share, recorded):
    folder, plan = planned("curves", seeds=(0, 1), **asked)
    co2 = plan.grids["curves"].variants[1].name
    fill(write_cell, folder, plan, "curves", {"moco": {0: 60.0}, co2: {0: 63.0, 1: 64.0}})
    other = {"name": "shapes:40:16", "train": 40, "bank": 40, "test": 1000, "classes": 10, "validate": recorded}
    write_cell(folder, plan, "curves", "moco", 1, {"linear.top1": 1.0, "knn.top1": 1.0}, data=other)
    results = gather(folder, plan, "curves")
    assert sorted(results.records["moco"]) == [0]
    text = markdown_text(results)
    assert table_of(text)["MoCo"][LINEAR.heading] == "60.00"
    said = f"share held out for validation: {recorded} in the record, {share} asked for"
    assert f"- moco-s1: left out: its record has other settings ({said})" in text


def test_what_cannot_be_written_is_told_in_a_sentence(planned, capsys):
    folder, _ = planned("claim")
    (folder / "claim.md").mkdir()
    assert main(["study", "report", str(folder)]) == 2
    assert f"{folder / 'claim.md'}: Is a directory. Make room there" in capsys.readouterr().err


def test_a_cell_that_lacks_an_evaluation_counts_for_what_it_has(planned, write_cell):
    folder, plan = planned("transfer")
    write_cell(folder, plan, "transfer", "moco", 0, {"svm.mAP_area": 40.0, "svm.mAP_11point": 41.0})
    results = gather(folder, plan, "transfer")
    assert results.missing["moco-s0"] == "not yet judged by detection and segmentation"
    assert table_of(markdown_text(results))["MoCo"]["svm mAP, area"] == "40.00"


def test_svm_at_another_view_size_is_another_number(planned, write_cell):
    folder, plan = planned("transfer", view_size=64)
    write_cell(folder, plan, "transfer", "moco", 0, {"svm.mAP_area": 40.0, "svm.mAP_11point": 41.0})
    other = replace(plan, view_size=96)
    assert "svm.view_size: 64 in the record, 96 asked for" in gather(folder, other, "transfer").missing["moco-s0"]


def test_published_numbers_stand_beside_those_of_the_same_method(planned, write_cell):
    folder, plan = planned("claim", data="data/cifar10", seeds=(0, 1, 2), epochs=200)
    for seed, share in enumerate((0.3, 0.4, 0.5)):
        curves = {"train": {"epoch": [], "top1": []}, "epoch": {"knn_embedding_top1": [0.1, share]}}
        write_cell(folder, plan, "claim", "moco", seed, {"knn.top1": 55.0 + seed}, curves=curves)
    text = markdown_text(gather(folder, plan, "claim"))
    # The notebook's kNN sees embeddings, at the end of training; lightly's sees features.
    assert "| MoCo, asymmetric | kNN top-1 of embeddings (%) | 82.6 | 40.00 ± 10.00 |" in text
    assert "| MoCo, symmetric | kNN top-1 of embeddings (%) | 85.3 | – |" in text
    assert "| MoCo, asymmetric | kNN top-1 of embeddings (%) | 88.7 |  |" in text  # at 800 epochs
    assert "| MoCo | kNN top-1 (%) | 84.7 | 56.00 ± 1.00 |" in text
    assert "| 91.0 |  |" in text
    assert "where it was trained as long (200 epochs)" in text
    assert "63.6" not in text  # ImageNet-100's
    measures = frozenset({"knn.top1", "linear.top1", "train.top1"})
    assert {one.value for one in published_for("x/tiny-imagenet-100", measures)} == {63.6, 69.2, 61.2, 97.57, 95.26}
    for other in ("my/pictures", "cifar100", "cifar-100-python", "imagenet", "tiny-imagenet", "imagenet1000"):
        assert published_for(other, measures) == []
    assert len(published_for("my/pictures", frozenset({"svm.mAP_11point", "segmentation.mIoU"}))) == 8
    assert len(PUBLISHED) == len(set(PUBLISHED))


def test_published_numbers_of_other_images_are_not_said_to_be_comparable(planned, write_cell):
    folder, plan = planned("claim", data="tiny-imagenet-100", epochs=60)
    write_cell(folder, plan, "claim", "moco", 0, {"linear.top1": 36.0})
    text = markdown_text(gather(folder, plan, "claim"))
    assert "| MoCo | linear top-1 (%) | 63.6 | 36.00 |" in text
    assert "of other images and networks" in text
    assert "trained as long" not in text


def test_the_row_beside_a_published_one_says_which_settings_it_has_here(planned, write_cell):
    folder, plan = planned("claim", data="tiny-imagenet-100", epochs=60)
    ours = plan.grids["claim"].variants[1]
    write_cell(folder, plan, "claim", ours.name, 0, {"linear.top1": 38.0})
    line = next(one for one in markdown_text(gather(folder, plan, "claim")).splitlines() if "| 69.2 |" in one)
    assert line.startswith("| MoCo + CO2 (α=10, τ=0.04) |")  # theirs
    assert f"| 38.00 by {ours.label} |" in line
    assert "α=10" not in ours.label


def test_numbers_on_a_validation_part_say_so_and_stand_beside_nothing_published(planned, write_cell):
    folder, plan = planned("claim", data="cifar10", validate=True)
    write_cell(folder, plan, "claim", "moco", 0, {"knn.top1": 50.0, "linear.top1": 60.0})
    text = markdown_text(gather(folder, plan, "claim"))
    assert "10% of the training images" in text
    assert "82.6" not in text


def log(seed, level, epochs=4, lines=10):
    """A log whose lines are a function of the seed."""
    ends = np.linspace(0, epochs, lines + 1)[1:]
    return {
        "epoch": [round(float(end), 4) for end in ends],
        "instance": (5 - ends + 0.1 * seed).tolist(),
        "consistency": (level + 0.1 * seed + 0.05 * ends).tolist(),
        "top1": (0.2 * ends).tolist(),
    }


def test_curves_are_averaged_part_by_part(planned, write_cell):
    folder, plan = planned("curves", seeds=(0, 1))
    co2 = plan.grids["curves"].variants[1].name
    curves = {"moco": lambda seed: log(seed, 0.5), co2: lambda seed: log(seed, 0.2)}
    fill(write_cell, folder, plan, "curves", {"moco": {0: 1.0, 1: 2.0}, co2: {0: 1.0, 1: 2.0}}, curves)
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


def test_columns_round_and_keep_gaps():
    rows = [{"kind": "train", "step": 1, "x": 1.23456789}, {"kind": "train", "step": 2, "y": float("nan")}]
    assert columns(rows) == {"step": [1, 2], "x": [1.23457, None], "y": [None, None]}


def test_every_study_has_a_figure_and_the_same_records_give_the_same_one(planned, write_cell):
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
    for mark in (">0.1<", ">0.3<", ">1<", ">3<", ">10<"):
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


def test_a_study_without_records_has_a_table_and_no_figure(planned):
    folder, plan = planned("alpha", "claim", "curves", "transfer")
    for study in plan.grids:
        results = report_study(folder, plan, study)
        assert not list(folder.glob(f"{study}.svg"))
        assert "Cells still missing" in (folder / f"{study}.md").read_text()
        assert all(row["n"] == 0 for row in rows_of(results))


def test_a_figure_of_records_that_are_gone_goes_too(planned, write_cell):
    folder, plan = planned("claim")
    write_cell(folder, plan, "claim", "moco", 0, {"linear.top1": 1.0, "knn.top1": 1.0})
    report_study(folder, plan, "claim")
    assert len(list(folder.glob("claim.[sp]*g"))) == 2
    (folder / "cells" / "moco-s0.json").unlink()
    report_study(folder, plan, "claim")
    assert not list(folder.glob("claim.[sp]*g"))


def test_without_matplotlib_the_tables_are_written_and_the_reader_told(planned, monkeypatch, capsys):
    folder, plan = planned("claim")
    monkeypatch.setitem(__import__("sys").modules, "co2.study.figures", None)
    monkeypatch.setattr("builtins.__import__", _without("matplotlib", "co2.study.figures", __import__), raising=True)
    report_study(folder, plan, "claim")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert (folder / "claim.md").is_file()


def _without(missing, module, real):
    def load(name, *arguments, **options):
        if name == module:
            raise ImportError(f"No module named '{missing}'", name=missing)
        return real(name, *arguments, **options)

    return load


def test_the_page_has_everything_and_keeps_what_people_wrote(planned, write_cell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, plan = planned("claim", "alpha", seeds=(0, 1, 2))
    co2 = plan.grids["claim"].variants[1].name
    fill(write_cell, folder, plan, "claim", {"moco": MOCO, co2: CO2})
    (folder / "notes.md").write_text("What the data are.\n")
    (folder / "claim.notes.md").write_text("It did not reproduce **because**.\n")
    page = tmp_path / "docs" / "RESULTS.md"
    page.parent.mkdir()
    (page.parent / "RESULTS.notes.md").write_text("In short: yes.\n")
    relative = folder.relative_to(tmp_path)
    assert write_page([relative], page.relative_to(tmp_path)) == page.relative_to(tmp_path)
    text = page.read_text()
    for part in ("In short: yes.", "What the data are.", "It did not reproduce **because**."):
        assert text.count(part) == 1, part
    assert text.count("**64.17 ± 1.26**") == 2  # in both studies: they share the cell
    assert text.index("In short") < text.index("What the data") < text.index("64.17") < text.index("did not reproduce")
    assert "```\nco2 study claim alpha --data shapes:40:16 --base demo-co2 --epochs 2 --set " in text
    for link in ("../results/claim.svg", "../results/cells", "../results/claim.csv", "../results/study.json"):
        assert f"({link})" in text
        assert (page.parent / link).exists()
    assert "alpha.svg" in text
    write_page([relative], page.relative_to(tmp_path))
    assert page.read_text() == text
    assert (folder / "notes.md").read_text() == "What the data are.\n"


@pytest.mark.parametrize(
    ("notes", "heading", "begins"),
    [
        ("In short: yes.", "# Results", "In short"),
        ("# How they were chosen\n\nIn short: well.", "# How they were chosen", "In short"),
        ("# How they were chosen", "# How they were chosen", "##"),
        ("## In short\n\nYes.", "# Results", "## In short"),
    ],
)
def test_notes_may_begin_with_the_heading_of_the_page(planned, tmp_path, notes, heading, begins):
    folder, _ = planned("alpha", folder=tmp_path / "results")
    (tmp_path / "page.notes.md").write_text(notes + "\n")
    _mark, first, made, then, *_ = write_page([folder], tmp_path / "page.md").read_text().split("\n\n")
    assert first == heading
    assert made.startswith("Made from the records by")
    assert then.startswith(begins)


def test_parts_of_a_page_are_called_by_what_tells_them_apart(planned, tmp_path):
    own = {"epochs": 3, "base": "demo-co2", "set": ()}
    folders = {
        name: planned("vary", folder=tmp_path / name, vary=("encoder.groups=[2]",), **{**own, **changes})[0]
        for name, changes in {
            "two": {"epochs": 2},
            "co2": {},
            "moco": {"set": ("objective.alpha=0",)},
            "validated": {"validate": True},
            "wider": {"validate": True, "set": ("views.size=20",)},
            "faster": {"validate": True, "set": ("views.size=20", "optimisation.learning_rate=0.5")},
            "again": {"validate": True, "set": ("views.size=20", "optimisation.learning_rate=0.5")},
        }.items()
    }
    text = write_page(list(folders.values()), tmp_path / "page.md").read_text()
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    judged = "judged on 10% of the training images"
    assert titles == [
        "shapes:40:16, 2 epochs",
        "shapes:40:16, 3 epochs, MoCo + CO2 (α=3, τ=0.4, ramp 1)",
        "shapes:40:16, 3 epochs, MoCo",
        f"shapes:40:16, 3 epochs, learning rate 0.03, 32 pixels, {judged}",
        f"shapes:40:16, 3 epochs, learning rate 0.03, 20 pixels, {judged}",
        f"shapes:40:16, 3 epochs, learning rate 0.5, {folders['faster']}, {judged}",
        f"shapes:40:16, 3 epochs, learning rate 0.5, {folders['again']}, {judged}",
    ]
    anchor = "shapes4016-3-epochs-moco--co2-α3-τ04-ramp-1"
    assert f"- [shapes:40:16, 3 epochs, MoCo + CO2 (α=3, τ=0.4, ramp 1)](#{anchor})\n" in text
    assert text.index(f"- [{titles[-1]}](#") < text.index(f"## {titles[0]}")
    assert "Base: the recipe `demo-co2` as MoCo, with" in text


def test_heads_and_instance_temperatures_tell_studies_apart(planned, tmp_path):
    folders = [
        planned("alpha", folder=tmp_path / str(number), epochs=3, base="demo-co2", set=changes)[0]
        for number, changes in enumerate(
            (
                ("encoder.head=linear",),
                ("encoder.head=mlp", "objective.tau_instance=0.1"),
                ("encoder.head=mlp", "objective.tau_instance=0.2"),
            )
        )
    ]
    text = write_page(folders, tmp_path / "page.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## shapes:40:16, 3 epochs, linear head",
        "## shapes:40:16, 3 epochs, MLP head, instance temperature 0.1",
        "## shapes:40:16, 3 epochs, MLP head, instance temperature 0.2",
    ]
    assert "groups of batch statistics, a linear head, an instance temperature of" in text
    assert "groups of batch statistics, an MLP head, an instance temperature of 0.2, a learning rate" in text


def test_a_batch_tells_studies_apart_and_not_the_learning_rate_that_follows_it(planned, tmp_path):
    folders = [
        planned("alpha", folder=tmp_path / str(size), epochs=3, base="demo-co2", set=(f"batch_size={size}",))[0]
        for size in (8, 16)
    ]
    text = write_page(folders, tmp_path / "page.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["## shapes:40:16, 3 epochs, batch 8", "## shapes:40:16, 3 epochs, batch 16"]


def test_a_warm_up_tells_studies_apart(planned, tmp_path):
    folders = [
        planned("alpha", folder=tmp_path / f"warm {share}", set=(f"optimisation.warm_up={share}",))[0]
        for share in (0, 0.05)
    ]
    text = write_page(folders, tmp_path / "page.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["## shapes:40:16, 2 epochs, no warm-up", "## shapes:40:16, 2 epochs, warm-up 5%"]
    assert text.count("warmed up over the first 5% of the run;") == 1


def test_views_that_grow_tell_studies_apart(planned, tmp_path):
    folders = [
        planned("alpha", folder=tmp_path / name, epochs=3, set=("views.size=32", f"views.earlier_sizes={sizes}"))[0]
        for name, sizes in (("all alike", "[]"), ("growing", "[16,24]"))
    ]
    text = write_page(folders, tmp_path / "page.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["## shapes:40:16, 3 epochs, 32 pixels", "## shapes:40:16, 3 epochs, 16 then 24 then 32 pixels"]
    assert text.count("views of 16 then 24 then 32 pixels, crops") == 1


def test_a_page_says_what_a_command_takes_since_its_recipe_has_changed(planned, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    own = {"base": "co2-small", "epochs": None, "set": ("views.size=16", "encoder.stem=small-stride-2")}
    vary = {"vary": ("optimisation.weight_decay=[0.1,0.2]",)}
    folder, plan = planned("vary", "claim", **own, **vary)
    assert "has changed" not in write_page([folder], page).read_text()
    today = recipes.get("co2-small").edit(
        epochs=7,
        views={"size": 64, "crop_scale": (0.5, 1.0)},
        encoder={"stem": "imagenet"},
        optimisation={"weight_decay": 0.3, "schedule": "constant"},
        monitoring={"log_every": 3},
    )
    recipe = recipes.RECIPES["co2-small"]
    monkeypatch.setitem(recipes.RECIPES, "co2-small", replace(recipe, build=lambda: today))
    text = write_page([folder], page).read_text()
    said = re.search(r"The recipe has changed since: add `(.*)` to have the same settings today\.", text)
    words = shlex.split(said[1])
    assert words == [
        *("--epochs", "200", "--set", "views.crop_scale=[0.08, 1.0]"),
        *("--set", "optimisation.weight_decay=0.0005", "--set", "optimisation.schedule=cosine"),
    ]
    more = (*own["set"], *(value for option, value in zip(words[::2], words[1::2], strict=True) if option == "--set"))
    again = planned("vary", "claim", folder=tmp_path / "again", **{**own, "epochs": 200, "set": more}, **vary)[1]
    same = replace(again.base, monitoring=plan.base.monitoring)
    assert same == plan.base


def test_a_page_says_where_negatives_come_from(planned, tmp_path):
    folder, _ = planned("vary", base="simclr-small", set=("views.size=16",), vary=("batch_size=[8]",))
    text = write_page([folder], tmp_path / "page.md").read_text()
    assert ", negatives from the batch itself, one group of batch statistics, an MLP head" in text


def test_a_page_says_that_a_recipe_is_gone(planned, monkeypatch, tmp_path):
    folder, _ = planned("claim")
    monkeypatch.delitem(recipes.RECIPES, "demo-co2")
    assert "There is no recipe `demo-co2` any more." in write_page([folder], tmp_path / "page.md").read_text()


def test_a_page_says_whose_minutes_it_counts(planned, write_cell, tmp_path):
    folder, plan = planned("curves")
    write_cell(folder, plan, "curves", "moco", 0, {"knn.top1": 1.0, "linear.top1": 2.0})
    time = {"wall": 1740.0, "steps": 1.0, "sittings": 1}
    co2 = plan.grids["curves"].variants[1].name
    page = write_page([folder], tmp_path / "page.md")
    assert "A cell took 60 seconds on average by its own clock, on cpu." in page.read_text()
    write_cell(folder, plan, "curves", co2, 0, {"knn.top1": 1.0, "linear.top1": 2.0}, seconds=time)
    assert "A cell took 15 minutes on average by its own clock (30 minutes in all, where cells that ran at once" in (
        write_page([folder], page).read_text()
    )


def test_links_of_a_page_lead_to_folders_with_any_name(planned, tmp_path):
    folder, _ = planned("claim", folder=tmp_path / "a (b) #1")
    text = write_page([folder], tmp_path / "page.md").read_text()
    assert "](a%20%28b%29%20%231/study.json)" in text


def test_a_folder_whose_name_is_no_text_is_reported_on(planned, tmp_path):
    folder, _ = planned("claim", folder=tmp_path / "not \udcff text", out=str(tmp_path / "not \udcff text"))
    text = write_page([folder], tmp_path / "page.md").read_text()
    assert f"co2 study report '{tmp_path}/not \\udcff text'" in text
    assert (folder / "claim.md").is_file()


def test_a_page_that_someone_else_wrote_is_left_alone(planned, tmp_path):
    folder, _ = planned("claim")
    page = tmp_path / "RESULTS.md"
    page.write_text("# Mine\n")
    with pytest.raises(UserError, match="left alone"):
        write_page([folder], page)
    assert page.read_text() == "# Mine\n"
    with pytest.raises(UserError, match="holds no study"):
        write_page([tmp_path], tmp_path / "other.md")


def test_damaged_records_are_named(tmp_path):
    path = tmp_path / "moco-s0.json"
    assert read_record(path) is None
    for text in ("", "[]", "{}", '{"settings": {"epochs": "many"}}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"moco-s0.json"):
            read_record(path)


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
    np.testing.assert_allclose(np.asarray(curve.get_xdata(), dtype=float), [0.1, 0.3, 1, 3, 10])
    np.testing.assert_allclose(np.asarray(curve.get_ydata(), dtype=float), [60.6, 60.8, 61.5, 63.5, 70.5])


def test_a_figure_over_a_setting_has_a_panel_for_each_accuracy_on_one_scale(planned, write_cell):
    folder, plan = planned("alpha", seeds=(0,))
    for place, variant in enumerate(plan.grids["alpha"].variants):
        numbers = {"knn.top1": 50.0 + 0.1 * place, "linear.top1": 60.0 + 2 * place}
        curves = {"train": log(0, 0.5), "epoch": {"epoch": [4.0], "knn_embedding_top1": [0.7 - 0.01 * place]}}
        write_cell(folder, plan, "alpha", variant.name, 0, numbers, curves=curves)
    panels = {axes.get_ylabel(): axes for axes in figures._over_setting(gather(folder, plan, "alpha")).axes}
    assert list(panels) == [LINEAR.heading, "kNN top-1 (%)", "kNN top-1 of embeddings (%)"]
    (embeddings,) = [container[0] for container in panels["kNN top-1 of embeddings (%)"].containers]
    np.testing.assert_allclose(np.asarray(embeddings.get_ydata(), dtype=float), [69, 68, 67, 66, 65])
    spans = [high - low for low, high in (axes.get_ylim() for axes in panels.values())]
    assert spans == pytest.approx([spans[0]] * 3)


def test_every_panel_over_a_setting_has_its_own_means_with_bars_and_the_baseline_a_band(planned, write_cell):
    folder, plan = planned("alpha", seeds=(0, 1))
    numbers = np.arange(6)
    means = {LINEAR: 60.0 + numbers, KNN: 50.0 - numbers, KNN_EMBEDDING: 70.0 + numbers % 3}
    around = {LINEAR: 0.5 + 0.1 * numbers, KNN: 0.9 - 0.1 * numbers, KNN_EMBEDDING: 0.2 + 0.05 * numbers}
    baseline, *placed = plan.grids["alpha"].variants
    assert (baseline.name, len(placed)) == ("moco", 5)
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
    assert list(curve.get_ydata()) == [61, 62, 63, 64, 65]
    report_study(folder, plan, "alpha")
    assert (folder / "alpha.png").is_file()


def test_both_settings_together_are_a_line_for_each_tau(planned, write_cell):
    folder, plan = planned("alpha-tau", seeds=(0,))
    variants = plan.grids["alpha-tau"].variants
    for place, variant in enumerate(variants[:-1]):  # the last point of the last line is still missing
        write_cell(folder, plan, "alpha-tau", variant.name, 0, {"knn.top1": 50.0, "linear.top1": 60.0 + place})
    axes = figures._over_setting(gather(folder, plan, "alpha-tau")).axes[0]
    curves = {container.get_label(): container[0] for container in axes.containers}
    assert list(curves) == ["τ_con = 0.02", "τ_con = 0.04", "τ_con = 0.07", "τ_con = 0.1", "τ_con = 0.2"]
    assert list(curves["τ_con = 0.04"].get_ydata()) == [66, 67, 68, 69, 70]
    assert list(curves["τ_con = 0.2"].get_xdata()) == [0.1, 0.3, 1, 3]
    assert len({curve.get_color() for curve in curves.values()}) == 5


def test_a_setting_that_learns_nothing_does_not_press_the_others_together(planned, write_cell):
    folder, plan = planned("alpha", seeds=(0,))
    for variant, linear in zip(plan.grids["alpha"].variants, (60.0, 61.0, 62.0, 63.0, 62.0, 10.0), strict=True):
        write_cell(folder, plan, "alpha", variant.name, 0, {"knn.top1": 50.0, "linear.top1": linear})
    axes = figures._over_setting(gather(folder, plan, "alpha")).axes[0]
    assert axes.get_ylim()[0] > 55
    (curve,) = [container[0] for container in axes.containers]
    assert list(curve.get_ydata())[:4] == [61, 62, 63, 62]
    assert "10.0" in [text.get_text() for text in axes.texts]  # said where the arrow is


def test_an_interrupted_run_logs_more_lines_and_is_compared_all_the_same(planned, write_cell):
    folder, plan = planned("curves", seeds=(0,))
    ours, theirs = plan.grids["curves"].variants[1].name, plan.grids["curves"].variants[0].name
    numbers = {"knn.top1": 1.0, "linear.top1": 2.0}
    write_cell(folder, plan, "curves", theirs, 0, numbers, log(0, 0.5))
    write_cell(folder, plan, "curves", ours, 0, numbers, log(0, 0.2, lines=11))
    assert "is below the baseline's in 10 of 10 equal parts" in markdown_text(gather(folder, plan, "curves"))


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


def test_no_curve_runs_through_the_legend(planned, write_cell):
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
