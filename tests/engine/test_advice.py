import pytest

from co2 import recipes
from co2.engine.advice import Advisor

HEALTHY = {"loss": 5.0, "top1": 0.5}


def advisor(**changes):
    return Advisor(recipes.moco_small().edit(**changes), has_batch_norm=True)


def after_epoch(ours, values, epoch=20, step=2000):
    """Of 200 epochs."""
    return ours.after_epoch(epoch, step, values)


def test_a_loss_that_rises_while_the_queue_fills_is_explained_once():
    ours = advisor()  # 4,096 keys at 512 a step: full at step 8
    assert ours.after_interval(2, {"loss": 4.0, "top1": 0.5}) == []
    (text,) = ours.after_interval(4, {"loss": 6.0, "top1": 0.5})
    assert "until step 8" in text
    assert ours.after_interval(6, {"loss": 7.0, "top1": 0.5}) == []


def test_a_loss_that_rises_later_is_not_excused():
    ours = advisor()
    ours.after_interval(8, {"loss": 4.0, "top1": 0.5})
    assert ours.after_interval(10, {"loss": 6.0, "top1": 0.5}) == []


def test_symmetric_runs_fill_the_queue_in_half_the_time():
    ours = advisor(method={"symmetric": True})
    ours.after_interval(2, {"loss": 4.0, "top1": 0.5})
    assert "until step 4" in ours.after_interval(3, {"loss": 6.0, "top1": 0.5})[0]


def test_perfect_accuracy_without_shuffled_keys_points_at_batch_statistics():
    ours = advisor(method={"shuffle": False})
    (text,) = ours.after_interval(100, {"loss": 0.1, "top1": 1.0})
    assert "Batch statistics give away" in text


def test_perfect_accuracy_with_shuffled_keys_points_elsewhere():
    (text,) = advisor().after_interval(100, {"loss": 0.1, "top1": 1.0})
    assert "Batch statistics" not in text
    assert "--method.momentum" in text


@pytest.mark.parametrize("step", [1, 8])
def test_perfect_accuracy_among_random_vectors_is_nothing_to_worry_about(step):
    assert advisor().after_interval(step, {"loss": 0.1, "top1": 1.0}) == []  # the queue is full after step 8


def test_what_a_run_has_written_before_it_is_continued_is_not_told_again():
    rows = [
        {"kind": "epoch", "step": 0, "epoch": 0.0, "effective_rank": 48.0, "uniformity": -1.0, "mean_norm": 0.5},
        {"kind": "train", "step": 2, "epoch": 0.1, "loss": 4.0, "top1": 0.5},
        {"kind": "train", "step": 4, "epoch": 0.1, "loss": 6.0, "top1": 0.5},
        {"kind": "advice", "step": 4, "epoch": 0.1, "text": "The loss is rising."},
        {"kind": "train", "step": 5, "epoch": 0.1, "loss": None, "top1": 0.5},
    ]
    ours = advisor()
    ours.recall(rows)
    assert ours.after_interval(6, {"loss": 7.0, "top1": 0.5}) == []
    # But what could not be said before its first measurement is.
    narrow = {"effective_rank": 5.0, "uniformity": -1.0, "mean_norm": 0.5}
    (text,) = after_epoch(ours, narrow)
    assert "untrained 48.0" in text
    again = advisor()
    again.recall([*rows, {"kind": "epoch", "step": 2000, "epoch": 20.0, **narrow}])
    assert after_epoch(again, narrow, epoch=40) == []


def test_collapse_is_told_and_health_is_not():
    ours = advisor()
    healthy = {"mean_norm": 0.2, "effective_rank": 40.0, "uniformity": -2.5}
    assert after_epoch(ours, healthy) == []
    (text,) = after_epoch(ours, {"mean_norm": 0.999, "effective_rank": 1.1, "uniformity": -0.01})
    assert "collapsed" in text


COLD = {"optimisation": {"warm_up": 0.0}}


def health(rank):
    return {"mean_norm": 0.9, "effective_rank": rank, "uniformity": -0.5}


def test_a_start_that_narrows_the_embeddings_is_told_with_its_remedy():
    ours = advisor(**COLD)
    ours.untrained(health(48.0))
    (text,) = after_epoch(ours, health(5.0))
    assert "effective rank 5.0, untrained 48.0" in text
    assert "--optimisation.warm-up 0.05, or" in text
    assert after_epoch(ours, health(4.0)) == []


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"method": {"alpha": 3.0}, **COLD}, "--optimisation.warm-up 0.05 and --method.ramp-up 0.5"),
        ({"method": {"alpha": 3.0, "ramp_up": 0.5}, **COLD}, "--optimisation.warm-up 0.05, or"),
        ({"optimisation": {"warm_up": 0.05}}, ": a longer --optimisation.warm-up, or"),
        ({"optimisation": {"warm_up": 0.6}}, ": a longer --optimisation.warm-up, or"),
    ],
)
def test_the_remedy_for_a_narrow_start_is_one_that_the_run_does_not_have(changes, remedy):
    ours = advisor(**changes)
    ours.untrained(health(48.0))
    assert remedy in after_epoch(ours, health(5.0))[0]


def test_embeddings_that_narrow_a_little_or_later_or_in_a_continued_run_are_not_a_narrow_start():
    ours = advisor()
    assert after_epoch(ours, health(5.0)) == []  # continued: what the untrained network had is not known
    ours = advisor(**COLD)
    ours.untrained(health(48.0))
    assert after_epoch(ours, health(17.0)) == []
    assert after_epoch(ours, health(5.0)) == []


def drawn_together(mean_norm=0.8):
    return {"mean_norm": mean_norm, "effective_rank": 40.0, "uniformity": -1.2}


def test_embeddings_that_the_term_has_drawn_together_are_told_late_in_the_run():
    ours = advisor(method={"alpha": 10.0, "tau_consistency": 0.04})
    assert after_epoch(ours, drawn_together(), epoch=149) == []
    (text,) = after_epoch(ours, drawn_together(), epoch=150)
    assert "a length of 0.80" in text
    assert "a lower --method.alpha or a higher --method.tau-consistency, or lets alpha rise over" in text
    assert "may be too strong" in text
    assert after_epoch(ours, drawn_together(), epoch=200) == []  # once


@pytest.mark.parametrize(("alpha", "mean_norm", "step"), [(0.0, 0.8, 2000), (10.0, 0.69, 2000), (10.0, 0.8, 999)])
def test_without_the_term_or_spread_out_or_hardly_begun_nothing_is_said_of_its_strength(alpha, mean_norm, step):
    assert after_epoch(advisor(method={"alpha": alpha}), drawn_together(mean_norm), epoch=200, step=step) == []


def test_a_term_that_rises_already_is_not_told_to():
    (text,) = after_epoch(advisor(method={"alpha": 10.0, "ramp_up": 1.0}), drawn_together(), epoch=200)
    assert "--method.ramp-up" not in text
