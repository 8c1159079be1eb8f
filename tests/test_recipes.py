"""The recipes against the table of the paper's appendix A.1, number by number."""

import dataclasses

import pytest

import co2
from co2 import recipes
from co2.engine.schedule import learning_rate


@pytest.mark.parametrize(
    ("recipe", "head", "tau_instance", "alpha", "tau_consistency"),
    [
        (recipes.moco_v1, "linear", 0.07, 0.0, 0.04),
        (recipes.co2_v1, "linear", 0.07, 10.0, 0.04),
        (recipes.moco_v2, "mlp", 0.2, 0.0, 0.05),
        (recipes.co2_v2, "mlp", 0.2, 0.3, 0.05),
    ],
)
def test_the_papers_settings(recipe, head, tau_instance, alpha, tau_consistency):
    experiment = recipe()
    assert experiment.network.backbone == "torchvision/resnet50"
    assert experiment.method.head == head
    assert experiment.method.hidden is None  # as wide as the backbone's features: 2048
    assert experiment.method.dimension == 128
    assert experiment.network.stem == "standard"
    assert (experiment.batch_size, experiment.network.groups, experiment.method.shuffle) == (256, 4, True)
    assert experiment.method.tau == tau_instance
    assert experiment.method.alpha == alpha
    assert experiment.method.tau_consistency == tau_consistency
    assert experiment.method.label_smoothing == 0
    assert experiment.method.name == "moco"
    assert (experiment.method.queue, experiment.method.momentum) == (65_536, 0.999)
    assert (experiment.optimisation.optimiser, experiment.optimisation.momentum) == ("sgd", 0.9)
    assert experiment.optimisation.weight_decay == 1e-4
    assert experiment.learning_rate == pytest.approx(0.03)
    assert experiment.epochs == 200
    assert experiment.size == 224


def test_moco_v1_drops_the_learning_rate_after_epochs_120_and_160_of_200():
    experiment = recipes.co2_v1()
    rates = [learning_rate(experiment.optimisation, experiment.learning_rate, epoch, 200) for epoch in range(200)]
    assert rates[:120] == pytest.approx([0.03] * 120)
    assert rates[120:160] == pytest.approx([0.003] * 40)
    assert rates[160:] == pytest.approx([0.0003] * 40)


def test_moco_v2_follows_a_cosine():
    experiment = recipes.co2_v2()
    rates = [learning_rate(experiment.optimisation, experiment.learning_rate, step, 100) for step in (0, 50, 99)]
    assert rates[0] == pytest.approx(0.03)
    assert rates[1] == pytest.approx(0.015)
    assert 0 < rates[2] < 0.0001


def test_views_of_moco_v1_and_v2():
    v1, v2 = recipes.moco_v1().plain, recipes.moco_v2().plain
    assert v1.crop_scale == v2.crop_scale == (0.2, 1.0)
    assert (v1.jitter, v1.jitter_probability, v1.grey_first) == ((0.4, 0.4, 0.4, 0.4), 1.0, True)
    assert (v2.jitter, v2.jitter_probability, v2.grey_first) == ((0.4, 0.4, 0.4, 0.1), 0.8, False)
    assert (v1.blur_probability, v2.blur_probability, v2.blur_sigma) == (0.0, 0.5, (0.1, 2.0))
    assert v1.grey_probability == v2.grey_probability == 0.2


@pytest.mark.parametrize("recipe", [recipes.moco_small, recipes.co2_small])
def test_small_recipes(recipe):
    experiment = recipe()
    assert experiment.network.backbone == "torchvision/resnet18"
    assert experiment.network.stem == "small"
    assert (experiment.method.queue, experiment.method.momentum) == (4096, 0.99)
    assert experiment.method.symmetric is False
    assert experiment.method.tau == 0.1
    assert (experiment.batch_size, experiment.learning_rate) == (512, pytest.approx(0.12))
    assert experiment.optimisation.warm_up == 0.05
    assert (experiment.optimisation.weight_decay, experiment.optimisation.schedule) == (5e-4, "cosine")
    assert experiment.epochs == 200
    assert experiment.method.view.blur_probability == 0


def test_simclr_and_insdisc_after_their_papers():
    simclr, insdisc = recipes.simclr(), recipes.insdisc()
    assert (simclr.batch_size, simclr.epochs, simclr.method.tau) == (4096, 100, 0.1)
    assert (simclr.optimisation.optimiser, simclr.optimisation.weight_decay) == ("lars", 1e-6)
    assert simclr.learning_rate == pytest.approx(0.3 * 4096 / 256)
    assert simclr.optimisation.warm_up * simclr.epochs == pytest.approx(10)
    assert (insdisc.method.name, insdisc.method.negatives, insdisc.method.bank_momentum) == ("insdisc", 4096, 0.5)
    assert insdisc.method.tau == 0.07
    for small, rate in ((recipes.simclr_small(), 0.24), (recipes.insdisc_small(), 0.06)):
        assert (small.learning_rate, small.optimisation.warm_up) == (pytest.approx(rate), 0.05)


def test_the_term_of_recipes_for_small_images_is_as_studies_chose_it():
    chosen = {
        small.recipe: (small.method.alpha, small.method.tau_consistency, small.method.ramp_up)
        for small in (recipes.co2_small(), recipes.co2_simclr_small(), recipes.co2_insdisc_small())
    }
    assert chosen == {
        "co2-small": (20.0, 0.2, 0.0),
        "co2-simclr-small": (1.0, 0.2, 0.0),
        "co2-insdisc-small": (3.0, 0.1, 1.0),
    }


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_each_recipe_carries_its_name_and_survives_json(name):
    experiment = recipes.get(name)
    assert (experiment.recipe, experiment.version) == (name, recipes.RECIPES[name].version)
    assert co2.Experiment.from_json(experiment.to_json()) == experiment


@pytest.mark.parametrize(
    ("plain", "with_co2"),
    [
        ("moco-v1", "co2-v1"),
        ("moco-v2", "co2-v2"),
        ("simclr", "co2-simclr"),
        ("insdisc", "co2-insdisc"),
        ("moco-small", "co2-small"),
        ("simclr-small", "co2-simclr-small"),
        ("insdisc-small", "co2-insdisc-small"),
        ("demo-moco", "demo-co2"),
    ],
)
def test_co2_changes_nothing_but_alpha_and_how_it_rises(plain, with_co2):
    ours, theirs = recipes.get(with_co2), recipes.get(plain)
    assert ours.method.alpha > 0 == theirs.method.alpha
    without = dataclasses.replace(ours, recipe=plain, method=dataclasses.replace(ours.method, alpha=0.0, ramp_up=0.0))
    assert without == theirs


def test_label_smoothing_changes_nothing_but_label_smoothing():
    ours = recipes.moco_label_smoothing().edit(recipe="moco-v1", method={"label_smoothing": 0.0})
    assert ours == recipes.moco_v1()
    assert recipes.moco_label_smoothing().method.label_smoothing == 0.1


def test_a_misspelt_recipe_gets_a_hint():
    with pytest.raises(co2.UserError, match="Did you mean 'co2-small'"):
        recipes.get("co2-smal")
