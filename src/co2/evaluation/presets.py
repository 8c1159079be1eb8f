"""Every protocol by its name, with its two sets of settings. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple, get_args

from co2.errors import UserError, did_you_mean
from co2.evaluation import specification as plain
from co2.evaluation.voc import specification as spatial

AFTER_STEPS = "after_steps"
"""Among the details of an evaluation: how long a run had trained what was judged, where it was a checkpoint."""
ALL = "all"
Preset = Literal["quick", "paper"]
MOCO_V1, MOCO_V2 = "moco-v1", "moco-v2"
_LIKE_MOCO_V1 = (MOCO_V1, "co2-v1", "moco-label-smoothing")  # recipes


class Protocol(NamedTuple):
    """A way to judge a backbone."""

    summary: str
    module: str  # of co2.evaluation, with `evaluate` in it
    paper: Any
    quick: Any
    needs_voc: bool = False
    nothing_random: bool = False
    trains_backbone: bool = False
    """Without the head that it was pre-trained with, so that there are no embeddings to judge."""
    seeds: int = 2**63
    """How many there are to choose from."""


PROTOCOLS: dict[str, Protocol] = {
    "knn": Protocol(
        "nearest neighbours vote; nothing is trained", "knn", plain.KNN_PAPER, plain.KNN_QUICK, nothing_random=True
    ),
    "linear": Protocol("one linear layer on the frozen backbone", "linear", plain.LINEAR_PAPER, plain.LINEAR_QUICK),
    "semi-supervised": Protocol(
        "the whole network, fine-tuned on 1% and 10% of the labels",
        "semi_supervised",
        plain.SEMI_SUPERVISED_PAPER,
        plain.SEMI_SUPERVISED_QUICK,
        trains_backbone=True,
    ),
    "svm": Protocol(
        "VOC classification by linear SVMs",
        "voc.svm",
        plain.SVM_PAPER,
        plain.SVM_QUICK,
        needs_voc=True,
        seeds=2**32,  # of scikit-learn
    ),
    "detection": Protocol(
        "VOC detection by Faster R-CNN, fine-tuned",
        "voc.detection",
        spatial.DETECTION_PAPER,
        spatial.DETECTION_QUICK,
        needs_voc=True,
        trains_backbone=True,
    ),
    "segmentation": Protocol(
        "VOC segmentation by an FCN, fine-tuned",
        "voc.segmentation",
        spatial.SEGMENTATION_PAPER,
        spatial.SEGMENTATION_QUICK,
        needs_voc=True,
        trains_backbone=True,
    ),
    "label-free": Protocol(
        "what can be said without any label", "label_free", plain.LABEL_FREE_PAPER, plain.LABEL_FREE_QUICK
    ),
}


def protocol_called(name: str) -> Protocol:
    """The protocol, or what is wrong with its name."""
    if name not in PROTOCOLS:
        raise UserError(
            f"There is no protocol '{name}'.{did_you_mean(name, [*PROTOCOLS, ALL])} There are "
            f"{', '.join(PROTOCOLS)}, and all of them: {ALL}."
        )
    return PROTOCOLS[name]


def settings_of(protocol: str, preset: Preset, recipe: str = "") -> Any:
    """The settings of a protocol: the paper's, or quick ones. The paper has some that depend on how the backbone was
    pre-trained: `recipe`, where that is known."""
    found = protocol_called(protocol)
    if preset not in get_args(Preset):
        raise UserError(
            f"There are no settings '{preset}'.{did_you_mean(str(preset), get_args(Preset))} Use quick or paper."
        )
    if preset == "quick":
        return found.quick
    if protocol == "semi-supervised" and recipe in _LIKE_MOCO_V1:
        return plain.SEMI_SUPERVISED_PAPER_V1
    return found.paper


def check_given(protocol: str, settings: plain.ProtocolSettings, given: Collection[str]) -> None:
    """Refuse settings that the user gave, by name, though nothing looks at them."""
    for names, why in settings.idle():
        options = " and ".join(f"--{name.replace('_', '-')}" for name in names if name in given)
        if options:
            raise UserError(f"{protocol}: {options} would do nothing {why}")
