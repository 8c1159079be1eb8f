"""The demo as `make demo` runs it, but shorter; the whole of it behind `make test-all`."""

import os
import re
import subprocess
import sys

import pytest

import co2
from co2 import recipes
from co2.demo import _ended_with_us, _Run, demo
from co2.report.runs import read_run


def run_demo(out, *words):
    command = [sys.executable, "-m", "co2.cli", "demo", "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def test_an_epoch_of_the_demo_leaves_two_runs_and_a_page(tmp_path):
    result = run_demo(tmp_path / "demo", "--epochs", "1")
    assert result.returncode == 0, result.stderr
    assert set(os.listdir(tmp_path / "demo")) == {
        "demo-co2",
        "demo-co2.log",
        "demo-moco",
        "demo-moco.log",
        "index.html",
    }
    page = (tmp_path / "demo" / "index.html").read_text()
    assert page.count("<svg") >= 4
    assert page.count("data:image/png") >= 6 * (1 + 3 * 6)
    assert (tmp_path / "demo" / "index.html").as_uri() in result.stdout
    for name in ("untrained", "MoCo", "MoCo + CO2"):
        assert re.search(rf"^{re.escape(name)} +\d+\.\d%", result.stdout, re.MULTILINE)
    # The accuracy beside an epoch is that epoch's.
    for name, folder in (("MoCo", "demo-moco"), ("MoCo + CO2", "demo-co2")):
        (last,) = re.findall(rf"^{re.escape(name)} +epoch +1/1 .* kNN (\S+)$", result.stdout, re.MULTILINE)
        assert last == format(read_run(tmp_path / "demo" / folder).latest("knn_top1"), ".1%")
    # Both started from the same network: the untrained measurements agree to the last digit.
    first = [read_run(tmp_path / "demo" / name).untrained("knn_top1") for name in ("demo-moco", "demo-co2")]
    assert first[0] == first[1] is not None


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(co2.UserError, match=r"holiday\.jpg.*--out"):
        demo(str(tmp_path))
    assert (tmp_path / "holiday.jpg").read_bytes() == b"precious"


@pytest.mark.parametrize("mistake", [{"epochs": 0}, {"seed": -1}])
def test_a_mistake_costs_no_earlier_demo(tmp_path, mistake):
    (tmp_path / "index.html").write_text("the page of an earlier demo")
    with pytest.raises(co2.UserError, match="must be"):
        demo(str(tmp_path), **mistake)
    assert (tmp_path / "index.html").is_file()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(co2.UserError, match=r"Not a directory\. Give another --out"):
        demo(str(tmp_path / "file" / "demo"))


def test_the_runs_start_before_torch_is_loaded_to_watch_them():
    subprocess.run([sys.executable, "-c", "import co2.demo, sys; assert 'torch' not in sys.modules"], check=True)


def test_the_runs_end_when_the_demo_does(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    run = _Run("MoCo", tmp_path, recipes.demo_moco(), process, tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), _ended_with_us([run]):
        raise KeyboardInterrupt
    assert process.poll() is not None


@pytest.mark.slow
def test_the_whole_demo_keeps_its_promise(tmp_path):
    result = run_demo(tmp_path / "demo")
    assert result.returncode == 0, result.stderr
    plain, consistent = (read_run(tmp_path / "demo" / name) for name in ("demo-moco", "demo-co2"))
    for run in (plain, consistent):
        assert run.latest("knn_top1") >= run.untrained("knn_top1") + 0.15
    assert consistent.final("consistency") < plain.final("consistency")
