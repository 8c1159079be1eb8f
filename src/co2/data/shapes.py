"""The rendered pictures of `co2.data.drawing` as a data set: in memory, or written out in two common layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image, ImageFilter

from co2.data.destination import names_in
from co2.data.drawing import CLASSES, Picture, Split, render
from co2.data.source import ImageSource, Progress, in_words, printable
from co2.errors import RunError, UserError, did_you_mean

Layout = Literal["folder", "voc"]
LAYOUTS: tuple[Layout, ...] = ("folder", "voc")
SMALLEST_SIZE, LARGEST_SIZE = 8, 4096  # in fewer pixels they cannot be told apart
MOST_PICTURES = 100_000_000
SMALLEST_WRITTEN = 20  # so that each class is both in train and in val
_CACHE_BYTES = 256 * 2**20
_VOID = 255  # VOC's mark for pixels on the border of an object, which are not judged


class ShapesSource(ImageSource):
    """`count` rendered pictures with one object each; the classes take turns."""

    def __init__(self, count: int, size: int = 32, seed: int = 0, split: Split = "train") -> None:
        check_request(count, size)
        self.name = "shapes"
        self.count = count
        self.size = size
        self.seed = seed
        self.split: Split = split
        self.classes = CLASSES
        self.labels = np.arange(count, dtype=np.int64) % len(CLASSES)  # [N]
        self._drawn: dict[int, np.ndarray] = {}  # pictures already rendered, while they fit into _CACHE_BYTES

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_drawn": {}}  # a worker draws its own: quicker than being sent them

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> torch.Tensor:
        pixels = self._drawn.get(index)  # [3, S, S] uint8
        if pixels is None:
            pixels = self.picture(index).image.transpose(2, 0, 1).copy()
            if (len(self._drawn) + 1) * pixels.nbytes <= _CACHE_BYTES:
                self._drawn[index] = pixels
        return torch.from_numpy(pixels.copy())

    def describe(self, index: int) -> str:
        return f"shapes image {index} of {self.size} pixels"  # which are other pictures at another size

    def picture(self, index: int) -> Picture:
        """Picture `index` with its box and mask."""
        return render(index, self.size, self.seed, self.split)


def check_request(count: int, size: int) -> None:
    if not 1 <= count <= MOST_PICTURES:
        raise UserError(f"The number of shapes pictures must be from 1 to {MOST_PICTURES:,}; got {count:,}.")
    if not SMALLEST_SIZE <= size <= LARGEST_SIZE:
        raise UserError(f"The size of shapes pictures must be from {SMALLEST_SIZE} to {LARGEST_SIZE:,}; got {size:,}.")


def write_shapes(
    destination: str | os.PathLike[str],
    layout: Layout = "folder",
    count: int = 4000,
    size: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write `count` pictures, a fifth of them held out, into a folder that is new or empty.

    Args:
        destination: where to write.
        layout: "folder" for train/CLASS/*.png and val/CLASS/*.png, one object in each picture; "voc" for Pascal VOC
            2012 (VOCdevkit/VOC2012 with boxes and segmentation), up to four objects where the size leaves room.
        count: how many pictures, train and val together.
        size: their side in pixels.
        seed: which pictures; the same seed gives those of `ShapesSource`.
        progress: told after each picture how far things are.
    """
    if layout not in LAYOUTS:
        raise UserError(f"There is no layout '{layout}'.{did_you_mean(layout, LAYOUTS)} Choose folder or voc.")
    check_request(count, size)
    if count < SMALLEST_WRITTEN:
        raise UserError(f"Write at least {SMALLEST_WRITTEN} pictures, so that train and val both have each class.")
    destination = os.fspath(destination)
    if names_in(destination):
        raise UserError(
            f"'{printable(destination)}' is not empty, and nothing in it is overwritten. Empty it or name a new folder."
        )
    held_out = max(count // 5, len(CLASSES))
    parts: list[tuple[str, Split, int]] = [("train", "train", count - held_out), ("val", "test", held_out)]
    write = _write_folder if layout == "folder" else _write_voc
    try:
        for done, _ in enumerate(write(destination, parts, size, seed), start=1):
            if progress is not None:
                progress(done, count)
    except OSError as error:
        raise RunError(
            f"The pictures in '{printable(destination)}' cannot be written any further: {in_words(error)}. Make room, "
            "empty the folder and run the command again, or name another one."
        ) from None


def _write_folder(destination: str, parts: list[tuple[str, Split, int]], size: int, seed: int) -> Iterator[None]:
    for part, split, count in parts:
        for name in CLASSES:
            os.makedirs(os.path.join(destination, part, name))
        for index in range(count):
            picture = render(index, size, seed, split)
            path = os.path.join(destination, part, CLASSES[picture.labels[0]], f"{index:06d}.png")
            Image.fromarray(picture.image).save(path)
            yield


def _write_voc(destination: str, parts: list[tuple[str, Split, int]], size: int, seed: int) -> Iterator[None]:
    root = os.path.join(destination, "VOCdevkit", "VOC2012")
    for name in ("JPEGImages", "Annotations", "SegmentationClass", "SegmentationObject"):
        os.makedirs(os.path.join(root, name))
    names: dict[str, list[str]] = {}
    for part, split, count in parts:
        names[part] = [f"{part}_{index:06d}" for index in range(count)]
        for index, name in enumerate(names[part]):
            picture = render(index, size, seed, split, several=True)
            Image.fromarray(picture.image).save(os.path.join(root, "JPEGImages", f"{name}.jpg"), quality=95)
            _voc_annotation(name, picture).write(os.path.join(root, "Annotations", f"{name}.xml"))
            by_class, by_object = _voc_masks(picture)
            by_class.save(os.path.join(root, "SegmentationClass", f"{name}.png"))
            by_object.save(os.path.join(root, "SegmentationObject", f"{name}.png"))
            yield
    names["trainval"] = names["train"] + names["val"]
    for task in ("Main", "Segmentation"):
        os.makedirs(os.path.join(root, "ImageSets", task))
        for part, listed in names.items():
            with open(os.path.join(root, "ImageSets", task, f"{part}.txt"), "w", encoding="utf-8") as file:
                file.write("\n".join(listed) + "\n")


def _voc_annotation(name: str, picture: Picture) -> ElementTree.ElementTree[ElementTree.Element]:
    height, width, depth = picture.image.shape
    top = ElementTree.Element("annotation")

    def add(parent: ElementTree.Element, tag: str, text: object = "") -> ElementTree.Element:
        element = ElementTree.SubElement(parent, tag)
        element.text = str(text)
        return element

    add(top, "folder", "VOC2012")
    add(top, "filename", f"{name}.jpg")
    add(add(top, "source"), "database", "shapes")
    extent = add(top, "size")
    for tag, number in (("width", width), ("height", height), ("depth", depth)):
        add(extent, tag, number)
    add(top, "segmented", 1)
    for label, (left, upper, right, lower) in zip(picture.labels, picture.boxes, strict=True):
        thing = add(top, "object")
        for tag, text in (("name", CLASSES[label]), ("pose", "Unspecified"), ("truncated", 0), ("difficult", 0)):
            add(thing, tag, text)
        box = add(thing, "bndbox")  # VOC counts pixels from 1, and includes the last one
        for tag, number in (("xmin", left + 1), ("ymin", upper + 1), ("xmax", right), ("ymax", lower)):
            add(box, tag, number)
    ElementTree.indent(top)
    return ElementTree.ElementTree(top)


def _voc_masks(picture: Picture) -> tuple[Image.Image, Image.Image]:
    """Each pixel's class and object, counted from 1 with 0 for the ground, and 255 along every object's border."""
    size = len(picture.image)
    by_class, by_object = np.zeros((2, size, size), dtype=np.uint8)
    border = np.zeros((size, size), dtype=bool)
    reach = 2 * max(1, size // 200) + 1  # VOC's borders are about 5 pixels wide in pictures of 500
    for number, (label, mask) in enumerate(zip(picture.labels, picture.masks, strict=True), start=1):
        by_class[mask] = label + 1
        by_object[mask] = number
        drawing = Image.fromarray(mask.astype(np.uint8))
        grown, shrunk = drawing.filter(ImageFilter.MaxFilter(reach)), drawing.filter(ImageFilter.MinFilter(reach))
        border |= np.asarray(grown) != np.asarray(shrunk)
    images = []
    for numbers in (by_class, by_object):
        numbers[border] = _VOID
        image = Image.fromarray(numbers).convert("P")
        image.putpalette(_VOC_PALETTE)
        images.append(image)
    return images[0], images[1]


def _voc_palette() -> bytes:
    """VOC's colour map: the bits of a number, spread over red, green and blue from the highest bit down."""
    palette = bytearray()
    for number in range(256):
        colour = [0, 0, 0]
        for place in range(8):
            for channel in range(3):
                colour[channel] |= ((number >> (3 * place + channel)) & 1) << (7 - place)
        palette += bytes(colour)
    return bytes(palette)


_VOC_PALETTE = _voc_palette()
