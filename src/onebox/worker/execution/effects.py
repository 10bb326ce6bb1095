"""Buffers that an instruction writes, and frames that it brings, as declared in the instruction; pure."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.wire import TensorSpec
from onebox.wire.protocol.eager import KeepGenerator
from onebox.wire.protocol.instructions import (
    Branch,
    Broadcast,
    Call,
    Evict,
    Gather,
    Offload,
    OptimizerStep,
    Prefetch,
    Receive,
    Reduce,
    Rename,
)
from onebox.wire.protocol.requests import Define, Instruction, OptimizerSpec, Put
from onebox.wire.protocol.snapshots import Fill, Lay, Write


def writes(instruction: Instruction) -> Sequence[int]:
    """Return the references of buffers that an instruction would write, or that would be lost without it."""
    match instruction:
        case Call():
            return instruction.outputs
        case OptimizerStep() | Branch():
            return (*instruction.previous, *instruction.ahead)
        case Rename():
            return instruction.into
        case Put() | Reduce() | Broadcast() | Fill() | Lay() | Offload() | Evict() | Prefetch():
            return instruction.buffers
        case Receive() | KeepGenerator():
            return (instruction.buffer,)
        case Gather():
            return (instruction.into,)
        case _:
            return ()


def frame_count(instruction: Instruction) -> int:
    """Return the number of frames of its message that belong to an instruction."""
    if isinstance(instruction, Put):
        return len(instruction.specs)
    if isinstance(instruction, Write):
        return 1
    if isinstance(instruction, Define) and isinstance(instruction.what, OptimizerSpec):
        return sum(isinstance(entry.value, TensorSpec) for entry in instruction.what.state)
    return 0
