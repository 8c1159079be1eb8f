"""`co2 evaluate` as a person meets it, and the same from Python."""

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys

import pytest
from PIL import Image

from co2.cli import main
from co2.data.shapes import write_shapes
from co2.engine.pretrain import pretrain
from co2.errors import UserError
from co2.evaluation import presets, suite
from co2.evaluation.presets import PROTOCOLS, settings_of
from co2.evaluation.protocol import Evaluation, Spread, spread_over_runs

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
    assert record["details"]["made_with"]["command"].startswith("co2 evaluate knn")
    assert {"co2", "torch", "device", "seconds"} <= record["details"]["made_with"].keys()


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
    assert "There is no 'nothing'" in refused(capsys, "knn", "nothing", "--data", "shapes")
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


def test_spread_over_runs():
    runs = [Evaluation("knn", "a", "b", {"top1": value}) for value in (1.0, 2.0, 6.0)]
    assert spread_over_runs(runs) == {"top1": Spread(3.0, pytest.approx(7**0.5))}
    assert str(spread_over_runs(runs)["top1"]) == "3.00 ± 2.65"
    assert str(spread_over_runs(runs[:1])["top1"]) == "1.00"


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
    assert all(f"step-{3 * epoch:09d}" in printed for epoch in range(1, 7))
    summary = json.loads((run / "evaluation" / "summary-label-free.json").read_text())
    assert len(summary["results"]) == 6
    assert all("knn_top1" in row["numbers"] for row in summary["results"])
    followed = summary["rank_correlation_with_knn"]
    assert followed.keys() == {"alignment", "uniformity", "rankme", "neighbour_agreement"}
    assert all(value is None or -1 <= value <= 1 for value in followed.values())
