"""The interpreter: a stored program, made ready to run."""

from __future__ import annotations

import contextlib
import operator as op
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.cost import Footprint, footprint
from onebox.errors import WireError
from onebox.wire import (
    DTYPES,
    DType,
    Layout,
    Many,
    MemoryFormat,
    Operator,
    OwnDevice,
    Program,
    Slot,
    Value,
    dtype_name,
)
from onebox.worker.allow import allowed

Seed = Callable[[int], None]
"""Seeds the device's random numbers for the random operator at a position."""


class OperatorFailed(Exception):
    """An operator raised; the cause is ``__cause__``."""

    def __init__(self, operator: str, shapes: str) -> None:
        super().__init__(operator)
        self.operator = operator
        self.shapes = shapes


class Progress:
    """How far a worker is; written by the thread that works, read by the one that watches."""

    def __init__(self) -> None:
        self.executed = 0
        self.doing = ""
        self.waiting = True

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Mark what happens inside as waiting for others, which is no stall of this worker."""
        before, self.waiting = self.waiting, True
        try:
            yield
        finally:
            self.waiting = before


class Tape:
    """A program whose operators are resolved and whose arguments are laid out in registers.

    Constants live in registers behind the slots, so that the arguments of an operator are picked by one
    ``operator.itemgetter`` in C.

    Args:
        program: The program, deaths set.
        device: Where it runs.

    Raises:
        WireError: It names an operator that is not allowed, or a slot that is not there.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program = program
        self._device = device
        self._registers: list[Any] = [None] * program.slots
        self._checked = False
        self._footprints: dict[tuple[int, ...], Footprint] = {}
        filled = set(range(len(program.inputs)))
        self._code = [self._compile(operator, filled) for operator in program.operators]
        if not set(program.outputs) <= filled:
            raise WireError("a program gives out a slot that nothing fills")

    def footprint(self, takes: tuple[int, ...]) -> Footprint:
        """Return the memory that a run needs beyond the buffers that are there; computed once."""
        found = self._footprints.get(takes)
        if found is None:
            found = self._footprints[takes] = footprint(self.program, takes)
        return found

    def run(self, inputs: list[Tensor], seed: Seed, progress: Progress) -> list[Tensor]:
        """Run the program.

        Args:
            inputs: Its inputs; the list is emptied, so that what nobody else holds dies after its last use.
            seed: Called before each random operator.
            progress: Counted up with each operator.

        Raises:
            OperatorFailed: An operator raised, or (in the first run) made something else than the program says.
        """
        registers = self._registers.copy()
        registers[: len(inputs)] = inputs
        inputs.clear()
        check = not self._checked
        for number, (call, pick, keywords, outs, dies, position) in enumerate(self._code):
            progress.executed += 1
            if position >= 0:
                seed(position)
            try:
                result = call(*pick(registers), **keywords) if keywords else call(*pick(registers))
            except Exception as error:
                operator = self.program.operators[number]
                raise OperatorFailed(operator.name, _shapes(pick(registers))) from error
            if isinstance(result, Tensor):
                registers[outs[0]] = result
            else:
                for slot, tensor in zip(outs, result, strict=True):
                    if slot is not None:
                        registers[slot] = tensor
            if check:
                self._check(self.program.operators[number], registers)
            del result
            for slot in dies:
                registers[slot] = None
        self._checked = True
        return [registers[slot] for slot in self.program.outputs]

    def _compile(self, operator: Operator, filled: set[int]) -> tuple[Any, ...]:
        call = allowed(operator.name)
        positional = [self._register(value, filled) for value in operator.args]
        keywords = {key: self._keyword(value) for key, value in operator.kwargs.items()}
        for slot in (slot for slot in operator.outs if slot is not None):
            if not 0 <= slot < self.program.slots or slot in filled:
                raise WireError(f"{operator.name} fills slot {slot}, which is not there or already filled")
            filled.add(slot)
        if not set(operator.dies) <= filled:
            raise WireError(f"{operator.name} ends a slot that nothing has filled")
        outs = operator.outs[0:1] if call._schema.returns and len(call._schema.returns) == 1 else operator.outs
        if str(call._schema.returns[0].type) != "Tensor":
            outs = operator.outs
        dies = tuple(slot for slot in operator.dies)
        return call, _picker(positional), keywords, outs, dies, operator.position

    def _register(self, value: Value, filled: set[int]) -> int | list[int]:
        """Return the register of an argument, or the registers of a list that holds tensors."""
        if isinstance(value, Slot):
            if value.index not in filled:
                raise WireError(f"slot {value.index} is read before anything fills it")
            return value.index
        if isinstance(value, Many) and any(isinstance(item, Slot) for item in value.items):
            return [self._register(item, filled) for item in value.items]  # type: ignore[misc]
        self._registers.append(self._constant(value))
        return len(self._registers) - 1

    def _keyword(self, value: Value) -> Any:
        if isinstance(value, Slot) or (isinstance(value, Many) and any(isinstance(i, Slot) for i in value.items)):
            raise WireError("tensors travel as positional arguments only")
        return self._constant(value)

    def _constant(self, value: Value) -> Any:
        if isinstance(value, Many):
            return list(value.items)
        if isinstance(value, DType):
            if value.name not in DTYPES:
                raise WireError(f"element type {value.name!r} is not allowed")
            return DTYPES[value.name]
        if isinstance(value, OwnDevice):
            return self._device
        if isinstance(value, Layout):
            return torch.strided
        if isinstance(value, MemoryFormat):
            formats = {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
            if value.name not in formats:
                raise WireError(f"memory format {value.name!r} is not allowed")
            return getattr(torch, value.name)
        return value

    def _check(self, operator: Operator, registers: list[Any]) -> None:
        for slot, spec in zip(operator.outs, operator.specs, strict=True):
            if slot is None or spec is None:
                continue
            made = registers[slot]
            if tuple(made.shape) != spec.shape or dtype_name(made.dtype) != spec.dtype:
                problem = WireError(f"made {_shapes([made])}, but the program says {spec}")
                raise OperatorFailed(operator.name, "") from problem


def _picker(registers: list[int | list[int]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function from all registers to the arguments of one operator."""
    flat = [register for register in registers if isinstance(register, int)]
    if len(flat) == len(registers) and len(flat) > 1:
        return op.itemgetter(*flat)
    plan = tuple(registers)

    def pick(values: list[Any]) -> list[Any]:
        return [values[r] if isinstance(r, int) else [values[i] for i in r] for r in plan]

    return pick


def _shapes(arguments: Sequence[Any]) -> str:
    """Describe tensors among arguments, for a person."""
    tensors = [
        tensor
        for argument in arguments
        for tensor in (argument if isinstance(argument, list) else [argument])
        if isinstance(tensor, Tensor)
    ]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
