import errno
import os
import pickle

import pytest
import torch
import torchvision

import co2
from co2 import recipes
from co2.checkpoint import (
    CheckpointWriter,
    DamagedCheckpoint,
    checkpoints,
    load_backbone,
    newest_sound_checkpoint,
    read_checkpoint,
    remove_unfinished,
    save_backbone,
    write_checkpoint,
)
from co2.errors import RunError
from co2.networks.backbones import build_backbone


def test_state_comes_back_as_it_was(tmp_path):
    state = {"step": 3, "text": "a", "weights": {"w": torch.randn(4, 3)}, "nothing": None}
    path = write_checkpoint(tmp_path, state, 3)
    back = read_checkpoint(path)
    assert torch.equal(back["weights"].pop("w"), state["weights"].pop("w"))
    assert back == state


def test_the_last_three_are_kept_and_the_newest_is_found_by_number(tmp_path):
    for step in (9, 10, 100, 1000):
        write_checkpoint(tmp_path, {"step": step}, step)
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    steps = ("step-000000010", "step-000000100", "step-000001000")
    assert names == [step + ending for step in steps for ending in (".pt", ".sha256")]
    assert read_checkpoint(checkpoints(tmp_path)[-1])["step"] == 1000


def test_every_so_many_steps_one_is_kept_for_good(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_every=20)
    for step in range(10, 101, 10):
        writer.write({"step": step}, step)
    writer.finish()
    writer.close()
    assert [int(path.stem.removeprefix("step-")) for path in checkpoints(tmp_path)] == [20, 40, 60, 80, 90, 100]
    assert all(path.with_suffix(".sha256").is_file() for path in checkpoints(tmp_path))


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoints(tmp_path) == []
    assert newest_sound_checkpoint(tmp_path, print) is None


def test_what_is_left_of_a_failed_write_is_no_checkpoint_to_anybody(tmp_path):
    write_checkpoint(tmp_path, {"step": 1}, 1)
    (tmp_path / "checkpoints" / "step-000000002.pt.writing").write_bytes(b"half")
    assert checkpoints(tmp_path)[-1].name == "step-000000001.pt"


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    else:
        content[len(content) // 2] ^= 1  # a single bit, in the middle of the weights
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["cut", "empty", "flip"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(tmp_path, how):
    for step in (1, 2):
        write_checkpoint(tmp_path, {"step": step, "w": torch.randn(1000)}, step)
    damage(checkpoints(tmp_path)[-1], how)
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        read_checkpoint(checkpoints(tmp_path)[-1])
    said = []
    assert newest_sound_checkpoint(tmp_path, said.append)["step"] == 1
    assert "step-000000002.pt" in said[0]
    assert "step-000000002.pt.damaged" in said[1]
    assert len(said) == 2
    damage(checkpoints(tmp_path)[0], how)
    with pytest.raises(co2.UserError, match=r"None of the checkpoints .* is sound \(1 tried\)"):
        newest_sound_checkpoint(tmp_path, said.append)


@pytest.mark.parametrize("content", [b"", b"\n", b"12ab", b"\xff\xfe"])
def test_a_damaged_checksum_is_a_damaged_checkpoint(tmp_path, content):
    for step in (1, 2):
        write_checkpoint(tmp_path, {"step": step}, step)
    checkpoints(tmp_path)[-1].with_suffix(".sha256").write_bytes(content)
    assert newest_sound_checkpoint(tmp_path, print)["step"] == 1


def test_damaged_checkpoints_do_not_push_out_what_is_written_after_them(tmp_path):
    for step in (1, 10, 20, 30):
        write_checkpoint(tmp_path, {"step": step}, step, keep_every=1)
    for path in checkpoints(tmp_path)[1:]:
        damage(path, "cut")
    assert newest_sound_checkpoint(tmp_path, print)["step"] == 1
    assert write_checkpoint(tmp_path, {"step": 2}, 2).is_file()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000001.pt", "step-000000002.pt"]
    aside = [f"step-{step:09d}.{end}.damaged" for step in (10, 20, 30) for end in ("pt", "sha256")]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.damaged")) == aside


def test_what_was_just_written_is_never_removed(tmp_path):
    for step in (10, 20, 30, 1):
        assert write_checkpoint(tmp_path, {"step": step}, step).is_file()


def test_nothing_is_put_aside_unless_there_is_something_to_go_on_from(tmp_path):
    write_checkpoint(tmp_path, {"step": 1}, 1)

    def refuse(state):
        raise KeyError("nets")

    with pytest.raises(RunError, match="None of the checkpoints"):
        newest_sound_checkpoint(tmp_path, print, refuse)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000001.pt"]


def test_what_a_killed_write_has_left_is_removed(tmp_path):
    write_checkpoint(tmp_path, {"step": 1}, 1)
    kept = set((tmp_path / "checkpoints").iterdir())
    for name in ("step-000000002.pt.writing", "step-000000002.sha256", "step-000000003.sha256.writing"):
        (tmp_path / "checkpoints" / name).write_bytes(b"left")
    remove_unfinished(tmp_path)
    assert set((tmp_path / "checkpoints").iterdir()) == kept


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path / "gone", {}, 1)
    assert not (tmp_path / "gone").exists()


def test_what_is_written_in_the_background_is_the_state_of_that_moment(tmp_path):
    writer, weights = CheckpointWriter(tmp_path), torch.zeros(500_000)
    for step in range(1, 6):
        weights.fill_(step)
        writer.write({"w": weights, "nested": [{"step": step}]}, step)
        weights.fill_(-1)  # training goes on while the thread writes
    writer.finish()
    writer.close()
    for path, step in zip(checkpoints(tmp_path), (3, 4, 5), strict=True):
        state = read_checkpoint(path)
        assert state["nested"] == [{"step": step}]
        assert (state["w"] == step).all()


def test_what_goes_wrong_in_the_background_is_raised(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    writer = CheckpointWriter(tmp_path)
    writer.write({}, 1)
    with pytest.raises(OSError, match="checkpoints"):
        writer.finish()
    writer.close()


class Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_a_checkpoint_cannot_run_code(tmp_path):
    path, target = tmp_path / "step-1.pt", tmp_path / "owned"
    torch.save({"step": Malicious(str(target))}, path)
    with pytest.raises(co2.UserError, match="not written by this program"):
        read_checkpoint(path)
    path.write_bytes(pickle.dumps(Malicious(str(target))))
    with pytest.raises(co2.UserError):
        read_checkpoint(path)
    assert not target.exists()


def saved(tmp_path, experiment, backbone):
    save_backbone(tmp_path / "backbone.safetensors", backbone, experiment)
    return tmp_path


def test_a_backbone_loads_strictly_into_the_plain_torchvision_model(tmp_path):
    experiment = recipes.moco_v2().edit(network={"backbone": "torchvision/resnet18"})
    backbone = build_backbone("torchvision/resnet18")
    run = saved(tmp_path, experiment, backbone)
    from safetensors.torch import load_file

    plain = torchvision.models.resnet18()
    missing, unexpected = plain.load_state_dict(load_file(run / "backbone.safetensors"), strict=False)
    assert (missing, unexpected) == (["fc.weight", "fc.bias"], [])
    plain.fc = torch.nn.Identity()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(plain.eval()(images), load_backbone(run).eval()(images))


def test_load_backbone_takes_a_folder_or_a_file_and_makes_a_classifier(tmp_path):
    experiment = recipes.demo_moco()
    backbone = build_backbone(experiment.network.backbone, stem=experiment.network.stem, view_size=32)
    run = saved(tmp_path, experiment, backbone)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(load_backbone(run).eval()(images), backbone.eval()(images))
    assert torch.equal(load_backbone(str(run / "backbone.safetensors")).eval()(images), backbone(images))
    assert load_backbone(run, classes=7)(images).shape == (2, 7)
    with pytest.raises(co2.UserError, match="got -1"):
        load_backbone(run, classes=-1)


@pytest.mark.parametrize("classes", [0, 5])
def test_a_backbone_with_weights_missing_is_refused_by_name(tmp_path, classes):
    experiment = recipes.demo_moco()
    backbone = build_backbone(experiment.network.backbone, stem=experiment.network.stem, view_size=32)
    del backbone.layer4
    run = saved(tmp_path, experiment, backbone)
    with pytest.raises(co2.UserError, match=r"(?s)does not fit co2/resnet10-narrow.*layer4"):
        load_backbone(run, classes=classes)


def test_load_backbone_of_a_model_that_asks_for_the_version_of_its_weights(tmp_path):
    experiment = recipes.moco_v2().edit(network={"backbone": "torchvision/mnasnet0_5"}, size=32)
    saved(tmp_path, experiment, build_backbone("torchvision/mnasnet0_5", view_size=32))
    assert co2.load_backbone(tmp_path)(torch.zeros(2, 3, 32, 32)).shape == (2, 1280)
    assert co2.load_backbone(tmp_path, classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_load_backbone_explains_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(co2.UserError, match="no backbone at"):
        load_backbone(tmp_path)
    (tmp_path / "backbone.safetensors").write_bytes(b"nonsense")
    with pytest.raises(co2.UserError, match="not a readable safetensors file"):
        load_backbone(tmp_path)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(co2.UserError, match=r"not a readable safetensors file: no permission to read it"):
        load_backbone(tmp_path)
