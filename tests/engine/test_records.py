"""The run folder itself: who may write to it, what is left of it after a kill, and what is read back from it."""

import contextlib
import errno
import fcntl
import json
import os

import pytest
from hostile import in_bounds, make_endless, make_pipe

import co2
from co2.data.folder import FileSource
from co2.engine import records
from co2.engine.records import BAD_IMAGES, METRICS, Records, claim_folder
from co2.errors import RunError
from co2.runs.rows import read_rows


def files(root, *names):
    return FileSource("pictures", str(root), [name.encode() for name in names])


@pytest.mark.parametrize("left", [[".lock"], [".lock", "config.json.writing"]])
def test_a_start_that_was_killed_can_be_started_again(tiny, tmp_path, left):
    for name in left:
        (tmp_path / name).write_text('{"rec')
    with claim_folder(tmp_path, tiny(resume="auto")):
        assert json.loads((tmp_path / "config.json").read_text())["recipe"] == "demo-co2"
    assert sorted(os.listdir(tmp_path)) == [".lock", "config.json"]


def test_what_a_killed_write_has_left_goes_when_the_folder_is_claimed(tiny, tmp_path):
    with claim_folder(tmp_path, tiny()):
        pass
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-000000003.pt.writing").write_bytes(b"half")
    with claim_folder(tmp_path, tiny(resume=True)):
        assert not os.listdir(tmp_path / "checkpoints")


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_something_else_is_no_run_to_go_on_with(tiny, tmp_path, resume):
    (tmp_path / "thesis.txt").write_text("nearly done")
    with (
        pytest.raises(co2.UserError, match=r"not a run folder: it has no config\.json\. Choose another --out"),
        claim_folder(tmp_path, tiny(resume=resume)),
    ):
        pass
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_settings_that_cannot_be_read_are_told_plainly(tiny, tmp_path, monkeypatch):
    with claim_folder(tmp_path, tiny()):
        pass

    def refuse(path, *how, **more):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("co2.files.open", refuse, raising=False)
    with (
        pytest.raises(co2.UserError, match=r"config\.json cannot be read: no permission to read it.*Make it readable"),
        claim_folder(tmp_path, tiny(resume=True)),
    ):
        pass


def test_a_name_that_is_too_long_is_told_plainly(tiny, tmp_path):
    with pytest.raises(co2.UserError, match=r"File name too long.*--out"), claim_folder(tmp_path / ("x" * 300), tiny()):
        pass


def test_a_disk_that_is_full_when_the_settings_are_written_is_told_plainly(tiny, tmp_path, monkeypatch):
    def fail(path, write):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records, "write_atomically", fail)
    with (
        pytest.raises(RunError, match=r"is full \(No space left on device\)\. Make room"),
        claim_folder(tmp_path, tiny()),
    ):
        pass


def test_errors_while_the_folder_is_claimed_are_left_alone(tiny, tmp_path):
    with pytest.raises(OSError, match="of the run's own"), claim_folder(tmp_path, tiny()):
        raise OSError(errno.ENOSPC, "of the run's own")


def test_where_there_are_no_locks_the_run_goes_on_and_says_so(tiny, tmp_path, monkeypatch, capsys):
    def unsupported(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with claim_folder(tmp_path, tiny()):
        assert (tmp_path / "config.json").is_file()
    said = capsys.readouterr().out
    assert "cannot be locked (No locks available)" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_is_held_is_held(tiny, tmp_path, monkeypatch, code):
    def held(file, how):
        raise OSError(code, "held")

    monkeypatch.setattr(fcntl, "lockf", held)
    with pytest.raises(co2.UserError, match="Another process is writing"), claim_folder(tmp_path, tiny()):
        pass


def test_bad_images_are_listed_once_however_often_a_run_is_resumed(tmp_path):
    source = files("/a", *(f"{number}.png" for number in range(9)))
    for first_step, bad in ((0, [1, 2]), (3, [2, 3]), (6, [1, 2, 3])):
        opened = Records(tmp_path, first_step)
        opened.note_bad([(index, "empty file") for index in bad], source)
        opened.close()
        listed = (tmp_path / BAD_IMAGES).read_text().splitlines()
        assert len(opened.bad) == len(listed) == len(set(listed)) == (2 if first_step == 0 else 3)
    assert listed == [f"/a/{number}.png\tempty file" for number in (1, 2, 3)]


def test_a_list_of_bad_images_is_put_in_order(tmp_path):
    (tmp_path / BAD_IMAGES).write_text("/a/1.png\tempty\n/a/1.png\tempty\nnonsense\n/a/2.png\ttrunc")
    opened = Records(tmp_path, 3)
    opened.note_bad([(2, "truncated file")], files("/a", "0.png", "1.png", "2.png"))
    opened.close()
    assert (tmp_path / BAD_IMAGES).read_text() == "/a/1.png\tempty\n/a/2.png\ttruncated file\n"


def test_a_list_that_has_stopped_a_run_begins_anew(tmp_path):
    (tmp_path / BAD_IMAGES).write_text("".join(f"/a/{number}.png\tempty\n" for number in range(4)))
    for most, left in ((4, 4), (3, 0)):
        opened = Records(tmp_path, 3, most_bad=most)
        opened.close()
        assert len(opened.bad) == left
    assert not (tmp_path / BAD_IMAGES).exists()


def row(step, **others):
    return json.dumps({"kind": "train", "step": step, "epoch": step / 3, "seconds": 10.0 * step} | others) + "\n"


def test_lines_of_steps_that_are_taken_again_go(tmp_path):
    metrics = tmp_path / METRICS
    for first_step, kept in ((3, [0, 3]), (0, [])):
        metrics.write_text("".join(row(step) for step in (0, 3, 6)))
        Records(tmp_path, first_step).close()
        assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == kept


def test_lines_that_are_no_rows_are_passed_over(tmp_path):
    strange = ["[1]", "7", "null", '"step"', "{}", '{"step": "x"}', '{"step": null}', '{"step": NaN}', '{"step": 1, "s']
    strange += [row(2, seconds="abc").strip(), "[" * 100_000, '{"step": 1' + 400 * "0" + "}"]
    (tmp_path / METRICS).write_bytes("\n".join([row(1).strip(), *strange, row(3)]).encode() + b"\xff\xfe\n")
    opened = Records(tmp_path, 3)
    opened.write("train", 4, 4 / 3, {})
    opened.close()
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3, 4]
    assert rows[-1]["seconds"] == pytest.approx(30, abs=5)


@pytest.mark.parametrize("name", [METRICS, BAD_IMAGES, "config.json", ".lock"])
@pytest.mark.parametrize("made", [True, False], ids=["of a file", "of nothing"])
def test_a_link_in_a_run_folder_carries_no_write_elsewhere(tiny, tmp_path, name, made):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with claim_folder(run, tiny()):
        pass
    elsewhere.mkdir()
    if made:
        (elsewhere / "file").write_text((run / name).read_text() if name == "config.json" else "precious\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(elsewhere / "file")
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    with contextlib.suppress(co2.UserError), claim_folder(run, tiny(resume=True)):
        opened = Records(run, 0)
        opened.write("train", 1, 0.5, {"loss": 1.0})
        opened.note_bad([(0, "empty file")], files("/a", "0.png"))
        opened.close()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


@pytest.mark.parametrize("name", [METRICS, BAD_IMAGES, "config.json", ".lock"])
@pytest.mark.parametrize("make", [make_pipe, make_endless])
def test_what_never_ends_in_a_run_folder_is_told_plainly(tiny, tmp_path, name, make):
    with claim_folder(tmp_path, tiny()):
        pass
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)

    def go_on():
        with claim_folder(tmp_path, tiny(resume=True)):
            Records(tmp_path, 0).close()

    assert in_bounds(go_on).startswith("UserError: ")


def test_bytes_that_are_no_text_in_a_run_cost_a_line(tmp_path):
    line = '{"kind": "train", "step": 1, "epoch": 0.5, "seconds": 1.0}\n'
    (tmp_path / METRICS).write_bytes(b"gr\xf6\xdfe\n" + line.encode() + b"[" * 200_000 + b"\n")
    assert [row["step"] for row in read_rows(tmp_path)] == [1]
