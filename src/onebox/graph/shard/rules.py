"""Sharding rules: for each operator, the dimensions along which its tensors can be split together.

A rule writes the dimensions of arguments and outputs as letters, as in Einstein summation: matrix product is
``mk, kn -> mn``. Ranks may share any one letter: arguments and outputs that have it are split along it, arguments
without it are whole on every rank; an output without it is the same on every rank, unless the rule marks the letter as
summed over: then every rank has a term. ``-`` marks dimensions that must not be split. An operator without a rule runs
on whole arguments, which is always correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onebox.wire import Many, Operator, SlotArgument, TensorSpec

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WHOLE = "-"


@dataclass(frozen=True)
class Output:
    """An output: the letters of its dimensions, and the letters that it is a sum over."""

    letters: str
    sums: str = ""


@dataclass(frozen=True)
class Rule:
    """The correspondence of dimensions between one operator's tensors.

    Args:
        inputs: Letters of each tensor argument, by position or keyword; of each item of a list.
        outputs: One for each output.
        sizes: For arguments that are sizes, by position, the output whose local shape they must be.
        counts: For arguments that are the number of elements of a letter, by position, the letter.
        factors: Positions of the factors of a product: where one is a layer's weight, it pays to split.
    """

    inputs: Mapping[int | str, str | Sequence[str]]
    outputs: Sequence[Output]
    sizes: Mapping[int, int] = field(default_factory=dict)
    counts: Mapping[int, str] = field(default_factory=dict)
    factors: tuple[int, ...] = ()


Specs = Mapping[int, TensorSpec]

RESHAPES = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims",
    )
)  # fmt: skip
"""Operators whose output has the elements of the input in the same order."""

SAME_SIZES = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
"""Those that have the shape as an argument."""

MOVES = frozenset({"aten.t.default", "aten.transpose.int", "aten.permute.default"})
"""Operators that permute dimensions."""

LINEAR = (
    RESHAPES
    | MOVES
    | {"aten.neg.default", "aten.clone.default", "aten.sum.dim_IntList", "aten.sum.default"}
    | {"aten.mul.Scalar", "aten.div.Scalar"}
)
"""Operators of one tensor that map terms of a sum to terms of the result."""

ADDITIVE = frozenset({"aten.add.Tensor", "aten.sub.Tensor"})
"""Operators of two tensors that do so if both are terms."""

FOLLOWS_WEIGHT = RESHAPES | MOVES | {"aten._to_copy.default", "aten.clone.default"}
"""Operators whose output is still a weight if their input is."""


def shape(operator: Operator, position: int, specs: Specs) -> tuple[int, ...]:
    """Return the shape of a tensor argument."""
    value = operator.args[position]
    assert isinstance(value, SlotArgument)
    return specs[value.index].shape


def order(operator: Operator, specs: Specs) -> list[int]:
    """Return the input dimension of each output dimension, for an operator of :data:`MOVES`."""
    rank = len(shape(operator, 0, specs))
    if operator.name == "aten.permute.default":
        return [dim % rank for dim in numbers(operator, 1)]
    dims = list(range(rank))
    if operator.name == "aten.transpose.int":
        a, b = (int(value) % rank for value in operator.args[1:3])  # type: ignore[arg-type]
        dims[a], dims[b] = b, a
        return dims
    return dims[::-1]


def slot_of(operator: Operator, position: int) -> int:
    """Return the slot of a tensor argument."""
    value = operator.args[position]
    assert isinstance(value, SlotArgument)
    return value.index


def numbers(operator: Operator, position: int) -> list[int]:
    """Return an argument that is a number or a list of them as a list; empty when it is missing."""
    value = operator.args[position] if position < len(operator.args) else None
    if isinstance(value, Many):
        return [int(item) for item in value.items if isinstance(item, int)]
    return [value] if isinstance(value, int) else []
