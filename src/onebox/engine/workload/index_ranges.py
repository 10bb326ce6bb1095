"""Ranges of a batch's integers: words for embeddings and classes for losses, checked before a step begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.errors import OperatorError
from onebox.graph import ModelPrograms, NamedProgram
from onebox.wire import Operator, SlotArgument, TensorSpec, specs_by_slot

MOST_ELEMENTS = 1 << 15
"""Elements of a tensor up to which it is checked, in less than 0.1 ms; of larger ones the workers report the first bad
element."""

_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_EMBEDDING = "aten.embedding.default"

_RESHAPING = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "_unsafe_view.default",
        "reshape.default",
        "unsqueeze.default",
        "squeeze.dim",
        "squeeze.default",
        "transpose.int",
        "permute.default",
        "clone.default",
        "alias.default",
        "detach.default",
    )
)
"""Operators whose results have all elements of their input, and no others."""


@dataclass(frozen=True, kw_only=True)
class IndexRange:
    """The allowed integers in a tensor of a batch.

    Args:
        leaf: Its place among the tensors of a batch.
        end: The first integer that is not allowed; 0 is the least one.
        ignored: An integer that is allowed in addition.
        operator: The operator that reads it.
        shapes: Types and shapes of the operator's tensor arguments.
    """

    leaf: int
    end: int
    ignored: int | None
    operator: str
    shapes: str

    def require(self, values: Tensor) -> None:
        """Require that integers are allowed; large tensors are not looked at.

        Raises:
            OperatorError: One is not.
        """
        if not 0 < values.numel() <= MOST_ELEMENTS or values.device.type != "cpu" or values.is_floating_point():
            return
        least, most = (int(bound) for bound in torch.aminmax(values))
        if least >= 0 and most < self.end:
            return
        if self.ignored is not None and _are_allowed(values.numpy(), self.end, self.ignored):
            return
        wrong = (values < 0) | (values >= self.end)
        if self.ignored is not None:
            wrong &= values != self.ignored
        value, place = int(values[wrong][0]), tuple(wrong.nonzero()[0].tolist())
        what, said = "a word", f"index {value} is out of range"
        if self.operator in _LOSSES:
            what, said = "a target", f"Target {value} is out of bounds."
        more = "" if self.ignored is None else f", and the loss's ignore_index, {self.ignored}"
        raise OperatorError(
            f"{self.operator} would fail on ({self.shapes}): {said}\n"
            f"  {what} of the batch, at {list(place)}, is {value}: allowed are 0 to {self.end - 1}{more}; correct the "
            "batch; nothing has been sent, and the trainer can go on",
            operator=self.operator,
            shapes=self.shapes,
            said=said,
            cause="IndexError",
            kept=True,
        )


def _are_allowed(values: NDArray[Any], end: int, ignored: int) -> bool:
    """Return whether all integers are below ``end`` or ignored; NumPy counts several times faster than PyTorch."""
    outside = np.count_nonzero(values.view(f"u{values.itemsize}") >= end)  # where negative ones are large
    return bool(outside == (0 if 0 <= ignored < end else np.count_nonzero(values == ignored)))


def index_ranges(programs: ModelPrograms) -> tuple[IndexRange, ...]:
    """Return the ranges of the integers of a batch that forward reads as they are."""
    found = {
        (each.leaf, each.end, each.ignored): each
        for phase, program in programs.phases.items()
        if phase.kind == "F"
        for each in _ranges(program)
    }
    return tuple(found.values())


def _ranges(forward: NamedProgram) -> Iterator[IndexRange]:
    program = forward.program
    specs = specs_by_slot(program)
    leaf_of = {slot: int(port.name) for slot, port in enumerate(forward.inputs) if port.kind == "leaf"}
    for operator in program.operators:
        slots = [value.index if isinstance(value, SlotArgument) else None for value in operator.args]
        if operator.name in _RESHAPING and slots and slots[0] in leaf_of:
            (out,) = operator.outs
            if out is not None:
                leaf_of[out] = leaf_of[slots[0]]
        if len(slots) < 2 or slots[0] is None or slots[1] not in leaf_of:
            continue
        table, leaf = specs[slots[0]], leaf_of[slots[1]]
        shapes = f"{_shown(table)}, {_shown(specs[slots[1]])}"
        if operator.name == _EMBEDDING:
            yield IndexRange(leaf=leaf, end=table.shape[0], ignored=None, operator=operator.name, shapes=shapes)
        elif operator.name in _LOSSES:
            classes, ignored = table.shape[1 if len(table.shape) > 1 else 0], _ignored(operator)
            yield IndexRange(leaf=leaf, end=classes, ignored=ignored, operator=operator.name, shapes=shapes)


def _ignored(operator: Operator) -> int | None:
    value = operator.args[4] if len(operator.args) > 4 else operator.kwargs.get("ignore_index")
    return value if isinstance(value, int) else None


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
