"""Tables and figures about a method with one metric of its own follow from the declaration."""

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from one_metric import Stretching

from co2 import recipes
from co2.errors import UserError
from co2.experiment import Experiment
from co2.study import figures
from co2.study.grids import Variant
from co2.study.records import CellRecord, read_record, write_record
from co2.study.settings import plain_settings
from co2.study.tables import Results, csv_text, markdown_text


def results_of(study):
    base = dataclasses.replace(recipes.get("byol-small"), method=Stretching(), epochs=2)
    variants = (Variant("narrow", "Narrow", {}), Variant("wide", "Wide", {"method.width": 16}, baseline="narrow"))
    records = {}
    for place, variant in enumerate(variants):
        content = {
            "data": {"test": 10, "classes": 10},
            "evaluations": {"linear": {"numbers": {"top1": 60.0 + place}}},
            "curves": {"train": {"epoch": [1.0, 2.0], "stretch": [4.0, 2.5 + place], "rest": [9.0, 9.0]}, "epoch": {}},
        }
        records[variant.name] = {0: CellRecord(Path("none"), base, content)}
    return Results(study, variants, records, {}, base, None)


def test_its_table_has_a_column_for_it_and_none_for_others(table_of):
    text = markdown_text(results_of("vary"))
    table = table_of(text)
    assert table["Narrow"]["S at the end"] == "2.50"
    assert table["Wide"]["S at the end"] == "3.50"
    assert table["Wide"]["Δ linear top-1"] == "+1.00 (n=1)"
    for other in ("L_con", "L_ins", "instance", "consistency"):
        assert other not in text
    rows = list(csv.DictReader(io.StringIO(csv_text(results_of("vary")))))
    assert {row["mean"] for row in rows if row["measure"] == "train.stretch"} == {"2.5", "3.5"}


def test_what_its_level_depends_on_is_said(monkeypatch):
    said = "S is measured at each row's own method.width (8 for Narrow)."
    assert said not in markdown_text(results_of("vary"))
    tied = dataclasses.replace(Stretching.metrics[0], depends_on=("method.width",))
    monkeypatch.setattr(Stretching, "metrics", (tied,))
    assert said in markdown_text(results_of("vary"))


def test_its_curves_are_drawn_in_one_panel():
    results = results_of("curves")
    (panel,) = figures._curves(results).axes
    assert panel.get_ylabel() == "S"
    assert [line.get_ydata().tolist() for line in panel.lines] == [[4.0, 2.5], [4.0, 3.5]]
    assert "below the baseline" not in markdown_text(results)  # no part of its loss may be left out


@pytest.mark.parametrize(("name", "value", "fits"), [("stretch", 40.0, True), ("knn_top1", 40.0, False)])
def test_only_shares_have_to_be_shares(tmp_path, name, value, fits):
    path = tmp_path / "cell.json"
    experiment = dataclasses.replace(recipes.get("byol-small"), method=Stretching())
    curve = {"epoch": [1.0], name: [value]}
    content = {"settings": plain_settings(experiment), "data": {"test": 10}, "evaluations": {}}
    content |= {"seconds": {"wall": 1.0}, "made_with": {"device": "cpu"}, "curves": {"train": curve, "epoch": {}}}
    write_record(path, content)
    if fits:
        assert isinstance(read_record(path).experiment, Experiment)
    else:
        with pytest.raises(UserError, match="from 0 to 1"):
            read_record(path)
