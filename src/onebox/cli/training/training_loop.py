"""The training loop of ``onebox train``: epochs of steps, recorded results, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from onebox.cli.options.jobs import TrainConfig
from onebox.cli.output_files import write_output
from onebox.engine import StepLoss, Trainer
from onebox.engine.adaptive.controller import AppliedDecision
from onebox.engine.data.prefetch import UploadedBatch
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.engine.state.background_save import BackgroundSave
from onebox.engine.steps.account import FEED, SAVING, Account, joined
from onebox.engine.steps.link_use import LinkUse, use_since
from onebox.errors import CheckpointError, OneboxError
from onebox.feed import Data, Feed, Position
from onebox.plan import Plan
from onebox.report import MetricsLog, Progress, RunFolder, epoch_line
from onebox.report.run.metrics import VERSION
from onebox.stop_signals import StopSignals

_T = TypeVar("_T")

_REMEMBERED = 1000
_FEED_SHARE = 0.03
"""Share of time in which training waits for the feed, from which its bottleneck is printed."""

_BEHIND = 2
"""Losses are read this number of steps later: the trainer's default number of steps in flight."""


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """The results of an epoch; a line of the metrics file.

    Args:
        step: Steps of the whole run at the end of the epoch.
        epoch: Number of the epoch, from 1.
        train_loss: Mean loss of its samples, each with the weights of its step.
        test_loss: Mean loss of the test set.
        test_accuracy: Accuracy on the test set, 0 to 1; ``None`` for a model whose outputs are not logits.
        samples_per_s: Training samples per second of wall time, without capture and planning; known once it is saved.
    """

    step: int
    epoch: int
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    samples_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """Progress of a run: the part of a checkpoint beside the trainer's own state.

    Args:
        position: The next batch.
        loss_sum: Sum of the losses of the epoch's samples so far; ``None`` where it is not finite.
        last: The last epoch's result.
        skipped: Number of samples of the epoch left out so far.
        continues_from: Name of the save that the run goes on from if it is given more epochs, as this one is after
            outer steps that are off their schedule; ``None`` if it goes on from this one.
    """

    position: Position
    loss_sum: float | None = 0.0
    last: EpochResult | None = None
    skipped: int = 0
    continues_from: str | None = None

    def to_extra(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], *, seed: int, path: Path) -> RunProgress:
        """Return the progress that :meth:`to_extra` wrote.

        Raises:
            CheckpointError: It is missing, or belongs to a run with another seed.
        """
        try:
            standing = msgspec.convert(extra, cls)
        except (msgspec.ValidationError, OneboxError) as error:
            raise CheckpointError(
                f"{path} holds no position in the data that this command wrote: {error}", path=path
            ) from None
        if standing.position.seed != seed:
            raise CheckpointError(
                f"{path} is of a run with seed {standing.position.seed}, the configuration with it of one with {seed}",
                path=path,
            )
        return standing


@dataclass(kw_only=True)
class TrainingLoop:
    """The training loop up to the last epoch.

    Args:
        config: The options.
        trainer: The trainer.
        data: The data set.
        train: Batches to train on, uploaded.
        test: Batches to test on, of one epoch in a fixed order.
        folder: Folder of the checkpoints.
        log: Log of the results.
        progress: Progress display.
        standing: Progress of the run, as last saved.
        stop: Signals that end it between two steps.
        saved: The last checkpoint, if any.
        samples: Samples trained on by this process.
        account: The account of the time of this process so far.
        unsaved: The reason for which the last due checkpoint was not written; ``None`` if it was.
        stopped: Whether a signal has ended it.
        full_steps: Numbers of the last steps with a whole batch, as in events, from 0.
        planned: Whether its plan was searched for, or given as a file.
        listeners: Called with each record of the metrics.
        plan_listeners: Called with the plan, once it is known and whenever it is another one.
    """

    config: TrainConfig
    trainer: Trainer
    data: Data
    train: Feed
    test: Feed
    folder: RunFolder
    log: MetricsLog
    progress: Progress
    standing: RunProgress
    stop: StopSignals
    saved: Path | None = None
    samples: int = 0
    account: Account = field(default_factory=lambda: Account(seconds=0.0))
    unsaved: OneboxError | None = None
    stopped: bool = False
    full_steps: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    planned: bool = False
    listeners: list[Callable[[Mapping[str, object]], object]] = field(default_factory=list)
    plan_listeners: list[Callable[[Plan], object]] = field(default_factory=list)
    _pending: deque[tuple[int, StepLoss, int]] = field(default_factory=deque)
    _loss_sum: float = 0.0
    _counted: int = 0
    _saving: tuple[int, BackgroundSave] | None = None
    _saved_s: float = field(default_factory=time.monotonic)
    _stories: int = 0
    _changes: int = 0
    _made: int = 0
    _silent: bool = False
    _links: tuple[LinkUse, ...] = ()
    _plan: Plan | None = None

    @property
    def full_batch(self) -> int:
        """Samples of a whole batch."""
        return min(self.config.batch, len(self.data.train))

    @property
    def computes(self) -> bool:
        """True if all devices compute; ``sim`` devices do not: then there is no loss and nothing to save."""
        return all(device.kind != "sim" for device in self.trainer.pool.devices)

    def run(self) -> None:
        """Train the remaining epochs, or until a signal; the checkpoint then continues in the middle of an epoch.

        A checkpoint that cannot be written, as on a full disk, is reported and tried again when the next one is due.

        Raises:
            OneboxError: A step failed.
        """
        self.trainer.wall.take()  # from here on
        if self.standing.position.epoch < self.config.epochs:
            self._write({"event": "begin", "version": VERSION, "step": self.trainer.steps_done})
        try:
            while self.standing.position.epoch < self.config.epochs and not self.stopped:
                self._epoch(self.standing)
                self.stopped = self.stop.requested and self.standing.position.epoch < self.config.epochs
        except BaseException:
            if self._saving is not None and self._saving[1].done:  # to name the last checkpoint
                self._end_save()
            raise
        self._end_save()
        self.account = joined([self.account, self.trainer.wall.take()])

    def _epoch(self, begin: RunProgress) -> None:
        """Train an epoch from where it was left, test, and save; on a signal, only save."""
        epoch, here = begin.position.epoch, begin
        self.progress.epoch(epoch + 1)
        self._loss_sum = math.nan if begin.loss_sum is None else begin.loss_sum
        with self.train.epoch(epoch) as batches:
            for uploaded in self._until_stopped(batches):
                self._step(uploaded, epoch)
                skipped = begin.skipped + self.train.skipped.in_epoch
                here = dataclasses.replace(begin, position=self.train.position, skipped=skipped)
                if self._save_now() and here.position.index < len(self.train):  # its end is saved with its results
                    self._save_within(here)
        self._drain(epoch)
        ends = epoch + 1 == self.config.epochs and not self.stop.requested
        continues_from = self._close(here) if ends and self.trainer.behind else None
        result = None
        if not self.stop.requested:
            result = self._test(epoch + 1, begin.skipped + self.train.skipped.in_epoch)
        if result is not None:
            self._save(RunProgress(position=self.train.position, last=result, continues_from=continues_from))
            self._tell_epoch(result)
        elif here.position != self.standing.position:
            self._save_within(here)

    def _close(self, here: RunProgress) -> str | None:
        """Include the last steps in the global parameters, at the end of a run of islands.

        Returns:
            The name of the save from before that; ``None`` if it could not be written.
        """
        if here.position != self.standing.position:  # else the run was resumed from that save
            self._save_within(here)
        self._end_save()
        self.trainer.synchronize()
        return self.saved.name if self.saved is not None and self.unsaved is None else None

    def _save_within(self, here: RunProgress) -> None:
        """Save in the middle of an epoch."""
        self._drain(here.position.epoch)
        self._save(dataclasses.replace(here, loss_sum=self._loss_sum))

    def _until_stopped(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield batches until a signal; a wait for the next one ends at once."""
        iterator = iter(batches)

        def following() -> _T | None:
            with self.trainer.wall.during(FEED):
                return self.stop.wait_for(lambda: next(iterator, None))

        while (batch := following()) is not None:
            yield batch

    def _step(self, uploaded: UploadedBatch, epoch: int) -> None:
        first = self.trainer.plan is None
        with self.progress.pass_over() if first else contextlib.nullcontext():  # capture and planning happen once
            loss = self.trainer.step(uploaded)
        if first and self.trainer.plan is not None:
            for island, plan in enumerate(self.trainer.island_plans):
                self.progress.note(f"island {island}: {plan.describe()}")
            if not self.trainer.island_plans:
                self._note_plan(self.trainer.plan)
        self._tell_plan()
        if uploaded.size == self.full_batch:
            self.full_steps.append(self.trainer.steps_done - 1)
        self._pending.append((self.trainer.steps_done, loss, uploaded.size))
        if len(self._pending) > _BEHIND:
            self._record(epoch)

    def _note_plan(self, plan: Plan) -> None:
        """Print the plan; one that was searched for by default is written into the run's folder."""
        self.progress.note(f"plan: {plan.describe()}")
        if self.config.plan is None and plan.predicted is not None:
            write_output("--plan", self.folder.plan, plan.to_json().encode())
            self.progress.note(f"the same plan again: --plan {self.folder.plan}")
            self.planned = True

    def _record(self, epoch: int) -> None:
        """Read and record the loss of the oldest pending step."""
        step, value, samples = self._pending.popleft()
        loss = value.item()
        self._loss_sum += loss * samples
        self.samples += samples
        norm = {} if value.gradient_norm is None else {"gradient_norm": value.gradient_norm}
        self._write({"event": "step", "step": step, "epoch": epoch + 1, "loss": loss, "samples": samples, **norm})
        self.progress.step(step, loss=loss, samples=samples)
        self._tell_news()

    def _drain(self, epoch: int) -> None:
        while self._pending:
            self._record(epoch)

    def _tell_epoch(self, result: EpochResult) -> None:
        """Record the results of an epoch, and what its time was spent on; its end is saved."""
        account, samples = self.trainer.wall.take(), self.samples - self._counted
        self.account, self._counted = joined([self.account, account]), self.samples
        rate = account.rate(samples)
        result = dataclasses.replace(result, samples_per_s=rate)
        self.standing = dataclasses.replace(self.standing, last=result)
        self._write({"event": "epoch", **msgspec.to_builtins(result)})
        self.progress.note(result_line(result, self.config.epochs))
        about = {"seconds": account.seconds, "samples": samples, "samples_per_s": rate, "shares": account.shares}
        told = {**about, "bound": account.bound, "text": account.text}
        self._write({"event": "account", "step": result.step, "epoch": result.epoch, **told})
        self.progress.note(f"{account.seconds:.1f} s: {account.text}")
        self._tell_feed(result.epoch, account.shares.get(FEED, 0.0))

    def _tell_feed(self, epoch: int, share: float) -> None:
        """Record the counters of the feed in an epoch; print them if training waited for it, or samples are missing.

        Args:
            epoch: The epoch.
            share: The share of time in which training waited for it.
        """
        stages = {each.name: msgspec.to_builtins(each) for each in self.train.counters}
        skipped = [msgspec.to_builtins(one) for one in self.train.skipped.first]
        used, self._links = use_since(self._links, self.trainer.links), self.trainer.links
        links = [msgspec.to_builtins(each) for each in used]
        about = {"stages": stages, "skipped": self.train.skipped.count, "first_skipped": skipped, "links": links}
        text = self.train.report()
        self._write({"event": "feed", "step": self.trainer.steps_done, "epoch": epoch, **about, "text": text})
        if (share >= _FEED_SHARE and text.startswith("bound by")) or self.train.skipped.in_epoch:
            self.progress.note(text)

    def _test(self, epoch: int, skipped: int) -> EpochResult | None:
        """Return the results of an epoch; ``None`` after a signal."""
        with self.test.epoch(0) as batches:
            try:
                found = self.trainer.evaluate(self._or_stopped(batches))
            except _StoppedTest:
                return None
        if self.test.skipped.in_epoch:
            self.progress.note(f"of those to test on: {self.test.skipped}")
        result = EpochResult(
            step=self.trainer.steps_done,
            epoch=epoch,
            train_loss=self._loss_sum / (len(self.data.train) - skipped),
            test_loss=found.loss,
            test_accuracy=None if math.isnan(found.metrics["accuracy"]) else found.metrics["accuracy"],
        )
        self._tell_news()
        return result

    def _or_stopped(self, batches: Iterable[_T]) -> Iterator[_T]:
        yield from self._until_stopped(batches)
        if self.stop.requested:
            raise _StoppedTest

    def _save_now(self) -> bool:
        interval = self.config.save_interval
        return interval is not None and interval.due(self.trainer.steps_done, time.monotonic() - self._saved_s)

    def _save(self, standing: RunProgress) -> None:
        if not self.computes:
            self.standing = standing
            return
        self._end_save()
        self.standing, self._saved_s = standing, time.monotonic()
        try:
            self._saving = (
                self.trainer.steps_done,
                self.trainer.begin_save(self.folder.checkpoint, extra=standing.to_extra()),
            )
        except CheckpointError as error:
            self._note_unsaved(self.trainer.steps_done, error)
        self._tell_news()

    def _end_save(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._saving is None:
            return
        (step, save), self._saving = self._saving, None
        try:
            with self.trainer.wall.during(SAVING):
                self.saved = save.result()
            self.unsaved = None
        except CheckpointError as error:
            self._note_unsaved(step, error)

    def _note_unsaved(self, step: int, error: CheckpointError) -> None:
        self.unsaved = error
        self.progress.note(f"no checkpoint of step {step}: {error}; training goes on until the next one is due")
        self._write({"event": "unsaved", "step": step, "error": str(error)})

    def _tell_news(self) -> None:
        """Record recoveries and decisions since the last call; the trainer has logged them."""
        for story in self.trainer.recoveries[self._stories :]:
            self._write({"event": "recovery", **recovery_data(story)})
            self._stories += 1
        for change in self.trainer.island_changes[self._changes :]:
            self._write({"event": "island", **dataclasses.asdict(change), "text": str(change)})
            self._changes += 1
        for made in self.trainer.decisions[self._made :]:
            self._write({"event": "decision", **decision_data(made)})
            self._made += 1
        self._tell_plan()

    def _tell_plan(self) -> None:
        """Call the listeners if the plan is another one than at the last call."""
        plan = self.trainer.plan
        if plan is not None and plan is not self._plan:
            self._plan = plan
            for tell in self.plan_listeners:
                tell(plan)

    def _write(self, record: Mapping[str, object]) -> None:
        """Write a record with its time; on a full disk it is written when there is room again."""
        record = {**record, "time": round(time.time(), 3)}
        for tell in self.listeners:
            tell(record)
        try:
            self.log.write(record)
        except OSError as error:
            if not self._silent:
                what = f"{self.folder.metrics} cannot be written: {error.strerror}; it is tried again with every step"
                self.progress.note(what)
            self._silent = True
        else:
            self._silent = False


class _StoppedTest(Exception):
    """Ends an evaluation after a signal."""


def recovery_data(story: RecoveryRecord) -> dict[str, object]:
    """Return a recovery as plain data, with its description."""
    return {**dataclasses.asdict(story), "text": str(story)}


def decision_data(made: AppliedDecision) -> dict[str, object]:
    """Return a decision of the run-time scheduler as plain data, with its description."""
    decision, outcome = made.decision, made.outcome
    return {
        "step": made.step,
        "kind": decision.kind,
        "plan": decision.plan.describe(),
        "before_s": decision.before_s,
        "expected_s": decision.after_s,
        "measured_s": outcome and outcome.after_s,
        "kept": outcome and outcome.kept,
        "moved_bytes": made.moved_bytes,
        "seconds": made.seconds,
        "refused": made.refused or None,
        "text": made.line,
    }


def result_line(result: EpochResult, epochs: int) -> str:
    """Describe the results of an epoch."""
    return epoch_line(
        epoch=result.epoch,
        epochs=epochs,
        loss=math.nan if result.train_loss is None else result.train_loss,
        test_loss=math.nan if result.test_loss is None else result.test_loss,
        test_accuracy=result.test_accuracy,
        samples_per_s=result.samples_per_s,
    )
