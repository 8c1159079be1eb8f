"""The kernels against torchvision, one picture at a time: in Triton's interpreter on the CPU, and for real on a GPU.

Levels are whole numbers, so most pixels are equal. The tolerances are those that the module states.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported and when kernels are defined
import triton
from presets import moco_v1_views, moco_v2_views, simclr_views, small_views

from co2.views import on_gpu
from co2.views.on_gpu import Pictures, make_views
from co2.views.parameters import ViewParameters, ViewRow, draw
from co2.views.transform import make_view, normalise, normalise_for_gpu
from co2.views.view import View, made_together

INTERPRETED = not isinstance(on_gpu._crop_kernel, triton.runtime.JITFunction)
DEVICE = "cpu" if INTERPRETED else "cuda"
gpu = pytest.mark.gpu

# Other CPUs resize in float32, where 1 level of difference is common.
ROUNDS_BETWEEN_PASSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
FEW = 0.001 if ROUNDS_BETWEEN_PASSES else 1.0

if INTERPRETED:
    import triton.runtime.interpreter as interpreter

    # The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer takes for loop bounds.
    _patch = interpreter._patch_lang_tensor

    def _patch_with_scalars(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_with_scalars

    def _fused_multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
        """Rounded once, as on a GPU and in torch; the interpreter rounds twice."""
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = _fused_multiply_add

NOTHING = ViewRow(
    crop=(2, 3, 22, 19),
    flip=False,
    jitter=False,
    jitter_order=(0, 1, 2, 3),
    jitter_factors=(1.3, 0.7, 1.6, 0.08),
    grey=False,
    blur=False,
    blur_sigma=1.1,
    solarise=False,
)
PRESETS = [moco_v1_views, moco_v2_views, simclr_views, small_views]


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth parts, edges, noise, and black, white and clear colours: uint8 [3, H, W]."""
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.rand(3, 5, 6, generator=generator)
    pixels = F.interpolate(smooth[None], (height, width), mode="bicubic")[0]
    pixels[:, height // 4 : height // 2, width // 4 : width // 2] = smooth[:, :1, :1]
    pixels += 0.1 * torch.randn(3, height, width, generator=generator)
    pixels[:, :, -width // 5 :] = (pixels[:, :, -width // 5 :] > 0.5).float()
    return (pixels.clamp(0, 1) * 255).to(torch.uint8)


def in_one_buffer(images: Sequence[Tensor], which: Sequence[int], device: str = DEVICE) -> Pictures:
    """The pictures behind one another, with some bytes before each that belong to none; row r shows which[r]."""
    buffer, begins = torch.full((5,), 77, dtype=torch.uint8), []
    for image in images:
        begins.append(len(buffer))
        buffer = torch.cat((buffer, image.flatten(), torch.full((5,), 77, dtype=torch.uint8)))
    offsets = torch.tensor([begins[i] for i in which])
    heights, widths = torch.tensor([images[i].shape[-2:] for i in which]).unbind(1)
    return Pictures(buffer.to(device), offsets.to(device), heights.to(device), widths.to(device))


def parameters_of(rows: Sequence[ViewRow], device: str = DEVICE) -> ViewParameters:
    return ViewParameters(*(torch.tensor(column, device=device) for column in zip(*rows, strict=True)))


def both(
    images: Sequence[Tensor], which: Sequence[int], rows: Sequence[ViewRow], augmentation: View
) -> tuple[Tensor, Tensor]:
    """The views by the kernels, and those by torchvision: uint8 [R, 3, S, S] each, on the CPU."""
    parameters = parameters_of(rows)
    found = make_views(in_one_buffer(images, which), parameters, augmentation)
    assert found.dtype == torch.uint8
    assert found.is_contiguous()
    return found.cpu(), by_torchvision(images, which, parameters, augmentation)


def by_torchvision(
    images: Sequence[Tensor], which: Sequence[int], parameters: ViewParameters, augmentation: View
) -> Tensor:
    # The rows of tensors, because their numbers are rounded to float32.
    rows = zip(which, parameters.rows(), strict=True)
    return torch.stack([make_view(images[i], row, augmentation) for i, row in rows])


def assert_equal_but_for_few(found: Tensor, expected: Tensor, few: float = FEW) -> None:
    difference = (found.int() - expected.int()).abs()
    assert found.shape == expected.shape
    assert difference.max() <= 1
    assert (difference > 0).double().mean() <= few


def assert_close_end_to_end(found: Tensor, expected: Tensor) -> None:
    difference = (found.int() - expected.int()).abs().double()
    assert found.shape == expected.shape
    assert difference.mean() <= (0.01 if ROUNDS_BETWEEN_PASSES else 1.0)
    assert (difference > 2).double().mean() <= (0.001 if ROUNDS_BETWEEN_PASSES else 0.01)


def only(**changes: Any) -> View:
    """All probabilities 0, but for what is asked for. (The parameters say what is done; 0 blur launches no blur.)"""
    nothing = {"jitter_probability": 0.0, "grey_probability": 0.0, "blur_probability": 0.0, "flip_probability": 0.0}
    return View(**{"size": 16, **nothing, **changes})


@pytest.mark.parametrize("size", [16, 21])
def test_crop_and_resize(size: int) -> None:
    images = [picture(40, 50), picture(1, 1, 1), picture(16, 16, 2), picture(3, 90, 3), picture(70, 64, 4)]
    crops = [
        (0, (0, 0, 40, 50)),  # smaller, by another factor in each direction
        (4, (6, 0, 64, 64)),  # four times smaller when the size is 16: weights that are powers of two
        (0, (35, 44, 5, 6)),  # larger, in the last corner
        (1, (0, 0, 1, 1)),
        (2, (0, 0, 16, 16)),  # the picture itself when the size is 16
        (3, (0, 10, 3, 80)),  # taller and narrower
        (4, (3, 63, 60, 1)),  # a single column
        (0, (7, 5, 17, 33)),  # a picture that came before
    ]
    rows = [NOTHING._replace(crop=crop) for _, crop in crops]
    found, expected = both(images, [which for which, _ in crops], rows, only(size=size))
    assert_equal_but_for_few(found, expected)
    if ROUNDS_BETWEEN_PASSES:
        assert torch.equal(found[2:5], expected[2:5])  # weights that no rounding can move


def test_nothing_outside_the_crop_is_seen() -> None:
    image = torch.zeros(3, 40, 40, dtype=torch.uint8)
    image[:, 10:30, 12:28] = 200
    rows = [NOTHING._replace(crop=(10, 12, 20, 16)), NOTHING._replace(crop=(11, 13, 3, 4))]
    found = make_views(in_one_buffer([image], [0, 0]), parameters_of(rows), only(size=8))
    assert (found == 200).all()


@pytest.mark.parametrize("change", range(4), ids=["brightness", "contrast", "saturation", "hue"])
def test_one_change_of_colour(change: int) -> None:
    factors = [-0.5, -0.13, 0.0, 0.02, 0.5] if change == 3 else [0.0, 0.3, 1.0, 1.4, 1.8]
    strengths = tuple(0.5 * (other == change) for other in range(4))
    rows = [NOTHING._replace(jitter=True, jitter_factors=(factor,) * 4) for factor in factors]
    found, expected = both([picture(24, 23)], [0] * 5, rows, only(size=18, jitter=strengths))
    assert_equal_but_for_few(found, expected)
    for i in (0, 1, 4):  # and the factor does something
        assert not torch.equal(found[i], found[2])


@pytest.mark.parametrize("tiled", [False, True])
def test_each_row_in_its_own_order(tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tiled:
        monkeypatch.setattr(on_gpu, "LARGEST_WHOLE", 0)
    orders = [(0, 1, 2, 3), (1, 0, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (0, 3, 1, 2)]
    rows = [NOTHING._replace(jitter=True, jitter_order=order) for order in orders]
    found, expected = both([picture(24, 23)], [0] * 5, rows, only(size=18))
    assert_close_end_to_end(found, expected)
    assert_equal_but_for_few(found, expected, 0.01)
    assert len({view.numpy().tobytes() for view in found}) == 5


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_grey_before_and_after_the_jitter(first: bool, tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tiled:
        monkeypatch.setattr(on_gpu, "LARGEST_WHOLE", 0)
    rows = [NOTHING._replace(jitter=jitter, grey=grey) for jitter in (False, True) for grey in (False, True)]
    found, expected = both([picture(24, 23)], [0] * 4, rows, only(size=16, grey_first=first))
    assert_equal_but_for_few(found, expected, 0.005)
    assert torch.equal(found[1, 0], found[1, 2])


def test_a_strength_of_0_switches_a_change_off_for_all() -> None:
    rows = [NOTHING._replace(jitter=True, jitter_factors=(0.5, 0.5, 0.5, 0.3)), NOTHING]
    off = only(size=16, jitter=(0.0, 0.0, 0.0, 0.0))
    found, expected = both([picture(24, 23)], [0, 0], rows, off)
    assert torch.equal(found[0], found[1])
    assert_equal_but_for_few(found, expected)
    found, expected = both([picture(24, 23)], [0, 0], rows, only(size=16, jitter=(0.0, 0.0, 0.4, 0.0)))
    assert not torch.equal(found[0], found[1])
    assert_equal_but_for_few(found, expected)


def test_flip() -> None:
    found, expected = both([picture(24, 23)], [0, 0], [NOTHING, NOTHING._replace(flip=True)], only(size=21))
    assert torch.equal(found[1], found[0].flip(-1))
    assert_equal_but_for_few(found, expected)


@pytest.mark.parametrize(
    ("size", "sigma"), [(4, 2.0), (20, 2.0), (50, 1.0), (60, 12.0)], ids=["small", "usual", "tiles", "windows"]
)
def test_blur(size: int, sigma: float) -> None:
    """From a radius as long as a view of 4 allows to one of 48, which needs several windows."""
    sigmas = [(0.1, False), (0.37 * sigma, True), (sigma, True), (0.0, False)]
    rows = [NOTHING._replace(blur=True, blur_sigma=value, flip=flip) for value, flip in sigmas]
    augmentation = only(size=size, blur_probability=0.5, blur_sigma=(0.1, sigma))
    found, expected = both([picture(24, 23)], [0] * 4, rows, augmentation)
    assert_equal_but_for_few(found, expected, 0.01 if ROUNDS_BETWEEN_PASSES else 1.0)
    assert found[2].double().var() < found[3].double().var()


@pytest.mark.parametrize("blur", [False, True])
@pytest.mark.parametrize("size", [16, 37])
def test_solarisation(size: int, blur: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels invert exactly what they make without it, blurred rows and others, in tiles and whole."""
    rows = [NOTHING._replace(blur=blur and row % 2 == 0, flip=row > 1) for row in range(4)]
    solarised = [row._replace(solarise=place != 1) for place, row in enumerate(rows)]
    pictures = in_one_buffer([picture(26, 24)], [0] * 4)
    view = only(size=size, blur_probability=0.5 * blur)
    for whole in (64, 0):
        monkeypatch.setattr(on_gpu, "LARGEST_WHOLE", whole)
        plain = make_views(pictures, parameters_of(rows), view)
        found = make_views(pictures, parameters_of(solarised), dataclasses.replace(view, solarise_probability=0.5))
        expected = torch.where(plain >= 128, 255 - plain, plain)
        expected[1] = plain[1]
        assert torch.equal(found, expected)
        assert not torch.equal(found, plain)


def test_solarisation_of_every_level() -> None:
    levels = torch.arange(256).to(torch.uint8).view(1, 16, 16).expand(3, 16, 16)
    row = NOTHING._replace(crop=(0, 0, 16, 16), solarise=True)
    found, expected = both([levels], [0], [row], only(solarise_probability=1.0))
    assert torch.equal(found, expected)
    assert found[0, 0].flatten().tolist() == [*range(128), *range(127, -1, -1)]


@pytest.mark.parametrize("place", range(3))
def test_end_to_end_of_a_view_that_is_made_together_with_others(place: int) -> None:
    """As BYOL's are: the kernels are told what may happen to any row, and the rows what happens to them."""
    first = View(size=16, jitter=(0.4, 0.4, 0.2, 0.1), blur_probability=1.0)
    second = dataclasses.replace(first, blur_probability=0.0, solarise_probability=0.5)
    third = dataclasses.replace(first, jitter_probability=0.0, blur_probability=0.0, grey_probability=0.0)
    ((_, how),) = made_together([first, second, third])
    view = (first, second, third)[place]
    images, which = [picture(40, 50), picture(26, 24, 2)], [1, 0, 1, 0]
    pictures = in_one_buffer(images, which)
    sizes = pictures.heights.cpu(), pictures.widths.cpu()
    drawn = draw(view, 5, 3, torch.tensor(which), torch.arange(4), *sizes)
    found = make_views(pictures, parameters_of(drawn.rows()), how).cpu()
    assert_close_end_to_end(found, by_torchvision(images, which, parameters_of(drawn.rows()), view))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
def test_end_to_end(preset: Any) -> None:
    images = [picture(40, 50), picture(1, 1, 1), picture(26, 24, 2)]
    which = [2, 0, 2, 1, 0, 2]
    augmentation = preset(24)
    pictures = in_one_buffer(images, which)
    drawn = draw(
        augmentation, 5, 3, torch.tensor(which), torch.arange(6), *(pictures.heights.cpu(), pictures.widths.cpu())
    )
    found, expected = both(images, which, drawn.rows(), augmentation)
    assert_close_end_to_end(found, expected)


@pytest.mark.parametrize("preset", [moco_v1_views, moco_v2_views])
def test_a_view_made_in_tiles_is_the_same(preset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    augmentation = preset(37)
    pictures = in_one_buffer([picture(40, 50), picture(30, 29, 1)], [1, 0, 1])
    sizes = pictures.heights, pictures.widths
    drawn = draw(augmentation, 1, 0, torch.arange(3, device=DEVICE), 0, *sizes)
    drawn = dataclasses.replace(drawn, flip=torch.tensor([True, False, True], device=DEVICE))
    whole = make_views(pictures, drawn, augmentation)
    monkeypatch.setattr(on_gpu, "LARGEST_WHOLE", 0)
    monkeypatch.setattr(on_gpu, "COLOUR_BLOCK", 512)
    assert torch.equal(make_views(pictures, drawn, augmentation), whole)


def test_rows_with_gaps_between_them() -> None:
    """Parameters of several batches in one tensor: a batch may be a slice of it in any direction."""
    augmentation = moco_v2_views(16)
    image = picture(26, 24)
    pictures = in_one_buffer([image], [0] * 4)
    drawn = draw(augmentation, 1, 0, torch.arange(4, device=DEVICE), 0, pictures.heights, pictures.widths)
    every_second = ViewParameters(**{name: value[::2] for name, value in vars(drawn).items()})
    some = Pictures(pictures.pixels, pictures.offsets[::2], pictures.heights[::2], pictures.widths[::2])
    assert torch.equal(make_views(some, every_second, augmentation), make_views(pictures, drawn, augmentation)[::2])
    none = ViewParameters(**{name: value[:0] for name, value in vars(drawn).items()})
    empty = Pictures(pictures.pixels, pictures.offsets[:0], pictures.heights[:0], pictures.widths[:0])
    assert make_views(empty, none, augmentation).shape == (0, 3, 16, 16)


COMPILE = """
import dataclasses, sys
import torch
sys.path.insert(0, sys.argv[1])
import compile_kernels
from co2.methods import moco
from co2.views import on_gpu, parameters, view
compile_kernels.TYPES.update({torch.uint8: "*u8", torch.int32: "*i32"})
for name in [name for name in vars(on_gpu) if name.endswith("_kernel")]:
    setattr(on_gpu, name, compile_kernels.Compiled(getattr(on_gpu, name), 90))
sizes, begins = torch.full((2,), 40), torch.zeros(2, dtype=torch.int64)
views = [view.View(size=32), moco.V1, view.View(size=224)]
views += [dataclasses.replace(one, solarise_probability=0.2) for one in views]
for augmentation in views:
    drawn = parameters.draw(augmentation, 0, 0, begins, 0, sizes, sizes)
    on_gpu.make_views(on_gpu.Pictures(torch.empty(4800, dtype=torch.uint8), begins, sizes, sizes), drawn, augmentation)
on_gpu.normalise_views(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
"""


@pytest.mark.parametrize("shape", [(3, 3, 8, 8), (2, 3, 31, 29), (1, 3, 1, 1)])
def test_normalised_views_are_those_of_the_cpu(shape: tuple[int, ...]) -> None:
    views = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = normalise_for_gpu(views, moco_v2_views())
    expected = normalise(views, moco_v2_views(), torch.bfloat16)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)  # a neighbour among bfloat16 numbers at most
    if not INTERPRETED:  # which rounds to bfloat16 downwards
        assert (found == expected).float().mean() > 0.99


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
def test_every_kernel_compiles_for_a_gpu() -> None:
    """The interpreter has no types and accepts kernels that the compiler does not."""
    script = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", COMPILE, str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    for kernel in ("_whole_kernel", "_crop_kernel", "_colour_kernel", "_blur_kernel", "_normalise_kernel"):
        assert kernel in run.stdout


def batch_of(
    augmentation: View, shapes: Sequence[tuple[int, int]], rows: int, seed: int = 0
) -> tuple[list[Tensor], list[int], Pictures, ViewParameters]:
    """Pictures of these shapes in turn, with parameters drawn on the GPU: images, which, pictures, parameters."""
    images = [picture(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    which = [row % len(images) for row in range(rows)]
    pictures = in_one_buffer(images, which, "cuda")
    index = torch.arange(rows, device="cuda")
    drawn = draw(augmentation, seed, 1, index, index % 2, pictures.heights, pictures.widths)
    return images, which, pictures, drawn


@gpu
@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
@pytest.mark.parametrize(
    ("size", "shapes"),
    [
        (224, [(480, 384), (375, 500), (1, 1), (1500, 2000)]),
        (32, [(32, 32)]),
        (64, [(64, 64), (70, 99)]),
        (96, [(96, 96)]),
    ],
    ids=["224", "32", "64", "96"],
)
def test_end_to_end_at_real_sizes(preset: Any, size: int, shapes: list[tuple[int, int]]) -> None:
    augmentation = dataclasses.replace(preset(size), solarise_probability=0.3)
    images, which, pictures, drawn = batch_of(augmentation, shapes, 24 if size == 224 else 128)
    found = make_views(pictures, drawn, augmentation)
    expected = by_torchvision(images, which, drawn, augmentation)
    assert_close_end_to_end(found.cpu(), expected)


@gpu
@pytest.mark.parametrize("size", [32, 50, 224])
def test_crop_and_resize_at_real_sizes(size: int) -> None:
    augmentation = only(size=size)
    images, which, pictures, drawn = batch_of(augmentation, [(480, 384), (375, 500), (32, 32)], 48)
    found = make_views(pictures, drawn, augmentation)
    assert_equal_but_for_few(found.cpu(), by_torchvision(images, which, drawn, augmentation))


@gpu
@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.3, 2.0, 9.0, 60.0])
def test_blur_at_real_sizes(sigma: float) -> None:
    augmentation = only(size=224, blur_probability=1.0, blur_sigma=(sigma, sigma))
    images, which, pictures, drawn = batch_of(augmentation, [(224, 224)], 4)
    found = make_views(pictures, drawn, augmentation)
    expected = by_torchvision(images, which, drawn, augmentation)
    assert_equal_but_for_few(found.cpu(), expected, 0.01 if ROUNDS_BETWEEN_PASSES else 1.0)


@gpu
@pytest.mark.parametrize("size", [32, 224])
def test_the_same_inputs_give_the_same_bits(size: int) -> None:
    augmentation = moco_v2_views(size)
    _, _, pictures, drawn = batch_of(augmentation, [(480, 384), (375, 500)], 512)
    first = make_views(pictures, drawn, augmentation)
    for _ in range(5):
        assert torch.equal(make_views(pictures, drawn, augmentation), first)


@gpu
@pytest.mark.parametrize("size", [32, 224])
def test_a_captured_graph_makes_new_views_of_new_inputs(size: int) -> None:
    augmentation = moco_v2_views(size)
    shapes = [[(100, 120), (90, 80)], [(90, 80), (64, 64)], [(1, 1), (100, 130)]]
    batches = [batch_of(augmentation, pair, 32, seed)[2:] for seed, pair in enumerate(shapes)]
    longest = max(len(pictures.pixels) for pictures, _ in batches)
    pictures, drawn = batches[0]
    pictures = dataclasses.replace(pictures, pixels=F.pad(pictures.pixels, (0, longest - len(pictures.pixels))))
    drawn = dataclasses.replace(drawn, **{name: value.clone() for name, value in vars(drawn).items()})
    pictures = dataclasses.replace(
        pictures, **{name: getattr(pictures, name).clone() for name in ("offsets", "heights", "widths")}
    )
    expected = [make_views(*batch, augmentation) for batch in batches]  # compiles the kernels

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = make_views(pictures, drawn, augmentation)
    for (new_pictures, new_drawn), wanted in zip(batches[1:] + batches[:1], expected[1:] + expected[:1], strict=True):
        pictures.pixels[: len(new_pictures.pixels)] = new_pictures.pixels
        for old, new in [(pictures, new_pictures), (drawn, new_drawn)]:
            for name, value in vars(old).items():
                if name != "pixels":
                    value.copy_(getattr(new, name))
        graph.replay()
        assert torch.equal(views, wanted)


@gpu
@pytest.mark.parametrize("size", [32, 224])
def test_nothing_waits_for_the_gpu(size: int) -> None:
    augmentation = moco_v2_views(size)
    _, _, pictures, drawn = batch_of(augmentation, [(100, 120)], 8)
    expected = make_views(pictures, drawn, augmentation)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = make_views(pictures, drawn, augmentation)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@gpu
def test_a_batch_that_begins_anywhere_is_not_compiled_for_anew() -> None:
    augmentation = moco_v2_views(32)
    _, _, pictures, drawn = batch_of(augmentation, [(100, 120), (90, 80)], 40)
    expected = make_views(pictures, drawn, augmentation)
    kernels = on_gpu._whole_kernel, on_gpu._blur_kernel
    device = torch.cuda.current_device()
    before = [len(kernel.device_caches[device][0]) for kernel in kernels]
    for begin in (1, 3, 8):
        some = Pictures(pictures.pixels, *(x[begin:] for name, x in vars(pictures).items() if name != "pixels"))
        rest = ViewParameters(**{name: value[begin:] for name, value in vars(drawn).items()})
        assert torch.equal(make_views(some, rest, augmentation), expected[begin:])
    assert [len(kernel.device_caches[device][0]) for kernel in kernels] == before


@gpu
@pytest.mark.parametrize("size", [32, 224])
def test_pictures_beyond_two_to_the_31(size: int) -> None:
    augmentation = moco_v2_views(size)
    _, _, pictures, drawn = batch_of(augmentation, [(480, 384), (375, 500)], 16)
    expected = make_views(pictures, drawn, augmentation)
    pixels = torch.zeros(3 * 2**30, dtype=torch.uint8, device="cuda")
    begin = 2**31 - 480 * 384  # the first picture lies across the limit, the second beyond it
    pixels[begin : begin + len(pictures.pixels)] = pictures.pixels
    far = dataclasses.replace(pictures, pixels=pixels, offsets=pictures.offsets + begin)
    assert torch.equal(make_views(far, drawn, augmentation), expected)


@gpu
@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
def test_parameters_are_the_same_on_both_devices(preset: Any) -> None:
    images = torch.arange(20_000)
    heights, widths = 32 + images % 500, 32 + images * 7 % 600
    there = draw(preset(), 3, 2, images.cuda(), 1, heights.cuda(), widths.cuda())
    here = draw(preset(), 3, 2, images, 1, heights, widths)
    for name, value in vars(here).items():
        assert torch.equal(getattr(there, name).cpu(), value), name
