"""Draws the figures of results/figures from the tables beside them: python tools/figures.py

claim     what the term adds to each method on test images, with deviations over seeds
alpha     accuracy over the weight of the term; tau: over its temperature
curves    both losses and the share of positives found, over the run, with and without the term
transfer  PASCAL VOC from the backbones of Tiny-ImageNet-100
speed     the objective, forward and backward, beside what PyTorch makes of it
"""

from __future__ import annotations

import csv
import gzip
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "results"
MEASURES = {"knn": "kNN", "embeddings": "kNN of embeddings", "linear": "linear"}
BLUE, ORANGE, GREY, GREEN = "#2b6cb0", "#c05621", "#718096", "#2f855a"
Rows = list[dict[str, str]]


def read(name: str) -> Rows:
    """The lines of a table."""
    with gzip.open(RESULTS / name, "rt") if name.endswith(".gz") else open(RESULTS / name) as file:
        return list(csv.DictReader(file))


def by_cell(rows: Rows) -> dict[str, dict[int, dict[str, str]]]:
    """Lines by STUDY/CELL and seed."""
    cells: dict[str, dict[int, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        cells[row["id"].rpartition("-s")[0]][int(row["seed"])] = row
    return cells


def leads(ours: dict[int, dict[str, str]], base: dict[int, dict[str, str]], measure: str) -> list[float]:
    """Differences to the baseline, seed by seed."""
    return [
        float(row[measure]) - float(base[seed][measure])
        for seed, row in sorted(ours.items())
        if row[measure] and seed in base
    ]


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and deviation; no deviation of one value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def save(figure: plt.Figure, name: str) -> None:
    """As SVG, the same bytes each time."""
    (RESULTS / "figures").mkdir(exist_ok=True)
    figure.savefig(RESULTS / "figures" / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def draw_claim(cells: dict[str, dict[int, dict[str, str]]]) -> None:
    """Leads over the same method without the term."""
    pairs = [
        ("CIFAR-10\nMoCo, α 20, τ 0.2", "cifar10-warm-no-ramp/moco-co2-a20-t0.2", "cifar10-warm-no-ramp/moco"),
        ("CIFAR-10\nMoCo, α 3, τ 0.1", "cifar10-warm-no-ramp/moco-co2-a3-t0.1", "cifar10-warm-no-ramp/moco"),
        (
            "Tiny-ImageNet-100\nMoCo v1, α 3 rising, τ 0.04",
            "tiny-imagenet-100/moco-co2-a3-t0.04-r1",
            "tiny-imagenet-100/moco",
        ),
        (
            "CIFAR-10, narrow*\nSimCLR, α 1, τ 0.2",
            "cifar10-simclr-narrow/simclr-co2-a1-t0.2",
            "cifar10-simclr-narrow/simclr",
        ),
        (
            "CIFAR-10, narrow*\nInsDisc, α 3 rising, τ 0.1",
            "cifar10-insdisc-narrow-ramp/insdisc-co2-a3-t0.1-r1",
            "cifar10-insdisc-narrow-ramp/insdisc",
        ),
    ]
    figure, axes = plt.subplots(figsize=(10.5, 3.6))
    for offset, (measure, title), colour in zip((-0.25, 0, 0.25), MEASURES.items(), (BLUE, ORANGE, GREEN), strict=True):
        found = [spread(leads(cells[ours], cells[base], measure)) for _, ours, base in pairs]
        places = [place + offset for place in range(len(pairs))]
        axes.errorbar(
            places, [mean for mean, _ in found], [deviation for _, deviation in found],
            fmt="o", color=colour, capsize=4, label=title,
        )  # fmt: skip
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xticks(range(len(pairs)), [name for name, *_ in pairs], fontsize=8)
    axes.set_ylabel("points that the term adds")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(
        "Three seeds each; bars are deviations. * judged on held-out training images", fontsize=9, loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "claim")


def draw_over(cells: dict[str, dict[int, dict[str, str]]], study: str, setting: str, fixed: tuple[str, float]) -> None:
    """Accuracy over one setting of the term, the other held; the baseline as a line."""
    other, value = fixed
    figure, panels = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    rows = [seeds[0] for cell, seeds in cells.items() if cell.startswith(f"{study}/")]
    base = next(row for row in rows if float(row["alpha"]) == 0 and not float(row["label_smoothing"]))
    points = sorted(
        (row for row in rows if float(row["alpha"]) and float(row[other]) == value), key=lambda row: float(row[setting])
    )
    for axes, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        axes.plot([float(row[setting]) for row in points], [float(row[measure]) for row in points], "o-", color=BLUE)
        axes.axhline(float(base[measure]), color=GREY, linestyle="--", linewidth=1)
        axes.set_xscale("log")
        ticks = [float(row[setting]) for row in points]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    named = {"alpha": "α", "tau_consistency": "τ_con"}
    panels[0].set_ylabel("accuracy (%)")
    figure.supxlabel(f"{named[setting]}, with {named[other]} = {value:g} ({study}, one seed; dashed: MoCo)", fontsize=8)
    save(figure, {"alpha": "alpha", "tau_consistency": "tau"}[setting])


def draw_curves(curves: Rows) -> None:
    """The paper's figures 2 and 3: losses and finding over the run."""
    cells = {
        "MoCo": ("cifar10-warm-no-ramp/moco-s0", GREY),
        "+ CO2": ("cifar10-warm-no-ramp/moco-co2-a3-t0.1-s0", BLUE),
    }
    panels_of = {
        "instance": "instance loss",
        "consistency": "consistency loss (τ_con = 0.1)",
        "top1": "positives found (%)",
    }
    figure, panels = plt.subplots(1, 3, figsize=(9.5, 2.8), layout="constrained")
    for name, (cell, colour) in cells.items():
        rows = [row for row in curves if row["id"] == cell and row["kind"] == "train"]
        for axes, measure in zip(panels, panels_of, strict=True):
            scale = 100 if measure == "top1" else 1
            axes.plot(
                [float(row["epoch"]) for row in rows], [scale * float(row[measure]) for row in rows],
                color=colour, label=name, linewidth=1.2,
            )  # fmt: skip
    for axes, title in zip(panels, panels_of.values(), strict=True):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("epoch", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, "curves")


def draw_transfer(rows: Rows) -> None:
    """PASCAL VOC 2012, three seeds."""
    measures = {"mAP_11point": "SVMs, mAP", "AP50": "detection, AP50", "mIoU": "segmentation, mIoU"}
    figure, panels = plt.subplots(1, 3, figsize=(7, 2.4), layout="constrained")
    for axes, (measure, title) in zip(panels, measures.items(), strict=True):
        for place, (cell, colour) in enumerate((("moco", GREY), ("moco-co2-a3-t0.04-r1", BLUE))):
            values = [
                float(row["value"]) for row in rows
                if row["id"].startswith(f"tiny-imagenet-100/{cell}-s") and row["measure"] == measure
            ]  # fmt: skip
            mean, deviation = spread(values)
            axes.errorbar([place], [mean], [deviation], fmt="o", color=colour, capsize=4)
            axes.plot([place] * len(values), values, ".", color=colour, alpha=0.4)
        axes.set_xticks([0, 1], ["MoCo", "+ CO2"], fontsize=8)
        axes.set_xlim(-0.6, 1.6)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, "transfer")


def draw_speed(rows: Rows) -> None:
    """The objective at the paper's size."""
    prefix = "objective, forward and backward, B=256 K=65,536 D=128, "
    names = {"reference": "PyTorch", "compiled": "compiled", "fused": "here (Triton)"}
    values = {row["what"].removeprefix(prefix): float(row["value"]) for row in rows if row["what"].startswith(prefix)}
    figure, axes = plt.subplots(figsize=(5, 1.6))
    for place, (name, title) in enumerate(names.items()):
        axes.barh(place, values[name], color=BLUE if name == "fused" else GREY)
        axes.text(values[name], place, f"  {values[name]:.2f} ms", va="center", fontsize=8)
        axes.text(0, place, f"{title}  ", va="center", ha="right", fontsize=8)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_title("256 queries against 65,536 negatives, forward and backward, one H200", fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    save(figure, "speed")


def main() -> None:
    """All of them."""
    plt.rcParams |= {"svg.hashsalt": "co2", "svg.fonttype": "none", "font.family": "sans-serif"}
    cells = by_cell(read("runs.csv"))
    draw_claim(cells)
    draw_over(cells, "tiny-imagenet-100-v1", "alpha", ("tau_consistency", 0.04))
    draw_over(cells, "tiny-imagenet-100-v1", "tau_consistency", ("alpha", 3.0))
    draw_curves(read("curves.csv.gz"))
    draw_transfer(read("transfer.csv"))
    draw_speed(read("speed.csv"))


if __name__ == "__main__":
    main()
