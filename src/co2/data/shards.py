"""Images in tar shards of the WebDataset convention: `train-000000.tar`, `train-000001.tar`, ...

Shards are usually streamed, and shuffled by passing through a buffer. Here they are addressed: an index (see
`co2.data.tar_index`) tells where each image lies, and reading one is reading a range of bytes. A `ShardSource` is
therefore an `ImageSource` like any other, and everything that the program promises about images by number holds for
shards too, without a line of code for it: an epoch visits every image once in an order that is a function of (seed,
epoch), whatever the number of nodes and workers; none is lost or repeated; and the position in a checkpoint is a
number. The price is a seek for each image, which worker processes hide.

Shards lie on this machine or behind an address that fsspec understands (s3://, gs://, https://, ...). Nothing is
fetched unless the user gives such an address, and commands in place of names (`pipe:...`) are refused.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

import numpy as np
import torch

from co2.data.decode import EXTENSIONS, TOO_LARGE, decode_image
from co2.data.folder import PackedPaths
from co2.data.packed import read_json
from co2.data.shard_storage import index_of, is_remote, read_beginning, read_range, remote_folder, remote_glob
from co2.data.source import HELD_OUT, BadImage, ImageSource, Parts, choose_held_out, printable
from co2.errors import UserError
from co2.files import MOST_BYTES, parse_json

_CLASSES_FILE = "classes.json"
_MANIFEST = "shards.json"  # by which an earlier version of this program noted whether all shards are there
_MOST_SHARDS = 1_000_000
_MOST_CLASSES_BYTES = 32 * 2**20
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")


class ShardSource(ImageSource):
    """The images in some tar files, one file after the other."""

    def __init__(self, name: str, shards: Sequence[str]) -> None:
        indices = []
        stamps = []
        for path in shards:
            index, stamp = index_of(path)
            indices.append(index)
            stamps.append(stamp)
        self.name = name
        self.shards = tuple(shards)
        self.stamps = tuple(stamps)
        self.ends = np.cumsum([len(index) for index in indices])  # images up to the end of each shard
        self.offsets = np.concatenate([index.offsets for index in indices])  # [N] int64
        self.sizes = np.concatenate([index.sizes for index in indices])  # [N] int64
        self.names = PackedPaths.chain([index.names for index in indices])
        self.damaged = tuple(
            f"{printable(path)} is used up to image {len(index):,} only: {index.damage}"
            for path, index in zip(shards, indices, strict=True)
            if index.damage
        )
        if not len(self):
            raise UserError(_no_images(name, self.shards, self.damaged))
        labels = np.concatenate([index.labels for index in indices])  # [N] int64
        self.without_label = int((labels < 0).sum())
        self.labels = None if self.without_label else labels
        self.classes: tuple[str, ...] = ()
        if self.labels is not None:
            self.classes = tuple(str(number) for number in range(int(labels.max()) + 1))

    def __len__(self) -> int:
        return len(self.offsets)

    def image(self, index: int) -> torch.Tensor:
        return decode_image(self.encoded(index)[0])

    def encoded(self, index: int) -> tuple[bytes, str]:
        shard, offset, size = self._shard(index), int(self.offsets[index]), int(self.sizes[index])
        if size > MOST_BYTES:
            raise BadImage(TOO_LARGE)
        data = read_range(self.shards[shard], self.stamps[shard], offset, size)
        if len(data) < size:
            raise BadImage("truncated file")
        return data, os.path.splitext(self.names[index])[1].decode("ascii").lower()

    def describe(self, index: int) -> str:
        return f"{printable(self.shards[self._shard(index)])}: {printable(self.names[index])}"

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self.ends, index, side="right"))


def find_shards(path: str) -> list[str] | None:
    """The tar files that `path` means, in order; None if it means something else.

    It may be a tar file, a folder of them, names with ranges or wildcards (`train-{000000..000012}.tar`,
    `part-*.tar`), or an address of any of these.
    """
    if path.startswith("pipe:"):
        raise UserError(
            f"'{printable(path)}' is a command, and commands are not run. Give the shards' names, or an address that "
            "fsspec understands, such as s3://bucket/train-{000000..000012}.tar."
        )
    remote = is_remote(path)
    if not remote and os.path.exists(path):
        if os.path.isdir(path):
            return _shards_in_folder(path)
        return [path] if path.lower().endswith(".tar") else None
    if not remote and not _is_pattern(path):
        return None
    found: list[str] = []
    for name in _expand_braces(path):
        if any(character in name for character in "*?["):
            matches = remote_glob(name) if remote else sorted(glob.glob(name))
            if not matches:
                raise UserError(f"No file is called '{printable(name)}'. Check the name of the shards.")
            found += matches
        elif remote and not name.lower().split("?")[0].endswith((".tar", ".tgz", ".gz")):
            found += remote_folder(name)
        else:
            found.append(name)
    return list(dict.fromkeys(found))  # each once


def open_shards(name: str, shards: Sequence[str]) -> Parts:
    """What is trained on, and the first of the held-out splits that has labels."""
    by_split = _by_split(shards)
    train = ShardSource(name, by_split["train"])
    others = [split or "others" for split in by_split if split != "train"]
    test, held_out = choose_held_out(others, lambda split: ShardSource(name, by_split[split]))
    _name_classes([source for source in (train, test) if source is not None], os.path.dirname(shards[0]))

    words = f"{printable(name)}: {_count(train)} in {len(train.shards):,} shard{'s' if len(train.shards) > 1 else ''}"
    words += held_out
    for damage in (*train.damaged, *(test.damaged if test is not None else ())):
        words += f". Note: {damage}"
    return train, train if train.labels is not None else None, test, words


def open_shard_splits(name: str, shards: Sequence[str]) -> dict[str, ShardSource]:
    """All splits, by their names."""
    splits = {split: ShardSource(name, paths) for split, paths in _by_split(shards).items() if split}
    _name_classes(list(splits.values()), os.path.dirname(shards[0]))
    return splits


def _by_split(shards: Sequence[str]) -> dict[str, list[str]]:
    """Shards told apart by the words 'train', 'val' and 'test' in their names; '' are others.

    Where none is called 'train', the others are trained on; where there are none, all of them: who names nothing but
    'test-000000.tar' wants to train on it.
    """
    found: dict[str, list[str]] = {}
    for path in shards:
        found.setdefault(_split_of(path), []).append(path)
    if "train" not in found and "" not in found:
        return {"train": list(shards)}
    return found if "train" in found else {"train": found.pop(""), **found}


def _count(source: ShardSource) -> str:
    if source.labels is not None:
        kinds = f"{len(source.classes):,} classes"
    elif source.without_label < len(source):
        kinds = f"labels not used because {source.without_label:,} have none"
    else:
        kinds = "no labels"
    return f"{len(source):,} image{'s' if len(source) != 1 else ''}, {kinds}"


def _split_of(path: str) -> str:
    words = re.split(r"[^a-z]+", path.replace("\\", "/").rsplit("/", 1)[-1].lower())
    return next((split for split in ("train", *HELD_OUT) if split in words), "")


def _name_classes(sources: Sequence[ShardSource], folder: str) -> None:
    """Give all sources the same classes, by the names in classes.json if it lies beside the shards."""
    labelled = [source for source in sources if source.labels is not None]
    path = f"{folder}/{_CLASSES_FILE}" if is_remote(folder) else os.path.join(folder, _CLASSES_FILE)
    try:
        text = read_beginning(path, _MOST_CLASSES_BYTES)
        names = parse_json(text)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("no list of names")
    except FileNotFoundError:
        names = [str(number) for number in range(max((len(source.classes) for source in labelled), default=0))]
    except (OSError, ValueError):
        raise UserError(
            f"'{printable(path)}' is not a list of class names in JSON. Repair it, or take it away: then the classes "
            "are called by their numbers."
        ) from None
    for source in labelled:
        if len(source.classes) > len(names):
            raise UserError(
                f"The images of '{printable(source.name)}' have labels up to {len(source.classes) - 1}, and "
                f"'{printable(path)}' names {len(names)} classes. Repair it, or take it away."
            )
        source.classes = tuple(printable(name) for name in names)


def _no_images(name: str, shards: Sequence[str], damaged: Sequence[str]) -> str:
    if damaged:
        return (
            f"No images were found in '{printable(name)}'. {damaged[0]}. Copy the file again, unpack it if it is "
            "compressed, or make a pack of the images with `co2 data pack`."
        )
    return (
        f"No images were found in the {len(shards)} tar file(s) of '{printable(name)}'. Members whose names end in "
        f"{', '.join(EXTENSIONS)} are read."
    )


# Names.


def _is_pattern(path: str) -> bool:
    return path.lower().endswith(".tar") and any(character in path for character in "*?[{")


def _expand_braces(pattern: str) -> list[str]:
    """`a-{08..10}` is a-08, a-09, a-10, and `{a,b}` is a and b."""
    match = min(filter(None, (_RANGE.search(pattern), _CHOICE.search(pattern))), key=_place, default=None)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    if match.re is _RANGE:
        first, last = match[1], match[2]
        if len(last) > 9 or not int(first) <= int(last) or int(last) - int(first) >= _MOST_SHARDS:
            raise UserError(f"'{match[0]}' is not a range of shards. Write {{000000..000012}} for thirteen of them.")
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        choices = match[1].split(",")
    rest = _expand_braces(after)
    if len(choices) * len(rest) > _MOST_SHARDS:
        raise UserError(f"'{printable(pattern)}' means more than {_MOST_SHARDS:,} shards. Write a narrower range.")
    return [before + choice + end for choice in choices for end in rest]


def _place(match: re.Match[str]) -> int:
    return match.start()


def _shards_in_folder(folder: str) -> list[str] | None:
    """The tar files in a folder, if that is what it is for: no images and no folders lie beside them."""
    try:
        with os.scandir(folder) as entries:
            seen = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    except OSError:
        return None  # said where the folder is read for its images
    manifest = read_json(os.path.join(folder, _MANIFEST)) if (_MANIFEST, False) in seen else None
    if isinstance(manifest, dict) and manifest.get("finished") is False:
        raise UserError(
            f"The shards in '{printable(folder)}' are unfinished. Pack the images that they were to hold with "
            f"`co2 data pack`, or name those that are there: '{printable(folder)}/*.tar'."
        )
    tars = [os.path.join(folder, name) for name, is_folder in seen if name.lower().endswith(".tar") and not is_folder]
    others = any(is_folder or name.lower().endswith(EXTENSIONS) for name, is_folder in seen)
    return tars if tars and not others else None
