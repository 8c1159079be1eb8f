"""Means, deviations and paired tests against what one computes by hand and with scipy; the tables."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from co2.measures.numbers import spread
from co2.study import figures
from co2.study.published import PUBLISHED, published_for
from co2.study.report import gather
from co2.study.tables import compare, csv_text, markdown_text

MOCO = {0: 60.0, 1: 62.0, 2: 61.0}
CO2 = {0: 63.0, 1: 64.0, 2: 65.5}


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


def test_the_tables_of_a_study(planned, fill, table_of):
    folder, plan = planned("claim", seeds=(0, 1, 2))
    co2 = plan.grids["claim"].variants[1].name
    fill(folder, plan, "claim", {"moco": MOCO, co2: CO2})
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
    assert set(table) == {"MoCo", "MoCo + CO2 (α=0.3, τ=0.1)"}  # the others are in the list of what is missing
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


def test_what_cells_are_judged_by_besides_has_columns_where_it_was_measured(planned, write_cell, table_of):
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


def test_a_cell_that_lacks_an_evaluation_counts_for_what_it_has(planned, write_cell, table_of):
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
    for ten in ("CIFAR10", "cifar-10-batches-py", "/data/cifar/cifar10.pack", "cifar100/../cifar_10"):
        assert published_for(ten, measures) == published_for(ten, measures, classes=10) != []
        assert published_for(ten, measures, classes=100) == []
    for either in ("/data/cifar/cifar-100-python", "cifar/CIFAR100", "cifar", "/data/cifar/train"):
        assert published_for(either, measures) == published_for(either, measures, classes=100) == []
    assert published_for("cifar", measures, classes=10) == published_for("cifar10", measures)
    assert len(published_for("my/pictures", frozenset({"svm.mAP_11point", "segmentation.mIoU"}))) == 8
    assert len(PUBLISHED) == len(set(PUBLISHED))


@pytest.mark.parametrize(("classes", "stands"), [(10, True), (100, False)])
def test_records_say_which_cifar_it_is_where_its_name_does_not(planned, write_cell, classes, stands):
    folder, plan = planned("claim", data="/data/cifar", epochs=200)
    data = {"name": "cifar", "train": 50000, "bank": 50000, "test": 10000, "classes": classes, "validate": None}
    write_cell(folder, plan, "claim", "moco", 0, {"knn.top1": 50.0, "linear.top1": 60.0}, data=data)
    assert ("| MoCo | kNN top-1 (%) | 84.7 | 50.00 |" in markdown_text(gather(folder, plan, "claim"))) == stands


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


def test_consistency_losses_at_several_temperatures_are_said_not_to_compare(planned, write_cell):
    folder, plan = planned("tau", seeds=(0,), taus=(0.1, 0.2))
    said = "L_con is measured at each row's own τ_con (0.1 for MoCo)."
    numbers = {"knn.top1": 50.0, "linear.top1": 60.0}
    for variant in plan.grids["tau"].variants:
        assert said not in markdown_text(gather(folder, plan, "tau"))  # until the row at 0.2 has been measured
        write_cell(folder, plan, "tau", variant.name, 0, numbers)
    assert said in markdown_text(gather(folder, plan, "tau"))
