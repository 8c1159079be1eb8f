"""InsDisc's memory bank in a step."""

import pytest
import torch
import torch.nn.functional as F
from steps import IMAGES, fresh, noise


def test_a_memory_bank_needs_one_view_and_follows_it(tiny):
    ours = fresh(tiny("insdisc-small", negatives=10))
    assert len(ours.method.views(16)) == 1
    step = ours.step(noise(1))
    assert len(step.drawn("negatives")) == 10
    assert not torch.equal(step.drawn("negatives"), ours.step(noise(1), number=1).drawn("negatives"))
    before = ours.nets["bank"].rows.clone()
    ours.method.update(ours.nets, step, ours.method.loss(ours.nets, step))
    changed = (ours.nets["bank"].rows != before).any(dim=1).nonzero().flatten()
    assert changed.tolist() == IMAGES.tolist()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_memory_bank_follows_as_slowly_as_it_is_told(tiny, momentum):
    ours = fresh(tiny("insdisc-small", negatives=10, method={"bank_momentum": momentum}))
    before = ours.nets["bank"].rows[IMAGES].clone()
    step = ours.step(noise(1))
    output = ours.method.loss(ours.nets, step)
    ours.method.update(ours.nets, step, output)
    mixed = momentum * before + (1 - momentum) * output.kept["rows"].detach()
    torch.testing.assert_close(ours.nets["bank"].rows[IMAGES], F.normalize(mixed))
