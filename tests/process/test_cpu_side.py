"""The CPU side of workers: the instruction sets that they use."""

from __future__ import annotations

import pytest

import onebox
from onebox.worker.instructions import instructions


def test_workers_use_the_instruction_sets_that_a_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that limit libraries reach workers, which say what they use; a device without values says none."""
    own = instructions()  # which this process's libraries settle with their first operator
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    with onebox.open("cpu,sim") as pool:
        cpu, sim = (device.instructions for device in pool.devices)
    assert (cpu.aten, cpu.onednn) == ("DEFAULT", "SSE4.1")
    assert cpu.hardware == own.hardware
    assert (sim.aten, sim.onednn, sim.hardware) == ("", "", ())
