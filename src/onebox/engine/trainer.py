"""The trainer: a user's model, loss and optimizer, trained on a pool; the user owns the loop."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from onebox.engine.batch import Batch, as_batch
from onebox.engine.checkpoint import read, write
from onebox.engine.compiler import Captures, Compiled, Recipe
from onebox.engine.evaluate import evaluate, step_message
from onebox.engine.remote import RemoteState
from onebox.engine.restore import planned_options, remembered, restore, take
from onebox.engine.results import Evaluation, Event, StepLoss, StepTrace, StepValues, step_values
from onebox.engine.setup import Ready, Request, check_settings, set_up
from onebox.engine.state import OptimizerEntries
from onebox.errors import OneboxError, ReplicasParted, UsageError
from onebox.graph import Loss, Metrics, Precision
from onebox.plan import Plan, Sync
from onebox.pool import Answer, Pool
from onebox.wire.messages import Instruction, Run
from onebox.wire.sayings import Memory

Shares = Literal["auto", "equal", "measured"] | Sequence[float]

_TRACED_STEPS = 200


class Trainer:
    """Trains a model on the devices of a pool as a plan says, with the result that one device would give.

    The loss must be a mean over the samples of its micro-batch; micro-batches are weighted by their samples.

    Args:
        model: Any module that ``torch.export`` can capture. A tuple of inputs is spread over its arguments, a dict
            over its keyword arguments.
        loss: Maps (outputs, targets) to a scalar, a mean over samples.
        optimizer: An optimizer of ``torch.optim`` over the model's parameters. Its class, groups and options are
            taken over by the workers; learning rates and other options are read anew with each step, so a scheduler
            that changes them takes effect.
        pool: From :func:`onebox.open`.
        plan: A :class:`onebox.Plan`, or the path of a plan file; ``None`` for data parallel over all devices. A plan
            says itself what ``micro_batch``, ``sync`` and ``shares`` are.
        micro_batch: Samples of a micro-batch. The loss curve depends on it (batch norm and dropout see micro-batches)
            but not on how many devices share the micro-batches. ``None`` makes each device's share one micro-batch.
        seed: Seed of everything random in the model, with the step and the micro-batch.
        sync: Where gradients are averaged: worker to ``workers``, or at the ``client``.
        shares: Each device's part of the batch: ``auto`` (equal for devices that are alike, else measured),
            ``equal``, ``measured``, or weights.
        precision: ``bf16`` runs model and loss under autocast; parameters stay as they are.
        clip_grad_norm: The most that the 2-norm of all gradients may be; ``None`` for no clipping.
        metrics: For :meth:`evaluate`: each maps (outputs, targets) to a scalar, a mean over samples.
        check_every: Every so many steps replicas compare a hash of all parameters and buffers; 0 for never.
        in_flight: Steps that may be under way at once.
        trace: Whether workers time their instructions, for :meth:`events`.

    Raises:
        UsageError: An argument is wrong.

    Example:
        >>> import torch, onebox
        >>> model = torch.nn.Linear(4, 1)
        >>> with onebox.open("cpu*2") as pool:
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     with onebox.Trainer(model, torch.nn.functional.mse_loss, optimizer, pool=pool) as trainer:
        ...         loss = trainer.step(torch.ones(8, 4), torch.zeros(8, 1))
        ...         assert loss.item() >= 0
        ...         trainer.pull()
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        *,
        pool: Pool,
        plan: Plan | str | Path | None = None,
        micro_batch: int | None = None,
        seed: int = 0,
        sync: Sync = "workers",
        shares: Shares = "auto",
        precision: Precision = "fp32",
        clip_grad_norm: float | None = None,
        metrics: Metrics | None = None,
        check_every: int = 100,
        in_flight: int = 2,
        trace: bool = True,
    ) -> None:
        check_settings(seed, precision, clip_grad_norm, check_every, in_flight)
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.pool = pool
        self.seed = seed
        self.steps_done = 0
        self.precision: Precision = precision
        self.clip_grad_norm = clip_grad_norm
        self.plan: Plan | None = None
        self.extra: dict[str, Any] = {}
        self._check_every = check_every
        self._in_flight = in_flight
        self._trace = trace
        given = Plan.read(plan) if isinstance(plan, str | Path) else plan
        self._request = Request(plan=given, shares=shares, micro_batch=micro_batch, sync=sync)
        self._request.check(pool)
        self._metrics = dict(metrics or {})
        self._ready: Ready | None = None
        self._running: deque[StepLoss] = deque()
        self._traces: deque[StepTrace] = deque(maxlen=_TRACED_STEPS)
        self._error: Exception | None = None
        self._closed = False
        self._remote = RemoteState(model, loss, optimizer, pool)
        kinds = {device.kind for device in pool.devices}
        recipe = Recipe(
            model=model,
            loss=loss,
            metrics=self._metrics,
            precision=precision,
            device_type="cuda" if "cuda" in kinds else "cpu",
            trained=frozenset(self._remote.wanted),
        )
        self.captures = Captures(recipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- training

    def step(self, inputs: Any, targets: Any) -> StepLoss:
        """Start one training step.

        Args:
            inputs: Tensors nested in tuples and dicts; the first dimension of each is the samples.
            targets: Likewise.

        Returns:
            The loss, which arrives later; asking for it waits. At most ``in_flight`` steps are under way: when there
            are more, this call waits for the oldest.

        Raises:
            UsageError: The batch is not one.
            CaptureError: The model cannot be captured.
            OneboxError: This or an earlier step failed.
        """
        self._require_open()
        batch = as_batch(inputs, targets)
        ready = self._set_up(batch)
        compiled = ready.compiler.step(batch)
        self._wait(self._in_flight - 1)
        changed = self._remote.changed_options()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether it has stepped
        number = self.steps_done
        check = bool(self._check_every) and (number + 1) % self._check_every == 0

        def run(routine: int, bindings: tuple[int, ...]) -> Run:
            return Run(routine, bindings, number, self.seed, changed, self._trace)

        messages = {}
        for worker in compiled.routines:
            instructions, frames = step_message(self.pool, batch, compiled, worker, run)
            asks = [ask for _, ask in ready.checks.get(worker, ())] if check else []
            messages[worker] = ([*instructions, *asks], frames)
        futures = self._post(number, messages)
        result = StepLoss(number, futures, lambda answers: self._finish(number, compiled, answers), self._fail)
        self._running.append(result)
        self.steps_done += 1
        return result

    def _post(self, step: int, messages: Mapping[int, tuple[Sequence[Instruction], Any]]) -> list[Future[Answer]]:
        """Send each device its part of a step; when only some have got theirs, the step is void."""
        try:
            return [
                self.pool.post(worker, instructions, frames, answer=True)
                for worker, (instructions, frames) in messages.items()
            ]
        except OneboxError as error:
            self._fail(error)
            raise
        except BaseException:  # such as KeyboardInterrupt
            self._fail(
                ReplicasParted(
                    f"step {step} was interrupted when some devices had it and others not; make another trainer, or "
                    "resume from the last checkpoint"
                )
            )
            raise

    def _finish(self, step: int, compiled: Compiled, answers: list[Answer]) -> StepValues:
        """Put together what the workers answered."""
        checks = self._ready.checks if self._ready else {}
        values = step_values(step, compiled.micro_batches, compiled.routines, answers, checks)
        if self._trace:
            traced = {
                worker: (routine.labels, answer.times_ns)
                for (worker, routine), answer in zip(compiled.routines.items(), answers, strict=True)
            }
            self._traces.append(StepTrace(step=step, workers=traced))
        return values

    def _fail(self, error: Exception) -> None:
        """Remember the first failure: the state on the workers is void, and every later call says why."""
        self._error = self._error or error

    def wait(self) -> None:
        """Wait for all steps under way.

        Raises:
            OneboxError: One of them failed.
        """
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Wait until so many steps at most are under way."""
        while len(self._running) > most:
            self._running[0].values()
            self._running.popleft()

    # ---- evaluation

    def evaluate(self, batches: Iterable[tuple[Any, Any]]) -> Evaluation:
        """Return the mean loss and metrics over batches, in eval mode, without changing anything.

        Args:
            batches: (inputs, targets) of each.

        Raises:
            UsageError: There is no batch.
            OneboxError: Something failed on a worker.
        """
        self._require_open()
        self.wait()
        return evaluate(
            batches,
            pool=self.pool,
            prepare=lambda batch: self._set_up(batch).compiler.evaluation(batch),
            metrics=list(self._metrics),
            in_flight=self._in_flight,
        )

    # ---- state

    def pull(self) -> None:
        """Copy the trained weights and buffers back into the model (and the loss, if it has any).

        Raises:
            OneboxError: A step failed.
        """
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                self._remote.named.tensors[name].copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained parameters and buffers, by name; names begin with ``model.`` or ``loss.``."""
        self._require_open()
        self.wait()
        return self._remote.tensors()

    def optimizer_state(self) -> OptimizerEntries:
        """Return what the optimizer remembers, as (parameter, key, value)."""
        self._require_open()
        self.wait()
        return self._remote.optimizer_state()

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
        self.wait()
        checkpoint = take(
            self._remote,
            step=self.steps_done,
            seed=self.seed,
            precision=self.precision,
            clip_grad_norm=self.clip_grad_norm,
            plan=self.plan,
            extra=dict(extra or {}),
        )
        return write(Path(path), checkpoint, keep=keep)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        *,
        pool: Pool,
        **options: Any,
    ) -> Self:
        """Make a trainer that goes on from a checkpoint.

        With the same plan (as many devices, nothing overridden) the run ends with the same bits as one that was not
        interrupted.

        Args:
            path: A checkpoint folder (its newest save), or the folder of one save.
            model: As it was made for the first trainer; its weights are overwritten.
            loss: As before.
            optimizer: As before; its options become those of the checkpoint.
            pool: The pool.
            **options: Arguments of :class:`Trainer` that are to differ from the checkpoint's.

        Raises:
            CheckpointError: There is none, it is damaged, or it belongs to another model or optimizer.
        """
        checkpoint = read(Path(path))
        manifest = checkpoint.manifest
        restore(checkpoint, model, loss, optimizer)
        settings: dict[str, Any] = {
            "seed": manifest.seed,
            "precision": manifest.precision,
            "clip_grad_norm": manifest.clip_grad_norm,
            **planned_options(manifest.plan, len(pool), options),
        }
        trainer = cls(model, loss, optimizer, pool=pool, **{**settings, **options})
        trainer.steps_done = manifest.step
        trainer.extra = manifest.extra
        trainer._remote.remembered = remembered(checkpoint)
        return trainer

    def memory(self) -> list[Memory]:
        """Return for each device the bytes used, the peak so far, and the quota."""
        self._require_open()
        return self._remote.memory()

    def predicted_memory(self, inputs: Any, targets: Any) -> dict[int, int]:
        """Return the most bytes that each device of the plan will use in a step with a batch, from lifetimes alone.

        Args:
            inputs: As for :meth:`step`.
            targets: Likewise.
        """
        self._require_open()
        batch = as_batch(inputs, targets)
        return self._set_up(batch).peaks(batch)

    def events(self) -> list[Event]:
        """Return what the workers did in the last steps, for a timeline; empty without ``trace``."""
        return [event for trace in self._traces for event in trace.events()]

    def close(self) -> None:
        """Free everything that the trainer holds on the pool; the pool stays. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):  # the pool may be broken, or closed before
            if self._ready is not None:
                self._ready.close()
            self._remote.free()

    # ---- setting up

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this trainer is closed; make another one on the pool")
        if self._error is not None:
            raise self._error

    def _set_up(self, batch: Batch) -> Ready:
        """Plan and compile, with the first batch."""
        if self._ready is None:
            clip = self.clip_grad_norm or 0.0
            self._ready = set_up(self._request, self.pool, self.captures, self._remote, batch, clip)
            self.plan = self._ready.plan
        return self._ready
