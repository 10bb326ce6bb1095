"""The virtual device: the devices of a pool as ``vgpu:0 … vgpu:N-1`` of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.pool import Pool, open_pool
from onebox.pool.network.emulated import LinkMap
from onebox.pool.streams.stream_recovery import recovery_budget
from onebox.sizes import Memory
from onebox.trainer_options import require_bool
from onebox.vgpu.cuda_alias import alias_cuda
from onebox.vgpu.distributed.ranks import Ranks, spawn
from onebox.vgpu.distributed.uneven_forward import EQUAL_SHARES
from onebox.vgpu.distributed.uneven_ranks import SHARES
from onebox.vgpu.registration import install, uninstall
from onebox.vgpu.runtime.context import (
    MEMORY_POLICY,
    after_attach,
    apply_memory_policy,
    attach,
    current_context,
    open_on_demand,
    open_queues,
    recover_scripts,
    tell_last,
)
from onebox.vgpu.runtime.context import memory_policy as _policy
from onebox.vgpu.runtime.script_events import PROFILE, MessageEvent, ScriptEvent, ScriptEvents
from onebox.vgpu.runtime.script_lines import place_of, text_of
from onebox.vgpu.runtime.script_time import ScriptFigures, ScriptLine
from onebox.vgpu.runtime.script_verdict import VERBOSE, say, verdict
from onebox.worker import Fault


def open_devices(
    spec: str = "auto",
    *,
    threads: int | None = None,
    memory: Memory | None = None,
    links: LinkMap | None = None,
    faults: dict[int, Sequence[Fault]] | None = None,
    grace_s: float | None = None,
    wait: bool = True,
    virtual_devices: bool = True,
    plain_links: bool = False,
    recover: bool | None = None,
    recover_memory: int | str | None = None,
    memory_policy: str | None = None,
) -> Pool:
    """Open a pool of devices: of this machine, of other hosts, or of a Ray cluster.

    Args:
        spec: ``auto`` for all accelerators or, with none, one CPU worker a core up to four; or a list such as
            ``cuda:0,cuda:1`` or ``cpu*2``; ``cpu@0.5`` is a CPU worker slowed down to half of its speed, ``sim*4`` are
            four devices that compute nothing and take the stated cost of each program. Devices of hosts where an
            agent runs that this client was paired with are ``hostA`` (all accelerators or some CPU workers),
            ``hostB:7171``, ``hostA/cuda:0``, ``hostA/cuda*2`` (any two) or ``hostA/cpu*2``, in one list with others;
            ``ray`` or ``ray://HOST:PORT`` is a Ray cluster; ``NAME.toml`` a file of hosts. Devices are numbered in the
            order of the list. For ``auto`` the environment variable ``ONEBOX_POOL`` may say something else.
        threads: Threads of each worker; an equal share of its host's cores when ``None``.
        memory: The most bytes that each device's buffers may take, as bytes or text such as ``2GiB``; different ones as
            a list or a dict by numbers of devices, or in a file of hosts where the pool has several hosts. An
            operator that needs more fails with :class:`~onebox.errors.DeviceMemoryError`. When ``None``, there is no
            limit but the device's; on another host a GPU alone or a CPU worker's share of the memory. A GPU's
            allocator is held to an eighth and 64 MiB more, for what operators need in passing.
        links: Links to emulate between ``sim`` devices of one host, by the numbers of the two: for both directions, or
            for each its own where both are given. Times over them are emulated.
        faults: Injected faults for tests, by worker of this machine.
        grace_s: How long this process may be gone or stopped before its leases on other hosts end, and how long the
            network to a host may be interrupted before its workers are given up; the failure of a whole host is noticed
            only then. By default leases outlast this process by 30 s, and an interruption may last 3 s.
        wait: Whether to queue for devices that others have leased; the place in the queue is logged.
        virtual_devices: Whether the pool's devices also become ``vgpu:0 …`` of PyTorch, for ordinary scripts. Without
            it nothing of PyTorch is registered or patched; a :class:`onebox.Trainer` needs none of it.
        plain_links: Whether workers of different hosts send each other tensors without encryption, between GPUs by
            NCCL, which has none: for hosts that reach each other through a tunnel, or by a network that nobody else
            reaches. By default these connections are encrypted, and let in the group's workers only.
        recover: Whether scripts on the virtual devices survive the loss of workers: lost ones are replaced, and what
            ran since the last snapshot is run again, with the same bits on devices whose operators are deterministic.
            A :class:`onebox.Trainer` does so by itself. When ``None``, as the environment variable ``ONEBOX_RECOVER``
            says (``1`` or ``0``), else with devices of other machines.
        recover_memory: With it the most bytes of this process's memory that a snapshot, and what is sent between two,
            may take, as bytes or text such as ``2GiB``; by default a quarter of the host's.
        memory_policy: What happens where a script's tensor finds no room on its device, whose memory or ``memory`` is
            full. With ``keep`` the operator is an error; with ``offload`` the tensors that were last used longest ago
            go to the memory of the device's host, and come back for their next use, so that an operator needs room for
            its own tensors only. A CPU worker has a memory of its own only with ``memory``. When ``None``, as the
            environment variable ``ONEBOX_MEMORY_POLICY`` says, else ``keep``.

    Returns:
        The pool; close it, or use it as a context manager.

    Raises:
        UsageError: The specification is wrong, or names a missing device or a host that this client was not paired
            with; or a link cannot be emulated.
        PoolError: A worker could not be started, or is of another version; an agent cannot be reached; or others hold
            the devices and ``wait`` is false.
        WorkerDied: A worker ended during its start.

    Example:
        >>> import onebox
        >>> with onebox.open("cpu*2") as pool:
        ...     len(pool)
        2
    """
    require_bool("virtual_devices", virtual_devices)
    recovery_budget(recover, recover_memory, remote=False)  # raises before workers are started
    _policy(memory_policy)
    pool = open_pool(
        spec,
        threads=threads,
        memory=memory,
        links=links,
        faults=faults,
        grace_s=grace_s,
        wait=wait,
        plain_links=plain_links,
    )
    if virtual_devices:
        try:
            install()
            attach(pool)
            recover_scripts(pool, recover, recover_memory)
            apply_memory_policy(pool, memory_policy)
        except BaseException:
            pool.close()
            raise
    return pool


def install_on_demand() -> None:
    """Register ``vgpu`` as a device of PyTorch, and open the pool of ``ONEBOX_POOL`` when a device is first used."""
    install()
    open_on_demand()


def set_synchronous(on: bool) -> None:
    """Set whether every operator is waited for, so that an error is raised at its own line; for debugging."""
    current_context().set_synchronous(on)


def used_devices(pool: Pool) -> set[int]:
    """Return the numbers of the devices on which this process has made a tensor, of a pool that is open."""
    return {queue.worker for queue in open_queues() if queue.pool is pool and queue.used}


__all__ = [
    "EQUAL_SHARES",
    "MEMORY_POLICY",
    "PROFILE",
    "SHARES",
    "VERBOSE",
    "MessageEvent",
    "Pool",
    "Ranks",
    "ScriptEvent",
    "ScriptEvents",
    "ScriptFigures",
    "ScriptLine",
    "after_attach",
    "alias_cuda",
    "attach",
    "current_context",
    "install",
    "install_on_demand",
    "open_devices",
    "place_of",
    "say",
    "set_synchronous",
    "spawn",
    "tell_last",
    "text_of",
    "uninstall",
    "used_devices",
    "verdict",
]
