"""Whole training against MoCo and CO2 written down once more, as plainly as can be: one network of torchvision's, each
group of the batch normalised by itself, logits as one matrix, and the optimiser's rule by hand."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from co2 import philox
from co2.engine.trainer import Trainer
from co2.engine.trainer import measured as measured_names
from co2.views.loader import Batch

B, S, K, D, GROUPS, STEPS = 16, 8, 40, 8, 4, 5  # the queue is not a multiple of the batch: rows wrap around
RATE, DECAY, MOMENTUM, KEY_MOMENTUM, TAU_INSTANCE, TAU_CONSISTENCY = 0.03, 5e-4, 0.9, 0.9, 0.1, 0.05


class NormaliseEachPart(nn.BatchNorm2d):
    """What a batch norm on several GPUs does: each sees its part of the batch."""

    def forward(self, images):
        outputs, means, variances = [], [], []
        for part in images.chunk(GROUPS):
            mean, variance = self.running_mean.clone(), self.running_var.clone()
            outputs.append(F.batch_norm(part, mean, variance, self.weight, self.bias, training=True, momentum=0.1))
            means.append(mean)
            variances.append(variance)
        self.running_mean = torch.stack(means).mean(0)
        self.running_var = torch.stack(variances).mean(0)
        return torch.cat(outputs)


class PlainMoCo:
    def __init__(self, alpha, symmetric, start):
        self.alpha, self.symmetric = alpha, symmetric
        self.query_network = torchvision.models.resnet18(num_classes=D, norm_layer=NormaliseEachPart)
        self.query_network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.query_network.maxpool = nn.Identity()
        names = {name: name.replace("fc.", "head.") for name in self.query_network.state_dict()}
        self.query_network.load_state_dict(
            {
                plain: start[f"encoder.{ours}" if ours.startswith("head") else f"encoder.backbone.{ours}"]
                for plain, ours in names.items()
            }
        )
        self.query_network.double()
        self.key_network = copy.deepcopy(self.query_network)
        self.queue = start["queue.rows"].clone()
        self.place = 0
        self.velocity = [torch.zeros_like(weight) for weight in self.query_network.parameters()]

    def one_way(self, queries, keys, order):
        """The loss of one direction, its two terms, and the new keys."""
        query = F.normalize(self.query_network(queries))
        with torch.no_grad():
            key = torch.empty_like(query)
            key[order] = F.normalize(self.key_network(keys[order]))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.T], dim=1) / TAU_INSTANCE
        instance = F.cross_entropy(logits, torch.zeros(B, dtype=torch.long))
        of_query = F.log_softmax(query @ self.queue.T / TAU_CONSISTENCY, dim=1)
        of_key = F.log_softmax(key @ self.queue.T / TAU_CONSISTENCY, dim=1)
        there = F.kl_div(of_query, of_key, log_target=True, reduction="batchmean")
        back = F.kl_div(of_key, of_query, log_target=True, reduction="batchmean")
        return instance, (there + back) / 2, key

    def step(self, views, order, rate):
        weights = list(self.query_network.parameters())
        directions = [(views[0], views[1]), (views[1], views[0])][: 2 if self.symmetric else 1]
        found = [self.one_way(queries, keys, order) for queries, keys in directions]
        loss = sum(instance + self.alpha * consistency for instance, consistency, _ in found)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient, velocity in zip(weights, gradients, self.velocity, strict=True):
                velocity.mul_(MOMENTUM).add_(gradient + DECAY * weight)
                weight.sub_(rate * velocity)
            for slow, fast in zip(self.key_network.parameters(), weights, strict=True):
                slow.mul_(KEY_MOMENTUM).add_((1 - KEY_MOMENTUM) * fast)
        for key in torch.cat([key for _, _, key in found]):
            self.queue[self.place] = key
            self.place = (self.place + 1) % K
        terms = torch.stack([torch.stack(term) for term in zip(*(each[:2] for each in found), strict=True)]).mean(1)
        return torch.stack([loss, *terms]).detach()


@pytest.mark.parametrize(
    ("alpha", "symmetric"), [(0.0, False), (2.0, False), (2.0, True)], ids=["MoCo", "CO2", "CO2, symmetric"]
)
def test_training_is_that_of_the_plain_method(tiny, alpha, symmetric):
    experiment = tiny(
        "moco-small",
        batch_size=B,
        size=S,
        network={"backbone": "torchvision/resnet18", "stem": "small", "groups": GROUPS},
        method={
            "queue": K,
            "momentum": KEY_MOMENTUM,
            "symmetric": symmetric,
            "dimension": D,
            "alpha": alpha,
            "tau": TAU_INSTANCE,
            "tau_consistency": TAU_CONSISTENCY,
        },
        optimisation={"learning_rate": RATE, "momentum": MOMENTUM, "weight_decay": DECAY},
    )
    trainer = Trainer(experiment, images=B, steps=STEPS, device=torch.device("cpu"))
    trainer.nets.double()  # batches as small as these make rounding grow from step to step
    normalised = trainer._feed
    trainer._feed = lambda view, pictures: normalised(view, pictures).double()
    plain = PlainMoCo(alpha, symmetric, copy.deepcopy(trainer.nets.state_dict()))
    random = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        views = torch.randint(0, 256, (2, B, 3, S, S), dtype=torch.uint8, generator=random)
        order = philox.permutation(experiment.seed, philox.Stream.KEY_SHUFFLE, step, B)
        rate = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        wanted = plain.step([trainer._feed(number, one) for number, one in enumerate(views)], order, rate)
        measured = dict(
            zip(
                measured_names(experiment.method), trainer.train_step(Batch(torch.arange(B), views, [], B)), strict=True
            )
        )
        got = torch.stack([measured[name] for name in ("loss", "instance", "consistency")])
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    ours = trainer.nets
    for network, encoder in ((plain.query_network, ours["encoder"]), (plain.key_network, ours["key_encoder"].encoder)):
        state = {**encoder.backbone.state_dict(), **{f"fc.{k}": v for k, v in encoder.head.state_dict().items()}}
        for name, wanted in network.state_dict().items():
            if "num_batches" not in name:
                torch.testing.assert_close(state[name], wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours["queue"].rows, plain.queue, rtol=1e-6, atol=1e-9)
