"""Known patterns in a run's numbers, told in plain words when they show. Each is told once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from co2.config import Experiment

PERFECT = 0.999  # instance-discrimination accuracy that real learning does not reach
COLLAPSED_UNIFORMITY = -0.05  # 0 is all features in one point; trained ones are at -1 and below
# Share of the untrained network's effective rank. Of the runs recorded in results/, those below it at their first
# measurement had all lost a tenth of their epochs by then, or never came to learn.
NARROW_START = 1 / 3
# Length of the mean of all unit embeddings: 1 is all of them pointing the same way. Read off the runs of MoCo with CO2
# that are recorded in results/ beside MoCo alone, and not tried on others: of the 13 above it in their last quarter all
# are worse than MoCo by kNN of embeddings, 8 by kNN of features and 8 by the linear classifier. So it is told as a
# doubt.
DRAWN_TOGETHER = 0.7
LAST_QUARTER = 0.75
SPREAD_BY = 1000  # steps; before, embeddings have not had the time to leave each other, with or without the term


class Advisor:
    """Reads the numbers of a run as they come."""

    def __init__(self, experiment: Experiment, has_batch_norm: bool) -> None:
        self.experiment = experiment
        self.has_batch_norm = has_batch_norm
        self._told: set[str] = set()
        self._lowest_loss = float("inf")
        self._untrained_rank = 0.0  # unknown until it is measured

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """What a run has written before it is continued: what there was to say of it has been said."""
        for row in rows:
            values = {name: value for name, value in row.items() if isinstance(value, int | float)}
            if row["kind"] == "train" and values.keys() >= {"loss", "top1"}:
                self.after_interval(row["step"], values)
            elif row["kind"] == "epoch" and values.keys() >= {"epoch", "uniformity", "effective_rank", "mean_norm"}:
                if row["step"] == 0:
                    self.untrained(values)
                else:
                    self.after_epoch(round(values["epoch"]), row["step"], values)

    def after_interval(self, step: int, values: Mapping[str, float]) -> list[str]:
        """What a logging interval's averages show."""
        advice = []
        negatives = self.experiment.negatives
        keys_per_step = self.experiment.batch_size * (2 if negatives.symmetric else 1)
        full_at = -(-negatives.size // keys_per_step) if negatives.source == "queue" else 0
        if step <= full_at and values["loss"] > self._lowest_loss:
            advice += self._once(
                "queue fills",
                f"The loss is rising. That is expected: the queue starts with random vectors, which are easy to "
                f"tell apart, and real keys replace them until step {full_at:,}. It falls again after that.",
            )
        if step > full_at and values["top1"] >= PERFECT and negatives.size >= 256:
            advice += self._once("leak", self._about_perfect_accuracy())
        self._lowest_loss = min(self._lowest_loss, values["loss"])
        return advice

    def untrained(self, values: Mapping[str, float]) -> None:
        """The health before the first step, to compare with."""
        self._untrained_rank = values["effective_rank"]

    def after_epoch(self, epochs_done: int, step: int, values: Mapping[str, float]) -> list[str]:
        """What the health at the end of an epoch shows."""
        untrained_rank, self._untrained_rank = self._untrained_rank, 0.0  # compared with the first measurement alone
        # An untrained network's embeddings can lie close together too; one point is what no training leaves behind.
        if values["uniformity"] > COLLAPSED_UNIFORMITY:
            return self._once(
                "collapse",
                f"The embeddings have collapsed: all images get nearly the same one (uniformity "
                f"{values['uniformity']:.3f}, effective rank {values['effective_rank']:.1f}). Lower the learning rate "
                "(--optimisation.base-learning-rate) or --objective.alpha, let alpha rise (--objective.ramp-up 0.5), "
                "or raise --negatives.momentum.",
            )
        if values["effective_rank"] < NARROW_START * untrained_rank:
            return self._once("narrow start", self._about_a_narrow_start(values["effective_rank"], untrained_rank))
        late = epochs_done >= LAST_QUARTER * self.experiment.epochs and step >= SPREAD_BY
        if self.experiment.objective.alpha and late and values["mean_norm"] > DRAWN_TOGETHER:
            return self._once("drawn together", self._about_a_term_too_strong(values["mean_norm"]))
        return []

    def _about_a_narrow_start(self, rank: float, untrained_rank: float) -> str:
        objective = self.experiment.objective
        warms_up = self.experiment.optimisation.warm_up > 0
        remedies = ["a longer --optimisation.warm-up" if warms_up else "--optimisation.warm-up 0.05"]
        remedies += ["--objective.ramp-up 0.5"] if objective.alpha and not objective.ramp_up else []
        return (
            f"The embeddings fill fewer dimensions than before training (effective rank {rank:.1f}, untrained "
            f"{untrained_rank:.1f}): the first steps were too large. They may spread again, but that costs epochs. "
            f"A gentler start keeps them: {' and '.join(remedies)}, or a lower learning rate."
        )

    def _about_a_term_too_strong(self, mean_norm: float) -> str:
        objective = self.experiment.objective
        gentler = "" if objective.ramp_up >= 1 else ", or lets alpha rise over the whole run (--objective.ramp-up 1)"
        return (
            f"The embeddings still point nearly the same way (their mean has a length of {mean_norm:.2f}, without the "
            "consistency term it ends near 0). Similarities that are all alike make that term small without two views "
            "agreeing on anything. It may be too strong: embeddings suffer from that, features not always. Compare "
            f"with a run that has a lower --objective.alpha or a higher --objective.tau-consistency{gentler}."
        )

    def _about_perfect_accuracy(self) -> str:
        found = "Queries find their own instance in 100% of cases, which usually means a short cut and not learning. "
        encoder = self.experiment.encoder
        if self.experiment.negatives.source == "queue" and self.has_batch_norm and not encoder.shuffle_keys:
            return found + (
                "Batch statistics give away which key belongs to which query: use --encoder.shuffle-keys with "
                "--encoder.groups 4 or more."
            )
        if self.experiment.negatives.source == "queue":
            return found + (
                "Most often the encoder changes so fast that the older keys in the queue look different from any new "
                "one: raise --negatives.momentum, lower the learning rate, or shorten the queue (--negatives.size)."
            )
        return found + (
            "Check that the pictures differ from each other and that views are augmented strongly enough "
            "(--views.crop-scale, --views.jitter)."
        )

    def _once(self, name: str, text: str) -> list[str]:
        if name in self._told:
            return []
        self._told.add(name)
        return [text]
