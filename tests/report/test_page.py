"""The page as a whole: well-formed, self-contained, and its numbers are those of the run folders."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from co2.errors import UserError
from co2.measures.numbers import duration
from co2.report.gallery import Gallery, Picture
from co2.report.page import Page, next_steps, page_html, report_runs, write_page
from co2.report.runs import read_run
from co2.report.story import Untrained

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Reader(HTMLParser):
    """Collects what a page holds, and complains about tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture
def demo_page(make_run) -> Page:
    runs = (
        read_run(make_run("moco"), name="MoCo", seconds=58.2),
        read_run(make_run("co2", alpha=1.0, knn=0.624), name="MoCo + CO2", seconds=61.0),
    )
    ring = Picture(np.full((3, 8, 8), 200, dtype=np.uint8), "ring")
    star = Picture(np.full((3, 8, 8), 100, dtype=np.uint8), "star")
    galleries = (Gallery(ring, {"untrained": [star, star], "MoCo": [ring, star], "MoCo + CO2": [ring, ring]}),)
    return Page("co2 demo", "Two runs.", runs, Untrained(0.281, 6.02), galleries, next_steps("runs/demo/co2"))


def test_the_page_is_well_formed_and_self_contained(demo_page: Page) -> None:
    text = page_html(demo_page)
    page = Reader(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert not re.search(r"https?:|//[\w.]+/|@import|url\((?!#)", text)
    for tag, name, value in page.attributes:
        if name in ("src", "href", "srcset", "action"):
            assert value.startswith("data:image/png;base64," if tag == "img" else "#")
    identifiers = [value for _, name, value in page.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_table_holds_the_numbers_of_the_run_folders(demo_page: Page) -> None:
    rows = {row[0].strip(): row[1:] for row in Reader(page_html(demo_page)).rows}
    assert rows["untrained"] == ["28.1%", "–", "–", "–", "6.0", "–"]
    for run, time in zip(demo_page.runs, ("58 seconds", "61 seconds"), strict=True):
        measured = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        train = [row for row in measured if row["kind"] == "train" and row["epoch"] > 11]
        last = [row for row in measured if row["kind"] == "epoch"][-1]
        mean = {name: sum(row[name] for row in train) / len(train) for name in ("instance", "consistency", "top1")}
        assert rows[run.name] == [
            f"{last['knn_top1']:.1%}",
            f"{mean['instance']:.3f}",
            f"{mean['consistency']:.3f}",
            f"{mean['top1']:.1%}",
            f"{last['effective_rank']:.1f}",
            time,
        ]


def test_every_chart_and_picture_has_a_text_alternative(demo_page: Page) -> None:
    page = Reader(page_html(demo_page))
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == page.tags.count("svg") == 4
    assert labels[3].endswith("At the end: MoCo 58.0%, MoCo + CO2 62.4%; untrained 28.1%.")
    assert sum((tag, name) == ("img", "alt") for tag, name, _ in page.attributes) == page.tags.count("img") == 7


def test_the_parts_of_the_story_are_there(demo_page: Page) -> None:
    text = unescape(page_html(demo_page))
    assert "62.4% with MoCo + CO2: 4.4 points higher with the consistency term." in text
    assert "untrained 0 of 2, MoCo 1 of 2, MoCo + CO2 2 of 2" in text
    assert "The loss is rising. That is expected" in text
    assert 'co2.load_backbone("runs/demo/co2")' in text
    assert "co2 pretrain co2-small --data PATH --out runs/mine" in text
    assert "one run of each kind" in text


def test_differing_settings_are_marked_and_come_first(demo_page: Page) -> None:
    text = page_html(demo_page)
    assert text.count('<tr class="differs">') == 1
    settings = Reader(text[text.index("<details>") : text.index("</details>") + len("</details>")]).rows
    assert settings[:2] == [["setting", "MoCo", "MoCo + CO2"], ["method.alpha differs", "0", "1"]]
    batch_size = str(demo_page.runs[0].experiment.batch_size)
    assert ["batch_size", batch_size, batch_size] in settings
    assert ["method.shuffle", "yes", "yes"] in settings


def test_everything_from_outside_is_escaped(demo_page: Page, make_run) -> None:
    bad = "<script>alert(1)</script>"
    run = read_run(make_run("bad"), name=bad)
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "advice", "step": 9, "epoch": 0.4, "text": bad}) + "\n")
    run = read_run(run.folder, name=bad)
    experiment = run.experiment.edit(data=bad, recipe=bad)
    (run.folder / "config.json").write_text(experiment.to_json())
    run = read_run(run.folder, name=bad)
    gallery = Gallery(Picture(np.zeros((3, 8, 8), dtype=np.uint8), bad), {bad: []})
    for runs in ((run,), (run, demo_page.runs[1]), (run, *demo_page.runs)):
        text = page_html(Page(bad, bad, runs, Untrained(0.3), (gallery,), next_steps(f"runs/{bad}")))
        assert "<script" not in text
        assert "script" not in Reader(text).tags
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("labels", [True, False])
def test_a_report_on_any_number_of_runs(make_run, tmp_path: Path, count: int, labels: bool) -> None:
    folders = [make_run(f"run-{i}", alpha=0.5 * i, seed=i, epochs=3, labels=labels) for i in range(count)]
    out = report_runs(folders, tmp_path / "new" / "page.html")
    text = out.read_text(encoding="utf-8")
    page = Reader(text)
    assert page.tags.count("svg") == 4
    assert ("kNN accuracy ends" in text) == labels
    assert ("Effective rank ends" in text) == (not labels)
    assert "co2.load_backbone" in text


def test_a_run_that_is_still_being_written(make_run, tmp_path: Path) -> None:
    folder = make_run("young", epochs=12, epochs_done=1)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])
    text = report_runs([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    Reader(text)
    assert "young has run 0.167 of its 12 epochs so far." in text


def test_mistakes_get_a_remedy(make_run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name one run folder or several"):
        report_runs([], tmp_path / "page.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Choose another place"):
        report_runs([make_run("run", epochs=2)], tmp_path / "file" / "page.html")


def test_writing_replaces_an_older_page(demo_page: Page, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!DOCTYPE html>" + "old " * 10**6)
    assert write_page(path, demo_page) == path
    assert path.read_text(encoding="utf-8") == page_html(demo_page)


def test_runs_on_a_page_need_names_of_their_own(demo_page: Page) -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        Page("title", "", (demo_page.runs[0], demo_page.runs[0]))


def test_durations() -> None:
    assert [duration(s) for s in (58.2, 119, 725, 7300, 300_000)] == [
        "58 seconds",
        "2 minutes",
        "12 minutes",
        "2.0 hours",
        "3.5 days (83 hours)",
    ]


def test_folders_whose_names_are_no_text_are_reported_on(make_run, tmp_path) -> None:
    folders = [make_run(name, epochs=2) for name in ("not \udcff text", "not \udcfe text")]
    page = report_runs(folders, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "not \\udcff text" in page
    assert Reader(page).rows[2][0].strip() == "not \\udcff text"


def test_what_is_no_page_is_not_written_over(make_run, tmp_path) -> None:
    run = make_run("run", epochs=2)
    weights = tmp_path / "backbone.safetensors"
    weights.write_bytes(b"weights")
    with pytest.raises(UserError, match="is no page, and is left alone"):
        report_runs([run], weights)
    assert weights.read_bytes() == b"weights"
    page = report_runs([run], tmp_path / "page.html")
    assert report_runs([run], page).read_text().startswith("<!DOCTYPE html>")
