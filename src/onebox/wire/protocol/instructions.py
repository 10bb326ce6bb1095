"""Steps: what a stored routine may hold, and a message may say at once.

Buffers are numbers; a negative reference ``-1 - k`` stands for binding ``k`` of the run that starts a routine.
"""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Message, TensorSpec

Delay = Literal["none", "predict", "extrapolate", "lookahead", "both", "feedback"]
"""What is done about gradients that are a step late: nothing; forward and backward are computed on weights that the
optimizer's momentum expects; the same with the momentum's change; steps look further ahead along the momentum; that and
the first of these; or what a step was too far off is taken back with the next one."""

GroupDelays = Delay | tuple[Delay, ...]
"""The same for all parameter groups, or that of each."""

Options = dict[str, bool | int | float | str | tuple[float | None, ...] | None]


class Call(Message, frozen=True, tag="call"):
    """Run a stored program.

    Args:
        program: Its number.
        inputs: Buffer references, one for each input.
        outputs: Buffer references, one for each output.
        takes: Positions in ``inputs`` whose buffers end with this call, so that their memory can go as soon as the
            program has read them for the last time.
        micro_batch: Index of the micro-batch within the step; part of the seed of random operators.
        age: How many steps before the run's step the one is that it belongs to, whose seed random operators have.
    """

    program: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    takes: tuple[int, ...] = ()
    micro_batch: int = 0
    age: int = 0


class Free(Message, frozen=True, tag="free"):
    """Forget buffers and definitions; numbers that are not there are passed over."""

    buffers: tuple[int, ...]
    definitions: tuple[int, ...] = ()


class Send(Message, frozen=True, tag="send"):
    """Send a buffer to a rank of a group, without waiting for its arrival.

    Args:
        buffer: Which.
        group: The group.
        peer: The rank.
        channel: What is sent on one is received in the same order.
        whole: What is received, where the buffer is only some of its rows (indices of the first dimension); the parts
            of one are sent in order.
        first: The first of these rows.
    """

    buffer: int
    group: int
    peer: int
    channel: int = 0
    whole: TensorSpec | None = None
    first: int = 0


class Receive(Message, frozen=True, tag="receive"):
    """Receive a buffer from a rank of a group; a later reader waits for it.

    Args:
        buffer: Which.
        spec: What it becomes.
        group: The group.
        peer: The rank.
        channel: What is sent on one is received in the same order.
        rows: How many rows each part has that it is sent in; empty where it is sent whole.
    """

    buffer: int
    spec: TensorSpec
    group: int
    peer: int
    channel: int = 0
    rows: tuple[int, ...] = ()


class Reduce(Message, frozen=True, tag="reduce"):
    """Replace each buffer by its sum over the ranks of a group; later readers wait for it.

    The buffers of one instruction share an element type and travel as one bucket.

    Args:
        buffers: Which.
        group: The group.
        root: The only rank that gets the sum; those buffers of the other ranks end. -1 where all get it.
    """

    buffers: tuple[int, ...]
    group: int
    root: int = -1


class Broadcast(Message, frozen=True, tag="broadcast"):
    """Replace buffers of all ranks of a group by those of one; later readers wait for it.

    The buffers of one instruction share an element type and travel as one bucket.

    Args:
        buffers: Which.
        group: The group.
        root: The rank whose they are; there they stay as they are.
        specs: What they are; empty where they are there on all ranks, and the elements come to be where they lie, so
            that whoever holds them, such as an optimizer, has them, too.
    """

    buffers: tuple[int, ...]
    group: int
    root: int
    specs: tuple[TensorSpec, ...] = ()


class Gather(Message, frozen=True, tag="gather"):
    """Fill a buffer with the concatenation, in the order of the ranks, of each rank's buffer; later readers wait.

    Args:
        buffer: This rank's part; it stays as it is. Its size along ``dim`` may differ from the other ranks'.
        into: The buffer that is filled.
        spec: What ``into`` becomes.
        group: The group.
        dim: The dimension along which parts are put together, from 0.
    """

    buffer: int
    into: int
    spec: TensorSpec
    group: int
    dim: int = 0


class Offload(Message, frozen=True, tag="offload"):
    """Begin to copy buffers to the host's memory; they stay readable, and must not be written to until :class:`Evict`.

    A storage is copied once, whole, however many of the buffers view it. What is copied counts for the worker's account
    of the host's memory, not for its quota.
    """

    buffers: tuple[int, ...]


class Evict(Message, frozen=True, tag="evict"):
    """Wait until buffers that are being copied to the host are there, and let go of them on the device.

    A storage that another buffer holds stays where it is.
    """

    buffers: tuple[int, ...]


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Begin to bring buffers back from the host; a later reader waits for it.

    Those that were views of one storage become so again, and their place on the host is free.
    """

    buffers: tuple[int, ...]


class OptimizerStep(Message, frozen=True, tag="optimize"):
    """Let an optimizer update its parameters.

    Args:
        optimizer: Its number.
        gradients: One reference for each parameter, in its order.
        max_norm: Where positive, scale all gradients so that their joint 2-norm is at most this. The norm before
            scaling is in the answer of the run.
        square_norm: A buffer that holds the square of that norm, where more gradients count than these; 0 for none.
        members: Positions of the parameters that are stepped, to which ``gradients`` belong; empty for all.
        previous: For each parameter stepped a buffer of the same kind, made by :class:`Branch`. What it held ends; from
            then on it is what the parameter was before the step, also for whoever has views of that.
        ahead: For each parameter stepped another one, likewise: where given, from then on it is what the parameter is
            expected to be one step later, ``previous`` is what ``ahead`` was, and the parameter stays where it is.
        age: How many steps before the run's step the one is whose gradients these are.
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
    """Begin versions of an optimizer's parameters: weights that some micro-batches still read when others are newer.

    Args:
        optimizer: Its number.
        previous: For each of its parameters a buffer that becomes a copy of it.
        ahead: For each of them a buffer that becomes what it is expected to be one step later; empty for none.
        behind: Where positive, these buffers are there already, and stay as they are: ``previous`` what it was that
            many updates ago.
        options: Of each of its groups, which it has from then on; those that it has if empty.
    """

    optimizer: int
    previous: tuple[int, ...]
    ahead: tuple[int, ...] = ()
    behind: int = 0
    options: tuple[Options, ...] = ()


class Rename(Message, frozen=True, tag="rename"):
    """Let buffers be known by other numbers, all at once; what had these numbers, and gets no other, ends.

    Args:
        buffers: Which, each once.
        into: The number of each from then on, each once.
    """

    buffers: tuple[int, ...]
    into: tuple[int, ...]


class Get(Message, frozen=True, tag="get"):
    """Answer with buffers: specifications in the reply, elements in frames.

    Args:
        buffers: Which.
        first: The first row (index of the first dimension) that is wanted of each.
        rows: How many rows of each; 0 for the whole.
    """

    buffers: tuple[int, ...]
    first: int = 0
    rows: int = 0


class Ask(Message, frozen=True, tag="ask"):
    """Answer a question.

    Args:
        about: ``scalars``: the values of one-element buffers; ``digest``: one hash over all bytes of the buffers;
            ``memory``: bytes used, peak and quota; ``peak``: the same, and the peak starts anew; ``optimizer``: its
            state, elements in frames; ``slots``: which of some slots are filled.
        buffers: What it is about; for ``optimizer`` its number.
    """

    about: Literal["scalars", "digest", "memory", "peak", "optimizer", "slots"]
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
    | Get
    | Ask
)
"""What a routine may hold."""
