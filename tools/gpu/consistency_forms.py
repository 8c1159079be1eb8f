"""The fused forms of the consistency term on a GPU: their errors against float64, and their times beside the paper's.

    python tools/gpu/consistency_forms.py          # half a minute, most of it compiling

The paper's form at one temperature is what the others are measured by: none is to take more than 1.3 times as long.
Times are of a forward and a backward pass for the queries, replayed as a CUDA graph, the median of twelve.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from co2.objective.contrast import contrast
from co2.objective.specification import Consistency

SHAPES = ((252, 507, 123), (256, 65536, 128), (4096, 65536, 128))
PAPER = Consistency(temperature=0.1, target_gradient=False)
SHARP = replace(PAPER, target_temperature=0.05)
TERMS = {
    "symmetric-kl, one temperature": PAPER,
    "symmetric-kl": SHARP,
    "kl": replace(SHARP, form="kl"),
    "reverse-kl": replace(SHARP, form="reverse-kl"),
    "soft-label": replace(SHARP, form="soft-label", weight=1.0),
}
AT_ONCE, REPEATS = 10, 12


def triple(b: int, k: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, positives that resemble them, and unrelated negatives."""
    generator = torch.Generator().manual_seed(0)
    query, noise, negatives = (F.normalize(torch.randn(n, d, generator=generator), dim=1) for n in (b, b, k))
    return query.cuda(), F.normalize(query + 0.7 * noise, dim=1).cuda(), negatives.cuda()


def found(inputs: tuple[Tensor, ...], term: Consistency, backend: str) -> list[Tensor]:
    query = inputs[0].detach().requires_grad_()
    terms = contrast(query, *inputs[1:], term=term, backend=backend)  # type: ignore[arg-type]
    assert terms.consistency is not None
    return [terms.consistency.detach(), torch.autograd.grad(terms.consistency.sum(), query)[0]]


def milliseconds(step: Callable[[], object]) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(AT_ONCE):
            step()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / AT_ONCE)
    return statistics.median(times)


def main() -> None:
    for shape in SHAPES:
        inputs = triple(*shape)
        paper = 0.0
        for name, term in TERMS.items():
            errors = []
            if shape[0] < 1024:  # the truth holds float64 matrices
                truth = found(tuple(x.double() for x in inputs), term, "reference")
                ours = found(inputs, term, "fused")
                errors = [((x - true).norm() / true.norm()).item() for x, true in zip(ours, truth, strict=True)]
            query = inputs[0].detach().requires_grad_()

            def step(query: Tensor = query, term: Consistency = term, others: tuple[Tensor, ...] = inputs[1:]) -> None:
                terms = contrast(query, *others, term=term, backend="fused")
                assert terms.consistency is not None
                torch.autograd.grad((terms.instance + terms.consistency).mean(), query)

            time = milliseconds(step)
            paper = paper or time
            wrong = ", ".join(f"{error:.1e}" for error in errors)
            print(
                f"{shape!s:20} {name:30} {time:.4f} ms, {time / paper:.2f} times the first   errors: {wrong}",
                flush=True,
            )


if __name__ == "__main__":
    main()
