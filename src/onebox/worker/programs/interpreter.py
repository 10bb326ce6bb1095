"""Stored programs as tapes, whose first run is checked and whose operators get contiguous tensors if they need them."""

from __future__ import annotations

import functools
import itertools
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
    Operator,
    Program,
    Strided,
    check,
    dtype_name,
    reads,
    specs_by_slot,
)
from onebox.worker.memory.buffers import lacks_memory
from onebox.worker.programs.arguments import picker
from onebox.worker.programs.device_implementation import device_implementation
from onebox.worker.programs.kernels import OutputLayout, Places, compile_call
from onebox.worker.programs.matmul_dispatch import faster_implementation
from onebox.worker.programs.tape import Row, Seed, Step, execute
from onebox.worker.progress import WorkerProgress
from onebox.worker.sandbox.allow_list import allowed

_shape = op.attrgetter("shape")
_dtype = op.attrgetter("dtype")

_VIEWS = ("aten.view.default", "aten._unsafe_view.default")

_FORMATS = (torch.contiguous_format, torch.channels_last)

_STRIDES = re.compile("strid|contiguous", re.IGNORECASE)
"""In the messages of kernels that refuse strides."""


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

    Its inputs are in the first registers; each operator fills the next ones, and constants are in the last.

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
        count = itertools.count(len(program.inputs))
        self._filled = [tuple([next(count) for _ in operator.outs]) for operator in program.operators]
        at = dict(enumerate(range(len(program.inputs))))  # register of each slot
        for operator, registers in zip(program.operators, self._filled, strict=True):
            at |= {slot: register for slot, register in zip(operator.outs, registers, strict=True) if slot is not None}
        self._at = at
        slots = next(count)
        self._places = Places(at, range(0), slots, device)
        self.steps = list(map(self._compile, itertools.count(), program.operators, self._filled))
        self._outputs = [at[slot] for slot in program.outputs]
        self._start = [*[None] * slots, *self._places.constants]
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
        registers = self._start.copy()
        registers[: len(inputs)] = inputs
        inputs.clear()
        for slot in self._unread:
            registers[slot] = None
        check_made = None if self._checked else self._check
        execute(self.steps, registers, progress, functools.partial(self._with_contiguous, seed), seed, check_made)
        self._checked = True
        made = [registers[slot] for slot in self._outputs]
        for place in self._complex:  # elements are sent as they are in memory
            made[place] = made[place].resolve_conj()
        return made

    def _with_contiguous(self, seed: Seed, row: Row, registers: list[Any], error: Exception) -> bool:
        """Run an operator again that failed: it may have refused strides, which differ by kernel, device and journey.

        If it takes contiguous tensors, it is given such ones from now on.

        Raises:
            OperatorFailed: It was not for strides.
        """
        if isinstance(error, OperatorFailed):
            raise error
        step = Step._make(row)
        number, args = step.number, step.pick(registers)
        tries: list[Callable[..., Any]] = []
        # what a rule about arguments refuses stays refused, whatever its strides; where memory lacks, copies take more
        refused = not isinstance(error, WireError) and not lacks_memory(error)
        if refused and not all(tensor.is_contiguous() for tensor in _tensors(args)):
            tries = [Tensor.reshape] if step.name in _VIEWS else _contiguous_first(step.run, _tensors(args))
        for again in tries:
            changed = step._replace(run=again)
            problems: list[Exception] = []

            def fail(row: Row, registers: list[Any], error: Exception, problems: list[Exception] = problems) -> bool:
                problems.append(error)
                return True

            if execute([changed._replace(dies=[])], registers, WorkerProgress(), fail, seed):
                self.steps[number] = tuple(changed)
                if not self._checked:
                    self._check(changed, registers)
                return False
            if lacks_memory(problems[0]):
                error = problems[0] if _STRIDES.search(str(error)) else error
                break
        raise OperatorFailed(step.name, describe(args), number) from error

    def laid_out(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return outputs of a run in their required layouts.

        Raises:
            ValueError: One has another element type or shape than its layout.
        """
        if not self._layouts:
            return outputs
        pairs = zip(outputs, self._layouts, strict=True)
        return [tensor if layout is None else layout.fit(tensor, fresh=True) for tensor, layout in pairs]

    def _compile(self, number: int, operator: Operator, filled: tuple[int, ...]) -> Row:
        call = allowed(operator.name)
        returns = call._schema.returns
        listed = len(returns) == 1 and str(returns[0].type) != "Tensor"
        if not listed and (len(operator.outs) != len(returns) or operator.outs == (None,)):
            raise WireError(f"{operator.name} has {len(returns)} outputs, but fills {operator.outs}")

        def implementation() -> Callable[..., Any] | None:
            made = device_implementation(operator, self._specs, self._device)
            return made or faster_implementation(operator, self._specs, self._device)

        run, places = compile_call(call, operator.args, operator.kwargs, self._places, implementation)
        if operator.name == "aten.clone.default" and operator.outs[0] not in self._given_out:
            form = self._places.constant(operator.kwargs.get("memory_format"))
            if form in _FORMATS:  # no operator writes there, so that nothing needs a copy
                run = functools.partial(Tensor.contiguous, memory_format=form)
        ended = [self._at[slot] for slot in operator.dies]
        ended += [register for slot, register in zip(operator.outs, filled, strict=True) if slot is None]
        first, stop = filled[0] if filled else 0, filled[-1] + 1 if filled else 0
        single = not listed and len(filled) == 1
        return (
            run,
            picker(places),
            None if single else functools.partial(_split, len(filled)),
            first if single else slice(first, stop),
            ended,
            operator.position,
            operator.name,
            number,
            (),
            first,
            stop,
            None,
        )

    def _check(self, row: Row, registers: list[Any]) -> None:
        number = row[7]
        operator = self.program.operators[number]
        for register, slot, spec in zip(self._filled[number], operator.outs, operator.specs, strict=True):
            if slot is None or spec is None:
                continue
            made = registers[register]
            if made is None or tuple(made.shape) != spec.shape or dtype_name(made.dtype) != spec.dtype:
                problem = WireError(f"made {describe([made])}, but the program says {spec}")
                raise OperatorFailed(operator.name, "", number) from problem


def _split(count: int, result: Any) -> Sequence[Any]:
    """Return the outputs of an operator that has several, or a list."""
    made = (result,) if isinstance(result, Tensor) else result
    if len(made) != count:
        raise ValueError(f"it returned {len(made)} tensors where {count} are expected")
    return made


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
