"""Every protocol by its name, with its two sets of settings. Nothing here imports torch."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from co2.errors import UserError, did_you_mean
from co2.evaluation import spatial_specification as spatial
from co2.evaluation import specification as plain

Preset = Literal["quick", "paper"]


class Protocol(NamedTuple):
    """A way to judge a backbone."""

    summary: str
    module: str  # of co2.evaluation, with `evaluate` in it
    paper: Any
    quick: Any
    needs_voc: bool = False
    nothing_random: bool = False


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
    ),
    "svm": Protocol("VOC classification by linear SVMs", "svm", plain.SVM_PAPER, plain.SVM_QUICK, needs_voc=True),
    "detection": Protocol(
        "VOC detection by Faster R-CNN, fine-tuned",
        "detection",
        spatial.DETECTION_PAPER,
        spatial.DETECTION_QUICK,
        needs_voc=True,
    ),
    "segmentation": Protocol(
        "VOC segmentation by an FCN, fine-tuned",
        "segmentation",
        spatial.SEGMENTATION_PAPER,
        spatial.SEGMENTATION_QUICK,
        needs_voc=True,
    ),
    "label-free": Protocol(
        "what can be said without any label", "label_free", plain.LABEL_FREE_PAPER, plain.LABEL_FREE_QUICK
    ),
}


def protocol_called(name: str) -> Protocol:
    """The protocol, or what is wrong with its name."""
    if name not in PROTOCOLS:
        raise UserError(
            f"There is no protocol '{name}'.{did_you_mean(name, [*PROTOCOLS, 'all'])} There are "
            f"{', '.join(PROTOCOLS)}, and all of them: all."
        )
    return PROTOCOLS[name]


def settings_of(protocol: str, preset: Preset) -> Any:
    """The settings of a protocol: the paper's, or quick ones."""
    found = protocol_called(protocol)
    return found.paper if preset == "paper" else found.quick
