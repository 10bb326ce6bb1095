"""The cores of a pool's hosts: how many each worker keeps busy, and how many are left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onebox.pool.devices import DeviceInfo


@dataclass(frozen=True, kw_only=True)
class HostCores:
    """The cores of a host, as far as its workers may use them.

    Args:
        host: Name of the host in the pool.
        cores: Number of cores.
        busy: Busy threads of each of its devices' workers while it computes, by number in the pool: for a CPU those of
            its operators; for a GPU one, which launches kernels; none for ``sim``. An optimizer
            that steps on the host of a GPU uses that worker's threads for a while, when nothing else of the step is
            left to do.
    """

    host: str
    cores: int
    busy: Mapping[int, int]

    @property
    def taken(self) -> int:
        """Number of threads that all its workers together keep busy."""
        return sum(self.busy.values())

    @property
    def free(self) -> int:
        """Cores left for a client on it, the preparation of its batches and everything else that runs there."""
        return max(0, self.cores - self.taken)


def busy_threads(device: DeviceInfo) -> int:
    """Return the number of threads that a device's worker keeps busy while it computes."""
    return {"cpu": device.threads, "cuda": 1}.get(device.kind, 0)


def host_cores(devices: Sequence[DeviceInfo], here: str, cores: int) -> tuple[HostCores, ...]:
    """Return the cores of the devices' hosts, the client's own host first, even where it has no worker.

    Args:
        devices: The devices.
        here: Name of the client's host.
        cores: Cores that the client may use.
    """
    hosts = dict.fromkeys((here, *(device.host for device in devices)))
    found = []
    for host in hosts:
        own = [device for device in devices if device.host == host]
        found.append(
            HostCores(
                host=host,
                cores=max((device.cores for device in own), default=cores) or cores,
                busy={device.number: busy_threads(device) for device in own},
            )
        )
    return tuple(found)


def explain_overcommitment(hosts: Sequence[HostCores]) -> str:
    """Return a line about hosts whose workers have more threads than cores; empty where there are none.

    Example:
        >>> explain_overcommitment([HostCores(host="localhost", cores=2, busy={0: 1, 1: 2})])
        'the workers of localhost have 3 busy threads for 2 cores and slow each other down; open fewer, or set threads'
    """
    over = [host for host in hosts if host.taken > host.cores]
    if not over:
        return ""
    which = "; those of ".join(
        f"{host.host} have {host.taken} busy threads for {host.cores} core{'s' if host.cores > 1 else ''}"
        for host in over
    )
    return f"the workers of {which} and slow each other down; open fewer, or set threads"
