"""Which records a study takes, which it leaves out, and what it says of those."""

import pytest

from co2.errors import UserError
from co2.study.records import columns, read_record, write_record
from co2.study.report import gather
from co2.study.tables import LINEAR, markdown_text

MOCO = {0: 60.0, 1: 62.0, 2: 61.0}
CO2 = {0: 63.0, 1: 64.0, 2: 65.5}


def test_records_dropped_in_from_elsewhere_are_picked_up_and_others_left_out(planned, write_cell, read_json, fill):
    folder, plan = planned("curves", seeds=(0, 1))
    co2 = plan.grids["curves"].variants[1].name
    fill(folder, plan, "curves", {"moco": MOCO, co2: {0: 63.0, 7: 66.0}})
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


def test_a_record_nobody_planned_is_named_if_it_cannot_be_used(planned, write_cell, read_json, fill):
    folder, plan = planned("curves", seeds=(0,))
    co2 = plan.grids["curves"].variants[1].name
    fill(folder, plan, "curves", {"moco": {0: 60.0, 5: 61.0}, co2: {0: 63.0}})
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


def test_records_of_other_data_are_left_out(planned, write_cell, fill):
    folder, plan = planned("curves", seeds=(0, 1, 2))
    fill(folder, plan, "curves", {"moco": MOCO})
    other = {"name": "other", "train": 50000, "bank": 50000, "test": 10000, "classes": 100, "validate": None}
    write_cell(folder, plan, "curves", "moco", 2, {"linear.top1": 1.0, "knn.top1": 1.0}, data=other)
    results = gather(folder, plan, "curves")
    assert sorted(results.records["moco"]) == [0, 1]
    assert "other data than most (train 50000, bank 50000" in results.missing["moco-s2"]


@pytest.mark.parametrize(
    ("asked", "share", "recorded"),
    [({}, None, 0.1), ({"validate": True}, 0.1, None), ({"validate": True, "validate_share": 0.3}, 0.3, 0.1)],
)
def test_a_record_with_another_share_held_out_is_left_out_and_said_to_be(
    planned, write_cell, asked, share, recorded, fill, table_of
):
    folder, plan = planned("curves", seeds=(0, 1), **asked)
    co2 = plan.grids["curves"].variants[1].name
    fill(folder, plan, "curves", {"moco": {0: 60.0}, co2: {0: 63.0, 1: 64.0}})
    other = {"name": "shapes:40:16", "train": 40, "bank": 40, "test": 1000, "classes": 10, "validate": recorded}
    write_cell(folder, plan, "curves", "moco", 1, {"linear.top1": 1.0, "knn.top1": 1.0}, data=other)
    results = gather(folder, plan, "curves")
    assert sorted(results.records["moco"]) == [0]
    text = markdown_text(results)
    assert table_of(text)["MoCo"][LINEAR.heading] == "60.00"
    said = f"share held out for validation: {recorded} in the record, {share} asked for"
    assert f"- moco-s1: left out: its record has other settings ({said})" in text


def test_columns_round_and_keep_gaps():
    rows = [{"kind": "train", "step": 1, "x": 1.23456789}, {"kind": "train", "step": 2, "y": float("nan")}]
    assert columns(rows) == {"step": [1, 2], "x": [1.23457, None], "y": [None, None]}


def test_damaged_records_are_named(tmp_path):
    path = tmp_path / "moco-s0.json"
    assert read_record(path) is None
    for text in ("", "[]", "{}", '{"settings": {"epochs": "many"}}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"moco-s0.json"):
            read_record(path)
