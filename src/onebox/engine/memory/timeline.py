"""Memory curve of a device over a step, and the contents of its memory at the peak, from the memory simulator alone.
Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from onebox.cost import alive_at, footprint, owners
from onebox.engine.memory.simulator import InitialContents, MemorySimulator, simulate_memory
from onebox.plan import Action
from onebox.wire import Operator, Program, TensorSpec, specs_by_slot
from onebox.wire.protocol.instructions import Call

MemoryCategory = Literal[
    "parameters", "buffers", "gradients", "optimizer state", "activations", "batch", "work", "constants"
]
"""Use of memory. Activations are values passed on to later actions, including gradients of activations; work is memory
needed only while an action runs."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory of a device during one instruction of a step.

    Args:
        name: Readable name of the instruction.
        action: The action of the plan's schedule that it computes, if any.
        peak_bytes: Most bytes in use during it.
        used_bytes: Bytes in use after it.
    """

    name: str
    action: Action | None
    peak_bytes: int
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """The memory of a device over a step.

    Args:
        device: Its number in the pool.
        start_bytes: Bytes in use at the beginning of the step.
        uses: Memory of each instruction, in order.
    """

    device: int
    start_bytes: int
    uses: tuple[MemoryUse, ...]

    @property
    def peak(self) -> MemoryUse:
        """The first instruction with the highest peak."""
        return max(self.uses, key=lambda use: use.peak_bytes)


@dataclass(frozen=True, kw_only=True)
class ResidentTensor:
    """An object in a device's memory.

    Args:
        sort: Its use.
        name: The name of a parameter, or the operator that made it.
        size_bytes: Its bytes.
    """

    sort: MemoryCategory
    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """The moment of a device's highest memory use.

    Args:
        device: Its number in the pool.
        size_bytes: Bytes in use.
        name: Name of the instruction that runs then.
        action: The action that it computes, if any.
        operator: The operator that runs then; empty if the instruction is no computation.
        residents: Contents of the memory, largest first; they add up to ``size_bytes``.
    """

    device: int
    size_bytes: int
    name: str
    action: Action | None
    operator: str
    residents: tuple[ResidentTensor, ...]

    @property
    def sorts(self) -> dict[MemoryCategory, int]:
        """Bytes of each sort, largest first."""
        found: dict[MemoryCategory, int] = defaultdict(int)
        for one in self.residents:
            found[one.sort] += one.size_bytes
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def memory_timeline(device: int, contents: InitialContents) -> MemoryTimeline:
    """Return a device's memory over a step.

    Args:
        device: The device.
        contents: Its contents at the beginning of the step.
    """
    ledgers = simulate_memory(contents)
    start_bytes = next(ledgers).used_bytes
    return MemoryTimeline(
        device=device,
        start_bytes=start_bytes,
        uses=tuple(
            MemoryUse(name=label.name, action=label.action, peak_bytes=ledger.peak_bytes, used_bytes=ledger.used_bytes)
            for label, ledger in zip(contents.routine.labels, ledgers, strict=True)
        ),
    )


def memory_peak(device: int, contents: InitialContents) -> MemoryPeak:
    """Return the peak of a device and the contents of its memory then.

    Args:
        device: The device.
        contents: Its contents at the beginning of the step.
    """
    curve = memory_timeline(device, contents)
    place = curve.uses.index(curve.peak)
    ledgers = simulate_memory(contents)
    for _ in range(place + 1):
        ledger = next(ledgers)
    step = contents.steps[place]
    found = _Inventory(contents, ledger)
    operator = ""
    if isinstance(step, Call):
        program = contents.programs[step.program]
        number = footprint(program, step.takes).peak_operator
        operator = program.operators[number].name
        found.run(step, program, number, curve.peak.name)
    found.add("work", f"{curve.peak.name}, while it runs", curve.peak.peak_bytes - found.total_bytes)
    return MemoryPeak(
        device=device,
        size_bytes=curve.peak.peak_bytes,
        name=curve.peak.name,
        action=curve.peak.action,
        operator=operator,
        residents=tuple(sorted(found.residents(), key=lambda one: (-one.size_bytes, one.name))),
    )


class _Inventory:
    """Contents of a device's memory, by storage."""

    def __init__(self, contents: InitialContents, ledger: MemorySimulator) -> None:
        self._contents = contents
        self._sizes: dict[int, int] = {}
        self._what: dict[int, tuple[MemoryCategory, str]] = {}
        self._storage: dict[int, int] = {}
        self._extra: list[ResidentTensor] = []
        self.add("optimizer state", "of all parameters", contents.optimizer_bytes)
        for number, (storage, size_bytes) in ledger.buffers().items():
            self._storage[number] = storage
            self._sizes[storage] = size_bytes
            what = self._known(number)
            if what is not None or storage not in self._what:
                self._what[storage] = what or self._made(*ledger.origins[storage])

    @property
    def total_bytes(self) -> int:
        """Total bytes."""
        return sum(self._sizes.values()) + sum(one.size_bytes for one in self._extra)

    def add(self, sort: MemoryCategory, name: str, size_bytes: int) -> None:
        """Add an object that is no buffer."""
        if size_bytes > 0:
            self._extra.append(ResidentTensor(sort=sort, name=name, size_bytes=size_bytes))

    def run(self, call: Call, program: Program, number: int, name: str) -> None:
        """Advance to an operator inside a program: consumed values are freed, computed values are present."""
        there = alive_at(program, number, call.takes)
        specs = specs_by_slot(program)
        for place in call.takes:
            if place not in there:
                self._sizes[self._storage[call.inputs[place]]] -= specs[place].size_bytes
        makers = {slot: operator for operator in program.operators for slot in operator.outs if slot is not None}
        for slot, size_bytes in there.items():
            if slot >= len(program.inputs):
                self.add(
                    *self._inside(call, program, slot, f"{_text(makers[slot], specs[slot])} of {name}"), size_bytes
                )

    def residents(self) -> Iterator[ResidentTensor]:
        """Yield all contents."""
        yield from self._extra
        for storage, size_bytes in self._sizes.items():
            if size_bytes > 0:
                sort, name = self._what[storage]
                yield ResidentTensor(sort=sort, name=name, size_bytes=size_bytes)

    def _known(self, number: int) -> tuple[MemoryCategory, str] | None:
        """Return the sort and name of a buffer with a fixed meaning."""
        contents = self._contents
        if number in contents.held:
            held = contents.held[number]
            sorts: Mapping[str, MemoryCategory] = {
                "parameter": "parameters",
                "buffer": "buffers",
                "constant": "constants",
                "residual": "gradients",
            }
            return sorts[held.what], held.name or "a constant of the graph"
        if number in contents.gradients:
            return "gradients", contents.gradients[number]
        if number < 0:
            micro_batch, leaf = contents.routine.leaves[-1 - number]
            return "batch", f"tensor {leaf} of micro-batch {micro_batch}"
        if number in contents.routine.constants:
            return "constants", "the weight of a micro-batch"
        return None

    def _made(self, instruction: int, slot: int | None) -> tuple[MemoryCategory, str]:
        """Return the sort and name of a value made by an instruction or by the previous step."""
        if instruction < 0:
            return "activations", "what is left of the step before"
        label, step = self._contents.routine.labels[instruction], self._contents.steps[instruction]
        if slot is None or not isinstance(step, Call):
            return "activations", label.name
        program = self._contents.programs[step.program]
        maker = next(operator for operator in program.operators if slot in operator.outs)
        return "activations", f"{_text(maker, specs_by_slot(program)[slot])} of {label.name}"

    def _inside(self, call: Call, program: Program, slot: int, text: str) -> tuple[MemoryCategory, str]:
        """Return the sort and name of a value inside a running program; its outputs are counted as such already."""
        root = owners(program)
        for number, out in zip(call.outputs, program.outputs, strict=True):
            if root[out] == slot:
                return self._known(number) or ("activations", text)
        return "work", text


def _text(operator: Operator, spec: TensorSpec) -> str:
    """Return a description of an operator's result."""
    name = operator.name.removeprefix("aten.").rpartition(".")[0]
    return f"{name} {spec}"
