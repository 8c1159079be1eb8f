"""How much faster the demo has become: it is run at two commits in turn, as the user runs it, on the CPU.

    python tools/demo_speed.py --against COMMIT --out results/demo-speed

Each turn is a whole `co2 demo`: two runs side by side, and the page. Reported are the time from command to page, the
processor time of everything in it, which other programs on the computer disturb less, and, from the runs' own records,
how long a step waits for its views and how long the rest of it takes. The load average at the start of a turn is
recorded too: where it is above 2, which is the demo's own, other programs were at work. Without --against, the present
checkout alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision

HOME = Path(__file__).parents[1]
RUNS = ("demo-moco", "demo-co2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument(
        "--epochs", type=int, default=20, help="of each run; 20 is the demo as it is, fewer are quicker"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each has its turn")
    parser.add_argument("--out", type=Path, help="folder for the record")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _checkout(asked.against, Path(folder, "before")) as before:
        sides = {"before": before, "now": HOME} if before else {"now": HOME}
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for code in sides.values():
            _python(
                code, "-c", "import co2.demo, co2.engine.pretrain"
            )  # compiled and in the disk's cache for all turns
        for turn in range(asked.rounds):
            for name, code in sides.items() if turn % 2 == 0 else reversed(sides.items()):
                turns[name].append(measure(code, asked.epochs, Path(folder, "demo")))
                print(name, *(f"{what} {value:.2f}" for what, value in turns[name][-1].items()), sep="  ", flush=True)

    found = {
        name: {what: statistics.median(turn[what] for turn in turns[name]) for what in turns[name][0]} for name in sides
    }
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit("HEAD"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
        },
        "device": f"{os.cpu_count()} CPU cores ({torch.backends.cpu.get_cpu_capability()}), no GPU used",
        "epochs": asked.epochs,
        "median": found,
        "turns": turns,
    }
    if before:
        record["commit_before"] = _commit(asked.against)
        record["times_faster"] = {
            what: found["before"][what] / value for what, value in found["now"].items() if what != "load_at_start"
        }
        # Other programs slow down neighbouring turns alike.
        record["times_faster_turn_by_turn"] = [
            round(earlier["seconds"] / later["seconds"], 3)
            for earlier, later in zip(turns["before"], turns["now"], strict=True)
        ]
    print(json.dumps({key: value for key, value in record.items() if key != "turns"}, indent=1))
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")


def measure(code: Path, epochs: int, out: Path) -> dict[str, float]:
    """One demo by the package that lies in `code`."""
    busy = os.getloadavg()[0]
    used, started = _processor_seconds(), time.perf_counter()
    _python(code, "-m", "co2.cli", "demo", "--out", str(out), "--epochs", str(epochs))
    measured = {"seconds": time.perf_counter() - started, "processor_seconds": _processor_seconds() - used}
    views = rest = 0.0
    rows = [row for run in RUNS for row in _training_rows(out / run)]
    for row in rows:
        step = 1000 * _images_per_step(out / RUNS[0]) / row["images_per_second"]
        views += row["waiting"] * step / len(rows)
        rest += (1 - row["waiting"]) * step / len(rows)
    return measured | {"views_ms_per_step": views, "rest_ms_per_step": rest, "load_at_start": busy}


def _training_rows(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def _images_per_step(run: Path) -> int:
    return int(json.loads((run / "config.json").read_text())["batch_size"])


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _python(code: Path, *words: str) -> None:
    package = code / "src" if (code / "src").is_dir() else code  # where it lay in earlier commits
    environment = {**os.environ, "PYTHONPATH": str(package), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run([sys.executable, *words], cwd=code, env=environment, check=True, stdout=subprocess.DEVNULL)


def _commit(name: str) -> str:
    return subprocess.check_output(["git", "rev-parse", name], cwd=HOME, text=True).strip()


@contextmanager
def _checkout(commit: str | None, folder: Path) -> Iterator[Path | None]:
    """The files of a commit, for as long as they are needed."""
    if commit is None:
        yield None
        return
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=HOME, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=HOME, check=True)


if __name__ == "__main__":
    main()
