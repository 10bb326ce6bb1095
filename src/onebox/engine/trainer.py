"""The trainer: a user's model, loss and optimizer, trained on a pool; the user owns the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn

from onebox.engine.adaptive.problem_source import check_adaptive
from onebox.engine.assembly import exact_settings, follow, recipe_of, requested, with_lateness
from onebox.engine.client_state import ClientState, DetachedClientState
from onebox.engine.config import check_settings, recovery_enabled, steps_in_flight
from onebox.engine.data.prefetch import AHEAD_BYTES, BatchPrefetcher, UploadedBatch, cache_bytes
from onebox.engine.observed import Observed
from onebox.engine.session import TrainingSession
from onebox.engine.state.checkpoint_files import read
from onebox.engine.state.checkpoint_restore import planned_options, remembered, restore, said_of_plan, versions
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.evaluation import evaluate
from onebox.engine.steps.results import Evaluation, StepLoss
from onebox.engine.workload.batch import as_pair
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.emulated_costs import SegmentCosts
from onebox.engine.workload.loss_reduction import LossReduction, check_reduction, resumed_reduction
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import UsageError
from onebox.graph import Loss, Metrics, Precision
from onebox.graph.capture.on_device_transform import OnDevice
from onebox.padding import Buckets, require_buckets
from onebox.plan import Plan, Sync, UpdateAt
from onebox.plan.model.problem import Problem
from onebox.pool import Pool

Shares = Literal["auto", "equal", "measured"] | Sequence[float]


class Trainer(Observed):
    """Trains a model on the devices of a pool as a plan says, with the result that one device would give.

    The loss is computed for each micro-batch; ``loss_reduction`` says how that of the batch is made of these.

    Args:
        model: A module. Its forward runs under a tracer, once for each shape of inputs, and not with each step; what
            that means for code that reads or changes Python's state is in docs/capture.md. A tuple of inputs is spread
            over its arguments, a dict over its keyword arguments.
        loss: Maps (outputs, targets) to a scalar: a mean over samples, unless ``loss_reduction`` says otherwise.
        optimizer: An optimizer of ``torch.optim`` over the model's parameters, or several in a list, each over its own,
            such as Muon for matrices and AdamW for the rest; a parameter that is in none is not trained. Class, groups
            and options are taken over by the workers; learning rates and other options are read anew with each step, so
            schedulers that change them take effect.
        pool: From :func:`onebox.open`.
        plan: A :class:`onebox.Plan`, or the path of a plan file; ``None`` for data parallel over all devices. A plan
            says itself what ``micro_batch``, ``sync``, ``shares`` and ``update`` are. Where it has stages recomputed or
            offloaded or swapped, a step takes less memory and more time, and ends with the same bits.
        micro_batch: Samples of a micro-batch. The loss curve depends on it (batch norm and dropout see micro-batches)
            but not on how many devices share the micro-batches. ``None`` makes each device's share one micro-batch.
        seed: Seed of everything random in the model, with the step and the micro-batch.
        sync: Where gradients are averaged: worker to ``workers``, or at the ``client``.
        update: Where the optimizer's state is, and its step is computed: on the ``device``, or on the ``host`` of each,
            whose memory is larger: on a GPU gradients go there and new parameters come back, and the step lasts longer.
        shard_optimizer: Whether the replicas share out what the optimizer remembers, instead of each having all of it:
            one of them steps a parameter, and hands it to the others. As many bytes travel, and the result is the same.
        shares: Each device's part of the batch: ``auto`` (equal for devices that are alike, else measured),
            ``equal``, ``measured``, or weights.
        precision: ``bf16`` runs model and loss under autocast; parameters stay as they are. With ``auto`` the products
            of each stage are of float32 or bf16 as the plan says; without a plan the model is measured both ways first,
            on devices that have instructions for bf16, and the faster way is taken. Stages of a plan with a precision
            of their own have it with ``fp32``, too.
        clip_grad_norm: The most that the 2-norm of all gradients may be; ``None`` for no clipping.
        metrics: For :meth:`evaluate`: each maps (outputs, targets) to a scalar, a mean over samples.
        check_every: Every so many steps replicas compare a hash of all parameters and buffers; 0 for never.
        in_flight: Steps that may be under way at once; ``None`` for as many as keep the workers busy however far they
            are: two on one machine or a LAN, up to eight where a round trip takes long.
        trace: Whether workers time their instructions, for :meth:`events`.
        recover: Whether to go on when a worker dies, hangs or cannot be reached any more; ``None`` for yes where agents
            or a Ray cluster run some of the workers, and no where all are processes of this machine. The worker is
            started again; where that cannot be, its replicas do its part, another device takes its place, or a plan is
            sought for the devices that are left, with the same micro-batches. All get the newest snapshot, which
            workers keep for each other, and the steps since are done again. Each time a line is logged and
            :attr:`recoveries` has one more. With the same plan the run ends with the bits of one in which nothing was
            lost, with another one it agrees with that to rounding.
        snapshot_every: Steps from one snapshot to the next; ``None`` for as many as keep their cost below 3 % of the
            time. Who says it wants recovery.
        fuse: Whether activations that the model writes out, as Hugging Face's GPT-2 does GELU, become single operators:
            fewer passes over memory, and fewer tensors kept for backward. Results differ by rounding.
        on_device: Tensor code in front of the model, captured with it and run on the workers, in training and
            evaluation: maps the inputs of a micro-batch, as they were given to :meth:`step`, to those of the model, so
            that for example bytes travel and floats are made of them there. What it draws at random is drawn by the
            run's own seeds. A module is in training mode when the model is. It is in no checkpoint.
        ahead_bytes: The most bytes of each device that batches may take which :meth:`upload` has brought there ahead of
            their steps; never more than steps leave free. 0 for none.
        cache: The most bytes of each device, such as ``"1GiB"``, that samples may take there which stay, so that only
            their places travel when they are used again; never more than steps leave free. Which samples a batch has
            is said by ``samples=`` of :meth:`step` and :meth:`upload`. What is made of a sample must be the same each
            time it is used: random changes belong into ``on_device``.
        adaptive: Whether the plan follows what devices and links do: when a device or link has plainly become slower or
            faster than planned, actions change their order, layers change places, or replicas change shares, between
            two steps, with the same micro-batches; what made steps slower is taken back. Each time a line is logged and
            :attr:`decisions` has one more. Instead of ``True`` the problem that the plan was made for, of
            :func:`onebox.make_plan`, which knows the times of each segment.
        costs: For experiments with ``sim`` devices, which compute nothing: for each segment of the model, by its name,
            the seconds of forward, input gradient and weight gradient of a sample, at speed 1. ``None`` for what the
            plan predicts.
        staleness: 0 for exact steps. With 1 each step is computed with the weights from before the last update, so that
            the next step begins while the gradients of this one are still on their way: a pipeline is never empty, and
            averaging hides under the next step. A plan of several stages needs the schedule ``async-1f1b`` for that,
            and that needs staleness 1.
        delay: What is done about gradients that are a step late: ``none``, ``predict``, ``lookahead``, ``both``,
            ``feedback`` (see docs/staleness.md), or ``auto``, which goes by the optimizer, and logs which and why.
        warm_up: With ``staleness`` 1, so many steps are exact at the beginning, where weights move fastest; ``None``
            for 100, which is said in the log.
        overlap: Whether exact steps overlap, too: a part of the averaging and of the update of a step comes in the next
            one, just before its parameters are read, and large values leave a stage in parts where that is predicted to
            pay (docs/topology.md). The result has the same bits, but for the last one of matrix products of these.
        loss_reduction: How the losses of micro-batches make up that of the batch. ``None``: the loss is a mean over
            samples, and a batch for which it is not is refused before its step. ``"mean"``: so it is, and nothing is
            checked. ``"sum"``: the loss is a sum over samples. ``onebox.Weighted(fn)``: it is a mean over something
            else, such as tokens that are not ignored or classes that have weights; ``fn`` maps the targets of a slice
            of a batch to what the loss of the slice divides by; see docs/losses.md.
        pad: Pads the batches of steps, uploads and evaluations to a few sizes, each of which is captured once, before
            anything else is done with them; see docs/capture.md.

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
        self.extra: dict[str, Any] = {}
        self._metrics = dict(metrics or {})
        given = Plan.read(plan) if isinstance(plan, str | Path) else plan
        request = requested(pool, given, shares, micro_batch, sync, update, shard=shard_optimizer)
        check_adaptive(adaptive, given, pool, trace=trace)
        settings = exact_settings(seed, check_every, in_flight, clip_grad_norm, trace=trace)
        settings = with_lateness(settings, optimizer, request, staleness, delay, warm_up, overlap=overlap)
        self.staleness, self.delay, self.warm_up, self.overlap = staleness, delay, settings.warm_up, overlap
        self._in_flight = in_flight
        remote = RemoteState(model, loss, optimizer, pool)
        recipe = recipe_of(pool, remote, model, loss, self._metrics, precision, on_device, costs, fuse=fuse)
        recipe = replace(recipe, reduction=loss_reduction)
        parts = (
            pool,
            request,
            Captures(recipe),
            remote,
            settings,
            BatchPrefetcher(pool, ahead_bytes, cache_bytes(cache)),
        )
        run = TrainingSession(
            *parts, recover=recovery_enabled(pool, recover, snapshot_every), snapshot_every=snapshot_every
        )
        follow(run, adaptive, pool, optimizer)
        super().__init__(run, remote, self._client_of(run, remote))
        self._planned = request.said(len(pool))

    def _client_of(self, run: TrainingSession, remote: RemoteState) -> ClientState | DetachedClientState:
        """Return what keeps the model and the optimizers in this process in step with the workers."""
        return ClientState(run, remote, self.model, self.loss)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(keep=error is None)

    # ---- training

    def upload(self, inputs: Any, targets: Any = None, samples: Any = None) -> UploadedBatch:
        """Begin to bring each worker its part of a batch, ahead of its step; any thread may call this.

        Up to two batches lie at the workers ahead of the steps under way, as far as there is room; what is uploaded
        beyond them, or before the first step, follows as soon as there is. The client keeps a copy.

        Args:
            inputs: As for :meth:`step`; copied, so they may be written to afterwards.
            targets: Likewise.
            samples: Whole numbers that tell its samples from all others, one for each; only for ``cache``.

        Returns:
            What :meth:`step` takes instead of the batch. Uploads are to be stepped in the order of their making.

        Raises:
            UsageError: The batch is not one.

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
                samples. Beside them, ``None`` and Python numbers: they are constants of the captured graph, the same
                for all samples, so each other value is captured anew, and a few are allowed. Or what
                :meth:`upload` returned, alone.
            targets: Likewise; the loss gets ``None`` where there are none.
            samples: As for :meth:`upload`.

        Returns:
            The loss, which arrives later; asking for it waits. At most ``in_flight`` steps are under way: when there
            are more, this call waits for the oldest.

        Raises:
            UsageError: The batch is not one, or the optimizer trains other parameters than when this trainer was made.
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
        for each in self._remote.optimizer:  # schedulers ask whether they have stepped
            each._opt_called = True  # type: ignore[attr-defined]
        return result

    # ---- evaluation

    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """Return the loss and metrics over batches, in eval mode, without changing anything.

        Metrics are means over samples. The loss is that of all batches as one: a mean over samples, a sum, or a mean
        over something else, as ``loss_reduction`` says.

        Args:
            batches: (inputs, targets) of each, as for :meth:`step`; or inputs alone, where the loss needs no targets.

        Raises:
            UsageError: There is no batch.
            DeviceMemoryError: A batch would need more than a device has, or may take; nothing of it was sent.
            OneboxError: Something failed on a worker.
        """
        self._require_open()
        self._client.bring()
        self.wait()
        with self._run.uploads.out_of_the_way():
            return evaluate(
                (self._batch(*as_pair(item)) for item in batches),
                pool=self.pool,
                prepare=self._run.evaluation,
                metrics=list(self._metrics),
                parts=self._run.uploads.parts_beside,
                in_flight=self._in_flight,
                failed=self._run.recover,
                parted=self._run.fail,
            )

    # ---- state

    def pull(self) -> None:
        """Copy the trained weights and buffers back into the model (and the loss, if it has any).

        What is changed there by hand from then on, until the next step, is brought to the workers by that, and by
        whatever else looks at the state. What the optimizer remembers is brought when it is read, as
        ``optimizer.state_dict()`` does.

        Raises:
            OneboxError: A step failed, or a worker is lost for good; the model may have been written in part.
        """
        self._require_open()
        self._client.bring(overwrite=True)
        self.wait()
        self._client.pull()

    def push(self) -> None:
        """Let the workers go on with the weights and buffers of the model (and the loss) as they are here, however old.

        What the optimizer remembers stays as it is.

        Raises:
            UsageError: A parameter is another object now than when this trainer was made, or steps are late.
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
            "fuse": manifest.fuse,
            "clip_grad_norm": manifest.clip_grad_norm,
            "staleness": manifest.staleness,
            "delay": manifest.delay,
            "warm_up": manifest.warm_up,
            "overlap": manifest.overlap,
            "loss_reduction": resumed_reduction(manifest.loss_reduction, options),
            **planned_options(manifest.plan, len(pool), options),
        }
        trainer = cls(model, loss, optimizer, pool=pool, **{**settings, **options})
        trainer._run.steps_done, trainer._run.saved = manifest.step, Path(path)
        trainer._planned = trainer._planned or (None if said_of_plan(options) else manifest.plan)
        trainer.extra = manifest.extra
        trainer._remote.remembered, trainer._remote.first_versions = remembered(checkpoint), versions(checkpoint)
        return trainer

    def close(self) -> None:
        """Free everything that the trainer holds on the pool; the pool stays. Idempotent.

        Where no step has been made since the last :meth:`pull`, what the optimizer remembers is brought first.
        """
        self._close(keep=True)

    def _close(self, *, keep: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):  # the pool may be broken, or closed before
            self._client.close(keep=keep)
        with contextlib.suppress(Exception):
            self._run.close()
