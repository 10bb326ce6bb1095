"""The tables of a profile."""

from __future__ import annotations

import io
from itertools import permutations
from typing import Any

import pytest
from rich.console import Console

from onebox.cost import CEILING_BPS, DeviceProfile, PoolProfile, Speeds, near_groups
from onebox.report import profile_tables

CPU = Speeds(
    call_s=7e-6,
    operator_s=2.5e-6,
    matmul_flops=1.2345e11,
    convolution_flops=5e9,
    pointwise_bps=3.14159e10,
    norm_bps=1e8,
    host_copy_bps=2.5e10,
    bf16_flops=4.56e11,
)


def profile(count: int, **changed: Any) -> PoolProfile:
    """Return a profile of two hosts of CPUs, but for the last device, which is emulated and on neither."""
    devices = tuple(
        DeviceProfile(
            number=number,
            device="sim" if number == count - 1 else "cpu",
            name="[red]",
            host=f"[host{number // 2}]",
            threads=1,
            memory_bytes=1 << 30,
            speed=1.0,
            emulated=number == count - 1,
            speeds=Speeds(call_s=5e-6) if number == count - 1 else CPU,
        )
        for number in range(count)
    )
    latency: dict[int, dict[int, float]] = {number: {} for number in range(count)}
    bandwidth: dict[int, dict[int, float]] = {number: {} for number in range(count)}
    for a, b in permutations(range(count - 1), 2):
        latency[a][b] = 62.5e-6 if a // 2 == b // 2 else 12.3456e-3
        bandwidth[a][b] = CEILING_BPS if a // 2 == b // 2 else 1.25e8
    fields = {
        "devices": devices,
        "latency_s": latency,
        "bandwidth_bps": bandwidth,
        "emulated_links": (),
        "groups": near_groups(latency, bandwidth),
        "torch": "2.13.0",
        "measured_at": "2026-11-21T04:00:00+00:00",
        "links_at_s": {a: dict.fromkeys(row, 1.8e9) for a, row in latency.items()},
    }
    return PoolProfile(**(fields | changed))


def shown(found: PoolProfile, width: int = 160) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    for table in profile_tables(found):
        console.print(table)
    return stream.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return line.replace("│", " ").split()


def test_devices_and_their_figures() -> None:
    lines = shown(profile(5))
    assert ["0", "cpu", "123", "456", "5.00", "31.4", "0.1", "25.0", "2.50", "7.00"] in map(cells, lines)
    assert ["4", "sim*", "-", "-", "-", "-", "-", "-", "-", "5.00"] in map(cells, lines)
    assert "* emulated" in "\n".join(lines)
    assert any("GFLOP/s" in line and "µs" in line for line in lines)


def test_links_from_row_to_column() -> None:
    lines = list(map(cells, shown(profile(5))))
    assert ["1", "62.5", "-", "12,346", "12,346", "-"] in lines
    assert ["1", "∞", "-", "0.125", "0.125", "-"] in lines


def test_emulated_links_are_marked_in_their_direction() -> None:
    lines = list(map(cells, shown(profile(5, emulated_links=((1, 2),)))))
    assert ["1", "62.5", "-", "12,346*", "12,346", "-"] in lines
    assert ["2", "12,346", "12,346", "-", "62.5", "-"] in lines
    assert lines.count(["*", "emulated"]) == 3


def test_groups_with_the_hosts_that_are_known() -> None:
    text = "\n".join(shown(profile(5)))
    rows = [cells(line) for line in text.splitlines() if "[host" in line or "1 " in line]
    assert ["1", "0", "1", "[host0]"] in rows
    assert ["1", "2", "3", "[host1]"] in rows
    assert ["1", "4", "[host2]"] in rows


def test_one_device_has_no_links() -> None:
    text = "\n".join(shown(profile(1)))
    assert "latency" not in text and "near" not in text


@pytest.mark.parametrize("width", [40, 200])
def test_titles_are_whole_above_small_tables(width: int) -> None:
    assert "latency in µs, row to column" in shown(profile(3), width)
