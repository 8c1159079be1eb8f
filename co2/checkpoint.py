"""Everything a run is, on disk: checkpoints to continue from, and the backbone to hand over.

Files are written under a temporary name, flushed to the disk and renamed, so that a reader finds a whole file or none.
Nothing that could execute code is ever loaded: `weights_only=True` for checkpoints, safetensors for backbones.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from co2.config import Experiment
from co2.encoders.backbones import build_backbone
from co2.errors import UserError

CONFIG = "config.json"
BACKBONE = "backbone.safetensors"
CHECKPOINTS = "checkpoints"
KEPT = 3  # checkpoints that stay; older ones are removed once a newer one is safe


def write_checkpoint(run: Path, state: Mapping[str, Any], step: int) -> Path:
    """Write checkpoints/step-N.pt into a run folder and remove all but the last few."""
    folder = run / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:09d}.pt"
    write_atomically(path, lambda file: torch.save(dict(state), file))
    for old in _checkpoints(run)[:-KEPT]:
        old.unlink()
    return path


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint with the most steps in a run folder, or None."""
    found = _checkpoints(run)
    return found[-1] if found else None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state that `write_checkpoint` wrote, on the CPU."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds more than tensors and plain values, so it is not loaded: it was not written by this program."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise UserError(
            f"{path} cannot be read: it is damaged or incomplete. Delete it to continue from the one before."
        ) from error
    return state


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that it is either there as a whole or not at all, even if the power fails."""
    temporary = path.with_name(path.name + ".writing")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)


def save_backbone(path: Path, backbone: nn.Module, experiment: Experiment) -> None:
    """Write the backbone's weights under the names that the plain torchvision or timm model gives them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.state_dict().items()}
    description = {
        "format": "pt",  # what other readers of safetensors look for
        "backbone": experiment.encoder.backbone,
        "stem": experiment.encoder.stem,
        "view_size": str(experiment.views.size),
        "mean": json.dumps(experiment.views.mean),
        "std": json.dumps(experiment.views.std),
        "recipe": experiment.recipe,
    }
    write_atomically(path, lambda file: file.write(save(tensors, metadata=description)))


def load_backbone(run: str | Path, classes: int = 0) -> nn.Module:
    """The pre-trained backbone as a plain torchvision or timm module.

    Args:
        run: a run folder, or a backbone.safetensors file.
        classes: 0 for a module that returns pooled features [N, width]; otherwise the width of a new classifier, ready
            to fine-tune.
    """
    weights, description = read_backbone(run)
    stem: Any = description["stem"]
    name, view_size = description["backbone"], int(description["view_size"])
    backbone = build_backbone(name, stem=stem, view_size=view_size)
    try:
        backbone.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{run} does not fit {name}. {error}") from error
    if not classes:
        return backbone
    with_classifier = build_backbone(name, stem=stem, view_size=view_size, classes=classes)
    with_classifier.load_state_dict(weights, strict=False)  # all but the new classifier, as the strict load has shown
    return with_classifier


def read_backbone(run: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights of a saved backbone, and what the file says about itself."""
    path = Path(run)
    if path.is_dir():
        path = path / BACKBONE
    if not path.is_file():
        raise UserError(
            f"There is no backbone at {path}. Give a run folder that `co2 pretrain` has finished, or the path of a "
            f"{BACKBONE}."
        )
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
            description = dict(file.metadata() or {})
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}.") from error
    if "backbone" not in description:
        raise UserError(f"{path} does not say which backbone it holds: it was not written by `co2 pretrain`.")
    return weights, description


def _checkpoints(run: Path) -> list[Path]:
    folder = run / CHECKPOINTS
    named = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name)]
    return sorted(named, key=lambda path: int(path.stem.removeprefix("step-")))
