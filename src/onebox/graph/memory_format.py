"""Memory formats: programs whose convolutions use channels-last memory format.

oneDNN convolves maps of either format, but with channels last it reorders less, and poolings and batch norms are
vectorised over channels. Results are the same but for rounding. Maps are converted where a convolution first reads them
and keep the format along operators that preserve it; every other operator reads the captured format, random ones among
them, which would draw other numbers. Each conversion is an operator of its own, so that its memory is accounted for
like any other.

A value of another stage may have either format: it has travelled, or it has not. A conversion to the format that a
value already has is free; see :class:`onebox.worker.programs.interpreter.CompiledProgram`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from onebox.graph.capture.joint import Port
from onebox.graph.lower.phases import Phase
from onebox.graph.lower.split import renumber
from onebox.graph.programs import ModelPrograms, NamedProgram
from onebox.wire import Many, MemoryFormat, Operator, Program, SlotArgument, reads, specs_by_slot, with_deaths

Format = Literal["as captured", "channels last", "either"]

_CONVOLUTIONS = {"aten.convolution.default": 2, "aten.convolution_backward.default": 3}
"""For each operator, the number of its tensor arguments; the last of them is the weight, which may keep its format."""

_POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy.default", "add.Scalar", "add.Tensor", "clamp.default", "clamp_max.default", "clamp_min.default",
        "div.Scalar", "div.Tensor", "elu.default", "eq.Scalar", "exp.default", "ge.Scalar", "gelu.default",
        "gelu_backward.default", "gt.Scalar", "hardsigmoid.default", "hardsigmoid_backward.default",
        "hardswish.default", "hardswish_backward.default", "hardtanh.default", "hardtanh_backward.default",
        "le.Scalar", "leaky_relu.default", "leaky_relu_backward.default", "lt.Scalar", "mul.Scalar", "mul.Tensor",
        "neg.default", "relu.default", "rsub.Scalar", "sigmoid.default", "sigmoid_backward.default", "silu.default",
        "silu_backward.default", "sub.Tensor", "tanh.default", "tanh_backward.default", "threshold_backward.default",
        "where.self",
    )
)  # fmt: skip
"""Operators on elements, whose maps must have one shape here."""

_LOCAL = frozenset(
    f"aten.{name}"
    for name in (
        "_adaptive_avg_pool2d.default", "_adaptive_avg_pool2d_backward.default", "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_functional.default", "_native_batch_norm_legit_no_training.default",
        "avg_pool2d.default", "avg_pool2d_backward.default", "cat.default", "max_pool2d_with_indices.default",
        "max_pool2d_with_indices_backward.default", "native_batch_norm_backward.default",
        "upsample_bilinear2d.default", "upsample_nearest2d.default",
    )
)  # fmt: skip
"""Operators that preserve the format of their input, whatever the shapes."""

_SUMS = frozenset({"aten.sum.dim_IntList", "aten.mean.dim"})
_MAP = 4
"""Dimensions of maps: samples, channels, rows and columns."""


def with_channels_last(programs: ModelPrograms, stages: Collection[int]) -> ModelPrograms:
    """Return the programs of a model with those of some stages in channels-last format.

    A stage whose captured programs permute channels themselves is unchanged.

    Args:
        programs: The programs of all stages.
        stages: The stages to convert.
    """
    own = {phase: named for phase, named in programs.phases.items() if phase.stage in set(stages)}
    kept = {phase.stage for phase, named in own.items() if _permutes(named.program)}
    own = {phase: named for phase, named in own.items() if phase.stage not in kept}
    outside = {port for phase, named in programs.phases.items() if phase not in own for port in named.inputs}
    makers = {port: phase.stage for phase, named in own.items() for port in named.outputs if port.kind == "value"}
    lies: dict[Port, Format] = dict.fromkeys(makers, "either")
    changed: dict[Phase, NamedProgram] = {}
    for phase in sorted(own, key=lambda phase: ("FBIW".index(phase.kind), phase.stage)):
        named = own[phase]
        given = [
            lies.get(port, "as captured") if makers.get(port) == phase.stage else _OF_OTHERS[port in makers]
            for port in named.inputs
        ]
        stay = [port.kind == "value" and port not in outside for port in named.outputs]
        rewriting = Rewriting(named.program, given)
        changed[phase] = replace(named, program=rewriting.program(stay))
        lies |= dict(zip(named.outputs, rewriting.made, strict=True))
    return replace(programs, phases={**programs.phases, **changed})


_OF_OTHERS: tuple[Format, Format] = ("as captured", "either")


class Rewriting:
    """A rewrite of a program, operator by operator.

    Args:
        program: The program.
        given: The format of each input.
    """

    def __init__(self, program: Program, given: Sequence[Format]) -> None:
        self.made: tuple[Format, ...] = ()
        """The format of each output of the finished program."""
        self._old = program
        self._specs = specs_by_slot(program)
        self._slots = program.slots
        self._lies: dict[int, Format] = {
            slot: lies for slot, lies in enumerate(given) if lies != "as captured" and self._is_map(slot)
        }
        self._operators: list[Operator] = []
        self._changes: dict[tuple[int, str], int] = {}
        for operator in program.operators:
            self._take(operator)

    def program(self, stay: Sequence[bool]) -> Program:
        """Return the program.

        Args:
            stay: For each output whether it may have its channels last.
        """
        pairs = list(zip(self._old.outputs, stay, strict=True))
        outputs = tuple(slot if may and slot in self._lies else self._as_captured(slot) for slot, may in pairs)
        self.made = tuple(self._lies.get(slot, "as captured") for slot in outputs)
        return with_deaths(Program(self._old.inputs, tuple(self._operators), outputs, self._slots))

    def _is_map(self, slot: int) -> bool:
        return len(self._specs[slot].shape) == _MAP

    def _take(self, operator: Operator) -> None:
        """Add an operator, with its maps in the format that it is to read."""
        read = dict.fromkeys(reads(operator))
        maps = [slot for slot in read if self._is_map(slot)]
        if operator.name in _CONVOLUTIONS and maps:
            weight = reads(operator)[_CONVOLUTIONS[operator.name] - 1]
            self._add(operator, {slot: self._channels_last(slot) for slot in maps if slot != weight})
            self._mark(operator, unsure=operator.name == "aten.convolution_backward.default")
        elif any(slot in self._lies for slot in maps) and self._keeps(operator, list(read), maps):
            self._add(operator, {slot: self._channels_last(slot) for slot in maps})
            self._mark(operator)
        elif operator.name in _SUMS and _over_maps(operator):
            self._add(operator, {})
        else:
            self._add(operator, {slot: self._as_captured(slot) for slot in read})

    def _keeps(self, operator: Operator, read: Sequence[int], maps: Sequence[int]) -> bool:
        """Return whether an operator preserves the format of its maps."""
        if operator.position >= 0 or "memory_format" in operator.kwargs:
            return False
        if operator.name in _POINTWISE:
            alike = len({self._specs[slot].shape for slot in maps}) == 1
            return alike and all(slot in maps or not self._specs[slot].shape for slot in read)
        return operator.name in _LOCAL

    def _mark(self, operator: Operator, *, unsure: bool = False) -> None:
        """Record the format of an operator's outputs; that of a weight's gradient is the library's choice."""
        for place, slot in enumerate(operator.outs):
            if slot is not None and self._is_map(slot):
                self._lies[slot] = "either" if unsure and place else "channels last"

    def _add(self, operator: Operator, instead: dict[int, int]) -> None:
        numbers = {slot: slot for slot in self._specs} | instead
        self._operators.append(renumber(operator, numbers))

    def _channels_last(self, slot: int) -> int:
        return slot if self._lies.get(slot) == "channels last" else self._change(slot, "channels_last")

    def _as_captured(self, slot: int) -> int:
        return self._change(slot, "contiguous_format") if slot in self._lies else slot

    def _change(self, slot: int, name: str) -> int:
        """Return the slot of the same tensor in another format."""
        if (slot, name) not in self._changes:
            spec, new = self._specs[slot], self._slots
            change = Operator(
                "aten.clone.default", (SlotArgument(slot),), {"memory_format": MemoryFormat(name)}, (new,), (spec,)
            )
            self._operators.append(change)
            self._specs[new] = spec
            self._slots += 1
            self._changes[slot, name] = new
            if name == "channels_last":
                self._lies[new] = "channels last"
        return self._changes[slot, name]


def _over_maps(operator: Operator) -> bool:
    """Return whether a sum goes over rows and columns, so that its result lies the same way in either format."""
    dims = operator.args[1] if len(operator.args) > 1 else None
    return isinstance(dims, Many) and {int(dim) % _MAP for dim in dims.items if isinstance(dim, int)} >= {2, 3}


def _permutes(program: Program) -> bool:
    """Return whether a program permutes channels itself."""
    orders = (Many((0, 2, 3, 1)), Many((0, 3, 1, 2)))
    return any(o.name == "aten.permute.default" and o.args[1] in orders for o in program.operators)
