"""Query pictures and their nearest neighbours under several networks, as pictures inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from co2.report.markup import Html

MOST_COLUMNS = 6  # neighbours in a line: more would be too small on a phone
LARGEST_SIDE = 160  # pixels kept of a picture: it is shown no larger than that
CRISP_BELOW = 96  # smaller pictures are scaled up with their pixels visible, which blurring would hide


@dataclass(frozen=True)
class Picture:
    """An image and the name of its class, None where no class is known."""

    pixels: np.ndarray  # [3, H, W] uint8
    label: str | None = None

    @staticmethod
    def of(image: Any, label: str | None = None) -> Picture:
        """From anything that numpy can read as uint8 [3, H, W], such as what an ImageSource returns."""
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[0] != 3:
            raise ValueError(f"A picture is uint8 [3, H, W]; got {pixels.dtype} {list(pixels.shape)}.")
        return Picture(pixels, label)


@dataclass(frozen=True)
class Gallery:
    """One query picture, and its nearest neighbours under each network by the network's name, nearest first."""

    query: Picture
    neighbours: Mapping[str, Sequence[Picture]]


def same_class(galleries: Sequence[Gallery]) -> dict[str, tuple[int, int]]:
    """For each network, how many of the neighbours shown have their query's class, and how many are shown.

    Pictures without a class are not counted."""
    counts: dict[str, tuple[int, int]] = {}
    for gallery in galleries:
        for network, pictures in gallery.neighbours.items():
            verdicts = [match for p in pictures if (match := _matches(gallery.query, p)) is not None]
            same, shown = counts.get(network, (0, 0))
            counts[network] = (same + sum(verdicts), shown + len(verdicts))
    return {network: count for network, count in counts.items() if count[1]}


def galleries_html(galleries: Sequence[Gallery]) -> Html:
    """All galleries, one block for each query."""
    return Html.of('<div class="galleries">\n{}\n</div>', Html.joined(map(_gallery_html, galleries), "\n"))


def data_uri(picture: Picture) -> str:
    """The picture as a PNG inside an address."""
    image = Image.fromarray(np.ascontiguousarray(picture.pixels.transpose(1, 2, 0)))
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _gallery_html(gallery: Gallery) -> Html:
    longest = max((len(pictures) for pictures in gallery.neighbours.values()), default=1)
    columns = max(4, min(MOST_COLUMNS, longest))
    row = '<div class="neighbours{}"><h4>{}</h4><div class="strip" style="--columns: {}">{}</div></div>'
    image, caption = _image_html(gallery.query, "query picture"), _caption(gallery.query)
    rows = [Html.of(row, " query", "query", columns, Html.of("<figure>{}{}</figure>", image, caption))]
    for network, pictures in gallery.neighbours.items():
        shown = Html.joined(_neighbour_html(gallery.query, one, rank) for rank, one in enumerate(pictures, 1))
        rows.append(Html.of(row, "", network, columns, shown))
    return Html.of('<div class="gallery">\n{}\n</div>', Html.joined(rows, "\n"))


def _neighbour_html(query: Picture, picture: Picture, rank: int) -> Html:
    match = _matches(query, picture)
    if match is None:
        return Html.of("<figure>{}{}</figure>", _image_html(picture, f"neighbour {rank}"), _caption(picture))
    verdict, mark, spoken = ("same", "✓", "same class") if match else ("other", "✗", "another class")
    image = _image_html(picture, f"neighbour {rank}, {spoken}")
    return Html.of('<figure class="{}">{}{}</figure>', verdict, image, _caption(picture, mark))


def _caption(picture: Picture, mark: str = "") -> Html:
    if picture.label is None:
        return Html()
    marked = Html.of('<span class="mark" aria-hidden="true">{mark}</span> ', mark=mark) if mark else ""
    return Html.of('<figcaption title="{name}">{marked}{name}</figcaption>', name=picture.label, marked=marked)


def _matches(query: Picture, picture: Picture) -> bool | None:
    if query.label is None or picture.label is None:
        return None
    return query.label == picture.label


def _image_html(picture: Picture, description: str) -> Html:
    crisp = Html(' class="crisp"' if max(picture.pixels.shape[1:]) < CRISP_BELOW else "")
    label = "" if picture.label is None else f": {picture.label}"
    return Html.of('<img{crisp} src="{uri}" alt="{alt}">', crisp=crisp, uri=data_uri(picture), alt=description + label)
