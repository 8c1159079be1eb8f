"""Numbers for people: a mean with its deviation, and lengths of time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A number over several runs."""

    mean: float
    deviation: float | None
    """Standard deviation of the sample; None for a single run."""
    count: int

    def text(self, decimals: int = 2) -> str:
        """`82.60 ± 0.21`"""
        mean = f"{self.mean:.{decimals}f}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.{decimals}f}"


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and standard deviation of the sample; None of nothing."""
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def duration(seconds: float) -> str:
    """A length of time in words: 74 seconds, 12 minutes, 1.6 hours, 3.1 days (75 hours)."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86400:,.1f} days ({seconds / 3600:,.0f} hours)"
