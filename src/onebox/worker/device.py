"""The device of a worker: the differences between a CPU and a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from onebox.errors import UsageError
from onebox.wire import TensorSpec, from_frame, spec_of, to_frame
from onebox.wire.protocol.requests import OptimizerSpec, StoredProgram
from onebox.wire.protocol.responses import InstructionSets, Scalars
from onebox.worker.accelerator import Accelerator, accelerator_for
from onebox.worker.memory.host import HostMemory
from onebox.worker.memory.staging import HostReads, UploadRing
from onebox.worker.optimizer.native import NativeOptimizer
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.system.instruction_sets import used_instruction_sets

PASSING_BYTES = 64 << 20
"""Memory of a GPU worker besides its buffers and an eighth of them: libraries' workspaces are of 8 to 32 MiB."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")

RESERVE_BYTES = 512 << 20
"""Memory of a GPU that tensors must leave: for NCCL (``NCCL_BUFFSIZE``, 4 MiB, for each neighbour and each of up to 32
channels), kernels that CUDA loads later than its context, and workspaces. By their documentation, not measured."""

CONTEXT_BYTES = 512 << 20
"""Memory of a GPU that a process with PyTorch takes before its first tensor, where it cannot be asked; an estimate."""

_ROUND_BYTES = 64 << 20


def usable_bytes(free_bytes: int) -> int:
    """Return how many bytes tensors may take of the free memory of a GPU.

    It is a multiple of 64 MiB where there is more than that, so that a pool is described alike each time it is opened.

    Args:
        free_bytes: Memory that nobody has taken: neither other processes nor the CUDA context of this one.
    """
    left_bytes = max(0, free_bytes - min(RESERVE_BYTES, free_bytes // 8))
    return left_bytes - (left_bytes % _ROUND_BYTES if left_bytes > _ROUND_BYTES else 0)


def share_bytes(total_bytes: int, sharing: int) -> int:
    """Return how many bytes the tensors of each of several workers of one GPU may take; 0, for no limit, of a single
    one. It depends on nothing that the others have taken already, so that one that is started again has the same.
    """
    return usable_bytes(max(0, total_bytes // sharing - CONTEXT_BYTES)) if sharing > 1 else 0


class ComputeDevice:
    """A device that programs run on.

    Args:
        name: ``cpu``, or ``cuda:k``.
        threads: Threads that CPU operators may use.
        speed: Fraction of a CPU's full speed; see :mod:`onebox.worker.execution.throttled` for less than 1.
        accelerator: What computes; ``None`` for the device of that name.

    Raises:
        UsageError: It does not support such a speed.
    """

    _aside: Tensor | None = None
    """State of the device's default generator while a program draws its own random numbers."""

    def __init__(self, name: str, threads: int, speed: float = 1.0, *, accelerator: Accelerator | None = None) -> None:
        if not 0 < speed <= 1 or (speed < 1 and name != "cpu"):
            raise UsageError(f"{name} at speed {speed}: a CPU can work at more than 0 and up to 1, a GPU at 1 only")
        self.name = name
        self.threads = threads
        self.speed = speed
        self.emulated = speed < 1
        torch.set_num_threads(threads)
        self.accelerator = accelerator or accelerator_for(name)
        self.device = self.accelerator.device
        self._uploads, self._reads = UploadRing(self.accelerator), HostReads(self.accelerator)

    # ---- programs and optimizers

    def load(self, stored: StoredProgram) -> CompiledProgram:
        """Compile a program for this device.

        Raises:
            WireError: It is invalid, or uses operators that are not allowed.
        """
        return CompiledProgram(stored.program, self.device, stored.layouts)

    def optimizer(
        self, spec: OptimizerSpec, parameters: list[Tensor], state: list[Tensor], host: HostMemory
    ) -> NativeOptimizer:
        """Create an optimizer over buffers of this device; see :class:`NativeOptimizer`.

        Raises:
            WireError: It is not allowed.
            QuotaExceeded: It runs on the host, which lacks memory.
        """
        return NativeOptimizer(spec, parameters, state, host, self.accelerator)

    def seed(self, run: int, step: int, micro_batch: int, position: int) -> None:
        """Seed the random numbers of one operator from its position in the run; see :meth:`unseed`."""
        if self._aside is None:
            self._aside = self.accelerator.generator.get_state()
        self.accelerator.generator.manual_seed(seed_of(run, step, micro_batch, position))

    def unseed(self) -> None:
        """Restore the device's default generator, used by eager operators, to its state before seeding."""
        if self._aside is not None:
            self.accelerator.generator.set_state(self._aside)
            self._aside = None

    def usable_bytes(self) -> int:
        """Return the bytes that tensors may take of the memory of a device other than the host; 0 of the host."""
        if not self.accelerator.asynchronous:
            return 0
        found = self.accelerator.memory()
        return usable_bytes(found.free_bytes + found.reserved_bytes)

    def new_generator(self, seed: int) -> torch.Generator:
        """Return a new random number generator of this device."""
        return self.accelerator.new_generator(seed)

    # ---- values

    def fill(self, spec: TensorSpec, frame: memoryview | bytes) -> Tensor:
        """Return a new tensor of this device with the elements of a frame.

        Raises:
            WireError: The frame does not match the spec.
        """
        if not self.accelerator.asynchronous:
            return self.accelerator.to_device(from_frame(spec, frame))
        return self._uploads.upload(spec, frame)

    def read(self, tensor: Tensor) -> memoryview | Callable[[], memoryview]:
        """Return the elements of a tensor, as a frame; on an asynchronous device a function that returns them when it
        has done the work up to here.
        """
        if not self.accelerator.asynchronous:
            return to_frame(self.accelerator.to_host(tensor))
        copy = self._reads.begin(tensor)
        return lambda: to_frame(copy())

    def scalars(self, tensors: Sequence[Tensor]) -> Scalars | Callable[[], Scalars]:
        """Return the values of tensors of one element; on an asynchronous device a function, as :meth:`read`."""
        if not self.accelerator.asynchronous:
            return Scalars(tuple(float(tensor) for tensor in tensors))
        for tensor in tensors:
            if tensor.numel() != 1:
                raise ValueError(f"{spec_of(tensor)} is no single value")
        copies = [self._reads.begin(tensor) for tensor in tensors]
        return lambda: Scalars(tuple(float(copy()) for copy in copies))

    def digest(self, tensors: list[Tensor]) -> bytes:
        """Return one hash over the bytes of tensors."""
        made = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            made.update(to_frame(self.accelerator.to_host(tensor)))
        return made.digest()

    # ---- identification

    def product_name(self) -> str:
        """Return the product name of the device."""
        return self.accelerator.identity().product

    def make(self) -> tuple[tuple[int, int], int, bool]:
        """Return compute capability and streaming multiprocessors of a GPU, and whether this PyTorch has NCCL for it;
        zeros for others.
        """
        found = self.accelerator.identity()
        return found.capability, found.multiprocessors, self.accelerator.nccl

    def gpu(self) -> str:
        """Return the identity of a GPU: its host, since its start, and its place there; empty for others, and where it
        is unknown.
        """
        place = self.accelerator.identity().place
        try:
            return f"{_BOOT.read_text().strip()}/{place}" if place else ""
        except OSError:
            return ""

    def instructions(self) -> InstructionSets:
        """Return the instruction sets that this process uses."""
        return used_instruction_sets()

    def memory_bytes(self) -> int:
        """Return the memory that tensors of this process may take: all of a CPU's; of a GPU what is free, or theirs
        already, less :data:`RESERVE_BYTES`.
        """
        memory = self.accelerator.memory()
        if not self.accelerator.asynchronous:
            return memory.total_bytes
        return usable_bytes(memory.free_bytes + memory.reserved_bytes)

    def quota_bytes(self, asked_bytes: int, sharing: int = 1) -> int:
        """Limit the memory of this worker, and return the most bytes of its buffers.

        Temporary memory of operators on a GPU is outside of buffers: PyTorch's allocator is limited to the buffers plus
        an eighth and :data:`PASSING_BYTES`, so that one share of a GPU cannot use memory that others have leased. The
        driver's memory for each process comes in addition.

        Args:
            asked_bytes: Requested limit; 0 for none, or a share of a GPU.
            sharing: Workers that share it, this one included.
        """
        if not asked_bytes and self.accelerator.asynchronous:
            asked_bytes = share_bytes(self.accelerator.memory().total_bytes, sharing)
        if asked_bytes:
            self.accelerator.limit(asked_bytes + asked_bytes // 8 + PASSING_BYTES)
        return asked_bytes


def seed_of(run: int, step: int, micro_batch: int, position: int) -> int:
    """Return the seed of the random operator at a position of a program."""
    text = f"{run}/{step}/{micro_batch}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
