"""Everything a run is, on disk: checkpoints to continue from, and the backbone to hand over.

Files are written under a temporary name, flushed to the disk and renamed, so that a reader finds a whole file or none.
Nothing in them that could execute code is called: `networks/weights.py` reads what they say about their tensors.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from co2.errors import RunError, UserError
from co2.experiment import Experiment
from co2.files import (
    WRITING,
    MissingFile,
    UnreadableFile,
    appearing_when_whole,
    open_regular,
    parse_json,
    read_text,
    write_atomically,
)
from co2.networks.backbones import build_backbone, outline
from co2.networks.settings import Stem
from co2.networks.weights import (
    MOST_BYTES,
    StoredTensor,
    describe_pickled,
    describe_safetensors,
    misfits,
    read_pickled,
    read_tensors,
)
from co2.runs import upgrade
from co2.views.view import VIEW_SIZES

CONFIG = "config.json"
BACKBONE = "backbone.safetensors"
CHECKPOINTS = "checkpoints"
CHECKSUM = ".sha256"
DAMAGED = ".damaged"  # after the name of a checkpoint that was passed over
KEPT = 3  # checkpoints that stay; older ones are removed once a newer one is safe


class CheckpointWriter:
    """Writes checkpoints/step-N.pt into a run folder, in the background, and keeps the last few.

    Those of every `keep_every`-th step stay for good, too, unless that is 0. `write` copies the state and returns; a
    thread of its own brings it to the disk while training goes on. What went wrong there is raised by the next `write`
    or by `finish`.
    """

    def __init__(self, run: Path, keep_every: int = 0) -> None:
        self.run = run
        self.keep_every = keep_every
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def write(self, state: Mapping[str, Any], step: int) -> None:
        """Bring `state`, as it is now, to the disk. Waits only for an earlier one that is still on its way."""
        self.finish()
        self._pending = self._thread.submit(write_checkpoint, self.run, _copy_to_cpu(state), step, self.keep_every)

    def finish(self) -> None:
        """Wait until everything is safe on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Give the thread back."""
        self._thread.shutdown()


def write_checkpoint(run: Path, state: Mapping[str, Any], step: int, keep_every: int = 0) -> Path:
    """Write checkpoints/step-N.pt and its checksum, and remove all but the last few and each `keep_every`-th step's."""
    folder = run / CHECKPOINTS
    folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone cannot be made up for
    path = folder / f"step-{step:09d}.pt"
    digest = hashlib.sha256()

    def sum_is_known(_: Path) -> None:
        # Before the checkpoint has its name: one that can be found has its checksum.
        write_atomically(path.with_suffix(CHECKSUM), f"{digest.hexdigest()}  {path.name}\n".encode())

    with appearing_when_whole(path, before_rename=sum_is_known) as file:
        summing = _Summing(file, digest)
        try:
            with io.BufferedWriter(summing) as buffered:
                torch.save(dict(state), buffered)
        except (RuntimeError, OSError):
            if summing.failure is not None:
                raise summing.failure from None  # what the disk said; torch hides it behind an error of its own
            raise
    remove_older(run, step, keep_every)
    return path


def remove_older(run: Path, step: int, keep_every: int = 0) -> None:
    """Remove the checkpoints of a run that stands at `step`, all but the last few and each `keep_every`-th step's."""
    # Later ones are not this run's, which has just come here; they must not push out what it has written.
    up_to_here = [one for one in checkpoints(run) if step_of(one) <= step]
    for old in up_to_here[:-KEPT]:
        if keep_every and step_of(old) % keep_every == 0:
            continue
        old.unlink()
        old.with_suffix(CHECKSUM).unlink(missing_ok=True)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder, the newest last."""
    return sorted((path for path in _listed(run) if re.fullmatch(r"step-\d+\.pt", path.name)), key=step_of)


def _listed(run: Path) -> list[Path]:
    """What lies where a run's checkpoints do."""
    folder = run / CHECKPOINTS
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return []
        # To go on as if there were none would be to start again.
        raise RunError(f"{folder} cannot be read: {error.strerror}. Make it readable, and try again.") from error


def step_of(checkpoint: Path) -> int:
    """After how many steps a checkpoint was written, by its name."""
    return int(checkpoint.stem.removeprefix("step-"))


def remove_unfinished(run: Path) -> None:
    """Remove what a process that was killed while it wrote a checkpoint has left behind."""
    for path in _listed(run):
        if path.suffix == WRITING or (path.suffix == CHECKSUM and not path.with_suffix(".pt").exists()):
            path.unlink()


def newest_sound_checkpoint(
    run: Path, say: Callable[[str], object], take_up: Callable[[dict[str, Any]], object] = lambda state: None
) -> dict[str, Any] | None:
    """The state of the newest checkpoint that is whole, None if there is none.

    Damaged ones are named on the way, and put aside under another name once there is a sound one to go on from.
    `take_up` gets the state, and may fail in any way on one that it cannot do anything with: it is damaged then, too.
    """
    found = checkpoints(run)
    for place, path in reversed([*enumerate(found)]):
        try:
            state = read_checkpoint(path)
            _try(path, take_up, state)
        except DamagedCheckpoint as damage:
            say(f"{damage} Trying the one before it.")
            continue
        for damaged in found[place + 1 :]:
            _put_aside(damaged)
            say(f"{damaged.name} is called {damaged.name}{DAMAGED} from now on, and may be deleted.")
        return state
    if found:
        raise RunError(
            f"None of the checkpoints in {run / CHECKPOINTS} is sound ({len(found)} tried), so the run cannot go on. "
            "Start it again with another --out."
        )
    return None


def _put_aside(checkpoint: Path) -> None:
    for file in (checkpoint, checkpoint.with_suffix(CHECKSUM)):
        with suppress(FileNotFoundError):  # not every checkpoint has a checksum
            file.rename(file.with_name(file.name + DAMAGED))


def _try(path: Path, take_up: Callable[[dict[str, Any]], object], state: dict[str, Any]) -> None:
    try:
        take_up(state)
    except (UserError, torch.cuda.OutOfMemoryError):
        raise  # no fault of the checkpoint's
    except Exception as error:  # what lacks a part, or has another in its place, can fail in any way
        raise DamagedCheckpoint(f"{path} is damaged: it lacks something that this run needs to go on.") from error


class DamagedCheckpoint(UserError):  # noqa: N818 - it names the file, not the program, as what is wrong
    """A checkpoint that is not what was written."""


def read_checkpoint(path: Path, read: Callable[[Path], dict[str, Any]] = read_pickled) -> dict[str, Any]:
    """The state that `write_checkpoint` wrote, on the CPU; with `describe_pickled`, what the file says of it."""
    try:
        describe_pickled(path)  # before all of it is read for its checksum
        with suppress(MissingFile):
            written = read_text(path.with_suffix(CHECKSUM), errors="replace").split()[:1]
            with open_regular(path, MOST_BYTES) as file:
                if written != [hashlib.file_digest(file, "sha256").hexdigest()]:  # type: ignore[arg-type]
                    raise UnreadableFile("its checksum is not the one it was written with")
        kept: dict[str, Any] = upgrade.state(read(path))
        return kept
    except UnreadableFile as error:
        raise DamagedCheckpoint(f"{path} is damaged, or was not written by this program: {error}.") from error


class _Summing(io.RawIOBase):
    """A file that adds up a checksum of what passes through it."""

    def __init__(self, file: BinaryIO, digest: Any) -> None:
        self.file = file
        self.digest = digest
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise


def _copy_to_cpu(value: Any) -> Any:
    """The same nest of containers, with a copy on the CPU of every tensor."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy_to_cpu(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_to_cpu(inner) for inner in value)
    return value


def save_backbone(path: Path, backbone: nn.Module, experiment: Experiment) -> None:
    """Write the backbone's weights under the names that the plain torchvision or timm model gives them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.state_dict().items()}
    description = {
        "format": "pt",  # what other readers of safetensors look for
        "backbone": experiment.network.backbone,
        "stem": experiment.network.stem,
        "view_size": str(experiment.size),
        "mean": json.dumps(experiment.plain.mean),
        "std": json.dumps(experiment.plain.std),
        "recipe": experiment.recipe,
    }
    write_atomically(path, save(tensors, metadata=description))


def load_backbone(run: str | Path, classes: int = 0) -> nn.Module:
    """The pre-trained backbone as a plain torchvision or timm module.

    Args:
        run: a run folder, or a backbone.safetensors file.
        classes: 0 for a module that returns pooled features [N, width]; otherwise the width of a new classifier, ready
            to fine-tune.
    """
    if classes < 0:
        raise UserError(f"classes must be 0, for pooled features, or how many there are; got {classes}.")
    stored, description = describe_backbone(run)
    stem: Any = description["stem"]
    name, view_size = description["backbone"], int(description["view_size"])
    complaint = misfits(stored, outline(name, stem, view_size).state_dict())
    if complaint:
        raise UserError(f"{run} does not fit {name}. {complaint}.")
    backbone = build_backbone(name, stem=stem, view_size=view_size, classes=classes)
    load_weights(backbone, read_tensors(stored), strict=not classes)  # all but a new classifier, which no file has
    return backbone


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
    """Load weights that are of this very version of the model, which plain tensors do not say, and some models ask."""
    state, own = OrderedDict(weights), module.state_dict()
    # Where a layer looks up its biases follows from its shape; a file could have it look beside them.
    state.update({key: own[key] for key in own if key in state and key.endswith("relative_position_index")})
    state._metadata = own._metadata  # type: ignore[attr-defined]
    module.load_state_dict(state, strict=strict)


def describe_backbone(run: str | Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Which weights a saved backbone has, and what the file says about itself."""
    path = Path(run)
    if os.path.isdir(path):  # pathlib's own raises where it may not look
        path = path / BACKBONE
    if not os.path.isfile(path):
        raise UserError(
            f"There is no backbone at {path}. Give a run folder that `co2 pretrain` has finished, or the path of a "
            f"{BACKBONE}."
        )
    try:
        weights, description = describe_safetensors(path)
    except UnreadableFile as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}.") from error
    if not _describes_a_backbone(description):
        raise UserError(f"{path} does not say which backbone it holds: it was not written by `co2 pretrain`.")
    return weights, description


def _describes_a_backbone(description: Mapping[str, str]) -> bool:
    """Whether a file says about itself what `save_backbone` writes: it may come from anywhere."""
    try:
        channels = [float(value) for name in ("mean", "std") for value in parse_json(description[name])]
        return (
            0 < len(description["backbone"]) <= 100
            and all(text.isprintable() for text in description.values())
            and description["stem"] in get_args(Stem)
            and re.fullmatch(r"[1-9][0-9]{0,3}", description["view_size"]) is not None
            and int(description["view_size"]) in VIEW_SIZES
            and len(channels) == 6
            and all(map(math.isfinite, channels))
        )
    except (KeyError, ValueError, TypeError):
        return False
