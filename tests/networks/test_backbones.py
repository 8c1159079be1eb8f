"""Every torchvision model is a backbone, and its state dict is the plain model's without the classifier."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import regnet
from torchvision.models.resnet import BasicBlock, ResNet

from co2.errors import UserError
from co2.networks import backbones
from co2.networks.backbones import build_backbone, feature_width, torchvision_names

ONE_OF_EACH_FAMILY = [
    ("torchvision/alexnet", 4096),
    ("torchvision/convnext_tiny", 768),
    ("torchvision/densenet121", 1024),
    ("torchvision/efficientnet_b0", 1280),
    ("torchvision/googlenet", 1024),
    ("torchvision/inception_v3", 2048),
    ("torchvision/maxvit_t", 512),
    ("torchvision/mnasnet0_5", 1280),
    ("torchvision/mobilenet_v2", 1280),
    ("torchvision/mobilenet_v3_small", 1024),
    ("torchvision/regnet_x_400mf", 400),
    ("torchvision/resnet50", 2048),
    ("torchvision/shufflenet_v2_x0_5", 1024),
    ("torchvision/squeezenet1_1", 512),
    ("torchvision/swin_t", 768),
    ("torchvision/swin_v2_t", 768),
    ("torchvision/vgg11_bn", 4096),
    ("torchvision/vit_b_32", 768),
    ("timm/test_resnet", 96),
    ("timm/test_efficientnet", 256),
    ("timm/convnext_atto", 320),
    ("timm/vit_tiny_patch16_224", 192),
    ("timm/resnet18.a1_in1k", 512),
    ("co2/resnet10-narrow", 128),
]


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models take no memory and no time to initialise: shapes only."""
    widths_of_a_regnet = regnet.BlockParams.from_init_params

    def computed_on_the_cpu(*arguments: object, **options: object) -> object:
        with torch.device("cpu"):
            return widths_of_a_regnet(*arguments, **options)

    monkeypatch.setattr(regnet.BlockParams, "from_init_params", computed_on_the_cpu)
    with torch.device("meta"):
        yield


def plain(name: str, classes: int = 1000) -> nn.Module:
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, weights=None, num_classes=classes, **options)


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("name", torchvision_names())
def test_state_dict_is_the_plain_models_without_its_classifier(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "check_view_size", lambda *_: None)  # `test_one_of_each_family_runs` has it
    ours = {key: value.shape for key, value in build_backbone(f"torchvision/{name}").state_dict().items()}
    theirs = {key: value.shape for key, value in plain(name).state_dict().items()}
    only_theirs = {key: shape for key, shape in theirs.items() if key not in ours}

    assert {key: theirs.get(key) for key in ours} == ours
    assert all(shape[0] == 1000 for shape in only_theirs.values())  # a classifier's weight and bias
    assert {key.rpartition(".")[2] for key in only_theirs} in ({"weight", "bias"}, {"weight"})
    assert len({key.rpartition(".")[0] for key in only_theirs}) == 1


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize(("name", "width"), ONE_OF_EACH_FAMILY)
def test_one_of_each_family_runs(name: str, width: int) -> None:
    backbone = build_backbone(name)
    images = torch.empty(2, 3, 224, 224)
    assert feature_width(backbone) == width
    assert backbone.training
    assert backbone(images).shape == (2, width)


@pytest.mark.slow
@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("name", torchvision_names())
def test_every_torchvision_model_runs(name: str) -> None:
    backbone = build_backbone(f"torchvision/{name}")
    assert backbone(torch.empty(2, 3, 224, 224)).shape == (2, feature_width(backbone))


@pytest.mark.parametrize("name", ["torchvision/resnet18", "torchvision/mobilenet_v3_small", "timm/test_efficientnet"])
def test_features_are_what_the_plain_models_classifier_sees(name: str) -> None:
    backbone, classifying = (
        build_backbone(name, view_size=64).eval(),
        build_backbone(name, view_size=64, classes=7).eval(),
    )
    missing, unexpected = classifying.load_state_dict(backbone.state_dict(), strict=False)
    assert unexpected == []
    assert {key.rpartition(".")[2] for key in missing} == {"weight", "bias"}

    images = torch.randn(2, 3, 64, 64)
    classifier = classifying.get_submodule(missing[0].rpartition(".")[0])
    torch.testing.assert_close(classifier(backbone(images)), classifying(images))
    assert classifying(images).shape == (2, 7)


@pytest.mark.parametrize("name", ["torchvision/squeezenet1_1", "torchvision/alexnet", "torchvision/mobilenet_v2"])
def test_no_dropout_stands_between_features_and_head(name: str) -> None:
    backbone = build_backbone(name, view_size=64)
    last_two = list(backbone.classifier)[-2:]
    assert not any(isinstance(module, nn.Dropout) for module in last_two)
    if name == "torchvision/squeezenet1_1":
        assert not any(isinstance(module, nn.Dropout) for module in backbone.modules())


def test_narrow_resnet_is_named_as_torchvisions() -> None:
    theirs = ResNet(BasicBlock, [1, 1, 1, 1])
    with_classifier = build_backbone("co2/resnet10-narrow", classes=10)
    assert list(with_classifier.state_dict()) == list(theirs.state_dict())
    without = build_backbone("co2/resnet10-narrow")
    assert set(theirs.state_dict()) - set(without.state_dict()) == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/resnet18", "timm/test_resnet", "co2/resnet10-narrow"])
@pytest.mark.parametrize(
    ("stem", "view_size", "stride"),
    [("small", 32, 1), ("small", 40, 1), ("small", 64, 2), ("small-stride-1", 64, 1), ("small-stride-2", 32, 2)],
)
def test_small_stems(name: str, stem: backbones.Stem, view_size: int, stride: int) -> None:
    with torch.device("meta"):
        backbone = build_backbone(name, stem, view_size)
        sizes: list[torch.Size] = []
        backbone.layer1.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[-2:]))
        features = backbone(torch.empty(2, 3, view_size, view_size))
    kernels = [module.kernel_size for module in backbone.modules() if isinstance(module, nn.Conv2d)]
    assert kernels[0] == (3, 3)
    assert sizes == [(view_size // stride, view_size // stride)]
    assert features.shape == (2, feature_width(backbone))


@contextmanager
def complaint(*words: str) -> Iterator[None]:
    with pytest.raises(UserError) as raised:
        yield
    for word in words:
        assert word in str(raised.value)


def test_clear_words_about_names() -> None:
    with complaint("torchvision/resnt50", "Did you mean 'torchvision/resnet50'?"):
        build_backbone("torchvision/resnt50")
    with complaint("resnet50", "Did you mean 'torchvision/resnet50'?"):
        build_backbone("resnet50")
    with complaint("co2/resnet10-narow", "Did you mean 'co2/resnet10-narrow'?"):
        build_backbone("co2/resnet10-narow")
    with complaint("convnext_tinny", "Did you mean 'convnext_tiny'?"):
        build_backbone("timm/convnext_tinny")


def test_clear_words_where_timm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with complaint("pip install 'consistent-contrast[timm]'"):
        build_backbone("timm/convnext_tiny")


def test_clear_words_about_stems_and_views() -> None:
    with complaint("'small' stem is for ResNets", "torchvision/mobilenet_v2"):
        build_backbone("torchvision/mobilenet_v2", "small", 32)
    with complaint("stem is for ResNets", "timm/test_efficientnet"):
        build_backbone("timm/test_efficientnet", "small-stride-1", 32)
    for name, size in [("torchvision/alexnet", 32), ("torchvision/vit_b_16", 100), ("torchvision/maxvit_t", 100)]:
        with torch.device("meta"), complaint(name, f"{size} x {size} pixels"):
            build_backbone(name, view_size=size)


def test_transformers_take_other_view_sizes() -> None:
    for name in ("torchvision/vit_b_16", "timm/vit_tiny_patch16_224", "torchvision/swin_t"):
        with torch.device("meta"):
            backbone = build_backbone(name, view_size=96)
            assert backbone(torch.empty(2, 3, 96, 96)).shape == (2, feature_width(backbone))


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("A connection was attempted.")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    build_backbone("torchvision/mobilenet_v3_small")
    build_backbone("timm/test_resnet.r160_in1k")


def test_the_check_of_the_view_size_leaves_the_model_as_it_was() -> None:
    backbone = build_backbone("co2/resnet10-narrow", view_size=32)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.num_batches_tracked == 0
            assert torch.equal(module.running_mean, torch.zeros_like(module.running_mean))
    assert all(type(parameter) is nn.Parameter for parameter in backbone.parameters())
