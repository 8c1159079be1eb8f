"""Are captured steps as fast as those of another version of the code?

    python tools/gpu/compare_steps.py --against OTHER/src --out steps.json

Runs `co2 bench step` of both, by turns, in processes of their own, and prints the median speed of each and the ratio.
One GPU, nothing else on it; about two minutes for each recipe and turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[2] / "src"
# ResNet-18 at 32 pixels with a batch of 512, and ResNet-50 at 224 pixels with one of 256.
RECIPES = ("moco-small", "co2-v2")


def speed(code: Path, recipe: str, out: Path) -> float:
    """Images a second of the captured step, by the code in a folder."""
    words = [sys.executable, "-m", "co2.cli", "bench", "step", recipe, "--kinds", "captured", "--out", str(out)]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": _path(code)}, check=True, stdout=subprocess.DEVNULL)
    record = json.loads((out / "step.json").read_text())
    return float(record["experiment"]["batch_size"] / statistics.median(record["kinds"][0]["seconds"]))


def _path(code: Path) -> str:
    return os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    """Ask both, by turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="folder that holds the other version's package")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    asked = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {recipe: {"here": [], "there": []} for recipe in asked.recipes}
    for number in range(asked.rounds):
        for recipe in asked.recipes:
            sides = [("here", HERE), ("there", asked.against.resolve())]
            for side, code in sides if number % 2 == 0 else reversed(sides):
                with tempfile.TemporaryDirectory() as folder:
                    found[recipe][side].append(speed(code, recipe, Path(folder)))
                print(f"{recipe}, {side}: {found[recipe][side][-1]:,.0f} images/s", flush=True)
    for recipe, sides_found in found.items():
        here, there = (statistics.median(sides_found[side]) for side in ("here", "there"))
        print(f"{recipe}: {here:,.0f} images/s here, {there:,.0f} there, ratio {here / there:.4f}")
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
