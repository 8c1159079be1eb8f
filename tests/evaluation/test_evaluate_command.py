"""`co2 evaluate` as a person meets it, and the same from Python."""

import dataclasses
import errno
import json
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

import co2
from co2.checkpoint import checkpoints, save_backbone
from co2.cli import main
from co2.data.shapes import write_shapes
from co2.engine.pretrain import pretrain
from co2.errors import UserError
from co2.evaluation import knn, linear, presets, semi_supervised, suite
from co2.evaluation.presets import PROTOCOLS, settings_of
from co2.evaluation.progress import Progress
from co2.evaluation.protocol import Evaluation, spread_over_runs
from co2.evaluation.subject import open_subject
from co2.measures.numbers import Spread
from co2.networks.backbones import build_backbone

ROOT = Path(__file__).parents[2]
CPU = ["--device", "cpu", "--workers", "0"]


@pytest.fixture
def short(monkeypatch):
    """Quick presets that are quicker still."""
    quicker = {
        "semi-supervised": {"epochs": 2, "milestones": (1,), "fractions": (0.1,)},
        "linear": {"strengths": (0.1, 0.01)},
        "svm": {"costs": (1.0,)},
        "detection": {"iterations": 2, "milestones": (1,), "batch_size": 2, "statistics_batches": 1, "warmup": 1},
        "segmentation": {"epochs": 1, "batch_size": 4, "crop": 48},
    }
    for name, changes in quicker.items():
        protocol = PROTOCOLS[name]
        monkeypatch.setitem(PROTOCOLS, name, protocol._replace(quick=dataclasses.replace(protocol.quick, **changes)))


def refused(capsys, *words):
    assert main(["evaluate", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_help_and_presets_are_answered_without_torch():
    code = (
        "import sys\nfrom co2.cli import main\n"
        "main(['evaluate']); main(['evaluate', 'linear', '--protocol', 'paper', '--print'])\n"
        "main(['evaluate', 'all', '--print'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy imports'"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for name in PROTOCOLS:
        assert name in text


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("preset", ["paper", "quick"])
def test_every_preset_can_be_printed(name, preset, capsys):
    assert main(["evaluate", name, "--protocol", preset, "--print"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(dataclasses.asdict(settings_of(name, preset))))
    module = __import__(f"co2.evaluation.{PROTOCOLS[name].module}", fromlist=["PAPER"])
    assert settings_of(name, preset) is (module.PAPER if preset == "paper" else module.QUICK)


@pytest.mark.parametrize("preset", ["paper", "quick"])
def test_the_presets_of_all_protocols_can_be_printed_at_once(preset, capsys):
    assert main(["evaluate", "all", "--protocol", preset, "--print"]) == 0
    expected = {name: dataclasses.asdict(settings_of(name, preset)) for name in PROTOCOLS}
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected))


def test_single_settings_can_be_changed(capsys):
    assert main(["evaluate", "linear", "--protocol", "paper", "--epochs", "7", "--milestones", "3", "--print"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["epochs"], printed["milestones"], printed["learning_rate"]) == (7, [3], 15.0)


def test_of_several_presets_the_last_one_counts(capsys):
    for words, solver in {
        ("--protocol", "paper", "--protocol", "quick"): "lbfgs",
        ("--protocol", "quick", "--protocol=paper"): "sgd",
        ("--protocol=paper",): "sgd",
        ("--protocol=paper", "--protocol=quick"): "lbfgs",
    }.items():
        assert main(["evaluate", "linear", *words, "--print"]) == 0
        assert json.loads(capsys.readouterr().out)["solver"] == solver


@pytest.mark.parametrize("name", [*PROTOCOLS, "all"])
def test_a_protocol_alone_asks_for_a_subject(name, capsys):
    assert "Say what to evaluate" in refused(capsys, name)


@pytest.mark.parametrize(
    "words",
    [
        "knn --query-images -2",
        "knn --bank-images -5",
        "knn --temperature nan",
        "knn --temperature 0",
        "knn --k 0",
        "linear --protocol paper --learning-rate nan",
        "linear --protocol paper --learning-rate -1",
        "linear --protocol paper --momentum -0.5",
        "linear --protocol paper --momentum nan",
        "linear --protocol paper --weight-decay -1",
        "linear --protocol paper --weight-decay nan",
        "linear --protocol paper --batch-size 1",
        "linear --protocol paper --milestones -5 60",
        "linear --crop-scale 0 1",
        "linear --crop-scale nan 1",
        "linear --crop-scale 0.5 2",
        "linear --crop-scale 1 0.5",
        "semi-supervised --crop-scale 0 1",
        "semi-supervised --fractions 0.1 0",
        "semi-supervised --fractions",
        "semi-supervised --milestones -1",
        "detection --milestones -1",
        "segmentation --milestones nan",
        "linear --strengths nan",
        "linear --strengths 0.1 inf",
        "semi-supervised --learning-rate nan",
        "semi-supervised --head-learning-rate -1",
        "semi-supervised --baseline-learning-rate nan",
        "semi-supervised --momentum 1",
        "semi-supervised --weight-decay nan",
        "svm --costs nan",
        "svm --costs inf",
        "svm --costs 0",
        "svm --iterations 0",
        "svm --positive-weight -1",
        "svm --seed 5000000000",
        "detection --statistics-batches -3",
        "detection --regions-per-image 0",
        "detection --anchors-per-image 0",
        "detection --learning-rate nan",
        "detection --momentum -1",
        "detection --weight-decay -1",
        "segmentation --channels 0",
        "segmentation --dilation 0",
        "segmentation --conv5-dilation 0",
        "segmentation --scales 0.001 0.001",
        "segmentation --learning-rate -1",
        "segmentation --weight-decay nan",
        "label-free --images 2",
        "knn --seed -1",
        "linear --seed 99999999999999999999999999",
        "knn --view-size -3",
        "knn --view-size 0",
    ],
)
def test_settings_out_of_their_range_are_told_in_one_sentence(words, capsys, tmp_path):
    name, *options = words.split()
    option = next(word for word in options if word.startswith("--") and word != "--protocol")
    rest = ["--view-size", "32", "--voc", tmp_path, "--out", tmp_path, *CPU]
    subject = ["random:co2/resnet10-narrow", "--data", "shapes:40:32"]
    try:
        code = main(["evaluate", name, *subject, *map(str, rest), *options])
    except SystemExit as end:  # of the parser, as for every setting that is wrong by itself
        code = end.code
    assert code == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    spelt = f"(?:{option}|{option.removeprefix('--').replace('-', '_')})"
    assert re.search(rf"{spelt} must be |takes a {spelt} from", told)


def test_settings_that_would_do_nothing_are_refused(capsys, tmp_path):
    rest = ["random:co2/resnet10-narrow", "--data", "shapes:40:32", "--view-size", "32", "--out", tmp_path, *CPU]
    sgd = {"--epochs": "5", "--learning-rate": "1", "--batch-size": "64", "--milestones": "3", "--momentum": "0.5"}
    for option, value in (sgd | {"--weight-decay": "1e-4", "--decay": "0.5"}).items():
        answer = refused(capsys, "linear", *rest, option, value)
        assert f"{option} would do nothing with --solver lbfgs" in answer
        assert "--solver sgd" in answer
    assert "--epochs and --batch-size would" in refused(capsys, "linear", *rest, "--epochs=100", "--batch-size", "64")
    for options in (["--solver", "sgd", "--crops", "2"], ["--protocol", "paper", "--strengths", "1"]):
        assert "would do nothing with --solver sgd" in refused(capsys, "linear", *rest, *options)
    idle = {
        "knn --ks 5 10": "--ks would do nothing without --best-k",
        "knn --best-k --k 5": "--k would do nothing with --best-k",
        "linear --crops 0 --plain --crop-scale 0.5 1": "--crop-scale would do nothing with --crops 0",
        "semi-supervised --baseline-epochs 5 --baseline-learning-rate 1": "--baseline-epochs and "
        "--baseline-learning-rate would do nothing without --baseline",
        "detection --warmup 0 --warmup-factor 0.1": "--warmup-factor would do nothing with --warmup 0",
        "detection --no-extra-norm --proposal-gradient 1": "--proposal-gradient would do nothing with --no-extra-norm",
        "svm --costs 1 --held-out 0.5": "--held-out would do nothing with a single cost",
    }
    for words, why in idle.items():
        name, *options = words.split()
        assert f"{name}: {why}" in refused(capsys, name, *rest, *options)
    with pytest.raises(UserError, match="--epochs would do nothing"):
        suite.evaluate("linear", "random:co2/resnet10-narrow", data="shapes:40:32", epochs=3)


def test_a_training_that_ends_before_its_milestones_is_told(capsys, tmp_path):
    words = "evaluate linear random:co2/resnet10-narrow --data shapes:40:32 --view-size 32 --protocol paper --epochs"
    rest = ["--out", str(tmp_path), *CPU]
    assert main([*words.split(), "1", *rest]) == 0
    told = capsys.readouterr().err
    assert "linear: training is over before it comes to 60 and 80 of its milestones" in told
    assert "--milestones" in told
    assert main([*words.split(), "2", "--milestones", "1", *rest]) == 0
    assert "milestones" not in capsys.readouterr().err
    for protocol, presets_of in PROTOCOLS.items():
        assert not suite.late_milestones(protocol, presets_of.paper)
        assert not suite.late_milestones(protocol, presets_of.quick)
    for protocol, changes in {
        "semi-supervised": {"epochs": 12},
        "detection": {"iterations": 2000},
        "segmentation": {"milestones": (0.7, 1.5)},
    }.items():
        assert len(suite.late_milestones(protocol, dataclasses.replace(PROTOCOLS[protocol].paper, **changes))) >= 1


def test_one_protocol_on_a_run_folder(pretrained_run, tmp_path, capsys):
    out = tmp_path / "records"
    words = ["evaluate", "knn", pretrained_run, "--against", "random", "--runs", "2", "--out", out, *CPU]
    assert main(list(map(str, words))) == 0
    table = capsys.readouterr().out
    assert "top1" in table
    assert "±" in table  # random weights are drawn anew for each run
    files = sorted(path.name for path in out.iterdir())
    assert [name for name in files if name.startswith("knn-random")] == ["knn-random-s0.json", "knn-random-s1.json"]
    assert len(files) == 4  # one of the trained backbone, in which nothing is random, and the summary
    summary = json.loads((out / "summary-knn.json").read_text())
    by_subject = {row["subject"]: row for row in summary["results"]}
    trained = by_subject[str(pretrained_run)]
    assert trained["runs"] == 1
    assert trained["numbers"]["top1"]["mean"] > by_subject["random"]["numbers"]["top1"]["mean"]
    [record] = [json.loads((out / name).read_text()) for name in files if "run-s0" in name]
    assert record["data"] == "shapes:600:32"  # what the run was trained on, since nothing else was said
    assert record["settings"]["k"] == 200
    assert record["preset"] == "quick"
    random = json.loads((out / "knn-random-s0.json").read_text())
    assert random["architecture"] == record["architecture"]
    assert random["architecture"].keys() == {"backbone", "stem", "view_size", "mean", "std"}
    assert random["architecture"]["backbone"] == "co2/resnet10-narrow"
    assert record["details"]["made_with"]["command"].startswith("co2 evaluate knn")
    assert {"co2", "torch", "device", "seconds"} <= record["details"]["made_with"].keys()


def test_knn_of_embeddings_is_what_the_run_itself_measured(tiny, tmp_path, capsys):
    measured = {"bank_images": 200, "query_images": 100}
    run = pretrain(tiny("demo-co2", data="shapes:300:16", monitoring=measured), out=tmp_path / "run")
    words = ["evaluate", "knn", str(run), "--bank-images", "200", "--query-images", "100", "--device", "cpu"]
    assert main([*words, "--embeddings"]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "epoch"][-1]
    (path,) = (run / "evaluation").glob("knn-*.json")
    record = json.loads(path.read_text())
    assert record["numbers"]["top1"] == pytest.approx(100 * last["knn_embedding_top1"])
    assert record["architecture"]["embeddings"] == json.loads((run / "config.json").read_text())["method"]["dimension"]
    assert main(words) == 0  # of features, which have a record of their own
    (other,) = set((run / "evaluation").glob("knn-*.json")) - {path}
    assert json.loads(other.read_text())["numbers"]["top1"] == pytest.approx(100 * last["knn_top1"])
    assert last["knn_top1"] != last["knn_embedding_top1"]


@pytest.mark.parametrize("name", ["semi-supervised", "detection", "segmentation"])
def test_what_trains_the_backbone_has_no_use_for_embeddings(pretrained_run, name, capsys):
    assert main(["evaluate", name, str(pretrained_run), "--embeddings"]) == 2
    told = "the backbone, without the head that embeddings come out of. Embeddings are judged by knn, linear, svm"
    assert f"{name} trains {told}" in capsys.readouterr().err
    subject = open_subject(str(pretrained_run), embeddings=True)  # however it comes by its head
    with pytest.raises(co2.UserError, match=told):
        co2.evaluate(name, subject)


def test_all_judges_embeddings_by_what_can(pretrained_run, tmp_path, capsys, short):
    words = ["evaluate", "all", str(pretrained_run), "--embeddings", "--out", str(tmp_path), "--device", "cpu"]
    assert main([*words, "--against", "none"]) == 0
    assert "Left out: semi-supervised. semi-supervised trains the backbone" in capsys.readouterr().out
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*-s0.json")]
    assert {record["protocol"] for record in records} == {"knn", "linear", "label-free"}
    assert all(record["architecture"]["embeddings"] for record in records)


def test_several_runs_are_summed_up_by_mean_and_standard_deviation(pretrained_run, tmp_path, capsys):
    words = ["linear", pretrained_run, "--data", "shapes:120:32", "--runs", "3", "--seed", "4", "--out", tmp_path]
    assert main(["evaluate", *map(str, words), "--crops", "1", "--strengths", "0.1", *CPU]) == 0
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("linear-*.json"))]
    assert [record["settings"]["seed"] for record in records] == [4, 5, 6]
    [row] = json.loads((tmp_path / "summary-linear.json").read_text())["results"]
    assert row["runs"] == 3
    found = [record["numbers"]["top1"] for record in records]
    mean, deviation = statistics.fmean(found), statistics.stdev(found)
    assert deviation > 0  # each seed shows other crops
    assert row["numbers"]["top1"] == pytest.approx({"mean": mean, "deviation": deviation})
    assert f"{mean:.2f} ± {deviation:.2f}" in capsys.readouterr().out


def test_a_file_with_the_record_of_another_protocol_is_not_written_over(pretrained_run, tmp_path, capsys):
    one = tmp_path / "one.json"
    words = [str(pretrained_run), "--data", "shapes:120:32", "--out", str(one), *CPU]
    assert main(["evaluate", "knn", *words]) == 0
    before = one.read_bytes()
    assert main(["evaluate", "linear", *words]) == 2
    assert "one.json holds the record of knn, which would be lost" in capsys.readouterr().err
    assert one.read_bytes() == before
    assert main(["evaluate", "knn", *words, "--k", "3"]) == 0  # tried again with something else
    assert json.loads(one.read_text())["settings"]["k"] == 3


def test_runs_that_are_done_are_kept_when_a_later_one_fails(pretrained_run, tmp_path, monkeypatch, capsys):
    real = linear.evaluate

    def fails(*words, seed, **more):
        if seed == 2:
            raise co2.UserError("Something else.")
        return real(*words, seed=seed, **more)

    monkeypatch.setattr(linear, "evaluate", fails)
    words = ["linear", pretrained_run, "--data", "shapes:120:32", "--runs", "3", "--out", tmp_path]
    assert main(["evaluate", *map(str, words), "--crops", "1", "--strengths", "0.1", *CPU]) == 2
    assert "Something else." in capsys.readouterr().err
    assert [json.loads(path.read_text())["settings"]["seed"] for path in sorted(tmp_path.glob("*.json"))] == [0, 1]


def test_a_record_of_an_unfinished_run_says_after_how_many_steps(pretrained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(pretrained_run, run)
    (run / "backbone.safetensors").unlink()
    shutil.rmtree(run / "evaluation", ignore_errors=True)
    [last] = checkpoints(run)[-1:]
    state = torch.load(last, weights_only=True)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    for step in (3, 12, 12):
        torch.save(state | {"step": step}, run / "checkpoints" / f"step-{step:09d}.pt")
        assert main(["evaluate", "knn", str(run), "--data", "shapes:120:32", *CPU]) == 0
    records = [json.loads(path.read_text()) for path in (run / "evaluation").glob("knn-*.json")]
    assert sorted(record["details"]["after_steps"] for record in records) == [3, 12]


def test_subjects_of_any_name_have_their_column_and_their_record(pretrained_run, tmp_path, capsys):
    folder = tmp_path.joinpath(*["long" * 20] * 4, "[/]mine")  # no markup, and too long for the name of a file
    folder.parent.mkdir(parents=True)
    folder.symlink_to(pretrained_run)
    words = ["knn", folder, "--data", "shapes:60:32", "--out", tmp_path / "records", *CPU]
    assert main(["evaluate", *map(str, words)]) == 0
    assert "[/]mine" in capsys.readouterr().out.replace("\n", "")
    [record] = (tmp_path / "records").glob("knn-*-mine-s0.json")
    assert json.loads(record.read_text())["subject"] == str(folder)


def test_a_single_file_of_records(tmp_path, capsys):
    subject = ["random:co2/resnet10-narrow", "--view-size", "16", "--data", "shapes:60:16"]
    out = tmp_path / "deep" / "knn.json"
    assert main(["evaluate", "knn", *subject, "--out", str(out), *CPU]) == 0
    assert json.loads(out.read_text())["protocol"] == "knn"
    assert main(["evaluate", "knn", *subject, "--runs", "2", "--out", str(out), *CPU]) == 0
    assert [record["settings"]["seed"] for record in json.loads(out.read_text())] == [0, 1]


def test_records_of_other_data_or_settings_stand_beside_each_other(tmp_path, capsys):
    subject = ["random:co2/resnet10-narrow", "--view-size", "16", "--out", str(tmp_path), *CPU]

    def names(*words):
        assert main(["evaluate", "knn", *subject, *words]) == 0
        return sorted(path.name for path in tmp_path.glob("knn-*"))

    usual = "knn-random-co2-resnet10-narrow-s0.json"
    assert names("--data", "shapes:60:16") == [usual]
    first = (tmp_path / usual).read_text()
    assert names("--data", "shapes:60:16") == [usual]  # the same again takes its place
    paper = names("--data", "shapes:60:16", "--protocol", "paper")
    assert paper == ["knn-paper-random-co2-resnet10-narrow-s0.json", usual]
    assert json.loads((tmp_path / paper[0]).read_text())["preset"] == "paper"
    assert json.loads((tmp_path / "summary-knn-paper.json").read_text())["preset"] == "paper"
    others = names("--data", "shapes:70:16")
    assert len(others) == 3
    assert names("--data", "shapes:70:16") == others
    assert len(names("--data", "shapes:60:16", "--k", "3")) == 4
    kept = json.loads((tmp_path / usual).read_text())
    assert (kept["data"], kept["settings"]) == ("shapes:60:16", json.loads(first)["settings"])
    (tmp_path / usual).write_text("[1, 2]")  # no record: nothing to keep
    assert len(names("--data", "shapes:60:16")) == 4


def test_the_records_in_this_repository_are_records():
    with tarfile.open(ROOT / "results" / "records" / "evaluation.tar.xz") as archive:
        found = [archive.extractfile(name).read() for name in archive.getnames() if name.endswith("-s0.json")]
    assert found
    for text in found:
        record = Evaluation(**json.loads(text))
        assert (record.preset, record.architecture) == ("", {})


def test_records_that_cannot_be_written_do_not_take_the_numbers_along(tmp_path, capsys, monkeypatch):
    subject = ["random:co2/resnet10-narrow", "--view-size", "16", "--data", "shapes:60:16", *CPU]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("co2.evaluation.protocol.write_atomically", full)
    for out in (tmp_path / "records", tmp_path / "knn.json"):
        assert main(["evaluate", "knn", *subject, "--out", str(out)]) == 1
        printed = capsys.readouterr()
        assert "top1" in printed.out
        assert "No space left on device" in printed.err
        assert "Traceback" not in printed.err
    (tmp_path / "folder.json").mkdir()
    assert "is a folder" in refused(capsys, "knn", *subject, "--out", tmp_path / "folder.json")


def test_too_little_memory_is_told_plainly_and_leaves_a_protocol_out(tmp_path, capsys, monkeypatch):
    subject = ["random:co2/resnet10-narrow", "--view-size", "16", "--data", "shapes:60:16", *CPU]

    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for module in (knn, linear, semi_supervised):
        monkeypatch.setattr(module, "evaluate", exhausted)
    for name, knob in {"knn": "--storage", "linear": "--crops", "semi-supervised": "--batch-size"}.items():
        assert main(["evaluate", name, *subject, "--out", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert f"{name}: the memory is not enough" in told
        assert knob in told
    assert main(["evaluate", "all", *subject, "--against", "none", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Left out: knn. knn: the memory is not enough" in printed
    assert "rankme" in printed

    def broken(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(knn, "evaluate", broken)
    with pytest.raises(RuntimeError, match="something else"):
        main(["evaluate", "knn", *subject, "--out", str(tmp_path)])


def test_all_runs_everything_that_the_data_allow(pretrained_run, tmp_path, capsys, short):
    write_shapes(str(tmp_path / "voc"), layout="voc", count=40, size=64)
    write_shapes(str(tmp_path / "folder"), layout="folder", count=200, size=32)
    words = ["evaluate", "all", pretrained_run, "--voc", tmp_path / "voc", "--data", tmp_path / "folder", *CPU]
    assert main([*map(str, words), "--out", str(tmp_path / "records")]) == 0
    printed = capsys.readouterr().out
    assert "Left out" not in printed
    summary = json.loads((tmp_path / "records" / "summary.json").read_text())
    assert {(row["protocol"], row["subject"]) for row in summary["results"]} == {
        (protocol, subject) for protocol in PROTOCOLS for subject in (str(pretrained_run), "random")
    }
    for number in ("top1", "top5_10%", "mAP_11point", "mAP_area", "AP50", "mIoU", "rankme"):
        assert number in printed


def test_all_says_what_is_left_out_and_why(pretrained_run, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    for index in range(12):
        Image.new("RGB", (40, 40), (20 * index, 0, 255 - 20 * index)).save(tmp_path / "photos" / f"{index}.png")
    words = ["evaluate", "all", pretrained_run, "--data", tmp_path / "photos", "--against", "none", *CPU]
    assert main([*map(str, words), "--out", str(tmp_path / "records")]) == 0
    printed = capsys.readouterr().out
    assert "label-free" in printed
    for left_out in ("knn", "linear", "semi-supervised"):
        assert f"Left out: {left_out}. {left_out} needs labels" in printed
    for left_out in ("svm", "detection", "segmentation"):
        assert f"Left out: {left_out}. {left_out} needs PASCAL VOC's layout" in printed
    left_out = json.loads((tmp_path / "records" / "summary-label-free.json").read_text())["left_out"]
    assert len(left_out) == 6


def test_mistakes_are_told_plainly(capsys, tmp_path, pretrained_run):
    assert "Did you mean 'linear'" in refused(capsys, "liner", "random")
    assert "Name the protocol first" in refused(capsys, "--data", "shapes")
    assert "Say what to evaluate" in refused(capsys, "knn", "--data", "shapes")
    assert "needs images" in refused(capsys, "knn", "random:co2/resnet10-narrow", "--out", tmp_path, *CPU)
    assert "needs PASCAL VOC's layout" in refused(capsys, "svm", pretrained_run, "--out", tmp_path, *CPU)
    assert "--checkpoints is for label-free" in refused(capsys, "knn", "random", "--checkpoints")
    assert "--runs" in refused(capsys, "knn", pretrained_run, "--runs", "0", "--out", tmp_path, *CPU)
    assert "There is no backbone 'nothing'" in refused(capsys, "knn", "nothing", "--data", "shapes")
    (tmp_path / "file").touch()
    assert "Give another --out" in refused(capsys, "knn", pretrained_run, "--out", tmp_path / "file" / "x", *CPU)
    nothing = refused(capsys, "all", "random:co2/resnet10-narrow", "--view-size", "32", "--out", tmp_path, *CPU)
    assert "Nothing could be evaluated" in nothing


def write_pictures(folder, count=4):
    folder.mkdir(parents=True)
    for index in range(count):
        Image.new("RGB", (24, 24), (50 * index, 0, 255 - 50 * index)).save(folder / f"{index}.png")


def test_bad_data_are_told_plainly_by_every_protocol(capsys, tmp_path):
    rest = ["--view-size", "32", "--out", tmp_path / "records", *CPU]

    def answer(protocol, *words, subject="random:co2/resnet10-narrow"):
        return refused(capsys, protocol, subject, *words, *rest)

    write_pictures(tmp_path / "unlabelled")
    write_pictures(tmp_path / "single" / "train" / "cat")
    for part, classes in {"train": ("cat", "dog"), "val": ("cat", "dog", "owl")}.items():
        for name in classes:
            write_pictures(tmp_path / "absent" / part / name)
    for protocol in ("knn", "linear", "semi-supervised"):
        unlabelled = answer(protocol, "--data", tmp_path / "unlabelled")
        assert f"{protocol} needs labels" in unlabelled
        assert "PATH/train/CLASS/*.jpg" in unlabelled
        assert "needs labels" in answer(protocol, "--data", tmp_path / "single")  # one folder tells nothing apart
        assert "'owl'" in answer(protocol, "--data", tmp_path / "absent")
    write_shapes(str(tmp_path / "voc"), layout="voc", count=20, size=32)
    year = tmp_path / "voc" / "VOCdevkit" / "VOC2012"
    for protocol in ("svm", "detection", "segmentation"):
        assert "is not in VOC's layout. Expected there: VOC" in answer(protocol, "--voc", tmp_path / "unlabelled")
    for protocol in ("detection", "segmentation"):
        assert "fewer than one batch of 16" in answer(protocol, "--voc", tmp_path / "voc")
    shutil.rmtree(year / "SegmentationClass")
    assert "it should hold the masks of train, as NAME.png" in answer("segmentation", "--voc", tmp_path / "voc")
    shutil.rmtree(year / "Annotations")
    for protocol in ("svm", "detection"):
        assert "images have no annotation" in answer(protocol, "--voc", tmp_path / "voc")


def test_bad_checkpoints_are_told_plainly(capsys, tmp_path):
    import torch
    from torchvision.models import resnet18

    weights = {f"module.encoder_q.{key}": value for key, value in resnet18().state_dict().items()}
    path = tmp_path / "moco.pth.tar"
    torch.save({"arch": "resnet34", "state_dict": weights}, path)
    other = refused(capsys, "knn", path, "--data", "shapes:60:32", *CPU)
    assert "not those of torchvision/resnet34" in other
    assert "layer1.2.conv1.weight" in other
    torch.save({"arch": "resnet18", "state_dict": weights, "by": tmp_path}, path)  # a path is no plain value
    more = refused(capsys, "knn", path, "--data", "shapes:60:32", *CPU)
    assert "holds more than tensors and plain values" in more
    assert "refused" in more


def test_the_same_from_python(pretrained_run, tmp_path):
    [result] = suite.evaluate("knn", pretrained_run, data="shapes:100:32", device="cpu", workers=0, k=3)
    assert (result.protocol, result.data, result.details["k"]) == ("knn", "shapes:100:32", 3)
    first, second = suite.evaluate(
        "linear", pretrained_run, data="shapes:100:32", runs=2, seed=5, device="cpu", workers=0, flips=False
    )
    assert [first.settings["seed"], second.settings["seed"]] == [5, 6]
    with pytest.raises(UserError, match="Did you mean 'epochs'"):
        suite.evaluate("linear", pretrained_run, data="shapes:100:32", epoch=3)
    with pytest.raises(UserError, match="There is no protocol"):
        presets.settings_of("svn", "quick")


def test_python_takes_what_the_command_line_takes(pretrained_run, tmp_path, monkeypatch):
    rest = {"device": "cpu", "workers": 0}
    write_shapes(str(tmp_path / "folder"), layout="folder", count=60, size=32)
    [result] = co2.evaluate("knn", pretrained_run, data=tmp_path / "folder", view_size=16, **rest)
    assert (result.data, result.settings["view_size"], result.preset) == (str(tmp_path / "folder"), 16, "quick")
    monkeypatch.setenv("HOME", str(pretrained_run.parent))
    [result] = co2.evaluate("knn", f"~/{pretrained_run.name}", preset="paper", **rest)
    assert (result.data, result.preset) == ("shapes:600:32", "paper")
    [result] = co2.evaluate("knn", pretrained_run, settings=settings_of("knn", "paper"), **rest)
    assert result.preset == ""  # who knows
    with pytest.raises(UserError, match=r"no settings 'papr'.*Did you mean 'paper'"):
        co2.evaluate("knn", pretrained_run, preset="papr", **rest)


def test_all_from_python(tmp_path, monkeypatch, short):
    said = []

    class Told(Progress):
        def say(self, words):
            said.append(words)

    rest = {"data": "shapes:60:16", "view_size": 16, "device": "cpu", "workers": 0}
    found = co2.evaluate("all", "random:co2/resnet10-narrow", progress=Told(), **rest)
    assert {one.protocol for one in found} == {"knn", "linear", "semi-supervised", "label-free"}
    assert any(words.startswith("Left out: svm. svm needs PASCAL VOC's layout") for words in said)
    with pytest.raises(UserError, match=r"Nothing could be evaluated\.\n  knn: knn needs images"):
        co2.evaluate("all", "random:co2/resnet10-narrow", **rest | {"data": ""})
    with pytest.raises(UserError, match="one protocol at a time"):
        co2.evaluate("all", "random:co2/resnet10-narrow", epochs=3, **rest)


def test_data_that_a_run_names_but_that_are_not_here(pretrained_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(pretrained_run, run)
    config = run / "config.json"
    config.write_text(config.read_text().replace("shapes:600:32", "data/elsewhere"))
    told = refused(capsys, "knn", run, "--out", tmp_path, *CPU)
    assert "data/elsewhere" in told
    assert "config.json" in told
    assert "give --data" in told
    config.write_bytes(b"\xff\xfe")
    damaged = "config.json: The configuration does not describe an experiment: not JSON"
    assert damaged in refused(capsys, "knn", run, "--out", tmp_path, *CPU)


@pytest.mark.parametrize(("recipe", "expected"), [("co2-v1", 5e-4), ("co2-v2", 1e-4), ("co2-small", 1e-4)])
def test_the_paper_fine_tunes_backbones_of_moco_v1_with_a_weight_decay_of_their_own(
    recipe, expected, tmp_path, capsys, monkeypatch
):
    experiment = co2.recipes.get("demo-moco").edit(recipe=recipe)
    save_backbone(tmp_path / "backbone.safetensors", build_backbone("co2/resnet10-narrow", "small", 32), experiment)

    def settings_alone(subject, data, settings, *, seed, **_):
        plain = dataclasses.asdict(settings) | {"seed": seed}
        return Evaluation("semi-supervised", subject.name, "", {"top1": 1.0}, plain)

    monkeypatch.setattr(semi_supervised, "evaluate", settings_alone)

    def weight_decay(*words):
        out = tmp_path / "record.json"
        rest = ["semi-supervised", str(tmp_path), "--data", "shapes:60:32", "--out", str(out), *CPU]
        assert main(["evaluate", *rest, *words]) == 0
        return json.loads(out.read_text())["settings"]["weight_decay"]

    assert weight_decay("--protocol", "paper") == expected
    printed = "".join(capsys.readouterr())
    assert ("weight_decay is 0.0005" in printed) == (expected == 5e-4)
    assert weight_decay("--protocol", "paper", "--weight-decay", "1e-4") == 1e-4
    assert weight_decay("--protocol", "paper", "--weight-decay=0.2") == 0.2
    assert weight_decay() == 1e-4
    [result] = co2.evaluate("semi-supervised", tmp_path, data="shapes:60:32", preset="paper", device="cpu", workers=0)
    assert result.settings["weight_decay"] == expected


def test_spread_over_runs():
    runs = [Evaluation("knn", "a", "b", {"top1": value}) for value in (1.0, 2.0, 6.0)]
    assert spread_over_runs(runs) == {"top1": Spread(3.0, pytest.approx(7**0.5), 3)}
    assert spread_over_runs(runs)["top1"].text() == "3.00 ± 2.65"
    assert spread_over_runs(runs[:1])["top1"].text() == "1.00"


def test_records_are_json_for_every_reader(tmp_path):
    odd = Evaluation("svm", "a", "b", {"mAP": float("nan")}, {"costs": (1.0, 2.0)}, {"by_k": {1: float("inf")}})
    odd.write(tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert record["numbers"]["mAP"] is None
    assert record["settings"]["costs"] == [1.0, 2.0]
    assert record["details"]["by_k"] == {"1": None}


def test_how_label_free_measures_follow_knn_over_kept_checkpoints(tiny, tmp_path, capsys):
    experiment = tiny(epochs=6, monitoring={"keep_every": 1, "evaluate_every": 6})
    run = pretrain(experiment, out=tmp_path / "run")
    capsys.readouterr()
    assert main(["evaluate", "label-free", str(run), "--checkpoints", "--images", "40", "--k", "5", *CPU]) == 0
    printed = capsys.readouterr().out
    assert "rank correlation with kNN" in printed
    record = json.loads(next((run / "evaluation").glob("label-free-*.json")).read_text())
    assert (record["data"], record["preset"]) == (experiment.data, "quick")
    assert {"co2", "torch", "device", "seconds", "command"} <= record["details"]["made_with"].keys()
    for words in (["--runs", "2"], ["--against", "random"]):
        assert "leave --runs and --against out" in refused(capsys, "label-free", run, "--checkpoints", *words, *CPU)
    assert all(f"step-{3 * epoch:09d}" in printed for epoch in range(1, 7))
    summary = json.loads((run / "evaluation" / "summary-label-free.json").read_text())
    assert len(summary["results"]) == 6
    assert all("knn_top1" in row["numbers"] for row in summary["results"])
    followed = summary["rank_correlation_with_knn"]
    assert followed.keys() == {"alignment", "uniformity", "rankme", "neighbour_agreement"}
    assert all(value is None or -1 <= value <= 1 for value in followed.values())
