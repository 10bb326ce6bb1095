"""Programs: straight-line tapes of ATen operators that a worker stores and interprets.

A program owns numbered slots. Slots ``0 .. len(inputs) - 1`` hold its inputs when it starts; each operator reads slots
and fills others, and names the slots that are not read after it. A program is functional: no operator in it writes to
its arguments. Nothing here imports torch, and no type is recursive, so a decoded program is bounded by construction.
"""

from __future__ import annotations

from math import prod

from msgspec import Struct

from onebox.errors import WireError

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Supported element types, with the bytes of one element."""

PROGRAM_TYPES = (*tuple(ITEM_BYTES)[:10], "complex64", "complex128")
"""Element types of tensors in programs; the others are for eager operators, which need no gradient reductions and no
optimizer on the worker."""

SLOTS = 1 << 20
"""Most slots of one program: one of 100,000 operators has about 150,000."""


class WireStruct(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all parts of a program: immutable, encoded as arrays, extra fields forbidden."""


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, encoded as arrays, extra fields forbidden."""


class TensorSpec(WireStruct, frozen=True):
    """Element type and shape of a dense tensor.

    Args:
        dtype: A key of :data:`ITEM_BYTES`.
        shape: Sizes, outermost first.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, stored densely."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class SlotArgument(WireStruct, frozen=True, tag="s"):
    """An operator argument: the tensor in a slot."""

    index: int


class DType(WireStruct, frozen=True, tag="d"):
    """An operator argument: an element type, by name."""

    name: str


class OwnDevice(WireStruct, frozen=True, tag="o"):
    """An operator argument: the device of the worker that runs the program."""


class LayoutArgument(WireStruct, frozen=True, tag="l"):
    """An operator argument: a memory layout; only ``strided`` is supported."""

    name: str = "strided"


class MemoryFormat(WireStruct, frozen=True, tag="m"):
    """An operator argument: a memory format, such as ``contiguous_format``."""

    name: str


class Complex(WireStruct, frozen=True, tag="c"):
    """An argument: a complex number."""

    real: float
    imag: float


class Hole(WireStruct, frozen=True, tag="h"):
    """An argument of a kernel: the call's floating-point number with this index."""

    index: int


class GeneratorArgument(WireStruct, frozen=True, tag="g"):
    """An argument of a kernel: the random number generator with a number."""

    number: int


class Many(WireStruct, frozen=True, tag="n"):
    """An operator argument: a flat list of numbers, or of tensors that may be missing."""

    items: tuple[SlotArgument | Hole | Complex | bool | int | float | None, ...]


Value = (
    SlotArgument
    | Hole
    | GeneratorArgument
    | Many
    | DType
    | OwnDevice
    | LayoutArgument
    | MemoryFormat
    | Complex
    | bool
    | int
    | float
    | str
    | None
)
"""An argument of an operator; programs have no numbers that change, and no generators by number."""


class Operator(WireStruct, frozen=True):
    """One operator of a program.

    Args:
        name: Overload, such as ``aten.addmm.default``.
        args: Positional arguments.
        kwargs: Keyword arguments.
        outs: Slot of each output; ``None`` for one that is not read.
        specs: Spec of each output; ``None`` only with a ``None`` slot, whose memory is then not counted.
        dies: Slots that are not read after this operator.
        position: For a random operator, its position among those of the whole model, from which its seed is derived
            together with run seed, step and micro-batch; otherwise -1.
    """

    name: str
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    outs: tuple[int | None, ...]
    specs: tuple[TensorSpec | None, ...]
    dies: tuple[int, ...] = ()
    position: int = -1


class Program(WireStruct, frozen=True):
    """A straight-line tape of operators.

    Args:
        inputs: Spec of each input; input ``i`` arrives in slot ``i``.
        operators: The tape.
        outputs: Slots whose tensors are the results, in order.
        slots: Number of slots.
    """

    inputs: tuple[TensorSpec, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[int, ...]
    slots: int


def reads(operator: Operator) -> list[int]:
    """Return the slots that an operator reads, in argument order, with repeats."""
    found: list[int] = []
    for value in (*operator.args, *operator.kwargs.values()):
        if isinstance(value, SlotArgument):
            found.append(value.index)
        elif isinstance(value, Many):
            found.extend(item.index for item in value.items if isinstance(item, SlotArgument))
    return found


def specs_by_slot(program: Program) -> dict[int, TensorSpec]:
    """Return the spec of each filled slot of a program."""
    found = dict(enumerate(program.inputs))
    for operator in program.operators:
        for slot, spec in zip(operator.outs, operator.specs, strict=True):
            if slot is not None and spec is not None:
                found[slot] = spec
    return found


def check(program: Program) -> None:
    """Require that a program is consistent: each slot is filled once, has a spec, and is read only while it is filled.

    Raises:
        WireError: It is not; the message gives the reason.
    """
    if not len(program.inputs) <= program.slots <= SLOTS:
        raise WireError(f"a program of {program.slots} slots for {len(program.inputs)} inputs; allowed are {SLOTS}")
    for spec in program.inputs:
        _check_spec(spec, "an input")
    filled = set(range(len(program.inputs)))
    alive = set(filled)
    for operator in program.operators:
        if not alive.issuperset(reads(operator)):
            raise WireError(f"{operator.name} reads a slot that nothing has filled, or that has ended")
        if len(operator.specs) != len(operator.outs):
            raise WireError(f"{operator.name} has {len(operator.outs)} outputs and specifies {len(operator.specs)}")
        for slot, made in zip(operator.outs, operator.specs, strict=True):
            if slot is not None:
                if not 0 <= slot < program.slots or slot in filled:
                    raise WireError(f"{operator.name} fills slot {slot}, which is not there or already filled")
                filled.add(slot)
                alive.add(slot)
            if slot is not None or made is not None:
                _check_spec(made, operator.name)
        if not alive.issuperset(operator.dies):
            raise WireError(f"{operator.name} ends a slot that nothing has filled, or that has ended")
        alive.difference_update(operator.dies)
    if not alive.issuperset(program.outputs):
        raise WireError("a program gives out a slot that nothing fills, or that has ended")


def _check_spec(spec: TensorSpec | None, what: str) -> None:
    if spec is None or spec.dtype not in PROGRAM_TYPES or min(spec.shape, default=0) < 0:
        raise WireError(f"{what} is specified as {spec}; allowed types: {', '.join(PROGRAM_TYPES)}")


def with_deaths(program: Program) -> Program:
    """Return the program with each slot's death at its last use; outputs never die.

    A slot that is never read dies where it is filled.
    """
    last: dict[int, int] = {}
    for number, operator in enumerate(program.operators):
        for slot in (*reads(operator), *(slot for slot in operator.outs if slot is not None)):
            last[slot] = number
    kept = set(program.outputs)
    dies: list[list[int]] = [[] for _ in program.operators]
    for slot, number in last.items():
        if slot not in kept:
            dies[number].append(slot)
    operators = tuple(
        Operator(o.name, o.args, o.kwargs, o.outs, o.specs, tuple(sorted(d)), o.position)
        for o, d in zip(program.operators, dies, strict=True)
    )
    return Program(program.inputs, operators, program.outputs, program.slots)
