"""The profile of a pool: throughput of its devices and of the links between them. Pure data for a small file."""

from __future__ import annotations

import math

from msgspec import Struct

FORMAT = 7
"""Version of the measurements; profiles of another version are measured anew."""

ACCELERATOR_BPS = 12e9
"""Assumed bytes per second between an accelerator and pinned memory of its host, without a measurement: PCIe 3 with 16
lanes."""


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objects in a profile."""


class Speeds(_Part, frozen=True):
    """Throughput of a device on a fixed set of kernels, while all devices of its host were at work.

    A device that computes nothing has ``None`` where there is no kernel; figures of a throttled device include the
    throttling. Kernels are larger on accelerators, and smaller where memory is short.

    Args:
        call_s: Seconds of a call of a stored program with one small operator.
        operator_s: Seconds of each of many small operators in one program.
        matmul_flops: Floating-point operations per second of a product of float32 matrices, 2 for each multiply-add.
        convolution_flops: The same of a 3 × 3 convolution of 64 feature maps to 64.
        pointwise_bps: Bytes per second, read and written, of a rectifier over 16 MiB, more than caches hold.
        norm_bps: The same of a batch normalisation, each byte counted as read once and written once.
        host_copy_bps: Bytes per second of a copy of 64 MiB between the device and the host's memory, either way.
        bf16_flops: As ``matmul_flops``, of bf16 matrices; ``None`` where the device computes with them one by one, as a
            CPU without such instructions does, a thousand times slower.
        bf16_coding_bps: Bytes per second of float32 gradients that are encoded as bf16, with the new residual.
        int8_coding_bps: The same as int8.
    """

    call_s: float
    operator_s: float | None = None
    matmul_flops: float | None = None
    convolution_flops: float | None = None
    pointwise_bps: float | None = None
    norm_bps: float | None = None
    host_copy_bps: float | None = None
    bf16_flops: float | None = None
    bf16_coding_bps: float | None = None
    int8_coding_bps: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: a speed is positive and finite")


class DeviceProfile(_Part, frozen=True):
    """One device.

    Args:
        number: Its number in the pool.
        device: Its name on its host: ``cpu``, ``cuda:k`` or ``sim``.
        name: Product name.
        host: The name of its host, if known.
        threads: Threads that its CPU operators may use.
        memory_bytes: Its memory, or the worker's quota where that is less.
        speed: Fraction of its full speed that a throttled CPU works at; of ``sim``, the divisor of costs.
        emulated: Whether times on it are artificial: it is throttled, or computes nothing.
        speeds: The measurements.
    """

    number: int
    device: str
    name: str
    host: str
    threads: int
    memory_bytes: int
    speed: float
    emulated: bool
    speeds: Speeds

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``sim``."""
        return self.device.split(":")[0]

    @property
    def type(self) -> str:
        """Key of like devices: of an accelerator its product name, of others their kind."""
        return self.name if self.kind == "cuda" else self.kind


class PoolProfile(_Part, frozen=True):
    """Measured devices and links of a pool.

    Args:
        devices: In the order of their numbers, from 0.
        latency_s: ``latency_s[source][target]``, seconds of an empty message from when it is sent until it can be used.
            No entry for a device itself, and where nothing can be sent (between ``sim`` and other devices).
        bandwidth_bps: ``bandwidth_bps[source][target]``, bytes per second of a long message; entries likewise. At most
            :data:`onebox.cost.CEILING_BPS`, which stands for a link without a visible limit.
        emulated_links: Source and target of each link that is emulated.
        groups: Devices that are nearer to each other than to others, one or two levels, smallest groups first: hosts
            and switches, as far as the speeds of the links show them; see :func:`onebox.cost.near_groups`.
        torch: Version of torch.
        measured_at: Time of the measurement of the devices, as an ISO 8601 time with its zone.
        links_at_s: ``links_at_s[source][target]``, time of the latest measurement of each link in POSIX seconds.
    """

    devices: tuple[DeviceProfile, ...]
    latency_s: dict[int, dict[int, float]]
    bandwidth_bps: dict[int, dict[int, float]]
    emulated_links: tuple[tuple[int, int], ...]
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    torch: str
    measured_at: str
    links_at_s: dict[int, dict[int, float]]

    def __post_init__(self) -> None:
        numbers = list(range(len(self.devices)))
        if [device.number for device in self.devices] != numbers or not numbers:
            raise ValueError("the devices of a profile are numbered from 0, at least one")
        for name, table in (
            ("latency_s", self.latency_s),
            ("bandwidth_bps", self.bandwidth_bps),
            ("links_at_s", self.links_at_s),
        ):
            if sorted(table) != numbers or any(
                not set(row) <= set(numbers) - {source} for source, row in table.items()
            ):
                raise ValueError(f"{name} has a row for each device, with entries for other devices")
            if any(not 0 <= value < math.inf for row in table.values() for value in row.values()):
                raise ValueError(f"{name} is finite and not negative")
        if any(
            not set(self.latency_s[source]) == set(self.bandwidth_bps[source]) == set(self.links_at_s[source])
            or not all(self.bandwidth_bps[source].values())
            for source in numbers
        ):
            raise ValueError("each link has a latency, a bandwidth that isn't 0, and a time of measurement")
        if not self.groups or any(sorted(n for group in level for n in group) != numbers for level in self.groups):
            raise ValueError("each level of groups has each device once")

    def host_names(self, group: tuple[int, ...]) -> tuple[str, ...]:
        """Return the known hosts of the devices of a group, each once."""
        return tuple(dict.fromkeys(self.devices[number].host for number in group))

    def link(self, source: int, target: int) -> tuple[float, float]:
        """Return latency and bandwidth of a link."""
        return self.latency_s[source][target], self.bandwidth_bps[source][target]

    def links_between_hosts(self) -> list[tuple[int, int]]:
        """Return source and target of each link whose ends are on hosts of different names."""
        hosts = [device.host for device in self.devices]
        return [(a, b) for a, row in self.links_at_s.items() for b in row if hosts[a] != hosts[b]]


def age_text(seconds: float) -> str:
    """Describe how long ago something was.

    Example:
        >>> [age_text(seconds) for seconds in (0.7, 40, 200, 5400, 200_000)]
        ['just now', '40 s ago', '3 min ago', '90 min ago', '2 days ago']
    """
    if seconds < 10:
        return "just now"
    for unit_s, name, most in ((1, "s", 120), (60, "min", 120), (3600, "hours", 48)):
        if seconds < most * unit_s:
            return f"{seconds / unit_s:.0f} {name} ago"
    return f"{seconds / 86400:.0f} days ago"


def link_age_line(profile: PoolProfile, now_s: float) -> str:
    """Return a line with the age of a profile's link measurements, the oldest of each kind; empty without links.

    Args:
        profile: The profile.
        now_s: The present time in POSIX seconds.
    """
    across = set(profile.links_between_hosts())
    every = [(a, b) for a, row in profile.links_at_s.items() for b in row]
    ages = []
    for kind, pairs in (("between hosts", across), ("within a host", set(every) - across)):
        if pairs:
            oldest_s = max(0.0, now_s - min(profile.links_at_s[a][b] for a, b in pairs))
            ages.append((f"{kind} " if across else "", age_text(oldest_s)))
    if not ages:
        return ""
    text = ", ".join(f"{kind}{age}" for kind, age in ages)
    return f"links measured {text}; --fresh measures all of them anew"
