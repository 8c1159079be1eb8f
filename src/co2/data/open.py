"""From what the user types after --data to images."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from co2.data.balance import balanced_subset
from co2.data.decode import EXTENSIONS
from co2.data.digits import digits_splits
from co2.data.folder import FileSource, find_images, folder_source, list_source
from co2.data.packed import PackedSource, is_pack, open_pack, open_pack_splits
from co2.data.shapes import ShapesSource
from co2.data.shards import ShardSource, find_shards, open_shard_splits, open_shards
from co2.data.source import HELD_OUT, BadImage, ImageSource, in_numbers, printable
from co2.data.torchvision_layouts import find_layout, open_layout
from co2.errors import UserError, did_you_mean

VALIDATION = "validation"
SHAPES_COUNT, SHAPES_SIZE, SHAPES_TEST_COUNT = 4000, 32, 1000
_SAMPLE = 5


@dataclass(frozen=True)
class DataSplits:
    """What a data set offers."""

    train: ImageSource
    """What is pre-trained on. Labels, if any, are not used for that."""
    bank: ImageSource | None
    """Labelled images in which a nearest-neighbour classifier looks things up."""
    test: ImageSource | None
    """Labelled images that are held out."""
    description: str
    """One line for the user: what was found."""


def open_data(specification: str) -> DataSplits:
    """The data that `specification` names.

    Args:
        specification: `shapes`, `shapes:COUNT` or `shapes:COUNT:SIZE` (pictures that the package renders), `digits`
            (scikit-learn's handwritten digits), or a path: a folder of images, a text file that lists images,
            CIFAR-10, CIFAR-100 or STL-10 as torchvision stores them, a pack that `co2 data pack` has written, or tar
            shards: a folder of them, one, a pattern such as `train-{000000..000012}.tar`, or an address for fsspec.
            `validation:SHARE:SEED:` before any of these puts a share of the training images aside and shows it in place
            of the test images.
    """
    kind, *numbers = specification.split(":")
    if kind == VALIDATION:
        return _validation(specification)
    if kind == "shapes":
        return _shapes(specification, numbers)
    if specification == "digits":
        return _digits()
    path = os.path.expanduser(specification)
    if is_pack(path):
        data = DataSplits(*open_pack(specification, path))
        _check_readable(data.train)
        return data
    shards = find_shards(path)
    if shards is not None:
        data = DataSplits(*open_shards(specification, shards))
        _check_readable(data.train)
        return data
    if not os.path.exists(path):
        raise UserError(_no_such_path(specification, path))
    if not os.path.isdir(path):
        return _listed(path)
    layout = find_layout(path)
    if layout is not None:
        return DataSplits(*open_layout(layout))
    return _folder(path)


def is_address(specification: str) -> bool:
    """Whether opening the data that `specification` names would ask another machine for them."""
    return "://" in specification or "::" in specification  # fsspec's addresses, and those that it finds in others


def open_splits(specification: str) -> dict[str, ImageSource]:
    """Every split of the data that `specification` names, also those that nothing is done with: for a copy of it all.

    Splits are called as their folders are, and else train, bank (where labels are only known of other images than
    those of train) and test. The classes of each are those of the one with the most, or the first of them.
    """
    data = open_data(specification)
    path = os.path.expanduser(specification)
    if isinstance(data.train, PackedSource):
        return {**open_pack_splits(specification, path)}
    if isinstance(data.train, ShardSource):
        return {**open_shard_splits(specification, find_shards(path) or [])}
    splits: dict[str, ImageSource] = {"train": data.train}
    if data.bank is not None and data.bank is not data.train:
        splits["bank"] = data.bank
    folders = _split_folders(path) if os.path.isdir(path) else {}
    if not isinstance(data.train, FileSource) or data.train.root != os.fsencode(folders.pop("train", "")):
        return splits if data.test is None else {**splits, "test": data.test}
    classes = data.train.classes
    for name, folder in folders.items():
        splits[name] = folder_source(folder, classes=classes)
        classes = splits[name].classes or classes
    return splits


def validation_of(data: str, share: float, seed: int = 0) -> str:
    """The specification of `data` with a share of its training images in place of its test images."""
    return f"{VALIDATION}:{share:g}:{seed}:{data}"


def _validation(specification: str) -> DataSplits:
    """Settings are chosen on images that are neither trained on nor tested on: a class-balanced share of the training
    images, which leave training, bank and all."""
    try:
        _, share_text, seed_text, data = specification.split(":", 3)
        share, seed = float(share_text), int(seed_text)
    except ValueError:
        share, seed, data = 0.0, 0, ""
    if not 0 < share < 1 or seed < 0 or not data:
        raise UserError(
            f"'{specification}' is not understood. Write {VALIDATION}:SHARE:SEED:DATA, with a share between 0 and 1, "
            f"for instance {VALIDATION}:0.1:0:digits."
        )
    whole = open_data(data)
    if whole.train.labels is None:
        raise UserError(
            f"To put a balanced part of the training images aside, all of them must have labels, and {data} has some "
            "without. Use data with class sub-folders, or judge on its own test images."
        )
    aside = balanced_subset(whole.train.labels, share, seed)  # [M]
    rest = np.setdiff1d(np.arange(len(whole.train)), aside)  # [N - M]
    if len(np.unique(whole.train.labels[rest])) < len(np.unique(whole.train.labels)):
        raise UserError(f"{data} has classes of too few images to put {share:.0%} of each aside. Use more images.")
    train = whole.train.subset(rest)
    words = f"{whole.description}; of the training images {len(aside):,} are put aside for validation, in place of them"
    return DataSplits(train, train, whole.train.subset(aside), words)


def _shapes(specification: str, numbers: list[str]) -> DataSplits:
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise UserError(
            f"'{specification}' is not understood. Write shapes, shapes:COUNT or shapes:COUNT:SIZE, "
            f"for instance shapes:{SHAPES_COUNT}:{SHAPES_SIZE}."
        )
    given = [int(number) for number in numbers]
    count, size = [*given, *(SHAPES_COUNT, SHAPES_SIZE)[len(given) :]]
    train = ShapesSource(count, size)
    test = ShapesSource(SHAPES_TEST_COUNT, size, split="test")
    words = (
        f"shapes: {count:,} rendered pictures of {size} pixels, {len(train.classes)} classes; {len(test):,} held out"
    )
    return DataSplits(train, train, test, words + _namesake(specification))


def _digits() -> DataSplits:
    train, test = digits_splits()
    words = f"scikit-learn's digits: {len(train):,} images of 32 pixels, {len(train.classes)} classes"
    return DataSplits(train, train, test, f"{words}; {len(test):,} held out{_namesake('digits')}")


def _namesake(specification: str) -> str:
    return f" (for the folder of that name, write ./{specification})" if os.path.exists(specification) else ""


def _listed(path: str) -> DataSplits:
    if path.lower().endswith(EXTENSIONS):
        raise UserError(f"'{path}' is a single image. Give the folder that holds it, or a text file that lists images.")
    source = list_source(path)
    _check_readable(
        source, "Write paths that are absolute or begin in the list's folder, one on each line, and labels after a tab."
    )
    return DataSplits(source, _if_labelled(source), None, f"{path}: a list of {in_numbers(source)}")


def _folder(path: str) -> DataSplits:
    folders = _split_folders(path)
    if len(folders) < 2:
        source = folder_source(path)
        if source.only_folder.lower() == "train":  # whose sub-folders are the classes, then
            source = folder_source(os.path.join(path, source.only_folder))
        _check_readable(source)
        return DataSplits(source, _if_labelled(source), None, f"{path}: {in_numbers(source)}")

    train = folder_source(folders["train"])
    _check_readable(train)
    for split in list(folders)[1:]:
        test = folder_source(folders[split], classes=train.classes)
        if test.labels is not None:
            break
    name = os.path.basename(folders[split])
    words = f"{path}: {in_numbers(train)} in train"
    if test.labels is None:
        words += f"; {name} has no class folders and is left out"
    else:
        _check_readable(test)
        words += f", {in_numbers(test)} in {name}" if train.labels is None else f"; {len(test):,} held out in {name}"
        if train.labels is not None:
            if new := test.classes[len(train.classes) :]:
                words += f", with {len(new):,} class{'es' if len(new) > 1 else ''} that train has not: {new[0]}"
            train.classes = test.classes
    unused = [other for other in _folders_in(path) if other not in (os.path.basename(folders["train"]), name)]
    if unused:
        words += f" (not used: {', '.join(map(printable, unused))})"
    return DataSplits(train, _if_labelled(train), _if_labelled(test), words)


def _split_folders(path: str) -> dict[str, str]:
    """The folders of the splits, by what these are called here, if one is train. Of the others those with images."""
    inside = {name.lower(): os.path.join(path, name) for name in _folders_in(path)}  # 'train' comes after 'Train'
    if "train" not in inside:
        return {}
    held_out = [name for name in HELD_OUT if name in inside and find_images(inside[name])[0]]
    return {name: inside[name] for name in ("train", *held_out)}


def _folders_in(path: str) -> list[str]:
    return sorted(name for name in _names(path) if os.path.isdir(os.path.join(path, name)) and name[0] != ".")


def _if_labelled(source: FileSource) -> FileSource | None:
    return None if source.labels is None else source


def _check_readable(
    source: ImageSource, remedy: str = "Check that these are image files, whole and readable, or name another folder."
) -> None:
    """Bad images are the loader's business, one by one; but if no image of a few can be read, say so at once."""
    reasons = []
    for index in np.unique(np.linspace(0, len(source) - 1, _SAMPLE).astype(int)):
        try:
            source.image(int(index))
            return
        except BadImage as error:
            reasons.append(f"  {source.describe(int(index))}: {error}")
    tried = "The only image" if len(source) == 1 else f"None of {len(reasons)} images tried"
    verb = "cannot" if len(source) == 1 else "can"
    raise UserError(f"{tried} from '{source.name}' {verb} be read:\n" + "\n".join(reasons) + f"\n{remedy}")


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise UserError(f"The folder '{folder}' cannot be read: {error.strerror}. Make it readable.") from None


def _no_such_path(specification: str, path: str) -> str:
    if os.path.islink(path):
        target = printable(os.readlink(path))
        return f"'{specification}' is a link to '{target}', which is not there. Bring it back, or mend the link."
    parent, last = os.path.split(os.path.normpath(path))
    while parent and not os.path.isdir(parent):  # the first part of the path that is wrong
        parent, last = os.path.split(parent)
    names = [printable(name) for name in _names(parent or ".") if name[0] != "."]
    hint = did_you_mean(last, [*names, "shapes", "digits"])
    return (
        f"There is no file or folder '{specification}'.{hint} --data takes a folder of images, a text file that lists "
        "images, tar shards, a pack, or one of the built-in sets: shapes, digits."
    )
