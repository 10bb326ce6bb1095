"""The CPU side of workers: the instruction sets that they use, and the formats of maps."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import onebox
from onebox.worker.instructions import instructions
from tests.process.shelf import Shelf
from tests.process.stages import reference, run, staged
from tests.reference import assert_same


@pytest.fixture(scope="module")
def pool(pools: Shelf) -> onebox.Pool:
    """Two devices."""
    return pools(2)


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


@pytest.mark.parametrize(("model", "devices"), [("unet", (0, 1, 0)), ("cnn", (1,))])
def test_stages_with_channels_last_train_as_one_process(
    model: str, devices: tuple[int, ...], pool: onebox.Pool
) -> None:
    """All stages, then every second one, whose neighbours on the same device are as captured."""
    plain = staged(model, devices)
    sizes = (6, 6, 6)
    expected = reference(model, plain, sizes)
    for every in (1, 2):
        stages = tuple(replace(stage, channels_last=place % every == 0) for place, stage in enumerate(plain.stages))
        plan = replace(plain, stages=stages)
        assert_same(run(pool, model, plan, sizes), expected)
