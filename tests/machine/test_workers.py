"""Processes that prepare something: what they make comes in order, whatever happens to them."""

import array
import errno
import fcntl
import multiprocessing
import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import tempfile
import termios
import time

import pytest
import torch

from co2.errors import RunError
from co2.machine.workers import Workers, in_parts, results_of


class Doubled:
    """Twice each number of an entry; some of them are told to go wrong."""

    def __init__(self, folder, *, fatal=(), refused=()):
        self.folder = folder
        self.fatal = fatal
        self.refused = refused

    def __call__(self, wanted):
        for number in wanted:
            if number in self.refused:
                raise RunError(f"no {number}")
            if number in self.fatal and not (self.folder / str(number)).exists():
                (self.folder / str(number)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return 2 * torch.tensor(wanted)


@pytest.mark.parametrize("workers", [0, 2])
def test_results_come_in_the_order_of_the_entries(tmp_path, workers):
    plan = [[3, 1], range(4, 7), [0]]
    assert [made.tolist() for made in results_of(Doubled(tmp_path), plan, workers)] == [[6, 2], [8, 10, 12], [0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_is_told_as_what_it_is(tmp_path, workers):
    with pytest.raises(RunError, match=r"^no 2$"):  # not wrapped in a page of traceback
        list(results_of(Doubled(tmp_path, refused=[2]), [[1], [2]], workers))


def test_a_lost_process_is_replaced_and_nothing_is_missing(tmp_path):
    plan = [[number] for number in range(12)]
    assert [made.item() for made in results_of(Doubled(tmp_path, fatal=[5]), plan, 2)] == list(range(0, 24, 2))
    assert (tmp_path / "5").exists()


def test_processes_end_with_the_last_entry_or_with_the_wish_for_more(tmp_path):
    before = set(multiprocessing.active_children())
    plan = [[number] for number in range(12)]
    made = results_of(Doubled(tmp_path), plan, 2)
    next(made)
    assert len(set(multiprocessing.active_children()) - before) == 2
    made.close()
    assert set(multiprocessing.active_children()) <= before
    list(results_of(Doubled(tmp_path), plan, 2))
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(("numbers", "size"), [(range(3, 17), 5), (range(8), 4), (range(2), 9), (range(0), 3)])
def test_parts_are_all_the_numbers_in_order(numbers, size):
    parts = in_parts(numbers, size)
    assert [number for part in parts for number in part] == list(numbers)
    assert all(len(part) == size for part in parts[:-1])
    assert all(1 <= len(part) <= size for part in parts)


def assert_succeeds(body):
    """It ends with 0 in a process of its own: nobody waits for ever if it hangs."""
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(timeout=60)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_tensors_of_every_kind_arrive_as_they_were():
    kinds = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64]
    made = [
        (torch.arange(24).reshape(2, 3, 4).to(kind).transpose(0, 2), torch.empty(0, 3, dtype=kind), torch.ones(()))
        for kind in kinds
    ]
    for arrived, sent in zip(results_of(made.__getitem__, range(len(made)), 1), made, strict=True):
        assert all(
            torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(arrived, sent, strict=True)
        )
        arrived[0].zero_()  # it can be written to, as any tensor


WITHOUT_SHARED_MEMORY = """
import torch
from co2.machine.workers import results_of

def no_room(*arguments):
    raise RuntimeError("unable to allocate shared memory(shm)")

torch.UntypedStorage._share_fd_cpu_ = torch.UntypedStorage._share_filename_cpu_ = no_room
print(sum(int(made[-1]) for made in results_of(lambda number: torch.full((100_000,), number), range(12), 2)))
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no memory without a name")
def test_tensors_are_handed_over_without_dev_shm():
    done = subprocess.run([sys.executable, "-c", WITHOUT_SHARED_MEMORY], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("66\n", "")


NO_ROOM_AT_ALL = """
import resource, signal, torch
from co2.errors import RunError
from co2.machine.workers import results_of

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    list(results_of(lambda number: torch.full((100_000,), number), range(4), 2))
except RunError as error:
    print(error)
"""


def test_a_result_that_cannot_be_handed_over_is_told_and_not_waited_for():
    done = subprocess.run([sys.executable, "-c", NO_ROOM_AT_ALL], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("A process that prepares images cannot hand them over (File too large)."), done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/shm"), reason="semaphores are elsewhere")
def test_workers_that_cannot_be_started_are_told_in_a_sentence(monkeypatch):
    def no_room(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", no_room)
    with pytest.raises(RunError, match=r"cannot be started \(No space left on device\)\. Try fewer --workers, or 0"):
        list(results_of(made_of, range(4), 2))


def dies_with_a_lock_in_its_hands(entry):
    """On entry 5, once: takes the lock of whatever torch's workers look at before each entry, and is killed."""
    number, folder = entry
    if number == 5 and not (folder / "it happened").exists():
        (folder / "it happened").touch()
        frame = sys._getframe()
        while "done_event" not in frame.f_locals:
            frame = frame.f_back
        lock = getattr(frame.f_locals["done_event"], "_cond", None)
        if lock is not None:
            lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_worker_that_is_killed_with_a_lock_in_its_hands_is_replaced(tmp_path):
    def body():
        made = list(results_of(dies_with_a_lock_in_its_hands, [(number, tmp_path) for number in range(12)], 2))
        os._exit(0 if made == list(range(12)) else 1)

    assert_succeeds(body)
    assert (tmp_path / "it happened").exists()


def large_from_the_first(number):
    return bytes(8 << 20 if torch.utils.data.get_worker_info().id == 0 else 8)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_in_the_middle_of_a_message_is_replaced(workers):
    def body():
        making = Workers(large_from_the_first, workers, tensors=False)
        results = making.results(range(8))
        next(results)
        iterator = making._loader._iterator
        waiting = array.array("i", [0])
        while waiting[0] < 1 << 15:  # more than small messages take: a large one has begun, and does not fit
            time.sleep(0.01)
            fcntl.ioctl(iterator._worker_result_queue._reader.fileno(), termios.FIONREAD, waiting)
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        os._exit(0 if (len(list(results)), making.lost) == (7, 1) else 1)

    assert_succeeds(body)


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_drawn_from_the_generator_that_networks_draw_from(tmp_path, workers):
    before = torch.get_rng_state()
    list(results_of(Doubled(tmp_path), [[1], [2]], workers))
    assert torch.equal(torch.get_rng_state(), before)


def made_of(number):
    return torch.full((1000,), number)


def test_the_workers_of_a_killed_process_clear_up(tmp_path):
    """Each has a folder with a socket, by which it hands over tensors."""
    seen = tmp_path / "there was one"

    def body():
        tempfile.tempdir = str(tmp_path)
        for number, _ in enumerate(results_of(made_of, range(1000), 2)):
            if number == 20:
                if list(tmp_path.glob("pymp-*")):
                    seen.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert seen.exists()
    deadline = time.monotonic() + 30
    while list(tmp_path.glob("pymp-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.glob("pymp-*"))


MORE_THAN_CORES = """
import os
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
from co2.machine.workers import results_of
print(*results_of(abs, [-1, -2], workers=2))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken away here")
def test_more_processes_than_cores_are_the_users_choice():
    done = subprocess.run([sys.executable, "-c", MORE_THAN_CORES], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1 2\n", "")
