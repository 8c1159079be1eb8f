"""Residual networks whose normalisation, addition and ReLU are one operation each: a third of the memory traffic.

The modules stay torchvision's, with the same names, parameters and results; only the order of calls in `forward` is
written out here, so that a layer and what follows it can be handed over together.
"""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from co2.networks.backbones import NarrowResNet
from co2.networks.batch_statistics import kernels_run_on, normalise_add_relu


def fuse_residual_blocks(module: nn.Module) -> None:
    """Let every torchvision ResNet inside `module` normalise, add and rectify in one go. In place; others stay."""
    for part in module.modules():
        if type(part) in _FUSED:
            part.__class__ = _FUSED[type(part)]


class FusedBasicBlock(BasicBlock):
    """Two 3x3 convolutions and a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = normalise_add_relu(self.bn1, self.conv1(x))
        return normalise_add_relu(self.bn2, self.conv2(x), shortcut)


class FusedBottleneck(Bottleneck):
    """A 3x3 convolution between two 1x1 convolutions, and a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = normalise_add_relu(self.bn1, self.conv1(x))
        x = normalise_add_relu(self.bn2, self.conv2(x))
        return normalise_add_relu(self.bn3, self.conv3(x), shortcut)


class _FusedStem(ResNet):
    def _forward_impl(self, x: Tensor) -> Tensor:
        x = _pool(self.maxpool, normalise_add_relu(self.bn1, self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        pooled: Tensor = self.fc(self.avgpool(x).flatten(1))
        return pooled  # [N, F]


def _pool(layer: nn.Module, x: Tensor) -> Tensor:
    known = isinstance(layer, nn.MaxPool2d) and layer.kernel_size == 3 and layer.stride == 2 and layer.padding == 1
    if known and kernels_run_on(x):
        from co2.kernels.pooling import max_pool

        return max_pool(x)
    pooled: Tensor = layer(x)
    return pooled


class FusedResNet(_FusedStem):
    """torchvision's ResNet."""


class FusedNarrowResNet(_FusedStem, NarrowResNet):
    """The small one for CPUs."""


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    BasicBlock: FusedBasicBlock,
    Bottleneck: FusedBottleneck,
    ResNet: FusedResNet,
    NarrowResNet: FusedNarrowResNet,
}
