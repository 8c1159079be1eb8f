"""The stopwatch: whether the parts of a step are told apart, also inside a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from co2.bench import parts
from co2.bench.parts import Stopwatch, shares, typical


def test_laps_on_a_cpu_are_differences_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 4.5, 10.0, 10.25, 10.5])
    monkeypatch.setattr(parts.time, "perf_counter", lambda: next(clock))
    stopwatch = Stopwatch(torch.device("cpu"))
    found = []
    for _ in range(2):
        for part in ("start", "views", "loss"):
            stopwatch.lap(part)
        found.append(stopwatch.read())
    assert found == [{"views": 0.5, "loss": 3.0}, {"views": 0.25, "loss": 0.25}]
    assert typical(found) == {"views": 0.375, "loss": 1.625}


def test_shares_add_up_to_the_whole() -> None:
    found = shares({"views": 0.25, "loss": 0.5}, whole=1.0)
    assert found == {"views": 0.25, "loss": 0.5, "between steps": 0.25}


def test_a_compiler_does_not_see_the_stopwatch() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        stopwatch.lap("key forward")
        return x * 2

    assert torch.equal(torch.compile(forward, backend=keep)(torch.ones(2)), torch.full((2,), 4.0))
    assert len(graphs) == 1
    assert stopwatch.read() == {}


@pytest.mark.gpu
def test_laps_inside_a_cuda_graph_are_timed_at_each_replay() -> None:
    device = torch.device("cuda")
    stopwatch = Stopwatch(device)
    small, large = torch.randn(512, 512, device=device), torch.randn(8192, 8192, device=device)

    def step() -> None:
        stopwatch.lap("start")
        small @ small
        stopwatch.lap("short")
        large @ large
        stopwatch.lap("long")

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    for _ in range(3):
        graph.replay()
        found = stopwatch.read()
    assert 0 < found["short"] < found["long"] < 1
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    whole = sum(stopwatch.read().values())
    assert 0.5 * whole < begin.elapsed_time(end) / 1e3 < 2 * whole
