"""Properties of a tape and its operators that do not depend on the split: computed once, read in every trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from onebox.graph.shard.placements import cuts_of
from onebox.graph.shard.rules import RESHAPES, WHOLE, Rule, Specs, slot_of
from onebox.graph.shard.table import rule_of
from onebox.wire import Many, Operator, Program, SlotArgument, TensorSpec, Value, reads, specs_by_slot


@dataclass(frozen=True)
class AnalyzedOperator:
    """An operator, with its properties that do not depend on the split.

    Args:
        operator: The operator.
        slots: The slots that it reads, as :func:`onebox.wire.reads` lists them.
        rule: Its rule.
        letters: For each of the slots, the letters of its dimensions.
        flops: Approximate number of its operations.
    """

    operator: Operator
    slots: tuple[int, ...]
    rule: Rule | None
    letters: tuple[str, ...]
    flops: float


def analyze_operator(operator: Operator, specs: Specs) -> AnalyzedOperator:
    """Return the properties of an operator."""
    slots, rule = tuple(reads(operator)), rule_of(operator, specs)
    if rule is None:
        return AnalyzedOperator(operator, slots, None, (), 0.0)
    names: list[str] = []
    arguments: list[tuple[int | str, Value]] = [*enumerate(operator.args), *operator.kwargs.items()]
    for key, value in arguments:
        found = rule.inputs.get(key, "")
        if isinstance(value, SlotArgument):
            names.append(str(found) or WHOLE * len(specs[value.index].shape))
        elif isinstance(value, Many):
            held = [item.index for item in value.items if isinstance(item, SlotArgument)]
            names += list(found) or [WHOLE * len(specs[slot].shape) for slot in held]
    return AnalyzedOperator(operator, slots, rule, tuple(names), _flops(operator, rule, specs))


def _flops(operator: Operator, rule: Rule, specs: Specs) -> float:
    """Return two operations for each factor of each sum of a product, and one for an element of anything else."""
    elements = float(sum(prod(spec.shape) for spec in operator.specs if spec is not None))
    if not rule.factors:
        return elements
    factor = rule.factors[-1]
    named = zip(str(rule.inputs[factor]), specs[slot_of(operator, factor)].shape, strict=True)
    return 2.0 * elements * prod(size for name, size in named if name == WHOLE or name not in rule.outputs[0].letters)


@dataclass(frozen=True)
class AnalyzedProgram:
    """A tape, with its properties that do not depend on the split.

    Args:
        program: The tape.
        specs: Specs of the slots.
        uses: Number of reads of each slot, as an output of the tape too.
        makers: The operator that fills a slot.
        cuts: For sizes of dimensions, the lengths of the runs into which views and splits divide them.
        sights: Properties of each operator, by its identity.
    """

    program: Program
    specs: Mapping[int, TensorSpec]
    uses: Mapping[int, int]
    makers: Mapping[int, Operator]
    cuts: Mapping[int, set[int]]
    sights: Mapping[int, AnalyzedOperator]


def analyze_program(program: Program) -> AnalyzedProgram:
    """Compute the properties of a tape."""
    specs = specs_by_slot(program)
    sights = {id(operator): analyze_operator(operator, specs) for operator in program.operators}
    uses = Counter(slot for sight in sights.values() for slot in sight.slots)
    uses.update(program.outputs)
    makers = {slot: operator for operator in program.operators for slot in operator.outs if slot is not None}
    return AnalyzedProgram(program, specs, uses, makers, _cuts(program, specs), sights)


def _cuts(program: Program, specs: Mapping[int, TensorSpec]) -> dict[int, set[int]]:
    """Return the lengths of runs into which views and splits of a program divide dimensions, by dimension size."""
    found: dict[int, set[int]] = {}
    for operator in program.operators:
        made = operator.specs[0] if operator.specs else None
        if operator.name in RESHAPES and made is not None:
            for size, runs in cuts_of(specs[reads(operator)[0]].shape, made.shape).items():
                found.setdefault(size, set()).update(runs)
        else:
            size, run = _parts(operator, specs)
            if 0 < run < size and size % run == 0:
                found.setdefault(size, set()).add(run)
    return found


def _parts(operator: Operator, specs: Mapping[int, TensorSpec]) -> tuple[int, int]:
    """Return the size of a dimension that is divided evenly, and the size of a part; zeros for none."""
    if operator.name == "aten.split.Tensor" and isinstance(operator.args[1], int):
        dim = operator.args[2] if len(operator.args) > 2 else 0
        assert isinstance(dim, int)
        return specs[reads(operator)[0]].shape[dim], operator.args[1]
    if operator.name == "aten.native_group_norm.default":
        channels, groups = operator.args[4], operator.args[6]
        assert isinstance(channels, int)
        assert isinstance(groups, int)
        return channels, channels // groups
    return 0, 0
