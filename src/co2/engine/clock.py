"""Time on the clock of the device that does the work."""

from __future__ import annotations

import time

import torch


class Moment:
    """Now, on the device's clock: when a GPU has done all that was asked of it so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._time = time.perf_counter()

    def until(self, later: Moment) -> float:
        """Seconds. Both must have passed: wait for the GPU first."""
        if self._event is None or later._event is None:
            return later._time - self._time
        return float(self._event.elapsed_time(later._event)) / 1e3
