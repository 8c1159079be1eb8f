import math

import pytest

from co2.engine.schedule import learning_rate
from co2.experiment import Optimisation
from co2.methods.moco import MoCo
from co2.methods.parts import constant


def rates(steps=100, **settings):
    specification = Optimisation(**settings)
    return [learning_rate(specification, 2.0, step, steps) for step in range(steps)]


def test_cosine_is_the_closed_form():
    expected = [2.0 * 0.5 * (1 + math.cos(math.pi * step / 100)) for step in range(100)]
    assert rates(schedule="cosine") == pytest.approx(expected)


@pytest.mark.parametrize("steps", [10, 50, 200])
def test_milestones_scale_with_the_length_of_the_run(steps):
    values = rates(steps, schedule="step", milestones=(0.6, 0.8), step_factor=0.1)
    drops = [step for step in range(1, steps) if values[step] < values[step - 1] * 0.5]
    assert drops == [round(0.6 * steps), round(0.8 * steps)]


def test_warm_up_rises_linearly_to_the_peak_and_then_the_schedule_starts_from_it():
    values = rates(schedule="cosine", warm_up=0.1)
    assert values[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert values[10] == pytest.approx(2.0)
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[-1] < 0.01


@pytest.mark.parametrize(("steps", "rising"), [(9, 1), (15, 2)])
def test_a_warm_up_of_part_of_a_step_is_a_whole_one(steps, rising):
    values = rates(steps, schedule="cosine", warm_up=0.1)
    assert values[:rising] == pytest.approx([2.0 * (step + 1) / rising for step in range(rising)])
    assert values[rising:] == sorted(values[rising:], reverse=True)
    assert 1.9 < values[rising] < 2.0


def test_a_resumed_run_has_the_rate_of_its_step_and_no_history():
    # A pure function: asked for in any order, it gives the same.
    specification = Optimisation(schedule="step", milestones=(0.5,))
    late = learning_rate(specification, 1.0, 80, 100)
    learning_rate(specification, 1.0, 3, 100)
    assert learning_rate(specification, 1.0, 80, 100) == late == pytest.approx(0.1)


def test_a_constant_rate_stays_and_a_network_may_have_a_rate_of_its_own():
    assert rates(schedule="constant", warm_up=0.1)[10:] == [2.0] * 90
    settings = Optimisation(schedule="cosine")
    own = [learning_rate(settings, 2.0, step, 100, constant(0.5)) for step in range(100)]
    assert own == [1.0] * 100


def test_the_weight_of_the_consistency_term_rises_to_alpha_over_its_share_of_the_run_and_stays():
    schedule = MoCo(alpha=3.0, ramp_up=0.4).schedules()["alpha"]
    weights = [schedule(step / 100) for step in range(100)]
    assert weights[:40] == pytest.approx([3 * math.exp(-5 * (1 - step / 40) ** 2) for step in range(40)])
    assert weights[40:] == [3.0] * 60
    assert MoCo(alpha=3.0).schedules()["alpha"](0.0) == 3.0  # the paper's: from the first step on
