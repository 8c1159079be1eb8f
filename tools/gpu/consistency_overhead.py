"""What the consistency term adds to a whole training step: MoCo with InfoNCE alone against MoCo with both terms.

    python tools/gpu/consistency_overhead.py --out results/overhead

Two settings: ResNet-50 on 224-pixel images with B = 256, and ResNet-18 (3x3 stem) on 32-pixel images with B = 512; both
with K = 65,536, bfloat16 autocast, channels last, a momentum encoder and SGD, on random images that are on the GPU
already. The two kinds of step take turns, so that clocks and heat are the same for both; each turn is timed with device
events over a few steps. Reported are the ratio of the medians and the spread of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import co2
from co2.objective.contrast import contrast


@dataclass(frozen=True)
class Setting:
    backbone: str
    pixels: int
    rows: int
    negatives: int = 65536
    dim: int = 128
    bound: float = 0.0  # the largest overhead that would go unnoticed


SETTINGS = {
    "resnet50-224": Setting("resnet50", 224, 256, bound=0.003),
    "resnet18-32": Setting("resnet18", 32, 512, bound=0.02),
}


def make_encoder(setting: Setting) -> nn.Module:
    encoder: nn.Module = getattr(torchvision.models, setting.backbone)(num_classes=setting.dim)
    if setting.pixels == 32:  # the stem for small images
        encoder.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        encoder.maxpool = nn.Identity()
    return encoder.cuda().to(memory_format=torch.channels_last)


def make_step(setting: Setting, backend: str, compiled: bool) -> Callable[[float], None]:
    """One training step as a function of the weight of the consistency term; at 0 the term is not computed."""
    torch.manual_seed(0)
    query_encoder = make_encoder(setting)
    key_encoder = copy.deepcopy(query_encoder).requires_grad_(False)
    encode_query, encode_key = query_encoder, key_encoder
    if compiled:
        encode_query, encode_key = torch.compile(query_encoder), torch.compile(key_encoder)
    optimiser = torch.optim.SGD(query_encoder.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4, foreach=True)
    queue = F.normalize(torch.randn(setting.negatives, setting.dim, device="cuda"), dim=1)
    shape = (setting.rows, 3, setting.pixels, setting.pixels)
    views = [torch.randn(shape, device="cuda").contiguous(memory_format=torch.channels_last) for _ in range(2)]
    pairs = list(zip(key_encoder.parameters(), query_encoder.parameters(), strict=True))
    places = torch.arange(setting.rows, device="cuda")  # [B] where the next keys go, kept on the device for the graph

    def embed(encoder: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.normalize(encoder(images).float(), dim=1)

    def step(alpha: float) -> None:
        query = embed(encode_query, views[0])
        with torch.no_grad():
            torch._foreach_lerp_([key for key, _ in pairs], [query for _, query in pairs], 0.001)
            key = embed(encode_key, views[1])
        terms = contrast(
            query,
            key,
            queue,
            tau_consistency=0.05 if alpha > 0 else None,
            backend=backend,  # type: ignore[arg-type]
        )
        loss = terms.instance if terms.consistency is None else terms.instance + alpha * terms.consistency
        optimiser.zero_grad()
        loss.mean().backward()
        optimiser.step()
        queue.index_copy_(0, places, key)
        places.add_(setting.rows).remainder_(setting.negatives)

    return step


def captured(step: Callable[[float], None], alpha: float) -> Callable[[], None]:
    """The step as one CUDA graph: the device's own time, whatever Python needs to launch it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(alpha)
    return graph.replay


def compare(setting: Setting, backend: str, compiled: bool, graph: bool, turns: int, steps: int) -> dict[str, Any]:
    step = make_step(setting, backend, compiled)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # a graph is captured away from the default stream, so warm up there too
        for alpha in (0.0, 0.3) * 5:
            step(alpha)
    torch.cuda.synchronize()
    run = {alpha: captured(step, alpha) if graph else functools.partial(step, alpha) for alpha in (0.0, 0.3)}
    taken: dict[float, list[float]] = {0.0: [], 0.3: []}
    for turn in range(turns):
        for alpha in (0.0, 0.3) if turn % 2 == 0 else (0.3, 0.0):  # neither kind is always the second
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(steps):
                run[alpha]()
            end.record()
            end.synchronize()
            taken[alpha].append(begin.elapsed_time(end) / steps)
    alone, both = (statistics.median(taken[alpha]) for alpha in (0.0, 0.3))
    ratios = sorted(with_term / without - 1 for without, with_term in zip(taken[0.0], taken[0.3], strict=True))
    return {
        "backend": backend,
        "compiled_encoder": compiled,
        "cuda_graph": graph,
        "infonce_ms": alone,
        "with_consistency_ms": both,
        "overhead": both / alone - 1,
        "overhead_median_of_turns": statistics.median(ratios),
        "overhead_low": ratios[round(0.2 * (len(ratios) - 1))],
        "overhead_high": ratios[round(0.8 * (len(ratios) - 1))],
        "images_per_second": setting.rows / both * 1e3,
        "turns": turns,
        "steps_per_turn": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--backends", nargs="+", default=["fused", "reference"], choices=["fused", "reference"])
    parser.add_argument("--compile", action="store_true", help="compile the encoders, for the shortest step")
    parser.add_argument("--graph", action="store_true", help="replay the step as a CUDA graph, free of launch noise")
    parser.add_argument("--turns", type=int, default=16, help="how often each kind of step has its turn")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn")
    parser.add_argument("--out", type=Path, help="folder for the record")
    asked = parser.parse_args()
    home = Path(__file__).parents[2]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=home, capture_output=True, text=True).stdout.strip()
    record: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or None,
        "versions": {"co2": co2.__version__, "torch": torch.__version__, "torchvision": torchvision.__version__},
        "device": torch.cuda.get_device_name(),
        "results": [],
    }
    torch.backends.cudnn.benchmark = True
    for name in asked.settings:
        setting = SETTINGS[name]
        for backend in asked.backends:
            found = {"setting": name, "bound": setting.bound}
            found.update(compare(setting, backend, asked.compile, asked.graph, asked.turns, asked.steps))
            record["results"].append(found)
            print(
                f"{name:13} {backend:10} InfoNCE {found['infonce_ms']:.3f} ms, with consistency "
                f"{found['with_consistency_ms']:.3f} ms: {100 * found['overhead']:+.2f}% "
                f"(turns {100 * found['overhead_low']:+.2f}% to {100 * found['overhead_high']:+.2f}%, "
                f"bound {100 * setting.bound:.1f}%)",
                flush=True,
            )
            torch.cuda.empty_cache()
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "overhead.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
