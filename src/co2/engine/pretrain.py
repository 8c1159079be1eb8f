"""A whole run: from an experiment and images to a folder with a backbone in it."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from co2.checkpoint import (
    BACKBONE,
    CONFIG,
    CheckpointWriter,
    checkpoints,
    newest_sound_checkpoint,
    remove_older,
    save_backbone,
)
from co2.data.fingerprint import fingerprint_of_names
from co2.data.open import DataSplits, open_data
from co2.data.source import ImageSource
from co2.engine.advice import Advisor
from co2.engine.clock import Moment
from co2.engine.distributed import Processes, join_processes
from co2.engine.monitor import Monitor
from co2.engine.progress import Display, Quiet, Work, choose_display
from co2.engine.records import (
    BAD_IMAGES,
    DISK_FULL,
    LOCK,
    Records,
    Unwritten,
    claim_folder,
)
from co2.engine.trainer import Epoch, Trainer, check_execution, measured
from co2.errors import RunError, UserError
from co2.experiment import Experiment, Precision, flatten, read_experiment
from co2.files import write_atomically
from co2.machine.device import choose_device, choose_workers, multiplies_bfloat16, ran_out_of_memory, stream_of_its_own
from co2.machine.memory import freed_memory_kept
from co2.machine.process import Terminated, interrupted_by_sigterm, stop_requests
from co2.method import Method
from co2.objective.contrast import why_not_fused
from co2.runs.rows import METRICS, read_rows
from co2.views.choose_input import choose_input
from co2.views.loader import Batch

NAN_BATCH = "nan_batch.txt"  # the images on which a run diverged
DISK_LOST = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOTCONN)  # what the system says of a disk that has gone
BAD_SHARE = 0.1  # a data set with more unreadable images than this is not what the user thinks it is


class Stopped(Exception):  # noqa: N818 - it is what the user asked for, not an error
    """The run was asked to stop, by Ctrl-C or by the system, and has written a checkpoint, if it has made a step."""

    def __init__(self, words: str, signal_number: int) -> None:
        super().__init__(words)
        self.signal_number = signal_number


def pretrain(
    experiment: Experiment | None = None,
    *,
    method: Method | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
) -> Path:
    """Pre-train a backbone and return the run folder. Started by torchrun, it trains with all its processes together.

    Args:
        experiment: a recipe, for instance `co2.recipes.co2_v2()`, edited or not.
        method: in place of the experiment's, one of your own, say; without an experiment it is trained as `Experiment`
            has it where nothing else is said.
        data: where the images are, if the experiment does not say it already.
        out: the run folder, likewise.
    """
    if experiment is None and method is None:
        raise UserError("Say what to train: a recipe, co2.recipes.co2_v2() say, or a method.")
    if experiment is None:
        assert method is not None
        experiment = Experiment(method=method, recipe=type(method).__name__.lower())
    elif method is not None:
        experiment = experiment.edit(method=method)
    if data is not None:
        experiment = experiment.edit(data=str(data))
    run = Path(out or experiment.out or Path("runs", f"{experiment.recipe}-s{experiment.seed}"))
    experiment = experiment.edit(out=str(run))
    with join_processes() as processes, ExitStack() as claimed, ExitStack() as starting:
        if processes.count == 1:  # of many, one that waits for another could not be interrupted
            starting.enter_context(_stopped_at_the_start())
        device = processes.each(lambda: choose_device(experiment.device, processes.launch))
        splits = processes.each(lambda: open_data(experiment.data))
        processes.use(device)
        images = processes.joined([len(splits.train)])  # for each process
        processes.first(lambda: check_sizes(experiment, images))
        names = processes.joined([fingerprint_of_names(splits.train)])  # for each process
        processes.first(lambda: check_names(experiment, names))
        processes.first(lambda: _check_execution_of_new_run(experiment, device, run))
        processes.first(lambda: _check_backend(experiment, device))
        before = {path for path in _written_by_start(run) if os.path.exists(path)}
        processes.first(lambda: claimed.enter_context(claim_folder(run, experiment)))
        display = choose_display(experiment.epochs, experiment.method.metrics) if processes.is_first else Quiet()
        with _explained(run), stream_of_its_own(device), freed_memory_kept(device), closing(display):
            with _taken_back_if_refused(run, before) if processes.is_first else nullcontext():
                started = Run(experiment, splits, device, run, processes, names[0], display)
            starting.close()  # from here on there is something to keep
            started.execute()
    return run


def check_sizes(experiment: Experiment, images_of_each_process: list[int]) -> None:
    """Whether the images make up batches that the processes can share out."""
    processes, images = len(images_of_each_process), images_of_each_process[0]
    if images != min(images_of_each_process) or images != max(images_of_each_process):
        raise UserError(
            f"{experiment.data} has {min(images_of_each_process)} images for one of the processes and "
            f"{max(images_of_each_process)} for another. All must see the same images."
        )
    if experiment.batch_size > images:
        raise UserError(
            f"A batch of {experiment.batch_size} is larger than the data set of {images} images. "
            + _smaller_batch(experiment, images)
        )

    groups = experiment.network.groups
    if groups > 1 and groups % processes:
        raise UserError(
            f"{groups} groups of batch statistics cannot be shared out among {processes} processes. Use "
            f"--network.groups {-(-groups // processes) * processes}, or another number of processes."
        )
    last = images % experiment.batch_size
    smallest = last if last >= 2 * groups else experiment.batch_size  # a shorter one is left out
    if smallest < processes:
        raise UserError(
            f"A batch of {smallest} images{', the last of an epoch,' if smallest == last else ''} cannot be shared out "
            f"among {processes} processes. Use another --batch-size, or fewer processes."
        )


def check_names(experiment: Experiment, fingerprint_of_each_process: list[int]) -> None:
    """Whether a number means the same image to all processes."""
    if len(set(fingerprint_of_each_process)) > 1:
        raise UserError(
            f"{experiment.data} has images of other names for one of the processes than for another. All must see the "
            "same images."
        )


def _smaller_batch(experiment: Experiment, images: int) -> str:
    """What to do about a batch that is larger than the data set, by settings that go together."""
    groups = experiment.network.groups
    if 2 * groups <= images:
        size = f"{images // 4} or less" if images // 4 > 2 * groups else f"{2 * groups}"
        return f"Use --batch-size {size}, or more images."
    fewest = next((groups for groups in (1, 2) if _takes(experiment, groups)), 1)
    if images < 2 * fewest:
        return f"{experiment.recipe} needs {2 * fewest} images at least."
    fewer = images // 2
    return f"Use --batch-size {2 * fewer} with --network.groups {fewer}, or more images."


def _takes(experiment: Experiment, groups: int) -> bool:
    try:
        experiment.method.check(2 * groups, groups)
    except UserError:
        return False
    return True


def _check_execution_of_new_run(experiment: Experiment, device: torch.device, run: Path) -> None:
    """A run that goes on somewhere else has had its reasons, and only says how it is done now."""
    if not (experiment.resume and checkpoints(run)):
        check_execution(experiment.execution, device)


def _check_backend(experiment: Experiment, device: torch.device) -> None:
    """Whether the objective can be computed in the way that was asked for."""
    if flatten(experiment).get("method.backend") == "fused":
        why_not = why_not_fused(torch.empty(1, 128, device=device))
        if why_not is not None:
            raise UserError(
                f"--method.backend fused cannot run here: {why_not}. Use --method.backend auto, or reference."
            )


def _written_by_start(run: Path) -> list[Path]:
    """What a run may write before its first step, files before the folders that they are in."""
    return [run / METRICS, run / CONFIG, run / LOCK, run, *run.parents]


@contextmanager
def _stopped_at_the_start() -> Iterator[None]:
    """What SIGTERM does to a run that has not begun to train; reading many images takes minutes."""
    try:
        with interrupted_by_sigterm():
            yield
    except Terminated:
        words = "Stopped while the run was being started, with nothing changed. The same command starts it again."
        raise Stopped(words, signal.SIGTERM) from None


@contextmanager
def _taken_back_if_refused(run: Path, before: set[Path]) -> Iterator[None]:
    """Removes what the start of a new run has written if it is refused, so that a corrected one can be started there.

    What was there `before` stays. So does a run that can go on as it is, which a `RunError` says of it.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt) as error:
        can_go_on = isinstance(error, UserError) and error.exit_code == RunError.exit_code
        if not can_go_on and run / CONFIG not in before and not checkpoints(run):
            with suppress(OSError):  # of a folder into which somebody else has put something
                for path in _written_by_start(run):
                    if path not in before:
                        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        raise


class Run:
    """The loop: steps, measurements, records and checkpoints."""

    def __init__(
        self,
        experiment: Experiment,
        splits: DataSplits,
        device: torch.device,
        folder: Path,
        processes: Processes,
        names: int,
        display: Display,
    ) -> None:
        self.experiment = experiment
        self.processes = processes
        self.folder = folder
        self.names = names  # their fingerprint
        self.train = splits.train
        self.workers = workers = choose_workers(experiment.workers, processes.launch.local_count)
        groups = experiment.network.groups
        self.display = display
        resident = experiment.execution.resident_gib
        self.loader, self.input = processes.each(
            lambda: choose_input(
                splits.train,
                experiment.views(),
                batch_size=experiment.batch_size,
                seed=experiment.seed,
                workers=workers,
                device=device,
                smallest=2 * groups,
                share=lambda images: processes.share(images, groups).rows,
                wanted=experiment.execution.input,
                budget_bytes=None if resident is None else int(resident * 2**30),
                progress=lambda done, total: self.display.preparing("reading images", done, total),
            )
        )
        self._lost_workers = [0] * processes.count  # of each process, as far as the user knows
        self.steps_per_epoch = self.loader.batches_per_epoch
        steps = experiment.epochs * self.steps_per_epoch
        labels = _labels(experiment, splits.train)
        self.trainer = Trainer(experiment, len(splits.train), steps, device, processes, self.display.say, labels)
        self.checkpoints = CheckpointWriter(folder, experiment.monitoring.keep_every * self.steps_per_epoch)
        self._restore()
        if experiment.earlier_sizes:
            self._rehearse_largest_views()
        self.monitor = Monitor(experiment, splits, device, workers)
        self.records: Records = Unwritten()
        if processes.is_first:
            self.records = Records(folder, self.trainer.step, most_bad=BAD_SHARE * len(self.train))
        self.advisor = Advisor(experiment, any(isinstance(m, _BatchNorm) for m in self.trainer.nets.modules()))
        if processes.is_first:
            self.advisor.recall(read_rows(folder))
        self._saved_at = time.monotonic()
        self._introduce(splits, device)
        self.display.begin(steps, self.trainer.step, work(experiment, self.steps_per_epoch))

    def execute(self) -> None:
        """Train from where the trainer stands to the end, and write the backbone."""
        try:
            with stop_requests() as requested:
                epochs_done, within = divmod(self.trainer.step, self.steps_per_epoch)
                if not within and self._to_be_measured(epochs_done) and not self.processes.first(self._is_measured):
                    self._measure(epochs_done)
                    self._stop_if(requested)  # all that there is to keep was there before
                while self.trainer.step < self.trainer.steps:
                    self._epoch(self.trainer.step // self.steps_per_epoch, requested)
            self.processes.first(self._finish)
        finally:
            self.checkpoints.close()
            self.records.close()

    def _finish(self) -> None:
        self.checkpoints.finish()
        self._refuse_ruins()
        save_backbone(self.folder / BACKBONE, self.trainer.nets["encoder"].backbone, self.experiment)

    def _epoch(self, number: int, stop_requested: list[int]) -> None:
        """Train epoch `number`, counted from 0, or what is left of it."""
        interval = Interval(self.trainer.device, measured(self.experiment.method))
        first_batch = self.trainer.step % self.steps_per_epoch
        if first_batch == 0:
            self._before_epoch(number)
        batches = self.loader.epoch(number, first_batch, self.experiment.views(number))
        for batch in interval.waiting_for(self.processes.batches(batches)):
            self._note_bad(batch)
            learning_rate = self.trainer.learning_rate()
            interval.add(self.trainer.train_step(batch), batch)
            step = self.trainer.step
            epoch_done = step % self.steps_per_epoch == 0
            # A signal may reach any of the processes, and the first one's clock counts: all do the same after a step.
            stop, save = self.processes.largest(
                stop_requested[0] if stop_requested else 0,
                self.processes.is_first and self._checkpoint_is_due(),
            )
            save = save or stop
            if step % self.experiment.monitoring.log_every == 0 or epoch_done or save:
                self._log(interval, learning_rate)  # before saving: a loss of NaN tells which images it came from
            if epoch_done or save:
                self.trainer.settle()
            if save:
                self.processes.first(self._save)
                self._saved_at = time.monotonic()
            if epoch_done and not stop:  # after saving: it takes long, and needs images that may not be there any more
                self._measure(number + 1)
                if save:
                    self._stop_if(stop_requested)
            if stop:
                self._stop(stop)

    def _before_epoch(self, number: int) -> None:
        """What the method does with all images, if anything: a part of the epoch's first step, so that a run that goes
        on from a checkpoint before it does it again, and from one behind it does not."""
        method = self.experiment.method
        if type(method).before_epoch is not Method.before_epoch:
            self.trainer.settle()
            epoch = Epoch(self.trainer, number, self.train, self.workers)
            with torch.no_grad():
                self.processes.each(lambda: method.before_epoch(self.trainer.nets, epoch))

    def _stop_if(self, requested: list[int]) -> None:
        """Stop here, if any of the processes was told to."""
        (stop,) = self.processes.largest(requested[0] if requested else 0)
        if stop:
            self._stop(stop)

    def _stop(self, signal_number: int) -> None:
        self.processes.first(self.checkpoints.finish)
        step = self.trainer.step
        reached = f"after step {step:,}" if step else "before the first step"
        raise Stopped(f"Stopped {reached}. Everything is in {self.folder}; go on with --resume.", signal_number)

    def _save(self) -> None:
        self._refuse_ruins()
        self.checkpoints.write({**self.trainer.state(), "names": self.names}, self.trainer.step)

    def _checkpoint_is_due(self) -> bool:
        """After every epoch, but seldom enough to cost little, and after many minutes within an epoch."""
        step, monitoring = self.trainer.step, self.experiment.monitoring
        epochs, within = divmod(step, self.steps_per_epoch)
        age = time.monotonic() - self._saved_at
        if within:
            return age > 60 * monitoring.checkpoint_minutes
        kept = monitoring.keep_every and epochs % monitoring.keep_every == 0
        return bool(step == self.trainer.steps or kept) or age >= monitoring.checkpoint_seconds

    def _log(self, interval: Interval, learning_rate: float) -> None:
        step = self.trainer.step
        interval.measured = [*self.processes.mean(torch.stack(interval.measured))]  # of the whole batches, [M] each
        diverged = interval.first_not_finite()
        if diverged is not None:
            images = self.processes.joined(interval.images_of(diverged))
            self.processes.first(lambda: self._give_up_loss(step - interval.steps + diverged + 1, images))
        values = interval.averages() | {"learning_rate": learning_rate}
        self._tell_of_lost_workers()
        self._record("train", values)
        self.display.interval(self.trainer.step, values)
        self._advise(self.advisor.after_interval(self.trainer.step, values, self.trainer.done))

    def _tell_of_lost_workers(self) -> None:
        before, self._lost_workers = self._lost_workers, self.processes.joined([self.loader.workers.lost])
        for rank, (now, known) in enumerate(zip(self._lost_workers, before, strict=True)):
            if now > known:
                whose = f" for process {rank} of {self.processes.count}" if self.processes.count > 1 else ""
                self.display.say(
                    f"A process that prepares images{whose} was ended by the system and has been replaced."
                )

    def _to_be_measured(self, epochs_done: int) -> bool:
        return epochs_done % self.experiment.monitoring.evaluate_every == 0 or epochs_done == self.experiment.epochs

    def _is_measured(self) -> bool:
        """Whether the step that the trainer stands at has been measured already, before the run was interrupted."""
        return any(row["kind"] == "epoch" and row["step"] == self.trainer.step for row in read_rows(self.folder))

    def _measure(self, epochs_done: int) -> None:
        if not self._to_be_measured(epochs_done):
            self.display.epoch(epochs_done, {})
            return
        values = self.processes.first(self._measurement)
        self._record("epoch", values)
        self.display.epoch(epochs_done, values)
        if epochs_done:
            self._advise(self.advisor.after_epoch(epochs_done, self.trainer.step, values))
        else:
            self.advisor.untrained(values)

    def _measurement(self) -> dict[str, float]:
        try:
            return self.monitor.measure(self.trainer.nets["encoder"])
        except UserError as error:
            if self.trainer.step == 0 or isinstance(error, RunError):
                raise
            raise RunError(
                f"How the run is doing could not be measured: {error} Put that right, and go on with --resume."
            ) from error

    def _advise(self, advice: list[str]) -> None:
        for text in advice:
            self.display.say(text)
            self._record("advice", {"text": text})

    def _record(self, kind: str, values: Mapping[str, float | str]) -> None:
        self.records.write(kind, self.trainer.step, self.trainer.step / self.steps_per_epoch, values)

    def _note_bad(self, batch: Batch) -> None:
        if batch.bad:
            self.trainer.settle()
            self.processes.first(lambda: self._write_down(batch.bad))

    def _write_down(self, bad: list[tuple[int, str]]) -> None:
        if not self.records.note_bad(bad, self.train):
            return
        count, images = len(self.records.bad), len(self.train)
        index, reason = bad[-1]
        if count > BAD_SHARE * images:
            self._save()
            self.checkpoints.finish()
            raise RunError(
                f"{count} of {images} images cannot be read, the last one {self.train.describe(index)} ({reason}). "
                f"That is more than a tenth: look at {self.folder / BAD_IMAGES}, repair or replace them, and go on "
                "with --resume."
            )
        self.display.say(
            f"Skipped an image that cannot be read: {self.train.describe(index)} ({reason}). "
            f"{count} so far, all in {self.folder / BAD_IMAGES}."
        )

    def _restore(self) -> None:
        """Go on from the last checkpoint, if the folder has one."""

        def take_up_newest() -> dict[str, Any] | None:
            state = newest_sound_checkpoint(self.folder, print, self._take_up)
            if state is not None:  # a process that was killed just after it wrote it may have left one too many
                remove_older(self.folder, state["step"], self.checkpoints.keep_every)
            return state

        state = self.processes.first(take_up_newest)
        if state is not None and not self.processes.is_first:
            self._take_up(state)

    def _rehearse_largest_views(self) -> None:
        """So that a run whose views grow does not find out after days that the last ones take too much memory."""
        batch = self.experiment.batch_size
        rows = len(range(batch)[self.processes.share(batch, self.experiment.network.groups).rows])
        sizes = [view.size for view in self.experiment.views()]
        blank = tuple(torch.zeros(rows, 3, size, size, dtype=torch.uint8) for size in sizes)
        self.trainer.rehearse(Batch(torch.arange(rows), blank, [], batch))

    def _take_up(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Fails somehow on one that lacks something."""
        images, step = int(state["images"]), state["step"]
        names = state.get("names", self.names)  # which older checkpoints do not have
        if images != len(self.train):
            raise UserError(
                f"The run in {self.folder} was trained on {images:,} images, and {self.experiment.data} has "
                f"{len(self.train):,}. Resume with the data it was started with."
            )
        if names != self.names:
            raise UserError(
                f"The run in {self.folder} was trained on as many images as {self.experiment.data} has, but they had "
                "other names, or came in another order. Resume with the data it was started with."
            )
        if type(step) is not int or not 0 <= step <= self.trainer.steps:
            raise ValueError(f"a run of {self.trainer.steps} steps has no step {step}")
        self.trainer.restore(state)

    def _give_up_loss(self, step: int, images: list[int]) -> NoReturn:
        """The loss is not a number any more: say when, on which images, and what to try."""
        names = self.folder / NAN_BATCH
        write_atomically(names, "".join(f"{self.train.describe(i)}\n" for i in images).encode())
        self._give_up(
            f"The loss became NaN or infinite at step {step:,}; the {len(images)} images of that batch are listed in "
            f"{names}."
        )

    def _refuse_ruins(self) -> None:
        """What is saved is numbers. The loss of a step cannot tell: it is from before the weights changed."""
        if not self.trainer.is_finite():
            self._give_up(f"The weights became NaN or infinite by step {self.trainer.step:,}, and are not saved.")

    def _give_up(self, what: str) -> NoReturn:
        self.checkpoints.finish()
        here = f"step-{self.trainer.step:09d}.pt"  # or later ones are no checkpoints to go back to
        saved = [path for path in checkpoints(self.folder) if path.name < here]
        good = f"The last good checkpoint is {saved[-1]}." if saved else "There is no checkpoint yet."
        raise RunError(
            f"{what} {good} Usually the learning rate is too high: start again with "
            f"--optimisation.learning-rate {self.experiment.learning_rate / 3:.2g}, or with "
            f"{', or with '.join(('--optimisation.warm-up 0.05', *self.experiment.method.remedies('diverged')))}. "
            "If it happens at once, look at the images."
        )

    def _introduce(self, splits: DataSplits, device: torch.device) -> None:
        experiment, trainer = self.experiment, self.trainer
        threads = torch.get_num_threads()
        name = f"{threads} CPU thread{'' if threads == 1 else 's'}"
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        if self.processes.count > 1:
            name = f"{self.processes.count} processes with {name} each"
        length = f"{experiment.epochs} epoch{'s' if experiment.epochs > 1 else ''} of {self.steps_per_epoch:,} steps"
        self.display.say(
            f"{experiment.recipe}: {splits.description}; {experiment.network.backbone}, {length}, "
            f"batch {experiment.batch_size}, on {name}. Writing to {self.folder}."
        )
        self.display.say(self.input)
        if experiment.earlier_sizes:
            self.display.say(growth(experiment))
        wanted = experiment.execution.step
        if wanted != "auto" and wanted != trainer.kind:
            why = "several processes train together" if device.type == "cuda" else f"the device is {device}"
            self.display.say(f"Steps are not {wanted} but taken as they are written: {why}.")
        about_precision = precision_advice(device, experiment.execution.precision, continued=trainer.step > 0)
        if about_precision is not None:
            self.display.say(about_precision)
        if trainer.step:
            self.display.say(f"Going on from step {trainer.step:,} of {trainer.steps:,}.")
        for note in experiment.method.notes(len(self.train)):
            self.display.say(note)


def _labels(experiment: Experiment, source: ImageSource) -> Tensor | None:
    """The labels of the images, where the method asks for them."""
    if not experiment.method.needs_labels:
        return None
    if source.labels is None:
        raise UserError(
            f"The method {experiment.method.name} learns from labels, and {experiment.data} has none. Give images in "
            "sub-folders, one for each class, or another method."
        )
    return torch.from_numpy(source.labels).long()


def precision_advice(device: torch.device, wanted: Precision, continued: bool) -> str | None:
    """What is to be said about the precision that was asked for on this device, if anything."""
    if device.type == "cuda":  # where a run that began on a CPU may go on
        return "Encoders compute in bfloat16 from here on: the device is a GPU." if wanted == "float32" else None
    if continued:  # it keeps what it was begun with
        return None
    if wanted == "auto" and multiplies_bfloat16():
        return (
            "This processor has instructions for bfloat16: --execution.precision bfloat16 makes steps faster, 1.4 "
            "to 1.7 times where it was measured. Rounding differs, so that a run does not come out the same to the bit."
        )
    if wanted == "bfloat16" and not multiplies_bfloat16():
        return (
            "This processor has no instructions for products of bfloat16 numbers: "
            "--execution.precision float32 is faster here."
        )
    return None


def growth(experiment: Experiment) -> str:
    """How large the views are in which part of a run, in a sentence."""
    sizes = experiment.view_sizes
    steps = enumerate(pairwise(sizes), start=2)
    changes = [f", {after} from epoch {number} on" for number, (before, after) in steps if after != before]
    return f"Views have {sizes[0]} pixels at first{''.join(changes)}; the larger they are, the longer a step takes."


def work(experiment: Experiment, steps_per_epoch: int) -> Work:
    """Of a number of steps how many steps of full size take as long: a step goes with the pixels of its views."""
    of_epoch = [steps_per_epoch * (size / experiment.size) ** 2 for size in experiment.view_sizes]
    before_epoch = [0.0, *accumulate(of_epoch)]

    def of_first(steps: int) -> float:
        epoch, within = divmod(steps, steps_per_epoch)
        return before_epoch[epoch] + (of_epoch[epoch] * within / steps_per_epoch if within else 0.0)

    return of_first


class Interval:
    """What happens between two lines of the log. Measurements stay on the device until they are asked for."""

    def __init__(self, device: torch.device, names: tuple[str, ...]) -> None:
        self.device = device
        self.names = names
        self._start()

    def _start(self) -> None:
        self.started = time.perf_counter()
        self.waits: list[tuple[Moment, Moment]] = []  # for each batch when it was asked for, and when it came
        self.measured: list[Tensor] = []  # of each step what `names` says, [M]
        self.batches: list[Tensor] = []  # of each step this process's images, [b]
        self.images = 0  # of all processes

    @property
    def steps(self) -> int:
        return len(self.measured)

    def waiting_for(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, with the time counted in which the device waited for them."""
        while True:
            asked = Moment(self.device)
            batch = next(batches, None)
            if batch is None:
                return
            self.waits.append((asked, Moment(self.device)))
            yield batch

    def add(self, measured: Tensor, batch: Batch) -> None:
        """Count one step."""
        self.measured.append(measured)
        self.batches.append(batch.indices)
        self.images += batch.total

    def first_not_finite(self) -> int | None:
        """Which step of the interval, counted from 0, was the first whose loss is no finite number."""
        finite = torch.stack(self.measured)[:, 0].isfinite().tolist()  # waits for the device
        return None if all(finite) else finite.index(False)

    def images_of(self, step: int) -> list[int]:
        """This process's images in a step of the interval."""
        return self.batches[step].tolist()

    def averages(self) -> dict[str, float]:
        """What is written to the log; then counting starts anew."""
        values = dict(zip(self.names, torch.stack(self.measured).mean(dim=0).tolist(), strict=True))
        elapsed = time.perf_counter() - self.started
        waited = sum(asked.until(came) for asked, came in self.waits)
        values |= {"images_per_second": self.images / elapsed, "waiting": min(1.0, waited / elapsed)}
        self._start()
        return values


@contextmanager
def _explained(run: Path) -> Iterator[None]:
    """Turns what can happen to any long run into a sentence that says what to do."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise RunError(memory_advice(run)) from error
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        method = "".join(f", {words}" for words in read_experiment(run / CONFIG).method.remedies("memory"))
        raise RunError(
            f"The machine's memory ran out. A smaller --batch-size or --size takes less of it{method}. Each makes "
            "another run: start it with another --out."
        ) from error
    except OSError as error:
        gone = error.errno == errno.ENOENT and not os.path.exists(run / CONFIG)  # or it is another file that is missing
        elsewhere = isinstance(error.filename, str) and not Path(error.filename).is_relative_to(run)
        if error.errno in DISK_FULL:
            problem, remedy = f"The disk with {error.filename if elsewhere else run} is full", "make room"
        elif gone or error.errno in DISK_LOST:
            problem, remedy = f"The run folder {run} cannot be written to any more", "bring it back"
        elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST) and not elsewhere:
            problem, remedy = f"Something is in the way at {error.filename or run}", "move it away"
        else:
            raise
        good = "There is no checkpoint in it"
        with suppress(RunError, IndexError):
            good = f"The last good checkpoint is {checkpoints(run)[-1].name}"
        raise RunError(f"{problem} ({error.strerror}). {good}; {remedy} and go on with --resume.") from error


def memory_advice(run: Path) -> str:
    """Which settings of the run in this folder free how much GPU memory."""
    experiment = read_experiment(run / CONFIG)
    total = torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else 0
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    half = experiment.batch_size // 2
    smaller = max(32, experiment.size * 3 // 4)
    others = "".join(f"  {words}\n" for words in experiment.method.remedies("memory"))
    return (
        f"The GPU's memory ({total / 2**30:.0f} GiB) ran out; the run had reached {peak / 2**30:.1f} GiB. What helps:\n"
        f"  --batch-size {half} frees about {peak / 2 / 2**30:.1f} GiB (the learning rate follows)\n"
        f"  --size {smaller} frees about {peak * 7 / 16 / 2**30:.1f} GiB\n"
        f"{others}"
        "These make another run: start it with another --out. Another program on the same GPU is worth a look too "
        "(nvidia-smi)."
    )
