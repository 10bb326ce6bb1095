"""Options of a trainer, in groups that check themselves; the command line and checkpoints share them.

Nothing here imports PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from onebox.errors import UsageError
from onebox.plan_names import LOSSY_PARTS, LossyPart, OuterCodec, StateAt, Sync, UpdateAt
from onebox.sizes import parse_size

Correction = Literal["auto", "none", "predict", "extrapolate", "lookahead", "both", "feedback"]
"""Correction of gradients that are a step late; ``auto`` chooses one by the optimizer."""

Shares = Literal["auto", "equal", "measured"] | Sequence[float]

MatmulPrecision = Literal["highest", "high", "medium"]
"""Internal precision of products of float32 matrices; see ``torch.set_float32_matmul_precision``."""

SegmentCosts = Mapping[str, tuple[float, float, float]]
"""By segment name: seconds of forward, input gradient and weight gradient for one sample at full speed."""


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Data parallel training: each device computes the whole model for its share of the batch.

    Args:
        micro_batch: Samples of a micro-batch, which are computed at once; without it each device's share of the batch
            is one. The loss curve depends on it (batch norm and dropout operate on micro-batches) but not on the number
            of devices that share the micro-batches.
        shares: Each device's share of the batch: ``auto`` (equal for identical devices, else measured), ``equal``,
            ``measured``, or one weight for each device.
        sync: Place where gradients are averaged: among ``workers``, or at the ``client``.
        update: Place of the optimizer's state and step: the ``device``, or the ``host`` of each, which has more memory;
            for a GPU, gradients travel there and new parameters back, and the step takes longer.
        shard_optimizer: Shard the optimizer's state among the replicas, instead of keeping all of it on each: one
            replica updates a parameter and sends it to the others. The number of bytes sent and the result are the
            same.

    Raises:
        UsageError: A value is not allowed, or two contradict each other.

    Example:
        >>> DataParallel(micro_batch=8, shares=[3, 1]).shares
        (3.0, 1.0)
    """

    micro_batch: int | None = None
    shares: Shares = "auto"
    sync: Sync = "workers"
    update: UpdateAt = "device"
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        require_int("micro_batch", self.micro_batch, least=1)
        _require_one("sync", self.sync, get_args(Sync))
        _require_one("update", self.update, get_args(UpdateAt))
        require_bool("shard_optimizer", self.shard_optimizer)
        if self.shard_optimizer and self.sync == "client":
            raise UsageError("shard_optimizer=True needs sync='workers': the client sums for all replicas or for none")
        object.__setattr__(self, "shares", _checked_shares(self.shares))


@dataclass(frozen=True)
class Weights:
    """Weights in a folder of safetensors files, as hubs have them, for a part of a model.

    Args:
        path: The folder, with ``model.safetensors`` or with several files and ``model.safetensors.index.json``; or one
            file.
        module: The part of the model whose names the files have, such as ``encoder``; empty for the whole model.
        skip: Patterns of names in the files that are left out, such as ``lm_head.*``.

    Raises:
        UsageError: A value is not allowed.
    """

    path: str | Path
    module: str = ""
    skip: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path) or not isinstance(self.module, str):
            raise UsageError(f"{self!r}: allowed are the path of a folder, and the name of a part of the model")
        if isinstance(self.skip, str) or not all(isinstance(pattern, str) for pattern in self.skip):
            raise UsageError(f"skip={self.skip!r}: allowed is a list of patterns, such as ['lm_head.*']")


@dataclass(frozen=True, kw_only=True)
class StaleGradients:
    """Gradients that are applied one step late, so that the next step begins while they are in flight.

    Each step uses the weights before the last update: a pipeline is never empty, and averaging overlaps with the next
    step. A plan of several stages then requires the schedule ``async-1f1b``, which in turn requires stale gradients.

    Args:
        correction: Correction of the late gradients: ``none``, ``predict`` (computing with predicted weights),
            ``extrapolate``, ``lookahead``, ``both``, ``feedback`` (formulas in
            docs/concepts/staleness.md), or ``auto``, which depends on the optimizer and logs the choice and its reason.
        warm_up: Number of exact steps at the beginning, where weights change fastest; without it 100, which is logged.

    Raises:
        UsageError: A value is not allowed.
    """

    correction: Correction = "auto"
    warm_up: int | None = None

    def __post_init__(self) -> None:
        _require_one("correction", self.correction, get_args(Correction))
        require_int("warm_up", self.warm_up, least=0)


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Outer optimizer of islands: what joins devices over slow links (DiLoCo, arXiv:2311.08105).

    Each island makes ``every`` steps with the user's optimizer by itself. Then the outer gradient, which is the global
    parameters minus the island's, is averaged over the islands, weighted by samples, and SGD with Nesterov momentum
    applies it to the global parameters, from which all islands go on.

    Args:
        every: Steps between two outer steps.
        lr: Learning rate of the outer optimizer.
        momentum: Its momentum; 0 for plain SGD. With ``lr=1`` and ``momentum=0`` parameters are averaged.
        fragments: Parts of the model that are synchronised in turn, ``every / fragments`` steps apart, so that each
            outer step sends so much less at a time (Streaming DiLoCo, arXiv:2501.18512); module ``i`` is in part
            ``i % fragments``. Each parameter is still synchronised after every ``every`` steps.
        overlap: Steps during which the sums of an outer step travel while islands go on; they are applied that many
            steps later, fewer than ``every`` (Streaming DiLoCo).
        keep: With ``overlap``, the fraction of an island's own parameters in those with which it goes on after an outer
            step; the rest are the global ones.
        compression: Codec of the outer gradients that islands send each other: ``none``, ``bf16``, ``int8``, or
            ``e3m0`` with four bits a value (Streaming DiLoCo). They are decoded and summed in the parameters' type, and
            what is lost is added to the next ones (error feedback, arXiv:2508.15706). See docs/how-to/compression.md.
        state: Place of the global parameters, the momentum, and what the codec has lost, between two outer steps: the
            ``device`` or the ``host`` of each worker that exchanges outer gradients. The result is the same.
        shares: Each island's share of the batch: ``auto`` (equal for islands of alike devices, else measured),
            ``equal``, ``measured``, or one weight for each island.
        quorum: Islands that the others always wait for; ``None`` for all. Once so many have made their steps, the
            others have ``grace_s`` left. One that is late then is not waited for: it gets no more samples, and those
            that it has made count in the first outer step before which it has made them (as in arXiv:2604.21428).
            Needs recovery. Two at least keep two copies of the newest global parameters.
        grace_s: With ``quorum``, seconds that punctual islands wait for the others.

    Raises:
        UsageError: A value is not allowed, or there are more fragments than steps between outer steps.

    Example:
        >>> Outer(every=100).momentum
        0.9
    """

    every: int = 30
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.5
    compression: OuterCodec = "none"
    state: StateAt = "device"
    shares: Shares = "auto"
    quorum: int | None = None
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        require_int("quorum", self.quorum, least=1)
        if not is_number(self.grace_s) or not 0 <= self.grace_s < math.inf:
            raise UsageError(f"grace_s={self.grace_s!r}: allowed are seconds from 0 up")
        if self.quorum is None and self.grace_s != Outer.grace_s:
            raise UsageError(f"grace_s={self.grace_s}: it is the time for islands beyond a quorum; give a quorum, too")
        require_int("overlap", self.overlap, least=0, optional=False)
        if not is_number(self.keep) or not 0 <= self.keep < 1:
            raise UsageError(f"keep={self.keep!r}: allowed are 0 up to, but not, 1")
        require_int("every", self.every, least=1, optional=False)
        require_int("fragments", self.fragments, least=1, optional=False)
        if not is_number(self.lr) or not 0 < self.lr < math.inf:
            raise UsageError(f"lr={self.lr!r}: allowed are numbers above 0")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum!r}: allowed are 0 up to, but not, 1")
        if self.fragments > self.every:
            raise UsageError(
                f"fragments={self.fragments} and every={self.every}: each fragment is synchronised once in every="
                f"{self.every} steps, at most one a step; allowed are up to {self.every} fragments"
            )
        if self.overlap >= self.every:
            raise UsageError(
                f"overlap={self.overlap} and every={self.every}: an outer step is applied before the next one begins; "
                f"allowed are up to {self.every - 1} steps of overlap"
            )
        _require_one("compression", self.compression, get_args(OuterCodec))
        _require_one("state", self.state, get_args(StateAt))
        object.__setattr__(self, "shares", _checked_shares(self.shares, "island"))


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery when a worker dies, hangs or becomes unreachable.

    The worker is restarted; if that is impossible, its replicas do its part, another device replaces it, or a plan is
    searched for the remaining devices, with the same micro-batches. All receive the newest snapshot, which workers
    store for each other, and later steps are repeated. Each recovery is logged and added to
    :attr:`Trainer.recoveries`. With the same plan the run ends bitwise equal to one without a loss, on GPUs if their
    operators are deterministic (:class:`Numerics`); otherwise equal up to rounding.

    Args:
        snapshot_every: Steps between two snapshots, from which a run continues after a loss; without it as many as keep
            their cost below 3 % of the time.

    Raises:
        UsageError: A value is not allowed.
    """

    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        require_int("snapshot_every", self.snapshot_every, least=1)


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Memory of each device for batches beside the step that is computed; never more than steps leave free.

    Args:
        ahead: Most bytes, as a number or such as ``"256MiB"``, for batches that :meth:`Trainer.upload` sends ahead of
            their steps; 0 for none.
        cache: Most bytes for cached samples, of which only indices travel when they are used again; without it there is
            no cache. ``samples=`` of :meth:`Trainer.step` and :meth:`Trainer.upload` identifies the samples of a batch.
            The data of a sample must be the same each time it is used: random augmentation belongs into ``on_device``.

    Raises:
        UsageError: A value is not a size.

    Example:
        >>> Staging(cache="1GiB").cache_bytes
        1073741824
    """

    ahead: int | str = "256MiB"  # more than two batches of 256 ImageNet images with one byte per colour
    cache: int | str | None = None

    def __post_init__(self) -> None:
        _ = self.ahead_bytes, self.cache_bytes

    @property
    def ahead_bytes(self) -> int:
        """``ahead`` in bytes."""
        return _size_bytes("ahead", self.ahead)

    @property
    def cache_bytes(self) -> int:
        """``cache`` in bytes; 0 for none."""
        return 0 if self.cache is None else _size_bytes("cache", self.cache)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Precision, determinism and launches of the workers' operators.

    Each value is, where it is ``None``, that of the client's PyTorch at the creation of the trainer: a run computes as
    it would in the client's process. The values of a run are stored in its checkpoints.

    Args:
        matmul: Precision of products of float32 matrices: ``highest`` (float32), ``high`` (TF32 where a device has it)
            or ``medium`` (bf16 also); see ``torch.set_float32_matmul_precision``.
        tf32_convolutions: Whether cuDNN's convolutions of float32 may use TF32, as by
            ``torch.backends.cudnn.allow_tf32``.
        cudnn_benchmark: Whether cuDNN tries its algorithms and takes the fastest, which may be another one in the next
            run.
        cudnn_deterministic: Whether cuDNN uses deterministic algorithms only.
        deterministic: Whether all operators are deterministic, as by ``torch.use_deterministic_algorithms``; one that
            cannot be is an error, or a warning of the worker where this is ``"warn"``. On a GPU, steps repeated after
            the loss of a worker are bitwise the same only with ``True``.
        cuda_graphs: Whether GPUs may repeat a program as a CUDA graph, with the same kernels but without launching them
            one by one.

    Raises:
        UsageError: A value is not allowed.

    Example:
        >>> Engine(numerics=Numerics(matmul="high", deterministic=True)).numerics.matmul
        'high'
    """

    matmul: MatmulPrecision | None = None
    tf32_convolutions: bool | None = None
    cudnn_benchmark: bool | None = None
    cudnn_deterministic: bool | None = None
    deterministic: bool | Literal["warn"] | None = None
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.matmul is not None:
            _require_one("matmul", self.matmul, get_args(MatmulPrecision))
        for name in ("tf32_convolutions", "cudnn_benchmark", "cudnn_deterministic"):
            if getattr(self, name) is not None:
                require_bool(name, getattr(self, name))
        if not isinstance(self.deterministic, bool) and self.deterministic not in (None, "warn"):
            raise UsageError(f"deterministic={self.deterministic!r}: allowed are True, False and 'warn'")
        if self.cuda_graphs is not True:
            require_bool("cuda_graphs", self.cuda_graphs)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Execution of steps.

    Args:
        in_flight: Most steps in flight; without it as many as keep the workers busy: two on one machine or a LAN, up to
            eight with long round trips or islands.
        overlap: Overlap a part of the averaging and of the update of each exact step with the next one, just before its
            parameters are read, and send large values in chunks where that is predicted to pay
            (docs/concepts/topology.md). The result is bitwise the same, except for the last bit of matrix products of
            chunks.
        fuse: Fuse activations that the model composes of several operators, such as GELU in Hugging Face's GPT-2: fewer
            passes over memory, and fewer tensors kept for backward. Results differ by rounding.
        trace: Time the workers' instructions, for :meth:`Trainer.events`.
        check_every: Steps between two comparisons of a hash of all parameters and buffers among replicas; 0 for none.
        costs: For experiments with emulated ``sim`` devices: for each segment of the model, by name, the seconds of
            forward, input gradient and weight gradient of a sample, at speed 1. Without it the plan's predictions.
        numerics: Precision and determinism of the workers' operators; without it as the client's PyTorch is set.

    Raises:
        UsageError: A value is not allowed.
    """

    in_flight: int | None = None
    overlap: bool = False
    fuse: bool = False
    trace: bool = True
    check_every: int = 100
    costs: SegmentCosts | None = None
    numerics: Numerics = Numerics()

    def __post_init__(self) -> None:
        if not isinstance(self.numerics, Numerics):
            raise UsageError(f"numerics={self.numerics!r}: allowed are onebox.Numerics(...)")
        require_int("in_flight", self.in_flight, least=1)
        require_int("check_every", self.check_every, least=0, optional=False)
        for name in ("overlap", "fuse", "trace"):
            require_bool(name, getattr(self, name))
        check_costs(self.costs or {})


def checked_lossy(lossy: Collection[str]) -> tuple[LossyPart, ...]:
    """Return the parts of a run's traffic that may be compressed with a loss, each once.

    Raises:
        UsageError: There is no such part.
    """
    if isinstance(lossy, str) or not all(part in LOSSY_PARTS for part in lossy):
        parts = ", ".join(map(repr, LOSSY_PARTS))
        raise UsageError(f"lossy={lossy!r}: allowed are {parts}, in a tuple, and () for none")
    return tuple(part for part in LOSSY_PARTS if part in lossy)


def check_costs(costs: SegmentCosts) -> None:
    """Refuse invalid segment costs.

    Raises:
        UsageError: A cost is not a triple of times.
    """
    for name, times in costs.items():
        if len(times) != 3 or not all(0 <= seconds < math.inf for seconds in times):
            raise UsageError(f"costs of segment {name!r} are {times}: allowed are three times in seconds, from 0 up")


def is_number(value: object) -> bool:
    """Return whether a value is a number, which ``True`` is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_shares(shares: Any, receiver: str = "device") -> Shares:
    if isinstance(shares, str) and shares in ("auto", "equal", "measured"):
        return shares  # type: ignore[return-value]
    try:
        weights = () if isinstance(shares, str) else tuple(float(share) for share in shares)
    except (TypeError, ValueError):
        weights = ()
    if not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
        raise UsageError(
            f"shares={shares!r}: allowed are auto, equal, measured, or one weight for each {receiver}, such as 3,1, "
            "from 0 up and not all 0"
        )
    return weights


def require_int(name: str, value: object, *, least: int, optional: bool = True) -> None:
    """Refuse an option that is no whole number from ``least`` up.

    Raises:
        UsageError: What came, and what is allowed.
    """
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r}: allowed are {least} and more")


def require_bool(name: str, value: object) -> None:
    """Refuse an option that is neither true nor false.

    Raises:
        UsageError: What came, and what is allowed.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r}: allowed are True and False")


def _require_one(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")


def _size_bytes(name: str, size: Any) -> int:
    if isinstance(size, str):
        return parse_size(name, size) if size != "0" else 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise UsageError(f"{name}={size!r}: allowed are sizes such as '1GiB', or bytes from 0 up")
    return size
