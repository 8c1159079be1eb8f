"""Average precision against hand-computed cases and scikit-learn; rank correlation against SciPy."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, precision_recall_curve

from co2.measures.ranking import average_precision, from_curve, precision_recall, spearman

RANDOM = np.random.default_rng(0)


def by_hand(scores, positives, rule):
    """Every threshold by itself, in plain Python."""
    points = []
    for threshold in sorted(set(scores), reverse=True):
        taken = [positive for score, positive in zip(scores, positives, strict=True) if score >= threshold]
        points.append((sum(taken) / sum(positives), sum(taken) / len(taken)))

    def best(recall):
        return max((precision for reached, precision in points if reached >= recall - 1e-9), default=0.0)

    if rule == "11-point":
        return sum(best(step / 10) for step in range(11)) / 11
    area, before = 0.0, 0.0
    for recall, _ in points:
        area += (recall - before) * best(recall)
        before = recall
    return area


def test_a_ranking_by_hand():
    # In order of score: right, wrong, right, wrong, wrong, right.
    scores, positives = np.array([6.0, 5, 4, 3, 2, 1]), np.array([1, 0, 1, 0, 0, 1])
    precision, recall = precision_recall(scores, positives.astype(bool))
    assert precision.tolist() == pytest.approx([1, 1 / 2, 2 / 3, 2 / 4, 2 / 5, 3 / 6])
    assert recall.tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1])
    assert average_precision(scores, positives, "area") == pytest.approx((1 + 2 / 3 + 1 / 2) / 3)
    # Recalls 0 to 0.3 reach precision 1, 0.4 to 0.6 reach 2/3, and 0.7 to 1 reach 1/2.
    assert average_precision(scores, positives, "11-point") == pytest.approx((4 * 1 + 3 * 2 / 3 + 4 * 1 / 2) / 11)


def test_later_precision_counts_for_earlier_recall():
    # Wrong first, then all right: the precision rises, and VOC takes the best at this recall or beyond.
    scores, positives = np.array([4.0, 3, 2, 1]), np.array([0, 1, 1, 1])
    assert average_precision(scores, positives, "area") == pytest.approx(3 / 4)
    assert average_precision_score(positives, scores) < 3 / 4  # scikit-learn's rule does not


def test_perfect_hopeless_and_empty():
    scores = np.array([3.0, 2, 1])
    for rule in ("11-point", "area"):
        assert average_precision(scores, np.array([1, 1, 0]), rule) == 1
        assert average_precision(scores, np.array([0, 0, 1]), rule) == pytest.approx(1 / 3)
        assert math.isnan(average_precision(scores, np.zeros(3), rule))
        assert from_curve(np.array([]), np.array([]), rule) == 0
    assert from_curve(np.array([1.0]), np.array([0.5]), "area") == 0.5  # half is never found
    assert from_curve(np.array([1.0]), np.array([0.5]), "11-point") == pytest.approx(6 / 11)


def test_equal_scores_come_in_together():
    scores, positives = np.array([1.0, 1, 1, 1]), np.array([1, 0, 0, 0])
    for order in (positives, positives[::-1]):
        assert average_precision(scores, order, "area") == 0.25
    mixed, right = np.array([2.0, 1, 1, 0]), np.array([1, 0, 1, 1])
    shuffled = [0, 2, 1, 3]
    assert average_precision(mixed, right) == average_precision(mixed[shuffled], right[shuffled])
    assert average_precision(mixed, right) == pytest.approx((1 + 3 / 4 + 3 / 4) / 3)


@pytest.mark.parametrize("distinct", [3, 10, 1000])
def test_equals_plain_python_and_scikit_learns_curve(distinct):
    for images in (1, 7, 60):
        scores = RANDOM.integers(0, distinct, images).astype(float)  # many ties where there are few distinct ones
        positives = RANDOM.random(images) < 0.3
        positives[0] = True
        for rule in ("11-point", "area"):
            assert average_precision(scores, positives, rule) == pytest.approx(by_hand(scores, positives, rule))
        theirs = precision_recall_curve(positives, scores)
        ours = precision_recall(scores, positives)
        np.testing.assert_allclose(ours[0][::-1], theirs[0][:-1])
        np.testing.assert_allclose(ours[1][::-1], theirs[1][:-1])
        # Without VOC's "or beyond", the area is scikit-learn's average precision.
        steps = np.sum(np.diff(ours[1], prepend=0) * ours[0])
        assert steps == pytest.approx(average_precision_score(positives, scores))
        assert average_precision(scores, positives) >= steps - 1e-12


def test_equals_scikit_learn_where_precision_never_rises():
    scores, positives = np.array([5.0, 4, 3, 2, 1]), np.array([1, 1, 1, 0, 0])
    assert average_precision(scores, positives) == average_precision_score(positives, scores) == 1
    scores, positives = np.array([1.0, 1, 0, 0, 0]), np.array([1, 0, 1, 0, 0])
    assert average_precision(scores, positives) == pytest.approx(average_precision_score(positives, scores))


def test_eleven_points_are_reached_in_spite_of_rounding():
    # 3 of 10 found is a recall of 0.3, and 0.1 + 0.1 + 0.1 is not 0.3.
    positives = np.ones(10)
    scores = np.arange(10.0)
    precision, recall = precision_recall(scores, positives.astype(bool))
    for found in range(1, 11):
        expected = (found + 1) / 11
        assert from_curve(precision[:found], recall[:found], "11-point") == pytest.approx(expected)


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [5, 4, 3, 2]) == pytest.approx(-1)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    for _ in range(5):
        first, second = RANDOM.integers(0, 6, (2, 12)).astype(float)  # with ties
        assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)
