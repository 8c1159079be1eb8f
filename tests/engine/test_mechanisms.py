import pytest
import torch

from co2 import recipes
from co2.engine.distributed import ALONE
from co2.engine.mechanisms import EndToEnd, MemoryBankContrast, MomentumContrast, build_mechanism
from co2.errors import UserError

B, S = 12, 16


def views(count, seed=0):
    return torch.randn(count, B, 3, S, S, generator=torch.Generator().manual_seed(seed))


IMAGES = torch.arange(B)
SHARE = ALONE.share(B, groups=1)


def compare(mechanism, loaded, step=0):
    chance = mechanism.chances(torch.tensor([step]), B)[0]
    return mechanism.compare(mechanism.arrange(loaded, SHARE, chance), IMAGES, SHARE, chance)


def test_each_recipe_gets_its_mechanism(tiny):
    assert isinstance(build_mechanism(tiny("demo-moco"), 40), MomentumContrast)
    assert isinstance(build_mechanism(tiny("simclr-small"), 40), EndToEnd)
    assert isinstance(build_mechanism(tiny("insdisc-small"), 40), MemoryBankContrast)


def test_a_backbone_that_does_not_take_an_earlier_size_is_refused_before_the_run(tiny):
    squeezenet = {"backbone": "torchvision/squeezenet1_1", "stem": "standard", "groups": 1, "shuffle_keys": False}
    build_mechanism(tiny(encoder=squeezenet, views={"size": 64, "earlier_sizes": (32,)}), 40)
    with pytest.raises(UserError, match=r"does not take views of 8 x 8 .* --views\.earlier-sizes"):
        build_mechanism(tiny(encoder=squeezenet, views={"size": 64, "earlier_sizes": (8,)}), 40)


def test_the_same_seed_gives_the_same_start_and_leaves_the_global_generator_alone(tiny):
    before = torch.get_rng_state()
    first, second = build_mechanism(tiny(), 40), build_mechanism(tiny(), 40)
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    other = build_mechanism(tiny(seed=1), 40)
    assert not torch.equal(first.queue.rows, other.queue.rows)
    assert not torch.equal(first.encoder.backbone.conv1.weight, other.encoder.backbone.conv1.weight)


def test_momentum_contrast_takes_keys_from_the_key_encoder_without_gradient(tiny):
    mechanism = build_mechanism(tiny(), 40)
    comparison = compare(mechanism, views(2))
    assert comparison.query.requires_grad
    assert not comparison.positive.requires_grad
    assert comparison.negatives is mechanism.queue.rows
    assert comparison.exclude is None


def test_keys_are_shuffled_across_groups_and_come_back_in_order(tiny):
    mechanism = build_mechanism(tiny(), 40)
    # In evaluation mode companions do not matter, so shuffled keys must equal unshuffled ones, row for row.
    mechanism.eval()
    shuffled = compare(mechanism, views(2), step=3).positive
    mechanism.shuffle = False
    torch.testing.assert_close(compare(mechanism, views(2), step=3).positive, shuffled)
    # In training mode they do, so keys with other companions differ; another step shuffles otherwise.
    mechanism.train()
    plain = compare(mechanism, views(2), step=3).positive
    mechanism.shuffle = True
    first, second = (compare(mechanism, views(2), step=step).positive for step in (3, 4))
    assert not torch.allclose(plain, first, atol=1e-4)
    assert not torch.allclose(first, second, atol=1e-4)


def test_the_symmetric_loss_lets_both_views_be_query_and_key(tiny):
    mechanism = build_mechanism(tiny(negatives={"symmetric": True}), 40).eval()
    both = compare(mechanism, views(2))
    assert both.query.shape == both.positive.shape == (2 * B, 16)
    mechanism.symmetric = False
    torch.testing.assert_close(compare(mechanism, views(2)).query, both.query[:B])
    swapped = compare(mechanism, views(2).flip(0))
    torch.testing.assert_close(swapped.query, both.query[B:])
    torch.testing.assert_close(swapped.positive, both.positive[B:])
    mechanism.update(both, IMAGES, SHARE)
    assert mechanism.queue.written == 2 * B


def test_update_moves_the_key_encoder_and_the_queue(tiny):
    mechanism = build_mechanism(tiny(negatives={"momentum": 0.75}), 40)
    comparison = compare(mechanism, views(2))
    with torch.no_grad():
        mechanism.encoder.head.weight.add_(1.0)
    before = mechanism.key_encoder.encoder.head.weight.clone()
    mechanism.update(comparison, IMAGES, SHARE)
    torch.testing.assert_close(mechanism.key_encoder.encoder.head.weight, before + 0.25)
    torch.testing.assert_close(mechanism.queue.rows[:B], comparison.positive)


def test_end_to_end_puts_the_two_views_of_an_image_side_by_side(tiny):
    mechanism = build_mechanism(tiny("simclr-small"), 40).eval()
    both = views(2)
    comparison = compare(mechanism, both)
    torch.testing.assert_close(comparison.query[0::2], mechanism.encoder(both[0]))
    torch.testing.assert_close(comparison.positive[0::2], mechanism.encoder(both[1]))
    assert comparison.negatives.requires_grad


def test_a_memory_bank_needs_one_view_and_follows_it(tiny):
    experiment = tiny("insdisc-small", negatives={"size": 10})
    assert experiment.negatives.views_per_image == 1
    mechanism = build_mechanism(experiment, 40)
    comparison = compare(mechanism, views(1))
    assert len(comparison.negatives) == 10
    assert torch.equal(comparison.positive, mechanism.bank.rows[IMAGES])
    another = compare(mechanism, views(1), step=1)
    assert not torch.equal(comparison.negatives, another.negatives)
    before = mechanism.bank.rows.clone()
    mechanism.update(comparison, IMAGES, SHARE)
    changed = (mechanism.bank.rows != before).any(dim=1).nonzero().flatten()
    assert changed.tolist() == IMAGES.tolist()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_memory_bank_follows_as_slowly_as_it_is_told(tiny, momentum):
    mechanism = build_mechanism(tiny("insdisc-small", negatives={"size": 10, "momentum": momentum}), 40)
    before = mechanism.bank.rows[IMAGES].clone()
    comparison = compare(mechanism, views(1))
    mechanism.update(comparison, IMAGES, SHARE)
    mixed = momentum * before + (1 - momentum) * comparison.query.detach()
    torch.testing.assert_close(mechanism.bank.rows[IMAGES], torch.nn.functional.normalize(mixed))


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_can_be_built_and_saved(name):
    mechanism = build_mechanism(recipes.get(name).edit(negatives={"size": 64}), 50)
    state = mechanism.state_dict()
    if recipes.get(name).negatives.source == "queue":
        assert {"queue.rows", "queue.written"} <= set(state)
        assert any(key.startswith("key_encoder.") for key in state)
    if recipes.get(name).negatives.source == "memory-bank":
        assert state["bank.rows"].shape == (50, 128)
