"""Records as a study writes them, without the training; and a study whose cells take a second each."""

import json

import numpy as np
import pytest

from co2.evaluation.presets import settings_of
from co2.study.command import Request, make_plan
from co2.study.plan import write_plan
from co2.study.records import record_path, settings_to_record, write_record
from co2.study.settings import plain_settings

TINY = ["size=16", "batch_size=16", "method.dimension=16", "method.queue=50", "monitoring.log_every=1"]
TINY += ["monitoring.health_images=16", "monitoring.bank_images=30", "monitoring.query_images=20"]
# What the demo's recipe has today is not what these tests are about.
TINY += ["method.alpha=0.3", "method.tau_consistency=0.1", "method.ramp_up=0"]
QUICKER = ["linear.strengths=0.1", "linear.iterations=3", "linear.flips=false", "knn.query_images=50"]


@pytest.fixture
def request_tiny():
    """What the command line would make of a study on 40 rendered pictures: 2 epochs of 3 steps."""

    def build(**changes):
        settings = {
            "data": "shapes:40:16",
            "base": "demo-co2",
            "epochs": 2,
            "seeds": (0,),
            "set": tuple(TINY),
            "evaluation": tuple(QUICKER),
            "device": "cpu",
            "workers": 0,
        }
        return Request(**{**settings, **changes})

    return build


@pytest.fixture
def words_tiny():
    """The same as words on the command line."""
    words = ["--data", "shapes:40:16", "--base", "demo-co2", "--epochs", "2", "--device", "cpu", "--workers", "0"]
    for text in TINY:
        words += ["--set", text]
    for text in QUICKER:
        words += ["--evaluation", text]
    return words


@pytest.fixture
def write_cell():
    """Write the record of a cell with made-up numbers and curves."""

    def write(folder, plan, study, variant, seed, numbers=None, curve=None, **changes):
        found = next(one for one in plan.grids[study].variants if one.name == variant)
        cell = plan.cell(study, found, seed)
        by_protocol = {}
        for name, value in (numbers or {}).items():
            protocol, _, inner = name.partition(".")
            by_protocol.setdefault(protocol, {})[inner] = value
        evaluations = {
            protocol: {
                "numbers": values,
                "settings": settings_to_record(
                    protocol, cell.protocols.get(protocol) or vars(settings_of(protocol, "quick")), plan.view_size
                ),
                "details": {},
                "data": plan.base.data,
            }
            for protocol, values in by_protocol.items()
        }
        content = {
            "cell": cell.name,
            "seed": seed,
            "settings": plain_settings(cell.experiment),
            "data": {"name": plan.base.data, "train": 40, "bank": 40, "test": 1000, "classes": 10}
            | {"validate": plan.validate},
            "evaluations": evaluations,
            "seconds": {"wall": 60.0, "steps": 50.0, "sittings": 1},
            "made_with": {"device": "cpu"},
            "curves": {"train": curve or {"epoch": [], "top1": []}, "epoch": {}},
            "advice": [],
        }
        write_record(record_path(folder, cell.name), {**content, **changes})
        return cell

    return write


@pytest.fixture
def fill(write_cell):
    """Write records with these linear accuracies, by variant and seed; kNN is five lower."""

    def write(folder, plan, study, accuracies, curves=None):
        for variant, by_seed in accuracies.items():
            for seed, value in by_seed.items():
                curve = (curves or {}).get(variant, lambda seed: None)(seed)
                numbers = {"knn.top1": value - 5, "linear.top1": value, "knn.top5": 99.0}
                write_cell(folder, plan, study, variant, seed, numbers, curve)

    return write


@pytest.fixture
def log():
    """A log whose lines are a function of the seed."""

    def build(seed, level, epochs=4, lines=10):
        ends = np.linspace(0, epochs, lines + 1)[1:]
        return {
            "epoch": [round(float(end), 4) for end in ends],
            "instance": (5 - ends + 0.1 * seed).tolist(),
            "consistency": (level + 0.1 * seed + 0.05 * ends).tolist(),
            "top1": (0.2 * ends).tolist(),
        }

    return build


@pytest.fixture
def table_of():
    """The first table of a Markdown text, by the first column."""

    def read(text):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        end = next((i for i, line in enumerate(text.splitlines()) if line.startswith("|")), 0)
        length = next((i for i, line in enumerate(text.splitlines()[end:]) if not line.startswith("|")), len(lines))
        return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:length]}

    return read


@pytest.fixture
def planned(tmp_path, request_tiny):
    """A folder with a plan in it, and the plan."""

    def build(*studies, folder=None, **changes):
        folder = folder or tmp_path / "results"
        folder.mkdir(exist_ok=True)
        plan = make_plan(studies, request_tiny(**changes))
        write_plan(folder, plan)
        return folder, plan

    return build


@pytest.fixture
def read_json():
    return lambda path: json.loads(path.read_text())
