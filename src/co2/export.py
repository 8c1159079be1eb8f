"""A backbone in the form that another tool reads: `co2 export runs/mine --to detectron2`.

    torchvision   its weights by torchvision's names                                   .pth or .safetensors
    timm          its weights by timm's names, where timm has the same network         .safetensors or .pth
    detectron2    its weights by Detectron2's names, and what its configuration needs  .pkl
    onnx          the network itself: normalised images in, pooled features out        .onnx

What can be tried here is tried before anything is written: timm's own model with these weights, and the ONNX graph in
ONNX Runtime, have to give the features that the backbone gives. Detectron2 itself is not needed to write for it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from co2.errors import RunError, UserError, did_you_mean
from co2.evaluation.subject import Subject, open_subject
from co2.files import write_atomically
from co2.networks.backbones import build_backbone

Format = Literal["torchvision", "timm", "detectron2", "onnx"]

_ENDINGS: dict[str, tuple[str, ...]] = {
    "torchvision": (".pth", ".safetensors"),
    "timm": (".safetensors", ".pth"),
    "detectron2": (".pkl",),
    "onnx": (".onnx",),
}  # of the files of each format, the usual one first
_CLOSE = 1e-3  # by how much features may differ, of the largest of them, where another program adds up in another order


@dataclass(frozen=True)
class Exported:
    """What was written, and how it is taken up."""

    path: Path
    usage: str
    """Lines of Python, or of Detectron2's configuration."""


def export_backbone(
    backbone: str | Path, to: Format, out: str | Path | None = None, *, view_size: int | None = None
) -> Exported:
    """Write a backbone for another tool.

    Args:
        backbone: what `co2 evaluate` takes: a run folder, a backbone.safetensors, an official MoCo checkpoint.
        to: which tool.
        out: the file to write; by default named after the network, in the current folder.
        view_size: side of the images that it will be shown, in pixels, instead of what it was trained with.
    """
    if to not in get_args(Format):
        hint = did_you_mean(to, get_args(Format))
        raise UserError(f"Nothing is written for '{to}'.{hint} --to takes {', '.join(get_args(Format))}.")
    subject = open_subject(str(backbone), view_size=view_size)
    if subject.drawn_from is not None:
        raise UserError(f"{subject.name} has random weights, which no other tool needs. Give a run folder.")
    path = Path(out) if out else Path(subject.backbone.partition("/")[2] + _ENDINGS[to][0])
    _check_place(path, to)
    content, usage = _WRITERS[to](subject, path)
    try:
        write_atomically(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}. Make room, or give another --out.") from error
    return Exported(path, usage)


def _check_place(path: Path, to: Format) -> None:
    """Before anything is computed."""
    if path.suffix not in _ENDINGS[to]:
        endings = " or ".join(_ENDINGS[to])
        raise UserError(f"A file for {to} ends in {endings}, and {path} does not. Give another --out.")
    if os.path.lexists(path):
        raise UserError(f"{path} is there already. Remove it, or give another --out.")
    if not os.path.isdir(path.parent):
        raise UserError(f"There is no folder {path.parent} to write to. Make it, or give another --out.")


# ---------------------------------------------------------------- torchvision


def _for_torchvision(subject: Subject, path: Path) -> tuple[bytes, str]:
    library, _, name = subject.backbone.partition("/")
    if library != "torchvision":
        raise UserError(f"{subject.name} is {subject.backbone}, which torchvision does not have. {_others(subject)}")
    load = "torch.load" if path.suffix == ".pth" else "safetensors.torch.load_file"
    lines = [
        "import torch, torchvision" if path.suffix == ".pth" else "import safetensors.torch, torch, torchvision",
        f'model = torchvision.models.get_model("{name}", num_classes=10)',
    ]
    if subject.stem != "standard":
        entrance = subject.weights["conv1.weight"]  # [C, 3, 3, 3]
        stride = subject.stem[-1]
        lines += [
            f"model.conv1 = torch.nn.Conv2d(3, {len(entrance)}, 3, stride={stride}, padding=1, bias=False)",
            "model.maxpool = torch.nn.Identity()",
        ]
    lines += [
        f"model.load_state_dict({load}({str(path)!r}), strict=False)  # all but the classifier",
        _normalisation(subject),
    ]
    return _weights_file(subject.weights, path, subject), "\n".join(lines)


def _weights_file(weights: Mapping[str, Tensor], path: Path, subject: Subject) -> bytes:
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    if path.suffix == ".safetensors":
        return save_safetensors(tensors, metadata={"format": "pt"} | _description(subject))
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def _description(subject: Subject) -> dict[str, str]:
    """How the network wants its images, for formats that have room for it."""
    return {
        "backbone": subject.backbone,
        "view_size": str(subject.view_size),
        "mean": json.dumps(subject.mean),
        "std": json.dumps(subject.std),
    }


def _normalisation(subject: Subject) -> str:
    return f"# images: RGB from 0 to 1, less {list(subject.mean)}, divided by {list(subject.std)}"


def _others(subject: Subject) -> str:
    own = "timm" if subject.backbone.startswith("timm/") else "onnx"
    return f"Use --to {own}, or take it up in Python with co2.load_backbone."


# ---------------------------------------------------------------- timm


def _for_timm(subject: Subject, path: Path) -> tuple[bytes, str]:
    name = subject.backbone.partition("/")[2]
    try:
        import timm
    except ImportError as error:
        raise UserError(
            "Writing for timm needs it, to see that it gives the same features, and it is not installed. Install it "
            "with: pip install 'consistent-contrast[timm]'"
        ) from error
    if not timm.models.is_model(name):
        raise UserError(f"{subject.name} is {subject.backbone}, which timm does not have. {_others(subject)}")
    model = build_backbone(f"timm/{name}", view_size=subject.view_size)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    if shapes != {key: tensor.shape for key, tensor in subject.weights.items()}:
        raise UserError(
            f"timm's {name} is another network than {subject.name}, which is {subject.backbone} with the "
            f"{subject.stem} stem. {_others(subject)}"
        )
    model.load_state_dict(subject.weights)
    _compare(subject, model, f"timm's {name}")
    sized = ""
    if getattr(model, "pretrained_cfg", {}).get("fixed_input_size"):
        sized = f", img_size={subject.view_size}"
    usage = (
        "import timm\n"
        f'model = timm.create_model("{name}", num_classes=0{sized}, checkpoint_path={str(path)!r})\n'
        f"{_normalisation(subject)}"
    )
    return _weights_file(subject.weights, path, subject), usage


def _compare(subject: Subject, other: Callable[[Tensor], Tensor], whose: str) -> None:
    """Whether another program's network gives the features that ours gives."""
    images = torch.randn(3, 3, subject.view_size, subject.view_size, generator=torch.Generator().manual_seed(0))
    own = subject.build().eval()
    if isinstance(other, nn.Module):
        other.eval()
    with torch.no_grad():
        wanted, found = own(images), other(images)  # [3, width] each
    if wanted.shape != found.shape or (wanted - found).abs().max() > _CLOSE * wanted.abs().max():
        raise RunError(f"{whose} gives other features than {subject.name} for the same images. Nothing was written.")


# ---------------------------------------------------------------- Detectron2


def _for_detectron2(subject: Subject, path: Path) -> tuple[bytes, str]:
    module = subject.build()
    if not subject.backbone.startswith("torchvision/") or not isinstance(module, ResNet) or subject.stem != "standard":
        raise UserError(
            f"Detectron2's ResNets begin with a 7x7 convolution, and {subject.name} is {subject.backbone} with the "
            f"{subject.stem} stem. Only torchvision's ResNets with their standard stem can be written for it. "
            f"{_others(subject)}"
        )
    blocks = [part for part in module.modules() if isinstance(part, BasicBlock | Bottleneck)]
    of_three = isinstance(blocks[0], Bottleneck)
    depth = 2 + len(blocks) * (3 if of_three else 2)  # layers with weights, the classifier among them
    weights = {
        detectron2_name(name): tensor.numpy()
        for name, tensor in subject.weights.items()
        if not name.endswith("num_batches_tracked")  # which its frozen normalisation does not have
    }
    file = {"model": weights, "__author__": "co2", "matching_heuristics": True}
    scaled = {name: [round(255 * value, 3) for value in getattr(subject, name)] for name in ("mean", "std")}
    narrow = "" if of_three else ", RES2_OUT_CHANNELS: 64"
    usage = (
        "MODEL:\n"
        f'  WEIGHTS: "{path}"\n'
        f"  PIXEL_MEAN: {scaled['mean']}\n"
        f"  PIXEL_STD: {scaled['std']}\n"
        f"  RESNETS: {{DEPTH: {depth}, STRIDE_IN_1X1: False, NUM_GROUPS: {module.groups}, "
        f"WIDTH_PER_GROUP: {module.base_width}{narrow}}}\n"
        "INPUT:\n"
        '  FORMAT: "RGB"'
    )
    return pickle.dumps(file), usage


def detectron2_name(name: str) -> str:
    """What Detectron2 calls a weight of torchvision's ResNets: layer1.0.bn1.weight is res2.0.conv1.norm.weight."""
    name = re.sub(r"layer(\d)", lambda found: f"res{int(found[1]) + 1}", name)
    name = re.sub(r"bn(\d)", r"conv\1.norm", name)
    name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    return name if name.startswith("res") else f"stem.{name}"


# ---------------------------------------------------------------- ONNX


def _for_onnx(subject: Subject, path: Path) -> tuple[bytes, str]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - by which torch writes the graph
    except ImportError as error:
        raise UserError(
            f"Writing ONNX needs {error.name}, which is not installed. Install it with: "
            "pip install 'consistent-contrast[onnx]'"
        ) from error
    module = subject.build().eval()
    images = torch.zeros(2, 3, subject.view_size, subject.view_size)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of what torch calls from its own parts
        program = torch.onnx.export(
            module,
            (images,),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: "batch"},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, _description(subject))
    content: bytes = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    _compare(
        subject,
        lambda views: torch.from_numpy(session.run(["features"], {"images": views.numpy()})[0]),
        "The ONNX graph",
    )
    usage = (
        "import onnxruntime\n"
        f"session = onnxruntime.InferenceSession({str(path)!r})\n"
        f'features = session.run(["features"], {{"images": images}})[0]'
        f"  # float32 [N, 3, {subject.view_size}, {subject.view_size}] in\n"
        f"{_normalisation(subject)}"
    )
    return content, usage


_WRITERS: dict[Format, Callable[[Subject, Path], tuple[bytes, str]]] = {
    "torchvision": _for_torchvision,
    "timm": _for_timm,
    "detectron2": _for_detectron2,
    "onnx": _for_onnx,
}
