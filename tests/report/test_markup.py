"""Text from files stays text in HTML, Markdown and CSV."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from co2.report.markup import Html, Markdown, active_content, csv_cells

READER = MarkdownIt("commonmark", {"html": True}).enable("table")
READER.validateLink = lambda _: True
EVIL = "<script>alert('x')</script> & [a](javascript:b) ![c](http://d) `e` *f* | g <!-- h"


def test_values_are_escaped_once_and_markup_is_not():
    inner = Html.of("<b>{name}</b>", name=EVIL)
    assert Html.of("<p>{inner}</p>", inner=inner) == f"<p>{inner}</p>"
    assert "<script" not in inner
    assert inner.count("&lt;script&gt;") == 1
    assert Html.joined([inner, "<i>"], "\n") == f"{inner}\n&lt;i&gt;"
    assert Html.of("{n}", n=3) == "3"


@given(st.text(max_size=30) | st.sampled_from([EVIL, "a\n\n# b", "a\n---", "&lt;", "](x)"]))
def test_text_is_read_as_text_from_markdown(text):
    """In a line of its own, in a cell of a table, and in code."""
    for page in (
        Markdown.of("Said: {text}.", text=text),
        Markdown.table(["a", "b"], [[text, text]]),
        Markdown.of("Said: {code}.", code=Markdown.code(text)),
        Markdown.block(text),
    ):
        tokens = READER.parse(page)
        kinds = {inner.type for token in tokens for inner in [token, *(token.children or ())]}
        assert not kinds & {"html_block", "html_inline", "image", "heading_open", "hr", "bullet_list_open"}
        links = [one for token in tokens for one in token.children or () if one.type == "link_open"]
        assert not links


def test_code_is_shown_letter_for_letter():
    for text in ("co2 study", "a ` b `` c", "`x`", "a\\*b <i>"):
        (inline,) = [
            token for token in READER.parse(Markdown.of("{c}", c=Markdown.code(text))) if token.type == "inline"
        ]
        assert [child.content for child in inline.children] == [text]
        (block,) = READER.parse(Markdown.block(f"{text}\n```\n{text}"))
        assert block.content == f"{text}\n```\n{text}\n"


@pytest.mark.parametrize("text", ["=1+1", "+a", "-a", "@a", "\t=1", "-1+cmd|' /C calc'!A0"])
def test_text_is_no_formula(text):
    assert csv_cells({"a": text}) == {"a": f"'{text}"}


@pytest.mark.parametrize("cell", [-1.5, 0, None, "-1.5", "-1.5 2e-05", "+3", "a=1", ""])
def test_numbers_stay_numbers(cell):
    file = io.StringIO()
    csv.DictWriter(file, ["a"]).writerow(csv_cells({"a": cell}))
    assert file.getvalue().strip().strip('"') == ("" if cell is None else str(cell))


def test_what_a_browser_would_obey_is_found():
    assert active_content("<img src=x>") == "HTML"
    assert active_content("[a](data:text/html,x)") == "a link that leads to no page"
    assert active_content("![a](https://example.org/x.png)") == "a picture from elsewhere"
    assert active_content("a < b, `x[i]`, [c](https://x.org) <https://x.org>, ![d](d.png), the data: 3") == ""
