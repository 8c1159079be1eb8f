"""Known patterns in a run's numbers, told in plain words when they show. Each is told once."""

from __future__ import annotations

from collections.abc import Mapping

from co2.config import Experiment


class Advisor:
    """Reads the numbers of a run as they come."""

    def __init__(self, experiment: Experiment, has_batch_norm: bool) -> None:
        self.experiment = experiment
        self.has_batch_norm = has_batch_norm
        self._told: set[str] = set()
        self._lowest_loss = float("inf")

    def after_interval(self, step: int, values: Mapping[str, float]) -> list[str]:
        """What a logging interval's averages show."""
        advice = []
        negatives = self.experiment.negatives
        if negatives.source == "queue":
            keys_per_step = self.experiment.batch_size * (2 if negatives.symmetric else 1)
            full_at = -(-negatives.size // keys_per_step)
            if step <= full_at and values["loss"] > self._lowest_loss:
                advice += self._once(
                    "queue fills",
                    f"The loss is rising. That is expected: the queue starts with random vectors, which are easy to "
                    f"tell apart, and real keys replace them until step {full_at:,}. It falls again after that.",
                )
        if values["top1"] >= 0.999 and negatives.size >= 256:
            advice += self._once("leak", self._about_perfect_accuracy())
        self._lowest_loss = min(self._lowest_loss, values["loss"])
        return advice

    def after_epoch(self, values: Mapping[str, float]) -> list[str]:
        """What the health at the end of an epoch shows."""
        if values["mean_norm"] > 0.95 or values["effective_rank"] < 1.5:
            return self._once(
                "collapse",
                f"The features have collapsed: all images get nearly the same one (effective rank "
                f"{values['effective_rank']:.1f}, norm of the mean feature {values['mean_norm']:.2f}). Lower "
                "--objective.alpha or the learning rate, or raise --objective.tau-consistency.",
            )
        return []

    def _about_perfect_accuracy(self) -> str:
        found = "Queries find their own instance in 100% of cases, which usually means a short cut and not learning. "
        encoder = self.experiment.encoder
        if self.experiment.negatives.source == "queue" and self.has_batch_norm and not encoder.shuffle_keys:
            return found + (
                "Batch statistics give away which key belongs to which query: use --encoder.shuffle-keys with "
                "--encoder.groups 4 or more."
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
