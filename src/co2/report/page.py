"""One self-contained HTML page about some runs: no other file, no script, nothing from the network."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from co2.errors import UserError
from co2.files import MissingFile, UnreadableFile, open_regular, write_atomically
from co2.report.curves import curves_html
from co2.report.gallery import Gallery, galleries_html, same_class
from co2.report.markup import Html
from co2.report.runs import RunRecord, read_runs
from co2.report.story import Untrained, caveats, differing_settings, findings, headline, untrained_of
from co2.report.style import STYLE
from co2.report.tables import outcome_table, outcomes, settings_table

_BEGINS = b"<!DOCTYPE html>"


@dataclass(frozen=True)
class NextStep:
    """Something for the reader to do: why, and what to type."""

    title: str
    text: str
    code: str


@dataclass(frozen=True)
class Page:
    """What the page is about. Headline, table and curves follow from the runs."""

    title: str
    introduction: str
    runs: tuple[RunRecord, ...]
    untrained: Untrained | None = None
    """The network before training: a row of the table and a dashed line in the chart of kNN accuracy."""
    galleries: tuple[Gallery, ...] = ()
    next_steps: tuple[NextStep, ...] = ()

    def __post_init__(self) -> None:
        if not self.runs or len({run.name for run in self.runs}) < len(self.runs):
            raise ValueError("A page needs at least one run, and every run a name of its own.")


def write_page(path: str | Path, page: Page) -> Path:
    """Write the page, making its folder if need be."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            if not file.read(len(_BEGINS)).startswith(_BEGINS):
                raise UnreadableFile("not a page")
    except MissingFile:
        pass
    except UnreadableFile as error:
        raise UserError(f"{path} is no page, and is left alone: {error}. Choose another place for it.") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of files need not be text.
        write_atomically(path, page_html(page).encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise UserError(f"The page {path} cannot be written: {error.strerror}. Choose another place for it.") from error
    return path


def report_runs(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page about any run folders, finished or not."""
    if not folders:
        raise UserError("There is nothing to report on: name one run folder or several.")
    runs = read_runs(folders)
    names = [run.name for run in runs]
    page = Page(
        title=f"Report on {names[0]}" if len(runs) == 1 else f"Report on {len(runs)} runs",
        introduction="Pre-training, as the run folders record it: " + ", ".join(names) + ".",
        runs=tuple(runs),
        untrained=untrained_of(runs),
        next_steps=next_steps(runs[-1].folder),
    )
    return write_page(out, page)


def next_steps(run: str | Path) -> tuple[NextStep, ...]:
    """What to do after looking at a run: own pictures, own task, own loop."""
    return (
        NextStep(
            "Pre-train on your own pictures",
            "Any folder of images will do, with or without class sub-folders. With class sub-folders the kNN accuracy "
            "is measured along the way.",
            "co2 pretrain co2-small --data PATH --out runs/mine",
        ),
        NextStep(
            "Use the backbone",
            "A plain PyTorch module with the pre-trained weights. Pass classes=10 for a new last layer of that width, "
            "ready to fine-tune.",
            "import co2\n"
            f"backbone = co2.load_backbone({json.dumps(str(run), ensure_ascii=False)})\n"
            "features = backbone(images)  # [N, width]",
        ),
        NextStep(
            "Keep your own training loop",
            "The objective is one call: unit-length features of the queries [B, D], their positives [B, D] and the "
            "negatives [K, D].",
            "import co2\n"
            "criterion = co2.CO2Loss(alpha=0.3, tau_consistency=0.05)\n"
            "loss = criterion(query, positive, negatives)",
        ),
        NextStep(
            "Look closer",
            "Every run folder holds TensorBoard events.",
            f"tensorboard --logdir {shlex.quote(str(Path(run).parent))}",
        ),
    )


def page_html(page: Page) -> Html:
    """The page as text."""
    sections = [
        _opening(page),
        _section("Training curves", curves_html(page.runs, page.untrained)),
        _gallery_section(page.galleries),
        _advice_section(page.runs),
        _next_section(page.next_steps),
        _settings_section(page.runs),
    ]
    return Html.of(
        _BEGINS.decode() + '\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Whatever stands in it: no script runs, nothing is fetched.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n{}\n</main>\n</body>\n</html>\n",
        page.title,
        Html(STYLE),
        Html.joined(filter(None, sections), "\n"),
    )


def _section(heading: str, content: Html) -> Html:
    return Html.of("<section>\n<h2>{}</h2>\n{}\n</section>", heading, content)


def _opening(page: Page) -> Html:
    found = Html.joined(Html.of("<li>{}</li>", one) for one in findings(page.runs))
    warned = " ".join(caveats(page.runs, page.untrained))
    return Html.of(
        '<header>\n<p class="title">{}</p>\n<h1>{}</h1>\n<p class="introduction">{}</p>\n</header>\n'
        "<section>\n<h2>Outcome</h2>\n{}\n"
        '<p class="note">Final values are means over the log lines of the last epoch.</p>\n'
        "{}\n{}\n</section>",
        page.title,
        headline(page.runs, page.untrained),
        page.introduction,
        outcome_table(outcomes(page.runs, page.untrained)),
        Html.of('<ul class="findings">{}</ul>', found) if found else "",
        Html.of('<p class="caveat">{}</p>', warned) if warned else "",
    )


def _gallery_section(galleries: Sequence[Gallery]) -> Html:
    if not galleries:
        return Html()
    counts = same_class(galleries)
    counted = ", ".join(f"{network} {same} of {shown}" for network, (same, shown) in counts.items())
    marked = (
        f"A frame with ✓ marks a neighbour of the query’s class, ✗ one of another class. Of the neighbours shown, so "
        f"many have the query’s class: {counted}. These are a few examples; the kNN accuracy above counts all."
        if counts
        else "These are a few examples."
    )
    said = "<p>The pictures that each network finds most similar to the query, nearest first. {}</p>\n{}"
    return _section("Nearest neighbours", Html.of(said, marked, galleries_html(galleries)))


def _advice_section(runs: Sequence[RunRecord]) -> Html:
    items = [
        Html.of("<li><b>{}:</b> {}</li>", f"{run.name}, epoch {advice.epoch:.1f}", advice.text)
        for run in runs
        for advice in run.advice
    ]
    listed = Html.of('<ul class="advice">\n{}\n</ul>', Html.joined(items, "\n"))
    return _section("What the program noticed", listed) if items else Html()


def _next_section(steps: Sequence[NextStep]) -> Html:
    if not steps:
        return Html()
    block = '<div class="step"><h3>{}</h3>\n<p>{}</p>\n<pre><code>{}</code></pre></div>'
    blocks = Html.joined((Html.of(block, step.title, step.text, step.code) for step in steps), "\n")
    note = '<p class="note">A click selects a whole block for copying.</p>\n<div class="steps">\n{}\n</div>'
    return _section("What to do next", Html.of(note, blocks))


def _settings_section(runs: Sequence[RunRecord]) -> Html:
    count = len(differing_settings(runs))
    differ = "" if len(runs) == 1 else f" ({count} {'differs' if count == 1 else 'differ'} between the runs)"
    details = "<details>\n<summary>All settings of the runs{}</summary>\n{}\n</details>"
    return _section("Settings", Html.of(details, differ, settings_table(runs)))
