from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from co2.data.shapes import ShapesSource
from co2.data.source import BAD_IN_A_ROW, ArraySource, BadImage, readable
from co2.errors import RunError


def numbered(count: int) -> ArraySource:
    """Image i is filled with the number i."""
    pixels = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 3, 2, 2)).copy()
    return ArraySource("numbers", pixels, np.arange(count) % 3, ("a", "b", "c"))


def test_a_subset_follows_its_indices() -> None:
    part = numbered(10).subset([7, 2, 2])
    assert len(part) == 3
    assert [int(part.image(index)[0, 0, 0]) for index in range(3)] == [7, 2, 2]
    assert part.labels is not None
    assert part.labels.tolist() == [1, 2, 2]
    assert part.classes == ("a", "b", "c")
    assert part.describe(0) == "numbers image 7"
    assert int(part.subset(np.array([2, 0])).image(1)[0, 0, 0]) == 7


def test_images_in_memory_come_as_one_array() -> None:
    source = numbered(10)
    stacked, part = source.stacked(), source.subset([7, 2, 2]).stacked()
    assert stacked is source.pixels
    assert part is not None
    assert part[:, 0, 0, 0].tolist() == [7, 2, 2]
    assert ShapesSource(3, 16).stacked() is None
    assert ShapesSource(3, 16).subset([1]).stacked() is None


def test_a_subset_of_unlabelled_images_has_no_labels() -> None:
    source = ArraySource("numbers", np.zeros((4, 3, 2, 2), dtype=np.uint8))
    assert source.subset([1]).labels is None
    assert len(source.subset([])) == 0


@pytest.mark.parametrize("index", [-1, 10])
def test_a_subset_refuses_what_is_not_there(index: int) -> None:
    with pytest.raises(IndexError, match="0 to 9"):
        numbered(10).subset([0, index])


def test_changing_an_image_does_not_change_the_data() -> None:
    source = numbered(3)
    source.image(1).zero_()
    assert int(source.image(1)[0, 0, 0]) == 1


def test_sources_pickle() -> None:
    copy = pickle.loads(pickle.dumps(numbered(5).subset([4, 1])))
    assert torch.equal(copy.image(0), torch.full((3, 2, 2), 4, dtype=torch.uint8))


def test_some_images_are_spread_evenly_over_all():
    source = numbered(10)
    assert [int(image[0, 0, 0]) for image in map(source.spread(4).image, range(4))] == [0, 2, 5, 7]
    for everything in (0, 10, 11):
        assert source.spread(everything) is source


def reader(good: set[int]) -> Callable[[int], str]:
    def read(index: int) -> str:
        if index not in good:
            raise BadImage(f"number {index} is torn")
        return f"image {index}"

    return read


def test_an_unreadable_image_is_replaced_by_the_next_one() -> None:
    bad: dict[int, str] = {}
    assert readable(numbered(6), reader({0, 1, 4}), 2, bad) == (4, "image 4")
    assert readable(numbered(6), reader({0, 1, 4}), 5, bad) == (0, "image 0")  # after the last comes the first
    assert bad == {2: "number 2 is torn", 3: "number 3 is torn", 5: "number 5 is torn"}


def test_too_many_unreadable_images_in_a_row_are_no_accident() -> None:
    bad = {199: "long ago"}
    assert readable(numbered(200), reader({BAD_IN_A_ROW - 1}), 0, bad)[0] == BAD_IN_A_ROW - 1
    last = BAD_IN_A_ROW + 9
    with pytest.raises(RunError, match=rf"^{BAD_IN_A_ROW} images.*numbers image {last} \(number {last} is torn\)"):
        readable(numbered(200), reader({last + 1}), 10, bad)
    with pytest.raises(RunError, match=r"^3 images in a row"):
        readable(numbered(3), reader(set()), 2, bad)  # each is tried once
