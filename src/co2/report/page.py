"""One self-contained HTML page about some runs: no other file, no script, nothing from the network."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from co2.errors import UserError
from co2.report.curves import curves_html
from co2.report.gallery import Gallery, galleries_html, same_class
from co2.report.runs import RunRecord, read_runs
from co2.report.story import Untrained, caveats, differing_settings, findings, headline, untrained_of
from co2.report.style import STYLE
from co2.report.tables import outcome_table, outcomes, settings_table


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
    if path.is_file() and not path.read_bytes().startswith(b"<!DOCTYPE html>"):
        raise UserError(f"{path} is no page, and is left alone. Choose another --out.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of files need not be text.
        path.write_text(page_html(page), encoding="utf-8", errors="backslashreplace")
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
        introduction="Pre-training by contrastive learning, as the run folders record it: " + ", ".join(names) + ".",
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


def page_html(page: Page) -> str:
    """The page as text."""
    sections = [
        _opening(page),
        f"<section>\n<h2>Training curves</h2>\n{curves_html(page.runs, page.untrained)}\n</section>",
        _gallery_section(page.galleries),
        _advice_section(page.runs),
        _next_section(page.next_steps),
        _settings_section(page.runs),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _opening(page: Page) -> str:
    found = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(page.runs))
    found = f'<ul class="findings">{found}</ul>' if found else ""
    warned = " ".join(escape(sentence) for sentence in caveats(page.runs, page.untrained))
    warned = f'<p class="caveat">{warned}</p>' if warned else ""
    return (
        f'<header>\n<p class="title">{escape(page.title)}</p>\n<h1>{escape(headline(page.runs, page.untrained))}</h1>\n'
        f'<p class="introduction">{escape(page.introduction)}</p>\n</header>\n'
        f"<section>\n<h2>Outcome</h2>\n{outcome_table(outcomes(page.runs, page.untrained))}\n"
        '<p class="note">Final losses and instance accuracy are means over the log lines of the last epoch.</p>\n'
        f"{found}\n{warned}\n</section>"
    )


def _gallery_section(galleries: Sequence[Gallery]) -> str:
    if not galleries:
        return ""
    counts = same_class(galleries)
    counted = ", ".join(f"{escape(network)} {same} of {shown}" for network, (same, shown) in counts.items())
    marked = (
        f"A frame with ✓ marks a neighbour of the query’s class, ✗ one of another class. Of the neighbours shown, so "
        f"many have the query’s class: {counted}. These are a few examples; the kNN accuracy above counts all."
        if counts
        else "These are a few examples."
    )
    return (
        "<section>\n<h2>Nearest neighbours</h2>\n<p>The pictures that each network finds most similar to the query, "
        f"nearest first. {marked}</p>\n{galleries_html(galleries)}\n</section>"
    )


def _advice_section(runs: Sequence[RunRecord]) -> str:
    items = "\n".join(
        f"<li><b>{escape(run.name)}, epoch {advice.epoch:.1f}:</b> {escape(advice.text)}</li>"
        for run in runs
        for advice in run.advice
    )
    return (
        f'<section>\n<h2>What the program noticed</h2>\n<ul class="advice">\n{items}\n</ul>\n</section>'
        if items
        else ""
    )


def _next_section(steps: Sequence[NextStep]) -> str:
    if not steps:
        return ""
    blocks = "\n".join(
        f'<div class="step"><h3>{escape(step.title)}</h3>\n<p>{escape(step.text)}</p>\n'
        f"<pre><code>{escape(step.code)}</code></pre></div>"
        for step in steps
    )
    return (
        '<section>\n<h2>What to do next</h2>\n<p class="note">A click selects a whole block for copying.</p>\n'
        f'<div class="steps">\n{blocks}\n</div>\n</section>'
    )


def _settings_section(runs: Sequence[RunRecord]) -> str:
    count = len(differing_settings(runs))
    differ = "" if len(runs) == 1 else f" ({count} {'differs' if count == 1 else 'differ'} between the runs)"
    return (
        f"<section>\n<h2>Settings</h2>\n<details>\n<summary>All settings of the runs{differ}</summary>\n"
        f"{settings_table(runs)}\n</details>\n</section>"
    )
