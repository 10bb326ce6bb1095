"""Messages: requests of a client to a worker, and their contents.

A client sends an :class:`Envelope` of instructions, executed in order; tensors follow as raw frames. The client chooses
the numbers of buffers. Inside a stored :class:`Routine` a negative reference ``-1 - k`` stands for binding ``k`` of the
:class:`Run` that starts it. No type is recursive and every decode is strict.
"""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Message, Program, TensorSpec
from onebox.wire.protocol.eager import (
    BoundMemory,
    CopyBuffers,
    EagerWork,
    GeneratorSpec,
    KernelSpec,
    StreamHeader,
    Strided,
    TapeSpec,
)
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Reduced, Rendezvous, Retime, TicketCancelled
from onebox.wire.protocol.instructions import GroupDelays, Options, Step
from onebox.wire.protocol.snapshots import SlotInstruction, StateEntry

PROTOCOL = 27
"""Version of the messages in this folder and of ``program.py``; client and worker must agree."""


class Routine(Message, frozen=True, tag="routine"):
    """A stored sequence of instructions.

    Args:
        steps: The instructions.
        bindings: As many as its negative references need.
        optimizer: If positive, the optimizer whose steps wait for a :class:`Vote`. After a failure before the vote, the
            worker objects in it, computes nothing more of that step, and sends NaNs, or zeros of integers, in place of
            what it would have computed, so that the other workers come to the vote. Otherwise a failure voids what it
            would have written.
    """

    steps: tuple[Step, ...]
    bindings: int
    optimizer: int = 0


class OptimizerSpec(Message, frozen=True, tag="optimizer"):
    """A native optimizer.

    Args:
        name: Class in ``torch.optim``, for all groups or for each.
        groups: For each parameter group, positions in ``parameters``, each in one group, and its options.
        parameters: Buffers of the parameters, updated in place.
        state: Initial state; the elements of its tensors are in frames, in order.
        cost_s: Seconds of a step on a ``sim`` device of speed 1; ignored by other devices.
        host: Whether its state and its steps are in the host's memory.
        delay: Treatment of gradients that are a step late, for all groups or for each.
        succeeds: Whether it replaces the optimizer with its number, if there is one, inheriting the state of common
            buffers.
    """

    name: str | tuple[str, ...]
    groups: tuple[tuple[tuple[int, ...], Options], ...]
    parameters: tuple[int, ...]
    state: tuple[StateEntry, ...] = ()
    cost_s: float = 0.0
    host: bool = False
    delay: GroupDelays = "none"
    succeeds: bool = False


class StoredProgram(Message, frozen=True, tag="program"):
    """A program, as a definition.

    Args:
        program: The program.
        cost_s: Seconds of a call on a ``sim`` device of speed 1; ignored by other devices.
        layouts: Required layout of each output, ``None`` for a view of an input or any layout; empty if none is
            required.
    """

    program: Program
    cost_s: float = 0.0
    layouts: tuple[Strided | None, ...] = ()


class Define(Message, frozen=True, tag="define"):
    """Store something under a number."""

    number: int
    what: StoredProgram | Routine | OptimizerSpec | KernelSpec | TapeSpec | GeneratorSpec


class Put(Message, frozen=True, tag="put"):
    """Fill buffers from the next frames, one frame for each buffer.

    Args:
        buffers: Their numbers.
        specs: Their new specs.
        packed: Compression of each frame, or none; empty if none is compressed.
        there: Whether the buffers already hold tensors of these specs, which are overwritten in place, so that an
            optimizer that updates them, including one on the host, uses the new elements.
    """

    buffers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    packed: tuple[Literal["", "lz4", "zstd"], ...] = ()
    there: bool = False


class Run(Message, frozen=True, tag="run"):
    """Run a stored routine.

    Args:
        routine: Its number.
        bindings: The buffers for its negative references.
        step: The training step, part of the seed of random operators.
        seed: The run's seed.
        options: New options for each group of each optimizer in the routine, in order, from this step on; empty for no
            change. Gradients of an earlier step are applied with the options of that step.
        optimizer: An optimizer outside the routine that the options are for; 0 for none.
        trace: Whether to return the time of each instruction: its start and its end on the monotonic clock, which all
            processes of a host share. An instruction starts when the buffers that it reads are present, so that a wait
            for other workers is a gap before it. ``Receive`` lasts from its posting until its tensor has arrived, even
            if it is read later; ``Send`` until its tensor is available to the peer (copied, and across an emulated
            link); ``Reduce`` and ``Gather`` until a waiting reader has the result; ``Offload`` and ``Prefetch`` until
            their copies are complete. An operation that is not waited for by the end of the run ends where it was
            posted. Over TCP and NCCL, a ``Receive`` ends when it is read, and a ``Send`` when it is handed to the
            library. Times of a GPU are those at which it reaches the instruction's place in its work, within tens of
            microseconds, however far the host is ahead; a ``Receive`` there ends when its reader may read it.
        void: Whether this worker objects to the step: nothing is computed for it, and no worker applies it.
    """

    routine: int
    bindings: tuple[int, ...] = ()
    step: int = 0
    seed: int = 0
    options: tuple[Options, ...] = ()
    trace: bool = False
    optimizer: int = 0
    void: bool = False


class SetNumerics(Message, frozen=True, tag="numerics"):
    """Set precision and determinism of operators for the rest of the message; otherwise they are PyTorch's defaults.

    Args:
        matmul: Precision of products of float32 matrices.
        tf32_convolutions: Whether cuDNN's convolutions may use TF32.
        cudnn_benchmark: Whether cuDNN chooses its algorithms by trying them.
        cudnn_deterministic: Whether cuDNN uses deterministic algorithms only.
        deterministic: Whether all operators must be deterministic: ``no``, ``warn``, or ``yes``, with which others
            fail.
        cuda_graphs: Whether programs may be captured as CUDA graphs.
        check_nan: Whether a call fails whose outputs are gradients and not all of them numbers.
    """

    matmul: Literal["highest", "high", "medium"] = "highest"
    tf32_convolutions: bool = True
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = False
    deterministic: Literal["no", "warn", "yes"] = "no"
    cuda_graphs: bool = True
    check_nan: bool = False


class FreeRange(Message, frozen=True, tag="free-range"):
    """Free all buffers and definitions whose numbers are in a range: those of a client process that has ended.

    Args:
        first: The first number.
        end: The number after the last one.
    """

    first: int
    end: int


class ReadClock(Message, frozen=True, tag="clock"):
    """Reply at once with :class:`~onebox.wire.protocol.responses.ClockReading`; sent beside the queue.

    Args:
        asked_ns: The client's monotonic clock; the reply repeats it.
    """

    asked_ns: int


class Shutdown(Message, frozen=True, tag="bye"):
    """End the worker."""


Instruction = (
    Step
    | Define
    | Put
    | Run
    | EagerWork
    | BoundMemory
    | CopyBuffers
    | StreamHeader
    | SlotInstruction
    | FormGroup
    | LeaveGroup
    | Retime
    | SetNumerics
    | FreeRange
    | Rendezvous
    | Reduced
    | TicketCancelled
    | ReadClock
    | Shutdown
)


class Envelope(Message, frozen=True):
    """One message from a client.

    Args:
        number: Sequence number; the reply repeats it.
        answer: Whether to reply after completion. A failure is always reported.
        instructions: The instructions, in order.
    """

    number: int
    answer: bool
    instructions: tuple[Instruction, ...]
