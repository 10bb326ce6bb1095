"""The device of a worker: the few things that differ between a CPU and a GPU."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import psutil
import torch
from torch import Tensor

from onebox.wire import to_frame


class Device:
    """A device that programs run on.

    Args:
        name: ``cpu``, or ``cuda:k``.
        threads: Threads that CPU operators may use.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.device = torch.device(name)
        self.threads = threads
        torch.set_num_threads(threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self._generator = torch.cuda.default_generators[self.device.index or 0]
        else:
            self._generator = torch.default_generator

    def seed(self, run: int, step: int, micro_batch: int, position: int) -> None:
        """Seed the random numbers of one operator from all that says where in the run it is."""
        text = f"{run}/{step}/{micro_batch}/{position}".encode()
        self._generator.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1)

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor on this device."""
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=False)

    def digest(self, tensors: list[Tensor]) -> bytes:
        """Return one hash over the bytes of tensors."""
        made = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            made.update(to_frame(tensor))
        return made.digest()

    def product_name(self) -> str:
        """Return the product name of the device."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    def memory_bytes(self) -> int:
        """Return the memory of the device."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return int(psutil.virtual_memory().total)
