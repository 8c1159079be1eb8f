import dataclasses
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from one_class_voc import write_one_class_voc
from sklearn.svm import LinearSVC
from torn_images import Listener

import co2
from co2.data.shapes import write_shapes
from co2.errors import RunError
from co2.evaluation.features import embed
from co2.evaluation.labels import balanced_subset
from co2.evaluation.voc.data import read_detection
from co2.evaluation.voc.svm import PAPER, QUICK, SvmSettings, evaluate
from co2.measures.ranking import average_precision

ONE_COST = dataclasses.replace(QUICK, costs=(1.0,))


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    folder = tmp_path_factory.mktemp("voc") / "shapes"
    write_shapes(str(folder), layout="voc", count=400, size=48)
    return folder


def features_and_labels(subject, part):
    features = embed(subject.build(), part.images, subject.views).features.double().numpy()
    return features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-5), part.image_labels()


def names_of(part):
    return [Path(part.images.describe(index)).stem for index in range(len(part.images))]


def test_the_papers_numbers():
    # Appendix, "Classification on PASCAL VOC", and Goyal et al. 2019, which it follows.
    assert dataclasses.asdict(PAPER) == {
        "train": "trainval2007",
        "test": "test2007",
        "costs": tuple(2.0**power for power in range(-10, 5)),
        "held_out": 0.25,
        "positive_weight": 2.0,
        "iterations": 2000,
    }
    assert len(PAPER.costs) > len(QUICK.costs) > 1


def test_one_machine_for_each_class_as_scikit_learn_trains_it(pretrained, voc):
    result = evaluate(pretrained, voc, ONE_COST)
    train, test = read_detection(voc, "train2012", "val2012")
    (features, labels), (test_features, test_labels) = (features_and_labels(pretrained, part) for part in (train, test))
    expected = {}
    for place, name in enumerate(train.classes):
        machine = LinearSVC(
            C=1.0, class_weight={1: 2, -1: 1}, loss="squared_hinge", dual=True, max_iter=2000, random_state=0
        )
        scores = machine.fit(features, labels[:, place]).decision_function(test_features)
        positives = test_labels[:, place] == 1
        expected[name] = [100 * average_precision(scores, positives, rule) for rule in ("11-point", "area")]
        found = result.details["classes"][name]
        assert [found["eleven_point"], found["area"]] == pytest.approx(expected[name], abs=1e-6)
    means = np.mean(list(expected.values()), axis=0)
    assert [result.numbers["mAP_11point"], result.numbers["mAP_area"]] == pytest.approx(means.tolist())
    assert result.details["classes_left_out"] == []


def test_pretraining_helps(pretrained, untrained, voc):
    learnt, not_learnt = (evaluate(subject, voc, QUICK) for subject in (pretrained, untrained))
    assert learnt.numbers["mAP_area"] > not_learnt.numbers["mAP_area"]
    tried = learnt.details["classes"]["circle"]
    assert tried["cost"] in QUICK.costs
    assert tried["held_out_area"][f"{tried['cost']:g}"] == max(tried["held_out_area"].values())
    assert evaluate(pretrained, voc, QUICK) == learnt  # repeats exactly under its seed


def test_the_cost_is_chosen_for_each_class_on_images_that_were_held_out(pretrained, voc):
    settings = dataclasses.replace(QUICK, costs=(0.01, 1.0, 100.0))
    result = evaluate(pretrained, voc, settings, seed=2)
    train, _ = read_detection(voc, "train2012", "val2012")
    features, labels = features_and_labels(pretrained, train)
    chosen = set()
    for place, name in enumerate(train.classes):
        aside = np.zeros(len(labels), dtype=bool)
        aside[balanced_subset(labels[:, place], settings.held_out, seed=2)] = True
        assert aside.mean() == pytest.approx(0.25, abs=0.01)
        expected = {}
        for cost in settings.costs:
            machine = LinearSVC(C=cost, class_weight={1: 2, -1: 1}, dual=False, max_iter=2000, random_state=2)
            machine.fit(features[~aside], labels[~aside, place])
            scores = machine.decision_function(features[aside])
            expected[f"{cost:g}"] = 100 * average_precision(scores, labels[aside, place] == 1, "area")
        found = result.details["classes"][name]
        assert found["held_out_area"] == pytest.approx(expected)
        assert f"{found['cost']:g}" == max(expected, key=expected.get)
        chosen.add(found["cost"])
    assert len(chosen) > 1  # not one for all


def change_objects(path, change):
    tree = ElementTree.parse(path)
    for thing in tree.getroot().findall("object"):
        change(thing)
    tree.write(path)


def test_difficult_objects_count_neither_for_nor_against(pretrained, tmp_path):
    write_shapes(str(tmp_path / "voc"), layout="voc", count=200, size=32)
    annotations = tmp_path / "voc" / "VOCdevkit" / "VOC2012" / "Annotations"
    train, test = read_detection(tmp_path / "voc", "train2012", "val2012")
    circle = train.classes.index("circle")
    judged = {}
    for part in (train, test):  # every second image with a circle shows only difficult ones
        names = names_of(part)
        with_circle = [name for name, row in zip(names, part.image_labels(), strict=True) if row[circle] == 1]
        for name in with_circle[::2]:

            def mark(thing):
                if thing.findtext("name") == "circle":
                    thing.find("difficult").text = "1"

            change_objects(annotations / f"{name}.xml", mark)
        judged[names[0]] = [name not in with_circle[::2] for name in names]
    result = evaluate(pretrained, tmp_path / "voc", ONE_COST)

    train, test = read_detection(tmp_path / "voc", "train2012", "val2012")
    (features, labels), (test_features, test_labels) = (features_and_labels(pretrained, part) for part in (train, test))
    kept, test_kept = (np.array(judged[names_of(part)[0]]) for part in (train, test))
    assert (labels[~kept, circle] == 0).all()
    machine = LinearSVC(
        C=1.0, class_weight={1: 2, -1: 1}, loss="squared_hinge", dual=True, max_iter=2000, random_state=0
    ).fit(features[kept], labels[kept, circle])
    scores = machine.decision_function(test_features[test_kept])
    expected = 100 * average_precision(scores, test_labels[test_kept, circle] == 1)
    assert result.details["classes"]["circle"]["area"] == pytest.approx(expected, abs=1e-6)


def test_classes_that_cannot_be_learnt_are_left_out_and_named(pretrained, tmp_path):
    write_shapes(str(tmp_path / "voc"), layout="voc", count=60, size=32)
    root = tmp_path / "voc" / "VOCdevkit" / "VOC2012"
    for name in (root / "ImageSets" / "Main" / "train.txt").read_text().split():

        def rename(thing):
            if thing.findtext("name") == "star":
                thing.find("name").text = "circle"

        change_objects(root / "Annotations" / f"{name}.xml", rename)
    result = evaluate(pretrained, tmp_path / "voc", ONE_COST)
    assert "star" in result.details["classes_left_out"]
    assert not any(map(np.isnan, result.numbers.values()))


def test_unreadable_images_are_left_out_together_with_their_labels(pretrained, tmp_path):
    write_shapes(str(tmp_path / "voc"), layout="voc", count=60, size=32)
    root = tmp_path / "voc" / "VOCdevkit" / "VOC2012"
    lists = [root / "ImageSets" / "Main" / f"{part}.txt" for part in ("train", "val")]
    for path in lists:
        (root / "JPEGImages" / f"{path.read_text().split()[0]}.jpg").write_bytes(b"nothing")
    broken = evaluate(pretrained, tmp_path / "voc", ONE_COST)
    assert (broken.details["train_images"], broken.details["test_images"]) == (47, 11)
    unreadable = broken.details.pop("unreadable")
    assert [name.rpartition("/")[2] for name in unreadable] == [f"{path.read_text().split()[0]}.jpg" for path in lists]
    for path in lists:
        path.write_text("\n".join(path.read_text().split()[1:]))
    without = evaluate(pretrained, tmp_path / "voc", ONE_COST)
    assert without.details.pop("unreadable") == {}
    assert without == broken


def test_boxes_that_are_dropped_make_no_image_a_negative(pretrained, tmp_path):
    write_shapes(str(tmp_path / "voc"), layout="voc", count=60, size=32)
    sound = evaluate(pretrained, tmp_path / "voc", ONE_COST)
    annotations = tmp_path / "voc" / "VOCdevkit" / "VOC2012" / "Annotations"
    train, _ = read_detection(tmp_path / "voc", "train2012", "val2012")
    objects_of = dict(zip(names_of(train), train.objects, strict=True))
    spoiled = [name for name, objects in objects_of.items() if len(objects.labels)][::2]

    def move_out(thing):
        thing.find("bndbox/xmin").text, thing.find("bndbox/xmax").text = "900", "950"

    for name in spoiled:
        change_objects(annotations / f"{name}.xml", move_out)
    dropped = sum(len(objects_of[name].labels) for name in spoiled)
    listener = Listener()
    result = evaluate(pretrained, tmp_path / "voc", ONE_COST, progress=listener)
    assert result.numbers == sound.numbers
    assert sound.details["boxes"]["train"]["dropped"] == 0
    assert result.details["boxes"]["train"]["dropped"] == dropped > 0
    assert result.details["boxes"]["test"] == sound.details["boxes"]["test"]
    [line] = listener.lines
    assert line.startswith(f"train2012: {dropped} objects have a box without any area in their image")


def test_the_record_says_which_machines_did_not_come_to_an_end(pretrained, voc):
    whole, cut_short = (
        evaluate(pretrained, voc, dataclasses.replace(ONE_COST, iterations=count)).details["classes"]
        for count in (2000, 1)
    )
    assert all(one["converged"] for one in whole.values())
    assert not any(one["converged"] for one in cut_short.values())


def test_a_backbone_that_has_diverged_is_told(pretrained, voc):
    weights = {name: weight.clone() for name, weight in pretrained.weights.items()}
    weights["conv1.weight"].fill_(torch.nan)
    with pytest.raises(RunError, match="are not finite numbers: the run that made these weights has diverged"):
        evaluate(dataclasses.replace(pretrained, weights=weights), voc, ONE_COST)


def test_bad_input_is_told_plainly(pretrained, voc, tmp_path):
    with pytest.raises(co2.UserError, match="VOC2007"):
        evaluate(pretrained, voc, PAPER)
    with pytest.raises(co2.UserError, match=r"not in VOC's layout.*JPEGImages, Annotations and ImageSets"):
        evaluate(pretrained, tmp_path, QUICK)
    write_one_class_voc(tmp_path, count=20, size=32)
    with pytest.raises(co2.UserError, match="no class has images with it and images without it in train2012"):
        evaluate(pretrained, tmp_path, QUICK)
    shutil.rmtree(tmp_path / "VOCdevkit" / "VOC2012" / "Annotations")
    with pytest.raises(co2.UserError, match=r"have no annotation.*in VOC's XML"):
        evaluate(pretrained, tmp_path, QUICK)
    with pytest.raises(co2.UserError, match="costs"):
        SvmSettings(costs=(0.0,))
