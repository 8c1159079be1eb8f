"""How this process was started: alone, or by a launcher such as torchrun as one of many. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from co2.errors import UserError

_TOLD_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """This process's place among the processes of a run, on all machines and on this one."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """What torchrun, or another launcher that speaks its language, says about this process."""
    if any(name not in environment for name in _TOLD_BY_LAUNCHERS):
        return Launch()
    try:
        rank, count, local_rank = (int(environment[name]) for name in _TOLD_BY_LAUNCHERS[:3])
        # A launcher that does not say how many are on this machine has told the highest number at least.
        local_count = int(environment.get("LOCAL_WORLD_SIZE", local_rank + 1))
    except ValueError as error:
        raise UserError(f"The launcher's RANK, WORLD_SIZE or LOCAL_RANK is no number: {error}.") from error
    return Launch(rank, count, local_rank, local_count)
