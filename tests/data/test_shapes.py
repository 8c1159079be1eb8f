"""The rendered pictures as a data set, and written out in two layouts."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import ImageFolder, VOCDetection, VOCSegmentation

from co2.data.drawing import CLASSES, render
from co2.data.open import open_data
from co2.data.shapes import ShapesSource, write_shapes
from co2.errors import RunError, UserError


def test_images_are_the_rendered_ones_each_time() -> None:
    source = ShapesSource(30, 32, seed=5, split="test")
    for _ in range(2):
        image = source.image(17)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), render(17, 32, 5, "test").image)
        image.zero_()  # what a caller does to it must not be seen by the next one
    assert source.describe(17) == "shapes image 17 of 32 pixels"
    assert np.array_equal(source.picture(17).image, render(17, 32, 5, "test").image)


def test_classes_are_balanced() -> None:
    source = ShapesSource(1003)
    assert source.labels is not None
    assert source.labels.dtype == np.int64
    assert np.ptp(np.bincount(source.labels, minlength=10)) <= 1
    assert source.classes == CLASSES == tuple(sorted(CLASSES))


def test_a_worker_is_not_sent_the_rendered_pictures() -> None:
    source = ShapesSource(50)
    before = len(pickle.dumps(source))
    images = [source.image(index) for index in range(50)]
    sent = pickle.dumps(source)
    assert len(sent) == before
    assert torch.equal(pickle.loads(sent).image(49), images[49])


@pytest.mark.parametrize(("count", "size"), [(0, 32), (10**14, 32), (10, 7), (10, 10**10)])
def test_requests_that_make_no_sense(count: int, size: int) -> None:
    with pytest.raises(UserError, match=r"must be from [18] to"):
        ShapesSource(count, size)


def test_folder_layout(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    write_shapes(tmp_path / "new", count=60, size=32, seed=2, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(done, 60) for done in range(1, 61)]
    train, val = ImageFolder(str(tmp_path / "new" / "train")), ImageFolder(str(tmp_path / "new" / "val"))
    assert (len(train), len(val)) == (48, 12)
    assert tuple(train.classes) == tuple(val.classes) == CLASSES
    for path, label in train.samples:
        assert label == int(Path(path).stem) % 10
    image, _ = train[3]
    assert np.array_equal(np.asarray(image), render(int(Path(train.samples[3][0]).stem), 32, seed=2).image)

    data = open_data(str(tmp_path / "new"))
    assert data.test is not None
    assert (len(data.train), len(data.test), data.train.classes) == (48, 12, CLASSES)


def test_voc_layout(tmp_path: Path) -> None:
    write_shapes(tmp_path, layout="voc", count=20, size=128, seed=1)
    assert [len(VOCDetection(str(tmp_path), image_set=part)) for part in ("train", "val", "trainval")] == [10, 10, 20]
    detection = VOCDetection(str(tmp_path), image_set="val")
    segmentation = VOCSegmentation(str(tmp_path), image_set="val")
    for index in range(10):
        truth = render(index, 128, seed=1, split="test", several=True)
        image, target = detection[index]
        assert np.abs(np.asarray(image).astype(int) - truth.image).mean() < 8  # JPEG
        annotation = target["annotation"]
        assert annotation["size"] == {"width": "128", "height": "128", "depth": "3"}
        objects = annotation["object"]
        assert [thing["name"] for thing in objects] == [CLASSES[label] for label in truth.labels]
        for thing, (left, top, right, bottom) in zip(objects, truth.boxes, strict=True):
            box = [int(thing["bndbox"][tag]) for tag in ("xmin", "ymin", "xmax", "ymax")]
            assert box == [left + 1, top + 1, right, bottom]

        _, mask = segmentation[index]
        assert mask.mode == "P"
        numbers = np.asarray(mask)
        expected = sum((label + 1) * shape for label, shape in zip(truth.labels, truth.masks, strict=True))
        judged = numbers != 255
        assert np.array_equal(numbers[judged], expected[judged])
        assert set(np.unique(numbers)) == {0, 255, *(truth.labels + 1)}
        # The void border lies on both sides of every object's edge, and nowhere else.
        edges = (expected[:, 1:] != expected[:, :-1]).nonzero()
        assert not judged[edges].any()
        assert not judged[edges[0], edges[1] + 1].any()
        assert judged.mean() > 0.85


def test_voc_palette(tmp_path: Path) -> None:
    write_shapes(tmp_path, layout="voc", count=20, size=32)
    _, mask = VOCSegmentation(str(tmp_path), image_set="train")[0]
    palette = np.array(mask.getpalette()).reshape(-1, 3).tolist()
    # The first colours of Pascal VOC's map, and cream for the border.
    assert palette[:9] == [
        [0, 0, 0],
        [128, 0, 0],
        [0, 128, 0],
        [128, 128, 0],
        [0, 0, 128],
        [128, 0, 128],
        [0, 128, 128],
        [128, 128, 128],
        [64, 0, 0],
    ]
    assert palette[255] == [224, 224, 192]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(UserError, match="not empty"):
        write_shapes(tmp_path, count=20)
    assert os.listdir(tmp_path) == ["mine.txt"]
    with pytest.raises(UserError, match="is a file"):
        write_shapes(tmp_path / "mine.txt", count=20)
    with pytest.raises(UserError, match="cannot be written to"):
        write_shapes(tmp_path / "mine.txt" / "below", count=20)


def test_hidden_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").touch()
    write_shapes(tmp_path, count=20, size=8)
    assert sorted(os.listdir(tmp_path)) == [".DS_Store", "train", "val"]


def test_a_full_disk_is_told_plainly(tmp_path: Path) -> None:
    def full(done: int, total: int) -> None:
        if done == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunError, match=r"cannot be written any further: No space left on device\. Make room"):
        write_shapes(tmp_path / "new", count=20, size=8, progress=full)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'folder'"):
        write_shapes(tmp_path / "new", layout="foldr")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least 20"):
        write_shapes(tmp_path / "new", count=19)
    assert not (tmp_path / "new").exists()
