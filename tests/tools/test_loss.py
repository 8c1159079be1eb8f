"""What the benchmark of the objective makes of its numbers. The numbers themselves need a GPU."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from loss import BACKENDS, LossBenchmark, main, run, speedups, write

from co2.errors import UserError

TIMES = [
    {"B": 256, "K": 4096, "D": 128, "backend": "compiled", "both_ms": 1.0, "memory_mib": 200.0},
    {"B": 256, "K": 4096, "D": 128, "backend": "fused", "both_ms": 0.1, "memory_mib": 8.0},
    {"B": 4096, "K": 4096, "D": 128, "backend": "compiled", "skipped": "does not fit this device's memory"},
    {"B": 4096, "K": 4096, "D": 128, "backend": "fused", "both_ms": 0.4, "memory_mib": 8.0},
]


def test_speedups_are_over_the_compiled_reference_where_it_ran() -> None:
    assert speedups(TIMES) == [{"B": 256, "K": 4096, "backend": "fused", "faster": 10.0, "leaner": 25.0}]


def test_a_record_becomes_a_table_and_a_plot(tmp_path: Path) -> None:
    write({"times": TIMES, "device": {"name": "a GPU"}}, tmp_path)
    assert json.loads((tmp_path / "loss.json").read_text())["times"] == TIMES
    with (tmp_path / "loss.csv").open() as file:
        assert [row["backend"] for row in csv.DictReader(file)] == ["compiled", "fused", "compiled", "fused"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "loss.svg").unlink()
    main(["--plot", str(tmp_path / "loss.json")])
    assert "<svg" in (tmp_path / "loss.svg").read_text()


def test_mistakes_are_told_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out needs a folder"):
        run(LossBenchmark(out=tmp_path / "file"))
    with pytest.raises(UserError, match="There is no backend 'jax'"):
        run(LossBenchmark(backends=("jax",)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="found no GPU"):
        run(LossBenchmark())


def test_every_backend_is_described() -> None:
    assert set(LossBenchmark().backends) <= set(BACKENDS)
