import pytest
import torch

import co2
from co2.data.open import open_data
from co2.engine.pretrain import pretrain
from co2.evaluation.knn import embed, evaluate_knn


def test_a_saved_backbone_scores_what_its_run_measured(tiny, rows, tmp_path):
    # The run measures its encoder in memory; the evaluation sees the file it left. Both must agree.
    experiment = tiny(monitoring={"bank_images": 1000, "query_images": 10_000})
    run = pretrain(experiment, out=tmp_path / "run")
    result = evaluate_knn(co2.load_backbone(run), open_data(experiment.data), experiment.views)
    assert result.top1 == rows(run, "epoch")[-1]["knn_top1"]
    assert result.top5 == rows(run, "epoch")[-1]["knn_top5"]


def test_without_a_held_out_part_each_image_asks_all_others(tiny):
    class Pixels(torch.nn.Module):
        def forward(self, images):
            return images.mean(dim=(2, 3))

    data = open_data("shapes:60:16")
    whole = type(data)(data.train, data.bank, None, data.description)
    result = evaluate_knn(Pixels(), whole, tiny().views)
    assert 0 < result.top1 < 1  # itself among the neighbours would give 1


def test_features_belong_to_their_images(tiny):
    class Mean(torch.nn.Module):
        def forward(self, images):
            return images.mean(dim=(2, 3))

    source = open_data("shapes:20:16").train
    views = tiny().views
    embedding = embed(Mean(), source, views)
    assert embedding.images.tolist() == list(range(20))
    assert embedding.labels.tolist() == source.labels.tolist()
    pixels = source.image(7).double() / 255
    expected = (pixels.mean(dim=(1, 2)) - torch.tensor(views.mean).double()) / torch.tensor(views.std).double()
    torch.testing.assert_close(embedding.features[7].double(), expected, rtol=1e-4, atol=1e-4)


def test_no_labels_is_told_plainly(tiny):
    data = open_data("shapes:20:16")
    unlabelled = type(data)(data.train, None, None, data.description)
    with pytest.raises(co2.UserError, match="needs labels"):
        evaluate_knn(torch.nn.Flatten(), unlabelled, tiny().views)
