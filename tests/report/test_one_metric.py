"""A page about a method with one metric of its own: everything of it follows from the declaration."""

import dataclasses
import json
import re

import pytest
from one_metric import STRETCH, Stretching

from co2 import recipes
from co2.demo import _summary
from co2.engine.progress import epoch_line, in_line
from co2.measures.metric import LOSS, told
from co2.report.page import report_runs
from co2.report.runs import read_run
from co2.report.story import findings, headline, pair_of, warning
from co2.report.tables import outcomes

OF_OTHERS = re.compile(r"instance|consistency|L_con|L_ins|contrastive|negatives", re.IGNORECASE)


@pytest.fixture
def stretched(tmp_path):
    def write(name, start, labels=True, **settings):
        folder = tmp_path / name
        folder.mkdir()
        experiment = dataclasses.replace(
            recipes.get("byol-small"), method=Stretching(**settings), epochs=2, out=str(folder)
        )
        (folder / "config.json").write_text(experiment.to_json())
        known = {"knn_top1": 0.5} if labels else {}
        lines = [{"kind": "epoch", "step": 0, "epoch": 0.0, "effective_rank": 6.0} | known]
        for step in (1, 2, 3, 4):
            values = {"loss": 1.0, "stretch": start - 0.5 * step, "rest": 0.1}
            lines.append({"kind": "train", "step": step, "epoch": step / 2} | values)
        lines.append({"kind": "epoch", "step": 4, "epoch": 2.0, "effective_rank": 9.0} | known)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return write


def of_the_runs(page):
    """The page without what is on every page: the style, what to do next, settings."""
    return page[page.index("<main>") : page.index("What to do next")]


@pytest.mark.parametrize("labels", [True, False])
def test_a_page_shows_the_one_metric_and_none_of_others(stretched, tmp_path, labels):
    folders = [stretched("short", 3.0, labels), stretched("long", 7.0, labels, width=16)]
    page = of_the_runs(report_runs(folders, tmp_path / "page.html").read_text())
    assert page.count("<svg") == 2
    assert "Stretch ends between 1.25 and 5.25" in page  # means over the last epoch
    assert 'data-label="final stretch">1.25<' in page
    assert "Line chart over epochs: stretch (furlongs). At the end: short 1.25, long 5.25." in page
    assert STRETCH.explanation in page
    assert "What is left" not in page
    assert ("kNN accuracy" in page) == labels
    assert not OF_OTHERS.search(page)


def test_sentences_about_it_claim_what_its_declaration_allows(stretched):
    runs = [read_run(stretched("short", 3.0, labels=False)), read_run(stretched("long", 7.0, labels=False, width=16))]
    assert pair_of(runs) is None
    assert findings(runs) == []
    assert headline(runs[:1], None) == "short: stretch 1.25, effective rank 9.0."
    assert warning(runs, STRETCH) == ""
    tied = dataclasses.replace(STRETCH, depends_on=("method.width",))
    assert "differ in method.width" in warning(runs, tied)


def test_the_demos_table_and_the_lines_of_progress_have_it(stretched):
    run = read_run(stretched("short", 3.0))
    table = _summary(outcomes([run], None))
    assert [column.header for column in table.columns] == ["network", "kNN accuracy", "S"]
    assert [list(column.cells) for column in table.columns] == [["short"], ["50.0%"], ["1.25"]]
    assert in_line(Stretching.metrics, {"loss": 1.0, "stretch": 2.0, "rest": 3.0}) == "S 2.00"
    assert epoch_line(1, 2, {"stretch": 2.0, "knn_top1": 0.5}, Stretching.metrics) == "epoch 1/2   S 2.00   kNN 50.0%"


def test_where_nothing_has_a_symbol_the_loss_is_told():
    assert told(Stretching.metrics[1:]) == (LOSS,)
    assert told([STRETCH, *Stretching.metrics]) == (STRETCH,)


def test_runs_of_two_methods_stand_on_one_page(stretched, make_run, tmp_path):
    page = of_the_runs(report_runs([make_run("moco"), stretched("short", 3.0)], tmp_path / "page.html").read_text())
    assert "Stretch ends at 1.25" in page
    assert "Instance loss ends at" in page
    assert "moco not measured, short 1.25" in page
    assert '<td class="missing" data-label="final stretch">–</td>' in page
