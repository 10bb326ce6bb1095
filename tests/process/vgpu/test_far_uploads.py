"""Uploads to a worker that is far: compressed where that pays, and ahead of what the worker does."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onebox
from onebox.pool.sharing import AttachedPool, PoolServer
from onebox.pool.streams import stream_recovery
from onebox.vgpu import attach
from onebox.vgpu.runtime import upload_packing
from onebox.vgpu.runtime.context import current_context
from tests.kit.slow_channel import slow_channel

HERE = "vgpu:0"

LINK_BPS = 4e6

Open = Callable[..., onebox.Pool]


@pytest.fixture(scope="module", autouse=True)
def slow() -> Iterator[None]:
    with slow_channel(latency_s=0.01, bandwidth_bps=LINK_BPS):
        yield


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the workers for those of another machine, whose links are measured soon."""
    monkeypatch.setattr(onebox.Pool, "near", lambda pool, worker: False)
    monkeypatch.setattr(upload_packing, "MEASURED_BYTES", 1 << 12)


@pytest.fixture
def opened() -> Iterator[Open]:
    pools: list[onebox.Pool] = []

    def start(**options: object) -> onebox.Pool:
        pools.append(onebox.open("cpu", threads=1, **options))  # type: ignore[arg-type]
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def dark_images(count: int, seed: int = 0) -> Tensor:
    """Return images [B, 1, 28, 28] of which most pixels are dark, like those of digits."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images.masked_fill(torch.rand(images.shape, generator=generator) < 0.8, 0)


def noise(count: int) -> Tensor:
    return torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8)


def measured(pool: onebox.Pool) -> int:
    """Upload enough for the link to be measured, and return the bytes that were sent so far."""
    (queue,) = current_context().queues
    torch.zeros(2000).to(HERE)
    queue.synchronize()
    return pool.sent_bytes[0]


def sent_bytes(pool: onebox.Pool, *tensors: Tensor) -> int:
    """Upload tensors, of which all have to arrive as they are, and return the bytes that were sent for them."""
    (queue,) = current_context().queues
    before = measured(pool)
    found = [tensor.to(HERE) for tensor in tensors]
    queue.synchronize()
    sent = pool.sent_bytes[0] - before
    assert all(torch.equal(one.cpu(), tensor) for one, tensor in zip(found, tensors, strict=True))
    return sent


@pytest.mark.feature("Virtual devices: Compress uploads to far workers without loss")
def test_uploads_to_a_far_worker_are_compressed_where_they_shrink(far: None, opened: Open) -> None:
    pool, images = opened(), dark_images(64)
    assert sent_bytes(pool, images) < 0.7 * images.nbytes
    floats, turned = images.float() / 255, images.permute(3, 2, 0, 1)
    assert sent_bytes(pool, floats) < 0.4 * floats.nbytes
    assert sent_bytes(pool, turned, images.expand(2, 64, 1, 28, 28)) < 3 * 0.7 * images.nbytes
    target = torch.zeros(64, 1, 28, 28, dtype=torch.uint8, device=HERE)
    before = pool.sent_bytes[0]
    target.copy_(images)
    assert torch.equal(target.cpu(), images)
    assert pool.sent_bytes[0] - before < 0.7 * images.nbytes


def test_what_does_not_shrink_is_sent_as_it_is(far: None, opened: Open) -> None:
    pool, few = opened(), torch.zeros(100)
    for tensor in (noise(64), torch.empty(0), few):
        assert sent_bytes(pool, tensor) == tensor.nbytes


def test_uploads_to_workers_of_this_machine_are_not_compressed(opened: Open) -> None:
    pool, images = opened(), torch.zeros(2 << 20, dtype=torch.uint8)
    assert sent_bytes(pool, images, images) == 2 * images.nbytes


def test_the_first_uploads_are_not_compressed(far: None, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_packing, "MEASURED_BYTES", 1 << 20)
    pool, images = opened(), dark_images(64)
    assert sent_bytes(pool, images, images) == 2 * images.nbytes


def test_a_worker_without_the_codecs_is_sent_what_it_can_read(far: None, opened: Open) -> None:
    pool, images = opened(virtual_devices=False), dark_images(64)
    pool.devices = tuple(dataclasses.replace(device, codecs=()) for device in pool.devices)
    attach(pool)
    assert sent_bytes(pool, images) == images.nbytes


def test_a_process_that_shares_the_pool_compresses_its_uploads(far: None, opened: Open) -> None:
    pool, images = opened(virtual_devices=False), dark_images(64)
    server = PoolServer(pool)
    try:
        child = AttachedPool(server.address)
        try:
            attach(child)
            assert sent_bytes(pool, images) < 0.7 * images.nbytes
        finally:
            child.close()
    finally:
        server.close()


def train(opened: Open, *, kill: int = -1) -> tuple[list[Tensor], int]:
    """Train for some steps; return the weights, and the bytes that were sent.

    Args:
        opened: Opens the pool.
        kill: The step after which the worker is killed.
    """
    pool = opened(recover=True)
    before = measured(pool)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(HERE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(8):
        images, labels = dark_images(32, seed=step).to(HERE), torch.arange(32).remainder(10).to(HERE)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images.float() / 255), labels).backward()
        optimizer.step()
        if step == kill:
            os.kill(pool.process_ids[0], signal.SIGKILL)
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    recovery = pool.script_recovery
    assert recovery is not None
    assert recovery.recoveries == (kill >= 0)
    sent = pool.sent_bytes[0] - before
    pool.close()
    return found, sent


@pytest.mark.parametrize("kill", [2, 6])
def test_a_lost_worker_is_sent_again_what_was_compressed(
    kill: int, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_recovery, "LEAST_S", 1e9)  # no snapshot: all uploads are sent again
    expected, plain_bytes = train(opened)
    monkeypatch.setattr(onebox.Pool, "near", lambda pool, worker: False)
    monkeypatch.setattr(upload_packing, "MEASURED_BYTES", 1 << 12)
    undisturbed, packed_bytes = train(opened)
    found, sent = train(opened, kill=kill)
    assert all(map(torch.equal, undisturbed, expected))
    assert all(map(torch.equal, found, expected))
    assert packed_bytes < plain_bytes
    assert sent > packed_bytes


def waits(run: Callable[[], object]) -> int:
    """Return how often a function waits for the device."""
    (queue,) = current_context().queues
    before = queue.channel.waits
    run()
    return queue.channel.waits - before


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_travel_ahead_of_the_steps_and_a_value_costs_one_round_trip(
    pinned: bool, far: None, opened: Open
) -> None:
    opened()
    torch.manual_seed(0)
    data = TensorDataset(dark_images(320), torch.arange(320) % 10)
    loader = DataLoader(data, 32, num_workers=2, pin_memory=pinned, multiprocessing_context="fork", prefetch_factor=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(HERE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []

    def epoch(every: int) -> None:
        for step, (images, labels) in enumerate(loader, 1):
            there = images.to(HERE, non_blocking=True), labels.to(HERE, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(there[0].float() / 255), there[1])
            loss.backward()
            optimizer.step()
            if every and step % every == 0:
                losses.append(loss.item())

    epoch(0)
    assert waits(lambda: epoch(0)) == 0
    assert waits(lambda: epoch(10)) == 1
    assert waits(lambda: epoch(1)) == 10
    assert losses[-1] < losses[0]


def test_a_buffer_of_the_script_may_change_once_its_upload_has_returned(far: None, opened: Open) -> None:
    opened()
    images, found = dark_images(64).pin_memory(), []
    for value in range(4):
        images[:, :, 0, 0] = value
        found.append(images.to(HERE, non_blocking=True))
    images.zero_()
    assert [int(one[0, 0, 0, 0]) for one in found] == [0, 1, 2, 3]
