"""What a fingerprint notices about images, and what it does not mind."""

import numpy as np

from co2.data.fingerprint import fingerprint, fingerprint_of_names
from co2.data.folder import FileSource
from co2.data.shapes import ShapesSource


def files(root, *names):
    return FileSource("pictures", str(root), [name.encode() for name in names])


def test_a_fingerprint_tells_names_and_their_order_apart_but_not_where_they_lie():
    ours = fingerprint_of_names(files("/a/train", "cat/1.png", "cat/2.png", "dog/1.png"))
    assert ours == fingerprint_of_names(files("elsewhere", "cat/1.png", "cat/2.png", "dog/1.png"))
    assert ours == fingerprint_of_names(files("/", "mnt/b/cat/1.png", "mnt/b/cat/2.png", "mnt/b/dog/1.png"))
    others = [
        ("cat/1.png", "dog/1.png", "cat/2.png"),
        ("cat/1.png", "cat/3.png", "dog/1.png"),
        ("cat/1.png", "dog/2.png", "dog/1.png"),  # moved from one class to another
        ("cat/1.png", "cat/2.png"),
    ]
    assert len({ours, *(fingerprint_of_names(files("/a/train", *names)) for names in others)}) == 5
    assert -(2**63) <= ours < 2**64


def test_a_list_in_any_order_may_be_moved():
    names = ("cat/1.png", "dog/1.png", "cat/2.png")  # the first and the last share a folder that the other is not in
    assert fingerprint_of_names(files("/a/train", *names)) == fingerprint_of_names(files("elsewhere", *names))


def test_a_fingerprint_leaves_the_beginning_of_file_names_alone():
    cats = fingerprint_of_names(files("/a", "cat_1.png", "cat_2.png"))
    assert cats != fingerprint_of_names(files("/a", "dog_1.png", "dog_2.png"))


def test_sources_without_files_have_names_by_number():
    assert fingerprint_of_names(ShapesSource(40, 16)) == fingerprint_of_names(ShapesSource(40, 16))
    assert fingerprint_of_names(ShapesSource(40, 16)) != fingerprint_of_names(ShapesSource(41, 16))
    half = ShapesSource(40, 16).subset(np.arange(20))
    assert fingerprint_of_names(half) == fingerprint_of_names(ShapesSource(20, 16))


def test_a_copy_minds_where_images_lie_too():
    ours = fingerprint([files("/a", "cat/1.png", "cat/2.png")])
    assert ours == fingerprint([files("/a", "cat/1.png", "cat/2.png")])
    assert ours != fingerprint([files("/a", "dog/1.png", "dog/2.png")])
