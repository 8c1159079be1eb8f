"""Whether images are the ones that they were: a run that goes on, and a copy that is finished, must mean the same."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator

from co2.data.source import ImageSource


def fingerprint_of_names(images: ImageSource) -> int:
    """A number of 64 bits that changes with any image's name or place among the others.

    Names count below the folder that the images have in common, so that it may be moved or written in another way.
    """
    # The first and the last in the order of letters have in common what all have; a list need not be in that order.
    extremes = [choose(map(images.describe, range(len(images)))) for choose in (min, max)]
    shared = os.path.commonprefix(extremes)  # noqa: RUF071 - of names, which need not be paths
    root = shared.removesuffix(re.split(r"/|: ", shared)[-1])  # packs and shards have a colon before a name
    digest = hashlib.blake2b(digest_size=8)
    for line in _lines(images, root):
        digest.update(line)
    return int.from_bytes(digest.digest())


def fingerprint(splits: Iterable[ImageSource]) -> str:
    """Changes when images come, go, change their names, labels or places; to mix two states would spoil a copy."""
    digest = hashlib.sha256()
    for images in splits:
        digest.update(name_bytes("\n".join(images.classes)))
        digest.update(b"" if images.labels is None else images.labels.tobytes())
        for line in _lines(images):
            digest.update(line)
    return digest.hexdigest()


def _lines(images: ImageSource, root: str = "") -> Iterator[bytes]:
    """Each image's name, below `root`."""
    for index in range(len(images)):
        yield name_bytes(images.describe(index).removeprefix(root) + "\n")


def name_bytes(name: str) -> bytes:
    """A name as it is written to files; that of a folder need not be text."""
    return name.encode("utf-8", "backslashreplace")
