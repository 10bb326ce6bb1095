"""Streams, memory and operators of a modelled accelerator."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from tests.kit.accelerator import ModelAccelerator
from tests.kit.accelerator.streams import ModelledFailure

X = torch.arange(64, dtype=torch.float64).reshape(8, 8) / 7


def test_kernels_run_when_the_host_waits_and_not_before(accelerator: ModelAccelerator) -> None:
    landing = accelerator.pinned(X.nbytes).view(torch.float64).view(8, 8)
    with torch.inference_mode():
        made = accelerator.to_device(X) * 2
        landing.copy_(made, non_blocking=True)
        event = accelerator.current().record(timed=True)
    memory = landing.numpy().copy()
    assert memory.tobytes() == b"\xff" * X.nbytes, "nothing has come yet"
    event.synchronize()
    assert event.query()
    assert event.time_ns() > 0
    assert torch.equal(landing, 2 * X)


def test_an_event_is_complete_only_after_the_waits_before_it(accelerator: ModelAccelerator) -> None:
    one, other = accelerator.stream(), accelerator.stream()
    with torch.inference_mode(), accelerator.on(one):
        accelerator.empty((4,), torch.float32).fill_(1)
        first = one.record()
    other.wait(first)
    second = other.record()
    assert not second.complete
    second.synchronize()
    assert first.complete
    assert second.complete


def test_memory_is_used_again_at_once_by_its_stream_unless_it_is_kept(accelerator: ModelAccelerator) -> None:
    side = accelerator.stream()
    with torch.inference_mode():
        first = accelerator.empty((100,), torch.float32)
        address = first.data_ptr()
        del first
        gc.collect()
        again = accelerator.empty((100,), torch.float32)
        assert again.data_ptr() == address
        with accelerator.on(side):
            side.wait_stream(accelerator._scheduler.default)
            again.add_(1)
        accelerator.keep(again, side)
        del again
        assert accelerator.empty((100,), torch.float32).data_ptr() != address
        accelerator.synchronize()
        free = [accelerator.empty((100,), torch.float32) for _ in range(2)]
        assert address in [tensor.data_ptr() for tensor in free]


def test_memory_has_an_end_and_counts(accelerator: ModelAccelerator) -> None:
    accelerator.limit(1 << 20)
    before = accelerator.memory()
    with torch.inference_mode():
        held = [accelerator.empty((1 << 18,), torch.uint8) for _ in range(4 - before.allocated_bytes // (1 << 18))]
        assert accelerator.memory().allocated_bytes == before.allocated_bytes + len(held) * (1 << 18)
        with pytest.raises(torch.OutOfMemoryError):
            accelerator.empty((1 << 18,), torch.uint8)
        held.clear()
        accelerator.reset_peak()
        assert accelerator.empty((1 << 18,), torch.uint8).numel() == 1 << 18


def test_operators_have_the_bits_of_the_cpu(accelerator: ModelAccelerator) -> None:
    weight, image = torch.randn(3, 2, 3, 3), torch.randn(2, 2, 6, 6)
    with torch.inference_mode():
        x, w, i = (accelerator.to_device(tensor) for tensor in (X, weight, image))
        pairs = [
            (x @ x.t() + 1, X @ X.t() + 1),
            (functional.conv2d(i, w), functional.conv2d(image, weight)),
            (functional.layer_norm(x, (8,)), functional.layer_norm(X, (8,))),
            (torch.cat([x, x[2:4]]).t().sum(0), torch.cat([X, X[2:4]]).t().sum(0)),
            (torch.nonzero(x > 3), torch.nonzero(X > 3)),
            (torch.topk(x, 3).indices, torch.topk(X, 3).indices),
            (x.clone().mul_(2).sub_(torch.tensor(1.0)), X * 2 - 1),
            (torch.add(x, 1, out=accelerator.empty((0,), torch.float64)), X + 1),
        ]
        assert all(torch.equal(accelerator.to_host(one), other) for one, other in pairs)
        assert x[1, 2].item() == X[1, 2]


def test_random_numbers_are_drawn_when_they_are_asked_for(accelerator: ModelAccelerator) -> None:
    with torch.inference_mode():
        x, found = accelerator.to_device(X), []
        for device in (True, False):
            torch.manual_seed(3)
            made = [torch.native_dropout(x if device else X, 0.5, True)[0], torch.rand_like(x if device else X)]
            found.append([tensor.cpu() for tensor in made])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_tensors_of_the_host_among_those_of_the_device_are_refused(accelerator: ModelAccelerator) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="same device"):
        accelerator.to_device(X) + X


def test_copies_are_counted(accelerator: ModelAccelerator) -> None:
    before = accelerator.counters
    with torch.inference_mode():
        accelerator.to_device(X).cpu()
        pinned = accelerator.pinned(X.nbytes).view(torch.float64).view(8, 8)
        accelerator.empty((8, 8), torch.float64).copy_(pinned, non_blocking=True)
    after = accelerator.counters
    assert (after.pageable_copies - before.pageable_copies, after.launches - before.launches) == (2, 3)
    assert after.synchronisations - before.synchronisations == 2


def test_memory_of_which_a_part_is_page_locked_cannot_be_copied(accelerator: ModelAccelerator) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    assert accelerator.pin(memory[:32])
    assert not accelerator.pin(memory[16:])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="only a part"):
        accelerator.to_device(memory)
    accelerator.unpin(memory[:32])


class TestRaces:
    """Devices of their own, because these race."""

    @pytest.fixture(autouse=True)
    def accelerator(self, seed: int) -> Iterator[ModelAccelerator]:
        """A device that may race."""
        made = ModelAccelerator(seed, memory_bytes=16 << 20)
        yield made
        made.close()

    def test_a_race_is_raised_where_the_host_waits(self, accelerator: ModelAccelerator) -> None:
        side = accelerator.stream()
        with torch.inference_mode():
            made = accelerator.to_device(X) * 2
            with accelerator.on(side):
                made.add_(1)
            with pytest.raises(ModelledFailure, match=r"write after write.*aten.add.*not ordered after aten.mul"):
                side.synchronize()
        assert len(accelerator.races) == 1

    def test_the_host_races_too(self, accelerator: ModelAccelerator) -> None:
        pinned = accelerator.pinned(X.nbytes).view(torch.float64).view(8, 8)
        with torch.inference_mode():
            pinned.copy_(accelerator.to_device(X), non_blocking=True)
            pinned.add_(1)
        assert [race.kind for race in accelerator.races] == ["write after write"]

    def test_a_kernel_that_fails_is_raised_where_the_host_waits(self, accelerator: ModelAccelerator) -> None:
        with torch.inference_mode():
            table, index = accelerator.to_device(X), accelerator.to_device(torch.tensor([99]))
            functional.embedding(index, table)
            with pytest.raises(ModelledFailure, match=r"failed on the device: index out of range"):
                accelerator.synchronize()
