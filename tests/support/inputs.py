"""Folders of pictures, and loaders to compare, for the tests of the ways that images take to the device."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from presets import moco_v2_views
from torch import Tensor

from co2.data.folder import FileSource, folder_source
from co2.views.loader import Batch, ViewLoader
from co2.views.view import View

AUGMENTATION = moco_v2_views(16)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class QuarterTurn:
    """A view that is turned, by none to three quarters, and the same unturned."""

    places: int = 1

    def apply(self, views: Tensor, uniforms: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        turn = (4 * uniforms[:, 0]).long()  # [b]
        turned = torch.stack([views.rot90(quarters, (2, 3)) for quarters in range(4)])  # [4, b, 3, S, S]
        chosen = turned[turn, torch.arange(len(views), device=views.device)]  # [b, 3, S, S]
        return torch.stack([chosen, views], dim=1), {"turn": turn}


# Two that differ in how often they are blurred and solarised, as BYOL's, one whose colours change otherwise, and two of
# other sizes, of which the last is too large for the views of a batch to be made together.
FIRST = View(size=16, crop_scale=(0.08, 1.0), jitter=(0.4, 0.4, 0.2, 0.1), blur_probability=1.0)
ASYMMETRIC = (
    FIRST,
    replace(FIRST, blur_probability=0.1, solarise_probability=0.5),
    replace(FIRST, jitter=(0.4, 0.4, 0.4, 0.0), grey_first=True, solarise_probability=1.0),
    View(size=10, crop_scale=(0.05, 0.3), blur_probability=0.0, flip_probability=0.0, then=QuarterTurn()),
    View(size=100, solarise_probability=0.5),
)


def smooth(number: int, height: int, width: int) -> Image.Image:
    """A picture that a JPEG keeps nearly as it is."""
    corners = np.random.default_rng(number).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(picture: Image.Image, *, xmp: bytes = b"", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    if not xmp:
        return file.getvalue()
    content = b"http://ns.adobe.com/xap/1.0/\0" + xmp  # by hand, because not every release of Pillow writes it
    segment = b"\xff\xe1" + (2 + len(content)).to_bytes(2, "big") + content
    return file.getvalue()[:2] + segment + file.getvalue()[2:]


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


def several(views: int | Sequence[View]) -> tuple[View, ...]:
    """These views, or so many of the usual one."""
    return (AUGMENTATION,) * views if isinstance(views, int) else tuple(views)


def view_loader(source, batch_size=8, seed=0, views=2, **others) -> ViewLoader:
    return ViewLoader(source, several(views), batch_size=batch_size, seed=seed, **others)


def assert_same_batches(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert all(torch.equal(*two) for two in zip(one.views, other.views, strict=True))
        assert_same_drawn(one, other)
        assert one.bad == other.bad
        assert one.total == other.total


def assert_same_drawn(one: Batch, other: Batch) -> None:
    """What was drawn for what follows views."""
    assert len(one.made) == len(other.made)
    for ours_of_view, theirs_of_view in zip(one.made, other.made, strict=True):
        assert ours_of_view.keys() == theirs_of_view.keys()
        assert all(torch.equal(drawn.cpu(), theirs_of_view[name]) for name, drawn in ours_of_view.items())


def assert_nearly_the_same_batches(ours: list[Batch], theirs: list[Batch], levels: int, outside: float) -> None:
    """The same images and bad ones, and all but a share `outside` of the pixels within so many levels."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.indices.tolist() == other.indices.tolist()
        assert (one.bad, one.total) == (other.bad, other.total)
        assert_same_drawn(one, other)
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
