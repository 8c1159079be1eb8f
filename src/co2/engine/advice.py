"""Known patterns in a run's numbers, told in plain words when they show. Each is told once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from co2.experiment import Experiment
from co2.method import Seen

COLLAPSED_UNIFORMITY = -0.05  # 0 is all features in one point; trained ones are at -1 and below
# Share of the untrained network's effective rank. Of the runs recorded in results/, those below it at their first
# measurement had all lost a tenth of their epochs by then, or never came to learn.
NARROW_START = 1 / 3


class Advisor:
    """Reads the numbers of a run as they come: what any run can show is known here, what a method's can it says."""

    def __init__(self, experiment: Experiment, has_batch_norm: bool) -> None:
        self.experiment = experiment
        self.has_batch_norm = has_batch_norm
        self._told: set[str] = set()
        self._lowest: dict[str, float] = {}
        self._untrained_rank = 0.0  # unknown until it is measured

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """What a run has written before it is continued: what there was to say of it has been said."""
        for row in rows:
            values = {name: value for name, value in row.items() if isinstance(value, int | float)}
            if row["kind"] == "train" and values.keys() >= {"epoch", "loss"}:
                self.after_interval(row["step"], values, values["epoch"] / self.experiment.epochs)
            elif row["kind"] == "epoch" and values.keys() >= {"epoch", "uniformity", "effective_rank", "mean_norm"}:
                if row["step"] == 0:
                    self.untrained(values)
                else:
                    self.after_epoch(round(values["epoch"]), row["step"], values)

    def after_interval(self, step: int, values: Mapping[str, float], done: float = 0.0) -> list[str]:
        """What a logging interval's averages show, when a share `done` of the run lies behind it."""
        advice = self._of_the_method(step, done, values)
        for name, value in values.items():
            self._lowest[name] = min(value, self._lowest.get(name, value))
        return advice

    def untrained(self, values: Mapping[str, float]) -> None:
        """The health before the first step, to compare with."""
        self._untrained_rank = values["effective_rank"]

    def after_epoch(self, epochs_done: int, step: int, values: Mapping[str, float]) -> list[str]:
        """What the health at the end of an epoch shows."""
        untrained_rank, self._untrained_rank = self._untrained_rank, 0.0  # compared with the first measurement alone
        # An untrained network's embeddings can lie close together too; one point is what no training leaves behind.
        if values["uniformity"] > COLLAPSED_UNIFORMITY:
            remedies = ("a lower learning rate (--optimisation.base-learning-rate)", *self._remedies("collapsed"))
            return self._once(
                "collapse",
                f"The embeddings have collapsed: all images get nearly the same one (uniformity "
                f"{values['uniformity']:.3f}, effective rank {values['effective_rank']:.1f}). What helps is "
                f"{', or '.join(remedies)}.",
            )
        if values["effective_rank"] < NARROW_START * untrained_rank:
            return self._once("narrow start", self._about_a_narrow_start(values["effective_rank"], untrained_rank))
        return self._of_the_method(step, epochs_done / self.experiment.epochs, values)

    def _about_a_narrow_start(self, rank: float, untrained_rank: float) -> str:
        warms_up = self.experiment.optimisation.warm_up > 0
        remedies = ["a longer --optimisation.warm-up" if warms_up else "--optimisation.warm-up 0.05"]
        remedies += self._remedies("narrow")
        return (
            f"The embeddings fill fewer dimensions than before training (effective rank {rank:.1f}, untrained "
            f"{untrained_rank:.1f}): the first steps were too large. They may spread again, but that costs epochs. "
            f"A gentler start keeps them: {' and '.join(remedies)}, or a lower learning rate."
        )

    def _of_the_method(self, step: int, done: float, values: Mapping[str, float]) -> list[str]:
        seen = Seen(step, done, values, self._lowest, self.experiment.batch_size, self.has_batch_norm)
        return [text for name, words in self.experiment.method.advice(seen).items() for text in self._once(name, words)]

    def _remedies(self, trouble: Any) -> tuple[str, ...]:
        return self.experiment.method.remedies(trouble)

    def _once(self, name: str, text: str) -> list[str]:
        if name in self._told:
            return []
        self._told.add(name)
        return [text]
