"""Messages: what a client asks of a worker, and what a worker answers.

A client sends an :class:`Envelope` of instructions, executed in order; tensors travel as raw frames behind it. A buffer
is a number that the client chose. Inside a stored :class:`Routine` a negative reference ``-1 - k`` stands for binding
``k`` of the :class:`Run` that starts it. No type is recursive and every decode is strict.
"""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Message, Program, TensorSpec
from onebox.wire.protocol.eager import BlockSpec, EagerWork, GeneratorSpec, KernelSpec, Strided
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Reduced, Rendezvous, Retime, TicketCancelled
from onebox.wire.protocol.instructions import GroupDelays, Options, Step
from onebox.wire.protocol.snapshots import SlotInstruction, StateEntry

PROTOCOL = 11
"""Version of everything in this file, in ``steps.py``, ``program.py`` and ``state.py``; both sides must agree."""


class Routine(Message, frozen=True, tag="routine"):
    """A stored sequence of instructions, with as many bindings as its negative references need."""

    steps: tuple[Step, ...]
    bindings: int


class OptimizerSpec(Message, frozen=True, tag="optimizer"):
    """A native optimizer.

    Args:
        name: Class in ``torch.optim``, of all groups or of each.
        groups: For each parameter group, positions in ``parameters``, each in one group, and its options.
        parameters: Buffers of the parameters, updated in place.
        state: State to start from; the elements of its tensors are in frames, in order.
        cost_s: Seconds that a step takes on a ``sim`` device of speed 1; other devices take what it takes.
        host: Whether its state is in the host's memory, and its steps are computed there.
        delay: What is done about gradients that are a step late, in all groups or in each.
        succeeds: Whether it takes the place of the optimizer that has its number now, if there is one, with what that
            remembers of buffers that both have.
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
        cost_s: Seconds that a call takes on a ``sim`` device of speed 1; other devices take what it takes.
        layouts: For each output how its elements are to lie, ``None`` where it is a view of an input or it does not
            matter; empty where none matters.
    """

    program: Program
    cost_s: float = 0.0
    layouts: tuple[Strided | None, ...] = ()


class Define(Message, frozen=True, tag="define"):
    """Store something under a number."""

    number: int
    what: StoredProgram | Routine | OptimizerSpec | KernelSpec | BlockSpec | GeneratorSpec


class Put(Message, frozen=True, tag="put"):
    """Fill buffers from the next frames, one frame a buffer.

    Args:
        buffers: Their numbers.
        specs: What they become.
        packed: How each frame is compressed, nothing where it is not; empty where none is.
        there: Whether the buffers hold tensors of these specifications already, and the elements come to be where those
            lie, so that an optimizer that steps them, on the host as well, has them, too.
    """

    buffers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    packed: tuple[Literal["", "lz4", "zstd"], ...] = ()
    there: bool = False


class Run(Message, frozen=True, tag="run"):
    """Run a stored routine.

    Args:
        routine: Its number.
        bindings: The buffers that its negative references stand for.
        step: The training step, part of the seed of random operators.
        seed: The run's seed.
        options: New options for each group of each optimizer that the routine steps, in order, from this step on;
            empty for no change. Gradients of an earlier step are applied with the options of theirs.
        optimizer: One that the options are for although the routine does not step it; 0 for none.
        trace: Whether to answer with the time of each instruction: its start and its end on the monotonic clock, which
            all processes of a host share. A start is taken after the buffers that the instruction reads are there, so
            that a wait for other workers is a gap before it. ``Receive`` lasts from its posting until its tensor had
            arrived, however much later that was read; ``Send`` until its tensor can be had by the peer (copied, and
            across an emulated link); ``Reduce`` and ``Gather`` until somebody who waited for the result had it;
            ``Offload`` and ``Prefetch`` until their copies were made. What nobody has waited for by the end of the run
            ends where it was posted. By Gloo and NCCL, the end of a ``Receive`` is when it was read, and that of a
            ``Send`` when it was handed over; on a GPU, what is copied to and from the host ends when it was read.
    """

    routine: int
    bindings: tuple[int, ...] = ()
    step: int = 0
    seed: int = 0
    options: tuple[Options, ...] = ()
    trace: bool = False
    optimizer: int = 0


class Shutdown(Message, frozen=True, tag="bye"):
    """End the worker."""


Instruction = (
    Step
    | Define
    | Put
    | Run
    | EagerWork
    | SlotInstruction
    | FormGroup
    | LeaveGroup
    | Retime
    | Rendezvous
    | Reduced
    | TicketCancelled
    | Shutdown
)


class Envelope(Message, frozen=True):
    """One message from a client.

    Args:
        number: Counts up; an answer names it.
        answer: Whether to answer when all is done. A failure is always answered.
        instructions: What to do, in order.
    """

    number: int
    answer: bool
    instructions: tuple[Instruction, ...]
