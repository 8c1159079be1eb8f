"""The studies: each a grid of variants of one base experiment, declared as data. Nothing here imports torch.

Every study takes a recipe with the consistency term as its base. A variant is the base with a few settings changed; its
name follows from what it is, so that the same variant in two studies is one cell, computed once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from co2 import recipes
from co2.errors import UserError, did_you_mean
from co2.experiment import Experiment, flatten
from co2.schema import Line, PlainName, shown
from co2.study.judges import QUICK, TRANSFER
from co2.study.settings import changed, changes_between

BASE = "co2-small"
SEEDS = (0, 1, 2)
ALPHAS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
TAUS = (0.02, 0.04, 0.07, 0.1, 0.2, 0.4)
LABEL_SMOOTHING = 0.1  # the paper says "a small constant" without a number; the usual choice (Szegedy et al. 2016)
PAPER_V1 = {"method.alpha": 10.0, "method.tau_consistency": 0.04, "method.ramp_up": 0.0}  # section 3.1
PAPER_V2 = {"method.alpha": 0.3, "method.tau_consistency": 0.05, "method.ramp_up": 0.0}
WITHOUT = {"method.alpha": 0.0, "method.ramp_up": 0.0}  # the term is measured, and not trained on
# The same method on the other two sources of negatives, for images of the same size.
SIBLINGS = {
    "co2-small": ("co2-simclr-small", "co2-insdisc-small"),
    "co2-v1": ("co2-simclr", "co2-insdisc"),
    "co2-v2": ("co2-simclr", "co2-insdisc"),
}
SYMBOLS = {"method.alpha": "α", "method.tau_consistency": "τ_con"}
"""What papers call these settings."""
# What `name_of` says of an experiment.
_NAMED = (
    "method.alpha",
    "method.tau_consistency",
    "method.ramp_up",
    "method.label_smoothing",
    "method.symmetric",
)


@dataclass(frozen=True)
class Variant:
    """One row of a table: the base with some settings changed, trained from several seeds."""

    name: PlainName
    """What its cells are called; safe as the name of a file."""
    label: Line
    """What people call it."""
    changes: Mapping[str, Any]
    """By dotted names: how it differs from the base."""
    baseline: str = ""
    """Name of the variant that it is compared with."""
    published: str = ""
    """The method under which `co2.study.published` has numbers to stand beside."""
    place: Annotated[float, "at least 0"] | None = None
    """Where it stands on the axis of the figure: its alpha, or its tau_con."""


@dataclass(frozen=True)
class Wanted:
    """What the user chooses about the grids."""

    base: Experiment
    """The base recipe with everything that all cells have in common: epochs, edits, data."""
    edits: Mapping[str, Any] = field(default_factory=dict)
    """The edits in it, for the variants that start from another recipe."""
    alphas: Sequence[float] = ALPHAS
    taus: Sequence[float] = TAUS
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """A question, the variants that answer it, and how each is judged."""

    summary: str
    variants: Callable[[Wanted], list[Variant]]
    judges: tuple[str, ...] = QUICK


def name_of(experiment: Experiment) -> str:
    """A name that says what the objective is: moco, moco-symmetric-co2-a1-t0.04-r0.5, simclr-smoothing-0.1."""
    method = method_settings(experiment)
    parts = [method["name"]]
    parts += ["symmetric"] if method.get("symmetric") else []
    parts += [f"smoothing-{method['label_smoothing']:g}"] if method.get("label_smoothing") else []
    parts += [f"co2-a{method['alpha']:g}-t{method['tau_consistency']:g}"] if method.get("alpha") else []
    parts += [f"r{method['ramp_up']:g}"] if method.get("alpha") and method["ramp_up"] else []
    return "-".join(parts)


def label_of(experiment: Experiment) -> str:
    """The same for people: MoCo + CO2 (α=1, τ=0.04), with "ramp 0.5" where alpha rises over half of the run."""
    method = method_settings(experiment)
    label = type(experiment.method).__name__ + (", symmetric" if method.get("symmetric") else "")
    label += f" + label smoothing {method['label_smoothing']:g}" if method.get("label_smoothing") else ""
    if method.get("alpha"):
        ramp = f", ramp {method['ramp_up']:g}" if method["ramp_up"] else ""
        label += f" + CO2 (α={method['alpha']:g}, τ={method['tau_consistency']:g}{ramp})"
    return label


def method_of(experiment: Experiment) -> str:
    """Under which name published numbers of this method are kept: moco, co2, moco-symmetric, co2-simclr, ..."""
    settings = method_settings(experiment)
    method: str = settings["name"]
    if settings.get("alpha"):
        method = "co2" if method == "moco" else f"co2-{method}"
    method += "-smoothing" if settings.get("label_smoothing") else ""
    return method + ("-symmetric" if settings.get("symmetric") else "")


def method_settings(experiment: Experiment) -> dict[str, Any]:
    """The settings of the method by their names, and its own: not every method has every one."""
    flat = flatten(experiment)
    return {name.removeprefix("method."): value for name, value in flat.items() if name.startswith("method.")}


def cost_of(experiment: Experiment) -> float:
    """How long a variant trains, relative to others of the same study: by the pixels of the views that are encoded with
    gradients."""
    return pixels_of(experiment) * experiment.method.encoded


def pixels_of(experiment: Experiment, until: float = math.inf) -> float:
    """Pixels of one view, added up over the epochs, or over those until one of them: views may grow."""
    return sum(size**2 * min(1.0, max(0.0, until - number)) for number, size in enumerate(experiment.view_sizes))


def _variant(
    wanted: Wanted,
    changes: Mapping[str, Any],
    *,
    baseline: str = "",
    place: float | None = None,
    published: bool = True,
) -> Variant:
    experiment = changed(wanted.base, changes)
    return Variant(
        name_of(experiment),
        label_of(experiment),
        changes_between(wanted.base, experiment),
        baseline=baseline,
        published=method_of(experiment) if published else "",
        place=place,
    )


def rebased(variant: Variant, base: Experiment, other: Experiment) -> Variant:
    """The same variant of another base: what it is called by stays as it is."""
    before, after = changed(base, variant.changes), changed(other, variant.changes)
    if name_of(before) == name_of(after):
        return variant
    settings = flatten(before)
    same = changed(after, {name: settings[name] for name in _NAMED})
    return replace(variant, changes=changes_between(other, same))


def _pair(wanted: Wanted, changes: Mapping[str, Any]) -> list[Variant]:
    """A method without the consistency term, and with it."""
    alone = _variant(wanted, {**changes, **WITHOUT})
    return [alone, _variant(wanted, changes, baseline=alone.name)]


def _with_consistency(wanted: Wanted) -> None:
    if not method_settings(wanted.base).get("alpha"):
        raise UserError(
            f"The base of this study, {wanted.base.recipe}, has no consistency term (alpha is 0); the baseline is made "
            "from it by leaving the term out. Use --base co2-small, for instance, or --set method.alpha=1."
        )


def claim(wanted: Wanted) -> list[Variant]:
    """The paper's claim (sections 3.2 and 3.5): the baseline, CO2, label smoothing; the paper's own settings, and the
    symmetric loss, where a queue has one."""
    _with_consistency(wanted)
    alone, consistent = _pair(wanted, {})
    smoothing = {**WITHOUT, "method.label_smoothing": LABEL_SMOOTHING}
    variants = [alone, consistent, _variant(wanted, smoothing, baseline=alone.name)]
    variants += [_variant(wanted, paper, baseline=alone.name, published=False) for paper in (PAPER_V1, PAPER_V2)]
    if method_settings(wanted.base).get("symmetric") is False:
        variants += _pair(wanted, {"method.symmetric": True})
    return _each_once(variants)


def alpha(wanted: Wanted) -> list[Variant]:
    """The weight of the consistency term (paper, figure on hyper-parameters, left): tau_con as in the base."""
    _with_consistency(wanted)
    baseline = _variant(wanted, WITHOUT, place=0.0)
    weights = sorted({*wanted.alphas, method_settings(wanted.base)["alpha"]} - {0.0})
    return [baseline] + [
        _variant(
            wanted,
            {"method.alpha": float(weight)},
            baseline=baseline.name,
            place=float(weight),
            published=weight == method_settings(wanted.base)["alpha"],
        )
        for weight in weights
    ]


def tau(wanted: Wanted) -> list[Variant]:
    """The temperature of the consistency term (the same figure, right): alpha as in the base."""
    _with_consistency(wanted)
    baseline = _variant(wanted, WITHOUT)
    temperatures = sorted({*wanted.taus, method_settings(wanted.base)["tau_consistency"]})
    return [baseline] + [
        _variant(
            wanted,
            {"method.tau_consistency": float(temperature)},
            baseline=baseline.name,
            place=float(temperature),
            published=temperature == method_settings(wanted.base)["tau_consistency"],
        )
        for temperature in temperatures
    ]


def alpha_tau(wanted: Wanted) -> list[Variant]:
    """Both together, each weight with each temperature: how strong the term is depends on both, and so does the best
    value of either on the other."""
    _with_consistency(wanted)
    baseline = _variant(wanted, WITHOUT, place=0.0)
    own = method_settings(wanted.base)
    variants = [baseline]
    for temperature in sorted({*wanted.taus, own["tau_consistency"]}):
        for weight in sorted({*wanted.alphas, own["alpha"]} - {0.0}):
            changes = {"method.alpha": float(weight), "method.tau_consistency": float(temperature)}
            is_base = (weight, temperature) == (own["alpha"], own["tau_consistency"])
            variants.append(_variant(wanted, changes, baseline=baseline.name, place=float(weight), published=is_base))
    return variants


def pair(wanted: Wanted) -> list[Variant]:
    """The baseline and CO2, and nothing else."""
    _with_consistency(wanted)
    return _pair(wanted, {})


def mechanisms(wanted: Wanted) -> list[Variant]:
    """The consistency term on all three sources of negatives: queue, batch and memory bank."""
    _with_consistency(wanted)
    if wanted.base.recipe not in SIBLINGS:
        raise UserError(
            f"mechanisms compares recipes that belong together, and there are none for {wanted.base.recipe}. "
            f"Use --base {', '.join(SIBLINGS)}."
        )
    variants = _pair(wanted, {})
    for name in SIBLINGS[wanted.base.recipe]:
        sibling = changed(recipes.get(name), {"epochs": wanted.base.epochs, **wanted.edits})
        variants += _pair(wanted, changes_between(wanted.base, sibling))
    return variants


def vary(wanted: Wanted) -> list[Variant]:
    """Any settings, one at a time: the base, and the base with each of the values."""
    if not wanted.vary:
        raise UserError("vary needs something to vary: --vary network.groups=[2,4,8], for instance.")
    base = _variant(wanted, {})
    variants = [base]
    for setting, values in wanted.vary.items():
        for value in values:
            if isinstance(flatten(wanted.base).get(setting), tuple) and not isinstance(value, list):
                raise UserError(
                    f"Each value of {setting} is a list itself: --vary {setting}=[[...],[...]], for instance."
                )
            off = WITHOUT if setting == "method.alpha" and not value else {}  # the same cell as any baseline
            experiment = changed(wanted.base, {setting: value, **off})
            changes = changes_between(wanted.base, experiment)
            if not changes:
                continue  # the base's own value
            shown = flatten(experiment)[setting]
            text = "-".join(f"{part:g}" for part in shown) if isinstance(shown, tuple) else f"{shown}"
            name = name_of(experiment)
            if setting not in _NAMED or name == base.name:
                name = re.sub(r"[^\w.]+", "-", f"{base.name}-{setting}-{text}")
            variants.append(Variant(name, f"{setting} = {text}", changes, baseline=base.name))
    if len(variants) == 1:
        raise UserError(
            f"vary has nothing to compare: every value of {' and '.join(wanted.vary)} is the base's own. Give others."
        )
    return _each_once(variants)


def _each_once(variants: Sequence[Variant]) -> list[Variant]:
    """The same variant may come about in two ways: the paper's settings may be the base's."""
    found: dict[str, Variant] = {}
    for variant in variants:
        found.setdefault(variant.name, variant)
    return list(found.values())


STUDIES: dict[str, Study] = {
    "claim": Study("the baseline, with CO2, with label smoothing; the paper's alpha and tau; symmetric losses", claim),
    "alpha": Study("the weight of the consistency term", alpha),
    "tau": Study("the temperature of the consistency term", tau),
    "alpha-tau": Study("both together: each weight with each temperature", alpha_tau),
    "curves": Study("both losses and instance accuracy during training, with and without CO2", pair),
    "mechanisms": Study("CO2 on a queue, on in-batch negatives and on a memory bank", mechanisms),
    "transfer": Study("VOC classification, detection and segmentation, with and without CO2", pair, TRANSFER),
    "vary": Study("any settings, one at a time: --vary network.groups=[2,4,8]", vary),
}


def study_called(name: str) -> Study:
    """The study, or what is wrong with its name."""
    if name not in STUDIES:
        raise UserError(
            f"There is no study '{shown(name)}'.{did_you_mean(name, [*STUDIES, 'list', 'report'])} There are "
            f"{', '.join(STUDIES)}."
        )
    return STUDIES[name]
