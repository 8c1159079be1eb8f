"""Backbones for other tools: taken up by the very lines that are printed, or by a second implementation of theirs."""

import pickle
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import co2
from co2 import export, recipes
from co2.checkpoint import save_backbone
from co2.cli import main
from co2.export import export_backbone
from co2.networks.backbones import build_backbone
from co2.views.view import View


def trained(backbone, stem="standard", size=32):
    """A backbone in which no two weights or statistics are alike, as after training."""
    generator = torch.Generator().manual_seed(0)
    module = build_backbone(backbone, stem, size)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(1 + 0.2 * torch.rand(tensor.shape, generator=generator))
            tensor.add_(0.01 * torch.rand(tensor.shape, generator=generator))
    return module.eval()


@pytest.fixture
def saved(tmp_path):
    """Writes a backbone as a run leaves it, and returns its path and the module."""

    def save(backbone, stem="standard", size=32):
        module = trained(backbone, stem, size)
        experiment = recipes.get("moco-small").edit(network={"backbone": backbone, "stem": stem}, size=size)
        path = tmp_path / "backbone.safetensors"
        save_backbone(path, module, experiment)
        return path, module

    return save


def pictures(count=3, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def taken_up(usage):
    """What the printed lines define."""
    names = {}
    exec(usage, names)
    return names


@pytest.mark.parametrize(
    ("stem", "ending"), [("standard", "pth"), ("standard", "safetensors"), ("small", "pth"), ("small-stride-2", "pth")]
)
def test_torchvision_takes_a_backbone_up_by_the_lines_that_are_printed(saved, tmp_path, stem, ending):
    path, module = saved("torchvision/resnet18", stem)
    exported = export_backbone(path, "torchvision", tmp_path / f"weights.{ending}")
    model = taken_up(exported.usage)["model"].eval()
    assert model.fc.out_features == 10
    model.fc = torch.nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(model(pictures()), module(pictures()))
    if ending == "safetensors":
        assert load_file(exported.path).keys() == module.state_dict().keys()


@pytest.mark.parametrize(
    ("backbone", "size", "ending"),
    [
        ("torchvision/resnet18", 32, "pth"),
        ("torchvision/densenet121", 32, "safetensors"),
        ("timm/vit_tiny_patch16_224", 48, "safetensors"),
    ],
)
def test_timm_takes_a_backbone_up_by_the_lines_that_are_printed(saved, tmp_path, backbone, size, ending):
    path, module = saved(backbone, size=size)
    exported = export_backbone(path, "timm", tmp_path / f"weights.{ending}")
    model = taken_up(exported.usage)["model"].eval()
    with torch.no_grad():
        torch.testing.assert_close(model(pictures(size=size)), module(pictures(size=size)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backbone", "stem"),
    [("torchvision/resnet18", "small"), ("torchvision/efficientnet_b0", "standard")],
    ids=["another stem", "other names"],
)
def test_what_timm_does_not_have_is_not_written_for_it(saved, tmp_path, backbone, stem):
    path, _ = saved(backbone, stem)
    with pytest.raises(co2.UserError, match=r"timm's \w+ is another network .* Use --to onnx, or take it up in Python"):
        export_backbone(path, "timm", tmp_path / "weights.pth")
    path, _ = saved("co2/resnet10-narrow", "small")
    with pytest.raises(co2.UserError, match=r"is co2/resnet10-narrow, which timm does not have. Use --to onnx"):
        export_backbone(path, "timm", tmp_path / "weights.pth")
    assert not (tmp_path / "weights.pth").exists()


def test_features_that_another_tool_would_compute_otherwise_are_noticed(saved, tmp_path, monkeypatch):
    """With a model of timm's that has the same weights and does something else with them."""
    path, _ = saved("torchvision/resnet18")

    def other(name, **options):
        module = build_backbone(name, **options)
        module.maxpool = torch.nn.AvgPool2d(3, 2, 1)
        return module

    monkeypatch.setattr(export, "build_backbone", other)
    with pytest.raises(co2.errors.RunError, match="timm's resnet18 gives other features"):
        export_backbone(path, "timm", tmp_path / "weights.pth")
    assert not (tmp_path / "weights.pth").exists()


def detectron2_features(weights, images, stages, convolutions, groups=1):
    """Detectron2's ResNet (modeling/backbone/resnet.py, STRIDE_IN_1X1 false) written down again, pooled at the end."""

    def convolve(x, name, stride=1, padding=0, groups=1):
        x = F.conv2d(x, torch.from_numpy(weights[f"{name}.weight"]), stride=stride, padding=padding, groups=groups)
        mean, variance, scale, bias = (
            torch.from_numpy(weights[f"{name}.norm.{which}"])
            for which in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, variance, scale, bias, eps=1e-5)

    x = F.max_pool2d(F.relu(convolve(images, "stem.conv1", 2, 3)), 3, 2, 1)
    for stage, blocks in enumerate(stages, start=2):
        for block in range(blocks):
            name, stride = f"res{stage}.{block}", 2 if stage > 2 and block == 0 else 1
            changes = f"{name}.shortcut.weight" in weights
            shortcut = convolve(x, f"{name}.shortcut", stride) if changes else x
            if convolutions == 3:
                x = F.relu(convolve(x, f"{name}.conv1"))
                x = F.relu(convolve(x, f"{name}.conv2", stride, 1, groups))
                x = convolve(x, f"{name}.conv3")
            else:
                x = convolve(F.relu(convolve(x, f"{name}.conv1", stride, 1)), f"{name}.conv2", 1, 1)
            x = F.relu(x + shortcut)
    return x.mean(dim=(2, 3))


@pytest.mark.parametrize(
    ("name", "depth", "stages", "convolutions", "groups", "width"),
    [
        ("resnet18", 18, (2, 2, 2, 2), 2, 1, 64),
        ("resnet50", 50, (3, 4, 6, 3), 3, 1, 64),
        ("resnext50_32x4d", 50, (3, 4, 6, 3), 3, 32, 4),
    ],
)
def test_detectron2_would_compute_the_same_features(saved, tmp_path, name, depth, stages, convolutions, groups, width):
    path, module = saved(f"torchvision/{name}", size=64)
    exported = export_backbone(path, "detectron2", tmp_path / "weights.pkl")
    content = pickle.loads(exported.path.read_bytes())
    assert content["matching_heuristics"]
    # A weight and four numbers of its normalisation for each convolution, and nothing else.
    shortcuts = 4 if convolutions == 3 else 3
    assert len(content["model"]) == 5 * (1 + convolutions * sum(stages) + shortcuts)
    assert all(isinstance(array, np.ndarray) for array in content["model"].values())
    images = pictures(2, 64)
    with torch.no_grad():
        found = detectron2_features(content["model"], images, stages, convolutions, groups)
        torch.testing.assert_close(found, module(images), rtol=1e-4, atol=1e-4)
    for words in (
        f"DEPTH: {depth}, STRIDE_IN_1X1: False, NUM_GROUPS: {groups}, WIDTH_PER_GROUP: {width}",
        "PIXEL_MEAN: [123.675, 116.28, 103.53]",
        "PIXEL_STD: [58.395, 57.12, 57.375]",
        'FORMAT: "RGB"',
    ):
        assert words in exported.usage
    assert ("RES2_OUT_CHANNELS: 64" in exported.usage) == (depth == 18)


@pytest.mark.parametrize(
    ("backbone", "stem", "size"),
    [
        ("torchvision/resnet18", "small", 32),
        ("timm/resnet18", "standard", 32),
        ("torchvision/squeezenet1_1", "standard", 32),
    ],
)
def test_detectron2_is_given_nothing_but_the_resnets_that_it_has(saved, tmp_path, backbone, stem, size):
    path, _ = saved(backbone, stem, size)
    with pytest.raises(co2.UserError, match="Only torchvision's ResNets with their standard stem"):
        export_backbone(path, "detectron2", tmp_path / "weights.pkl")


@pytest.mark.parametrize(
    ("backbone", "stem", "size"),
    [("co2/resnet10-narrow", "small-stride-2", 16), ("torchvision/resnet18", "standard", 40)],
)
def test_the_onnx_graph_gives_the_same_features_for_any_number_of_images(saved, tmp_path, backbone, stem, size):
    path, module = saved(backbone, stem, size)
    exported = export_backbone(path, "onnx", tmp_path / "network.onnx")
    onnx.checker.check_model(str(exported.path))
    for count in (1, 5):
        images = pictures(count, size)
        session = taken_up("import numpy\nimages = numpy.zeros((1, 3, SIZE, SIZE), numpy.float32)\n".replace(
            "SIZE", str(size)) + exported.usage)["session"]  # fmt: skip
        (found,) = session.run(None, {"images": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), module(images), rtol=1e-4, atol=1e-4)
    described = onnxruntime.InferenceSession(str(exported.path)).get_modelmeta().custom_metadata_map
    assert described["view_size"] == str(size)
    assert described["mean"] == str(list(View.mean))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["backbone.safetensors", "network.onnx"]


def test_other_images_than_it_was_trained_with(saved, tmp_path):
    path, module = saved("co2/resnet10-narrow", "small", 16)
    exported = export_backbone(path, "onnx", tmp_path / "network.onnx", view_size=48)
    session = onnxruntime.InferenceSession(str(exported.path))
    (found,) = session.run(None, {"images": pictures(2, 48).numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), module(pictures(2, 48)), rtol=1e-4, atol=1e-4)


def test_an_official_moco_checkpoint_for_detectron2(tmp_path):
    module = trained("torchvision/resnet18", size=64)
    state = {f"module.encoder_q.{name}": tensor for name, tensor in module.state_dict().items()}
    head = {"module.encoder_q.fc.weight": torch.zeros(128, 512), "module.encoder_q.fc.bias": torch.zeros(128)}
    torch.save({"arch": "resnet18", "state_dict": state | head}, tmp_path / "moco.pth.tar")
    exported = export_backbone(tmp_path / "moco.pth.tar", "detectron2", tmp_path / "weights.pkl")
    weights = pickle.loads(exported.path.read_bytes())["model"]
    assert not any("fc" in name for name in weights)
    with torch.no_grad():
        found = detectron2_features(weights, pictures(2, 64), (2, 2, 2, 2), 2)
        torch.testing.assert_close(found, module(pictures(2, 64)), rtol=1e-4, atol=1e-4)


def test_from_a_run_to_another_tool_on_the_command_line(tiny, tmp_path, monkeypatch, capsys):
    run = co2.pretrain(tiny(epochs=1), out=tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["export", str(run), "--to", "onnx"]) == 0
    printed = capsys.readouterr().out
    assert "Wrote resnet10-narrow.onnx." in printed
    assert "onnxruntime.InferenceSession('resnet10-narrow.onnx')" in printed
    assert (tmp_path / "resnet10-narrow.onnx").is_file()
    assert main(["export", str(run), "--to", "onnx"]) == 2
    assert "resnet10-narrow.onnx is there already. Remove it, or give another --out." in capsys.readouterr().err
    assert main(["export", str(run), "--to", "torchvision"]) == 2
    assert "which torchvision does not have. Use --to onnx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "to", "ending"),
    [
        ("onnx", "onnx", "onnx"),
        ("onnxruntime", "onnx", "onnx"),
        ("onnxscript", "onnx", "onnx"),
        ("timm", "timm", "pth"),
    ],
)
def test_without_the_extra_its_name_is_told(saved, tmp_path, monkeypatch, missing, to, ending):
    path, _ = saved("co2/resnet10-narrow", "small")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(co2.UserError, match=rf"consistent-contrast\[{to}\]"):
        export_backbone(path, to, tmp_path / f"network.{ending}")


def test_mistakes_are_told_before_anything_is_computed(saved, tmp_path):
    path, _ = saved("torchvision/resnet18")
    with pytest.raises(co2.UserError, match=r"Nothing is written for 'onx'. Did you mean 'onnx'\?"):
        export_backbone(path, "onx")
    with pytest.raises(co2.UserError, match="random weights"):
        export_backbone("torchvision/resnet18", "onnx")
    with pytest.raises(co2.UserError, match=r"A file for timm ends in .safetensors or .pth"):
        export_backbone(path, "timm", tmp_path / "weights.onnx")
    with pytest.raises(co2.UserError, match="There is no folder"):
        export_backbone(path, "torchvision", tmp_path / "none" / "weights.pth")
    with pytest.raises(co2.UserError, match="There is no backbone"):
        export_backbone(tmp_path / "nothing", "onnx")
