"""What is evaluated: a backbone, by any name that a person has for one.

    runs/mine                           a run folder; of a run that is not finished, the newest checkpoint
    runs/mine/backbone.safetensors      what a run leaves
    runs/mine/checkpoints/step-9.pt     a run in the middle
    moco_v2_800ep_pretrain.pth.tar      an official MoCo v1 or v2 checkpoint
    torchvision/resnet50, timm/NAME     a model with random weights
    torchvision/resnet50:DEFAULT        the same with its published weights, downloaded if they are not there yet
    random, random:torchvision/NAME     random weights; alone, those of whatever it is compared with, or of a ResNet-50

Files are read as tensors and plain values only, by `networks/weights.py`: nothing in them can execute code.
"""

from __future__ import annotations

import re
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import list_models
from torchvision.models.resnet import ResNet

from co2.checkpoint import BACKBONE, checkpoints, describe_backbone, load_weights, read_checkpoint
from co2.errors import UserError, did_you_mean
from co2.evaluation.presets import MOCO_V1, MOCO_V2
from co2.experiment import Experiment
from co2.files import UnreadableFile, parse_json
from co2.networks.backbones import UnsuitableViewSizeError, build_backbone, feature_width, outline
from co2.networks.encoder import Embedder
from co2.networks.heads import layers_like
from co2.networks.settings import Stem
from co2.networks.weights import StoredTensor, describe_pickled, misfits, read_tensors, some
from co2.runs import upgrade
from co2.views.view import VIEW_SIZES, View, crop_and_flip

PAPER_BACKBONE = "torchvision/resnet50"
SEEDS = 2**63
_WIDEST_LAYER = 2**16  # of a head


@dataclass(frozen=True)
class Subject:
    """A backbone to evaluate. It is never changed: every protocol builds modules of its own from it."""

    name: str
    """What the user calls it."""
    backbone: str
    """Which model it is: torchvision/resnet50, timm/NAME, co2/resnet10-narrow."""
    weights: Mapping[str, Tensor]
    """Its state dict, without a classifier, on the CPU."""
    head: Mapping[str, Tensor] = field(default_factory=dict)
    """The state dict of the head that it was trained with, where embeddings are to be judged and not features."""
    stem: Stem = "standard"
    view_size: int = 224
    """Side of the views that it is shown, in pixels."""
    mean: tuple[float, float, float] = View.mean
    std: tuple[float, float, float] = View.std
    steps: int | None = None
    """How long it has been trained, where a run's checkpoint says so."""
    drawn_from: int | None = None
    """The seed of its random weights, if it has such."""
    recipe: str = ""
    """By which recipe it was trained (of an official checkpoint, moco-v1 or moco-v2), where that is known."""

    def build(self, classes: int = 0) -> nn.Module:
        """A new module with the subject's weights: returning pooled features [N, width], or embeddings on the unit
        sphere where it has a head, or the logits [N, classes] of a new, randomly initialised classifier."""
        module = build_backbone(self.backbone, self.stem, self.view_size, classes)
        load_weights(module, self.weights, strict=classes == 0)  # all but the classifier, as open_subject saw
        if not self.head or classes:
            return module
        head = self._empty_head()
        load_weights(head, self.head)
        return Embedder(module, head)

    def spatial(self) -> ResNet:
        """A new module with the subject's weights, for protocols that need conv1 to layer4 one by one."""
        module = self.build()
        if not isinstance(module, ResNet):
            raise UserError(
                f"Detection and segmentation are built on torchvision's ResNets (and co2/resnet10-narrow), and "
                f"{self.name} is {self.backbone}. Evaluate it by knn, linear, semi-supervised, svm or label-free."
            )
        return module

    @cached_property
    def width(self) -> int:
        """Length of the pooled features, or of the embeddings."""
        if self.head:
            layers = layers_like(self.head, self._features, _WIDEST_LAYER)
            assert layers is not None
            return layers.widths[-1] or 0
        return self._features

    @cached_property
    def _features(self) -> int:
        """Length of the pooled features."""
        return feature_width(outline(self.backbone, self.stem, self.view_size))

    @property
    def architecture(self) -> dict[str, Any]:
        """For the record: which network it is, which `random` alone does not say, and how it is shown images."""
        return {
            "backbone": self.backbone,
            "stem": self.stem,
            "view_size": self.view_size,
            "mean": self.mean,
            "std": self.std,
        } | ({"embeddings": self.width} if self.head else {})

    @property
    def views(self) -> View:
        """How the backbone is shown images while something is trained on it: a random resized crop and a flip, no more
        (the paper's appendix). Crops as for supervised training on ImageNet, from 8% of the area."""
        return crop_and_flip(View(size=self.view_size, crop_scale=(0.08, 1.0), mean=self.mean, std=self.std))

    def _empty_head(self) -> nn.Module:
        """A head of the kind that has a state dict like this one's."""
        layers = layers_like(self.head, self._features, _WIDEST_LAYER)
        assert layers is not None, "open_subject has seen to that"
        return layers.make(self._features)

    def random(self, seed: int = 0) -> Subject:
        """The same architecture with random weights: what a subject is compared with."""
        fresh = _fresh_weights(self.backbone, self.stem, self.view_size, seed)
        head = {}
        if self.head:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                head = self._empty_head().state_dict()
        return replace(self, name="random", weights=fresh, head=head, steps=None, drawn_from=seed)


def open_subject(
    name: str,
    *,
    view_size: int | None = None,
    like: Subject | None = None,
    seed: int = 0,
    embeddings: bool = False,
) -> Subject:
    """The backbone that `name` stands for; see the top of this file.

    Args:
        name: a run folder, a file, a model's name, or `random`.
        view_size: side of the views to show it, instead of the one that it was trained with (224 where unknown).
        like: whose architecture, views, normalisation and kind of head `random` takes.
        seed: what random weights are drawn from.
        embeddings: with the head that it was trained with, which checkpoints have.
    """
    if not 0 <= seed < SEEDS:
        raise UserError(f"--seed must be a whole number from 0 to 2^63 - 1; got {seed}.")
    if view_size is not None and view_size not in VIEW_SIZES:
        raise UserError(f"--view-size must be from {VIEW_SIZES[0]} to {VIEW_SIZES[-1]} pixels; got {view_size}.")
    try:
        return _open(name, view_size, like, seed, embeddings)
    except UnsuitableViewSizeError as error:  # it names the setting of `co2 pretrain`
        raise error.by("--view-size") from error


def _open(name: str, view_size: int | None, like: Subject | None, seed: int, embeddings: bool) -> Subject:
    if name == "random" and like is not None:
        return _checked(like.random(seed), view_size)
    subject = _named(name, view_size, seed, embeddings)
    if embeddings and not subject.head:
        raise UserError(
            f"{name} has no head, and embeddings are what comes out of one. Heads are in the checkpoints of a run, "
            "and in official MoCo checkpoints: give a run folder that still has its checkpoints/, or such a file."
        )
    return subject


def _named(name: str, view_size: int | None, seed: int, embeddings: bool) -> Subject:
    kind, _, rest = name.partition(":")
    if kind == "random":
        return _checked(replace(_model(rest or PAPER_BACKBONE, "", seed, view_size), name=name), view_size)
    if kind.startswith(("torchvision/", "timm/", "co2/")) and not Path(name).exists():
        return _checked(replace(_model(kind, rest, seed, view_size), name=name), view_size)
    path = Path(name).expanduser()
    if not path.exists():
        hint = did_you_mean(name, ["random", "torchvision/resnet50", "torchvision/resnet18", "co2/resnet10-narrow"])
        if name in list_models():
            hint = f" Did you mean 'torchvision/{name}'?"
        raise UserError(
            f"There is no backbone '{name}'.{hint} Give a run folder, a backbone.safetensors, an official MoCo "
            "checkpoint (.pth.tar), torchvision/NAME or timm/NAME (with :DEFAULT for its published weights), or random."
        )
    from_checkpoint = path.is_dir() and (embeddings or not (path / BACKBONE).is_file())
    found = checkpoints(path) if from_checkpoint else []
    if found:
        subject = _pickled(found[-1])
    elif path.is_dir() or path.suffix == ".safetensors":
        subject = _saved_backbone(path)
    else:
        subject = _pickled(path)
    return _checked(replace(subject, name=name, head=subject.head if embeddings else {}), view_size)


def _saved_backbone(path: Path) -> Subject:
    weights: Any
    weights, description = describe_backbone(path)
    stem: Any = description["stem"]
    return Subject(
        name=str(path),
        backbone=description["backbone"],
        weights=weights,
        stem=_stem_as_trained(stem, int(description["view_size"])),
        view_size=int(description["view_size"]),
        mean=_three(parse_json(description["mean"])),
        std=_three(parse_json(description["std"])),
        recipe=description.get("recipe", ""),
    )


def _stem_as_trained(stem: Stem, view_size: int) -> Stem:
    """The 'small' stem chooses its stride by the view size: that of the training, whatever is shown later."""
    if stem != "small":
        return stem
    return "small-stride-1" if view_size <= 40 else "small-stride-2"


def _pickled(path: Path) -> Subject:
    """A checkpoint of this program, or of the MoCo authors'."""
    own = path.parent.name == "checkpoints" and path.suffix == ".pt"
    try:
        state: Any = read_checkpoint(path, describe_pickled) if own else upgrade.state(describe_pickled(path))
    except UnreadableFile as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not isinstance(state, dict):
        raise UserError(f"{path} holds a {type(state).__name__}, not a checkpoint.")
    if "experiment" in state and "nets" in state:
        return _training_checkpoint(path, state)
    if "state_dict" in state:
        return _moco_checkpoint(path, state)
    raise UserError(
        f"{path} is not a checkpoint that is understood: it has {some(state)}. Official MoCo checkpoints have "
        "arch and state_dict."
    )


def _training_checkpoint(path: Path, state: Mapping[str, Any]) -> Subject:
    steps = state.get("step")
    if not isinstance(state["experiment"], str) or not isinstance(steps, int):
        raise UserError(f"{path} is not a checkpoint of `co2 pretrain`: it does not say of which run, and which step.")
    try:
        experiment = Experiment.from_json(state["experiment"])
    except UserError as error:
        raise UserError(f"{path} is damaged, or no checkpoint that this version reads: {error}") from error
    nets = state["nets"]
    return Subject(
        name=str(path),
        backbone=experiment.network.backbone,
        weights=_tensors(path, "nets", nets, "encoder.backbone."),
        head=_tensors(path, "nets", nets, "encoder.head."),
        stem=_stem_as_trained(experiment.network.stem, experiment.size),
        view_size=experiment.size,
        mean=experiment.plain.mean,
        std=experiment.plain.std,
        steps=steps,
        recipe=experiment.recipe,
    )


def _moco_checkpoint(path: Path, state: Mapping[str, Any]) -> Subject:
    """`main_moco.py` of facebookresearch/moco: the query encoder is the one that is handed over."""
    prefix = re.compile(r"^(module\.)?encoder_q\.")
    everything = _tensors(path, "state_dict", state["state_dict"])
    entries = {prefix.sub("", key): value for key, value in everything.items() if prefix.match(key)}
    # Without the head that projects onto the sphere.
    weights = {key: value for key, value in entries.items() if not key.startswith("fc.")}
    if not weights:
        raise UserError(
            f"{path} has no query encoder: no entry begins with module.encoder_q. It has {some(everything)}. "
            "Checkpoints of MoCo v1 and v2 pre-training are understood, those of a linear classifier on top are not."
        )
    architecture = state.get("arch", "resnet50")
    if not isinstance(architecture, str) or len(architecture) > 100:
        raise UserError(f"{path} is damaged, or no checkpoint: its arch is not the name of an architecture.")
    recipe = MOCO_V1 if "fc.weight" in entries else MOCO_V2 if "fc.0.weight" in entries else ""
    head = {key.removeprefix("fc."): value for key, value in entries.items() if key.startswith("fc.")}
    return Subject(name=str(path), backbone=f"torchvision/{architecture}", weights=weights, head=head, recipe=recipe)


def _tensors(path: Path, name: str, entries: Any, prefix: str = "") -> dict[str, Any]:
    """What a state dict says of its tensors whose names begin with `prefix`, without it, once it is known to be one."""
    if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
        raise UserError(f"{path} is damaged, or no checkpoint: its {name} does not name tensors.")
    found = {key: value for key, value in entries.items() if key.startswith(prefix)}
    for key, value in found.items():
        if not isinstance(value, StoredTensor):
            raise UserError(
                f"{path} is damaged, or no checkpoint: {some([key])} in its {name} is no dense tensor of plain numbers."
            )
    return {key.removeprefix(prefix): value for key, value in found.items()}


def _model(backbone: str, weights: str, seed: int, view_size: int | None) -> Subject:
    if weights and backbone.startswith("torchvision/"):
        return _published_torchvision(backbone, weights, view_size)
    if weights:
        return _published_timm(backbone, weights, view_size)
    size = view_size or 224
    fresh = _fresh_weights(backbone, "standard", size, seed)
    return Subject(backbone, backbone, fresh, view_size=size, drawn_from=seed)


def _fresh_weights(backbone: str, stem: Stem, view_size: int, seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone(backbone, stem, view_size).state_dict()


def _published_torchvision(backbone: str, weights: str, view_size: int | None) -> Subject:
    from torchvision.models import get_model_weights

    name = backbone.removeprefix("torchvision/")
    build_backbone(backbone, view_size=view_size or 224)  # says what is wrong with the name, if anything is
    known = get_model_weights(name)
    if weights not in known.__members__:
        raise UserError(
            f"torchvision has no weights '{weights}' for {name}.{did_you_mean(weights, known.__members__)} "
            f"It has {', '.join(known.__members__)}."
        )
    chosen = known[weights]
    try:
        state = chosen.get_state_dict(progress=True, check_hash=True)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        raise UserError(
            f"The published weights of {backbone} cannot be downloaded from {chosen.url}: {error}. Download that file "
            f"elsewhere and put it into {Path(torch.hub.get_dir()) / 'checkpoints'}."
        ) from error
    transforms = chosen.transforms()
    size = view_size or int(transforms.crop_size[0])
    wanted = build_backbone(backbone, view_size=size).state_dict()
    return Subject(
        backbone,
        backbone,
        {key: value for key, value in state.items() if key in wanted},  # without the classifiers
        view_size=size,
        mean=_three(transforms.mean),
        std=_three(transforms.std),
    )


def _published_timm(backbone: str, weights: str, view_size: int | None) -> Subject:
    if weights != "DEFAULT" or not backbone.startswith("timm/"):
        raise UserError(
            f"{backbone} has no weights '{weights}'. timm's models have :DEFAULT; other weights of theirs are part of "
            "the name: timm/resnet50.a1_in1k:DEFAULT."
        )
    name = backbone.removeprefix("timm/")
    build_backbone(backbone, view_size=view_size or 224)  # says what is wrong with the name, if anything is
    import timm

    published = timm.models.get_pretrained_cfg(name)
    if published is None or not published.has_weights:
        raise UserError(f"timm publishes no weights for {name}. Without :DEFAULT it is evaluated with random ones.")
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # whatever the hub's client raises: the reason is told
        raise UserError(f"The published weights of {backbone} cannot be downloaded: {error}") from error
    return Subject(
        backbone,
        backbone,
        model.state_dict(),
        view_size=view_size or int(published.input_size[-1]),
        mean=_three(published.mean),
        std=_three(published.std),
    )


def _checked(subject: Subject, view_size: int | None) -> Subject:
    """The subject with the view size that was asked for, once its weights are known to be all that its model needs."""
    subject = replace(subject, view_size=view_size or subject.view_size)
    backbone = outline(subject.backbone, subject.stem, subject.view_size)
    complaint = misfits(subject.weights, backbone.state_dict())
    if complaint:
        raise UserError(
            f"The weights in {subject.name} are not those of {subject.backbone}"
            + (f" with the {subject.stem} stem" if subject.stem != "standard" else "")
            + f". {complaint}. Is this the file of another architecture?"
        )
    if subject.head and not _is_head(subject.head, feature_width(backbone)):
        raise UserError(
            f"The head in {subject.name} is neither MoCo's nor MoCo v2's, or not of {subject.backbone}: it has "
            f"{some(f'{key} {tuple(tensor.shape)} {tensor.dtype}' for key, tensor in subject.head.items())}."
        )
    subject = replace(subject, weights=read_tensors(subject.weights), head=read_tensors(subject.head))
    for key, tensor in (*subject.weights.items(), *subject.head.items()):
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise UserError(
                f"The weights in {subject.name} are not all finite numbers, {key} is the first that is not: the run "
                "that made them diverged. Evaluate an earlier checkpoint of it, or train again with a lower learning "
                "rate."
            )
    return subject


def _is_head(entries: Mapping[str, Any], width: int) -> bool:
    """Whether these are the weights of a head on features of this width. Files may claim any shape."""
    layers = layers_like(entries, width, _WIDEST_LAYER)
    if layers is None:
        return False
    with torch.device("meta"):
        return not misfits(entries, layers.make(width).state_dict())


def _three(numbers: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = numbers
    return float(red), float(green), float(blue)
