"""Small programs: a slice of a program, and element-wise programs that engines need around a model's own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from onebox.wire import (
    DType,
    Many,
    Operator,
    OwnDevice,
    Program,
    Slot,
    TensorSpec,
    reads,
    specs_by_slot,
    with_deaths,
)

PortT = TypeVar("PortT", bound=Hashable)


def extract(program: Program, outputs: Sequence[int]) -> Program:
    """Return the part of a program that some of its slots need; its inputs stay as they are.

    Args:
        program: The whole.
        outputs: Slots that the part gives out.
    """
    needed = set(outputs)
    body: list[Operator] = []
    for operator in reversed(program.operators):
        if needed & {slot for slot in operator.outs if slot is not None}:
            needed |= set(reads(operator))
            body.append(operator)
    return with_deaths(Program(program.inputs, tuple(reversed(body)), tuple(outputs), program.slots))


def own_outputs(program: Program) -> Program:
    """Return the program with copies of outputs that are inputs or come twice: each is a buffer of its own then."""
    specs = specs_by_slot(program)
    operators, outputs, slots = list(program.operators), list[int](), program.slots
    for slot in program.outputs:
        if slot >= len(program.inputs) and slot not in outputs:
            outputs.append(slot)
            continue
        operators.append(Operator("aten.clone.default", (Slot(slot),), {}, (slots,), (specs[slot],)))
        outputs.append(slots)
        slots += 1
    return with_deaths(Program(program.inputs, tuple(operators), tuple(outputs), slots))


def sum_alike(program: Program, ports: Sequence[PortT]) -> tuple[Program, tuple[PortT, ...]]:
    """Return the program with outputs of equal ports added up, each output a buffer of its own, and the ports left.

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
        add = Operator("aten.add.Tensor", (Slot(slots[port]), Slot(slot)), {}, (count,), (specs[slot],))
        operators.append(add)
        slots[port], count = count, count + 1
    summed = Program(program.inputs, tuple(operators), tuple(slots.values()), count)
    return own_outputs(summed), tuple(slots)


def add_all(specs: Sequence[TensorSpec]) -> Program:
    """Return a program of inputs ``a0 … an, b0 … bn`` that gives ``a0 + b0 … an + bn``."""
    return combine_all(specs, [1.0] * len(specs))


def combine_all(specs: Sequence[TensorSpec], factors: Sequence[float]) -> Program:
    """Return a program of inputs ``a0 … an, b0 … bn`` that gives ``a0 * f0 + b0 … an * fn + bn``."""
    count = len(specs)
    operators: list[Operator] = []
    slots = 2 * count
    outputs: list[int] = []
    for index, (spec, factor) in enumerate(zip(specs, factors, strict=True)):
        left = index
        if factor != 1.0:
            operators.append(Operator("aten.mul.Scalar", (Slot(index), factor), {}, (slots,), (spec,)))
            left, slots = slots, slots + 1
        operators.append(Operator("aten.add.Tensor", (Slot(left), Slot(count + index)), {}, (slots,), (spec,)))
        outputs.append(slots)
        slots += 1
    return with_deaths(Program((*specs, *specs), tuple(operators), tuple(outputs), slots))


def scale_all(specs: Sequence[TensorSpec], factors: Sequence[float]) -> Program:
    """Return a program of inputs ``a0 … an`` that gives ``a0 * f0 … an * fn``; with a factor of 1 an input itself."""
    outputs = list(range(len(specs)))
    operators: list[Operator] = []
    for index, (spec, factor) in enumerate(zip(specs, factors, strict=True)):
        if factor != 1.0:
            outputs[index] = len(specs) + len(operators)
            operators.append(Operator("aten.mul.Scalar", (Slot(index), factor), {}, (outputs[index],), (spec,)))
    return with_deaths(Program(tuple(specs), tuple(operators), tuple(outputs), len(specs) + len(operators)))


def zeros(specs: Sequence[TensorSpec]) -> Program:
    """Return a program without inputs that gives tensors of zeros."""
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
