"""Responses: messages of a worker to its client; the counterpart of :mod:`onebox.wire.protocol.requests`."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from onebox.wire.program import Complex, Message, TensorSpec
from onebox.wire.protocol.eager import Strided
from onebox.wire.protocol.snapshots import StateEntry


class InstructionSets(Message, frozen=True):
    """Instruction sets that a worker uses on its processor.

    Args:
        aten: Instruction set of ATen's own kernels: ``DEFAULT``, ``AVX2``, ``AVX512`` …; ``ATEN_CPU_CAPABILITY`` limits
            it.
        onednn: Instruction set reported by oneDNN; ``ONEDNN_MAX_CPU_ISA`` limits it.
        maker: Vendor of the processor. MKL's choice of kernels depends on it: the newest ones on Intel's only.
        hardware: Features of the processor, of AVX2, AVX-512, VNNI, bf16, AMX and AMX fp16.
    """

    aten: str = ""
    onednn: str = ""
    maker: str = ""
    hardware: tuple[str, ...] = ()


NO_INSTRUCTION_SETS = InstructionSets()
"""Instruction sets of a device that computes nothing."""


class Hello(Message, frozen=True, tag="hello"):
    """First message of a worker: its identity and resources.

    Args:
        protocol: Its :data:`PROTOCOL`.
        torch: Its torch version.
        device: Such as ``cpu``, ``cuda:0`` or ``sim``.
        name: The device's product name.
        threads: Threads that operators may use.
        memory_bytes: Memory of the device that tensors may take, or the worker's quota if that is less.
        speed: Fraction of full speed of a throttled CPU; for a ``sim`` device, the divisor of costs.
        emulated: Whether its times are artificial: it is throttled, or computes nothing (``sim``).
        capability: Compute capability of a GPU, such as (9, 0); (0, 0) otherwise.
        processors: Streaming multiprocessors of a GPU; 0 otherwise.
        nccl: Whether the worker of a GPU has NCCL.
        instructions: The instruction sets that it uses; none for a device that computes nothing.
        cores: Cores of its host that it may use.
        codecs: Supported compression of frames.
        host_bytes: Host memory that it may use for data that would otherwise be on the device.
        host_free_bytes: Free memory of its host at its start.
        gpu: Identity of a GPU: its host, since when, and its place on the bus; empty for others, and where unknown.
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
    gpu: str = ""


class WorkerFailure(Message, frozen=True, tag="failure"):
    """The first failure.

    Args:
        kind: ``operator``, ``memory``, ``values`` (a ``sim`` device has none), ``address`` (of this host, which is not
            its own), ``peer`` (another worker of a group has ended) or ``protocol``.
        operator: Operator or instruction that failed.
        message: The error message.
        shapes: Its tensor arguments.
        cause: Type of the exception, such as ``IndexError``.
        routine: The routine in which it happened; 0 outside of one.
        place: Index of the instruction in the routine.
        asked_bytes: For insufficient memory, if known: requested bytes,
        used_bytes: other bytes in use,
        allowed_bytes: and the limit.
        kept: Whether only the step, or the batch, is affected: what lasts is unchanged.
        steps: The numbers of the steps that it, and what failed after it, has cost.
        index: Index of the operator in its program; -1 if it is none of a program.
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
    kept: bool = False
    steps: tuple[int, ...] = ()
    index: int = -1


class Tensors(Message, frozen=True, tag="tensors"):
    """Reply to :class:`Get`; elements in as many frames."""

    specs: tuple[TensorSpec, ...]


class Scalars(Message, frozen=True, tag="scalars"):
    """Reply to ``Ask("scalars")``, and the gradient norm of an :class:`OptimizerStep` that clips."""

    values: tuple[float, ...]


class Delays(Message, frozen=True, tag="delays"):
    """Reply to an :class:`OptimizerStep` of parameters with versions: the measured delays of its gradients.

    The worker counts the updates of each parameter, and records the versions that the calls of a step read.

    Args:
        counts: Each delay in updates, with its number of parameters, in ascending order.
        mixed: Number of parameters of which calls of the step read several versions; they count with the oldest.
        unread: Number of parameters that no call of the step has read; they are not counted.
    """

    counts: tuple[tuple[int, int], ...] = ()
    mixed: int = 0
    unread: int = 0


class Digest(Message, frozen=True, tag="digest"):
    """Reply to ``Ask("digest")``."""

    value: bytes


class WorkerMemory(Message, frozen=True, tag="memory"):
    """Reply to ``Ask("memory")``.

    Args:
        used_bytes: Present bytes of buffers.
        peak_bytes: Peak bytes of buffers.
        quota_bytes: Limit of bytes of buffers; 0 for no limit.
        kept_bytes: Bytes of slots, on the host.
        host_bytes: Bytes on the host instead of the device: optimizers on the host, offloaded activations.
        host_peak_bytes: Peak of ``host_bytes``.
        allocated_peak_bytes: Peak bytes of PyTorch's allocator on a GPU, including temporary memory of operators; 0
            otherwise.
    """

    used_bytes: int
    peak_bytes: int
    quota_bytes: int
    kept_bytes: int = 0
    host_bytes: int = 0
    host_peak_bytes: int = 0
    allocated_peak_bytes: int = 0


class OptimizerState(Message, frozen=True, tag="state"):
    """Reply to ``Ask("optimizer")``; the elements of its tensors are in frames, in order."""

    entries: tuple[StateEntry, ...]


class SnapshotContents(Message, frozen=True, tag="kept"):
    """Reply to ``Snapshot``: contents of the slot, in order; tensors of buffers, and entries of the optimizer."""

    specs: tuple[TensorSpec, ...]
    entries: tuple[StateEntry, ...]


class FilledSlots(Message, frozen=True, tag="slots"):
    """Reply to ``Ask("slots")`` and ``Ask("filled")``.

    Args:
        filled: Filled slots, or buffers that are not void.
        failure: Reason that others cannot be filled; empty for none.
    """

    filled: tuple[int, ...]
    failure: str = ""


class OperatorResult(Message, frozen=True, tag="made"):
    """Reply to ``Perform``.

    Args:
        results: Results of the operator, with lists flattened: a tensor, an undefined one, or a number.
        inputs: Present layouts of its inputs.
    """

    results: tuple[Strided | Complex | bool | int | float | None, ...]
    inputs: tuple[Strided, ...]


class BufferCopies(Message, frozen=True, tag="copies"):
    """Reply to :class:`~onebox.wire.protocol.eager.CopyBuffers`; each storage is a frame.

    Args:
        buffers: The buffers.
        layouts: Layout of each in its storage.
        storages: Frame of each, among those of this reply.
        stopped: Whether a failure has stopped the stream, so that the copies are not all of its state.
        took_ns: Nanoseconds that the worker spent on them.
    """

    buffers: tuple[int, ...]
    layouts: tuple[Strided, ...]
    storages: tuple[Annotated[int, Meta(ge=0)], ...]
    stopped: bool
    took_ns: int


class Joined(Message, frozen=True, tag="joined"):
    """Reply to :class:`FormGroup`.

    Args:
        near: Ranks that share memory with this one, including it; empty if sharing was not requested.
        apart: Ranks on this host that do not, with the reason.
    """

    near: tuple[int, ...] = ()
    apart: tuple[tuple[int, str], ...] = ()


Result = (
    OperatorResult
    | BufferCopies
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


class GroupTraffic(Message, frozen=True):
    """Traffic of a worker's connection in a group to a rank of another host.

    Args:
        group: The group.
        peer: The rank.
        size_bytes: Bytes that have arrived.
        busy_ns: Time in which bytes were on the way or queued, without the round trips of the last ones.
    """

    group: Annotated[int, Meta(ge=0)]
    peer: Annotated[int, Meta(ge=0)]
    size_bytes: Annotated[int, Meta(ge=0)]
    busy_ns: Annotated[int, Meta(ge=0)]


class LinkTraffic(NamedTuple):
    """Traffic of a worker's connections to a worker of another host: :class:`GroupTraffic` of all groups.

    Args:
        worker: The number of the other worker in the pool.
        size_bytes: Bytes that have arrived.
        busy_ns: Time in which bytes were on the way or queued.
    """

    worker: int
    size_bytes: int
    busy_ns: int


class MessageTimes(Message, frozen=True):
    """Times of a message of a script's stream, on the worker's monotonic clock.

    Args:
        message: Its number in the stream.
        start_ns: The start of its first instruction.
        end_ns: The end of its last one; on a GPU that of its kernels.
        waited_ns: How much of that was spent waiting for other workers; on a GPU such a wait is not known.
    """

    message: int
    start_ns: int
    end_ns: int
    waited_ns: int

    @property
    def busy_ns(self) -> int:
        """Nanoseconds in which the device worked."""
        return max(0, self.end_ns - self.start_ns - self.waited_ns)


class Reply(Message, frozen=True, tag="reply"):
    """Reply to an envelope.

    Args:
        number: The envelope's.
        results: One for each instruction with a reply, in order.
        failure: The failure, if any; then there are no results.
        times_ns: With ``Run.trace``: for each instruction of such routines, its start and end on the monotonic clock.
        used_bytes: Likewise: peak bytes in use during it, and bytes in use after it.
        traffic: Likewise: what was carried to workers of other hosts since the reply before that told it.
        messages: Of a script's stream: the messages that the device has executed and no reply has told of.
    """

    number: int
    results: tuple[Result, ...] = ()
    failure: WorkerFailure | None = None
    times_ns: tuple[int, ...] = ()
    used_bytes: tuple[int, ...] = ()
    traffic: tuple[GroupTraffic, ...] = ()
    messages: tuple[MessageTimes, ...] = ()


class Heartbeat(Message, frozen=True, tag="beat"):
    """Heartbeat.

    Args:
        executed: Number of operators and instructions executed so far.
        stalled_s: Seconds for which the current one has made no progress and used no processor time; 0 normally, or
            while it waits for other workers.
        doing: Its present activity.
        used_bytes: Present bytes of buffers.
        peak_bytes: Peak bytes of buffers.
    """

    executed: int
    stalled_s: float
    doing: str
    used_bytes: int
    peak_bytes: int


class ClockReading(Message, frozen=True, tag="reading"):
    """Reply to :class:`~onebox.wire.protocol.requests.ReadClock`.

    Args:
        asked_ns: The time in the question.
        read_ns: The worker's monotonic clock.
    """

    asked_ns: int
    read_ns: int


LOOKUP_KEYS = 1024
"""Most keys of a lookup; the client keeps those of lookups that wait."""


class Lookup(Message, frozen=True, tag="lookup"):
    """A rendezvous operation of a group.

    Args:
        ticket: The worker's number for it; the reply repeats it.
        group: The group.
        action: ``set`` (without a reply), ``get`` (waits for the keys), ``add`` (to a counter), ``check``, or
            ``delete``.
        keys: One key; for ``get`` and ``check`` also up to :data:`LOOKUP_KEYS`, each once.
        value: The value for ``set``, the decimal amount for ``add``.
    """

    ticket: int
    group: int
    action: Literal["set", "get", "add", "check", "delete"]
    keys: tuple[str, ...]
    value: bytes = b""


class Contribution(Message, frozen=True, tag="contribution"):
    """A bucket to be reduced at the client, in one frame.

    Args:
        ticket: The reply repeats it.
        group: The group, of backend ``client``.
        order: Sequence number of the worker's contributions to the group; equal numbers of all members are summed.
        spec: The bucket, flat.
    """

    ticket: int
    group: int
    order: int
    spec: TensorSpec


class Left(Message, frozen=True, tag="left"):
    """This worker has left a group, or could not join it: other members must not wait for it.

    Args:
        group: The group.
        failed: Whether it has left because it could not do its part.
    """

    group: int
    failed: bool = False


class RelayRequest(Message, frozen=True, tag="relay"):
    """This worker cannot connect to a peer of a group: the client is to relay what it sends there.

    Args:
        group: The group.
        peer: The peer's rank.
    """

    group: int
    peer: int


WorkerMessage = Hello | Reply | Heartbeat | ClockReading | Lookup | Contribution | Left | RelayRequest
