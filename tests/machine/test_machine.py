import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torchvision.io import decode_jpeg, encode_jpeg

import co2
from co2.machine.device import choose_device, choose_workers, multiplies_bfloat16, stream_of_its_own
from co2.machine.memory import freed_memory_kept
from co2.machine.process import stop_requests
from co2.machine.provenance import commit


@pytest.mark.parametrize(("name", "message"), [("tpu9", "no device"), ("meta", "not supported")])
def test_a_device_that_is_not_there(name, message):
    with pytest.raises(co2.UserError, match=message):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(co2.UserError, match="--device cpu"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(("before", "after"), [(None, "32"), ("4", "4")])
def test_streams_get_queues_of_their_own_unless_the_user_says_otherwise(monkeypatch, before, after):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", before)
    choose_device("auto")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == after


@pytest.mark.parametrize(("name", "chosen"), [("cuda", []), ("cuda:0", [0]), ("cuda:1", [1])])
def test_a_gpu_that_is_named_by_its_number_is_the_current_one_from_then_on(monkeypatch, name, chosen):
    made_current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(device.index))
    assert choose_device(name) == torch.device(name)
    with pytest.raises(co2.UserError, match="There is no cuda:2"):
        choose_device("cuda:2")
    assert made_current == chosen


def test_ctrl_c_is_acknowledged_once_and_ends_the_program_the_second_time(capfd):
    with stop_requests() as requested:
        os.kill(os.getpid(), signal.SIGINT)
        assert requested == [signal.SIGINT]
        assert "Ctrl-C again ends it at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with stop_requests() as requested:
        os.kill(os.getpid(), signal.SIGTERM)
        assert requested == [signal.SIGTERM]
    assert not capfd.readouterr().err


def test_workers_as_asked_or_as_the_machine_has():
    assert choose_workers(0) == 0
    assert choose_workers(5) == 5
    assert 0 <= choose_workers(-1) <= 16
    for asked in (-7, 100_000):
        with pytest.raises(co2.UserError, match="--workers must be -1"):
            choose_workers(asked)


@pytest.mark.gpu
def test_on_a_stream_of_its_own_a_long_step_does_not_hold_up_the_decoder():
    device = torch.device("cuda")
    jpeg = encode_jpeg(torch.zeros(3, 64, 64, dtype=torch.uint8))
    decode_jpeg([jpeg] * 2, device=device)  # starts the decoder
    torch.cuda.synchronize()
    with stream_of_its_own(device):
        torch.cuda._sleep(2_000_000_000)  # cycles: a second
        step_is_over = torch.cuda.Event()
        step_is_over.record()
        with ThreadPoolExecutor(max_workers=1) as thread:
            thread.submit(lambda: decode_jpeg([jpeg] * 32, device=device)[-1].cpu()).result()
        assert not step_is_over.query()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.default_stream().synchronize()
    assert step_is_over.query()  # what follows outside comes after it


@pytest.fixture
def checkout(tmp_path):
    """A repository with a package in it, all of it committed."""
    (tmp_path / "src" / "co2").mkdir(parents=True)
    for name in ("src/co2/code.py", "README.md"):
        (tmp_path / name).write_text("as committed")
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "all")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_record_names_the_commit_and_says_if_the_code_is_another(checkout):
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    (checkout / "README.md").write_text("changed, but not run")
    assert commit(checkout) == head.strip()
    (checkout / "src" / "co2" / "code.py").write_text("changed")
    assert commit(checkout) == f"{head.strip()}-modified"


def test_a_new_file_of_the_package_is_a_change_of_it(checkout):
    (checkout / "src" / "co2" / "new.py").write_text("not committed")
    assert commit(checkout).endswith("-modified")


def test_what_is_installed_inside_somebody_elses_repository_has_no_commit(checkout):
    installed = checkout / "site-packages"
    installed.mkdir()
    assert commit(installed) is None


def test_without_git_there_is_no_commit(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commit(checkout) is None


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "aarch64", "sve_bf16": True}, True),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_a_processor_says_whether_it_multiplies_bfloat16(monkeypatch, capabilities, has):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert multiplies_bfloat16() == has


_FAULTS = """
import resource, torch
from co2.machine.memory import freed_memory_kept

MIB = (1 << 20) // resource.getpagesize()  # in pages

def fills_anew(size, times):  # whether the system has to fill most pages, when tensors of so many MiB come and go
    anew = 0
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(size << 18)
        anew += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > size * MIB / 2
    return anew > times / 2  # malloc may need a few before it finds a place again

def resident():
    return int(open("/proc/self/statm").read().split()[1])

outside = fills_anew(64, 50)
with freed_memory_kept(torch.device("DEVICE")):
    inside, held = fills_anew(64, 50), resident()
left = resident()
after = fills_anew(1024, 4)  # larger than any place that was kept
print(outside, inside, after, held - left > 32 * MIB)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or sys.platform != "linux", reason="for glibc's malloc")
@pytest.mark.parametrize(
    ("device", "environment", "inside"),
    [
        ("cpu", {}, "False"),
        ("cuda", {}, "True"),  # whose memory is torch's own business
        ("cpu", {"MALLOC_MMAP_THRESHOLD_": "1048576"}, "True"),  # a user who has chosen
        ("cpu", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}, "True"),
    ],
)
def test_on_a_cpu_freed_memory_is_used_again_until_the_work_is_done(device, environment, inside):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    program = [sys.executable, "-c", _FAULTS.replace("DEVICE", device)]
    said = subprocess.run(program, env=own | environment, capture_output=True, text=True, check=True).stdout.split()
    held_until_then = "True" if inside == "False" else "False"
    assert said == ["True", inside, "True", held_until_then]


def test_errors_pass_where_freed_memory_is_kept():
    with pytest.raises(KeyError), freed_memory_kept(torch.device("cpu")):
        raise KeyError
