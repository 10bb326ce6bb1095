"""Sample cache on the workers: after their first use, only the indices of samples travel.

Each worker has a slab for each tensor of a batch that it reads, with a row for each sample. A row is filled from the
normal upload, and stays until the trainer is closed, the plan changes, or steps need the memory; the client tracks
which sample is in which row. A part of a batch is then assembled on the worker from rows of the slab and newly uploaded
samples. If no row is free, samples travel as without a slab.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.data.batch_transfer import WorkerBatch, put_leaves, put_packed
from onebox.engine.workload.batch import Batch
from onebox.errors import OneboxError
from onebox.pool import Pool
from onebox.pool.network.upload_compression import UploadCompression
from onebox.wire import (
    DType,
    KernelSpec,
    Many,
    OwnDevice,
    SlotArgument,
    Strided,
    TensorSpec,
    Value,
    elements_of,
    spec_of,
)
from onebox.wire.protocol.eager import Replay, alone
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define, Instruction, Put

LEAST_BYTES = 16
"""Rows of at most this size always travel, such as class labels: their indices would take as many bytes."""

_MOST_ROWS = (1 << 31) - 1
"""Row limit: indices of rows travel as int32."""

_FILL = KernelSpec(
    "aten.index_copy_.default", (SlotArgument(0), 0, SlotArgument(1), SlotArgument(2)), {}, 3, 0, (None,)
)
"""Overwrites rows of a tensor: (tensor, indices, rows)."""


@dataclass(kw_only=True)
class _Slab:
    """The rows of one tensor of a batch on one worker.

    Args:
        number: Its buffer.
        capacity: Number of rows.
        row_bytes: Bytes of one row.
        rows: The row of each sample.
    """

    number: int
    capacity: int
    row_bytes: int
    rows: dict[int, int] = field(default_factory=dict)

    def admit(self, samples: Iterable[int]) -> list[int] | None:
        """Allocate a row for each new sample; return ``None`` if there are not enough."""
        new = dict.fromkeys(samples)
        if len(self.rows) + len(new) > self.capacity:
            return None
        self.rows |= {sample: len(self.rows) + place for place, sample in enumerate(new)}
        return [self.rows[sample] for sample in new]


class SampleCache:
    """The slabs of all workers of a plan.

    Args:
        pool: The pool.
        limit_bytes: Most bytes of slabs on each worker.
    """

    def __init__(self, pool: Pool, limit_bytes: int) -> None:
        self.hits = self.misses = 0
        self._pool = pool
        self._limit_bytes = limit_bytes
        self._slabs: dict[int, dict[int, _Slab]] = {}
        self._kinds: dict[int, tuple[TensorSpec, ...]] = {}
        self._refused: set[int] = set()
        self._kernels: dict[tuple[int, Hashable], int] = {}  # by worker and kernel key

    def held_bytes(self, worker: int) -> int:
        """Return the bytes of a worker's slabs."""
        return sum(slab.capacity * slab.row_bytes for slab in self._slabs.get(worker, {}).values())

    def part_of(
        self, batch: Batch, compiled: CompiledStep, worker: int, packing: UploadCompression, spare_bytes: int
    ) -> WorkerBatch | None:
        """Return the transfer of a worker's part of a batch, which must be sent before the next request.

        Args:
            batch: The batch, whose sample identifiers are known.
            compiled: The routines.
            worker: The worker.
            packing: The transfer encoding.
            spare_bytes: Memory that steps leave free there.

        Returns:
            The part; ``None`` if the worker has no slabs and cannot have any.
        """
        leaves = compiled.routines[worker].leaves
        if not leaves or batch.samples is None:
            return None
        tensors = enumerate(batch.leaves)
        large = {leaf for leaf, tensor in tensors if tensor.nbytes > LEAST_BYTES * batch.size}
        read = sorted({leaf for _, leaf in leaves} & large)
        made = self._ready(batch, read, worker, spare_bytes)
        if made is None:
            return None
        instructions, frames, bindings, size_bytes = made, [], [], 0
        for micro_batch, leaf in leaves:
            cut = compiled.micro_batches[micro_batch]
            whole = slice(cut.start, cut.start + cut.size)
            tensor, samples = compiled.leaf_of(batch, micro_batch, leaf), batch.samples[whole].tolist()
            if leaf in self._slabs[worker] and compiled.replaced(batch, micro_batch, leaf) is None:
                number, more, elements = self._assembled(worker, leaf, tensor, samples, packing)
            else:
                put, elements = put_packed(self._pool, [elements_of(tensor)], [leaf], worker, packing)
                number, more = put.buffers[0], [put]
            bindings.append(number)
            instructions += more
            frames += elements
            size_bytes += tensor.nbytes
        return WorkerBatch(
            bindings=tuple(bindings), size_bytes=size_bytes, instructions=tuple(instructions), frames=tuple(frames)
        )

    def drop(self, worker: int) -> None:
        """Free the slabs of a worker permanently: steps need the memory."""
        self._refused.add(worker)
        self._forget(worker)

    def clear(self) -> None:
        """Free all slabs; the next plan may have other workers and placements."""
        for worker in list(self._slabs):
            self._forget(worker)
        self._refused.clear()

    # ---- slabs

    def _ready(self, batch: Batch, leaves: list[int], worker: int, spare_bytes: int) -> list[Instruction] | None:
        """Return the instructions that make a worker's slabs usable, or ``None`` if there can be none."""
        kinds = tuple(
            TensorSpec(spec_of(batch.leaves[leaf]).dtype, tuple(batch.leaves[leaf].shape[1:])) for leaf in leaves
        )
        if worker in self._slabs and self._kinds[worker] == kinds:
            return []
        if worker in self._slabs or worker in self._refused or self._pool.devices[worker].kind == "sim":
            return None  # samples of other shapes than the first are not cached
        a_sample = sum(kind.size_bytes for kind in kinds)
        capacity = min(_MOST_ROWS, min(self._limit_bytes, spare_bytes) // max(a_sample, 1))
        if capacity < 1 or not leaves:
            self._refused.add(worker)
            return None
        self._kinds[worker] = kinds
        self._slabs[worker] = {}
        made: list[Instruction] = []
        for leaf, kind in zip(leaves, kinds, strict=True):
            spec = TensorSpec(kind.dtype, (capacity, *kind.shape))
            slab = _Slab(number=self._pool.new_number(), capacity=capacity, row_bytes=kind.size_bytes)
            self._slabs[worker][leaf] = slab
            made += self._call(worker, ("make", leaf), _make(spec), (), slab.number)
        return made

    def _forget(self, worker: int) -> None:
        slabs = self._slabs.pop(worker, {})
        kernels = [number for (where, _), number in self._kernels.items() if where == worker]
        self._kernels = {key: number for key, number in self._kernels.items() if key[0] != worker}
        if slabs and worker not in self._pool.gone:
            with contextlib.suppress(OneboxError):
                self._pool.post(worker, [Free(tuple(slab.number for slab in slabs.values()), tuple(kernels))])

    # ---- parts

    def _assembled(
        self, worker: int, leaf: int, tensor: Tensor, samples: list[int], packing: UploadCompression
    ) -> tuple[int, list[Instruction], list[memoryview | bytes]]:
        """Return the buffer of an assembled tensor, the instructions that make it, and the elements that these
        upload.
        """
        slab = self._slabs[worker][leaf]
        missing = [place for place, sample in enumerate(samples) if sample not in slab.rows]
        self.hits += len(samples) - len(missing)
        self.misses += len(missing)
        if len(missing) == len(samples):
            return self._uploaded(worker, leaf, tensor, samples, packing)
        rows, frames = self._places([slab.rows.get(sample, 0) for sample in samples], torch.int32)
        out, ended = self._pool.new_number(), [*rows.buffers]
        made: list[Instruction] = [rows, *self._picked(worker, slab, tensor, rows.buffers[0], out)]
        if missing:
            brought = tensor[torch.tensor(missing)]
            new, more, elements = self._uploaded(worker, leaf, brought, [samples[i] for i in missing], packing)
            places, numbers = self._places(missing)
            made += [*more, places, *self._filled(worker, out, places.buffers[0], new)]
            frames += [*elements, *numbers]
            ended += [*places.buffers, new]
        return out, [*made, Free(tuple(ended))], frames

    def _uploaded(
        self, worker: int, leaf: int, tensor: Tensor, samples: list[int], packing: UploadCompression
    ) -> tuple[int, list[Instruction], list[memoryview | bytes]]:
        """Return the buffer that samples are uploaded to, and fill free rows of the slab with them."""
        slab = self._slabs[worker][leaf]
        put, frames = put_packed(self._pool, [elements_of(tensor)], [leaf], worker, packing)
        made: list[Instruction] = [put]
        rows = slab.admit(samples) if len(set(samples)) == len(samples) else None  # a repeated sample travels again
        if rows is not None:
            places, numbers = self._places(rows)
            made += [places, *self._filled(worker, slab.number, places.buffers[0], put.buffers[0])]
            made.append(Free(places.buffers))
            frames += numbers
        return put.buffers[0], made, frames

    def _places(self, places: list[int], dtype: torch.dtype = torch.int64) -> tuple[Put, list[memoryview | bytes]]:
        """Return the upload of row indices into a new buffer."""
        put, frames = put_leaves(self._pool, [torch.tensor(places, dtype=dtype)])
        return put, list(frames)

    # ---- kernels

    def _picked(self, worker: int, slab: _Slab, like: Tensor, rows: int, out: int) -> list[Instruction]:
        """Return the instructions that copy some rows of a slab."""
        spec = spec_of(like)
        return self._call(worker, ("pick", spec.dtype, spec.shape), _pick(spec), (slab.number, rows), out)

    def _filled(self, worker: int, into: int, places: int, rows: int) -> list[Instruction]:
        """Return the instructions that write rows of a tensor."""
        return self._call(worker, "fill", _FILL, (into, places, rows))

    def _call(
        self, worker: int, key: Hashable, kernel: KernelSpec, inputs: tuple[int, ...], *outputs: int
    ) -> list[Instruction]:
        """Return the instructions that run a kernel, with its definition if the worker has none."""
        made: list[Instruction] = []
        number = self._kernels.get((worker, key))
        if number is None:
            once, number = self._pool.new_number(), self._pool.new_number()
            self._kernels[worker, key] = number
            made += [Define(once, kernel), Define(number, alone(once, kernel)), Free((), (once,))]
        return [*made, Replay(number, inputs, outputs)]


def _make(spec: TensorSpec) -> KernelSpec:
    """Return the kernel that allocates a slab."""
    named: dict[str, Value] = {"dtype": DType(spec.dtype), "device": OwnDevice()}
    return KernelSpec("aten.empty.memory_format", (Many(spec.shape),), named, 0, 0, (_dense(spec),))


def _pick(spec: TensorSpec) -> KernelSpec:
    """Return the kernel that selects rows of a slab: (slab, rows)."""
    return KernelSpec("aten.index_select.default", (SlotArgument(0), 0, SlotArgument(1)), {}, 2, 0, (_dense(spec),))


def _dense(spec: TensorSpec) -> Strided:
    strides = tuple(prod(spec.shape[place + 1 :]) for place in range(len(spec.shape)))
    return Strided(spec.dtype, spec.shape, strides, 0, spec.size_bytes)
