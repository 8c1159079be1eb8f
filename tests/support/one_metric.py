"""A method that has nothing of what ours have: it measures one thing, and in a unit of its own."""

from dataclasses import dataclass

from co2.measures.metric import Metric
from co2.method import Method
from co2.views.view import View

STRETCH = Metric("stretch", "Stretch", "lower", "S", "furlongs", digits=2, explanation="How far apart two views lie.")


@dataclass(frozen=True, kw_only=True)
class Stretching(Method):
    """Not to be trained: what is looked at is made up."""

    width: int = 8
    """How wide."""
    metrics = (STRETCH, Metric("rest", "What is left"))

    def views(self, size):
        return (View(size=size),)

    def build(self, parts):
        raise NotImplementedError

    def loss(self, nets, step):
        raise NotImplementedError
