"""Small programs: slices of a program, and element-wise programs for the engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from onebox.graph.lower.split import renumber
from onebox.wire import (
    DType,
    Many,
    Operator,
    OwnDevice,
    Program,
    SlotArgument,
    TensorSpec,
    Value,
    reads,
    specs_by_slot,
    with_deaths,
)

PortT = TypeVar("PortT", bound=Hashable)


def extract(program: Program, outputs: Sequence[int]) -> Program:
    """Return the part of a program that some of its slots need, with all its inputs.

    Args:
        program: The whole.
        outputs: Slots that are outputs of the part.
    """
    needed = set(outputs)
    body: list[Operator] = []
    for operator in reversed(program.operators):
        if needed & {slot for slot in operator.outs if slot is not None}:
            needed |= set(reads(operator))
            body.append(operator)
    return with_deaths(Program(program.inputs, tuple(reversed(body)), tuple(outputs), program.slots))


def own_outputs(program: Program) -> Program:
    """Return the program with copies of outputs that are inputs or repeated, so that each is a separate buffer."""
    specs = specs_by_slot(program)
    operators, outputs, slots = list(program.operators), list[int](), program.slots
    for slot in program.outputs:
        if slot >= len(program.inputs) and slot not in outputs:
            outputs.append(slot)
            continue
        operators.append(Operator("aten.clone.default", (SlotArgument(slot),), {}, (slots,), (specs[slot],)))
        outputs.append(slots)
        slots += 1
    return with_deaths(Program(program.inputs, tuple(operators), tuple(outputs), slots))


def sum_alike(program: Program, ports: Sequence[PortT]) -> tuple[Program, tuple[PortT, ...]]:
    """Return the program with outputs of equal ports added up, each output a separate buffer, and the remaining ports.

    Args:
        program: The whole.
        ports: One for each output.
    """
    specs = specs_by_slot(program)
    slots: dict[PortT, int] = {}
    operators, count = list(program.operators), program.slots
    for port, slot in zip(ports, program.outputs, strict=True):
        if port not in slots:
            slots[port] = slot
            continue
        add = Operator("aten.add.Tensor", (SlotArgument(slots[port]), SlotArgument(slot)), {}, (count,), (specs[slot],))
        operators.append(add)
        slots[port], count = count, count + 1
    summed = Program(program.inputs, tuple(operators), tuple(slots.values()), count)
    return own_outputs(summed), tuple(slots)


def relaid(program: Program, inputs: Mapping[int, Sequence[int]], outputs: Mapping[int, Sequence[int]]) -> Program:
    """Return the program with some inputs and outputs permuted to the memory order in which they travel.

    A tensor that is not laid out in the order of its dimensions would arrive in that order, and a view made for its
    original layout would fail.

    Args:
        program: The whole.
        inputs: For some inputs, by index, the order of their dimensions in memory, outermost first.
        outputs: For some outputs, by index, likewise.
    """
    specs = specs_by_slot(program)
    count = program.slots
    given = list(program.inputs)
    before: list[Operator] = []
    number = {slot: slot for slot in specs}
    for place, order in inputs.items():
        given[place] = TensorSpec(specs[place].dtype, tuple(specs[place].shape[dim] for dim in order))
        back = tuple(sorted(range(len(order)), key=order.__getitem__))
        before.append(
            Operator("aten.permute.default", (SlotArgument(place), Many(back)), {}, (count,), (specs[place],))
        )
        number[place], count = count, count + 1
    body = [renumber(operator, number) for operator in program.operators]
    results = [number[slot] for slot in program.outputs]
    for place, order in outputs.items():
        spec = specs[program.outputs[place]]
        made = TensorSpec(spec.dtype, tuple(spec.shape[dim] for dim in order))
        body.append(
            Operator("aten.permute.default", (SlotArgument(results[place]), Many(tuple(order))), {}, (count,), (made,))
        )
        results[place], count = count, count + 1
    return with_deaths(Program(tuple(given), (*before, *body), tuple(results), count))


def add_all(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that maps inputs ``a0 … an, b0 … bn`` to ``a0 + b0 … an + bn``."""
    return combine_all(specs, [1.0] * len(specs))


def combine_all(specs: Sequence[TensorSpec], factors: Sequence[float]) -> Program:
    """Return a program that maps inputs ``a0 … an, b0 … bn`` to ``a0 * f0 + b0 … an * fn + bn``."""
    count = len(specs)
    operators: list[Operator] = []
    slots = 2 * count
    outputs: list[int] = []
    for index, (spec, factor) in enumerate(zip(specs, factors, strict=True)):
        left = index
        if factor != 1.0:
            operators.append(Operator("aten.mul.Scalar", (SlotArgument(index), factor), {}, (slots,), (spec,)))
            left, slots = slots, slots + 1
        operators.append(
            Operator("aten.add.Tensor", (SlotArgument(left), SlotArgument(count + index)), {}, (slots,), (spec,))
        )
        outputs.append(slots)
        slots += 1
    return with_deaths(Program((*specs, *specs), tuple(operators), tuple(outputs), slots))


def scale_all(specs: Sequence[TensorSpec], factors: Sequence[float]) -> Program:
    """Return a program that maps inputs ``a0 … an`` to ``a0 * f0 … an * fn``; with a factor of 1 to an input itself."""
    outputs = list(range(len(specs)))
    operators: list[Operator] = []
    for index, (spec, factor) in enumerate(zip(specs, factors, strict=True)):
        if factor != 1.0:
            outputs[index] = len(specs) + len(operators)
            operators.append(Operator("aten.mul.Scalar", (SlotArgument(index), factor), {}, (outputs[index],), (spec,)))
    return with_deaths(Program(tuple(specs), tuple(operators), tuple(outputs), len(specs) + len(operators)))


def round_all(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that converts inputs ``a0 … an`` to bfloat16."""
    operators = tuple(
        Operator(
            "aten._to_copy.default",
            (SlotArgument(place),),
            {"dtype": DType("bfloat16")},
            (len(specs) + place,),
            (TensorSpec("bfloat16", spec.shape),),
        )
        for place, spec in enumerate(specs)
    )
    outputs = tuple(range(len(specs), 2 * len(specs)))
    return with_deaths(Program(tuple(specs), operators, outputs, 2 * len(specs)))


def square_norm(specs: Sequence[TensorSpec]) -> Program:
    """Return a program that maps inputs ``a0 … an`` to the sum of all their squares, as one float64."""
    total = TensorSpec("float64", ())
    here: dict[str, Value] = {"dtype": DType("float64"), "device": OwnDevice()}
    operators = [Operator("aten.full.default", (Many(()), 0.0), here, (len(specs),), (total,))]
    slots = len(specs) + 1
    for index, spec in enumerate(specs):
        wide: dict[str, Value] = {"dtype": DType("complex128" if spec.dtype.startswith("complex") else "float64")}
        norm, square, summed = range(slots, slots + 3)
        operators += [
            Operator("aten.linalg_vector_norm.default", (SlotArgument(index),), wide, (norm,), (total,)),
            Operator("aten.mul.Tensor", (SlotArgument(norm), SlotArgument(norm)), {}, (square,), (total,)),
            Operator("aten.add.Tensor", (SlotArgument(slots - 1), SlotArgument(square)), {}, (summed,), (total,)),
        ]
        slots += 3
    return with_deaths(Program(tuple(specs), tuple(operators), (slots - 1,), slots))


def zeros(specs: Sequence[TensorSpec]) -> Program:
    """Return a program without inputs that makes tensors of zeros."""
    operators = tuple(
        Operator(
            "aten.zeros.default",
            (Many(spec.shape),),
            {"dtype": DType(spec.dtype), "device": OwnDevice()},
            (index,),
            (spec,),
        )
        for index, spec in enumerate(specs)
    )
    return Program((), operators, tuple(range(len(specs))), len(specs))
