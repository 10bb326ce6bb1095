"""Eager operators: the protocol of a virtual device, one operator after the other.

Repeated calls of an operator in a script differ in their tensors and in numbers such as a learning rate, rarely in
anything else. So the rest is defined once, as a :class:`KernelSpec`, and a call is a few integers. A batch of calls is
defined at its first occurrence, as a :class:`TapeSpec`, and run by number. Unlike a
:class:`~onebox.wire.program.Program` it may write to its arguments and create views: the worker holds the storages and
tracks shared memory.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from onebox.wire.program import Value, WireStruct

FREE = 0
"""In place of a kernel's number: the next integer is a slot to free."""


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
        views: For each input, its layout if it is a view of its buffer, whose offset counts from the first element of
            the buffer, in elements of the view; empty if none is.
    """

    name: str
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    inputs: int
    floats: int
    outs: tuple[Strided | None, ...] = ()
    views: tuple[Strided | None, ...] = ()


class TapeSpec(WireStruct, frozen=True, tag="tape"):
    """A batch of calls over slots, independent of the numbers of its buffers.

    Input ``i`` is in slot ``-1 - i``; what calls keep is in slots from 0, in order. The slots from 0 that are not freed
    are its outputs.

    Args:
        calls: For each call ``kernel, slots...``, with as many slots as the kernel has inputs; or ``FREE, slot``, which
            for an input frees its buffer, too.
        inputs: Number of inputs.
        floats: Number of floating-point numbers of all calls.
    """

    calls: tuple[int, ...]
    inputs: int
    floats: int = 0


def alone(number: int, kernel: KernelSpec) -> TapeSpec:
    """Return the tape of a single call.

    Args:
        number: The kernel's number.
        kernel: The kernel.
    """
    return TapeSpec((number, *range(-1, -1 - kernel.inputs, -1)), kernel.inputs, kernel.floats)


class GeneratorSpec(WireStruct, frozen=True, tag="generator"):
    """A random number generator of the worker's device, as a definition."""

    seed: int


# ---- instructions


class Replay(WireStruct, frozen=True, tag="replay"):
    """Run a stored batch of calls.

    Args:
        tape: Its number.
        inputs: The buffers that are its inputs.
        outputs: Numbers for its outputs.
        floats: The floating-point numbers of all its calls, in order.
        frees: Buffers to free before it, also where it does not run; missing numbers are ignored.
    """

    tape: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    floats: tuple[float, ...] = ()
    frees: tuple[int, ...] = ()


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


class CopyBuffers(WireStruct, frozen=True, tag="copies"):
    """Reply with the buffers of a stream, as of this point: those with numbers in a range.

    It waits for what is being received; void buffers are left out.

    Args:
        first: The first number.
        end: The number after the last one.
    """

    first: int
    end: int


class BoundMemory(WireStruct, frozen=True, tag="bound"):
    """Say what happens where a stream's buffers find no room on the device.

    Args:
        first: The first number of the stream's buffers.
        end: The number after the last one.
        offload: Whether buffers that were last used longest ago go to the host's memory, and come back for their next
            use; otherwise the operator fails.
        most_bytes: The most bytes of buffers on the device, if that is less than the worker's quota; 0 for the quota.
    """

    first: int
    end: int
    offload: bool = False
    most_bytes: Annotated[int, Meta(ge=0)] = 0


EagerWork = Replay | Perform | SetGenerator | KeepGenerator | DefaultType
"""Instructions outside of routines: those of scripts, operator by operator."""
