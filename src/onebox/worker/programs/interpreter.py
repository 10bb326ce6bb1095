"""The interpreter: a stored program, compiled for execution."""

from __future__ import annotations

import functools
import operator as op
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.cost import Footprint, footprint
from onebox.cost.lifetimes import owners
from onebox.errors import WireError
from onebox.wire import (
    DTYPES,
    Many,
    Operator,
    Program,
    SlotArgument,
    Strided,
    Value,
    check,
    dtype_name,
    reads,
    specs_by_slot,
)
from onebox.worker.memory.buffers import lacks_memory
from onebox.worker.optimizer.fused_kernels import exactly
from onebox.worker.programs.arguments import ValueIndex, by_keyword, constant, picker
from onebox.worker.programs.bindings import TENSOR, fastest, spreads
from onebox.worker.programs.device_implementation import device_implementation
from onebox.worker.programs.kernels import OutputLayout
from onebox.worker.programs.matmul_dispatch import faster_implementation
from onebox.worker.progress import WorkerProgress
from onebox.worker.sandbox.allow_list import allowed
from onebox.worker.sandbox.argument_checks import check_constants, guarded

_shape = op.attrgetter("shape")
_dtype = op.attrgetter("dtype")

_VIEWS = ("aten.view.default", "aten._unsafe_view.default")

_FORMATS = (torch.contiguous_format, torch.channels_last)

_STRIDES = re.compile("strid|contiguous", re.IGNORECASE)
"""In the messages of kernels that refuse strides."""

Seed = Callable[[int], None]
"""Seeds the device's random numbers for the random operator at a position."""


class OperatorFailed(Exception):
    """An operator raised an exception; it is in ``__cause__``.

    Args:
        operator: Its name.
        shapes: A readable description of its tensor arguments.
        index: Its index in its program; -1 outside of one.
    """

    def __init__(self, operator: str, shapes: str, index: int = -1) -> None:
        super().__init__(operator)
        self.operator = operator
        self.shapes = shapes
        self.index = index


class CompiledProgram:
    """A program with resolved operators, and arguments laid out in registers.

    Constants are in registers after the slots, so that the arguments of an operator are picked by one
    ``operator.itemgetter`` in C.

    Args:
        program: The program, deaths set.
        device: Its device.
        layouts: Required layout of each output; empty if none is required.

    Raises:
        WireError: It names an operator that is not allowed, or a slot that does not exist.
    """

    def __init__(self, program: Program, device: torch.device, layouts: Sequence[Strided | None] = ()) -> None:
        check(program)
        if layouts and len(layouts) != len(program.outputs):
            raise WireError(f"{len(layouts)} layouts for a program of {len(program.outputs)} outputs")
        self.program = program
        self._layouts = [None if layout is None else OutputLayout(layout) for layout in layouts]
        self._device = device
        self._shapes = [torch.Size(spec.shape) for spec in program.inputs]
        self._dtypes = [DTYPES[spec.dtype] for spec in program.inputs]
        self._registers: list[Any] = [None] * program.slots
        self._numbers: dict[int, int] = {}  # registers of integers
        self._checked = False
        self._footprints: dict[tuple[int, ...], Footprint] = {}
        self._specs = specs_by_slot(program)
        for name in {operator.name for operator in program.operators}:
            allowed(name)
        memory_of = owners(program)
        self._complex = [
            place for place, slot in enumerate(program.outputs) if self._specs[slot].dtype.startswith("complex")
        ]
        self._given_out = {memory_of[slot] for slot in program.outputs}
        self._code = [self._compile(operator) for operator in program.operators]
        read = {slot for operator in program.operators for slot in reads(operator)} | set(program.outputs)
        self._unread = [slot for slot in range(len(program.inputs)) if slot not in read]

    def footprint(self, takes: tuple[int, ...]) -> Footprint:
        """Return the additional memory of a run besides existing buffers; cached.

        Raises:
            WireError: The input does not exist.
        """
        found = self._footprints.get(takes)
        if found is None:
            if not all(0 <= position < len(self.program.inputs) for position in takes):
                raise WireError(f"a call takes inputs {takes} of a program that has {len(self.program.inputs)}")
            found = self._footprints[takes] = footprint(self.program, takes)
        return found

    def check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Require that inputs match the program.

        Raises:
            WireError: One does not match; the message names it and its spec.
        """
        if list(map(_shape, inputs)) == self._shapes and list(map(_dtype, inputs)) == self._dtypes:
            return
        if len(inputs) != len(self.program.inputs):
            raise WireError(f"a program of {len(self.program.inputs)} inputs is given {len(inputs)}")
        for number, (tensor, spec) in enumerate(zip(inputs, self.program.inputs, strict=True)):
            if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
                raise WireError(f"input {number} of the program is {spec}, but its buffer holds {describe([tensor])}")

    def run(self, inputs: list[Tensor], seed: Seed, progress: WorkerProgress) -> list[Tensor]:
        """Run the program.

        Args:
            inputs: Its inputs; the list is emptied, so that unshared tensors are freed after their last use.
            seed: Called before each random operator.
            progress: Incremented for each operator.

        Raises:
            WireError: An input does not match the program.
            OperatorFailed: An operator raised an exception, or (in the first run) returned something else than the
                program declares.
        """
        self.check_inputs(inputs)
        registers = self._registers.copy()
        registers[: len(inputs)] = inputs
        inputs.clear()
        for slot in self._unread:
            registers[slot] = None
        first = not self._checked
        for number, (call, pick, keywords, outs, dies, position) in enumerate(self._code):
            progress.executed += 1
            if position >= 0:
                seed(position)
            try:
                result = call(*pick(registers), **keywords) if keywords else call(*pick(registers))
                if isinstance(result, Tensor):
                    registers[outs[0]] = result
                else:
                    for slot, tensor in zip(outs, result, strict=True):
                        if slot is not None:
                            registers[slot] = tensor
            except Exception as error:
                self._with_contiguous(number, registers, seed, error)
            if first:
                self._check(number, registers)
            result = tensor = None  # freed tensors must not survive here
            for slot in dies:
                registers[slot] = None
        self._checked = True
        made = [registers[slot] for slot in self.program.outputs]
        for place in self._complex:  # elements are sent as they are in memory
            made[place] = made[place].resolve_conj()
        return made

    def _with_contiguous(self, number: int, registers: list[Any], seed: Seed, error: Exception) -> None:
        """Run an operator again that failed: it may have refused strides, which differ by kernel, device and journey.

        If it takes contiguous tensors, it is given such ones from now on.

        Raises:
            OperatorFailed: It was not for strides.
        """
        call, pick, keywords, outs, dies, position = self._code[number]
        name, args = self.program.operators[number].name, pick(registers)
        tries: list[Callable[..., Any]] = []
        # what a rule about arguments refuses stays refused, whatever its strides; where memory lacks, copies take more
        refused = not isinstance(error, WireError) and not lacks_memory(error)
        if refused and not all(tensor.is_contiguous() for tensor in _tensors(args)):
            tries = [Tensor.reshape] if name in _VIEWS else _contiguous_first(call, _tensors(args))
        for again in tries:
            try:
                if position >= 0:
                    seed(position)
                result = again(*args, **keywords)
                made = [result] if isinstance(result, Tensor) else result
                for slot, tensor in zip(outs, made, strict=True):
                    if slot is not None:
                        registers[slot] = tensor
            except Exception as failed:
                if lacks_memory(failed):
                    error = failed if _STRIDES.search(str(error)) else error
                    break
            else:
                self._code[number] = again, pick, keywords, outs, dies, position
                return
        raise OperatorFailed(name, describe(args), number) from error

    def laid_out(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return outputs of a run in their required layouts.

        Raises:
            ValueError: One has another element type or shape than its layout.
        """
        if not self._layouts:
            return outputs
        pairs = zip(outputs, self._layouts, strict=True)
        return [tensor if layout is None else layout.fit(tensor, fresh=True) for tensor, layout in pairs]

    def _compile(self, operator: Operator) -> tuple[Any, ...]:
        call = allowed(operator.name)
        check_constants(call, operator.args, operator.kwargs)
        named = {key: value for key, value in operator.kwargs.items() if _holds_tensors(value)}
        keywords = {key: constant(value, self._device) for key, value in operator.kwargs.items() if key not in named}
        returns = call._schema.returns
        listed = len(returns) == 1 and str(returns[0].type) != "Tensor"
        if not listed and (len(operator.outs) != len(returns) or operator.outs == (None,)):
            raise WireError(f"{operator.name} has {len(returns)} outputs, but fills {operator.outs}")
        run = exactly(call)
        given = [self._constants(value) for value in operator.args]
        if run is call:
            run = fastest(call, given, keywords | {key: self._constants(value) for key, value in named.items()})
        direct = run
        if not named:
            run = (
                device_implementation(operator, self._specs, self._device)
                or faster_implementation(operator, self._specs, self._device)
                or run
            )
        run = guarded(call, run)
        if named:
            run = by_keyword(run, tuple(named))
        within = operator.outs[0] not in self._given_out  # no operator writes there, so that nothing needs a copy
        if operator.name == "aten.clone.default" and keywords.get("memory_format") in _FORMATS and within:
            run = Tensor.contiguous
        args = [*operator.args, *named.values()]
        if run is direct and not operator.kwargs and spreads(run, call, given):
            args[-1:] = given[-1]
        positional = [self._register(value) for value in args]
        return run, picker(positional), keywords, operator.outs, operator.dies, operator.position

    def _register(self, value: Value) -> ValueIndex:
        """Return the register of an argument, or the registers of a list that holds tensors."""
        if isinstance(value, SlotArgument):
            return value.index
        if isinstance(value, Many) and _holds_tensors(value):
            return tuple(self._register(item) for item in value.items)  # type: ignore[misc]
        known = self._numbers.get(value) if value.__class__ is int else None
        if known is not None:
            return known
        self._registers.append(constant(value, self._device))
        if value.__class__ is int:
            self._numbers[value] = len(self._registers) - 1
        return len(self._registers) - 1

    def _constants(self, value: Value) -> Any:
        """Return an argument, :data:`TENSOR` in place of tensors."""
        if isinstance(value, Many):
            return [TENSOR if isinstance(item, SlotArgument) else item for item in value.items]
        return TENSOR if isinstance(value, SlotArgument) else constant(value, self._device)

    def _check(self, number: int, registers: list[Any]) -> None:
        operator = self.program.operators[number]
        for slot, spec in zip(operator.outs, operator.specs, strict=True):
            if slot is None or spec is None:
                continue
            made = registers[slot]
            if made is None or tuple(made.shape) != spec.shape or dtype_name(made.dtype) != spec.dtype:
                problem = WireError(f"made {describe([made])}, but the program says {spec}")
                raise OperatorFailed(operator.name, "", number) from problem


def _holds_tensors(value: Value) -> bool:
    return isinstance(value, SlotArgument) or (
        isinstance(value, Many) and any(isinstance(i, SlotArgument) for i in value.items)
    )


def describe(arguments: Sequence[Any]) -> str:
    """Return a readable description of tensors among arguments."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(arguments))


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    return [
        tensor
        for argument in arguments
        for tensor in (argument if isinstance(argument, list | tuple) else [argument])
        if isinstance(tensor, Tensor)
    ]


def _contiguous_first(call: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Callable[..., Any]]:
    """Return an operator that makes its tensors contiguous; first one that leaves them expanded, which takes less."""
    expanded = any(0 in tensor.stride() for tensor in tensors)
    ways = (_dense, Tensor.contiguous) if expanded else (_dense,)
    return [functools.partial(_with_each, way, call) for way in ways]


def _with_each(way: Callable[[Tensor], Tensor], call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call an operator with tensors that have gone through a function."""

    def given(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [given(item) for item in value]
        return way(value) if isinstance(value, Tensor) else value

    return call(*map(given, args), **keywords)


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor that is contiguous but for the dimensions along which it is expanded."""
    once = tensor[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())]
    return once.contiguous().expand(tensor.shape)
