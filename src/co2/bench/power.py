"""How much power a GPU draws, as far as its driver says."""

from __future__ import annotations

import statistics
import subprocess
import threading
from types import TracebackType

import torch

_EVERY = 0.5  # seconds


class PowerMeter:
    """Reads the power of a GPU again and again while something runs: `with PowerMeter(device) as meter: ...`"""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watts: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def watts(self) -> float | None:
        """The mean; None where nobody tells."""
        return statistics.fmean(self._watts) if self._watts else None

    def __enter__(self) -> PowerMeter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        # The first reading is a moment after the start: a driver's reading is a mean over the last moments.
        while not self._stopped.wait(_EVERY):
            watts = read_watts(self._device)
            if watts is None:
                return
            self._watts.append(watts)


def read_watts(device: torch.device) -> float | None:
    """The power that the device draws now; None where nobody tells."""
    if device.type != "cuda":
        return None
    # By its name, because nvidia-smi does not count GPUs as CUDA does where some are hidden.
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    asked = ["nvidia-smi", f"--id={name}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):  # no such program, or "[N/A]"
        return None
