import json
from pathlib import Path

import numpy as np
import pytest

import co2
from co2 import recipes
from co2.experiment import Experiment, differences, refuse_idle, views_in
from co2.views.view import View


def test_the_learning_rate_follows_the_batch_size_unless_it_is_set():
    recipe = recipes.moco_v2()
    assert recipe.edit(batch_size=1024).learning_rate == pytest.approx(0.12)
    assert recipe.edit(batch_size=1024, optimisation={"learning_rate": 0.5}).learning_rate == 0.5


def test_edit_reaches_nested_settings_and_leaves_the_rest():
    edited = recipes.co2_v2().edit(epochs=7, method={"alpha": 2.0})
    assert (edited.epochs, edited.method.alpha, edited.method.tau_consistency) == (7, 2.0, 0.05)


def test_edit_refuses_a_setting_that_does_not_exist():
    with pytest.raises(co2.UserError, match="Did you mean 'epochs'"):
        recipes.co2_v2().edit(epoch=7)
    with pytest.raises(co2.UserError, match=r"no setting 'method\.alfa'\. Did you mean 'alpha'"):
        recipes.co2_v2().edit(method={"alfa": 1.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 1}, "batch statistics"),
        ({"seed": -1}, "seed"),
        ({"workers": -2}, "workers"),
        ({"workers": 100_000}, "from 0 to 1,024; got 100,000"),
        ({"method": {"alpha": -1.0}}, "alpha"),
        ({"method": {"alpha": float("nan")}}, "alpha"),
        ({"method": {"tau": 0.0}}, "above 0"),
        ({"method": {"tau_consistency": -0.1}}, "above 0"),
        ({"method": {"label_smoothing": 1.0}}, "label_smoothing"),
        ({"method": {"ramp_up": 1.5}}, "ramp_up is a share of the run"),
        ({"method": {"queue": 0}}, "queue"),
        ({"method": {"momentum": 1.0}}, "momentum"),
        ({"network": {"groups": 1}}, "one group of batch statistics"),
        ({"network": {"groups": 200}}, "cannot be split into 200 groups"),
        ({"method": {"dimension": 0}}, "dimension"),
        ({"optimisation": {"learning_rate": 0.0}}, "learning_rate"),
        ({"optimisation": {"learning_rate": float("inf")}}, "learning_rate must be a number"),
        ({"optimisation": {"weight_decay": -1.0}}, "weight_decay"),
        ({"optimisation": {"step_factor": float("nan")}}, "step_factor"),
        ({"optimisation": {"milestones": (120.0, 160.0)}}, "0.6 for epoch 120"),
        ({"monitoring": {"log_every": 0}}, "log_every"),
        ({"monitoring": {"health_images": 1}}, "health_images must be at least 2"),
        ({"monitoring": {"bank_images": 1}}, "bank_images must be at least 2"),
        ({"monitoring": {"checkpoint_minutes": float("inf")}}, "checkpoint_minutes must be a number"),
        ({"monitoring": {"checkpoint_seconds": float("nan")}}, "checkpoint_seconds must be a number"),
        ({"execution": {"resident_gib": float("inf")}}, "resident_gib must be a number"),
        ({"method": {"alpha": float("inf")}}, "alpha must be a number"),
        ({"method": {"tau": float("inf")}}, "tau is a temperature and must be a number"),
        ({"monitoring": {"keep_every": -1}}, "keep_every"),
        ({"size": 2}, "too small"),
        ({"epochs": 2, "earlier_sizes": (96, 160)}, "2 epochs has no room for 3 sizes"),
        ({"method": {"view": {"crop_scale": (0.5, 0.2)}}}, "crop_scale"),
        ({"method": {"view": {"crop_scale": (0.5, 1.2)}}}, "at most 1"),
        ({"method": {"view": {"grey_probability": 1.5}}}, "probability"),
        ({"method": {"view": {"jitter": (0.4, 0.4, 0.4, 0.7)}}}, "hue"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_a_reason(changes, message):
    with pytest.raises(co2.UserError, match=message):
        recipes.moco_v2().edit(**changes)


def test_one_group_is_fine_where_no_keys_are_shuffled():
    recipes.moco_v2().edit(network={"groups": 1}, method={"shuffle": False})


def test_lists_become_the_tuples_that_settings_are():
    listed = recipes.moco_v1().edit(earlier_sizes=[96, 160], optimisation={"milestones": [0.5]})
    assert differences(listed, Experiment.from_json(listed.to_json())) == []
    assert (listed.earlier_sizes, listed.optimisation.milestones) == ((96, 160), (0.5,))


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("epochs", "many", "epochs cannot be many: it has to be a whole number"),
        ("method", {"alpha": "abc"}, "method.alpha cannot be abc: it has to be a number"),
        ("method", {"symmetric": 1}, "method.symmetric cannot be 1: it has to be true or false"),
        ("method", {"head": "wide"}, "method.head cannot be wide: it has to be one of linear, mlp"),
        ("method", {"name": "mocco"}, "does not know the method mocco"),
        ("method", {"name": "unheard.py:Of"}, "never imported: name the file again"),
        ("method", {"name": None}, "The method is not named"),
        (
            "method",
            {"view": {"crop_scale": [1]}},
            "method.view.crop_scale cannot be .*: it has to be a list of 2, each a number",
        ),
        ("earlier_sizes", ["x"], "earlier_sizes cannot be .*: it has to be a list, each a whole number"),
        ("optimisation", {"learning_rate": "x"}, "learning_rate cannot be x: it has to be a number or null"),
    ],
)
def test_what_a_setting_has_to_be_is_said(setting, value, wanted):
    plain = json.loads(recipes.moco_v2().to_json())
    plain[setting] = {**plain[setting], **value} if isinstance(value, dict) else value
    with pytest.raises(co2.UserError, match=wanted):
        Experiment.from_json(json.dumps(plain))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimisation": {"schedule": "cosin"}},
            "schedule cannot be cosin: it has to be one of step, cosine, constant",
        ),
        ({"optimisation": {"optimiser": "adam"}}, "optimiser cannot be adam"),
        ({"execution": {"precision": "bf16"}}, "precision cannot be bf16: it has to be one of auto, float32, bfloat16"),
        ({"method": {"head": "MLP"}}, "head cannot be MLP"),
        ({"network": {"stem": "tiny"}}, "stem cannot be tiny"),
        ({"method": {"head": "linear", "hidden": 64}}, "A linear head has no hidden layer"),
        ({"epochs": 1.5}, "epochs cannot be 1.5: it has to be a whole number"),
        ({"seed": "x"}, "seed cannot be x"),
        ({"method": 3}, "method is a group of settings"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_when_it_is_given(changes, message):
    with pytest.raises(co2.UserError, match=message):
        recipes.moco_v2().edit(**changes)


def test_values_of_other_libraries_become_plain_ones():
    edited = recipes.co2_v2().edit(
        data=Path("pictures"), epochs=np.int64(7), size=48, method={"alpha": np.float64(2.5), "view": View()}
    )
    assert (edited.data, edited.epochs, edited.method.alpha, edited.size) == ("pictures", 7, 2.5, 48)
    assert Experiment.from_json(edited.to_json()) == edited


def test_differences_name_settings_and_leave_circumstances_aside():
    ours = recipes.co2_v2()
    theirs = ours.edit(out="elsewhere", device="cpu", workers=3, resume=True, data="moved")
    assert differences(ours, theirs) == []
    theirs = theirs.edit(epochs=3, method={"alpha": 1.0})
    assert differences(ours, theirs) == [
        "epochs: 3 in the run folder, 200 asked for",
        "method.alpha: 1.0 in the run folder, 0.3 asked for",
    ]
    elsewhere = ours.edit(execution={"step": "eager", "precision": "bfloat16"})
    assert differences(ours, elsewhere) == ["execution.precision: bfloat16 in the run folder, auto asked for"]


def test_settings_of_another_version_are_refused_by_name():
    plain = json.loads(recipes.co2_v2().to_json())
    plain["method"]["gamma"] = 1
    with pytest.raises(co2.UserError, match="gamma"):
        co2.Experiment.from_json(json.dumps(plain))


@pytest.mark.parametrize(
    ("recipe", "changes", "option", "with_these_it_is_used"),
    [
        (
            "moco-v2",
            {"optimisation": {"milestones": (0.5,)}},
            "--optimisation.milestones",
            {"optimisation": {"schedule": "step"}},
        ),
        (
            "moco-v2",
            {"optimisation": {"step_factor": 0.5}},
            "--optimisation.step-factor",
            {"optimisation": {"schedule": "step", "milestones": (0.5,)}},
        ),
        (
            "moco-v1",
            {"optimisation": {"milestones": (), "step_factor": 0.5}},
            "--optimisation.step-factor",
            {"optimisation": {"milestones": (0.5,)}},
        ),
        (
            "moco-v2",
            {"optimisation": {"learning_rate": 0.1, "base_learning_rate": 0.2}},
            "--optimisation.base-learning-rate",
            {"optimisation": {"learning_rate": None}},
        ),
        (
            "moco-v2",
            {"optimisation": {"learning_rate": 0.1, "base_batch_size": 64}},
            "--optimisation.base-batch-size",
            {"optimisation": {"learning_rate": None}},
        ),
        (
            "moco-small",
            {"method": {"view": {"blur_sigma": (0.5, 1.0)}}},
            "--method.view.blur-sigma",
            {"method": {"view": {"blur_probability": 0.5}}},
        ),
        (
            "moco-v2",
            {"method": {"view": {"jitter_probability": 0.0, "jitter": (0.1,) * 4}}},
            "--method.view.jitter",
            {"method": {"view": {"jitter_probability": 0.5}}},
        ),
        (
            "moco-v2",
            {"method": {"view": {"jitter_probability": 0.5, "jitter": (0.0,) * 4}}},
            "--method.view.jitter-probability",
            {"method": {"view": {"jitter": (0.1,) * 4}}},
        ),
        (
            "moco-v2",
            {"method": {"view": {"grey_probability": 0.0, "grey_first": True}}},
            "--method.view.grey-first",
            {"method": {"view": {"grey_probability": 0.1}}},
        ),
        (
            "moco-v2",
            {"optimisation": {"adapt": "all"}},
            "--optimisation.adapt",
            {"optimisation": {"optimiser": "lars"}},
        ),
        (
            "moco-v2",
            {"optimisation": {"beta2": 0.95}},
            "--optimisation.beta2",
            {"optimisation": {"optimiser": "adamw"}},
        ),
        (
            "moco-v2",
            {"optimisation": {"weight_decay": 0.0, "decay": "matrices"}},
            "--optimisation.decay",
            {"optimisation": {"weight_decay": 0.1}},
        ),
        ("moco-v2", {"method": {"ramp_up": 0.5}}, "--method.ramp-up", {"method": {"alpha": 1.0}}),
        ("simclr", {"method": {"detach_target": True}}, "--method.detach-target", {"method": {"alpha": 1.0}}),
        (
            "moco-v2",
            {"execution": {"input": "workers", "resident_gib": 1.0}},
            "--execution.resident-gib",
            {"execution": {"input": "auto"}},
        ),
    ],
)
def test_what_was_changed_though_nothing_looks_at_it_is_refused_and_only_then(
    recipe, changes, option, with_these_it_is_used
):
    plain = recipes.get(recipe)
    refuse_idle(plain, plain)
    edited = plain.edit(**changes)
    with pytest.raises(co2.UserError, match=f"^{option} would do nothing "):
        refuse_idle(edited, plain)
    refuse_idle(edited.edit(**with_these_it_is_used), plain)


def test_no_recipe_is_refused_for_what_another_change_leaves_idle():
    for recipe in recipes.RECIPES.values():
        plain = recipe.build()
        refuse_idle(
            plain.edit(
                optimisation={"schedule": "cosine"},
                method={name: {"blur_probability": 0.0} for name in views_in(plain.method)},
            ),
            plain,
        )
