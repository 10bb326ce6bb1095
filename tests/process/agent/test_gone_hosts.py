"""Scripts over agents one of which is killed for good: their workers go on in another place, with the same bits."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.errors import UsageError, WorkerDied
from onebox.pool import spare_workers
from onebox.pool.discovery import LOCAL_HOST
from tests.kit.waiting import until
from tests.process.agent.hosts import Host, start
from tests.process.vgpu.rank_script import rank_script

pytestmark = pytest.mark.usefixtures("folder")

STEPS = 12


@pytest.fixture
def lab(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two agents of this test's own, with two cores each."""
    made = start(2)
    yield made[0], made[1]
    for host in made:
        host.kill()


def opened(lab: tuple[Host, Host], threads: int = 1) -> onebox.Pool:
    """Return a pool of one worker of each agent."""
    return onebox.open(",".join(f"{host.address}/cpu" for host in lab), threads=threads)


def two_stages(at: Callable[[int], object] = lambda step: None) -> list[Tensor]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3)).to("vgpu:0")
    second = nn.Linear(32, 4).to("vgpu:1")
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 1e-2)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(second(first(x.to("vgpu:0")).to("vgpu:1")), y.to("vgpu:1"))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        at(step)
    return [*losses, *(value.detach().cpu() for part in (first, second) for value in part.state_dict().values())]


def hosts_of(pool: onebox.Pool) -> list[str]:
    return [device.host for device in pool.devices]


@pytest.mark.feature("Virtual devices: A script survives the loss of a machine")
def test_a_worker_of_a_host_that_is_gone_goes_on_at_another_agent(
    lab: tuple[Host, Host], caplog: pytest.LogCaptureFixture
) -> None:
    gone, other = lab
    with opened(lab) as pool:
        before = pool.devices[0]
        expected = two_stages()
        found = two_stages(lambda step: step == 5 and gone.kill())
        assert all(map(torch.equal, found, expected))
        assert hosts_of(pool) == [other.address, other.address]
        assert pool.devices[0].memory_bytes == before.memory_bytes
        assert torch.cuda.is_available() or f"on {other.address}" in torch.vgpu.get_device_properties(0).name  # type: ignore[attr-defined]
        assert other.held() == 2
        (said,) = [record.message for record in caplog.records if "has taken its place" in record.message]
        assert f"; device 0 is cpu on {other.address} now, not cpu on {gone.address}; it may be slower" in said
        assert "rounding" not in said

        gone.start_again()
        with contextlib.suppress(ProcessLookupError):
            psutil.Process(pool.process_ids[0]).kill()
        assert all(map(torch.equal, two_stages(), expected))
        assert hosts_of(pool) == [other.address, other.address], "a host that is back is not used"
        assert (gone.held(), other.held()) == (0, 2)
    assert other.held() == 0


def test_without_room_at_agents_a_worker_goes_on_at_the_client(
    lab: tuple[Host, Host], caplog: pytest.LogCaptureFixture
) -> None:
    """And so does the next one."""
    gone, other = lab
    with opened(lab, threads=2) as pool:
        expected = two_stages()
        found = two_stages(lambda step: step == 5 and gone.kill())
        assert all(map(torch.equal, found, expected))
        assert hosts_of(pool) == [LOCAL_HOST, other.address]
        assert pool.devices[0].threads == 2
        own = psutil.Process(pool.process_ids[0])
        assert psutil.Process() in own.parents()
        other.kill()
        assert all(map(torch.equal, two_stages(), expected))
        assert hosts_of(pool) == [LOCAL_HOST, LOCAL_HOST]
        assert f"device 1 is cpu on {LOCAL_HOST} now, not cpu on {other.address}" in caplog.text
    until(lambda: not own.is_running())


@pytest.mark.long
def test_a_host_that_is_back_gets_its_lease_back(lab: tuple[Host, Host]) -> None:
    """Of an agent that was only stopped, with a worker that has gone on running."""
    gone, other = lab
    with opened(lab) as pool:
        expected, moved = two_stages(), [other.address, other.address]

        def at(step: int) -> None:
            if step == 5:
                gone.process.send_signal(signal.SIGSTOP)
                until(lambda: hosts_of(pool) == moved, turn=torch.ones(2, device="vgpu:0").tolist)

        assert all(map(torch.equal, two_stages(at), expected))
        gone.process.send_signal(signal.SIGCONT)
        until(lambda: gone.held() == 0)
        assert all(map(torch.equal, two_stages(), expected))
        assert hosts_of(pool) == moved


def test_with_no_other_place_the_script_gets_the_error(
    lab: tuple[Host, Host], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_workers(what: str, instead: str) -> None:
        raise UsageError(f"{what} on Linux alone")

    monkeypatch.setattr(spare_workers, "require_linux", no_workers)
    gone, other = lab
    with opened(lab, threads=2) as pool:
        with pytest.raises(WorkerDied, match=rf"worker 0 \(cpu on {gone.address}\)"):
            two_stages(lambda step: step == 5 and gone.kill())
        assert pool.gone == {0}
        (said,) = [record.message for record in caplog.records if "finds no other place" in record.message]
        assert said.startswith(f"device 0 (cpu on {gone.address}) finds no other place: the agent at {gone.address}")
        assert f"the agent at {other.address} refuses: what is asked for is leased" in said
        assert said.endswith("workers run on Linux alone")


def test_devices_do_not_move_under_a_trainer(lab: tuple[Host, Host]) -> None:
    gone, _ = lab
    model = nn.Linear(16, 4)
    with opened(lab) as pool:
        trainer = onebox.Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), pool=pool)
        before = pool.devices
        with pytest.raises(WorkerDied, match=rf"worker 0 \(cpu on {gone.address}\)"):
            two_stages(lambda step: step == 5 and gone.kill())
        assert pool.devices == before
        assert pool.gone == {0}
        trainer.close()


def ranks(lab: tuple[Host, Host], script: Path, at: Callable[[], object]) -> tuple[list[str], list[str], str]:
    """Run two ranks; what is to happen happens once rank 0 has come to its line. Return bits, places, and stderr."""
    command = [str(Path(sys.executable).parent / "onebox"), "run", "--threads", "1"]
    command += ["--pool", ",".join(f"{host.address}/cpu" for host in lab)]
    command += ["torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        bits, places = [], []
        for line in process.stdout:
            if line.startswith("STEP"):
                at()
                process.stdin.write("\n")
                process.stdin.flush()
            elif line.startswith("BITS"):
                bits.append(line)
            elif line.startswith("PLACE"):
                places.append(line)
        said = process.stderr.read()
        assert process.wait(60) == 0, said
    return bits, sorted(places), said


def test_all_ranks_go_on_when_a_host_is_gone(lab: tuple[Host, Host], tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(rank_script(6))
    gone, other = lab
    expected, _, _ = ranks(lab, script, lambda: None)
    found, places, said = ranks(lab, script, gone.kill)
    assert f"device 0 is cpu on {other.address} now, not cpu on {gone.address}" in said
    assert found == expected
    assert len(set(found)) == 1
    assert [line.rpartition(" on ")[2].strip() for line in places] == [f"{other.address})"] * 2
