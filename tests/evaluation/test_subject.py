"""Every name that a person has for a backbone, and what is said about those that are none."""

import pickle
import random

import pytest
import timm
import torch
import torchvision
from fresh import encoder_of
from safetensors.torch import save_file

import co2
from co2.checkpoint import checkpoints, read_checkpoint
from co2.evaluation.subject import open_subject
from co2.networks.backbones import build_backbone
from co2.networks.encoder import Embedder
from co2.views.view import View


def moco_checkpoint(path, head, architecture="resnet18", **changes):
    """What main_moco.py writes, with the two encoders, the queue and an optimiser."""
    state = {}
    for encoder in ("encoder_q", "encoder_k"):
        model = torchvision.models.get_model(architecture, num_classes=128)
        if head == "mlp":  # MoCo v2
            model.fc = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), model.fc)
        state |= {f"module.{encoder}.{key}": value for key, value in model.state_dict().items()}
    state |= {"module.queue": torch.randn(128, 64), "module.queue_ptr": torch.zeros(1, dtype=torch.long)}
    torch.save({"epoch": 200, "arch": architecture, "state_dict": state, "optimizer": {}} | changes, path)
    return state


def test_a_run_folder_its_backbone_and_its_checkpoint_are_the_same(pretrained_run):
    names = [pretrained_run, pretrained_run / "backbone.safetensors", checkpoints(pretrained_run)[-1]]
    folder, file, checkpoint = (open_subject(str(name)) for name in names)
    state = read_checkpoint(names[2])
    assert checkpoint.steps == state["step"]
    for other in (file, checkpoint):
        assert (other.backbone, other.stem, other.view_size) == (folder.backbone, folder.stem, folder.view_size)
        assert other.weights.keys() == folder.weights.keys()
        assert all(torch.equal(other.weights[key], folder.weights[key]) for key in folder.weights)
    assert folder.name == str(pretrained_run)


def test_of_an_unfinished_run_the_newest_checkpoint_counts(pretrained_run, tmp_path):
    (tmp_path / "checkpoints").symlink_to(pretrained_run / "checkpoints")
    subject, finished = open_subject(str(tmp_path)), open_subject(str(pretrained_run))
    assert (subject.name, subject.steps) == (str(tmp_path), 80)
    assert torch.equal(subject.weights["conv1.weight"], finished.weights["conv1.weight"])


def test_normalisation_is_that_of_the_training(pretrained_run):
    folder = open_subject(str(pretrained_run))
    assert (folder.mean, folder.std) == (View.mean, View.std)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_official_moco_checkpoints(tmp_path, head):
    path = tmp_path / "moco_200ep.pth.tar"
    state = moco_checkpoint(path, head)
    subject = open_subject(str(path))
    assert (subject.backbone, subject.width, subject.view_size) == ("torchvision/resnet18", 512, 224)
    assert torch.equal(subject.weights["layer4.1.conv2.weight"], state["module.encoder_q.layer4.1.conv2.weight"])
    # What the authors' main_lincls.py would compute: the plain ResNet with the query encoder's weights.
    plain = torchvision.models.resnet18()
    plain.load_state_dict(dict(subject.weights), strict=False)
    plain.fc = torch.nn.Identity()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(subject.build().eval()(images), plain.eval()(images))


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_embeddings_are_what_an_official_checkpoint_was_trained_with(tmp_path, head):
    path = tmp_path / "moco_200ep.pth.tar"
    state = moco_checkpoint(path, head)
    subject = open_subject(str(path), embeddings=True, view_size=64)
    plain = torchvision.models.resnet18(num_classes=128)
    if head == "mlp":
        plain.fc = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), plain.fc)
    prefix = "module.encoder_q."
    plain.load_state_dict({key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)})
    images = torch.rand(3, 3, 64, 64)
    with torch.no_grad():
        wanted = torch.nn.functional.normalize(plain.eval()(images), dim=1)
        torch.testing.assert_close(subject.build().eval()(images), wanted)
    assert subject.width == subject.architecture["embeddings"] == 128
    without = open_subject(str(path), view_size=64)
    assert without.width == 512
    assert not without.head
    assert "embeddings" not in without.architecture


def test_embeddings_of_a_run_are_those_of_its_newest_checkpoint(pretrained_run):
    subject = open_subject(str(pretrained_run), embeddings=True)
    state = read_checkpoint(checkpoints(pretrained_run)[-1])
    experiment = co2.Experiment.from_json(state["experiment"])
    encoder = Embedder(*encoder_of(experiment).children())
    weights = {key: value for key, value in state["nets"].items() if key.startswith("encoder.")}
    encoder.load_state_dict({key.removeprefix("encoder."): value for key, value in weights.items()})
    images = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(subject.build().eval()(images), encoder.eval()(images))
    fresh = open_subject("random", like=subject, seed=3, embeddings=True)
    assert fresh.head.keys() == subject.head.keys()
    assert not torch.equal(fresh.head["weight"], subject.head["weight"])
    assert torch.equal(fresh.head["weight"], subject.random(3).head["weight"])


def test_what_has_no_head_has_no_embeddings(pretrained_run, tmp_path):
    (tmp_path / "backbone.safetensors").symlink_to(pretrained_run / "backbone.safetensors")
    for name in (tmp_path, tmp_path / "backbone.safetensors", "co2/resnet10-narrow", "random"):
        with pytest.raises(co2.UserError, match="has no head, and embeddings are what comes out of one"):
            open_subject(str(name), embeddings=True)


@pytest.mark.parametrize(
    "head",
    [
        {"fc.weight": torch.zeros(8, 100), "fc.bias": torch.zeros(8)},  # of another backbone
        {"fc.weight": torch.zeros(8, 512)},
        {"fc.weight": torch.zeros(()), "fc.bias": torch.zeros(8)},
        {"fc.weight": torch.zeros(1, 1).expand(2**40, 512), "fc.bias": torch.zeros(1).expand(2**40)},
        {"fc.0.weight": torch.zeros(8, 512), "fc.0.bias": torch.zeros(8), "fc.2.weight": torch.zeros(4, 9)},
    ],
    ids=["width", "no bias", "scalar", "huge", "half"],
)
def test_heads_of_another_kind_are_refused_where_they_are_needed(tmp_path, head):
    path = tmp_path / "odd.pth.tar"
    model = torchvision.models.resnet18()
    state = {key: value for key, value in model.state_dict().items() if not key.startswith("fc.")} | head
    torch.save({"arch": "resnet18", "state_dict": {f"module.encoder_q.{k}": v for k, v in state.items()}}, path)
    assert open_subject(str(path)).width == 512
    with pytest.raises(
        co2.UserError, match=r"odd\.pth\.tar is neither MoCo's nor MoCo v2's, or not of torchvision/resn"
    ):
        open_subject(str(path), embeddings=True)


def test_a_checkpoint_of_another_architecture_names_the_keys(tmp_path):
    path = tmp_path / "moco.pth.tar"
    moco_checkpoint(path, "linear", arch="resnet34")
    with pytest.raises(co2.UserError, match=r"not those of torchvision/resnet34.*missing: layer1\.2\.conv1\.weight"):
        open_subject(str(path))
    wide = build_backbone("torchvision/resnet18").state_dict()
    wide["conv1.weight"] = torch.randn(64, 3, 3, 3)
    wide["extra.weight"] = torch.randn(1)
    described = {"backbone": "torchvision/resnet18", "stem": "standard", "view_size": "64"}
    described |= {"mean": "[0.5, 0.5, 0.5]", "std": "[0.5, 0.5, 0.5]"}
    save_file(wide, tmp_path / "backbone.safetensors", metadata=described)
    with pytest.raises(co2.UserError, match=r"unknown to it: extra\.weight.*conv1\.weight \(64, 3, 3, 3\) instead of"):
        open_subject(str(tmp_path / "backbone.safetensors"))


def test_files_that_could_run_code_are_refused(tmp_path):
    class Surprise:
        def __reduce__(self):
            return (print, ("executed",))

    path = tmp_path / "evil.pth.tar"
    moco_checkpoint(path, "linear", surprise=Surprise())
    with pytest.raises(co2.UserError, match=r"more than tensors.*refused"):
        open_subject(str(path))
    path.write_bytes(pickle.dumps({"state_dict": {}}, protocol=2) + b"rest")
    with pytest.raises(co2.UserError, match="evil"):
        open_subject(str(path))
    path.write_bytes(b"no checkpoint at all")
    with pytest.raises(co2.UserError, match="evil"):
        open_subject(str(path))


def test_checkpoints_of_something_else_are_told_plainly(tmp_path):
    path = tmp_path / "other.pth"
    torch.save({"state_dict": {"module.fc.weight": torch.ones(1)}}, path)
    with pytest.raises(co2.UserError, match=r"no query encoder.*module\.fc\.weight"):
        open_subject(str(path))
    torch.save({"model": {}}, path)
    with pytest.raises(co2.UserError, match="it has model"):
        open_subject(str(path))
    torch.save([1, 2], path)
    with pytest.raises(co2.UserError, match="holds a list"):
        open_subject(str(path))


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": 5},
        {"state_dict": None},
        {"state_dict": {1: torch.ones(1), "module.encoder_q.conv1.weight": torch.ones(1)}},
        {"state_dict": {"module.encoder_q.conv1.weight": 5}},
        {"experiment": "{}", "nets": {}},
        {"experiment": "{}", "nets": [], "step": 1},
        {"experiment": "{}", "nets": {"encoder.backbone.conv1.weight": "x"}, "step": 1},
        {"experiment": 5, "nets": {}, "step": 1},
        {"experiment": "{}", "nets": {}, "step": "one"},
    ],
    ids=str,
)
def test_checkpoints_of_another_structure_are_told_plainly(tmp_path, content):
    path = tmp_path / "other.pth"
    torch.save(content, path)
    with pytest.raises(co2.UserError, match=r"other\.pth is (damaged, or no|not a) checkpoint"):
        open_subject(str(path))


@pytest.mark.parametrize(
    "content",
    [
        b"some words, and no checkpoint\n",
        b"<!DOCTYPE html><html><body>404</body></html>",
        b'{"recipe": "co2-v2"}',
        b"\x89PNG\r\n\x1a\n" + bytes(64),
        b"",
        b"PK\x03\x04" + bytes(64),
        b"\x80\x02",
    ],
    ids=["text", "html", "json", "png", "empty", "zip", "pickle"],
)
def test_files_that_are_no_checkpoints_are_not_accused_of_running_code(tmp_path, content):
    path = tmp_path / "t.pth.tar"
    path.write_bytes(content)
    with pytest.raises(co2.UserError, match=r"t\.pth\.tar cannot be read: it is damaged, incomplete, or no checkpoint"):
        open_subject(str(path))


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "bare pickle"])
def test_damaged_bytes_never_end_in_a_traceback(tmp_path, archive):
    path = tmp_path / "moco.pth.tar"
    state = {f"module.encoder_q.{name}": torch.ones(3) for name in ("conv1.weight", "bn1.weight", "fc.weight")}
    torch.save({"arch": "resnet18", "state_dict": state}, path, _use_new_zipfile_serialization=archive)
    sound = path.read_bytes()
    generator = random.Random(0)
    for _ in range(150):
        damaged = bytearray(sound)
        for _ in range(3):
            damaged[generator.randrange(len(sound))] = generator.randrange(256)
        path.write_bytes(damaged)
        with pytest.raises(co2.UserError):  # of a sound one, too: weights are missing
            open_subject(str(path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path, value):
    weights = build_backbone("co2/resnet10-narrow", view_size=32).state_dict()
    weights["layer2.0.conv1.weight"][0, 0, 0, 0] = value
    described = {"backbone": "co2/resnet10-narrow", "stem": "standard", "view_size": "32"}
    described |= {"mean": "[0.5, 0.5, 0.5]", "std": "[0.5, 0.5, 0.5]"}
    save_file(weights, tmp_path / "backbone.safetensors", metadata=described)
    with pytest.raises(co2.UserError, match=r"layer2\.0\.conv1\.weight is the first.*diverged"):
        open_subject(str(tmp_path))


def test_models_that_ask_for_the_version_of_their_weights(tmp_path):
    subject = open_subject("torchvision/mnasnet0_5", view_size=32)
    module = subject.build()
    assert all(torch.equal(value, subject.weights[key]) for key, value in module.state_dict().items())
    assert subject.build(classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_how_a_backbone_was_trained_is_known_where_it_says_so(tmp_path, pretrained_run):
    assert open_subject(str(pretrained_run)).recipe == "demo-co2"
    assert open_subject(str(checkpoints(pretrained_run)[-1])).recipe == "demo-co2"
    for head, recipe in (("linear", "moco-v1"), ("mlp", "moco-v2")):
        moco_checkpoint(tmp_path / "moco.pth.tar", head)
        subject = open_subject(str(tmp_path / "moco.pth.tar"))
        assert subject.recipe == recipe
        assert open_subject("random", like=subject).recipe == recipe  # compared with the same settings
    assert open_subject("torchvision/resnet18").recipe == ""


@pytest.mark.parametrize("view_size", [-3, 0, 3, 100_000])
def test_view_sizes_have_limits(view_size):
    with pytest.raises(co2.UserError, match="--view-size must be from 4 to 4096"):
        open_subject("random:co2/resnet10-narrow", view_size=view_size)


def test_a_view_size_that_a_model_does_not_take_is_named_as_here():
    with pytest.raises(co2.UserError, match="Choose another --view-size"):
        open_subject("torchvision/vit_b_16", view_size=33)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_seeds_have_limits(seed):
    with pytest.raises(co2.UserError, match=r"--seed must be .* from 0 to 2\^63 - 1"):
        open_subject("random:co2/resnet10-narrow", seed=seed)


def test_random_weights_are_a_function_of_the_seed(pretrained):
    first, again, other = (open_subject("random:torchvision/resnet18", seed=seed, view_size=32) for seed in (1, 1, 2))
    key = "layer1.0.conv1.weight"
    assert torch.equal(first.weights[key], again.weights[key])
    assert not torch.equal(first.weights[key], other.weights[key])
    assert (first.drawn_from, other.drawn_from) == (1, 2)
    like = open_subject("random", like=pretrained, seed=3)
    assert (like.name, like.backbone, like.stem) == ("random", pretrained.backbone, pretrained.stem)
    assert like.view_size == pretrained.view_size
    assert not torch.equal(like.weights["conv1.weight"], pretrained.weights["conv1.weight"])
    assert pretrained.drawn_from is None


def test_model_names(monkeypatch):
    assert open_subject("torchvision/resnet18").view_size == 224
    small = open_subject("timm/resnet10t", view_size=64)
    assert (small.view_size, small.width) == (64, 512)
    with pytest.raises(co2.UserError, match="resnet18"):
        open_subject("torchvision/resnet19")
    with pytest.raises(co2.UserError, match=r"no weights 'DEFUALT'.*Did you mean 'DEFAULT'"):
        open_subject("torchvision/resnet18:DEFUALT")
    with pytest.raises(co2.UserError, match="There is no backbone 'runs/nowhere'"):
        open_subject("runs/nowhere")
    with pytest.raises(co2.UserError, match="Did you mean 'torchvision/resnet50'"):
        open_subject("resnet50")


def test_published_weights_are_taken_from_torchvision(monkeypatch):
    published = torchvision.models.resnet18().state_dict()
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    monkeypatch.setattr(type(weights), "get_state_dict", lambda *_, **__: published)
    subject = open_subject("torchvision/resnet18:DEFAULT")
    assert "fc.weight" not in subject.weights
    assert torch.equal(subject.weights["conv1.weight"], published["conv1.weight"])
    assert (subject.view_size, subject.mean, subject.drawn_from) == (224, (0.485, 0.456, 0.406), None)

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(type(weights), "get_state_dict", offline)
    with pytest.raises(co2.UserError, match=r"cannot be downloaded.*no network"):
        open_subject("torchvision/resnet18:DEFAULT")


def test_published_weights_are_taken_from_timm(monkeypatch):
    create = timm.create_model
    asked = []

    def published(name, pretrained=False, **others):
        asked.append((name, pretrained))
        return create(name, pretrained=False, **others)  # what would be downloaded is drawn here

    monkeypatch.setattr(timm, "create_model", published)
    subject = open_subject("timm/resnet10t:DEFAULT")
    assert ("resnet10t", True) in asked
    assert "fc.weight" not in subject.weights
    expected = timm.models.get_pretrained_cfg("resnet10t")
    assert (subject.view_size, subject.mean, subject.std) == (expected.input_size[-1], expected.mean, expected.std)
    assert subject.drawn_from is None
    with pytest.raises(co2.UserError, match=r"no weights 'IMAGENET1K'.*:DEFAULT"):
        open_subject("timm/resnet10t:IMAGENET1K")

    def offline(*_, pretrained=False, **others):
        if pretrained:
            raise OSError("no network")
        return create(*_, **others)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(co2.UserError, match=r"cannot be downloaded.*no network"):
        open_subject("timm/resnet10t:DEFAULT")


def test_modules_are_new_and_the_subject_stays_as_it_is(pretrained):
    first, second = pretrained.build(), pretrained.build(classes=7)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert pretrained.weights["conv1.weight"].abs().sum() > 0
    assert torch.equal(second.conv1.weight, pretrained.weights["conv1.weight"])
    assert second(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert pretrained.width == 128


def test_only_resnets_are_taken_apart(pretrained):
    spatial = pretrained.spatial()
    assert torch.equal(spatial.layer4[0].conv1.weight, pretrained.weights["layer4.0.conv1.weight"])
    with pytest.raises(co2.UserError, match="Evaluate it by knn"):
        open_subject("torchvision/squeezenet1_1", view_size=64).spatial()


def test_a_stem_keeps_its_stride_at_another_view_size(tmp_path):
    described = {"backbone": "torchvision/resnet18", "stem": "small", "view_size": "32"}
    described |= {"mean": "[0.5, 0.5, 0.5]", "std": "[0.5, 0.5, 0.5]"}
    save_file(
        build_backbone("torchvision/resnet18", "small", 32).state_dict(),
        tmp_path / "backbone.safetensors",
        metadata=described,
    )
    subject = open_subject(str(tmp_path), view_size=64)  # a folder with a backbone in it
    assert subject.view_size == 64
    assert subject.build().conv1.stride == (1, 1)
    assert subject.mean == (0.5, 0.5, 0.5)


def test_training_views_are_crops_and_flips_alone(pretrained):
    views = pretrained.views
    assert (views.jitter_probability, views.grey_probability, views.blur_probability) == (0, 0, 0)
    assert (views.flip_probability, views.size) == (0.5, pretrained.view_size)
