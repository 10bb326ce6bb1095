"""The ways of tensors between the workers of one host: through memory that they share, or sockets where it is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest
import torch

import onebox
from onebox.errors import UsageError, WorkerDied
from onebox.pool import Pool, raise_first
from onebox.wire import TensorSpec, from_frame, to_frame
from onebox.wire.protocol.instructions import Ask, Call, Free, Get, Receive, Reduce, Send
from onebox.wire.protocol.requests import Define, Instruction, Put, StoredProgram
from onebox.wire.protocol.responses import Digest, WorkerMemory
from onebox.worker.comm.shm.segment import supported
from tests.kit import leaks
from tests.kit.pools import Pools
from tests.kit.reference import assert_same
from tests.kit.stages import reference, run, staged
from tests.unit.machines import elementwise

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

SHAPES = [(0, 3), (), (7,), (100, 41), (512, 1000), (6_000_000,), (33, 1)]
"""Of what is sent: from nothing to 24 MB."""


def maps(pool: Pool) -> list[int]:
    """Return how many shared memories each worker has mapped."""
    raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in range(len(pool))])
    return [leaks.mapped("onebox", pid) for pid in pool.process_ids]


def settled(pool: Pool, expected: list[int]) -> bool:
    """Return whether the workers have as many shared memories mapped as expected, once readers have left, too."""
    end_s = time.monotonic() + 10
    while maps(pool) != expected and time.monotonic() < end_s:
        time.sleep(0.02)
    return maps(pool) == expected


def used_bytes(pool: Pool) -> list[int]:
    """Return how many bytes the buffers of each worker take."""
    answers = raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in range(len(pool))])
    return [result.used_bytes for answer in answers for result in answer.results if isinstance(result, WorkerMemory)]


def descriptors(pool: Pool) -> list[int]:
    """Return how many descriptors each worker has open."""
    return [len(leaks.descriptors(pid)) for pid in pool.process_ids]


def swap(pool: Pool, group: int, shapes: Sequence[tuple[int, ...]]) -> list[list[bytes]]:
    """Let two workers send each other tensors, all at once, and compute with what came; return hashes of the results.

    Returns:
        For each worker a hash of each tensor that came, doubled; then a hash of each that it sent, doubled.
    """
    specs = [TensorSpec("float32", shape) for shape in shapes]

    def work(worker: int) -> list[Instruction]:
        numbers = range(len(specs))
        found: list[Instruction] = [Put(tuple(100 + n for n in numbers), tuple(specs))]
        found += [
            Define(500 + n, StoredProgram(elementwise("aten.add.Tensor", spec, 2))) for n, spec in enumerate(specs)
        ]
        found += [Send(100 + n, group, 1 - worker, n % 2) for n in numbers]
        found += [Call(500 + n, (100 + n, 100 + n), (300 + n,)) for n in numbers]
        found += [Receive(200 + n, spec, group, 1 - worker, n % 2) for n, spec in enumerate(specs)]
        found += [Call(500 + n, (200 + n, 200 + n), (400 + n,)) for n in reversed(numbers)]
        found += [Ask("digest", (first + n,)) for first in (400, 300) for n in numbers]
        return [*found, Free(tuple(first + n for first in (100, 200, 300, 400) for n in numbers), ())]

    frames = [[bytes(to_frame(torch.randn(shape) + worker)) for shape in shapes] for worker in range(2)]
    answers = raise_first([pool.post(worker, work(worker), frames[worker], answer=True) for worker in range(2)])
    return [[result.value for result in answer.results if isinstance(result, Digest)] for answer in answers]


@pytest.mark.feature("Networks: Share memory among workers of a host, or not")
def test_tensors_of_all_sizes_go_both_ways_at_once_and_nothing_is_left() -> None:
    with onebox.open("cpu*2", threads=1) as pool:
        swap(pool, pool.form_group((0, 1), "workers"), [(3,)])  # whatever is opened once and for all
        group = pool.form_group((0, 1), "workers")
        assert settled(pool, [4, 4])
        pool.leave_group(group, (0, 1))
        assert settled(pool, [2, 2])
        before = descriptors(pool)
        group = pool.form_group((0, 1), "workers")
        for _ in range(3):
            one, other = swap(pool, group, SHAPES)
            count = len(SHAPES)
            assert one[:count] == other[count:]
            assert other[:count] == one[count:]
        pool.leave_group(group, (0, 1))
        assert settled(pool, [2, 2])
        assert descriptors(pool) == before
        assert used_bytes(pool) == [0, 0]


def test_where_memory_is_not_to_be_shared_sockets_serve_and_the_result_is_the_same(pools: Pools) -> None:
    pool = pools(3)
    plan, sizes = staged("mlp", (0, (1, 2)), micro_batch=2), [8, 5, 8]
    found = run(pool, "mlp", plan, sizes)
    before = maps(pool)
    pool.shared = False
    try:
        group = pool.form_group((0, 1), "workers")
        assert settled(pool, before)
        pool.leave_group(group, (0, 1))
        other = run(pool, "mlp", plan, sizes)
    finally:
        pool.shared = True
    assert_same(found, reference("mlp", plan, sizes))
    assert_same(other, reference("mlp", plan, sizes))


@pytest.mark.feature("Networks: Share memory among workers of a host, or not")
def test_a_variable_lets_sockets_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBOX_SHARED_MEMORY", "no")
    with pytest.raises(UsageError, match=r"ONEBOX_SHARED_MEMORY is 'no'; allowed are 1, and 0"):
        onebox.open("cpu*2", threads=1)
    monkeypatch.setenv("ONEBOX_SHARED_MEMORY", "0")
    with onebox.open("cpu*2", threads=1) as pool:
        assert not pool.shared
        one, other = swap(pool, pool.form_group((0, 1), "workers"), SHAPES)
        assert one[: len(SHAPES)] == other[len(SHAPES) :]
        assert settled(pool, [0, 0])


def test_a_worker_that_is_killed_while_tensors_are_under_way_is_named_and_replaced() -> None:
    """What it has sent is used by others, who wait for more."""
    spec = TensorSpec("float32", (4_000_000,))
    with onebox.open("cpu*3", threads=1) as pool:
        group = pool.form_group((0, 1, 2), "workers")
        frame = bytes(to_frame(torch.arange(4e6)))
        raise_first([pool.post(1, [Put((1,), (spec,)), Send(1, group, 0)], [frame], answer=True)])
        (answer,) = raise_first([pool.post(0, [Receive(1, spec, group, 1), Get((1,))], answer=True)])
        assert torch.equal(from_frame(spec, answer.frames[0]), torch.arange(4e6))
        waits = pool.post(0, [Receive(2, spec, group, 1), Get((2,))], answer=True)
        total = pool.post(2, [Put((3,), (spec,)), Reduce((3,), group), Get((3,))], [frame], answer=True)
        os.kill(pool.process_ids[1], signal.SIGKILL)
        for future in (waits, total):
            with pytest.raises(WorkerDied) as caught:
                future.result(30)
            assert caught.value.worker == 1
        assert pool.recover_workers().replaced == (1,)
        (answer,) = raise_first([pool.post(0, [Get((1,))], answer=True)])
        assert torch.equal(from_frame(spec, answer.frames[0]), torch.arange(4e6)), "it outlasts its sender"
        raise_first([pool.post(0, [Free((1, 2), ())], answer=True)])
        assert settled(pool, [0, 0, 0])
        one, other = swap(pool, pool.form_group((0, 1), "workers"), SHAPES)
        assert one[: len(SHAPES)] == other[len(SHAPES) :]
