"""Random numbers that are a pure function of what they are for: Philox4x32-10 (Salmon et al., SC 2011).

A counter-based generator has no state. Ask for the same numbers twice, on another machine, in another process, on a
GPU or after a resumed run, and they are the same. All arithmetic is on 32-bit words held in int64 tensors, so that it
is exact on every device and can be captured in a CUDA graph.

How a counter and a key are made, here and nowhere else:

    key      seed, low word       seed, high word
    counter  view·2¹⁶ + block     item                 time               stream

`stream` says what the numbers are for (see `Stream`), `time` is an epoch or a step, `item` an image or a place in a
list, and `block` counts groups of four words where one item needs more than four.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from co2.lazily import torch

if TYPE_CHECKING:
    from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, and sqrt(3) - 1
_ROUNDS = 10


class Stream(IntEnum):
    """What random numbers are for. Two purposes never share a stream; a number, once given, is never given again."""

    VIEW = 1
    """Augmentation of one view of an image. Time: epoch. Item: image."""
    EPOCH_ORDER = 2
    """In which order an epoch visits the images. Time: epoch."""
    KEY_SHUFFLE = 3
    """How keys are shuffled between the groups of batch statistics. Time: step."""
    BANK_SAMPLE = 4
    """Which rows of a memory bank serve as negatives. Time: step."""
    LAYERS = 5
    """What seeds the generators from which layers such as dropout draw. Time: step."""


def philox(counter: Tensor, key: tuple[int | Tensor, int | Tensor]) -> Tensor:
    """Four random 32-bit words for each counter: Philox4x32 with ten rounds. Both in and out: int64 [..., 4]."""
    c0, c1, c2, c3 = counter.unbind(-1)  # each [...]
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product needs all 64 bits and may wrap around into the sign: no bit is lost, and the masks drop the sign.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), -1)


def _words(seed: int, stream: int, time: int | Tensor, item: Tensor, view: int | Tensor = 0, blocks: int = 1) -> Tensor:
    """Random words for each item: int64 [N, 4 * blocks], on the device of `item` [N]."""
    assert blocks <= 1 << 16, "a counter has 16 bits for the block"
    block = torch.arange(blocks, device=item.device)  # [blocks]
    first = (_column(view, item) << 16) + block  # [N, blocks]
    words = (first, item[:, None].expand_as(first), _column(time, item).expand_as(first))
    counter = torch.stack((*words, torch.full_like(first, int(stream))), -1)  # [N, blocks, 4]
    return philox(counter, (seed & _WORD, (seed >> 32) & _WORD)).flatten(1)


def _column(value: int | Tensor, like: Tensor) -> Tensor:
    """A number, or one number for each item, as an int64 column [N, 1]. A tensor stays on its device."""
    if isinstance(value, torch.Tensor):
        return value.expand_as(like)[:, None]
    return torch.full_like(like, value)[:, None]


def uniforms(seed: int, epoch: int | Tensor, image: Tensor, view: int | Tensor, count: int) -> Tensor:
    """`count` uniform numbers in [0, 1) for one view of each image: float64 [B, count], on the device of `image` [B].

    The n-th number of a view does not depend on `count`. `epoch` and `view` may be tensors (one number, or one for
    each image), so that a captured graph can advance them.
    """
    words = _words(seed, Stream.VIEW, epoch, image, view, blocks=-(-count // 4))[:, :count]
    return words.to(torch.float64) * 2.0**-32  # exact: 32 bits fit into the 53 of a float64


def _long_words(seed: int, stream: int, times: Tensor, count: int) -> Tensor:
    """For each time `count` random whole numbers in 0 .. 2⁶³ - 1: int64 [T, count], on the device of `times` [T]."""
    pairs = -(-count // 2)  # each block of four words gives two numbers
    item = torch.arange(pairs, device=times.device).repeat(len(times))  # [T * pairs]
    words = _words(seed, stream, times.repeat_interleave(pairs), item).view(len(times), 2 * pairs, 2)[:, :count]
    return (words[..., 0] << 31) | (words[..., 1] >> 1)


def permutations(seed: int, stream: int, times: Tensor, n: int) -> Tensor:
    """For each time a random order of 0 .. n-1, a function of (seed, stream, time) alone: int64 [T, n].

    Sorts by 63-bit random numbers rather than asking `torch.randperm`, whose answer differs between devices.
    """
    return torch.argsort(_long_words(seed, stream, times, n), dim=1, stable=True)


def permutation(seed: int, stream: int, time: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """A random order of 0 .. n-1, a function of (seed, stream, time) alone: int64 [n]."""
    return permutations(seed, stream, torch.full((1,), time, device=device), n)[0]


def samples(seed: int, stream: int, times: Tensor, n: int, count: int) -> Tensor:
    """For each time `count` numbers out of 0 .. n-1, with replacement, a function of (seed, stream, time) alone:
    int64 [T, count]."""
    return _long_words(seed, stream, times, count) % n
