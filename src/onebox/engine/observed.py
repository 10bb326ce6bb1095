"""What can be seen of a trainer from outside: memory, used and predicted, what the workers did, and uploads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from onebox.engine.adaptive.controller import AppliedDecision
from onebox.engine.client_state import ClientState, DetachedClientState
from onebox.engine.data.prefetch import UploadCounters
from onebox.engine.memory.timeline import MemoryTimeline, memory_timeline
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.engine.session import TrainingSession
from onebox.engine.state.checkpoint_files import write
from onebox.engine.state.checkpoint_restore import contents
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.results import TraceEvent
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.loss_reduction import LossReduction, reduction_name
from onebox.engine.workload.named_state import OptimizerEntries
from onebox.errors import UsageError
from onebox.graph import Precision
from onebox.padding import Buckets
from onebox.plan import Plan
from onebox.wire.protocol.responses import WorkerMemory


class Observed:
    """The part of a trainer that changes nothing: what can be seen of it, and what of it can be kept.

    Args:
        run: What it has on the pool.
        remote: The state on the workers.
        client: The model in this process.
    """

    seed: int
    precision: Precision
    fuse: bool
    clip_grad_norm: float | None
    staleness: int
    delay: str
    warm_up: int
    overlap: bool
    loss_reduction: LossReduction
    pad: Buckets | None

    def __init__(self, run: TrainingSession, remote: RemoteState, client: ClientState | DetachedClientState) -> None:
        self._run = run
        self._client = client
        self._remote = remote
        self._planned: Plan | None = None
        """The plan that there will be, as far as is known before the first step."""
        self._closed = False

    def _batch(self, inputs: Any, targets: Any = None, samples: Any = None) -> Batch:
        """Return a batch as it is trained with."""
        if self.pad is not None:
            inputs, targets = self.pad((inputs, targets))
        return as_batch(inputs, targets, samples)

    @property
    def steps_done(self) -> int:
        """Steps begun so far, those before a checkpoint included."""
        return self._run.steps_done

    @property
    def plan(self) -> Plan | None:
        """The plan; ``None`` before the first step."""
        return self._run.plan

    @property
    def captures(self) -> Captures:
        """The captured model; before the first step that of a trainer of the same model may take its place."""
        return self._run.captures

    @captures.setter
    def captures(self, captures: Captures) -> None:
        self._run.captures = captures

    @property
    def recoveries(self) -> tuple[RecoveryRecord, ...]:
        """What was lost so far, and how the run went on."""
        return tuple(self._run.guard.recoveries) if self._run.guard else ()

    @property
    def delays(self) -> Mapping[int, int]:
        """How many updates were how many steps late, as the workers measured it; exact steps are not measured."""
        return self._run.overlap.measured()

    @property
    def decisions(self) -> tuple[AppliedDecision, ...]:
        """What was decided on so far because devices or links were not as planned; nothing without ``adaptive``."""
        return self._run.adaptive.decisions if self._run.adaptive else ()

    @property
    def snapshots_apart(self) -> int:
        """Steps from one snapshot to the next, as it is now; 0 without ``recover``."""
        return self._run.guard.cadence.every if self._run.guard else 0

    def memory(self) -> list[WorkerMemory]:
        """Return for each device the bytes used, the peak so far, and the quota."""
        self._require_open()
        return self._run.with_recovery(self._remote.memory)

    def predicted_memory(self, inputs: Any, targets: Any = None, *, ahead: int = 0) -> dict[int, int]:
        """Return the most bytes that each device of the plan will use in a step with a batch, from lifetimes alone.

        What of ``cache`` is there counts, too.

        Args:
            inputs: As for :meth:`Trainer.step`.
            targets: Likewise.
            ahead: Batches like it that have been uploaded for later steps.
        """
        self._require_open()
        batch = self._batch(inputs, targets)
        peaks = self._run.set_up(batch).peaks(batch, ahead=ahead)
        return {device: peak + self._run.uploads.cached_bytes(device) for device, peak in peaks.items()}

    def predicted_curves(self, inputs: Any, targets: Any = None) -> dict[int, MemoryTimeline]:
        """Return how much memory each device of the plan will use over a step with a batch, instruction by instruction.

        What it used in fact is in :meth:`events`.

        Args:
            inputs: As for :meth:`Trainer.step`.
            targets: Likewise.
        """
        self._require_open()
        batch = self._batch(inputs, targets)
        contents = self._run.set_up(batch).contents(batch)
        return {device: memory_timeline(device, found) for device, found in contents.items()}

    def events(self) -> list[TraceEvent]:
        """Return what the workers did in the last steps, for a timeline; empty without ``trace``."""
        return [event for trace in self._run.traces for event in trace.events()]

    def upload_counters(self) -> UploadCounters:
        """Return what bringing batches to the workers took so far, in time of the steps' callers and in bytes."""
        return self._run.uploads.counters()

    # ---- state

    def wait(self) -> None:
        """Wait for all steps under way.

        Raises:
            OneboxError: One of them failed.
        """
        self._run.drain()
        self._run.wait(0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained parameters and buffers, by name; names begin with ``model.`` or ``loss.``."""
        self._require_open()
        self._client.bring()
        self.wait()
        return self._run.with_recovery(self._run.transfer.tensors)

    def optimizer_state(self) -> OptimizerEntries:
        """Return what the optimizer remembers, as (parameter, key, value)."""
        self._require_open()
        self._client.bring()
        self.wait()
        return self._run.with_recovery(self._run.transfer.optimizer_state)

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None, keep: int | None = 2) -> Path:
        """Write a checkpoint, atomically; a process that is killed meanwhile leaves the earlier ones whole.

        Args:
            path: The checkpoint folder; each save is a folder inside it, named for its step.
            extra: Anything that JSON can hold, such as the position in the data and a scheduler's state; after
                :meth:`resume` it is in ``trainer.extra``.
            keep: How many saves to keep, the newest; all when ``None``.

        Returns:
            The folder of this save.

        Raises:
            CheckpointError: It could not be written.
            OneboxError: A step failed.
        """
        self._require_open()
        self._client.bring()
        self.wait()
        settings = {
            "step": self.steps_done,
            "seed": self.seed,
            "precision": self.precision,
            "fuse": self.fuse,
            "clip_grad_norm": self.clip_grad_norm,
            "staleness": self.staleness,
            "delay": self.delay,
            "warm_up": self.warm_up,
            "overlap": self.overlap,
            "loss_reduction": reduction_name(self.loss_reduction),
            "extra": dict(extra or {}),
        }
        run, remote = self._run, self._remote

        def written() -> Path:
            plan = self.plan or self._planned
            return write(Path(path), contents(remote, run.transfer, plan=plan, **settings), keep=keep)

        run.saved = run.with_recovery(written)
        return run.saved

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this trainer is closed; make another one on the pool")
        if self._run.error is not None:
            raise self._run.error
