"""What contrastive methods have in common: InfoNCE, and the consistency term of CO2 (Wei et al. 2021).

    L = L_ins + alpha L_con      L_ins, L_con as in `co2.contrast`; alpha may rise over the run

Whoever inherits from `Contrastive` has the term, its ramp, label smoothing and the fused kernel, and nothing to write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from co2.errors import UserError
from co2.measures.metric import Metric
from co2.method import Method, Output, Schedule, Seen, Step, Trouble
from co2.objective.specification import Consistency, Form

if TYPE_CHECKING:
    from torch import Tensor

    from co2.objective.contrast import Contrast

_CANDIDATES = ("method.name", "method.queue", "method.negatives")
INSTANCE = Metric(
    "instance", "Instance loss", "lower", "L_ins", "nats", summarised=False,
    depends_on=("method.tau", "method.label_smoothing", *_CANDIDATES),
    explanation="How hard it is for a view of a picture to find another view of the same picture among the negatives. "
    "It is larger with more negatives and with a higher temperature, and can rise at first, while a queue fills with "
    "real features.",
)  # fmt: skip
CONSISTENCY = Metric(
    "consistency", "Consistency loss", "lower", "L_con", from_zero=True, weight="method.alpha",
    depends_on=("method.form", "method.tau_consistency", "method.tau_target", "method.own_label", "method.centred",
                *_CANDIDATES),
    explanation="How differently two views of a picture compare themselves with the negatives. Where the term has no "
    "weight it is measured, and not trained on. In the paper, that of MoCo jumps at the beginning and stays higher, "
    "while CO2 keeps it low throughout.",
)  # fmt: skip
TOP1 = Metric(
    "top1", "Instance accuracy", "higher", "found", "%", depends_on=_CANDIDATES,
    explanation="How often the other view of the same picture is closer than all negatives. It measures the training "
    "task, not how good the features are, and higher is not always better: in the paper CO2 lowers it on ImageNet-100, "
    "from 97.57% to 95.26%, while the features improve.",
)  # fmt: skip
TOP5 = Metric("top5", "Instance accuracy among the first five", "higher", unit="%", depends_on=_CANDIDATES)

PERFECT = 0.999  # share of instances found that real learning does not reach
# Length of the mean of all unit embeddings: 1 is all of them pointing the same way. Read off the runs of MoCo with CO2
# that are recorded in results/ beside MoCo alone, and not tried on others: of the 13 above it in their last quarter all
# are worse than MoCo by kNN of embeddings, 8 by kNN of features and 8 by the linear classifier. So it is told as a
# doubt.
DRAWN_TOGETHER = 0.7
LAST_QUARTER = 0.75
SPREAD_BY = 1000  # steps; before, embeddings have not had the time to leave each other, with or without the term


@dataclass(frozen=True, kw_only=True)
class Contrastive(Method):
    """Settings of the objective, L = L_ins + alpha L_con (paper, section 2.2)."""

    tau: float = 0.2
    """Temperature of instance discrimination (InfoNCE)."""
    alpha: float = 0.0
    """Weight of the consistency term. At 0 the term is measured but not trained on."""
    tau_consistency: float = 0.05
    """Temperature of the two similarity distributions that the consistency term compares."""
    ramp_up: float = 0.0
    """Share of the run over which alpha rises from 0.7% of its value to all of it, as consistency terms do elsewhere
    (Laine and Aila 2017). At 0, as in the paper, it has its value from the first step on."""
    start: float = 0.0
    """Share of the run before the consistency term begins to count, and to rise."""
    form: Form = "symmetric-kl"
    """symmetric-kl: as in the paper. kl: the positive's relation as a pseudo-label; reverse-kl, jsd, mse, mse-logits:
    other ways to compare. soft-label: a label mixed of the instance (`own_label`) and of its relation to the negatives,
    as in SCE; alpha, at most 1, is then how far it replaces the instance's own."""
    tau_target: float | None = None
    """Temperature of the positive's similarities, the target; below `tau_consistency` it is the sharper. By default the
    same."""
    own_label: float = 0.5
    """Share of a soft label that the instance itself keeps."""
    centred: bool = False
    """Compare directions as seen from the mean of the negatives, which embeddings that lie close together do not
    flatter."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the positive and all negatives (the paper's ablation)."""
    backend: Literal["auto", "reference", "fused"] = "auto"
    """Which implementation computes it: the plain one, the fused kernel, or whichever fits the device."""

    metrics = (INSTANCE, CONSISTENCY, TOP1, TOP5)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise UserError(f"method.alpha must be a number, 0 or more; got {self.alpha}.")
        for name in ("ramp_up", "start"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"method.{name} is a share of the run, between 0 and 1; got {getattr(self, name)}.")
        for name in ("tau", "tau_consistency"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(
                    f"method.{name} is a temperature and must be a number above 0; got {getattr(self, name)}."
                )
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"method.label_smoothing must be in [0, 1); got {self.label_smoothing}.")
        self.term()  # and what the term itself refuses

    def term(self, detach: bool = False) -> Consistency:
        """The consistency term as one value; with `detach` the target is fixed."""
        return Consistency(
            self.form, self.alpha, self.tau_consistency, self.tau_target, self.own_label, self.start, self.ramp_up,
            target_gradient=not detach, centred=self.centred,
        )  # fmt: skip

    def schedules(self) -> Mapping[str, Schedule]:
        """The weight of the term."""
        return {"alpha": self.term().weight_at}

    def compare(
        self, query: Tensor, positive: Tensor, negatives: Tensor, exclude: Tensor | None = None, detach: bool = False
    ) -> Contrast:
        """Both terms of queries [b, D], with their positives [b, D], among negatives [K, D]: [b] each."""
        from co2.objective.contrast import contrast

        return contrast(
            query, positive, negatives, exclude=exclude, tau_instance=self.tau, term=self.term(detach),
            label_smoothing=self.label_smoothing, backend=self.backend,
        )  # fmt: skip

    def objective(self, step: Step, *compared: tuple[float, Any]) -> Output:
        """The loss is the weighted sum of what was compared, (weight, terms) each; what is reported are means."""
        total = sum(weight for weight, _ in compared)
        instance = sum(weight * terms.instance.mean() for weight, terms in compared)
        consistency = sum(weight * terms.consistency.mean() for weight, terms in compared)
        more = consistency - instance if self.form == "soft-label" else consistency  # whose place it takes
        loss = instance + step.at("alpha") * more if self.alpha > 0 else instance
        metrics = {INSTANCE.name: instance / total, CONSISTENCY.name: consistency / total}
        for best in (1, 5):
            among = sum(weight * (terms.rank < best).float().mean() for weight, terms in compared)
            metrics[f"top{best}"] = among / total
        return Output(loss, metrics)

    def idle(self) -> Mapping[str, str]:
        """What belongs to a term that has no weight, or has another form."""
        if not self.alpha:
            why = "without the consistency term. Give --method.alpha too, or leave it out."
            return dict.fromkeys(("ramp_up", "start", "form", "tau_target", "own_label", "centred"), why)
        if self.form == "soft-label":
            return {"tau_consistency": "of a soft label, whose prediction has the temperature --method.tau."}
        return {"own_label": "without a soft label. Give --method.form soft-label too, or leave it out."}

    def advice(self, seen: Seen) -> Mapping[str, str]:
        """A task that is solved too well, and embeddings that the term holds together."""
        advice = {}
        if seen.values.get(TOP1.name, 0.0) >= PERFECT:
            advice["leak"] = (
                "Queries find their own instance in 100% of cases, which usually means a short cut and not learning. "
                + self.short_cut(seen)
            )
        late = seen.done >= LAST_QUARTER and seen.step >= SPREAD_BY
        if self.alpha and late and seen.values.get("mean_norm", 0.0) > DRAWN_TOGETHER:
            gentler = "" if self.ramp_up >= 1 else ", or lets alpha rise over the whole run (--method.ramp-up 1)"
            advice["drawn together"] = (
                f"The embeddings still point nearly the same way (their mean has a length of "
                f"{seen.values['mean_norm']:.2f}, without the consistency term it ends near 0). Similarities that are "
                "all alike make that term small without two views agreeing on anything. It may be too strong: "
                "embeddings suffer from that, features not always. Compare with a run that has a lower --method.alpha "
                f"or a higher --method.tau-consistency{gentler}."
            )
        return advice

    def short_cut(self, seen: Seen) -> str:
        """Where the short cut may be that makes the task so easy, and what closes it."""
        return (
            "Check that the pictures differ from each other and that views are augmented strongly enough "
            "(--method.view.crop-scale, --method.view.jitter)."
        )

    def remedies(self, trouble: Trouble) -> tuple[str, ...]:
        """Softer temperatures, and a term that weighs less or later."""
        if trouble == "diverged":
            return ("a higher --method.tau",)
        if trouble == "collapsed" and self.alpha:
            return ("a lower --method.alpha", "--method.ramp-up 0.5, which lets alpha rise")
        if trouble == "narrow" and self.alpha and not self.ramp_up:
            return ("--method.ramp-up 0.5",)
        return ()
