"""The trainer: trains a user's model with its loss and optimizer on a pool; the user owns the loop."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn

from onebox.drawing import notebook
from onebox.engine.adaptive.controller import AppliedDecision
from onebox.engine.adaptive.problem_source import check_adaptive
from onebox.engine.client_state import ClientState
from onebox.engine.config import (
    check_islands,
    check_numerics,
    check_objects,
    chosen_recovery,
    island_recovery,
    island_steps_in_flight,
    numeric_instructions,
    resolved_numerics,
    steps_in_flight,
)
from onebox.engine.data.prefetch import BatchPrefetcher, UploadCounters, UploadedBatch
from onebox.engine.entry import entered, entry, users
from onebox.engine.islands.division import Islands, chosen_islands, given_islands
from onebox.engine.islands.islands_session import IslandsSession, TrainerSession
from onebox.engine.islands.islands_state import islands_start
from onebox.engine.islands.membership import IslandChange
from onebox.engine.memory.timeline import MemoryTimeline, memory_timeline
from onebox.engine.planning.island_plans import IslandsRequest
from onebox.engine.planning.make_plan import PlanningResult, known_pool_links
from onebox.engine.planning.resolve_plan import ALLOWED_PLANS, PlanRequest, default_plan
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.engine.session import TrainingSession
from onebox.engine.state.background_save import BackgroundSave
from onebox.engine.state.checkpoint_files import CheckpointContents, IslandsEntry, find_save, read, write
from onebox.engine.state.checkpoint_restore import (
    ResumePoint,
    Stored,
    contents,
    plan_elsewhere,
    restore,
    resume_point,
    resumed_plan,
    resumed_reduction,
    write_model,
)
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.weight_files import first_values
from onebox.engine.steps.account import EVALUATING, SAVING
from onebox.engine.steps.launch import StepSettings
from onebox.engine.steps.link_use import LinkEvent, LinkUse
from onebox.engine.steps.observer import StepObserver
from onebox.engine.steps.overlap_scheduler import with_staleness
from onebox.engine.steps.results import Evaluation, StepLoss, TraceEvent
from onebox.engine.steps.step_chart import measured_chart
from onebox.engine.steps.wall_time import WallTime
from onebox.engine.workload.batch import Batch, as_batch, as_pair
from onebox.engine.workload.captures import Captures, CaptureSpec, target_type
from onebox.engine.workload.loss_reduction import LossReduction, check_reduction, reduction_name
from onebox.engine.workload.named_state import OptimizerEntries, named_state
from onebox.engine.workload.parameter_groups import Optimizers, mark_stepped
from onebox.errors import DeviceMemoryError, PoolError, UsageError
from onebox.graph import Loss, Metrics, Precision
from onebox.graph.capture.on_device_transform import OnDevice
from onebox.graph.capture.transparent_contexts import refuse_saved_tensors_hooks
from onebox.padding import Buckets, require_buckets
from onebox.plan import Links, Plan
from onebox.plan.evaluate.islands import IslandsPrediction
from onebox.plan.model.problem import Problem
from onebox.plan.replan.profile_correction import ProfileCorrection
from onebox.plan_names import LossyPart
from onebox.pool import Pool
from onebox.sizes import parse_size
from onebox.trainer_options import (
    DataParallel,
    Engine,
    Outer,
    Recovery,
    Staging,
    StaleGradients,
    Weights,
    checked_lossy,
)
from onebox.wire.protocol.responses import WorkerMemory

_LOG = logging.getLogger("onebox")

PlanArgument = Plan | PlanningResult | str | Path | DataParallel | Literal["auto"]
"""A plan as users give it: itself, what was planned, the path of its file, data parallel training, or ``auto``."""


class Trainer:
    """Trains a model on the devices of a pool according to a plan, with the result that one device would give.

    The loss is computed for each micro-batch; ``loss_reduction`` defines how these make up the batch's loss.

    Args:
        model: A module. Its forward is traced once for each shape of inputs, not run with each step;
            docs/concepts/capture.md describes the consequences for code that reads or changes Python's state. A tuple
            of inputs is spread over its arguments, a dict over its keyword arguments.
        loss: Maps (outputs, targets) to a scalar: a mean over samples, unless ``loss_reduction`` differs.
        optimizer: An optimizer of ``torch.optim`` over the model's parameters, or a list of several over disjoint
            parameters, such as Muon for matrices and AdamW for the rest; parameters in none are not trained. The
            workers take over class, groups and options; learning rates and other options are read at each step, so
            schedulers that change them take effect.
        pool: From :func:`onebox.open`.
        plan: :class:`DataParallel` training over all devices; a :class:`onebox.Plan`, the result of
            :func:`onebox.make_plan` or the path of a plan file; or ``auto``: with the first batch, model, devices and
            links are measured and the best plan is searched for, as by :func:`onebox.make_plan` with its defaults, and
            logged. ``None`` is ``DataParallel()`` on one host and ``auto`` over several, as their network may be too
            slow for all devices; one line then reports the plan and its reason, and :attr:`plan` is what to give for
            the same result again. If a plan recomputes, offloads or swaps activations of stages, a step takes less
            memory and more time, with bitwise the same result. The first steps are compared with the prediction of a
            plan (:attr:`profile_correction`).
        precision: ``bf16`` runs model and loss under autocast; parameters keep their type. With ``auto`` the products
            of each stage use float32 or bf16 according to the plan; without a plan the model is first measured in both,
            on devices with bf16 instructions, and the faster one is used. Stages of a plan with an explicit precision
            keep it with ``fp32``, too.
        clip_grad_norm: Limit of the 2-norm of all gradients; ``None`` for no clipping.
        seed: Seed of all random operators in the model, together with the step and the micro-batch.
        metrics: For :meth:`evaluate`: each maps (outputs, targets) to a scalar, a mean over samples.
        on_device: Tensor code that runs before the model, captured with it and run on the workers, in training and
            evaluation: maps the inputs of a micro-batch, as given to :meth:`step`, to those of the model, so that for
            example bytes travel and are converted to floats there. It draws random numbers from the run's own seeds. A
            module is in training mode when the model is. It is not part of checkpoints.
        adaptive: Whether to adapt the plan to devices and links: when one has clearly become slower or faster than
            planned, actions are reordered, layers move, or shares of replicas change, between two steps, with the same
            micro-batches; a change that made steps slower is reverted. Each change is logged and added to
            :attr:`decisions`. Instead of ``True``, the problem that the plan was made for, from
            :func:`onebox.make_plan`, which has the times of each segment.
        loss_reduction: Reduction of the micro-batches' losses to the batch's loss. ``None``: the loss is a mean over
            samples, and a batch that violates this is refused before its step. ``"mean"``: the same without a check.
            ``"sum"``: the loss is a sum over samples. ``onebox.Weighted(fn)``: it is a mean over another quantity, such
            as tokens that are not ignored or weighted classes; ``fn`` maps the targets of a slice of a batch to the
            divisor of the slice's loss; see docs/concepts/numerics.md.
        pad: Pads the batches of steps, uploads and evaluations to a few sizes, each of which is captured once, before
            any other processing; see docs/concepts/capture.md.
        stale: Stale gradients; ``None`` for exact steps.
        lossy: Parts of the traffic that may be compressed with a loss, which changes the result; see
            docs/how-to/compression.md. A plan may name codecs for ``gradients``, which replicas exchange, and for
            ``activations``, with their gradients, between stages; ``auto`` takes one where it is predicted to save at
            least a tenth of the step.
        recovery: Recovery from the loss of workers; ``None`` for none, and ``auto`` for recovery if agents or a Ray
            cluster run some of the workers, and none if all are processes of this machine. With islands the others go
            on without one that has lost a worker, until it is back; see docs/how-to/islands.md.
        staging: Memory of each device for batches sent ahead and for cached samples.
        engine: Execution of steps.
        islands: Devices of each island, such as ``[[0, 1], [2, 3]]``, or ``auto`` for the groups of near devices that
            measured links show; ``None`` for exact steps. Islands train by themselves, each with its own copy of the
            parameters, and are joined by outer steps; see :class:`Outer` and docs/how-to/islands.md. ``plan`` then
            holds for each of them, or is a list with a plan for each.
        outer: The outer optimizer of islands; ``None`` for :class:`Outer` with its defaults.
        weights: A folder of safetensors files, as hubs have them, or :class:`Weights` of one, for a part of the model.
            Tensors of the model on the meta device (see :func:`meta_parameters`) are read from it one by one when the
            workers need them, and take no memory in this process; others that it has are written into the model.
        step: Number of steps that model and optimizer have behind them, in a run that is not resumed from a checkpoint
            of a trainer: steps are numbered, and random numbers drawn, from there on.
        guards: Whether what the model's and the loss's code reads of Python (attributes, globals, hooks, ...) is
            compared before each step with what it was when it was captured; a change means another capture. Without,
            the code runs once, and later changes of Python's state have no effect: for code that PyTorch's Dynamo does
            not read.

    Raises:
        UsageError: An argument is invalid.
        CheckpointError: The folder of weights cannot be read, or does not fit the model.

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

    _saving: BackgroundSave | None = None
    """The save that is under way, if there is one."""

    @entry
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizers,
        *,
        pool: Pool,
        plan: PlanArgument | Sequence[PlanArgument] | None = None,
        precision: Precision = "fp32",
        clip_grad_norm: float | None = None,
        seed: int = 0,
        metrics: Metrics | None = None,
        on_device: OnDevice | None = None,
        adaptive: bool | Problem = False,
        loss_reduction: LossReduction = None,
        pad: Buckets | None = None,
        stale: StaleGradients | None = None,
        lossy: Collection[LossyPart] = (),
        recovery: Recovery | Literal["auto"] | None = "auto",
        staging: Staging = Staging(),
        engine: Engine = Engine(),
        islands: Islands | None = None,
        outer: Outer | None = None,
        weights: str | Path | Weights | None = None,
        step: int = 0,
        guards: bool = True,
        _start: ResumePoint | None = None,
    ) -> None:
        check_objects(model, loss, pool, metrics, on_device)
        check_numerics(seed, precision, clip_grad_norm, guards)
        step, failed = _first_step(step, _start), _start.failed if _start else 0
        check_reduction(loss_reduction)
        require_buckets(pad)
        _require_groups(stale=stale, staging=staging, engine=engine, outer=outer)
        if outer is not None and islands is None:
            raise UsageError(f"outer={outer}: it is the outer optimizer of islands; give islands= too, or leave it out")
        self._lock = threading.RLock()
        """Held by the thread that uses the trainer."""
        numerics = resolved_numerics(engine.numerics)
        self.model, self.loss, self.optimizer, self.pool = model, loss, optimizer, pool
        self.precision: Precision = precision
        self.clip_grad_norm, self.seed = clip_grad_norm, seed
        self.loss_reduction: LossReduction = loss_reduction
        self.pad, self.recovery, self.staging = pad, recovery, staging
        self.lossy, self.engine = checked_lossy(lossy), replace(engine, numerics=numerics)
        self.extra: dict[str, Any] = _start.extra if _start else {}
        self._metrics = dict(metrics or {})
        by_default = plan is None and islands is None
        default = default_plan(pool) if by_default else DataParallel()
        given = _plans_for(default if plan is None else plan, islands)
        made = plan if isinstance(plan, PlanningResult) else None
        request = PlanRequest(
            plan=given[0],
            problem=made.problem if made else None,
            correction=made.correction if made else None,
            stale=stale,
            lossy=self.lossy,
            overlap=engine.overlap,
            split_layers=not adaptive and islands is None,
            micro_batch=_start.plan.micro_batch if _start and _start.plan else None,
            by_default=by_default,
        )
        request.check(pool)
        check_adaptive(adaptive, request.plan if isinstance(request.plan, Plan) else None, pool, trace=engine.trace)
        settings = StepSettings(
            seed=seed,
            trace=engine.trace,
            check_every=engine.check_every,
            in_flight=engine.in_flight
            or (
                steps_in_flight(pool.round_trip_s)
                if islands is None
                else island_steps_in_flight(pool.round_trip_s, (outer or Outer()).every)
            ),
            max_norm=clip_grad_norm or 0.0,
            overlap=engine.overlap,
            numerics=numeric_instructions(numerics),
        )
        settings = with_staleness(settings, optimizer, stale, request.sample(len(pool)))
        self.stale = replace(stale, warm_up=settings.warm_up) if stale else None
        values = _first_values(weights, model, loss, _start, islands)
        self._remote = RemoteState(model, loss, optimizer, pool, _start.state if _start else None, values)
        spec = CaptureSpec(
            model=model,
            loss=loss,
            metrics=self._metrics,
            precision=precision,
            device_type=target_type(pool.devices),
            trained=frozenset(self._remote.wanted),
            on_device=on_device,
            fuse=engine.fuse,
            costs=engine.costs,
            reduction=loss_reduction,
            numerics=numerics,
            guards="required" if guards else "none",
        )
        captures = Captures(spec)
        self._run: TrainerSession
        if islands is None:
            self._run = TrainingSession(
                pool,
                lambda captures, batch: request.resolve(pool, self._remote, captures, batch),
                captures,
                self._remote,
                settings,
                BatchPrefetcher(pool, staging.ahead_bytes, staging.cache_bytes),
                recovery=chosen_recovery(pool, recovery),
                adaptive=adaptive,
                compare=True,
                step=step + failed,
                failed=failed,
                saved=_start.path if _start else None,
            )
        else:
            check_islands(stale=stale, recovery=recovery, adaptive=adaptive, overlap=engine.overlap)
            self._run = self._islands_session(
                islands,
                outer or Outer(),
                [replace(request, plan=each) for each in given],
                captures,
                settings,
                step=step,
                start=_start,
            )
        self._client = ClientState(self._run, self._remote, model, loss, self._lock)
        usual = islands is not None or request.plan in [
            DataParallel(shares=shares) for shares in ("auto", "equal", "measured")
        ]
        self._planned = None if usual else request.sample(len(pool))
        """The plan before the first step, as far as it is known."""
        self._saves = {_folder_of(_start.path): _start.identity} if _start else {}
        """Identity of the latest save of this run in each checkpoint folder."""
        self._request = request
        self._provisional: TrainingSession | None = None
        """The run whose plan is only that of evaluations, until the first step."""
        self._closed = False
        pool.trainers.add(self)

    def _islands_session(
        self,
        islands: Islands,
        outer: Outer,
        requests: Sequence[PlanRequest],
        captures: Captures,
        settings: StepSettings,
        *,
        step: int,
        start: ResumePoint | None,
    ) -> IslandsSession:
        """Return the session of islands, new or from a checkpoint."""
        pool, stored = self.pool, start.islands if start else None
        found = chosen_islands(pool, islands)
        if len(requests) not in (1, len(found)):
            raise UsageError(f"plan= has {len(requests)} plans for {len(found)} islands; give one for all, or one each")
        if start is not None and (stored is None or len(stored.devices) != len(found)):
            had = "no islands" if stored is None else f"{len(stored.devices)} islands"
            raise UsageError(
                f"islands={islands!r}: the run to be resumed has {had}, and each island has a state of its own; resume "
                "it with as many"
            )
        request = IslandsRequest(
            islands=found,
            requests=tuple(requests) if len(requests) == len(found) else (requests[0],) * len(found),
            outer=outer,
        )
        request.check(pool)
        parts = islands_start(start.state.optimizer, stored) if start and stored else None
        others = parts.islands if parts else (None,) * len(found)
        self._remote = RemoteState(self.model, self.loss, self.optimizer, pool, others[0])
        states = [
            self._remote,
            *(RemoteState(self.model, self.loss, self.optimizer, pool, own) for own in others[1:]),
        ]
        return IslandsSession(
            pool,
            found,
            outer,
            functools.partial(request.resolve, pool),
            functools.partial(request.provisional, pool),
            captures,
            states,
            settings,
            self.staging,
            recovery=island_recovery(pool, self.recovery, outer),
            step=step,
            start=parts,
            saved=start.path if start else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._keep_weights()
        self._close(keep=error is None)

    def _keep_weights(self) -> None:
        """Pull where an error leaves the trainer's block, so that the model has the weights that it has in plain
        PyTorch; where that fails, :meth:`close` says what is lost."""
        if not self._closed and self._client.lost_steps and self._run.error is None:
            with contextlib.suppress(Exception):
                self.pull()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a Trainer cannot be pickled or copied: it holds what workers have. Write a checkpoint with "
            "trainer.save(folder), and go on elsewhere with Trainer.resume(folder, ...); or pull(), and pickle the "
            "model's state_dict()"
        )

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
        with entered("Trainer.upload()", self.model):
            return self._run.uploads.add(self._batch(inputs, targets, samples).kept())

    @entry
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
            The loss, which arrives later; reading it waits. At most ``in_flight`` steps are in flight (see
                :class:`Engine`): this call waits for the oldest if there are more.

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
        refuse_saved_tensors_hooks()
        if self._provisional is not None:
            self._begin(self._provisional, self.captures.stamped(batch))
        self._client.bring()
        self._run.tell_fault()
        result = self._run.step(batch, uploaded)
        self._client.stepped()
        mark_stepped(self._remote.optimizer)
        return result

    def _begin(self, run: TrainingSession, batch: Batch) -> None:
        """Replace the plan of evaluations before the first step by one that is made for a training batch."""
        while self._provisional is not None:
            resolved = run.recovery.run(lambda: self._request.resolve(self.pool, self._remote, self.captures, batch))
            run.begin_with(resolved, batch)
            if run.plan == resolved.plan or self.pool.gone:  # else a recovery from a loss has kept the provisional plan
                self._provisional = None

    @entry
    def synchronize(self) -> None:
        """With islands: make outer steps now, with the steps since the last ones, and wait for them.

        Without it :meth:`pull`, :meth:`save`, :meth:`tensors` and :meth:`evaluate` use the global parameters as of the
        last outer step. Usual at the end of training. It changes the steps that follow: a run that may go on later is
        saved before it, if :attr:`behind`, and resumed from there. Without islands it waits for all steps in flight.

        Raises:
            OneboxError: A step failed.
        """
        self._require_open()
        self._client.bring()
        if isinstance(self._run, IslandsSession):
            behind = self.behind
            self._run.synchronize()
            if behind:
                self._client.synchronized()
        else:
            self.wait()

    @property
    def behind(self) -> bool:
        """True if :meth:`synchronize` would change the global parameters of islands, as steps have been made since the
        last outer steps; always false without islands."""
        return isinstance(self._run, IslandsSession) and self._run.behind

    # ---- evaluation

    @entry
    def evaluate(self, batches: Iterable[Any], *, metrics: None = None) -> Evaluation:
        """Return the loss and metrics over batches, in eval mode, without changing anything.

        Metrics are those of the trainer, ``Trainer(metrics=...)``: means over samples; others are refused. The loss is
        that of all batches as one: a mean over samples, a sum, or a mean over another quantity, according to
        ``loss_reduction``.

        Args:
            batches: (inputs, targets) of each, as for :meth:`step`; or inputs alone, if the loss needs no targets.
            metrics: Refused: they are captured with the model, and belong to the trainer.

        Raises:
            UsageError: There is no batch; or the loss or a metric is no mean over samples, and a batch is divided.
            DeviceMemoryError: A batch needs more memory than a device has, or may use; nothing of it was sent.
            OneboxError: Something failed on a worker.
        """
        if metrics is not None:
            raise UsageError(
                "evaluate(metrics=...): metrics belong to the trainer, which captures them with the model; give it "
                "them, as in Trainer(..., metrics={'accuracy': lambda outputs, targets: ...})"
            )
        self._require_open()
        self._client.bring()
        self.wait()
        run, request = self._run, self._request
        chosen_later = request.by_default and request.plan == "auto" and self.stale is None
        if chosen_later and isinstance(run, TrainingSession) and run.plan is None:
            run.adopt(request.provisional(self.pool))
            self._provisional = run
        with self.wall.during(EVALUATING):
            return self._run.evaluate((self._batch(*as_pair(item)) for item in users(batches)), list(self._metrics))

    # ---- observation

    def _repr_html_(self) -> str:
        """Return the trainer as a notebook shows it: its plan, its progress, and the newest step over time.

        Nothing is waited for: it shows as much as workers have reported.
        """
        plan = self.plan
        told = "no plan yet: it follows with the first step" if plan is None else plan.describe()
        counts = {
            "steps": self.steps_done,
            "recoveries": len(self.recoveries),
            "changes of the plan": len([each for each in self.decisions if not each.refused]),
            "islands": len(self.island_plans),
        }
        rows = [(name, count) for name, count in counts.items() if count or name == "steps"]
        events = self._run.newest_events()
        done = max((event.step for event in events if event.track == "compute"), default=None)
        svg = "" if done is None else notebook.step_svg(measured_chart(events, done))
        stages = "" if plan is None else plan.stages_html()
        title = f"Trainer of {type(self.model).__name__} on {len(self.pool)} devices"
        return notebook.card(title, notebook.text(told), notebook.table((), rows), stages, svg)

    @property
    def wall(self) -> WallTime:
        """The account of the run's wall time."""
        return self._run.wall

    @property
    def steps_done(self) -> int:
        """Number of steps begun so far, including those before a checkpoint, without those known to have failed."""
        return self._run.steps_done - self._run.failed_steps

    @property
    def plan(self) -> Plan | None:
        """The plan, of the first island if there are several; ``None`` before the first step."""
        return self._run.plan

    @property
    def island_plans(self) -> tuple[Plan, ...]:
        """The plan of each island; empty before the first step, and without islands."""
        return self._run.plans if isinstance(self._run, IslandsSession) else ()

    def predicted_islands(self, links: Links | None = None) -> IslandsPrediction | None:
        """Return the prediction of a run of islands; ``None`` before the first step, or if a plan has none.

        Args:
            links: Links between the devices; without it those in the profile of the pool, if it has one.
        """
        if links is None and self.pool.profiled is not None:
            links = known_pool_links(self.pool.profiled, self.pool.devices)
        return None if links is None or not isinstance(self._run, IslandsSession) else self._run.prediction(links)

    @property
    def island_sums_s(self) -> float | None:
        """Measured seconds of a step's part of the sums between islands; ``None`` where they are not known, as of sums
        that travel while islands go on."""
        return self._run.sums_s if isinstance(self._run, IslandsSession) else None

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
    def island_changes(self) -> tuple[IslandChange, ...]:
        """Islands that have left and joined so far; empty without islands, or without their recovery."""
        return tuple(self._run.recovery.changes) if isinstance(self._run, IslandsSession) else ()

    @property
    def delays(self) -> Mapping[int, int]:
        """Number of updates by their measured delay in steps; exact steps are not measured."""
        return self._run.overlap.measured()

    @property
    def decisions(self) -> tuple[AppliedDecision, ...]:
        """Replanning decisions so far; empty without ``adaptive``."""
        return self._run.adaptive.decisions if self._run.adaptive else ()

    @property
    def profile_correction(self) -> ProfileCorrection | None:
        """The first steps compared with the prediction of their plan, with the correction of the profile that follows.

        ``None`` until at least twelve steps of the predicted batch have ended, up to 43 if they spread much, and for
        plans without a prediction or with split layers, runs with ``adaptive``, whose measurements go on, islands,
        overlapping steps, and without ``trace``. A plan that ``auto`` chooses later for this model and pool is made
        from the corrected profile; see docs/concepts/plans.md.
        """
        run = self._run
        return run.first_steps.correction if isinstance(run, TrainingSession) and run.first_steps else None

    @property
    def snapshots_apart(self) -> int:
        """Present number of steps between snapshots; 0 without recovery."""
        return self._run.snapshots.every if self._run.snapshots else 0

    @entry
    def memory(self) -> list[WorkerMemory]:
        """Return the used bytes, the peak so far, and the quota of each device."""
        self._require_open()
        return self._run.recovery.run(self._remote.memory)

    @entry
    def predicted_memory(self, inputs: Any, targets: Any = None, *, ahead: int = 0) -> dict[int, int]:
        """Return the peak bytes of each device of the plan in a step with a batch, from lifetimes alone.

        The present contents of ``cache`` are included.

        Args:
            inputs: As for :meth:`step`.
            targets: Likewise.
            ahead: Number of similar batches uploaded for later steps.
        """
        self._require_open()
        batch = self._batch(inputs, targets)
        peaks = self._run.peaks(batch, ahead=ahead)
        return {device: peak + self._run.uploads.cached_bytes(device) for device, peak in peaks.items()}

    @entry
    def predicted_curves(self, inputs: Any, targets: Any = None) -> dict[int, MemoryTimeline]:
        """Return the memory of each device of the plan over a step with a batch, instruction by instruction.

        For the memory actually used see :meth:`events`.

        Args:
            inputs: As for :meth:`step`.
            targets: Likewise.
        """
        self._require_open()
        batch = self._batch(inputs, targets)
        contents = self._run.contents(batch)
        return {device: memory_timeline(device, found) for device, found in contents.items()}

    def subscribe(self, observer: StepObserver) -> None:
        """Call an observer at the events of all later steps; with islands, of those of the first one."""
        self._run.subscribe(observer)

    def events(self) -> list[TraceEvent]:
        """Return the workers' activity in the last steps, for a timeline; empty without ``trace``."""
        return self._run.events()

    @property
    def links(self) -> tuple[LinkUse, ...]:
        """Bytes that the links between hosts have carried so far, and the time they were busy; empty without ``trace``.

        It is measured of encrypted connections, by the kernel of the host that sends.
        """
        return self._run.links

    def link_events(self) -> list[LinkEvent]:
        """Return the use of each link between hosts in the last steps, for a timeline; empty without ``trace``.

        It is measured as that of :attr:`links`.
        """
        return self._run.link_events()

    def upload_counters(self) -> UploadCounters:
        """Return the cost of uploading batches so far, in callers' time and in bytes."""
        return self._run.uploads.counters()

    # ---- state

    @entry
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

    @entry
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

    def wait(self) -> None:
        """Wait for all steps in flight.

        Raises:
            OneboxError: One of them failed.
        """
        self._run.drain()
        self._run.wait(0)

    @entry
    def tensors(self) -> dict[str, Tensor]:
        """Return the trained parameters and buffers, by name; names begin with ``model.`` or ``loss.``."""
        self._require_open()
        self._client.bring()
        self.wait()
        found = self._run.recovery.run(self._run.transfer.tensors)
        self._client.kept()
        return found

    @entry
    def optimizer_state(self) -> OptimizerEntries:
        """Return the optimizer's state as (parameter, key, value)."""
        self._require_open()
        self._client.bring()
        self.wait()
        return self._run.recovery.run(self._run.transfer.optimizer_state)

    @entry
    def save_weights(self, path: str | Path, *, shard: int | str = "5GB") -> None:
        """Write the model's parameters and saved buffers into a folder as hubs have it, a few MiB in memory at a time.

        The files are safetensors with the names of ``model.state_dict()``, and an index if there are several; tied
        parameters are written once, under their first name.

        Args:
            path: The folder; created if missing. What else lies there stays.
            shard: Most bytes of a file's tensors, as a number or as ``5GB``; a larger tensor has a file of its own.

        Raises:
            UsageError: The folder has weights already.
            CheckpointError: They could not be written.
            OneboxError: A step failed.
        """
        shard_bytes = parse_size("shard", shard) if isinstance(shard, str) else shard
        if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
            raise UsageError(f"shard={shard!r}: allowed are a number of bytes, and a size such as '5GB'")
        self._require_open()
        self._client.bring()
        self.wait()
        run = self._run
        transfer = run.whole_transfer if isinstance(run, IslandsSession) else run.transfer
        run.recovery.run(lambda: write_model(Path(path), self.model, self._remote, transfer, shard_bytes))
        self._client.kept()

    @entry
    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None, keep: int | None = 2) -> Path:
        """Write a checkpoint, atomically; a process killed meanwhile leaves the earlier ones intact.

        Args:
            path: The checkpoint folder; each save is a folder inside it, named for its step.
            extra: Any JSON value, such as the position in the data and a scheduler's state; after :meth:`resume` it is
                in ``trainer.extra``.
            keep: Number of saves to keep: the newest of this run, then those that it has abandoned by going back to
                an earlier one; ``None`` keeps all.

        Returns:
            The folder of this save.

        Raises:
            CheckpointError: It could not be written.
            OneboxError: A step failed.
        """
        return self._save(Path(path), extra, keep, aside=False).result()

    def begin_save(
        self, path: str | Path, *, extra: Mapping[str, Any] | None = None, keep: int | None = 2
    ) -> BackgroundSave:
        """Begin to write a checkpoint of the present state, while training goes on.

        The workers copy their parts within their own memory; these are fetched and written meanwhile. An earlier save
        that is under way is waited for, and so is this one by the next call, and by :meth:`close`. Workers without room
        for a copy, and islands, are saved before this returns.

        Args:
            path: As for :meth:`save`.
            extra: Likewise.
            keep: Likewise.

        Returns:
            The save. If nobody has asked for its result, the next call and :meth:`close` raise the error with which it
                has failed.

        Raises:
            CheckpointError: An earlier save could not be written.
            OneboxError: A step failed.

        Example:
            >>> import tempfile, torch, onebox
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with tempfile.TemporaryDirectory() as folder, onebox.open("cpu") as pool, onebox.Trainer(
            ...     model, torch.nn.functional.mse_loss, optimizer, pool=pool
            ... ) as trainer:
            ...     loss = trainer.step(torch.ones(8, 4), torch.zeros(8, 1))
            ...     save = trainer.begin_save(folder)
            ...     loss = trainer.step(torch.ones(8, 4), torch.zeros(8, 1))
            ...     save.result().name
            'step-00000001'
        """
        return self._save(Path(path), extra, keep, aside=True)

    def _save(self, path: Path, extra: Mapping[str, Any] | None, keep: int | None, *, aside: bool) -> BackgroundSave:
        """Write a checkpoint, now or aside."""
        self._require_open()
        self._end_save()
        self._client.bring()
        self.wait()
        run, identity = self._run, secrets.token_hex(16)
        settings = {
            "step": self.steps_done,
            "failed": run.failed_steps,
            "seed": self.seed,
            "precision": self.precision,
            "clip_grad_norm": self.clip_grad_norm,
            "loss_reduction": reduction_name(self.loss_reduction),
            "stale": self.stale,
            "lossy": self.lossy,
            "recovery": self.recovery,
            "staging": self.staging,
            "engine": self.engine,
            "extra": dict(extra or {}),
            "identity": identity,
            "parent": self._saves.get(Path(path).resolve()),
        }

        def taken(frozen: bool) -> CheckpointContents:
            plan = self.plan or self._planned
            islands, transfer = None, run.transfer
            if isinstance(run, IslandsSession):
                islands, transfer = run.entry(), run.whole_transfer
            return contents(self._remote, transfer, plan=plan, islands=islands, frozen=frozen, **settings)

        def keep_note(saved: Path) -> None:
            self._saves[_folder_of(saved)] = identity
            run.recovery.saved(saved)

        with self.wall.during(SAVING):
            if aside and not isinstance(run, IslandsSession):
                with contextlib.suppress(DeviceMemoryError):  # there is no room for a copy
                    found = run.recovery.run(lambda: taken(True))
                    thaw = functools.partial(run.transfer.thaw, found.slots)
                    self._saving = BackgroundSave(lambda: write(path, found, keep=keep), keep_note, thaw, path=path)
                    self._client.kept()
                    return self._saving
            saved = run.recovery.run(lambda: write(path, taken(False), keep=keep))
        keep_note(saved)
        self._client.kept()
        return BackgroundSave.ended(saved)

    def _end_save(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: It could not be written, and nobody has asked for its result.
        """
        save, self._saving = self._saving, None
        if save is not None:
            with self.wall.during(SAVING):
                save.end()

    @classmethod
    def resume(
        cls,
        path: str | Path,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizers,
        *,
        pool: Pool,
        plan: PlanArgument | Sequence[PlanArgument] | Stored = "stored",
        precision: Precision | Stored = "stored",
        clip_grad_norm: float | Stored | None = "stored",
        seed: int | Stored = "stored",
        metrics: Metrics | None = None,
        on_device: OnDevice | None = None,
        adaptive: bool | Problem = False,
        loss_reduction: LossReduction | Stored = "stored",
        pad: Buckets | None = None,
        stale: StaleGradients | Stored | None = "stored",
        lossy: Collection[LossyPart] | Stored = "stored",
        recovery: Recovery | Literal["auto", "stored"] | None = "stored",
        staging: Staging | Stored = "stored",
        engine: Engine | Stored = "stored",
        islands: Islands | Stored | None = "stored",
        outer: Outer | Stored = "stored",
        guards: bool = True,
    ) -> Self:
        """Create a trainer that continues from a checkpoint.

        With the same plan (equally many devices, nothing overridden) the result is bitwise equal to that of an
        uninterrupted run; on GPUs if their operators are deterministic (:class:`Numerics`).

        The other arguments are those of :class:`Trainer`; ``stored`` stands for the value in the checkpoint. A group
        that is given replaces all of the stored one.

        Args:
            path: A checkpoint folder (the save that was written last), or the folder of one save, from which the run
                branches off if there are later ones.
            model: As created for the first trainer; its weights are overwritten.
            loss: As before.
            optimizer: As before; its options become those of the checkpoint.
            pool: The pool. If it lacks devices of the stored plan, the run becomes data parallel over it; likewise, on
                one host, if it has more devices than a stored data-parallel plan.
            plan: As for :class:`Trainer`. With :class:`DataParallel`, shares of ``auto`` are the stored ones if the
                devices are as many; with ``auto``, the plan has the stored size of micro-batches.
            islands: As many islands as before, on the same devices or others; ``stored`` also for a run without.
            outer: As for :class:`Trainer`; the fragments are as many as before.

        Raises:
            CheckpointError: There is none, it is damaged, or it belongs to another model or optimizer.
            UsageError: An argument is invalid, or the stored loss reduction is a function, which must be given again.
        """
        check_objects(model, loss, pool, metrics, on_device)
        place = find_save(Path(path))
        checkpoint = read(place)
        stored = checkpoint.manifest
        reduction = resumed_reduction(stored.loss_reduction, loss_reduction)
        chosen = _resumed_islands(stored.islands, plan, islands, outer, len(pool))
        if chosen is None:
            given = "stored" if plan == "stored" else _plans_for(plan, None)[0]
            spread = default_plan(pool) == "auto"
            chosen = {"plan": resumed_plan(stored.plan, given, len(pool), spread=spread)}
        with entered("Trainer.resume()", model):
            restore(checkpoint, model, loss, optimizer)
        return cls(
            model,
            loss,
            optimizer,
            pool=pool,
            **chosen,
            precision=stored.precision if precision == "stored" else precision,
            clip_grad_norm=stored.clip_grad_norm if clip_grad_norm == "stored" else clip_grad_norm,
            seed=stored.seed if seed == "stored" else seed,
            metrics=metrics,
            on_device=on_device,
            adaptive=adaptive,
            loss_reduction=reduction,
            pad=pad,
            stale=stored.stale if stale == "stored" else stale,
            lossy=stored.lossy if lossy == "stored" else lossy,
            recovery=stored.recovery if recovery == "stored" else recovery,
            staging=stored.staging if staging == "stored" else staging,
            engine=stored.engine if engine == "stored" else engine,
            guards=guards,
            _start=resume_point(checkpoint, place),
        )

    def close(self) -> None:
        """Free everything that the trainer holds on the pool; the pool stays open. Idempotent.

        If there was no step since the last :meth:`pull`, the optimizer's state is downloaded first. A save that
        is under way is waited for. Steps whose weights were neither pulled nor saved are lost, and the log says so, as
        it does for a step that failed and whose loss was not read.

        Raises:
            CheckpointError: The save could not be written, and nobody has asked for its result.
        """
        self._close(keep=True)

    def _close(self, *, keep: bool) -> None:
        if self._closed:
            return
        with contextlib.suppress(PoolError):  # that is closed already
            if keep and (error := self._run.unread_error()) is not None:
                _LOG.error("closing the trainer: a step whose loss was not read has failed: %s", error)
        lost = self._client.lost_steps
        if lost and self._run.error is None:
            _LOG.warning(
                "the trainer is closed, and the weights of its last %s neither pulled nor saved: they are lost. Call "
                "trainer.pull() before the end of its block, or trainer.save(folder); in a finally: where errors may "
                "end it",
                "step were" if lost == 1 else f"{lost} steps were",
            )
        self._closed = True
        self.pool.trainers.discard(self)
        try:
            if keep:
                self._end_save()
        finally:
            with contextlib.suppress(Exception):  # the pool may be broken, or closed before
                self._client.release(keep=keep)
            with contextlib.suppress(Exception):
                self._run.close()

    def _batch(self, inputs: Any, targets: Any = None, samples: Any = None) -> Batch:
        """Return a batch in the form used for training."""
        if self.pad is not None:
            inputs, targets = self.pad((inputs, targets))
        return as_batch(inputs, targets, samples)

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this trainer is closed; make another one on the pool")
        if self._run.error is not None:
            raise self._run.error


def _first_step(step: int, start: ResumePoint | None) -> int:
    """Return the number of steps that are done already."""
    if not isinstance(step, int) or step < 0:
        raise UsageError(f"step={step!r}: allowed are whole numbers from 0 up")
    return start.step if start else step


def _first_values(
    weights: str | Path | Weights | None,
    model: nn.Module,
    loss: Loss,
    start: ResumePoint | None,
    islands: Islands | None,
) -> Mapping[str, Tensor]:
    """Return the values of the tensors on the meta device, from a folder of weights or a checkpoint."""
    state = named_state(model, loss, lambda: 0)
    if start is None:
        values = first_values(weights, model, state)
    else:
        values = {name: start.weights[name] for name, tensor in state.tensors.items() if tensor.is_meta}
    if values and islands is not None:
        raise UsageError("islands= need a model with values in this process; load the weights into it, on the CPU")
    return values


def _folder_of(save: Path) -> Path:
    """Return the checkpoint folder of a save."""
    return save.resolve().parent


def _plans_for(
    plan: PlanArgument | Sequence[PlanArgument], islands: Islands | None
) -> list[Plan | DataParallel | Literal["auto"]]:
    """Return the plan as given, or that of each island."""
    several = isinstance(plan, Sequence) and not isinstance(plan, str)
    if several and islands is None:
        raise UsageError("plan= is a list of plans, which are for islands=, one for each; give one plan")
    if several and not plan:
        raise UsageError("plan= is an empty list; give a plan for each island")
    return [_given_plan(each) for each in (plan if several else [plan])]  # type: ignore[arg-type,union-attr]


def _given_plan(plan: PlanArgument) -> Plan | DataParallel | Literal["auto"]:
    """Return a plan as given, read from its file if that is given."""
    if plan == "auto":
        return "auto"
    if isinstance(plan, PlanningResult):
        return plan.plan
    if isinstance(plan, str) and not Path(plan).exists():
        meant = _meant_by(plan)
        meaning = f"did you mean plan={meant}? " if meant else ""
        raise UsageError(f"plan={plan!r}: there is no such file; {meaning}{ALLOWED_PLANS}")
    return Plan.read(plan) if isinstance(plan, str | Path) else plan


def _meant_by(plan: str) -> str:
    """Return the plan that a user may have meant by a word that is no file; empty for none."""
    word = "".join(filter(str.isalpha, plan.lower()))
    if word in ("dp", "ddp", "fsdp") or difflib.get_close_matches(word, ["dataparallel"], cutoff=0.7):
        return "onebox.DataParallel()"
    return "'auto'" if difflib.get_close_matches(word, ["auto"], cutoff=0.6) else ""


def _resumed_islands(
    stored: IslandsEntry | None,
    plan: PlanArgument | Sequence[PlanArgument] | Stored,
    islands: Islands | Stored | None,
    outer: Outer | Stored,
    devices: int,
) -> dict[str, Any] | None:
    """Return the arguments of a trainer that resumes islands on so many devices; ``None`` for a run without."""
    if stored is None:
        if islands not in ("stored", None) or outer != "stored":
            raise UsageError("the run to be resumed has no islands; leave islands= and outer= out")
        return None
    if islands is None:
        raise UsageError(
            f"islands=None: the run to be resumed has {len(stored.devices)} islands, and each island has a state of "
            "its own; resume it with as many, or train another run from the pulled weights"
        )
    options = stored.outer if isinstance(outer, str) else outer
    if options.fragments != stored.outer.fragments:
        raise UsageError(
            f"outer={options}: the run to be resumed has fragments={stored.outer.fragments}, each with outer steps of "
            "its own; give the same"
        )
    groups: Islands = stored.devices
    if islands != "stored":
        groups = "auto" if islands == "auto" else given_islands(islands, devices)
    found: dict[str, Any] = {"islands": groups, "outer": options}
    if plan != "stored":
        found["plan"] = plan
    elif stored.plans:
        places: Sequence[Sequence[int]] = [()] * len(stored.devices)  # as far as they are known
        if not isinstance(groups, str) and len(groups) == len(places):
            places = groups
        found["plan"] = [
            plan_elsewhere(each, before, now)
            for each, before, now in zip(stored.plans, stored.devices, places, strict=True)
        ]
    if stored.shares and outer == "stored":  # the same bits need the same parts of each batch
        found["outer"] = replace(options, shares=stored.shares)
    return found


_GROUPS: Mapping[str, tuple[Any, str]] = {
    "stale": (StaleGradients | None, "StaleGradients(...), and None for exact steps"),
    "staging": (Staging, "Staging(...)"),
    "engine": (Engine, "Engine(...)"),
    "outer": (Outer | None, "Outer(...), and None"),
}
"""By argument, the kind of a group of options, and what is allowed."""


def _require_groups(**given: object) -> None:
    for name, value in given.items():
        kind, allowed = _GROUPS[name]
        if not isinstance(value, kind):
            raise UsageError(f"{name}={value!r}: allowed are onebox.{allowed}")
