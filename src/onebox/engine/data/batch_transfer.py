"""Parcels: what brings a batch to the workers, to each of them only what its routine reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.data.compression import BatchCompression
from onebox.engine.install.constant_tensors import put_leaves
from onebox.engine.workload.batch import Batch
from onebox.pool import Pool
from onebox.wire.protocol.requests import Instruction, Put


@dataclass(frozen=True, kw_only=True)
class WorkerBatch:
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


def worker_batch(
    pool: Pool, batch: Batch, compiled: CompiledStep, worker: int, packing: BatchCompression
) -> WorkerBatch:
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
        return WorkerBatch(bindings=(), size_bytes=0)
    put, frames = put_packed(pool, parts, [leaf for _, leaf in compiled.routines[worker].leaves], worker, packing)
    return WorkerBatch(
        bindings=put.buffers,
        size_bytes=sum(part.nbytes for part in parts),
        instructions=(put,),
        frames=tuple(frames),
    )


def put_packed(
    pool: Pool, tensors: Sequence[Tensor], leaves: Sequence[int], worker: int, packing: BatchCompression
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


def worker_batches(
    pool: Pool, batch: Batch, compiled: CompiledStep, packing: BatchCompression
) -> dict[int, WorkerBatch]:
    """Return what brings each worker its part of a batch."""
    return {worker: worker_batch(pool, batch, compiled, worker, packing) for worker in compiled.routines}


def batch_bytes(batch: Batch, compiled: CompiledStep) -> dict[int, int]:
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
class BatchTransfer:
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
    compiled: CompiledStep | None = None
    parts: Mapping[int, WorkerBatch] = field(default_factory=dict)
    needs: Mapping[int, int] = field(default_factory=dict)
    sent: bool = False
    stepped: bool = False
