import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torn_images import Listener, Torn

import co2
from co2.data.open import open_data
from co2.data.source import ArraySource
from co2.evaluation import features, linear
from co2.evaluation.features import embed, random_views
from co2.evaluation.labels import accuracies, balanced_subset, labelled_split
from co2.evaluation.linear import PAPER, QUICK, evaluate
from co2.evaluation.progress import Progress
from co2.evaluation.regression import choose_strength, fit
from co2.evaluation.subject import Subject

SHORT = dataclasses.replace(PAPER, epochs=6, milestones=(4, 5), learning_rate=0.1, batch_size=64, crop_scale=(0.5, 1.0))
SOLVED = dataclasses.replace(QUICK, crop_scale=SHORT.crop_scale)  # a tenth of a rendered picture mostly shows nothing


def test_the_papers_numbers():
    # Appendix, "Linear Classification".
    assert (PAPER.solver, PAPER.epochs, PAPER.learning_rate) == ("sgd", 100, 15)
    assert (PAPER.milestones, PAPER.decay) == ((60, 80), 0.1)
    assert (PAPER.momentum, PAPER.weight_decay, PAPER.batch_size) == (0.9, 0, 256)
    assert (PAPER.crop_scale, PAPER.flips) == ((0.08, 1.0), True)


@pytest.mark.parametrize("flips", [True, False])
def test_the_layer_learns_from_random_crops_and_their_mirror_images(pretrained, shapes, monkeypatch, flips):
    shown = []

    def watched(source, views, **rest):
        shown.append(views)
        return random_views(source, views, **rest)

    monkeypatch.setattr(linear, "random_views", watched)  # for sgd
    monkeypatch.setattr(features, "random_views", watched)  # for the quick solve
    for settings in (dataclasses.replace(SHORT, epochs=1), dataclasses.replace(SOLVED, crops=1)):
        evaluate(pretrained, shapes(60), dataclasses.replace(settings, flips=flips))
    wanted = dataclasses.replace(pretrained.views, crop_scale=(0.5, 1.0), flip_probability=0.5 if flips else 0.0)
    assert shown == [wanted, wanted]


@pytest.mark.parametrize("settings", [SOLVED, dataclasses.replace(QUICK, crops=0, plain=True)], ids=["crops", "plain"])
def test_the_quick_solve_reads_more_off_a_pretrained_backbone(pretrained, untrained, shapes, settings):
    learnt, not_learnt = (evaluate(subject, shapes(600), settings).numbers for subject in (pretrained, untrained))
    assert learnt["top1"] > not_learnt["top1"] + 5
    assert learnt["top1"] > 30  # of ten classes
    assert learnt["top5"] > learnt["top1"]


def test_sgd_reads_more_off_a_pretrained_backbone(pretrained, untrained, shapes):
    result = evaluate(pretrained, shapes(300), SHORT)
    assert result.numbers["top1"] > evaluate(untrained, shapes(300), SHORT).numbers["top1"] + 3
    assert result.details["loss_by_epoch"][-1] < result.details["loss_by_epoch"][0]
    assert result.settings["epochs"] == 6
    assert evaluate(pretrained, shapes(300), SHORT) == result  # repeats exactly under its seed
    assert evaluate(pretrained, shapes(300), SHORT, seed=1).numbers != result.numbers


class Counting(Progress):
    """Remembers how many steps were announced, and how many were taken."""

    def __init__(self):
        self.announced, self.taken = {}, {}

    def stage(self, words, total=None):
        self.announced[words], self.taken[words], self.current = total, 0, words

    def advance(self, steps=1):
        self.taken[self.current] += steps


@pytest.mark.parametrize("at_once", [2, 3, 100])  # of 5 steps an epoch, the last of 44 images
def test_images_of_several_steps_pass_the_backbone_together(pretrained, shapes, monkeypatch, at_once):
    passed = []
    build = Subject.build

    def watched(self, classes=0):
        backbone = build(self, classes)
        backbone.register_forward_pre_hook(lambda _, inputs: passed.append(len(inputs[0])))
        return backbone

    monkeypatch.setattr(Subject, "build", watched)
    results = []
    for many in (1, at_once):
        monkeypatch.setattr(linear, "batch_size", lambda *_, many=many: many * 64)
        passed.clear()
        progress = Counting()
        results.append(evaluate(pretrained, shapes(300), SHORT, progress=progress))
        assert passed[0] == min(many * 64, 300)
        assert progress.taken["Linear"] == progress.announced["Linear"] == 6 * 5
    one, several = results
    assert several.details["loss_by_epoch"] == pytest.approx(one.details["loss_by_epoch"], rel=1e-4)
    assert several.numbers["top1"] == pytest.approx(one.numbers["top1"], abs=1)  # rounding may move an image or two


def test_only_a_gpu_takes_the_images_of_several_steps_at_once_and_only_small_ones():
    def steps(size, device="cuda"):
        return features.batch_size(size, torch.device(device)) // PAPER.batch_size

    assert (steps(32), steps(64), steps(224), steps(32, "cpu")) == (4, 4, 1, 1)


@pytest.mark.gpu
def test_a_gpu_takes_several_steps_at_once_and_learns_the_same(pretrained, shapes, monkeypatch):
    together = evaluate(pretrained, shapes(300), SHORT, device="cuda")
    monkeypatch.setattr(linear, "batch_size", lambda *_: SHORT.batch_size)
    alone = evaluate(pretrained, shapes(300), SHORT, device="cuda")
    # In bfloat16, whose kernels depend on how many images there are.
    assert together.details["loss_by_epoch"] == pytest.approx(alone.details["loss_by_epoch"], rel=0.02)
    assert together.numbers["top1"] == pytest.approx(alone.numbers["top1"], abs=3)


def test_crops_are_the_same_however_many_pass_the_backbone_at_once(pretrained, shapes, monkeypatch):
    source, views = shapes(300).train, linear._views(pretrained, SOLVED)
    passed, found = [], []
    for count in (64, 300):
        monkeypatch.setattr(features, "batch_size", lambda *_, count=count: count)
        backbone = pretrained.build()
        backbone.register_forward_pre_hook(lambda _, inputs: passed.append(len(inputs[0])))
        (crops,) = features.embed_crops(backbone, source, views, count=1, seed=3, device=torch.device("cpu"))
        found.append(crops.features[crops.images.argsort()])
    assert passed == [64, 64, 64, 64, 44, 300]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_the_quick_solve_agrees_with_sgd_on_the_same_crops(pretrained, shapes):
    data = shapes(600)
    converged = dataclasses.replace(SHORT, epochs=40, milestones=(24, 32))
    by_sgd = evaluate(pretrained, data, converged).numbers["top1"]
    solved = evaluate(pretrained, data, SOLVED).numbers["top1"]
    assert solved == pytest.approx(by_sgd, abs=4)  # of 300 images: one in three such pairs differs by 4 by chance alone


@pytest.mark.parametrize("settings", [SHORT, dataclasses.replace(QUICK, plain=True)], ids=["sgd", "lbfgs"])
def test_the_backbone_is_bit_identical_before_and_after(pretrained, shapes, settings, monkeypatch):
    backbone = pretrained.build().train()  # in training mode, to see that it is not left to chance
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    monkeypatch.setattr(Subject, "build", lambda self, classes=0: backbone)
    evaluate(pretrained, shapes(300), settings)
    after = backbone.state_dict()
    assert any("running_mean" in key for key in after)
    assert any("num_batches_tracked" in key for key in after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_the_learning_rate_drops_where_it_should(pretrained, shapes, monkeypatch):
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            group = self.param_groups[0]
            seen.append((group["lr"], group["momentum"], group["weight_decay"], len(self.param_groups)))
            assert sum(parameter.numel() for parameter in group["params"]) == 128 * 10 + 10  # one linear layer
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "SGD", Watched)
    evaluate(pretrained, shapes(40), dataclasses.replace(PAPER, epochs=5, milestones=(2, 4)))
    rates = [15, 15, 1.5, 1.5, 0.15]  # a step in each epoch: there are fewer images than fit into a batch
    assert [lr for lr, *_ in seen] == pytest.approx(rates)
    assert {rest for _, *rest in map(list, seen) for rest in [tuple(rest)]} == {(0.9, 0, 1)}


def clouds(images, classes, width, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    scales = torch.logspace(-1, 1, width)  # features of very different size
    return (centres[labels] + torch.randn(images, width, generator=generator)) * scales + 3, labels


@pytest.mark.parametrize("strength", [0.3, 0.01, 1e-3])
def test_the_solution_is_scikit_learns(strength):
    features, labels = clouds(400, 5, 12, seed=1)
    features[:, 3] = 7.0  # a constant feature, which tells nothing
    ours = fit(features, labels, 5, strength)
    deviation = features.std(dim=0, correction=0)
    deviation[3] = 1
    standardised = ((features - features.mean(dim=0)) / deviation).numpy()
    theirs = LogisticRegression(C=1 / (strength * len(labels)), tol=1e-8, max_iter=5000).fit(
        standardised, labels.numpy()
    )
    np.testing.assert_allclose(ours.weight.numpy(), theirs.coef_, atol=5e-3)
    expected = theirs.predict_proba(standardised)
    np.testing.assert_allclose(ours(features).softmax(dim=1).numpy(), expected, atol=3e-3)


def test_the_solution_does_not_depend_on_blocks_or_the_start(monkeypatch):
    from co2.evaluation import regression

    features, labels = clouds(200, 4, 6, seed=2)
    whole = fit(features, labels, 4, 0.05)
    monkeypatch.setattr(regression, "_BLOCK_ELEMENTS", 4 * 33)  # rows: 33, ragged at the end
    torch.testing.assert_close(fit(features, labels, 4, 0.05).weight, whole.weight, atol=1e-3, rtol=1e-2)
    far = fit(features, labels, 4, 1e-3)
    torch.testing.assert_close(fit(features, labels, 4, 0.05, start=far).weight, whole.weight, atol=2e-3, rtol=1e-2)


def test_the_scores_of_a_block_are_not_kept_for_a_gradient_that_nobody_asks_for(monkeypatch):
    from co2.evaluation import regression

    features, labels = clouds(200, 4, 6, seed=2)
    monkeypatch.setattr(regression, "_BLOCK_ELEMENTS", 4 * 33)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda shape: shape):
        fit(features, labels, 4, 0.05)
    assert kept == []


def test_the_strength_is_chosen_on_held_out_images():
    # More directions than images: hardly regularised, the noise is learnt by heart.
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 2
    signal = (2.0 * labels - 1)[:, None] * 0.7
    features = torch.cat([signal, torch.zeros(120, 200)], dim=1) + torch.randn(120, 201, generator=generator)
    choice = choose_strength(features[:60], labels[:60], features[60:], labels[60:], 2, (3.0, 1.0, 0.1, 1e-5), 200)
    assert choice.tried[f"{choice.strength:g}"] == max(choice.tried.values())
    assert choice.strength > 1e-5


def test_no_view_of_a_held_out_image_is_learnt_from_until_the_strength_is_chosen(pretrained, shapes, monkeypatch):
    fitted, chosen = [], []

    def choose(features, labels, held_out, *rest):
        chosen.append((features, held_out))
        return choose_strength(features, labels, held_out, *rest)

    def fit_all(features, *rest):
        fitted.append((features, rest[2]))
        return fit(features, *rest)

    monkeypatch.setattr(linear, "choose_strength", choose)
    monkeypatch.setattr(linear, "fit", fit_all)
    settings = dataclasses.replace(SOLVED, crops=1, plain=True, strengths=(1.0, 0.1), held_out=0.2)
    result = evaluate(pretrained, shapes(100), settings)
    [(learnt, held_out)], [(everything, strength)] = chosen, fitted
    assert len(held_out) == pytest.approx(20, abs=5)
    assert (len(learnt), len(everything)) == (3 * (100 - len(held_out)), 300)  # a crop, the whole, its mirror image

    def smallest_distance(some):
        return torch.cdist(held_out.double(), some.double()).amin(dim=1)  # [held out]

    assert smallest_distance(everything).max() < 1e-4  # the whole image itself
    assert smallest_distance(learnt).min() > 1e-2
    assert strength == result.details["strength"]


def test_a_class_of_one_image_can_be_learnt(pretrained, shapes):
    data = shapes(60)
    labels = data.bank.labels
    one_of_the_first_class = [np.flatnonzero(labels == 0)[0], *np.flatnonzero(labels != 0)]
    result = evaluate(pretrained, dataclasses.replace(data, bank=data.bank.subset(one_of_the_first_class)))
    assert result.details["train_images"] == len(one_of_the_first_class)


def test_without_a_held_out_part_a_fifth_is_put_aside(pretrained, shapes):
    data = dataclasses.replace(shapes(100), test=None)
    result = evaluate(pretrained, data)
    assert result.details["held_out_by_seed"] is True
    assert result.details["train_images"] + result.details["test_images"] == 100
    assert result.details["test_images"] == pytest.approx(20, abs=5)  # a fifth of each class, rounded
    split = labelled_split(data, "linear", seed=0)
    shown = {split.train.describe(index) for index in range(len(split.train))}
    assert not shown & {split.test.describe(index) for index in range(len(split.test))}
    assert len(np.unique(split.test_labels)) == 10


def test_the_only_image_of_a_class_is_not_put_aside(pretrained, shapes):
    data = dataclasses.replace(shapes(60), test=None)
    labels = data.bank.labels
    one_of_the_first_class = [np.flatnonzero(labels == 0)[0], *np.flatnonzero(labels != 0)]
    data = dataclasses.replace(data, bank=data.bank.subset(one_of_the_first_class))
    split = labelled_split(data, "linear", seed=0)
    assert (split.train_labels == 0).sum() == 1
    assert set(split.test_labels) == set(range(1, 10))
    assert evaluate(pretrained, data).details["train_images"] == len(split.train)
    one_of_each = data.bank.subset([np.flatnonzero(data.bank.labels == label)[0] for label in range(10)])
    with pytest.raises(co2.UserError, match=r"no class has two\. Add images, or a held-out part"):
        labelled_split(dataclasses.replace(data, bank=one_of_each), "linear", seed=0)


def test_classes_of_several_images_are_divided_as_ever(shapes):
    data = dataclasses.replace(shapes(100), test=None)
    split = labelled_split(data, "linear", seed=3)
    aside = balanced_subset(data.bank.labels, 0.2, seed=3)
    assert [split.test.describe(index) for index in range(len(split.test))] == [data.bank.describe(i) for i in aside]


@pytest.mark.parametrize(
    ("settings", "fate"),
    [
        (dataclasses.replace(SHORT, epochs=3), "replaced by others"),
        (dataclasses.replace(SOLVED, crops=2, plain=True), "replaced by others"),
        (dataclasses.replace(QUICK, crops=0, plain=True), "left out"),
    ],
)
def test_unreadable_images_are_said_once_and_recorded(pretrained, shapes, settings, fate):
    data = shapes(100)
    data = dataclasses.replace(data, bank=Torn(data.bank, {4, 40}), test=Torn(data.test, {3}))
    listener = Listener()
    result = evaluate(pretrained, data, settings, progress=listener)
    in_training, judged = listener.lines
    assert in_training.startswith(f"2 of 100 images could not be read and are {fate}: picture ")
    assert {"picture 4 (torn)", "picture 40 (torn)"} == set(in_training.rstrip(".").split(": ")[1].split(", "))
    assert judged == "1 of 300 images could not be read and are left out: picture 3 (torn)."
    assert result.details["unreadable"] == {f"picture {index}": "torn" for index in (4, 40, 3)}
    assert result.details["test_images"] == 299


def test_a_class_of_one_image_does_not_decide_about_the_strength(pretrained, shapes, monkeypatch):
    judged = []

    def choose(features, labels, held_out, held_out_labels, *rest):
        judged.append((len(features), held_out_labels.tolist()))
        return choose_strength(features, labels, held_out, held_out_labels, *rest)

    monkeypatch.setattr(linear, "choose_strength", choose)
    data = shapes(100)
    few = data.bank.subset([*np.flatnonzero(data.bank.labels != 3), np.flatnonzero(data.bank.labels == 3)[0]])
    evaluate(pretrained, dataclasses.replace(data, bank=few), dataclasses.replace(SOLVED, crops=1))
    [(learnt, held_out)] = judged
    assert set(held_out) == set(range(10)) - {3}
    assert learnt == len(few) - len(held_out)  # the only image of its class among them


def test_images_that_cannot_be_read_are_not_held_out_for_the_strength(pretrained, shapes):
    data = shapes(20)
    torn = set(balanced_subset(data.bank.labels, SOLVED.held_out, seed=0).tolist())
    evaluate(pretrained, dataclasses.replace(data, bank=Torn(data.bank, torn)), dataclasses.replace(SOLVED, crops=1))


def test_balanced_subsets():
    labels = np.repeat(np.arange(5), [1000, 200, 30, 1, 0][:5])
    chosen = balanced_subset(labels, 0.01, seed=3)
    assert np.bincount(labels[chosen]).tolist() == [10, 2, 1, 1]  # at least one of each that there is
    assert np.array_equal(chosen, balanced_subset(labels, 0.01, seed=3))
    assert not np.array_equal(chosen, balanced_subset(labels, 0.01, seed=4))
    assert set(chosen) <= set(balanced_subset(labels, 0.1, seed=3))
    assert np.array_equal(balanced_subset(labels, 1.0, seed=0), np.arange(len(labels)))


def test_accuracies_by_hand():
    ranked = np.array([[0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [5, 4, 3, 2, 1], [1, 2, 3, 4, 5]])
    assert accuracies(ranked, np.array([0, 0, 0, 2])) == {"top1": 25.0, "top5": 75.0}


def test_a_hopeless_learning_rate_is_told_plainly(pretrained, shapes):
    with pytest.raises(co2.UserError, match=r"diverged.*lower --learning-rate"):
        evaluate(pretrained, shapes(300), dataclasses.replace(SHORT, learning_rate=1e38))


def test_bad_data_is_told_plainly(pretrained, shapes, tmp_path):
    data = shapes(20)
    with pytest.raises(co2.UserError, match=r"linear needs labels.*train/CLASS"):
        evaluate(pretrained, dataclasses.replace(data, bank=None))
    for part in ("train", "val"):
        (tmp_path / part / "ants").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / part / "ants" / "1.png")
    with pytest.raises(co2.UserError, match=r"two classes at least, and '.*/train' has a single sub-folder.*'ants'"):
        evaluate(pretrained, open_data(str(tmp_path)))
    of_one = np.flatnonzero(data.bank.labels == 2)
    with pytest.raises(co2.UserError, match="single class"):
        evaluate(pretrained, dataclasses.replace(data, bank=data.bank.subset(of_one), test=None))
    not_nine = np.flatnonzero(data.bank.labels != 9)
    with pytest.raises(co2.UserError, match=rf"held-out images of '{data.bank.classes[9]}', but none to learn from"):
        evaluate(pretrained, dataclasses.replace(data, bank=data.bank.subset(not_nine)))
    with pytest.raises(co2.UserError, match="held_out"):
        linear.LinearSettings(held_out=1.5)
    with pytest.raises(co2.UserError, match="nothing is left to train on"):
        linear.LinearSettings(crops=0)


def test_features_of_wide_images_are_those_of_their_centre(pretrained):
    # At evaluation an image is resized and its centre cut out: what is left and right of it must not matter.
    pixels = np.random.default_rng(0).integers(0, 255, (2, 3, 32, 96), dtype=np.uint8)
    pixels[1, :, :, 32:64] = pixels[0, :, :, 32:64]
    features = embed(pretrained.build(), ArraySource("wide", pixels), pretrained.views).features
    torch.testing.assert_close(features[0], features[1])
