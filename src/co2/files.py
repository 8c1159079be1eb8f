"""The one door to the disk: how files are read, how they are written, and how processes keep out of each other's way.

Files come from anywhere. What is read is a regular file of bounded size, opened without waiting, whatever lies under
its name. What is written is there as a whole or not at all, even if the process is killed or the power fails. Nothing
that lies in a folder already, and no link in it, makes a write or a lock reach a file elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from co2.errors import UserError

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

WRITING = ".writing"  # ends the name of a file that is not whole yet
MOST_BYTES = 512 * 2**20
MOST_TEXT = 64 * 2**20
MOST_JSON = 16 * 2**20  # a few bytes of it can become hundreds in memory
MOST_NESTED = 100  # lists and dictionaries in each other
_UNFINISHED = re.compile(rf"(?P<name>.+?)(\.[0-9a-f]{{8}})?{re.escape(WRITING)}", re.DOTALL)
_OWNER = "process "  # begins what a process writes into the lock that it holds
_LONGEST_OWNER = 300


class UnreadableFile(UserError):  # noqa: N818  (it names the file, not the program, as what is wrong)
    """A file that cannot be read. The message is the reason alone, in a few plain words: 'not a regular file'."""


class MissingFile(UnreadableFile):
    """A file that cannot be read because there is none."""


class TakenError(UserError):
    """Another process holds a lock. The message is what it calls itself: 'process 17 on birch'."""

    exit_code = os.EX_TEMPFAIL


# Reading.


@contextmanager
def open_regular(path: AnyPath, most: int = MOST_BYTES, *, empty: bool = True) -> Iterator[BinaryIO]:
    """A file from outside, of at most so many bytes, opened and read without waiting for ever.

    Raises UnreadableFile, and nothing else, if it is none, or if reading it fails in the block.

    Args:
        path: what it is called; links are followed.
        most: the largest size that is accepted, in bytes.
        empty: whether a file of no bytes is one.
    """
    try:
        _check_regular(os.stat(path), most, empty)  # before it is opened: opening a device may already do something
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - closed below
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFile("the file does not exist") from None
    except PermissionError:
        raise UnreadableFile("no permission to read it") from None
    except OSError as error:
        raise UnreadableFile(f"cannot be opened ({error.strerror or error})") from None
    except UnreadableFile:
        raise
    except ValueError as error:  # a NUL in its name
        raise UnreadableFile(f"cannot be opened ({error})") from None
    with file:
        try:
            _check_regular(os.fstat(file.fileno()), most, empty)  # again: it may have been exchanged for another
            yield file
        except OSError as error:  # a failing disk
            raise UnreadableFile(f"cannot be read ({error.strerror or error})") from None


def _check_regular(information: os.stat_result, most: int, empty: bool) -> None:
    if not stat.S_ISREG(information.st_mode):
        raise UnreadableFile("not a regular file")  # reading a pipe would wait for ever
    if information.st_size == 0 and not empty:
        raise UnreadableFile("empty file (0 bytes)")
    if information.st_size > most:
        raise UnreadableFile(f"larger than {most // 2**20} MiB")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: AnyPath, most: int = MOST_BYTES, *, empty: bool = True) -> bytes:
    """What is in a file. Raises UnreadableFile, and nothing else, if it cannot be read."""
    with open_regular(path, most, empty=empty) as file:
        number = file.fileno()
        size = os.fstat(number).st_size
        # From the system itself: a buffered read makes room for all that it might get, which takes longer than reading.
        # And no more than it said it holds, or a file that grows, or one that the system makes up, would have no bound.
        data = os.read(number, size)
        while len(data) < size and (more := os.read(number, size - len(data))):  # network file systems give in parts
            data += more
        return data


def read_text(path: AnyPath, most: int = MOST_TEXT, *, errors: str = "strict") -> str:
    r"""The text in a file of UTF-8, with or without the mark that some programs put before it, every line end as \n.

    Raises UnreadableFile, and nothing else, if there is none to be had; `errors` says as in Python what becomes of
    bytes that are no text.
    """
    try:
        text = read_bytes(path, most).decode("utf-8-sig", errors)
    except UnicodeDecodeError:
        raise UnreadableFile("not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: AnyPath, most: int = MOST_JSON) -> Any:
    """The value in a JSON file. Raises UnreadableFile, and nothing else, if there is none; see `parse_json`."""
    return parse_json(read_bytes(path, most))


def parse_json(text: str | bytes) -> Any:
    """The value that JSON stands for, with bounds: finite numbers, integers of 64 bits, a hundred levels of nesting.

    Raises UnreadableFile, and nothing else, if it is not JSON or beyond them.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, parse_int=_integer, parse_float=_real, parse_constant=_real)
    except UnicodeDecodeError:
        raise UnreadableFile("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UnreadableFile(f"not JSON ({error})") from None
    except RecursionError:
        raise UnreadableFile(f"JSON nested more than {MOST_NESTED} deep") from None
    level: list[Any] = [value]
    for _ in range(MOST_NESTED + 1):
        level = [inner for outer in level if isinstance(outer, list | dict) for inner in _inside(outer)]
        if not level:
            return value
    raise UnreadableFile(f"JSON nested more than {MOST_NESTED} deep")


def _inside(outer: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise UnreadableFile(f"JSON with the number {digits[:20]}..., which is too large")
    return int(digits)


def _real(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise UnreadableFile(f"JSON with the number {digits[:20]}, which is not finite")
    return number


# Writing.


@contextmanager
def appearing_when_whole(path: str | Path, before_rename: Callable[[Path], object] | None = None) -> Iterator[BinaryIO]:
    """A file to write to that has its name only once it is complete and on the disk.

    Until then it has a name of its own: of several processes that write the same file at once, one whole file stays.
    What a killed one leaves goes when whoever owns the folder calls `remove_leftovers`.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{WRITING}")
    try:
        with open(temporary, "xb") as file:  # made here: no file that is there, and no link, is written to
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # the first error tells more
            temporary.unlink()  # of no use to anybody, and on a full disk in the way
        if isinstance(error, OSError) and error.filename in (temporary, str(temporary)):
            error.filename, error.filename2 = str(path), None  # the name that its owner knows it by
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file at once."""
    with appearing_when_whole(path) as file:
        file.write(content)


def unfinished(name: str) -> str | None:
    """The name of the file that a file of this name was to become, if it is one that was not whole yet."""
    found = _UNFINISHED.fullmatch(name)
    return found["name"] if found else None


def remove_leftovers(path: str | Path) -> None:
    """Delete what killed processes have left of a file. To be called only while no other process writes it."""
    path = Path(path)
    for name in os.listdir(path.parent) if path.parent.is_dir() else ():
        if unfinished(name) == path.name:
            path.with_name(name).unlink(missing_ok=True)


def open_to_append(path: str | Path) -> BinaryIO:
    """A file, new or not, to whose end is written what is written, and never through a link; see `open_own`."""
    return open(open_own(path), "ab")


def open_own(path: str | Path, access: int = os.O_WRONLY) -> int:
    """The number of a file, new or not, that was opened to write to its end.

    Raises OSError, as opening a file does, and UserError where a link, a pipe or a device lies.
    """
    with suppress(FileNotFoundError):
        _check_own(os.lstat(path), path)  # before it is opened: opening a device may already do something
    flags = access | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags, 0o666)
    try:
        _check_own(os.fstat(number), path)
    except BaseException:
        os.close(number)
        raise
    return number


def refuse_link(path: str | Path) -> None:
    """Say so if what is to be written into, or deleted, is a link, and lies who knows where."""
    if os.path.islink(path):
        raise UserError(f"{path} is a link. Put what it leads to in its place, or name another folder.")


def _check_own(information: os.stat_result, path: str | Path) -> None:
    """Refuse what would carry a write elsewhere: links of both kinds, pipes, devices."""
    if not stat.S_ISREG(information.st_mode) or information.st_nlink > 1:
        raise UserError(f"'{path}' is a link, or no file at all, and nothing is written through it. Remove it.")


# Locking.


@contextmanager
def locked(path: str | Path, *, wait: bool = False) -> Iterator[str]:
    """Keep other processes from what a file stands for while the block runs.

    The file is made for that, says who holds it, and is removed at the end. A killed process leaves it behind and holds
    nothing. The block is told what is wrong where the file system has no locks, and else an empty text.

    Raises TakenError if another process holds it, OSError if the file cannot be made, and UserError where a link, a
    pipe or a device lies.

    Args:
        path: the file.
        wait: until no other process holds it.
    """
    there = False
    while not there:
        number = open_own(path, os.O_RDWR)
        try:
            trouble = _take(number, wait)
            with suppress(FileNotFoundError):
                there = os.path.samestat(os.fstat(number), os.lstat(path))  # else who had it before has removed it
            if there:
                signed = _sign(number)
                try:
                    yield trouble
                finally:
                    if signed:
                        with suppress(OSError):
                            os.unlink(path)
        finally:
            os.close(number)


def _take(number: int, wait: bool) -> str:
    try:
        # The system lets go of it when this process ends, however that happens. Not flock: the workers of a loader
        # would inherit it, and hold on to it for seconds after their parent was killed.
        fcntl.lockf(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        owner = os.pread(number, _LONGEST_OWNER, 0).decode(errors="replace").strip()
        raise TakenError(owner if owner.startswith(_OWNER) and owner.isprintable() else "unknown") from None
    except OSError as error:  # there are file systems without locks
        return error.strerror or str(error)
    return ""


def _sign(number: int) -> bool:
    """Write who holds a lock into it, unless that is a file in which somebody keeps something."""
    if os.fstat(number).st_size and not os.pread(number, _LONGEST_OWNER, 0).startswith(_OWNER.encode()):
        return False
    with suppress(OSError):  # on a full disk nobody can say who holds it, and it is held
        os.ftruncate(number, 0)
        os.pwrite(number, f"{_OWNER}{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return True
