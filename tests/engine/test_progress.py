"""What a terminal shows while a run goes on."""

import pytest
from rich.console import Console

from co2.engine.progress import Bar, Lines
from co2.methods.contrastive import Contrastive

NUMBERS = {"instance": 5.0, "consistency": 0.5, "top1": 0.25, "images_per_second": 1234.0, "waiting": 0.1}


@pytest.fixture
def bar():
    made = Bar(epochs=4, metrics=Contrastive.metrics)
    yield made
    made.close()


def shown(bar):
    """The line of the bar."""
    console = Console(width=200, record=True)
    console.print(bar.progress.get_renderable())
    return console.export_text()


def test_steps_are_counted_and_time_goes_with_the_work(bar):
    """Of four steps the first two take a quarter of the time of the others."""
    bar.begin(4, 1, [0.0, 0.25, 0.5, 1.5, 2.5].__getitem__)
    (task,) = bar.progress.tasks
    assert (task.completed, task.total) == (0.25, 2.5)
    assert "1/4" in shown(bar)
    bar.interval(3, NUMBERS)
    assert (task.completed, task.percentage) == (1.5, 60.0)
    line = shown(bar)
    assert "3/4" in line
    assert "L_ins 5.000  L_con 0.500  found 25.0%  1,234 images/s" in line


def test_what_comes_before_the_first_step_is_counted_too(bar):
    bar.preparing("reading images", 1200, 50_000)
    assert "Reading images" in shown(bar)
    assert "1,200/50,000" in shown(bar)
    bar.begin(10, 0, float)
    assert "Reading images" not in shown(bar)
    assert "0/10" in shown(bar)


def test_the_line_of_an_epoch_is_about_all_of_its_steps(capsys):
    lines = Lines(epochs=2, metrics=Contrastive.metrics)
    lines.begin(20, 4, float)  # a run that is continued in the middle of an epoch
    lines.interval(8, NUMBERS | {"instance": 6.0})
    lines.interval(10, NUMBERS | {"instance": 3.0})
    lines.epoch(1, {"effective_rank": 8.0})
    lines.interval(20, NUMBERS | {"instance": 1.0})
    lines.epoch(2, {})
    first, second = capsys.readouterr().out.splitlines()
    assert "L_ins 5.000" in first
    assert "effective rank 8.0" in first
    assert "L_ins 1.000" in second
