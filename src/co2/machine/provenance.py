"""Where a number comes from: the commit of the code that made it."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit(home: Path = Path(__file__).parents[3]) -> str | None:
    """Of the checkout that the code is run from, for records: with "-modified" where the package is not as committed.

    None where it is no checkout, but installed: the repository around it, if there is one, is somebody else's.
    """
    if not (home / ".git").exists():
        return None

    def ask_git(*question: str) -> str:
        return subprocess.run(["git", "-C", str(home), *question], capture_output=True, text=True).stdout.strip()

    try:
        head, changes = ask_git("rev-parse", "HEAD"), ask_git("status", "--porcelain", "--", "src/co2")
    except OSError:  # there is no git
        return None
    return f"{head}-modified" if head and changes else head or None
