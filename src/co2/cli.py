"""The command line: parse, build, run.

Each command imports what it needs when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from co2.errors import RunError, UserError, did_you_mean
from co2.machine.device import why_no_import
from co2.machine.process import read_launch
from co2.machine.terminal import Lasting, lasting_output, not_too_narrow


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = [_from_home(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text that can be printed
    not_too_narrow()
    with lasting_output() as printed:
        try:
            return _answer(words, printed)
        except UserError as error:
            if _speaks():  # of many processes with the same mistake
                print(f"co2: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("co2: interrupted.", file=sys.stderr)
            return 130
        except (ImportError, MemoryError) as error:
            why = why_no_import(error)
            if why is None:
                raise
            print(f"co2: {why}", file=sys.stderr)
            return 1


def _answer(words: list[str], printed: Lasting) -> int:
    """Run a command. What it was to print may be lost where files have the same, as long runs write them."""
    try:
        ended: int | SystemExit = _dispatch(words)
    except SystemExit as asked:  # of --help
        ended = asked
    printed.flush()
    kept = words[:1] in _IN_FILES and not {"-h", "--help"} & set(words)
    if printed.failed is not None and not kept:
        raise RunError(f"Not everything could be printed ({printed.failed.strerror}).")
    if isinstance(ended, SystemExit):
        raise ended
    return ended


def _from_home(word: str) -> str:
    """Shells know what ~ is in `--out ~/runs`, but not in `--out=~/runs`."""
    option, equals, value = word.partition("=")
    return f"{option}={os.path.expanduser(value)}" if equals and option.startswith("--") else word


def _speaks() -> bool:
    """Whether this is the process that prints; any one is if the launcher's numbering is the mistake."""
    try:
        return read_launch().is_first
    except UserError:
        return True


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from co2 import __version__

        print(__version__)
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise UserError(f"There is no command '{name}'.{did_you_mean(name, COMMANDS)} `co2 --help` lists them all.")
    return COMMANDS[name].run(rest) or 0


def _overview() -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"  {command.usage:<{width}}  {command.summary}" for command in COMMANDS.values()]
    return "\n".join(
        [
            "co2: pre-train a vision backbone from unlabelled images, by contrastive learning with a consistency term.",
            "",
            "usage: co2 COMMAND ...",
            "",
            *lines,
            "",
            "`co2 COMMAND --help` tells all about one. A first try without any data: co2 demo",
        ]
    )


def _pretrain(words: list[str]) -> int:
    from co2 import recipes
    from co2.experiment import Experiment, refuse_idle
    from co2.method import load_from_file
    from co2.runs.upgrade import renamed

    if not words or words[0] in ("-h", "--help"):
        print("usage: co2 pretrain RECIPE --data PATH --out DIR [--epochs N] [--batch-size N] ...")
        print("       co2 pretrain path/to/file.py:Method --data PATH ...   a method of your own\n")
        _recipes([])
        print("\n`co2 pretrain RECIPE --help` lists every setting of a recipe with its value.")
        return 0
    if words[0].startswith("-"):
        raise UserError("Name the recipe first: co2 pretrain RECIPE --data PATH. `co2 recipes` lists them all.")
    for word in words[1:]:
        option = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and (now := renamed(option)) is not None:
            raise UserError(f"--{option} {now}.")
    if ":" in words[0]:
        method = load_from_file(words[0])
        recipe, summary = Experiment(method=method(), recipe=method.__name__.lower()), f"{method.__name__}, of your own"
    else:
        recipe, summary = recipes.get(words[0]), recipes.RECIPES[words[0]].summary
    experiment = tyro.cli(
        Experiment,
        args=_resume_alone(words[1:]),
        default=recipe,
        prog=f"co2 pretrain {words[0]}",
        description=f"{summary}.",
        console_outputs=read_launch().is_first,
    )
    if not experiment.resume:  # a run goes on as it was begun
        refuse_idle(experiment, recipe)

    with _interrupted_afterwards():
        from co2.engine.pretrain import Stopped, pretrain

    try:
        run = pretrain(experiment)
    except Stopped as stop:
        if read_launch().is_first:
            print(stop)
        return 128 + stop.signal_number
    if not read_launch().is_first:
        return 0
    print(f"\nDone. The backbone is in {run}. Three lines load it:\n")
    print(f"    import co2\n    backbone = co2.load_backbone({str(run)!r})")
    print("    features = backbone(images)  # [N, 3, H, W] normalised images in, pooled features out\n")
    return 0


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: half an import, whose interruption other packages may swallow, leaves
    things behind that fail later in words of their own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _resume_alone(words: list[str]) -> list[str]:
    """`--resume` by itself means yes; `--resume auto` is the other thing it can say."""
    spelt_out = []
    for word, following in zip(words, [*words[1:], "--"], strict=False):  # no words at all: nothing follows either
        spelt_out += ["--resume", "True"] if word == "--resume" and following.startswith("-") else [word]
    return spelt_out


def _recipes(words: list[str]) -> int:
    """List the recipes, or print one."""
    from co2 import recipes
    from co2.experiment import flatten

    if words and words[0] in ("-h", "--help"):
        print("usage: co2 recipes [NAME]\n\nWithout NAME, a table of all recipes; with it, every setting of that one.")
        return 0
    if words:
        print(recipes.get(words[0]).to_json(), end="")
        return 0

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in (
        "recipe",
        "what it is",
        "backbone",
        "method",
        "negatives",
        "tau",
        "alpha",
        "tau_con",
        "epochs",
        "batch",
    ):
        table.add_column(heading, no_wrap=heading in ("recipe", "backbone"))
    for recipe in recipes.RECIPES.values():
        experiment = recipe.build()
        method = {name.removeprefix("method."): value for name, value in flatten(experiment).items()}
        negatives = method.get("queue", method.get("negatives"))
        alpha = method.get("alpha")
        table.add_row(
            recipe.name,
            recipe.summary,
            experiment.network.backbone.split("/")[1],
            type(experiment.method).__name__,
            f"{negatives:,}" if negatives else f"{2 * experiment.batch_size - 2:,}" if "tau" in method else "-",
            f"{method['tau']:g}" if "tau" in method else "-",
            f"{alpha:g}" if alpha else "-",
            f"{method['tau_consistency']:g}" if alpha else "-",
            str(experiment.epochs),
            f"{experiment.batch_size:,}",
        )
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    return 0


@dataclass(frozen=True)
class DemoSettings:
    """Pre-train MoCo and MoCo + CO2 side by side on rendered shapes, and look at a page that compares them."""

    out: str = "demo"
    """Folder for the two runs and the page; an earlier demo in it is replaced."""
    epochs: int | None = None
    """Epochs of each run; by default what takes about a minute on two cores."""
    seed: int = 0
    """Both runs start from it."""


def _demo(words: list[str]) -> int:
    settings = tyro.cli(DemoSettings, args=words, prog="co2 demo")
    from co2.demo import demo

    demo(settings.out, epochs=settings.epochs, seed=settings.seed)
    return 0


@dataclass(frozen=True)
class ShapesSettings:
    """Write pictures of coloured, textured shapes, with their classes, boxes and masks."""

    destination: Annotated[str, tyro.conf.Positional]
    """Folder to write; must be empty or not exist."""
    layout: Literal["folder", "voc"] = "folder"
    """folder: train/ and val/ with a sub-folder for each class. voc: PASCAL VOC 2012 with boxes and masks."""
    count: int = 2000
    """Pictures in all."""
    size: int = 64
    """Side of each, in pixels."""
    seed: int = 0
    """Another seed gives other pictures."""


@dataclass(frozen=True)
class PackSettings:
    """Write a packed copy of images: resized, as JPEG, in a few large files in place of millions of small ones."""

    source: Annotated[str, tyro.conf.Positional]
    """What to pack: anything that --data takes."""
    destination: Annotated[str, tyro.conf.Positional]
    """Folder for the pack: new, empty, or begun by the same command, which then goes on where it stood."""
    shorter_side: int = 256
    """Pixels to which the shorter side of larger images is resized. None is enlarged."""
    quality: int = 90
    """Of the JPEGs, from 1 to 100. A plain JPEG that is small enough already is copied as it is."""
    workers: int = -1
    """Processes that decode and encode; -1 takes every core, 0 works in the main process. The pack is the same."""


@dataclass(frozen=True)
class VerifySettings:
    """Read every byte of a pack that `co2 data pack` has written, and compare it with its checksum."""

    pack: Annotated[str, tyro.conf.Positional]
    """The folder of the pack."""


def _data(words: list[str]) -> int:
    kinds: dict[str, Callable[[list[str]], int]] = {
        "shapes": _data_shapes,
        "pack": _data_pack,
        "verify": _data_verify,
    }
    if not words or words[0] in ("-h", "--help"):
        print(
            "usage: co2 data shapes DESTINATION [--layout folder|voc] [--count N] [--size N] [--seed N]\n"
            "       co2 data pack SOURCE DESTINATION [--shorter-side 256] [--quality 90] [--workers N]\n"
            "       co2 data verify PACK\n\n"
            "  shapes   write pictures that co2 renders, in ImageFolder or PASCAL VOC layout\n"
            "  pack     write a resized copy of any images in a few large files, for fast reading\n"
            "  verify   compare every byte of a pack with its checksum"
        )
        return 0
    if words[0] == "shard":
        raise UserError("Tar shards are read, but no longer written. Use `co2 data pack SOURCE DESTINATION`.")
    if words[0] not in kinds:
        hint = did_you_mean(words[0], kinds)
        raise UserError(f"There is no command 'data {words[0]}'.{hint} Use shapes, pack or verify.")
    try:
        return kinds[words[0]](words[1:])
    except KeyboardInterrupt:
        if words[0] != "pack":
            raise
        print("co2: interrupted. Run the same command again: it goes on where it stood.", file=sys.stderr)
        return 130


def _data_shapes(words: list[str]) -> int:
    settings = tyro.cli(ShapesSettings, args=words, prog="co2 data shapes")

    from co2.data.shapes import write_shapes

    with _image_bar("Writing") as progress:
        write_shapes(**dataclasses.asdict(settings), progress=progress)
    print(f"Wrote {settings.count:,} pictures of shapes to {settings.destination}.")
    return 0


def _data_pack(words: list[str]) -> int:
    settings = tyro.cli(PackSettings, args=words, prog="co2 data pack")

    from co2.data.pack_writer import write_pack
    from co2.data.packed import BAD_IMAGES

    with _image_bar("Packing") as progress:
        packed = write_pack(**dataclasses.asdict(settings), progress=progress)
    if packed.left_out:
        listed = os.path.join(settings.destination, BAD_IMAGES)
        print(f"Left out: {packed.left_out:,} that cannot be read, named with the reasons in {listed}", file=sys.stderr)
    counts = " and ".join(f"{count:,} in {split}" for split, count in packed.images.items())
    print(f"{sum(packed.images.values()):,} images are packed in {settings.destination}: {counts}.")
    print(f"Train on them with --data {shlex.quote(settings.destination)}")
    return 0


def _data_verify(words: list[str]) -> int:
    settings = tyro.cli(VerifySettings, args=words, prog="co2 data verify")

    from co2.data.packed import verify_pack

    with _image_bar("Verifying") as progress:
        verified = verify_pack(settings.pack, progress=progress)
    for name, reason in verified.damaged:
        print(f"{name}: {reason}", file=sys.stderr)
    print(f"{len(verified.damaged):,} of {verified.images:,} images in {settings.pack} are damaged.")
    return 1 if verified.damaged else 0


@contextlib.contextmanager
def _image_bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar over images with the time that is left, on terminals. What was done before the first call does not
    count as speed."""
    from rich.progress import MofNCompleteColumn, Progress

    if not sys.stdout.isatty():  # where some releases of rich print an empty line for a bar that is not shown
        yield lambda done, total: None
        return
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(doing, total=None)

        def show(done: int, total: int) -> None:
            if bar.tasks[0].total is None:
                bar.reset(task, completed=done, total=total)
            bar.update(task, completed=done)

        yield show


def _evaluate(words: list[str]) -> int:
    from co2.evaluation.command import run

    return run(words)


def _study(words: list[str]) -> int:
    from co2.study.command import run

    return run(words)


def _bench(words: list[str]) -> int:
    from co2.bench.command import run

    return run(words)


def _plan(words: list[str]) -> int:
    from co2.bench.command import plan

    return plan(words)


@dataclass(frozen=True)
class ReportSettings:
    """Compare run folders on one self-contained HTML page: curves, outcomes, and what differs in their settings."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders, as `co2 pretrain --out` writes them."""
    out: str = "report.html"
    """The page to write."""


def _report(words: list[str]) -> int:
    settings = tyro.cli(ReportSettings, args=words, prog="co2 report")
    if not settings.runs:
        raise UserError("Name at least one run folder: co2 report runs/mine [runs/other ...] --out report.html")

    from co2.report.page import report_runs

    page = report_runs(settings.runs, settings.out)
    print(f"Wrote {page.resolve().as_uri()}")
    return 0


@dataclass(frozen=True)
class ExportSettings:
    """Write a backbone in the form that another tool reads, and say how it is taken up there."""

    backbone: Annotated[str, tyro.conf.Positional]
    """What to write: a run folder, a backbone.safetensors, a checkpoint of a run, or an official MoCo checkpoint."""
    to: Literal["torchvision", "timm", "detectron2", "onnx"]
    """torchvision, timm, detectron2: its weights, by the names that each has for them. onnx: the network itself,
    normalised images in and pooled features out, for any number of images."""
    out: str | None = None
    """The file to write; by default named after the network, in the current folder."""
    view_size: int | None = None
    """Side of the images that it will be shown, in pixels, instead of what it was trained with."""


def _export(words: list[str]) -> int:
    settings = tyro.cli(ExportSettings, args=words, prog="co2 export")

    from co2.export import export_backbone

    exported = export_backbone(settings.backbone, settings.to, settings.out, view_size=settings.view_size)
    print(f"Wrote {exported.path}. To take it up:\n\n{textwrap.indent(exported.usage, '    ')}\n")
    return 0


@dataclass(frozen=True)
class Command:
    """A word after `co2`."""

    usage: str
    summary: str
    run: Callable[[list[str]], int]


COMMANDS: dict[str, Command] = {
    "pretrain": Command("pretrain RECIPE", "pre-train a backbone on your images", _pretrain),
    "recipes": Command("recipes [NAME]", "what each recipe is, in a table; or all settings of one", _recipes),
    "demo": Command("demo", "MoCo and MoCo + CO2 side by side, in minutes, on any computer", _demo),
    "evaluate": Command("evaluate PROTOCOL", "how good a backbone is, by the paper's protocols and others", _evaluate),
    "export": Command("export BACKBONE", "write a backbone for torchvision, timm, Detectron2 or ONNX", _export),
    "report": Command("report RUN ...", "run folders on one page: curves, outcomes, what differs", _report),
    "study": Command("study NAME", "the paper's comparisons and ablations, or your own, as grids of runs", _study),
    "bench": Command("bench KIND", "how fast training and its parts are on your machine", _bench),
    "plan": Command("plan RECIPE", "how long a run takes on your machine, and how much memory and energy", _plan),
    "data": Command("data KIND", "write pictures to try things on, or a packed copy of any images", _data),
}

_IN_FILES = [["pretrain"], ["demo"], ["evaluate"], ["study"], ["data"]]  # what these print, or more, is written

if __name__ == "__main__":
    sys.exit(main())
