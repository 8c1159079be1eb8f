"""Reading run folders: whole ones, ones that are still being written, and folders that are no runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from co2.errors import UserError
from co2.report.runs import CONFIG, METRICS, read_run, read_runs


def test_file_names_are_those_the_engine_writes() -> None:
    from co2 import checkpoint
    from co2.engine import records

    assert (CONFIG, METRICS) == (checkpoint.CONFIG, records.METRICS)


def test_reads_every_kind_of_row(make_run) -> None:
    folder = make_run("moco", epochs=3)
    run = read_run(folder, name="MoCo", seconds=12.5)
    assert (run.name, run.seconds, run.experiment.epochs) == ("MoCo", 12.5, 3)
    assert len(run.train) == 3 * 24 // 4
    assert [row["epoch"] for row in run.epochs] == [0, 1, 2, 3]
    assert run.advice[0].text.startswith("The loss is rising")
    assert run.epochs_done == 3
    assert read_run(folder).name == "moco"


def test_final_is_the_mean_over_the_last_epoch(make_run) -> None:
    folder = make_run("run", epochs=3)
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    last = [row["instance"] for row in rows if row["kind"] == "train" and row["epoch"] > 2]
    assert len(last) == 6
    assert read_run(folder).final("instance") == pytest.approx(sum(last) / 6, rel=1e-12)


def test_latest_and_untrained_are_kept_apart(make_run) -> None:
    run = read_run(make_run("run", epochs=4, knn=0.5))
    assert run.latest("knn_top1") == pytest.approx(0.5)
    assert run.untrained("knn_top1") == pytest.approx(0.28)
    begun = read_run(make_run("begun", epochs=4, epochs_done=1))
    unlabelled = read_run(make_run("unlabelled", labels=False))
    assert begun.latest("knn_top1") != begun.untrained("knn_top1")
    assert unlabelled.latest("knn_top1") is None


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_an_unfinished_last_line_is_left_out(make_run, cut: int) -> None:
    folder = make_run("run", epochs=2)
    whole = read_run(folder)
    text = (folder / METRICS).read_bytes() + '{"kind": "advice", "step": 99, "epoch": 4.1, "text": "größer'.encode()
    (folder / METRICS).write_bytes(text[: -min(cut, 50)])
    assert read_run(folder).train == whole.train
    assert read_run(folder).advice == whole.advice


def test_a_whole_last_line_without_its_line_end_counts(make_run) -> None:
    folder = make_run("run", epochs=2)
    whole = read_run(folder)
    (folder / METRICS).write_bytes((folder / METRICS).read_bytes().rstrip(b"\n"))
    assert read_run(folder).epochs == whole.epochs


def test_null_values_are_left_out_of_curves(make_run) -> None:
    folder = make_run("run", epochs=2)
    with open(folder / METRICS, "a") as file:
        file.write('{"kind": "train", "step": 49, "epoch": 2.04, "instance": null, "consistency": 0.5}\n')
    run = read_run(folder)
    assert len(run.curve("train", "instance")[1]) == len(run.train) - 1
    assert run.curve("train", "consistency")[1][-1] == 0.5


def test_folders_that_are_no_runs(tmp_path: Path, make_run) -> None:
    with pytest.raises(UserError, match="There is no folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        read_run(tmp_path)
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / CONFIG).symlink_to(CONFIG)
    with pytest.raises(UserError, match=r"config\.json cannot be read: .*symbolic links"):
        read_run(tmp_path / "loop")
    run = make_run("run", epochs=2)
    (run / METRICS).unlink()
    with pytest.raises(UserError, match="not written any measurements yet"):
        read_run(run)
    for config in ("not json", "[1, 2]"):
        (run / CONFIG).write_text(config)
        with pytest.raises(UserError, match="does not describe an experiment"):
            read_run(run)
    (run / CONFIG).write_text('{"epochs": "many"}')
    with pytest.raises(UserError, match="epochs cannot be many: it has to be a whole number"):
        read_run(run)
    (run / CONFIG).write_text('{"flavour": 3}')
    with pytest.raises(UserError, match="flavour"):
        read_run(run)


def test_a_run_that_has_only_measured_the_untrained_network_has_nothing_to_show_yet(make_run) -> None:
    with pytest.raises(UserError, match="not written any measurements yet"):
        read_run(make_run("run", epochs_done=0))


def test_a_broken_line_in_the_middle_is_named(make_run) -> None:
    folder = make_run("run", epochs=2)
    lines = (folder / METRICS).read_text().splitlines()
    lines[4] = lines[4][:20]
    (folder / METRICS).write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="Line 5 of"):
        read_run(folder)


@pytest.mark.parametrize("value", ['"abc"', "[1]", "{}", "NaN", "1" + 400 * "0"])
def test_a_value_that_is_no_number_is_named_by_its_line(make_run, value: str) -> None:
    for kind, measure in (("train", "instance"), ("epoch", "knn_top1"), ("advice", "epoch")):
        folder = make_run(f"{kind}/run", epochs=2)
        lines = (folder / METRICS).read_text().splitlines()
        lines.insert(4, f'{{"kind": "{kind}", "step": 3, "epoch": 1.0, "seconds": 1.0, "{measure}": {value}}}')
        (folder / METRICS).write_text("\n".join(lines) + "\n")
        with pytest.raises(UserError, match="Line 5 of"):
            read_run(folder)


def test_runs_of_the_same_name_are_told_apart(make_run) -> None:
    folders = [make_run("a/run", epochs=2), make_run("b/run", epochs=2), make_run("c/other", epochs=2)]
    assert [run.name for run in read_runs(folders)] == [str(folders[0]), str(folders[1]), "other"]
    with pytest.raises(UserError, match="named twice"):
        read_runs([folders[0], folders[1], folders[0] / ".." / "run"])
