"""Runs of the version before: four small folders that it wrote, taken up by this one.

The folders in data/ hold two epochs of three steps on rendered pictures, with a network of four to eight channels, and
the checkpoint after the first epoch.
"""

import json
import shutil
from pathlib import Path

import PIL
import pytest
import torch

import co2
from co2 import recipes
from co2.cli import main
from co2.engine.pretrain import pretrain
from co2.evaluation.subject import open_subject
from co2.experiment import Experiment, differences
from co2.networks.backbones import NarrowResNet
from co2.report.page import report_runs
from co2.runs import upgrade

DATA = Path(__file__).parent / "data"
RUNS = {"co2-small": "moco", "co2-v2": "moco", "co2-simclr": "simclr", "co2-insdisc-small": "insdisc"}


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A copy of an old run folder."""
    monkeypatch.setattr(NarrowResNet.__init__, "__defaults__", ((4, 4, 8, 8), 1000))

    def copy(name):
        return Path(shutil.copytree(DATA / name, tmp_path / name))

    return copy


@pytest.mark.parametrize("name", RUNS)
def test_settings_are_those_of_the_recipe_that_it_was_begun_with(name):
    found = Experiment.from_json((DATA / name / "config.json").read_text())
    today = recipes.get(name)
    own = {one: getattr(found.method, one) for one in ("dimension", "queue", "negatives") if hasattr(found.method, one)}
    same = today.edit(
        data=found.data, epochs=2, batch_size=16, size=16, workers=0, device="cpu", out=found.out, method=own,
        network={"backbone": "co2/resnet10-narrow", "stem": "small-stride-2"}, monitoring=found.monitoring,
    )  # fmt: skip
    assert found.method.name == RUNS[name]
    assert differences(found, same) == []


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_an_old_checkpoint_as_the_old_code_did(old, rows, name):
    run = old(name)
    before = rows(run)
    experiment = Experiment.from_json((run / "config.json").read_text())
    pretrain(experiment.edit(resume=True), out=run)
    after = rows(run)
    assert [row["step"] for row in after] == [row["step"] for row in before] == [1, 2, 3, 4, 5, 6]
    # Before version 12 Pillow made views that differ by more than rounding.
    comparable = 6 if int(PIL.__version__.split(".")[0]) >= 12 else 3
    for ours, theirs in zip(after[:comparable], before[:comparable], strict=True):
        for metric in ("loss", "instance", "consistency", "learning_rate"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-3, abs=1e-5), (ours["step"], metric)
    kept = torch.load(run / "checkpoints" / "step-000000006.pt", weights_only=True)
    assert Experiment.from_json(kept["experiment"]) == experiment.edit(resume=True, out=str(run))


@pytest.mark.parametrize("name", RUNS)
def test_old_folders_are_evaluated_exported_and_reported(old, tmp_path, name):
    run = old(name)
    features = open_subject(str(run)).build().eval()(torch.zeros(1, 3, 16, 16))
    checkpoint = run / "checkpoints" / "step-000000003.pt"
    embedded = open_subject(str(checkpoint), embeddings=True).build().eval()(torch.rand(1, 3, 16, 16))
    assert features.shape == embedded.shape == (1, 8)
    assert embedded.norm().item() == pytest.approx(1.0)
    loaded = co2.load_backbone(run).eval()(torch.zeros(1, 3, 16, 16))
    torch.testing.assert_close(loaded, features)
    assert "method.alpha" in report_runs([run], tmp_path / "page.html").read_text()


def test_what_was_never_a_setting_is_refused_by_name():
    plain = json.loads((DATA / "co2-v2" / "config.json").read_text())
    for group, name in (("objective", "gamma"), ("encoder", "depth"), ("negatives", "hard"), ("views", "cutout")):
        other = json.loads(json.dumps(plain))
        other[group][name] = 1
        with pytest.raises(co2.UserError, match=rf"does not know the settings {group}\.{name}"):
            Experiment.from_json(json.dumps(other))
    for source in ("cue", None, ["queue"], 3):
        with pytest.raises(co2.UserError, match=r"negatives\.source cannot be"):
            Experiment.from_json(json.dumps(plain | {"negatives": {"source": source}}))


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--objective.alpha", "is called --method.alpha now"),
        ("--objective.tau-instance=0.1", "is called --method.tau now"),
        ("--views.size", "is called --size now"),
        ("--views.crop-scale", "is called --method.view.crop-scale now"),
        ("--encoder.groups", "is called --network.groups now"),
        ("--encoder.no-shuffle-keys", "is called --method.shuffle now"),
        ("--negatives.size", "is called --method.queue or --method.negatives now"),
        ("--negatives.source", "is decided by the recipe now"),
    ],
)
def test_an_old_option_is_answered_with_the_new_one(capsys, option, answer):
    assert main(["pretrain", "moco-v2", option, "1"]) == 2
    assert f"co2: {option.partition('=')[0]} {answer}" in capsys.readouterr().err
    assert upgrade.renamed("method.alpha") is None
