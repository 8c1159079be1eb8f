"""Bytes of shards, from files of this machine or through fsspec, and the indices that are kept of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from co2.data.source import BadImage, in_words, printable
from co2.data.tar_index import TarIndex, build_index, index_from_bytes, index_to_bytes
from co2.errors import UserError
from co2.files import WRITING, MissingFile, UnreadableFile, open_regular, read_bytes

Stamp = tuple[int, str]
"""The length of a file, and something that changes when the file does."""
_OPEN_AT_ONCE = 64


def is_remote(path: str) -> bool:
    """Whether this is an address for fsspec and not the path of a file."""
    return "://" in path or path.startswith(("simplecache::", "filecache::", "blockcache::"))


class _Handle:
    """An open file. It is read at given places, so forked processes and threads can share it, and it is closed when
    the last of them has let go of it."""

    def __init__(self, path: str, length: int) -> None:
        with open_regular(path, sys.maxsize) as file:
            if os.fstat(file.fileno()).st_size != length:
                raise BadImage("the shard has changed since it was indexed")
            self.number = os.dup(file.fileno())

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _open_shard(path: str, stamp: Stamp) -> _Handle:
    return _Handle(path, stamp[0])


def read_range(path: str, stamp: Stamp, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`, fewer if the file ends before. Raises BadImage, and nothing else."""
    if size == 0:
        return b""
    try:
        if is_remote(path):
            system, inner = _filesystem(path)
            return bytes(system.cat_file(inner, start=offset, end=offset + size))
        handle = _open_shard(path, stamp)
        parts = []
        while size > 0:  # one call may return less than was asked for, on network file systems above all
            part = os.pread(handle.number, size, offset)
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)
    except BadImage:
        raise
    except (FileNotFoundError, MissingFile):
        raise BadImage("the shard does not exist") from None
    except Exception as error:  # every kind of storage has errors of its own
        _open_shard.cache_clear()  # a mount that went away and came back has other handles
        raise BadImage(f"the shard cannot be read ({in_words(error)})") from None


def read_beginning(path: str, most: int) -> bytes:
    """The first `most` bytes of a file. Raises OSError."""
    if is_remote(path):
        system, inner = _filesystem(path)
        try:
            return bytes(system.cat_file(inner, start=0, end=most))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise OSError(in_words(error)) from None
    try:
        with open_regular(path, empty=False) as file:
            return file.read(most)
    except MissingFile:
        raise FileNotFoundError(path) from None
    except UnreadableFile as error:
        raise OSError(str(error)) from None


def _filesystem(address: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path in it. fsspec keeps one for each process that asks."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(
            f"'{printable(address)}' lies on another machine, and reading from there needs fsspec: pip install fsspec, "
            "and what goes with the address (s3fs for s3://, gcsfs for gs://, aiohttp for https://)."
        ) from None
    try:
        system, inner = url_to_fs(address)
    except (ImportError, ValueError) as error:  # an unknown protocol, or one that needs a package
        raise UserError(f"'{printable(address)}' cannot be reached: {in_words(error)}.") from None
    return system, inner


def remote_glob(pattern: str) -> list[str]:
    """The addresses that a pattern with wildcards stands for."""
    system, inner = _filesystem(pattern)
    with _told_as_user_error(pattern):
        return [str(system.unstrip_protocol(path)) for path in sorted(system.glob(inner))]


def remote_folder(address: str) -> list[str]:
    """The addresses of the tar files in a folder, or the address itself if it is a file's."""
    system, inner = _filesystem(address)
    with _told_as_user_error(address):
        if system.isfile(inner):
            return [address]
        names = sorted(str(path) for path in system.ls(inner, detail=False))
    tars = [str(system.unstrip_protocol(path)) for path in names if path.lower().endswith(".tar")]
    if not tars:
        raise UserError(f"There are no tar files in '{printable(address)}'. Give the address of shards.")
    return tars


@contextlib.contextmanager
def _told_as_user_error(path: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"There is no shard '{printable(path)}'. Check its name.") from None
    except Exception as error:  # every kind of storage has errors of its own
        raise UserError(f"The shard '{printable(path)}' cannot be read: {in_words(error)}.") from None


# Indices: beside the shards, or among the user's caches where that is not possible.


def index_of(path: str) -> tuple[TarIndex, Stamp]:
    """The index of a shard, as it was kept or made anew, and the state of the shard that it describes."""
    with _told_as_user_error(path):
        if is_remote(path):
            system, inner = _filesystem(path)
            stamp = (int(system.info(inner)["size"]), str(system.ukey(inner)))
        else:
            information = os.stat(path)
            stamp = (information.st_size, str(information.st_mtime_ns))
            if not os.path.isfile(path):
                raise UserError(f"The shard '{printable(path)}' is not a regular file.")
        places = _index_places(path)
        for place in places:
            with contextlib.suppress(UnreadableFile):
                index = index_from_bytes(read_bytes(place), *stamp)
                if index is not None:
                    return index, stamp
        index = _build(path, stamp)
    for place in places:
        if _keep(place, index_to_bytes(index, *stamp)):
            break
    return index, stamp


def _build(path: str, stamp: Stamp) -> TarIndex:
    if not is_remote(path):
        return build_index(lambda offset, size: read_range(path, stamp, offset, size), stamp[0])
    system, inner = _filesystem(path)
    with system.open(inner, "rb", block_size=4 * 2**20) as file:  # headers are small and far apart: read ahead

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return bytes(file.read(size))

        return build_index(read, stamp[0])


def _index_places(path: str) -> list[str]:
    full = path if is_remote(path) else os.path.abspath(path)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    among_caches = os.path.join(caches, "co2", "shards", hashlib.sha256(os.fsencode(full)).hexdigest() + ".index")
    if is_remote(path):
        return [among_caches]
    folder, name = os.path.split(full)
    return [os.path.join(folder, f".{name}.index"), among_caches]


def _keep(place: str, data: bytes) -> bool:
    """Write a file as a whole or not at all; False where that is not possible."""
    folder = os.path.dirname(place)
    try:
        os.makedirs(folder, exist_ok=True)
        # A name of its own: several processes may be at it at once. Not brought to the disk: it can be made anew.
        number, temporary = tempfile.mkstemp(prefix=".", suffix=WRITING, dir=folder)
    except OSError:
        return False
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        return False
    return True
