import importlib.util

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from co2.errors import UserError
from co2.evaluation.voc import boxes
from co2.evaluation.voc.boxes import THRESHOLDS, Found, Truth, average_precision, coco_precision, overlaps


def found(*rows):
    """Detections in an image, each (label, score, left, top, right, bottom)."""
    table = np.array(rows, dtype=float).reshape(-1, 6)
    return Found(table[:, 2:], table[:, 0].astype(int), table[:, 1])


def truth(*rows):
    """Objects in an image, each (label, left, top, right, bottom) and perhaps 1 for difficult."""
    table = np.array([[*row, 0][:6] for row in rows], dtype=float).reshape(-1, 6)
    return Truth(table[:, 1:5], table[:, 0].astype(int), table[:, 5] > 0)


def voc_precision(said, images, classes, interpolation="area"):
    return boxes.voc_precision(boxes.match(said, images, classes), interpolation)


def test_overlaps_of_known_boxes():
    box = np.array([[0, 0, 10, 10]])
    others = np.array([[0, 0, 10, 10], [5, 0, 15, 10], [5, 5, 15, 15], [10, 0, 20, 10], [2, 2, 4, 4]])
    assert overlaps(box, others)[0].tolist() == [1, 1 / 3, 25 / 175, 0, 0.04]
    assert overlaps(np.zeros((1, 4)), np.zeros((1, 4))).tolist() == [[0]]  # no area, and no division by it


def test_a_perfect_detector_scores_one():
    images = [truth((0, 0, 0, 10, 10), (1, 20, 20, 30, 40)), truth((1, 5, 5, 9, 9))]
    said = [found((0, 0.9, 0, 0, 10, 10), (1, 0.3, 20, 20, 30, 40)), found((1, 0.4, 5, 5, 9, 9))]
    for interpolation in ("area", "11-point"):
        result = voc_precision(said, images, 2, interpolation)
        assert (result.ap, result.ap50, result.ap75) == (1, 1, 1)
        assert result.per_class.shape == (10, 2)


def test_a_case_computed_by_hand():
    # Two objects. In the order of scores: right, wrong, right. Precision 1, 1/2, 2/3 at recall 1/2, 1/2, 1.
    # Area: 1/2 * 1 + 1/2 * 2/3 = 5/6. Eleven points: recalls 0 to 0.5 have 1, 0.6 to 1 have 2/3: (6 + 5 * 2/3) / 11.
    images = [truth((0, 0, 0, 10, 10)), truth((0, 0, 0, 10, 10))]
    said = [found((0, 0.9, 0, 0, 10, 10), (0, 0.8, 50, 50, 60, 60)), found((0, 0.7, 0, 0, 10, 10))]
    assert voc_precision(said, images, 1, "area").ap50 == pytest.approx(5 / 6)
    assert voc_precision(said, images, 1, "11-point").ap50 == pytest.approx((6 + 5 * 2 / 3) / 11)


def test_an_object_is_found_once():
    # The second detection of the same object is wrong, though it fits better. Then the other object: 2/3.
    images = [truth((0, 0, 0, 10, 10), (0, 30, 30, 40, 40))]
    said = [found((0, 0.9, 0, 0, 10, 8), (0, 0.8, 0, 0, 10, 10), (0, 0.7, 30, 30, 40, 40))]
    assert voc_precision(said, images, 1).ap50 == pytest.approx(5 / 6)


def test_a_detection_looks_at_the_object_it_overlaps_most_even_if_that_one_is_taken():
    # VOC's rule, where COCO's would let the second detection take the neighbour that it overlaps by 0.6.
    images = [truth((0, 0, 0, 10, 10), (0, 0, 4, 10, 14))]
    said = [found((0, 0.9, 0, 0, 10, 10), (0, 0.8, 0, 1.5, 10, 11.5))]
    best = overlaps(said[0].boxes[1:], images[0].boxes)[0]
    assert best[0] > best[1] > 0.5
    assert voc_precision(said, images, 1).ap50 == pytest.approx(0.5)


def test_difficult_objects_count_neither_way():
    images = [truth((0, 0, 0, 10, 10), (0, 30, 30, 40, 40, 1))]
    right = (0, 0.5, 0, 0, 10, 10)
    on_difficult = [(0, 0.9, 30, 30, 40, 40), (0, 0.8, 30, 30, 40, 40)]  # twice: still neither
    assert voc_precision([found(right)], images, 1).ap == 1
    assert voc_precision([found(*on_difficult, right)], images, 1).ap == 1
    assert voc_precision([found((0, 0.9, 60, 60, 70, 70), right)], images, 1).ap == 0.5


def test_ap_is_the_mean_over_thresholds():
    # The box covers 0.78 of the object: right at 0.50, 0.55, 0.60, 0.65, 0.70 and 0.75, wrong at the other four.
    images = [truth((0, 0, 0, 10, 100))]
    result = voc_precision([found((0, 1, 0, 0, 10, 78))], images, 1)
    assert THRESHOLDS == (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    assert (result.ap50, result.ap75, result.ap) == (1, 1, pytest.approx(0.6))
    exact = voc_precision([found((0, 1, 0, 0, 10, 75))], images, 1)
    assert exact.ap75 == 1  # reaching the threshold is enough
    assert exact.ap == pytest.approx(0.6)


def test_classes_are_judged_apart_and_absent_ones_left_out():
    images = [truth((0, 0, 0, 10, 10), (3, 0, 0, 5, 5, 1)), truth()]
    said = [found((1, 0.9, 0, 0, 10, 10), (0, 0.8, 0, 0, 10, 10)), found((2, 0.9, 0, 0, 10, 10))]
    result = voc_precision(said, images, 4)
    assert result.per_class[0, 0] == 1
    assert np.isnan(result.per_class[:, 1:]).all()  # not there, only predicted, and only difficult
    assert result.ap == 1
    nothing = voc_precision([found(), found()], images, 4)
    assert nothing.ap == 0


def test_images_without_objects_still_make_mistakes_count():
    images = [truth((0, 0, 0, 10, 10)), truth()]
    said = [found((0, 0.5, 0, 0, 10, 10)), found((0, 0.9, 0, 0, 10, 10))]
    assert voc_precision(said, images, 1).ap50 == 0.5


def test_nothing_to_find_is_told():
    with pytest.raises(UserError, match="No image has an object that counts"):
        voc_precision([found()], [truth((0, 0, 0, 1, 1, 1))], 1)
    with pytest.raises(ValueError, match="2 images and the truth about 1"):
        voc_precision([found(), found()], [truth()], 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_area_against_a_plain_loop(seed):
    random = np.random.default_rng(seed)
    right = random.random(60) < 0.4
    to_find = int(right.sum()) + 7  # seven are never found
    recall = np.cumsum(right) / to_find
    precision = np.cumsum(right) / np.arange(1, 61)
    area = eleven = 0.0
    for place in np.flatnonzero(right):
        area += precision[place:].max() / to_find
    for tenth in range(11):
        reached = precision[recall >= tenth / 10 - 1e-12]
        eleven += (reached.max() if len(reached) else 0) / 11
    assert average_precision(right, to_find, "area") == pytest.approx(area)
    assert average_precision(right, to_find, "11-point") == pytest.approx(eleven)
    # scikit-learn's has no envelope: it can only be lower, and is the same where precision never rises again.
    everything = average_precision_score(right, -np.arange(60))
    assert average_precision(right, int(right.sum()), "area") >= everything - 1e-12
    falling = np.arange(60) < 20
    assert average_precision(falling, 20) == pytest.approx(average_precision_score(falling, -np.arange(60)))


def random_scene(random, difficult):
    """Objects far apart, so that VOC's and COCO's ways of matching agree, and detections around and beside them."""
    objects, said = [], []
    for place in range(random.integers(1, 6)):
        left, label = 100 * place, random.integers(3)
        side = random.uniform(20, 60, 2)
        objects.append((label, left, 0, left + side[0], side[1], difficult and random.random() < 0.3))
        for _ in range(random.integers(0, 3)):
            shift = random.uniform(-8, 8, 4)
            guess = label if random.random() < 0.8 else random.integers(3)
            said.append((guess, random.random(), *(np.array([left, 0, left + side[0], side[1]]) + shift)))
    return found(*said), truth(*objects)


def test_against_cocos_own_program():
    pytest.importorskip("pycocotools", reason="pycocotools is not installed")
    random = np.random.default_rng(0)
    said, images = zip(*(random_scene(random, difficult=False) for _ in range(150)), strict=True)
    coco = coco_precision(said, images, 3)
    ours = voc_precision(said, images, 3)
    # COCO samples the same curve at 101 recalls instead of summing its area.
    for name, number in (("AP", ours.ap), ("AP50", ours.ap50), ("AP75", ours.ap75)):
        assert coco[name] == pytest.approx(number, abs=0.01)


def test_difficult_objects_count_neither_way_for_cocos_program():
    pytest.importorskip("pycocotools", reason="pycocotools is not installed")
    images = [truth((0, 0, 0, 10, 10), (0, 30, 30, 40, 40, 1))]
    said = [found((0, 0.9, 30, 30, 40, 40), (0, 0.8, 30, 30, 40, 40), (0, 0.5, 0, 0, 10, 10))]
    assert coco_precision(said, images, 1) == pytest.approx({"AP": 1, "AP50": 1, "AP75": 1})
    random = np.random.default_rng(1)
    said, images = zip(*(random_scene(random, difficult=True) for _ in range(150)), strict=True)
    # A box need not cover a crowd to lie in it: only where overlaps are far from the threshold do both rules agree.
    assert coco_precision(said, images, 3)["AP50"] == pytest.approx(voc_precision(said, images, 3).ap50, abs=0.02)


def test_cocos_program_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'consistent-contrast\[coco\]'"):
        coco_precision([found()], [truth()], 1)
