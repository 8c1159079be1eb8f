"""Views of JPEGs that a GPU decodes: for images that do not fit into its memory.

Worker processes read files ahead. A thread has a batch of them decoded, each image once, and makes all its views, on a
CUDA stream of its own; the training loop finds them ready. Order, parameters and replacements are those of
`ViewLoader`.

Processes, not threads, because a file is read in a few short system calls, after each of which a thread must wait for
its turn with Python: fifteen threads together read half as many files per second as one alone, and what the training
loop and the decoding thread do in the meantime takes them twenty-five times as long.

The pixels are not quite those of the CPU. Decoders may differ by a level or two, and a GPU's enlarges the colours of
the usual JPEG, which are stored at half the resolution, by repeating them where the CPU's interpolates: along sharp
edges between colours that is more. Files that are not plain JPEGs (see `plain_jpeg_size`), and those that the GPU
cannot decode, go to the CPU's decoder, whose word is final: every file is read, or skipped and named, as it is on the
CPU.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from co2.data.decode import decode_image
from co2.data.plain_jpeg import plain_jpeg_size
from co2.data.source import ImageSource, readable
from co2.views.loader import Batch, ViewLoader, followed
from co2.views.parameters import ViewParameters, draw_views
from co2.views.resident import views_of
from co2.views.view import View, made_together

BATCHES_AHEAD = 3
READ_AT_ONCE = 32  # images that a worker sends together
MOST_READERS = 8  # worker processes: reading is quick, and each holds two times as many files in memory
_BYTES_AT_ONCE = 1 << 30  # of images that are decoded together: a batch of photographs can be many gigabytes
_PATIENCE = 30.0  # seconds for a thread to end, which may be waiting for a disk that does not answer

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Files:
    """Some images as a worker has read them."""

    used: list[int]
    """Which images they are: those that were asked for, or the ones that are used in their place."""
    contents: Tensor
    """uint8 [bytes]: one after the other, JPEGs for the device to decode, and pixels from the CPU's decoder."""
    lengths: list[int]
    """How many bytes each has of these."""
    sizes: list[tuple[int, int]]
    """Height and width of each."""
    encoded: list[bool]
    """Which are JPEGs."""
    bad: dict[int, str]
    """Images that could not be read on the way, and why."""


class _Picture(NamedTuple):
    """One image of a batch on its way."""

    used: int
    data: Tensor  # uint8 [bytes]: a JPEG, or planar pixels
    size: tuple[int, int]
    encoded: bool

    @property
    def bytes_needed(self) -> int:
        return max(3 * self.size[0] * self.size[1], self.data.numel())


class JpegViews(ViewLoader):
    """What `ViewLoader` gives, with JPEGs decoded on the device: see there. Views and indices are on the device too.

    Its workers read, and decode what only the CPU can.
    """

    def __init__(
        self,
        source: ImageSource,
        views: Sequence[View],
        *,
        device: torch.device,
        workers: int = 0,
        **common: Any,
    ) -> None:
        super().__init__(source, views, workers=min(workers, MOST_READERS), **common)
        self._source = source
        self._device = device
        # Its small kernels come before those of the training step, which would otherwise wait for them later.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def _work(self, source: ImageSource) -> Callable[[Any], Any]:
        return _Reading(source)

    def epoch(self, number: int, first_batch: int = 0, views: Sequence[View] = ()) -> Iterator[Batch]:
        """The batches of an epoch, as `ViewLoader.epoch` has them."""
        how = _How(number, views or self._views)
        wholes, own = self._batches(number, first_batch)
        files = self.workers.results([some.numpy() for images in own for some in images.split(READ_AT_ONCE)])

        def made() -> Iterator[_Made]:
            for whole, images in zip(wholes, own, strict=True):
                yield self._make(how, itertools.islice(files, -(-len(images) // READ_AT_ONCE)), len(whole))

        ahead = _Ahead(made(), BATCHES_AHEAD)
        atexit.register(ahead.close)  # a thread in the middle of CUDA's work when the process ends takes it down
        try:
            for _ in own:
                yield self._handed_over(ahead.take())
        finally:
            ahead.close()
            atexit.unregister(ahead.close)
            files.close()

    def _make(self, how: _How, files: Iterator[_Files], total: int) -> _Made:
        """A batch from what has been read of it."""
        if self._stream is None:
            return _Made(self._made_in_parts(how, files, total), None)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = self._made_in_parts(how, files, total)
            return _Made(batch, self._stream.record_event())

    def _handed_over(self, made: _Made) -> Batch:
        """A batch that the training loop's stream may use, as soon as it is ready."""
        if made.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(made.ready)

            def in_use(tensor: Tensor) -> Tensor:
                tensor.record_stream(stream)  # its memory is not used again before that stream is done with it
                return tensor

            made.batch.each(in_use)
        return made.batch

    def _made_in_parts(self, how: _How, files: Iterator[_Files], total: int) -> Batch:
        bad: dict[int, str] = {}
        parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        held: list[_Picture] = []
        bytes_held = 0
        for some in files:
            bad |= some.bad
            contents = some.contents.split(some.lengths)
            for picture in map(_Picture, some.used, contents, some.sizes, some.encoded):
                if held and bytes_held + picture.bytes_needed > _BYTES_AT_ONCE:
                    parts.append(self._made(how, held, bad))
                    held, bytes_held = [], 0
                held.append(picture)
                bytes_held += picture.bytes_needed
        parts.append(self._made(how, held, bad))
        indices, views = parts[0]
        if len(parts) > 1:
            all_indices, all_views = zip(*parts, strict=True)
            indices, views = torch.cat(all_indices), tuple(map(torch.cat, zip(*all_views, strict=True)))
        return followed(Batch(indices, views, list(bad.items()), total), how.views, self._seed, how.epoch)

    def _made(self, how: _How, pictures: list[_Picture], bad: dict[int, str]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Indices [b], and of each view [b, 3, S, S], of some images. Adds to `bad` what could not be read."""
        used, images = self._decoded(pictures, bad)
        # All that is small is computed on the CPU, and brought to the device at the end: the many short kernels that it
        # would be there had to wait for room beside those of the training step, each by itself.
        indices = torch.tensor(used)  # [b], as the next three
        heights, widths = torch.tensor([image.shape[-2:] for image in images]).unbind(1)
        lengths = 3 * heights * widths
        offsets = lengths.cumsum(0) - lengths
        pixels = torch.cat([image.flatten() for image in images])  # [bytes]
        made: dict[int, Tensor] = {}
        for together, view in made_together(how.views):
            shape = (1, len(together), len(used))
            drawn = draw_views(
                together, self._seed, how.epoch, *(column.expand(shape) for column in (indices, heights, widths))
            )
            where = torch.stack((offsets, heights, widths))[:, None].expand(3, *shape[1:]).flatten(1)  # [3, V * b]
            where = self._on_device(where)
            parameters = ViewParameters(*map(self._on_device, drawn.columns()))
            rows = views_of(pixels, where[0], where[1], where[2], parameters, view)  # [V * b, 3, S, S]
            made |= zip(together, rows.unflatten(0, shape[1:]), strict=True)
        return self._on_device(indices), tuple(made[number] for number in range(len(how.views)))

    def _on_device(self, column: Tensor) -> Tensor:
        return column if self._stream is None else column.pin_memory().to(self._device, non_blocking=True)

    def _decoded(self, pictures: list[_Picture], bad: dict[int, str]) -> tuple[list[int], list[Tensor]]:
        """Which images are used, and their pixels on the device, uint8 [3, H, W] each."""
        jpegs = [place for place, picture in enumerate(pictures) if picture.encoded]
        decoded = dict(zip(jpegs, self._decode([pictures[place].data for place in jpegs]), strict=True))
        used: list[int] = []
        images: list[Tensor] = []
        for place, picture in enumerate(pictures):
            index, image = picture.used, decoded.get(place)
            if not picture.encoded:
                image = picture.data.view(3, *picture.size)
            elif image is None or image.shape != (3, *picture.size):  # the CPU's decoder judges
                index, instead = readable(self._source, self._source.image, picture.used, bad)
                image = instead
            used.append(index)
            images.append(image.to(self._device))
        return used, images

    def _decode(self, jpegs: list[Tensor]) -> list[Tensor | None]:
        """Pixels on the device, uint8 [3, H, W] each; None for a JPEG that cannot be decoded there."""
        if not jpegs:
            return []
        try:
            return list(self._decode_together(jpegs))
        except RuntimeError:  # and it does not say which one it was
            return [self._decode_alone(one) for one in jpegs]

    def _decode_together(self, jpegs: list[Tensor]) -> list[Tensor]:
        if self._stream is not None:
            # The decoder writes on a stream of its own, into memory that was given back on this one: before it does,
            # what was still to be read there must have been read.
            self._stream.synchronize()
        return decode_jpeg(jpegs, mode=ImageReadMode.RGB, device=self._device)

    def _decode_alone(self, jpeg: Tensor) -> Tensor | None:
        try:
            return self._decode_together([jpeg])[0]
        except RuntimeError:
            return None


class _How(NamedTuple):
    """What decides about the views of an image."""

    epoch: int
    views: Sequence[View]


class _Made(NamedTuple):
    batch: Batch
    ready: torch.cuda.Event | None  # when the device has made it


class _Reading:
    """What a worker does: reads files, and decodes those that are not plain JPEGs."""

    def __init__(self, source: ImageSource) -> None:
        self.source = source

    def __call__(self, wanted: np.ndarray) -> _Files:
        used: list[int] = []
        contents: list[Tensor] = []
        sizes: list[tuple[int, int]] = []
        encoded: list[bool] = []
        bad: dict[int, str] = {}
        for index in wanted.tolist():
            one, (content, size, is_encoded) = readable(self.source, self._read, index, bad)
            used.append(one)
            contents.append(content)
            sizes.append(size)
            encoded.append(is_encoded)
        flat = [one.flatten() for one in contents]
        return _Files(used, torch.cat(flat), [len(one) for one in flat], sizes, encoded, bad)

    def _read(self, index: int) -> tuple[Tensor, tuple[int, int], bool]:
        """A plain JPEG's bytes, or else the pixels of the image; its height and width; and whether it is the former."""
        data, _ = self.source.encoded(index)
        size = plain_jpeg_size(data)
        if size is not None:
            return torch.frombuffer(bytearray(data), dtype=torch.uint8), size, True
        image = decode_image(data)  # [3, H, W]
        return image, (image.shape[1], image.shape[2]), False


class _Ahead(Generic[Result]):
    """Takes what an iterator gives, in a thread of its own, before somebody else wants it: a few results wait.

    What the iterator raises, `take` raises in its turn.
    """

    def __init__(self, results: Iterator[Result], most: int) -> None:
        self._results = results
        self._most = most
        self._waiting: deque[tuple[Result | None, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> Result:
        """The next result. Waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            result, error = self._waiting.popleft()
            self._changed.notify_all()
        if error is not None:
            raise error
        return cast(Result, result)

    def close(self) -> None:
        """Nobody wants more. Waits until the thread has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE)
        self._waiting.clear()

    def _run(self) -> None:
        try:
            for result in self._results:
                if not self._keep(result, None):
                    return
        except BaseException as error:  # whatever it is, whoever waits for the result must not wait for ever
            self._keep(None, error)

    def _keep(self, result: Result | None, error: BaseException | None) -> bool:
        """Puts a result where it will be taken, when there is room; not if nobody wants it."""
        with self._changed:
            self._waiting.append((result, error))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or len(self._waiting) < self._most)
            return not self._closed
