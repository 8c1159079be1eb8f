"""How long the objective takes and how much memory it needs, fused against everything else that could compute it.

    python tools/loss.py --out results/loss
    python tools/loss.py --rows 256 4096 --negatives 65536 --backends compiled fused
    python tools/loss.py --sweep --rows 256 1024 4096 --negatives 65536 --out results/loss

What is timed is the device's work for one call: events around it, after a warm-up, with the second-level cache flushed
before each run and the queue of launches kept ahead of the device, as it is in a training step. `call` is the time a
lone caller waits who launches one after the other, launch costs and all.
"""

from __future__ import annotations

import csv
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from co2.bench.record import check_folder, provenance, show
from co2.bench.roofline import measure
from co2.bench.step import release
from co2.errors import UserError
from co2.files import read_json
from co2.objective import fused
from co2.objective.contrast import contrast
from co2.objective.reference import reference
from co2.objective.specification import Consistency, Precision

DEVICE = torch.device("cuda")
BACKENDS = {
    "reference": "plain PyTorch",
    "compiled": "the reference through torch.compile",
    "attention": "two scaled_dot_product_attention calls: the consistency term alone, without InfoNCE and rank",
    "attention-bf16": "the same on bfloat16 copies, where PyTorch has a flash kernel",
    "fused": "the Triton kernels",
    "fused-full": "the Triton kernels with precision='full'",
}
PASSES = ("forward", "backward", "both")
TAU, SIGMA = 0.2, 0.05


@dataclass(frozen=True)
class LossBenchmark:
    """How long the objective takes and how much memory it needs, by each implementation."""

    rows: tuple[int, ...] = (256, 1024, 4096)
    """Batch sizes B."""
    negatives: tuple[int, ...] = (4096, 65536, 262144)
    """Numbers of negatives K."""
    dim: int = 128
    """Numbers in an embedding, D."""
    backends: tuple[str, ...] = ("reference", "compiled", "attention", "attention-bf16", "fused")
    """Which implementations to time."""
    budget: float = 0.2
    """Seconds of device time for each number."""
    sweep: bool = False
    """Try tile sizes of the fused kernels instead, and print the best of each shape."""
    out: Path | None = None
    """Folder for the table (CSV), the plot (PNG, SVG) and the record (JSON)."""
    plot: Path | None = None
    """Only draw the plot of this record, beside it."""


def run(settings: LossBenchmark) -> dict[str, Any]:
    """Measures, prints a table, and writes the record where `settings.out` says."""
    unknown = [name for name in settings.backends if name not in BACKENDS]
    if unknown:
        raise UserError(f"There is no backend '{unknown[0]}': use some of {', '.join(BACKENDS)}.")
    if settings.out is not None:
        check_folder(settings.out, "--out")
    if not torch.cuda.is_available():
        raise UserError("This benchmark measures CUDA kernels and found no GPU. Run it on a machine that has one.")
    record = provenance(DEVICE) | {
        "settings": {"tau_instance": TAU, "tau_consistency": SIGMA, "dtype": "float32", "gradient": "query"},
        "backends": BACKENDS,
    }
    record["ceilings"] = ceilings()
    print("ceilings: " + ", ".join(f"{name} {value:.4g}" for name, value in record["ceilings"].items()), flush=True)
    if settings.sweep:
        record["sweep"] = sweep(settings)
    else:
        record["accuracy"] = accuracy(settings)
        show("error against float64, relative to the norm", record["accuracy"])
        record["times"] = times(settings)
        show("median milliseconds on the device (20% and 80% quantiles), and memory beyond the inputs", record["times"])
        record["speedups"] = speedups(record["times"])
        show("how many times faster and leaner than the compiled reference, forward and backward", record["speedups"])
    if settings.out is not None:
        write(record, settings.out)
    return record


# ---------------------------------------------------------------- what is measured


def times(settings: LossBenchmark) -> list[dict[str, Any]]:
    """One row for each shape and backend."""
    rows = []
    for b in settings.rows:
        for k in settings.negatives:
            for backend in settings.backends:
                row: dict[str, Any] = {"B": b, "K": k, "D": settings.dim, "backend": backend}
                try:
                    row.update(time_backend(backend, b, k, settings.dim, settings.budget))
                except torch.cuda.OutOfMemoryError:
                    row["skipped"] = "does not fit this device's memory"
                print(json.dumps(row), flush=True)
                rows.append(row)
                release(DEVICE)
    return rows


def time_backend(backend: str, b: int, k: int, d: int, budget: float) -> dict[str, Any]:
    query, positive, negatives = make_inputs(b, k, d)
    query.requires_grad_()
    loss = loss_of(backend, positive, negatives)
    kept: list[Tensor] = []

    def forward() -> None:
        kept[:] = [loss(query)]

    def backward() -> None:
        query.grad = None
        kept.pop().backward()

    def both() -> None:
        query.grad = None
        loss(query).backward()

    for _ in range(3):  # compiles, and fills the allocator's cache
        both()
    torch.cuda.synchronize()
    query.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"memory_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
    for name, action, prepare in (("forward", forward, None), ("backward", backward, forward), ("both", both, None)):
        found.update({f"{name}_{key}": value for key, value in measure(action, budget, prepare).items()})
    kept.clear()
    start = time.perf_counter()
    repeats = max(3, min(100, int(budget / (found["both_ms"] / 1e3))))
    for _ in range(repeats):
        both()
    torch.cuda.synchronize()
    found["call_ms"] = (time.perf_counter() - start) / repeats * 1e3
    return found


def loss_of(backend: str, positive: Tensor, negatives: Tensor) -> Callable[[Tensor], Tensor]:
    """The mean loss as a function of the queries: MoCo's case, where nothing else has a gradient."""

    def plain(query: Tensor) -> Tensor:
        instance, consistency, _ = reference(query, positive, negatives, TAU, Consistency(temperature=SIGMA), 0.0, None)
        assert consistency is not None
        return (instance + consistency).mean()

    def fused(query: Tensor) -> Tensor:
        precision: Precision = "full" if backend == "fused-full" else "fast"
        found = contrast(
            query, positive, negatives, tau_instance=TAU, tau_consistency=SIGMA, backend="fused", precision=precision
        )
        assert found.consistency is not None
        return (found.instance + found.consistency).mean()

    keys = negatives.bfloat16() if backend == "attention-bf16" else negatives

    def attention(query: Tensor) -> Tensor:
        # L_con = (p − q)·(μ_P − μ_Q) / 2σ with μ_u = softmax(u Nᵀ / σ) N
        both = (x.to(keys.dtype)[None, None] for x in (query, positive))
        n = keys[None, None]
        around = [F.scaled_dot_product_attention(x, n, n, scale=1 / SIGMA) for x in both]
        return ((positive - query) * (around[1] - around[0])[0, 0].float()).sum(dim=1).mean() / (2 * SIGMA)

    if backend == "compiled":
        torch._dynamo.reset()
        return torch.compile(plain, dynamic=False)
    return {"reference": plain, "attention": attention, "attention-bf16": attention}.get(backend, fused)


def accuracy(settings: LossBenchmark) -> list[dict[str, Any]]:
    """Errors of the terms and of the query's gradient on the largest of the asked shapes whose truth is affordable."""
    b, k = min(min(settings.rows), 1024), min(max(settings.negatives), 65536)
    query, positive, negatives = make_inputs(b, k, settings.dim)

    def evaluate(dtype: torch.dtype, **options: Any) -> list[Tensor]:
        leaf = query.to(dtype).requires_grad_()
        found = contrast(
            leaf, positive.to(dtype), negatives.to(dtype), tau_instance=TAU, tau_consistency=SIGMA, **options
        )
        assert found.consistency is not None
        by_instance, by_consistency = (
            torch.autograd.grad(term.sum(), leaf, retain_graph=True)[0] for term in (found.instance, found.consistency)
        )
        terms = [found.instance.detach(), found.consistency.detach(), by_instance, by_consistency]
        return [x.double() for x in [*terms, found.rank]]

    truth = evaluate(torch.float64, backend="reference")
    cases: dict[str, dict[str, Any]] = {
        "reference": {"backend": "reference"},
        "reference, TF32 products": {"backend": "reference"},
        "fused": {"backend": "fused"},
        "fused, precision='full'": {"backend": "fused", "precision": "full"},
    }
    rows = []
    for name, options in cases.items():
        torch.backends.cuda.matmul.allow_tf32 = "TF32" in name
        found = evaluate(torch.float32, **options)
        torch.backends.cuda.matmul.allow_tf32 = False
        names = ("instance", "consistency", "gradient of instance", "gradient of consistency")
        errors = {
            label: ((ours - true).norm() / true.norm()).item()
            for label, ours, true in zip(names, found, truth, strict=False)
        }
        wrong_ranks = (found[-1] != truth[-1]).double().mean().item()
        rows.append({"B": b, "K": k, "D": settings.dim, "backend": name, **errors, "ranks that differ": wrong_ranks})
    return rows


def speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    timed = {(row["B"], row["K"], row["backend"]): row for row in rows if "both_ms" in row}
    for (b, k, backend), row in timed.items():
        compiled = timed.get((b, k, "compiled"))
        if compiled is not None and backend != "compiled":
            times_faster = compiled["both_ms"] / row["both_ms"]
            leaner = compiled["memory_mib"] / row["memory_mib"]
            found.append({"B": b, "K": k, "backend": backend, "faster": times_faster, "leaner": leaner})
    return found


CANDIDATES = [  # rows, negatives, warps, stages
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (64, 128, 4, 3),
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3),
]  # fmt: skip


def sweep(settings: LossBenchmark) -> list[dict[str, Any]]:
    """Times the forward and the backward kernels alone with every candidate, on float32 and on rounded negatives."""
    rows: list[dict[str, Any]] = []
    for b in settings.rows:
        for k in settings.negatives:
            query, positive, negatives = make_inputs(b, k, settings.dim)
            rounding = measure(negatives.half, settings.budget / 4)["ms"]
            for form in (negatives, negatives.half()):
                for name, found in sweep_shape(query, positive, form, settings.budget / 8).items():
                    shape = {"B": b, "K": k, "negatives": str(form.dtype)[6:], "pass": name, "rounding_ms": rounding}
                    rows += [{**shape, **row} for row in found]
                    show(f"{shape}", found[:4])
            release(DEVICE)
    return rows


def sweep_shape(query: Tensor, positive: Tensor, negatives: Tensor, budget: float) -> dict[str, list[dict[str, Any]]]:
    """Milliseconds of each candidate, the best first."""
    from triton.runtime.errors import OutOfResources

    options = fused.Settings(TAU, SIGMA, None, 0, 0.0, False)
    instance, _, _, operands, saved = fused.forward(query, positive, negatives, None, options)
    gradient = instance.new_full((len(query),), 1 / len(query))

    def forward(tiles: fused.Tiles) -> None:
        fused.forward(query, positive, negatives, None, options, tiles)

    def backward(tiles: fused.Tiles) -> None:
        tensors = (gradient, gradient, query, positive, negatives, None, operands, saved)
        fused.backward(*tensors, options, True, (True, False, False), None, tiles)

    found: dict[str, list[dict[str, Any]]] = {}
    for name, action in (("forward", forward), ("backward", backward)):
        timed: list[dict[str, Any]] = []
        for candidate in CANDIDATES:
            for programs in (1, 2, 3, 4):
                tiles = fused.Tiles(*candidate, programs)
                try:
                    timed.append({"ms": measure(functools.partial(action, tiles), budget)["ms"], **tiles._asdict()})
                except OutOfResources:
                    break
        found[name] = sorted(timed, key=lambda row: row["ms"])
    return found


# ---------------------------------------------------------------- how it is measured


def ceilings() -> dict[str, float]:
    """What this device moves and multiplies at best: TB/s of a copy, read plus written, and TFLOP/s of products."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    found = {"copy_tb_per_s": 2 * source.nbytes / measure(lambda: target.copy_(source), 0.1)["ms"] / 1e9}
    n = 8192
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32)):
        left, right = torch.randn(n, n, device="cuda", dtype=dtype), torch.randn(n, n, device="cuda", dtype=dtype)
        torch.backends.cuda.matmul.allow_tf32 = True
        milliseconds = measure(lambda a=left, b=right: a @ b, 0.1)["ms"]  # type: ignore[misc]
        torch.backends.cuda.matmul.allow_tf32 = False
        found[f"{name}_tflop_per_s"] = 2 * n**3 / milliseconds / 1e9
    release(DEVICE)
    return found


def make_inputs(b: int, k: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries with positives that resemble them, and unrelated negatives."""
    generator = torch.Generator("cuda").manual_seed(0)
    noise = [torch.randn(rows, d, generator=generator, device="cuda") for rows in (b, b, k)]
    query, other, negatives = (F.normalize(x, dim=1) for x in noise)
    return query, F.normalize(query + 0.7 * other, dim=1), negatives


# ---------------------------------------------------------------- what comes out


def write(record: dict[str, Any], out: Path) -> None:
    """The record as JSON, its table of times as CSV, and a plot of them."""
    out.mkdir(parents=True, exist_ok=True)
    name = "sweep" if "sweep" in record else "loss"
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    rows = record.get("times") or record.get("sweep") or []
    with (out / f"{name}.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        table.writeheader()
        table.writerows(rows)
    if "times" in record:
        try:
            plot(record, out)
        except ImportError:
            print(f"matplotlib is not installed here. Plot later: --plot {out / 'loss.json'}", flush=True)


def plot(record: dict[str, Any], out: Path) -> None:
    """Time and memory of each backend over the number of negatives, one column for each batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in record["times"] if "both_ms" in row]
    sizes = sorted({row["B"] for row in rows})
    figure, axes = pyplot.subplots(2, len(sizes), figsize=(4 * len(sizes), 6.5), sharex=True, squeeze=False)
    for column, b in enumerate(sizes):
        for backend in dict.fromkeys(row["backend"] for row in rows):
            mine = sorted((row["K"], row) for row in rows if row["B"] == b and row["backend"] == backend)
            counts = [k for k, _ in mine]
            for line, key in ((0, "both_ms"), (1, "memory_mib")):
                axes[line][column].plot(counts, [max(row[key], 1e-3) for _, row in mine], marker="o", label=backend)
        axes[0][column].set_title(f"B = {b:,}")
        axes[1][column].set_xlabel("negatives K")
        for line in (0, 1):
            axes[line][column].set_xscale("log", base=2)
            axes[line][column].set_yscale("log")
            axes[line][column].grid(alpha=0.3)
    axes[0][0].set_ylabel("forward + backward, ms")
    axes[1][0].set_ylabel("memory beyond the inputs, MiB")
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(f"InfoNCE + consistency, D = {rows[0]['D']}, float32, {record['device']['name']}")
    figure.tight_layout()
    for ending in ("png", "svg"):
        figure.savefig(out / f"loss.{ending}", dpi=150)
    pyplot.close(figure)


def main(words: list[str] | None = None) -> None:
    """Measure what the command line says, or draw a record again."""
    settings = tyro.cli(LossBenchmark, args=words, prog="python tools/loss.py")
    if settings.plot is not None:
        plot(read_json(settings.plot), settings.plot.parent)
        return
    try:
        run(settings)
    except UserError as mistake:
        sys.exit(str(mistake))


if __name__ == "__main__":
    main()
