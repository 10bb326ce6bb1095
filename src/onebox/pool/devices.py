"""Description of a device in a pool, taken from its worker's hello message."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from ipaddress import ip_address

import torch

from onebox.errors import PoolError, UsageError
from onebox.pool.backends.base import WorkerHandle
from onebox.pool.discovery import LOCAL_HOST
from onebox.wire.protocol.requests import PROTOCOL
from onebox.wire.protocol.responses import NO_INSTRUCTION_SETS, Hello, InstructionSets
from onebox.worker import START_S


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device of a pool.

    Args:
        number: Its number in the pool.
        host: Its host: ``localhost``, or the host's name in the pool's specification.
        address: The address of that host that peers connect to.
        device: Its name on that host: ``cpu``, ``cuda:k`` or ``sim``.
        name: Product name.
        threads: Threads that its CPU operators may use.
        memory_bytes: Its memory, of a GPU what was free when its worker started, less a reserve for libraries; or the
            worker's quota where that is less.
        speed: Fraction of its full speed that a throttled CPU works at; for ``sim``, the divisor of costs.
        emulated: Whether times on it are emulated: it is throttled, or computes nothing (``sim``).
        capability: Compute capability of a GPU, such as (9, 0); (0, 0) for others.
        processors: Streaming multiprocessors of a GPU; 0 for others.
        nccl: Whether it is a GPU whose worker has NCCL.
        gpu: Identity of a GPU, equal for several workers on it and for its MIG slices; empty where unknown.
        instructions: Instruction sets of the processor that its worker uses.
        cores: Cores of its host that its worker may use, shared or not; see :attr:`onebox.Pool.cores`.
        codecs: Compression codecs that its worker accepts for frames.
        host_bytes: Host memory that its worker may use for offloaded optimizer state and activations; 0 where unknown.
        host_free_bytes: Free memory of its host when its worker started; 0 where unknown. Ignored by comparisons.
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
    host_free_bytes: int = field(default=0, compare=False)  # differs at every start
    gpu: str = field(default="", compare=False)  # differs at every start of its host

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``sim``."""
        return self.device.split(":")[0]

    @property
    def arithmetic(self) -> tuple[object, ...]:
        """Properties that the last bits of results depend on: devices with equal ones compute the same bits."""
        if self.kind == "cuda":
            return self.kind, self.name, self.capability
        return self.kind, self.name, self.threads, self.instructions

    @property
    def has_bf16(self) -> bool:
        """True if it has bf16 instructions: an Ampere GPU or later (8.0), or a CPU that reports them.

        A CPU without them takes a thousand times as long as with float32.
        """
        if self.kind == "cuda":
            return self.capability >= (8, 0)
        return bool({"bf16", "AMX"} & set(self.instructions.hardware)) and "bf" in self.instructions.onednn


def distinct_hosts(devices: Sequence[DeviceInfo]) -> dict[str, tuple[int, ...]]:
    """Return the numbers of the devices of each host; an agent at an address of this host is on it.

    Args:
        devices: The devices.
    """
    found: dict[str, tuple[int, ...]] = {}
    own = {device.address for device in devices if device.host == LOCAL_HOST}
    for device in devices:
        here = device.host == LOCAL_HOST or device.address in own or _is_loopback(device.address)
        host = LOCAL_HOST if here else device.host
        found[host] = (*found.get(host, ()), device.number)
    return found


def host_uplinks(devices: Sequence[DeviceInfo]) -> dict[int, str]:
    """Return the uplink of each device, that of its host; none on a single host, within which links are emulated."""
    hosts = distinct_hosts(devices)
    return {device: host for host, own in hosts.items() for device in own} if len(hosts) > 1 else {}


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == LOCAL_HOST


def welcome(handle: WorkerHandle, future: Future[Hello], within_s: float = START_S) -> DeviceInfo:
    """Return the device that a worker's hello message describes.

    Args:
        handle: The worker.
        future: Its hello message.
        within_s: Longest wait for it.

    Raises:
        PoolError: The message did not come, or the worker is of another version.
        WorkerDied: It ended instead.
    """
    place = handle.place
    try:
        hello = future.result(within_s)
    except FutureTimeout:
        raise PoolError(f"{place} did not say hello within {within_s:.0f} s") from None
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
        address=handle.address,
        instructions=hello.instructions,
        cores=hello.cores,
        codecs=hello.codecs,
        host_bytes=hello.host_bytes,
        host_free_bytes=hello.host_free_bytes,
        gpu=hello.gpu,
    )


def nccl_ranks(members: Sequence[DeviceInfo], *, between_hosts: bool) -> tuple[tuple[int, ...], ...]:
    """Return for each rank of a group the ranks with which it uses NCCL, itself included; none where it does not.

    One rank for each GPU is among them, as NCCL refuses a GPU twice.

    Args:
        members: The devices, by rank.
        between_hosts: Whether GPUs of different hosts use it with each other; it does not encrypt.
    """
    sets: dict[str, dict[str, int]] = {}
    for rank, device in enumerate(members):
        if device.nccl and device.gpu:
            sets.setdefault("" if between_hosts else device.host, {}).setdefault(device.gpu, rank)
    found: list[tuple[int, ...]] = [()] * len(members)
    for ranks in sets.values():
        for rank in ranks.values() if len(ranks) > 1 else ():
            found[rank] = tuple(ranks.values())
    return tuple(found)


def require_devices(workers: Sequence[int], count: int) -> None:
    """Require that a pool has devices of some numbers.

    Args:
        workers: The numbers.
        count: Number of devices of the pool.

    Raises:
        UsageError: It has not.
    """
    for worker in workers:
        if not 0 <= worker < count:
            raise UsageError(f"there is no device {worker}; the pool has 0 to {count - 1}")


def check_kinds(members: Sequence[DeviceInfo], whole: str) -> None:
    """Raise an error for emulated devices together with others: they have no values that they could give to these.

    Args:
        members: The devices.
        whole: Their common use, such as ``"a group"``, for the error.

    Raises:
        UsageError: Some, but not all are ``sim`` devices.
    """
    kinds = sorted({device.kind for device in members})
    if "sim" in kinds and len(kinds) > 1:
        raise UsageError(
            f"{whole} of {' and '.join(kinds)} devices: sim devices have no values to give to others; let it be of sim "
            "devices only, or of none"
        )


def explain_links(devices: Sequence[DeviceInfo], plain_links: bool) -> str:
    """Return a warning about the connections between hosts: that they are not encrypted, or that they are not those of
    NCCL because they are; empty where neither is so.

    Args:
        devices: The devices of a pool.
        plain_links: Whether it was opened so.
    """
    if len({device.host for device in devices}) < 2:
        return ""
    if plain_links:
        return (
            "plain_links: tensors between hosts are neither encrypted nor authenticated; use it inside a tunnel or on "
            "a network that nobody else reaches"
        )
    if len({device.host for device in devices if device.nccl}) < 2:
        return ""
    return (
        "GPUs of different hosts send each other tensors over encrypted sockets, by way of the hosts' memory: NCCL "
        "does not encrypt. On a network that nobody else reaches, plain_links=True lets them use NCCL"
    )
