"""Pools over agents: each agent is a process, its host is this one."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import onebox
from onebox.errors import PoolError, UsageError, WorkerDied, WorkerError, WorkerHung
from onebox.plan import Plan
from onebox.pool import Pool, open_pool
from onebox.wire.protocol.instructions import Ask
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.reference import Outcome, assert_same, train
from tests.kit.stages import tensors_of
from tests.kit.waiting import until
from tests.process.agent.hosts import NOTICED_S, Host, start
from tests.process.cli.commands import WITHIN_S, read_until, running

pytestmark = pytest.mark.usefixtures("folder")

STEPS = 20


@pytest.fixture(scope="module")
def pool(hosts: tuple[Host, Host]) -> Iterator[Pool]:
    """A pool of one worker of each agent, for tests that leave it whole."""
    with onebox.open(f"{hosts[0].address}/cpu,{hosts[1].address}/cpu", threads=1) as opened:
        yield opened


@pytest.mark.feature("Pools: Use devices of several hosts as one pool")
def test_devices_of_several_hosts_have_one_numbering(hosts: tuple[Host, Host], pool: Pool) -> None:
    assert [(device.number, device.host, device.device, device.threads) for device in pool.devices] == [
        (number, host.address, "cpu", 1) for number, host in enumerate(hosts)
    ]
    assert {device.address for device in pool.devices} == {"127.0.0.1"}
    assert [host.held() for host in hosts] == [1, 1]


@pytest.mark.feature("Pools: Use devices of several hosts as one pool")
@pytest.mark.feature("Data parallel: Average gradients among workers or at the client")
@pytest.mark.parametrize("sync", ["workers", "client"])
def test_training_over_two_agents_gives_the_result_of_one_process(pool: Pool, sync: str) -> None:
    case = CASES["mlp"]
    batches = case.batches([8] * STEPS)
    here = case.model()
    plan = Plan.data_parallel(range(2), (1.0, 1.0))
    expected = train(
        here,
        case.loss,
        OPTIMIZERS["adamw"](here),
        batches,
        lambda size: [part.size for part in plan.micro_batches(size)],
    )
    model = case.model()
    with onebox.Trainer(
        model,
        case.loss,
        OPTIMIZERS["adamw"](model),
        pool=pool,
        plan=onebox.DataParallel(sync=sync),
        engine=onebox.Engine(check_every=1),
    ) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches]
        tensors = tensors_of(trainer)
    assert_same(Outcome(losses=losses, norms=[], tensors=tensors), expected)


def test_a_model_that_fits_no_device_of_other_hosts_is_planned_by_estimated_times(
    hosts: tuple[Host, Host], caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be measured there as a whole, and lies on both in the end."""
    torch.manual_seed(0)
    widths = [512, 520, 504, 528, 496, 536, 488, 544, 512]  # equal layers would be measured by one of them
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(widths)]  # of 2 MiB, with gradients and momenta 8
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(4, 512, dtype=torch.float64), torch.randn(4, 512, dtype=torch.float64)
    loss = torch.nn.functional.mse_loss
    addresses = ",".join(f"{host.address}/cpu" for host in hosts)
    with (
        onebox.open(addresses, threads=1, memory="48MiB") as pool,
        onebox.Trainer(model, loss, optimizer, pool=pool, plan="auto") as trainer,
    ):
        first, second = float(trainer.step(x, y)), float(trainer.step(x, y))
        assert trainer.plan is not None
        assert set(trainer.plan.devices) == {0, 1}
        assert len(trainer.plan.stages) > 1
    assert second < first
    assert "the model fits no single device, where it would be measured: its times are estimated for" in caplog.text


def test_tensors_go_from_host_to_host(pool: Pool) -> None:
    x_BD = torch.arange(6.0, dtype=torch.float64, device="vgpu:0").reshape(2, 3)
    y_BD = (x_BD.to("vgpu:1") + 1).to("vgpu:0") * x_BD
    assert y_BD.cpu().tolist() == [[0, 2, 6], [12, 20, 30]]


@pytest.mark.feature("Virtual devices: A script survives the loss of its workers")
def test_a_script_over_two_agents_survives_their_workers_unasked(hosts: tuple[Host, Host]) -> None:
    with onebox.open(f"{hosts[0].address}/cpu,{hosts[1].address}/cpu", threads=1) as own:
        total = torch.arange(6.0, device="vgpu:0")
        for step in range(6):
            total = (total.to("vgpu:1") * 2 + step).to("vgpu:0")
            if step in (2, 4):
                os.kill(own.process_ids[step // 4], signal.SIGKILL)
        assert total.tolist() == [64.0 * k + 57 for k in range(6)]
        assert own.script_recovery is not None
        assert own.script_recovery.recoveries >= 1


def test_workers_of_two_agents_share_no_memory_though_they_are_on_one_machine(pool: Pool) -> None:
    torch.ones(256, 256, device="vgpu:0").to("vgpu:1").sum().item()
    for process in pool.process_ids[:2]:
        assert "memfd:onebox" not in Path(f"/proc/{process}/maps").read_text()


@pytest.mark.feature("Pools: Use devices of several hosts as one pool")
def test_workers_of_this_machine_beside_those_of_an_agent(hosts: tuple[Host, Host], folder: Path) -> None:
    file = folder / "lab.toml"
    file.write_text(
        f'[[hosts]]\naddress = "{hosts[1].address}"\ndevices = "cpu"\nthreads = 1\nmemory = "64MiB"\n'
        '[[hosts]]\naddress = "local"\ndevices = "cpu"\nthreads = 1\n'
    )
    with onebox.open(str(file)) as mixed:
        assert [device.host for device in mixed.devices] == [hosts[1].address, "localhost"]
        assert mixed.devices[0].memory_bytes == 64 << 20
        assert (torch.ones(3, device="vgpu:0").to("vgpu:1") * 3).to("vgpu:0").sum().item() == 9


def test_nothing_is_leased_where_a_pool_cannot_be_opened(hosts: tuple[Host, Host]) -> None:
    before = [host.held() for host in hosts]
    with pytest.raises(UsageError, match=rf"{hosts[0].address} has no cuda:0 to lease; it offers cpu"):
        open_pool(f"{hosts[1].address}/cpu,{hosts[0].address}/cuda:0")
    assert [host.held() for host in hosts] == before


@pytest.mark.feature("Agents: Wait for devices in a queue")
def test_who_waits_is_told_the_place_and_gets_the_devices_when_they_are_free(
    hosts: tuple[Host, Host], caplog: pytest.LogCaptureFixture
) -> None:
    spec = f"{hosts[0].address}/cpu"
    held = hosts[0].held()
    first = open_pool(spec, threads=2 - held)
    opened: list[Pool] = []
    with caplog.at_level(logging.WARNING, "onebox.pool"):
        with pytest.raises(PoolError, match="refuses: what is asked for is leased: ana"):
            open_pool(spec, threads=1, wait=False)
        waiting = threading.Thread(target=lambda: opened.append(open_pool(spec, threads=1)))
        waiting.start()
        try:
            until(lambda: bool(caplog.records))
        finally:
            first.close()
            waiting.join(30)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"waiting for {hosts[0].address}: place 1 in its queue, behind ana, lacking cores (0 of "
    )
    assert hosts[0].held() == held + 1
    opened[0].close()
    assert hosts[0].held() == held


def failure(pool: Pool, worker: int, kind: type[WorkerError] = WorkerDied) -> Any:
    """Ask a worker until that fails; return the error."""
    end_s = time.monotonic() + NOTICED_S
    with pytest.raises(kind) as raised:
        while time.monotonic() < end_s:
            pool.post(worker, [Ask("memory")], answer=True).result(NOTICED_S)
            time.sleep(0.05)
    return raised.value


def test_a_worker_that_is_killed_is_named_and_can_be_replaced(hosts: tuple[Host, Host]) -> None:
    with open_pool(f"{hosts[1].address}/cpu", threads=1) as opened:
        (number,) = opened.process_ids
        os.kill(number, signal.SIGKILL)
        error = failure(opened, 0)
        assert (error.worker, error.host, error.exit_status) == (0, hosts[1].address, -signal.SIGKILL)
        assert f"worker 0 (cpu on {hosts[1].address}), process {number}, was ended by signal 9" in str(error)
        healing = opened.recover_workers()
        assert (healing.replaced, healing.gone) == ((0,), ())
        assert opened.process_ids != (number,)
        assert opened.devices[0].host == hosts[1].address
        opened.post(0, [Ask("memory")], answer=True).result(NOTICED_S)


def test_a_device_that_is_excluded_is_given_up_and_taken_back_later(hosts: tuple[Host, Host]) -> None:
    """Rather than replaced at once, as a lost one is whose agent can be reached."""
    spec = f"{hosts[0].address}/cpu,{hosts[1].address}/cpu"
    with open_pool(spec, threads=1) as opened:
        processes = opened.process_ids
        opened.exclude([1])
        healing = opened.recover_workers()
        assert (healing.replaced, healing.gone, opened.gone) == ((), (1,), {1})
        assert "was back, and was lost again" in opened.why_gone(1)
        opened.exclude([1])
        assert not opened.broken, "it has gone already"
        opened.post(0, [Ask("memory")], answer=True).result(NOTICED_S)
        until(lambda: opened.returning)
        assert opened.readmit().keys() == {1} and not opened.gone
        assert opened.process_ids[0] == processes[0] and opened.process_ids[1] != processes[1]
        for worker in range(2):
            opened.post(worker, [Ask("memory")], answer=True).result(NOTICED_S)


def test_a_worker_that_hangs_is_noticed_in_time_however_long_a_cut_may_last(hosts: tuple[Host, Host]) -> None:
    with open_pool(f"{hosts[1].address}/cpu", threads=1, grace_s=60.0) as opened:
        (number,) = opened.process_ids
        os.kill(number, signal.SIGSTOP)
        error = failure(opened, 0, WorkerHung)
        assert "while its host could be heard" in str(error)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_ends_or_hangs_is_noticed(folder: Path, how: signal.Signals) -> None:
    with contextlib.ExitStack() as stack:
        (host,) = start(1)
        stack.callback(host.kill)
        opened = stack.enter_context(open_pool(f"{host.address}/cpu", threads=1))
        host.process.send_signal(how)
        error = failure(opened, 0)
        assert (error.worker, error.host) == (0, host.address)
        assert f"worker 0 (cpu on {host.address})" in str(error)
        opened.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_client_that_is_told_to_end_gives_its_leases_back_at_once(
    hosts: tuple[Host, Host], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Rather than when it has been silent for half a minute."""
    held = hosts[0].held()
    line = ["train", "--model", "mlp", "--epochs", "100000", "--every", "1", "--run", "run"]
    with running([*line, "--pool", f"{hosts[0].address}/cpu", "--threads", "1"], tmp_path) as process:
        read_until(process, r"step 3/")
        assert hosts[0].held() == held + 1
        process.send_signal(number)
        _, said = process.communicate(timeout=WITHIN_S)
        assert hosts[0].held() == held, "given back before the process ended"
    assert process.returncode == status
    assert f"onebox: ended by {number.name} after step" in said and "go on with: onebox train --resume run" in said
