"""What cells are judged by: protocols of `co2 evaluate`, each with its settings. Nothing here imports torch.

A judge is called as its protocol is, but for one protocol that may be asked twice: `linear` is the quick preset's, the
regression in seconds, and `linear-paper` beside it the paper's own, SGD for 100 epochs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from co2.errors import UserError, did_you_mean
from co2.evaluation.presets import PROTOCOLS, Preset, check_given, settings_of
from co2.schema import read_as, shown
from co2.study.settings import changed_settings, parse_assignments

Judge = Literal["knn", "linear", "svm", "detection", "segmentation", "linear-paper", "semi-supervised"]
QUICK = ("knn", "linear")
TRANSFER = ("svm", "detection", "segmentation")
LINEAR_PAPER, SEMI_SUPERVISED = "linear-paper", "semi-supervised"
BESIDES = (LINEAR_PAPER, SEMI_SUPERVISED)
"""What cells may be judged by as well, if the user asks for it: on the data themselves, so not those of transfer."""


def protocol_of(judge: str) -> str:
    """The protocol that a judge follows."""
    return "linear" if judge == LINEAR_PAPER else judge


def read_settings(judge: str, plain: Mapping[str, Any]) -> Any:
    """The settings of a judge as a file has them, if they are settings of it."""
    if judge not in get_args(Judge):
        raise UserError(f"No study is judged by '{shown(judge)}'.{did_you_mean(judge, get_args(Judge))}")
    return read_as(type(PROTOCOLS[protocol_of(judge)].quick), plain, judge)


def portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the folder that features are put into, which no file decides: it changes no number."""
    return {name: "" if name == "storage" else value for name, value in settings.items()}


def judges(
    names: Sequence[str], besides: Sequence[str], preset: Preset, recipe: str, edits: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The settings of each judge: a study's own and those besides, by the preset, with the user's edits.

    The paper has settings that depend on the recipe that a backbone was pre-trained by.
    """
    known = get_args(Judge)
    for name in besides:
        if name not in BESIDES:
            raise UserError(
                f"--also knows no '{name}'.{did_you_mean(name, BESIDES)} There are {' and '.join(BESIDES)}."
            )
    if LINEAR_PAPER in besides and preset == "paper":
        raise UserError(f"With --protocol paper linear is the paper's already. Leave out --also {LINEAR_PAPER}.")
    settings = {
        name: settings_of(protocol_of(name), "paper" if name == LINEAR_PAPER else preset, recipe)
        for name in (*names, *(besides if names != TRANSFER else ()))
    }
    changes: dict[str, dict[str, Any]] = {}
    for setting, value in parse_assignments(edits, "--evaluation").items():
        judge, _, inner = setting.partition(".")
        judge = judge.replace("_", "-")
        if judge not in known:
            raise UserError(
                f"No study is judged by '{judge}'.{did_you_mean(judge, known)} There are {', '.join(known)}."
            )
        if judge in BESIDES and judge not in besides:
            raise UserError(f"Nothing is judged by {judge} here. Ask for it with --also {judge}.")
        if judge in settings:  # else it is for another study of the same data
            changes.setdefault(judge, {})[inner] = value
    edited = {judge: _edited(judge, one, changes.get(judge, {})) for judge, one in settings.items()}
    return {judge: dataclasses.asdict(one) for judge, one in edited.items()}


def _edited(judge: str, settings: Any, changes: Mapping[str, Any]) -> Any:
    try:
        edited = changed_settings(settings, changes, judge)
        check_given(judge, edited, changes)
    except UserError as error:  # where `co2 evaluate` has options, a study has names to give to --evaluation
        options = {f"--{name.replace('_', '-')}": f"{judge}.{name}" for name in settings.__dataclass_fields__}
        words = re.sub(r"--[\w-]+", lambda option: options.get(option[0], option[0]), str(error))
        raise UserError(words) from None
    return edited
