"""Views of images that lie on the device, all of them, as uint8: nothing is read or decoded after the start.

Order, parameters and replacements are those of `ViewLoader`. They are computed on the device, many batches at a time,
so that an epoch never waits for the device and the device never waits for Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from co2.data.source import BAD_IN_A_ROW, BadImage, ImageSource, Progress, too_many_in_a_row
from co2.machine.workers import Workers, in_parts
from co2.philox import Stream, permutation
from co2.views import transform
from co2.views.loader import Batch, ViewLoader, followed
from co2.views.parameters import ViewParameters, draw_views
from co2.views.view import View, made_together

_READ_AT_ONCE = 32  # images that a worker sends together
_ROWS_AT_ONCE = 65_536  # views whose parameters are drawn together: drawing takes as long for one as for thousands
_GROWTH = 1.25  # by how much the memory for pixels grows when an estimate was too low


class DoesNotFit(Exception):  # noqa: N818 - it names what happened
    """The images take more memory than they may."""


@dataclass(frozen=True)
class ImagesOnDevice:
    """Images of any sizes, one after the other."""

    pixels: Tensor
    """uint8 [bytes], on the device: each image planar, [3, H, W]."""
    offsets: Tensor
    """int64 [N]: where each image begins."""
    heights: Tensor
    """int64 [N]; 0 for an image that cannot be read."""
    widths: Tensor
    """int64 [N]"""
    bad: dict[int, str]
    """Index of each image that cannot be read, and why, in order."""


def views_of(
    pixels: Tensor,
    offsets: Tensor,
    heights: Tensor,
    widths: Tensor,
    parameters: ViewParameters,
    view: View,
) -> Tensor:
    """One view for each row, uint8 [R, 3, S, S], of planar images that lie in `pixels` [bytes], uint8.

    `offsets`, `heights` and `widths` [R] are int64, on the device of `pixels`. On a GPU a few kernels make all views.
    """
    if pixels.is_cuda:
        from co2.views.on_gpu import Pictures, make_views  # needs Triton, which is not there on every machine

        return make_views(Pictures(pixels, offsets, heights, widths), parameters, view)
    table = zip(offsets.tolist(), heights.tolist(), widths.tolist(), strict=True)
    images = [pixels[start : start + 3 * height * width].view(3, height, width) for start, height, width in table]
    return transform.make_views(images, parameters, view)


class ResidentViews(ViewLoader):
    """What `ViewLoader` gives, of images that lie on the device: see there. Views and indices are on the device too.

    All images are read when the loader is made, by `workers` processes; `progress` is told how far they are. Raises
    `DoesNotFit` as soon as they take more than `most_bytes`. Of several processes each holds all images, because an
    epoch may bring any of them to any process.
    """

    def __init__(
        self,
        source: ImageSource,
        views: Sequence[View],
        *,
        device: torch.device,
        most_bytes: int | None = None,
        progress: Progress | None = None,
        **common: Any,
    ) -> None:
        super().__init__(source, views, **common)
        self._device = device
        self.images = _load_images(source, self.workers, device, most_bytes, progress)
        self._used, self._passed_over = _replacements(source, self.images.bad)
        self._used = self._used.to(device)  # [N]

    def _work(self, source: ImageSource) -> Callable[[Any], Any]:
        return _WholeImages(source)

    def epoch(self, number: int, first_batch: int = 0, views: Sequence[View] = ()) -> Iterator[Batch]:
        """The batches of an epoch, as `ViewLoader.epoch` has them."""
        order = permutation(self._seed, Stream.EPOCH_ORDER, number, self._length, self._device)  # [N]
        batches = order.split(self._batch_size)[: self.batches_per_epoch]
        bad = self._bad_of_each_batch(order)
        place, views = first_batch, views or self._views
        for _, same_size in groupby(batches[first_batch:], len):
            together = list(same_size)
            total = len(together[0])
            wanted = torch.stack(together)[:, self._share(total)]  # [batches, b]
            at_once = max(1, _ROWS_AT_ONCE // (len(views) * max(1, wanted.shape[1])))
            for some in wanted.split(at_once):
                for indices, made in self._make(number, self._used[some], views):
                    batch = Batch(indices, made, bad.get(place, []), total)
                    yield followed(batch, views, self._seed, number)
                    place += 1

    def _make(self, epoch: int, images: Tensor, views: Sequence[View]) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Images [b], and of each view [b, 3, S, S], of each batch of `images` [batches, b]."""
        batches, size = images.shape
        groups = []
        for together, how in made_together(views):
            rows = images[:, None].expand(batches, len(together), size)
            offsets, heights, widths = (
                column[rows] for column in (self.images.offsets, self.images.heights, self.images.widths)
            )  # [batches, V, b] each
            drawn = draw_views(together, self._seed, epoch, rows, heights, widths)
            columns = (offsets.flatten(), heights.flatten(), widths.flatten(), *drawn.columns())  # [R, ...] each
            pieces = zip(*(column.split(len(together) * size) for column in columns), strict=True)
            groups.append((together, how, pieces))
        for batch in images:
            made: dict[int, Tensor] = {}
            for together, how, pieces in groups:
                offsets, heights, widths, *parameters = next(pieces)
                rows = views_of(self.images.pixels, offsets, heights, widths, ViewParameters(*parameters), how)
                made |= zip(together, rows.unflatten(0, (len(together), size)), strict=True)
            yield batch, tuple(made[number] for number in range(len(views)))

    def _bad_of_each_batch(self, order: Tensor) -> dict[int, list[tuple[int, str]]]:
        """For the number of a batch what this process has to say about bad images in it."""
        if not self._passed_over:
            return {}
        place_of = torch.empty_like(order)  # [N]
        place_of[order] = torch.arange(len(order), device=self._device)
        asked = torch.tensor(list(self._passed_over), device=self._device)
        found: dict[int, dict[int, str]] = {}
        # The one place where an epoch waits for the device, before its first batch, and only where images are bad.
        for place, index in sorted(zip(place_of[asked].tolist(), self._passed_over, strict=True)):
            batch, place_in_batch = divmod(place, self._batch_size)
            size = min(self._batch_size, self._length - batch * self._batch_size)
            if place_in_batch in range(*self._share(size).indices(size)):
                reasons = {other: self.images.bad[other] for other in self._passed_over[index]}
                found.setdefault(batch, {}).update(reasons)
        return {batch: list(reasons.items()) for batch, reasons in found.items()}


def _load_images(
    source: ImageSource,
    workers: Workers[range, _Pack],
    device: torch.device,
    most_bytes: int | None,
    progress: Progress | None,
) -> ImagesOnDevice:
    """All images of a source on the device, read by these workers, who end with it."""
    stacked = source.stacked()
    if stacked is not None:
        return _load_stacked(stacked, device, most_bytes)
    buffer = _Pixels(device, most_bytes)
    sizes = torch.zeros(len(source), 2, dtype=torch.int64)  # [N, 2]: height and width
    bad: dict[int, str] = {}
    done = 0
    try:
        for pack in workers.results(in_parts(range(len(source)), _READ_AT_ONCE)):
            sizes[done : done + len(pack.sizes)] = pack.sizes
            done += len(pack.sizes)
            bad |= pack.bad
            _check_row(source, bad, done)
            buffer.append(pack.pixels, done / len(source))
            if progress is not None:
                progress(done, len(source))
    finally:
        # Not when nobody knows them any more: whoever keeps an error keeps them with it, and a process does not end
        # while it has workers.
        workers.end()
    heights, widths = sizes.unbind(1)  # [N] each
    lengths = 3 * heights * widths
    offsets = lengths.cumsum(0) - lengths  # [N]
    heights, widths, offsets = heights.to(device), widths.to(device), offsets.to(device)
    return ImagesOnDevice(buffer.pixels[: buffer.used], offsets, heights, widths, bad)


def _load_stacked(stacked: np.ndarray, device: torch.device, most_bytes: int | None) -> ImagesOnDevice:
    count, channels, height, width = stacked.shape
    _check_room(stacked.nbytes, most_bytes)
    pixels = torch.from_numpy(np.ascontiguousarray(stacked)).to(device).flatten()  # [bytes]
    return ImagesOnDevice(
        pixels,
        torch.arange(count, device=device) * (channels * height * width),
        torch.full((count,), height, device=device),
        torch.full((count,), width, device=device),
        {},
    )


class _Pixels:
    """Memory on the device that grows with what is put into it."""

    def __init__(self, device: torch.device, most_bytes: int | None) -> None:
        self.pixels = torch.empty(0, dtype=torch.uint8, device=device)
        self.used = 0
        self._most_bytes = most_bytes

    def append(self, more: Tensor, share_done: float) -> None:
        """Put `more` [bytes] at the end; with it, this share of everything is there."""
        needed = self.used + len(more)
        _check_room(needed, self._most_bytes)
        if needed > len(self.pixels):
            room = max(int(needed / share_done), int(_GROWTH * len(self.pixels)) if self.used else 0)
            if self._most_bytes is not None:
                room = min(room, self._most_bytes)
            grown = torch.empty(max(needed, room), dtype=torch.uint8, device=self.pixels.device)
            grown[: self.used] = self.pixels[: self.used]
            self.pixels = grown
        self.pixels[self.used : needed] = more
        self.used = needed


def in_bytes(count: int) -> str:
    """A number of bytes for people: '147 MiB', '33.2 GiB'."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{-(-count // 2**20):,} MiB"


def _check_room(needed: int, most_bytes: int | None) -> None:
    if most_bytes is not None and needed > most_bytes:
        raise DoesNotFit(f"more than the {in_bytes(most_bytes)} allowed")


class _Pack(NamedTuple):
    """Some images in a row."""

    pixels: Tensor  # uint8 [bytes]
    sizes: Tensor  # int64 [n, 2]: height and width; 0 and 0 where an image cannot be read
    bad: dict[int, str]


class _WholeImages:
    def __init__(self, source: ImageSource) -> None:
        self.source = source

    def __call__(self, wanted: range) -> _Pack:
        pixels = [torch.empty(0, dtype=torch.uint8)]
        sizes = torch.zeros(len(wanted), 2, dtype=torch.int64)
        bad: dict[int, str] = {}
        for place, index in enumerate(wanted):
            try:
                image = self.source.image(index)  # [3, H, W]
            except BadImage as error:
                bad[index] = str(error)
                continue
            pixels.append(image.flatten())
            sizes[place] = torch.tensor(image.shape[-2:])
        return _Pack(torch.cat(pixels), sizes, bad)


def _check_row(source: ImageSource, bad: dict[int, str], done: int) -> None:
    """Give up on the images up to `done` if too many in a row could not be read."""
    limit = min(BAD_IN_A_ROW, len(source))
    if len(bad) < limit:
        return
    row = 0
    for index in range(max(0, done - _READ_AT_ONCE - limit), done):
        row = row + 1 if index in bad else 0
        if row == limit:
            raise too_many_in_a_row(source, limit, index, bad[index])


def _replacements(source: ImageSource, bad: dict[int, str]) -> tuple[Tensor, dict[int, list[int]]]:
    """Which image is used for each, int64 [N], and for each bad one the bad ones that are passed over on the way."""
    used = torch.arange(len(source))
    passed_over: dict[int, list[int]] = {}
    for index in bad:
        others: list[int] = []
        following = index
        while following in bad:
            others.append(following)
            if len(others) == min(BAD_IN_A_ROW, len(source)):
                raise too_many_in_a_row(source, len(others), following, bad[following])
            following = (following + 1) % len(source)
        used[index] = following
        passed_over[index] = others
    return used, passed_over
