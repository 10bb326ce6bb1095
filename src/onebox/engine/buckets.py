"""Buckets: which gradients travel together, and where in a backward program each bucket is complete. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.graph import ModelPrograms, NamedProgram, Port
from onebox.wire import Program, TensorSpec, specs_by_slot

BUCKET_BYTES = 1 << 20
"""Gradients travel in buckets of about this size."""


def gradient_buckets(backward: NamedProgram, size_bytes: int = BUCKET_BYTES) -> list[list[str]]:
    """Group the gradients of a backward program into buckets, in the order in which they are made.

    A bucket holds one element type and, but for the last, at least ``size_bytes``.
    """
    specs = specs_by_slot(backward.program)
    made = _made_by(backward.program)
    found: list[list[str]] = []
    filled, kind = 0, ""
    pairs = list(zip(backward.outputs, backward.program.outputs, strict=True))
    for port, slot in sorted(pairs, key=lambda pair: made.get(pair[1], -1)):
        spec = specs[slot]
        if not found or filled >= size_bytes or spec.dtype != kind:
            found.append([])
            filled, kind = 0, spec.dtype
        found[-1].append(str(port.name))
        filled += spec.size_bytes
    return found


def _made_by(program: Program) -> dict[int, int]:
    return {
        slot: number for number, operator in enumerate(program.operators) for slot in operator.outs if slot is not None
    }


def bucket_ends(backward: NamedProgram, buckets: Sequence[Sequence[str]]) -> list[int]:
    """Return the operators behind which all buckets but the last are complete; empty when they cannot be told apart."""
    made = _made_by(backward.program)
    slots = dict(zip((str(port.name) for port in backward.outputs), backward.program.outputs, strict=True))
    ends: list[int] = []
    for bucket in buckets[:-1]:
        end = max(made.get(slots[name], -1) for name in bucket)
        ends.append(max([end, *ends[-1:]]))
    distinct = len(set(ends)) == len(ends) and all(0 <= end < len(backward.program.operators) - 1 for end in ends)
    return ends if distinct else []


def gradient_specs(model: ModelPrograms, names: Sequence[str]) -> list[TensorSpec]:
    """Return what the gradients of parameters are."""
    backward = model.backward
    assert backward is not None
    specs = specs_by_slot(backward.program)
    where = dict(zip(backward.outputs, backward.program.outputs, strict=True))
    return [specs[where[Port("gradient", name)]] for name in names]


def buffer_specs(model: ModelPrograms, names: Sequence[str]) -> list[TensorSpec]:
    """Return what the buffers that a model changes are."""
    specs = specs_by_slot(model.forward.program)
    where = dict(zip(model.forward.outputs, model.forward.program.outputs, strict=True))
    return [specs[where[Port("update", name)]] for name in names]
