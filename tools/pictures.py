"""JPEGs that are like photographs to a decoder: about 50 KB for 480 x 384 pixels, each another one.

    python tools/pictures.py FOLDER --count 5000 --size 480x384

Soft noise at all scales, stronger at the larger ones as in photographs, and a few shapes with sharp edges. Nothing here
imports torch, so that processes that write pictures start quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from co2.bench.record import check_folder
from co2.errors import RunError, UserError
from co2.machine.device import choose_workers

_CELLS = (4, 8, 16, 32, 64, 128)  # of noise along the shorter side
_LOUDEST = 70.0  # levels, at the largest scale; each following has 0.6 of it
_QUIETER = 0.6
_COLOUR = 0.4  # how loud each channel is beside what all have in common
_GRAIN = 4.0  # levels, of each pixel by itself
_SHAPES = 6
_QUALITY = 90
_FOLDER = 1000  # pictures in one
_AT_ONCE = 50  # that a process writes before it reports
_WORTH_PROCESSES = 200  # pictures


def parse_size(text: str) -> tuple[int, int]:
    """Width and height from '480x384'."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and min(int(width), int(height)) >= 8):
        raise UserError(
            f"--picture-size must be WIDTHxHEIGHT with at least 8 pixels each, for instance 480x384; got '{text}'."
        )
    return int(width), int(height)


def picture(number: int, width: int, height: int) -> Image.Image:
    """Picture `number`: always the same one."""
    random = np.random.default_rng(number)
    levels = np.full((height, width, 3), 128.0, np.float32)
    levels += random.uniform(-50, 50, 3).astype(np.float32)
    for noise in _noises(width, height):  # [2H, 2W, 3]: a window of each, turned one way or another
        top, left = random.integers(0, (height, width))
        window = noise[top : top + height, left : left + width]
        levels += window[:: random.choice((-1, 1)), :: random.choice((-1, 1))]
    image = Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))
    drawing = ImageDraw.Draw(image)
    for _ in range(_SHAPES):
        left, top = random.uniform(-0.1, 0.9, 2) * (width, height)
        size = random.uniform(0.05, 0.35, 2) * min(width, height)
        colour = tuple(int(level) for level in random.integers(0, 256, 3))
        draw = drawing.ellipse if random.random() < 0.5 else drawing.rectangle
        draw((left, top, left + size[0], top + size[1]), fill=colour)
    return image


@lru_cache(maxsize=2)
def _noises(width: int, height: int) -> list[np.ndarray]:
    """Soft noise at each scale, float32 [2H, 2W, 3] each, and grain. Made once: it takes longer than a picture."""
    random = np.random.default_rng(0)
    shape = (2 * height, 2 * width)
    found = []
    for place, cells in enumerate(_CELLS):
        rows, columns = (max(2, round(cells * side / min(width, height))) for side in shape)
        noise = random.standard_normal((4, rows, columns), dtype=np.float32)
        grey, *colours = (
            np.asarray(Image.fromarray(one).resize(shape[::-1], Image.Resampling.BICUBIC)) for one in noise
        )
        loudness = _LOUDEST * _QUIETER**place
        # All channels follow the first, as the colours of things do.
        found.append(loudness * np.stack([grey + _COLOUR * colour for colour in colours], axis=2))
    return [*found, _GRAIN * random.standard_normal((*shape, 1), dtype=np.float32)]


def path_of(folder: Path, number: int) -> Path:
    """Where picture `number` is."""
    return folder / f"{number // _FOLDER:04d}" / f"{number:07d}.jpg"


def list_pictures(folder: Path, count: int) -> Path:
    """A text file that lists the first `count` pictures: there may be more of them."""
    path = folder / f"first-{count}.txt"
    if not path.exists():
        _write_whole(path, "".join(f"{path_of(Path(), number)}\n" for number in range(count)).encode())
    return path


def write_pictures(
    folder: Path,
    count: int,
    width: int,
    height: int,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Writes those of the first `count` pictures that are not there yet, and returns how many these were."""
    missing = [number for number in range(count) if not path_of(folder, number).exists()]
    for parent in {path_of(folder, number).parent for number in missing}:
        parent.mkdir(parents=True, exist_ok=True)
    parts = [missing[first : first + _AT_ONCE] for first in range(0, len(missing), _AT_ONCE)]
    done = count - len(missing)
    for written in _written(folder, parts, width, height, workers if len(missing) >= _WORTH_PROCESSES else 0):
        done += written
        progress(done, count)
    return len(missing)


def _written(folder: Path, parts: list[list[int]], width: int, height: int, workers: int) -> Iterator[int]:
    """How many pictures were written, part by part."""
    if workers == 0:
        yield from (_write(folder, part, width, height) for part in parts)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_write, folder, part, width, height) for part in parts]
        yield from (future.result() for future in futures)


def _write(folder: Path, numbers: list[int], width: int, height: int) -> int:
    for number in numbers:
        file = io.BytesIO()
        picture(number, width, height).save(file, "JPEG", quality=_QUALITY)
        _write_whole(path_of(folder, number), file.getvalue())
    return len(numbers)


def _write_whole(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)  # so that a file that is there is whole


@contextlib.contextmanager
def made_pictures(count: int, size: str, keep: str = "") -> Iterator[str]:
    """A list of `count` pictures of `size`, such as 480x384; those that are kept are in a folder for each size."""
    width, height = parse_size(size)
    with contextlib.ExitStack() as temporary:
        above = keep or temporary.enter_context(tempfile.TemporaryDirectory(prefix="co2-pictures-"))
        folder = Path(above, f"{width}x{height}")
        check_folder(folder, "--keep")
        start = time.perf_counter()
        try:
            written = write_pictures(folder, count, width, height, max(1, choose_workers(-1)))
            pictures = list_pictures(folder, count)
        except OSError as error:
            raise RunError(
                f"The pictures cannot be written to {folder}: {error.strerror}. Make room, or choose another --keep."
            ) from error
        there = count - written
        print(
            f"Wrote {written:,} pictures of {width}x{height} pixels in {time.perf_counter() - start:.0f} s"
            f"{f'; {there:,} were there already' if there else ''}."
        )
        yield str(pictures)


def main() -> None:
    """Write pictures into a folder, to be measured with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="each size has a folder of its own in it")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--size", default="480x384", help="width and height")
    asked = parser.parse_args()
    try:
        with made_pictures(asked.count, asked.size, asked.folder) as written:
            print(f"They are listed in {written}: give that as --data.")
    except (UserError, RunError) as mistake:
        sys.exit(str(mistake))


if __name__ == "__main__":
    main()
