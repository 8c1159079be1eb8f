"""Cells that share a GPU, with stand-ins for NVIDIA's program that write down what they are told."""

import os
import signal
import subprocess
import sys
import time

import pytest

from co2.study import sharing
from co2.study.sharing import shared_gpu

# As the real one: -d leaves a server and returns; without it, commands come on the input.
STAND_IN = """#!/bin/sh
if [ "$1" = "-d" ]; then echo "begins in $CUDA_MPS_PIPE_DIRECTORY" >> {notes}; exit {code}; fi
while read word; do echo "told to $word in $CUDA_MPS_PIPE_DIRECTORY" >> {notes}; done
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """The file that the stand-in writes to. It serves, unless a test makes it fail."""
    monkeypatch.delenv(sharing.PIPES, raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(sharing, "_USUAL_PIPES", tmp_path / "usual")
    monkeypatch.setattr(sharing, "_PROBE", "import os; assert os.environ['CUDA_MPS_PIPE_DIRECTORY']")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    put_stand_in(tmp_path)
    return tmp_path / "notes"


def put_stand_in(folder, code=0):
    program = folder / sharing.CONTROL
    program.write_text(STAND_IN.format(notes=folder / "notes", code=code))
    program.chmod(0o755)


def test_it_serves_as_long_as_cells_run(notes, capsys):
    with shared_gpu(3) as environment:
        folder = environment[sharing.PIPES]
        assert notes.read_text() == f"begins in {folder}\n"
        assert os.path.isdir(folder)
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "21"
    assert notes.read_text() == f"begins in {folder}\ntold to quit in {folder}\n"
    assert not os.path.exists(folder)
    assert "3 cells at once share the GPU through MPS." in capsys.readouterr().out
    assert sharing.PIPES not in os.environ


def test_it_ends_after_an_error_too(notes):
    with pytest.raises(KeyError), shared_gpu(2):
        raise KeyError
    assert "told to quit" in notes.read_text()


@pytest.mark.parametrize(("code", "probe"), [(1, "pass"), (0, "raise SystemExit(1)")])
def test_where_it_does_not_serve_cells_take_turns(notes, tmp_path, monkeypatch, capsys, code, probe):
    put_stand_in(tmp_path, code)
    monkeypatch.setattr(sharing, "_PROBE", probe)
    with shared_gpu(2) as environment:
        assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert "take turns" in capsys.readouterr().out
    assert ("told to quit" in notes.read_text()) == (code == 0)


def test_one_that_the_user_has_started_is_left_alone(notes, tmp_path, monkeypatch):
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "control").touch()
    with shared_gpu(2) as environment:
        assert sharing.PIPES not in environment
    (tmp_path / "usual" / "control").unlink()
    monkeypatch.setenv(sharing.PIPES, str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "5")
    with shared_gpu(2) as environment:
        assert environment == {}
    assert not notes.exists()


def test_without_it_nothing_happens(notes, tmp_path):
    (tmp_path / sharing.CONTROL).unlink()
    with shared_gpu(100) as environment:
        assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "2"}
    assert not notes.exists()


def test_it_ends_with_a_study_that_is_killed(notes):
    program = (
        "from co2.study import sharing\n"
        "sharing._PROBE = 'pass'\n"
        "with sharing.shared_gpu(2):\n"
        "    print('begun', flush=True)\n"
        "    input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert "MPS" in process.stdout.readline()
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 30
    while "told to quit" not in notes.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
