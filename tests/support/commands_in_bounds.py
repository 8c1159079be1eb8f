"""Runs commands of the program one after the other, each in a fork of this process: torch is loaded once.

Reads a line of JSON for each from its input: `{"words": [...]}` for the command line, `{"resume": [settings, folder]}`
for a run that goes on with the settings in a file, or `{"voc": [kind, root]}` for a reader of VOC trees. Answers each
with a line of JSON: how it ended, what it said, and the memory at its peak.
"""

import json
import os
import resource
import signal
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch  # noqa: F401 - loaded before the forks

from co2 import export, study  # noqa: F401
from co2.cli import main
from co2.engine import pretrain
from co2.errors import UserError
from co2.evaluation import command, knn, suite  # noqa: F401
from co2.evaluation.voc.data import read_detection, read_segmentation
from co2.experiment import read_experiment
from co2.report import page  # noqa: F401

SECONDS = 20  # of computing
SECONDS_ON_A_BUSY_MACHINE = 120  # for what computes nothing, but waits


def act(task):
    if "words" in task:
        return main(task["words"])
    if "resume" in task:
        settings, folder = task["resume"]
        try:
            pretrain.pretrain(read_experiment(Path(settings)).edit(out=folder, resume=True))
        except UserError as error:
            print(error)
            return error.exit_code
        return 0
    kind, root = task["voc"]
    from co2.data.source import BadImage

    try:
        (data,) = (read_detection if kind == "detection" else read_segmentation)(root, "train2012")
        for index in islice(range(len(data.images)), 3):
            try:
                data.images.image(index)
                if kind == "segmentation":
                    data.mask(index)
            except BadImage as error:
                print(error)
    except UserError as error:
        print(error)
        return 2
    return 0


for line in sys.stdin:
    task = json.loads(line)
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
                signal.alarm(SECONDS_ON_A_BUSY_MACHINE)
                for number in (1, 2):
                    os.dup2(said.fileno(), number)
                code = act(task)
            except SystemExit as end:
                code = end.code
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 70)
        _, status, usage = os.wait4(child, 0)
        said.seek(0)
        answer = {
            "code": os.waitstatus_to_exitcode(status),
            "said": said.read().decode(errors="replace")[-3000:],
            "mebibytes": usage.ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10),
        }
    print(json.dumps(answer), file=sys.__stdout__, flush=True)
