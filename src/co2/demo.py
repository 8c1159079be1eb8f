"""MoCo and MoCo + CO2 side by side on rendered shapes, on the CPU, and a page that compares them.

Each run is an ordinary `co2 pretrain` in a process of its own; this module starts both, watches their metrics, looks
at the backbones they leave, and writes the page. It loads torch, which takes seconds, when the runs are on their way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from co2 import recipes
from co2.engine.progress import in_line
from co2.errors import UserError
from co2.experiment import Experiment
from co2.files import read_text
from co2.machine.device import cores
from co2.measures.metric import HEALTH, KNN, Metric, told
from co2.report.gallery import Gallery, Picture
from co2.report.page import Page, next_steps, write_page
from co2.report.runs import read_run
from co2.report.story import untrained_of
from co2.report.tables import Outcome, outcomes
from co2.runs.rows import read_rows

if TYPE_CHECKING:
    from torch import nn

    from co2.data.open import DataSplits
    from co2.data.source import ImageSource

METHODS = {"MoCo": "demo-moco", "MoCo + CO2": "demo-co2"}
UNTRAINED = "untrained"
PAGE = "index.html"
GALLERY_QUERIES = 6
GALLERY_NEIGHBOURS = 6

# Has Linux's C library keep freed memory for what comes next. By default it hands tensors of the demo's sizes back to
# the system and asks for them again, dozens of times in a step, and a twentieth of the time goes into that.
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}


def demo(out: str, *, epochs: int | None = None, seed: int = 0) -> Path:
    """Run the demo in the folder `out` and return the path of the page."""
    folder = Path(out)
    lengths = {} if epochs is None else {"epochs": epochs}
    experiments = {name: recipes.get(recipe).edit(seed=seed, **lengths) for name, recipe in METHODS.items()}
    _make_room(folder)
    console = Console(highlight=False)
    console.print(
        "Pre-training the same small network twice on pictures of shapes, without labels: with MoCo, and with MoCo and "
        "the consistency term of CO2. This takes a minute or two.\n"
    )
    runs = [_start(name, experiment, folder) for name, experiment in experiments.items()]
    with _ended_with_us(runs):
        neighbours = _Neighbours(runs[0].experiment)
        neighbours.look_up_untrained()  # now, when there is nothing to watch yet
        _watch(runs, console)

    console.print("\nLooking up nearest neighbours in the two trained networks ...")
    for run in runs:
        neighbours.look_up_trained(run)
    records = tuple(read_run(run.folder, name=run.name, seconds=run.seconds) for run in runs)
    untrained = untrained_of(records)
    page = write_page(
        folder / PAGE,
        Page(
            title="MoCo and MoCo + CO2, side by side",
            introduction=_introduction(runs[0].experiment, neighbours.data),
            runs=records,
            untrained=untrained,
            galleries=neighbours.galleries(),
            next_steps=next_steps(runs[-1].folder),
        ),
    )
    console.print(_summary(outcomes(records, untrained)))
    console.print(f"\nThe page that compares them: [bold]{page.resolve().as_uri()}[/bold]", soft_wrap=True)
    return page


@dataclass
class _Run:
    name: str
    folder: Path
    experiment: Experiment
    process: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def latest(self) -> dict[str, Any]:
        """The newest value of everything that the run has measured so far; `judged` is the epoch of the newest kNN."""
        values: dict[str, Any] = {}
        for row in read_rows(self.folder):
            if row["kind"] != "advice":
                values |= row
            if row["kind"] == "epoch":
                values["judged"] = row["epoch"]
        return values


def _make_room(folder: Path) -> None:
    """Remove an earlier demo; leave anything else alone."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file. Give the demo a folder with --out.")
    known = {PAGE, *METHODS.values(), *(f"{recipe}.log" for recipe in METHODS.values())}
    foreign = sorted({path.name for path in folder.glob("*")} - known)
    if foreign:
        raise UserError(
            f"{folder} holds things that are not from a demo ({', '.join(foreign[:3])}). Give another --out."
        )
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made anew: {error.strerror}. Give another --out.") from error


def _start(name: str, experiment: Experiment, folder: Path) -> _Run:
    recipe = METHODS[name]
    run, log = folder / recipe, folder / f"{recipe}.log"
    words = ["pretrain", recipe, "--out", str(run), "--device", "cpu"]
    words += ["--epochs", str(experiment.epochs), "--seed", str(experiment.seed)]
    # Two processes of one thread each get more done on two cores than two threads in turn.
    threads = str(max(1, cores() // len(METHODS)))
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "co2.cli", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_KEPT_MEMORY, "OMP_NUM_THREADS": threads},
        )
    return _Run(name, run, experiment, process, log)


def _watch(runs: list[_Run], console: Console) -> None:
    """Show how the runs get on until all have ended."""
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        shown: dict[str, float] = {}
        while any(run.process.poll() is None for run in runs) or any(not run.seconds for run in runs):
            values = {run.name: run.latest() for run in runs}
            for run in runs:
                if run.process.poll() is not None and not run.seconds:
                    run.seconds = time.monotonic() - run.started
                    if run.process.returncode:
                        raise UserError(
                            f"{run.name} ended early:\n{read_text(run.log, errors='replace').strip()[-2000:]}"
                        )
            if console.is_terminal:
                live.update(_progress_table(runs, values))
            else:
                _print_epochs(runs, values, shown, console)
            time.sleep(0.25)
        values = {run.name: run.latest() for run in runs}
        if console.is_terminal:
            live.update(_progress_table(runs, values))
        else:
            _print_epochs(runs, values, shown, console)


@contextmanager
def _ended_with_us(runs: list[_Run]) -> Iterator[None]:
    try:
        yield
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


def _progress_table(runs: list[_Run], values: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method")
    metrics = (*told(runs[0].experiment.method.metrics), KNN)
    for heading in ("epoch", *(metric.symbol for metric in metrics), "images/s"):
        table.add_column(heading, justify="right", min_width=8)
    for run in runs:
        row = values[run.name]
        speed = row.get("images_per_second")
        table.add_row(
            run.name,
            f"{row.get('epoch', 0):.1f}/{run.experiment.epochs}",
            *(_number(metric, row.get(metric.name)) for metric in metrics),
            "-" if speed is None else f"{speed:,.0f}",
        )
    return table


def _print_epochs(
    runs: list[_Run], values: Mapping[str, Mapping[str, Any]], shown: dict[str, float], console: Console
) -> None:
    """Where nobody watches, a line for each epoch whose network has been judged."""
    for run in runs:
        row = values[run.name]
        epoch = int(row.get("judged", 0))
        if epoch <= shown.get(run.name, 0):
            continue
        shown[run.name] = epoch
        numbers = in_line((*run.experiment.method.metrics, KNN), row)
        console.print(f"{run.name:<11} epoch {epoch:>2}/{run.experiment.epochs}  {numbers}")


def _number(metric: Metric, value: float | None) -> str:
    return "-" if value is None else metric.shown(value)


class _Neighbours:
    """A few held-out pictures, and which pictures of the bank each network finds nearest to them."""

    def __init__(self, experiment: Experiment) -> None:
        import torch

        from co2.data.open import open_data

        torch.set_num_threads(1)  # the runs have a core each, and threads that wait for one another would take it away
        self.experiment = experiment
        self.data = open_data(experiment.data)
        assert self.data.bank is not None
        assert self.data.test is not None
        assert self.data.test.labels is not None
        self.bank: ImageSource = self.data.bank
        # The first picture of each of a few classes.
        first = {int(label): place for place, label in reversed(list(enumerate(self.data.test.labels)))}
        chosen = [first[label] for label in sorted(first)][:: max(1, len(first) // GALLERY_QUERIES)]
        self.queries: ImageSource = self.data.test.subset(chosen[:GALLERY_QUERIES])
        self.found: dict[str, list[list[int]]] = {}  # for each network [queries, neighbours], in the order of the page

    def look_up_untrained(self) -> None:
        from co2.engine.trainer import build_networks

        self._look_up(UNTRAINED, build_networks(self.experiment, len(self.data.train))["encoder"].backbone)

    def look_up_trained(self, run: _Run) -> None:
        from co2.checkpoint import load_backbone

        self._look_up(run.name, load_backbone(run.folder))

    def _look_up(self, name: str, backbone: nn.Module) -> None:
        from co2.evaluation.features import embed
        from co2.measures.knn import nearest

        bank, queries = (
            embed(backbone, source, self.experiment.plain).features for source in (self.bank, self.queries)
        )  # [bank, F], [queries, F]
        self.found[name] = nearest(bank, queries, GALLERY_NEIGHBOURS).tolist()

    def galleries(self) -> tuple[Gallery, ...]:
        """One for each held-out picture."""
        return tuple(
            Gallery(
                _picture(self.queries, place),
                {name: [_picture(self.bank, row) for row in rows[place]] for name, rows in self.found.items()},
            )
            for place in range(len(self.queries))
        )


def _picture(source: ImageSource, index: int) -> Picture:
    assert source.labels is not None
    return Picture.of(source.image(index), source.classes[int(source.labels[index])])


def _introduction(experiment: Experiment, data: DataSplits) -> str:
    return (
        f"The same network ({experiment.network.backbone}) was pre-trained twice from the same starting point on "
        f"{len(data.train):,} pictures of shapes for {experiment.epochs} epochs, without labels: with MoCo, and with "
        "MoCo and the consistency term. Labels were used afterwards only, to see what the networks had learnt: a "
        "held-out picture is given the class of its nearest neighbours."
    )


def _summary(rows: Sequence[Outcome]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("network")
    metrics = [metric for metric in rows[0].values if metric is KNN or metric not in HEALTH]
    for metric in metrics:
        table.add_column(metric.called if metric is KNN else metric.symbol, justify="right")
    for row in rows:
        table.add_row(row.network, *(_number(metric, row.values[metric]) for metric in metrics))
    return table
