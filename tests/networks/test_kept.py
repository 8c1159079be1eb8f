import copy

import pytest
import torch
import torch.nn.functional as F
from fresh import build_encoder
from torch import nn

import co2
from co2.methods.parts import SpreadSample
from co2.networks.kept import Bank, Queue, SlowCopy


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def queue(size, dimension=3):
    return Queue(unit(size, dimension))


def test_a_new_queue_holds_unit_rows():
    torch.testing.assert_close(queue(100).rows.norm(dim=1), torch.ones(100))


@pytest.mark.parametrize("size", [1, 5, 7, 64])
@pytest.mark.parametrize("batches", [[4, 4, 4], [3, 5, 2, 7, 1], [64], [65, 3], [200]])
def test_the_queue_keeps_exactly_the_newest_keys_whatever_the_sizes(size, batches):
    # The oracle is a plain list: every key ever written, of which the last K must be in the queue.
    ours, everything = queue(size), list(queue(size).rows)
    for number, count in enumerate(batches):
        keys = unit(count, 3, seed=number + 1)
        ours.push(keys)
        everything += list(keys)
    expected = {tuple(row.tolist()) for row in everything[-size:]}
    assert {tuple(row.tolist()) for row in ours.rows} == expected
    assert ours.written.item() == sum(batches)


def test_the_oldest_keys_go_first():
    ours = queue(4)
    ours.push(unit(3, 3, seed=1))
    ours.push(unit(2, 3, seed=2))  # one at the end of the buffer, one over the oldest row
    torch.testing.assert_close(ours.rows[3], unit(2, 3, seed=2)[0])
    torch.testing.assert_close(ours.rows[0], unit(2, 3, seed=2)[1])
    torch.testing.assert_close(ours.rows[1:3], unit(3, 3, seed=1)[1:])


def test_the_queues_state_travels():
    ours, copy = queue(8), queue(8)
    ours.push(unit(5, 3, seed=1))
    copy.load_state_dict(ours.state_dict())
    for one in (ours, copy):
        one.push(unit(6, 3, seed=2))
    assert torch.equal(ours.rows, copy.rows)
    assert ours.written == copy.written


def test_writing_to_the_queue_before_backward_is_caught():
    ours = queue(8)
    query = unit(4, 3, seed=1).requires_grad_()
    loss = co2.contrast(query, unit(4, 3, seed=2), ours.rows).instance.sum()
    ours.push(unit(4, 3, seed=2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def bank(images=20):
    return Bank(unit(images, 5))


def test_a_memory_bank_compares_with_the_own_row_and_hides_it():
    ours, images, sampled = bank(), torch.tensor([4, 7, 19]), torch.tensor([0, 4, 6, 18, 19])
    own, others, hidden = ours.look_up(images, sampled)
    assert torch.equal(own, ours.rows[images])
    assert torch.equal(others, ours.rows[sampled])
    assert hidden.tolist() == [[1], [-1], [4]]


def test_rows_of_a_memory_bank_follow_their_images():
    ours, images, features = bank(), torch.tensor([3, 9]), unit(2, 5, seed=2)
    before = ours.rows.clone()
    ours.follow(images, features, 0.5)
    expected = F.normalize(0.5 * before[images] + 0.5 * features, dim=1)  # InsDisc's proximal momentum of 0.5
    torch.testing.assert_close(ours.rows[images], expected)
    others = [i for i in range(20) if i not in (3, 9)]
    assert torch.equal(ours.rows[others], before[others])


def drawn(count, size, seed=1, steps=1):
    """Samples of so many steps, of `size` out of `count` images."""
    return SpreadSample(size).numbers(seed, 4, torch.arange(steps), 16, count)


@pytest.mark.parametrize(("count", "size"), [(100, 7), (7, 7), (5, 9), (1000, 999)])
def test_spread_samples_are_sorted_distinct_and_in_range(count, size):
    (rows,) = drawn(count, size)
    assert len(rows) == min(size, count)
    assert torch.equal(rows, rows.unique())
    assert 0 <= rows.min() <= rows.max() < count


def test_spread_samples_reach_every_row_equally_often():
    counts = drawn(50, 10, steps=2000).flatten().bincount(minlength=50)
    assert (counts - 400).abs().max() < 5 * 400**0.5


# Slow copies.


def encoder_with(groups):
    torch.manual_seed(0)
    return build_encoder(stem="small", groups=groups, size=16)


def test_update_is_an_exponential_moving_average_of_the_parameters_alone():
    encoder = encoder_with(1)
    keys = SlowCopy(encoder)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter))
    encoder(torch.randn(4, 3, 16, 16))  # moves the encoder's own running statistics
    before = copy.deepcopy(keys.encoder)

    keys.follow(encoder, 0.9)

    for name, parameter in keys.encoder.named_parameters():
        expected = 0.9 * before.get_parameter(name) + 0.1 * encoder.get_parameter(name)
        torch.testing.assert_close(parameter, expected)
    for name, buffer in keys.encoder.named_buffers():
        assert torch.equal(buffer, before.get_buffer(name))


def test_keys_carry_no_gradient_and_the_copy_is_frozen_and_apart():
    encoder = encoder_with(2)
    keys = SlowCopy(encoder.eval())
    assert all(module.training for module in keys.modules())
    assert not any(parameter.requires_grad for parameter in keys.parameters())
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    own = {parameter.data_ptr() for parameter in encoder.parameters()}
    assert own.isdisjoint(parameter.data_ptr() for parameter in keys.parameters())
    assert not keys(torch.randn(4, 3, 16, 16)).requires_grad


def test_shuffling_moves_images_between_the_groups():
    encoder = encoder_with(2)
    keys = SlowCopy(encoder)
    plain = copy.deepcopy(encoder)
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.groups = 1
    images, order = torch.randn(6, 3, 16, 16), torch.tensor([4, 1, 0, 3, 5, 2])

    shuffled = keys(images[order])

    with torch.no_grad():
        first, second = plain(images[[4, 1, 0]]), plain(images[[3, 5, 2]])
    torch.testing.assert_close(shuffled, torch.cat([first, second]), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(shuffled, keys(images)[order], atol=1e-3)


def test_with_one_group_shuffling_does_nothing():
    """Why a run with one group and shuffled keys is refused: companions stay the same, so nothing is hidden."""
    keys = SlowCopy(encoder_with(1))
    images, order = torch.randn(6, 3, 16, 16), torch.tensor([4, 1, 0, 3, 5, 2])
    torch.testing.assert_close(keys(images[order]), keys(images)[order], atol=1e-5, rtol=1e-4)
