import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import in_bounds, make_endless, make_pipe
from PIL import Image

from co2.data import decode
from co2.data.drawing import CLASSES, render
from co2.data.shapes import write_shapes
from co2.data.source import BadImage
from co2.errors import UserError
from co2.evaluation.voc.data import VOC_CLASSES, read_detection, read_segmentation


def annotation(*objects, top=""):
    """An annotation as VOC writes it; objects are (name, xmin, ymin, xmax, ymax) and perhaps difficult."""
    body = "".join(
        f"<object><name>{name}</name><difficult>{rest[0] if rest else 0}</difficult><truncated>0</truncated><bndbox>"
        f"<xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax></bndbox>"
        "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
        "</object>"
        for name, a, b, c, d, *rest in objects
    )
    return f"{top}<annotation><size><width>999</width><height>999</height></size>{body}</annotation>"


def write_year(root, year, splits, *, size=(40, 30), objects=None, masks=None):
    """A year's folder; `splits` gives the names of images, `objects` their annotations, `masks` arrays [H, W]."""
    folder = root / "VOCdevkit" / f"VOC{year}"
    for name in ("JPEGImages", "Annotations", "SegmentationClass", "ImageSets/Main", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for split, names in splits.items():
        for task in ("Main", "Segmentation"):
            (folder / "ImageSets" / task / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
        for name in names:
            Image.new("RGB", size, (90, 120, 30)).save(folder / "JPEGImages" / f"{name}.jpg")
            (folder / "Annotations" / f"{name}.xml").write_text(
                annotation(*(objects or {}).get(name, [("dog", 2, 3, 11, 13)]))
            )
            mask = (masks or {}).get(name, np.zeros(size[::-1], dtype=np.uint8))
            Image.fromarray(mask).save(folder / "SegmentationClass" / f"{name}.png")
    return folder


def names_of(data):
    return [Path(data.images.describe(index)).stem for index in range(len(data.images))]


def test_boxes_begin_at_zero_and_exclude_their_last_edge(tmp_path):
    write_year(tmp_path, 2012, {"train": ["a"]}, objects={"a": [("cat", 1, 1, 40, 30), ("dog", 5, 7.5, 5, 20)]})
    (data,) = read_detection(tmp_path, "train2012")
    assert data.objects[0].boxes.tolist() == [[0, 0, 40, 30], [4, 6.5, 5, 20]]
    assert data.objects[0].boxes.dtype == np.float32
    assert [data.classes[label] for label in data.objects[0].labels] == ["cat", "dog"]  # and no parts, such as heads
    assert data.classes == VOC_CLASSES
    assert len(VOC_CLASSES) == 20
    assert data.sizes.tolist() == [[40, 30]]  # what the file has, not what its annotation says
    assert (data.clipped, data.dropped) == (0, 0)


def test_rendered_shapes_are_read_as_they_were_drawn(tmp_path):
    write_shapes(tmp_path, "voc", count=30, size=96, seed=5)
    train, val = read_detection(tmp_path, "train2012", "val2012")
    assert (len(train.images), len(val.images)) == (20, 10)
    assert train.classes == val.classes == CLASSES
    for data, split in ((train, "train"), (val, "test")):
        for index in range(len(data.images)):
            drawn = render(index, 96, 5, split, several=True)
            assert (data.objects[index].boxes == drawn.boxes).all()
            assert (data.objects[index].labels == drawn.labels).all()
            assert data.images.image(index).shape == (3, 96, 96)
    (masks,) = read_segmentation(tmp_path, "val2012")
    assert masks.classes == ("background", *CLASSES)
    drawn = render(3, 96, 5, "test", several=True)
    mask = masks.mask(3).numpy()
    for label, inside in zip(drawn.labels, drawn.masks, strict=True):
        assert set(np.unique(mask[inside])) <= {label + 1, 255}
    ground = ~drawn.masks.any(axis=0)
    assert set(np.unique(mask[ground])) <= {0, 255}
    assert (mask != 255).mean() > 0.6


def test_years_are_joined_and_told_apart(tmp_path):
    write_year(tmp_path, 2007, {"trainval": ["000001", "000002"], "test": ["000003"]})
    write_year(tmp_path, 2012, {"trainval": ["2008_000001"]})
    both, test = read_detection(tmp_path, "trainval07+12", "test2007")
    assert names_of(both) == ["000001", "000002", "2008_000001"]
    assert names_of(test) == ["000003"]
    assert "VOC2012" in both.images.describe(2)
    for root in (tmp_path / "VOCdevkit", tmp_path / "VOCdevkit" / "VOC2007"):
        assert names_of(read_detection(root, "test2007")[0]) == ["000003"]
    with pytest.raises(UserError, match="say which year"):
        read_detection(tmp_path, "trainval")
    with pytest.raises(UserError, match="needs VOC2012"):
        read_detection(tmp_path / "VOCdevkit" / "VOC2007", "trainval07+12")


def test_a_folder_of_another_name_stands_for_any_year(tmp_path):
    folder = write_year(tmp_path, 2012, {"train": ["a"]})
    moved = tmp_path / "mine"
    shutil.move(folder, moved)
    for split in ("train2012", "train"):
        assert names_of(read_detection(moved, split)[0]) == ["a"]


def test_image_labels_follow_vocs_rule_for_difficult_objects(tmp_path):
    objects = {
        "a": [("dog", 1, 1, 9, 9, 1), ("dog", 1, 1, 9, 9, 0), ("cat", 1, 1, 9, 9, 1)],  # a dog that counts, a cat not
        "b": [],
    }
    write_year(tmp_path, 2012, {"train": ["a", "b"]}, objects=objects)
    (data,) = read_detection(tmp_path, "train2012")
    labels = data.image_labels()
    assert labels.shape == (2, 20)
    assert labels[0, VOC_CLASSES.index("dog")] == 1
    assert labels[0, VOC_CLASSES.index("cat")] == 0
    assert (labels[0] == -1).sum() == 18
    assert (labels[1] == -1).all()
    assert len(data.objects[1].boxes) == 0  # an image without objects is kept
    assert data.objects[1].boxes.shape == (0, 4)


def test_boxes_outside_the_image_are_cut_or_dropped_and_counted(tmp_path):
    bad = [
        ("cat", -5, 4, 12, 50),  # reaches out on two sides
        ("cat", 41, 1, 60, 10),  # wholly outside
        ("cat", 10, 10, 9, 20),  # no area: VOC's last pixel is included, so 9 is one too few
        ("cat", 20, 10, 4, 20),  # the wrong way round
        ("cat", "nan", 10, 4, 20),
        ("cat", 10, 10, 10, 10),  # a single pixel
        ("cat", 0, 0.4, 40.6, 31),  # out by a pixel at most, as rounding makes it: cut, and not counted
    ]
    write_year(tmp_path, 2012, {"train": ["a"]}, objects={"a": bad})
    (data,) = read_detection(tmp_path, "train2012")
    assert data.objects[0].boxes.tolist() == [[0, 3, 12, 30], [9, 9, 10, 10], [0, 0, 40, 30]]
    assert (data.clipped, data.dropped) == (1, 4)
    assert data.box_counts() == {"kept": 3, "cut": 1, "dropped": 4}


def test_an_image_shows_what_is_in_it_even_where_no_box_is_kept(tmp_path):
    objects = {
        "a": [("dog", 41, 1, 60, 10), ("cat", 10, 10, 9, 20, 1), ("cow", "nan", 1, 2, 2, 1), ("cow", 1, 1, 9, 9)],
        "b": [],
    }
    write_year(tmp_path, 2012, {"train": ["a", "b"]}, objects=objects)
    (data,) = read_detection(tmp_path, "train2012")
    shown = {name: row for name, row in zip(VOC_CLASSES, data.image_labels()[0].tolist(), strict=True) if row >= 0}
    assert shown == {"dog": 1, "cat": 0, "cow": 1}  # only a difficult cat, and a difficult cow beside one that counts
    assert [data.classes[label] for label in data.objects[0].labels] == ["cow"]  # nothing to be found but this
    assert (data.image_labels()[1] == -1).all()


def test_classes_that_only_a_later_split_has(tmp_path):
    objects = {"a": [("zebra", 1, 1, 9, 9)], "b": [("ant", 1, 1, 9, 9), ("zebra", 1, 1, 9, 9)]}
    write_year(tmp_path, 2012, {"train": ["a"], "val": ["b"]}, objects=objects)
    train, val = read_detection(tmp_path, "train2012", "val2012")
    assert train.classes == val.classes == ("ant", "zebra")
    assert train.objects[0].labels.tolist() == [1]
    assert val.objects[0].labels.tolist() == [0, 1]


def test_masks_number_the_classes_of_all_annotations(tmp_path):
    objects = {"a": [("zebra", 1, 1, 9, 9)], "b": [("cat", 1, 1, 9, 9)], "c": [("ant", 1, 1, 9, 9)]}
    masks = {"a": np.full((30, 40), 3, dtype=np.uint8)}
    splits = {"train": ["a"], "val": ["b"], "test": ["c"]}  # nobody asks for the last one
    folder = write_year(tmp_path, 2012, splits, objects=objects, masks=masks)
    (folder / "Annotations" / "._a.xml").write_bytes(b"hidden, and not XML")
    (folder / "Annotations" / "notes.txt").write_text("not XML either")
    train, val = read_segmentation(tmp_path, "train2012", "val2012")
    assert train.classes == val.classes == ("background", "ant", "cat", "zebra")
    assert (train.mask(0) == train.classes.index("zebra")).all()
    without_box = "<annotation><object><name>bee</name></object></annotation>"  # masks do without
    (folder / "Annotations" / "c.xml").write_text(without_box)
    assert read_segmentation(tmp_path, "train2012")[0].classes == ("background", "bee", "cat", "zebra")
    (folder / "Annotations" / "c.xml").write_text("<annotation>")
    with pytest.raises(UserError, match=r"c\.xml' is not understood"):
        read_segmentation(tmp_path, "train2012")
    shutil.rmtree(folder / "Annotations")
    assert read_segmentation(tmp_path, "train2012")[0].classes == ("background", *VOC_CLASSES)


def test_masks_of_one_year_do_not_number_the_classes_of_another(tmp_path):
    write_year(tmp_path, 2012, {"train": ["a"]}, objects={"a": [("zebra", 1, 1, 9, 9)]})
    write_year(tmp_path, 2007, {"train": ["b"]}, objects={"b": [("ant", 1, 1, 9, 9)]})
    assert read_segmentation(tmp_path, "train2012")[0].classes == ("background", "zebra")
    assert read_segmentation(tmp_path, "train07+12")[0].classes == ("background", "ant", "zebra")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_entities_are_refused_in_any_encoding(tmp_path, encoding):
    bomb = '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;&x;">]>'
    folder = write_year(tmp_path, 2012, {"train": ["a"]})
    text = f'<?xml version="1.0" encoding="{encoding}"?>' + annotation(("&y;", 1, 1, 2, 2), top=bomb)
    (folder / "Annotations" / "a.xml").write_bytes(text.encode(encoding))
    with pytest.raises(UserError, match=r"a\.xml.*document type"):
        read_detection(tmp_path, "train2012")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation><object>", "no element found"),
        ("", "no element found"),
        ("<annotation><object><name>cat</name></object></annotation>", r"no bndbox"),
        ("<annotation><object><bndbox/></object></annotation>", "no name"),
        (annotation(("cat", "left", 1, 2, 3)), "could not convert"),
        ("<annotation>" + " " * 2**20 + "</annotation>", "larger than 1 MiB"),
        ('<?xml version="1.0" encoding="cp9999"?>' + annotation(("cat", 1, 1, 2, 2)), "unknown encoding: cp9999"),
    ],
)
def test_a_broken_annotation_is_named(tmp_path, text, message):
    folder = write_year(tmp_path, 2012, {"train": ["good", "bad"]})
    (folder / "Annotations" / "bad.xml").write_text(text)
    with pytest.raises(UserError, match=rf"bad\.xml.*{message}"):
        read_detection(tmp_path, "train2012")


@pytest.mark.parametrize("make", [make_pipe, make_endless])
@pytest.mark.parametrize("file", ["ImageSets/Main/train.txt", "Annotations/bad.xml", "Annotations/of_no_image.xml"])
def test_a_list_or_an_annotation_that_never_ends_is_told_plainly(tmp_path, make, file):
    folder = write_year(tmp_path, 2012, {"train": ["good", "bad"]}, objects={"good": [("zebra", 1, 1, 9, 9)]})
    (folder / file).unlink(missing_ok=True)
    make(folder / file)
    said = in_bounds(lambda: read_detection(tmp_path, "train2012"))
    wanted = "1 of 2 images have no annotation" if file == "Annotations/bad.xml" else "not a regular file"
    assert re.match(f"UserError: .*{wanted}", said) or file == "Annotations/of_no_image.xml", said


@pytest.mark.parametrize("make", [make_pipe, make_endless])
@pytest.mark.parametrize("file", ["ImageSets/Segmentation/train.txt", "Annotations/bad.xml", "Annotations/more.xml"])
def test_a_list_of_masks_or_any_annotation_that_never_ends_is_told_plainly(tmp_path, make, file):
    """Masks are numbered by the classes of all annotations, whoever they belong to."""
    folder = write_year(tmp_path, 2012, {"train": ["good", "bad"]})
    (folder / file).unlink(missing_ok=True)
    make(folder / file)
    said = in_bounds(lambda: read_segmentation(tmp_path, "train2012"))
    assert re.match("UserError: .*not a regular file", said), said


@pytest.mark.parametrize("make", [make_pipe, make_endless])
def test_a_mask_that_never_ends_is_a_bad_image(tmp_path, make):
    folder = write_year(tmp_path, 2012, {"train": ["a", "b"]})
    (data,) = read_segmentation(tmp_path, "train2012")
    (folder / "SegmentationClass" / "a.png").unlink()
    make(folder / "SegmentationClass" / "a.png")
    assert in_bounds(lambda: data.mask(0)).startswith("BadImage: ")


def test_missing_parts_are_named(tmp_path):
    with pytest.raises(UserError, match="VOCdevkit/VOC2012 with JPEGImages"):
        read_detection(tmp_path, "train2012")
    with pytest.raises(UserError, match="There is no folder"):
        read_detection(tmp_path / "nowhere", "train2012")
    folder = write_year(tmp_path, 2012, {"train": ["a"]})
    with pytest.raises(UserError, match="no split of VOC"):
        read_detection(tmp_path, "12")
    with pytest.raises(UserError, match=r"trainn\.txt' is missing.*Did you mean 'train'"):
        read_detection(tmp_path, "trainn2012")
    (folder / "ImageSets/Segmentation/train_aug.txt").write_text("a\n")
    with pytest.raises(UserError, match="SegmentationClassAug' is missing"):
        read_segmentation(tmp_path, "train_aug2012")
    (folder / "SegmentationClass" / "a.png").unlink()
    with pytest.raises(UserError, match=r"no mask.*a\.png"):
        read_segmentation(tmp_path, "train2012")
    (folder / "Annotations" / "a.xml").unlink()
    with pytest.raises(UserError, match=r"no annotation.*a\.xml"):
        read_detection(tmp_path, "train2012")
    (folder / "JPEGImages" / "a.jpg").unlink()
    with pytest.raises(UserError, match=r"no a\.jpg"):
        read_detection(tmp_path, "train2012")
    (folder / "ImageSets/Main/train.txt").write_text("\n")
    with pytest.raises(UserError, match="lists no images"):
        read_detection(tmp_path, "train2012")


@pytest.mark.parametrize("line", ["a", "JPEGImages/a.jpg SegmentationClassAug/a.png", "../../../a"])
def test_augmented_masks_from_a_folder_of_their_own(tmp_path, line):
    folder = write_year(tmp_path, 2012, {"train": ["a"]})
    (folder / "SegmentationClassAug").mkdir()
    mask = np.full((30, 40), 7, dtype=np.uint8)
    Image.fromarray(mask).save(folder / "SegmentationClassAug" / "a.png")
    (folder / "ImageSets/Segmentation/train_aug.txt").write_text(line + "\n")
    (data,) = read_segmentation(tmp_path, "train_aug2012")
    assert (data.mask(0) == 7).all()


def test_the_other_name_of_the_augmented_list(tmp_path):
    folder = write_year(tmp_path, 2012, {"train": ["a"]})
    (folder / "SegmentationClass").rename(folder / "SegmentationClassAug")
    (folder / "ImageSets/Segmentation/trainaug.txt").write_text("a\n")
    for split in ("train_aug2012", "trainaug2012"):
        assert names_of(read_segmentation(tmp_path, split)[0]) == ["a"]


def test_sizes_are_those_of_images_as_they_are_seen(tmp_path):
    """A camera on its side writes lying pixels and "turn me": whoever drew the boxes saw an upright picture."""
    objects = {"a": [("dog", 1, 1, 30, 40)]}
    folder = write_year(tmp_path, 2012, {"train": ["a"]}, objects=objects, masks={"a": np.zeros((40, 30), np.uint8)})
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(folder / "JPEGImages" / "a.jpg", exif=exif)
    (data,) = read_detection(tmp_path, "train2012")
    assert data.sizes.tolist() == [[30, 40]]
    assert data.images.image(0).shape == (3, 40, 30)
    assert data.objects[0].boxes.tolist() == [[0, 0, 30, 40]]
    assert data.clipped == 0
    assert read_segmentation(tmp_path, "train2012")[0].odd_sizes == []


@pytest.mark.parametrize("exif", [b"garbage", b"II*\0\xff\xff\xff\x7fgarbage"], ids=["error", "warning"])
def test_broken_exif_costs_no_annotation(tmp_path, recwarn, exif):
    masks = {"a": np.zeros((30, 40), np.uint8), "odd": np.zeros((40, 30), np.uint8)}
    folder = write_year(tmp_path, 2012, {"train": ["a"], "val": ["a", "odd"]}, masks=masks)
    for name in ("a", "odd"):
        (folder / "JPEGImages" / f"{name}.jpg").unlink()
        Image.new("RGB", (40, 30)).save(folder / "JPEGImages" / f"{name}.png", exif=exif)
    (data,) = read_detection(tmp_path, "train2012")
    assert data.images.image(0).shape == (3, 30, 40)
    assert data.sizes.tolist() == [[40, 30]]
    assert data.objects[0].boxes.tolist() == [[1, 2, 11, 13]]
    assert names_of(read_segmentation(tmp_path, "val2012")[0]) == ["a"]  # a mask of another size is still found out
    assert not recwarn.list  # nor is the user bothered with it


def test_masks_of_another_size_are_left_out_and_named(tmp_path):
    masks = {"odd": np.zeros((40, 30), dtype=np.uint8)}
    write_year(tmp_path, 2012, {"train": ["a", "odd", "b"], "val": ["odd"]}, masks=masks)
    (data,) = read_segmentation(tmp_path, "train2012")
    assert names_of(data) == ["a", "b"]
    assert [path.endswith("odd.png") for path in data.odd_sizes] == [True]
    assert len(data.images) == len(data.mask_paths) == 2
    with pytest.raises(UserError, match="No mask has the size of its image"):
        read_segmentation(tmp_path, "val2012")


def test_masks_that_are_no_masks(tmp_path, monkeypatch):
    too_many = np.full((30, 40), 21, dtype=np.uint8)
    folder = write_year(tmp_path, 2012, {"train": ["a", "b", "c"]}, masks={"a": too_many})
    Image.new("RGB", (40, 30)).save(folder / "SegmentationClass" / "b.png")
    (folder / "SegmentationClass" / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    (data,) = read_segmentation(tmp_path, "train2012")
    with pytest.raises(UserError, match=r"a\.png has pixels of class 21"):
        data.mask(0)
    with pytest.raises(UserError, match=r"b\.png has colours"):
        data.mask(1)
    with pytest.raises(BadImage, match="damaged"):
        data.mask(2)
    monkeypatch.setattr(decode, "MOST_PIXELS", 40 * 30 - 1)
    with pytest.raises(BadImage, match="its mask: more than"):
        data.mask(0)


def test_an_unreadable_image_is_left_to_whoever_loads_it(tmp_path):
    folder = write_year(tmp_path, 2012, {"train": ["a", "b"]})
    (folder / "JPEGImages" / "a.jpg").write_bytes(b"nothing")
    (data,) = read_detection(tmp_path, "train2012")
    assert data.dropped == 0
    with pytest.raises(BadImage):
        data.images.image(0)
    assert isinstance(data.images.image(1), torch.Tensor)
    (masks,) = read_segmentation(tmp_path, "train2012")
    assert names_of(masks) == ["a", "b"]
