"""The command line as a person meets it: real processes, exit codes, and no tracebacks."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import torchvision

import co2


def run(*words, timeout=300, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "co2.cli", *map(str, words)], capture_output=True, text=True, timeout=timeout, **kwargs
    )


def refused(*words, **kwargs):
    """A mistake: exit code 2, nothing like a traceback, and the message on one screen."""
    result = run(*words, **kwargs)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stderr + result.stdout).split())


SMALL = ["--size", "16", "--batch-size", "16", "--epochs", "1", "--device", "cpu", "--method.queue", "30"]


def test_help_names_every_command():
    text = run("--help").stdout
    for command in ("pretrain", "recipes", "demo", "evaluate", "report", "bench", "data"):
        assert command in text


def test_version():
    assert run("--version").stdout.strip() == co2.__version__


def test_recipes_lists_all_and_prints_one():
    listing = run("recipes").stdout
    for name in co2.recipes.RECIPES:
        assert name in listing
    assert co2.Experiment.from_json(run("recipes", "co2-v2").stdout) == co2.recipes.co2_v2()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
@pytest.mark.parametrize("words", ["recipes", "--help", "pretrain demo-co2 --help"])
def test_an_answer_that_cannot_be_written_is_a_failure_in_a_sentence(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "co2", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "co2: Not everything could be printed (No space left on device).\n"


@pytest.mark.parametrize("columns", ["1", "4"])
def test_help_on_a_narrow_terminal_costs_nothing(columns):
    done = run("pretrain", "demo-co2", "--help", env={**os.environ, "COLUMNS": columns}, timeout=60)
    assert done.returncode == 0
    assert "--epochs" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on addresses is kept by few systems")
def test_too_few_addresses_to_begin_with_are_told_in_a_sentence(tmp_path):
    few = ["bash", "-c", 'ulimit -v 1500000 && exec "$@"', "bash", sys.executable, "-m", "co2"]
    words = ["pretrain", "demo-co2", "--out", tmp_path / "run"]
    done = subprocess.run([*few, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"co2: torch and what it needs do not fit into the 1\.4 GiB .*\(ulimit -v\).*\n", done.stderr)


def test_pretrain_end_to_end_prints_three_lines_that_work(tmp_path):
    out = tmp_path / "my run"
    result = run("pretrain", "demo-co2", "--data", "shapes:40:16", "--out", out, *SMALL, "--method.alpha", "2.5")
    assert result.returncode == 0, result.stderr
    assert json.loads((out / "config.json").read_text())["method"]["alpha"] == 2.5
    lines = [line[4:] for line in result.stdout.splitlines() if line.startswith("    ")]
    names = {"images": torch.randn(2, 3, 16, 16)}
    exec("\n".join(lines), names)
    assert names["features"].shape[0] == 2


def test_misspelt_words_get_a_hint():
    assert "Did you mean 'pretrain'" in refused("pretrian")
    assert "Did you mean 'moco-v2'" in refused("pretrain", "mocov2")
    assert "--epochs" in refused("pretrain", "moco-v2", "--epoch", "3")
    assert "Did you mean 'shapes'" in refused("data", "shape")


def test_a_misspelt_backbone_gets_a_hint(tmp_path):
    words = ["pretrain", "demo-moco", "--data", "shapes:40:16", "--out", tmp_path / "run", *SMALL]
    text = refused(*words, "--network.stem", "standard", "--network.backbone", "torchvision/resnet51")
    assert "torchvision/resnet5" in text or "resnet50" in text


def test_bad_settings_are_told_plainly(tmp_path):
    assert "above 0" in refused("pretrain", "moco-v2", "--method.tau", "0")
    assert "one group of batch statistics" in refused("pretrain", "moco-v2", "--network.groups", "1")
    assert "Name the recipe first" in refused("pretrain", "--data", "shapes")
    idle = ["pretrain", "demo-moco", "--optimisation.milestones", "0.5", "--out", str(tmp_path / "run")]
    assert "--optimisation.milestones would do nothing on a cosine schedule" in refused(*idle)
    assert "would do nothing" not in refused(*idle, "--resume")  # which goes on as it was begun; there is no such run


def test_bad_data_is_told_plainly_and_writes_nothing(tmp_path):
    out = tmp_path / "run"
    assert "There is no" in refused("pretrain", "demo-moco", "--data", tmp_path / "nowhere", "--out", out)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("pretrain", "demo-moco", "--data", empty, "--out", out)
    (empty / "notes.txt").write_text("no picture")
    refused("pretrain", "demo-moco", "--data", empty, "--out", out)
    (empty / "a.png").write_bytes(b"no picture either")
    refused("pretrain", "demo-moco", "--data", empty, "--out", out)
    assert not out.exists()


def test_an_occupied_out_folder_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("dear to me")
    text = refused("pretrain", "demo-moco", "--data", "shapes:40:16", "--out", tmp_path, *SMALL)
    assert "not a run folder" in text
    assert "--out" in text
    assert (tmp_path / "thesis.txt").read_text() == "dear to me"


@pytest.mark.parametrize("layout", ["folder", "voc"])
def test_data_shapes_writes_trees_that_torchvision_reads(tmp_path, layout):
    result = run("data", "shapes", tmp_path / "out", "--layout", layout, "--count", 30, "--size", 48)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"Wrote 30 pictures of shapes to {tmp_path / 'out'}.\n"
    if layout == "folder":
        parts = [torchvision.datasets.ImageFolder(tmp_path / "out" / split) for split in ("train", "val")]
        assert sum(map(len, parts)) == 30
    else:
        root = next(folder for folder, names, _ in os.walk(tmp_path / "out") if "VOCdevkit" in names)
        images = torchvision.datasets.VOCDetection(root, year="2012", image_set="trainval", download=False)
        assert len(images) == 30
    assert "not empty" in refused("data", "shapes", tmp_path / "out", "--layout", layout)


def test_the_home_folder_after_an_equals_sign(tmp_path):
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    words = ["pretrain", "demo-moco", "--data", "shapes:40:16", "--out=~/run", *SMALL]
    result = run(*words, cwd=work, env={**os.environ, "HOME": str(home)})
    assert result.returncode == 0, result.stderr
    assert (home / "run" / "backbone.safetensors").is_file()
    assert not list(work.iterdir())


def test_report_makes_a_page_of_any_runs(tmp_path):
    words = ["pretrain", "demo-moco", "--data", "shapes:40:16", *SMALL]
    for name in ("one", "two"):
        assert run(*words, "--out", tmp_path / name).returncode == 0
    result = run("report", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "page.html")
    assert result.returncode == 0, result.stderr
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "page.html").as_uri() in result.stdout
    assert "run folder" in refused("report", tmp_path)
    assert "at least one run folder" in refused("report")


def test_a_benchmark_that_is_not_there_is_told():
    assert "Did you mean 'train'" in refused("bench", "trian")


def test_a_launcher_that_does_not_number_its_processes_is_told_plainly(tmp_path):
    launch = {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    words = ["pretrain", "demo-co2", "--data", "shapes:40:16", "--out", tmp_path / "run", *SMALL]
    assert "is no number" in refused(*words, env={**os.environ, **launch})


def test_a_reader_who_has_seen_enough_is_no_mistake():
    command = [sys.executable, "-m", "co2.cli", "recipes"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


def test_nobody_needs_to_listen():
    command = f"{shlex.quote(sys.executable)} -m co2.cli recipes >&-"
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


INTERRUPTED_IMPORT = """
import contextlib, os, signal, sys

class CtrlC:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            with contextlib.suppress(KeyboardInterrupt) if sys.argv[2] == "swallowed" else contextlib.nullcontext():
                os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
sys.meta_path.insert(0, CtrlC())
from co2.cli import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(("module", "what_happens"), [("torch", "raised"), ("numpy", "raised"), ("numpy", "swallowed")])
def test_an_interruption_while_packages_are_imported_is_one(tmp_path, module, what_happens):
    words = ["pretrain", "demo-co2", "--data", "shapes:40:16", "--out", str(tmp_path / "run"), *SMALL]
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, what_happens, *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (130, "co2: interrupted.\n")
    assert not (tmp_path / "run").exists()
