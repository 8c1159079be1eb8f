"""The forms of the consistency term as settings of a method."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import co2
from co2.errors import UserError
from co2.method import Step
from co2.methods.contrastive import Contrastive
from co2.methods.moco import MoCo
from co2.objective.specification import Consistency


def unit_rows(rows: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator), dim=1)


class At:
    """As much of a step as the objective looks at."""

    def __init__(self, method: Contrastive, done: float) -> None:
        self._schedules, self._done = method.schedules(), done

    def at(self, name: str) -> float:
        return self._schedules[name](self._done)


def loss_of(method: Contrastive, done: float = 1.0) -> Tensor:
    compared = method.compare(unit_rows(6, 8, 0), unit_rows(6, 8, 1), unit_rows(40, 8, 2))
    step: Step = At(method, done)  # type: ignore[assignment]
    return method.objective(step, (1, compared)).loss


def test_the_settings_are_one_term() -> None:
    method = MoCo(
        alpha=0.5, form="kl", tau_consistency=0.1, tau_target=0.05, start=0.1, ramp_up=0.4, own_label=0.3, centred=True
    )
    expected = Consistency(
        "kl", weight=0.5, temperature=0.1, target_temperature=0.05, own_label=0.3, start=0.1, ramp_up=0.4, centred=True
    )
    assert method.term() == expected
    assert not method.term(detach=True).target_gradient
    assert method.schedules()["alpha"](0.05) == 0
    assert method.schedules()["alpha"](0.6) == 0.5


def test_another_form_or_a_sharper_target_is_another_loss_and_no_weight_is_none() -> None:
    losses = [
        loss_of(MoCo(alpha=1.0, **settings)).item()  # type: ignore[arg-type]
        for settings in ({}, {"form": "kl"}, {"form": "jsd"}, {"tau_target": 0.02}, {"centred": True})
    ]
    assert len(set(losses)) == len(losses)
    assert loss_of(MoCo(alpha=0.0, form="kl")).item() == loss_of(MoCo(alpha=0.0)).item() < min(losses)


def test_a_soft_label_takes_the_place_of_the_instances_own() -> None:
    plain = loss_of(MoCo()).item()
    soft = MoCo(alpha=1.0, form="soft-label", own_label=1.0)
    assert loss_of(soft).item() == pytest.approx(plain, rel=1e-6)
    half, whole = (loss_of(MoCo(alpha=alpha, form="soft-label", own_label=0.0)).item() for alpha in (0.5, 1.0))
    assert half == pytest.approx((plain + whole) / 2, rel=1e-6)
    with pytest.raises(UserError, match="at most 1"):
        MoCo(alpha=2.0, form="soft-label")


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"alpha": 0.0}, {"ramp_up", "start", "form", "tau_target", "own_label", "centred"}),
        ({"alpha": 1.0}, {"own_label"}),
        ({"alpha": 1.0, "form": "soft-label"}, {"tau_consistency"}),
    ],
)
def test_what_would_do_nothing_is_named(settings: dict[str, object], idle: set[str]) -> None:
    found = MoCo(**settings).idle()  # type: ignore[arg-type]
    assert idle <= set(found)
    assert not ({"start", "form", "own_label", "tau_consistency"} - idle) & set(found)


def test_a_run_trains_with_another_form(tiny, tmp_path) -> None:
    run = co2.pretrain(
        tiny(method={"alpha": 1.0, "form": "soft-label", "tau_target": 0.05, "start": 0.2}), out=tmp_path / "run"
    )
    assert (run / "backbone.safetensors").exists()
