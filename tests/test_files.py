"""The door to the disk: what is read is bounded, what is written is whole, what is locked is nobody else's."""

import errno
import fcntl
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from functools import partial

import pytest

from co2.errors import UserError
from co2.files import (
    MissingFile,
    TakenError,
    UnreadableFile,
    appearing_when_whole,
    locked,
    open_regular,
    open_to_append,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    remove_leftovers,
    unfinished,
    write_atomically,
)


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    seen = []
    with appearing_when_whole(path, before_rename=lambda whole: seen.append(whole.read_bytes())) as file:
        file.write(b"all of it")
        file.flush()
        assert [unfinished(name) for name in os.listdir(tmp_path)] == ["file"]
    assert seen == [b"all of it"]
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"all of it"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail():
        with appearing_when_whole(path) as file:
            file.write(b"half of the n")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_files_are_readable_by_others_as_the_user_set_it(tmp_path):
    write_atomically(str(tmp_path / "file"), b"x")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) & 0o400


@pytest.mark.parametrize("obstacle", ["a folder of that name", "no folder around it"])
def test_an_error_names_the_file_that_was_wanted(tmp_path, obstacle):
    path = tmp_path / "missing" / "file" if obstacle == "no folder around it" else tmp_path / "file"
    if obstacle == "a folder of that name":
        path.mkdir()
    with pytest.raises(OSError) as caught:
        write_atomically(path, b"x")
    assert (caught.value.filename, caught.value.filename2) == (str(path), None)


def writer(path, letter, times):
    """A process that writes a file many times, two megabytes of one letter in many parts."""
    code = (
        "import sys\nfrom co2.files import appearing_when_whole\n"
        "print('ready', flush=True)\nsys.stdin.read(1)\n"
        "for _ in range(int(sys.argv[3])):\n"
        "    with appearing_when_whole(sys.argv[1]) as file:\n"
        "        for _ in range(32):\n            file.write(sys.argv[2].encode() * 65536)\n            file.flush()\n"
    )
    words = [sys.executable, "-c", code, str(path), letter, str(times)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_of_two_processes_that_write_a_file_at_once_one_whole_file_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"c" * 2**21)
    processes = [writer(path, letter, 40) for letter in "ab"]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b".")
        process.stdin.close()
    while any(process.poll() is None for process in processes):
        content = path.read_bytes()
        assert content == content[:1] * 2**21
    assert [process.wait(timeout=60) for process in processes] == [0, 0], [one.stderr.read() for one in processes]
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_under_the_name_of_an_unfinished_file_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file.writing").symlink_to(tmp_path / "elsewhere")
    (folder / "file").symlink_to(tmp_path / "elsewhere")
    write_atomically(folder / "file", b"new")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    assert (folder / "file").read_bytes() == b"new"
    assert not (folder / "file").is_symlink()


def test_a_link_under_the_very_name_that_a_writer_draws_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("co2.files.secrets.token_hex", lambda size: "01234567")
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "file.01234567.writing").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_what_killed_writers_leave_of_a_file_is_removed_and_nothing_else(tmp_path):
    process = writer(tmp_path / "file", "a", 10_000)
    process.stdout.readline()
    process.stdin.write(b".")
    process.stdin.close()
    while not any(unfinished(name) for name in os.listdir(tmp_path)):
        assert process.poll() is None
    process.kill()
    process.wait()
    (tmp_path / "file").write_bytes(b"whole")
    others = ["file", "file.json", "file.json.writing", "file.json.0123abcd.writing", "writing", "my.writing"]
    for name in [*others[1:], "file.writing", "file.0123abcd.writing"]:
        (tmp_path / name).write_bytes(b"x")
    remove_leftovers(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == sorted(others)


# Reading.


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def loop(path):
    path.symlink_to(path)


def sparse(path):
    path.touch()
    os.truncate(path, 2**40)


NO_FILES = {
    pipe: "not a regular file",
    endless: "not a regular file",
    os.mkdir: "not a regular file",
    loop: r"cannot be opened \(Too many levels of symbolic links\)",
    sparse: r"larger than \d+ MiB",
}


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json])
@pytest.mark.parametrize("make", NO_FILES, ids=lambda make: make.__name__)
def test_what_is_no_file_is_refused_without_waiting(tmp_path, make, read):
    path = tmp_path / "file"
    make(path)
    with within_seconds(5), pytest.raises(UnreadableFile, match=f"^{NO_FILES[make]}$"):
        read(path)


def within_seconds(seconds):
    """A limit for what would otherwise wait for ever."""

    class Limit:
        def __enter__(self):
            self.before = signal.signal(signal.SIGALRM, self.over)
            signal.alarm(seconds)

        def __exit__(self, *error):
            signal.alarm(0)
            signal.signal(signal.SIGALRM, self.before)

        def over(self, *_):
            raise AssertionError("it waits")

    return Limit()


def test_a_file_that_is_not_there_is_told_apart(tmp_path):
    with pytest.raises(MissingFile, match=r"^the file does not exist$"):
        read_bytes(tmp_path / "file")
    with pytest.raises(UnreadableFile, match="null"):
        read_bytes(str(tmp_path) + "/a\0b")


def test_an_empty_file_is_one_unless_it_may_not_be(tmp_path):
    (tmp_path / "file").touch()
    assert read_bytes(tmp_path / "file") == b""
    with pytest.raises(UnreadableFile, match="empty"):
        read_bytes(tmp_path / "file", empty=False)


def test_files_that_the_system_makes_up_have_no_more_than_they_say():
    if not os.path.exists("/proc/self/pagemap"):
        pytest.skip("Linux has it: a regular file of no bytes from which half a terabyte can be read")
    assert read_bytes("/proc/self/pagemap") == b""


def test_a_disk_that_fails_while_a_file_is_read_is_told(tmp_path):
    (tmp_path / "file").write_bytes(b"x")

    def fail():
        with open_regular(tmp_path / "file"):
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(UnreadableFile, match=r"^cannot be read \(Input/output error\)$"):
        fail()


def test_what_is_wrong_in_the_block_stays_what_it_is(tmp_path):
    (tmp_path / "file").write_bytes(b"x")

    def fail(error):
        with open_regular(tmp_path / "file"):
            raise error

    for error in (UserError("of the content"), ValueError("of the program")):
        with pytest.raises(type(error), match=str(error)):
            fail(error)


def test_text_is_utf8_with_or_without_a_mark_and_any_line_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfgr\xc3\xbc\xc3\x9fe\r\nb\rc\n")
    assert read_text(path) == "grüße\nb\nc\n"
    path.write_bytes("grüße".encode("latin-1"))
    with pytest.raises(UnreadableFile, match=r"^not UTF-8 text$"):
        read_text(path)
    assert os.fsencode(read_text(path, errors="surrogateescape")) == "grüße".encode("latin-1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (b"\xff{}", "not UTF-8 text"),
        ("{}".encode("utf-16"), "not UTF-8 text"),
        ("[" * 200_000, "nested more than 100 deep"),
        ('{"a":' * 200_000, "nested more than 100 deep"),
        ("[" * 102 + "]" * 102, "nested more than 100 deep"),
        ("[NaN]", "not finite"),
        ("-Infinity", "not finite"),
        ("1e999", "not finite"),
        ("9" * 5000, "too large"),
        (str(2**63), "too large"),
        ("-" + "9" * 19, "too large"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_json_is_bounded(text, reason):
    with pytest.raises(UnreadableFile, match=reason) as refusal:
        parse_json(text)
    assert len(str(refusal.value)) < 120


@pytest.mark.parametrize(
    "value", [None, -(2**63), 2**63 - 1, 1e308, "text", {"a": [1, {"b": None}]}, json.loads("[" * 100 + "]" * 100)]
)
def test_other_json_is_what_it_is(tmp_path, value):
    (tmp_path / "file").write_text(json.dumps(value))
    assert read_json(tmp_path / "file") == parse_json(json.dumps(value)) == value


def test_the_largest_json_stays_within_two_gigabytes(tmp_path):
    (tmp_path / "file").write_text("[" + '{"":0},' * ((2**24 - 4) // 7) + "0]")
    pid = os.fork()
    if pid == 0:
        try:
            read_json(tmp_path / "file")
        finally:
            os._exit(0 if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# Appending and locking.


NOT_OWN = {
    "a link": lambda path, elsewhere: path.symlink_to(elsewhere),
    "a link to nothing": lambda path, elsewhere: path.symlink_to(elsewhere.with_name("nothing")),
    "a second name": lambda path, elsewhere: path.hardlink_to(elsewhere),
    "a pipe": lambda path, elsewhere: os.mkfifo(path),
    "a device": lambda path, elsewhere: path.symlink_to("/dev/zero"),
    "a folder": lambda path, elsewhere: path.mkdir(),
}


@pytest.mark.parametrize("what", NOT_OWN)
@pytest.mark.parametrize("use", [locked, partial(locked, wait=True), open_to_append], ids=["lock", "wait", "append"])
def test_nothing_is_locked_or_appended_to_through_what_lies_there(tmp_path, what, use):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    path = tmp_path / "lock"
    NOT_OWN[what](path, elsewhere)
    with within_seconds(5), pytest.raises(UserError, match="nothing is written through it"), use(path):
        pass
    assert elsewhere.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "lock"]


def test_appending_goes_to_the_end(tmp_path):
    for part in (b"one", b"two"):
        with open_to_append(tmp_path / "log") as file:
            file.write(part)
    assert (tmp_path / "log").read_bytes() == b"onetwo"


HOLDER = """
import sys
from co2.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_names_its_owner_and_goes_with_it(tmp_path):
    path = tmp_path / "lock"
    process = holder(path)
    with pytest.raises(TakenError, match=rf"^process {process.pid} on \S+$"), locked(path):
        pass
    assert path.read_text().startswith(f"process {process.pid} on")  # who asks in vain takes nothing from it
    process.kill()
    process.communicate()
    with locked(path) as trouble:
        assert trouble == ""
        assert path.read_text().startswith(f"process {os.getpid()} on")
    assert os.listdir(tmp_path) == []


def test_who_waits_for_a_lock_gets_it(tmp_path):
    path = tmp_path / "lock"
    process = holder(path)
    waiting = subprocess.Popen(
        [sys.executable, "-c", HOLDER.replace("sys.argv[1]", "sys.argv[1], wait=True"), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.communicate()  # it ends, and removes what the other one is waiting at
    assert waiting.stdout.readline() == "held\n"
    with pytest.raises(TakenError, match=f"process {waiting.pid} "), locked(path):
        pass
    waiting.communicate()
    assert os.listdir(tmp_path) == []


def test_a_file_of_somebody_else_under_the_name_of_a_lock_keeps_what_is_in_it(tmp_path):
    (tmp_path / "lock").write_text("a list of locks")
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == "a list of locks"
    assert (tmp_path / "lock").read_text() == "a list of locks"


def test_where_the_file_system_has_no_locks_the_block_is_told(tmp_path, monkeypatch):
    def unsupported(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with locked(tmp_path / "lock") as trouble:
        assert trouble == "No locks available"
    assert os.listdir(tmp_path) == []


def test_a_full_disk_keeps_nobody_from_a_lock(tmp_path, monkeypatch):
    def full(number, data, place):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").read_bytes() == b""
