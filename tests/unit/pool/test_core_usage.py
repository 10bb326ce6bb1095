"""Cores are a budget: each host's, what its workers keep busy, and what is left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.pool import DeviceInfo, discovery
from onebox.pool.core_usage import HostCores, explain_overcommitment, host_cores
from onebox.pool.discovery import requested_devices


def device(number: int, host: str, name: str, threads: int, cores: int = 8) -> DeviceInfo:
    return DeviceInfo(number=number, host=host, device=name, name="", threads=threads, memory_bytes=1, cores=cores)


def test_a_cpu_is_busy_with_all_its_threads_a_gpu_with_one_and_what_sleeps_with_none() -> None:
    devices = [
        device(0, "localhost", "cuda:0", 4),
        device(1, "localhost", "cpu", 5),
        device(2, "far", "cpu", 3, cores=2),
        device(3, "far", "sim", 1, cores=2),
    ]
    here, far = host_cores(devices, "localhost", 8)
    assert here == HostCores(host="localhost", cores=8, busy={0: 1, 1: 5})
    assert (here.taken, here.free) == (6, 2)
    assert far == HostCores(host="far", cores=2, busy={2: 3, 3: 0})
    assert (far.taken, far.free) == (3, 0)


def test_a_client_without_workers_has_its_cores_for_itself() -> None:
    here, far = host_cores([device(0, "far", "cpu", 2)], "localhost", 3)
    assert (here.host, here.cores, here.free) == ("localhost", 3, 3)
    assert far.host == "far"


def test_one_line_says_where_workers_are_crowded() -> None:
    fine = HostCores(host="a", cores=4, busy={0: 4})
    one, other = HostCores(host="b", cores=1, busy={1: 2}), HostCores(host="c", cores=2, busy={2: 2, 3: 2})
    assert explain_overcommitment([fine]) == ""
    said = explain_overcommitment([fine, one, other])
    assert said == (
        "the workers of b have 2 busy threads for 1 core; those of c have 4 busy threads for 2 cores and slow each "
        "other down; open fewer, or set threads"
    )


@given(cores=st.integers(1, 64), cards=st.integers(0, 8), processors=st.integers(1, 8))
def test_shares_of_cores_leave_one_to_each_gpu_and_crowd_nobody(cores: int, cards: int, processors: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: cards > 0)
        patch.setattr("torch.cuda.device_count", lambda: cards)
        patch.setattr(discovery, "cores", lambda: cores)
        requests = requested_devices(f"cuda,cpu*{processors}" if cards else f"cpu*{processors}")
    devices: list[Any] = [device(n, "localhost", r.device, r.threads, cores) for n, r in enumerate(requests)]
    (here,) = host_cores(devices, "localhost", cores)
    assert all(threads >= 1 for threads in here.busy.values())
    assert here.taken <= max(cores, cards + processors)
    assert here.free < max(1, processors), "what is left does not divide"
