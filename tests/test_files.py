"""Files that are there as a whole or not at all."""

import os
import stat

import pytest

from co2.files import appearing_when_whole, write_atomically


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    seen = []
    with appearing_when_whole(path, before_rename=lambda whole: seen.append(whole.read_bytes())) as file:
        file.write(b"all of it")
        file.flush()
        assert os.listdir(tmp_path) == ["file.writing"]
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
