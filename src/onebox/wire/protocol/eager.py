"""Eager operators: the protocol of a virtual device, one operator after the other.

Repeated calls of an operator in a script differ in their tensors and in numbers such as a learning rate, rarely in
anything else. So the rest is defined once, as a :class:`KernelSpec`, and a call is a few integers. A repeated sequence
of calls is defined once, too, as a :class:`BlockSpec`. Unlike a :class:`~onebox.wire.program.Program` these may write
to their arguments and create views: the worker holds the storages and tracks shared memory.

Calls are coded as integers: ``kernel, inputs..., outputs...`` with as many of each as the kernel says, or ``FREE,
number``.
"""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Complex, DType, LayoutArgument, MemoryFormat, OwnDevice, SlotArgument, WireStruct

FREE = 0
"""In place of a kernel's number: the next integer is a buffer to free."""


class Hole(WireStruct, frozen=True, tag="h"):
    """An argument: the call's floating-point number with this index."""

    index: int


class GeneratorArgument(WireStruct, frozen=True, tag="g"):
    """An argument: the random number generator with a number."""

    number: int


class Items(WireStruct, frozen=True, tag="i"):
    """An argument: a flat list."""

    items: tuple[SlotArgument | Hole | Complex | bool | int | float | None, ...]


Argument = (
    SlotArgument
    | Hole
    | Complex
    | GeneratorArgument
    | Items
    | DType
    | OwnDevice
    | LayoutArgument
    | MemoryFormat
    | bool
    | int
    | float
    | str
    | None
)


class Strided(WireStruct, frozen=True, tag="t"):
    """Layout of a tensor in its storage.

    Args:
        dtype: A key of :data:`~onebox.wire.program.ITEM_BYTES`.
        shape: Sizes, outermost first.
        strides: Elements between neighbouring indices, for each dimension.
        offset: Elements from the start of the storage to the first.
        storage_bytes: Bytes of the storage.
        conjugate: Whether the elements are the conjugates of the stored ones, as in PyTorch's lazy ``conj``.
        negative: Whether they are the negatives of the stored ones, likewise.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    storage_bytes: int = 0
    conjugate: bool = False
    negative: bool = False


class KernelSpec(WireStruct, frozen=True, tag="kernel"):
    """An operator with open tensors and floating-point numbers.

    Args:
        name: Overload, such as ``aten.add_.Tensor``.
        args: Positional arguments; slot ``i`` is input ``i`` of a call.
        kwargs: Keyword arguments, likewise.
        inputs: Number of tensors of a call.
        floats: Number of floating-point numbers of a call.
        outs: For each returned tensor, with lists flattened: its layout, if a call keeps it under the next of its
            output numbers; ``None`` for one that is an argument, undefined, or unused. A new tensor with other strides
            is converted to this layout.
    """

    name: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    inputs: int
    floats: int
    outs: tuple[Strided | None, ...] = ()


class BlockSpec(WireStruct, frozen=True, tag="block"):
    """A sequence of calls over slots: the first ``inputs`` slots are inputs, each output fills the next slot.

    Args:
        calls: The calls, encoded as integers, with slots for buffers. ``FREE`` frees a slot; for an input, it frees its
            buffer, too.
        inputs: Number of buffers of a :class:`Replay`.
        outputs: The slots to keep, in the order of their numbers in a ``Replay``.
        floats: Number of floating-point numbers of a ``Replay``: those of all calls, in order.
    """

    calls: tuple[int, ...]
    inputs: int
    outputs: tuple[int, ...]
    floats: int


class GeneratorSpec(WireStruct, frozen=True, tag="generator"):
    """A random number generator of the worker's device, as a definition."""

    seed: int


# ---- instructions


class Operate(WireStruct, frozen=True, tag="operate"):
    """Run operators in sequence.

    Args:
        calls: The calls, encoded as described in :mod:`onebox.wire.protocol.eager`, with buffers by number.
        floats: The floating-point numbers of all of them, in order.
    """

    calls: tuple[int, ...]
    floats: tuple[float, ...] = ()


class Replay(WireStruct, frozen=True, tag="replay"):
    """Run a stored block.

    Args:
        block: Its number.
        inputs: Buffers for its first slots.
        outputs: Numbers for the slots that it keeps.
        floats: The floating-point numbers of all its calls, in order.
    """

    block: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    floats: tuple[float, ...] = ()


class Perform(WireStruct, frozen=True, tag="perform"):
    """Run one operator with results unknown to the client, and return them.

    Args:
        kernel: The operator, with no ``outs``.
        inputs: Its tensors.
        floats: Its floating-point numbers.
        first: Number of the first returned tensor; later returned values get the next numbers, whatever they are.
    """

    kernel: KernelSpec
    inputs: tuple[int, ...]
    floats: tuple[float, ...]
    first: int


class SetGenerator(WireStruct, frozen=True, tag="random"):
    """Set a random number generator.

    Args:
        generator: Its number; 0 for the device's own.
        seed: The seed, or ``None`` to restore a state.
        buffer: The buffer of the state.
    """

    generator: int
    seed: int | None
    buffer: int = 0


class DefaultType(WireStruct, frozen=True, tag="default"):
    """Set the element type returned by operators without an explicit one or tensors to infer it from."""

    dtype: Literal["float16", "bfloat16", "float32", "float64"]


class KeepGenerator(WireStruct, frozen=True, tag="keep"):
    """Fill a buffer with the state of a random number generator, as bytes.

    Args:
        generator: Its number; 0 for the device's own.
        buffer: The buffer.
    """

    generator: int
    buffer: int


class StreamHeader(WireStruct, frozen=True, tag="stream"):
    """Make the rest of the message part of a script's stream.

    After a failure in it, later instructions of the stream have no effect, until the script has been told: what they
    would have made is void, and what exists stays as it is.

    Args:
        number: The stream's number, one for each process that uses the worker.
        message: The number of this message in the stream, ascending.
        told: The latest message of the stream with a failure that the script had been told of when this one was sent.
            The stream goes on if it was stopped in that message or an earlier one.
        errors: Number of failures on any device that the script had been told of. A stream that lacks the data of
            another device goes on with a higher number.
    """

    number: int
    message: int
    told: int = 0
    errors: int = 0


EagerWork = Operate | Replay | Perform | SetGenerator | KeepGenerator | DefaultType
"""Instructions outside of routines: those of scripts, operator by operator."""
