"""Instructions allowed in stored routines as well as in messages.

Buffers are numbers; a negative reference ``-1 - k`` stands for binding ``k`` of the run that starts a routine.
"""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Message, TensorSpec

Delay = Literal["none", "predict", "extrapolate", "lookahead", "both", "feedback"]
"""Treatment of gradients that are a step late: none; forward and backward use weights predicted from the optimizer's
momentum; the same plus the momentum's change; steps look further ahead along the momentum; that and the first of these;
or the error of a step is corrected in the next one."""

GroupDelays = Delay | tuple[Delay, ...]
"""One treatment for all parameter groups, or one for each."""

Options = dict[str, bool | int | float | str | tuple[float | None, ...] | None]


class Call(Message, frozen=True, tag="call"):
    """Run a stored program.

    Args:
        program: Its number.
        inputs: Buffer references, one for each input.
        outputs: Buffer references, one for each output.
        takes: Positions in ``inputs`` of buffers that end with this call, so that their memory is freed after their
            last use in the program.
        micro_batch: Index of the micro-batch within the step; part of the seed of random operators.
        age: Age of its step: how many steps before the run's step. It determines the seed of random operators, and the
            step that a failure costs.
        backward: Whether its outputs are gradients; see ``check_nan`` of :class:`SetNumerics`.
    """

    program: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    takes: tuple[int, ...] = ()
    micro_batch: int = 0
    age: int = 0
    backward: bool = False


class Free(Message, frozen=True, tag="free"):
    """Free buffers and definitions; missing numbers are ignored."""

    buffers: tuple[int, ...]
    definitions: tuple[int, ...] = ()


class Send(Message, frozen=True, tag="send"):
    """Send a buffer to a rank of a group, without waiting for its arrival.

    Args:
        buffer: The buffer.
        group: The group.
        peer: The rank.
        channel: Buffers of one channel are received in the order in which they are sent.
        whole: Spec of the receiver's buffer, if this one is a chunk of its rows (indices of the first dimension);
            chunks are sent in order.
        first: Index of the chunk's first row.
        age: Age of its step.
    """

    buffer: int
    group: int
    peer: int
    channel: int = 0
    whole: TensorSpec | None = None
    first: int = 0
    age: int = 0


class Receive(Message, frozen=True, tag="receive"):
    """Receive a buffer from a rank of a group; a later reader waits for it.

    Args:
        buffer: The buffer.
        spec: Its new spec.
        group: The group.
        peer: The rank.
        channel: Buffers of one channel are received in the order in which they are sent.
        rows: Number of rows of each chunk; empty if it is sent whole.
        age: Age of its step.
    """

    buffer: int
    spec: TensorSpec
    group: int
    peer: int
    channel: int = 0
    rows: tuple[int, ...] = ()
    age: int = 0


class Reduce(Message, frozen=True, tag="reduce"):
    """Replace each buffer by its sum over the ranks of a group; later readers wait for it.

    The buffers of one instruction share an element type and travel as one bucket.

    Args:
        buffers: The buffers.
        group: The group.
        root: The only rank that receives the sum; those buffers of the other ranks end. -1 for all ranks.
        age: Age of its step.
    """

    buffers: tuple[int, ...]
    group: int
    root: int = -1
    age: int = 0


class Broadcast(Message, frozen=True, tag="broadcast"):
    """Replace buffers of all ranks of a group by those of one; later readers wait for it.

    The buffers of one instruction share an element type and travel as one bucket.

    Args:
        buffers: The buffers.
        group: The group.
        root: The sending rank, whose buffers stay unchanged.
        specs: Their specs; empty if they exist on all ranks and are overwritten in place, so that their holders, such
            as optimizers, use the new elements.
    """

    buffers: tuple[int, ...]
    group: int
    root: int
    specs: tuple[TensorSpec, ...] = ()


class Gather(Message, frozen=True, tag="gather"):
    """Fill a buffer with the concatenation, in the order of the ranks, of each rank's buffer; later readers wait.

    Args:
        buffer: This rank's part, which stays unchanged.
        into: The buffer to fill.
        spec: Its new spec.
        group: The group.
        sizes: The size of each rank's part along ``dim``.
        dim: The dimension of concatenation, from 0.
        age: Age of its step.
    """

    buffer: int
    into: int
    spec: TensorSpec
    group: int
    sizes: tuple[int, ...]
    dim: int = 0
    age: int = 0


class Offload(Message, frozen=True, tag="offload"):
    """Begin to copy buffers to the host's memory; they stay readable, and must not be overwritten until :class:`Evict`.

    A storage is copied once, whole, for all buffers that view it. Copies count towards the worker's host memory, not
    towards its quota.
    """

    buffers: tuple[int, ...]


class Evict(Message, frozen=True, tag="evict"):
    """Wait until buffers have been copied to the host, and free them on the device.

    A storage that another buffer views stays.
    """

    buffers: tuple[int, ...]


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Begin to copy buffers back from the host; a later reader waits for it.

    Views of one storage share a storage again, and their memory on the host is freed.
    """

    buffers: tuple[int, ...]


class OptimizerStep(Message, frozen=True, tag="optimize"):
    """Update the parameters of an optimizer.

    Args:
        optimizer: Its number.
        gradients: One reference for each parameter, in order.
        max_norm: If positive, scale all gradients so that their joint 2-norm is at most this. The norm before scaling
            is in the reply of the run.
        square_norm: A buffer with the square of that norm, if it covers more gradients than these; 0 for none.
        members: Positions of the updated parameters, to which ``gradients`` belong; empty for all.
        previous: For each updated parameter a buffer of the same spec, created by :class:`Branch`. Its contents end;
            afterwards it holds the parameter before the step, also for existing views.
        ahead: For each updated parameter another one, likewise: if given, it afterwards holds the prediction of the
            parameter one step later, ``previous`` holds the former ``ahead``, and the parameter stays in place.
        age: Age of the gradients: how many steps before the run's step.
    """

    optimizer: int
    gradients: tuple[int, ...]
    max_norm: float = 0.0
    square_norm: int = 0
    members: tuple[int, ...] = ()
    previous: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    age: int = 0


class Branch(Message, frozen=True, tag="branch"):
    """Create versions of an optimizer's parameters: weights that some micro-batches still read after newer ones exist.

    Args:
        optimizer: Its number.
        previous: For each of its parameters a buffer that becomes a copy of it.
        ahead: For each of them a buffer that becomes its prediction one step later; empty for none.
        behind: If positive, these buffers exist already and stay unchanged: ``previous`` lacks that many updates.
        options: New options of each of its groups; unchanged if empty.
    """

    optimizer: int
    previous: tuple[int, ...]
    ahead: tuple[int, ...] = ()
    behind: int = 0
    options: tuple[Options, ...] = ()


class Rename(Message, frozen=True, tag="rename"):
    """Renumber buffers, all at once; buffers whose numbers are taken, and that get no others, end.

    Args:
        buffers: The buffers, each once.
        into: The new number of each, each once.
    """

    buffers: tuple[int, ...]
    into: tuple[int, ...]


class Vote(Message, frozen=True, tag="vote"):
    """Vote on a step with the other ranks of a group, and renumber buffers if no rank objects.

    A rank objects if something of the step has failed there; see :class:`Routine`. If one does, the buffers end, and
    steps of the optimizer with gradients of that step change nothing, on all ranks.

    Args:
        optimizer: The optimizer.
        group: The group; 0 for a worker that decides alone.
        buffers: Buffers with new contents of lasting ones, each once.
        into: These lasting ones.
        age: Age of the step: how many steps before the run's step.
        final: Whether the vote decides on the step of the optimizer, too, rather than on these buffers alone, which
            are then not taken either if one of them has an element that is not a number; an objection is repeated in
            the final vote.
    """

    optimizer: int
    group: int = 0
    buffers: tuple[int, ...] = ()
    into: tuple[int, ...] = ()
    age: int = 0
    final: bool = True


class Get(Message, frozen=True, tag="get"):
    """Reply with buffers: specs in the reply, elements in frames.

    Args:
        buffers: The buffers.
        first: First requested row (index of the first dimension) of each.
        rows: Number of rows of each; 0 for the whole.
    """

    buffers: tuple[int, ...]
    first: int = 0
    rows: int = 0


class Ask(Message, frozen=True, tag="ask"):
    """Reply to a query.

    Args:
        about: ``scalars``: the values of one-element buffers; ``digest``: one hash over all bytes of the buffers;
            ``memory``: bytes used, peak and quota; ``peak``: the same, and the peak is reset; ``optimizer``: its state,
            elements in frames; ``slots``: the filled ones among some slots; ``filled``: the buffers that are not void;
            ``time``: when everything before has been executed, in seconds on the monotonic clock.
        buffers: The buffers or slots; for ``optimizer`` its number.
    """

    about: Literal["scalars", "digest", "memory", "peak", "optimizer", "slots", "filled", "time"]
    buffers: tuple[int, ...] = ()


Step = (
    Call
    | Free
    | Send
    | Receive
    | Reduce
    | Broadcast
    | Gather
    | Offload
    | Evict
    | Prefetch
    | OptimizerStep
    | Branch
    | Rename
    | Vote
    | Get
    | Ask
)
"""Instructions allowed in a routine."""


def references(step: Step) -> tuple[int, ...]:
    """Return the buffers that an instruction names."""
    match step:
        case Call():
            return (*step.inputs, *step.outputs)
        case Send() | Receive():
            return (step.buffer,)
        case Gather():
            return (step.buffer, step.into)
        case OptimizerStep():
            norm = (step.square_norm,) if step.square_norm else ()
            return (*step.gradients, *norm, *step.previous, *step.ahead)
        case Branch():
            return (*step.previous, *step.ahead)
        case Rename() | Vote():
            return (*step.buffers, *step.into)
        case Free() | Reduce() | Broadcast() | Offload() | Evict() | Prefetch() | Get() | Ask():
            return step.buffers
