"""Soak: train for a long time, kill every few minutes, and watch memory, file handles and disk.

    python tools/soak.py --minutes 60 --kill-every 120 --out results/soak

The same run is made again and again; while it is made, its process is killed (SIGKILL, or SIGTERM every third time) at
random moments and started again with `--resume auto`. Each time it ends, its final weights must equal those of one run
that nobody disturbed. Every two seconds the process's memory, threads and open files and the size of the run folder
are noted. The record says how many kills there were, whether all weights agreed, and how far each quantity moved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from co2.checkpoint import checkpoints, read_checkpoint

TRAINING = ["pretrain", "demo-co2", "--data", "shapes:600:32", "--device", "cpu", "--workers", "1"]
TRAINING += ["--monitoring.evaluate-every", "10", "--monitoring.checkpoint-minutes", "0.2"]
TRAINING += ["--monitoring.checkpoint-seconds", "0"]


def start(out: Path, epochs: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "co2.cli", *TRAINING, "--out", str(out), "--epochs", str(epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--resume", "auto"], env=environment, stdout=subprocess.DEVNULL)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(checkpoints(run)[-1])["nets"]


def sample(process: subprocess.Popen[bytes], out: Path) -> dict[str, float] | None:
    folder = Path("/proc", str(process.pid))
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        handles = len(list((folder / "fd").iterdir()))
        memory = int(status["VmRSS"].split()[0]) / 1024
    except (OSError, KeyError):
        return None  # it ended just now
    disk = sum(path.stat().st_size for path in out.rglob("*") if path.exists() and path.is_file()) / 2**20
    return {"memory_mib": memory, "handles": handles, "threads": int(status["Threads"]), "disk_mib": disk}


def soak(minutes: float, kill_every: float, epochs: int, seed: int) -> dict[str, object]:
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        reference = Path(temporary, "undisturbed")
        assert start(reference, epochs).wait() == 0, "the undisturbed run failed"
        expected = weights(reference)
        out, began = Path(temporary, "soaked"), time.monotonic()
        lives: list[list[dict[str, float]]] = []  # the samples of each process
        ended = {"killed": 0, "terminated": 0, "finished": 0}
        identical = 0
        while time.monotonic() - began < 60 * minutes:
            process, life = start(out, epochs), []
            deadline = time.monotonic() + moments.uniform(0.3, 1.7) * kill_every
            while process.poll() is None and time.monotonic() < deadline:
                seen = sample(process, out)
                if seen is not None:
                    life.append(seen)
                time.sleep(2)
            if process.poll() is None:
                gentle = (ended["killed"] + ended["terminated"]) % 3 == 2
                process.send_signal(signal.SIGTERM if gentle else signal.SIGKILL)
                process.wait()
                ended["terminated" if gentle else "killed"] += 1
            else:
                assert process.returncode == 0, f"a run ended with {process.returncode}"
                ended["finished"] += 1
                ours = weights(out)
                identical += all(torch.equal(ours[name], expected[name]) for name in expected)
                shutil.rmtree(out)
            lives.append(life)
            print(f"{(time.monotonic() - began) / 60:5.1f} minutes  {ended}  identical {identical}", flush=True)
    # The first half minute of a process is start-up; after it nothing should move.
    steady = [life[15:] for life in lives if len(life) > 30]
    growth = {
        name: max((life[-1][name] - life[0][name] for life in steady), default=0.0)
        for name in ("memory_mib", "handles", "threads")
    }
    return {
        "minutes": minutes,
        "ended": ended,
        "finished_with_identical_weights": identical,
        "largest_growth_within_a_process_after_its_first_30_seconds": growth,
        "largest_seen": {
            name: max(seen[name] for life in lives for seen in life)
            for name in ("memory_mib", "handles", "threads", "disk_mib")
        },
        "processes_long_enough_to_judge": len(steady),
        "samples": sum(map(len, lives)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kill-every", type=float, default=120, help="seconds, on average")
    parser.add_argument("--epochs", type=int, default=150, help="of the run that is made again and again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/soak"))
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": f"{os.cpu_count()} CPU cores",
        **soak(arguments.minutes, arguments.kill_every, arguments.epochs, arguments.seed),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
