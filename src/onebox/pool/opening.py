"""Opening a pool: from what is asked for to workers that are connected to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from onebox.errors import UsageError
from onebox.pool.device import welcome
from onebox.pool.discover import requested_devices
from onebox.pool.links import LinkMap
from onebox.pool.local import LocalSource
from onebox.pool.member import Member, Source, end_all
from onebox.pool.pool import Pool
from onebox.pool.switchboard import Switchboard
from onebox.wire import new_keys
from onebox.worker import Fault


def open_pool(
    spec: str = "auto",
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    links: LinkMap | None = None,
    channel_latency_s: float = 0.0,
    faults: dict[int, Sequence[Fault]] | None = None,
) -> Pool:
    """Open a pool of this machine's devices.

    Args:
        spec: ``auto`` for all accelerators or, with none, one CPU worker a core up to four; or a list such as
            ``cuda:0,cuda:1`` or ``cpu*2``; ``cpu@0.5`` is a CPU worker slowed down to half of its speed, ``sim*4`` are
            four devices that compute nothing and sleep as long as what they are sent says that it costs.
        threads: Threads of each worker; an equal share of the cores when ``None``.
        memory_bytes: The most bytes that each worker's buffers may take; no limit when ``None``.
        links: Links to emulate between devices, by the numbers of the two: for both directions, or for each its own
            where both are given. For experiments on one host; times over them are made, not measured.
        channel_latency_s: Seconds that every message between this process and a worker takes in addition, each way;
            signs of life are not held up. Emulated likewise.
        faults: For tests: what goes wrong on which worker.

    Returns:
        The pool; close it, or use it as a context manager.

    Raises:
        UsageError: The specification is wrong, or names a device that is not there; or a link or latency cannot be
            emulated.
        PoolError: A worker could not be started, or is of another version.
        WorkerDied: A worker ended while it started.

    Example:
        >>> import onebox
        >>> with onebox.open("cpu*2") as pool:
        ...     len(pool)
        2
    """
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(f"memory_bytes={memory_bytes}: a worker needs some memory; leave it out for no limit")
    if not 0 <= channel_latency_s < math.inf:
        raise UsageError(f"channel_latency_s={channel_latency_s}: a latency is 0 s or more and finite")
    sources: list[Source] = [
        LocalSource(requested_devices(spec, threads), memory_bytes=memory_bytes or 0, faults=faults)
    ]
    return connect_pool(sources, links=links, channel_latency_s=channel_latency_s)


def connect_pool(sources: Sequence[Source], *, links: LinkMap | None = None, channel_latency_s: float = 0.0) -> Pool:
    """Start the workers of some sources, in that order, and make a pool of them; see :func:`open_pool`.

    The sources are closed with the pool, or when there is none.
    """
    mine = new_keys()
    with contextlib.ExitStack() as undo:
        for source in sources:
            undo.callback(source.close)
        started: list[tuple[Member, str]] = []
        undo.callback(lambda: end_all([member for member, _ in started], grace_s=0.0))
        for source in sources:
            started += source.start(len(started), mine.public)
        members = [member for member, _ in started]
        switchboard = Switchboard(mine, channel_latency_s, len(members))
        undo.callback(switchboard.stop)
        hellos = [switchboard.connect(member, key) for member, key in started]
        switchboard.start()
        devices = [welcome(member, hello) for member, hello in zip(members, hellos, strict=True)]
        for source in sources:
            source.connected()
        pool = Pool(members, sources, switchboard, devices, links, channel_latency_s)
        undo.pop_all()
        return pool
