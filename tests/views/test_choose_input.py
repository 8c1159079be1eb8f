"""Which way images take is decided by what they are and what fits, and said in one sentence."""

import re

import numpy as np
import pytest
import torch
from inputs import AUGMENTATION, CPU, KINDS, assert_same_batches, folder_of, jpeg, png, smooth, view_loader

from co2.data.folder import folder_source
from co2.data.shapes import ShapesSource
from co2.data.source import ArraySource, BadImage, ImageSource
from co2.errors import UserError
from co2.views import choose_input as module
from co2.views.choose_input import Survey, choose_input, survey
from co2.views.jpeg_stream import JpegViews
from co2.views.loader import ViewLoader
from co2.views.resident import ResidentViews, in_bytes

CUDA = torch.device("cuda")
JPEG = KINDS[:1]
PNG = (png,)
NOISE = ArraySource("noise", np.random.default_rng(0).integers(0, 256, (40, 3, 16, 16), dtype=np.uint8))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def a_gpu(monkeypatch):
    """A machine that seems to have a GPU with a million free bytes; what is put there lies in memory."""

    class Resident(ResidentViews):
        def __init__(self, *arguments, device, **others):
            super().__init__(*arguments, device=CPU, **others)

    class Jpeg(JpegViews):
        def __init__(self, *arguments, device, **others):
            super().__init__(*arguments, device=CPU, **others)

    monkeypatch.setattr(module, "ResidentViews", Resident)
    monkeypatch.setattr(module, "JpegViews", Jpeg)
    monkeypatch.setattr(module, "_free_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(module, "_no_jpegs_on", lambda device: None)


def chosen(source, device=CUDA, **others):
    settings = {"batch_size": 4, "seed": 3, "workers": 0} | others
    loader, sentence = choose_input(source, (AUGMENTATION,) * 2, device=device, **settings)
    assert re.fullmatch(r"[A-Z][^\n]*\.", sentence)
    theirs = view_loader(source, batch_size=4, seed=3)
    if settings["workers"] == 0:
        assert_same_batches(list(loader.epoch(1)), list(theirs.epoch(1)))  # whichever way they take
    kinds = {JpegViews: "jpeg", ResidentViews: "resident"}
    return next((word for kind, word in kinds.items() if isinstance(loader, kind)), "workers"), sentence


@pytest.mark.parametrize("wanted", ["auto", "workers"])
def test_without_a_gpu_there_are_workers(wanted):
    kind, sentence = chosen(NOISE, CPU, wanted=wanted)
    assert kind == "workers"
    assert "the training process itself" in sentence
    assert ("there is no GPU" in sentence) == (wanted == "auto")


@pytest.mark.parametrize(("workers", "words"), [(1, "by 1 worker process:"), (2, "by 2 worker processes:")])
def test_workers_are_counted(workers, words):
    loader, sentence = choose_input(
        NOISE, (AUGMENTATION,), batch_size=4, seed=0, workers=workers, device=CPU, wanted="auto"
    )
    assert type(loader) is ViewLoader
    assert words in sentence


@pytest.mark.usefixtures("a_gpu")
def test_what_fits_lies_on_the_gpu(tmp_path):
    for source in (NOISE, ShapesSource(30, 16), folder_of(tmp_path / "images", 30, kinds=PNG)):
        kind, sentence = chosen(source)
        assert kind == "resident"
        assert sentence.startswith(f"All {len(source)} images lie on the GPU")
        assert "1 MiB of the 1 MiB allowed" in sentence


@pytest.mark.usefixtures("a_gpu")
def test_a_quarter_of_the_free_memory_is_the_limit_unless_said_otherwise():
    for count, budget, kind in ((20, None, "resident"), (21, None, "workers"), (21, 260_000, "resident")):
        source = ArraySource("zeros", np.zeros((count, 3, 64, 64), dtype=np.uint8))  # 12,288 bytes each
        assert chosen(source, budget_bytes=budget)[0] == kind


@pytest.mark.usefixtures("a_gpu")
def test_jpegs_that_do_not_fit_are_decoded_on_the_gpu(tmp_path):
    kind, sentence = chosen(folder_of(tmp_path / "images", 30, kinds=JPEG), budget_bytes=1000)
    assert kind == "jpeg"
    assert "read ahead by a thread," in sentence
    assert "their pixels, about 1 MiB, are more than the 1 MiB allowed" in sentence


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("kinds", "kind"), [(PNG, "workers"), (PNG + JPEG, "workers"), (PNG + JPEG + JPEG, "jpeg"), (KINDS, "workers")]
)
def test_most_must_be_jpegs_for_that(tmp_path, kinds, kind):
    found, sentence = chosen(folder_of(tmp_path / "images", 30, kinds=kinds), budget_bytes=1000)
    assert found == kind
    assert ("no JPEGs" in sentence) == (kind == "workers")


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_that_cannot_decode_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_no_jpegs_on", lambda device: "not compiled with nvJPEG")
    source = folder_of(tmp_path / "images", 30, kinds=JPEG)
    kind, sentence = chosen(source, budget_bytes=1000)
    assert kind == "workers"
    assert "cannot decode JPEGs (not compiled with nvJPEG)" in sentence
    with pytest.raises(UserError, match="not compiled with nvJPEG"):
        chosen(source, wanted="jpeg")


@pytest.mark.usefixtures("a_gpu")
def test_what_was_thought_to_fit_and_does_not_takes_another_way(tmp_path):
    folder_of(tmp_path / "images", 30, kinds=JPEG)
    for number in range(30, 200):  # of 200 images 64 are looked at: these are not among them
        side = 12 if number in sampled(200) else 100
        (tmp_path / "images" / f"{number:04d}.jpg").write_bytes(jpeg(smooth(number, side, side)))
    kind, sentence = chosen(folder_source(str(tmp_path / "images")))
    assert kind == "jpeg"
    assert "thought to fit into the GPU's memory and did not (more than the 1 MiB allowed)" in sentence


def sampled(count):
    return set(np.unique(np.linspace(0, count - 1, 64).astype(int)).tolist())


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_that_runs_out_of_memory_while_loading_takes_another_way(monkeypatch):
    def full(*arguments, **others):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(module, "ResidentViews", full)
    kind, sentence = chosen(NOISE)
    assert kind == "workers"
    assert "did not (its memory ran out)" in sentence
    with pytest.raises(UserError, match=r"do not fit \(its memory ran out\)"):
        chosen(NOISE, wanted="resident")


@pytest.mark.parametrize(("wanted", "kind"), [("resident", "resident"), ("jpeg", "jpeg"), ("workers", "workers")])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.usefixtures("a_gpu")
def test_a_way_can_be_asked_for(tmp_path, device, wanted, kind):
    source = folder_of(tmp_path / "images", 30, bad=(3,))
    found, sentence = chosen(source, device, wanted=wanted)
    assert found == kind
    if wanted != "resident":
        assert "as asked for" in sentence


@pytest.mark.usefixtures("a_gpu")
def test_nine_tenths_of_the_free_memory_are_the_limit_where_it_is_asked_for():
    def zeros(count):
        return ArraySource("zeros", np.zeros((count, 3, 64, 64), dtype=np.uint8))  # 12,288 bytes each

    assert chosen(zeros(73), wanted="resident")[0] == "resident"
    with pytest.raises(UserError, match=r"'zeros' do not fit .* Use --execution.input auto"):
        chosen(zeros(74), wanted="resident")
    with pytest.raises(UserError, match="do not fit"):
        chosen(NOISE, CPU, wanted="resident", budget_bytes=1000)


@pytest.mark.usefixtures("a_gpu")
def test_several_processes_share_batches_whichever_way_they_take(tmp_path):
    source = folder_of(tmp_path / "images", 30, kinds=JPEG)
    whole = list(view_loader(source, batch_size=8, seed=3).epoch(1))
    for wanted in ("resident", "jpeg", "workers"):
        parts = []
        for share in (lambda images: slice(images // 2), lambda images: slice(images // 2, images)):
            settings = {"batch_size": 8, "seed": 3, "workers": 0, "share": share, "wanted": wanted}
            parts.append(list(choose_input(source, (AUGMENTATION,) * 2, device=CUDA, **settings)[0].epoch(1)))
        for together, first, second in zip(whole, *parts, strict=True):
            assert first.total == second.total == together.total
            assert torch.equal(torch.cat([first.indices, second.indices]), together.indices)
            for view, ours, theirs in zip(together.views, first.views, second.views, strict=True):
                assert torch.equal(torch.cat([ours, theirs]), view)


class Unreadable(ImageSource):
    name = "unreadable"
    labels = None
    classes = ()

    def __len__(self):
        return 100

    def image(self, index):
        raise BadImage("the file does not exist")

    def describe(self, index):
        return f"gone/{index}.jpg"


@pytest.mark.usefixtures("a_gpu")
def test_images_that_cannot_be_read_are_the_workers_business():
    loader, sentence = choose_input(Unreadable(), (AUGMENTATION,) * 2, batch_size=4, seed=0, workers=0, device=CUDA)
    assert type(loader) is ViewLoader
    assert "none of the images tried could be read" in sentence


def test_a_survey_tells_pixels_and_jpegs(tmp_path):
    assert survey(NOISE) == Survey(40 * 3 * 16 * 16, exact=True, jpegs=0.0, readable=True)
    assert survey(NOISE.subset([1, 2])) == Survey(2 * 3 * 16 * 16, exact=True, jpegs=0.0, readable=True)
    source = folder_of(tmp_path / "images", 50, bad=(3,), kinds=PNG + JPEG)  # few enough to look at all
    sizes = [source.image(index).numel() for index in range(50) if index != 3]
    assert survey(source) == Survey(int(np.mean(sizes) * 50), exact=False, jpegs=24 / 49, readable=True)
    assert survey(ShapesSource(500, 16)) == Survey(500 * 3 * 16 * 16, exact=False, jpegs=0.0, readable=True)
    assert survey(Unreadable()) == Survey(0, exact=False, jpegs=0.0, readable=False)


def test_loading_reports_progress():
    seen = []
    choose_input(
        ShapesSource(40, 16),
        (AUGMENTATION,),
        batch_size=4,
        seed=0,
        workers=0,
        device=CPU,
        wanted="resident",
        progress=lambda done, count: seen.append((done, count)),
    )
    assert seen == [(32, 40), (40, 40)]


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 MiB"), (147 << 20, "147 MiB"), (1023 << 20, "1,023 MiB"), (35_648_000_000, "33.2 GiB")]
)
def test_bytes_for_people(count, words):
    assert in_bytes(count) == words


@pytest.mark.gpu
def test_on_a_gpu_the_ways_are_chosen(tmp_path):
    jpegs = folder_of(tmp_path / "jpegs", 40, kinds=JPEG)
    settings = {"batch_size": 4, "seed": 0, "workers": 2, "device": CUDA}
    for source, budget, kind in (
        (NOISE, None, ResidentViews),
        (jpegs, None, ResidentViews),
        (jpegs, 1000, JpegViews),
        (NOISE, 1000, ViewLoader),
    ):
        loader, _ = choose_input(source, (AUGMENTATION,) * 2, budget_bytes=budget, **settings)
        assert type(loader) is kind
        assert sum(len(batch.indices) for batch in loader.epoch(0)) == 40
