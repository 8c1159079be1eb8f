"""Image files in folders, and text files that list them."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import torch

from co2.data.decode import EXTENSIONS, read_image, unreadable_is_bad
from co2.data.source import ImageSource, printable
from co2.errors import UserError
from co2.files import UnreadableFile, open_regular, read_bytes, read_text

_EXTENSIONS = tuple(extension.encode() for extension in EXTENSIONS)
EXTENSIONS_IN_WORDS = ", ".join(EXTENSIONS)
_ENOUGH_TO_TELL = 1 << 16  # bytes of a file, whether it is text
_MOST_LIST_BYTES, _MOST_LISTED = 256 * 2**20, 10_000_000  # larger collections are better packed


class PackedPaths:
    """Paths joined into one array: a million of them are two arrays to copy into a worker, not a million objects."""

    def __init__(self, paths: Iterable[bytes]) -> None:
        listed = list(paths)
        self.joined = np.frombuffer(b"".join(listed), dtype=np.uint8)  # all paths, end to end
        self.ends = np.cumsum([len(path) for path in listed], dtype=np.int64)  # [N]

    @staticmethod
    def from_arrays(joined: np.ndarray, ends: np.ndarray) -> PackedPaths:
        """From paths that are already end to end, uint8, and the places where each ends, [N] int64."""
        packed = PackedPaths(())
        packed.joined, packed.ends = joined, ends
        return packed

    @staticmethod
    def chain(parts: Sequence[PackedPaths]) -> PackedPaths:
        """The paths of all parts, one part after the other."""
        starts = np.cumsum([0, *(len(part.joined) for part in parts)])
        ends = [part.ends + start for part, start in zip(parts, starts, strict=False)]
        return PackedPaths.from_arrays(np.concatenate([part.joined for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        start = 0 if index == 0 else self.ends[index - 1]
        return self.joined[start : self.ends[index]].tobytes()


class FileSource(ImageSource):
    """Image files by path. Relative paths are below `root`."""

    only_folder = ""
    """The sub-folder that all images are in, where it makes no class because there is no other beside it."""

    def __init__(
        self,
        name: str,
        root: str,
        paths: Iterable[bytes],
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.root = os.fsencode(root)
        self.paths = PackedPaths(paths)
        self.labels = labels
        self.classes = classes

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> torch.Tensor:
        return read_image(os.path.join(self.root, self.paths[index]))

    def describe(self, index: int) -> str:
        return printable(os.path.join(self.root, self.paths[index]))

    def encoded(self, index: int) -> tuple[bytes, str]:
        path = os.path.join(self.root, self.paths[index])
        with unreadable_is_bad():
            return read_bytes(path, empty=False), os.fsdecode(os.path.splitext(path)[1]).lower()


def find_images(folder: str) -> tuple[list[bytes], Counter[str]]:
    """The image files below a folder, as sorted paths relative to it, and how many other files have which extension.

    Hidden files and folders are left out. Links to folders are followed, but no folder is entered twice, and none that
    the whole folder lies in: a link to one ends there, and does not lead all over the disk. A folder that is reached
    both ways counts where it really is.
    """
    root = os.fsencode(folder)
    found: list[bytes] = []
    others: Counter[str] = Counter()
    entered = _around(root)
    folders = deque([b""])
    linked: deque[bytes] = deque()  # entered when all real folders have been
    while folders or linked:
        relative = folders.popleft() if folders else linked.popleft()
        path = os.path.join(root, relative)
        try:
            information = os.stat(path)
            identity = (information.st_dev, information.st_ino)
            if identity in entered:
                continue
            entered.add(identity)
            with os.scandir(path) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith(b"."):
                        continue
                    below = os.path.join(relative, entry.name)
                    if _is_folder(entry):
                        (linked if entry.is_symlink() else folders).append(below)
                    elif entry.name.lower().endswith(_EXTENSIONS):
                        found.append(below)
                    else:
                        others[printable(os.path.splitext(entry.name)[1].lower())] += 1
        except OSError as error:
            raise UserError(
                f"The folder '{printable(path)}' cannot be read: {error.strerror}. "
                "Make it readable, or list the images you want in a text file."
            ) from None
    separator = os.fsencode(os.sep)
    found.sort(key=lambda path: path.replace(separator, b"\0"))  # a folder's files stay together: 'a' before 'a-b'
    return found, others


def _around(folder: bytes) -> set[tuple[int, int]]:
    """The folders that this one lies in, by device and number."""
    found = set()
    path = os.path.realpath(folder)
    while (above := os.path.dirname(path)) != path:
        path = above
        with suppress(OSError):
            information = os.stat(path)
            found.add((information.st_dev, information.st_ino))
    return found


def folder_source(folder: str, classes: Sequence[str] = ()) -> FileSource:
    """All images below a folder.

    The sub-folders at the first level are the classes if there are at least two of them with images in them and no
    image lies beside them; otherwise there are no labels. `classes` gives the numbering, as far as it is known.
    """
    paths, others = find_images(folder)
    if not paths:
        raise UserError(_no_images(folder, others))
    separator = os.fsencode(os.sep)
    owners = [path.partition(separator)[0] if separator in path else b"" for path in paths]
    names = sorted(set(owners))
    if len(names) < 2 or b"" in names:
        unlabelled = FileSource(folder, folder, paths)
        unlabelled.only_folder = printable(names[0]) if len(names) == 1 else ""
        return unlabelled
    # Some systems write accents in one character and others in two: the same name to people, so the same class.
    own = [unicodedata.normalize("NFC", printable(owner)) for owner in names]
    known = tuple(dict.fromkeys((*classes, *own)))
    number = {owner: known.index(label) for owner, label in zip(names, own, strict=True)}
    labels = np.array([number[owner] for owner in owners], dtype=np.int64)  # [N]
    return FileSource(folder, folder, paths, labels, known)


def list_source(path: str) -> FileSource:
    """The images that a text file lists, one on each line, perhaps with a label after a tab.

    Paths are absolute or relative to the list's folder. Blank lines and lines that begin with '#' are left out.
    """
    try:
        with open_regular(path, sys.maxsize) as file:
            is_text = b"\0" not in file.read(_ENOUGH_TO_TELL)  # an archive may be larger than memory
        text = read_text(path, _MOST_LIST_BYTES, errors="surrogateescape") if is_text else ""
    except UnreadableFile as error:
        raise UserError(f"The list '{path}' cannot be read: {error}. Make it readable, or give a folder.") from None
    if not is_text or "\0" in text:
        raise UserError(
            f"'{path}' is neither a folder nor a text file that lists images. "
            "Give a folder of images, or a text file with one path on each line; unpack an archive first."
        )
    paths: list[bytes] = []
    words: list[str | None] = []
    missing = 0  # the first line without a label
    for found in re.finditer(".+", text):
        entry = found[0].strip()
        if not entry or entry.startswith("#"):
            continue
        if len(paths) == _MOST_LISTED:
            raise UserError(f"'{path}' lists more than {_MOST_LISTED:,} images. Give the folder that they are in.")
        image, tab, label = entry.partition("\t")
        paths.append(os.fsencode(image.strip()))
        words.append(label.strip() if tab else None)
        missing = missing if tab or missing else text.count("\n", 0, found.start()) + 1
    if not paths:
        raise UserError(f"The list '{path}' names no images. Write one path on each line.")
    root = os.path.dirname(os.path.abspath(path))
    labelled = [word for word in words if word is not None]
    if not labelled:
        return FileSource(path, root, paths)
    if len(labelled) < len(words):
        raise UserError(
            f"Line {missing} of '{path}' has no label, but others have. "
            "Put a tab and a label on every line, or on none."
        )
    classes = tuple(sorted(set(labelled), key=_by_number_then_name))
    position = {word: label for label, word in enumerate(classes)}
    labels = np.array([position[word] for word in labelled], dtype=np.int64)  # [N]
    return FileSource(path, root, paths, labels, classes)


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _by_number_then_name(word: str) -> tuple[int, int, str]:
    return (0, int(word), word) if word.isdecimal() else (1, 0, word)


def _no_images(folder: str, others: Counter[str]) -> str:
    if not others:
        return f"The folder '{folder}' is empty. Put images into it ({EXTENSIONS_IN_WORDS}), or name another folder."
    kinds = ", ".join(f"{extension or 'no extension'} ({count})" for extension, count in others.most_common(5))
    message = f"There are no image files in '{folder}'. It holds files with {kinds}; read are {EXTENSIONS_IN_WORDS}."
    if ".tar" in others:
        return message + f" If the tar files are shards, name them: '{folder}/*.tar', or the folder they are in."
    archives = {".gz", ".tgz", ".zip", ".bz2", ".xz", ".7z", ".rar"} & set(others)
    return message + (" Unpack the archive first." if archives else " Convert them, or name another folder.")
