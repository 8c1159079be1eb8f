"""What a user can get wrong, told in a plain sentence with a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_WORD = 100  # that is compared with others, which takes the longer the longer it is


class UserError(ValueError):
    """A mistake in what the user asked for. The command line prints its message alone, without a traceback."""

    exit_code = 2


class RunError(UserError):
    """Something went wrong in the middle of a run that no setting could have told: a full disk, a loss of NaN."""

    exit_code = 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: " Did you mean 'resnet50'?", or nothing when no known name is close."""
    close = difflib.get_close_matches(word[:_LONGEST_WORD], list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
