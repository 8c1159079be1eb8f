"""What is seen of an evaluation: a bar where somebody looks, lines in a log file."""

import io
import sys

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from co2.evaluation.progress import Bar, Lines, shown


@pytest.fixture
def screen():
    return io.StringIO()


@pytest.fixture
def bar(screen):
    console = Console(file=screen, force_terminal=True, width=300, color_system=None)
    with RichProgress(console=console, auto_refresh=False) as rich_bar:
        yield Bar(rich_bar)


def test_a_bar_shows_what_is_done_and_how_far_it_is(bar, screen):
    bar.about("knn, [red]runs/[/]mine, seed 0")  # names are no markup
    assert list(bar.track("abcd", "Features", 4)) == list("abcd")
    bar.bar.refresh()
    text = screen.getvalue()
    assert "knn, [red]runs/[/]mine, seed 0: Features" in text
    assert "100%" in text
    bar.stage("Neighbours", 8)
    bar.advance(2)
    bar.bar.refresh()
    last = screen.getvalue()[len(text) :]
    assert "seed 0: Neighbours" in last
    assert "25%" in last


def test_what_is_said_stays_as_it_is(bar, screen, capsys):
    bar.say("1 of 3 images could not be read; the first is /data/[/]a.png.")
    assert "the first is /data/[/]a.png." in screen.getvalue()
    Lines().say("[/]b.png")
    assert capsys.readouterr().err == "[/]b.png\n"


@pytest.mark.parametrize("somebody_looks", [True, False])
def test_only_a_terminal_gets_a_bar(somebody_looks, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: somebody_looks, raising=False)
    with shown() as progress:
        assert isinstance(progress, Bar if somebody_looks else Lines)
