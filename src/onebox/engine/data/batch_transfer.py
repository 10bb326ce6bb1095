"""Batch transfers: each worker receives only the parts that its routine reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.workload.batch import Batch
from onebox.pool import Pool
from onebox.pool.network.upload_compression import UploadCompression
from onebox.wire import TensorSpec, elements_of
from onebox.wire.protocol.requests import Instruction, Put


@dataclass(frozen=True, kw_only=True)
class WorkerBatch:
    """Transfer of a worker's part of a batch.

    Args:
        bindings: Buffers of its tensors, as the worker's routine expects them.
        size_bytes: Its bytes on the worker.
        instructions: Instructions that fill them.
        frames: Elements for the instructions.
    """

    bindings: tuple[int, ...]
    size_bytes: int
    instructions: tuple[Instruction, ...] = ()
    frames: tuple[memoryview | bytes, ...] = ()


def worker_batch(
    pool: Pool, batch: Batch, compiled: CompiledStep, worker: int, packing: UploadCompression
) -> WorkerBatch:
    """Return the transfer of a worker's part of a batch: the tensors that its routine reads.

    Args:
        pool: The pool.
        batch: The batch; its tensors must not be written to until the worker has received them.
        compiled: The routines.
        worker: The worker.
        packing: The compression.
    """
    leaves = compiled.routines[worker].leaves
    if not leaves:
        return WorkerBatch(bindings=(), size_bytes=0)
    parts = [compiled.elements_of(batch, micro_batch, leaf) for micro_batch, leaf in leaves]
    put, frames = put_packed(pool, parts, [leaf for _, leaf in leaves], worker, packing)
    return WorkerBatch(
        bindings=put.buffers,
        size_bytes=sum([len(elements) for _, elements in parts]),
        instructions=(put,),
        frames=tuple(frames),
    )


def put_leaves(pool: Pool, leaves: Sequence[Tensor]) -> tuple[Put, list[memoryview]]:
    """Return the instruction that uploads tensors into new buffers, and their elements.

    Elements of dense tensors are not copied: do not write to them until the worker has received them.
    """
    parts = [elements_of(leaf) for leaf in leaves]
    return _put(pool, parts), [frame for _, frame in parts]


def _put(pool: Pool, parts: Sequence[tuple[TensorSpec, memoryview]]) -> Put:
    return Put(tuple(pool.new_number() for _ in parts), tuple(spec for spec, _ in parts))


def put_packed(
    pool: Pool,
    parts: Sequence[tuple[TensorSpec, memoryview]],
    leaves: Sequence[int],
    worker: int,
    packing: UploadCompression,
) -> tuple[Put, list[memoryview | bytes]]:
    """Return the instruction that uploads tensors into new buffers, and their elements as sent.

    Args:
        pool: The pool.
        parts: Spec and elements of each tensor; they must not be written to until the worker has received them.
        leaves: Index in the batch of each tensor.
        worker: The receiver.
        packing: The compression.
    """
    put = _put(pool, parts)
    packed = [packing.packed(worker, leaf, frame) for leaf, (_, frame) in zip(leaves, parts, strict=True)]
    if any(codec for codec, _ in packed):
        put = Put(put.buffers, put.specs, tuple(codec or "" for codec, _ in packed))
    return put, [frame for _, frame in packed]


def worker_batches(
    pool: Pool, batch: Batch, compiled: CompiledStep, packing: UploadCompression
) -> dict[int, WorkerBatch]:
    """Return the transfer of each worker's part of a batch."""
    return {worker: worker_batch(pool, batch, compiled, worker, packing) for worker in compiled.routines}


def batch_bytes(batch: Batch, compiled: CompiledStep) -> dict[int, int]:
    """Return the bytes of each worker's part of a batch, with the indices of its samples."""
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
        compiled: The routines for its parts; ``None`` before they exist.
        parts: Transfer of each worker, once prepared.
        needs: Bytes of each worker's part.
        sent: Whether they have been sent.
        stepped: Whether its step has been requested.
    """

    batch: Batch
    compiled: CompiledStep | None = None
    parts: Mapping[int, WorkerBatch] = field(default_factory=dict)
    needs: Mapping[int, int] = field(default_factory=dict)
    sent: bool = False
    stepped: bool = False
