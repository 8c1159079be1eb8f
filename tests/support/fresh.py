"""Networks as a run begins with them, without a run."""

import torch

from co2.networks.backbones import build_backbone
from co2.networks.batch_statistics import group_batch_statistics
from co2.networks.heads import head
from co2.networks.parts import Parts


def build_encoder(
    kind="linear", dimension=128, hidden=None, backbone="co2/resnet10-narrow", stem="standard", size=32, groups=1
):
    """An encoder with fresh weights, in training mode, whose BatchNorm layers work in groups."""
    parts = Parts(lambda: build_backbone(backbone, stem, size), 10, None, torch.Generator())
    encoder = parts.encoder(head(kind, dimension, hidden))
    group_batch_statistics(encoder, groups)
    return encoder


def encoder_of(experiment):
    """That of an experiment of a method with one head."""
    method, network = experiment.method, experiment.network
    return build_encoder(
        method.head, method.dimension, method.hidden, network.backbone, network.stem, experiment.size, network.groups
    )
