"""The random numbers are those of the published generator, and depend on what they are for and on nothing else."""

import math

import pytest
import torch

from co2.philox import Stream, permutation, permutations, philox, samples, uniforms

# Random123's kat_vectors for philox4x32-10: counter, key, answer
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_answers(counter, key, answer):
    assert tuple(philox(torch.tensor(counter), key).tolist()) == answer


def test_many_counters_at_once_with_a_key_each():
    counters = torch.tensor([counter for counter, _, _ in KNOWN_ANSWERS])
    keys = torch.tensor([key for _, key, _ in KNOWN_ANSWERS])
    answers = torch.tensor([answer for _, _, answer in KNOWN_ANSWERS])
    assert torch.equal(philox(counters, (keys[:, 0], keys[:, 1])), answers)


def test_the_counter_of_a_view_is_the_documented_one():
    seed, epoch, image, view = (7 << 32) | 5, 11, 13, 3
    counters = torch.tensor([[(view << 16) + block, image, epoch, int(Stream.VIEW)] for block in range(3)])
    expected = philox(counters, (5, 7)).flatten()[:10].double() / 2**32
    assert torch.equal(uniforms(seed, epoch, torch.tensor([image]), view, 10)[0], expected)


def test_uniforms_are_keyed_by_seed_epoch_image_and_view():
    images = torch.arange(5)
    base = uniforms(0, 0, images, 0, 8)
    assert torch.equal(base, uniforms(0, 0, images, 0, 8))
    assert torch.equal(base[[3, 1]], uniforms(0, 0, torch.tensor([3, 1]), 0, 8))  # whatever else is in the batch
    assert torch.equal(base[:, :3], uniforms(0, 0, images, 0, 3))  # whatever else is asked for
    for other in (uniforms(1, 0, images, 0, 8), uniforms(0, 1, images, 0, 8), uniforms(0, 0, images, 1, 8)):
        assert not torch.isclose(base, other).any()
    assert not torch.isclose(uniforms(1 << 32, 0, images, 0, 8), base).any()  # all 64 bits of a seed count
    assert base.unique().numel() == base.numel()


def test_epoch_and_view_may_be_tensors():
    images = torch.tensor([4, 9])
    mixed = uniforms(3, torch.tensor([5, 6]), images, torch.tensor([0, 1]), 4)
    assert torch.equal(mixed[0], uniforms(3, 5, images, 0, 4)[0])
    assert torch.equal(mixed[1], uniforms(3, 6, images, 1, 4)[1])
    assert torch.equal(uniforms(3, torch.tensor(5), images, 0, 4), uniforms(3, 5, images, 0, 4))


def test_uniforms_are_uniform_and_independent():
    numbers = uniforms(0, 0, torch.arange(20_000), 0, 8)
    assert ((numbers >= 0) & (numbers < 1)).all()
    total = numbers.numel()
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    chi_square = ((counts - total / 100) ** 2 / (total / 100)).sum().item()
    assert abs(chi_square - 99) < 4 * math.sqrt(2 * 99)
    correlations = torch.corrcoef(torch.cat([numbers, numbers.roll(1, 0)], 1).T)  # places, and neighbouring images
    assert (correlations - torch.eye(16)).abs().max() < 4.5 / math.sqrt(20_000)


def test_permutation():
    order = permutation(0, Stream.EPOCH_ORDER, 0, 1001)
    assert torch.equal(order.sort().values, torch.arange(1001))
    several = permutations(0, Stream.EPOCH_ORDER, torch.tensor([3, 0]), 1001)
    assert torch.equal(order, several[1])
    assert torch.equal(permutation(0, Stream.EPOCH_ORDER, 3, 1001), several[0])
    others = [
        permutation(1, Stream.EPOCH_ORDER, 0, 1001),
        permutation(0, Stream.KEY_SHUFFLE, 0, 1001),
        permutation(0, Stream.EPOCH_ORDER, 1, 1001),
        torch.arange(1001),
    ]
    for other in others:
        assert (order == other).float().mean() < 0.01
    assert permutation(0, Stream.EPOCH_ORDER, 0, 0).tolist() == []
    assert permutation(0, Stream.EPOCH_ORDER, 0, 1).tolist() == [0]


def test_permutation_sorts_by_the_words_of_the_generator():
    seed, step = 3, 7
    answers = philox(torch.tensor([[0, block, step, int(Stream.KEY_SHUFFLE)] for block in range(5)]), (seed, 0))
    words = answers.flatten().tolist()
    numbers = [(words[2 * place] << 32) + words[2 * place + 1] for place in range(9)]
    expected = sorted(range(9), key=lambda place: numbers[place])
    assert permutation(seed, Stream.KEY_SHUFFLE, step, 9).tolist() == expected


def test_a_seed_means_the_same_order_in_every_release():
    assert permutation(0, Stream.EPOCH_ORDER, 0, 10).tolist() == [4, 9, 5, 3, 2, 0, 1, 7, 6, 8]


def test_every_order_is_equally_likely():
    counts = torch.zeros(3, 3, 3)
    for step in range(1800):
        first, second, third = permutation(0, Stream.KEY_SHUFFLE, step, 3).tolist()
        counts[first, second, third] += 1
    seen = counts[counts > 0]
    assert len(seen) == 6
    assert ((seen - 300) ** 2 / 300).sum() < 5 + 4 * math.sqrt(10)


def test_sample():
    rows, others = samples(0, Stream.BANK_SAMPLE, torch.tensor([3, 4]), 10, 50_001)
    assert rows.shape == (50_001,)
    assert torch.equal(rows, samples(0, Stream.BANK_SAMPLE, torch.tensor([3]), 10, 50_001)[0])
    assert not torch.equal(rows, others)
    counts = torch.bincount(rows, minlength=10).double()
    assert len(counts) == 10
    assert ((counts - 5000.1) ** 2 / 5000.1).sum() < 9 + 4 * math.sqrt(18)


@pytest.mark.gpu
def test_the_same_on_the_gpu():
    images = torch.arange(1000)
    assert torch.equal(uniforms(5, 2, images.cuda(), 1, 32).cpu(), uniforms(5, 2, images, 1, 32))
    on_gpu = permutation(5, Stream.KEY_SHUFFLE, 9, 1000, device="cuda")
    assert torch.equal(on_gpu.cpu(), permutation(5, Stream.KEY_SHUFFLE, 9, 1000))
