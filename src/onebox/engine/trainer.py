"""The trainer: trains a user's model with its loss and optimizer on a pool; the user owns the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn

from onebox.engine.adaptive.problem_source import check_adaptive
from onebox.engine.assembly import exact_settings, recipe_of, requested, with_lateness
from onebox.engine.client_state import ClientState
from onebox.engine.config import check_settings, recovery_enabled, steps_in_flight
from onebox.engine.data.prefetch import AHEAD_BYTES, BatchPrefetcher, UploadedBatch, cache_bytes
from onebox.engine.observed import Observed
from onebox.engine.planning.resolve_plan import resolve_plan
from onebox.engine.session import TrainingSession
from onebox.engine.state.checkpoint_files import read
from onebox.engine.state.checkpoint_restore import ResumePoint, planned_options, restore, resume_point
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.results import Evaluation, StepLoss
from onebox.engine.workload.batch import as_pair
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.emulated_costs import SegmentCosts
from onebox.engine.workload.loss_reduction import LossReduction, check_reduction, resumed_reduction
from onebox.engine.workload.parameter_groups import Optimizers, mark_stepped
from onebox.errors import UsageError
from onebox.graph import Loss, Metrics, Precision
from onebox.graph.capture.on_device_transform import OnDevice
from onebox.padding import Buckets, require_buckets
from onebox.plan import Plan, Sync, UpdateAt
from onebox.plan.model.problem import Problem
from onebox.pool import Pool

Shares = Literal["auto", "equal", "measured"] | Sequence[float]


class Trainer(Observed):
    """Trains a model on the devices of a pool according to a plan, with the result that one device would give.

    The loss is computed for each micro-batch; ``loss_reduction`` defines how these make up the batch's loss.

    Args:
        model: A module. Its forward is traced once for each shape of inputs, not run with each step; docs/capture.md
            describes the consequences for code that reads or changes Python's state. A tuple of inputs is spread over
            its arguments, a dict over its keyword arguments.
        loss: Maps (outputs, targets) to a scalar: a mean over samples, unless ``loss_reduction`` differs.
        optimizer: An optimizer of ``torch.optim`` over the model's parameters, or a list of several over disjoint
            parameters, such as Muon for matrices and AdamW for the rest; parameters in none are not trained. The
            workers take over class, groups and options; learning rates and other options are read at each step, so
            schedulers that change them take effect.
        pool: From :func:`onebox.open`.
        plan: A :class:`onebox.Plan`, or the path of a plan file; ``None`` for data parallel over all devices. A plan
            contains ``micro_batch``, ``sync``, ``shares`` and ``update``. If it recomputes, offloads or swaps
            activations of stages, a step takes less memory and more time, with bitwise the same result.
        micro_batch: Samples of a micro-batch. The loss curve depends on it (batch norm and dropout operate on
            micro-batches) but not on the number of devices that share the micro-batches. ``None`` makes each device's
            share one micro-batch.
        seed: Seed of all random operators in the model, together with the step and the micro-batch.
        sync: Place where gradients are averaged: among ``workers``, or at the ``client``.
        update: Place of the optimizer's state and step: the ``device``, or the ``host`` of each, which has more memory:
            for a GPU, gradients travel there and new parameters back, and the step takes longer.
        shard_optimizer: Whether the replicas shard the optimizer's state instead of each holding all of it: one replica
            updates a parameter and sends it to the others. The number of bytes sent and the result are the same.
        shares: Each device's share of the batch: ``auto`` (equal for identical devices, else measured), ``equal``,
            ``measured``, or weights.
        precision: ``bf16`` runs model and loss under autocast; parameters keep their type. With ``auto`` the products
            of each stage use float32 or bf16 according to the plan; without a plan the model is first measured in both,
            on devices with bf16 instructions, and the faster one is used. Stages of a plan with an explicit precision
            keep it with ``fp32``, too.
        clip_grad_norm: Limit of the 2-norm of all gradients; ``None`` for no clipping.
        metrics: For :meth:`evaluate`: each maps (outputs, targets) to a scalar, a mean over samples.
        check_every: Interval, in steps, at which replicas compare a hash of all parameters and buffers; 0 for never.
        in_flight: Most steps in flight; ``None`` for as many as keep the workers busy: two on one machine or a LAN, up
            to eight with long round trips.
        trace: Whether workers time their instructions, for :meth:`events`.
        recover: Whether to recover when a worker dies, hangs or becomes unreachable; ``None`` for yes if agents or a
            Ray cluster run some of the workers, and no if all are processes of this machine. The worker is restarted;
            if that is impossible, its replicas do its part, another device replaces it, or a plan is searched for the
            remaining devices, with the same micro-batches. All receive the newest snapshot, which workers store for
            each other, and later steps are repeated. Each recovery is logged and added to :attr:`recoveries`. With the
            same plan the run ends bitwise equal to one without a loss, with another plan equal up to rounding.
        snapshot_every: Steps between snapshots; ``None`` for as many as keep their cost below 3 % of the time. Setting
            it enables recovery.
        fuse: Whether to fuse activations that the model composes of several operators, such as GELU in Hugging Face's
            GPT-2: fewer passes over memory, and fewer tensors kept for backward. Results differ by rounding.
        on_device: Tensor code that runs before the model, captured with it and run on the workers, in training and
            evaluation: maps the inputs of a micro-batch, as given to :meth:`step`, to those of the model, so that for
            example bytes travel and are converted to floats there. It draws random numbers from the run's own seeds. A
            module is in training mode when the model is. It is not part of checkpoints.
        ahead_bytes: Most bytes of each device for batches that :meth:`upload` sends ahead of their steps; never more
            than steps leave free. 0 for none.
        cache: Most bytes of each device, such as ``"1GiB"``, for cached samples, of which only indices travel when they
            are used again; never more than steps leave free. ``samples=`` of :meth:`step` and :meth:`upload` identifies
            the samples of a batch. The data of a sample must be the same each time it is used: random augmentation
            belongs into ``on_device``.
        adaptive: Whether to adapt the plan to devices and links: when one has clearly become slower or faster than
            planned, actions are reordered, layers move, or shares of replicas change, between two steps, with the same
            micro-batches; a change that made steps slower is reverted. Each change is logged and added to
            :attr:`decisions`. Instead of ``True``, the problem that the plan was made for, from
            :func:`onebox.make_plan`, which has the times of each segment.
        costs: For experiments with emulated ``sim`` devices: for each segment of the model, by name, the seconds of
            forward, input gradient and weight gradient of a sample, at speed 1. ``None`` for the plan's predictions.
        staleness: 0 for exact steps. With 1 each step uses the weights before the last update, so that the next step
            begins while the gradients of this one are in flight: a pipeline is never empty, and averaging overlaps with
            the next step. A plan of several stages then requires the schedule ``async-1f1b``, which in turn requires
            staleness 1.
        delay: Treatment of gradients that are a step late: ``none``, ``predict``, ``lookahead``, ``both``, ``feedback``
            (see docs/staleness.md), or ``auto``, which depends on the optimizer, and logs the choice and its reason.
        warm_up: With ``staleness`` 1, the number of exact steps at the beginning, where weights change fastest;
            ``None`` for 100, which is logged.
        overlap: Whether exact steps overlap, too: a part of the averaging and of the update of a step happens in the
            next one, just before its parameters are read, and large values are sent in chunks where that is predicted
            to pay (docs/topology.md). The result is bitwise the same, except for the last bit of matrix products of
            chunks.
        loss_reduction: Reduction of the micro-batches' losses to the batch's loss. ``None``: the loss is a mean over
            samples, and a batch that violates this is refused before its step. ``"mean"``: the same without a check.
            ``"sum"``: the loss is a sum over samples. ``onebox.Weighted(fn)``: it is a mean over another quantity, such
            as tokens that are not ignored or weighted classes; ``fn`` maps the targets of a slice of a batch to the
            divisor of the slice's loss; see docs/losses.md.
        pad: Pads the batches of steps, uploads and evaluations to a few sizes, each of which is captured once, before
            any other processing; see docs/capture.md.

    Raises:
        UsageError: An argument is invalid.

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
        optimizer: Optimizers,
        *,
        pool: Pool,
        plan: Plan | str | Path | None = None,
        micro_batch: int | None = None,
        seed: int = 0,
        sync: Sync = "workers",
        update: UpdateAt = "device",
        shard_optimizer: bool = False,
        shares: Shares = "auto",
        precision: Precision = "fp32",
        clip_grad_norm: float | None = None,
        metrics: Metrics | None = None,
        check_every: int = 100,
        in_flight: int | None = None,
        trace: bool = True,
        recover: bool | None = None,
        snapshot_every: int | None = None,
        on_device: OnDevice | None = None,
        fuse: bool = False,
        ahead_bytes: int = AHEAD_BYTES,
        cache: int | str | None = None,
        adaptive: bool | Problem = False,
        costs: SegmentCosts | None = None,
        staleness: int = 0,
        delay: str = "auto",
        warm_up: int | None = None,
        overlap: bool = False,
        loss_reduction: LossReduction = None,
        pad: Buckets | None = None,
        _start: ResumePoint | None = None,
    ) -> None:
        in_flight = steps_in_flight(pool.round_trip_s) if in_flight is None else in_flight
        check_settings(seed, precision, clip_grad_norm, check_every, in_flight, ahead_bytes)
        check_reduction(loss_reduction)
        require_buckets(pad)
        self.model, self.loss, self.optimizer, self.pool = model, loss, optimizer, pool
        self.seed, self.fuse, self.clip_grad_norm = seed, fuse, clip_grad_norm
        self.precision: Precision = precision
        self.loss_reduction: LossReduction = loss_reduction
        self.pad = pad
        self.extra: dict[str, Any] = _start.extra if _start else {}
        self._metrics = dict(metrics or {})
        given = Plan.read(plan) if isinstance(plan, str | Path) else plan
        request = requested(pool, given, shares, micro_batch, sync, update, shard=shard_optimizer)
        check_adaptive(adaptive, given, pool, trace=trace)
        settings = exact_settings(seed, check_every, in_flight, clip_grad_norm, trace=trace)
        settings = with_lateness(settings, optimizer, request, staleness, delay, warm_up, overlap=overlap)
        self.staleness, self.delay, self.warm_up, self.overlap = staleness, delay, settings.warm_up, overlap
        remote = RemoteState(model, loss, optimizer, pool, _start.state if _start else None)
        recipe = recipe_of(pool, remote, model, loss, self._metrics, precision, on_device, costs, fuse=fuse)
        recipe = replace(recipe, reduction=loss_reduction)
        run = TrainingSession(
            pool,
            partial(resolve_plan, request, pool, remote),
            Captures(recipe),
            remote,
            settings,
            BatchPrefetcher(pool, ahead_bytes, cache_bytes(cache)),
            recover=recovery_enabled(pool, recover, snapshot_every),
            snapshot_every=snapshot_every,
            adaptive=adaptive,
            step=_start.step if _start else 0,
            saved=_start.path if _start else None,
        )
        planned = request.said(len(pool)) or (_start.plan if _start else None)
        super().__init__(run, remote, ClientState(run, remote, model, loss), planned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(keep=error is None)

    # ---- training

    def upload(self, inputs: Any, targets: Any = None, samples: Any = None) -> UploadedBatch:
        """Begin to send each worker its part of a batch, ahead of its step; callable from any thread.

        Up to two batches are on the workers ahead of the steps in flight, as memory allows; further ones, and those
        uploaded before the first step, follow as soon as possible. The client keeps a copy.

        Args:
            inputs: As for :meth:`step`; copied, so they may be written to afterwards.
            targets: Likewise.
            samples: Integers that identify its samples, one for each; only for ``cache``.

        Returns:
            The argument for :meth:`step` instead of the batch. Uploads must be used in the order in which they were
                made.

        Raises:
            UsageError: The batch is invalid.

        Example:
            >>> import torch, onebox
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with onebox.open("cpu*2") as pool, onebox.Trainer(
            ...     model, torch.nn.functional.mse_loss, optimizer, pool=pool
            ... ) as trainer:
            ...     uploaded = trainer.upload(torch.ones(8, 4), torch.zeros(8, 1))
            ...     loss = trainer.step(uploaded)
            ...     uploaded.size, uploaded.nbytes
            (8, 160)
        """
        self._require_open()
        return self._run.uploads.add(self._batch(inputs, targets, samples).kept())

    def step(self, inputs: Any, targets: Any = None, samples: Any = None) -> StepLoss:
        """Start one training step.

        Args:
            inputs: Tensors or numpy arrays nested in tuples, lists and dicts; the first dimension of each is the
                samples. Also ``None`` and Python numbers: they are constants of the captured graph, the same for all
                samples; each new value needs another capture, and only a few are allowed. Or the result of
                :meth:`upload`, alone.
            targets: Likewise; the loss receives ``None`` if there are none.
            samples: As for :meth:`upload`.

        Returns:
            The loss, which arrives later; reading it waits. At most ``in_flight`` steps are in flight: this call waits
                for the oldest if there are more.

        Raises:
            UsageError: The batch is invalid, or the optimizer trains other parameters than when this trainer was
                created.
            CaptureError: The model cannot be captured.
            OneboxError: This or an earlier step failed.
        """
        self._require_open()
        if isinstance(inputs, UploadedBatch):
            if targets is not None or samples is not None:
                raise UsageError("step() was given an upload and targets; an upload has its targets already")
            batch, uploaded = inputs.parcel.batch, inputs
        else:
            batch, uploaded = self._batch(inputs, targets, samples), None
        self._client.bring()
        result = self._run.step(batch, uploaded)
        self._client.stepped()
        mark_stepped(self._remote.optimizer)
        return result

    # ---- evaluation

    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """Return the loss and metrics over batches, in eval mode, without changing anything.

        Metrics are means over samples. The loss is that of all batches as one: a mean over samples, a sum, or a mean
        over another quantity, according to ``loss_reduction``.

        Args:
            batches: (inputs, targets) of each, as for :meth:`step`; or inputs alone, if the loss needs no targets.

        Raises:
            UsageError: There is no batch.
            DeviceMemoryError: A batch needs more memory than a device has, or may use; nothing of it was sent.
            OneboxError: Something failed on a worker.
        """
        self._require_open()
        self._client.bring()
        self.wait()
        return self._run.evaluate((self._batch(*as_pair(item)) for item in batches), list(self._metrics))

    # ---- state

    def pull(self) -> None:
        """Copy the trained weights and buffers back into the model (and the loss, if it has any).

        User changes of the model after this call, before the next step, are uploaded by that step or any other access
        to the state. The optimizer's state is downloaded when it is read, for example by ``optimizer.state_dict()``.

        Raises:
            OneboxError: A step failed, or a worker is permanently lost; the model may be partly written.
        """
        self._require_open()
        self._client.bring(overwrite=True)
        self.wait()
        self._client.pull()

    def push(self) -> None:
        """Upload the weights and buffers of the local model (and the loss), however old they are.

        The optimizer's state stays unchanged.

        Raises:
            UsageError: A parameter is another object than when this trainer was created, or steps use stale weights.
            OneboxError: A worker failed.

        Example:
            >>> import torch, onebox
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with onebox.open("cpu*2") as pool, onebox.Trainer(
            ...     model, torch.nn.functional.mse_loss, optimizer, pool=pool
            ... ) as trainer:
            ...     loss = trainer.step(torch.ones(8, 4), torch.zeros(8, 1))
            ...     torch.nn.init.zeros_(model.weight) is model.weight
            ...     trainer.push()
            ...     bool(trainer.tensors()["model.weight"].any())
            True
            False
        """
        self._require_open()
        self._client.push()

    @classmethod
    def resume(
        cls,
        path: str | Path,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizers,
        *,
        pool: Pool,
        **options: Any,
    ) -> Self:
        """Create a trainer that continues from a checkpoint.

        With the same plan (equally many devices, nothing overridden) the result is bitwise equal to that of an
        uninterrupted run.

        Args:
            path: A checkpoint folder (its newest save), or the folder of one save.
            model: As created for the first trainer; its weights are overwritten.
            loss: As before.
            optimizer: As before; its options become those of the checkpoint.
            pool: The pool.
            **options: Arguments of :class:`Trainer` that override the checkpoint's.

        Raises:
            CheckpointError: There is none, it is damaged, or it belongs to another model or optimizer.
        """
        checkpoint = read(Path(path))
        manifest = checkpoint.manifest
        restore(checkpoint, model, loss, optimizer)
        settings: dict[str, Any] = {
            "seed": manifest.seed,
            "precision": manifest.precision,
            "fuse": manifest.fuse,
            "clip_grad_norm": manifest.clip_grad_norm,
            "staleness": manifest.staleness,
            "delay": manifest.delay,
            "warm_up": manifest.warm_up,
            "overlap": manifest.overlap,
            "loss_reduction": resumed_reduction(manifest.loss_reduction, options),
            **planned_options(manifest.plan, len(pool), options),
        }
        start = resume_point(checkpoint, Path(path), options)
        return cls(model, loss, optimizer, pool=pool, **{**settings, **options}, _start=start)

    def close(self) -> None:
        """Free everything that the trainer holds on the pool; the pool stays open. Idempotent.

        If there was no step since the last :meth:`pull`, the optimizer's state is downloaded first.
        """
        self._close(keep=True)

    def _close(self, *, keep: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):  # the pool may be broken, or closed before
            self._client.release(keep=keep)
        with contextlib.suppress(Exception):
            self._run.close()
