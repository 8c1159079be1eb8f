"""Text of formats that readers obey: HTML and Markdown. What is put into a template is escaped there, once, unless it
is of that format already, so that nothing that a file says can become a part of the page that it is shown on.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self


class _Markup(str):
    """Text of a format. The writers of pages take this and no other text."""

    __slots__ = ()

    @classmethod
    def of(cls, template: str, /, *values: object, **named: object) -> Self:
        """A template with its `{}`s and `{name}`s filled in, each value escaped."""
        by_name = {name: cls.escaped(value) for name, value in named.items()}
        return cls(template.format(*map(cls.escaped, values), **by_name))

    @classmethod
    def joined(cls, parts: Iterable[object], between: str = "") -> Self:
        """Parts one after the other, those escaped that are plain text."""
        return cls(between.join(map(cls.escaped, parts)))

    @classmethod
    def escaped(cls, value: object) -> Self:
        """Something as it is to be read; what is of this format already stays as it is."""
        return value if isinstance(value, cls) else cls(cls._escape(str(value)))

    @staticmethod
    def _escape(text: str) -> str:
        raise NotImplementedError


class Html(_Markup):
    """HTML, to stand between tags or, in quotes, as the value of an attribute that is no address and no script."""

    @staticmethod
    def _escape(text: str) -> str:
        return html.escape(text)


class Markdown(_Markup):
    """Markdown, to stand in a line or in the cell of a table. HTML in it is text as well."""

    @staticmethod
    def _escape(text: str) -> str:
        line = " ".join(re.sub(r"([\\`*|]|\](?=[(\[:]))", r"\\\1", text).splitlines())
        return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", re.sub(r"&(?=#?\w+;)", "&amp;", line))

    @classmethod
    def code(cls, text: str) -> Self:
        """Text within a line, letter for letter."""
        text = " ".join(text.splitlines())
        fence = _fence(text, 1)
        space = " " if text.startswith("`") or text.endswith("`") else ""
        return cls(f"{fence}{space}{text}{space}{fence}")

    @classmethod
    def paragraphs(cls, parts: Iterable[str]) -> Self:
        """Parts with lines between them, and none for those that are empty."""
        return cls.joined(filter(None, parts), "\n\n")

    @classmethod
    def block(cls, text: str) -> Self:
        """Lines of their own, letter for letter."""
        fence = _fence(text, 3)
        return cls(f"{fence}\n{text}\n{fence}")

    @classmethod
    def table(cls, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Self:
        """The first column to the left, the others to the right."""
        rule = cls("--- | " + " | ".join(["---:"] * (len(headings) - 1)))
        lines = [cls.joined(headings, " | "), rule, *(cls.joined(row, " | ") for row in rows)]
        return cls("\n".join(f"| {line} |" for line in lines))


def _fence(text: str, least: int) -> str:
    """More backticks than there are in the text one after the other."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def csv_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for `csv.DictWriter`, in which no text is a formula to the program that opens it; numbers stay numbers."""
    return {name: f"'{cell}" if _is_formula(cell) else cell for name, cell in row.items()}


def _is_formula(cell: object) -> bool:
    return isinstance(cell, str) and cell[:1] in tuple("=+-@\t\r") and not re.fullmatch(r"[-+.\de ]+", cell)


_HARMLESS = re.compile(r"</?(?:b|br|code|details|em|i|kbd|p|strong|sub|summary|sup)\s*/?>|<https?://[^\s<>]*>", re.I)
_SCHEME = r"\s*<?\s*(?!https?:|mailto:)[a-z][\w+.\s-]*:"


def active_content(text: str) -> str:
    """What a browser might obey or fetch in somebody's Markdown, in words, or nothing."""
    if re.search(r"<[a-z/!?]", _HARMLESS.sub("", text), re.I):
        return "HTML"
    links = re.sub(r"[\\\x00-\x08\x0b-\x1f]", "", html.unescape(text))  # as they are read
    if re.search(rf"\]\s*[(:]{_SCHEME}", links, re.I):
        return "a link that leads to no page"
    if re.search(r"!\[[^\]]*\](?!\((?!\s*<?\s*(?:[a-z][\w+.\s-]*:|[/\\]{2})))", links, re.I):
        return "a picture from elsewhere"
    return ""
