"""Features on a GPU: the same as on the CPU, and as fast as the backbone goes."""

import time
from types import SimpleNamespace

import pytest
import torch

from co2.data.open import open_data
from co2.evaluation import knn, linear
from co2.evaluation.features import batch_size, embed, preparation, ready
from co2.evaluation.subject import open_subject
from co2.measures.knn import nearest
from co2.networks.features import extract

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def test_features_and_accuracies_are_those_of_the_cpu(pretrained, shapes):
    source = open_data("shapes:100:32").train
    on_cpu = embed(pretrained.build(), source, pretrained.views).features
    on_gpu = embed(pretrained.build(), source, pretrained.views, device=GPU).features
    assert on_gpu.device.type == "cuda"
    similarity = torch.nn.functional.cosine_similarity(on_cpu, on_gpu.cpu())
    assert similarity.min() > 0.999  # bfloat16 inside
    for protocol in (knn, linear):
        cpu, gpu = (protocol.evaluate(pretrained, shapes(300), device=device).numbers for device in ("cpu", GPU))
        assert abs(cpu["top1"] - gpu["top1"]) < 6


def test_a_bank_in_main_memory_serves_queries_on_the_gpu():
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(70_000, 64, generator=generator), torch.randn(300, 64, generator=generator)
    expected = nearest(bank, queries, 20)
    found = nearest(bank, queries.to(GPU), 20).cpu()
    assert (found == expected).double().mean() > 0.999  # but for rounding between near equals


@pytest.mark.parametrize(("model", "size"), [("torchvision/resnet50", 224), ("torchvision/resnet18", 64)])
def test_extraction_takes_little_more_than_the_bare_forward_pass(model, size, capsys):
    subject = open_subject(f"random:{model}", view_size=size)
    backbone = ready(subject.build(), GPU).eval()
    count = batch_size(size, GPU)
    pixels = torch.randint(0, 256, (1, count, 3, size, size), dtype=torch.uint8, device=GPU)
    batches = [SimpleNamespace(indices=torch.arange(count), views=pixels)] * 20
    prepare = preparation(subject.views, GPU)
    images = prepare(pixels[0])

    def bare():
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for _ in batches:
                backbone(images)

    def seconds(work):
        work()
        torch.cuda.synchronize()
        best = float("inf")
        for _ in range(5):
            begun = time.perf_counter()
            work()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begun)
        return best

    forward = seconds(bare)
    extraction = seconds(lambda: extract(backbone, batches, prepare, GPU))
    with capsys.disabled():
        rate = 20 * count / extraction
        print(f"\n{model} at {size}: {rate:,.0f} images/s, {forward / extraction:.0%} of the bare forward pass")
    assert forward / extraction >= 0.8
