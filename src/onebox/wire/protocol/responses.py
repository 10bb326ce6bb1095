"""Sayings: what a worker tells its client; the other half of :mod:`onebox.wire.protocol.requests`."""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Complex, Message, TensorSpec
from onebox.wire.protocol.eager import Strided
from onebox.wire.protocol.snapshots import StateEntry


class InstructionSets(Message, frozen=True):
    """The instruction sets that a worker uses on its processor.

    Args:
        aten: What ATen's own kernels use: ``DEFAULT``, ``AVX2``, ``AVX512`` …; ``ATEN_CPU_CAPABILITY`` limits it.
        onednn: What oneDNN says that it uses; ``ONEDNN_MAX_CPU_ISA`` limits it.
        maker: Who has made the processor. MKL chooses its kernels by that, too: the newest ones on Intel's only.
        hardware: What the processor has, of AVX2, AVX-512, VNNI, bf16, AMX and AMX fp16.
    """

    aten: str = ""
    onednn: str = ""
    maker: str = ""
    hardware: tuple[str, ...] = ()


NO_INSTRUCTION_SETS = InstructionSets()
"""Of what computes nothing."""


class Hello(Message, frozen=True, tag="hello"):
    """First words of a worker: who it is and what it has.

    Args:
        protocol: Its :data:`PROTOCOL`.
        torch: Its torch version.
        device: Such as ``cpu``, ``cuda:0`` or ``sim``.
        name: The device's product name.
        threads: Threads that operators may use.
        memory_bytes: Memory of the device, or the worker's quota where that is less.
        speed: Fraction of its full speed that a throttled CPU works at; of a ``sim`` device, what costs are divided by.
        emulated: Whether times on it are made: it is throttled, or computes nothing (``sim``).
        capability: Compute capability of a GPU, such as (9, 0); (0, 0) for all else.
        processors: Streaming multiprocessors of a GPU; 0 for all else.
        nccl: Whether the worker of a GPU has NCCL.
        instructions: The instruction sets that it uses; none of a device that computes nothing.
        cores: Cores of its host that it may use.
        codecs: How frames for it may be packed.
        host_bytes: Its host's memory that it may keep things in which would else be on the device.
        host_free_bytes: Memory of its host that nobody used when it began.
    """

    protocol: int
    torch: str
    device: str
    name: str
    threads: int
    memory_bytes: int
    speed: float = 1.0
    emulated: bool = False
    capability: tuple[int, int] = (0, 0)
    processors: int = 0
    nccl: bool = False
    instructions: InstructionSets = NO_INSTRUCTION_SETS
    cores: int = 0
    codecs: tuple[str, ...] = ()
    host_bytes: int = 0
    host_free_bytes: int = 0


class WorkerFailure(Message, frozen=True, tag="failure"):
    """The first thing that went wrong.

    Args:
        kind: ``operator``, ``memory``, ``values`` (a ``sim`` device has none), ``address`` (of this host, which is not
            its own), ``peer`` (another worker of a group went away) or ``protocol``.
        operator: Operator or instruction that failed.
        message: What it said.
        shapes: Its tensor arguments.
        cause: Type of the exception, such as ``IndexError``.
        routine: The routine that it happened in; 0 outside of one.
        place: Which of the routine's instructions it was.
        asked_bytes: Of a lack of memory, where they are known: the bytes that were asked for,
        used_bytes: those that were in use beside them,
        allowed_bytes: and those that are allowed.
    """

    kind: Literal["operator", "memory", "values", "address", "peer", "protocol"]
    operator: str
    message: str
    shapes: str = ""
    cause: str = ""
    routine: int = 0
    place: int = 0
    asked_bytes: int = 0
    used_bytes: int = 0
    allowed_bytes: int = 0


class Tensors(Message, frozen=True, tag="tensors"):
    """Answer to :class:`Get`; elements in as many frames."""

    specs: tuple[TensorSpec, ...]


class Scalars(Message, frozen=True, tag="scalars"):
    """Answer to ``Ask("scalars")``, and the gradient norm of an :class:`OptimizerStep` that clips."""

    values: tuple[float, ...]


class Delays(Message, frozen=True, tag="delays"):
    """Answer to an :class:`OptimizerStep` of parameters that have versions: how late its gradients were, as measured.

    The worker counts the updates of each parameter, and notes which version of it the calls of a step read.

    Args:
        counts: Each delay that was found, in updates, and of how many parameters, in ascending order.
        mixed: How many of them had calls of the step read several versions; they count with the oldest.
        unread: How many parameters no call of the step has read; they are in no count.
    """

    counts: tuple[tuple[int, int], ...] = ()
    mixed: int = 0
    unread: int = 0


class Digest(Message, frozen=True, tag="digest"):
    """Answer to ``Ask("digest")``."""

    value: bytes


class WorkerMemory(Message, frozen=True, tag="memory"):
    """Answer to ``Ask("memory")``.

    Args:
        used_bytes: Of buffers, now.
        peak_bytes: The most of them so far.
        quota_bytes: The most that they may be; 0 for no limit.
        kept_bytes: Of slots, on the host.
        host_bytes: Of what is on the host instead of the device: optimizers that step there, activations that wait.
        host_peak_bytes: The most of it so far.
        allocated_peak_bytes: The most that PyTorch's allocator had given out on a GPU, what operators need in passing
            among it; 0 for all else.
    """

    used_bytes: int
    peak_bytes: int
    quota_bytes: int
    kept_bytes: int = 0
    host_bytes: int = 0
    host_peak_bytes: int = 0
    allocated_peak_bytes: int = 0


class OptimizerState(Message, frozen=True, tag="state"):
    """Answer to ``Ask("optimizer")``; the elements of its tensors are in frames, in order."""

    entries: tuple[StateEntry, ...]


class SnapshotContents(Message, frozen=True, tag="kept"):
    """Answer to ``Snapshot``: what lies in the slot, in order; tensors of buffers, and entries of the optimizer."""

    specs: tuple[TensorSpec, ...]
    entries: tuple[StateEntry, ...]


class FilledSlots(Message, frozen=True, tag="slots"):
    """Answer to ``Ask("slots")``.

    Args:
        filled: Those that are.
        failure: Why others cannot be; empty where all is well.
    """

    filled: tuple[int, ...]
    failure: str = ""


class OperatorResult(Message, frozen=True, tag="made"):
    """Answer to ``Perform``.

    Args:
        results: What the operator returned, lists one by one: a tensor, an undefined one, or a number.
        inputs: What its inputs are now.
    """

    results: tuple[Strided | Complex | bool | int | float | None, ...]
    inputs: tuple[Strided, ...]


class Joined(Message, frozen=True, tag="joined"):
    """Answer to :class:`FormGroup`.

    Args:
        near: The ranks that share memory with this one, which is among them; nobody where none was to.
        apart: Those that do not though they are on this host, and why.
    """

    near: tuple[int, ...] = ()
    apart: tuple[tuple[int, str], ...] = ()


Result = (
    OperatorResult
    | Tensors
    | Scalars
    | Delays
    | Digest
    | WorkerMemory
    | OptimizerState
    | SnapshotContents
    | FilledSlots
    | Joined
)


class Reply(Message, frozen=True, tag="reply"):
    """Answer to an envelope.

    Args:
        number: The envelope's.
        results: One for each instruction that answers, in order.
        failure: What went wrong, if anything did; then there are no results.
        times_ns: With ``Run.trace``: for each instruction of the routine, its start and end on the monotonic clock.
        used_bytes: Likewise: the most bytes that were in use while it ran, and those in use after it.
    """

    number: int
    results: tuple[Result, ...] = ()
    failure: WorkerFailure | None = None
    times_ns: tuple[int, ...] = ()
    used_bytes: tuple[int, ...] = ()


class Heartbeat(Message, frozen=True, tag="beat"):
    """Sign of life.

    Args:
        executed: Operators and instructions executed so far.
        stalled_s: How long the current one has made no progress and used no processor time; 0 when all is well,
            or while it waits for other workers.
        doing: What it is at.
    """

    executed: int
    stalled_s: float
    doing: str


class Lookup(Message, frozen=True, tag="lookup"):
    """A rendezvous operation of a group.

    Args:
        ticket: The worker's number for it; the answer names it.
        group: The group.
        action: ``set`` (no answer waited for), ``get`` (waits for the key), ``add`` (to a counter), ``check``, or
            ``delete``.
        keys: One key; several for ``check``.
        value: For ``set`` the value, for ``add`` the decimal amount.
    """

    ticket: int
    group: int
    action: Literal["set", "get", "add", "check", "delete"]
    keys: tuple[str, ...]
    value: bytes = b""


class Contribution(Message, frozen=True, tag="contribution"):
    """A bucket to be summed at the client, in one frame.

    Args:
        ticket: The answer names it.
        group: The group, of backend ``client``.
        order: Counts the worker's contributions to the group; equal orders of all members are summed.
        spec: The bucket, flat.
    """

    ticket: int
    group: int
    order: int
    spec: TensorSpec


class Left(Message, frozen=True, tag="left"):
    """This worker has left a group, or could not join it: nobody is to wait for it there."""

    group: int


WorkerMessage = Hello | Reply | Heartbeat | Lookup | Contribution | Left
