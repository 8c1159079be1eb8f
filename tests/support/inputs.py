"""Folders of pictures, and loaders to compare, for the tests of the ways that images take to the device."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from co2.data.folder import FileSource, folder_source
from co2.views.loader import Batch, ViewLoader
from co2.views.view import moco_v2_views

AUGMENTATION = moco_v2_views(16)
CPU = torch.device("cpu")


def smooth(number: int, height: int, width: int) -> Image.Image:
    """A picture that a JPEG keeps nearly as it is."""
    corners = np.random.default_rng(number).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(picture: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def turned(picture: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(picture, exif=exif)


KINDS = (
    jpeg,
    lambda picture: jpeg(picture, subsampling=0),
    png,
    lambda picture: jpeg(picture.convert("L")),
    lambda picture: jpeg(picture, progressive=True),
    lambda picture: turned(picture, 6),
    lambda picture: jpeg(picture.convert("CMYK")),
)


def folder_of(folder: Path, count: int, bad: tuple[int, ...] = (), kinds: tuple[object, ...] = KINDS) -> FileSource:
    """Pictures of different sizes and kinds in a folder. The bad ones are cut off in the middle."""
    folder.mkdir()
    for number in range(count):
        data = kinds[number % len(kinds)](smooth(number, 20 + number % 7, 30 - number % 5))
        data = data[: len(data) // 2] if number in bad else data
        (folder / f"{number:04d}.img.png").write_bytes(data)  # by its contents, not by its name, is it known
    return folder_source(os.fspath(folder))


def view_loader(source, batch_size=8, seed=0, views=2, **others) -> ViewLoader:
    return ViewLoader(source, (AUGMENTATION,) * views, batch_size=batch_size, seed=seed, workers=0, **others)


def assert_same_batches(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert all(torch.equal(*two) for two in zip(one.views, other.views, strict=True))
        assert one.bad == other.bad
        assert one.total == other.total


def assert_nearly_the_same_batches(ours: list[Batch], theirs: list[Batch], levels: int, outside: float) -> None:
    """The same images and bad ones, and all but a share `outside` of the pixels within so many levels."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.indices.tolist() == other.indices.tolist()
        assert (one.bad, one.total) == (other.bad, other.total)
        for ours_of_view, theirs_of_view in zip(one.views, other.views, strict=True):
            difference = (ours_of_view.cpu().int() - theirs_of_view.int()).abs()
            beyond = (difference > levels).float().mean()
            assert beyond <= outside, f"{beyond:.1%} by more than {levels}, the worst by {difference.max()}"


def told(batches) -> str:
    """The words of the error. Not by pytest.raises, which keeps the error and with it what its frames hold."""
    from co2.errors import UserError

    try:
        list(batches)
    except UserError as error:
        return str(error)
    raise AssertionError("no error")
