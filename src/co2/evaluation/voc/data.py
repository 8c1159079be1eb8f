"""Pascal VOC's layout: images, boxes, image labels and segmentation masks of a split, by its name.

    VOCdevkit/VOC2012/JPEGImages/NAME.jpg
                      Annotations/NAME.xml              objects: class, box, difficult
                      SegmentationClass/NAME.png        a class for each pixel: 0 ground, 255 not judged
                      SegmentationClassAug/NAME.png     the same for the images of train_aug, where there is one
                      ImageSets/Main/SPLIT.txt          names of images, for boxes and image labels
                      ImageSets/Segmentation/SPLIT.txt  names of images, for masks

VOC counts pixels from 1 and includes the last one. Here boxes are real numbers that begin at 0 and exclude their right
and lower edge: xmin - 1, ymin - 1, xmax, ymax. The whole image is (0, 0, width, height).

An annotation that cannot be understood stops the program with the name of the file, before anything is trained on it.
What is merely wrong in it is put right and counted: boxes that reach outside the image are cut, those without any area
in it are dropped (the image still shows their classes), and masks of another size than their image are left out. Images
without objects stay: they are examples of nothing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar
from xml.etree import ElementTree
from xml.parsers import expat

import numpy as np
import torch

from co2.data.decode import EXTENSIONS, opened, unreadable_is_bad, upright_size
from co2.data.folder import FileSource
from co2.data.source import BadImage, in_words, printable
from co2.errors import UserError, did_you_mean
from co2.files import MissingFile, UnreadableFile, read_bytes, read_text

T = TypeVar("T")
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
NOT_JUDGED = 255
"""The mark in a mask for pixels that belong to nothing in particular, such as borders of objects."""
_IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png")
_MOST_XML_BYTES = 2**20  # VOC's largest annotation has 20 kB
_LAYOUT = "VOCdevkit/VOC2012 with JPEGImages, Annotations and ImageSets in it"


@dataclass(frozen=True)
class Objects:
    """What there is to see in one image."""

    boxes: np.ndarray  # [M, 4] float32: left, top, right, bottom; right and bottom exclusive
    labels: np.ndarray  # [M] int64: places in the list of classes
    difficult: np.ndarray  # [M] bool: neither right nor wrong to find
    dropped_labels: np.ndarray  # [D] int64: of objects whose box has no area in the image, so that no box is kept
    dropped_difficult: np.ndarray  # [D] bool


@dataclass(frozen=True)
class VocDetection:
    """The images of a split and the objects in them."""

    images: FileSource
    sizes: np.ndarray  # [N, 2] int64: width and height of each image
    classes: tuple[str, ...]
    objects: list[Objects]
    clipped: int
    """Boxes that reached outside their image by more than a pixel, and were cut at its edge."""
    dropped: int
    """Boxes without any area inside their image."""

    def image_labels(self) -> np.ndarray:
        """Which classes an image shows, int8 [N, classes]: 1 yes, -1 no, 0 only as difficult objects (not judged)."""
        labels = np.full((len(self.objects), len(self.classes)), -1, dtype=np.int8)
        for row, objects in zip(labels, self.objects, strict=True):
            # It takes no sound box to say that an image shows something.
            shown = np.concatenate([objects.labels, objects.dropped_labels])  # [M + D]
            difficult = np.concatenate([objects.difficult, objects.dropped_difficult])  # [M + D]
            row[shown[difficult]] = 0
            row[shown[~difficult]] = 1
        return labels

    def box_counts(self) -> dict[str, int]:
        """For the record: boxes that are used, those of them that were cut, and those that were dropped."""
        kept = sum(len(objects.labels) for objects in self.objects)
        return {"kept": kept, "cut": self.clipped, "dropped": self.dropped}


@dataclass(frozen=True)
class VocSegmentation:
    """The images of a split and the class of each of their pixels."""

    images: FileSource
    classes: tuple[str, ...]
    """With "background" in the first place."""
    mask_paths: list[str]
    odd_sizes: list[str]
    """Masks that were left out because their size is not their image's."""

    def mask(self, index: int) -> torch.Tensor:
        """The class of each pixel: uint8 [H, W], `NOT_JUDGED` where none counts. Raises BadImage if it is unreadable,
        and UserError if it has classes that are not in the list."""
        path = self.mask_paths[index]
        try:
            with unreadable_is_bad():
                data = read_bytes(path)
            with opened(data, formats=("PNG",)) as image:
                if image.mode not in ("P", "L"):
                    raise UserError(
                        f"{printable(path)} has colours ({image.mode}) where class numbers are expected. "
                        "VOC's masks are PNG files with a palette, or grey ones."
                    )
                numbers = np.array(image)  # [H, W] uint8
        except UserError:
            raise
        except BadImage as error:
            raise BadImage(f"its mask: {error}") from None
        except Exception as error:  # a broken file makes Pillow raise anything from SyntaxError to struct.error
            raise BadImage(f"its mask is damaged ({in_words(error)})") from None
        unknown = numbers[(numbers >= len(self.classes)) & (numbers != NOT_JUDGED)]
        if len(unknown):
            raise UserError(
                f"{printable(path)} has pixels of class {unknown.max()}, and there are {len(self.classes) - 1} classes "
                f"besides the background: {', '.join(self.classes[1:])}."
            )
        return torch.from_numpy(numbers)


def read_detection(path: str | os.PathLike[str], *splits: str) -> list[VocDetection]:
    """The images and objects of splits such as "trainval07+12" and "test2007", with one list of classes for all.

    The classes are VOC's twenty where the annotations have no others, and else those that they have, sorted.

    Args:
        path: a folder that holds VOCdevkit, VOCdevkit itself, or one year's folder of it.
        splits: names of lists in ImageSets/Main with the year after them; several years are joined by +. The year may
            be left out where the layout has only one.
    """
    found = [_named_images(os.fspath(path), split, "Main") for split in splits]
    annotations = [_read_annotations(images) for images in found]
    classes = _class_list(thing.name for split in annotations for image in split for thing in image)
    return [
        _detection(os.fspath(path), images, things, classes) for images, things in zip(found, annotations, strict=True)
    ]


def read_segmentation(path: str | os.PathLike[str], *splits: str) -> list[VocSegmentation]:
    """The images and masks of splits such as "train_aug2012" and "val2012"; see `read_detection`.

    Masks have numbers for classes, and count them from 1 in alphabetical order. The names are VOC's twenty where the
    annotations have no others, or where there are none, and else all that the annotations of the splits' years have:
    a class that no image of the splits shows has its number all the same.
    """
    found = [_named_images(os.fspath(path), split, "Segmentation") for split in splits]
    years = sorted({image.year_folder for images in found for image in images})
    classes = _class_list(name for folder in years for name in _annotated_names(folder))
    return [_segmentation(os.fspath(path), images, ("background", *classes)) for images in found]


# Finding the files of a split.


@dataclass(frozen=True)
class _Place:
    """Where the parts of one image are."""

    year_folder: str
    name: str
    picture: str
    annotation: str
    masks: str  # the folder


def _named_images(path: str, split: str, task: str) -> list[_Place]:
    match = re.fullmatch(r"([a-z]+(?:_[a-z]+)*?)(\d+(?:\+\d+)*)?", split)
    if match is None:
        raise UserError(f"'{split}' is no split of VOC. Write, for instance, train2012, test2007 or trainval07+12.")
    part, years = match.groups()
    folders = _year_folders(path)
    if years is None:
        if len(folders) > 1:
            raise UserError(
                f"'{path}' has {' and '.join(folders)}: say which year, as in {split}{next(iter(folders))}."
            )
        wanted = list(folders)
    else:
        wanted = [year if len(year) == 4 else f"20{year}" for year in years.split("+")]
    if list(folders) == [""]:
        wanted = [""]  # one folder of unknown year stands for any
    places = []
    for year in wanted:
        if year not in folders:
            there = " and ".join(f"VOC{known}" for known in folders)
            raise UserError(
                f"The split {split} needs VOC{year}, and '{path}' has {there}. "
                f"Put VOC{year} beside it, or choose another split."
            )
        places += _listed(folders[year], part, task)
    return places


def _year_folders(path: str) -> dict[str, str]:
    """The folders of a layout by their year; the year is "" where the folder's name does not tell."""
    if not os.path.isdir(path):
        raise UserError(f"There is no folder '{path}'. VOC's layout is expected: {_LAYOUT}.")
    if os.path.isdir(os.path.join(path, "ImageSets")):
        name = re.fullmatch(r"VOC(\d{4})", os.path.basename(os.path.abspath(path)))
        return {name[1] if name else "": path}
    devkit = os.path.join(path, "VOCdevkit")
    inside = devkit if os.path.isdir(devkit) else path
    years = {
        name[3:]: os.path.join(inside, name)
        for name in sorted(os.listdir(inside))
        if re.fullmatch(r"VOC\d{4}", name) and os.path.isdir(os.path.join(inside, name))
    }
    if not years:
        raise UserError(f"'{path}' is not in VOC's layout. Expected there: {_LAYOUT}.")
    return years


def _listed(folder: str, part: str, task: str) -> list[_Place]:
    lists = os.path.join(folder, "ImageSets", task)
    file, masks = os.path.join(lists, f"{part}.txt"), "SegmentationClass"
    if part in ("train_aug", "trainaug"):  # Hariharan et al. 2011; both names are in use
        files = [os.path.join(lists, f"{name}.txt") for name in ("train_aug", "trainaug")]
        file, masks = next((one for one in files if os.path.isfile(one)), files[0]), "SegmentationClassAug"
    try:
        lines = read_text(file, errors="surrogateescape").split("\n")
        names = [_plain_name(line.split()[0]) for line in lines if line.strip()]
    except MissingFile:
        there = sorted(name[:-4] for name in os.listdir(lists) if name.endswith(".txt")) if os.path.isdir(lists) else []
        hint = did_you_mean(part, there) or (f" It has {', '.join(there[:8])}." if there else "")
        raise UserError(f"'{file}' is missing: it should list the names of the images of {part}.{hint}") from None
    except UnreadableFile as error:
        raise UserError(f"'{file}' cannot be read: {error}.") from None
    if not names:
        raise UserError(f"'{file}' lists no images.")
    if task == "Segmentation" and not os.path.isdir(os.path.join(folder, masks)):
        raise UserError(f"'{os.path.join(folder, masks)}' is missing: it should hold the masks of {part}, as NAME.png.")
    return [
        _Place(
            folder,
            name,
            _picture(folder, name, file),
            os.path.join(folder, "Annotations", f"{name}.xml"),
            os.path.join(folder, masks),
        )
        for name in names
    ]


def _plain_name(entry: str) -> str:
    """A name, from a list of names or from one of paths, as some lists of train_aug are."""
    name = entry.replace("\\", "/").rpartition("/")[2]
    stem, extension = os.path.splitext(name)
    return stem if extension.lower() in EXTENSIONS else name


def _picture(folder: str, name: str, listed_in: str) -> str:
    for extension in _IMAGE_EXTENSIONS:
        path = os.path.join(folder, "JPEGImages", name + extension)
        if os.path.isfile(path):
            return path
    raise UserError(
        f"'{listed_in}' lists '{printable(name)}', and there is no {printable(name)}.jpg in "
        f"'{os.path.join(folder, 'JPEGImages')}'."
    )


# Annotations.


@dataclass(frozen=True)
class _Thing:
    """An object as it is annotated."""

    name: str
    corners: tuple[float, float, float, float]  # as VOC counts
    difficult: bool


def _read_annotations(images: list[_Place]) -> list[list[_Thing]]:
    missing = [image.annotation for image in images if not os.path.isfile(image.annotation)]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(images)} images have no annotation; the first that is missing is "
            f"'{printable(missing[0])}'. Boxes and classes are expected there, in VOC's XML."
        )
    return [_things(image.annotation) for image in images]


def _annotated_names(year_folder: str) -> Iterator[str]:
    """The name of each object in all annotations of a year, whatever split they belong to."""
    folder = os.path.join(year_folder, "Annotations")
    try:
        files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    except OSError as error:
        raise UserError(
            f"The folder '{printable(folder)}' cannot be read: {error.strerror}. Make it readable."
        ) from None
    for file in files:
        if file.endswith(".xml") and not file.startswith("."):  # some systems put hidden files of the same name beside
            yield from _understood(os.path.join(folder, file), _name)


def _things(path: str) -> list[_Thing]:
    return _understood(path, _thing)


def _understood(path: str, read: Callable[[ElementTree.Element], T]) -> list[T]:
    """What `read` makes of each object in an annotation."""
    try:
        data = read_bytes(path, _MOST_XML_BYTES)
        return [read(element) for element in _parse_without_declarations(data).findall("object")]
    except (LookupError, ValueError, expat.ExpatError) as error:  # an encoding that nobody knows is a LookupError
        raise UserError(f"The annotation '{printable(path)}' is not understood: {in_words(error)}.") from None


def _parse_without_declarations(data: bytes) -> ElementTree.Element:
    """The tree of an XML file. One with a document type is refused: entities that it declares can unpack to gigabytes
    or pull in other files, and no annotation needs them."""
    builder = ElementTree.TreeBuilder()
    parser = expat.ParserCreate()

    def refuse(*_: object) -> None:
        raise ValueError("it declares a document type, which annotations have no need of and which can do harm")

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = _ends(builder)
    parser.CharacterDataHandler = builder.data
    parser.Parse(data, True)
    return builder.close()


def _ends(builder: ElementTree.TreeBuilder) -> Callable[[str], None]:
    def end(tag: str) -> None:
        builder.end(tag)  # returns the element, which expat has no use for

    return end


def _name(element: ElementTree.Element) -> str:
    name = (element.findtext("name") or "").strip()
    if not name:
        raise ValueError("an object has no name")
    return printable(name)


def _thing(element: ElementTree.Element) -> _Thing:
    name = _name(element)
    corners = [element.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
    if None in corners:
        raise ValueError(f"an object ({name}) has no bndbox with xmin, ymin, xmax and ymax")
    left, top, right, bottom = (float(text or "") for text in corners)  # VOC 2012 has a few that are not whole
    difficult = (element.findtext("difficult") or "0").strip() == "1"
    return _Thing(name, (left, top, right, bottom), difficult)


def _class_list(names: Iterable[str]) -> tuple[str, ...]:
    seen = set(names)
    return VOC_CLASSES if seen <= set(VOC_CLASSES) else tuple(sorted(seen))


@dataclass
class _Tally:
    clipped: int = 0
    dropped: int = 0


def _detection(
    path: str, images: list[_Place], annotations: list[list[_Thing]], classes: tuple[str, ...]
) -> VocDetection:
    numbers = {name: number for number, name in enumerate(classes)}
    # From the files themselves: what annotations say of sizes is not believed.
    sizes = np.array([upright_size(image.picture) for image in images], dtype=np.int64)  # [N, 2]
    tally = _Tally()
    objects = [
        # The objects of an image that cannot be read are neither right nor wrong: nobody will see it.
        _objects(things if width else [], numbers, int(width), int(height), tally)
        for things, (width, height) in zip(annotations, sizes, strict=True)
    ]
    return VocDetection(_pictures(path, images), sizes, classes, objects, tally.clipped, tally.dropped)


def _objects(things: list[_Thing], numbers: dict[str, int], width: int, height: int, tally: _Tally) -> Objects:
    kept: list[tuple[_Thing, list[float]]] = []
    dropped: list[_Thing] = []
    for thing in things:
        left, top, right, bottom = thing.corners
        exact = [left - 1, top - 1, right, bottom]
        if not all(map(math.isfinite, exact)):
            dropped.append(thing)
            continue
        inside = [min(max(number, 0.0), float(limit)) for number, limit in zip(exact, (width, height) * 2, strict=True)]
        if inside[0] >= inside[2] or inside[1] >= inside[3]:
            dropped.append(thing)
            continue
        # Up to a pixel is the rounding of resized annotations, or of tools that count from 0: cut, not worth a word.
        tally.clipped += max(abs(one - other) for one, other in zip(inside, exact, strict=True)) > 1
        kept.append((thing, inside))
    tally.dropped += len(dropped)
    return Objects(
        np.array([box for _, box in kept], dtype=np.float32).reshape(-1, 4),
        np.array([numbers[thing.name] for thing, _ in kept], dtype=np.int64),
        np.array([thing.difficult for thing, _ in kept], dtype=bool),
        np.array([numbers[thing.name] for thing in dropped], dtype=np.int64),
        np.array([thing.difficult for thing in dropped], dtype=bool),
    )


def _segmentation(path: str, images: list[_Place], classes: tuple[str, ...]) -> VocSegmentation:
    kept: list[tuple[_Place, str]] = []
    odd_sizes, missing = [], []
    for image in images:
        mask = os.path.join(image.masks, f"{image.name}.png")
        if not os.path.isfile(mask):
            missing.append(mask)
            continue
        sizes = upright_size(image.picture), upright_size(mask)
        if sizes[0] != sizes[1] and (0, 0) not in sizes:  # one that cannot be read is told of when it is loaded
            odd_sizes.append(printable(mask))
        else:
            kept.append((image, mask))
    if missing:
        raise UserError(
            f"{len(missing)} of {len(images)} images have no mask; the first that is missing is "
            f"'{printable(missing[0])}'."
        )
    if not kept:
        raise UserError(f"No mask has the size of its image; the first is '{odd_sizes[0]}'.")
    return VocSegmentation(
        _pictures(path, [image for image, _ in kept]),
        classes,
        [mask for _, mask in kept],
        odd_sizes,
    )


def _pictures(path: str, images: list[_Place]) -> FileSource:
    return FileSource(path, os.getcwd(), (os.fsencode(image.picture) for image in images))
