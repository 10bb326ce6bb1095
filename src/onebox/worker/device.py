"""The device of a worker: the differences between a CPU, a GPU and an emulated device."""

from __future__ import annotations

import hashlib
import math
import platform
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from onebox.errors import UsageError, WireError
from onebox.wire import TensorSpec, from_frame, to_frame
from onebox.wire.protocol.requests import OptimizerSpec, StoredProgram
from onebox.wire.protocol.responses import InstructionSets
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.native import NativeOptimizer
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress, wait_until
from onebox.worker.system.clock import wake_on_time
from onebox.worker.system.instruction_sets import used_instruction_sets

PASSING_BYTES = 64 << 20
"""Memory of a GPU worker besides its buffers and an eighth of them: libraries' workspaces are of 8 to 32 MiB."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class ComputeDevice:
    """A device that programs run on.

    Args:
        name: ``cpu``, or ``cuda:k``.
        threads: Threads that CPU operators may use.
        speed: Fraction of a CPU's full speed; below 1 everything takes proportionally longer.

    Raises:
        UsageError: It does not support such a speed.
    """

    _aside: Tensor | None = None
    """State of the device's default generator while a program draws its own random numbers."""

    def __init__(self, name: str, threads: int, speed: float = 1.0) -> None:
        if not 0 < speed <= 1 or (speed < 1 and name != "cpu"):
            raise UsageError(f"{name} at speed {speed}: a CPU can work at more than 0 and up to 1, a GPU at 1 only")
        self.name = name
        self.device = torch.device(name)
        self.threads = threads
        self.speed = speed
        self.emulated = speed < 1
        if self.emulated:
            wake_on_time()
        torch.set_num_threads(threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.own_generator = torch.cuda.default_generators[self.device.index or 0]
        else:
            self.own_generator = torch.default_generator

    # ---- programs and optimizers

    def load(self, stored: StoredProgram) -> CompiledProgram:
        """Compile a program for this device.

        Raises:
            WireError: It is invalid, or uses operators that are not allowed.
        """
        check_cost(stored.cost_s)
        return CompiledProgram(stored.program, self.device, stored.layouts)

    def optimizer(
        self, spec: OptimizerSpec, parameters: list[Tensor], state: list[Tensor], host: HostMemory
    ) -> NativeOptimizer:
        """Create an optimizer over buffers of this device; see :class:`NativeOptimizer`.

        Raises:
            WireError: It is not allowed.
            QuotaExceeded: It runs on the host, which lacks memory.
        """
        check_cost(spec.cost_s)
        return NativeOptimizer(spec, parameters, state, host)

    def seed(self, run: int, step: int, micro_batch: int, position: int) -> None:
        """Seed the random numbers of one operator from its position in the run; see :meth:`unseed`."""
        if self._aside is None:
            self._aside = self.own_generator.get_state()
        text = f"{run}/{step}/{micro_batch}/{position}".encode()
        self.own_generator.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1)

    def unseed(self) -> None:
        """Restore the device's default generator, used by eager operators, to its state before seeding."""
        if self._aside is not None:
            self.own_generator.set_state(self._aside)
            self._aside = None

    def new_generator(self, seed: int) -> torch.Generator:
        """Return a new random number generator of this device."""
        return torch.Generator(self.device).manual_seed(seed)

    def pace(self, start_ns: int, cost_s: float, progress: WorkerProgress) -> None:
        """Extend work to its modelled duration on this device; only an emulated one waits.

        Args:
            start_ns: Beginning of the work, by ``time.monotonic_ns``; it is complete now.
            cost_s: Its cost by the client's model of a ``sim`` device.
            progress: Notified of the wait.
        """
        if self.emulated:
            wait_until(start_ns + math.ceil((time.monotonic_ns() - start_ns) / self.speed), progress)

    def retime(self, speed: float) -> None:
        """Change the speed; only an emulated device that computes nothing can.

        Raises:
            WireError: The device does not support it, or the speed is invalid.
        """
        raise WireError(f"{self.name} cannot be of another speed; only a sim device can")

    # ---- values

    def fill(self, spec: TensorSpec, frame: memoryview | bytes) -> Tensor:
        """Return a new tensor of this device with the elements of a frame.

        Raises:
            WireError: The frame does not match the spec.
        """
        tensor = from_frame(spec, frame)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=False)

    def read(self, tensor: Tensor) -> memoryview:
        """Return the elements of a tensor, as a frame."""
        return to_frame(tensor)

    def scalar(self, tensor: Tensor) -> float:
        """Return the value of a tensor of one element."""
        return float(tensor)

    def digest(self, tensors: list[Tensor]) -> bytes:
        """Return one hash over the bytes of tensors."""
        made = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            made.update(to_frame(tensor))
        return made.digest()

    # ---- identification

    def product_name(self) -> str:
        """Return the product name of the device."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    def make(self) -> tuple[tuple[int, int], int, bool]:
        """Return compute capability and streaming multiprocessors of a GPU, and whether this PyTorch has NCCL for it;
        zeros for others.
        """
        if self.device.type != "cuda":
            return (0, 0), 0, False
        properties = torch.cuda.get_device_properties(self.device)
        capability = (properties.major, properties.minor)
        return capability, properties.multi_processor_count, dist.is_nccl_available()

    def gpu(self) -> str:
        """Return the identity of a GPU, or nothing for others and where it is unknown.

        It is that of its host since its start, and the GPU's place on the bus there: MIG slices of a GPU have different
        UUIDs but one place, and that is what NCCL refuses twice.
        """
        if self.device.type != "cuda":
            return ""
        properties = torch.cuda.get_device_properties(self.device)
        place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if None in place:  # this torch does not tell it
            return "" if " MIG " in properties.name else str(properties.uuid)
        try:
            return ":".join([_BOOT.read_text().strip(), *map(str, place)])
        except OSError:
            return ""

    def instructions(self) -> InstructionSets:
        """Return the instruction sets that this process uses."""
        return used_instruction_sets()

    def memory_bytes(self) -> int:
        """Return the memory of the device."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return int(psutil.virtual_memory().total)

    def quota_bytes(self, asked_bytes: int) -> int:
        """Limit the memory of this worker, and return the most bytes of its buffers.

        Temporary memory of operators on a GPU is outside of buffers: PyTorch's allocator is limited to the buffers plus
        an eighth and :data:`PASSING_BYTES`, so that one share of a GPU cannot use memory that others have leased. The
        driver's memory for each process comes in addition.

        Args:
            asked_bytes: Requested limit; 0 for the device's memory.
        """
        if asked_bytes and self.device.type == "cuda":
            share = (asked_bytes + asked_bytes // 8 + PASSING_BYTES) / self.memory_bytes()
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)
        return asked_bytes


def check_cost(cost_s: float) -> None:
    """Require that a cost is valid.

    Raises:
        WireError: It is invalid.
    """
    if not 0 <= cost_s < math.inf:
        raise WireError(f"a cost of {cost_s} s; allowed are seconds from 0")
