"""The README, the pages under docs and in results: what they link to is there."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "results").glob("*.md"))]


def prose(page):
    """The page without its blocks of code, in which a `#` is no heading and brackets are no link."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def headings(page):
    """The names by which GitHub's pages can be linked into: of each heading its letters, digits and hyphens."""
    for title in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):  # another site
            continue
        path, _, heading = target.partition("#")
        there = page.parent / unquote(path) if path else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        assert not heading or heading in headings(there), f"{page.name} links to {target}: no such heading"


def test_the_pages_do_link():
    assert sum(len(re.findall(r"\]\(", prose(page))) for page in PAGES) > 100
