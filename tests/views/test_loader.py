"""Batches are a function of the seed, whatever the workers, and bad images are passed over and named."""

import dataclasses
import multiprocessing
import os
import re
import signal

import numpy as np
import pytest
import torch
from inputs import ASYMMETRIC
from presets import moco_v2_views

from co2.data.source import BadImage, ImageSource
from co2.errors import UserError
from co2.machine import workers as workers_module
from co2.philox import Stream, permutation, uniforms
from co2.views import loader as loader_module
from co2.views.loader import ViewLoader, plain_batches
from co2.views.parameters import draw
from co2.views.transform import LARGEST_SIZE, make_view, plain_view

AUGMENTATION = moco_v2_views(16)


class Pictures(ImageSource):
    """Noise of different sizes; some of it cannot be read."""

    name = "pictures"
    labels = None
    classes = ()

    def __init__(self, count, bad=()):
        generator = np.random.default_rng(0)
        self.pictures = [
            generator.integers(0, 256, (3, 20 + index % 7, 30 - index % 5), dtype=np.uint8) for index in range(count)
        ]
        self.bad = frozenset(bad)

    def __len__(self):
        return len(self.pictures)

    def image(self, index):
        if index in self.bad:
            raise BadImage(f"torn at {index}")
        return torch.from_numpy(self.pictures[index].copy())

    def describe(self, index):
        return f"folder/{index}.jpg"


class DeadlyPictures(Pictures):
    """Reading number 3 ends the process, as the system does when memory runs out."""

    def image(self, index):
        if index == 3:
            os._exit(1)
        return super().image(index)


def loader(source, workers=0, batch_size=8, seed=0, views=2):
    return ViewLoader(source, (AUGMENTATION,) * views, batch_size=batch_size, seed=seed, workers=workers)


def view_of_each_image(batches):
    """Index of an image to its views [V, 3, S, S]."""
    return {
        int(index): torch.stack([view[place] for view in batch.views])
        for batch in batches
        for place, index in enumerate(batch.indices)
    }


def assert_same_batches(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert all(torch.equal(*two) for two in zip(one.views, other.views, strict=True))
        assert one.bad == other.bad


@pytest.mark.parametrize("size", [16, LARGEST_SIZE + 8])
def test_a_view_is_a_function_of_seed_epoch_image_and_view(size):
    """Of small images the views of a batch are made together, of larger ones one by one."""
    source = Pictures(20)
    augmentation = moco_v2_views(size)
    batches = ViewLoader(source, (augmentation,) * 3, batch_size=8, seed=5, workers=0).epoch(4)
    views = view_of_each_image(batches)
    assert sorted(views) == list(range(20))
    for index in (0, 7, 19):
        image = source.image(index)
        height, width = (torch.tensor([side]) for side in image.shape[-2:])
        for view in range(3):
            (row,) = draw(augmentation, 5, 4, torch.tensor([index]), view, height, width).rows()
            assert torch.equal(views[index][view], make_view(image, row, augmentation))


def test_the_order_of_an_epoch_is_a_function_of_seed_and_epoch():
    batches = loader(Pictures(20), seed=5).epoch(4)
    order = torch.cat([batch.indices for batch in batches])
    assert torch.equal(order, permutation(5, Stream.EPOCH_ORDER, 4, 20))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers):
    source = Pictures(45, bad=[3, 4, 40])
    here, there = loader(source), loader(source, workers)
    for epoch in (0, 1, 7):  # the same workers serve one epoch after the other
        assert_same_batches(list(there.epoch(epoch)), list(here.epoch(epoch)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_start_in_mid_epoch_continues_as_if_never_stopped(workers):
    source = Pictures(45)
    whole = list(loader(source).epoch(2))
    again = loader(source, workers)
    assert_same_batches(list(again.epoch(2, first_batch=4)), whole[4:])
    stopped = again.epoch(1)
    next(stopped)
    stopped.close()  # a run may leave an epoch half-way and begin another
    assert_same_batches(list(again.epoch(2)), whole)
    assert list(again.epoch(2, first_batch=again.batches_per_epoch)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_may_have_other_views(workers):
    """In epochs before and after it workers go on with their own."""
    smaller = dataclasses.replace(AUGMENTATION, size=8, blur_sigma=(0.1, 1.0))
    ours, source = loader(Pictures(20), workers), Pictures(20)
    with_smaller = ViewLoader(source, (smaller,) * 2, batch_size=8, seed=0, workers=0)
    assert_same_batches(list(ours.epoch(0, views=(smaller,) * 2)), list(with_smaller.epoch(0)))
    assert_same_batches(list(ours.epoch(1, 1, (smaller,) * 2)), list(with_smaller.epoch(1, 1)))
    assert_same_batches(list(ours.epoch(1)), list(loader(source).epoch(1)))


def test_the_batch_size_changes_no_view():
    source = Pictures(30)
    by_five, by_ten = (view_of_each_image(loader(source, batch_size=size).epoch(0)) for size in (5, 10))
    assert all(torch.equal(by_five[index], by_ten[index]) for index in range(30))


def test_holding_few_decoded_images_changes_no_view(monkeypatch):
    source = Pictures(30, bad=[2])
    at_once = list(loader(source, batch_size=10).epoch(0))
    monkeypatch.setattr(loader_module, "_BYTES_HELD", 4000)
    assert_same_batches(list(loader(source, batch_size=10).epoch(0)), at_once)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        next(loader(Pictures(10)).epoch(0))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_views_differ_between_views_epochs_and_seeds():
    source = Pictures(10)
    base = view_of_each_image(loader(source).epoch(0))
    for other in (loader(source).epoch(1), loader(source, seed=1).epoch(0)):
        for index, views in view_of_each_image(other).items():
            assert not torch.equal(views[0], base[index][0])
    assert all(not torch.equal(views[0], views[1]) for views in base.values())


@pytest.mark.parametrize(
    ("count", "sizes"), [(24, [8, 8, 8]), (27, [8, 8, 8, 3]), (26, [8, 8, 8, 2]), (25, [8, 8, 8]), (8, [8])]
)
def test_a_short_last_batch_is_used_unless_it_holds_one_image(count, sizes):
    batches = loader(Pictures(count))
    assert [len(batch.indices) for batch in batches.epoch(0)] == sizes
    assert [[view.shape for view in batch.views] for batch in batches.epoch(0)] == [
        [(size, 3, 16, 16)] * 2 for size in sizes
    ]
    assert batches.batches_per_epoch == len(sizes)


def test_a_last_batch_that_is_too_small_is_left_out():
    def sizes(smallest):
        views = ViewLoader(Pictures(21), (AUGMENTATION,), batch_size=8, seed=0, workers=0, smallest=smallest)
        assert views.batches_per_epoch == len(list(views.epoch(0)))
        return [len(batch.indices) for batch in views.epoch(0)]

    assert sizes(5) == [8, 8, 5]
    assert sizes(6) == [8, 8]


@pytest.mark.parametrize("workers", [0, 1])
def test_shares_of_a_batch_make_up_the_batch(workers):
    source = Pictures(21, bad=[4])
    whole = list(loader(source).epoch(3))
    halves = []
    for second in (False, True):
        share = (lambda images: slice(images // 2, images)) if second else (lambda images: slice(images // 2))
        views = ViewLoader(source, (AUGMENTATION,) * 2, batch_size=8, seed=0, workers=workers, share=share)
        halves.append(list(views.epoch(3)))
    for together, first, second in zip(whole, *halves, strict=True):
        assert first.total == second.total == together.total == len(together.indices)
        assert torch.equal(torch.cat([first.indices, second.indices]), together.indices)
        for view, ours, theirs in zip(together.views, first.views, second.views, strict=True):
            assert torch.equal(torch.cat([ours, theirs]), view)
        assert sorted(first.bad + second.bad) == sorted(together.bad)


def test_workers_leave_signals_to_the_run_from_their_first_moment_on(monkeypatch):
    begin = workers_module._begin_worker

    def signalled_before_it_begins(worker):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        begin(worker)

    monkeypatch.setattr(workers_module, "_begin_worker", signalled_before_it_begins)
    views = loader(Pictures(64), workers=2)
    assert len(list(views.epoch(0))) == 8
    assert views.workers.lost == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}  # not for this process


def test_workers_leave_signals_to_the_run():
    """Ctrl-C and a launcher's SIGTERM go to the workers too, which the run needs to finish its step."""
    before = set(multiprocessing.active_children())
    views = loader(Pictures(64), workers=2)
    batches = views.epoch(0)
    seen = [next(batches)]
    for worker in set(multiprocessing.active_children()) - before:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)
    assert len(seen + list(batches)) == 8
    assert views.workers.lost == 0


def test_bad_images_are_replaced_by_the_next_readable_one_and_named():
    batches = list(loader(Pictures(24, bad=[5, 6, 23])).epoch(0))
    assert [len(batch.indices) for batch in batches] == [8, 8, 8]
    wanted = permutation(0, Stream.EPOCH_ORDER, 0, 24)
    replaced = {5: 7, 6: 7, 23: 0}
    used = torch.cat([batch.indices for batch in batches])
    assert used.tolist() == [replaced.get(index, index) for index in wanted.tolist()]
    reported = [entry for batch in batches for entry in batch.bad]
    assert set(reported) == {(5, "torn at 5"), (6, "torn at 6"), (23, "torn at 23")}
    for batch in batches:
        assert len(batch.bad) == len(set(batch.bad))
    clean = view_of_each_image(loader(Pictures(24)).epoch(0))
    assert all(torch.equal(views, clean[index]) for index, views in view_of_each_image(batches).items())


def what_is_told(batches):
    """The words of the error. Not by pytest.raises, which keeps the error and with it the frames that hold workers."""
    try:
        list(batches)
    except UserError as error:
        return str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [20, 120])
def test_data_that_vanished_ends_the_run_with_a_plain_sentence(count, workers):
    told = what_is_told(loader(Pictures(count, bad=range(count)), workers).epoch(0))
    said = rf"{min(50, count)} images in a row could not be read, the last one being folder/(\d+)\.jpg \(torn at \1\)\."
    assert re.match(said, told)
    assert "Traceback" not in told


def test_a_worker_that_dies_is_told_in_a_plain_sentence():
    assert "memory ran out" in what_is_told(loader(DeadlyPictures(20), workers=1).epoch(0))


@pytest.mark.parametrize(
    ("count", "size", "said"), [(10, 11, "at most 10"), (10, 1, "at least 2"), (0, 8, "of 0 images")]
)
def test_batch_sizes_that_make_no_sense(count, size, said):
    with pytest.raises(UserError, match=said):
        loader(Pictures(count), batch_size=size)


@pytest.mark.parametrize("workers", [0, 2])
def test_plain_batches_come_in_order_without_the_bad_ones(workers):
    source = Pictures(23, bad=[0, 9, 10])
    batches = list(plain_batches(source, 16, 8, workers))
    assert torch.cat([batch.indices for batch in batches]).tolist() == [i for i in range(23) if i not in (0, 9, 10)]
    assert [batch.views[0].shape for batch in batches] == [(7, 3, 16, 16), (6, 3, 16, 16), (7, 3, 16, 16)]
    assert [batch.bad for batch in batches] == [[(0, "torn at 0")], [(9, "torn at 9"), (10, "torn at 10")], []]
    for index, views in view_of_each_image(batches).items():
        assert torch.equal(views[0], plain_view(source.image(index), 16))


@pytest.mark.parametrize(
    "bad", [range(4), range(4, 8), range(8, 12), range(8), range(4, 12), [0, 1, 2, 3, 8, 9, 10, 11]]
)
def test_no_plain_batch_is_empty_and_no_bad_image_is_forgotten(bad):
    batches = list(plain_batches(Pictures(12, bad=bad), 16, 4, workers=0))
    assert all(len(batch.indices) == 4 for batch in batches)
    assert torch.cat([batch.indices for batch in batches]).tolist() == [i for i in range(12) if i not in bad]
    assert [index for batch in batches for index, _ in batch.bad] == list(bad)


def test_plain_batches_of_nothing_readable():
    with pytest.raises(UserError, match="None of the 5 images could be read"):
        list(plain_batches(Pictures(5, bad=range(5)), 16, 2, workers=0))


class Mistaken(Pictures):
    def image(self, index):
        raise UserError("Install the missing package.")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_mistake_is_told_as_it_is(workers):
    assert what_is_told(loader(Mistaken(20), workers).epoch(0)) == "Install the missing package."
    assert what_is_told(plain_batches(Mistaken(20), 16, 8, workers)) == "Install the missing package."


@pytest.mark.parametrize("workers", [0, 1])
def test_views_may_differ_in_size_and_in_everything_else(workers):
    """Each is what it would be alone under its number; and what follows one follows it wherever it is made."""
    source = Pictures(20, bad=[3])
    ours = ViewLoader(source, ASYMMETRIC, batch_size=8, seed=5, workers=workers)
    solarised = 0
    for batch in ours.epoch(4):
        assert [tuple(view.shape[1:]) for view in batch.views] == [
            *[(3, 16, 16)] * 3,
            (2, 3, 10, 10),
            (3, 100, 100),
        ]
        for place, index in enumerate(batch.indices.tolist()):
            image = source.image(index)
            height, width = (torch.tensor([side]) for side in image.shape[-2:])
            for number, view in enumerate(ASYMMETRIC):
                (row,) = draw(view, 5, 4, torch.tensor([index]), number, height, width).rows()
                expected = make_view(image, row, view)
                solarised += row.solarise
                if view.then is None:
                    assert torch.equal(batch.views[number][place], expected)
                else:
                    turn = int(4 * uniforms(5, 4, torch.tensor([index]), number, 65)[0, 64])
                    assert batch.made[number]["turn"][place] == turn
                    assert torch.equal(batch.views[number][place, 0], expected.rot90(turn, (1, 2)))
                    assert torch.equal(batch.views[number][place, 1], expected)
        assert [list(drawn) for drawn in batch.made] == [[], [], [], ["turn"], []]
    assert 19 + 2 <= solarised < 3 * 19  # all of one view, about half of two others


def test_nothing_is_said_of_what_follows_where_nothing_does():
    assert all(batch.made == () for batch in loader(Pictures(20)).epoch(0))


@pytest.mark.parametrize("workers", [0, 1])
def test_views_that_differ_grow_together(workers):
    ours, source = ViewLoader(Pictures(20), ASYMMETRIC, batch_size=8, seed=0, workers=workers), Pictures(20)
    for epoch, scale in ((0, 2), (1, 1)):
        views = tuple(view.scaled(1 / scale) for view in ASYMMETRIC)
        (batch, *_) = ours.epoch(epoch, views=views)
        assert [view.shape[-1] for view in batch.views] == [view.size // scale for view in ASYMMETRIC]
        assert_same_batches([batch], list(ViewLoader(source, views, batch_size=8, seed=0).epoch(epoch))[:1])


def test_every_tensor_of_a_batch_can_be_changed():
    (batch, *_) = ViewLoader(Pictures(20), ASYMMETRIC, batch_size=8, seed=0).epoch(0)
    moved = batch.each(lambda tensor: tensor.to("meta"))
    assert {tensor.device.type for tensor in (moved.indices, *moved.views, moved.made[3]["turn"])} == {"meta"}
    assert (moved.bad, moved.total) == (batch.bad, batch.total)
