"""Eager operators: what a virtual device sends, one operator after the other.

An operator that a script runs again and again differs from call to call in its tensors and in numbers such as a
learning rate, hardly ever in anything else. So all else is defined once, as a :class:`KernelSpec`, and a call is a
handful of integers. A sequence of calls that repeats is defined once, too, as a :class:`BlockSpec`. Unlike a
:class:`~onebox.wire.program.Program` these may write to their arguments and make views: a worker holds the storages,
and so it knows what shares memory with what.

Calls are coded as integers: ``kernel, inputs..., outputs...`` with as many of each as the kernel says, or
``FREE, number``.
"""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Complex, DType, LayoutArgument, MemoryFormat, OwnDevice, SlotArgument, WireStruct

FREE = 0
"""Instead of a kernel's number: the next integer is a buffer that ends here."""


class Hole(WireStruct, frozen=True, tag="h"):
    """An argument that each call brings along: its floating-point number with this index."""

    index: int


class GeneratorArgument(WireStruct, frozen=True, tag="g"):
    """An argument: the random number generator that was defined under a number."""

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
    """Where the elements of a tensor lie.

    Args:
        dtype: A key of :data:`~onebox.wire.program.ITEM_BYTES`.
        shape: Sizes, outermost first.
        strides: Elements from one index to the next, for each dimension.
        offset: Elements from the start of the storage to the first.
        storage_bytes: Bytes of the storage.
        conjugate: Whether the elements are the conjugates of what is stored, as in PyTorch's lazy ``conj``.
        negative: Whether they are the negatives of it, likewise.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    storage_bytes: int = 0
    conjugate: bool = False
    negative: bool = False


class KernelSpec(WireStruct, frozen=True, tag="kernel"):
    """An operator with its tensors and floating-point numbers left open.

    Args:
        name: Overload, such as ``aten.add_.Tensor``.
        args: Positional arguments; slot ``i`` is input ``i`` of a call.
        kwargs: Keyword arguments, likewise.
        inputs: How many tensors a call brings.
        floats: How many floating-point numbers a call brings.
        outs: For each tensor that the operator returns, those of lists one by one: what it is, if a call keeps it,
            under the next of its output numbers; ``None`` for one that is an argument, or undefined, or that nobody
            reads. A new tensor whose strides are others is laid out as is said here.
    """

    name: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    inputs: int
    floats: int
    outs: tuple[Strided | None, ...] = ()


class BlockSpec(WireStruct, frozen=True, tag="block"):
    """A sequence of calls over slots: the first ``inputs`` slots are given, each output fills the next.

    Args:
        calls: The calls, coded as integers, with slots for buffers. ``FREE`` ends what a slot holds; where it held an
            input, its buffer ends, too.
        inputs: How many buffers a :class:`Replay` brings.
        outputs: The slots that are kept, in the order of the numbers that a ``Replay`` gives them.
        floats: How many floating-point numbers a ``Replay`` brings: those of all calls, in order.
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
    """Run operators one after the other.

    Args:
        calls: The calls, coded as :mod:`onebox.wire.protocol.eager` says, with buffers by number.
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
    """Run one operator of which the client does not know what it will return, and answer with that.

    Args:
        kernel: The operator, with no ``outs``.
        inputs: Its tensors.
        floats: Its floating-point numbers.
        first: The number of the first tensor that it returns; the next returns get the next numbers, whatever they are.
    """

    kernel: KernelSpec
    inputs: tuple[int, ...]
    floats: tuple[float, ...]
    first: int


class SetGenerator(WireStruct, frozen=True, tag="random"):
    """Set a random number generator.

    Args:
        generator: Its number; 0 for the device's own.
        seed: The seed, or ``None`` for a state that was kept.
        buffer: The buffer of that state.
    """

    generator: int
    seed: int | None
    buffer: int = 0


class DefaultType(WireStruct, frozen=True, tag="default"):
    """Let operators that are not told an element type, and have none from their tensors, return this one."""

    dtype: Literal["float16", "bfloat16", "float32", "float64"]


class KeepGenerator(WireStruct, frozen=True, tag="keep"):
    """Fill a buffer with the state of a random number generator, as bytes.

    Args:
        generator: Its number; 0 for the device's own.
        buffer: The buffer.
    """

    generator: int
    buffer: int


EagerWork = Operate | Replay | Perform | SetGenerator | KeepGenerator | DefaultType
"""Instructions that no routine holds: what scripts do operator by operator."""
