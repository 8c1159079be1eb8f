"""A run that takes a second, for every test that needs a real one."""

import json
import os

import pytest
import torch
from hypothesis import settings

from co2 import recipes
from co2.config import Experiment

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
    def build(recipe: str = "demo-co2", **changes) -> Experiment:
        small = {
            "data": "shapes:40:16",
            "epochs": 2,
            "batch_size": 16,
            "workers": 0,
            "device": "cpu",
            "views": {"size": 16},
            "encoder": {"backbone": "co2/resnet10-narrow", "stem": "small-stride-2", "dimension": 16},
            "monitoring": {
                "checkpoint_seconds": 0.0,
                "log_every": 1,
                "evaluate_every": 1,
                "health_images": 16,
                "bank_images": 30,
                "query_images": 20,
            },
        }
        if recipe.startswith(("demo", "moco", "co2-v", "co2-small")):
            small["negatives"] = {"size": 50}
        # A learning rate and an alpha that stay, so that six steps say what they do.
        small["objective"] = {"ramp_up": 0.0}
        small["optimisation"] = {"warm_up": 0.0}
        if recipe.startswith("demo"):
            small["objective"] |= {"tau_consistency": 0.1} | ({"alpha": 0.3} if recipe == "demo-co2" else {})
        for name, value in changes.items():
            small[name] = {**small.get(name, {}), **value} if isinstance(value, dict) else value
        return recipes.get(recipe).edit(**small)

    return build


@pytest.fixture(scope="session")
def rows():
    """The lines of a run's metrics.jsonl of one kind."""

    def read(run, kind="train"):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    return read
