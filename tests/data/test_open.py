"""What the user may write after --data, and what they are told when it does not work."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from co2.data.open import open_data, open_splits, validation_of
from co2.data.source import ImageSource
from co2.errors import UserError


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name, "PNG")


@pytest.mark.parametrize(
    ("specification", "count", "size"), [("shapes", 4000, 32), ("shapes:70", 70, 32), ("shapes:30:48", 30, 48)]
)
def test_shapes(specification: str, count: int, size: int) -> None:
    data = open_data(specification)
    assert data.bank is data.train
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (count, 1000)
    assert data.train.image(1).shape == data.test.image(1).shape == (3, size, size)
    assert not torch.equal(data.train.image(1), data.test.image(1))
    assert data.description == f"shapes: {count:,} rendered pictures of {size} pixels, 10 classes; 1,000 held out"


@pytest.mark.parametrize("specification", ["shapes:", "shapes:many", "shapes:10:20:30", "shapes:-5", "shapes:1.5"])
def test_shapes_misspelt(specification: str) -> None:
    with pytest.raises(UserError, match="Write shapes, shapes:COUNT or shapes:COUNT:SIZE"):
        open_data(specification)


@pytest.mark.parametrize("name", ["shapes", "digits"])
def test_a_folder_called_like_a_built_in_set_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    put(tmp_path, f"{name}/a.png")
    monkeypatch.chdir(tmp_path)
    assert f"write ./{name}" in open_data(name).description
    assert len(open_data(f"./{name}").train) == 1


def test_digits() -> None:
    data = open_data("digits")
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert "1,437 images" in data.description


def test_a_folder_without_and_with_classes(tmp_path: Path) -> None:
    put(tmp_path, "plain/1.png", "plain/2.png", "sorted/cat/1.png", "sorted/dog/2.png")
    plain, labelled = open_data(str(tmp_path / "plain")), open_data(str(tmp_path / "sorted"))
    assert (plain.bank, plain.test) == (None, None)
    assert plain.description == f"{tmp_path}/plain: 2 images, no labels"
    assert labelled.bank is labelled.train
    assert labelled.test is None
    assert labelled.description == f"{tmp_path}/sorted: 2 images, 2 classes"


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "pictures/1.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_data("~/pictures").train) == 1


def test_a_list(tmp_path: Path) -> None:
    put(tmp_path, "1.png", "2.png")
    (tmp_path / "list.txt").write_text("2.png\tdog\n1.png\tcat\n")
    data = open_data(str(tmp_path / "list.txt"))
    assert data.bank is data.train
    assert data.train.classes == ("cat", "dog")
    assert data.description == f"{tmp_path}/list.txt: a list of 2 images, 2 classes"


@pytest.mark.parametrize("held_out", ["val", "validation", "test"])
def test_splits(tmp_path: Path, held_out: str) -> None:
    put(tmp_path, "train/cat/1.png", "train/dog/2.png", f"{held_out}/dog/3.png", f"{held_out}/cat/4.png", "extra/5.png")
    data = open_data(str(tmp_path))
    assert data.bank is data.train
    assert data.test is not None
    assert data.test.labels is not None
    assert (len(data.train), data.test.labels.tolist()) == (2, [0, 1])
    assert data.description == f"{tmp_path}: 2 images, 2 classes in train; 2 held out in {held_out} (not used: extra)"


def test_val_is_preferred_unless_only_test_has_labels(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b/4.png", "test/a/5.png", "test/b/6.png")
    test = open_data(str(tmp_path)).test
    assert test is not None
    assert test.describe(0).endswith("val/a/3.png")
    put(tmp_path, "val/loose.png")
    test = open_data(str(tmp_path)).test
    assert test is not None
    assert test.describe(0).endswith("test/a/5.png")


def test_splits_number_their_classes_alike(tmp_path: Path) -> None:
    put(tmp_path, "train/bee/1.png", "train/cat/2.png", "val/ant/3.png", "val/cat/4.png")
    data = open_data(str(tmp_path))
    assert data.test is not None
    assert data.test.labels is not None
    assert data.train.labels is not None
    assert data.train.classes == data.test.classes == ("bee", "cat", "ant")
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1], [2, 1])
    assert data.description.endswith("2 held out in val, with 1 class that train has not: ant")


def test_a_class_is_the_same_in_both_splits_however_its_accents_are_written(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    put(tmp_path, f"train/{composed}/1.png", "train/dog/2.png", f"val/{decomposed}/3.png", "val/dog/4.png")
    data = open_data(str(tmp_path))
    assert data.test is not None
    assert data.test.labels is not None
    assert data.test.classes == (composed, "dog")
    assert data.test.labels.tolist() == [0, 1]


def test_splits_may_be_written_in_capitals(tmp_path: Path) -> None:
    put(tmp_path, "Train/cat/1.png", "Train/dog/2.png", "VAL/cat/3.png", "VAL/dog/4.png")
    data = open_data(str(tmp_path))
    assert data.test is not None
    assert data.train.classes == data.test.classes == ("cat", "dog")
    assert data.description == f"{tmp_path}: 2 images, 2 classes in train; 2 held out in VAL"
    assert {name: len(source) for name, source in open_splits(str(tmp_path)).items()} == {"train": 2, "val": 2}


def test_splits_without_images_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.png", "train/dog/2.png")
    for empty in ("val/cat", "val/dog", "test"):
        (tmp_path / empty).mkdir(parents=True)
    alone = open_data(str(tmp_path))
    assert (alone.train.classes, alone.test) == (("cat", "dog"), None)
    assert list(open_splits(str(tmp_path))) == ["train"]
    put(tmp_path, "test/cat/3.png", "test/dog/4.png")
    data = open_data(str(tmp_path))
    assert data.test is not None
    assert data.description.endswith("2 held out in test (not used: val)")
    assert list(open_splits(str(tmp_path))) == ["train", "test"]


def test_a_folder_of_nothing_but_train_has_its_classes(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.png", "train/dog/2.png")
    data = open_data(str(tmp_path))
    assert data.bank is data.train
    assert data.train.classes == ("cat", "dog")


def test_splits_of_which_one_is_not_labelled(tmp_path: Path) -> None:
    put(tmp_path, "a/train/x/1.png", "a/train/y/2.png", "a/val/3.png")
    put(tmp_path, "b/train/1.png", "b/val/x/3.png", "b/val/y/2.png")
    first, second = open_data(str(tmp_path / "a")), open_data(str(tmp_path / "b"))
    assert first.bank is first.train
    assert first.test is None
    assert "val has no class folders and is left out" in first.description
    assert second.bank is None
    assert second.test is not None
    assert second.test.classes == ("x", "y")


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for wrong in ("picturs", "picturs/deeper"):
        with pytest.raises(UserError, match=r"no file or folder .*Did you mean 'pictures'\?.*shapes, digits"):
            open_data(str(tmp_path / wrong))
    (tmp_path / "link").symlink_to("unmounted")
    with pytest.raises(UserError, match=r"link' is a link to 'unmounted', which is not there"):
        open_data(str(tmp_path / "link"))
    with pytest.raises(UserError, match="Did you mean 'digits'"):
        open_data("digit")
    with pytest.raises(UserError, match="no file or folder ''"):
        open_data("")


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    with pytest.raises(UserError, match=r"is empty. Put images into it \(.jpg, "):
        open_data(str(tmp_path))


def test_a_folder_of_other_things(tmp_path: Path) -> None:
    for name in ("a.heic", "b.HEIC", "c.mp4", "README"):
        (tmp_path / name).write_text("x")
    with pytest.raises(
        UserError, match=r"\.heic \(2\), no extension \(1\), \.mp4 \(1\); read are \.jpg, .* Convert them"
    ):
        open_data(str(tmp_path))
    (tmp_path / "all.tar.gz").write_text("x")
    with pytest.raises(UserError, match=r"\.gz \(1\).*Unpack the archive first"):
        open_data(str(tmp_path))
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "train-000000.tar").write_text("x")
    with pytest.raises(UserError, match=r"If the tar files are shards, name them"):
        open_data(str(tmp_path))


def test_a_single_image(tmp_path: Path) -> None:
    put(tmp_path, "one.PNG")
    with pytest.raises(UserError, match=r"is a single image\. Give the folder"):
        open_data(str(tmp_path / "one.PNG"))


def test_nothing_but_unreadable_images_is_said_at_once(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.jpg").write_text("no image")
    with pytest.raises(
        UserError, match=r"None of 5 images tried from .*\n.*/0\.jpg: not an image(.|\n)*whole and readable"
    ):
        open_data(str(tmp_path))
    put(tmp_path, "99.png")  # one of those tried
    assert len(open_data(str(tmp_path)).train) == 31


def test_a_list_whose_images_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("gone.png 3\n")
    with pytest.raises(
        UserError,
        match=r"The only image .* cannot be read:\n.*gone\.png 3: the file does not exist\n.*the list's folder.* a tab",
    ):
        open_data(str(tmp_path / "list.txt"))


def test_validation_puts_a_balanced_part_of_the_training_images_aside_and_never_shows_a_test_image() -> None:
    whole, split = open_data("digits"), open_data("validation:0.1:0:digits")
    assert whole.test is not None
    assert split.test is not None
    assert split.bank is split.train
    assert split.train.labels is not None
    assert split.test.labels is not None
    assert whole.train.labels is not None

    def pictures(source: ImageSource) -> list[bytes]:
        return [source.image(index).numpy().tobytes() for index in range(len(source))]

    rest, aside, tested = pictures(split.train), pictures(split.test), set(pictures(whole.test))
    assert sorted(rest + aside) == sorted(pictures(whole.train))  # every training image is in one of the two, once
    assert not set(rest) & set(aside)
    assert not tested & set(aside)
    assert not tested & set(rest)
    counts = np.bincount(whole.train.labels)
    np.testing.assert_array_equal(np.bincount(split.test.labels), np.rint(0.1 * counts))

    other = open_data("validation:0.1:1:digits")
    assert other.test is not None
    assert set(pictures(other.test)) != set(aside)
    again = open_data(validation_of("digits", 0.1))
    assert again.test is not None
    assert pictures(again.test) == aside


@pytest.mark.parametrize(
    "specification",
    ["validation", "validation:0.1", "validation:2:0:digits", "validation:x:0:digits", "validation:0.1:0:"],
)
def test_validation_misspelt(specification: str) -> None:
    with pytest.raises(UserError, match="Write validation:SHARE:SEED:DATA"):
        open_data(specification)


def test_validation_needs_labels_and_more_than_one_image_of_a_class(tmp_path: Path) -> None:
    put(tmp_path, "plain/1.png", "plain/2.png", "few/cat/1.png", "few/dog/2.png")
    with pytest.raises(UserError, match="must have labels"):
        open_data(f"validation:0.1:0:{tmp_path / 'plain'}")
    with pytest.raises(UserError, match="too few images"):
        open_data(f"validation:0.1:0:{tmp_path / 'few'}")
