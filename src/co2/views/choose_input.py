"""Which way images take to the device: chosen by what they are and how much memory there is, and said in a sentence.

All images on the GPU where they fit; else JPEGs that the GPU decodes; else worker processes, which can do everything.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from co2.data.decode import decode_image
from co2.data.plain_jpeg import plain_jpeg_size
from co2.data.source import BadImage, ImageSource, Progress, in_words
from co2.errors import UserError
from co2.views.jpeg_stream import MOST_READERS, JpegViews
from co2.views.loader import ViewLoader
from co2.views.resident import DoesNotFit, ResidentViews, in_bytes
from co2.views.view import View

Wanted = Literal["auto", "resident", "jpeg", "workers"]
_SAMPLE = 64  # images by which the others are judged
_SHARE_FOR_IMAGES = 1 / 4  # of the GPU's free memory, if nobody says otherwise: the rest is for training
_SHARE_ON_REQUEST = 9 / 10  # if somebody wants all images there


@dataclass(frozen=True)
class Survey:
    """What a data set looks like, as far as a few of its images can tell."""

    pixel_bytes: int
    """How many bytes all images take when they are decoded."""
    exact: bool
    """Whether that is known, not estimated."""
    jpegs: float
    """Share of the images that are JPEGs a GPU can decode; 0 where none could be read."""
    readable: bool
    """Whether any image could be read at all."""


def survey(source: ImageSource) -> Survey:
    """Look at up to 64 images, at equal distances; at none where all lie in memory."""
    stacked = source.stacked()
    if stacked is not None:
        return Survey(stacked.nbytes, exact=True, jpegs=0.0, readable=True)
    sizes: list[int] = []
    jpegs = 0
    for index in np.unique(np.linspace(0, len(source) - 1, _SAMPLE).astype(int)):
        try:
            data, _ = source.encoded(int(index))
            size = plain_jpeg_size(data)
            if size is None:
                height, width = decode_image(data).shape[-2:]
            else:
                height, width = size
                jpegs += 1
        except BadImage:
            continue
        sizes.append(3 * height * width)
    if not sizes:
        return Survey(0, exact=False, jpegs=0.0, readable=False)
    return Survey(int(np.mean(sizes) * len(source)), exact=False, jpegs=jpegs / len(sizes), readable=True)


def choose_input(
    source: ImageSource,
    views: Sequence[View],
    *,
    workers: int,
    device: torch.device,
    wanted: Wanted = "auto",
    budget_bytes: int | None = None,
    progress: Progress | None = None,
    **common: Any,
) -> tuple[ViewLoader, str]:
    """A loader, and a sentence about it for the user.

    Args:
        workers: processes that read images, all the time or, for `resident`, at the start.
        wanted: `auto`, or the way that the user wants: `resident`, `jpeg` or `workers`.
        budget_bytes: how many bytes of pixels may lie on the GPU: a quarter of its free memory unless said otherwise,
            and nine tenths where `resident` is asked for by name.
        progress: told how far `resident` is with reading.
        common: what else `ViewLoader` asks for: batch_size, seed, and perhaps smallest and share.
    """
    common |= {"source": source, "views": views, "workers": workers}

    def with_workers(why: str) -> tuple[ViewLoader, str]:
        loader = ViewLoader(**common)
        by = f"{workers} worker process{'es' if workers != 1 else ''}" if workers else "the training process itself"
        return loader, f"Images are read and augmented by {by}: {why}."

    def resident(most_bytes: int | None) -> tuple[ViewLoader, str]:
        loader = ResidentViews(**common, device=device, most_bytes=most_bytes, progress=progress)
        used = in_bytes(loader.images.pixels.numel())
        allowed = f" of the {in_bytes(most_bytes)} allowed" if most_bytes is not None else ""
        where = "on the GPU" if device.type == "cuda" else "in memory"
        return loader, f"All {len(source):,} images lie {where} and are augmented there: {used}{allowed}."

    def jpeg(why: str) -> tuple[ViewLoader, str]:
        loader = JpegViews(**common, device=device)
        where = "GPU" if device.type == "cuda" else "CPU"
        readers = min(workers, MOST_READERS)
        by = f"{readers} worker process{'es' if readers != 1 else ''}" if readers else "a thread"
        return loader, f"JPEGs are read ahead by {by}, and decoded and augmented on the {where}: {why}."

    on_gpu = device.type == "cuda"
    if wanted == "workers":
        return with_workers("as asked for")
    if wanted == "jpeg":
        if on_gpu and (problem := _no_jpegs_on(device)):
            raise UserError(f"JPEGs cannot be decoded on this GPU ({problem}). Use --execution.input auto or workers.")
        return jpeg("as asked for")
    if wanted == "resident":
        most_bytes = budget_bytes
        if on_gpu and most_bytes is None:
            most_bytes = int(_SHARE_ON_REQUEST * _free_bytes(device))
        try:
            return resident(most_bytes)
        except (DoesNotFit, torch.cuda.OutOfMemoryError) as error:
            raise UserError(
                f"The images of '{source.name}' do not fit ({_reason(error)}). "
                "Use --execution.input auto, jpeg or workers."
            ) from None

    if not on_gpu:
        return with_workers("there is no GPU to do it")
    budget = int(_SHARE_FOR_IMAGES * _free_bytes(device)) if budget_bytes is None else budget_bytes
    seen = survey(source)
    if not seen.readable:
        return with_workers("none of the images tried could be read")
    if seen.pixel_bytes <= budget:
        try:
            return resident(budget)
        except (DoesNotFit, torch.cuda.OutOfMemoryError) as error:
            too_many = f"they were thought to fit into the GPU's memory and did not ({_reason(error)})"
        torch.cuda.empty_cache()  # what was read up to there
    else:
        about = "" if seen.exact else "about "
        too_many = f"their pixels, {about}{in_bytes(seen.pixel_bytes)}, are more than the {in_bytes(budget)} allowed"
    if seen.jpegs <= 0.5:
        return with_workers(f"{too_many}, and most of them are no JPEGs that a GPU could decode")
    if problem := _no_jpegs_on(device):
        return with_workers(f"{too_many}, and this GPU cannot decode JPEGs ({problem})")
    return jpeg(too_many)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DoesNotFit) else "its memory ran out"


def _no_jpegs_on(device: torch.device) -> str | None:
    """Why JPEGs cannot be decoded on this GPU; None if they can."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    try:
        with torch.cuda.device(device):
            decode_jpeg([data], mode=ImageReadMode.RGB, device=device)
    except RuntimeError as error:
        return in_words(error).partition("\n")[0]
    return None
