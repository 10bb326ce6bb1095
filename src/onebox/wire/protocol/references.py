"""Buffers named by an instruction; pure."""

from __future__ import annotations

from onebox.wire.protocol.instructions import (
    Ask,
    Branch,
    Broadcast,
    Call,
    Evict,
    Free,
    Gather,
    Get,
    Offload,
    OptimizerStep,
    Prefetch,
    Receive,
    Reduce,
    Rename,
    Send,
    Step,
)


def references(step: Step) -> tuple[int, ...]:
    """Return the buffers that an instruction names."""
    match step:
        case Call():
            return (*step.inputs, *step.outputs)
        case Send() | Receive():
            return (step.buffer,)
        case Gather():
            return (step.buffer, step.into)
        case OptimizerStep():
            norm = (step.square_norm,) if step.square_norm else ()
            return (*step.gradients, *norm, *step.previous, *step.ahead)
        case Branch():
            return (*step.previous, *step.ahead)
        case Rename():
            return (*step.buffers, *step.into)
        case Free() | Reduce() | Broadcast() | Offload() | Evict() | Prefetch() | Get() | Ask():
            return step.buffers
