"""A stopwatch for the parts of a training step: `Trainer(..., lap=Stopwatch(device).lap)`.

On a GPU a lap is an event on the stream. While a step is captured in a CUDA graph, such an event becomes a node of the
graph (that is what `external` means), so that each replay records it anew, and the parts of a step that no Python runs
between can be told apart. One event stands for each lap, so they are read after each step, before the next one begins.
"""

from __future__ import annotations

import statistics
import time

import torch

START = "start"
BETWEEN = "between steps"
"""What a step takes beside its parts: the copy of a batch to where a captured step reads it, and gaps."""


class Stopwatch:
    """Notes when each part of a step ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._order: list[str] = []  # the laps of a step
        self._events: dict[str, torch.cuda.Event] = {}
        self._moments: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Part `part` of a step ends here; `start` begins a step."""
        if torch.compiler.is_compiling():
            return  # a compiled forward pass is one piece, and stays it
        if part == START:
            self._order = []
        self._order.append(part)
        if self._device.type != "cuda":
            self._moments[part] = time.perf_counter()
            return
        if part not in self._events:
            self._events[part] = torch.cuda.Event(enable_timing=True, external=True)
        self._events[part].record()

    def read(self) -> dict[str, float]:
        """Seconds of each part of the last step. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {part: self._between(before, part) for before, part in zip(self._order, self._order[1:], strict=False)}

    def _between(self, before: str, after: str) -> float:
        if self._device.type != "cuda":
            return self._moments[after] - self._moments[before]
        return self._events[before].elapsed_time(self._events[after]) / 1e3


def typical(steps: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part over several steps."""
    return {part: statistics.median(step[part] for step in steps) for part in steps[0]}


def shares(parts: dict[str, float], whole: float, rest: str = BETWEEN) -> dict[str, float]:
    """What share of `whole` seconds each part takes, and what is left."""
    left = max(0.0, whole - sum(parts.values()))
    return {part: seconds / whole for part, seconds in (parts | {rest: left}).items()}
