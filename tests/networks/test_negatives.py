import pytest
import torch
import torch.nn.functional as F

import co2
from co2.networks.negatives import MemoryBank, MomentumQueue, compare_in_batch, spread_sample


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def queue(size, dimension=3):
    return MomentumQueue(size, dimension, torch.Generator().manual_seed(0))


def test_a_new_queue_holds_unit_rows():
    torch.testing.assert_close(queue(100).rows.norm(dim=1), torch.ones(100))


@pytest.mark.parametrize("size", [1, 5, 7, 64])
@pytest.mark.parametrize("batches", [[4, 4, 4], [3, 5, 2, 7, 1], [64], [65, 3], [200]])
def test_the_queue_keeps_exactly_the_newest_keys_whatever_the_sizes(size, batches):
    # The oracle is a plain list: every key ever written, of which the last K must be in the queue.
    ours, everything = queue(size), list(queue(size).rows)
    for number, count in enumerate(batches):
        keys = unit(count, 3, seed=number + 1)
        ours.update(keys)
        everything += list(keys)
    expected = {tuple(row.tolist()) for row in everything[-size:]}
    assert {tuple(row.tolist()) for row in ours.rows} == expected
    assert ours.written.item() == sum(batches)


def test_the_oldest_keys_go_first():
    ours = queue(4)
    ours.update(unit(3, 3, seed=1))
    ours.update(unit(2, 3, seed=2))  # one at the end of the buffer, one over the oldest row
    torch.testing.assert_close(ours.rows[3], unit(2, 3, seed=2)[0])
    torch.testing.assert_close(ours.rows[0], unit(2, 3, seed=2)[1])
    torch.testing.assert_close(ours.rows[1:3], unit(3, 3, seed=1)[1:])


def test_the_queues_state_travels():
    ours, copy = queue(8), queue(8)
    ours.update(unit(5, 3, seed=1))
    copy.load_state_dict(ours.state_dict())
    for one in (ours, copy):
        one.update(unit(6, 3, seed=2))
    assert torch.equal(ours.rows, copy.rows)
    assert ours.written == copy.written


def test_writing_to_the_queue_before_backward_is_caught():
    ours = queue(8)
    query = unit(4, 3, seed=1).requires_grad_()
    loss = co2.contrast(*ours.compare(query, unit(4, 3, seed=2))[:3]).instance.sum()
    ours.update(unit(4, 3, seed=2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_batch_is_simclrs_loss():
    embeddings = unit(10, 6, seed=3)
    comparison = compare_in_batch(embeddings)
    terms = co2.contrast(*comparison[:3], exclude=comparison.exclude, tau_instance=0.5)
    # NT-Xent (Chen et al. 2020, equation 1), written out row by row.
    for i in range(10):
        partner = i + 1 if i % 2 == 0 else i - 1
        others = [j for j in range(10) if j != i]
        scores = embeddings[i] @ embeddings[others].T / 0.5
        expected = -(embeddings[i] @ embeddings[partner] / 0.5 - torch.logsumexp(scores, 0))
        torch.testing.assert_close(terms.instance[i], expected)


def test_in_batch_gradients_reach_queries_positives_and_negatives():
    raw = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def loss(x):
        comparison = compare_in_batch(F.normalize(x, dim=1))
        terms = co2.contrast(*comparison[:3], exclude=comparison.exclude)
        return (terms.instance + terms.consistency).mean()

    assert torch.autograd.gradcheck(loss, (raw,))


def test_some_images_ask_all_the_others():
    embeddings = unit(10, 6, seed=3)
    everyone, some = compare_in_batch(embeddings), compare_in_batch(embeddings, slice(1, 3))
    assert torch.equal(some.query, everyone.query[2:6])
    assert torch.equal(some.positive, everyone.positive[2:6])
    assert torch.equal(some.exclude, everyone.exclude[2:6])
    assert some.negatives is embeddings


def bank(images=20):
    return MemoryBank(images, 5, 0.5, torch.Generator().manual_seed(0))


def test_a_memory_bank_compares_with_the_own_row_and_hides_it():
    ours, images, sampled = bank(), torch.tensor([4, 7, 19]), torch.tensor([0, 4, 6, 18, 19])
    comparison = ours.compare(unit(3, 5, seed=1), images, sampled)
    assert torch.equal(comparison.positive, ours.rows[images])
    assert torch.equal(comparison.negatives, ours.rows[sampled])
    assert comparison.exclude.tolist() == [[1], [-1], [4]]


def test_rows_of_a_memory_bank_follow_their_images():
    ours, images, features = bank(), torch.tensor([3, 9]), unit(2, 5, seed=2)
    before = ours.rows.clone()
    ours.update(features, images)
    expected = F.normalize(0.5 * before[images] + 0.5 * features, dim=1)  # InsDisc's proximal momentum of 0.5
    torch.testing.assert_close(ours.rows[images], expected)
    others = [i for i in range(20) if i not in (3, 9)]
    assert torch.equal(ours.rows[others], before[others])


@pytest.mark.parametrize(("count", "size"), [(100, 7), (7, 7), (5, 9), (1000, 999)])
def test_spread_samples_are_sorted_distinct_and_in_range(count, size):
    draws = torch.randint(0, 2**31, (size,), generator=torch.Generator().manual_seed(1))
    rows = spread_sample(draws, count)
    assert len(rows) == min(size, count)
    assert torch.equal(rows, rows.unique())
    assert 0 <= rows.min() <= rows.max() < count


def test_spread_samples_reach_every_row_equally_often():
    generator = torch.Generator().manual_seed(2)
    counts = torch.zeros(50)
    for _ in range(2000):
        counts[spread_sample(torch.randint(0, 2**31, (10,), generator=generator), 50)] += 1
    assert (counts - 400).abs().max() < 5 * 400**0.5
