"""Results folders that somebody else has made: what their files say, what their names are, and what kind of files they
are. Each ends in tables or in a sentence, within 20 seconds, with nothing changed that was not named."""

import contextlib
import copy
import csv
import io
import json
import os
import resource
import shutil
import signal
import stat
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from co2.cli import main
from co2.study.plan import read_plan

SECONDS, GIB = 20, 2**30
SCRIPT = "<script>alert(1)</script>"
IMAGE = '<img src="https://example.org/x.png" onerror="alert(1)">'


@contextlib.contextmanager
def bounded():
    """What hangs or takes more than 2.5 GiB fails."""

    def too_long(*_):
        raise TimeoutError(f"not done in {SECONDS} seconds")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    earlier = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2.5 * GIB / 1024


def tree(folder, *but):
    """Everything below a folder, but for some of it: what it is, and what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if any(path == one or one in path.parents for one in but):
            continue
        information = path.lstat()
        kind = stat.S_IFMT(information.st_mode)
        content = os.readlink(path) if stat.S_ISLNK(kind) else ""
        if stat.S_ISREG(kind):
            content = path.read_bytes() if information.st_size < 2**20 else information.st_size
        found[str(path.relative_to(folder))] = (kind, content)
    return found


class Active(HTMLParser):
    """Notes what a browser would run or fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "iframe", "object", "embed", "link", "base", "form", "svg", "style", "meta"):
            self.found.append(tag)
        for name, value in attributes:
            address = (value or "").strip().lower()
            if name.startswith("on"):
                self.found.append(name)
            if name in ("href", "src") and address.split(":")[0] in ("javascript", "vbscript", "data", "file"):
                self.found.append(value)
            if tag == "img" and (address.startswith("//") or "://" in address):
                self.found.append(value)


def active_in(markdown):
    """The same of a Markdown page, by a reader that lets all of it through."""
    active, reader = Active(), MarkdownIt("commonmark", {"html": True}).enable("table")
    reader.validateLink = lambda _: True
    active.feed(reader.render(markdown))
    return active.found


@pytest.fixture
def study(planned, fill, tmp_path, monkeypatch, request):
    """A folder with two studies, records, a failure and notes; and somebody's files beside it."""
    if "figures" not in request.node.name:  # drawing takes a second each time
        monkeypatch.setattr("co2.study.figures.draw", lambda *_: [])
    folder, plan = planned("claim", "vary", seeds=(0, 1), vary=("network.groups=[2]",))
    co2 = plan.grids["claim"].variants[1].name
    fill(folder, plan, "claim", {"moco": {0: 60.0, 1: 62.0}, co2: {0: 63.0}})
    (folder / "cells" / f"{co2}-s1.failed.json").write_text('{"cell": "x", "exit_code": 1, "error": "It broke."}')
    (folder / "notes.md").write_text("What the data are.\n")
    (folder / "claim.notes.md").write_text("It did not reproduce.\n")
    victim = tmp_path / "victim"
    (victim / "mine" / "checkpoints").mkdir(parents=True)
    (victim / "mine" / "config.json").write_text(plan.base.to_json())
    (victim / "mine" / "backbone.safetensors").write_bytes(b"weights")
    for ending in ("md", "csv", "svg", "png"):
        (victim / f"v.{ending}").write_text("mine")
    return folder


def edited(path, change):
    """The JSON of a file, changed in place."""
    plain = json.loads(path.read_text())
    changed = change(plain)
    path.write_text(json.dumps(plain if changed is None else changed))


def reported(folder, capsys, code=None):
    """Report on a folder by the command line, on a page beside it; what was said."""
    page = folder.parent / "PAGE.md"
    with bounded():
        found = main(["study", "report", str(folder), "--out", str(page)])
    said = capsys.readouterr()
    assert code in (None, found), said.err
    assert found in (0, 2)
    assert bool(said.err) == (found == 2)
    assert said.err.replace("\n", "").isprintable()
    return said.out + said.err


def rename_study(plan, name):
    plan["studies"][name] = plan["studies"].pop("claim")


def of_variant(**changes):
    return lambda plan: plan["studies"]["claim"]["variants"][1].update(changes)


def of_grid(**changes):
    return lambda plan: plan["studies"]["claim"].update(changes)


FORGED_PLANS = {
    "a study called by a path": lambda plan: rename_study(plan, "../../victim/v"),
    "a study called by another path": lambda plan: rename_study(plan, "../victim/v"),
    "a study that nobody knows": lambda plan: rename_study(plan, "notes"),
    "a variant called by a path": of_variant(name="../../../victim/mine"),
    "a variant called by a folder": of_variant(name="a/b"),
    "a hidden variant": of_variant(name=".git"),
    "a variant called by a formula": of_variant(name="=1+1"),
    "a variant called by nothing": of_variant(name=""),
    "a variant called by a number": of_variant(name=3),
    "a variant with a long name": of_variant(name="x" * 300),
    "a label of lines": of_variant(label="a\n# b"),
    "a baseline that is not there": of_variant(baseline="nobody"),
    "a baseline that is a number": of_variant(baseline=7),
    "changes of nothing that there is": of_variant(changes={"no.such": 1}),
    "changes of a command to the terminal": of_variant(changes={"\x1b[2J": 1}),
    "a study called by a command to the terminal": lambda plan: rename_study(plan, "\x1b[2J"),
    "changes that are text": of_variant(changes="x"),
    "changes of the data": of_variant(changes={"data": "ftp://127.0.0.1/x"}),
    "changes of the run folder": of_variant(changes={"out": "/tmp/elsewhere"}),
    "a place that is negative": of_variant(place=-1),
    "a place that is true": of_variant(place=True),
    "a command that is a number": of_grid(command=5),
    "seeds that are text": of_grid(seeds=["0", "1"]),
    "seeds that are true": of_grid(seeds=[True]),
    "seeds that are one": of_grid(seeds=[0, 0]),
    "no seeds": of_grid(seeds=[]),
    "more seeds than anybody trains": of_grid(seeds=list(range(100_000))),
    "no variants": of_grid(variants=[]),
    "variants that are a mapping": of_grid(variants={"a": 1}),
    "protocols that are a list": of_grid(protocols=["knn"]),
    "a protocol that nobody knows": of_grid(protocols={"../x": {}}),
    "settings that a protocol has not": of_grid(protocols={"knn": {"evil": 1}}),
    "settings of another kind": of_grid(protocols={"knn": {"k": "many"}}),
    "no studies": lambda plan: plan.update(studies={}),
    "studies that are a list": lambda plan: plan.update(studies=[]),
    "a share that is text": lambda plan: plan.update(validate="half"),
    "a share above one": lambda plan: plan.update(validate=3),
    "a size that is text": lambda plan: plan.update(view_size="x"),
    "a base that is a list": lambda plan: plan.update(base=[]),
    "a base of more epochs than can be": lambda plan: plan["base"].update(epochs=10**15),
    "no base": lambda plan: plan.pop("base") and None,
    "a list": lambda plan: [plan],
}


@pytest.mark.parametrize("forge", FORGED_PLANS.values(), ids=FORGED_PLANS)
def test_a_forged_plan_is_told_in_a_sentence_and_nothing_is_written(study, capsys, forge):
    edited(study / "study.json", forge)
    before = tree(study.parent)
    said = reported(study, capsys, code=2)
    assert "study.json" in said
    assert main(["study", "claim", "--data", "shapes:40:16", "--out", str(study), "--redo", "--device", "cpu"]) == 2
    assert tree(study.parent) == before


def test_a_study_called_by_an_absolute_path_writes_nothing_there(study, capsys):
    edited(study / "study.json", lambda plan: rename_study(plan, str(study.parent / "victim" / "v")))
    before = tree(study.parent)
    reported(study, capsys, code=2)
    assert tree(study.parent) == before


def test_all_that_is_wrong_with_a_plan_is_told_at_once(study, capsys):
    def forge(plan):
        plan["validate"] = "half"
        plan["studies"]["claim"]["seeds"] = ["0"]
        plan["studies"]["vary"]["variants"][1]["name"] = "../x"

    edited(study / "study.json", forge)
    said = reported(study, capsys, code=2)
    for place in ("validate cannot be half", "studies.claim.seeds", "studies.vary.variants.1.name cannot be ../x"):
        assert place in said
    assert said.count(str(study / "study.json")) == 1


FORGED_RECORDS = {
    "no seconds": lambda record: record["seconds"].update(wall=None),
    "negative seconds": lambda record: record["seconds"].update(wall=-5),
    "seconds that are true": lambda record: record["seconds"].update(wall=True),
    "classes that are a mapping": lambda record: record["data"].update(classes={"a": 1}),
    "images that are a script": lambda record: record["data"].update(train=SCRIPT),
    "an accuracy of 1e308": lambda record: record["evaluations"]["knn"]["numbers"].update(top1=1e308),
    "an accuracy of 10^400": lambda record: record["evaluations"]["knn"]["numbers"].update(top1=10**400),
    "an accuracy above 100": lambda record: record["evaluations"]["knn"]["numbers"].update(top1=101),
    "an accuracy below 0": lambda record: record["evaluations"]["knn"]["numbers"].update(top1=-1),
    "an accuracy that is true": lambda record: record["evaluations"]["knn"]["numbers"].update(top1=True),
    "an accuracy that is no number": lambda record: record["evaluations"]["knn"]["numbers"].update(top1=float("nan")),
    "an accuracy that is text": lambda record: record["evaluations"]["knn"]["numbers"].update(top1="60"),
    "a judge called by a path": lambda record: record["evaluations"].update({"../x": record["evaluations"]["knn"]}),
    "epochs that are negative": lambda record: record["curves"]["train"].update(epoch=[-1.0], top1=[0.5]),
    "shares above one": lambda record: record["curves"]["train"].update(epoch=[1.0], top1=[60.0]),
    "a curve that is true": lambda record: record["curves"]["train"].update(epoch=[1.0], instance=[True]),
    "a device of lines": lambda record: record["made_with"].update(device="a\nb"),
    "settings that are text": lambda record: record.update(settings="x"),
    "a list": lambda record: [record],
}


@pytest.mark.parametrize("forge", FORGED_RECORDS.values(), ids=FORGED_RECORDS)
def test_a_forged_record_is_left_out_and_named(study, capsys, forge):
    edited(study / "cells" / "moco-s0.json", forge)
    reported(study, capsys, code=0)
    page = (study.parent / "PAGE.md").read_text()
    assert "moco-s0: left out" in page
    assert "moco-s0.json is damaged" in page
    assert not active_in(page)


@pytest.mark.parametrize("name", ["study.json", "cells/moco-s0.json", "cells/moco-co2-a0.3-t0.1-s1.failed.json"])
@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "", "null", "\xff", '{"error": 1e999}'])
def test_json_that_is_none_is_told_or_left_out(study, capsys, name, text):
    (study / name).write_bytes(text.encode("latin-1"))
    said = reported(study, capsys, code=2 if name == "study.json" else 0)
    page = study.parent / "PAGE.md"
    assert name in said or "left out" in page.read_text() or "its note is damaged" in page.read_text()


def test_a_quote_that_is_not_closed_is_shown_as_it_is(study, capsys):
    edited(study / "study.json", of_grid(command="co2 study claim --data 'x"))
    reported(study, capsys, code=0)
    assert "co2 study claim --data 'x" in (study.parent / "PAGE.md").read_text()


@pytest.mark.parametrize("evil", [SCRIPT, IMAGE, "[x](javascript:alert(1))", "![x](https://example.org/x.png)", "`<b>"])
def test_nothing_that_a_folder_says_is_active_on_its_page(study, capsys, evil):
    def forge(plan):
        for variant in plan["studies"]["claim"]["variants"]:
            variant["label"] = f"{variant['label']} {evil}"
        plan["studies"]["claim"]["command"] = f"co2 study claim\n```\n{evil}\n```"
        plan["base"]["recipe"] = f"`{evil}`"
        plan["base"]["data"] = f"x/{evil}"
        plan["base"]["network"]["backbone"] = evil

    edited(study / "study.json", forge)
    for path in (study / "cells").glob("*-s?.json"):
        edited(path, lambda record: record["made_with"].update(device=evil))
    edited(study / "cells" / "moco-co2-a0.3-t0.1-s1.failed.json", lambda note: note.update(error=evil))
    reported(study, capsys, code=0)
    for path in (study.parent / "PAGE.md", study / "claim.md"):
        text = path.read_text()
        assert not active_in(text), text


def test_a_label_is_text_in_a_figure(planned, fill):
    folder, plan = planned("claim", seeds=(0, 1))
    fill(folder, plan, "claim", {"moco": {0: 60.0, 1: 62.0}})
    edited(folder / "study.json", lambda plan: plan["studies"]["claim"]["variants"][0].update(label=SCRIPT))
    assert main(["study", "report", str(folder)]) == 0
    assert SCRIPT not in (folder / "claim.svg").read_text()
    drawing = ElementTree.parse(folder / "claim.svg")  # as XML that can be read
    assert not [one for one in drawing.iter() if one.tag.endswith(("script", "foreignObject"))]


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        (SCRIPT, "HTML"),
        (IMAGE, "HTML"),
        ("<!--> <b onclick=x>", "HTML"),
        ("[x](javascript:alert(1))", "a link"),
        ("[x](<JavaScript:alert(1)>)", "HTML|a link"),
        ("[x](java&Tab;script&colon;alert(1))", "a link"),
        ("[x]\n\n[x]: javascript:alert(1)", "a link"),
        ("![x](https://example.org/x.png)", "a picture"),
        ("![x](//example.org/x.png)", "a picture"),
        ("![x][y]\n\n[y]: https://example.org/x.png", "a picture"),
    ],
)
def test_notes_that_a_browser_would_obey_are_put_on_no_page(study, capsys, notes, said):
    (study / "notes.md").write_text(f"What the data are.\n\n{notes}\n")
    told = reported(study, capsys, code=2)
    assert "notes.md has " in told
    assert any(word in told for word in said.split("|"))
    assert not (study.parent / "PAGE.md").exists()


def test_notes_may_have_what_notes_have(study, capsys):
    text = "x < y, H<sub>2</sub>O, <https://example.org>, [a](notes.md#x), ![p](claim.svg): see [b](https://x.org/a:b)."
    (study / "notes.md").write_text(text)
    reported(study, capsys, code=0)
    assert "H<sub>2</sub>O, <https://example.org>" in (study.parent / "PAGE.md").read_text()


def test_notes_that_are_no_text_are_told(study, capsys):
    (study / "notes.md").write_bytes("Größe".encode("latin-1"))
    assert "notes.md: not UTF-8 text" in reported(study, capsys, code=2)


@pytest.mark.parametrize("label", ["=1+1", "+1+cmd", "-1+cmd", "@SUM(A1)", "=HYPERLINK(1)"])
def test_a_label_is_no_formula_in_a_table_and_numbers_stay_numbers(study, capsys, label):
    edited(study / "study.json", of_variant(label=label))
    co2 = read_plan(study).grids["claim"].variants[1].name
    reported(study, capsys, code=0)
    rows = list(csv.DictReader(io.StringIO((study / "claim.csv").read_text())))
    assert {row["label"] for row in rows if row["variant"] == co2} == {f"'{label}"}
    for row in rows:
        for name in ("n", "mean", "difference"):
            assert row[name] == "" or float(row[name]) is not None
        assert not row["values"].startswith("'")


@pytest.mark.parametrize("storage", ["/tmp/elsewhere", "../victim"])
def test_no_plan_decides_where_features_are_put(study, storage):
    edited(study / "study.json", lambda plan: plan["studies"]["claim"]["protocols"]["knn"].update(storage=storage))
    assert read_plan(study).grids["claim"].protocols["knn"]["storage"] == ""


def test_redo_leaves_a_run_alone_that_no_study_has_made(study, words_tiny, capsys):
    """Somebody's own run lies where a cell of that name would."""
    victim = study.parent / "victim"
    (victim / "mine").rename(victim / "moco-s0")
    (study / "cells" / "moco-s0.json").unlink()
    before = tree(study.parent)
    words = ["study", "claim", *words_tiny, "--seeds", "0", "--only", "moco", "--epochs", "3", "--redo"]
    assert main([*words, "--out", str(study), "--runs", str(victim)]) == 2
    assert "No study has noted that it made" in capsys.readouterr().err
    assert tree(study.parent) == before


@pytest.mark.parametrize("place", ["runs", "runs/moco-s0", "cells"])
def test_nothing_is_written_or_deleted_through_a_link(study, words_tiny, capsys, place):
    victim = study.parent / "victim"
    if place == "cells":
        shutil.move(study / "cells", victim / "cells")
    link = study / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim / {"runs": "", "cells": "cells"}.get(place, "mine"))
    (study / "runs").mkdir(exist_ok=True)
    (study / "runs" / "moco-s0.sessions.json").write_text('[{"began": 1, "ended": 2}]')
    before = tree(study.parent)
    words = ["study", "claim", *words_tiny, "--seeds", "0", "--only", "moco", "--epochs", "3", "--redo"]
    assert main([*words, "--out", str(study)]) == 2
    assert f"{link} is a link" in capsys.readouterr().err
    assert tree(study.parent) == before


# Each file of a folder, exchanged for something else.


def another(folder, path):
    others = sorted(one for one in folder.rglob("*") if one.is_file() and one != path)
    shutil.copy(others[len(path.name) % len(others)], path)


KINDS = {
    "pipe": lambda folder, path: os.mkfifo(path),
    "link": lambda folder, path: path.symlink_to(folder.parent / "victim" / "v.md"),
    "loop": lambda folder, path: path.symlink_to(path.name),
    "device": lambda folder, path: path.symlink_to("/dev/zero"),
    "folder": lambda folder, path: path.mkdir(),
    "empty": lambda folder, path: path.touch(),
    "sparse": lambda folder, path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
    "another": another,
}
PLACES = ["study.json", "cells/moco-s0.json", "cells/moco-co2-a0.3-t0.1-s1.failed.json", "notes.md", "claim.notes.md"]
PLACES += ["claim.md", "claim.csv", "claim.csv.writing", "study.json.lock", "cells", "runs"]
PLACES += ["cells/moco-s1.failed.json", "cells/moco-s0.json.writing", "../PAGE.md"]


def exchange(folder, place, kind):
    path = Path(os.path.normpath(folder / place))
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](folder, path)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_kind_of_file_lies_where_figures_go_a_report_ends(study, capsys, kind):
    for place in ("claim.svg", "claim.png"):
        exchange(study, place, kind)
    before = tree(study.parent, study, study.parent / "PAGE.md")
    reported(study, capsys)
    assert tree(study.parent, study, study.parent / "PAGE.md") == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_kind_of_file_lies_there_a_report_ends(study, capsys, place, kind):
    exchange(study, place, kind)
    before = tree(study.parent, study, study.parent / "PAGE.md")
    reported(study, capsys)
    assert tree(study.parent, study, study.parent / "PAGE.md") == before


# Fuzzing by structure.

ODD_VALUES = [None, True, False, -1, 0, 1, 3, 2**62, 2**63, 10**400, 0.5, 1e308, -1e-300, "", "x", "..", "-x", "=1"]
ODD_VALUES += ["../../victim/v", "/abs", "\u202e", "\0", "\ud800", SCRIPT, IMAGE, "a" * 5000]
ODD_VALUES += [[], [[]], [1, "a"], {}, {"a": {}}, {"": 1}]
ODD = st.sampled_from(ODD_VALUES) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places_in(plain, path=()):
    yield path
    inside = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for name, value in inside:
        yield from places_in(value, (*path, name))


@st.composite
def forged(draw, good):
    """A good file with some of its parts taken away, exchanged, or called otherwise."""
    plain = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([path for path in places_in(plain) if path] or [("",)]))
        outer = plain
        for name in way:
            outer = outer[name]
        deed = draw(st.sampled_from(["exchange", "remove", "rename", "add"]))
        if deed == "exchange" or isinstance(outer, list):
            outer[last] = draw(ODD)
        elif deed == "add":
            outer[draw(st.text(max_size=6))] = draw(ODD)
        else:
            value = outer.pop(last, None)
            if deed == "rename":
                outer[draw(st.sampled_from(["../x", "", "=1", "x", "\0", SCRIPT]))] = value
    return plain


def report_on_forgeries(study, capsys, examples):
    good = {name: json.loads((study / name).read_text()) for name in ("study.json", "cells/moco-s0.json")}
    page = study.parent / "PAGE.md"
    tried = {"read": 0, "told": 0}

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def report(data):
        for name, plain in good.items():
            content = data.draw(forged(plain)) if data.draw(st.booleans()) else plain
            (study / name).write_text(json.dumps(content))
        page.unlink(missing_ok=True)
        before = tree(study.parent, study)
        said = reported(study, capsys)
        tried["read" if said.startswith("Wrote") else "told"] += 1
        assert tree(study.parent, study, page) == {name: one for name, one in before.items() if name != "PAGE.md"}
        assert all(path.suffix in (".md", ".csv", ".json") for path in study.rglob("*") if path.is_file())
        if page.exists():
            assert not active_in(page.read_text())

    report()
    print(f"forged folders: {tried}")
    assert min(tried.values()) > examples // 20


def test_forged_plans_and_records_end_in_a_page_or_a_sentence(study, capsys):
    report_on_forgeries(study, capsys, examples=60)


@pytest.mark.slow
def test_many_forged_plans_and_records_end_in_a_page_or_a_sentence(study, capsys):
    report_on_forgeries(study, capsys, examples=5000)


def test_the_good_folder_is_good(study, capsys):
    """Else nothing here would be tried."""
    assert read_plan(study) is not None
    reported(study, capsys, code=0)
    assert "left out" not in (study.parent / "PAGE.md").read_text()
    with pytest.raises(TimeoutError), bounded():
        signal.raise_signal(signal.SIGALRM)
    assert len(active_in(f"{SCRIPT}\n\n[x](javascript:a) {IMAGE}")) == 4
