"""What a folder of results is about: the base experiment and the grids declared on it, kept as study.json.

A folder has one base and may hold several studies of it, which share their cells. The plan says which cells there
should be; the records in cells/ say which there are. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from co2.errors import UserError
from co2.experiment import Experiment, differences
from co2.files import MissingFile, locked, read_json, remove_leftovers, write_atomically
from co2.runs import upgrade
from co2.schema import read_as, shown
from co2.study.grids import Variant, method_settings, rebased, study_called
from co2.study.judges import portable, read_settings
from co2.study.settings import changed, plain_settings, refuse_decided

PLAN = "study.json"
CELLS = "cells"
RUNS = "runs"
FAILED = ".failed.json"
_LOCK = f"{PLAN}.lock"
_SEED = re.compile(r"(?P<variant>.+)-s(?P<seed>\d{1,18})")
_MOST_VARIANTS, _MOST_CELLS = 200, 2000  # of a study: more are no table that anybody reads


@dataclass(frozen=True)
class Grid:
    """One study of a plan, as it was declared."""

    variants: tuple[Variant, ...]
    seeds: tuple[Annotated[int, "at least 0"], ...]
    protocols: Mapping[str, Mapping[str, Any]]
    """How cells are judged: the settings of each protocol."""
    command: str
    """What the user typed, but for what changes no number; a line for each sitting that asked for something else."""

    def __post_init__(self) -> None:
        names = {variant.name for variant in self.variants}
        cells = len(self.variants) * len(self.seeds)
        unknown = {variant.baseline for variant in self.variants if variant.baseline} - names
        if unknown:
            raise UserError(f"There is no variant '{shown(min(unknown))}' to be a baseline.")
        if not cells or len(names) < len(self.variants) or len(set(self.seeds)) < len(self.seeds):
            raise UserError("It needs variants with names of their own and different seeds, at least one of each.")
        if len(names) > _MOST_VARIANTS or cells > _MOST_CELLS:
            raise UserError(
                f"A study has at most {_MOST_VARIANTS} variants and {_MOST_CELLS} cells; got {len(names)} and {cells}."
            )


@dataclass(frozen=True)
class Plan:
    """A base experiment and the studies of it."""

    base: Experiment
    validate: float | None = None
    """The share of the training images on which cells are judged instead of the test images."""
    view_size: int = 224
    """Side of the views that a backbone is shown for VOC classification."""
    grids: Mapping[str, Grid] = field(default_factory=dict)

    def cells(self, study: str) -> list[Cell]:
        """The cells of a study, seed by seed, so that an unfinished grid has whole rows to compare."""
        grid = self.grids[study]
        return [self.cell(study, variant, seed) for seed in grid.seeds for variant in grid.variants]

    def cell(self, study: str, variant: Variant, seed: int) -> Cell:
        """One variant, trained from one seed."""
        experiment = changed(self.base, variant.changes).edit(seed=seed)
        return Cell(f"{variant.name}-s{seed}", variant.name, experiment, self.grids[study].protocols)


@dataclass(frozen=True)
class Cell:
    """One run and what is asked of its backbone."""

    name: str
    variant: str
    experiment: Experiment
    protocols: Mapping[str, Mapping[str, Any]]


def all_cells(plan: Plan, studies: Sequence[str]) -> list[Cell]:
    """The cells of several studies, each once, with all that any of them asks about it."""
    found: dict[str, Cell] = {}
    for study in studies:
        for cell in plan.cells(study):
            known = found.get(cell.name)
            found[cell.name] = (
                cell if known is None else replace(known, protocols={**known.protocols, **cell.protocols})
            )
    return sorted(found.values(), key=lambda cell: cell.experiment.seed)  # stable: whole rows first


def seeds_found(folder: Path, variants: Sequence[Variant]) -> set[int]:
    """The seeds of the variants' records in a folder of results, planned or dropped in from elsewhere."""
    names = {variant.name for variant in variants}
    matches = (_SEED.fullmatch(path.stem) for path in (folder / CELLS).glob("*.json"))
    return {int(match["seed"]) for match in matches if match and match["variant"] in names}


def write_plan(folder: Path, plan: Plan) -> None:
    """study.json: the plan as data, in a folder that is made if need be."""
    plain = {
        "base": plain_settings(plan.base),
        "validate": plan.validate,
        "view_size": plan.view_size,
        "studies": {name: dataclasses.asdict(grid) for name, grid in plan.grids.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PLAN, (json.dumps(plain, indent=1) + "\n").encode())


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder of results, or None where there is none yet."""
    path = folder / PLAN
    try:
        found: _PlanFile = read_as(_PlanFile, read_json(path), "The plan")
    except MissingFile:
        return None
    except UserError as error:
        raise UserError(f"{path} is damaged, or not the plan of a study: {error} Choose another --out.") from error
    studies = {
        name: replace(grid, protocols={judge: portable(settings) for judge, settings in grid.protocols.items()})
        for name, grid in found.studies.items()
    }
    return Plan(found.base, found.validate, found.view_size, studies)


@dataclass(frozen=True)
class _PlanFile:
    """What study.json holds. Names in it become names of files, and settings what is computed: all of it is checked."""

    base: Experiment
    validate: Annotated[float, "between 0 and 1"] | None
    view_size: Annotated[int, "at least 1"]
    studies: Mapping[str, Grid]

    @classmethod
    def as_read(cls, plain: Any) -> tuple[Any, Any]:
        """For `co2.schema`: variants are changes of the base, by the names of the time when both were written."""
        try:
            studies = {name: dict(grid) for name, grid in plain["studies"].items()}
            for grid in studies.values():
                variants = [dict(variant) for variant in grid["variants"]]
                grid["variants"] = [
                    variant | {"changes": upgrade.changes_of(plain["base"], variant["changes"])} for variant in variants
                ]
        except (TypeError, ValueError, KeyError, AttributeError):  # no such thing, which is told in detail
            return cls, plain
        return cls, {**plain, "studies": studies}

    def __post_init__(self) -> None:
        if not self.studies:
            raise UserError("It has no study.")
        for name, grid in self.studies.items():
            study_called(name)
            for judge, settings in grid.protocols.items():
                read_settings(judge, settings)
            for variant in grid.variants:
                refuse_decided(variant.changes, f"{name}: {variant.name}")
                changed(self.base, variant.changes)


def add_to_plan(folder: Path, asked: Plan, redo: bool) -> None:
    """Write what is asked for into the plan of a folder, to which other sittings may add at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / _LOCK, wait=True):
        remove_leftovers(folder / PLAN)
        write_plan(folder, merge_plans(read_plan(folder), asked, folder, redo))


def merge_plans(earlier: Plan | None, asked: Plan, folder: Path, redo: bool) -> Plan:
    """The plan of a folder with what is asked for now added to it. Studies of one folder share their base.

    On another base, earlier studies are kept as far as variants can be called what they are: by their method first of
    all, so that of another method's nothing can.
    """
    if earlier is None:
        return asked
    lines = [line.replace("the run folder", str(folder)) for line in differences(asked.base, earlier.base)]
    for name in ("validate", *(["view_size"] if "transfer" in earlier.grids and "transfer" in asked.grids else [])):
        ours, theirs = getattr(asked, name), getattr(earlier, name)
        lines += [f"{name}: {theirs} in {folder}, {ours} asked for"] if ours != theirs else []
    if lines and not redo:
        raise UserError(
            f"{folder} holds studies with other settings:\n  "
            + "\n  ".join(lines)
            + "\nChoose another --out, or say --redo to compute them again with the new settings."
        )
    same_method = earlier.base.method.name == asked.base.method.name
    kept = {
        name: replace(grid, variants=tuple(rebased(variant, earlier.base, asked.base) for variant in grid.variants))
        for name, grid in earlier.grids.items()
        if same_method
    }
    grids = {**kept, **asked.grids}
    if not lines:
        both = earlier.grids.keys() & asked.grids.keys()
        grids.update({name: _united(earlier.grids[name], asked.grids[name], asked.base) for name in both})
    view_size = (asked if "transfer" in asked.grids else earlier).view_size  # nothing else looks at it
    return replace(asked, grids=grids, view_size=view_size)


def _united(earlier: Grid, asked: Grid, base: Experiment) -> Grid:
    """What two sittings ask of a study: what one adds takes nothing away from the other."""

    def place(variant: Variant) -> tuple[float, float]:
        if not variant.place:
            return 0.0, 0.0
        method = method_settings(changed(base, variant.changes))
        return method["tau_consistency"], method["alpha"]

    variants = {variant.name: variant for variant in (*earlier.variants, *asked.variants)}
    return Grid(
        variants=tuple(sorted(variants.values(), key=place)),  # stable: only what stands on an axis is moved
        seeds=tuple(sorted({*earlier.seeds, *asked.seeds})),
        protocols={**earlier.protocols, **asked.protocols},
        command="\n".join(dict.fromkeys([*earlier.command.splitlines(), *asked.command.splitlines()])),
    )
