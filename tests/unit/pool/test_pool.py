"""A pool whose workers are threads: messages and answers, and what everybody hears when one of them goes wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import onebox
from onebox.errors import (
    OperatorError,
    PeerLost,
    PoolError,
    UsageError,
    WireError,
    WorkerDied,
    WorkerError,
)
from onebox.pool import Fault, Pool, WorkerReply, raise_first
from onebox.pool.client import loop
from onebox.pool.devices import explain_links
from onebox.wire import TensorSpec, encode, from_frame, to_frame
from onebox.wire.protocol import codec
from onebox.wire.protocol.instructions import Ask, Call, Get, Receive, Reduce, Send
from onebox.wire.protocol.requests import Put
from onebox.wire.protocol.responses import Contribution, Lookup, Scalars
from tests.kit.leaks import nothing_left
from tests.kit.trainer_arguments import grouped
from tests.unit.house import OpenPool, threads_for_processes

SPEC = TensorSpec("float32", (2,))
FRAME = bytes(to_frame(torch.tensor([1.0, 2.0])))
SOON_S = 30.0


@pytest.fixture
def open_pool() -> Iterator[OpenPool]:
    with threads_for_processes() as opening:
        yield opening


@pytest.fixture
def pool(open_pool: OpenPool) -> Pool:
    return open_pool(2)


def result(future: Future[Any]) -> Any:
    """Return the result of a future, within the time in which every error is to be known."""
    return future.result(SOON_S)


def put_and_get(pool: Pool, worker: int) -> list[float]:
    number = pool.new_number()
    pool.post(worker, [Put((number,), (SPEC,))], [FRAME])
    answer = result(pool.post(worker, [Get((number,))], answer=True))
    return from_frame(SPEC, answer.frames[0]).tolist()


def test_what_is_posted_is_answered(pool: Pool) -> None:
    assert [put_and_get(pool, worker) for worker in (0, 1, 0)] == [[1.0, 2.0]] * 3
    assert result(pool.post(1, [Ask("scalars", ())], answer=True)).results == (Scalars(()),)


def test_a_pool_describes_itself(pool: Pool) -> None:
    assert len(pool) == 2
    assert repr(pool) == "<onebox.Pool of cpu, cpu>"
    assert [(device.number, device.kind, device.threads) for device in pool.devices] == [(0, "cpu", 1), (1, "cpu", 1)]
    assert len(pool.process_ids) == 2


def test_numbers_are_never_the_same(pool: Pool) -> None:
    assert len({pool.new_number() for _ in range(1000)}) == 1000


def test_without_an_answer_the_future_is_done_at_once(pool: Pool) -> None:
    assert pool.post(0, [Put((1,), (SPEC,))], [FRAME]).done()


def test_failures_of_two_workers_are_told_apart(pool: Pool) -> None:
    futures = [pool.post(worker, [Call(77 + worker, (), ())], answer=True) for worker in range(2)]
    for worker, future in enumerate(futures):
        with pytest.raises(WireError, match=rf"worker {worker} .*definition {77 + worker}"):
            result(future)
    assert put_and_get(pool, 0) == [1.0, 2.0], "the pool is whole"


def test_a_failure_of_a_message_without_an_answer_poisons(pool: Pool) -> None:
    pool.post(0, [Call(77, (), (5,)), Reduce((5,), 9)])
    with pytest.raises(WireError, match="definition 77"):
        result(pool.post(0, [Get((5,))], answer=True))


@pytest.mark.parametrize("frames", [[], [FRAME] * 2], ids=["too few", "too many"])
def test_a_wrong_number_of_frames_is_an_error(pool: Pool, frames: list[bytes]) -> None:
    with pytest.raises(WireError, match="frames"):
        result(pool.post(0, [Put((1,), (SPEC,))], frames, answer=True))
    assert put_and_get(pool, 0) == [1.0, 2.0]


def test_what_is_over_the_limits_is_refused_before_it_is_sent(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker drops such a message, and nobody would ever be answered."""
    with pytest.raises(WireError, match="65536 tensors"):
        pool.post(0, [], [b""] * codec.FRAMES, answer=True)
    monkeypatch.setattr(codec, "FRAME_BYTES", 7)
    with pytest.raises(WireError, match="a tensor of 8 bytes"):
        pool.post(0, [Put((1,), (SPEC,))], [FRAME], answer=True)
    monkeypatch.undo()
    with pytest.raises(WireError):
        pool.post(0, [Ask("scalars", (2**70,))], answer=True)
    assert put_and_get(pool, 0) == [1.0, 2.0]


@pytest.mark.parametrize("worker", [2, -1, 99])
def test_a_worker_that_is_not_there(pool: Pool, worker: int) -> None:
    with pytest.raises(UsageError, match=f"worker {worker}"):
        pool.post(worker, [Ask("memory")], answer=True)
    assert put_and_get(pool, 0) == [1.0, 2.0]


def test_a_message_that_the_worker_cannot_read_breaks_the_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose answer is missing nobody knows: all are told, rather than one left waiting for ever."""
    monkeypatch.setattr(loop, "encode", lambda message: b"junk")
    later = pool.post(0, [Ask("scalars", ())], answer=True)
    monkeypatch.undo()
    with pytest.raises(WireError, match="not of this protocol"):
        result(later)
    with pytest.raises(WireError, match="not of this protocol"):
        pool.post(1, [Ask("memory")], answer=True)


@pytest.mark.parametrize(
    "parts",
    [
        [b"junk"],
        [encode(Lookup(1, 1, "add", ("n",), b"x"))],
        [encode(Contribution(1, 1, 0, SPEC))],
        [encode(Contribution(1, 1, 0, SPEC)), b"short"],
        [encode(Contribution(1, 1, 0, TensorSpec("object", (2,)))), FRAME],
        [msgspec.msgpack.encode(["hello", 1])],
    ],
    ids=["junk", "no number", "no frame", "short frame", "no type", "no hello"],
)
def test_junk_from_a_worker_breaks_the_pool_and_nothing_else(
    open_pool: OpenPool, pool: Pool, parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool.form_group((0, 1), "client") == 1
    bad, good = open_pool.servers
    pending = keep_busy(pool, 1, good, monkeypatch)
    monkeypatch.setattr(bad.machine, "execute", lambda instruction, frames: bad.say(parts) or [])
    pool.post(0, [Ask("scalars", ())])
    with pytest.raises(WireError):
        result(pending)
    assert pool.groups_of(0) == {1: (0, 1)}, "the client's thread still serves"


def keep_busy(pool: Pool, worker: int, server: Any, monkeypatch: pytest.MonkeyPatch) -> Future[WorkerReply]:
    """Return the future of a reply that its worker does not give before the future is done."""
    done = threading.Event()

    def execute(instruction: Any, frames: Any) -> list[Any]:
        done.wait(SOON_S)
        return []

    monkeypatch.setattr(server.machine, "execute", execute)
    pending = pool.post(worker, [Ask("memory")], answer=True)
    pending.add_done_callback(lambda _: done.set())
    return pending


def test_a_worker_that_ends_is_what_everybody_hears_of(
    open_pool: OpenPool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = threading.Event()

    def die(instruction: Any, frames: Any) -> None:
        posted.wait(SOON_S)  # afterwards nothing can be posted any more
        raise SystemError("its last words")

    monkeypatch.setattr(open_pool.servers[1].machine, "execute", die)
    futures = [pool.post(worker, [Ask("memory")], answer=True) for worker in (1, 1)]
    posted.set()
    for future in futures:
        with pytest.raises(WorkerDied, match=r"worker 1 .*its last words"):
            result(future)
    with pytest.raises(WorkerDied, match="its last words"):
        pool.post(0, [])
    pool.close()


def test_a_closed_pool_says_so(pool: Pool) -> None:
    pool.close()
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        pool.post(0, [])


def test_what_is_waited_for_when_a_pool_is_closed_fails(
    open_pool: OpenPool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = keep_busy(pool, 0, open_pool.servers[0], monkeypatch)
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        result(pending)


def test_closing_is_idle_in_a_fork(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    pool.close()
    with pytest.raises(PoolError, match="forked"):
        pool.post(0, [])
    monkeypatch.undo()
    assert put_and_get(pool, 0) == [1.0, 2.0]


def test_opening_and_closing_leaves_nothing(open_pool: OpenPool) -> None:
    open_pool(2).close()
    with nothing_left():
        for workers in (1, 2, 3, 2):
            open_pool(workers).close()


def test_a_callback_that_fails_does_not_keep_a_pool_open(open_pool: OpenPool) -> None:
    open_pool(1).close()
    called: list[str] = []

    def fail() -> None:
        raise BrokenPipeError("of the callback")

    with nothing_left():
        pool = open_pool(1)
        pool.closing[:0] = [fail, lambda: called.append("second")]
        with pytest.raises(BrokenPipeError, match="of the callback"):
            pool.close()
    assert called == ["second"]
    with pytest.raises(PoolError, match="closed"):
        pool.post(0, [])


@pytest.mark.parametrize("memory", [0, -5, "0", "much", [], {}, True, {"0": 5}, {-1: 5}, [5, 5], {1: 5}])
def test_budgets_that_cannot_be_are_refused(open_pool: OpenPool, memory: Any) -> None:
    with pytest.raises(UsageError, match="memory"):
        open_pool(1, memory=memory)


def test_a_quota_is_the_memory_that_a_device_has(open_pool: OpenPool) -> None:
    pool = open_pool(1, memory=1000)
    assert pool.devices[0].memory_bytes == 1000


def test_the_error_of_a_broken_pool_does_not_grow_with_each_call(pool: Pool) -> None:
    pool.close()
    errors, depths = set(), set()
    for _ in range(3):
        with pytest.raises(PoolError, match="the pool is closed") as caught:
            pool.post(0, [Ask("memory")])
        errors.add(caught.value)
        depths.add(len(caught.traceback))
    assert len(errors) == len(depths) == 1


# ---- groups


@pytest.mark.parametrize("via", ["workers", "client"])
def test_a_group_adds_up(pool: Pool, via: Any) -> None:
    group = pool.form_group((0, 1), via)
    for worker in range(2):
        pool.post(worker, [Put((1,), (SPEC,))], [bytes(to_frame(torch.tensor([1.0, worker])))])
    answers = raise_first([pool.post(worker, [Reduce((1,), group), Get((1,))], answer=True) for worker in range(2)])
    assert [from_frame(SPEC, answer.frames[0]).tolist() for answer in answers] == [[2.0, 1.0]] * 2
    pool.leave_group(group, (0, 1))
    with pytest.raises(PeerLost):
        result(pool.post(0, [Reduce((1,), group)], answer=True))


def test_groups_that_threads_form_at_once_are_begun_in_one_order(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two orders, each of two workers would wait in another group for the other one."""
    begun: list[list[int]] = [[], []]

    def post(worker: int, instructions: list[Any], answer: bool = False) -> Future[WorkerReply]:
        begun[worker].append(instructions[0].group)
        time.sleep(0.001)  # let other threads go on
        return Future()

    monkeypatch.setattr(pool, "post", post)
    threads = [
        threading.Thread(
            target=lambda own=own: [  # type: ignore[misc]
                pool.begin_group((own % 2, 1 - own % 2), "workers", number=10 * own + turn) for turn in range(5)
            ]
        )
        for own in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert begun[0] == begun[1] and len(begun[0]) == 20


@pytest.mark.parametrize(
    ("gpus", "more", "ranks"),
    [
        (("a", "b"), {}, (0, 1)),
        (("a", ""), {}, ()),
        (("a", "b"), {"aside": True}, ()),
        (("a", "b"), {"tagged": True}, ()),
        (("a", "a"), {}, ()),
        (("", "a", "b", "a"), {}, (1, 2)),
    ],
    ids=[
        "two GPUs",
        "one GPU",
        "for host memory",
        "for messages with tags",
        "one GPU twice",
        "a CPU, and two GPUs of which one twice",
    ],
)
def test_different_gpus_whose_workers_have_nccl_use_it(
    open_pool: OpenPool,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    more: dict[str, bool],
    ranks: tuple[int, ...],
) -> None:
    """Not what this client's own PyTorch has, which is not between them."""
    pool = open_pool(len(gpus))
    devices = [
        replace(each, device="cuda:0" if gpu else "cpu", nccl=bool(gpu), gpu=gpu)
        for each, gpu in zip(pool.devices, gpus, strict=True)
    ]
    monkeypatch.setattr(pool, "devices", devices)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: not ranks)
    formed = forms_of(pool, monkeypatch, **more)
    assert formed == [("tcp", ranks if rank in ranks else ()) for rank in range(len(gpus))]


@pytest.mark.parametrize("plain_links", [False, True])
def test_between_hosts_connections_are_encrypted_and_nccl_takes_plain_links(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch, plain_links: bool
) -> None:
    pool = open_pool(5)
    devices = [
        replace(each, device="cuda:0", nccl=True, gpu=f"gpu {each.number}", host=host)
        for each, host in zip(pool.devices, ("lab1", "lab1", "lab2", "lab2", "lab3"), strict=True)
    ]
    monkeypatch.setattr(pool, "devices", devices)
    monkeypatch.setattr(pool, "plain_links", plain_links)
    expected = [("tls", ranks) for ranks in ((0, 1), (0, 1), (2, 3), (2, 3), ())]
    assert forms_of(pool, monkeypatch) == ([("tcp", (0, 1, 2, 3, 4))] * 5 if plain_links else expected)
    said = explain_links(devices, plain_links)
    assert ("neither encrypted nor authenticated" in said, "NCCL does not encrypt" in said) == (
        plain_links,
        not plain_links,
    )
    assert not explain_links(devices[:2], plain_links)


def forms_of(pool: Pool, monkeypatch: pytest.MonkeyPatch, **more: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Return with which backend and which ranks for NCCL each worker of a pool is asked to form a group of all."""
    formed: list[Any] = []

    def post(worker: int, instructions: list[Any], answer: bool = False) -> Future[WorkerReply]:
        formed.extend(instructions)
        done: Future[WorkerReply] = Future()
        done.set_result(WorkerReply((), (), ()))
        return done

    monkeypatch.setattr(pool, "post", post)
    raise_first(pool.begin_group(range(len(pool)), "workers", number=pool.new_number(), **more))
    return [(form.backend, form.nccl) for form in formed]


@pytest.mark.parametrize("via", ["workers", "client"])
def test_who_waits_for_a_worker_that_failed_hears_of_it_at_once(pool: Pool, via: Any) -> None:
    group = pool.form_group((0, 1), via)
    pool.post(0, [Put((1,), (SPEC,))], [FRAME])
    waiting = pool.post(0, [Reduce((1,), group), Get((1,))], answer=True)
    failing = pool.post(1, [Call(77, (), (1,)), Reduce((1,), group)], answer=True)
    with pytest.raises(WireError, match="definition 77"):
        raise_first([waiting, failing])
    with pytest.raises(PeerLost):
        result(waiting)
    assert put_and_get(pool, 0) == [1.0, 2.0]


def test_a_group_that_cannot_be_formed_is_an_error_at_once(pool: Pool, open_pool: OpenPool) -> None:
    broken = open_pool(2, faults={1: [Fault("error", "formgroup", 1)]})
    with pytest.raises(OperatorError, match="injected fault"):
        broken.form_group((0, 1), "workers")
    assert put_and_get(broken, 0) == [1.0, 2.0]


def test_transfers_from_worker_to_worker(pool: Pool) -> None:
    group = pool.form_group((1, 0), "workers")  # worker 1 is rank 0
    pool.post(1, [Put((1,), (SPEC,)), Send(1, group, 1, 3)], [FRAME])
    answer = result(pool.post(0, [Receive(9, SPEC, group, 0, 3), Get((9,))], answer=True))
    assert from_frame(SPEC, answer.frames[0]).tolist() == [1.0, 2.0]


# ---- a training run that goes wrong


def trainer(pool: Pool, sync: Any) -> onebox.Trainer:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"sync": sync, "micro_batch": 2, "loss_reduction": "mean"}  # only steps use the workers
    return onebox.Trainer(model, functional.mse_loss, optimizer, **grouped(pool=pool, **options))


@pytest.mark.parametrize("sync", ["workers", "client"])
@pytest.mark.parametrize("instruction", ["put", "call", "reduce", "optimizerstep"])
def test_one_clear_error_and_the_pool_is_whole(open_pool: OpenPool, sync: Any, instruction: str) -> None:
    """A failure before the vote on a step costs that step; a failed update is what every later call tells of. Another
    trainer on the same pool works."""
    pool = open_pool(2, faults={1: [Fault("error", instruction, {"put": 8}.get(instruction, 2))]})
    batch = torch.ones(8, 4), torch.ones(8, 3)
    with trainer(pool, sync) as broken:
        with pytest.raises(WorkerError, match="injected fault") as first:
            for _ in range(6):
                broken.step(*batch)
            broken.wait()
        for call in (broken.pull, lambda: broken.step(*batch), lambda: broken.evaluate([batch])):
            if instruction != "optimizerstep":
                call()
                continue
            with pytest.raises(WorkerError, match="injected fault") as again:
                call()
            assert again.value is first.value
        assert first.value.worker == 1
    with trainer(pool, sync) as whole:
        assert float(whole.step(*batch)) > 0
