"""Emulated devices in processes of their own: sim devices that sleep for what work costs, and slowed-down CPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import nn

import onebox
from onebox.emulator import MEMORY_BYTES
from onebox.errors import DeviceMemoryError, OperatorError, UsageError
from onebox.pool import Pool, WorkerReply, open_pool, raise_first
from onebox.wire import TensorSpec, to_frame
from onebox.wire.protocol.instructions import Ask, Call, Free, Get, OptimizerStep, Receive, Reduce, Send
from onebox.wire.protocol.requests import Define, OptimizerSpec, Put, Routine, Run, StoredProgram
from onebox.wire.protocol.responses import Digest, Scalars, WorkerMemory
from tests.unit.machines import elementwise

SPEC = TensorSpec("float32", (256, 256))
X = torch.ones(256, 256)
RELU, ADAM, ROUTINE = 100, 101, 102
COST_S = 0.05


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two sim devices, the second at half speed, and a CPU at half speed."""
    with open_pool("sim,sim@0.5,cpu@0.5", threads=1) as opened:
        yield opened


def prepare(pool: Pool, worker: int) -> None:
    """Store a program, an optimizer and a routine that runs both."""
    program = elementwise("aten.relu.default", SPEC)
    adam = OptimizerSpec("Adam", (((0,), {"lr": 0.1}),), (1,), (), COST_S)
    steps = (Call(RELU, (1,), (3,)), OptimizerStep(ADAM, (2,)), Free((3,)))
    defines = [Define(RELU, StoredProgram(program, COST_S)), Define(ROUTINE, Routine(steps, 0))]
    frames = [bytes(to_frame(X))] * 2
    pool.post(worker, [Put((1, 2), (SPEC, SPEC)), *defines, Define(ADAM, adam)], frames)


def lasted_s(answer: WorkerReply) -> list[float]:
    """Return how long each instruction of a traced routine took."""
    return [(end - start) / 1e9 for start, end in zip(answer.times_ns[::2], answer.times_ns[1::2], strict=True)]


def test_emulated_devices_say_that_they_are(pool: Pool) -> None:
    found = [(device.kind, device.speed, device.emulated) for device in pool.devices]
    assert found == [("sim", 1.0, True), ("sim", 0.5, True), ("cpu", 0.5, True)]
    assert pool.devices[0].memory_bytes == MEMORY_BYTES


def test_work_takes_at_least_what_it_costs(pool: Pool) -> None:
    for worker in (0, 1):
        prepare(pool, worker)
    futures = [pool.post(worker, [Run(ROUTINE, trace=True)], answer=True) for worker in (0, 1)]
    for worker, answer in enumerate(raise_first(futures)):
        call_s, step_s, _ = lasted_s(answer)
        assert min(call_s, step_s) >= COST_S / pool.devices[worker].speed


def test_a_device_is_of_another_speed_from_what_is_posted_next_on(pool: Pool) -> None:
    prepare(pool, 0)
    futures = []
    for speed in (1.0, 0.25, 1.0):
        pool.retime(0, speed=speed)
        futures.append(pool.post(0, [Run(ROUTINE, trace=True)], answer=True))
    calls_s = [lasted_s(answer)[0] for answer in raise_first(futures)]
    assert min(calls_s) >= COST_S
    assert calls_s[1] >= 4 * COST_S
    assert pool.devices[0].speed == 1.0
    for speed in (0.0, math.nan):
        with pytest.raises(UsageError, match="a sim device can be of any above 0"):
            pool.retime(0, speed=speed)
    with pytest.raises(UsageError, match="device 2 is cpu"):
        pool.retime(2, speed=0.5)


def test_the_next_message_begins_where_the_device_ends_the_one_before_although_that_is_answered(pool: Pool) -> None:
    prepare(pool, 0)
    asked = [[Put((1,), (SPEC,)), Run(ROUTINE, trace=True), Ask("digest", (1,))] for _ in range(6)]
    futures = [pool.post(0, each, [bytes(to_frame(X))], answer=True) for each in asked]
    times = [answer.times_ns for answer in raise_first(futures)]
    assert times[-1][3] <= time.monotonic_ns(), "it answers when the device has ended"
    waits_ns = [later[0] - before[3] for before, later in pairwise(times)]
    assert min(waits_ns) == 0, "the host prepares it meanwhile"


def test_answers_come_in_order_also_those_of_failures(pool: Pool) -> None:
    prepare(pool, 0)
    done: list[str] = []
    first = pool.post(0, [Run(ROUTINE, trace=True)], answer=True)
    second = pool.post(0, [Get((1,))], answer=True)
    first.add_done_callback(lambda _: done.append("run"))
    second.add_done_callback(lambda _: done.append("failure"))
    with pytest.raises(OperatorError, match="has no values"):
        second.result(30)
    assert done == ["run", "failure"]


@pytest.mark.feature("Pools: Slow down devices and links for experiments")
def test_a_slowed_down_cpu_computes_what_others_do_and_ignores_costs(pool: Pool) -> None:
    prepare(pool, 2)
    answer = pool.post(2, [Run(ROUTINE, trace=True), Ask("scalars", ())], answer=True).result(30)
    assert len(answer.times_ns) == 6
    answer = pool.post(2, [Get((1,))], answer=True).result(30)
    assert torch.frombuffer(bytearray(answer.frames[0]), dtype=torch.float32)[0].item() == pytest.approx(0.9)


def test_questions_to_sim_devices(pool: Pool) -> None:
    for worker in (0, 1):
        pool.post(worker, [Put((5, 6), (SPEC, TensorSpec("float32", ())))], [bytes(to_frame(X)), bytes(4)])
    asked = [pool.post(w, [Ask("scalars", (6,)), Ask("digest", (5, 6))], answer=True) for w in (0, 1)]
    (one, digest), (_, other) = (answer.results for answer in raise_first(asked))
    assert isinstance(one, Scalars)
    assert math.isnan(one.values[0])
    assert isinstance(digest, Digest)
    assert digest == other
    with pytest.raises(OperatorError, match=r"sim on localhost.*float32\[256, 256\] on a sim device has no values"):
        pool.post(0, [Get((5,))], answer=True).result(30)


def test_a_group_of_devices_with_and_without_values_is_refused(pool: Pool) -> None:
    for via in ("workers", "client"):
        with pytest.raises(UsageError, match="a group of cpu and sim devices"):
            pool.form_group((0, 2), via)  # type: ignore[arg-type]


def test_a_plan_for_devices_with_and_without_values_is_refused_and_those_of_one_kind_get_one(pool: Pool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    given = (model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), X[:8, :8], X[:8, :8])
    with pytest.raises(UsageError, match="a plan of cpu and sim devices"):
        onebox.make_plan(*given, pool=pool)
    found = onebox.make_plan(*given, pool=pool, among=(0, 1), budget_s=0.5)
    assert {*found.plan.devices} <= {0, 1}


def test_groups_of_sim_devices_hand_on_shapes_and_the_client_adds_nothing_up(pool: Pool) -> None:
    group = pool.form_group((0, 1), "workers")
    for worker in (0, 1):
        pool.post(worker, [Put((8,), (SPEC,))], [bytes(to_frame(X))])
    pool.post(0, [Send(8, group, 1)])
    pool.post(1, [Receive(9, SPEC, group, 0)])
    asked = [pool.post(w, [Reduce((8,), group), Ask("digest", (8 + w,))], answer=True) for w in (0, 1)]
    digests = [answer.results for answer in raise_first(asked)]
    assert digests[0] == digests[1]
    pool.leave_group(group, (0, 1))
    with pytest.raises(UsageError, match="no values that a client could add up"):
        pool.form_group((0, 1), "client")


def test_a_value_travels_when_the_device_has_made_it_and_not_when_the_host_is_there(pool: Pool) -> None:
    """The host, which runs ahead, has the tensor when the program begins."""
    for worker in (0, 1):
        prepare(pool, worker)
    group = pool.form_group((0, 1), "workers")
    made = Routine((Call(RELU, (1,), (3,)), Send(3, group, 1), Free((3,)), Call(RELU, (1,), (3,)), Free((3,))), 0)
    read = Routine((Receive(3, SPEC, group, 0), Call(RELU, (3,), (4,)), Free((3, 4))), 0)
    for worker, routine in enumerate((made, read)):
        pool.post(worker, [Define(ROUTINE, routine)])
    runs = [pool.post(worker, [Run(ROUTINE, trace=True)], answer=True) for worker in (0, 1)]
    times = [list(zip(run.times_ns[::2], run.times_ns[1::2], strict=True)) for run in raise_first(runs)]
    pool.leave_group(group, (0, 1))
    (first, sent, _, second, _), (received, third, _) = times
    assert first[1] <= sent[0] <= sent[1] <= received[1] <= third[0]
    assert first[1] <= second[0]
    lasts_ns = math.ceil(COST_S * 1e9)
    assert [end - start for start, end in (first, second, third)] == [lasts_ns, lasts_ns, 2 * lasts_ns]


def test_a_quota_is_that_of_a_device_with_so_much_memory() -> None:
    quota = 3 * SPEC.size_bytes + 100
    with open_pool("sim*2", memory=quota) as pool:
        assert pool.devices[0].memory_bytes == quota
        prepare(pool, 0)
        with pytest.raises(DeviceMemoryError, match=rf"aten\.relu\.default.*quota is {quota}"):
            pool.post(0, [Call(RELU, (1,), (3,)), Call(RELU, (1,), (4,))], answer=True).result(30)
        (memory,) = pool.post(0, [Ask("memory")], answer=True).result(30).results
        assert memory == WorkerMemory(3 * SPEC.size_bytes, 3 * SPEC.size_bytes, quota)
        (memory,) = pool.post(1, [Ask("memory")], answer=True).result(30).results
        assert memory == WorkerMemory(0, 0, quota)


def memory_of_a_run(spec: str) -> list[WorkerMemory]:
    """Train a small model for three steps and return what each device says of its memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with (
        open_pool(spec, threads=1) as pool,
        onebox.Trainer(
            model, nn.functional.cross_entropy, optimizer, pool=pool, engine=onebox.Engine(check_every=2)
        ) as trainer,
    ):
        for _ in range(3):
            step = trainer.step(torch.randn(32, 8), torch.randint(0, 4, (32,)))
        assert math.isnan(step.item()) == spec.startswith("sim")
        return trainer.memory()


@pytest.mark.feature("Plans: Rehearse with emulated devices")
def test_a_trainer_works_on_sim_devices_and_takes_the_memory_that_it_takes_on_cpus() -> None:
    for one, other in zip(memory_of_a_run("sim*2"), memory_of_a_run("cpu*2"), strict=True):
        assert (one.used_bytes, one.peak_bytes) == (other.used_bytes, other.peak_bytes)
        assert one.peak_bytes > one.used_bytes > 0


@pytest.mark.feature("Data parallel: Give uneven devices uneven shares")
def test_shares_of_sim_devices_are_their_speeds() -> None:
    model = nn.Linear(4, 1)
    with (
        open_pool("sim,sim@0.5") as pool,
        onebox.Trainer(
            model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool
        ) as trainer,
    ):
        trainer.step(torch.zeros(6, 4), torch.zeros(6, 1))
        trainer.wait()
        assert trainer.plan is not None
        assert trainer.plan.stages[0].shares == pytest.approx((2 / 3, 1 / 3))
