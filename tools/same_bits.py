"""Whether two versions of the code train the same networks, to the bit.

    python tools/same_bits.py train CODE FOLDER     two epochs of every recipe, cut down, in one process and in two
    python tools/same_bits.py go-on CODE FROM TO    the second of these epochs again, by CODE, from FROM's checkpoints
    python tools/same_bits.py compare ONE OTHER     what is not the same in two such folders

CODE is the folder in which the package lies (`src`, or that of another checkout). Everything runs on the CPU, on
rendered pictures. Compared are weights, statistics, queue and bank, the state of the optimiser, and the rows of
metrics.jsonl but for what a clock says.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLOCKS = {"seconds", "images_per_second", "waiting"}

# Edits by the names that settings had before a method was a value, and by those that they have since.
BEFORE = {
    "all": {
        "data": "shapes:40:16", "epochs": 2, "batch_size": 16, "workers": 0, "device": "cpu",
        "views": {"size": 16},
        "encoder": {"backbone": "co2/resnet10-narrow", "stem": "small-stride-2", "dimension": 16},
        "monitoring": {
            "checkpoint_seconds": 0.0, "log_every": 1, "evaluate_every": 1, "health_images": 16, "bank_images": 30,
            "query_images": 20, "keep_every": 1,
        },
    },
    "moco": {"negatives": {"size": 50}},
    "insdisc": {"negatives": {"size": 20}},
}  # fmt: skip
SINCE = {
    "all": {
        **{name: BEFORE["all"][name] for name in ("data", "epochs", "batch_size", "workers", "device", "monitoring")},
        "network": {"backbone": "co2/resnet10-narrow", "stem": "small-stride-2"},
        "size": 16,
        "method": {"dimension": 16},
    },
    "moco": {"method": {"queue": 50}},
    "insdisc": {"method": {"negatives": 20}},
}
# What no recipe does: a recipe, its edits before and since.
VARIANTS = {
    "symmetric": ("co2-small", {"negatives": {"symmetric": True}}, {"method": {"symmetric": True}}),
    "not-shuffled": ("co2-v2", {"encoder": {"shuffle_keys": False}}, {"method": {"shuffle": False}}),
    "one-group": (
        "co2-v2",
        {"encoder": {"groups": 1, "shuffle_keys": False}},
        {"network": {"groups": 1}, "method": {"shuffle": False}},
    ),
    "simclr-groups": ("co2-simclr-small", {"encoder": {"groups": 2}}, {"network": {"groups": 2}}),
    "detached": (
        "co2-simclr-small",
        {"objective": {"detach_target": True, "label_smoothing": 0.1}},
        {"method": {"detach_target": True, "label_smoothing": 0.1}},
    ),
    "hidden": ("moco-v2", {"encoder": {"hidden": 24}}, {"method": {"hidden": 24}}),
    "growing": ("demo-co2", {"views": {"earlier_sizes": (8,)}}, {"earlier_sizes": (8,)}),
    "bfloat16": ("demo-co2", {"execution": {"precision": "bfloat16"}}, {"execution": {"precision": "bfloat16"}}),
}


def merged(*edits):
    """One set of edits from several; groups of settings are joined."""
    whole = {}
    for edit in edits:
        for name, value in edit.items():
            whole[name] = {**whole.get(name, {}), **value} if isinstance(value, dict) else value
    return whole


def experiments():
    """All that is trained, by name, with the code that is imported."""
    from co2 import recipes

    edits = BEFORE if hasattr(recipes.get("demo-co2"), "negatives") else SINCE

    def cut(recipe, own):
        kind = "insdisc" if "insdisc" in recipe else "simclr" if "simclr" in recipe else "moco"
        return recipes.get(recipe).edit(**merged(edits["all"], edits.get(kind, {}), own))

    before_byol = [name for name in recipes.RECIPES if not name.startswith(("byol", "simsiam"))]
    found = {name: cut(name, {}) for name in before_byol}
    for name, (recipe, before, since) in VARIANTS.items():
        found[name] = cut(recipe, before if edits is BEFORE else since)
    return found


def work(folder, origin=None):
    """What each process does: every run into `folder`, from the checkpoint after an epoch in `origin` if given."""
    import torch

    torch.set_num_threads(1)
    from co2 import pretrain

    first = os.environ.get("RANK", "0") == "0"
    for name, experiment in experiments().items():
        run = Path(folder, name)
        if origin is not None and first:
            shutil.copytree(
                Path(origin, name), run, ignore=shutil.ignore_patterns("events*", "step-000000006*", "*.safetensors")
            )
        if origin is not None and "RANK" in os.environ:
            import time

            ready = run / "metrics.jsonl"
            while not ready.is_file():
                time.sleep(0.05)
        pretrain(experiment.edit(resume=origin is not None), out=str(run))


def start(code, folder, origin=None):
    """Both numbers of processes, each in a subfolder of its name."""
    environment = {**os.environ, "PYTHONPATH": str(Path(code).resolve()), "OMP_NUM_THREADS": "1"}
    for processes in (1, 2):
        words = [str(Path(__file__).resolve()), "work", str(Path(folder, str(processes)))]
        words += [str(Path(origin, str(processes)))] if origin is not None else []
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        subprocess.run([sys.executable, *(launcher if processes > 1 else []), *words], env=environment, check=True)


def digests(run):
    """What is compared of a run: names with digests."""
    import torch

    state = torch.load(run / "checkpoints" / "step-000000006.pt", weights_only=True)
    kept = state.get("nets", state.get("mechanism"))

    def digest(tensor):
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + raw).hexdigest()[:16]

    found = {name: digest(tensor) for name, tensor in kept.items()}
    for number, entries in state["optimiser"]["state"].items():
        found |= {f"optimiser {number} {name}": digest(v) for name, v in entries.items() if torch.is_tensor(v)}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = {name: value for name, value in json.loads(line).items() if name not in CLOCKS}
        if row["kind"] != "advice":
            found[f"row {row['kind']} {row['step']}"] = json.dumps(row, sort_keys=True)
    return found


def compare(one, other):
    """Prints what differs; returns how many runs do."""
    names = {
        str(path.parent.relative_to(folder)) for folder in (one, other) for path in Path(folder).glob("*/*/config.json")
    }
    different = 0
    for name in sorted(names):
        try:
            ours, theirs = digests(Path(one, name)), digests(Path(other, name))
        except OSError as error:
            print(f"{name}: {error}")
            different += 1
            continue
        wrong = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        different += bool(wrong)
        print(f"{name}: " + (f"{len(wrong)} of {len(ours)} differ: {wrong[:4]}" if wrong else f"{len(ours)} the same"))
        if wrong and wrong[0].startswith("row"):
            print(f"    {ours.get(wrong[0])}\n    {theirs.get(wrong[0])}")
    print(f"{len(names)} runs, {different} of them different")
    return different


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "work":
        work(*words)
    elif what == "train":
        start(*words)
    elif what == "go-on":
        start(words[0], words[2], words[1])
    else:
        sys.exit(compare(*words) > 0)
