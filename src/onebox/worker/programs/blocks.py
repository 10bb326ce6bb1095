"""A compiled block: a sequence of calls that take their arguments from one list of registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from onebox.errors import WireError
from onebox.wire import FREE, BlockSpec
from onebox.wire.protocol.responses import WorkerFailure
from onebox.worker.programs.arguments import ValueIndex, picker
from onebox.worker.programs.kernels import CompiledKernel
from onebox.worker.progress import WorkerProgress

Explain = Callable[[Exception, CompiledKernel, Sequence[Any]], WorkerFailure]
"""Converts an operator's exception, given its arguments, to a failure, and reports it."""


class Void(NamedTuple):
    """Register content in place of a tensor that could not be computed."""

    failure: WorkerFailure


class Step(NamedTuple):
    """One call.

    Args:
        run: The operator.
        pick: Selects its arguments from the registers.
        kept: Selects the tensors to keep from its result.
        first: Register of the first kept tensor.
        stop: Register after the last one; ``first`` if none is kept.
        dies: Registers that are freed after it.
        ends: Inputs of the block whose buffers are freed after it.
        kernel: Its kernel.
        slots: Registers of its inputs.
        floats: Index of its first number among those of the block.
    """

    run: Callable[..., Any]
    pick: Callable[[Any], Sequence[Any]]
    kept: Callable[[Any], Sequence[Tensor]]
    first: int
    stop: int
    dies: tuple[int, ...]
    ends: tuple[int, ...]
    kernel: CompiledKernel
    slots: tuple[int, ...]
    floats: int


class CompiledBlock:
    """A checked block with resolved kernels.

    Args:
        block: The block.
        kernel: Returns the kernel with a number.

    Raises:
        WireError: A call is truncated, reads an empty slot, or fills another slot than the next; or an empty slot is
            kept, or numbers are left over.
        Poisoned: One of its kernels is void.
    """

    def __init__(self, block: BlockSpec, kernel: Callable[[int], CompiledKernel]) -> None:
        self.block = block
        self.peak_bytes = -1  # peak bytes of a run in addition to those at its start; known after the first run
        if block.inputs < 0 or block.inputs > len(block.calls) + len(block.outputs):
            raise WireError(f"a block of {len(block.calls)} integers has {block.inputs} inputs")
        self._alive = [True] * block.inputs
        self._origins = list(range(block.inputs))  # for each slot, the input that it is a view of; -1 for none
        self.begins: list[int] = []  # inputs that are freed before any call
        self._writes: set[int] = set()
        self._resizes: set[int] = set()
        parsed = self._parse(kernel)
        if not all(0 <= slot < len(self._alive) and self._alive[slot] for slot in block.outputs):
            raise WireError("a block keeps a slot that nothing fills, or that has ended")
        taken = sum(compiled.floats for compiled, *_ in parsed)
        if taken != block.floats:
            raise WireError(f"the calls of a block take {taken} numbers, but it brings {block.floats}")
        slots = len(self._alive)
        self._empty: list[Any] = [None] * (slots + block.floats)
        self._floats = slice(slots, slots + block.floats)
        at = slots
        self.steps: list[Step] = []
        for compiled, inputs, first, freed in parsed:
            self.steps.append(self._step(compiled, inputs, first, freed, at))
            at += compiled.floats
        self.resizes = tuple(slot for slot in self._resizes if slot < block.inputs)

    @property
    def writes(self) -> tuple[int, ...]:
        """Inputs that a run may write to."""
        return tuple(slot for slot in self._writes if slot >= 0)

    def _parse(
        self, kernel: Callable[[int], CompiledKernel]
    ) -> list[tuple[CompiledKernel, tuple[int, ...], int, list[int]]]:
        """Return the kernel of each call, its slots, the first slot that it fills, and those freed after it."""
        calls, alive = self.block.calls, self._alive
        parsed: list[tuple[CompiledKernel, tuple[int, ...], int, list[int]]] = []
        at = 0
        while at < len(calls):
            if calls[at] == FREE:
                slots, at = calls[at + 1 : at + 2], at + 2
                self._require(slots, 1)
                alive[slots[0]] = False
                (parsed[-1][3] if parsed else self.begins).append(slots[0])
                continue
            compiled = kernel(calls[at])
            middle = at + 1 + compiled.inputs
            slots, made, at = (
                calls[at + 1 : middle],
                calls[middle : middle + compiled.outputs],
                middle + compiled.outputs,
            )
            self._require(slots, compiled.inputs)
            first = len(alive)
            if made != tuple(range(first, first + compiled.outputs)):
                raise WireError(f"a call of a block fills slots {made}, but the next one is {first}")
            alive += [True] * compiled.outputs
            base = -1 if compiled.fresh or not slots else self._origins[slots[0]]  # views are of the first argument
            self._origins += [base] * compiled.outputs
            self._writes.update(self._origins[slots[index]] for index in compiled.writes)
            self._resizes.update(slots[index] for index in compiled.resizes)
            parsed.append((compiled, slots, first, []))
        return parsed

    def _require(self, slots: tuple[int, ...], count: int) -> None:
        """Require that a call names the given number of slots, and that all of them are filled."""
        if len(slots) != count:
            raise WireError("the last call of a block is cut short")
        for slot in slots:
            if not 0 <= slot < len(self._alive) or not self._alive[slot]:
                raise WireError(f"a call of a block names slot {slot}, which nothing has filled, or which has ended")

    def _step(
        self, compiled: CompiledKernel, slots: tuple[int, ...], first: int, freed: list[int], floats: int
    ) -> Step:
        constants = len(self._empty)
        self._empty += compiled.constants
        places = [*slots, *range(floats, floats + compiled.floats)]
        places += range(constants, constants + len(compiled.constants))

        def translate(place: ValueIndex) -> ValueIndex:
            return places[place] if isinstance(place, int) else tuple(places[one] for one in place)

        return Step(
            compiled.run,
            picker([translate(place) for place in compiled.places]),
            compiled.kept,
            first,
            first + compiled.outputs,
            tuple(freed),
            tuple(slot for slot in freed if slot < self.block.inputs),
            compiled,
            slots,
            floats - self._floats.start,
        )

    def run(
        self,
        inputs: list[Tensor],
        floats: Sequence[float],
        progress: WorkerProgress,
        end: Callable[[int], None],
        explain: Explain,
    ) -> list[Any]:
        """Run the calls, up to one that fails, without counting the memory of each.

        Args:
            inputs: Contents of the first slots; the list is emptied.
            floats: Numbers of all calls.
            progress: Incremented for each operator.
            end: Called with each input whose buffer is freed.
            explain: Called when an operator fails.

        Returns:
            The registers, those of slots first; :class:`Void` where a call failed, or was skipped after one.
        """
        registers = self._empty.copy()
        registers[: len(inputs)] = inputs
        registers[self._floats] = floats
        inputs.clear()
        for slot in self.begins:
            registers[slot] = None
            end(slot)
        steps = iter(self.steps)
        for step in steps:
            run, pick, kept, first, stop, dies, ends, kernel, slots, _ = step
            progress.executed += 1
            progress.doing = kernel.name
            try:
                if first < stop:
                    registers[first:stop] = kept(run(*pick(registers)))
                else:
                    run(*pick(registers))
            except Exception as error:
                mark = Void(explain(error, kernel, [registers[slot] for slot in slots]))
                registers[first:stop] = [mark] * (stop - first)
                _end(step, registers, end)
                for later in steps:
                    _skip(later, registers, mark)
                    _end(later, registers, end)
                return registers
            for slot in dies:
                registers[slot] = None
            for slot in ends:
                end(slot)
        return registers

    def skip(self) -> tuple[list[int], list[int]]:
        """Return the inputs that are freed in a run, and those that are void if none of its operators can run."""
        freed = [slot for slot in range(self.block.inputs) if not self._alive[slot]]
        return freed, [slot for slot in self.writes if self._alive[slot]]


def _end(step: Step, registers: list[Any], end: Callable[[int], None]) -> None:
    """Free what a call is the last to use."""
    for slot in step.dies:
        registers[slot] = None
    for slot in step.ends:
        end(slot)


def _skip(step: Step, registers: list[Any], mark: Void) -> None:
    """Skip a call: its outputs are void, but for views of what is not void."""
    made: Sequence[Any] = [mark] * (step.stop - step.first)
    if step.kernel.views and all(isinstance(registers[slot], Tensor) for slot in step.slots):
        try:
            result = step.run(*step.pick(registers))
            made = step.kept(result) if made else ()
        except Exception:
            for index in step.kernel.writes:  # the script sees another shape
                registers[step.slots[index]] = mark
    registers[step.first : step.stop] = made
