"""SimCLR's loss against the paper's equation, row by row."""

import torch
import torch.nn.functional as F
from steps import fresh, noise
from torch import nn

from co2.methods.simclr import SimCLR


class Embeddings(nn.Module):
    """Stands where the encoder is: what it makes of an image is the image's own first numbers."""

    def forward(self, pictures):
        return pictures[:, :, 0, 0]


def step_of(tiny, raw):
    """A step whose views have these embeddings: [B, 2, 3] before they are made unit."""
    ours = fresh(tiny("simclr-small"))
    return ours.step(raw.transpose(0, 1)[..., None, None].expand(-1, -1, -1, 2, 2))


def test_the_loss_is_that_of_the_paper(tiny):
    """NT-Xent (Chen et al. 2020, equation 1), written out row by row."""
    raw = torch.randn(5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    embeddings = F.normalize(raw, dim=-1).flatten(0, 1)
    losses = []
    for i in range(10):
        partner = i + 1 if i % 2 == 0 else i - 1
        others = [j for j in range(10) if j != i]
        scores = embeddings[i] @ embeddings[others].T / 0.5
        losses.append(-(embeddings[i] @ embeddings[partner] / 0.5 - torch.logsumexp(scores, 0)))
    found = SimCLR(tau=0.5).loss({"encoder": Embeddings()}, step_of(tiny, raw))
    torch.testing.assert_close(found.loss, torch.stack(losses).mean())


def test_gradients_reach_queries_positives_and_negatives(tiny):
    raw = torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    method = SimCLR(tau=0.2, alpha=1.0)
    assert torch.autograd.gradcheck(lambda x: method.loss({"encoder": Embeddings()}, step_of(tiny, x)).loss, (raw,))


def test_the_two_views_of_an_image_stand_side_by_side(tiny):
    ours = fresh(tiny("simclr-small"))
    ours.nets.eval()
    both, compared = noise(2), []

    class Noting(SimCLR):
        def compare(self, *arguments, **more):
            compared.append(arguments)
            return super().compare(*arguments, **more)

    Noting().loss(ours.nets, ours.step(both))
    (query, positive, negatives), embed = compared[0], ours.nets["encoder"]
    torch.testing.assert_close(query[0::2], F.normalize(embed(both[0])))
    torch.testing.assert_close(positive[0::2], F.normalize(embed(both[1])))
    assert negatives.requires_grad
