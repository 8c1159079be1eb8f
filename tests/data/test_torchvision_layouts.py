"""Small data sets in the layouts of torchvision's downloads, with known pixels."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hostile import in_bounds, make_endless, make_pipe
from torchvision.datasets import CIFAR10, STL10

from co2.data.open import DataSplits, open_data
from co2.data.source import BadImage, ImageSource
from co2.data.torchvision_layouts import find_layout
from co2.errors import UserError

WORDS = tuple("abcdefghij")


def dump(path: Path, contents: object, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(contents, protocol))


def random_pixels(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def make_cifar10(root: Path, protocol: int = 2) -> Path:
    folder = root / "cifar-10-batches-py"
    for number in range(1, 6):
        batch = {"data": random_pixels(number, 4), "labels": [number, 0, 1, 2], "filenames": ["x.png"] * 4}
        dump(folder / f"data_batch_{number}", batch, protocol)
    dump(folder / "test_batch", {"data": random_pixels(6, 3), "labels": [9, 8, 7]}, protocol)
    dump(folder / "batches.meta", {"label_names": list(WORDS), "num_cases_per_batch": 4}, protocol)
    return folder


def pixels(source: ImageSource, index: int) -> np.ndarray:
    return source.image(index).numpy()


def check_cifar10(data: DataSplits) -> None:
    assert data.bank is data.train
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (20, 3)
    assert np.array_equal(pixels(data.train, 9), random_pixels(3, 4)[1].reshape(3, 32, 32))
    assert np.array_equal(pixels(data.test, 2), random_pixels(6, 3)[2].reshape(3, 32, 32))
    assert data.train.labels is not None
    assert data.train.labels.tolist()[:6] == [1, 0, 1, 2, 2, 0]
    assert data.test.labels is not None
    assert data.test.labels.tolist() == [9, 8, 7]
    assert data.train.classes == WORDS


@pytest.mark.parametrize("protocol", range(6))
def test_cifar10_pickled_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    folder = make_cifar10(tmp_path, protocol)
    check_cifar10(open_data(str(folder)))
    check_cifar10(open_data(str(tmp_path)))
    assert "20 images of 32 pixels, 10 classes; 3 held out" in open_data(str(tmp_path)).description


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_are_read_in_the_order_that_they_were_pickled_in(tmp_path: Path, protocol: int) -> None:
    folder = make_cifar10(tmp_path, protocol)
    columns_first, swapped = np.asfortranarray(random_pixels(6, 3)), np.array([9, 8, 7], dtype=">i4")
    dump(folder / "test_batch", {"data": columns_first, "labels": swapped}, protocol)
    check_cifar10(open_data(str(folder)))


def test_cifar10_as_python_2_pickled_it(tmp_path: Path) -> None:
    """The published files: text and array data both as byte strings of Python 2."""
    folder = make_cifar10(tmp_path)
    data = random_pixels(1, 1)
    body = (
        b"\x80\x02}q\x00(U\x06labels]K\x01aU\x04datacnumpy.core.multiarray\n_reconstruct\n"
        b"cnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + data.tobytes() + b"tbu."
    )
    (folder / "test_batch").write_bytes(body)
    oracle = pickle.loads(body, encoding="latin1")
    assert np.array_equal(oracle["data"], data)  # the bytes above are what NumPy itself understands
    test = open_data(str(folder)).test
    assert test is not None
    assert np.array_equal(pixels(test, 0), data.reshape(3, 32, 32))


def test_cifar10_agrees_with_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar10(tmp_path)
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    theirs = CIFAR10(str(tmp_path), train=True)
    ours = open_data(str(tmp_path)).train
    assert ours.labels is not None
    assert ours.labels.tolist() == theirs.targets
    assert ours.classes == tuple(theirs.classes)
    for index in range(len(theirs)):
        assert np.array_equal(pixels(ours, index).transpose(1, 2, 0), np.array(theirs[index][0]))


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    fine = [f"kind {number}" for number in range(100)]
    dump(folder / "meta", {"fine_label_names": fine, "coarse_label_names": list(WORDS)})
    dump(folder / "train", {"data": random_pixels(0, 2), "fine_labels": [99, 5], "coarse_labels": [1, 1]})
    dump(folder / "test", {"data": random_pixels(1, 1), "fine_labels": [7], "coarse_labels": [1]})
    data = open_data(str(tmp_path))
    assert data.train.labels is not None
    assert data.train.labels.tolist() == [99, 5]
    assert data.train.classes == tuple(fine)
    assert np.array_equal(pixels(data.train, 1), random_pixels(0, 2)[1].reshape(3, 32, 32))


class Malicious:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.witness),)


def test_a_pickle_that_would_run_a_program_is_refused(tmp_path: Path) -> None:
    folder = make_cifar10(tmp_path)
    witness = tmp_path / "it ran"
    dump(folder / "data_batch_3", {"data": Malicious(witness), "labels": []})
    with pytest.raises(UserError, match=r"mkdir', which no CIFAR file needs .* not opened"):
        open_data(str(folder))
    assert not witness.exists()


@pytest.mark.parametrize(
    "stream",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c__builtin__\ngetattr\n.",
        b"cnumpy\nload\n.",
        b"cnumpy._core.multiarray\nscalar\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",
        b"cos\nsystem\n.",
    ],
)
def test_no_other_name_gets_through(tmp_path: Path, stream: bytes) -> None:
    folder = make_cifar10(tmp_path)
    (folder / "data_batch_1").write_bytes(stream)
    with pytest.raises(UserError, match="could run a program"):
        open_data(str(folder))


@pytest.mark.parametrize(
    "contents",
    [
        {"data": random_pixels(0, 2), "labels": [0]},
        {"data": random_pixels(0, 2)[:, :100], "labels": [0, 1]},
        {"data": random_pixels(0, 2).astype(np.int32), "labels": [0, 1]},
        {"data": random_pixels(0, 2), "labels": [0, 10]},
        {"data": random_pixels(0, 2), "labels": ["a", "b"]},
        {"data": np.array([None, None]), "labels": [0, 1]},
        {"data": random_pixels(0, 2)},
        [1, 2],
    ],
)
def test_contents_that_make_no_sense(tmp_path: Path, contents: object) -> None:
    folder = make_cifar10(tmp_path)
    dump(folder / "data_batch_2", contents)
    with pytest.raises(UserError, match=r"data_batch_2.*Download and unpack the data set again"):
        open_data(str(folder))


def test_a_damaged_and_a_missing_batch(tmp_path: Path) -> None:
    folder = make_cifar10(tmp_path)
    whole = (folder / "data_batch_4").read_bytes()
    (folder / "data_batch_4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"data_batch_4' is damaged"):
        open_data(str(folder))
    (folder / "data_batch_4").unlink()
    with pytest.raises(UserError, match=r"data_batch_4' cannot be read: the file does not exist"):
        open_data(str(folder))


@pytest.mark.parametrize("make", [make_pipe, make_endless])
@pytest.mark.parametrize("name", ["batches.meta", "data_batch_2", "test_batch"])
def test_a_cifar_file_that_never_ends(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder = make_cifar10(tmp_path)
    (folder / name).unlink()
    make(folder / name)
    said = in_bounds(lambda: open_data(str(folder)))
    assert said.endswith(f"{name}' cannot be read: not a regular file. Download and unpack the data set again.")


def billion_laughs() -> list:
    words: list = ["ha"]
    for _ in range(12):
        words = [words] * 10
    return words


@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("data_batch_2", b"\x80\x02}r\xff\xff\xff\x7f."),  # to be kept under number 2**31 - 1
        ("data_batch_2", b"}p2147483647\n."),
        ("data_batch_2", b"(" + b"]" * 30_000_000 + b"l."),  # a list of thirty million lists
        (
            "data_batch_2",  # a thousand times the bytes of one long text
            b"\x80\x02(c_codecs\nencode\nq\x05X\x00\x00\x80\x00" + b"x" * 2**23 + b"q\x06X\x01\x00\x00\x00xq\x07"
            b"00" + b"h\x05h\x06h\x07\x86R" * 1000 + b"l.",
        ),
        ("data_batch_2", pickle.dumps(np.dtype, 2)[:-1] + pickle.dumps((billion_laughs(),), 2)[2:-1] + b"R."),
        ("batches.meta", pickle.dumps({"label_names": billion_laughs()}, 2)),
    ],
    ids=["memo", "memo in text", "steps", "copies", "type", "names"],
)
def test_a_pickle_that_asks_for_too_much_memory(tmp_path: Path, name: str, stream: bytes) -> None:
    folder = make_cifar10(tmp_path)
    (folder / name).write_bytes(stream)
    said = in_bounds(lambda: open_data(str(folder)))
    assert said.startswith("UserError: ")
    assert said.endswith("Download and unpack the data set again.")
    assert "MemoryError" not in said


def test_a_link_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(make_cifar10(tmp_path))
    check_cifar10(open_data(str(tmp_path / "link")))


def test_two_data_sets_in_one_folder(tmp_path: Path) -> None:
    make_cifar10(tmp_path)
    (tmp_path / "stl10_binary").mkdir()
    with pytest.raises(UserError, match="several data sets"):
        find_layout(str(tmp_path))
    assert find_layout(str(tmp_path / "stl10_binary")) == str(tmp_path / "stl10_binary")
    (tmp_path / "other").mkdir()
    assert find_layout(str(tmp_path / "other")) is None


def make_stl10(root: Path) -> tuple[Path, dict[str, np.ndarray]]:
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    images = {}
    for seed, (part, count) in enumerate((("unlabeled", 4), ("train", 3), ("test", 2))):
        images[part] = np.random.default_rng(seed).integers(0, 256, (count, 3, 96, 96), dtype=np.uint8)
        images[part].transpose(0, 1, 3, 2).tofile(folder / f"{part}_X.bin")  # columns first, as in MATLAB
    np.array([1, 10, 2], dtype=np.uint8).tofile(folder / "train_y.bin")
    np.array([3, 3], dtype=np.uint8).tofile(folder / "test_y.bin")
    (folder / "class_names.txt").write_text("\n".join(WORDS) + "\n")
    return folder, images


def test_stl10(tmp_path: Path) -> None:
    _, images = make_stl10(tmp_path)
    data = open_data(str(tmp_path))
    assert data.bank is not None
    assert data.test is not None
    assert (len(data.train), len(data.bank), len(data.test)) == (7, 3, 2)
    assert data.train.labels is None
    assert data.bank.labels is not None
    assert data.test.labels is not None
    assert data.bank.labels.tolist() == [0, 9, 1]
    assert data.test.labels.tolist() == [2, 2]
    everything = np.concatenate([images["unlabeled"], images["train"]])
    for index in range(7):
        assert np.array_equal(pixels(data.train, index), everything[index])
    assert np.array_equal(pixels(data.test, 1), images["test"][1])
    assert data.train.describe(5).endswith("train_X.bin image 1")
    assert "7 images of 96 pixels, 3 of them labelled, 10 classes; 2 held out" in data.description


def test_stl10_agrees_with_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_stl10(tmp_path)
    monkeypatch.setattr(STL10, "_check_integrity", lambda self: True)
    theirs = STL10(str(tmp_path), split="train")
    ours = open_data(str(tmp_path)).bank
    assert ours is not None
    assert ours.labels is not None
    for index in range(3):
        image, label = theirs[index]
        assert np.array_equal(pixels(ours, index).transpose(1, 2, 0), np.array(image))
        assert ours.labels[index] == label


def test_stl10_without_its_unlabelled_part_and_without_labels(tmp_path: Path) -> None:
    folder, _ = make_stl10(tmp_path)
    (folder / "unlabeled_X.bin").unlink()
    assert len(open_data(str(folder)).train) == 3
    (folder / "train_y.bin").unlink()
    (folder / "test_X.bin").unlink()
    data = open_data(str(folder))
    assert data.bank is None
    assert data.test is None
    (folder / "train_X.bin").unlink()
    with pytest.raises(UserError, match=r"neither unlabeled_X\.bin nor train_X\.bin"):
        open_data(str(folder))


@pytest.mark.parametrize("make", [make_pipe, make_endless])
@pytest.mark.parametrize("name", ["unlabeled_X.bin", "train_X.bin", "test_y.bin", "class_names.txt"])
def test_an_stl10_file_that_never_ends(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder, _ = make_stl10(tmp_path)
    (folder / name).unlink()
    make(folder / name)
    said = in_bounds(lambda: open_data(str(folder)))
    assert said.endswith(f"{name}' cannot be read: not a regular file. Download and unpack the data set again.")


def test_an_stl10_file_that_is_exchanged_for_a_pipe(tmp_path: Path) -> None:
    folder, _ = make_stl10(tmp_path)
    source = open_data(str(folder)).train
    (folder / "unlabeled_X.bin").unlink()
    make_pipe(folder / "unlabeled_X.bin")
    assert in_bounds(lambda: source.image(0)) == f"{BadImage.__name__}: not a regular file"


def test_stl10_class_names_that_are_no_text(tmp_path: Path) -> None:
    folder, _ = make_stl10(tmp_path)
    (folder / "class_names.txt").write_bytes(b"\xff " + " ".join(WORDS[1:]).encode())
    bank = open_data(str(folder)).bank
    assert bank is not None
    assert bank.classes == ("\\udcff", *WORDS[1:])


def test_stl10_that_is_cut_off_or_does_not_fit(tmp_path: Path) -> None:
    folder, _ = make_stl10(tmp_path)
    np.array([1, 2], dtype=np.uint8).tofile(folder / "train_y.bin")
    with pytest.raises(UserError, match="do not fit"):
        open_data(str(folder))
    with open(folder / "unlabeled_X.bin", "ab") as file:
        file.write(b"\0")
    np.array([1, 2, 3], dtype=np.uint8).tofile(folder / "train_y.bin")
    with pytest.raises(UserError, match="cut off"):
        open_data(str(folder))
