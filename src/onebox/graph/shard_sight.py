"""What is known of an operator however it is split."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onebox.graph.shard_rules import WHOLE, Rule, Specs, slot_of
from onebox.graph.shard_table import rule_of
from onebox.wire import Many, Operator, Slot, Value, reads


@dataclass(frozen=True)
class Sight:
    """An operator, and what is known of it however it is split.

    Args:
        operator: The operator.
        slots: What it reads, as :func:`onebox.wire.reads` lists it.
        rule: Its rule.
        letters: For each of the slots, the letters of its dimensions.
        flops: About how many operations it does.
    """

    operator: Operator
    slots: tuple[int, ...]
    rule: Rule | None
    letters: tuple[str, ...]
    flops: float


def look(operator: Operator, specs: Specs) -> Sight:
    """Return what is known of an operator."""
    slots, rule = tuple(reads(operator)), rule_of(operator, specs)
    if rule is None:
        return Sight(operator, slots, None, (), 0.0)
    names: list[str] = []
    arguments: list[tuple[int | str, Value]] = [*enumerate(operator.args), *operator.kwargs.items()]
    for key, value in arguments:
        found = rule.inputs.get(key, "")
        if isinstance(value, Slot):
            names.append(str(found) or WHOLE * len(specs[value.index].shape))
        elif isinstance(value, Many):
            held = [item.index for item in value.items if isinstance(item, Slot)]
            names += list(found) or [WHOLE * len(specs[slot].shape) for slot in held]
    return Sight(operator, slots, rule, tuple(names), _flops(operator, rule, specs))


def _flops(operator: Operator, rule: Rule, specs: Specs) -> float:
    """Return two operations for each factor of each sum of a product, and one for an element of anything else."""
    elements = float(sum(prod(spec.shape) for spec in operator.specs if spec is not None))
    if not rule.factors:
        return elements
    factor = rule.factors[-1]
    named = zip(str(rule.inputs[factor]), specs[slot_of(operator, factor)].shape, strict=True)
    return 2.0 * elements * prod(size for name, size in named if name == WHOLE or name not in rule.outputs[0].letters)
