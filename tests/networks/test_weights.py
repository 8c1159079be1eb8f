"""Files of weights: what torch and safetensors write is read as it is, and what others make up costs nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import DESCRIBED, Member, archive, deflated, members, number
from safetensors.torch import save

import co2
from co2 import recipes
from co2.checkpoint import load_backbone, read_checkpoint
from co2.cli import main
from co2.evaluation.subject import open_subject
from co2.files import UnreadableFile
from co2.networks.backbones import build_backbone, outline
from co2.networks.weights import describe_pickled, describe_safetensors, read_pickled

ZIP_OR_NOT = pytest.mark.parametrize("zipped", [True, False], ids=["archive", "bare pickle"])
MOST_SECONDS = 20
MOST_MIB = 2560
KEY = "module.encoder_q."


@pytest.fixture(scope="module")
def narrow() -> dict[str, torch.Tensor]:
    return build_backbone("co2/resnet10-narrow", "small", 32).state_dict()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "other.pth"


def saved(content: object, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def of_a_run(weights: object, **changes: object) -> dict[str, Any]:
    """The part of a run's checkpoint that an evaluation looks at."""
    nets = {f"encoder.backbone.{key}": value for key, value in weights.items()} if weights else {}
    experiment = recipes.demo_moco().edit(network={"stem": "small"}, size=32)
    return {"experiment": experiment.to_json(), "step": 3, "nets": nets | changes}


# What torch and safetensors write.


@ZIP_OR_NOT
def test_everything_that_torch_writes_is_read_as_torch_reads_it(path: Path, zipped: bool) -> None:
    whole = torch.randn(4, 6)
    content = {
        "types": [torch.arange(7).to(kind) for kind in (torch.float16, torch.bfloat16, torch.float64, torch.uint8)],
        "whole": [torch.arange(-3, 4).to(kind) for kind in (torch.int8, torch.int16, torch.int32, torch.int64)],
        "others": [torch.tensor([True, False]), torch.tensor([1 + 2j])],
        "views": [whole, whole.t(), whole[1], whole[:, 2:5], whole[0, 0]],
        "shapes": [torch.zeros(0, 3), torch.tensor(2.5), torch.randn(1, 1, 2)],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "module": torch.nn.BatchNorm2d(3).state_dict(),
        "plain": {"a": None, 1: -5, "b": [2**40, 1.5, True, (1, "ü")], 140_234_567_890_123: {}},
    }
    path.write_bytes(saved(content, zipped))
    wanted, found = torch.load(path, weights_only=True), read_pickled(path)
    assert found.keys() == wanted.keys()
    assert found["plain"] == wanted["plain"]
    assert type(found["module"]) is OrderedDict
    for name in ("types", "whole", "others", "views", "shapes"):
        for one, other in zip(found[name], wanted[name], strict=True):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
    assert found["channels"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found["channels"], wanted["channels"])
    assert torch.equal(found["parameter"], wanted["parameter"])
    assert all(torch.equal(found["module"][key], value) for key, value in wanted["module"].items())


@ZIP_OR_NOT
def test_what_is_neither_a_tensor_nor_plain_is_passed_over(path: Path, zipped: bool) -> None:
    """Such as the counter in the state of a schedule: nothing here needs it."""
    others = {"set": {1}, "counter": Counter([30, 40]), "size": torch.Size([2]), "device": torch.device("cpu")}
    others |= {"bytes": b"x", "type": torch.float8_e5m2, "sparse": torch.eye(2).to_sparse()}
    path.write_bytes(saved(others | {"weight": torch.ones(2)}, zipped))
    found = read_pickled(path)
    assert torch.equal(found.pop("weight"), torch.ones(2))
    assert found == dict.fromkeys(others)


def test_a_description_reads_no_numbers_and_says_what_the_tensors_are(path: Path) -> None:
    tensor = torch.randn(3, 4, dtype=torch.float64)
    path.write_bytes(saved({"a": tensor, "b": tensor[:, 1]}))
    stored = describe_pickled(path)
    assert [(one.dtype, one.shape) for one in stored.values()] == [(torch.float64, (3, 4)), (torch.float64, (3,))]
    assert torch.equal(stored["b"].read(), tensor[:, 1])
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(UnreadableFile, match="has become shorter"):
        stored["b"].read()


def test_safetensors_are_described_as_they_were_written(path: Path) -> None:
    tensors = {
        "b": torch.randn(2, 3),
        "a": torch.arange(5),
        "c": torch.tensor(1.5, dtype=torch.bfloat16),
        "d": torch.ones(0),
    }
    path.write_bytes(save(tensors, metadata={"what": "ever"}))
    stored, description = describe_safetensors(path)
    assert description == {"what": "ever"}
    assert stored.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert stored[key].dtype == tensor.dtype
        assert torch.equal(stored[key].read(), tensor)


# What is compared before it costs.


def opened(names: list[str], seconds: float = 120) -> tuple[dict[str, dict[str, Any]], int]:
    """What became of each file in a process of its own, and the MiB that it took in all."""
    program = [sys.executable, checkpoints.__file__]
    done = subprocess.run(program, input="\n".join(names), capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, last = map(json.loads, done.stdout.splitlines())
    return {line["name"]: line for line in lines}, last["mib"]


def test_files_that_cost_before_they_are_compared_are_a_sentence(
    tmp_path: Path, narrow: dict[str, torch.Tensor]
) -> None:
    """Gigabytes out of kilobytes, networks of gigabytes by their names, and pipes that nobody writes to."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    files: dict[str, tuple[bytes, str]] = {}
    moco = {"arch": "resnet18", "state_dict": {f"{KEY}conv1.weight": torch.ones(3)}}
    parts = members(saved(moco), tmp_path / "whole")
    for ending, folder in ((".pth", tmp_path), (".pt", run / "checkpoints")):
        for place, (name, byte, times) in enumerate((("data/0", b"\0", 0xF000_0000), ("data.pkl", b"N", 3 * 2**30))):
            bomb = [deflated(part.name, byte, times) if part.name.endswith(name) else part for part in parts]
            files[str(folder / f"step-{place}{ending}")] = archive(bomb), "its parts are compressed"
    described = DESCRIBED | {"backbone": "torchvision/vit_h_14", "view_size": "4004", "stem": "standard"}
    files[str(tmp_path / "huge.safetensors")] = save({"x": torch.ones(1)}, metadata=described), "missing: class_token"
    large = saved(moco | {"arch": "regnet_y_128gf"})
    files[str(tmp_path / "large.pth")] = large, "missing: stem.0.weight"
    files[str(tmp_path / "bare.pth")] = saved(moco | {"arch": "regnet_y_128gf"}, False), "missing: stem.0.weight"
    described = DESCRIBED | {"backbone": "timm/eva_giant_patch14_560", "view_size": "4004", "stem": "standard"}
    files[str(tmp_path / "timm.safetensors")] = save({"x": torch.ones(1)}, metadata=described), "missing: "
    for place, header in enumerate((b"[" * 5 * 2**20, b"")):
        files[str(tmp_path / f"{place}.safetensors")] = (
            checkpoints.safetensors(header, length=len(header) or 2**33),
            "larger than 4 MiB",
        )
    for name, (data, _) in files.items():
        Path(name).write_bytes(data)
    for name in (tmp_path / "pipe.pth", run / "checkpoints" / "step-7.pt", tmp_path / "pipe.safetensors"):
        os.mkfifo(name)
        files[str(name)] = b"", "There is no backbone at" if name.suffix == ".safetensors" else "not a regular file"
    sparse = tmp_path / "sparse.pth"
    sparse.write_bytes(parts[0].data)
    os.truncate(sparse, 2**40)
    files[str(sparse)] = b"", "larger than 32768 MiB"
    names = {f"open={name}": words for name, (_, words) in files.items()}
    names |= {f"load={name}": words for name, (_, words) in files.items() if name.endswith(".safetensors")}
    names[f"open={run}"] = "not a regular file"  # the newest of its checkpoints
    names[f"resume={run}"] = "None of the checkpoints in"
    outcomes, mib = opened(list(names))
    for name, words in names.items():
        assert words in outcomes[name]["outcome"], name
        assert outcomes[name]["seconds"] < MOST_SECONDS
    assert mib < MOST_MIB


@pytest.mark.parametrize("most", [2**16, pytest.param(4 * 2**20 - 100, marks=pytest.mark.slow)])
def test_pickles_that_would_take_memory_or_time_without_end(tmp_path: Path, most: int) -> None:
    """As long as a description may be, of whatever asks for most: objects, nesting, arguments, keys, places to keep."""
    parts = members(saved({"state_dict": {}}), tmp_path / "whole")
    many = b"(" + b"K\x01" * (most // 4) + b"tq\x01"  # as many numbers, remembered
    deep = b")q\x02" + b"h\x02h\x02\x86q\x02" * 200  # 2^200 numbers, to whom goes through them all
    names = {
        "lists": b"]" * most,
        "dictionaries": b"}" * most,
        "marks": b"(" * most,
        "nested": b")" + b"\x85" * most + b".",
        "memory": b"Nr\xff\xff\xff\xff.",
        "text": b"X\xff\xff\xff\xffx.",
        "arguments": many + b"ccollections\nCounter\nq\x03" + b"h\x03h\x01R" * (most // 10) + b".",
        "of a tensor": many + b"ctorch._utils\n_rebuild_tensor_v2\nq\x03" + b"h\x03h\x01R" * (most // 10) + b".",
        "copies": many + b"ccollections\nOrderedDict\n(" + b"h\x01h\x01\x86" * (most // 20) + b"t\x85R.",
        "storages": many + b"h\x01Q" * (most // 10) + b".",
        "keys": b"}(" + b"".join(number((2**61 - 1) * n) + b"N" for n in range(most // 16)) + b"u.",
        "a deep key": b"}" + deep + b"h\x02Ns.",
        "a deep name": deep + b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nh\x02NK\x01tQ.",
        "a deep arch": deep + b"0}(X\x04\x00\x00\x00archh\x02X\x0a\x00\x00\x00state_dict}u."
        .replace(b"0}(", b"}("),
        "a huge tensor": b"ctorch\nTensor\n" + number(2**40) + b"\x85R.",
        "huge bytes": b"cbuiltins\nbytearray\n" + number(2**40) + b"\x85R.",
    }  # fmt: skip
    for name, pickled in names.items():
        data = [Member(part.name, pickled) if part.name.endswith("data.pkl") else part for part in parts]
        (tmp_path / f"{name}.pth").write_bytes(archive(data))
    directory = archive([])[:-22] + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 9, 9, 3 * 2**30, 30, 0)
    (tmp_path / "directory.pth").write_bytes(b"PK\x03\x04")
    with open(tmp_path / "directory.pth", "r+b") as file:
        file.seek(3 * 2**30 + 30)
        file.write(directory)
    (tmp_path / "entries.pth").write_bytes(archive([Member(f"{n}", b"") for n in range(60_000)]))
    outcomes, mib = opened([f"open={tmp_path}/{name}.pth" for name in (*names, "directory", "entries")], 300)
    for name, line in outcomes.items():
        assert "other.pth" not in line["outcome"]
        assert line["outcome"] != "read"
        assert line["seconds"] < MOST_SECONDS, name
    assert mib < MOST_MIB


def test_a_network_is_outlined_without_memory() -> None:
    for name in ("torchvision/regnet_y_400mf", "torchvision/swin_t", "timm/test_vit", "co2/resnet10-narrow"):
        size = 224 if "vit" not in name else 160
        shapes = {key: tensor.shape for key, tensor in outline(name, view_size=size).state_dict().items()}
        assert {
            key: tensor.shape for key, tensor in build_backbone(name, view_size=size).state_dict().items()
        } == shapes
        assert all(tensor.is_meta for tensor in outline(name, view_size=size).parameters())


# What is believed.

ODD = {
    "sparse": lambda value: value.to_sparse(),
    "compressed rows": lambda value: value.reshape(len(value), -1).to_sparse_csr(),
    "meta": lambda value: value.to("meta"),
    "complex": lambda value: value.to(torch.complex64),
    "complex NaN": lambda value: value * complex(0, float("nan")),
    "quantised": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    "whole": lambda value: value.to(torch.int64),
    "boolean": lambda value: value.to(torch.bool),
    "eight bits": lambda value: value.to(torch.float8_e4m3fn),
    "spread": lambda value: torch.zeros(*value.shape, 9)[..., 0],
    "no tensor": lambda value: value.tolist(),
}


@ZIP_OR_NOT
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore")  # of torch's, about kinds that it will not have for ever
def test_weights_of_another_kind_are_refused_by_name(
    path: Path, narrow: dict[str, torch.Tensor], kind: str, zipped: bool
) -> None:
    content = of_a_run(narrow)
    content["nets"]["encoder.backbone.conv1.weight"] = ODD[kind](narrow["conv1.weight"])
    path.write_bytes(saved(content, zipped))
    with pytest.raises(co2.UserError, match=r"conv1\.weight|the tensors is spread out|it holds quantised numbers"):
        open_subject(str(path))
    with pytest.raises(co2.UserError):
        co2.export_backbone(path, "onnx", path.with_suffix(".onnx"))
    assert not path.with_suffix(".onnx").exists()


@pytest.mark.parametrize("kind", [torch.complex64, torch.int32, torch.bool, torch.uint8])
def test_saved_backbones_of_another_kind_are_refused_by_name(
    tmp_path: Path, narrow: dict[str, torch.Tensor], kind: torch.dtype
) -> None:
    written = torch.float64 if kind == torch.complex64 else kind  # of as many bytes, which every release can write
    content = save(narrow | {"conv1.weight": narrow["conv1.weight"].to(written)}, metadata=DESCRIBED)
    (tmp_path / "backbone.safetensors").write_bytes(content.replace(b'"F64"', b'"C64"'))
    for call in (load_backbone, lambda path: open_subject(str(path))):
        with pytest.raises(co2.UserError, match=r"of another kind: conv1\.weight|is damaged, or something else"):
            call(tmp_path)
    counters = {key: value.to(torch.float32) for key, value in narrow.items()}
    (tmp_path / "backbone.safetensors").write_bytes(save(counters, metadata=DESCRIBED))
    with pytest.raises(co2.UserError, match=r"of another kind: bn1\.num_batches_tracked torch\.float32 instead"):
        load_backbone(tmp_path)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision_are_taken(
    tmp_path: Path, narrow: dict[str, torch.Tensor], kind: torch.dtype
) -> None:
    half = {
        key: value.to(kind) if value.is_floating_point() else value.to(torch.int32) for key, value in narrow.items()
    }
    (tmp_path / "backbone.safetensors").write_bytes(save(half, metadata=DESCRIBED))
    module = load_backbone(tmp_path)
    assert torch.equal(module.conv1.weight, half["conv1.weight"].float())
    assert open_subject(str(tmp_path)).build()(torch.zeros(2, 3, 32, 32)).shape == (2, 128)


@pytest.mark.parametrize("head", ["whole", "complex", "spread"])
def test_heads_of_another_kind_are_refused(path: Path, narrow: dict[str, torch.Tensor], head: str) -> None:
    layer = {"encoder.head.weight": ODD[head](torch.ones(8, 128)), "encoder.head.bias": torch.ones(8)}
    path.write_bytes(saved(of_a_run(narrow, **layer)))
    assert open_subject(str(path)).width == 128
    with pytest.raises(co2.UserError, match=r"(head|weights).*other\.pth"):
        open_subject(str(path), embeddings=True)


def test_where_a_layer_looks_is_not_taken_from_a_file(tmp_path: Path) -> None:
    swin = build_backbone("torchvision/swin_t", view_size=32).state_dict()
    places = {key: value + 10**6 for key, value in swin.items() if key.endswith("relative_position_index")}
    assert places
    described = DESCRIBED | {"backbone": "torchvision/swin_t", "stem": "standard"}
    (tmp_path / "backbone.safetensors").write_bytes(save(swin | places, metadata=described))
    for module in (load_backbone(tmp_path), open_subject(str(tmp_path)).build()):
        assert module.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 768)


# Names.

EVIL = "evil\x1b]0;title\x07\x9b2J\u202e"


def test_names_in_files_never_act_on_a_terminal(
    tmp_path: Path, narrow: dict[str, torch.Tensor], capsys: Any, monkeypatch: Any
) -> None:
    contents: dict[str, object] = {
        "arch": {"arch": EVIL, "state_dict": {f"{KEY}conv1.weight": torch.ones(1)}},
        "key": {"arch": "resnet18", "state_dict": {f"{KEY}{EVIL}": torch.ones(1)}},
        "no tensor": {"arch": "resnet18", "state_dict": {EVIL: 5}},
        "other": {EVIL: 1},
        "no query": {"state_dict": {EVIL: torch.ones(1)}},
        "head": of_a_run(narrow, **{f"encoder.head.{EVIL}": torch.ones(1)}),
        "config": of_a_run(narrow) | {"experiment": json.dumps({EVIL: 1})},
        "backbone": of_a_run(narrow)
        | {"experiment": recipes.demo_moco().edit(network={"backbone": f"torchvision/{EVIL}"}).to_json()},
    }
    names = []
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pth")
        names.append(str(tmp_path / f"{name}.pth"))
    for name, header in {
        "described": DESCRIBED | {"backbone": EVIL},
        "named": DESCRIBED,
        "recipe": DESCRIBED | {"recipe": EVIL},
    }.items():
        weights = narrow if name == "recipe" else {EVIL: torch.ones(1)}
        (tmp_path / f"{name}.safetensors").write_bytes(save(weights, metadata=header))
        names.append(str(tmp_path / f"{name}.safetensors"))
    for name in names:
        words = ["evaluate", "knn", name, "--data", "shapes:40:16"] + (["--embeddings"] if "head" in name else [])
        assert main(words) == 2, name
        said = capsys.readouterr()
        assert said.err.startswith("co2: "), name
        assert all(line.isprintable() for line in (said.out + said.err).split("\n")), name
    assert str(co2.UserError(f"No {EVIL}, and\nno more")) == "No evil\\x1b]0;title\\x07\\x9b2J\\u202e, and\nno more"


@pytest.mark.parametrize("name", ["timm/resnet18.nosuchtag", "timm/resnet18.hf-hub:evil/x", "timm/hf-hub:evil/x"])
def test_weights_that_timm_does_not_have_are_a_sentence_without_the_network(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked for the network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    (tmp_path / "backbone.safetensors").write_bytes(save({"x": torch.ones(1)}, metadata=DESCRIBED | {"backbone": name}))
    for call in (
        lambda: open_subject(name),
        lambda: open_subject(f"{name}:DEFAULT"),
        lambda: open_subject(f"random:{name}"),
        lambda: open_subject(str(tmp_path)),
        lambda: load_backbone(tmp_path),
    ):
        with pytest.raises(co2.UserError):
            call()


def test_an_architecture_that_is_no_name_is_refused(path: Path) -> None:
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]  # written out, more letters than there is memory for
    for arch in (nested, 5, "x" * 10**6):
        torch.save({"arch": arch, "state_dict": {f"{KEY}conv1.weight": torch.ones(1)}}, path)
        with pytest.raises(co2.UserError, match="its arch is not the name of an architecture"):
            open_subject(str(path))


@ZIP_OR_NOT
def test_tensors_that_overlap_or_reach_beyond_their_storage_are_refused(path: Path, zipped: bool) -> None:
    whole = torch.zeros(100_000)
    path.write_bytes(saved([whole[n:] for n in range(50)], zipped))
    with pytest.raises(UnreadableFile):  # fifty times the file
        read_pickled(path)
    path.write_bytes(saved(torch.zeros(1).expand(2**40), zipped))
    with pytest.raises(UnreadableFile):
        read_pickled(path)
    path.write_bytes(saved([torch.zeros(100)], zipped).replace(b"K\x64\x85", b"K\x65\x85"))
    with pytest.raises(UnreadableFile):
        describe_pickled(path)


def test_a_pickle_that_would_run_a_program_runs_none(path: Path, tmp_path: Path) -> None:
    class Surprise:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    for zipped in (True, False):
        path.write_bytes(saved({"state_dict": {}, "x": Surprise()}, zipped))
        with pytest.raises(co2.UserError, match=r"more than tensors and plain values.*so it is refused"):
            open_subject(str(path))
        with pytest.raises(co2.UserError, match="was not written by this program: it holds more than tensors"):
            read_checkpoint(path)
    path.write_bytes(pickle.dumps({}, protocol=4))
    with pytest.raises(co2.UserError, match="damaged, incomplete, or no checkpoint"):
        open_subject(str(path))
    assert not (tmp_path / "made").exists()


# Fuzzing by structure: whatever the parts are, a result or a sentence.


def fuzzed(folder: Path, narrow: dict[str, torch.Tensor], seeds: range, seconds: float) -> int:
    """Opens files made of these seeds, in processes of their own; returns how many were read."""
    small = of_a_run(narrow)
    kinds: dict[str, Any] = {
        "archive": members(saved(small), folder / "whole"),
        "views": members(
            saved({"arch": "resnet18", "state_dict": {f"{KEY}a": torch.ones(4, 4).t()[1:]}}), folder / "whole"
        ),
        "bare": saved(small, False),
        "header": save(narrow, metadata=DESCRIBED),
    }
    (folder / "same.pt").write_bytes(archive(kinds["archive"]))
    assert open_subject(str(folder / "same.pt")).width == 128
    read = 0
    for first in range(seeds.start, seeds.stop, 500):
        names = []
        for seed in range(first, min(first + 500, seeds.stop)):
            draw = random.Random(seed)
            kind = draw.choice(["archive", "archive", "views", "bare", "header"])
            if kind == "header":
                data = checkpoints.other_safetensors(kinds[kind], draw)
            elif kind == "bare":
                cut = kinds[kind].index(b"conv1.weight") + draw.choice([100, 400, 2_000, 7_000])
                data = checkpoints.other_pickle(kinds[kind][:cut], draw) + kinds[kind][cut:]
            else:
                data = checkpoints.other_archive(kinds[kind], draw)
            own = folder / ("checkpoints" if draw.random() < 0.3 else "")
            own.mkdir(exist_ok=True)
            file = own / f"step-{seed}.{'safetensors' if kind == 'header' else 'pt'}"
            file.write_bytes(data)
            names.append(f"{draw.choice(['open', 'embed', 'load' if kind == 'header' else 'open'])}={file}")
        begun = time.monotonic()
        outcomes, mib = opened(names, seconds)
        assert mib < MOST_MIB, f"{names[0]}: {mib} MiB, {time.monotonic() - begun} s"
        assert len(outcomes) == len(names)
        for line in outcomes.values():
            assert line["seconds"] < MOST_SECONDS, line
            assert line["outcome"].isprintable(), line
            read += line["outcome"] == "read"
        for name in names:
            Path(name.partition("=")[2]).unlink()
    return read


def test_any_parts_of_a_file_of_weights(tmp_path: Path, narrow: dict[str, torch.Tensor]) -> None:
    assert fuzzed(tmp_path, narrow, range(100), 120) > 0


@pytest.mark.slow
def test_many_parts_of_files_of_weights(tmp_path: Path, narrow: dict[str, torch.Tensor]) -> None:
    assert fuzzed(tmp_path, narrow, range(1_000, 21_000), 1_200) > 100
