"""Several cells on one GPU at once: through NVIDIA's MPS their kernels run side by side, and not by turns.

A small network does not fill a large GPU with every kernel; three ResNet-18 at 32 pixels train a tenth more images a
second together than one does alone. MPS is a process of the user's own that comes with the driver. The one started here
ends with the study, in whatever way that ends.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_USUAL_PIPES = Path("/tmp/nvidia-mps")
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# MPS has so many queues for all of its clients, or a few more: three with 32 each were seen to work, and others beside
# them were told that memory had run out.
_ALL_QUEUES = 64
_SECONDS_TO_BEGIN, _SECONDS_TO_END = 30.0, 20.0

# Runs until its input is closed: by `shared_gpu`, or by the system when the study's process is gone.
_KEEPER = f"{CONTROL} -d < /dev/null > /dev/null || exit 1; echo ready; cat > /dev/null; echo quit | {CONTROL}"

# What a cell will do first. It fails where MPS is there but does not serve: another user's, or none in a container.
_PROBE = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
sys.exit(cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
         or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
"""


@contextmanager
def shared_gpu(jobs: int) -> Iterator[dict[str, str]]:
    """What processes that share a GPU find in their environment, while MPS serves them if it is there."""
    mine = {} if _QUEUES in os.environ else {_QUEUES: str(max(2, min(32, _ALL_QUEUES // jobs)))}
    if PIPES in os.environ or (_USUAL_PIPES / "control").exists() or shutil.which(CONTROL) is None:
        yield mine  # the user has started one, or has none
        return
    folder = Path(tempfile.mkdtemp(prefix="co2-mps-"))
    serving = {PIPES: str(folder), _LOGS: str(folder)}
    keeper = subprocess.Popen(
        ["sh", "-c", _KEEPER],
        env={**os.environ, **serving},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the study, whose cells still need it to stop well
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        begun = select.select([keeper.stdout], [], [], _SECONDS_TO_BEGIN)[0]  # else it hangs
        if begun and keeper.stdout.readline().strip() == b"ready" and _serves(serving):
            print(f"{jobs} cells at once share the GPU through MPS.", flush=True)
            yield {**mine, **serving}
        else:
            print("MPS is on this machine but does not serve; the cells take turns on the GPU.", flush=True)
            yield mine
    finally:
        keeper.stdin.close()
        try:
            keeper.wait(timeout=_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            keeper.kill()
        keeper.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def _serves(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment gets to a GPU."""
    probe = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(probe, env={**os.environ, **environment}, stderr=subprocess.DEVNULL, timeout=60)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
