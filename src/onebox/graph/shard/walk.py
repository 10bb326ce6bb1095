"""Splitting of one tape, operator by operator: each operator is split if possible, each value gets a placement."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.graph.capture.joint import Port
from onebox.graph.shard.analysis import AnalyzedOperator, AnalyzedProgram
from onebox.graph.shard.placements import PARTIAL, REPLICATE, Placement, Shard, even_parts, reshaped
from onebox.graph.shard.rules import (
    ADDITIVE,
    FOLLOWS_WEIGHT,
    LINEAR,
    MOVES,
    RESHAPES,
    SAME_SIZES,
    WHOLE,
    Rule,
    order,
    slot_of,
)
from onebox.graph.shard.special import SPECIAL
from onebox.graph.shard.spmd import PerRank, reduce_bytes
from onebox.graph.shard.state import Choice, PlacementState, ShardGroup
from onebox.wire import Many, Operator, SlotArgument, TensorSpec, Value, reads


class ProgramSharder(PlacementState):
    """The split of one tape.

    Args:
        tape: The tape.
        inputs: Ports of its inputs.
        outputs: Ports of its outputs.
        group: State shared with the tapes before and after.
    """

    def __init__(
        self, tape: AnalyzedProgram, inputs: Sequence[Port], outputs: Sequence[Port], group: ShardGroup
    ) -> None:
        super().__init__(tape, inputs, outputs, group)
        for operator in tape.program.operators:
            self.operator(operator)
        self.outputs = [self.leave(slot, port) for slot, port in zip(tape.program.outputs, outputs, strict=True)]
        for slot in range(len(inputs)):
            if self.native[slot] is None:
                self.settle(slot, REPLICATE)

    def operator(self, operator: Operator) -> None:
        """Append one operator of the whole program, split if possible."""
        sight = self.sight(operator)
        natives = [self.native[slot] for slot in sight.slots]
        if operator.name in FOLLOWS_WEIGHT and natives == [None]:
            out = operator.outs[0]
            assert out is not None
            self.native[out], self._deferred[out] = None, operator
        elif self._keeps_terms(sight, natives):
            self.emit(operator, [PARTIAL] * len(natives), [PARTIAL])
        elif operator.name in RESHAPES | MOVES and isinstance(natives[0], Shard):
            self._view(operator, natives[0])
        elif operator.name in SPECIAL and SPECIAL[operator.name](self, operator):
            pass
        elif sight.rule is None:
            self._whole(sight)
        else:
            self._share(sight, sight.rule)

    def _keeps_terms(self, sight: AnalyzedOperator, natives: Sequence[Placement | None]) -> bool:
        """Return whether an operator can work on terms of a sum that have no other readers."""
        operator, slots = sight.operator, sight.slots
        if not natives or any(native != PARTIAL for native in natives) or any(self.uses[slot] > 1 for slot in slots):
            return False
        first = bool(operator.args) and isinstance(operator.args[0], SlotArgument)
        scaled = operator.name in ("aten.mul.Tensor", "aten.div.Tensor") and first and len(slots) == 1
        return scaled or operator.name in LINEAR or (operator.name in ADDITIVE and len(slots) == 2)

    def _view(self, operator: Operator, native: Shard) -> None:
        made = operator.specs[0]
        assert made is not None
        if operator.name in MOVES:
            placed: Shard | None = native.at(order(operator, self.specs).index(native.dim))
        else:
            placed = reshaped(self.specs[reads(operator)[0]].shape, made.shape, native)
        if placed is None:
            self._whole(self.sight(operator))
        else:
            self.emit(operator, [native], [placed], {1: 0} if operator.name in SAME_SIZES else {})

    def _whole(self, sight: AnalyzedOperator) -> None:
        """Append an operator on whole arguments; of an argument that only determines a type, any part will do."""
        operator, slots = sight.operator, sight.slots
        if operator.name.startswith("aten.new_") and self.native[slots[0]] is not None:
            wanted = [self.native[slot] or REPLICATE for slot in slots]
        else:
            wanted = [REPLICATE] * len(slots)
        self.emit(operator, wanted, [REPLICATE] * len(operator.outs))

    def _share(self, sight: AnalyzedOperator, rule: Rule) -> None:
        """Choose a letter of a rule to split along, and append the operator with its collectives."""
        layer = any(self._is_weight(sight.operator, position) for position in rule.factors)
        choices = self._choices(sight, rule)
        best = min(choices, key=lambda choice: self._price(sight, rule, choice, layer)) if choices[1:] else choices[0]
        if layer:
            specs = tuple(self.specs[slot] for slot in sight.slots)
            key = (sight.operator.name, specs, tuple(self.native[slot] for slot in sight.slots))
            chosen = self.group.choices.get(key, best)
            best = chosen if chosen in choices else best
            self.group.met.setdefault(key, choices)
            self.group.taken.setdefault(key, best)
        terms = best.letter and best.letter in rule.outputs[0].sums
        if terms and rule.factors and _bias(sight.operator) is not None:
            self._without_bias(sight.operator, best)
        else:
            self._apply(sight, rule, best)

    def _choices(self, sight: AnalyzedOperator, rule: Rule) -> list[Choice]:
        """Return the possible splits of an operator, the unsplit one first."""
        operator = sight.operator
        found = [Choice()]
        for slot, names in zip(sight.slots, sight.letters, strict=True):
            native = self.native[slot]
            if isinstance(native, Shard):
                found.append(Choice(names[native.dim], native.sizes, native.blocks))
        for out, output in zip(operator.outs, rule.outputs, strict=False):
            goal = None if out is None else self.goals.get(out)
            if goal is not None:
                found.append(Choice(output.letters[goal.dim], goal.sizes, goal.blocks))
        for position in rule.factors:
            if self._is_weight(operator, position):
                found += self._layer_choices(operator, rule, position, found)
        return [choice for choice in dict.fromkeys(found) if self._fits(sight, rule, choice)]

    def _layer_choices(self, operator: Operator, rule: Rule, position: int, given: Sequence[Choice]) -> list[Choice]:
        """Return the possible splits of a weight without a placement, including the given ones of its product."""
        slot = slot_of(operator, position)
        if self.specs[slot].size_bytes < self.group.prices.minimum_bytes:
            self.settle(slot, REPLICATE)
            return []
        found = list(given)
        for name, size in zip(str(rule.inputs[position]), self.specs[slot].shape, strict=True):
            found += [Choice(name, sizes, blocks) for sizes, blocks in self._splits(size)]
        terms = [choice for choice in found if choice.letter and choice.letter in rule.outputs[0].sums]
        return found + [choice._replace(scatter=True) for choice in terms]

    def _fits(self, sight: AnalyzedOperator, rule: Rule, choice: Choice) -> bool:
        """Return whether all dimensions of a letter can be split in this way."""
        if not choice.letter:
            return True
        if choice.letter == WHOLE or (sight.operator.kwargs and rule.factors and choice.letter in rule.outputs[0].sums):
            return False
        sizes = {
            self.specs[slot].shape[names.index(choice.letter)]
            for slot, names in zip(sight.slots, sight.letters, strict=True)
            if choice.letter in names
        }
        return sizes == {choice.blocks * sum(choice.sizes)}

    def _splits(self, size: int) -> list[tuple[tuple[int, ...], int]]:
        """Return splits of features that the views of the program suggest: whole heads, separate packed parts."""
        found: dict[tuple[tuple[int, ...], int], None] = {}
        for run in sorted({size} | set(self.tape.cuts.get(size, ())), reverse=True):
            for unit in sorted({1} | set(self.tape.cuts.get(run, ()))):
                sizes = even_parts(run, self.group.ranks, unit)
                if sizes is not None:
                    found[sizes, size // run] = None
        return list(found)

    def _is_weight(self, operator: Operator, position: int) -> bool:
        value = operator.args[position]
        return isinstance(value, SlotArgument) and self.native[value.index] is None

    def _price(self, sight: AnalyzedOperator, rule: Rule, choice: Choice, layer: bool) -> float:
        """Estimate the cost of a choice at this operator; for a layer including its memory."""
        ranks, prices, letter = self.group.ranks, self.group.prices, choice.letter or "none"
        share = 1.0 / ranks if choice.letter else 1.0
        total = share * sight.flops / prices.flops_per_byte
        for slot, names in zip(sight.slots, sight.letters, strict=True):
            total += self.cost(slot, _placed(names, choice))
            if self.native[slot] is None:
                total += prices.held * 2 * self.specs[slot].size_bytes * (share if letter in names else 1.0)
        for spec, output in zip(sight.operator.specs, rule.outputs, strict=False):
            if spec is not None:
                total += reduce_bytes(spec.size_bytes, ranks) if letter in output.sums else 0.0
                split = choice.scatter or letter in output.letters
                total += prices.held * spec.size_bytes * (share if split else 1.0) if layer else 0.0
        return total

    def _apply(self, sight: AnalyzedOperator, rule: Rule, choice: Choice) -> None:
        made: list[Placement] = []
        for output in rule.outputs:
            if choice.letter and choice.letter in output.letters:
                made.append(Shard(output.letters.index(choice.letter), choice.sizes, choice.blocks))
            else:
                made.append(PARTIAL if choice.letter and choice.letter in output.sums else REPLICATE)
        counted = PerRank(tuple(size * choice.blocks for size in choice.sizes))
        fixed = {position: counted for position, letter in rule.counts.items() if letter == choice.letter}
        placed = [_placed(names, choice) for names in sight.letters]
        self.emit(sight.operator, placed, made, rule.sizes, fixed)
        if choice.scatter:
            self._scatter(sight.operator)

    def _scatter(self, operator: Operator) -> None:
        """Keep of a completed sum only each rank's features: the last dimension of a matrix, channels of an image."""
        slot = operator.outs[0]
        assert slot is not None
        dim = 1 if operator.name == "aten.convolution.default" else len(self.specs[slot].shape) - 1
        sizes = even_parts(self.specs[slot].shape[dim], self.group.ranks)
        if sizes is not None:
            shard = Shard(dim, sizes)
            self.want(slot, shard)
            self.native[slot] = shard

    def _without_bias(self, operator: Operator, choice: Choice) -> None:
        """Sum the ranks' terms of a product first, and add the bias once."""
        bias, made = _bias(operator), operator.specs[0]
        assert bias is not None
        assert made is not None
        product = self.add(made)
        args: tuple[Value, ...]
        if operator.name == "aten.convolution.default":
            name, args = operator.name, (*operator.args[:2], None, *operator.args[3:])
            sizes = (made.shape[1], *[1] * (len(made.shape) - 2))
            spec = TensorSpec(self.specs[bias.index].dtype, sizes)
            column = self.add(spec)
            self.operator(Operator("aten.view.default", (bias, Many(sizes)), {}, (column,), (spec,)))
            bias = SlotArgument(column)
        else:
            name, args = operator.name.replace("addmm", "mm").replace("baddbmm", "bmm"), operator.args[1:]
        bare = self.sight(Operator(name, args, {}, (product,), (made,)))
        assert bare.rule is not None
        self._apply(bare, bare.rule, choice)
        self.operator(Operator("aten.add.Tensor", (SlotArgument(product), bias), {}, operator.outs, operator.specs))


def _bias(operator: Operator) -> SlotArgument | None:
    """Return the bias of a product, if it has one."""
    position = {"aten.addmm.default": 0, "aten.baddbmm.default": 0, "aten.convolution.default": 2}.get(operator.name)
    value = None if position is None else operator.args[position]
    return value if isinstance(value, SlotArgument) else None


def _placed(letters: str, choice: Choice) -> Placement:
    if choice.letter and choice.letter in letters:
        return Shard(letters.index(choice.letter), choice.sizes, choice.blocks)
    return REPLICATE
