"""Observation of a trainer: used and predicted memory, workers' activity, and uploads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from onebox.engine.adaptive.controller import AppliedDecision
from onebox.engine.client_state import ClientState
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
    """The read-only part of a trainer: its observable state, and saving it.

    Args:
        run: The run on the pool.
        remote: The remote state.
        client: The local model's state.
        planned: The future plan, as far as it is known before the first step.
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

    def __init__(self, run: TrainingSession, remote: RemoteState, client: ClientState, planned: Plan | None) -> None:
        self._run = run
        self._client = client
        self._remote = remote
        self._planned = planned
        self._closed = False

    def _batch(self, inputs: Any, targets: Any = None, samples: Any = None) -> Batch:
        """Return a batch in the form used for training."""
        if self.pad is not None:
            inputs, targets = self.pad((inputs, targets))
        return as_batch(inputs, targets, samples)

    @property
    def steps_done(self) -> int:
        """Number of steps begun so far, including those before a checkpoint."""
        return self._run.steps_done

    @property
    def plan(self) -> Plan | None:
        """The plan; ``None`` before the first step."""
        return self._run.plan

    @property
    def captures(self) -> Captures:
        """The captured model; before the first step it may be shared with a trainer of the same model."""
        return self._run.captures

    def share_captures(self, captures: Captures) -> None:
        """Use the captures of another trainer of an equal model instead of own ones.

        Raises:
            UsageError: The model has been captured.
        """
        self._run.share_captures(captures)

    @property
    def recoveries(self) -> tuple[RecoveryRecord, ...]:
        """Recoveries from losses so far."""
        return tuple(self._run.recovery.recoveries)

    @property
    def delays(self) -> Mapping[int, int]:
        """Number of updates by their measured delay in steps; exact steps are not measured."""
        return self._run.overlap.measured()

    @property
    def decisions(self) -> tuple[AppliedDecision, ...]:
        """Replanning decisions so far; empty without ``adaptive``."""
        return self._run.adaptive.decisions if self._run.adaptive else ()

    @property
    def snapshots_apart(self) -> int:
        """Present number of steps between snapshots; 0 without ``recover``."""
        return self._run.snapshots.every if self._run.snapshots else 0

    def memory(self) -> list[WorkerMemory]:
        """Return the used bytes, the peak so far, and the quota of each device."""
        self._require_open()
        return self._run.recovery.run(self._remote.memory)

    def predicted_memory(self, inputs: Any, targets: Any = None, *, ahead: int = 0) -> dict[int, int]:
        """Return the peak bytes of each device of the plan in a step with a batch, from lifetimes alone.

        The present contents of ``cache`` are included.

        Args:
            inputs: As for :meth:`Trainer.step`.
            targets: Likewise.
            ahead: Number of similar batches uploaded for later steps.
        """
        self._require_open()
        batch = self._batch(inputs, targets)
        peaks = self._run.set_up(batch).peaks(batch, ahead=ahead)
        return {device: peak + self._run.uploads.cached_bytes(device) for device, peak in peaks.items()}

    def predicted_curves(self, inputs: Any, targets: Any = None) -> dict[int, MemoryTimeline]:
        """Return the memory of each device of the plan over a step with a batch, instruction by instruction.

        For the memory actually used see :meth:`events`.

        Args:
            inputs: As for :meth:`Trainer.step`.
            targets: Likewise.
        """
        self._require_open()
        batch = self._batch(inputs, targets)
        contents = self._run.set_up(batch).contents(batch)
        return {device: memory_timeline(device, found) for device, found in contents.items()}

    def events(self) -> list[TraceEvent]:
        """Return the workers' activity in the last steps, for a timeline; empty without ``trace``."""
        return self._run.traces.events()

    def upload_counters(self) -> UploadCounters:
        """Return the cost of uploading batches so far, in callers' time and in bytes."""
        return self._run.uploads.counters()

    # ---- state

    def wait(self) -> None:
        """Wait for all steps in flight.

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
        return self._run.recovery.run(self._run.transfer.tensors)

    def optimizer_state(self) -> OptimizerEntries:
        """Return the optimizer's state as (parameter, key, value)."""
        self._require_open()
        self._client.bring()
        self.wait()
        return self._run.recovery.run(self._run.transfer.optimizer_state)

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None, keep: int | None = 2) -> Path:
        """Write a checkpoint, atomically; a process killed meanwhile leaves the earlier ones intact.

        Args:
            path: The checkpoint folder; each save is a folder inside it, named for its step.
            extra: Any JSON value, such as the position in the data and a scheduler's state; after :meth:`resume` it is
                in ``trainer.extra``.
            keep: Number of newest saves to keep; ``None`` keeps all.

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

        saved = run.recovery.run(written)
        run.recovery.saved(saved)
        return saved

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this trainer is closed; make another one on the pool")
        if self._run.error is not None:
            raise self._run.error
