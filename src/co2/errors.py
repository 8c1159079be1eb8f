"""What a user can get wrong, told in a plain sentence with a remedy."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

_LONGEST_WORD = 100  # that is compared with others, which takes the longer the longer it is


def escaped(text: str, keep: str = "") -> str:
    r"""Text in which nothing acts on a terminal: what cannot be printed (escape sequences, marks that turn the
    direction of writing, bytes that are no UTF-8) as Python shows it, \n or \x1b, but for the characters to keep."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode()
        for character in text
    )


class UserError(ValueError):
    """A mistake in what the user asked for. The command line prints its message alone, without a traceback.

    Whatever names from files are in the message, nothing in it acts on a terminal.
    """

    exit_code = 2

    def __str__(self) -> str:
        return escaped(super().__str__(), keep="\n\t")


class RunError(UserError):
    """Something went wrong in the middle of a run that no setting could have told: a full disk, a loss of NaN."""

    exit_code = 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: " Did you mean 'resnet50'?", or nothing when no known name is close."""
    close = difflib.get_close_matches(word[:_LONGEST_WORD], list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
