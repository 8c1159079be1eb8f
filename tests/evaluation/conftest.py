"""A backbone that has learnt a little, to compare with one that has not."""

import dataclasses

import pytest

from co2 import recipes
from co2.data.open import open_data
from co2.engine.pretrain import pretrain
from co2.evaluation.subject import open_subject


@pytest.fixture(scope="session")
def pretrained_run(tmp_path_factory):
    """The demo's network after 8 epochs on 600 shapes: seconds, and enough to beat random weights by far."""
    experiment = recipes.get("demo-co2").edit(
        data="shapes:600:32",
        epochs=8,
        workers=0,
        device="cpu",
        optimisation={"learning_rate": 0.3},
        method={"queue": 256},
        monitoring={"evaluate_every": 1000, "health_images": 16, "bank_images": 30, "query_images": 20},
    )
    return pretrain(experiment, out=tmp_path_factory.mktemp("pretrained") / "run")


@pytest.fixture(scope="session")
def pretrained(pretrained_run):
    return open_subject(str(pretrained_run))


@pytest.fixture(scope="session")
def untrained(pretrained):
    return pretrained.random(seed=0)


@pytest.fixture(scope="session")
def shapes():
    """Some shapes to learn from, and a few hundred to be judged on."""

    def build(count):
        data = open_data(f"shapes:{count}:32")
        return dataclasses.replace(data, test=data.test.subset(range(300)))

    return build
