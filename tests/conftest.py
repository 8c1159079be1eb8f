"""A run that takes a second, for every test that needs a real one."""

import dataclasses
import json
import os

import pytest
import torch
from hypothesis import settings

from co2 import recipes
from co2.experiment import Experiment

# What passed once passes again: every run draws the same examples. `pytest --hypothesis-profile search` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, which must know before it is imported
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter as interpreter

    # The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer takes for loop bounds.
    patch_tensors = interpreter._patch_lang_tensor

    def patch_tensors_and_scalars(tensor, scope):
        patch_tensors(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensors_and_scalars


@pytest.fixture
def tiny(build_tiny):
    """An experiment on 40 rendered pictures: 2 epochs of 3 steps, the last one short."""
    return build_tiny


@pytest.fixture(scope="session")
def build_tiny():
    def build(recipe: str = "demo-co2", *, negatives: int | None = None, **changes) -> Experiment:
        """`negatives`: how many, for a queue or a memory bank, which have names of their own for it."""
        start = recipes.get(recipe)
        # A learning rate and an alpha that stay, so that six steps say what they do.
        method = {"dimension": 16, "ramp_up": 0.0}
        own = {"queue", "negatives"} & {one.name for one in dataclasses.fields(start.method)}
        method |= dict.fromkeys(own & {"queue"}, 50) if negatives is None else dict.fromkeys(own, negatives)
        if recipe.startswith("demo"):
            method |= {"tau_consistency": 0.1} | ({"alpha": 0.3} if recipe == "demo-co2" else {})
        small = {
            "data": "shapes:40:16",
            "epochs": 2,
            "batch_size": 16,
            "workers": 0,
            "device": "cpu",
            "size": 16,
            "network": {"backbone": "co2/resnet10-narrow", "stem": "small-stride-2"},
            "method": {name: value for name, value in method.items() if hasattr(start.method, name)},
            "optimisation": {"warm_up": 0.0},
            "monitoring": {
                "checkpoint_seconds": 0.0,
                "log_every": 1,
                "evaluate_every": 1,
                "health_images": 16,
                "bank_images": 30,
                "query_images": 20,
            },
        }
        for name, value in changes.items():
            small[name] = {**small.get(name, {}), **value} if isinstance(value, dict) else value
        return start.edit(**small)

    return build


@pytest.fixture(scope="session")
def rows():
    """The lines of a run's metrics.jsonl of one kind."""

    def read(run, kind="train"):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    return read
