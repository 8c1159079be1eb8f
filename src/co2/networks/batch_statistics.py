"""Batch statistics in groups: one device computes what several would, each with its own share of the batch.

MoCo must not let BatchNorm tell which key belongs to which query, so each query and its key are normalised with
different companions (He et al. 2020, section 3.3, "Shuffling BN"). With one group, shuffling the keys does nothing.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

SMALLEST_GROUP = 2  # one image alone has no variance between images


def group_batch_statistics(module: nn.Module, groups: int) -> None:
    """Make every BatchNorm inside `module` normalise a training batch as `groups` contiguous separate ones.

    Works in place, on any model: it exchanges the class of each BatchNorm (torch's or a subclass such as timm's
    BatchNormAct2d) for a subclass of it, and leaves parameters, buffers and the state dict's names as they are. The
    running statistics move once per batch, towards the mean over the groups. Evaluation mode is not affected.
    SyncBatchNorm is left alone: it exists to share statistics.
    """
    assert groups >= 1
    for layer in module.modules():
        if isinstance(layer, GroupedStatistics):
            layer.groups = groups
        elif isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm) and groups > 1:
            layer.__class__ = _mixed(GroupedStatistics, type(layer))
            assert isinstance(layer, GroupedStatistics)
            layer.groups, layer.rows_per_image = groups, 1


@contextmanager
def views_together(module: nn.Module, views: int) -> Iterator[None]:
    """Inside the block `views` consecutive rows of a batch show one image: no group begins in the middle of one."""
    layers = [layer for layer in module.modules() if isinstance(layer, GroupedStatistics)]
    for layer in layers:
        layer.rows_per_image = views
    try:
        yield
    finally:
        for layer in layers:
            layer.rows_per_image = 1


def synchronise_batch_statistics(module: nn.Module, gather: Callable[[Tensor], Tensor]) -> None:
    """Make every BatchNorm inside `module` normalise a training batch with the statistics of all processes.

    What `nn.SyncBatchNorm` does, but on every device and for every subclass of BatchNorm. In place, as
    `group_batch_statistics` is.

    Args:
        gather: takes a tensor [X] from each process and returns them all, [processes, X], with gradients.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SynchronisedStatistics):
            layer.__class__ = _mixed(SynchronisedStatistics, type(layer))
            assert isinstance(layer, SynchronisedStatistics)
            layer.gather = gather


def nearly_equal(count: int, parts: int) -> list[int]:
    """Where each of `parts` nearly equal parts of `count` things begins, larger parts first, and where the last ends.

    The parts of a part are the parts: cut into G, or into W and each of these into G / W, things come out the same.
    """
    size, larger = divmod(count, parts)
    return [part * size + min(part, larger) for part in range(parts + 1)]


def group_count(images: int, groups: int) -> int:
    """How many groups a batch of `images` falls into: `groups`, or fewer so that none is left with a single image."""
    return max(1, min(groups, images // SMALLEST_GROUP))


if TYPE_CHECKING:
    _Layer = _BatchNorm
else:
    _Layer = object


class GroupedStatistics(_Layer):
    """Mixed into a BatchNorm class by `group_batch_statistics`."""

    groups: int
    rows_per_image = 1

    def forward(self, input: Tensor) -> Tensor:
        images = len(input) // self.rows_per_image
        count = group_count(images, self.groups)
        if not self.training or count == 1:
            return super().forward(input)  # [N, C, ...]
        if takes_kernels(self, input):
            return _by_kernels(self, input, None, relu=False)
        if torch.compiler.is_compiling() and images % count == 0 and type(self) in _PLAIN_KINDS:
            return self._in_one_expression(input, count)
        bounds = nearly_equal(images, count)
        parts = input.split([(end - start) * self.rows_per_image for start, end in itertools.pairwise(bounds)])
        if self.momentum is None:  # a cumulative average: each group is a batch of its own
            return torch.cat([super(GroupedStatistics, self).forward(part) for part in parts])
        # Group i of g has momentum (m/g) / (1 - (g-i) m/g). The product of what the later groups leave of it
        # telescopes, so that running = (1 - m) * running + m * mean over groups, whatever g.
        momentum, share = self.momentum, self.momentum / count
        normalised = []
        try:
            for later_groups, part in zip(reversed(range(count)), parts, strict=True):
                self.momentum = share / (1 - later_groups * share)
                normalised.append(super().forward(part))
        finally:
            self.momentum = momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.sub_(count - 1)  # it was one batch
        return torch.cat(normalised)  # [N, C, ...]

    def _in_one_expression(self, input: Tensor, count: int) -> Tensor:
        """The same for equal groups, without parts: for compilers to fuse with what comes before and after."""
        exact = torch.promote_types(input.dtype, torch.float32)
        numbers = input.unflatten(0, (count, -1)).to(exact)  # [G, N / G, C, ...]
        other_dimensions = [1, *range(3, numbers.dim())]
        variance, mean = torch.var_mean(numbers, other_dimensions, correction=0, keepdim=True)  # [G, 1, C, ...]
        if self.track_running_stats and self.momentum is not None:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            number = numbers.numel() / mean.numel()
            unbiased = variance.detach().mean(0).flatten() * (number / (number - 1))  # [C]
            self.running_mean.lerp_(mean.detach().mean(0).flatten(), self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
            self.num_batches_tracked.add_(1)
        shape = [1] * 2 + [-1] + [1] * (numbers.dim() - 3)
        normalised = (numbers - mean) * (variance + self.eps).rsqrt()
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised.to(input.dtype).flatten(0, 1)  # [N, C, ...]


def normalise_add_relu(layer: nn.Module, input: Tensor, residual: Tensor | None = None) -> Tensor:
    """relu(layer(input) + residual) for a layer of batch statistics, in one operation where kernels can do it."""
    if takes_kernels(layer, input):
        return _by_kernels(layer, input, residual, relu=True)
    output: Tensor = layer(input)
    return F.relu(output if residual is None else output + residual, inplace=True)


def takes_kernels(layer: Any, input: Tensor) -> bool:
    """Whether the kernels of `co2.kernels.normalisation` can do what this layer does to a training batch."""
    return bool(
        layer.training
        and type(layer) in _PLAIN_KINDS
        and layer.track_running_stats
        and layer.momentum is not None
        and kernels_run_on(input)
    )


def kernels_run_on(tensor: Tensor) -> bool:
    """Whether Triton kernels can take the place of torch's operations on this tensor."""
    return (
        tensor.is_cuda
        and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()  # a compiler fuses in its own way
        and _triton_is_there()
    )


@lru_cache(maxsize=1)
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def _by_kernels(layer: Any, input: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    from co2.kernels.normalisation import Running, normalise_in_groups

    rows_per_image = getattr(layer, "rows_per_image", 1)
    return normalise_in_groups(
        input,
        layer.weight,
        layer.bias,
        groups=group_count(len(input) // rows_per_image, getattr(layer, "groups", 1)),
        rows_per_image=rows_per_image,
        epsilon=layer.eps,
        running=Running(layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum),
        residual=residual,
        relu=relu,
    )


class SynchronisedStatistics(_Layer):
    """Mixed into a BatchNorm class by `synchronise_batch_statistics`."""

    gather: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        channels = input.shape[1]
        numbers = input.to(torch.promote_types(input.dtype, torch.float32))  # [N, C, ...]
        other_dimensions = [0, *range(2, input.dim())]
        variance, mean = torch.var_mean(numbers, other_dimensions, correction=0)  # [C] each
        count = mean.new_tensor([numbers.numel() / channels])  # [1]
        everyone = self.gather(torch.cat([mean, variance, count]))  # [processes, 2C + 1]
        means, variances, counts = everyone.split([channels, channels, 1], dim=1)
        total = counts.sum()
        share = counts / total  # [processes, 1]
        mean = (share * means).sum(dim=0)  # [C]
        variance = (share * (variances + (means - mean).square())).sum(dim=0)  # [C]
        self._track(mean.detach(), (variance * total / (total - 1)).detach())
        scale = (variance + self.eps).rsqrt()  # [C]
        shape = [1, channels] + [1] * (input.dim() - 2)
        normalised = (numbers - mean.view(shape)) * scale.view(shape)  # [N, C, ...]
        with self._statistics_of_normalised(mean):  # the rest is the layer's own: weight, bias, timm's activation
            return super().forward(normalised.to(input.dtype))

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics as torch's BatchNorm does."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        step = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), step)
        self.running_var.lerp_(variance.to(self.running_var.dtype), step)

    @contextmanager
    def _statistics_of_normalised(self, like: Tensor) -> Iterator[None]:
        """Let the layer take its input for normalised already."""
        own = self.running_mean, self.running_var
        self.running_mean, self.running_var = torch.zeros_like(like), torch.full_like(like, 1 - self.eps)
        self.training = False
        try:
            yield
        finally:
            self.running_mean, self.running_var = own
            self.training = True


_mixed_kinds: dict[tuple[type, type], type] = {}


def _mixed(way: type, kind: type) -> type:
    """The subclass of a BatchNorm class that works in another way: always the same one for the same classes."""
    if (way, kind) not in _mixed_kinds:
        name = way.__name__.removesuffix("Statistics") + kind.__name__
        _mixed_kinds[way, kind] = type(name, (way, kind), {})
    return _mixed_kinds[way, kind]


# The kinds of layers that do nothing but normalise; a subclass from elsewhere may do more.
_PLAIN_KINDS = {
    kind
    for plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for kind in (plain, _mixed(GroupedStatistics, plain))
}
