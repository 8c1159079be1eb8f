import pytest
import torch
from sklearn.metrics import jaccard_score

from co2.errors import UserError
from co2.evaluation.voc.segments import ConfusionMatrix


def test_a_case_computed_by_hand():
    true = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 255]])
    predicted = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]])
    matrix = ConfusionMatrix(2)
    matrix.add(predicted, true)
    assert matrix.counts.tolist() == [[3, 1], [1, 2]]  # the last pixel is not judged
    overlap = matrix.overlap()
    assert overlap.per_class.tolist() == [3 / 5, 2 / 4]
    assert overlap.mean == pytest.approx(0.55)
    assert overlap.accuracy == pytest.approx(5 / 7)


def test_classes_that_do_not_occur_are_left_out_of_the_mean():
    matrix = ConfusionMatrix(4)
    matrix.add(torch.tensor([0, 2, 2, 2]), torch.tensor([0, 2, 0, 2]))
    overlap = matrix.overlap()
    assert overlap.per_class[[0, 2]].tolist() == [1 / 2, 2 / 3]
    assert overlap.per_class[[1, 3]].isnan().all()
    assert overlap.mean == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_a_class_that_is_only_predicted_counts_as_a_mistake():
    matrix = ConfusionMatrix(3)
    matrix.add(torch.tensor([0, 1, 0, 0]), torch.tensor([0, 0, 0, 0]))
    assert matrix.overlap().mean == pytest.approx((3 / 4 + 0) / 2)


def test_pixels_of_all_images_are_counted_together():
    # A mean of means over images would give 0.75.
    matrix = ConfusionMatrix(2)
    matrix.add(torch.tensor([1, 1]), torch.tensor([1, 1]))
    matrix.add(torch.tensor([0, 1, 1, 1, 1, 1]), torch.tensor([1, 0, 1, 1, 1, 0]))
    assert matrix.overlap().per_class.tolist() == [0, 5 / 8]


@pytest.mark.parametrize("seed", range(3))
def test_against_scikit_learn(seed):
    generator = torch.Generator().manual_seed(seed)
    true = torch.randint(0, 5, (3, 17, 23), generator=generator)
    predicted = torch.where(torch.rand(true.shape, generator=generator) < 0.7, true, true.flip(0))
    void = torch.rand(true.shape, generator=generator) < 0.1
    matrix = ConfusionMatrix(5)
    for one, other, unjudged in zip(predicted, true, void, strict=True):
        matrix.add(one, other.masked_fill(unjudged, 255).to(torch.uint8))
    expected = jaccard_score(true[~void], predicted[~void], average=None)
    torch.testing.assert_close(matrix.overlap().per_class, torch.from_numpy(expected))


def test_what_cannot_be_counted_is_told():
    matrix = ConfusionMatrix(2)
    with pytest.raises(ValueError, match="were predicted where there are"):
        matrix.add(torch.zeros(2, 2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="only 2 classes"):
        matrix.add(torch.zeros(2), torch.tensor([0, 2]))
    matrix.add(torch.zeros(3), torch.full((3,), 255))
    with pytest.raises(UserError, match="all are marked 255"):
        matrix.overlap()
