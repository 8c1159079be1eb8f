"""Run folders as the engine writes them, with made-up numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from co2 import recipes

RunWriter = Callable[..., Path]
STEPS_PER_EPOCH = 24


def write_run(
    folder: Path,
    *,
    alpha: float = 0.0,
    epochs: int = 12,
    epochs_done: int | None = None,
    labels: bool = True,
    untrained: bool = True,
    seed: int = 0,
    knn: float = 0.58,
) -> Path:
    """A run folder whose curves look like those of a short MoCo run (alpha 0) or CO2 run."""
    base = recipes.demo_moco() if alpha == 0 else recipes.demo_co2()
    experiment = base.edit(epochs=epochs, seed=seed, method={"alpha": alpha, "ramp_up": 0.0}, out=str(folder))
    noise = np.random.default_rng(seed + int(alpha * 100))
    rows: list[dict[str, Any]] = []

    def health(epoch: int) -> dict[str, Any]:
        done = epoch / epochs
        row = {"alignment": 0.6 - 0.3 * done, "uniformity": -1 - 1.6 * done, "effective_rank": 6 + 22 * done**0.5}
        row["mean_norm"] = 0.6 * math.exp(-3 * done)
        if labels:
            row["knn_top1"] = 0.28 + (knn - 0.28) * done**0.5 + (noise.normal(0, 0.008) if 0 < epoch < epochs else 0)
            row["knn_top5"] = 0.8
        return {"kind": "epoch", "step": epoch * STEPS_PER_EPOCH, "epoch": float(epoch), **row}

    if untrained:
        rows.append(health(0))
    for step in range(1, (epochs if epochs_done is None else epochs_done) * STEPS_PER_EPOCH + 1):
        done = step / (epochs * STEPS_PER_EPOCH)
        if step % 4 == 0:
            jump = math.exp(-(((done - 0.06) / 0.06) ** 2))
            consistency = 0.12 + 0.1 * done if alpha else 0.45 + 0.6 * jump - 0.1 * done
            instance = 3.4 + 2.2 * math.exp(-4 * done) + (0.25 if alpha else 0) + noise.normal(0, 0.08)
            rows.append({
                "kind": "train", "step": step, "epoch": round(step / STEPS_PER_EPOCH, 4),
                "loss": instance + alpha * consistency, "instance": instance,
                "consistency": max(0.01, consistency + noise.normal(0, 0.02)),
                "top1": (0.62 if alpha else 0.7) * (1 - math.exp(-5 * done)) + noise.normal(0, 0.02) ** 2,
                "top5": 0.9, "learning_rate": 0.12, "images_per_second": 812.0, "waiting": 0.03,
            })  # fmt: skip
        if step == 8 and alpha == 0:
            text = "The loss is rising. That is expected: the queue starts with random vectors, and real keys replace"
            rows.append({"kind": "advice", "step": 8, "epoch": 0.3333, "text": text + " them until step 8."})
        if step % STEPS_PER_EPOCH == 0:
            rows.append(health(step // STEPS_PER_EPOCH))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(experiment.to_json())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> RunWriter:
    """Writes a run folder of the given name into the test's own folder."""
    return lambda name, **changes: write_run(tmp_path / "runs" / name, **changes)
