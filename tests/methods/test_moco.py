"""MoCo's forward pass and its update, by what they do."""

from dataclasses import replace

import pytest
import torch
from steps import B, fresh, noise

from co2.engine.trainer import build_networks
from co2.errors import UserError


def test_a_backbone_that_does_not_take_an_earlier_size_is_refused_before_the_run(tiny):
    squeezenet = {"backbone": "torchvision/squeezenet1_1", "stem": "standard", "groups": 1}
    plain = {"network": squeezenet, "method": {"shuffle": False}, "size": 64}
    build_networks(tiny(**plain, earlier_sizes=(32,)), 40)
    with pytest.raises(UserError, match=r"does not take views of 8 x 8 .* --earlier-sizes"):
        build_networks(tiny(**plain, earlier_sizes=(8,)), 40)


def test_the_same_seed_gives_the_same_start_and_leaves_the_global_generator_alone(tiny):
    before = torch.get_rng_state()
    first, second = build_networks(tiny(), 40), build_networks(tiny(), 40)
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    other = build_networks(tiny(seed=1), 40)
    assert not torch.equal(first["queue"].rows, other["queue"].rows)
    assert not torch.equal(first["encoder"].backbone.conv1.weight, other["encoder"].backbone.conv1.weight)


def test_keys_come_from_the_key_encoder_without_gradient(tiny):
    ours = fresh(tiny())
    query, positive, keys = ours.method.encode(ours.nets, ours.step(noise(2)))
    assert query.requires_grad
    assert not positive.requires_grad
    assert torch.equal(positive, keys)
    torch.testing.assert_close(query.norm(dim=1), torch.ones(B))
    torch.testing.assert_close(keys.norm(dim=1), torch.ones(B))


def test_keys_are_shuffled_across_groups_and_come_back_in_order(tiny):
    ours = fresh(tiny())
    still = replace(ours, method=replace(ours.method, shuffle=False))

    def positives(which, step=3):
        return which.method.encode(which.nets, which.step(noise(2), step))[1]

    # In evaluation mode companions do not matter, so shuffled keys must equal unshuffled ones, row for row.
    ours.nets.eval()
    torch.testing.assert_close(positives(still), positives(ours))
    # In training mode they do, so keys with other companions differ; another step shuffles otherwise.
    ours.nets.train()
    plain, first, second = positives(still), positives(ours), positives(ours, step=4)
    assert not torch.allclose(plain, first, atol=1e-4)
    assert not torch.allclose(first, second, atol=1e-4)


def test_the_symmetric_loss_lets_both_views_be_query_and_key(tiny):
    ours = fresh(tiny(method={"symmetric": True}))
    ours.nets.eval()
    one_way = replace(ours.method, symmetric=False)
    step, swapped = ours.step(noise(2)), ours.step(noise(2).flip(0))
    query, positive, _ = ours.method.encode(ours.nets, step)
    assert query.shape == positive.shape == (2 * B, 16)
    torch.testing.assert_close(one_way.encode(ours.nets, step)[0], query[:B])
    there, back, _ = one_way.encode(ours.nets, swapped)
    torch.testing.assert_close(there, query[B:])
    torch.testing.assert_close(back, positive[B:])
    ours.method.update(ours.nets, step, ours.method.loss(ours.nets, step))
    assert ours.nets["queue"].written == 2 * B


def test_update_moves_the_key_encoder_and_the_queue(tiny):
    ours = fresh(tiny(method={"momentum": 0.75}))
    step = ours.step(noise(2))
    output = ours.method.loss(ours.nets, step)
    with torch.no_grad():
        ours.nets["encoder"].head.weight.add_(1.0)
    before = ours.nets["key_encoder"].encoder.head.weight.clone()
    ours.method.update(ours.nets, step, output)
    torch.testing.assert_close(ours.nets["key_encoder"].encoder.head.weight, before + 0.25)
    torch.testing.assert_close(ours.nets["queue"].rows[:B], output.kept["keys"])
