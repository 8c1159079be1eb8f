"""Compiles every kernel of the fused objective for a GPU on a machine that has none, and prints what each one uses.

    python tests/support/compile_kernels.py [capability, such as 90] [--few]

The launches are real, only their last step is replaced: what would run is compiled down to machine code instead. The
interpreter accepts kernels that the compiler does not (it has no types), so the tests need both.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from co2.objective import fused

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64"}
seen: set[Any] = set()


class Compiled:
    """Stands in for a kernel and compiles where that would launch."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability = kernel, capability

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        values = {**dict(zip(self.kernel.arg_names, arguments, strict=False)), **constants}
        signature: dict[str, str] = {}
        constexprs: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for position, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                signature[parameter.name], constexprs[(position,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], attributes[(position,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(position,)] = [["tt.divisibility", 16]]
        key = (self.kernel.__name__, num_warps, num_stages, str(signature), str(constexprs), str(attributes))
        if key in seen:
            return
        seen.add(key)
        source = ASTSource(self.kernel, signature, constexprs, attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        shared = compiled.metadata.shared
        print(f"{self.kernel.__name__:28} {shared:7} bytes of shared memory  {len(compiled.asm['cubin']):7} of code")
        limit = {80: 163, 86: 99, 89: 99}.get(self.capability, 227) * 1024
        assert shared <= limit, f"{self.kernel.__name__} needs {shared} bytes of shared memory and may have {limit}"


def main() -> None:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    for name in [name for name in vars(fused) if name.endswith("_kernel")]:
        setattr(fused, name, Compiled(getattr(fused, name), capability))
    fused._roomy = lambda device: capability in (80, 90, 100)
    few = "--few" in sys.argv
    # Even, in blocks of dimensions, least, ragged, and enough rows for tall tiles, in one block and in several.
    shapes = [(64, 256, 128), (40, 70, 200), (1, 1, 1), (5, 70, 24), (256, 256, 128), (250, 70, 100), (256, 256, 1024)]
    cases = list(itertools.product(shapes, (False, True), (None, 2)))
    for (b, k, d), full, exclude in [cases[i] for i in (0, 5, 9, 16, 21)] if few else cases:
        query, positive, negatives = torch.empty(b, d), torch.empty(b, d), torch.empty(k, d)
        columns = None if exclude is None else torch.zeros(b, exclude, dtype=torch.int64)
        gradients = (torch.empty(b), torch.empty(b))
        kinds = [(0.05, 0.0, 0), (0.02, 0.1, 0), (None, 0.1, 0), (0.1, 0.0, 1), (0.05, 0.0, 2), (0.2, 0.0, 3)]
        for sigma, smoothing, form in [kinds[1], kinds[5]] if few else kinds:
            settings = fused.Settings(0.2, sigma, 0.04 if form else sigma, form, smoothing, full)
            for rows in (negatives,) if few else (negatives, negatives.bfloat16(), negatives.half()):
                *_, operands, statistics = fused.forward(query, positive, rows, columns, settings)
            for target, positive_too in [(False, False), (False, True), (True, True)]:
                needed = (True, positive_too, positive_too)
                for g, h in [gradients] if few else [gradients, (gradients[0], None), (None, gradients[1])]:
                    if sigma is None and h is not None:
                        continue
                    fused.backward(
                        g, h, query, positive, negatives, columns, operands, statistics, settings, target, needed
                    )
    print(f"{len(seen)} kernels compiled")


if __name__ == "__main__":
    main()
