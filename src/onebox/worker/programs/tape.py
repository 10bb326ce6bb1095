"""The tape: a straight line of compiled calls that take their arguments from one list of registers."""

from __future__ import annotations

import operator as op
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from onebox.errors import WireError
from onebox.wire import FREE, TapeSpec
from onebox.worker.programs.arguments import picker
from onebox.worker.programs.kernels import CompiledKernel
from onebox.worker.progress import WorkerProgress

Seed = Callable[[int], None]
"""Seeds the device's random numbers for the random operator at a position."""


class Void:
    """Register content in place of a tensor that does not exist.

    Args:
        error: Raised by its use.
    """

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class Step(NamedTuple):
    """One call.

    Args:
        run: The operator.
        pick: Selects its arguments from the registers.
        keep: Selects what to keep from its result; ``None`` for the result itself.
        target: The register, or registers, that it fills.
        dies: Registers that are freed after it.
        position: For a random operator, its position, from which its seed is derived; otherwise -1.
        name: The operator's name.
        number: Its index in the tape.
        slots: Registers of the tensors that it reads.
        first: The first register that it fills.
        stop: The register after the last one.
        kernel: Its kernel, in a batch.
    """

    run: Callable[..., Any]
    pick: Callable[[Any], Sequence[Any]]
    keep: Callable[[Any], Any] | None
    target: int | slice
    dies: list[int]
    position: int
    name: str
    number: int
    slots: tuple[int, ...]
    first: int
    stop: int
    kernel: Any


Row = tuple[
    Callable[..., Any],
    Callable[[Any], Sequence[Any]],
    Callable[[Any], Any] | None,
    int | slice,
    list[int],
    int,
    str,
    int,
    tuple[int, ...],
    int,
    int,
    Any,
]
"""A :class:`Step` as a plain tuple, which Python makes and unpacks several times as fast."""

Fail = Callable[[Row, list[Any], Exception], bool]
"""Handles the exception of a call; returns whether the tape stops there."""

After = Callable[[Row, list[Any]], None]
"""Checks or counts what a call has made, before registers are freed."""


def execute(
    steps: Iterable[Row],
    registers: list[Any],
    progress: WorkerProgress,
    fail: Fail,
    seed: Seed | None = None,
    after: After | None = None,
) -> bool:
    """Run calls in sequence, and return whether none has stopped it."""
    for step in steps:
        run, pick, keep, target, dies, position, name, _, _, _, _, _ = step
        progress.executed += 1
        progress.doing = name
        if position >= 0 and seed is not None:
            seed(position)
        try:
            if keep is None:
                registers[target] = run(*pick(registers))
            else:
                registers[target] = keep(run(*pick(registers)))
            if after is not None:
                after(step, registers)
        except Exception as error:
            if fail(step, registers, error):
                return False
        for slot in dies:
            registers[slot] = None
    return True


class CompiledTape:
    """A checked batch of calls, linked to the registers from which they take their arguments.

    Registers from 0 are slots, in the order in which calls fill them. The others count from the end, as in the batch:
    inputs, then numbers, then constants.

    Args:
        spec: The batch.
        kernel: Returns the kernel with a number.

    Raises:
        WireError: A call is truncated, or reads an empty slot; an empty slot is freed; or numbers are left over.
    """

    def __init__(self, spec: TapeSpec, kernel: Callable[[int], CompiledKernel]) -> None:
        calls, end = spec.calls, len(spec.calls)
        if not 0 <= spec.inputs <= end:
            raise WireError(f"a tape of {end} integers has {spec.inputs} inputs")
        self.spec = spec
        self.peak_bytes = -1  # peak bytes of a run in addition to those at its start; known after the first run
        self.steps: list[Row] = []
        self.reserving: list[int] = []  # calls that reserve memory while it is counted
        resized: set[int] = set()
        self._constants: list[Any] = []
        self._placed: dict[int, tuple[int, ...]] = {}  # registers of the constants of kernels
        self._drawn = 0  # numbers that calls have taken
        alive = set(range(-spec.inputs, 0))
        made = at = 0
        dies: list[int] = []
        while at < end:
            code = calls[at]
            if code == FREE:
                if at + 1 == end or calls[at + 1] not in alive or not self.steps:
                    raise WireError("a tape frees a slot that nothing has filled, or that has ended")
                alive.remove(calls[at + 1])
                dies.append(calls[at + 1])
                at += 2
                continue
            called = kernel(code)
            slots = calls[at + 1 : at + 1 + called.inputs]
            at += 1 + called.inputs
            if at > end or not alive.issuperset(slots):
                raise WireError(f"{called.name} is cut short, or reads a slot that is empty")
            where = called.pick(slots if called.plain else self._values(code, called, slots))
            pick = op.itemgetter(*where) if called.flat and len(where) > 1 else picker(where)
            stop = made + called.outputs
            target: int | slice = made if called.single else slice(made, stop)
            number, dies = len(self.steps), []
            if called.reserves:
                self.reserving.append(number)
                resized.update(slots[index] for index in called.resizes)
            self.steps.append(
                (called.run, pick, called.keep, target, dies, -1, called.name, number, slots, made, stop, called)
            )
            alive.update(range(made, stop))
            made = stop
        if self._drawn != spec.floats:
            raise WireError(f"the calls of a tape take {self._drawn} numbers of the {spec.floats} that it brings")
        self.outputs = sorted(slot for slot in alive if slot >= 0)
        """The slots that outlive it."""
        self.ends = [index for index in range(spec.inputs) if -1 - index not in alive]
        """The inputs that it frees."""
        self.resizes = [-1 - slot for slot in resized if slot < 0]
        """The inputs whose storages a run may change."""
        self.filled = made
        """The number of slots that it fills."""
        self._start = [*[None] * made, *reversed(self._constants)]

    def _values(self, code: int, called: CompiledKernel, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return the registers of a call's tensors, numbers and constants."""
        first = self._drawn - self.spec.inputs - self.spec.floats
        self._drawn += called.floats
        constants = self._placed.get(code)
        if constants is None:
            last = -self.spec.inputs - self.spec.floats - len(self._constants) - 1
            constants = self._placed[code] = tuple(range(last, last - len(called.constants), -1))
            self._constants += called.constants
        return (*slots, *range(first, first + called.floats), *constants)

    def registers(self, inputs: list[Any], floats: Sequence[float]) -> list[Any]:
        """Return the registers at the start of a run; the list of inputs is emptied."""
        made = [*self._start, *floats, *reversed(inputs)]
        inputs.clear()
        return made

    def writes(self) -> list[int]:
        """Return the inputs that a run may write to."""
        origins = {slot: slot for slot in range(-self.spec.inputs, 0)}  # of views, which are of the first argument
        found = set()
        for step in map(Step._make, self.steps):
            base = origins[step.slots[0]] if step.slots and not step.kernel.fresh else 0
            origins |= dict.fromkeys(range(step.first, step.stop), base)
            found |= {origins[step.slots[index]] for index in step.kernel.writes}
        return [-1 - slot for slot in found if slot < 0]


def void_among(step: Step, registers: Sequence[Any]) -> Void | None:
    """Return the first tensor that a call reads and that does not exist."""
    return next((registers[slot] for slot in step.slots if isinstance(registers[slot], Void)), None)


def tensors_of(step: Step, registers: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that a call reads."""
    return [registers[slot] for slot in step.slots if isinstance(registers[slot], Tensor)]
