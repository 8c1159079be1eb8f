"""Tar shards of the WebDataset convention, as other programs write them: for the tests of reading them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from co2.data.open import open_splits
from co2.data.source import BadImage


def write_shards(source: Path, folder: Path, count: int = 1000) -> dict[str, str]:
    """Write train-000000.tar, ... of `count` images each, those that are held out likewise, and classes.json.

    Returns the images without bytes to copy, which are left out, with the reasons.
    """
    folder.mkdir(parents=True)
    splits = open_splits(str(source))
    left_out = {}
    for split, images in splits.items():
        samples = []
        for index in range(len(images)):
            try:
                data, extension = images.encoded(index)
            except BadImage as error:
                left_out[images.describe(index)] = str(error)
                continue
            label = {} if images.labels is None else {".cls": str(int(images.labels[index])).encode()}
            samples.append({f"{index:09d}{end}": part for end, part in ({extension: data} | label).items()})
        for number, first in enumerate(range(0, len(samples), count)):
            with tarfile.open(folder / f"{split}-{number:06d}.tar", "w") as archive:
                for name, part in (member for sample in samples[first : first + count] for member in sample.items()):
                    member = tarfile.TarInfo(name)
                    member.size = len(part)
                    archive.addfile(member, io.BytesIO(part))
    classes = max((images.classes for images in splits.values()), key=len)  # the others have the first of them
    if classes:
        (folder / "classes.json").write_text(json.dumps(classes))
    return left_out
