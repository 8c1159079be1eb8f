"""What every benchmark leaves behind: a table to read, and a record that says which command made which numbers."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from co2.errors import RunError, UserError
from co2.machine.device import cores
from co2.machine.provenance import commit

if TYPE_CHECKING:
    import torch


def provenance(device: torch.device) -> dict[str, Any]:
    """The command, commit, versions and device behind the numbers. For before they are measured: a checkout may move on
    meanwhile."""
    import torch

    import co2

    versions = {"python": platform.python_version(), "co2": co2.__version__, "torch": torch.__version__}
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            import triton

            versions["triton"] = triton.__version__
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": versions,
        "device": device_facts(device),
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    if device.type != "cuda":
        processor = torch.cpu.get_capabilities().get("cpu_name", platform.machine())
        return {"name": "CPU", "processor": processor, "cores": cores(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
        "cores": cores(),
    }


def device_name(device: torch.device) -> str:
    """The same in a few words."""
    facts = device_facts(device)
    if device.type == "cuda":
        return str(facts["name"])
    return f"CPU ({facts['threads']} thread{'s' if facts['threads'] != 1 else ''})"


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows of a table. Quantiles, low_ms and high_ms, stand beside a median."""
    names = dict.fromkeys(key for row in rows for key in row)
    columns = [name for name in names if not name.endswith(("low_ms", "high_ms"))]
    cells = [[_cell(row, column) for column in columns] for row in rows]
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for line in cells:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 170).print(table)


def _cell(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if isinstance(value, float):
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    if column.endswith("_ms") and f"{column[:-2]}low_ms" in row:
        text += f" ({row[f'{column[:-2]}low_ms']:.3g} {row[f'{column[:-2]}high_ms']:.3g})"
    return text


def check_folder(folder: Path, option: str) -> None:
    """Refuses a folder that cannot be made or written to at once, and not after minutes of work for what goes there."""
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise UserError(f"{option} needs a folder at {folder}, but {existing} is a file. Choose another {option}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"Nothing can be written to {existing}. Change its permissions, or choose another {option}.")


def check_out(out: str, name: str) -> None:
    """Whether `write_record` will have a place for the record."""
    if not out:
        return
    path = _record_path(out, name)
    check_folder(path.parent, "--out")
    if path.is_dir():
        raise UserError(f"The record would be written to {path}, which is a folder. Choose another --out.")


def write_record(record: dict[str, Any], out: str, name: str) -> None:
    """The record as DIR/NAME.json, or as the file that `out` names if it ends so. Nothing where `out` is empty."""
    if not out:
        return
    path = _record_path(out, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise RunError(
            f"The record cannot be written to {path}: {error.strerror}. What was measured stands above; measure again "
            "with another --out."
        ) from error
    print(f"The record is in {path}.")


def _record_path(out: str, name: str) -> Path:
    return Path(out) if out.endswith(".json") else Path(out, f"{name}.json")
