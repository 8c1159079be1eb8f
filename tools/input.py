"""How fast images become batches of views, by each way that they can take to the device.

    python tools/input.py path/to/pictures --inputs jpeg workers
    python tools/input.py --make 5000 --picture-size 480x384 --recipe moco-v2 --out results/input

Files that were just written, or read once already, lie in the system's memory: what is measured then is the work, not
the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from pictures import made_pictures

from co2 import recipes
from co2.bench.record import check_out, provenance, show, write_record
from co2.bench.step import peak_memory_gib, release, wait_for
from co2.bench.train import endless_batches, open_loader
from co2.data.decode import decode_image
from co2.data.open import open_data
from co2.data.plain_jpeg import plain_jpeg_size
from co2.data.source import BadImage, ImageSource
from co2.errors import RunError, UserError
from co2.experiment import Experiment
from co2.machine.device import choose_device
from co2.views.loader import write_views
from co2.views.parameters import draw
from co2.views.resident import views_of

Input = Literal["auto", "resident", "jpeg", "workers"]
_WARM_UP = 3  # batches
_BATCHES_AT_ONCE = 20  # before the device is waited for
_DECODED_AT_ONCE = 256
_SAMPLE = 512  # images on which each piece of work is measured by itself


@dataclass(frozen=True)
class InputBenchmark:
    """How fast images become batches of views by themselves, without a training step.

    Every setting of `co2 pretrain RECIPE` can be given beside these."""

    make: int | None = None
    """Write so many JPEGs that are like photographs, and read those."""
    picture_size: str = "480x384"
    """Width and height of these."""
    keep: str = ""
    """Folder for them, to be used again; by default a temporary one. Each size has a folder of its own in it."""
    recipe: str = "moco-v2"
    """Whose views and batches to make."""
    inputs: tuple[Input, ...] = ("auto",)
    """Ways for images to take, to compare with each other."""
    seconds: float = 10.0
    """How long to measure each."""
    out: str = ""
    """Folder for the record (input.json), or a file that ends in .json."""

    def __post_init__(self) -> None:
        if self.seconds <= 0 or (self.make is not None and self.make < 1):
            raise UserError("--seconds and --make must be above 0.")


@dataclass(frozen=True)
class InputMeasurement:
    """What was found out about one way."""

    asked: str
    sentence: str
    """What `co2 pretrain` would say about it."""
    prepare_seconds: float
    """Until there is a loader: where all images lie on the device, they are read here."""
    first_batch_seconds: float
    images: int
    seconds: float
    gpu_memory_gib: float
    process_memory_gib: float
    """The most that this process took, and the largest of those it started."""
    bad_images: int

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def run(experiment: Experiment, settings: InputBenchmark, data: str | None) -> dict[str, Any]:
    """Measures, prints tables, and writes the record where `settings.out` says."""
    if (data is None) == (settings.make is None):
        raise UserError("Say which images to read: tools/input.py DATA, or tools/input.py --make 5000.")
    check_out(settings.out, "input")
    device = choose_device(experiment.device)
    made_with = provenance(device)
    with contextlib.ExitStack() as temporary:
        if settings.make is not None:
            data = temporary.enter_context(made_pictures(settings.make, settings.picture_size, settings.keep))
        assert data is not None
        splits = open_data(data)
        print(f"{splits.description}.")
        source = splits.train
        pieces = measure_pieces(experiment, source, device)
        found = [measure_input(experiment, source, device, asked, settings.seconds) for asked in settings.inputs]
    made = f"{settings.make} JPEGs of {settings.picture_size} pixels"
    record = made_with | {
        "experiment": asdict(experiment),
        "data": splits.description if settings.make is None else made,
        "images": len(source),
        "pieces_images_per_second": pieces,
        "inputs": [asdict(one) | {"images_per_second": one.images_per_second} for one in found],
    }
    present(record)
    write_record(record, settings.out, "input")
    return record


# ---------------------------------------------------------------- how it is measured


def measure_input(
    experiment: Experiment, source: ImageSource, device: torch.device, asked: Input, seconds: float
) -> InputMeasurement:
    """The speed of one way, from a loader of its own."""
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    loader, sentence = open_loader(experiment.edit(execution={"input": asked}), source, device)
    wait_for(device)
    prepared = time.perf_counter()
    with contextlib.closing(endless_batches(loader)) as batches:
        bad = len(next(batches).bad)
        wait_for(device)
        first = time.perf_counter()
        for batch in itertools.islice(batches, _WARM_UP):
            bad += len(batch.bad)
        wait_for(device)
        images = 0
        began = time.perf_counter()
        while not images or time.perf_counter() - began < seconds:
            for batch in itertools.islice(batches, _BATCHES_AT_ONCE if device.type == "cuda" else 1):
                images += batch.total
                bad += len(batch.bad)
            wait_for(device)
        elapsed = time.perf_counter() - began
    return InputMeasurement(
        asked,
        sentence,
        prepared - start,
        first - prepared,
        images,
        elapsed,
        peak_memory_gib(device)[0] if device.type == "cuda" else 0.0,
        _process_memory_gib(),
        bad,
    )


def _process_memory_gib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    used = [resource.getrusage(whose).ru_maxrss for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used) * unit / 2**30


def measure_pieces(experiment: Experiment, source: ImageSource, device: torch.device) -> dict[str, float]:
    """Images/s of reading, decoding and making views, each by itself on a few hundred images, without bad ones.

    Nothing is read or decoded of images that lie in memory. What no image came out of has no speed, and is left out.
    """
    stacked = source.stacked()
    count = min(_SAMPLE, len(source))
    found: dict[str, float] = {}
    if stacked is not None:
        images = [torch.from_numpy(pixels).to(device) for pixels in stacked[:count]]
    else:
        # From all over the data: those that cannot be read may well lie side by side.
        chosen = np.linspace(0, len(source) - 1, count).astype(int).tolist()
        read, seconds = _timed(lambda: [_file(source, index) for index in chosen], device)
        files = [file for file in read if file is not None]
        if files:
            found["reading (one process)"] = len(files) / seconds
        images, where, seconds = _decoded(files, device)
        if images:
            found[f"decoding ({where})"] = len(images) / seconds
    if images:
        where = "GPU" if device.type == "cuda" else "CPU"
        found[f"making views (on the {where})"] = len(images) / _view_seconds(experiment, images, device)
    return found


def _file(source: ImageSource, index: int) -> bytes | None:
    with contextlib.suppress(BadImage):
        return source.encoded(index)[0]
    return None


def _decoded(files: list[bytes], device: torch.device) -> tuple[list[Tensor], str, float]:
    """Images on the device, uint8 [3, H, W] each; where they were decoded, and how long it took."""
    if device.type == "cuda" and all(plain_jpeg_size(file) is not None for file in files):
        data = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]

        def in_batches() -> list[Tensor]:
            parts = [data[first : first + _DECODED_AT_ONCE] for first in range(0, len(data), _DECODED_AT_ONCE)]
            return [image for part in parts for image in decode_jpeg(part, mode=ImageReadMode.RGB, device=device)]

        with contextlib.suppress(RuntimeError):  # this GPU decodes none, or one of these is damaged
            in_batches()  # starts the decoder
            images, seconds = _timed(in_batches, device)
            return images, "on the GPU", seconds

    def one_by_one() -> Iterator[Tensor]:
        for file in files:
            with contextlib.suppress(BadImage):
                yield decode_image(file)

    images, seconds = _timed(lambda: list(one_by_one()), device)
    return [image.to(device) for image in images], "one CPU core", seconds


def _view_seconds(experiment: Experiment, images: list[Tensor], device: torch.device) -> float:
    """How long the views of these images take, made as training on this device makes them."""
    count, views = len(images), len(experiment.views())
    if device.type != "cuda":
        size = experiment.size
        into = torch.empty(views, count, 3, size, size, dtype=torch.uint8).unbind()
        of_each, indices = experiment.views(), list(range(count))
        return _timed(lambda: write_views(into, images, indices, of_each, experiment.seed, 0), device)[1]
    heights, widths = torch.tensor([image.shape[-2:] for image in images] * views, device=device).unbind(1)  # [V * N]
    lengths = 3 * heights[:count] * widths[:count]  # [N]
    offsets = (lengths.cumsum(0) - lengths).repeat(views)  # [V * N]
    pixels = torch.cat([image.flatten() for image in images])
    numbers = torch.arange(count, device=device).repeat(views)
    view = torch.arange(views, device=device).repeat_interleave(count)

    def make() -> Tensor:
        drawn = draw(experiment.views()[0], experiment.seed, 0, numbers, view, heights, widths)
        return views_of(pixels, offsets, heights, widths, drawn, experiment.views()[0])

    make()  # compiles the kernels
    return _timed(make, device)[1]


def _timed(action: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    wait_for(device)
    start = time.perf_counter()
    result = action()
    wait_for(device)
    return result, time.perf_counter() - start


# ---------------------------------------------------------------- what comes out


def present(record: dict[str, Any]) -> None:
    """Tables for people."""
    pieces = [{"piece": piece, "images/s": speed} for piece, speed in record["pieces_images_per_second"].items()]
    if pieces:
        show("each piece of the work by itself", pieces)
    rows = [
        {
            "input": one["asked"],
            "images/s": one["images_per_second"],
            "ready after s": one["prepare_seconds"],
            "first batch after s": one["first_batch_seconds"],
            "GPU memory GiB": one["gpu_memory_gib"],
            "process memory GiB": one["process_memory_gib"],
            "bad images": one["bad_images"],
        }
        for one in record["inputs"]
    ]
    show("images that become batches of views", rows)
    for one in record["inputs"]:
        print(f"{one['asked']}: {one['sentence']}")


def main(words: list[str] | None = None) -> None:
    """Measure what the command line says: DATA first, if there are any, then settings of this and of the recipe."""
    words = sys.argv[1:] if words is None else words
    data = words[0] if words and not words[0].startswith("-") else None
    prog = "python tools/input.py"
    try:
        own = words if data is None else words[1:]
        settings, rest = tyro.cli(InputBenchmark, args=own, prog=prog, return_unknown_args=True)
        run(tyro.cli(Experiment, args=rest, default=recipes.get(settings.recipe), prog=prog), settings, data)
    except (UserError, RunError) as mistake:
        sys.exit(str(mistake))


if __name__ == "__main__":
    main()
