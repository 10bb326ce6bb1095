"""Parcels: what brings a batch to the workers, to each of them only what its routine reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from onebox.engine.batch import Batch
from onebox.engine.compiler import Compiled
from onebox.engine.constants import put_leaves
from onebox.engine.packing import Packing
from onebox.pool import Pool
from onebox.wire.messages import Instruction, Put


@dataclass(frozen=True, kw_only=True)
class Part:
    """What brings a worker its part of a batch.

    Args:
        bindings: The buffers that it lies in, as the worker's routine wants them.
        size_bytes: Its bytes there.
        instructions: What fills them.
        frames: The elements that these need.
    """

    bindings: tuple[int, ...]
    size_bytes: int
    instructions: tuple[Instruction, ...] = ()
    frames: tuple[memoryview | bytes, ...] = ()


def part_of(pool: Pool, batch: Batch, compiled: Compiled, worker: int, packing: Packing) -> Part:
    """Return what brings a worker its part of a batch: what its routine reads of it, and nothing else.

    Args:
        pool: The pool.
        batch: The batch; its tensors are not to be written to until the worker has them.
        compiled: The routines.
        worker: The worker.
        packing: How it travels.
    """
    parts = [compiled.leaf_of(batch, micro_batch, leaf) for micro_batch, leaf in compiled.routines[worker].leaves]
    if not parts:
        return Part(bindings=(), size_bytes=0)
    put, frames = put_packed(pool, parts, [leaf for _, leaf in compiled.routines[worker].leaves], worker, packing)
    return Part(
        bindings=put.buffers,
        size_bytes=sum(part.nbytes for part in parts),
        instructions=(put,),
        frames=tuple(frames),
    )


def put_packed(
    pool: Pool, tensors: Sequence[Tensor], leaves: Sequence[int], worker: int, packing: Packing
) -> tuple[Put, list[memoryview | bytes]]:
    """Return the instruction that uploads tensors into new buffers, and their elements as they travel.

    Args:
        pool: The pool.
        tensors: Not to be written to until the worker has them.
        leaves: Which tensor of the batch each is a part of.
        worker: To whom.
        packing: How they travel.
    """
    put, _, frames = put_leaves(pool, tensors)
    packed = [packing.packed(worker, leaf, frame) for leaf, frame in zip(leaves, frames, strict=True)]
    if any(codec for codec, _ in packed):
        put = Put(put.buffers, put.specs, tuple(codec or "" for codec, _ in packed))
    return put, [frame for _, frame in packed]


def parts_of(pool: Pool, batch: Batch, compiled: Compiled, packing: Packing) -> dict[int, Part]:
    """Return what brings each worker its part of a batch."""
    return {worker: part_of(pool, batch, compiled, worker, packing) for worker in compiled.routines}


def needs_of(batch: Batch, compiled: Compiled) -> dict[int, int]:
    """Return the bytes that each worker's part of a batch takes there, with places of its samples."""
    found = {}
    for worker, routine in compiled.routines.items():
        found[worker] = 0
        for micro_batch, leaf in routine.leaves:
            if leaf == len(batch.leaves):  # a weight
                found[worker] += 8
                continue
            size = compiled.micro_batches[micro_batch].size
            found[worker] += batch.leaves[leaf].nbytes // batch.size * size + 16 * size * (batch.samples is not None)
    return found


@dataclass(eq=False)
class Parcel:
    """A batch on its way to the workers.

    Args:
        batch: The client's copy.
        compiled: The routines that its parts are for; ``None`` before there are any.
        parts: Those of each worker, where they have been made.
        needs: Their bytes.
        sent: Whether they have been sent.
        stepped: Whether its step has been asked for.
    """

    batch: Batch
    compiled: Compiled | None = None
    parts: Mapping[int, Part] = field(default_factory=dict)
    needs: Mapping[int, int] = field(default_factory=dict)
    sent: bool = False
    stepped: bool = False
