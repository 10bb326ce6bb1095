"""Splitting one tape: operator by operator, the ranks share what they can, and every value gets a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from onebox.graph.joint import Port
from onebox.graph.placements import PARTIAL, REPLICATE, Placement, Shard, apportion, cuts_of, reshaped
from onebox.graph.shard_rules import (
    ADDITIVE,
    FOLLOWS_WEIGHT,
    LINEAR,
    MOVES,
    RESHAPES,
    SAME_SIZES,
    WHOLE,
    Rule,
    order,
    rule_of,
)
from onebox.graph.shard_special import along_blocks, dropout
from onebox.graph.shard_state import Choice, Group, Placing
from onebox.graph.spmd import PerRank, reduce_bytes
from onebox.wire import Many, Operator, Program, Slot, TensorSpec, Value, reads


class Walk(Placing):
    """Splits one tape.

    Args:
        program: The tape.
        inputs: Ports of its inputs.
        outputs: Ports of its outputs.
        group: Shared with the tapes before and behind.
    """

    def __init__(self, program: Program, inputs: Sequence[Port], outputs: Sequence[Port], group: Group) -> None:
        super().__init__(program, inputs, outputs, group)
        self._cuts = _cuts(program, self.specs)
        self._own = {id(operator) for operator in program.operators}
        for operator in program.operators:
            self.operator(operator)
        self.outputs = [self.leave(slot, port) for slot, port in zip(program.outputs, outputs, strict=True)]
        for slot in range(len(inputs)):
            if self.native[slot] is None:
                self.settle(slot, REPLICATE)

    def operator(self, operator: Operator) -> None:
        """Append one operator of the whole program, in whatever way it can be shared."""
        slots = reads(operator)
        natives = [self.native[slot] for slot in slots]
        if operator.name in FOLLOWS_WEIGHT and natives == [None]:
            out = operator.outs[0]
            assert out is not None
            self.native[out], self._deferred[out] = None, operator
        elif self._keeps_terms(operator, natives):
            self.emit(operator, [PARTIAL] * len(slots), [PARTIAL])
        elif operator.name in RESHAPES | MOVES and isinstance(natives[0], Shard):
            self._view(operator, natives[0])
        elif not along_blocks(self, operator) and not dropout(self, operator):
            rule = self._rule(operator)
            if rule is None:
                self._whole(operator)
            else:
                self._share(operator, rule)

    def _rule(self, operator: Operator) -> Rule | None:
        """Return the rule of an operator; those of the whole program are looked up once."""
        if id(operator) not in self._own:
            return rule_of(operator, self.specs)
        rules = self.group.rules
        if id(operator) not in rules:
            rules[id(operator)] = rule_of(operator, self.specs)
        return rules[id(operator)]

    def _keeps_terms(self, operator: Operator, natives: Sequence[Placement | None]) -> bool:
        """Tell whether an operator can work on terms of a sum that nobody else reads."""
        slots = reads(operator)
        if not natives or any(native != PARTIAL for native in natives) or any(self.uses[slot] > 1 for slot in slots):
            return False
        first = bool(operator.args) and isinstance(operator.args[0], Slot)
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
            self._whole(operator)
        else:
            self.emit(operator, [native], [placed], {1: 0} if operator.name in SAME_SIZES else {})

    def _whole(self, operator: Operator) -> None:
        """Every rank runs it on whole arguments; of an argument that only names a type, any part will do."""
        slots = reads(operator)
        if operator.name.startswith("aten.new_") and self.native[slots[0]] is not None:
            wanted = [self.native[slot] or REPLICATE for slot in slots]
        else:
            wanted = [REPLICATE] * len(slots)
        self.emit(operator, wanted, [REPLICATE] * len(operator.outs))

    def _share(self, operator: Operator, rule: Rule) -> None:
        """Choose a letter of a rule that the ranks share, and append what that takes."""
        letters = _letters(operator, rule)
        choices = self._choices(operator, rule, letters)
        best = min(choices, key=lambda choice: self._price(operator, rule, letters, choice))
        if any(self._is_weight(operator, position) for position in rule.factors):
            placed = tuple(self.native[slot] for slot in reads(operator))
            key = (operator.name, tuple(self.specs[slot] for slot in reads(operator)), placed)
            chosen = self.group.choices.get(key, best)
            best = chosen if chosen in choices else best
            self.group.met.setdefault(key, choices)
            self.group.taken.setdefault(key, best)
        terms = best.letter and best.letter in rule.outputs[0].sums
        if terms and rule.factors and self._bias(operator) is not None:
            self._without_bias(operator, rule, best)
        else:
            self._apply(operator, rule, letters, best)

    def _choices(self, operator: Operator, rule: Rule, letters: Sequence[str]) -> list[Choice]:
        found = [Choice()]
        for slot, names in zip(reads(operator), letters, strict=True):
            native = self.native[slot]
            if isinstance(native, Shard):
                found.append(Choice(names[native.dim], native.sizes, native.blocks))
        for out, output in zip(operator.outs, rule.outputs, strict=False):
            goal = None if out is None else self.goals.get(out)
            if goal is not None:
                found.append(Choice(output.letters[goal.dim], goal.sizes, goal.blocks))
        weights = [position for position in rule.factors if self._is_weight(operator, position)]
        for position in weights:
            slot = _slot(operator, position)
            names = str(rule.inputs[position])
            if self.specs[slot].size_bytes < self.group.prices.minimum_bytes:
                self.settle(slot, REPLICATE)
                continue
            for name, size in zip(names, self.specs[slot].shape, strict=True):
                found += [Choice(name, sizes, blocks) for sizes, blocks in self._splits(size)]
            scattered = [choice for choice in found if choice.letter and choice.letter in rule.outputs[0].sums]
            found += [choice._replace(scatter=True) for choice in scattered]
        return [choice for choice in dict.fromkeys(found) if self._fits(operator, rule, letters, choice)]

    def _fits(self, operator: Operator, rule: Rule, letters: Sequence[str], choice: Choice) -> bool:
        """Tell whether all dimensions of a letter can be split so."""
        if not choice.letter:
            return True
        if choice.letter == WHOLE or (operator.kwargs and rule.factors and choice.letter in rule.outputs[0].sums):
            return False
        sizes = [
            self.specs[slot].shape[names.index(choice.letter)]
            for slot, names in zip(reads(operator), letters, strict=True)
            if choice.letter in names
        ]
        return bool(sizes) and set(sizes) == {choice.blocks * sum(choice.sizes)}

    def _splits(self, size: int) -> list[tuple[tuple[int, ...], int]]:
        """Return ways to split features that the views of the program suggest: heads stay whole, packed parts apart."""
        found: dict[tuple[tuple[int, ...], int], None] = {}
        for run in sorted({size} | self._cuts.get(size, set()), reverse=True):
            for unit in sorted({1} | self._cuts.get(run, set())):
                sizes = apportion(run, self.group.ranks, unit)
                if sizes is not None:
                    found[sizes, size // run] = None
        return list(found)

    def _is_weight(self, operator: Operator, position: int) -> bool:
        value = operator.args[position]
        return isinstance(value, Slot) and self.native[value.index] is None

    def _price(self, operator: Operator, rule: Rule, letters: Sequence[str], choice: Choice) -> float:
        """Estimate what a choice costs at this operator."""
        ranks, prices = self.group.ranks, self.group.prices
        share = 1.0 / ranks if choice.letter else 1.0
        total, work = 0.0, 0.0
        for slot, names in zip(reads(operator), letters, strict=True):
            total += self.cost(slot, _placed(names, choice))
            if self.native[slot] is None:
                held = 2 * self.specs[slot].size_bytes * (share if choice.letter in names else 1.0)
                total += prices.held * held
        for spec, output in zip(operator.specs, rule.outputs, strict=False):
            if spec is None:
                continue
            work += prod(spec.shape)
            split = choice.scatter or (choice.letter and choice.letter in output.letters)
            if choice.letter and choice.letter in output.sums:
                total += reduce_bytes(spec.size_bytes, ranks)
            if any(self._is_weight(operator, position) for position in rule.factors):
                total += prices.held * spec.size_bytes * (1.0 / ranks if split else 1.0)
        return total + share * work * self._inner(operator, rule) / prices.flops_per_byte

    def _inner(self, operator: Operator, rule: Rule) -> float:
        """Return how many operations there are for an element of output."""
        if not rule.factors:
            return 1.0
        factor = rule.factors[-1]
        named = zip(str(rule.inputs[factor]), self.specs[_slot(operator, factor)].shape, strict=True)
        return 2.0 * prod(size for name, size in named if name not in rule.outputs[0].letters.replace(WHOLE, ""))

    def _apply(self, operator: Operator, rule: Rule, letters: Sequence[str], choice: Choice) -> None:
        placed: list[Placement] = [_placed(names, choice) for names in letters]
        made: list[Placement] = []
        for output in rule.outputs:
            if choice.letter and choice.letter in output.letters:
                made.append(Shard(output.letters.index(choice.letter), choice.sizes, choice.blocks))
            else:
                made.append(PARTIAL if choice.letter and choice.letter in output.sums else REPLICATE)
        fixed = {at: PerRank(tuple(n * choice.blocks for n in choice.sizes)) for at, letter in rule.counts.items()
                 if letter == choice.letter}  # fmt: skip
        self.emit(operator, placed, made, rule.sizes, fixed)
        if choice.scatter:
            self._scatter(operator)

    def _scatter(self, operator: Operator) -> None:
        """Keep of a sum just completed each rank's features: the last dimension of a matrix, channels of an image."""
        slot = operator.outs[0]
        assert slot is not None
        dim = 1 if operator.name == "aten.convolution.default" else len(self.specs[slot].shape) - 1
        sizes = apportion(self.specs[slot].shape[dim], self.group.ranks)
        if sizes is not None:
            shard = Shard(dim, sizes)
            self.want(slot, shard)
            self.native[slot] = shard

    def _bias(self, operator: Operator) -> Slot | None:
        """Return the bias of a product, if it has one."""
        at = {"aten.addmm.default": 0, "aten.baddbmm.default": 0, "aten.convolution.default": 2}.get(operator.name)
        value = None if at is None else operator.args[at]
        return value if isinstance(value, Slot) else None

    def _without_bias(self, operator: Operator, rule: Rule, choice: Choice) -> None:
        """Sum the ranks' terms of a product first, and add the bias once."""
        bias, made = self._bias(operator), operator.specs[0]
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
            bias = Slot(column)
        else:
            name, args = operator.name.replace("addmm", "mm").replace("baddbmm", "bmm"), operator.args[1:]
        bare = Operator(name, args, {}, (product,), (made,))
        bare_rule = rule_of(bare, self.specs)
        assert bare_rule is not None
        self._apply(bare, bare_rule, _letters(bare, bare_rule), choice)
        self.operator(Operator("aten.add.Tensor", (Slot(product), bias), {}, operator.outs, operator.specs))


def _letters(operator: Operator, rule: Rule) -> list[str]:
    """Return the letters of each tensor that an operator reads, in that order."""
    found: list[str] = []
    arguments: list[tuple[int | str, Value]] = [*enumerate(operator.args), *operator.kwargs.items()]
    for key, value in arguments:
        names = rule.inputs.get(key)
        if isinstance(value, Slot):
            found.append(str(names) if names is not None else "")
        elif isinstance(value, Many):
            count = sum(isinstance(item, Slot) for item in value.items)
            found += list(names)[:count] if names is not None else [""] * count
    return found


def _slot(operator: Operator, position: int) -> int:
    value = operator.args[position]
    assert isinstance(value, Slot)
    return value.index


def _placed(letters: str, choice: Choice) -> Placement:
    if choice.letter and choice.letter in letters:
        return Shard(letters.index(choice.letter), choice.sizes, choice.blocks)
    return REPLICATE


def _cuts(program: Program, specs: Mapping[int, TensorSpec]) -> dict[int, set[int]]:
    """Return where views and splits of a program take dimensions apart, by size of the dimension."""
    found: dict[int, set[int]] = {}
    for operator in program.operators:
        made = operator.specs[0] if operator.specs else None
        if operator.name in RESHAPES and made is not None:
            for size, runs in cuts_of(specs[reads(operator)[0]].shape, made.shape).items():
                found.setdefault(size, set()).update(runs)
        elif operator.name == "aten.split.Tensor":
            dim = operator.args[2] if len(operator.args) > 2 else 0
            size, run = specs[reads(operator)[0]].shape[dim], operator.args[1]  # type: ignore[index]
            if isinstance(run, int) and 0 < run < size and size % run == 0:
                found.setdefault(size, set()).add(run)
    return found
