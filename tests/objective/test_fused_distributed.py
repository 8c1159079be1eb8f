"""The fused objective behind DistributedDataParallel: real processes against one that has all their rows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from test_fused import interpreted, triple
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from co2.objective import fused as fused_module
from co2.objective.contrast import contrast

ROWS, STEPS = 24, 3


class Encoder(nn.Module):
    """Two layers and unit rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.layers(images), dim=1)


def train(encoder: nn.Module, pairs: list[tuple[Tensor, Tensor]], negatives: Tensor) -> list[Tensor]:
    """The gradients of every step, in one row each; both views of a pair carry gradients, as in SimCLR."""
    gradients = []
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.5)
    for first, second in pairs:
        optimiser.zero_grad()
        query, positive = encoder(torch.cat([first, second])).chunk(2)  # [b, 16] each
        found = contrast(query, positive, negatives, backend="fused")
        assert found.consistency is not None
        (found.instance + 0.3 * found.consistency).mean().backward()
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in encoder.parameters() if weight.grad is not None])
        )
        optimiser.step()
    return gradients


def train_in_a_process(rank: int, processes: int, backend: str, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))  # sets up Triton's interpreter, where that is used
    assert (device == "cpu") == fused_module.INTERPRETED
    if device == "cuda":
        torch.cuda.set_device(0)  # all of them share it
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=processes)
    generator = torch.Generator().manual_seed(0)
    pairs = [tuple(torch.randn(2, ROWS, 20, generator=generator).to(device)) for _ in range(STEPS)]
    negatives = triple(1, 50, 16)[2].to(device)
    torch.manual_seed(0)
    encoder = Encoder().to(device)
    initial = {name: value.clone() for name, value in encoder.state_dict().items()}
    own = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)
    shares = [(first[own], second[own]) for first, second in pairs]
    found = {"together": train(DistributedDataParallel(encoder), shares, negatives)}
    for name, rows in (("alone", pairs), ("own", shares)):
        encoder = Encoder().to(device)
        encoder.load_state_dict(initial)
        found[name] = train(encoder, rows, negatives)
    torch.save({name: torch.stack(rows).cpu() for name, rows in found.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def check_processes(processes: int, backend: str, device: str, folder: Path) -> None:
    # Not forked: once a compiler has run here, autograd has threads, which a forked process would lack.
    torch.multiprocessing.spawn(train_in_a_process, (processes, backend, device, str(folder)), nprocs=processes)
    results = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]
    for result in results:
        together, alone = result["together"], result["alone"]  # [STEPS, weights] each
        assert torch.equal(together, results[0]["together"])  # all processes go the same way
        assert alone.norm(dim=1).min() > 1e-2
        # The order of sums differs, and after the first step what is rounded to float16 does a little, too.
        assert (together - alone).norm() <= 1e-3 * alone.norm()
        if processes > 1:
            assert (result["own"] - alone).norm() > 0.1 * alone.norm()  # one share is not the whole


@interpreted
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    check_processes(2, "gloo", "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(("processes", "backend"), [(1, "nccl"), (2, "gloo")])
def test_processes_on_a_gpu_have_the_gradients_of_one(processes: int, backend: str, tmp_path: Path) -> None:
    check_processes(processes, backend, "cuda", tmp_path)
