"""Scripts that need more than their devices have: the rest goes to the host's memory, with the same results."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onebox
from onebox.errors import UsageError
from onebox.pool.streams import stream_recovery as recovery
from tests.process.cli.commands import command

MEMORY = 1 << 20
WIDTH = 64
BATCH = 300
"""More than twice as many rows as fit: the activations of a step take 2 MiB, weights and their states 0.5."""

STEPS = 4

Case = Callable[[str, str], list[Tensor]]
"""From the names of two devices to the results there."""


def blocks(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(count)]
    return nn.Sequential(*parts).double()


def rows(number: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def trained(model: nn.Module, run: Callable[[Tensor], Tensor], place: str) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run(rows(step).to(place)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [each.cpu() for each in (*losses, *model.state_dict().values())]


def one_device(first: str, _: str) -> list[Tensor]:
    model = blocks().to(first)
    return trained(model, model, first)


def two_stages(first: str, second: str) -> list[Tensor]:
    model = blocks()
    halves = model[:2].to(first), model[2:].to(second)
    return trained(model, lambda x: halves[1](halves[0](x).to(second)), first)


def data_parallel(first: str, second: str) -> list[Tensor]:
    model = blocks().to(first)
    return trained(model, model if first == "cpu" else nn.DataParallel(model, [first, second]), first)


def checkpointed(first: str, _: str) -> list[Tensor]:
    model = blocks().to(first)

    def run(x: Tensor) -> Tensor:
        for part in model:
            x = checkpoint(part, x, use_reentrant=False)
        return x

    return trained(model, run, first)


def views(first: str, _: str) -> list[Tensor]:
    """Tensors that share memory, of which some are written to while others are away."""
    kept = [rows(number).to(first) for number in range(6)]
    turned = [each.t()[3:, ::2] for each in kept]
    for step in range(STEPS):
        for number, view in enumerate(turned):
            view.add_(step).mul_(1 + number)
            kept[number - 1][:, 1] += kept[number][:, 4]
    return [each.cpu() for each in (*kept, *turned)]


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    with onebox.open("cpu*2", threads=1, memory=MEMORY, memory_policy="offload") as made:
        yield made


@pytest.mark.parametrize("case", [one_device, two_stages, data_parallel, checkpointed, views])
@pytest.mark.feature("Memory: Run a script that needs more than its devices have")
def test_what_does_not_fit_gives_the_same(pool: onebox.Pool, case: Case) -> None:
    found, expected = case("vgpu:0", "vgpu:1"), case("cpu", "cpu")
    assert torch.vgpu.max_memory_allocated("vgpu:0") <= MEMORY
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10)


def test_without_the_policy_it_is_an_error_that_names_it() -> None:
    with onebox.open("cpu*2", threads=1, memory=MEMORY) as pool:
        assert len(pool) == 2
        with pytest.raises(torch.OutOfMemoryError, match="onebox run --memory-policy offload uses the memory of its"):
            one_device("vgpu:0", "vgpu:1")


def test_an_operator_that_is_too_large_by_itself_is_an_error_and_the_script_goes_on(pool: onebox.Pool) -> None:
    kept = [rows(number).to("vgpu:0") for number in range(6)]
    with pytest.raises(torch.OutOfMemoryError, match="the tensors of one operator have to be there at once") as caught:
        torch.cat(kept).sum().item()
    assert "--memory-policy" not in str(caught.value), "it is on"
    assert torch.equal(kept[0].cpu(), rows(0)) and torch.equal(kept[5].cpu(), rows(5))


def test_what_is_away_is_brought_back_after_the_loss_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LEAST_S", 0.0)
    monkeypatch.setattr(recovery, "SHARE", 1e9)
    with onebox.open("cpu*2", threads=1, memory=MEMORY, memory_policy="offload", recover=True) as pool:
        kept = [rows(number).to("vgpu:0") for number in range(6)]
        for each in kept:
            each.mul_(2).sum().item()
        assert pool.script_recovery is not None and pool.script_recovery.snapshots > 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(pool.process_ids[0], signal.SIGKILL)
        found = one_device("vgpu:0", "vgpu:1")
        assert all(torch.equal(each.cpu(), 2 * rows(number)) for number, each in enumerate(kept))
        assert pool.script_recovery.recoveries == 1
    for mine, plain in zip(found, one_device("cpu", "cpu"), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("said", ["given", "environment"])
def test_another_policy_is_refused_before_workers_start(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if said == "environment":
        monkeypatch.setenv("ONEBOX_MEMORY_POLICY", "swap")
    with pytest.raises(UsageError, match="'swap': allowed are 'keep' and 'offload'"):
        onebox.open("cpu", memory_policy="swap" if said == "given" else None)


def test_a_device_without_a_memory_of_its_own_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with onebox.open("cpu", threads=1, memory_policy="offload"):
        assert "the memory of cpu on localhost is its host's" in caplog.text
    caplog.clear()
    with onebox.open("cpu", threads=1, memory=MEMORY, memory_policy="offload"):
        assert not caplog.text


RANKS = f"""
import os
import torch, torch.distributed as dist
from torch import nn
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear({WIDTH}, {WIDTH}), nn.GELU())]).cuda()
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    torch.manual_seed(step)
    loss = model(torch.randn(2 * {BATCH}, {WIDTH}, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
line = f"rank {{dist.get_rank()}} ended within {{torch.cuda.max_memory_allocated() <= {MEMORY}}}\\n"
os.write(1, line.encode())  # at once: lines of two ranks do not mix
dist.destroy_process_group()
"""


def test_ranks_have_the_policy_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    flags = ["run", "--pool", "cpu*2", "--threads", "1", "--memory", str(MEMORY)]
    ranks = ["torchrun", "--standalone", "--nproc-per-node", "2", "script.py"]
    assert command([*flags, *ranks], tmp_path).returncode != 0
    done = command([*flags, "--memory-policy", "offload", *ranks], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:2]) == ["rank 0 ended within True", "rank 1 ended within True"]


def test_a_script_may_keep_to_a_share_of_the_memory(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "whole = torch.cuda.get_device_properties(0).total_memory\n"
        "torch.cuda.set_per_process_memory_fraction(0.25, 0)\n"
        "assert abs(torch.cuda.get_per_process_memory_fraction(0) - 0.25) < 1e-6\n"
        "try:\n    torch.ones(whole // 3, dtype=torch.uint8, device='cuda').sum().item()\n"
        "except torch.cuda.OutOfMemoryError as error:\n    print(error)\n"
        "torch.cuda.set_per_process_memory_fraction(1.0)\n"
        "assert torch.cuda.get_per_process_memory_fraction() == 1\n"
        "torch.ones(whole // 3, dtype=torch.uint8, device='cuda').sum().item()\n"
        "try:\n    torch.cuda.set_per_process_memory_fraction(1.5)\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = command(["run", "--pool", "cpu", "--threads", "1", "--memory", "3MiB", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "the quota is 786432 bytes" in done.stdout
        and "Invalid fraction value: 1.5. Allowed range: 0 to 1" in done.stdout
    )
