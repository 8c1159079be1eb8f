"""Views of JPEGs that a GPU decodes: for images that do not fit into its memory.

Threads read files ahead. Another thread has a batch of them decoded, each image once, and makes all its views, on a
CUDA stream of its own; the training loop finds them ready. Order, parameters and replacements are those of
`ViewLoader`.

The pixels are not quite those of the CPU. Decoders may differ by a level or two, and a GPU's enlarges the colours of
the usual JPEG, which are stored at half the resolution, by repeating them where the CPU's interpolates: along sharp
edges between colours that is more. Files that are not plain JPEGs (see `plain_jpeg_size`), and those that the GPU
cannot decode, go to the CPU's decoder, whose word is final: every file is read, or skipped and named, as it is on the
CPU.
"""

from __future__ import annotations

import atexit
import struct
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from co2.data.decode import MOST_PIXELS, decode_image
from co2.data.source import ImageSource
from co2.philox import Stream, permutation
from co2.views.loader import Batch, ViewLoader, _readable
from co2.views.parameters import draw
from co2.views.resident import views_of
from co2.views.specification import Augmentation

BATCHES_AHEAD = 3
BYTES_AHEAD = 512 << 20  # of files, and of pixels that the CPU decoded, that wait in memory
_BYTES_AT_ONCE = 1 << 30  # of images that are decoded together: a batch of photographs can be many gigabytes
_PATIENCE = 30.0  # seconds for a thread to end, which may be reading from a disk that does not answer

Result = TypeVar("Result")


class _Encoded(NamedTuple):
    """A JPEG as it was read, and what it says its size is."""

    data: Tensor  # uint8 [bytes]
    height: int
    width: int


class _Fetched(NamedTuple):
    """What became of an image that was asked for."""

    used: int  # itself, or the one that is used in its place
    picture: _Encoded | Tensor  # a JPEG for the device to decode, or pixels, uint8 [3, H, W], from the CPU's decoder
    bad: dict[int, str]  # images that could not be read on the way, and why

    @property
    def size(self) -> tuple[int, int]:
        if isinstance(self.picture, _Encoded):
            return self.picture.height, self.picture.width
        return self.picture.shape[-2], self.picture.shape[-1]

    @property
    def bytes_held(self) -> int:
        return (self.picture.data if isinstance(self.picture, _Encoded) else self.picture).numel()


class JpegViews(ViewLoader):
    """What `ViewLoader` gives, with JPEGs decoded on the device: see there. Views and indices are on the device too.

    `threads` read, and decode what only the CPU can. They take part in Python's turns with the training loop, so that
    more of them than the disk needs do not help.
    """

    def __init__(
        self,
        source: ImageSource,
        augmentation: Augmentation,
        *,
        views: int,
        batch_size: int,
        seed: int,
        device: torch.device,
        threads: int = 8,
        smallest: int = 2,
        share: Callable[[int], slice] = slice,
        bytes_ahead: int = BYTES_AHEAD,
    ) -> None:
        super().__init__(
            source,
            augmentation,
            views=views,
            batch_size=batch_size,
            seed=seed,
            workers=0,
            smallest=smallest,
            share=share,
        )
        self._source = source
        self._files = _Files(source)
        self._augmentation = augmentation
        self._views = views
        self._device = device
        self._threads = max(1, threads)
        self._bytes_ahead = bytes_ahead
        # Its small kernels come before those of the training step, which would otherwise wait for them later.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def epoch(self, number: int, first_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `first_batch` on."""
        order = permutation(self._seed, Stream.EPOCH_ORDER, number, self._length)  # [N]
        batches = order.split(self._batch_size)[first_batch : self.batches_per_epoch]
        if not batches:
            return
        own = [batch[self._share(len(batch))] for batch in batches]  # [b] each
        wanted = torch.cat(own).numpy()

        def fetch(place: int) -> tuple[_Fetched, int]:
            fetched = self._fetch(int(wanted[place]))
            return fetched, fetched.bytes_held

        def make(batch: int) -> tuple[_Made, int]:
            return self._make(number, reading, len(own[batch]), len(batches[batch])), 1

        reading: _Ahead[_Fetched] = _Ahead(fetch, len(wanted), self._threads, self._bytes_ahead)
        making: _Ahead[_Made] = _Ahead(make, len(own), 1, BATCHES_AHEAD)

        def close() -> None:
            reading.stop()
            making.stop()
            reading.join()
            making.join()

        atexit.register(close)  # a thread that is in the middle of CUDA's work when the process ends takes it down
        try:
            for _ in own:
                yield self._handed_over(making.take())
        finally:
            close()
            atexit.unregister(close)

    def _fetch(self, index: int) -> _Fetched:
        bad: dict[int, str] = {}
        used, picture = cast(tuple[int, Any], _readable(self._files, index, bad))
        return _Fetched(used, picture, bad)

    def _make(self, epoch: int, reading: _Ahead[_Fetched], size: int, total: int) -> _Made:
        """The next batch, of `size` images, from what has been read."""
        if self._stream is None:
            return _Made(self._made_in_parts(epoch, reading, size, total), None)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = self._made_in_parts(epoch, reading, size, total)
            return _Made(batch, self._stream.record_event())

    def _handed_over(self, made: _Made) -> Batch:
        """A batch that the training loop's stream may use, as soon as it is ready."""
        if made.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(made.ready)
            for tensor in (made.batch.indices, made.batch.views):
                tensor.record_stream(stream)  # its memory is not used again before that stream is done with it
        return made.batch

    def _made_in_parts(self, epoch: int, reading: _Ahead[_Fetched], size: int, total: int) -> Batch:
        bad: dict[int, str] = {}
        parts: list[tuple[Tensor, Tensor]] = []
        held: list[_Fetched] = []
        bytes_held = 0
        for _ in range(size):
            fetched = reading.take()
            bytes_needed = max(3 * fetched.size[0] * fetched.size[1], fetched.bytes_held)
            if held and bytes_held + bytes_needed > _BYTES_AT_ONCE:
                parts.append(self._made(epoch, held, bad))
                held, bytes_held = [], 0
            held.append(fetched)
            bytes_held += bytes_needed
        parts.append(self._made(epoch, held, bad))
        indices, views = zip(*parts, strict=True)
        if len(parts) == 1:
            return Batch(indices[0], views[0], list(bad.items()), total)
        return Batch(torch.cat(indices), torch.cat(views, dim=1), list(bad.items()), total)

    def _made(self, epoch: int, fetched: list[_Fetched], bad: dict[int, str]) -> tuple[Tensor, Tensor]:
        """Indices [b] and views [V, b, 3, S, S] of some images. Adds to `bad` what could not be read."""
        used, images = self._decoded(fetched, bad)
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        table = torch.tensor([(index, *size) for index, size in zip(used, sizes, strict=True)])  # [b, 3]
        if self._stream is not None:
            table = table.pin_memory()
        indices, heights, widths = table.to(self._device, non_blocking=True).unbind(1)  # [b] each
        lengths = 3 * heights * widths
        offsets = lengths.cumsum(0) - lengths  # [b]
        pixels = torch.cat([image.flatten() for image in images])  # [bytes]

        count = self._views
        rows, offsets, heights, widths = (column.repeat(count) for column in (indices, offsets, heights, widths))
        view = torch.arange(count, device=self._device)[:, None].expand(count, len(used)).flatten()  # [V * b]
        drawn = draw(self._augmentation, self._seed, epoch, rows, view, heights, widths)
        views = views_of(pixels, offsets, heights, widths, drawn, self._augmentation)  # [V * b, 3, S, S]
        return indices.contiguous(), views.unflatten(0, (count, len(used)))

    def _decoded(self, fetched: list[_Fetched], bad: dict[int, str]) -> tuple[list[int], list[Tensor]]:
        """Which images are used, and their pixels on the device, uint8 [3, H, W] each."""
        places = [place for place, item in enumerate(fetched) if isinstance(item.picture, _Encoded)]
        decoded = dict(zip(places, self._decode([fetched[place] for place in places]), strict=True))
        used: list[int] = []
        images: list[Tensor] = []
        for place, item in enumerate(fetched):
            bad.update(item.bad)
            index, image = item.used, decoded.get(place)
            if image is None and isinstance(item.picture, Tensor):
                image = item.picture
            elif image is None or image.shape != (3, *item.size):  # the CPU's decoder judges
                index, image = _readable(self._source, item.used, bad)
            used.append(index)
            images.append(image.to(self._device))
        return used, images

    def _decode(self, jpegs: list[_Fetched]) -> list[Tensor | None]:
        """Pixels on the device, uint8 [3, H, W] each; None for a JPEG that cannot be decoded there."""
        if not jpegs:
            return []
        data = [cast(_Encoded, jpeg.picture).data for jpeg in jpegs]
        try:
            return list(self._decode_together(data))
        except RuntimeError:  # and it does not say which one it was
            return [self._decode_alone(one) for one in data]

    def _decode_together(self, data: list[Tensor]) -> list[Tensor]:
        if self._stream is not None:
            # The decoder writes on a stream of its own, into memory that was given back on this one: before it does,
            # what was still to be read there must have been read.
            self._stream.synchronize()
        return decode_jpeg(data, mode=ImageReadMode.RGB, device=self._device)

    def _decode_alone(self, data: Tensor) -> Tensor | None:
        try:
            return self._decode_together([data])[0]
        except RuntimeError:
            return None


class _Made(NamedTuple):
    batch: Batch
    ready: torch.cuda.Event | None  # when the device has made it


class _Files(ImageSource):
    """A source whose images come as `_Encoded` where they are plain JPEGs, and else as pixels."""

    def __init__(self, source: ImageSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def describe(self, index: int) -> str:
        return self.source.describe(index)

    def image(self, index: int) -> Any:
        data, _ = self.source.encoded(index)
        size = plain_jpeg_size(data)
        if size is None:
            return decode_image(data)
        return _Encoded(torch.frombuffer(bytearray(data), dtype=torch.uint8), *size)


class _Outcome(NamedTuple, Generic[Result]):
    result: Result | None
    weight: int
    error: BaseException | None


class _Ahead(Generic[Result]):
    """Does numbered pieces of work in threads, ahead of whoever takes the results, which come in order.

    `work` gives a result and its weight; new work is begun while the results that wait weigh less than `most`, and
    always if it is the next that is to be taken. What `work` raises, `take` raises in its turn.
    """

    def __init__(self, work: Callable[[int], tuple[Result, int]], count: int, threads: int, most: int) -> None:
        self._work = work
        self._count = count
        self._most = most
        self._resume = most - most // 8  # threads that wait are woken for more than one piece of work
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._begun = 0
        self._taken = 0
        self._weight = 0
        self._waiting = 0
        self._stopped = False
        self._done: dict[int, _Outcome[Result]] = {}
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(min(threads, count))]
        for thread in self._threads:
            thread.start()

    def take(self) -> Result:
        """The next result. Waits for it."""
        with self._lock:
            while self._taken not in self._done:
                if self._stopped:
                    raise _Stopped
                self._ready.wait()
            outcome = self._done.pop(self._taken)
            self._taken += 1
            self._weight -= outcome.weight
            if self._waiting and (self._weight < self._resume or self._taken == self._begun):
                self._room.notify_all()
        if outcome.error is not None:
            raise outcome.error
        return cast(Result, outcome.result)

    def stop(self) -> None:
        """Begin nothing more, and do not let anybody wait."""
        with self._lock:
            self._stopped = True
            self._room.notify_all()
            self._ready.notify_all()

    def join(self) -> None:
        """Wait until the threads have ended, and forget what nobody has taken."""
        for thread in self._threads:
            thread.join(_PATIENCE)
        self._done.clear()

    def _run(self) -> None:
        while (number := self._next()) is not None:
            outcome = self._outcome(number)
            with self._lock:
                self._done[number] = outcome
                self._weight += outcome.weight
                if outcome.error is not None:
                    self._count = self._begun  # nobody will take what comes after it
                if number == self._taken:
                    self._ready.notify_all()

    def _outcome(self, number: int) -> _Outcome[Result]:
        try:
            return _Outcome(*self._work(number), None)
        except BaseException as error:  # whatever it is, whoever waits for the result must not wait for ever
            return _Outcome(None, 0, error)

    def _next(self) -> int | None:
        """The number of the next piece of work, when there is room for its result; None when there is none."""
        with self._lock:
            while (
                not self._stopped
                and self._begun < self._count
                and self._weight >= self._most
                and self._begun != self._taken
            ):
                self._waiting += 1
                self._room.wait()
                self._waiting -= 1
            if self._stopped or self._begun >= self._count:
                return None
            self._begun += 1
            return self._begun - 1


class _Stopped(Exception):  # noqa: N818 - it is no error
    """Nobody wants the results any more."""


# Which JPEGs a GPU decodes as the CPU does.

_SEGMENT = struct.Struct(">BBH")
_FRAME = struct.Struct(">BHHB")
_BASELINE, _HUFFMAN, _QUANTISATION, _SCAN = 0xC0, 0xC4, 0xDB, 0xDA
_EXIF, _SEVERAL_PICTURES, _ADOBE = 0xE1, 0xE2, 0xEE
_NO_HARM = frozenset((*range(0xE0, 0xF0), 0xDD, 0xFE))  # other programs' notes, restart intervals, comments
_COMPONENTS = (b"\1\2\3", b"\0\1\2")  # brightness and two of colour; others may stand for red, green and blue
_LUMINANCE = (0x11, 0x21, 0x12, 0x22, 0x41)  # how many samples to one of colour, across and down
_LONGEST_SIDE = 16_384
_ALL_FREQUENCIES = b"\0\x3f\0"
_ORIENTATION = 0x0112
_SHORT = 3


class _Frame(NamedTuple):
    height: int
    width: int
    names: bytes  # of the components
    tables: bytes  # the quantisation table of each


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that every decoder understands in the same way; None for whatever else it may be.

    Plain is a baseline JPEG of 8 bits, in grey or in the usual colours, upright, with sound tables, in one scan and up
    to its end mark. Progressive ones are not: a GPU's decoder takes them one by one and has the CPU do half of the
    work, in the one thread that must not wait.
    """
    if data[:2] != b"\xff\xd8" or data[-2:] != b"\xff\xd9":
        return None
    place, end = 2, len(data) - 2
    frame: _Frame | None = None
    huffman: frozenset[int] = frozenset()
    quantisation: frozenset[int] = frozenset()
    exif = False
    while place + 4 <= end:
        mark, kind, length = _SEGMENT.unpack_from(data, place)
        begin, place = place + 4, place + 2 + length
        if mark != 0xFF or length < 2 or place > end:
            return None
        content = data[begin:place]
        if kind == _HUFFMAN:
            tables = _huffman_tables(content)
            if not tables:
                return None
            huffman |= tables
        elif kind == _QUANTISATION:
            tables = _quantisation_tables(content)
            if not tables:
                return None
            quantisation |= tables
        elif kind == _BASELINE:
            if frame is not None:
                return None
            frame = _plain_frame(content)
            if frame is None:
                return None
        elif kind == _EXIF:
            if content[:6] == b"Exif\0\0":
                if exif or not _is_upright(content[6:]):
                    return None
                exif = True
            elif b"Orientation" in content:
                return None
        elif kind == _ADOBE:
            if content[:5] == b"Adobe" and content[11:12] != b"\1":  # not the usual colours
                return None
        elif kind == _SEVERAL_PICTURES and content[:4] == b"MPF\0":
            return None
        elif kind == _SCAN:
            if frame is None or not quantisation.issuperset(frame.tables):
                return None
            return (frame.height, frame.width) if _is_whole_scan(content, frame.names, huffman) else None
        elif kind not in _NO_HARM:
            return None
    return None


def _plain_frame(content: bytes) -> _Frame | None:
    """The picture's size and components, if it is in grey or in the usual colours, of 8 bits and not too large."""
    if len(content) < 6:
        return None
    bits, height, width, count = _FRAME.unpack_from(content)
    if bits != 8 or len(content) != 6 + 3 * count or count not in (1, 3):
        return None
    if not (0 < height <= _LONGEST_SIDE and 0 < width <= _LONGEST_SIDE and height * width <= MOST_PIXELS):
        return None
    frame = _Frame(height, width, content[6::3], content[8::3])
    samples = content[7::3]
    if count == 1:
        return frame if samples == b"\x11" else None
    usual = frame.names in _COMPONENTS and samples[0] in _LUMINANCE and samples[1:] == b"\x11\x11"
    return frame if usual else None


def _is_whole_scan(content: bytes, names: bytes, huffman: frozenset[int]) -> bool:
    """Whether all components follow, at all frequencies, by tables that are there."""
    count = len(names)
    if len(content) != 4 + 2 * count or content[0] != count or content[-3:] != _ALL_FREQUENCIES:
        return False
    selected = content[2 : 1 + 2 * count : 2]
    return content[1 : 1 + 2 * count : 2] == names and all(
        pair >> 4 in huffman and 0x10 | pair & 0xF in huffman for pair in selected
    )


@lru_cache(maxsize=256)  # most programs write the same tables all the time
def _huffman_tables(content: bytes) -> frozenset[int]:
    """Which tables these are: 0 and 1 for mean values, 16 and 17 for other frequencies. None if one is not sound."""
    found = set()
    place = 0
    while place < len(content):
        name, counts = content[place], content[place + 1 : place + 17]
        symbols = content[place + 17 : place + 17 + sum(counts)]
        if name not in (0x00, 0x01, 0x10, 0x11) or len(counts) < 16 or len(symbols) < sum(counts):
            return frozenset()
        codes = 0
        for bits, count in enumerate(counts, start=1):
            codes = 2 * codes + count
            if codes >= 1 << bits:  # more codes than there are, the one of ones only being kept free
                return frozenset()
        if name < 0x10 and any(symbol > 11 for symbol in symbols):
            return frozenset()
        found.add(name)
        place += 17 + len(symbols)
    return frozenset(found)


@lru_cache(maxsize=256)
def _quantisation_tables(content: bytes) -> frozenset[int]:
    """Which tables these are, 0 to 3. None if one is not sound, or of more than 8 bits."""
    names = content[::65]
    return frozenset(names) if content and len(content) % 65 == 0 and max(names) < 4 else frozenset()


def _is_upright(exif: bytes) -> bool:
    """Whether these notes say, or leave open, that the picture is upright. False also if they make no sense."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 10:
        return False
    (first,) = struct.unpack_from(order + "I", exif, 4)
    if first > len(exif) - 2:
        return False
    (count,) = struct.unpack_from(order + "H", exif, first)
    entries = exif[first + 2 : first + 2 + 12 * count]
    if len(entries) < 12 * count:
        return False
    for tag, kind, number, value, _ in struct.iter_unpack(order + "HHIHH", entries):
        if tag == _ORIENTATION:
            return (kind, number, value) == (_SHORT, 1, 1)
    return True
