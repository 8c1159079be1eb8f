"""What is reported of a run under a name, declared once: logs, curves, tables and pages are made from declarations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A number that is reported: how it is called and shown, which way is better, between what it may be compared."""

    name: str
    """Under which it stands in metrics.jsonl."""
    title: str
    """What a curve or a column is called."""
    better: Literal["higher", "lower", "neither"] = "neither"
    symbol: str = ""
    """What it is called in a line of progress. Only what has one has a place there, on pages and in tables."""
    unit: str = ""
    """What a value counts: nats, directions. %: it is a share, 0 to 1, and shown in percent."""
    digits: int = 3
    """Behind the point, where it is no share."""
    depends_on: tuple[str, ...] = ()
    """Settings, by their dotted names, on which its level depends: runs that differ in one cannot be compared by it."""
    explanation: str = ""
    """A sentence or two for somebody who looks at its curve."""
    from_zero: bool = False
    """Whether its curve is drawn from zero on, where it is no share."""
    summarised: bool = True
    """Whether it has a column in every table of a study. Those about curves have one for it in any case."""
    weight: str = ""
    """The setting that is its weight in the loss, by its dotted name, where it is a term that a run may leave out."""

    @property
    def called(self) -> str:
        """The title, as it stands inside a sentence."""
        return self.title[:1].lower() + self.title[1:] if self.title[1:2].islower() else self.title

    @property
    def term(self) -> str:
        """What this part of a loss is called where it may be left out: the consistency term."""
        return f"{self.called.removesuffix(' loss')} term"

    def shown(self, value: float) -> str:
        """A value as text."""
        return f"{value:.1%}" if self.unit == "%" else f"{value:.{self.digits}f}"


LOSS = Metric("loss", "Loss", "lower", "loss", depends_on=("method.name",))
KNN = Metric(
    "knn_top1", "kNN accuracy", "higher", "kNN", "%", depends_on=("data",),
    explanation="How often the nearest neighbours of a picture vote for its class, which the training never saw. This "
    "is what tells whether the features are useful.",
)  # fmt: skip
EFFECTIVE_RANK = Metric(
    "effective_rank", "Effective rank", "neither", "effective rank", "directions", digits=1, from_zero=True,
    depends_on=("data", "method.name", "method.dimension"),
    explanation="How many directions the embeddings, what comes out of the head, spread over. Towards 1, they have "
    "collapsed: all pictures look the same to the network.",
)  # fmt: skip
HEALTH = (
    EFFECTIVE_RANK,
    KNN,
    Metric("knn_top5", "kNN accuracy among the first five", "higher", unit="%", depends_on=("data",)),
    Metric("knn_embedding_top1", "kNN accuracy of embeddings", "higher", "of embeddings", "%", depends_on=("data",)),
    Metric("alignment", "Alignment", "lower", depends_on=("data", "method.name")),
    Metric("uniformity", "Uniformity", "lower", depends_on=("data", "method.name")),
    Metric("mean_norm", "Length of the mean embedding", "lower", depends_on=("data", "method.name")),
)
"""What is measured of every network at the end of an epoch, whatever its method."""


def told(declared: Iterable[Metric]) -> tuple[Metric, ...]:
    """Of what methods declare, each name once: what has a symbol. The loss, where nothing has."""
    return tuple({metric.name: metric for metric in declared if metric.symbol}.values()) or (LOSS,)
