"""The settings of each protocol as plain data, and two values of each: the paper's, and a quick one.

The paper's are from the appendix of Wei et al. 2021 ("Implementation Details of Downstream Tasks"); what it leaves open
is as in the work that it follows, and said so. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from co2.errors import UserError
from co2.schema import RANGES


def check(protocol: str, settings: Any, wanted: str, *names: str) -> None:
    """Refuse settings that are not in the range `wanted`, by name. Of a tuple, every number must be, and be there."""
    for name in names:
        value = getattr(settings, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or not all(RANGES[wanted](number) for number in numbers):
            shown = " ".join(map(str, numbers)) or "nothing"
            raise UserError(f"{protocol}: {name} must be {wanted}; got {shown}.")


def check_sgd(protocol: str, settings: Any) -> None:
    """What every training by stochastic gradient descent needs."""
    check(protocol, settings, "above 0", "learning_rate")
    check(protocol, settings, "from 0 to below 1", "momentum")
    check(protocol, settings, "at least 0", "weight_decay", "decay")
    if settings.milestones:
        check(protocol, settings, "at least 0", "milestones")


def check_crop_scale(protocol: str, settings: Any) -> None:
    """What random crops need."""
    check(protocol, settings, "above 0 and at most 1", "crop_scale")
    smallest, largest = settings.crop_scale
    if smallest > largest:
        raise UserError(f"{protocol}: crop_scale must be the smaller share first; got {smallest} {largest}.")


class Idle(NamedTuple):
    """Settings that nothing looks at, as the others are."""

    names: tuple[str, ...]
    why: str
    """How a sentence ends that begins with "--ks would do nothing", and what to do about it."""


class ProtocolSettings:
    """What a protocol can be told."""

    def idle(self) -> tuple[Idle, ...]:
        """What has no effect, because other settings make it so."""
        return ()


@dataclass(frozen=True)
class KnnSettings(ProtocolSettings):
    """k nearest neighbours by cosine, each voting with exp(similarity / temperature) (Wu et al. 2018)."""

    k: int = 200
    """Neighbours that vote; fewer in sets with fewer than 2k images per class, where others would outvote them."""
    temperature: float = 0.1
    """The smaller, the more the nearest count."""
    best_k: bool = False
    """Find the best k of `ks` by leaving out one image at a time of the bank, and report the accuracy with that."""
    ks: tuple[int, ...] = (1, 5, 10, 20, 50, 100, 200)
    """Which k are tried for best_k; the record has the accuracy of each."""
    bank_images: int = 0
    """Labelled images to look neighbours up in, evenly spread over the data; 0 for all."""
    query_images: int = 0
    """Held-out images to classify, evenly spread; 0 for all."""
    storage: str = ""
    """Folder for a file of features, mapped into memory: for features that are larger than it."""

    def __post_init__(self) -> None:
        check("knn", self, "at least 1", "k", "ks")
        check("knn", self, "above 0", "temperature")
        check("knn", self, "at least 0", "bank_images", "query_images")

    def idle(self) -> tuple[Idle, ...]:
        if self.best_k:
            return (Idle(("k",), "with --best-k, which chooses among --ks. Leave one of them out."),)
        return (Idle(("ks",), "without --best-k, which chooses among them. Give it too, or one --k."),)


@dataclass(frozen=True)
class LinearSettings(ProtocolSettings):
    """One linear layer on the pooled features of a frozen backbone."""

    solver: Literal["sgd", "lbfgs"] = "sgd"
    """sgd: on random crops, as in the paper. lbfgs: the features of a few views of each image, computed once, and a
    regularised logistic regression solved to the optimum, in seconds."""
    epochs: int = 100
    """sgd: how often every image is seen."""
    learning_rate: float = 15.0
    """sgd: at the beginning. As large as this for MoCo's features, which are small; try 0.1 for supervised ones."""
    milestones: tuple[int, ...] = (60, 80)
    """sgd: epochs after which the learning rate drops."""
    decay: float = 0.1
    """sgd: by which factor it drops."""
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 256
    """sgd: images in a step; all of them where there are fewer."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Share of the area that a random crop covers, as for supervised training on ImageNet."""
    flips: bool = True
    """Mirror every second view."""
    crops: int = 4
    """lbfgs: train on so many random crops of every image. More are slower, and closer to sgd, which sees others in
    every epoch."""
    plain: bool = False
    """lbfgs: train on every whole image too, and with flips on its mirror image. With crops = 0 that is the best that
    can be read off the features, often some points above what sgd finds on random crops."""
    strengths: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
    """lbfgs: strengths of the L2 regularisation to choose from, relative to the mean loss on standardised features."""
    held_out: float = 0.1
    """lbfgs: share of the training images on which the strength is chosen."""
    iterations: int = 200
    """lbfgs: at most, for each strength."""

    def __post_init__(self) -> None:
        check("linear", self, "at least 1", "epochs", "iterations")
        check("linear", self, "at least 2", "batch_size")
        check("linear", self, "at least 0", "crops")
        check_sgd("linear", self)
        check_crop_scale("linear", self)
        if not self.crops and not self.plain:
            raise UserError("linear: nothing is left to train on. Give --crops 4, or --plain.")
        check("linear", self, "between 0 and 1", "held_out")
        check("linear", self, "above 0", "strengths")

    def idle(self) -> tuple[Idle, ...]:
        if self.solver == "sgd":
            only_lbfgs = ("crops", "plain", "strengths", "held_out", "iterations")
            return (Idle(only_lbfgs, "with --solver sgd, the paper's. Give --solver lbfgs too, or --protocol quick."),)
        only_sgd = ("epochs", "learning_rate", "milestones", "decay", "momentum", "weight_decay", "batch_size")
        why = "with --solver lbfgs, the quick preset's. Give --solver sgd too, or --protocol paper."
        no_crops = Idle(("crop_scale",), "with --crops 0. Give another number of crops.")
        return (Idle(only_sgd, why), *([] if self.crops else [no_crops]))


@dataclass(frozen=True)
class SemiSupervisedSettings(ProtocolSettings):
    """The whole network, fine-tuned on few labels."""

    fractions: tuple[float, ...] = (0.01, 0.1)
    """Shares of the training images, balanced over classes, whose labels are used; one network is tuned for each."""
    epochs: int = 20
    learning_rate: float = 0.01
    """Of the backbone, at the beginning."""
    head_learning_rate: float = 1.0
    """Of the new classifier."""
    milestones: tuple[int, ...] = (12, 16)
    """Epochs after which both learning rates drop."""
    decay: float = 0.2
    """By which factor they drop."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    """1e-4 for MoCo v2 and its like, 5e-4 for MoCo v1 and its like."""
    batch_size: int = 256
    """All images of the subset where there are fewer."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Share of the area that a random crop covers, as for supervised training on ImageNet."""
    baseline: bool = False
    """Also train the same architecture from scratch on the same labels."""
    baseline_epochs: int = 100
    """Training from scratch takes longer; the paper does not say how long. Milestones scale with it."""
    baseline_learning_rate: float = 0.1
    """Of the whole network, from scratch."""

    def __post_init__(self) -> None:
        check("semi-supervised", self, "above 0 and at most 1", "fractions")
        check("semi-supervised", self, "at least 1", "epochs", "baseline_epochs")
        check("semi-supervised", self, "at least 2", "batch_size")
        check_sgd("semi-supervised", self)
        check_crop_scale("semi-supervised", self)
        check("semi-supervised", self, "above 0", "head_learning_rate", "baseline_learning_rate")

    def idle(self) -> tuple[Idle, ...]:
        names = ("baseline_epochs", "baseline_learning_rate")
        return () if self.baseline else (Idle(names, "without --baseline. Give it too."),)


@dataclass(frozen=True)
class SvmSettings(ProtocolSettings):
    """A linear support vector machine for each class of PASCAL VOC, on pooled features (Goyal et al. 2019)."""

    train: str = "trainval2007"
    """Split to learn from: a list in ImageSets/Main and its year; trainval07+12 joins two."""
    test: str = "test2007"
    """Split to be judged on."""
    costs: tuple[float, ...] = tuple(2.0**power for power in range(-10, 5))
    """Costs C to choose from, for each class, by average precision on the held-out part of the training set."""
    held_out: float = 0.25
    """Share of the training images on which the cost is chosen; the machine is then trained on all."""
    positive_weight: float = 2.0
    """How much an image with the class weighs against one without it."""
    iterations: int = 2000
    """Of liblinear, at most."""

    def __post_init__(self) -> None:
        check("svm", self, "above 0", "costs", "positive_weight")
        check("svm", self, "between 0 and 1", "held_out")
        check("svm", self, "at least 1", "iterations")

    def idle(self) -> tuple[Idle, ...]:
        why = "with a single cost, which needs no choosing. Give several --costs."
        return (Idle(("held_out",), why),) if len(self.costs) == 1 else ()


@dataclass(frozen=True)
class LabelFreeSettings(ProtocolSettings):
    """What can be said of a backbone without any label."""

    images: int = 10_000
    """How many are looked at, evenly spread over the training images."""
    k: int = 20
    """Nearest neighbours on which two views should agree."""

    def __post_init__(self) -> None:
        check("label-free", self, "at least 3", "images")  # fewer have no neighbours to agree on
        check("label-free", self, "at least 1", "k")


KNN_PAPER = KnnSettings()
KNN_QUICK = KnnSettings(bank_images=50_000, query_images=10_000)

LINEAR_PAPER = LinearSettings()
LINEAR_QUICK = LinearSettings(solver="lbfgs")

SEMI_SUPERVISED_PAPER = SemiSupervisedSettings(baseline=True)  # whose rows stand in its table, too
SEMI_SUPERVISED_PAPER_V1 = replace(SEMI_SUPERVISED_PAPER, weight_decay=5e-4)
# Small images lose too much in crops of 8% of their area, and small sets have too few steps in batches of 256. The
# learning rates are a quarter of the paper's, as the batches are: larger steps make 5 images of a class forget more of
# the pre-training than they teach.
SEMI_SUPERVISED_QUICK = SemiSupervisedSettings(
    epochs=40,
    milestones=(24, 32),
    learning_rate=0.0025,
    head_learning_rate=0.25,
    batch_size=64,
    crop_scale=(0.2, 1.0),
    baseline_epochs=80,
)

SVM_PAPER = SvmSettings()
SVM_QUICK = SvmSettings(train="train2012", test="val2012", costs=(0.05, 0.2, 0.8, 3.0, 12.0))

LABEL_FREE_PAPER = LabelFreeSettings()
LABEL_FREE_QUICK = LabelFreeSettings(images=4096)
