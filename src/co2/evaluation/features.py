"""Pooled features of many images, as fast as the backbone goes, and wherever there is room for them."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from co2.data.source import BadImage, ImageSource
from co2.errors import RunError, UserError
from co2.evaluation.progress import SILENT, Progress
from co2.networks.features import extract
from co2.views.choose_input import choose_input
from co2.views.loader import Batch, ViewLoader, plain_batches
from co2.views.transform import normalise_for_convolutions
from co2.views.view import View

Network = TypeVar("Network", bound=nn.Module)

BATCH = 256
LARGEST_BATCH = 1024  # for small views on a GPU, which 256 would not keep busy
REMEMBERED_BYTES = 2**30  # of the plain views of a source that are kept: 87,000 of 64 pixels, 7,100 of 224
SLAB_IMAGES = 2**18  # whose features are on the device at a time (2 GiB for ResNet-50); more move to main memory
REPLACED = "replaced by others"
"""What becomes of unreadable images where batches of random views keep their size."""
_IMAGES_NAMED = 3  # of those that cannot be read; the record has all


class Embedding(NamedTuple):
    """Images as a backbone sees them."""

    features: Tensor  # [N, F] float32, on the device, or in main memory where they are many
    images: Tensor  # [N] indices into the source; images that cannot be read are missing
    labels: Tensor | None  # [N]


class NotFinite(RunError):  # noqa: N818 - it names what the features are
    """Features that are no numbers."""


class Unreadable:
    """The images that could not be read in an evaluation: told once each, however often they are shown, and recorded.

    `reasons` has them all: what to call the image, and why it could not be read.
    """

    def __init__(self, progress: Progress) -> None:
        self.reasons: dict[str, str] = {}
        self._progress = progress

    def add(self, source: ImageSource, bad: Mapping[int, str], fate: str) -> None:
        """These images of the source are, for instance, "left out"."""
        named = {source.describe(index): reason for index, reason in bad.items()}
        new = {name: reason for name, reason in named.items() if name not in self.reasons}
        if not new:
            return
        self.reasons |= new
        listed = ", ".join(f"{name} ({reason})" for name, reason in list(new.items())[:_IMAGES_NAMED])
        more = f" and {len(new) - _IMAGES_NAMED:,} more" if len(new) > _IMAGES_NAMED else ""
        self._progress.say(f"{len(new):,} of {len(source):,} images could not be read and are {fate}: {listed}{more}.")


def check_readable(protocol: str, split: str, images: ImageSource, read: Callable[[int], object]) -> None:
    """Refuse a split of which `read` can read no image at all, before anything is trained for nothing."""
    reason = ""
    for index in range(len(images)):
        try:
            read(index)
            return
        except BadImage as error:
            reason = reason or str(error)
    raise UserError(
        f"{protocol}: none of the {len(images)} images of {split} can be read; the first is {images.describe(0)} "
        f"({reason}). Check that these are image files, whole and readable."
    )


def embed(
    backbone: nn.Module,
    source: ImageSource,
    views: View,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    storage: str = "",
    mirrored: bool = False,
    progress: Progress = SILENT,
    unreadable: Unreadable | None = None,
) -> Embedding:
    """Pooled features of every image, resized and cut as `views` says but not augmented.

    Args:
        backbone: returns pooled features; it is moved to the device, and otherwise left as it is.
        source: the images.
        views: their size, mean and std.
        device: where the backbone works.
        workers: processes that read images.
        storage: a folder for a file that holds the features, mapped into memory; by default they are in memory.
        mirrored: show the backbone every image mirrored left to right.
        progress: told of every batch.
        unreadable: takes down the images that cannot be read, which are left out.
    """
    device = torch.device(device)
    backbone = ready(backbone, device)
    prepare = preparation(views, mirrored)
    batch = batch_size(views.size, device)
    progress.stage("Features", -(-len(source) // batch))
    slabs = max(1, -(-len(source) // SLAB_IMAGES))
    room: Tensor | None = None
    done, images = 0, []
    bad: dict[int, str] = {}
    for start in range(0, len(source), SLAB_IMAGES):
        part = source if slabs == 1 else source.subset(range(start, min(start + SLAB_IMAGES, len(source))))
        bad_in_part: dict[int, str] = {}
        batches = _watched(_plain(part, views.size, batch, workers), bad_in_part, progress)
        features, rows = extract(backbone, batches, prepare, device)  # [n, F] on the device, [n]
        check_finite(features, rows, part)
        bad |= {index + start: reason for index, reason in bad_in_part.items()}
        images.append(rows + start)
        if slabs > 1 or storage:
            room = _room(len(source), features.shape[1], storage) if room is None else room
            room[done : done + len(rows)] = features.cpu()
            done += len(rows)
    (unreadable or Unreadable(progress)).add(source, bad, "left out")
    everything = torch.cat(images)
    labels = None if source.labels is None else torch.from_numpy(source.labels)[everything]
    return Embedding(features if room is None else room[:done], everything, labels)


def embed_crops(
    backbone: nn.Module,
    source: ImageSource,
    views: View,
    *,
    count: int,
    seed: int,
    device: torch.device,
    workers: int = 0,
    progress: Progress = SILENT,
    unreadable: Unreadable | None = None,
) -> list[Embedding]:
    """Pooled features of a random view of every image, `count` times. Unreadable images are replaced by others."""
    if not count:
        return []
    batch = batch_size(views.size, device)
    loader = random_views(source, views, batch_size=batch, seed=seed, device=device, workers=workers, smallest=1)
    network, prepare = ready(backbone, device), preparation(views)
    progress.stage("Features of crops", count * loader.batches_per_epoch)
    found = []
    bad: dict[int, str] = {}
    for epoch in range(count):
        features, images = extract(network, _watched(loader.epoch(epoch), bad, progress), prepare, device)
        check_finite(features, images, source)
        labels = None if source.labels is None else torch.from_numpy(source.labels)[images]
        found.append(Embedding(features, images, labels))
    (unreadable or Unreadable(progress)).add(source, bad, REPLACED)
    return found


def check_finite(features: Tensor, images: Tensor, source: ImageSource) -> None:
    """Whether all features [N, F] of these images [N] of the source are numbers: what is measured of others means
    nothing, and looks as if it did."""
    lowest, highest = features.aminmax(dim=1)  # [N] each, NaN where there is one among the features
    wrong = ~(lowest.isfinite() & highest.isfinite()).cpu()  # [N]
    if wrong.any():
        raise NotFinite(
            f"The features of image {source.describe(int(images[wrong][0]))} are not finite numbers: the run that made "
            "these weights has diverged, or their file is damaged. Evaluate an earlier checkpoint, or train again with "
            "a lower learning rate."
        )


def random_views(
    source: ImageSource,
    views: View,
    *,
    batch_size: int,
    seed: int,
    device: torch.device,
    workers: int = 0,
    smallest: int = 2,
) -> ViewLoader:
    """One random view of each image, epoch by epoch, made wherever that is fastest: on the GPU if the images fit."""
    loader, _ = choose_input(
        source,
        (views,),
        batch_size=min(batch_size, len(source)),
        seed=seed,
        workers=workers,
        device=device,
        smallest=smallest,
    )
    return loader


_remembered: weakref.WeakKeyDictionary[ImageSource, dict[int, list[Batch]]] = weakref.WeakKeyDictionary()


def _plain(source: ImageSource, size: int, batch_size: int, workers: int) -> Iterator[Batch]:
    """Plain views of all images, read once and kept for as long as the source if they are small.

    Most protocols look at the same images, and so do all subjects, several times over.
    """
    kept = _remembered.get(source, {})
    if size in kept:
        yield from kept[size]
        return
    small = len(source) * 3 * size**2 <= REMEMBERED_BYTES
    seen: list[Batch] = []
    for batch in plain_batches(source, size, batch_size=batch_size, workers=workers):
        yield batch
        if small:
            seen.append(batch)
    if small:
        _remembered.setdefault(source, {})[size] = seen


def _watched(batches: Iterable[Batch], bad: dict[int, str], progress: Progress) -> Iterator[Batch]:
    """The batches; `bad` gets the images that could not be read."""
    for batch in batches:
        yield batch
        progress.advance()
        bad.update(batch.bad)


def batch_size(view_size: int, device: torch.device) -> int:
    """How many views to show a backbone at a time: on a GPU as many pixels as 256 views of 224 have, within limits."""
    if device.type != "cuda":
        return BATCH
    return min(LARGEST_BATCH, max(BATCH, BATCH * 224**2 // view_size**2))


def ready(network: Network, device: torch.device) -> Network:
    """The network on the device, laid out as convolutions like it."""
    return network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def preparation(views: View, mirrored: bool = False) -> Callable[[Tensor], Tensor]:
    """How uint8 views [B, 3, S, S] on a device become what a network takes there."""

    def prepare(pixels: Tensor) -> Tensor:
        return normalise_for_convolutions(pixels.flip(-1) if mirrored else pixels, views)

    return prepare


def _room(images: int, width: int, storage: str) -> Tensor:
    """Where features [images, width] go: main memory, or a file without a name in the folder `storage`."""
    if not storage:
        return torch.empty(images, width)
    try:
        file = tempfile.NamedTemporaryFile(dir=storage, prefix="features-")  # noqa: SIM115 - the mapping outlives it
    except OSError as error:
        raise UserError(f"Features cannot be stored in '{storage}': {error.strerror}. Name another folder.") from None
    with file:
        _reserve(file.fileno(), 4 * images * width, storage)
        return torch.from_file(file.name, shared=True, size=images * width, dtype=torch.float32).view(images, width)


def _reserve(file: int, size: int, storage: str) -> None:
    """Take so many bytes of the disk now: a file that only seems to be so large kills whoever writes into its mapping
    when the disk is full."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        raise UserError(
            f"Features need {size / 2**20:,.1f} MiB, and '{storage}' does not take them: {error.strerror}. Make room "
            "there, or name another folder with --storage."
        ) from None
