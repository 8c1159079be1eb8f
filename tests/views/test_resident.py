"""Images that lie on the device give the batches of ViewLoader, and what is wrong with them is told when they load."""

import dataclasses
import multiprocessing
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import CORPUS
from inputs import (
    ASYMMETRIC,
    AUGMENTATION,
    CPU,
    FIRST,
    assert_nearly_the_same_batches,
    assert_same_batches,
    folder_of,
    several,
    told,
    view_loader,
)
from test_hostile import assert_named, mixed, place_in  # noqa: F401 - `mixed` is a fixture

from co2.data.open import open_data
from co2.data.source import ArraySource, BadImage, ImageSource
from co2.errors import RunError, UserError
from co2.machine.workers import WorkerLost
from co2.views import resident
from co2.views.resident import DoesNotFit, ResidentViews


@pytest.fixture(autouse=True)
def one_thread():
    """Sums over an image come out the same only if one thread adds them up, as in ViewLoader."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Pictures(ImageSource):
    """Noise of different sizes; some of it cannot be read."""

    name = "pictures"
    labels = None
    classes = ()

    def __init__(self, count, bad=(), side=20):
        self.count = count
        self.bad = frozenset(bad)
        self.side = side
        self.read = []

    def __len__(self):
        return self.count

    def image(self, index):
        self.read.append(index)
        if index in self.bad:
            raise BadImage(f"torn at {index}")
        size = (3, self.side + index % 7, 30 - index % 5)
        return torch.from_numpy(np.random.default_rng(index).integers(0, 256, size, dtype=np.uint8))

    def describe(self, index):
        return f"folder/{index}.jpg"


def resident_views(source, batch_size=8, seed=0, views=2, device=CPU, **others):
    return ResidentViews(source, several(views), batch_size=batch_size, seed=seed, device=device, **others)


@pytest.mark.parametrize("rows_at_once", [1, 40, 1 << 16])
@pytest.mark.parametrize("views", [1, 3, ASYMMETRIC], ids=["1", "3", "asymmetric"])
def test_batches_are_those_of_the_view_loader(monkeypatch, views, rows_at_once):
    monkeypatch.setattr(resident, "_ROWS_AT_ONCE", rows_at_once)
    source = Pictures(45, bad=[3, 4, 40, 44])
    ours, theirs = resident_views(source, seed=5, views=views), view_loader(source, seed=5, views=views)
    assert ours.batches_per_epoch == theirs.batches_per_epoch == 6
    for epoch, first in ((0, 0), (1, 3), (7, 5), (7, 6)):
        assert_same_batches(list(ours.epoch(epoch, first)), list(theirs.epoch(epoch, first)))


@pytest.mark.parametrize("workers", [0, 2])
def test_files_of_all_kinds(tmp_path, workers):
    source = folder_of(tmp_path / "images", 40, bad=(0, 17, 18, 39))
    ours = resident_views(source, workers=workers)
    for epoch in (0, 1):
        assert_same_batches(list(ours.epoch(epoch)), list(view_loader(source).epoch(epoch)))


def test_an_epoch_may_have_other_views():
    source = Pictures(45, bad=[3, 4, 40, 44])
    smaller = dataclasses.replace(AUGMENTATION, size=8, blur_sigma=(0.1, 1.0))
    ours, theirs = resident_views(source), view_loader(source)
    for how in ({"views": (smaller,) * 2}, {}):
        assert_same_batches(list(ours.epoch(1, **how)), list(theirs.epoch(1, **how)))


@pytest.mark.parametrize(
    ("views", "rows"),
    [
        (2, [16]),
        ((FIRST, dataclasses.replace(FIRST, blur_probability=0.1, solarise_probability=0.2)), [16]),  # BYOL
        ((*several(2), *(dataclasses.replace(AUGMENTATION, size=8),) * 6), [16, 48]),
        ((AUGMENTATION, dataclasses.replace(AUGMENTATION, grey_first=True), AUGMENTATION), [16, 8]),
    ],
    ids=["alike", "other probabilities", "two sizes", "another order"],
)
def test_views_of_one_size_are_made_at_once(monkeypatch, views, rows):
    """On a GPU that is a launch for all of them, however they differ in what is drawn."""
    made, views_of = [], resident.views_of

    def counted(pixels, offsets, *how):
        made.append(len(offsets))
        return views_of(pixels, offsets, *how)

    monkeypatch.setattr(resident, "views_of", counted)
    list(resident_views(Pictures(24), views=several(views)).epoch(0))
    assert made == rows * 3


@pytest.mark.parametrize("share", [lambda images: slice(images // 3), lambda images: slice(images // 3, images)])
def test_a_share_of_each_batch(share):
    source = Pictures(45, bad=[4, 5, 13])
    ours, theirs = resident_views(source, share=share), view_loader(source, share=share)
    assert_same_batches(list(ours.epoch(2)), list(theirs.epoch(2)))


def test_a_last_batch_that_is_too_small_is_left_out():
    ours = resident_views(Pictures(21, bad=[0]), smallest=6)
    assert [batch.total for batch in ours.epoch(0)] == [8, 8]


def test_arrays_and_parts_of_them():
    pixels = np.random.default_rng(0).integers(0, 256, (30, 3, 12, 12), dtype=np.uint8)
    source = ArraySource("numbers", pixels)
    for some in (source, source.subset([7, 2, 9, 11, 3, 4, 5, 29, 1, 0])):
        ours = resident_views(some, batch_size=4)
        assert ours.images.pixels.numel() == len(some) * 3 * 12 * 12
        assert_same_batches(list(ours.epoch(0)), list(view_loader(some, batch_size=4).epoch(0)))


def test_nothing_is_read_after_the_start():
    source = Pictures(40, bad=[7])
    ours = resident_views(source)
    assert sorted(source.read) == list(range(40))
    source.read.clear()
    assert len([*ours.epoch(0), *ours.epoch(1)]) == 10
    assert source.read == []


def test_images_that_grow_fit_into_memory_that_grows(monkeypatch):
    class Growing(Pictures):
        def image(self, index):
            return torch.full((3, 1 + index * index // 8, 5), index, dtype=torch.uint8)

    monkeypatch.setattr(resident, "_READ_AT_ONCE", 4)
    ours = resident_views(Growing(40))
    assert ours.workers.lost == 0
    images = ours.images
    assert images.heights.tolist() == [1 + index * index // 8 for index in range(40)]
    ends = (images.offsets + 3 * images.heights * images.widths).tolist()
    assert images.offsets.tolist() == [0, *ends[:-1]]
    assert images.pixels.numel() == ends[-1]
    for index, (start, end) in enumerate(zip(images.offsets.tolist(), ends, strict=True)):
        assert (images.pixels[start:end] == index).all()


def test_more_than_is_allowed_is_noticed_on_the_way():
    source = Pictures(1000)
    with pytest.raises(DoesNotFit, match="more than the 1 MiB allowed"):
        resident_views(source, most_bytes=100_000)
    assert len(source.read) < 200
    assert resident_views(Pictures(10), most_bytes=100_000).images.pixels.numel() <= 100_000
    with pytest.raises(DoesNotFit):
        resident_views(ArraySource("zeros", np.zeros((40, 3, 20, 20), dtype=np.uint8)), most_bytes=40_000)


def test_progress_is_told():
    seen = []
    resident_views(Pictures(70, bad=[69]), progress=lambda done, count: seen.append((done, count)))
    assert seen == [(32, 70), (64, 70), (70, 70)]


def test_a_folder_that_vanished_ends_it_at_once_with_the_words_of_the_view_loader():
    source = Pictures(1000, bad=range(100, 1000))
    with pytest.raises(RunError) as refusal:
        resident_views(source)
    assert len(source.read) < 300
    same = Pictures(120, bad=range(120))
    words = r"50 images in a row could not be read, the last one being folder/\d+\.jpg \(torn at \d+\)\. Is the folder"
    for said in (str(refusal.value), told(view_loader(same).epoch(0))):
        assert re.match(words, said)


@pytest.mark.parametrize(
    ("bad", "too_many"), [((*range(30), *range(100, 120)), True), ((*range(29), *range(101, 120)), False)]
)
def test_a_row_of_bad_images_may_go_over_the_end(bad, too_many):
    source = Pictures(120, bad=bad)
    if too_many:
        assert "50 images in a row" in told(view_loader(source).epoch(0))
        with pytest.raises(RunError, match=r"50 images in a row .* folder/29\.jpg"):
            resident_views(source)
    else:
        assert_same_batches(list(resident_views(source).epoch(0)), list(view_loader(source).epoch(0)))


def test_a_small_data_set_of_which_nothing_can_be_read():
    with pytest.raises(RunError, match="20 images in a row"):
        resident_views(Pictures(20, bad=range(20)))


class DiesOnce(Pictures):
    """Reading number 40 ends the process the first time, as the system does when memory runs out."""

    def __init__(self, count, flag):
        super().__init__(count)
        self.flag = flag

    def image(self, index):
        if index == 40 and not os.path.exists(self.flag):
            Path(self.flag).touch()
            os._exit(1)
        return super().image(index)


def test_a_worker_that_dies_is_replaced(tmp_path):
    source = DiesOnce(100, str(tmp_path / "died"))
    ours = resident_views(source, workers=1)
    assert ours.workers.lost == 1
    assert_same_batches(list(ours.epoch(0)), list(view_loader(source).epoch(0)))


class Deadly(Pictures):
    def image(self, index):
        os._exit(1)


def test_workers_that_die_again_and_again_are_no_accident():
    with pytest.raises(WorkerLost, match="memory ran out"):
        resident_views(Deadly(40), workers=1)


@pytest.mark.parametrize("wrong", [{"bad": range(200)}, {"most_bytes": 1000}])
def test_no_worker_outlives_a_failure(wrong):
    source = Pictures(200, bad=wrong.pop("bad", ()))
    before = set(multiprocessing.active_children())
    with pytest.raises((RunError, DoesNotFit)) as kept:  # and with it the frames of the loader
        resident_views(source, workers=2, **wrong)
    assert kept.tb is not None
    assert set(multiprocessing.active_children()) <= before


class Mistaken(Pictures):
    def image(self, index):
        raise UserError("Install the missing package.")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_mistake_is_told_as_it_is(workers):
    before = set(multiprocessing.active_children())
    with pytest.raises(UserError) as refusal:
        resident_views(Mistaken(40), workers=workers)
    assert str(refusal.value) == "Install the missing package."
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(("size", "said"), [(41, "at most 40"), (1, "at least 2")])
def test_batch_sizes_that_make_no_sense(size, said):
    with pytest.raises(UserError, match=said):
        resident_views(Pictures(40), batch_size=size)


def test_hostile_files_have_their_stated_outcomes(mixed):  # noqa: F811
    source = open_data(str(mixed)).train
    ours = resident_views(source, views=1, batch_size=32)
    bad = {source.describe(index): reason for batch in ours.epoch(0) for index, reason in batch.bad}
    assert_named(bad, {place_in(mixed, file): file for file in CORPUS if not file.is_folder})


@pytest.mark.gpu
@pytest.mark.parametrize("views", [2, ASYMMETRIC], ids=["alike", "asymmetric"])
def test_on_a_gpu_views_are_those_of_the_cpu(views):
    source = Pictures(45, bad=[3, 4, 40])
    ours, theirs = resident_views(source, device=torch.device("cuda"), views=views), view_loader(source, views=views)
    for epoch in (0, 1):
        batches = list(ours.epoch(epoch))
        assert all(view.is_cuda for batch in batches for view in batch.views)
        assert_nearly_the_same_batches(batches, list(theirs.epoch(epoch)), levels=2, outside=0.002)


@pytest.mark.gpu
@pytest.mark.parametrize("views", [2, ASYMMETRIC], ids=["alike", "asymmetric"])
def test_on_a_gpu_an_epoch_never_waits_for_it(views):
    ours = resident_views(Pictures(45), views=views, device=torch.device("cuda"))
    list(ours.epoch(0))  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(ours.epoch(1))) == 6
    finally:
        torch.cuda.set_sync_debug_mode("default")
