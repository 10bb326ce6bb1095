"""Sizes that follow from a model's graph alone: bytes of its segments, and of the values between them. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from onebox.cost import footprint
from onebox.cost.model_profile import CrossingValue, ModelBytes, SegmentBytes, TiedParameter
from onebox.graph import ModelPrograms, NamedProgram, Phase, Port
from onebox.wire import TensorSpec

_BEHIND = ("I", "W")


def model_bytes(
    model: ModelPrograms,
    names: tuple[str, ...],
    size: int,
    *,
    state: Mapping[str, TensorSpec],
    trained: frozenset[str],
    factors: Mapping[str, float],
    updates: Mapping[str, float],
) -> ModelBytes:
    """Return the bytes of a model's segments.

    Args:
        model: Its programs, with each segment as a stage and backward split into input and weight gradients.
        names: Names of the segments.
        size: Samples of the micro-batch.
        state: Spec of each parameter and buffer.
        trained: Parameters that have gradients.
        factors: For each of these, the ratio of its optimizer state's bytes to its own.
        updates: For each of these, the bytes read and written by its update.
    """
    table = _Table(model)
    readers: dict[str, set[int]] = defaultdict(set)
    for phase, part in model.phases.items():
        for port in (*part.inputs, *part.outputs):
            if port.kind in ("parameter", "rounded", "buffer", "gradient", "update"):
                readers[str(port.name)].add(phase.stage)
    held = {name: _held(state[name], factors[name] if name in trained else None) for name in readers}
    own = [[held[key] for key, found in readers.items() if found == {index}] for index in range(len(names))]
    cost = [
        sum(updates.get(key, 0.0) for key, found in readers.items() if found == {index} and key in trained)
        for index in range(len(names))
    ]
    segments = [_segment(table, index, name, own[index], cost[index]) for index, name in enumerate(names)]
    ties = [
        TiedParameter(
            name=key,
            segments=tuple(sorted(found)),
            parameter_bytes=held[key].parameter,
            state_bytes=held[key].total,
            optimizer_bytes=held[key].remembered,
        )
        for key, found in sorted(readers.items())
        if len(found) > 1
    ]
    programs = [(phase.stage, phase.kind, part.program) for phase, part in sorted(model.phases.items())]
    return ModelBytes(
        graph=hashlib.blake2b(msgspec.msgpack.encode((names, programs)), digest_size=16).hexdigest(),
        size=size,
        segments=tuple(segments),
        values=tuple(table.crossings()),
        ties=tuple(ties),
    )


class _Held(NamedTuple):
    """Bytes of a parameter or buffer on a worker that holds it.

    Args:
        parameter: Bytes of the parameter; 0 for a buffer, and for an untrained parameter.
        total: Total bytes, with its gradient and optimizer state.
        remembered: Bytes of the optimizer state.
    """

    parameter: int
    total: int
    remembered: int


def _held(spec: TensorSpec, factor: float | None) -> _Held:
    """Return the bytes of a tensor, given its ratio of optimizer state; ``None`` for an untrained one."""
    size_bytes = spec.size_bytes
    if factor is None:
        return _Held(0, size_bytes, 0)
    remembered_bytes = int(size_bytes * factor)
    return _Held(size_bytes, 2 * size_bytes + remembered_bytes, remembered_bytes)


def _segment(table: _Table, index: int, name: str, own: Sequence[_Held], update_bytes: float) -> SegmentBytes:
    """Return the bytes of a segment that alone holds some tensors."""
    return SegmentBytes(
        name=name,
        parameter_bytes=sum(held.parameter for held in own),
        state_bytes=sum(held.total for held in own),
        optimizer_bytes=sum(held.remembered for held in own),
        saved_bytes=table.saved(index),
        late_bytes=table.late(index),
        forward_work_bytes=_work(table.part(index, "F")),
        backward_work_bytes=max(table.back(index), *(_work(table.part(index, kind)) for kind in _BEHIND)),
        update_bytes=update_bytes,
    )


def _work(part: NamedProgram) -> int:
    """Return the peak bytes of a program besides its inputs and outputs."""
    made = sum(spec.size_bytes for port, spec in part.specs().items() if port.kind != "update")
    return max(0, footprint(part.program).peak_bytes - made)


class _Table:
    """Producers and readers of each value."""

    def __init__(self, model: ModelPrograms) -> None:
        self._model = model
        self.makers: dict[Port, Phase] = {}
        self.sizes: dict[Port, int] = {}
        self.readers: dict[Port, list[Phase]] = defaultdict(list)
        for phase, part in model.phases.items():
            if phase.kind == "B":
                continue
            for port, spec in part.specs().items():
                if port.kind == "value":
                    self.makers[port] = phase
                    self.sizes[port] = spec.size_bytes
            for port, spec in zip(part.inputs, part.program.inputs, strict=True):
                if port.kind in ("value", "leaf"):
                    self.readers[port].append(phase)
                    self.sizes.setdefault(port, spec.size_bytes)

    def part(self, index: int, kind: str) -> NamedProgram:
        """Return a program of a segment."""
        return self._model.of(index, kind)  # type: ignore[arg-type]

    def saved(self, index: int) -> int:
        """Return the bytes of values that a segment's forward computes, or reads from the batch, for backward."""
        total = 0
        for port, phases in self.readers.items():
            behind = any(phase.kind in _BEHIND for phase in phases)
            made_here = self.makers.get(port) == Phase(index, "F")
            read_here = port.kind == "leaf" and any(p.stage == index and p.kind in _BEHIND for p in phases)
            total += self.sizes[port] if behind and (made_here or read_here) else 0
        return total

    def back(self, index: int) -> int:
        """Return the peak bytes of a segment's whole backward besides saved values, including gradients."""
        part = self.part(index, "B")
        own = Phase(index, "F")
        ends, gradients = set(), 0
        for place, (port, spec) in enumerate(zip(part.inputs, part.program.inputs, strict=True)):
            if port.kind != "value":
                continue
            maker = self.makers.get(port)
            if maker == own or maker is None or maker.kind != "F":
                ends.add(place)
            if maker is None or maker.kind != "F":
                gradients += spec.size_bytes
        made = sum(spec.size_bytes for port, spec in part.specs().items() if port.kind == "gradient")
        return max(0, gradients + footprint(part.program, ends).peak_bytes - made)

    def late(self, index: int) -> int:
        """Return the bytes that a segment's weight gradient reads."""
        ports = self.part(index, "W").inputs
        return sum(self.sizes[port] for port in ports if port.kind in ("value", "leaf"))

    def crossings(self) -> list[CrossingValue]:
        """Return the values between segments."""
        found = []
        for port, maker in self.makers.items():
            others = {phase.stage for phase in self.readers[port]} - {maker.stage}
            if not others:
                continue
            size = self.sizes[port]
            if maker.kind == "F":
                kept = any(phase.kind in _BEHIND and phase.stage != maker.stage for phase in self.readers[port])
                later = tuple(sorted(other for other in others if other > maker.stage))
                if later:
                    found.append(
                        CrossingValue(
                            source=maker.stage, consumers=later, forward_bytes=size, backward_bytes=0, kept=kept
                        )
                    )
            else:
                found += [
                    CrossingValue(
                        source=other, consumers=(maker.stage,), forward_bytes=0, backward_bytes=size, kept=False
                    )
                    for other in sorted(others)
                    if other < maker.stage
                ]
        return found
