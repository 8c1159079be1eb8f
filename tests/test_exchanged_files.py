"""Whatever lies in place of a file, what reads it ends in a result or a sentence, soon, and changes nothing elsewhere.

Each file of a run folder, of a pack, of shards and of a VOC tree is exchanged for each kind of thing that a file system
can hold, and the commands that read it are run for real.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shards import write_shards

from co2.cli import main
from co2.data.open import open_data
from co2.data.pack_writer import write_pack
from co2.engine.pretrain import pretrain

MOST_MEBIBYTES = 2560
THINGS = ("run", "pack", "half-pack", "shards", "voc")


def link_to(target: str) -> Callable[[Path, Path, Path], None]:
    def make(path: Path, elsewhere: Path, other: Path) -> None:
        path.symlink_to(target if target.startswith("/") else elsewhere / target)

    return make


def sparse(path: Path, elsewhere: Path, other: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def grown(path: Path, elsewhere: Path, other: Path) -> None:
    """What was there, with holes after it that take no room."""
    path.write_bytes(other.read_bytes())
    os.truncate(path, 2**36)


KINDS: dict[str, Callable[[Path, Path, Path], object]] = {
    "nothing": lambda path, elsewhere, other: None,
    "a pipe": lambda path, elsewhere, other: os.mkfifo(path),
    "a link to a file": link_to("precious.txt"),
    "a link to no file": link_to("nothing"),
    "a link to a folder": link_to("folder"),
    "a link to a device": link_to("/dev/zero"),
    "a link to itself": lambda path, elsewhere, other: path.symlink_to(path),
    "a second name of a file": lambda path, elsewhere, other: path.hardlink_to(elsewhere / "precious.txt"),
    "a folder": lambda path, elsewhere, other: path.mkdir(),
    "an empty file": lambda path, elsewhere, other: path.touch(),
    "a huge sparse file": sparse,
    "a file that has grown": grown,
    "another file": lambda path, elsewhere, other: path.write_bytes(other.read_bytes()),
    "brackets": lambda path, elsewhere, other: path.write_text("[" * 200_000),
    "Latin-1": lambda path, elsewhere, other: path.write_bytes("größe\n".encode("latin-1")),
}


class Server:
    """A process that runs commands in bounds; see `tests/support/commands_in_bounds.py`."""

    def __init__(self, folder: Path) -> None:
        program = Path(__file__).with_name("support") / "commands_in_bounds.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        )

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout  # noqa: PT018
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.process.communicate()


def interrupt(done: int, total: int) -> None:
    if done >= 5:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, build_tiny: Callable[..., Any]) -> Path:
    """A run folder, a pack, shards, and a VOC tree."""
    folder = tmp_path_factory.mktemp("good")
    for part, count in (("train", 12), ("val", 6)):
        for number in range(count):
            place = folder / "pictures" / part / "ab"[number % 2] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(noise).save(place)
    pretrain(build_tiny(), out=folder / "run")
    newest = sorted((folder / "run" / "checkpoints").glob("*.pt"))[-1]
    newest.unlink()  # so that there is something to go on with
    newest.with_suffix(".sha256").unlink()
    (folder / "run" / "bad_images.txt").write_text("/a/1.png\tempty file\n")
    assert main(["data", "pack", str(folder / "pictures"), str(folder / "pack")]) == 0
    write_shards(folder / "pictures", folder / "shards", count=3)
    (folder / "shards" / "shards.json").write_text('{"finished": true}')
    open_data(str(folder / "shards"))  # and their indices
    with pytest.raises(KeyboardInterrupt):
        write_pack(folder / "pictures", folder / "half-pack", workers=0, progress=interrupt)
    year = folder / "voc" / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "Annotations", "SegmentationClass", "ImageSets/Main", "ImageSets/Segmentation"):
        (year / name).mkdir(parents=True)
    for name in ("one", "two"):
        Image.new("RGB", (40, 30), (90, 120, 30)).save(year / "JPEGImages" / f"{name}.jpg")
        Image.fromarray(np.zeros((30, 40), dtype=np.uint8)).save(year / "SegmentationClass" / f"{name}.png")
        (year / "Annotations" / f"{name}.xml").write_text(
            "<annotation><object><name>dog</name><bndbox><xmin>2</xmin><ymin>3</ymin><xmax>11</xmax><ymax>13</ymax>"
            "</bndbox></object></annotation>"
        )
    for task in ("Main", "Segmentation"):
        (year / "ImageSets" / task / "train.txt").write_text("one\ntwo\n")
    return folder


def commands(what: str, folder: Path, good: Path) -> dict[str, dict[str, Any]]:
    """What reads a thing, and is run on it, each a task for the server."""
    out, pictures = folder.parent / "out", str(good / "pictures")
    if what == "run":
        return {
            "evaluate": {"words": ["evaluate", "knn", str(folder), "--data", pictures, "--out", str(out / "knn.json")]},
            "report": {"words": ["report", str(folder), "--out", str(out / "page.html")]},
            "resume": {"resume": [str(good / "run" / "config.json"), str(folder)]},
            "export": {"words": ["export", str(folder), "--to", "timm", "--out", str(out / "weights.safetensors")]},
        }
    if "pack" in what:
        return {
            "verify": {"words": ["data", "verify", str(folder)]},
            "pack": {"words": ["data", "pack", pictures, str(folder)]},
        }
    if what == "shards":
        return {"pack": {"words": ["data", "pack", str(folder), str(out / "pack")]}}
    return {kind: {"voc": [kind, str(folder)]} for kind in ("detection", "segmentation")}


def added(what: str) -> list[str]:
    """Names that are not there and that a command writes, so that something may lie in wait under them."""
    if what == "run":
        return [".lock", "config.json.writing", "backbone.safetensors.writing", "metrics.jsonl.writing"]
    if "pack" in what:
        return [".lock", "co2-pack.unfinished.json", "co2-pack.json.writing"]
    return []


def readers(what: str, name: str) -> list[str]:
    """Which commands do something with a file."""
    if what == "run":
        found = {"config.json": ["evaluate", "report", "resume", "export"], "metrics.jsonl": ["report", "resume"]}
        return found.get(name, ["evaluate", "export", "resume"] if name.startswith("backbone") else ["resume"])
    if "pack" in what:
        return ["verify", "pack"]
    if what == "shards":
        return ["pack"]
    return [task for task, parts in VOC_READERS.items() if any(part in name for part in parts)]


VOC_READERS = {
    "detection": ("JPEGImages", "Annotations", "Main"),
    "segmentation": ("JPEGImages", "Annotations", "ImageSets/Segmentation", "SegmentationClass"),
}


def cases(good: Path, what: str) -> list[tuple[str, str, str]]:
    """Every file with every kind of thing in its place: (file, kind, command)."""
    files = sorted(str(path.relative_to(good / what)) for path in (good / what).rglob("*") if path.is_file())
    names = [*files, *(name for name in added(what) if name not in files)]
    folders = sorted({str(Path(file).parent) for file in files} - {"."})
    kinds = [(name, kind) for name in names for kind in KINDS]
    kinds += [(name, kind) for name in folders for kind in ("nothing", "a link to a folder", "an empty file", "a pipe")]
    return [(name, kind, command) for name, kind in kinds for command in readers(what, name)]


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that lies in a folder, with the times of its changes."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() and not path.is_symlink() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


def try_one(server: Server, good: Path, room: Path, what: str, case: tuple[str, str, str]) -> list[str]:
    """Exchange one file, run one command; what was wrong about it."""
    name, kind, command = case
    place, elsewhere = room / "place", room / "elsewhere"
    (elsewhere / "folder").mkdir(parents=True)
    for path in ("precious.txt", "folder/precious.pt", "folder/step-000000001.pt", "folder/a.writing"):
        (elsewhere / path).write_text("precious\n")
    shutil.copytree(good / what, place / what)
    (place / "out").mkdir()
    path = place / what / name
    others = sorted(p for p in (good / what).rglob("*") if p.is_file() and p.name != path.name)
    original = good / what / name
    other = original if kind == "a file that has grown" and original.is_file() else random.Random(name).choice(others)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path, elsewhere, other)
    before = state(elsewhere)
    answer = server.run(commands(what, place / what, good)[command])
    wrong = []
    if answer["code"] not in (0, 1, 2):
        wrong.append(f"ended with {answer['code']}")
    if "Traceback" in answer["said"]:
        wrong.append("a traceback")
    if answer["code"] in (1, 2) and not answer["said"].strip():
        wrong.append("not a word")
    if answer["mebibytes"] > MOST_MEBIBYTES:
        wrong.append(f"{answer['mebibytes']} MiB")
    if state(elsewhere) != before:
        wrong.append("changed something elsewhere")
    shutil.rmtree(room)
    return [f"{what}/{name} as {kind}, {command}: {', '.join(wrong)}\n{answer['said']}"] if wrong else []


@pytest.mark.parametrize("what", THINGS)
def test_a_file_exchanged_for_something_else_hangs_nothing_and_reaches_nothing(
    server: Server, good: Path, tmp_path: Path, what: str
) -> None:
    """A few of them by default."""
    all_of_them = cases(good, what)
    some = random.Random(f"co2 {what}").sample(all_of_them, 2 if what == "run" else 4)
    assert [told for case in some for told in try_one(server, good, tmp_path / "room", what, case)] == []


@pytest.mark.slow
@pytest.mark.parametrize("what", THINGS)
def test_every_file_exchanged_for_every_kind_of_thing(server: Server, good: Path, tmp_path: Path, what: str) -> None:
    all_of_them = cases(good, what)
    wrong = []
    for case in all_of_them:
        for told in try_one(server, good, tmp_path / "room", what, case):
            print(told, flush=True)
            wrong.append(told)
    print(f"{what}: {len(all_of_them)} exchanged files tried, {len(wrong)} of them wrong")
    assert wrong == []


@pytest.mark.slow
def test_the_commands_do_what_they_should_where_nothing_is_exchanged(
    server: Server, good: Path, tmp_path: Path
) -> None:
    """Else the tests above would see nothing but refusals."""
    for what in THINGS:
        place = tmp_path / what / "place"
        place.mkdir(parents=True)
        shutil.copytree(good / what, place / what)
        (place / "out").mkdir()
        for command, task in commands(what, place / what, good).items():
            answer = server.run(task)
            # Of what only this program has, export says so once it has read it; what is unfinished is not read.
            refusal = "which timm does not have" in answer["said"] or "unfinished" in answer["said"]
            assert answer["code"] == 0 or refusal, (what, command, answer["said"])
