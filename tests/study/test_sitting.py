"""Studies as people run them: real processes, killed, stopped, failing, resumed; and single cells in this process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from PIL import Image

from co2.checkpoint import checkpoints
from co2.cli import main
from co2.data.open import open_data
from co2.data.shapes import write_shapes
from co2.errors import UserError
from co2.experiment import Experiment
from co2.measures.numbers import duration
from co2.study import cell as cells
from co2.study import sitting
from co2.study.cell import Job, work_on
from co2.study.grids import cost_of
from co2.study.plan import all_cells, read_plan
from co2.study.records import record_path, write_record
from co2.study.report import report_study
from co2.study.sitting import Circumstances, data_of, outstanding

PAIR = ["moco-s0", "moco-co2-a0.3-t0.1-s0"]


@pytest.fixture
def study(words_tiny, tmp_path):
    """`co2 study` as a process; returns it when it has ended."""

    def start(*words):
        name, *options_after = words  # of an option that is given twice, the last one counts
        command = [sys.executable, "-m", "co2.cli", "study", name, *words_tiny, *options_after]
        command += ["--out", str(tmp_path / "results")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def finished(process):
    output, _ = process.communicate(timeout=300)
    assert "Traceback" not in output, output
    return process.returncode, output


def jobs_of(plan, study, folder, **changes):
    """The job files of a study's cells, as a sitting writes them."""
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    for cell in all_cells(plan, [study]):
        experiment = cell.experiment.edit(
            data=data_of(plan), out=str(runs / cell.name), resume="auto", device="cpu", workers=0
        )
        job = Job(
            cell=cell.name,
            experiment=experiment.to_json(),
            protocols=cell.protocols,
            record=str(record_path(folder, cell.name)),
            data=plan.base.data,
            validate=plan.validate,
            command="co2 study",
            **{"voc": "", "view_size": 224, "keep_checkpoints": False, **changes},
        )
        path = runs / f"{cell.name}.job.json"
        job.write(path)
        yield cell, path


def test_a_study_from_beginning_to_end_and_again(study, tmp_path, read_json, words_tiny, capsys):
    code, output = finished(study("curves", "--seeds", "0", "--jobs", "2"))
    assert code == 0, output
    folder = tmp_path / "results"
    for name in PAIR:
        record = read_json(folder / "cells" / f"{name}.json")
        assert record["seed"] == 0
        assert set(record["evaluations"]) == {"knn", "linear"}
        assert 0 <= record["evaluations"]["linear"]["numbers"]["top1"] <= 100
        assert record["evaluations"]["knn"]["details"]["k"] >= 1
        logged = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        train = [row for row in logged if row["kind"] == "train"]
        assert record["curves"]["train"]["step"] == [row["step"] for row in train] == [1, 2, 3, 4, 5, 6]
        assert record["curves"]["train"]["consistency"] == pytest.approx(
            [row["consistency"] for row in train], rel=1e-5
        )
        assert record["curves"]["epoch"]["epoch"] == [0, 1, 2]
        assert record["made_with"]["torch"]
        assert record["made_with"]["command"].startswith("co2 study curves --data shapes:40:16")
        assert record["seconds"]["wall"] > record["seconds"]["steps"] > 0
        assert record["data"] == {"name": "shapes:40:16", "train": 40, "bank": 40, "test": 1000, "classes": 10} | {
            "validate": None
        }
        assert Experiment.from_json(json.dumps(record["settings"])).method.alpha == (0.3 if "co2" in name else 0.0)
        assert str(tmp_path) not in json.dumps({**record, "made_with": ""})
        assert (folder / "runs" / name / "backbone.safetensors").is_file()
        assert not checkpoints(folder / "runs" / name)
    assert (folder / "runs" / ".gitignore").read_text().endswith("*\n")
    assert {path.name for path in folder.glob("curves.*")} == {"curves.md", "curves.csv", "curves.svg", "curves.png"}
    assert "MoCo + CO2 (α=0.3, τ=0.1) | 1 |" in output

    # Nothing is computed a second time, even where the runs are gone: the records say it all.
    shutil.rmtree(folder / "runs")
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    words = [*words_tiny, "--out", str(folder)]
    assert main(["study", "curves", "--seeds", "0", *words]) == 0
    assert "2 of 2 cells are done already" in capsys.readouterr().out
    assert before == {path.name: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    assert not [path for path in (folder / "runs").iterdir() if path.is_dir()]

    # Another question about the same runs begins with what is there: only label smoothing and others are left.
    assert main(["study", "claim", "--seeds", "0", "--plan", *words]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name:<40} done" in shown for name in PAIR)
    assert "2 of 7 cells are done" in shown

    # Other settings are refused by name, and nothing is changed.
    for wrong in (["--set", "method.tau=0.3"], ["--epochs", "3"], ["--validate"]):
        assert main(["study", "curves", "--seeds", "0", *words, *wrong]) == 2
        assert "--redo" in capsys.readouterr().err
    assert main(["study", "curves", "--seeds", "0", *words, "--evaluation", "knn.k=3"]) == 2
    assert "knn.k: 200 in the record, 3 asked for" in capsys.readouterr().err
    assert main(["study", "curves", "--seeds", "0", *words, "--data", "shapes:41:16"]) == 2
    assert "data, train: 40 in the record, 41 asked for" in capsys.readouterr().err

    # Tables alone need neither data nor settings.
    (folder / "curves.md").unlink()
    assert main(["study", "curves", "--report-only", "--out", str(folder)]) == 0
    assert "Cells still missing" not in (folder / "curves.md").read_text()
    assert main(["study", "alpha", "--report-only", "--out", str(folder)]) == 2


@pytest.mark.gpu
def test_several_cells_share_one_gpu(study, tmp_path, read_json):
    code, output = finished(study("curves", "--seeds", "0", "1", "--jobs", "4", "--device", "cuda"))
    assert code == 0, output
    records = [read_json(path) for path in (tmp_path / "results" / "cells").glob("*.json")]
    assert len(records) == 4
    for record in records:
        assert record["made_with"]["device"] != "cpu"
        assert record["made_with"]["cuda"]
        assert record["curves"]["train"]["step"] == [1, 2, 3, 4, 5, 6]


def wait_until(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_study_goes_on_where_it_stood(study, tmp_path, read_json):
    """The study's own process is killed in the middle of a run: the run stops with a checkpoint and nothing is
    orphaned. The same command goes on with it to the end, and every step is made once."""
    folder, run = tmp_path / "results", tmp_path / "results" / "runs" / "moco-s0"
    words = ["curves", "--seeds", "0", "--only", "moco", "--epochs", "30", "--set", "monitoring.evaluate_every=30"]
    process = study(*words)
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_text().count('"train"') > 3, process)
    owner = int((run / ".lock").read_text().split()[1])
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while alive(owner) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(owner)
    step = int(checkpoints(run)[-1].stem.removeprefix("step-"))
    assert 3 < step < 90
    assert not record_path(folder, "moco-s0").exists()

    code, output = finished(study(*words))
    assert code == 0, output
    assert "moco-s0 goes on from its last checkpoint" in output
    record = read_json(record_path(folder, "moco-s0"))
    assert record["curves"]["train"]["step"] == list(range(1, 91))
    assert f"Going on from step {step:,} of 90" in (folder / "runs" / "moco-s0.log").read_text()
    assert record["seconds"]["sittings"] == 2


# A sitting with processes that only behave like cells.

STAND_IN = """
import json, os, pathlib, shutil, signal, sys, time
job = json.load(open(sys.argv[1]))
behaviour = json.loads(os.environ["BEHAVIOUR"])[job["cell"]]
run = pathlib.Path(json.loads(job["experiment"])["out"])
run.mkdir(exist_ok=True)
(run / "began").touch()
if behaviour == "diverge":
    print("Some numbers.")
    sys.exit("co2: The loss became NaN.")
if behaviour == "vanish":
    print("epoch 19/40  L_ins 5.039", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "taken" and not (run / "tried").exists():
    (run / "tried").touch()
    sys.exit(os.EX_TEMPFAIL)
if behaviour in ("do", "taken"):
    shutil.copy(run.parent / (run.name + ".prepared"), job["record"])
    sys.exit(0)
if behaviour == "meet":  # the other one, which must be there at the same time
    end = time.monotonic() + 120
    while len(list(run.parent.glob("*/began"))) < 2:
        if time.monotonic() > end:
            sys.exit("the other one has not begun")
    shutil.copy(run.parent / (run.name + ".prepared"), job["record"])
    sys.exit(0)
if behaviour == "resist":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run / "metrics.jsonl").write_text('{"kind": "train", "epoch": 1.0, "step": 3}\\n')
while True:
    signal.pause()
"""


@pytest.fixture
def sit_with(planned, write_cell, tmp_path, monkeypatch):
    """A sitting in which each cell behaves as told; returns how it went and the folder."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(sitting, "COMMAND", (sys.executable, str(script)))

    def work(behaviours, **circumstances):
        folder, plan = planned("curves", seeds=tuple(range(-(-len(behaviours) // 2))))
        runs = folder / "runs"
        runs.mkdir(exist_ok=True)
        cells_ = plan.cells("curves")[: len(behaviours)]
        for cell in cells_:
            write_cell(
                folder, plan, "curves", cell.variant, cell.experiment.seed, {"knn.top1": 50.0, "linear.top1": 60.0}
            )
            record_path(folder, cell.name).rename(runs / f"{cell.name}.prepared")
        told = dict(zip((cell.name for cell in cells_), behaviours, strict=True))
        monkeypatch.setenv("BEHAVIOUR", json.dumps(told))
        here = Circumstances(folder, runs, device="cpu", **circumstances)
        outcome = sitting.sit(cells_, 0, plan, here, dict.fromkeys(told, "co2 study"))
        return outcome, folder, list(told)

    return work


def test_cells_that_fail_are_recorded_and_the_others_go_on(sit_with, read_json, planned, capsys):
    outcome, folder, names = sit_with(["diverge", "do", "vanish", "do"])
    assert outcome.failed == [names[0], names[2]]
    assert outcome.done == [names[1], names[3]]
    assert not outcome.left
    diverged, vanished = (read_json(folder / "cells" / f"{names[i]}.failed.json") for i in (0, 2))
    assert diverged == {"cell": names[0], "exit_code": 1, "error": "Some numbers.\nco2: The loss became NaN."}
    assert vanished["exit_code"] == -9
    assert vanished["error"].startswith("It was ended by signal 9; most often memory ran out.")
    assert f"{names[0]} failed: co2: The loss became NaN." in capsys.readouterr().out
    plan = read_plan(folder)
    report_study(folder, plan, "curves")
    text = (folder / "curves.md").read_text()
    assert f"- {names[0]}: failed: co2: The loss became NaN." in text
    assert "Cells still missing (2)" in text

    # The next sitting tries again, and what succeeds takes its note away.
    outcome, folder, _ = sit_with(["do"])
    assert outcome.done == [names[0]]
    assert not (folder / "cells" / f"{names[0]}.failed.json").exists()


def test_the_time_limit_stops_cells_in_time_and_begins_no_more(sit_with, capsys):
    started = time.monotonic()
    outcome, folder, names = sit_with(["wait", "resist", "do"], jobs=2, minutes=0.05)
    assert 2.0 < time.monotonic() - started < 30  # three seconds, and what a busy machine adds
    assert sorted(outcome.left) == sorted(names)
    assert not outcome.failed
    assert not list((folder / "cells").iterdir())
    assert not (folder / "runs" / names[2] / "began").exists()
    output = capsys.readouterr().out
    assert f"{names[0]} stopped at epoch 1; it can go on." in output
    assert "The time is up. The same command goes on from here." in output


def test_several_cells_are_worked_on_at_once(sit_with):
    outcome, _, names = sit_with(["meet", "meet"], jobs=2)
    assert sorted(outcome.done) == sorted(names)


OTHER_SITTING = """
import fcntl, pathlib, shutil, sys, time
runs, cell, afterwards = pathlib.Path(sys.argv[1]), *sys.argv[2:]
with open(runs / f"{cell}.lock", "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print("at work", flush=True)
    end = time.monotonic() + 120
    while not (runs / afterwards / "began").exists():
        if time.monotonic() > end:
            sys.exit(f"{afterwards} has not begun")
        time.sleep(0.01)
    shutil.copy(runs / f"{cell}.prepared", runs.parent / "cells" / f"{cell}.json")
"""


@pytest.fixture
def other_sitting(tmp_path):
    """A process that holds a cell until another one has begun, and then leaves its record."""
    processes = []

    def begin(cell, afterwards):
        runs = tmp_path / "results" / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", OTHER_SITTING, str(runs), cell, afterwards]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[0].stdout.readline() == "at work\n"

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_sittings_at_the_same_study_share_out_its_cells(sit_with, other_sitting, capsys):
    other_sitting(PAIR[0], afterwards=PAIR[1])
    outcome, folder, names = sit_with(["diverge", "do"])
    assert names == PAIR
    assert (outcome.done, outcome.failed, outcome.left) == ([PAIR[1]], [], [])
    output = capsys.readouterr().out
    assert f"{PAIR[0]} is being worked on by another sitting." in output
    assert f"{PAIR[0]} has been done by another sitting." in output
    assert record_path(folder, PAIR[0]).is_file()


def test_a_cell_that_two_sittings_begin_at_once_is_no_failure(sit_with):
    outcome, folder, names = sit_with(["taken", "do"])
    assert (sorted(outcome.done), outcome.failed) == (sorted(names), [])
    assert not list(folder.glob("cells/*.failed.json"))


def test_a_killed_run_without_a_checkpoint_begins_again(sit_with, tmp_path, capsys):
    run = tmp_path / "results" / "runs" / PAIR[0]
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"kind": "train", "epoch": 1.0}\n')
    sit_with(["do"])
    assert f"{PAIR[0]} begins" in capsys.readouterr().out


def test_a_signal_to_the_study_stops_its_cells(sit_with, tmp_path):
    def stop_once_begun():
        while not list((tmp_path / "results" / "runs").glob("*/began")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_once_begun, daemon=True).start()
    outcome, folder, names = sit_with(["wait", "do"])
    assert outcome.signal_number == signal.SIGTERM
    assert sorted(outcome.left) == sorted(names)
    assert not list((folder / "cells").iterdir())


# What all cells would run into is told once, before any begins.


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("names", "wrong", "message"),
    [
        (["claim"], ["--device", "cuda"], "--device cpu"),
        (["claim"], ["--set", "batch_size=64"], "--set batch_size="),
        (["transfer"], ["--voc", "nowhere"], "nowhere"),
        (["claim"], ["--runs", "FILE"], "file: File exists. Make room there"),
        (["claim"], ["--out", "FILE/results"], "Not a directory. Make room there"),
        (["claim"], ["--data", "UNLABELLED"], "Give data with a sub-folder for each class"),
    ],
)
def test_mistakes_that_all_cells_share(words_tiny, tmp_path, capsys, names, wrong, message):
    (tmp_path / "file").touch()
    (tmp_path / "unlabelled").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "unlabelled" / "one.png")
    places = {"FILE": str(tmp_path / "file"), "UNLABELLED": str(tmp_path / "unlabelled")}
    for name, place in places.items():
        wrong = [word.replace(name, place) for word in wrong]
    assert main(["study", *names, *words_tiny, "--seeds", "0", "--out", str(tmp_path / "results"), *wrong]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("results/cells/*"))


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_computed(sit_with, monkeypatch):
    monkeypatch.setattr(sitting.os, "access", lambda path, mode: path.name != "cells")
    with pytest.raises(PermissionError, match="cells"):  # which the command line tells in a sentence
        sit_with(["do"])


def test_a_damaged_run_is_named(planned):
    folder, plan = planned("curves")
    run = folder / "runs" / PAIR[0]
    run.mkdir(parents=True)
    (run / "config.json").write_bytes(b"{\xff")
    with pytest.raises(UserError, match=rf"{PAIR[0]}/config.json: .* Delete .*{PAIR[0]} to begin it again"):
        outstanding(plan.cells("curves"), plan, Circumstances(folder, folder / "runs"))


def test_looking_for_the_device_does_not_decide_for_the_cells(planned, monkeypatch):
    """How many queues of the GPU each of them takes is said by who shares it out, not by the study's own process."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    folder, plan = planned("curves")
    outstanding(plan.cells("curves"), plan, Circumstances(folder, folder / "runs"))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


def test_the_plan_shows_what_the_command_would_do(planned, write_cell, words_tiny, capsys):
    folder, plan = planned("curves")
    for variant in plan.grids["curves"].variants:
        write_cell(folder, plan, "curves", variant.name, 0, {"knn.top1": 1.0, "linear.top1": 2.0})
    words = ["study", "curves", *words_tiny, "--seeds", "0", "--out", str(folder), "--plan"]
    assert main(words) == 0
    assert "2 of 2 cells are done" in capsys.readouterr().out
    assert main([*words, "--redo", "--epochs", "3", "--only", "moco"]) == 0
    shown = capsys.readouterr().out
    assert "to do again: its record has other settings (epochs: 2 in the record" in shown
    assert "0 of 1 cells are done" in shown

    run = folder / "runs" / PAIR[0]
    run.mkdir(parents=True)
    (run / "config.json").write_text(plan.cells("curves")[0].experiment.edit(epochs=9).to_json())
    record_path(folder, PAIR[0]).unlink()
    assert main(words) == 0
    assert f"{PAIR[0]:<40} refused without --redo: its run has other settings (epochs: 9 in" in capsys.readouterr().out


def test_redo_says_which_studies_another_source_of_negatives_leaves_nothing_of(planned, capsys):
    folder, _ = planned("claim", "tau", base="co2-small", set=())
    words = ["study", "curves", "--data", "shapes:40:16", "--epochs", "2", "--out", str(folder), "--plan"]
    assert main([*words, "--base", "co2-simclr-small"]) == 2
    assert "method.name: moco in" in capsys.readouterr().err
    assert main([*words, "--base", "co2-simclr-small", "--redo"]) == 0
    assert f"--redo takes claim and tau out of {folder / 'study.json'}: nothing there is for" in capsys.readouterr().out
    assert main([*words, "--base", "co2-small", "--seeds", "7"]) == 0
    assert "takes" not in capsys.readouterr().out


def test_a_study_that_another_sitting_gives_up_is_written_up_all_the_same(
    words_tiny, tmp_path, monkeypatch, planned, capsys
):
    def meanwhile(*words):
        planned("alpha", base="co2-simclr-small", set=())
        return sitting.Outcome()

    monkeypatch.setattr(sitting, "sit", meanwhile)
    assert main(["study", "curves", *words_tiny, "--seeds", "0", "--out", str(tmp_path / "results")]) == 0
    assert "curves: 0 cells, 2 cells missing" in capsys.readouterr().out


# One cell, in this process.


def test_a_stopped_evaluation_is_not_repeated_and_the_record_grows(planned, monkeypatch, read_json):
    folder, plan = planned("curves")
    _, path = next(jobs_of(plan, "curves", folder))
    real, calls = cells.evaluate_runs, []

    def killed_at_linear(protocol, *arguments):
        calls.append(protocol)
        if protocol == "linear" and calls.count("linear") == 1:
            raise KeyboardInterrupt
        return real(protocol, *arguments)

    monkeypatch.setattr(cells, "evaluate_runs", killed_at_linear)
    trained = []
    real_pretrain = cells.pretrain
    monkeypatch.setattr(cells, "pretrain", lambda experiment: trained.append(real_pretrain(experiment)))
    with pytest.raises(KeyboardInterrupt):
        work_on(str(path))
    assert set(read_json(record_path(folder, "moco-s0"))["evaluations"]) == {"knn"}
    assert work_on(str(path)) == 0
    assert calls == ["knn", "linear", "linear"]
    assert len(trained) == 1
    assert set(read_json(record_path(folder, "moco-s0"))["evaluations"]) == {"knn", "linear"}
    assert read_json(record_path(folder, "moco-s0"))["seconds"]["sittings"] == 2


def test_cells_may_be_judged_by_more_later(planned, monkeypatch, read_json):
    folder, plan = planned("curves")
    _, path = next(jobs_of(plan, "curves", folder))
    assert work_on(str(path)) == 0
    before = read_json(record_path(folder, "moco-s0"))["evaluations"]
    monkeypatch.setattr(cells, "pretrain", lambda experiment: pytest.fail("trained again"))
    short = ("linear-paper.epochs=2", "linear-paper.milestones=1", "linear-paper.batch_size=16")
    short += ("semi-supervised.fractions=0.5", "semi-supervised.epochs=2", "semi-supervised.milestones=1")
    also = ("linear-paper", "semi-supervised")
    _, more = planned("curves", folder=folder, also=also, evaluation=(*plan_quick(plan), *short))
    _, path = next(jobs_of(more, "curves", folder))
    assert work_on(str(path)) == 0
    after = read_json(record_path(folder, "moco-s0"))["evaluations"]
    assert list(after) == ["knn", "linear", *also]
    assert (after["knn"], after["linear"]) == (before["knn"], before["linear"])
    assert [after[judge]["settings"]["solver"] for judge in ("linear", "linear-paper")] == ["lbfgs", "sgd"]
    assert len(after["linear-paper"]["details"]["loss_by_epoch"]) == 2
    assert set(after["semi-supervised"]["numbers"]) == {"top1_50%", "top5_50%"}


def test_a_record_is_not_replaced_by_one_that_says_less(planned, write_cell, read_json):
    """A backbone that is gone is trained again for a new evaluation; until that has all that the old record had, the
    old one stays."""
    folder, plan = planned("curves")
    write_cell(folder, plan, "curves", "moco", 0, {"svm.mAP_area": 40.0, "knn.top1": 1.0, "linear.top1": 2.0})
    _, path = next(jobs_of(plan, "curves", folder))
    before = record_path(folder, "moco-s0").read_bytes()
    assert work_on(str(path)) == 0
    assert record_path(folder, "moco-s0").read_bytes() == before


def test_transfer_takes_the_backbones_of_claim(planned, tmp_path, read_json, monkeypatch):
    voc = tmp_path / "voc"
    write_shapes(voc, layout="voc", count=24, size=48)
    quick = ("svm.costs=1", "svm.train=train", "svm.test=val", "detection.train=train", "detection.test=val")
    quick += ("detection.iterations=2", "detection.milestones=1", "detection.batch_size=2")
    quick += ("detection.statistics_batches=1", "detection.warmup=1")
    quick += ("segmentation.train=train", "segmentation.test=val", "segmentation.epochs=1", "segmentation.batch_size=4")
    quick += ("segmentation.crop=48",)
    folder, plan = planned("curves")
    (_, path), *_ = jobs_of(plan, "curves", folder)
    assert work_on(str(path)) == 0
    first = read_json(record_path(folder, "moco-s0"))
    folder, both = planned("curves", "transfer", evaluation=(*plan_quick(plan), *quick), view_size=32)
    todo, done = outstanding(all_cells(both, ["transfer"]), both, Circumstances(folder, folder / "runs"))
    assert [cell.name for cell in todo] == PAIR
    assert not done
    monkeypatch.setattr(cells, "pretrain", lambda experiment: pytest.fail("trained again"))
    process = sitting._Sitting(
        todo[:1],
        0,
        both,
        Circumstances(folder, folder / "runs", voc=str(voc), device="cpu"),
        {"moco-s0": "co2"},
        sitting.Outcome(),
    )
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda command, **options: None)
        process._start(todo[0])
    (path,) = folder.glob(f"runs/moco-s0.{os.getpid()}.job.json")
    assert work_on(str(path)) == 0
    record = read_json(record_path(folder, "moco-s0"))
    assert set(record["evaluations"]) == {"knn", "linear", "svm", "detection", "segmentation"}
    assert record["evaluations"]["knn"] == first["evaluations"]["knn"]
    assert record["backbone_sha256"] == first["backbone_sha256"]
    assert record["evaluations"]["svm"]["settings"]["view_size"] == 32
    assert record["evaluations"]["knn"]["settings"]["view_size"] == 16


def plan_quick(plan):
    """The evaluation settings of a plan as the user would type them."""
    for protocol, settings in plan.grids["curves"].protocols.items():
        for name in {"linear": ("strengths", "iterations", "flips"), "knn": ("query_images",)}[protocol]:
            yield f"{protocol}.{name}={json.dumps(settings[name])}"


def test_a_validation_study_is_judged_on_training_images_that_it_does_not_train_on(planned, read_json):
    folder, plan = planned(
        "curves",
        data="digits",
        validate=True,
        epochs=1,
        set=(
            "batch_size=512",
            "size=16",
            "monitoring.health_images=16",
            "monitoring.bank_images=30",
            "monitoring.query_images=20",
        ),
    )
    assert data_of(plan) == "validation:0.1:0:digits"
    split = open_data(data_of(plan))
    _, path = next(jobs_of(plan, "curves", folder))
    assert work_on(str(path)) == 0
    record = read_json(record_path(folder, "moco-s0"))
    assert record["data"]["train"] == record["data"]["bank"] == len(split.train)
    assert record["data"]["test"] == len(split.test)
    assert record["data"]["train"] + record["data"]["test"] == 1437  # the 360 test images are not among them
    assert record["data"]["validate"] == 0.1
    assert record["evaluations"]["linear"]["details"]["test_images"] == len(split.test)
    assert record["settings"]["data"] == record["data"]["name"] == "digits"


def test_redo_gives_up_records_and_runs_with_other_settings(planned, write_cell, capsys):
    folder, plan = planned("curves")
    write_cell(folder, plan, "curves", "moco", 0, {"knn.top1": 1.0, "linear.top1": 2.0})
    runs = folder / "runs"
    (runs / "moco-s0").mkdir(parents=True)
    cell = plan.cells("curves")[0]
    (runs / "moco-s0" / "config.json").write_text(cell.experiment.edit(epochs=9).to_json())
    (runs / "moco-s0.sessions.json").write_text('[{"began": 1, "ended": 2}]')  # it is a study's
    # The record is what was asked for, so the run does not matter.
    todo, done = outstanding([cell], plan, Circumstances(folder, runs))
    assert (todo, done) == ([], ["moco-s0"])
    _, other = planned("curves", folder=folder, epochs=3)
    cell = other.cells("curves")[0]
    with pytest.raises(UserError, match="moco-s0: epochs: 2 in the record, 3 asked for"):
        outstanding([cell], other, Circumstances(folder, runs))
    todo, done = outstanding([cell], other, Circumstances(folder, runs, redo=True))
    assert ([one.name for one in todo], done) == (["moco-s0"], [])
    assert not record_path(folder, "moco-s0").exists()
    assert not (runs / "moco-s0").exists()
    assert "computed again" in capsys.readouterr().out


def test_redo_with_other_data_trains_again(planned, read_json, capsys):
    folder, plan = planned("curves")
    _, path = next(jobs_of(plan, "curves", folder))
    assert work_on(str(path)) == 0
    first = read_json(record_path(folder, PAIR[0]))
    _, other = planned("curves", folder=folder, data="shapes:60:16")
    cell = other.cells("curves")[0]
    with pytest.raises(UserError, match="data, train: 40 in the record, 60 asked for; data, bank"):
        outstanding([cell], other, Circumstances(folder, folder / "runs"))
    # Another folder of results may have the same runs.
    elsewhere = folder.with_name("elsewhere")
    with pytest.raises(UserError, match=rf"data, train: 40 in .*{PAIR[0]}, 60 asked for"):
        outstanding([cell], other, Circumstances(elsewhere, folder / "runs"))
    outstanding([cell], other, Circumstances(folder, folder / "runs", redo=True))
    assert "is removed" in capsys.readouterr().out
    _, path = next(jobs_of(other, "curves", folder))
    assert work_on(str(path)) == 0
    second = read_json(record_path(folder, PAIR[0]))
    assert second["data"]["train"] == 60
    assert second["backbone_sha256"] != first["backbone_sha256"]
    assert second["seconds"]["sittings"] == 1  # of its own


def test_a_run_of_unknown_data_is_given_up_with_its_record(planned):
    folder, plan = planned("curves")
    _, path = next(jobs_of(plan, "curves", folder))
    assert work_on(str(path)) == 0
    (folder / "runs" / f"{PAIR[0]}.images.json").unlink()  # as runs of earlier versions
    _, other = planned("curves", folder=folder, data="shapes:60:16")
    outstanding(other.cells("curves")[:1], other, Circumstances(folder, folder / "runs", redo=True))
    assert not (folder / "runs" / PAIR[0]).exists()


def test_what_a_run_was_begun_with_is_noted_when_it_begins_alone(planned, read_json):
    folder, plan = planned("curves")
    _, path = next(jobs_of(plan, "curves", folder))
    note, run = folder / "runs" / f"{PAIR[0]}.images.json", folder / "runs" / PAIR[0]
    note.write_text('{"train": 7}')  # of a run that was deleted by hand
    assert work_on(str(path)) == 0
    assert read_json(note)["train"] == 40
    (run / "backbone.safetensors").unlink()
    note.unlink()  # as runs of earlier versions, which goes on
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    assert work_on(str(path)) == 0
    assert not note.exists()


def test_an_evaluation_on_other_data_does_not_count(tmp_path):
    path = tmp_path / "svm.json"
    path.write_text('{"backbone": "b", "data": "voc", "settings": {"k": 1}, "numbers": {}, "details": {}}')
    assert cells._read_evaluation(path, "b", "voc", {"k": 1})
    assert cells._read_evaluation(path, "b", "", {"k": 1})
    assert cells._read_evaluation(path, "b", "other", {"k": 1}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_redo_removes_nothing_when_it_is_refused(planned, write_cell):
    folder, plan = planned("curves")
    write_cell(folder, plan, "curves", "moco", 0, {"knn.top1": 1.0, "linear.top1": 2.0})
    run = folder / "runs" / "moco-s0"
    run.mkdir(parents=True)
    (run / "config.json").write_text(plan.cells("curves")[0].experiment.to_json())
    _, other = planned("curves", folder=folder, epochs=3)
    with pytest.raises(UserError, match="--device cpu"):
        outstanding(other.cells("curves"), other, Circumstances(folder, folder / "runs", redo=True, device="cuda"))
    assert record_path(folder, "moco-s0").exists()
    assert run.exists()


def test_redo_removes_no_run_that_another_sitting_works_on(planned, other_sitting):
    folder, plan = planned("curves")
    run = folder / "runs" / PAIR[0]
    run.mkdir(parents=True)
    (run / "config.json").write_text(plan.cells("curves")[0].experiment.to_json())
    other_sitting(PAIR[0], afterwards="never")
    _, other = planned("curves", folder=folder, epochs=3)
    with pytest.raises(UserError, match=f"{PAIR[0]} is being worked on by another sitting"):
        outstanding(other.cells("curves"), other, Circumstances(folder, folder / "runs", redo=True))
    assert run.exists()


def test_a_record_with_numbers_on_voc_needs_voc_where_the_backbone_is_gone(planned, write_cell):
    folder, plan = planned("curves")
    write_cell(folder, plan, "curves", "moco", 0, {"svm.mAP_area": 40.0})
    here = Circumstances(folder, folder / "runs")
    with pytest.raises(UserError, match=r"moco-s0 has to be trained again: .* by svm, .* give --voc"):
        outstanding(plan.cells("curves"), plan, here)
    (folder / "runs" / "moco-s0").mkdir(parents=True)
    (folder / "runs" / "moco-s0" / "backbone.safetensors").touch()
    todo, _ = outstanding(plan.cells("curves"), plan, here)
    assert [cell.name for cell in todo] == PAIR


def test_a_record_has_the_command_that_made_it_and_no_other(words_tiny, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(sitting, "sit", lambda *words: told.append(words[-1]) or sitting.Outcome())
    for seed in ("0", "1"):
        assert main(["study", "curves", *words_tiny, "--seeds", seed, "--out", str(tmp_path / "results")]) == 0
    plan = read_plan(tmp_path / "results")
    assert len(plan.grids["curves"].command.splitlines()) == 2
    assert "--seeds 0" in told[0]["moco-s0"]
    assert "--seeds 1" in told[1]["moco-s1"]
    assert "--seeds 0" not in told[1]["moco-s1"]


def test_a_killed_session_ended_with_the_last_line_that_it_logged(tmp_path, read_json):
    run = tmp_path / "moco-s0"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    os.utime(run / "metrics.jsonl", (1060, 1060))
    (tmp_path / "moco-s0.sessions.json").write_text('[{"began": 1000, "ended": null}]')
    with cells._session(run, None):
        pass
    killed, last = read_json(tmp_path / "moco-s0.sessions.json")
    assert killed == {"began": 1000, "ended": 1060}
    assert last["ended"] >= last["began"] > 1060


def test_a_record_names_the_commits_that_a_cell_was_begun_with(planned, monkeypatch, read_json):
    """A checkout may be at another commit when hours of training are over."""
    folder, plan = planned("curves", seeds=(0,))
    heads = iter(["aaa", "bbb", "bbb"])
    monkeypatch.setattr(cells, "commit", lambda: next(heads))
    _, path = next(jobs_of(plan, "curves", folder))
    run = path.with_name(path.name.removesuffix(".job.json"))
    with cells._session(run, None):  # a sitting that was stopped before the first step
        pass
    assert work_on(str(path)) == 0
    assert read_json(record_path(folder, run.name))["made_with"]["commit"] == "aaa then bbb"
    assert next(heads) == "bbb"  # asked once, when the process began


def test_a_record_names_what_a_cell_was_trained_with_wherever_it_is_judged_later(planned, monkeypatch, read_json):
    folder, plan = planned("curves")
    _, path = next(jobs_of(plan, "curves", folder))
    record, sessions = record_path(folder, PAIR[0]), folder / "runs" / f"{PAIR[0]}.sessions.json"
    here = cells.made_with(torch.device("cpu"))
    there = here | {"device": "NVIDIA H200", "cuda": "12.8", "torch": "1.0", "date": "2020-02-02"}

    def recorded():
        assert work_on(str(path)) == 0
        made_with = read_json(record)["made_with"]
        assert made_with.keys() == {*here, "commit", "command"}
        return {name: made_with[name] for name in here}

    monkeypatch.setattr(cells, "made_with", lambda device: there)
    assert recorded() == there
    monkeypatch.setattr(cells, "made_with", lambda device: here)
    assert recorded() == there
    record.unlink()
    assert recorded() == there

    # Earlier versions noted it in the record alone.
    noted = [{name: one[name] for name in ("began", "ended", "commit")} for one in read_json(sessions)]
    sessions.write_text(json.dumps(noted))
    assert recorded() == there
    record.unlink()
    assert recorded() == here
    write_record(record, read_json(record) | {"backbone_sha256": "of another training", "made_with": there})
    assert recorded() == here


def test_a_cell_that_was_trained_on_two_devices_names_both(tmp_path):
    run = tmp_path / "moco-s0"
    cpu = {"torch": "2.0", "cuda": None, "device": "cpu", "cores": 2, "date": "2020-02-02"}
    gpu = {"torch": "2.0", "cuda": "12.8", "device": "NVIDIA H200", "cores": 16, "date": "2020-02-03"}
    for trains_with, checkpoint in ((cpu, None), (gpu, 3), (cpu, 6), (None, None)):  # the first left nothing behind
        with cells._session(run, trains_with):
            _log(run, epoch=1.0, step=9, checkpoint=checkpoint)
    assert cells._trained_with(run) == cpu | {"device": "NVIDIA H200 then cpu", "cuda": "12.8"}


def test_two_sittings_do_not_share_a_job_file(planned, monkeypatch):
    folder, plan = planned("curves")
    cell = plan.cells("curves")[0]
    for number in (11, 12):
        monkeypatch.setattr(sitting.os, "getpid", lambda number=number: number)
        here = Circumstances(folder, folder / "runs", device="cpu", workers=number)
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", lambda command, **options: None)
            sitting._Sitting([cell], 0, plan, here, {cell.name: "co2"}, sitting.Outcome())._start(cell)
    jobs = [Job.read(folder / "runs" / f"{cell.name}.{number}.job.json") for number in (11, 12)]
    assert [Experiment.from_json(job.experiment).workers for job in jobs] == [11, 12]


def test_two_processes_do_not_work_on_one_cell(planned, other_sitting):
    folder, plan = planned("curves")
    other_sitting(PAIR[0], afterwards="never")
    _, path = next(jobs_of(plan, "curves", folder))
    with pytest.raises(cells.TakenError, match="Another process is working on") as caught:
        work_on(str(path))
    assert caught.value.exit_code == os.EX_TEMPFAIL  # by which a sitting knows it


def test_time_left_follows_from_what_is_done(planned, monkeypatch):
    folder, plan = planned("claim", seeds=(0,))
    todo = plan.cells("claim")
    work = sitting._Sitting(todo, 0, plan, Circumstances(folder, folder / "runs", jobs=2), {}, sitting.Outcome())
    assert work._time_left() == ""
    work.waiting = todo[1:]  # six cells, of which two cost twice: eight runs
    assert {cell.name for cell in work.waiting if "symmetric" in cell.name}
    work.cost_done, work.seconds_spent = cost_of(todo[0].experiment), 120.0
    assert work._time_left() == " About 8 minutes left."  # of two at once
    work.waiting = todo[2:]  # one is half done, in another two minutes: eight runs less half of one, of 160 s each
    _log(folder / "runs" / todo[1].name, epoch=1.0, step=3)
    work.running = [sitting._Process(todo[1], None, None, None, 0, 0.0, began=time.monotonic() - 120)]
    assert work._time_left() == " About 10 minutes left."
    assert f"{todo[1].name} at epoch 1/2. About" in work._status()
    (folder / "runs" / todo[1].name / "backbone.safetensors").touch()
    assert f"{todo[1].name} being judged." in work._status()
    assert duration(7200) == "2.0 hours"


def test_cells_that_failed_are_not_counted_as_done(planned):
    folder, plan = planned("claim", seeds=(0,))
    outcome = sitting.Outcome()
    work = sitting._Sitting(plan.cells("claim"), 2, plan, Circumstances(folder, folder / "runs"), {}, outcome)
    outcome.done.append("moco-s0")
    assert work._status().startswith("3 of 9 cells done; none running.")
    outcome.failed += ["moco-s1", "moco-s2"]
    assert work._status().startswith("3 of 9 cells done, 2 failed; none running.")


def _log(run, epoch, step, checkpoint=None):
    """What a run has logged last, and its checkpoint."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text(f'{{"kind": "train", "epoch": {epoch}, "step": {step}}}\n')
    if checkpoint is not None:
        (run / "checkpoints" / f"step-{checkpoint}.pt").touch()


def test_a_killed_cell_counts_from_its_checkpoint(planned):
    """What was logged after it is forgotten, and done again."""
    folder, plan = planned("curves", seeds=(0,), epochs=40)
    cell = plan.cells("curves")[0]
    run = folder / "runs" / cell.name
    assert sitting._share_kept(run, cell) == 0
    _log(run, epoch=30.0, step=90)
    assert sitting._share_kept(run, cell) == 0
    _log(run, epoch=30.0, step=90, checkpoint=60)
    assert sitting._share_kept(run, cell) == 0.5
    work = sitting._Sitting([], 0, plan, Circumstances(folder, folder / "runs"), {}, sitting.Outcome())
    process = sitting._Process(cell, None, None, None, 0, sitting._share_kept(run, cell), began=time.monotonic() - 60)
    work.running = [process]
    _log(run, epoch=20.0, step=60)  # it has begun, and logged nothing yet
    assert work._time_left() == ""
    _log(run, epoch=25.0, step=75)
    assert work._time_left() == " About 3 minutes left."


def test_later_epochs_with_larger_views_count_for_more(planned):
    folder, plan = planned("curves", set=("size=16", "earlier_sizes=[8]"), epochs=4)  # 8, 8, 16, 16 pixels
    (cell, _) = plan.cells("curves")
    run = folder / "runs" / cell.name
    run.mkdir(parents=True)
    assert sitting._share_done(run, cell) == 0
    shares = {1: 0.1, 2: 0.2, 2.5: 0.4, 3: 0.6, 4: 1.0, 4.2: 1.0}
    for epoch, share in shares.items():
        (run / "metrics.jsonl").write_text(
            f'{{"kind": "train", "epoch": {epoch}, "step": 9}}\n{{"kind": "tra'
        )  # being written
        assert sitting._share_done(run, cell) == pytest.approx(share)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["clam"], "Did you mean 'claim'"),
        (["--data", "x"], "Name the study first"),
        (["claim", "--data", "shapes:40:16"], "--out"),
        (["claim", "--out", "x"], "give --data"),
        (["claim", "--out", "x", "--report-only"], "nothing to report"),
        (["transfer", "--data", "shapes:40:16", "--out", "x"], "--voc"),
        (["claim", "--data", "nowhere", "--out", "x"], "no file or folder 'nowhere'"),
        (["claim", "--data", "shapes:40:16", "--out", "x", "--only", "mocco"], "There are moco, "),
        (["claim", "--data", "shapes:40:16", "--out", "x", "--jobs", "0"], "--jobs must be at least 1"),
        (["claim", "--data", "shapes:40:16", "--out", "x", "--time-limit", "0"], "--time-limit"),
        (["report"], "at least one folder"),
        (["report", "nowhere"], "holds no study"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
