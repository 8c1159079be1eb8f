"""Backbones by name: the plain torchvision or timm model, with or without its classifier.

Weights are always fresh: pre-training starts from nothing, and nothing is ever downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torchvision.models.resnet import BasicBlock, ResNet

from co2.errors import UserError, did_you_mean
from co2.networks.settings import Stem

NARROW_RESNET = "co2/resnet10-narrow"


class PooledFeatures(nn.Identity):
    """Stands where the classifier was, so that the model returns what the classifier would have seen: [N, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class NarrowResNet(ResNet):
    """A ResNet of four basic blocks that pre-trains in minutes on a CPU.

    On small images it has a thirtieth of ResNet-18's arithmetic. Its state dict is named as a torchvision ResNet's.
    (The parent's `__init__` is passed over: it fixes the widths.)
    """

    def __init__(self, widths: tuple[int, int, int, int] = (16, 32, 64, 128), num_classes: int = 1000) -> None:
        nn.Module.__init__(self)
        self.conv1 = nn.Conv2d(3, widths[0], kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(widths[0], widths[0]))
        self.layer2 = self._halving_layer(widths[0], widths[1])
        self.layer3 = self._halving_layer(widths[1], widths[2])
        self.layer4 = self._halving_layer(widths[2], widths[3])
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(widths[3], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _halving_layer(inputs: int, outputs: int) -> nn.Sequential:
        shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel_size=1, stride=2, bias=False), nn.BatchNorm2d(outputs)
        )
        return nn.Sequential(BasicBlock(inputs, outputs, stride=2, downsample=shortcut))


def build_backbone(name: str, stem: Stem = "standard", view_size: int = 224, classes: int = 0) -> nn.Module:
    """The model called `name` with fresh weights.

    With `classes=0` it returns pooled features [N, feature_width(model)], and its state dict is the plain model's
    without the classifier's entries. With `classes=C` it is the plain model with a classifier of C classes.
    """
    library, _, model_name = name.partition("/")
    if library == "timm":
        model = _timm_model(model_name, view_size, classes)
    elif library == "torchvision" and model_name in torchvision_names():
        model = _torchvision_model(model_name, view_size, classes)
    elif name == NARROW_RESNET:
        model = NarrowResNet(num_classes=classes or 1)
        if classes == 0:
            _remove_classifier(model)
    else:
        known = [f"torchvision/{known_name}" for known_name in torchvision_names()] + [NARROW_RESNET]
        guess = name if model_name else f"torchvision/{name}"
        raise UserError(
            f"There is no backbone called '{name}'.{did_you_mean(guess, known)}"
            f" Give torchvision/NAME, timm/NAME or {NARROW_RESNET}."
        )
    if stem != "standard":
        _fit_small_stem(model, name, stem, view_size)
    check_view_size(model, name, view_size)
    return model


def outline(name: str, stem: Stem = "standard", view_size: int = 224) -> nn.Module:
    """The model that `build_backbone` builds, of names and shapes alone, on PyTorch's meta device.

    It takes no memory for weights or images, whatever the name and the size are: these may come out of a file, and the
    weights beside them be others.
    """
    with torch.device("meta"), _NumbersOnCpu(name.startswith("torchvision/regnet")):
        return build_backbone(name, stem, view_size)


class _NumbersOnCpu(TorchFunctionMode):
    """Where models are built without memory: the few numbers that some of them compute their layers from are there."""

    def __init__(self, of_regnet: bool) -> None:
        super().__init__()
        self.functions = (torch.linspace, torch.arange, torch.tensor) if of_regnet else (torch.linspace,)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function in self.functions and options.get("device") is None:
            options = options | {"device": "cpu"}
        return function(*args, **options)


def feature_width(backbone: nn.Module) -> int:
    """How many numbers a backbone built with `classes=0` returns for an image."""
    for module in backbone.modules():
        if isinstance(module, PooledFeatures):
            return module.width
    return int(backbone.head_hidden_size)  # type: ignore[arg-type]  # every timm model has it


def torchvision_names() -> list[str]:
    """Every classification model of torchvision."""
    return list(torchvision.models.list_models(module=torchvision.models))


class UnsuitableViewSizeError(UserError):
    """A backbone does not take views of the size asked for."""

    def __init__(self, backbone: str, view_size: int, error: BaseException, setting: str = "--size") -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        super().__init__(
            f"The backbone '{backbone}' does not take views of {view_size} x {view_size} pixels ({reason}). "
            f"Choose another {setting} (224 suits most models), or a ResNet, which takes any."
        )
        self._known = (backbone, view_size, error)

    def by(self, setting: str) -> UnsuitableViewSizeError:
        """The same for a command in which another setting says the size."""
        return UnsuitableViewSizeError(*self._known, setting)


def _torchvision_model(name: str, view_size: int, classes: int) -> nn.Module:
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # The auxiliary classifiers return tuples in training mode; init_weights is today's default, spelt out
        # because torchvision warns otherwise.
        options = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": view_size}
    elif name.startswith("maxvit"):
        options = {"input_size": (view_size, view_size)}
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes or 1, **options)
    except (AssertionError, ValueError) as error:
        raise UnsuitableViewSizeError(f"torchvision/{name}", view_size, error) from error
    if classes == 0:
        _remove_classifier(model)
    return model


def _remove_classifier(model: nn.Module) -> None:
    """Put `PooledFeatures` in the place of a torchvision model's classifier, and drop the dropout that feeds it."""
    # In every torchvision classification model the classifier is the layer with weights that is registered last.
    path, classifier = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]
    if isinstance(classifier, nn.Linear):
        width = classifier.in_features
    else:
        width = classifier.in_channels  # SqueezeNet classifies each position and then pools
    parent_path, _, own_name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    siblings = list(parent.named_children())
    position = [sibling_name for sibling_name, _ in siblings].index(own_name)
    if position > 0 and isinstance(siblings[position - 1][1], nn.Dropout):
        setattr(parent, siblings[position - 1][0], nn.Identity())
    setattr(parent, own_name, PooledFeatures(width))


def _timm_model(name: str, view_size: int, classes: int) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise UserError(
            f"The backbone 'timm/{name}' needs timm, which is not installed. Install it with: "
            "pip install 'consistent-contrast[timm]'"
        ) from error
    architecture, _, weights = name.partition(".")
    known = timm.models.is_model(architecture)
    if not known or (weights and name not in timm.models.get_arch_pretrained_cfgs(architecture)):
        raise UserError(
            f"timm {timm.__version__} has no model called '{name}'.{did_you_mean(name, timm.list_models())}"
            " timm.list_models() names them all."
        )
    options: dict[str, Any] = {}
    published = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    if published is not None and published.fixed_input_size:
        options["img_size"] = view_size
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise UnsuitableViewSizeError(f"timm/{name}", view_size, error) from error
    return model


def _fit_small_stem(model: nn.Module, name: str, stem: Stem, view_size: int) -> None:
    """For small images: a 3x3 convolution of stride 1 or 2, and no pooling, at the entrance of a ResNet."""
    if not _is_resnet(model):
        raise UserError(
            f"The '{stem}' stem is for ResNets, and '{name}' is none. Give --network.stem standard, or a ResNet."
        )
    stride = {"small-stride-1": 1, "small-stride-2": 2, "small": 1 if view_size <= 40 else 2}[stem]
    entrance = model.conv1
    if isinstance(entrance, nn.Sequential):  # timm's deep stems (resnet50d) are 3x3 convolutions already
        assert isinstance(entrance[0], nn.Conv2d)
        entrance[0].stride = (stride, stride)
    else:
        assert isinstance(entrance, nn.Conv2d)
        model.conv1 = nn.Conv2d(
            entrance.in_channels, entrance.out_channels, kernel_size=3, stride=stride, padding=1, bias=False
        )
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _is_resnet(model: nn.Module) -> bool:
    # timm's ResNet is told by its name and module, so that timm need not be installed.
    return isinstance(model, ResNet) or any(
        (kind.__module__, kind.__qualname__) == ("timm.models.resnet", "ResNet") for kind in type(model).__mro__
    )


def check_view_size(model: nn.Module, name: str, view_size: int) -> None:
    """Send one view through the model: better a clear word now than an obscure one in the first step."""
    shapes = {key: tensor.to("meta") for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    view = torch.zeros(1, 3, view_size, view_size, device="meta")
    model.eval()
    try:
        with torch.no_grad():
            outputs: Tensor = functional_call(model, shapes, (view,))  # without memory for what lies between the layers
    except (AssertionError, ValueError, RuntimeError) as error:
        if "meta tensor" in str(error):  # the way through some models depends on values, which are not there
            return
        raise UnsuitableViewSizeError(name, view_size, error) from error
    finally:
        model.train()
    if outputs.ndim != 2:
        raise UserError(f"The backbone '{name}' returns {tuple(outputs.shape)} for one image, and not its features.")
