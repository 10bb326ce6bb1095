"""Memory formats: programs whose convolutions read and make maps with their channels last in memory.

oneDNN convolves maps of either format, but with channels last it reorders less, and poolings and batch norms are
vectorised over channels. What a program computes stays the same but for rounding. Maps are brought into the format
where a convolution first reads them and stay so along operators that keep it; every other operator reads what it was
captured with, random ones among them, which would draw other numbers. Each change of format is an operator of its own,
so that its memory is accounted for like any other.

A value of another stage may lie either way: it has travelled, or it has not. A change of format of what lies so already
is free; see :class:`onebox.worker.programs.interpreter.CompiledProgram`.
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
"""By operator, how many of its arguments are tensors, the last of them the weight, which may lie as it does."""

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
"""Operators on elements, whose maps have to be of one shape here."""

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
"""Operators that make maps of the format that they read, whatever the shapes."""

_SUMS = frozenset({"aten.sum.dim_IntList", "aten.mean.dim"})
_MAP = 4
"""Dimensions of maps: samples, channels, rows and columns."""


def with_channels_last(programs: ModelPrograms, stages: Collection[int]) -> ModelPrograms:
    """Return the programs of a model with those of some stages changed.

    A stage whose captured programs permute channels themselves stays as it is.

    Args:
        programs: The programs of all stages.
        stages: The stages whose convolutions are to have channels last.
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
    """A program as it is rewritten, operator by operator.

    Args:
        program: The program.
        given: How each input lies.
    """

    def __init__(self, program: Program, given: Sequence[Format]) -> None:
        self.made: tuple[Format, ...] = ()
        """How each output lies, once the program is made."""
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
        """Add an operator, its maps in the format that it is to read."""
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
        """Tell whether an operator makes maps of the format that it reads."""
        if operator.position >= 0 or "memory_format" in operator.kwargs:
            return False
        if operator.name in _POINTWISE:
            alike = len({self._specs[slot].shape for slot in maps}) == 1
            return alike and all(slot in maps or not self._specs[slot].shape for slot in read)
        return operator.name in _LOCAL

    def _mark(self, operator: Operator, *, unsure: bool = False) -> None:
        """Note how what an operator makes lies; the gradient of a weight lies as the library likes."""
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
    """Tell whether a sum goes over rows and columns, so that what is left lies the same way in either format."""
    dims = operator.args[1] if len(operator.args) > 1 else None
    return isinstance(dims, Many) and {int(dim) % _MAP for dim in dims.items if isinstance(dim, int)} >= {2, 3}


def _permutes(program: Program) -> bool:
    """Tell whether a program moves channels itself."""
    orders = (Many((0, 2, 3, 1)), Many((0, 3, 1, 2)))
    return any(o.name == "aten.permute.default" and o.args[1] in orders for o in program.operators)
