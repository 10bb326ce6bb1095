"""What a pool knows of a device: from the first words of its worker."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

import torch

from onebox.errors import PoolError
from onebox.pool.backends.base import WorkerHandle
from onebox.pool.launch.worker_process import START_S
from onebox.wire.protocol.requests import PROTOCOL
from onebox.wire.protocol.responses import NO_INSTRUCTION_SETS, Hello, InstructionSets


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device of a pool.

    Args:
        number: Its number in the pool.
        host: The host that it is in: ``localhost``, or what it is called where the pool was asked for.
        address: What its peers connect to: an address of that host.
        device: Its name there: ``cpu``, ``cuda:k`` or ``sim``.
        name: Product name.
        threads: Threads that its CPU operators may use.
        memory_bytes: Its memory, or the worker's quota where that is less.
        speed: Fraction of its full speed that a throttled CPU works at; of ``sim``, what costs are divided by.
        emulated: Whether times on it are made: it is throttled, or computes nothing (``sim``).
        capability: Compute capability of a GPU, such as (9, 0); (0, 0) for all else.
        processors: Streaming multiprocessors of a GPU; 0 for all else.
        nccl: Whether its worker, of a GPU, has NCCL.
        instructions: The instruction sets that its worker uses on its processor.
        cores: Cores of its host that its worker may use, whoever else uses them; see :attr:`onebox.pool.Pool.cores`.
        codecs: How frames for its worker may be packed.
        host_bytes: Its host's memory that its worker may keep things in which would else be on the device: optimizer
            state and activations that wait there; 0 where that is not known.
        host_free_bytes: Memory of its host that nobody used when its worker began; 0 where that is not known. It is no
            part of what makes devices equal.
    """

    number: int
    host: str
    device: str
    name: str
    threads: int
    memory_bytes: int
    speed: float = 1.0
    emulated: bool = False
    capability: tuple[int, int] = (0, 0)
    processors: int = 0
    nccl: bool = False
    address: str = "127.0.0.1"
    instructions: InstructionSets = NO_INSTRUCTION_SETS
    cores: int = 0
    codecs: tuple[str, ...] = ()
    host_bytes: int = 0
    host_free_bytes: int = field(default=0, compare=False)  # which is another each time

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``sim``."""
        return self.device.split(":")[0]

    @property
    def has_bf16(self) -> bool:
        """Whether it has instructions for bf16: an Ampere GPU or a later one (8.0), or a CPU that says so.

        A CPU without takes a thousand times as long as with float32.
        """
        if self.kind == "cuda":
            return self.capability >= (8, 0)
        return bool({"bf16", "AMX"} & set(self.instructions.hardware)) and "bf" in self.instructions.onednn


def welcome(member: WorkerHandle, future: Future[Hello]) -> DeviceInfo:
    """Return what a worker's first words say of its device.

    Args:
        member: The worker.
        future: Its first words.

    Raises:
        PoolError: They did not come, or the worker is of another version.
        WorkerDied: It ended instead.
    """
    place = member.place
    try:
        hello = future.result(START_S)
    except FutureTimeout:
        raise PoolError(f"{place} did not say hello within {START_S:.0f} s") from None
    if hello.protocol != PROTOCOL or hello.torch.split("+")[0] != torch.__version__.split("+")[0]:
        raise PoolError(
            f"{place} speaks protocol {hello.protocol} with torch {hello.torch}, this client protocol "
            f"{PROTOCOL} with torch {torch.__version__}: install the same versions on both sides"
        )
    return DeviceInfo(
        number=place.worker,
        host=place.host,
        device=hello.device,
        name=hello.name,
        threads=hello.threads,
        memory_bytes=hello.memory_bytes,
        speed=hello.speed,
        emulated=hello.emulated,
        capability=hello.capability,
        processors=hello.processors,
        nccl=hello.nccl,
        address=member.address,
        instructions=hello.instructions,
        cores=hello.cores,
        codecs=hello.codecs,
        host_bytes=hello.host_bytes,
        host_free_bytes=hello.host_free_bytes,
    )
