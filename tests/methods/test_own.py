"""A method of one's own, without a fork: named on the command line, or handed over."""

import json
from pathlib import Path

import pytest

import co2
from co2.cli import main
from co2.experiment import Experiment
from co2.method import METHODS, load_from_file

GOOD = '''
from dataclasses import dataclass
from torch import nn
from co2.method import Method, Output
from co2.measures.metric import Metric
from co2.networks.heads import linear
from co2.views.view import View

@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    """Pulls two views together."""

    weight: float = 1.0
    """How strongly."""
    metrics = (Metric("apart", "Distance"),)

    def views(self, size):
        return (View(size=size),) * 2

    def build(self, parts):
        return nn.ModuleDict({"encoder": parts.encoder(linear(8))})

    def loss(self, nets, step):
        one, other = (nets["encoder"](view) for view in step.views)
        apart = (one - other).square().sum(dim=1).mean()
        return Output(self.weight * apart, {"apart": apart})
'''
SMALL = ["--data", "shapes:40:16", "--epochs", "1", "--batch-size", "16", "--size", "16", "--device", "cpu"]
SMALL += ["--workers", "0", "--network.backbone", "co2/resnet10-narrow", "--monitoring.log-every", "1"]


def written(folder, text=GOOD, name="mine.py"):
    path = Path(folder) / name
    path.write_text(text)
    return path


def test_a_file_is_trained_and_its_run_goes_on_only_where_the_file_is_named(tmp_path, rows, capsys):
    path, out = written(tmp_path), tmp_path / "run"
    words = ["pretrain", f"{path}:Mine", "--out", str(out), *SMALL, "--method.weight", "2.5"]
    assert main(words) == 0
    assert "loss" in capsys.readouterr().out
    plain = json.loads((out / "config.json").read_text())
    assert plain["method"] == {"name": "mine.py:Mine", "weight": 2.5}
    for row in rows(out):
        assert row["loss"] == pytest.approx(2.5 * row["apart"], rel=1e-5)
    assert main([*words, "--resume"]) == 0
    METHODS.pop("mine.py:Mine")
    with pytest.raises(co2.UserError, match="never imported: name the file again"):
        Experiment.from_json((out / "config.json").read_text())
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 2
    assert "name the file again" in capsys.readouterr().err


def test_a_method_is_handed_over_in_python(tmp_path):
    method = load_from_file(f"{written(tmp_path, name='given.py')}:Mine")
    small = co2.recipes.demo_co2().edit(
        data="shapes:40:16", epochs=1, batch_size=16, size=16, device="cpu", method=method(weight=0.5)
    )
    run = co2.pretrain(small, out=tmp_path / "run")
    assert json.loads((run / "config.json").read_text())["method"]["name"] == "given.py:Mine"
    with pytest.raises(co2.UserError, match="Say what to train"):
        co2.pretrain()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("class Mine(Method)", "class Other(Method)"), r"mine\.py has no Mine\. .*Other"),
        (("class Mine(Method)", "class Mine"), "is no method: let it inherit"),
        (("    def build", "    def built"), r"Mine in mine\.py lacks build"),
        (("@dataclass(frozen=True, kw_only=True)\n", ""), "write @dataclass"),
        (("frozen=True, ", ""), "cannot be imported: TypeError"),
        (("import Metric", "import Metrik"), "cannot be imported: ImportError"),
        (('{"apart": apart}', "{}"), r"does not give back apart, which its metrics declare"),
        (("self.weight * apart", "self.weight * (one - other)"), r"loss that is no single number but \[16, 8\]"),
        (("return Output(self.weight * apart,", "return (self.weight * apart,"), "gives back a tuple"),
        (("        apart =", "        self.weight = 3.0\n        apart ="), "keeps something in itself"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_sentence(tmp_path, capsys, change, said):
    assert change[0] in GOOD
    path = written(tmp_path, GOOD.replace(*change, 1))
    assert main(["pretrain", f"{path}:Mine", "--out", str(tmp_path / "run"), *SMALL]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(error)


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["pretrain", f"{tmp_path}/none.py:Mine", *SMALL]) == 2
    assert "There is no file" in capsys.readouterr().err
