"""The kernels of `fused_normalisation` against the same arithmetic in float64: in the interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

from co2.kernels.normalisation import Running, normalise_in_groups
from co2.networks import batch_statistics
from co2.networks.backbones import build_backbone
from co2.networks.batch_statistics import group_batch_statistics, nearly_equal, takes_kernels
from co2.networks.residual_blocks import FusedBottleneck, fuse_residual_blocks

EPSILON = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case:
    """Random inputs, what the kernels make of them, and what float64 does."""

    def __init__(
        self,
        shape: tuple[int, ...],
        groups: int,
        *,
        relu: bool = True,
        residual: bool = False,
        affine: bool = True,
        rows_per_image: int = 1,
        dtype: torch.dtype = torch.float32,
        offset: float = 3.0,
        device: str = DEVICE,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(shape) + groups)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device)

        channels = shape[1]
        x = (draw(*shape) * 2 + offset * draw(channels).view(-1, *[1] * (len(shape) - 2))).to(dtype)
        inputs = {"input": x}
        if affine:
            inputs |= {"weight": draw(channels), "bias": draw(channels)}
        if residual:
            inputs["residual"] = draw(*shape).to(dtype)
        self.upstream = draw(*shape).to(dtype)
        self.running = {"mean": draw(channels), "variance": draw(channels).abs()}

        self.found = self._by_kernels(inputs, groups, rows_per_image, relu)
        self.truth = self._in_float64(inputs, groups, rows_per_image, relu, torch.float64)
        self.torch = self._in_float64(inputs, groups, rows_per_image, relu, dtype)

    def _by_kernels(self, inputs: dict[str, Tensor], groups: int, rows_per_image: int, relu: bool) -> dict[str, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        batches = torch.zeros((), dtype=torch.int64, device=self.upstream.device)
        running = {name: value.clone() for name, value in self.running.items()}
        output = normalise_in_groups(
            leaves["input"],
            leaves.get("weight"),
            leaves.get("bias"),
            groups=groups,
            rows_per_image=rows_per_image,
            epsilon=EPSILON,
            running=Running(running["mean"], running["variance"], batches, 0.1),
            residual=leaves.get("residual"),
            relu=relu,
        )
        output.backward(self.upstream)
        assert batches == 1
        gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
        return {"output": output.detach()} | gradients | {f"running {name}": value for name, value in running.items()}

    def _in_float64(
        self, inputs: dict[str, Tensor], groups: int, rows_per_image: int, relu: bool, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = {
            name: value.to(exact if name in ("weight", "bias") else dtype).requires_grad_()
            for name, value in inputs.items()
        }
        images = len(inputs["input"]) // rows_per_image
        parts = leaves["input"].tensor_split([cut * rows_per_image for cut in nearly_equal(images, groups)[1:-1]])
        output = torch.cat(
            [F.batch_norm(p, None, None, leaves.get("weight"), leaves.get("bias"), True, 0.1, EPSILON) for p in parts]
        )
        if "residual" in leaves:
            output = output + leaves["residual"]
        if relu:
            output = output.relu()
        output.backward(self.upstream.to(dtype))
        flat = [part.detach().double().transpose(0, 1).flatten(1) for part in parts]  # [C, rows of the group] each
        means, variances = (torch.stack([f.mean(1) for f in flat]), torch.stack([f.var(1) for f in flat]))
        return (
            {"output": output.detach()}
            | {f"d{name}": leaf.grad for name, leaf in leaves.items()}
            | {
                "running mean": 0.9 * self.running["mean"].double() + 0.1 * means.mean(0),
                "running variance": 0.9 * self.running["variance"].double() + 0.1 * variances.mean(0),
            }
        )

    def check(self, tolerance: float) -> None:
        """Each result no further from the truth than torch's own in the same precision, but for a tolerance."""
        assert self.found.keys() == self.truth.keys()
        for name, truth in self.truth.items():
            error, torchs = (distance(one[name], truth) for one in (self.found, self.torch))
            # Where sums cancel, what is left of them is rounding, torch's as much as ours.
            assert error <= 1.2 * torchs + tolerance, f"{name}: {error} from the truth, torch {torchs}"


def distance(one: Tensor, other: Tensor) -> float:
    return float(
        (one.detach().double() - other.detach().double()).norm() / other.detach().double().norm().clamp(min=1e-6)
    )


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((8, 5, 3, 3), 4), ((10, 70, 4, 2), 4), ((7, 16, 9, 9), 2), ((12, 8), 3), ((6, 3, 4, 2, 2), 1)],
)
def test_equals_float64(shape: tuple[int, ...], groups: int, residual: bool, relu: bool) -> None:
    Case(shape, groups, relu=relu, residual=residual).check(2e-6)


@pytest.mark.parametrize("affine", [False, True])
def test_with_and_without_weight_and_bias(affine: bool) -> None:
    Case((8, 6, 3, 3), 2, affine=affine).check(2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [False, True])
def test_half_precision_is_as_good_as_torchs(dtype: torch.dtype, residual: bool) -> None:
    # Where torch rounds before it adds and the kernels do not, an element may fall on the other side of zero.
    Case((8, 24, 4, 4), 4, residual=residual, dtype=dtype).check(2e-3)


def test_many_stretches_of_rows() -> None:
    Case((8, 3, 12, 12), 2, residual=True).check(2e-6)  # 576 rows in a group: more than one program adds them up


def test_a_large_mean_costs_no_digits() -> None:
    case = Case((8, 4, 5, 5), 2, relu=False, offset=3000.0)
    assert distance(case.found["running variance"], case.truth["running variance"]) < 1e-5


def test_views_of_an_image_stay_in_one_group() -> None:
    Case((10, 4, 3, 3), 2, rows_per_image=2).check(2e-6)  # 5 images: 3 in the first group, 6 rows


def test_the_same_inputs_give_the_same_bits() -> None:
    first, second = (Case((8, 20, 6, 6), 4, residual=True).found for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name])


def test_no_gradient_where_none_is_wanted() -> None:
    with torch.no_grad():
        output = normalise_in_groups(torch.randn(4, 3, 2, 2, device=DEVICE), None, None, groups=2)
    assert not output.requires_grad


@contextmanager
def kernels_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Layers use the kernels on the CPU too, in the interpreter; the list fills with those that did."""
    taken: list[Any] = []

    def take(layer: nn.Module, input: Tensor) -> bool:
        plain = type(layer) in batch_statistics._PLAIN_KINDS and layer.training
        if plain:
            taken.append(layer)
        return plain

    with monkeypatch.context() as patch:
        patch.setattr(batch_statistics, "takes_kernels", take)
        yield taken


def bottlenecks() -> nn.Module:
    shortcut = nn.Sequential(nn.Conv2d(3, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16))
    return nn.Sequential(Bottleneck(3, 4, stride=2, downsample=shortcut), Bottleneck(16, 4))


def narrow() -> nn.Module:
    return build_backbone("co2/resnet10-narrow", "small-stride-2", 16)


@pytest.mark.parametrize(("build", "layers"), [(narrow, 12), (bottlenecks, 7)])
def test_a_network_of_fused_blocks_equals_the_plain_one(
    build: Callable[[], nn.Module], layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain, fused, exact = (build() for _ in range(3))
    for network in (plain, fused, exact):
        network.load_state_dict(plain.state_dict())
        group_batch_statistics(network, 2)
    fuse_residual_blocks(fused)
    assert list(fused.state_dict()) == list(plain.state_dict())
    batch = torch.randn(16, 3, 16, 16)

    def everything(network: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        output = network(batch)
        output.square().sum().backward()
        gradients = {f"gradient of {name}": parameter.grad for name, parameter in network.named_parameters()}
        return {"output": output} | gradients | dict(network.named_buffers())

    truth, torchs = everything(exact.double(), batch.double()), everything(plain, batch)
    with kernels_taken(monkeypatch) as taken:
        found = everything(fused, batch)

    assert len(taken) == layers
    for what in truth:  # a deep network magnifies rounding, torch's as much as ours
        assert distance(found[what], truth[what]) <= 5 * distance(torchs[what], truth[what]) + 1e-5, what


def test_fused_blocks_compute_the_same_without_kernels() -> None:
    torch.manual_seed(0)
    plain, fused = (build_backbone("torchvision/resnet50", "small", 16) for _ in range(2))
    fused.load_state_dict(plain.state_dict())
    fuse_residual_blocks(fused)
    assert isinstance(fused.layer1[0], FusedBottleneck)
    batch = torch.randn(16, 3, 16, 16)
    assert torch.equal(fused(batch), plain(batch))
    assert torch.equal(fused.eval()(batch), plain.eval()(batch))


def test_kernels_are_for_training_batches_on_a_gpu() -> None:
    layer = nn.BatchNorm2d(3)
    assert not takes_kernels(layer, torch.zeros(2, 3, 4, 4))


@pytest.mark.parametrize("equal", [True, False])
def test_compilers_are_given_the_same_arithmetic(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.BatchNorm2d(3).double() for _ in range(2)]
    for layer in layers:
        group_batch_statistics(layer, 2)
    batch = torch.randn(6 if equal else 5, 3, 4, 4, dtype=torch.float64)
    truth = layers[0](batch)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = layers[1](batch)
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(layers[1].buffers(), layers[0].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


COMPILE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from compile_kernels import TYPES, Compiled
from co2.kernels import normalisation, pooling
TYPES[torch.uint8] = "*u8"
for module in (normalisation, pooling):
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        setattr(module, name, Compiled(getattr(module, name), 90))
for dtype in (torch.float32, torch.bfloat16):
    for residual, relu, affine in [(True, True, True), (False, True, True), (False, False, False)]:
        x = torch.zeros(8, 64, 16, 16, dtype=dtype, requires_grad=True)
        weight = torch.zeros(64, requires_grad=True) if affine else None
        running = normalisation.Running(torch.zeros(64), torch.zeros(64), torch.zeros((), dtype=torch.int64), 0.1)
        y = normalisation.normalise_in_groups(
            x, weight, weight, groups=4, running=running, residual=x if residual else None, relu=relu
        )
        y.backward(torch.zeros_like(y))
    y = pooling.max_pool(x)
    y.backward(torch.zeros_like(y))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
def test_every_kernel_compiles_for_a_gpu() -> None:
    """The interpreter has no types and accepts kernels that the compiler does not."""
    script = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    run = subprocess.run([sys.executable, "-c", COMPILE, str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    for kernel in ("_statistics", "_apply", "_sums", "_merge_sums", "_input_gradient", "_forward", "_backward"):
        assert f"{kernel}_kernel" in run.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(512, 64, 32, 32), (509, 128, 16, 16), (256, 2048, 7, 7), (250, 64, 56, 56)])
def test_real_sizes_on_a_gpu(shape: tuple[int, ...], residual: bool, dtype: torch.dtype) -> None:
    Case(shape, 4, residual=residual, dtype=dtype, device="cuda").check(1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.gpu
def test_a_network_on_a_gpu_under_autocast_takes_the_kernels() -> None:
    torch.manual_seed(0)
    network = build_backbone("torchvision/resnet18", "small", 32).cuda().to(memory_format=torch.channels_last)
    group_batch_statistics(network, 4)
    assert takes_kernels(network.bn1, torch.zeros(8, 64, 4, 4, device="cuda"))
    fused = build_backbone("torchvision/resnet18", "small", 32).cuda().to(memory_format=torch.channels_last)
    fused.load_state_dict(network.state_dict())
    group_batch_statistics(fused, 4)
    fuse_residual_blocks(fused)
    exact = build_backbone("torchvision/resnet18", "small", 32).cuda().double()
    exact.load_state_dict(network.state_dict())
    group_batch_statistics(exact, 4)
    batch = torch.randn(64, 3, 32, 32, device="cuda")
    truth = exact(batch.double())
    with torch.autocast("cuda", torch.bfloat16):
        found = fused(batch.contiguous(memory_format=torch.channels_last))
    assert distance(found, truth) < 0.03
