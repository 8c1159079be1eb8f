"""Run folders that somebody else has made: what their config.json names is not asked of other machines."""

import json
import os
import shutil
import socket

import pytest

from co2.cli import main
from co2.errors import UserError
from co2.evaluation.suite import evaluate


@pytest.fixture
def listening():
    """A port of this machine that sees whether anybody comes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        yield server


ADDRESSES = ["ftp://{}/x.tar", "http://{}/x.tar", "https://{}/", "s3://{}/bucket", "sftp://u@{}/x"]
ADDRESSES += ["simplecache::ftp://{}/x.tar", "validation:0.1:0:ftp://{}/x.tar", "zip://x.tar::ftp://{}/y.zip"]
ADDRESSES += ["ftp://{}/train-{{0..3}}.tar"]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("protocol", ["knn", "label-free"])
def test_a_config_opens_no_address(pretrained_run, tmp_path, listening, capsys, address, protocol):
    run = tmp_path / "run"
    shutil.copytree(pretrained_run, run)
    settings = json.loads((run / "config.json").read_text())
    host, port = listening.getsockname()
    settings["data"] = address.replace("{}", f"{host}:{port}").replace("{{", "{").replace("}}", "}")
    (run / "config.json").write_text(json.dumps(settings))
    assert main(["evaluate", protocol, str(run), "--device", "cpu", "--workers", "0"]) == 2
    said = capsys.readouterr().err
    assert "An address that a file names is not opened" in said
    assert "give --data" in said
    with pytest.raises(UserError, match="give --data"):
        evaluate(protocol, str(run), device="cpu", workers=0)
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    with pytest.raises(BlockingIOError):
        listening.accept()


@pytest.mark.parametrize("kind", ["pipe", "folder", "sparse", "device"])
def test_a_config_of_another_kind_is_told(pretrained_run, tmp_path, capsys, kind):
    run = tmp_path / "run"
    shutil.copytree(pretrained_run, run)
    config = run / "config.json"
    config.unlink()
    {
        "pipe": lambda: os.mkfifo(config),
        "folder": config.mkdir,
        "sparse": lambda: os.truncate(os.open(config, os.O_CREAT | os.O_WRONLY), 2**40),
        "device": lambda: config.symlink_to("/dev/zero"),
    }[kind]()
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    assert main(["evaluate", "knn", str(run), "--device", "cpu", "--workers", "0"]) == 2
