"""Devices of one machine that are taken for those of several hosts, or for ones that are joined by slow links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from onebox.cost import AllReduceAlgorithm, TransferTime, store
from onebox.engine.compile import compiler
from onebox.pool import Pool
from onebox.pool.network.profile import profile_key

Members = tuple[int, ...]


def sum_in_hosts_first(monkeypatch: pytest.MonkeyPatch, *hosts: Members) -> None:
    """Let the devices of some hosts sum within each host first, as over slow links between these."""
    way = AllReduceAlgorithm(hosts, TransferTime(0.0, 0.0))
    every = sorted(device for host in hosts for device in host)

    def found(devices: Sequence[Any], links: Any, groups: Iterable[Members], **options: Any) -> dict[Members, Any]:
        return {members: (way,) for members in dict.fromkeys(groups) if sorted(members) == every}

    monkeypatch.setattr(compiler, "find_reductions", found)


def believe_slow(pool: Pool, *, latency_s: float, bandwidth_bps: float) -> None:
    """Measure a pool, and keep a profile of it in which all links are slow."""
    known = pool.profile()
    slow = replace(
        known,
        latency_s={a: dict.fromkeys(row, latency_s) for a, row in known.latency_s.items()},
        bandwidth_bps={a: dict.fromkeys(row, bandwidth_bps) for a, row in known.bandwidth_bps.items()},
    )
    assert store(profile_key(pool.devices, pool.links, plain_links=pool.plain_links), slow)
