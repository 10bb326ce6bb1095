"""Prediction of the devices that a local pool would have, without starting workers."""

from __future__ import annotations

import os

import torch

from onebox.emulator import MEMORY_BYTES, PRODUCT
from onebox.errors import UsageError
from onebox.pool.devices import DeviceInfo
from onebox.pool.discovery import LOCAL_HOST, DeviceRequest, cores, requested_devices, require_local_workers
from onebox.pool.spec import LocalPart, asked_parts, read_hosts
from onebox.sizes import Memory, parse_budgets
from onebox.wire import codecs
from onebox.wire.protocol.responses import NO_INSTRUCTION_SETS
from onebox.worker.device import CONTEXT_BYTES, ComputeDevice, share_bytes, usable_bytes
from onebox.worker.memory.host import HostMemory
from onebox.worker.system.instruction_sets import used_instruction_sets


def expected_devices(
    spec: str = "auto", *, threads: int | None = None, memory: Memory | None = None
) -> tuple[DeviceInfo, ...]:
    """Return the devices that a pool of this machine would have; nothing is started.

    Args:
        spec: As for :func:`~onebox.pool.open_pool`.
        threads: Likewise.
        memory: Likewise.

    Raises:
        UsageError: The specification is wrong, or names devices of other machines.
    """
    found: list[DeviceInfo] = []
    budgets = parse_budgets("memory", memory)
    for part in asked_parts(spec, os.environ, read_hosts):
        if not isinstance(part, LocalPart):
            raise UsageError(
                f"pool {spec!r} has devices of other machines, which would have to be asked; describe them by what "
                "they have, such as sim*2 with a memory of 24GiB"
            )
        requests = requested_devices(part.devices, part.threads or threads)
        if any(request.device != "sim" for request in requests):
            require_local_workers(part.devices)
        for request, quota in zip(requests, (part.memory or budgets).of(len(requests)), strict=True):
            found.append(_described(len(found), request, quota))
    return tuple(found)


def _described(number: int, request: DeviceRequest, quota: int) -> DeviceInfo:
    """Return the description that the worker of a device would send."""
    capability, processors, nccl, used = (0, 0), 0, False, NO_INSTRUCTION_SETS
    if request.device == "sim":
        name, memory = PRODUCT, quota or MEMORY_BYTES
    elif not request.device.startswith("cuda"):
        device = ComputeDevice("cpu", torch.get_num_threads())
        name, memory, used = device.product_name(), device.memory_bytes(), device.instructions()
    else:
        about = torch.cuda.get_device_properties(request.device)
        name, memory = about.name, usable_bytes(int(about.total_memory) - CONTEXT_BYTES)
        used = used_instruction_sets()
        quota = quota or share_bytes(int(about.total_memory), request.sharing)
        capability, processors = (about.major, about.minor), about.multi_processor_count
        nccl = torch.distributed.is_nccl_available()
    host = HostMemory(memory if request.device == "sim" else quota)  # sim has its memory as a quota
    return DeviceInfo(
        number=number,
        host=LOCAL_HOST,
        device=request.device,
        name=name,
        threads=request.threads,
        memory_bytes=min(memory, quota or memory),
        speed=request.speed,
        emulated=request.device == "sim" or request.speed < 1,
        capability=capability,
        processors=processors,
        nccl=nccl,
        instructions=used,
        cores=cores(),
        codecs=codecs(),
        host_bytes=host.limit_bytes,
        host_free_bytes=host.free_bytes,
    )
