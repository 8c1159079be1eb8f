"""JPEGs read ahead and decoded together give the batches of ViewLoader, whatever is among them; threads end."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hostile import CORPUS
from inputs import (
    ASYMMETRIC,
    AUGMENTATION,
    CPU,
    KINDS,
    assert_nearly_the_same_batches,
    assert_same_batches,
    folder_of,
    jpeg,
    png,
    several,
    told,
    view_loader,
)
from shards import write_shards
from test_hostile import assert_named, mixed, place_in  # noqa: F401 - `mixed` is a fixture

from co2.data.decode import decode_image
from co2.data.folder import FileSource
from co2.data.open import open_data
from co2.data.pack_writer import write_pack
from co2.data.plain_jpeg import plain_jpeg_size
from co2.data.shards import ShardSource
from co2.data.source import ArraySource, BadImage
from co2.errors import UserError
from co2.views import jpeg_stream
from co2.views.jpeg_stream import BATCHES_AHEAD, JpegViews, _Ahead

JPEG = KINDS[:1]


@pytest.fixture(autouse=True)
def one_thread():
    """Sums over an image come out the same only if one thread adds them up, as in ViewLoader."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)  # one that has been told to end may still be about to, on a busy machine
    assert set(threading.enumerate()) <= before


def jpeg_views(source, batch_size=8, seed=0, views=2, device=CPU, **others):
    return JpegViews(source, several(views), batch_size=batch_size, seed=seed, device=device, **others)


# Batches.


@pytest.mark.parametrize(
    "how",
    [{"workers": 0}, {"workers": 1}, {"workers": 2}, {"views": ASYMMETRIC}],
    ids=["0 workers", "1 worker", "2 workers", "asymmetric"],
)
def test_batches_are_those_of_the_view_loader(tmp_path, how, monkeypatch):
    monkeypatch.setattr(jpeg_stream, "READ_AT_ONCE", 3)  # so that the files of a batch come in three parts
    source = folder_of(tmp_path / "images", 45, bad=(0, 17, 18, 40))
    ours, theirs = jpeg_views(source, seed=5, **how), view_loader(source, seed=5, views=how.get("views", 2))
    assert ours.batches_per_epoch == theirs.batches_per_epoch == 6
    for epoch, first in ((0, 0), (1, 3), (7, 5), (7, 6)):
        assert_same_batches(list(ours.epoch(epoch, first)), list(theirs.epoch(epoch, first)))


def test_an_epoch_may_have_other_views(tmp_path):
    source = folder_of(tmp_path / "images", 20, bad=(2,))
    smaller = dataclasses.replace(AUGMENTATION, size=8, blur_sigma=(0.1, 1.0))
    ours, theirs = jpeg_views(source), view_loader(source)
    for how in ({"views": (smaller,) * 2}, {}):
        assert_same_batches(list(ours.epoch(1, **how)), list(theirs.epoch(1, **how)))


@pytest.mark.parametrize("share", [lambda images: slice(images // 3), lambda images: slice(images // 3, images)])
def test_a_share_of_each_batch(tmp_path, share):
    source = folder_of(tmp_path / "images", 45, bad=(4, 5, 13))
    ours, theirs = jpeg_views(source, share=share), view_loader(source, share=share)
    assert_same_batches(list(ours.epoch(2)), list(theirs.epoch(2)))


def test_decoding_few_at_once_changes_nothing(tmp_path, monkeypatch):
    source = folder_of(tmp_path / "images", 30, bad=(3,))
    monkeypatch.setattr(jpeg_stream, "_BYTES_AT_ONCE", 5000)  # two or three of these images
    assert_same_batches(list(jpeg_views(source, views=3).epoch(0)), list(view_loader(source, views=3).epoch(0)))


def test_shards_packs_and_arrays(tmp_path):
    folder_of(tmp_path / "images", 20, bad=(2,))
    write_shards(tmp_path / "images", tmp_path / "shards", count=3)
    shards = ShardSource("shards", sorted(map(str, (tmp_path / "shards").glob("*.tar"))))
    write_pack(tmp_path / "images", tmp_path / "pack", workers=0)
    pack = open_data(str(tmp_path / "pack")).train
    array = ArraySource("noise", np.random.default_rng(0).integers(0, 256, (20, 3, 12, 12), dtype=np.uint8))
    for source in (shards, pack, array, array.subset([9, 4, 3, 2, 7, 1, 0, 19])):
        assert_same_batches(list(jpeg_views(source).epoch(0)), list(view_loader(source).epoch(0)))


@pytest.mark.parametrize(("size", "said"), [(41, "at most 40"), (1, "at least 2")])
def test_batch_sizes_that_make_no_sense(tmp_path, size, said):
    with pytest.raises(UserError, match=said):
        jpeg_views(folder_of(tmp_path / "images", 40), batch_size=size)


def test_plain_jpegs_are_decoded_together_and_others_by_the_cpu(tmp_path, monkeypatch):
    together = []

    def decode(data, **options):
        together.append(len(data))
        return original(data, **options)

    original = jpeg_stream.decode_jpeg
    monkeypatch.setattr(jpeg_stream, "decode_jpeg", decode)
    kinds = len(KINDS)  # of which three are plain
    source = folder_of(tmp_path / "images", 2 * kinds)
    list(jpeg_views(source, batch_size=2 * kinds).epoch(0))
    assert together == [6]


# What is wrong with files.


def test_hostile_files_have_their_stated_outcomes(mixed):  # noqa: F811
    source = open_data(str(mixed)).train
    ours = jpeg_views(source, views=1, batch_size=32, workers=2)
    bad = {source.describe(index): reason for batch in ours.epoch(0) for index, reason in batch.bad}
    assert_named(bad, {place_in(mixed, file): file for file in CORPUS if not file.is_folder})


@pytest.mark.parametrize("size", [None, (1, 1)], ids=["raises", "gives another size"])
def test_what_the_device_cannot_decode_the_cpu_judges(tmp_path, monkeypatch, size):
    source = folder_of(tmp_path / "images", 24, kinds=JPEG)
    refused = {bytes(source.encoded(index)[0]) for index in (3, 9, 10, 23)}

    def decode(data, **options):
        suspects = [bytes(one.numpy()) in refused for one in data]
        if any(suspects) and size is None:
            raise RuntimeError("Error while decoding JPEG images: status 8")
        decoded = original(data, **options)
        return [image[:, :1, :1] if bad else image for image, bad in zip(decoded, suspects, strict=True)]

    original = jpeg_stream.decode_jpeg
    monkeypatch.setattr(jpeg_stream, "decode_jpeg", decode)
    assert_same_batches(list(jpeg_views(source).epoch(0)), list(view_loader(source).epoch(0)))


def test_a_plain_jpeg_with_damaged_pixels_is_replaced_and_named(tmp_path):
    source = folder_of(tmp_path / "images", 24, kinds=JPEG)
    for number in (5, 6, 23):
        path = tmp_path / "images" / f"{number:04d}.img.png"
        data = path.read_bytes()
        scan = data.index(b"\xff\xda") + 30
        damaged = data[:scan] + b"\xff\xc4\x00\x03\x00" + data[scan:]  # a broken table in the middle of the pixels
        assert plain_jpeg_size(damaged) is not None
        with pytest.raises(BadImage, match="broken data stream"):
            decode_image(damaged)
        path.write_bytes(damaged)
    ours = list(jpeg_views(source).epoch(0))
    assert {index for batch in ours for index, _ in batch.bad} == {5, 6, 23}
    assert_same_batches(ours, list(view_loader(source).epoch(0)))


@pytest.mark.parametrize("count", [20, 400])
def test_a_folder_that_vanishes_in_mid_epoch_ends_the_run_with_a_plain_sentence(tmp_path, count):
    source = folder_of(tmp_path / "images", count, kinds=JPEG)
    batches = jpeg_views(source, batch_size=2).epoch(0)
    next(batches)
    shutil.rmtree(tmp_path / "images")
    said = told(batches)
    assert said.startswith(f"{min(50, count)} images in a row could not be read, the last one being {tmp_path}")
    assert "(the file does not exist). Is the folder with the images still there?" in said
    gone = view_loader(source, batch_size=2)
    assert told(jpeg_views(source, batch_size=2).epoch(0)) == told(gone.epoch(0))  # from the first image on


class Failing(ArraySource):
    error: Exception

    def encoded(self, index):
        if index == 17:
            raise self.error
        return super().encoded(index)


@pytest.mark.parametrize("error", [UserError("Install the missing package."), KeyError("a mistake in the program")])
def test_what_goes_wrong_in_a_thread_reaches_the_loop_as_it_is(error):
    source = Failing("zeros", np.zeros((40, 3, 8, 8), dtype=np.uint8))
    source.error = error
    with pytest.raises(type(error)) as caught:
        list(jpeg_views(source, batch_size=4).epoch(0))
    assert str(caught.value) == str(error)


# Threads and memory.


def test_an_epoch_may_be_left_half_way(tmp_path):
    source = folder_of(tmp_path / "images", 40)
    ours = jpeg_views(source, batch_size=4)
    before = set(threading.enumerate())
    for taken in range(4):
        batches = ours.epoch(0)
        for _ in range(taken):
            next(batches)
        batches.close()
        assert set(threading.enumerate()) <= before
    assert_same_batches(list(ours.epoch(1)), list(view_loader(source, batch_size=4).epoch(1)))


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_process_ends_in_the_middle_of_an_epoch(tmp_path, workers):
    folder_of(tmp_path / "images", 60, kinds=JPEG)
    program = (
        "import sys, torch\n"
        "from co2.data.folder import folder_source\n"
        "from co2.views.jpeg_stream import JpegViews\n"
        "from co2.views.view import View\n"
        "source = folder_source(sys.argv[1])\n"
        "device, workers = torch.device('cpu'), int(sys.argv[2])\n"
        "views = JpegViews(source, (View(size=16),) * 2, batch_size=4, seed=0, device=device, workers=workers)\n"
        "batches = views.epoch(0)\n"
        "next(batches)\n"
        "sys.modules['kept'] = batches\n"  # so that nobody closes it
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "images"), workers], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")


class Counted(FileSource):
    read = 0

    def encoded(self, index):
        self.read += 1
        return super().encoded(index)


def test_reading_ahead_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(jpeg_stream, "READ_AT_ONCE", 2)
    folder_of(tmp_path / "images", 200, kinds=JPEG)
    paths = sorted((tmp_path / "images").iterdir())
    source = Counted("images", str(tmp_path / "images"), [os.fsencode(path.name) for path in paths])
    for number, _ in enumerate(jpeg_views(source, batch_size=4).epoch(0)):
        assert source.read <= 4 * (number + 1 + BATCHES_AHEAD + 1)  # given out, ready, and in the making
    assert source.read == 200


def test_a_lost_worker_is_replaced_and_nothing_is_missing(tmp_path):
    source = folder_of(tmp_path / "images", 40)
    ours = jpeg_views(source, batch_size=4, workers=2)
    batches = ours.epoch(0)
    got = [next(batches)]
    for worker in ours.workers._loader._iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
    got += list(batches)
    assert_same_batches(got, list(view_loader(source, batch_size=4).epoch(0)))


def test_results_come_in_order_and_few_wait():
    begun = []

    def results():
        for number in range(300):
            begun.append(number)
            yield -number

    ahead = _Ahead(results(), most=10)
    for taken in range(300):
        assert len(begun) <= taken + 10 + 1
        assert ahead.take() == -taken
    ahead.close()


def test_what_came_before_a_failure_is_given():
    def results():
        yield from range(20)
        raise ValueError("twenty")

    ahead = _Ahead(results(), most=3)
    assert [ahead.take() for _ in range(20)] == list(range(20))
    with pytest.raises(ValueError, match="twenty"):
        ahead.take()
    ahead.close()


# On a GPU.

CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "levels", "views"),
    [
        (lambda p: jpeg(p.convert("L")), 4, 2),
        (lambda p: jpeg(p, subsampling=0), 6, 2),
        (jpeg, 32, 2),
        (png, 2, 2),
        (png, 2, ASYMMETRIC),
    ],
)
def test_on_a_gpu_views_are_nearly_those_of_the_cpu(tmp_path, kind, levels, views):
    """Smooth pictures: colours at half the resolution, which the two decoders enlarge differently, are the worst."""
    source = folder_of(tmp_path / "images", 45, bad=(4,), kinds=(kind,))
    ours, theirs = jpeg_views(source, device=CUDA, views=views), view_loader(source, views=views)
    for epoch in (0, 1):
        batches = list(ours.epoch(epoch))
        assert all(view.is_cuda for batch in batches for view in batch.views)
        assert_nearly_the_same_batches(batches, list(theirs.epoch(epoch)), levels=levels, outside=0.01)


@pytest.mark.gpu
def test_on_a_gpu_batches_wait_for_their_decoder_and_keep_their_memory(tmp_path):
    """Many batches that are looked at late, by a stream that is busy, are the same as when each is waited for."""
    source = folder_of(tmp_path / "images", 400, kinds=KINDS[:4])
    ours = jpeg_views(source, batch_size=16, device=CUDA)
    calm = []
    for batch in ours.epoch(0):
        torch.cuda.synchronize()
        calm.append(torch.stack(batch.views).cpu())
    busy = torch.randn(4096, 4096, device=CUDA)
    copies = []
    for batch in ours.epoch(0):
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)
        copies.append(torch.stack(batch.views))  # queued behind that; the batch itself is let go of
    assert all(torch.equal(copy.cpu(), once) for copy, once in zip(copies, calm, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_hostile_files_have_their_stated_outcomes(mixed):  # noqa: F811
    source = open_data(str(mixed)).train
    ours = jpeg_views(source, views=1, batch_size=32, device=CUDA)
    bad = {source.describe(index): reason for batch in ours.epoch(0) for index, reason in batch.bad}
    assert_named(bad, {place_in(mixed, file): file for file in CORPUS if not file.is_folder})


@pytest.mark.gpu
def test_on_a_gpu_damaged_jpegs_do_no_harm(tmp_path):
    """Whatever its pixels hold, a JPEG leaves the GPU as it was, and every image asked for is given."""
    generator = np.random.default_rng(0)
    source = folder_of(tmp_path / "images", 300, kinds=JPEG)
    for number in range(0, 300, 3):
        path = tmp_path / "images" / f"{number:04d}.img.png"
        data = bytearray(path.read_bytes())
        for _ in range(3):
            data[generator.integers(data.index(b"\xff\xda") + 14, len(data) - 2)] = generator.integers(256)
        path.write_bytes(bytes(data))
    batches = list(jpeg_views(source, batch_size=32, device=CUDA).epoch(0))
    assert sum(len(batch.indices) for batch in batches) == 300
    torch.cuda.synchronize()
