"""The numbers that the documents quote are those of the recorded runs."""

import csv
import gzip
import lzma
import re
import statistics
import tarfile
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "RESULTS.md", RESULTS / "README.md")
MEASURES = {"kNN": "knn", "of embeddings": "embeddings", "kNN of embeddings": "embeddings", "linear": "linear"}
NUMBER = re.compile(r"([+−-]?)(\d+\.\d+) ± (\d+\.\d+)")


def lines(name):
    opener = gzip.open if name.endswith(".gz") else open
    with opener(RESULTS / name, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


RUNS = {row["id"]: row for row in lines("runs.csv")}
CELLS = defaultdict(dict)  # by STUDY/CELL: the run of each seed
for identity, row in RUNS.items():
    cell, _, seed = identity.rpartition("-s")
    CELLS[cell][seed] = row


def quoted(page):
    """(runs, measure, sign, mean, deviation) of every number that stands in a table with a column of runs."""
    header = []
    for line in page.read_text(encoding="utf-8").splitlines():
        parts = [part.strip() for part in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not parts:
            header = []
        elif not header:
            header = parts
        elif "runs" in header and (named := re.findall(r"`([^`]+/[^`]+)`", parts[header.index("runs")])):
            for title, part in zip(header, parts, strict=False):
                for found in NUMBER.finditer(part):
                    measure = MEASURES.get(title) or MEASURES[parts[0].rpartition(", ")[2]]
                    yield named[0], measure, *found.groups()


QUOTED = [pytest.param(*one, id=f"{page.name}-{one[0]}-{one[1]}") for page in PAGES for one in quoted(page)]


def spread(values):
    return statistics.mean(values), statistics.stdev(values)


@pytest.mark.parametrize(("cell", "measure", "sign", "mean", "deviation"), QUOTED)
def test_a_quoted_number_is_that_of_its_runs(cell, measure, sign, mean, deviation):
    ours = {seed: float(row[measure]) for seed, row in CELLS[cell].items()}
    if sign:  # a lead over the baseline of the same study, seed by seed
        study, _, name = cell.partition("/")
        base = CELLS[f"{study}/{name.partition('-')[0]}"]
        ours = {seed: value - float(base[seed][measure]) for seed, value in ours.items()}
    found, around = spread(list(ours.values()))
    quoted_mean = float(mean) * (-1 if sign in ("−", "-") else 1)
    assert found == pytest.approx(quoted_mean, abs=0.0051)
    assert around == pytest.approx(float(deviation), abs=0.0051)


def test_the_documents_quote_what_was_measured():
    assert len(QUOTED) >= 40


def test_every_study_that_the_documents_name_was_recorded():
    studies = {identity.partition("/")[0] for identity in RUNS}
    kept = studies | {path.name.removesuffix(".tar.xz") for path in (RESULTS / "records").iterdir()}
    for page in (*PAGES, ROOT / "docs" / "SETTINGS.md"):
        for line in page.read_text(encoding="utf-8").splitlines():
            for named in re.findall(r"`((?:cifar10|tiny-imagenet-100)[\w.-]*)(?:/[^`]*)?`", line):
                assert named in kept, f"{page.name}: {named}"


def test_every_run_has_its_curves_and_stands_in_the_diary():
    curves = {row["id"] for row in lines("curves.csv.gz")}
    diary = (RESULTS / "LOG.md").read_text(encoding="utf-8")
    for identity in RUNS:
        assert identity in curves, identity
        assert re.search(rf"^### {re.escape(identity.partition('/')[0])}$", diary, re.MULTILINE), identity


def test_records_are_whole():
    for path in sorted((RESULTS / "records").glob("*.tar.xz")):
        with lzma.open(path) as file, tarfile.open(fileobj=file) as archive:
            names = archive.getnames()
        assert names, path
        assert all(name.startswith(path.name.removesuffix(".tar.xz")) for name in names), path


def test_transfer_names_runs_that_there_are():
    assert {row["id"] for row in lines("transfer.csv")} <= set(RUNS)
