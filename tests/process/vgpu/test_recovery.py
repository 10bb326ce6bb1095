"""Scripts on virtual devices whose workers are killed at a line of theirs: the same bits as without that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.errors import PoolError, UsageError, WorkerDied
from onebox.pool.streams import stream_recovery as recovery
from tests.kit.waiting import until
from tests.process.vgpu.rank_script import rank_script

STEPS = 12


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a snapshot whenever one can be taken."""
    monkeypatch.setattr(recovery, "LEAST_S", 0.0)
    monkeypatch.setattr(recovery, "SHARE", 1e9)


@pytest.fixture
def pool() -> Iterator[onebox.Pool]:
    with onebox.open("cpu*2", threads=1, recover=True) as made:
        yield made


def kill(pool: onebox.Pool, worker: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the last one's, which is being replaced
        os.kill(pool.process_ids[worker], signal.SIGKILL)


def batches(steps: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        yield step, torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def two_stages(at: Callable[[int], None]) -> list[Tensor]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3)).to("vgpu:0")
    second = nn.Linear(32, 4).to("vgpu:1")
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 1e-2)
    losses = []
    for step, x, y in batches(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(second(first(x.to("vgpu:0")).to("vgpu:1")), y.to("vgpu:1"))
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            losses.append(loss.detach().cpu())
        at(step)
    return [*losses, *(value.detach().cpu() for part in (first, second) for value in part.state_dict().values())]


def data_parallel(at: Callable[[int], None]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.DataParallel(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, 4)).to("vgpu:0"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step, x, y in batches(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to("vgpu:0")), y.to("vgpu:0")).backward()
        optimizer.step()
        at(step)
    return [parameter.detach().cpu() for parameter in model.parameters()]


def odd_tensors(at: Callable[[int], None]) -> list[Tensor]:
    """Views, other layouts and types, random numbers of own generators, and what is freed meanwhile."""
    torch.manual_seed(0)
    generator = torch.Generator("vgpu:0").manual_seed(5)
    base = torch.arange(24.0, device="vgpu:0").reshape(2, 3, 4)
    turned, part = base.permute(2, 0, 1), base[:, 1:]
    wide = torch.empty(2, 3, 4, 5, device="vgpu:1").to(memory_format=torch.channels_last).fill_(1)
    numbers = torch.view_as_complex(torch.ones(3, 2, device="vgpu:1")).conj()
    whole = torch.tensor([1, -2], dtype=torch.int8, device="vgpu:1")
    empty = torch.empty(0, 3, device="vgpu:0")
    torch.set_default_dtype(torch.float64)
    try:
        for step in range(STEPS):
            part += torch.rand(2, 2, 4, generator=generator, device="vgpu:0", dtype=torch.float32)
            turned[0] *= 1.5
            wide[:, 1] += torch.randn(2, 4, 5, device="vgpu:1")
            numbers = numbers * (1 + 0.5j)
            whole = whole + 1
            grown = torch.cat([base.flatten(), torch.ones(step, device="vgpu:0")])
            at(step)
        found = [base, turned, part, wide, numbers, whole, empty, grown]
        return [each.cpu() for each in found]
    finally:
        torch.set_default_dtype(torch.float32)


def errors_on_the_way(at: Callable[[int], None]) -> list[Tensor]:
    """Operators that fail, of which the script is told, and that it goes on after."""
    total = torch.zeros(3, device="vgpu:0")
    for step in range(STEPS):
        with pytest.raises(RuntimeError, match="out of bounds"):
            torch.ones(3, device="vgpu:0")[torch.tensor([7], device="vgpu:0")].cpu()
        total += step
        total.cpu()
        at(step)
    return [total.cpu()]


def compiled(at: Callable[[int], None]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to("vgpu:0")
    run = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step, x, y in batches(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(x.to("vgpu:0")), y.to("vgpu:0")).backward()
        optimizer.step()
        at(step)
    return [parameter.detach().cpu() for parameter in model.parameters()]


SCRIPTS = [two_stages, data_parallel, odd_tensors, errors_on_the_way, pytest.param(compiled, marks=pytest.mark.long)]


@pytest.mark.feature("Virtual devices: A script survives the loss of its workers")
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # PyTorch's own, from loading Inductor
@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_whose_workers_are_killed_has_the_same_bits(
    script: Callable[[Callable[[int], None]], list[Tensor]],
    snapshots: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not snapshots:
        monkeypatch.setattr(recovery, "LEAST_S", 1e9)
    with onebox.open("cpu*2", threads=1, recover=True) as pool:
        expected = script(lambda _: None)
        found = script(lambda step: kill(pool, step % 2) if step in (3, 6, 11) else None)
        recovered = pool.script_recovery
        assert recovered is not None
        assert recovered.recoveries >= 1
        assert bool(recovered.snapshots) == snapshots
        assert all(map(torch.equal, found, expected))


def test_all_workers_may_be_lost_at_once_and_again(pool: onebox.Pool) -> None:
    def at(step: int) -> None:
        if step in (2, 3, 8):
            kill(pool, 0)
            kill(pool, 1)

    assert all(map(torch.equal, two_stages(at), two_stages(lambda _: None)))


def test_a_worker_may_be_lost_while_nothing_runs(pool: onebox.Pool) -> None:
    held = torch.arange(5.0, device="vgpu:1")
    assert held[2].item() == 2
    process = psutil.Process(pool.process_ids[1])
    kill(pool, 1)
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert (held * 2).tolist() == [0, 2, 4, 6, 8]


def test_uploads_beyond_the_budget_go_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LEAST_S", 1e9)
    with onebox.open("cpu", threads=1, recover=True, recover_memory="1MiB") as pool:
        recovered = pool.script_recovery
        assert recovered is not None
        parts = [torch.full((100_000,), float(k)).to("vgpu:0") for k in range(8)]
        kill(pool, 0)
        assert [part[-1].item() for part in parts] == [*range(8)]
        assert recovered.recoveries == 1


def test_a_snapshot_beyond_the_budget_goes_to_a_file() -> None:
    with onebox.open("cpu", threads=1, recover=True, recover_memory="1MiB") as pool:
        recovered = pool.script_recovery
        assert recovered is not None
        held = torch.arange(500_000.0).to("vgpu:0")
        before = recovered.snapshots
        until(lambda: recovered.snapshots > before, turn=held[:2].tolist)
        held += 1
        kill(pool, 0)
        assert torch.equal(held.cpu(), torch.arange(500_000.0) + 1)
        assert recovered.recoveries >= 1
        assert recovered.kept_bytes > 2_000_000


def test_without_room_the_recovery_pauses_and_the_loss_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with onebox.open("cpu", threads=1, recover=True, recover_memory="64KiB") as pool:
        held = torch.ones(1_000_000).to("vgpu:0")
        assert held.sum().item() == 1_000_000
        assert [record.message for record in caplog.records if "recovery pauses" in record.message]
        kill(pool, 0)
        with pytest.raises(WorkerDied):
            held.sum().item()
        with pytest.raises(WorkerDied):
            torch.ones(1, device="vgpu:0").item()


def test_it_goes_on_once_there_is_room_again(caplog: pytest.LogCaptureFixture) -> None:
    with onebox.open("cpu", threads=1, recover=True, recover_memory="64KiB") as pool:
        held, kept = torch.ones(1_000_000).to("vgpu:0"), torch.arange(4.0, device="vgpu:0")
        held.sum().item()
        del held

        def again() -> bool:
            (kept + 0).sum().item()
            return any("survives the loss of a worker again" in record.message for record in caplog.records)

        until(again)
        kill(pool, 0)
        assert kept.tolist() == [0, 1, 2, 3]


def test_a_script_each_message_of_which_fails_has_its_snapshots(pool: onebox.Pool) -> None:
    """So that the log does not grow."""
    recovered = pool.script_recovery
    assert recovered is not None
    held, at = torch.arange(3.0, device="vgpu:0"), torch.tensor([7], device="vgpu:0")

    def fail() -> None:
        with pytest.raises(RuntimeError, match="out of bounds"):
            held[at].cpu()

    fail()
    before = recovered.snapshots
    until(lambda: recovered.snapshots > before + 3, turn=fail)
    kill(pool, 0)
    fail()
    assert held.tolist() == [0, 1, 2]


@pytest.mark.parametrize("likeness", ["other", "rounding"])
def test_values_that_come_out_differently_are_an_error_unless_by_rounding(
    likeness: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery, "LEAST_S", 1e9)
    monkeypatch.setattr(recovery.ReadValues, "likeness", lambda *_, **__: likeness)
    with onebox.open("cpu", threads=1, recover=True) as pool:
        assert torch.ones(2, device="vgpu:0").sum().item() == 2
        assert torch.ones(3, device="vgpu:0").sum().item() == 3
        kill(pool, 0)
        if likeness == "rounding":
            assert torch.ones(4, device="vgpu:0").sum().item() == 4
            assert sum("but for rounding" in record.message for record in caplog.records) == 1
            return
        with pytest.raises(PoolError, match="came out differently when it was run again"):
            until(lambda: torch.ones(2, device="vgpu:0").sum().item() != 2)


@pytest.mark.parametrize("snapshots", [True, False])
def test_on_a_device_of_another_kind_a_script_goes_on_with_other_bits(
    snapshots: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker of a GPU, for all that the pool knows, is replaced by one of a CPU."""
    if not snapshots:
        monkeypatch.setattr(recovery, "LEAST_S", 1e9)
    with onebox.open("cpu*2", threads=1, recover=True) as pool:
        recovered = pool.script_recovery
        assert recovered is not None

        def at(step: int) -> None:
            if step == 5:
                before, some = recovered.snapshots, torch.ones(2, device="vgpu:0")
                until(lambda: not snapshots or recovered.snapshots > before, turn=some.tolist)
                kill(pool, 0)

        expected = data_parallel(lambda _: None)
        pool.devices = (replace(pool.devices[0], device="cuda:0"), pool.devices[1])
        found = data_parallel(at)
        assert recovered.recoveries >= 1
        assert [each.shape for each in found] == [each.shape for each in expected]
        assert all(torch.isfinite(each).all() for each in found)
        assert not snapshots or not all(map(torch.equal, found, expected)), "the state had to become a seed"
        (said,) = [record.message for record in caplog.records if "has taken its place" in record.message]
        assert "; device 0 is cpu on localhost now, not cuda:0 on localhost; it may be slower there" in said
        assert "results may differ by rounding; random numbers are others" in said
        before = [each.clone() for each in data_parallel(lambda _: None)]
        assert all(map(torch.equal, data_parallel(lambda step: kill(pool, 0) if step == 5 else None), before))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recover": "yes"}, "recover='yes'"),
        ({"recover": False, "recover_memory": "1GiB"}, "recover_memory='1GiB'"),
        ({"recover": True, "recover_memory": ["1GiB"]}, r"recover_memory=\['1GiB'\]"),
        ({"recover": True, "recover_memory": "much"}, "recover_memory much"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        onebox.open("cpu", **options)  # type: ignore[arg-type]


def test_the_environment_says_whether_scripts_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    def whether(**options: bool) -> bool:
        return bool(recovery.recovery_budget(options.get("recover"), None, remote=options.get("remote", False)))

    assert (whether(), whether(remote=True), whether(recover=True)) == (False, True, True)
    monkeypatch.setenv("ONEBOX_RECOVER", "1")
    assert (whether(), whether(recover=False)) == (True, False)
    monkeypatch.setenv("ONEBOX_RECOVER", "0")
    assert (whether(remote=True), whether(recover=True)) == (False, True)
    monkeypatch.setenv("ONEBOX_RECOVER", "no")
    with pytest.raises(UsageError, match="ONEBOX_RECOVER=no"):
        whether()


def ranks(script: Path, victims: tuple[int, ...]) -> tuple[list[str], str]:
    """Run two ranks; a worker is killed each time that rank 0 has come to its line."""
    command = [str(Path(sys.executable).parent / "onebox"), "run", "--recover", "--pool", "cpu*2", "--threads", "1"]
    command += ["torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        found, left = [], [*victims]
        for line in process.stdout:
            if line.startswith("STEP"):
                workers = [each for each in psutil.Process(process.pid).children(recursive=True) if _is_worker(each)]
                if left:
                    sorted(workers, key=lambda each: each.pid)[left.pop()].kill()
                process.stdin.write("\n")
                process.stdin.flush()
            elif line.startswith("BITS"):
                found.append(line)
        said = process.stderr.read()
        assert process.wait(60) == 0, said
    return found, said


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("onebox-worker") and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_whose_workers_are_killed_have_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(rank_script(4, 8))
    expected, _ = ranks(script, ())
    found, said = ranks(script, (0, 1))
    assert "has taken its place" in said
    assert found == expected
    assert len(set(found)) == 1


@pytest.mark.long
def test_a_trainer_on_such_a_pool_recovers_by_itself(pool: onebox.Pool) -> None:
    held = torch.arange(3.0, device="vgpu:0") + 1
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    trainer = onebox.Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), pool=pool, recovery=onebox.Recovery()
    )
    losses = []
    for step, x, y in batches(STEPS):
        losses.append(float(trainer.step(x, y)))
        if step == 4:
            kill(pool, 1)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    trainer.close()
    assert held.tolist() == [1, 2, 3]
