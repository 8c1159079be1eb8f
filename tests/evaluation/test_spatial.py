"""What detection and segmentation share: how images come in, whatever happens on the way."""

import multiprocessing
import os
import signal

import pytest
import torch

from co2.data.source import BadImage
from co2.errors import RunError, UserError
from co2.evaluation.spatial import load, readable
from co2.views.loader import BAD_IN_A_ROW


def reader(good):
    def read(index):
        if index not in good:
            raise BadImage(f"number {index} is torn")
        return f"image {index}"

    return read


def test_an_unreadable_image_is_replaced_by_the_next_one():
    bad = {}
    assert readable(reader({0, 1, 4}), 2, 6, bad) == (4, "image 4")
    assert readable(reader({0, 1, 4}), 5, 6, bad) == (0, "image 0")  # after the last comes the first
    assert bad == {2: "number 2 is torn", 3: "number 3 is torn", 5: "number 5 is torn"}


def test_too_many_unreadable_images_in_a_row_are_no_accident():
    bad = {999: "long ago"}
    assert readable(reader({BAD_IN_A_ROW - 1}), 0, 1000, bad)[0] == BAD_IN_A_ROW - 1
    with pytest.raises(UserError, match=rf"^{BAD_IN_A_ROW} images in a row.*number {BAD_IN_A_ROW + 9} is torn"):
        readable(reader({BAD_IN_A_ROW + 10}), 10, 1000, bad)
    with pytest.raises(UserError, match=r"^3 images in a row"):
        readable(reader(set()), 2, 3, bad)  # each is tried once


class Doubled:
    """Twice each number of an entry; some of them are told to go wrong."""

    def __init__(self, folder, *, fatal=(), refused=()):
        self.folder = folder
        self.fatal = fatal
        self.refused = refused

    def __getitems__(self, wanted):
        for number in wanted:
            if number in self.refused:
                raise RunError(f"no {number}")
            if number in self.fatal and not (self.folder / str(number)).exists():
                (self.folder / str(number)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return 2 * torch.tensor(wanted)


@pytest.mark.parametrize("workers", [0, 2])
def test_entries_of_a_plan_come_in_its_order(tmp_path, workers):
    plan = [[3, 1], range(4, 7), [0]]
    assert [made.tolist() for made in load(Doubled(tmp_path), plan, workers)] == [[6, 2], [8, 10, 12], [0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_is_told_as_what_it_is(tmp_path, workers):
    with pytest.raises(RunError, match=r"^no 2$"):  # not wrapped in a page of traceback
        list(load(Doubled(tmp_path, refused=[2]), [[1], [2]], workers))


def test_a_lost_process_is_replaced_and_nothing_is_missing(tmp_path):
    plan = [[number] for number in range(12)]
    assert [made.item() for made in load(Doubled(tmp_path, fatal=[5]), plan, 2)] == list(range(0, 24, 2))
    assert (tmp_path / "5").exists()


def test_processes_end_with_the_last_entry_or_with_the_wish_for_more(tmp_path):
    before = set(multiprocessing.active_children())
    plan = [[number] for number in range(12)]
    made = load(Doubled(tmp_path), plan, 2)
    next(made)
    assert len(set(multiprocessing.active_children()) - before) == 2
    made.close()
    assert set(multiprocessing.active_children()) <= before
    list(load(Doubled(tmp_path), plan, 2))
    assert set(multiprocessing.active_children()) <= before
