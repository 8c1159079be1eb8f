"""Which files are found in a folder or a list, in which order, with which labels."""

from __future__ import annotations

import os
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hostile import in_bounds, make_endless, make_pipe
from PIL import Image

from co2.data import folder as folder_module
from co2.data.folder import FileSource, PackedPaths, find_images, folder_source, list_source
from co2.data.source import BadImage
from co2.errors import UserError


def sparse(path: str | os.PathLike[str]) -> None:
    Path(path).write_bytes(b"a.png\n" * 20_000)
    os.truncate(path, 2**40)


def put(root: Path, *names: str) -> None:
    """Images of one colour, the first channel of which counts them."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path, "PNG")


def names(root: Path) -> list[str]:
    return [os.fsdecode(path) for path in find_images(str(root))[0]]


def test_images_are_found_at_any_depth_and_in_order(tmp_path: Path) -> None:
    put(tmp_path, "b/z.jpg", "b/deep/er/y.PNG", "a/x.JpEg", "a-b/w.tiff", "a/v.webp")
    put(tmp_path, ".hidden.png", ".cache/c.png", "a/._x.png")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    assert names(tmp_path) == ["a/v.webp", "a/x.JpEg", "a-b/w.tiff", "b/deep/er/y.PNG", "b/z.jpg"]
    assert find_images(str(tmp_path))[1] == {".txt": 1}


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "TIF"])
def test_extensions(tmp_path: Path, extension: str) -> None:
    put(tmp_path, f"picture.{extension}")
    assert names(tmp_path) == [f"picture.{extension}"]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    put(tmp_path, "data/a/1.png", "elsewhere/2.png", "elsewhere/3.png")
    data = tmp_path / "data"
    (data / "a" / "up").symlink_to(data)
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    (data / "again").symlink_to(tmp_path / "elsewhere")
    (data / "itself").symlink_to(data / "itself")
    (data / "one.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    assert names(data) == ["a/1.png", "again/2.png", "again/3.png", "one.png"]


def test_a_folder_counts_where_it_really_is(tmp_path: Path) -> None:
    put(tmp_path, "z/1.png")
    (tmp_path / "a").symlink_to(tmp_path / "z")
    assert names(tmp_path) == ["z/1.png"]


def test_a_link_to_what_lies_around_the_folder_is_not_followed(tmp_path: Path) -> None:
    put(tmp_path / "all", "train/1.png", "private/2.png")
    (tmp_path / "all" / "train" / "root").symlink_to("/")
    (tmp_path / "all" / "train" / "up").symlink_to("..")
    (tmp_path / "all" / "train" / "beside").symlink_to("../private")  # which is what somebody wants
    assert find_images(str(tmp_path / "all" / "train"))[0] == [b"1.png", b"beside/2.png"]


def test_a_dangling_link_is_named_when_it_is_read(tmp_path: Path) -> None:
    put(tmp_path, "1.png")
    (tmp_path / "2.png").symlink_to(tmp_path / "gone.png")
    source = folder_source(str(tmp_path))
    with pytest.raises(BadImage, match="does not exist"):
        source.image(1)
    assert source.describe(1) == str(tmp_path / "2.png")


def test_labels_from_the_first_level_of_folders(tmp_path: Path) -> None:
    put(tmp_path, "dog/1.png", "cat/b/2.png", "cat/a/3.png", "dog/4.png")
    (tmp_path / "empty").mkdir()
    source = folder_source(str(tmp_path))
    assert source.classes == ("cat", "dog")
    assert source.labels is not None
    assert source.labels.dtype == np.int64
    assert [(source.describe(i).rsplit("/", 1)[1], int(source.labels[i])) for i in range(4)] == [
        ("3.png", 0),
        ("2.png", 0),
        ("1.png", 1),
        ("4.png", 1),
    ]
    assert [int(source.image(i)[0, 0, 0]) for i in range(4)] == [2, 1, 0, 3]


@pytest.mark.parametrize("extra", [(), ("2.png",), ("only/2.png", "3.png")])
def test_one_folder_or_images_at_the_top_make_no_labels(tmp_path: Path, extra: tuple[str, ...]) -> None:
    put(tmp_path, "only/1.png", *extra)
    source = folder_source(str(tmp_path))
    assert source.labels is None
    assert source.classes == ()
    assert source.only_folder == ("" if extra else "only")


def test_images_beside_two_folders_make_no_labels(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.png", "dog/2.png", "stray.png")
    source = folder_source(str(tmp_path))
    assert source.labels is None
    assert source.only_folder == ""


def test_known_classes_give_the_numbering(tmp_path: Path) -> None:
    put(tmp_path, "ant/1.png", "dog/2.png")
    source = folder_source(str(tmp_path), classes=("cat", "dog"))
    assert source.classes == ("cat", "dog", "ant")
    assert source.labels is not None
    assert source.labels.tolist() == [2, 1]


def test_names_that_are_no_unicode(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    try:
        with open(odd, "wb") as file:
            Image.new("RGB", (4, 4)).save(file, "PNG")
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    source = folder_source(str(tmp_path))
    assert source.image(0).shape == (3, 4, 4)
    source.describe(0).encode("utf-8")  # can be printed and written to a report


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "open/1.png", "closed/2.png")
    scandir = os.scandir

    def refuse(path: bytes) -> object:
        if path.endswith(b"closed"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"closed' cannot be read: Permission denied"):
        find_images(str(tmp_path))


def test_packed_paths_give_back_every_path() -> None:
    paths = [b"a.png", b"", b"some/deep/er.jpg", "ü.png".encode()]
    packed = PackedPaths(paths)
    assert [packed[index] for index in range(len(packed))] == paths


def test_a_large_source_is_cheap_to_send_to_a_worker() -> None:
    count = 20_000
    paths = [f"class_{number % 10}/picture_{number:08d}.jpg".encode() for number in range(count)]
    source = FileSource("many", "/data", paths, np.arange(count) % 10, tuple("abcdefghij"))
    sent = pickle.dumps(source)
    assert len(sent) < sum(map(len, paths)) + 17 * count  # the paths, their ends, their labels, and hardly more
    assert pickle.loads(sent).describe(count - 1) == "/data/class_9/picture_00019999.jpg"


# Lists.


def test_a_list_with_comments_labels_and_both_kinds_of_path(tmp_path: Path) -> None:
    put(tmp_path, "pictures/a b.png", "pictures/c.png", "elsewhere/d.png")
    (tmp_path / "list.txt").write_text(
        f"\ufeff# what I like\n\npictures/a b.png\tdog\r\n{tmp_path}/elsewhere/d.png\tcat\n  pictures/c.png\tdog\n",
        encoding="utf-8",
    )
    source = list_source(str(tmp_path / "list.txt"))
    assert [int(source.image(index)[0, 0, 0]) for index in range(3)] == [0, 2, 1]
    assert source.classes == ("cat", "dog")
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0, 1]


def test_a_list_without_labels(tmp_path: Path) -> None:
    put(tmp_path, "a#1.png")
    (tmp_path / "list.txt").write_text("a#1.png")
    source = list_source(str(tmp_path / "list.txt"))
    assert source.labels is None
    assert source.image(0).shape == (3, 4, 4)


def test_numbers_as_labels_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.png\t10\nb.png\t9\nc.png\t10\n")
    source = list_source(str(tmp_path / "list.txt"))
    assert source.classes == ("9", "10")
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0, 1]


def test_a_label_that_is_missing_is_found(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# labels\na.png\tcat\nb.png\n")
    with pytest.raises(UserError, match=r"Line 3 .* has no label"):
        list_source(str(tmp_path / "list.txt"))


def test_labels_that_are_the_same_number_are_in_the_order_of_letters(tmp_path: Path) -> None:
    words = ["1", "01", "001", "0001"]  # as a set, in an order of its own in every process
    (tmp_path / "list.txt").write_text("".join(f"{word}.png\t{word}\n" for word in words))
    assert list_source(str(tmp_path / "list.txt")).classes == ("0001", "001", "01", "1")


def test_an_empty_list_and_one_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# nothing yet\n\n")
    with pytest.raises(UserError, match="names no images"):
        list_source(str(tmp_path / "list.txt"))
    (tmp_path / "pictures.tar").write_bytes(b"PK\0\0\1\2\3")
    with pytest.raises(UserError, match="unpack an archive first"):
        list_source(str(tmp_path / "pictures.tar"))


def test_a_large_archive_in_place_of_a_list_is_not_read_to_its_end(tmp_path: Path) -> None:
    with open(tmp_path / "pictures.zip", "wb") as file:
        file.write(b"PK\3\4\0\0")
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="unpack an archive first"):
            list_source(str(tmp_path / "pictures.zip"))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [make_pipe, make_endless, sparse])
def test_a_list_that_never_ends_is_told_plainly(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "list.txt")
    said = in_bounds(lambda: list_source(str(tmp_path / "list.txt")))
    assert re.match("UserError: The list .* cannot be read: (not a regular file|larger than 256 MiB)", said)


def test_a_list_of_more_than_can_be_held_is_told_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_MOST_LISTED", 3)
    (tmp_path / "list.txt").write_text("# a list\na.png\nb.png\n\nc.png\n")
    assert len(list_source(str(tmp_path / "list.txt"))) == 3
    (tmp_path / "list.txt").write_text("a.png\n" * 4)
    with pytest.raises(UserError, match="lists more than 3 images"):
        list_source(str(tmp_path / "list.txt"))
