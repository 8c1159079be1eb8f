"""Nobody gets in through a file, and nothing goes out: no foreign code, no shell, no network, names taken literally."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch
import tyro
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from safetensors.torch import save

import co2
from co2 import recipes
from co2.checkpoint import load_backbone, read_checkpoint, write_checkpoint
from co2.cli import main
from co2.data.open import open_data
from co2.engine.pretrain import pretrain
from co2.engine.progress import Bar, Lines
from co2.experiment import Experiment, differences
from co2.measures.metric import Metric
from co2.report.page import report_runs

PACKAGE = Path(co2.__file__).parent

# What the source text may not contain. Each exception says why it is none.
DANGEROUS_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
NETWORK = {
    "aiohttp", "asyncio", "ftplib", "fsspec", "http", "httpx", "huggingface_hub", "imaplib", "poplib", "requests",
    "smtplib", "socket", "socketserver", "ssl", "telnetlib", "urllib", "urllib3", "webbrowser", "websockets", "xmlrpc",
    "wandb", "sentry_sdk", "boto3", "gcsfs", "s3fs",
}  # fmt: skip
ALLOWED = {
    ("data/torchvision_layouts.py", "import pickle"): "CIFAR's files are pickles",
    ("data/torchvision_layouts.py", "pickle.Unpickler"): "subclassed so that it knows arrays and refuses all else",
    ("__init__.py", "importlib.import_module"): "public names on first use, from a table in the same file",
    ("data/shard_storage.py", "import fsspec"): "only for an address that the user has given as --data",
    ("evaluation/subject.py", "import urllib"): "for the name of the error of a download that the user has asked for",
    ("evaluation/subject.py", "torch.hub"): "for the name of the folder where a download would lie",
    ("evaluation/subject.py", "timm.create_model(pretrained=...)"): "published weights, by NAME:DEFAULT of the user's",
    ("lazily.py", "importlib.import_module"): "torch, by names that stand in that file",
    ("method.py", "importlib.import_module"): "files of our own room of methods, as they lie there",
    ("evaluation/suite.py", "importlib.import_module"): "the module of a protocol, from a table in the same room",
    ("data/decode.py", "reads by Image.open"): "bytes, or a file that the door has opened",
    ("data/packed.py", "reads by mmap.mmap"): "maps what the door has opened",
    ("data/shard_storage.py", "reads by system.open"): "fsspec's, for an address that the user has given as --data",
    ("study/records.py", "reads by json.loads"): "what the program has just written as JSON itself",
    ("study/settings.py", "reads by json.loads"): "likewise, and values that the user has typed",
    (
        "data/tar_index.py",
        "reads by json.loads",
    ): "a sample's own JSON, of bounded size, of which one small number is taken",
    ("evaluation/command.py", "reads by json.loads"): "what the program has just written as JSON itself",
    ("machine/workers.py", "reads by os.fdopen"): "memory that a worker hands over",
    ("machine/workers.py", "reads by mmap.mmap"): "memory that a worker hands over",
    ("networks/weights.py", "reads by zipfile.ZipFile"): "the directory of an archive that the door has opened",
    ("machine/terminal.py", "reads by os.open"): "the null device, to write to",
    ("export.py", "import pickle"): "Detectron2 reads pickles; one is written for it, and none read",
    ("networks/weights.py", "import pickle"): "torch's checkpoints are pickles",
    ("networks/weights.py", "pickle._Unpickler"): "subclassed so that it describes tensors and calls nothing",
}

# Ways to read a file, of which the package knows one: `co2.files`. Writing is another matter.
READERS = {
    "open", "io.open", "os.open", "os.fdopen", "codecs.open", "torch.load", "safe_open", "load_file", "json.load",
    "json.loads", "np.load", "np.fromfile", "np.loadtxt", "np.genfromtxt", "np.memmap", "mmap.mmap", "Image.open",
    "tarfile.open", "zipfile.ZipFile", "gzip.open", "ElementTree.parse", "ET.parse", "csv.reader", "fileinput.input",
    "tomllib.load", "configparser.ConfigParser", "torch.jit.load", "safetensors.torch.load_file", "plt.imread",
}  # fmt: skip


def findings(path: Path) -> list[str]:
    """Everything in a file of the package that could run foreign code, reach the network, or read a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            roots = {module.split(".")[0] for module in modules if module != "urllib.parse"}  # which deals in text
            found += [f"import {root}" for root in sorted(roots & (NETWORK | UNPICKLERS))]
        if isinstance(node, ast.Attribute):
            found += _attribute_findings(ast.unparse(node))
        if isinstance(node, ast.Call):
            found += _call_findings(node)
    return found


def _attribute_findings(text: str) -> list[str]:
    root, _, name = text.partition(".")
    if root in UNPICKLERS and name in ("load", "loads", "Unpickler", "_Unpickler", "unsafe_load", "full_load"):
        return [text]
    forbidden = (
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "importlib.import_module",
        "torch.hub",
        "np.fromregex",
    )
    return [text] if text in forbidden or text.startswith(("os.exec", "os.spawn")) else []


def _call_findings(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    found = [name] if name in DANGEROUS_CALLS else []
    found += [f"{name}(shell=...)" for value in [given.get("shell", "False")] if value != "False"]
    found += [f"{name}({flag}=...)" for flag in ("pretrained", "download") if given.get(flag, "False") != "False"]
    found += [f"{name}(allow_pickle=...)" for value in [given.get("allow_pickle", "False")] if value != "False"]
    if name == "torch.load" and given.get("weights_only") != "True":
        found.append("torch.load without weights_only=True")
    if name.endswith(("extractall", ".extract", "unpack_archive")):
        found.append(f"{name}: unpacks an archive")
    if name in READERS or name.endswith((".read_text", ".read_bytes", ".open", ".fromfile")):
        modes = [given.get("mode", "''"), *map(ast.unparse, node.args[: 2 if name == "open" else 1])]
        if not any(re.fullmatch(r"'[wxa]b?'", mode) for mode in modes):
            found.append(f"reads by {name}")
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "files.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_source_neither_runs_foreign_code_nor_reaches_out(path: Path) -> None:
    own = path.relative_to(PACKAGE).as_posix()
    assert [text for text in findings(path) if (own, text) not in ALLOWED] == []


def test_every_exception_is_still_needed() -> None:
    present = {(path.relative_to(PACKAGE).as_posix(), text) for path in FILES for text in findings(path)}
    assert set(ALLOWED) <= present


def test_the_scan_finds_what_it_looks_for(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import pickle, requests.sessions\nfrom urllib.request import urlopen\nimport torch, os, subprocess\n"
        "pickle.load(f)\npickle._Unpickler(f)\ntorch.load(f)\ntorch.load(f, weights_only=False)\neval('1')\n"
        "subprocess.run('x', shell=True)\nos.system('x')\narchive.extractall()\nnp.load(f, allow_pickle=True)\n"
        "timm.create_model('x', pretrained=True)\ntorch.hub.load('x')\n"
    )
    assert len(findings(tmp_path / "bad.py")) == 17  # three of which read a file, too
    (tmp_path / "reads.py").write_text(
        "open(p)\nopen(p, 'rb')\nopen(p, 'r+')\nopen(p, mode)\nopen(p, mode='r')\np.open()\np.read_text()\n"
        "q.r(1).read_bytes()\nos.open(p, os.O_RDONLY)\njson.load(f)\njson.loads(text)\nsafe_open(p, 'pt')\n"
        "np.load(p)\nnp.fromfile(p)\ntorch.load(p, weights_only=True)\nImage.open(p)\nmmap.mmap(3, 4)\n"
    )
    assert [text.startswith("reads by") for text in findings(tmp_path / "reads.py")] == [True] * 17
    (tmp_path / "good.py").write_text(
        "from urllib.parse import quote\n"
        "model.eval()\ntorch.compile(f)\nread_text(p)\nread_json(p)\nopen(p, 'w')\nopen(p, mode='xb')\np.open('w')\n"
    )
    assert findings(tmp_path / "good.py") == []


# Files that somebody else wrote.


def test_damaged_and_forged_checkpoints_are_refused(tmp_path: Path) -> None:
    """One that would run code is tested beside the reader; here are those that are only broken, in many ways."""
    good = write_checkpoint(tmp_path, {"step": 1, "weights": torch.arange(100.0)}, 1).read_bytes()
    path = tmp_path / "forged.pt"
    for data in (b"", b"\x80", b"not a checkpoint", good[:100], good[:-100], good[::-1], b"PK\x03\x04" + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(co2.UserError):
            read_checkpoint(path)
    for place in range(0, len(good), 97):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        with contextlib.suppress(co2.UserError):  # a byte of a tensor is not looked at without the checksum
            read_checkpoint(path)


def described(weights: str = "w", /, **description: str) -> bytes:
    """A file that says all that it has to about itself, but for what is given."""
    standard = {"backbone": "torchvision/resnet18", "stem": "standard", "view_size": "32"}
    standard |= {"mean": "[0, 0, 0]", "std": "[1, 1, 1]"}
    return save({weights: torch.zeros(2)}, metadata={k: v for k, v in (standard | description).items() if v != "-"})


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        header(b"{}", length=2**63),
        header(b"{}", length=2**40),
        header(b"[" * 200_000),
        header(b'{"a":' * 5_000 + b"1" + b"}" * 5_000),
        header(b'{"w":{"dtype":"F32","shape":[99999999,99999999],"data_offsets":[0,8]}}') + bytes(8),
        header(b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}') + bytes(8),
        header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}') + bytes(8),
        header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,80]}}') + bytes(8),
        header(b'{"w":{"dtype":"EVIL","shape":[2],"data_offsets":[0,8]}}') + bytes(8),
        header(b'{"__metadata__":{"backbone":7}}'),
        pickle.dumps({"backbone": "x"}),
        save({"w": torch.zeros(2)}),
        *(described(**{missing: "-"}) for missing in ("backbone", "stem", "view_size", "mean", "std")),
        *(described(view_size=size) for size in ("many", "9" * 30, "9999", "-5", "0", "3.5", "")),
        *(described(stem=stem) for stem in ("__class__", "")),
        *(
            described(backbone=name)
            for name in ("torchvision/__class__", "os/system", "", "../x", "timm/local-dir:/etc")
        ),
        described(backbone="timm/hf-hub:somebody/something"),
        *(described(mean=mean) for mean in ("[NaN, 0, 0]", "[0]", "{}", "3", "no", "[" * 100_000, '["x", "y", "z"]')),
        described(),  # without its weights
    ],
)
def test_forged_backbones_are_refused_in_a_sentence(tmp_path: Path, data: bytes, no_network: None) -> None:
    (tmp_path / "backbone.safetensors").write_bytes(data)
    with pytest.raises(co2.UserError):
        load_backbone(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '"text"',
        "{",
        "[" * 100_000,
        '{"views":' * 100_000,
        '{"views": {"views": {"views": {}}}}',
        '{"epochs": 1e999}',
        '{"epochs": ' + "9" * 5000 + "}",
        '{"epochs": 99999999999999999999999}',
        '{"epochs": 2.5}',
        '{"epochs": true}',
        '{"epochs": "3"}',
        '{"epochs": null}',
        '{"epochs": [3]}',
        '{"epochs": {"x": 3}}',
        '{"data": 3}',
        '{"data": {"x": 3}}',
        '{"resume": "perhaps"}',
        '{"resume": 1}',
        '{"views": 3}',
        '{"views": []}',
        '{"views": {"crop_scale": [0.5]}}',
        '{"views": {"crop_scale": [0.5, "1"]}}',
        '{"views": {"crop_scale": [[0.5], 1]}}',
        '{"views": {"mean": [NaN, 0, 0]}}',
        '{"method": {"alpha": NaN}}',
        '{"method": {"alpha": Infinity}}',
        '{"method": {"alpha": ' + "9" * 400 + "}}",
        '{"method": {"backend": ["auto"]}}',
        '{"negatives": {"source": "__class__"}}',
        '{"__class__": 3}',
        '{"__post_init__": 3}',
        '{"optimisation": {"milestones": "half"}}',
        '{"\\u001b[2J": 3}',
    ],
)
def test_forged_configurations_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(co2.UserError) as refusal:
        Experiment.from_json(text)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 400


def test_every_recipe_passes_the_same_examination() -> None:
    for name in recipes.RECIPES:
        assert Experiment.from_json(recipes.get(name).to_json()) == recipes.get(name)


# Fuzzing of configuration: an experiment or a sentence, never a traceback.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = {
    name: [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for name, kind in get_type_hints(Experiment).items()
}
fuzz = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])


@fuzz
@given(JSON)
def test_any_json(value: Any) -> None:
    read_or_refused(json.dumps(value))


@fuzz
@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    read_or_refused(text)


@fuzz
@given(st.data())
def test_a_configuration_with_other_values(choices: st.DataObject) -> None:
    plain = json.loads(recipes.get(choices.draw(st.sampled_from(sorted(recipes.RECIPES)))).to_json())
    for _ in range(choices.draw(st.integers(1, 3))):
        name = choices.draw(st.sampled_from(sorted(FIELDS)))
        inner = choices.draw(st.sampled_from([None, *FIELDS[name]]))
        value = choices.draw(JSON)
        if inner is None or not isinstance(plain[name], dict):
            plain[name] = value
        else:
            plain[name][inner] = value
    read_or_refused(json.dumps(plain))


def read_or_refused(text: str) -> None:
    try:
        experiment = Experiment.from_json(text)
    except co2.UserError as error:
        refusal = str(error)
        assert refusal.isprintable()
    else:
        assert Experiment.from_json(experiment.to_json()) == experiment


WORDS = st.one_of(
    st.sampled_from(
        [f"--{name.replace('_', '-')}" for name in FIELDS]
        + [f"--{name}.{inner.replace('_', '-')}" for name in FIELDS for inner in FIELDS[name]]
        + ["--help", "--", "-", "--resume", "auto", "[red]", "[/]", "{0}", "%s", "--epochs=3", "--views.no-grey-first"]
    ),
    st.sampled_from(
        ["0", "-1", "1", "nan", "inf", "1e400", "9" * 50, "0.5", "True", "None", "", " ", "../..", "é\u202e"]
    ),
    st.text(max_size=6).filter(lambda text: "\0" not in text),
)


@settings(fuzz, max_examples=100)
@given(st.sampled_from(["moco-v2", "co2-v1", "simclr-small", "[red]", "", "../x"]), st.lists(WORDS, max_size=6))
def test_any_words_on_the_command_line(recipe: str, words: list[str]) -> None:
    """Parsed and refused, or parsed and handed on; the run itself is not started."""
    handed_on: list[Experiment] = []

    def instead(experiment: Experiment) -> Path:
        handed_on.append(experiment)
        return Path("run")

    output = io.StringIO()
    with (
        mock.patch("co2.engine.pretrain.pretrain", instead),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            code: Any = main(["pretrain", recipe, *words])
        except SystemExit as end:
            code = end.code
    assert code in (0, 2), output.getvalue()
    assert (code == 0) == bool(handed_on) or "--help" in words or "-h" in words
    assert "Traceback" not in output.getvalue()


def test_the_parser_of_the_fuzz_test_is_the_real_one() -> None:
    experiment = tyro.cli(Experiment, args=["--epochs", "3"], default=recipes.moco_v2())
    assert experiment.epochs == 3


# Names are taken literally.

NAMES = [
    "[red]x[/red]",
    "[/]",
    "[bold",
    ":bomb:",
    "a\\[b]",
    "ends in \\",
    "[link=https://example.org]x[/link]",
    "{0} %s",
]


@pytest.mark.parametrize("name", NAMES)
def test_markup_in_names_is_printed_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar(epochs=1, metrics=())
    bar.begin(10, 0, float)
    written = io.StringIO()
    bar.progress.live.console = bar.progress.console  # the same console, and a file to look at
    bar.progress.console.file = written
    bar.say(f"Skipped an image that cannot be read: /data/{name}.png (truncated file).")
    bar.close()
    text = " ".join(written.getvalue().split())
    assert f"/data/{name}.png (truncated file)." in text
    Lines(1, ()).say(f"/data/{name}.png")
    assert f"/data/{name}.png" in capsys.readouterr().out


EVIL = "evil\x1b[2J\u202e"  # clears a terminal, and turns the direction of writing


def test_no_sentence_holds_a_command_to_the_terminal(tmp_path: Path) -> None:
    """Names from outside that get into sentences: of folders beside the data, in pickles, backbones, configurations."""
    said = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(co2.UserError) as caught:
            call()
        said.append(str(caught.value))

    for name in ("train/a", "train/b", "val/a", "val/b", EVIL):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "data" / name / "1.png")
    said.append(open_data(str(tmp_path / "data")).description)
    refused(lambda: open_data(str(tmp_path / "data" / "evil")))
    (tmp_path / "link").symlink_to(EVIL)
    refused(lambda: open_data(str(tmp_path / "link")))

    cifar = tmp_path / "cifar-10-batches-py"
    cifar.mkdir()
    for pickled in (b"cevil\x1b[2J\nsystem\n.", b"cnumpy\ndtype\n(Vevil\x1b[2J\ntR."):
        (cifar / "batches.meta").write_bytes(pickled)
        refused(lambda: open_data(str(cifar)))

    backbone = tmp_path / "backbone.safetensors"
    backbone.write_bytes(described(backbone=EVIL))
    refused(lambda: load_backbone(backbone))
    backbone.write_bytes(described(EVIL))
    refused(lambda: load_backbone(backbone))

    said += differences(recipes.moco_v2(), recipes.moco_v2().edit(recipe=EVIL))
    assert len(said) == 8
    for text in said:
        assert text.replace("\n", "").replace("\t", "").isprintable(), text


def test_a_run_with_bad_names_on_a_terminal_and_in_a_report(tiny, tmp_path: Path, monkeypatch) -> None:
    """The whole way of a name: from the disk over the progress bar into the list of bad images, and of a run's name
    into the page."""
    pictures = tmp_path / "<b>[/]pictures"
    pictures.mkdir(parents=True)
    for number in range(20):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(pictures / f"{number}.png")
    (pictures / "[red]\n<script>\x1b[2J.png").write_bytes(b"no image")
    screen = io.StringIO()

    def on_a_terminal(epochs: int, metrics: Sequence[Metric]) -> Bar:
        bar = Bar(epochs, metrics)
        bar.progress.stop()
        bar.progress.live.console = Console(file=screen, force_terminal=True, width=4000)
        return bar

    monkeypatch.setattr("co2.engine.pretrain.choose_display", on_a_terminal)
    run = pretrain(tiny(epochs=1), data=pictures, out=tmp_path / "<i>[bold]run")
    shown = r"[red]\n<script>\x1b[2J.png"
    assert f"Skipped an image that cannot be read: {pictures}/{shown} (not an image" in screen.getvalue()
    lines = (run / "bad_images.txt").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{pictures}/{shown}\t")
    page = report_runs([run], tmp_path / "page.html").read_text()
    assert "<i>[bold]run" not in page
    assert "<b>[/]pictures" not in page
    assert "&lt;i&gt;[bold]run" in page


def test_names_that_are_no_text_can_be_printed(tmp_path: Path) -> None:
    """On a terminal that takes nothing but ASCII, with a folder whose name is not even UTF-8."""
    folder = os.fsencode(tmp_path) + b"/caf\xe9 \xf0\x9f\x98\x80"
    command = [sys.executable, "-m", "co2.cli", "data", "shapes", folder, "--count", "20", "--size", "8"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert os.path.isdir(os.path.join(folder, b"train"))


# Nothing talks to the network.

NO_NETWORK = """
import socket, sys

def refuse(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.sendto"):
        raise RuntimeError(f"asked for {event} {arguments[:2]}")
    if event in ("socket.connect", "socket.bind") and not isinstance(arguments[1], (str, bytes)):
        raise RuntimeError(f"asked for {event} {arguments[1]}")  # text is the path of a socket of this machine

class Refused(socket.socket):
    def __init__(self, family=-1, *arguments, **others):
        if family not in (getattr(socket, "AF_UNIX", None),):
            raise RuntimeError("asked for a socket")
        super().__init__(family, *arguments, **others)

sys.addaudithook(refuse)
socket.socket = Refused
"""


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked for the network")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


def test_a_whole_run_and_its_report_without_a_network(tmp_path: Path) -> None:
    """Where every socket to elsewhere is refused: with workers, whose sockets stay on this machine."""
    words = ["pretrain", "demo-co2", "--data", "shapes:40:16", "--out", str(tmp_path / "run"), "--size", "16"]
    words += ["--batch-size", "16", "--epochs", "1", "--device", "cpu", "--method.queue", "30", "--workers", "2"]
    code = (
        NO_NETWORK + "from co2.cli import main\nfrom co2.report.page import report_runs\nimport co2\n"
        f"assert main({words!r}) == 0\n"
        f"report_runs([{str(tmp_path / 'run')!r}], {str(tmp_path / 'page.html')!r})\n"
        f"co2.load_backbone({str(tmp_path / 'run')!r})\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert 'src="http' not in page


def test_the_block_of_the_network_blocks() -> None:
    for attempt in (
        "import urllib.request; urllib.request.urlopen('http://localhost:9')",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import socket; socket.socket(socket.AF_INET)",
        "import _socket; _socket.socket(_socket.AF_INET).connect(('127.0.0.1', 9))",
    ):
        result = subprocess.run([sys.executable, "-c", NO_NETWORK + attempt], capture_output=True, text=True)
        assert "asked for" in result.stderr


def test_every_test_that_the_documentation_names_exists() -> None:
    root = PACKAGE.parents[1]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs" / "RELIABILITY.md").read_text(encoding="utf-8"))
    assert len(named) >= 30
    for path, name in named:
        assert re.search(rf"^def {name}\(", (root / path).read_text(encoding="utf-8"), re.MULTILINE), f"{path}::{name}"
