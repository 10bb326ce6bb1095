"""Budgets: what does not fit fails as a lack of memory, which says where, how much, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import onebox
from onebox.engine.memory.simulator import peak_of
from onebox.engine.workload.batch import as_batch
from onebox.errors import DeviceMemoryError, PlanError, UsageError
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from onebox.pool import raise_first
from onebox.sizes import enough_text, size_text
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import WorkerMemory
from tests.kit.pools import Pools

LARGE_BYTES, SMALL_BYTES = 4 << 20, 192 << 10
ADVICE = (
    "smaller micro_batch, a plan with other policies .recompute, offload, swap; 'onebox memory'.*update='host'.*memory="
)


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    """Two workers, of which one has little memory."""
    with onebox.open("cpu*2", threads=1, memory="4MiB,192KiB") as opened:
        yield opened


@pytest.fixture
def parts() -> tuple[nn.Module, Any, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """A model, loss, optimizer and batch: the second half of the model takes most of the small budget."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    return model, nn.functional.mse_loss, torch.optim.Adam(model.parameters()), (torch.ones(64, 8), torch.zeros(64, 8))


def halved(parts: Any) -> Plan:
    """Return a plan of two stages."""
    model, loss, _, batch = parts
    names = TracedModel(capture(model, loss, batch), backward=True).segments
    stages = (
        Stage(segments=names[:1], replicas=((0,),), shares=(1.0,)),
        Stage(segments=names[1:], replicas=((1,),), shares=(1.0,)),
    )
    return Plan(stages=stages, micro_batch=16)


@pytest.mark.feature("Memory: Limit the memory of each device")
def test_each_device_has_its_own_budget(pool: onebox.Pool) -> None:
    assert [device.memory_bytes for device in pool.devices] == [LARGE_BYTES, SMALL_BYTES]


@pytest.mark.feature("Memory: Limit the memory of each device")
def test_an_eager_operator_above_the_budget_is_named(pool: onebox.Pool) -> None:
    small = torch.ones(1 << 12, device="vgpu:1")
    with pytest.raises(torch.OutOfMemoryError, match=rf"worker 1 .*aten\.repeat.*quota is {SMALL_BYTES}") as caught:
        small.repeat(16).sum().item()
    error = caught.value.__cause__
    assert isinstance(error, DeviceMemoryError)
    assert "let go of what is needed no more, or give the device a larger budget (memory=)" in str(error)
    assert (error.worker, error.operator) == (1, "aten.repeat.default")
    assert (error.asked_bytes, error.used_bytes, error.allowed_bytes) == (16 * small.nbytes, small.nbytes, SMALL_BYTES)
    assert (error.stage, error.doing) == (None, "")
    assert small.sum().item() == 1 << 12, "what is there stays"


@pytest.mark.feature("Memory: Be told where memory lacks, before uploading if possible")
def test_an_operator_of_a_step_above_the_budget_is_named_with_its_stage(pool: onebox.Pool, parts: Any) -> None:
    model, loss, optimizer, batch = parts
    others = torch.ones(35 << 10, device="vgpu:1")  # somebody else's, of which no plan knows
    with onebox.Trainer(model, loss, optimizer, pool=pool, plan=halved(parts), loss_reduction="mean") as trainer:
        for _ in range(2):  # the state on the workers is void: the error stays the same
            with pytest.raises(DeviceMemoryError, match=ADVICE) as caught:
                trainer.step(*batch).item()
        error = caught.value
        assert error.worker == 1
        assert error.operator.startswith("aten.")
        assert error.stage == 1
        assert error.doing.startswith("stage 1 ")
        assert f"{error.operator} failed in {error.doing}:" in str(error)
        assert error.allowed_bytes == SMALL_BYTES < error.asked_bytes + error.used_bytes
        assert error.used_bytes >= others.nbytes
    del others
    with onebox.Trainer(model, loss, optimizer, pool=pool, plan=halved(parts), loss_reduction="mean") as trainer:
        assert trainer.step(*batch).item() > 0


def held_bytes(pool: onebox.Pool) -> list[int]:
    answers = raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in range(len(pool))])
    return [result.used_bytes for answer in answers for result in answer.results if isinstance(result, WorkerMemory)]


@pytest.mark.feature("Memory: Be told where memory lacks, before uploading if possible")
def test_a_step_that_will_not_fit_is_refused_before_anything_is_uploaded(pool: onebox.Pool, parts: Any) -> None:
    model, loss, optimizer, batch = parts
    small, large = batch, (torch.ones(256, 8), torch.zeros(256, 8))
    plan = replace(halved(parts), micro_batch=256)
    before = held_bytes(pool)
    with onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan) as trainer:
        with pytest.raises(DeviceMemoryError, match=ADVICE) as caught:
            trainer.step(*large)
        assert held_bytes(pool) == before
        error = caught.value
        assert (error.worker, error.stage, error.allowed_bytes) == (1, 1, SMALL_BYTES)
        assert error.operator.startswith("aten.")
        assert f"{error.operator} would fail in {error.doing}:" in str(error)
        needed = error.asked_bytes + error.used_bytes
        assert (
            f"{enough_text(needed)} needed, but the quota is {size_text(SMALL_BYTES)}: "
            f"{enough_text(needed - SMALL_BYTES)} too much"
        ) in str(error)
        assert trainer.step(*(tensor[:8] for tensor in small)).item() > 0, "a smaller batch fits"
        with pytest.raises(DeviceMemoryError, match="no step was begun"):
            trainer.step(*large)
        assert trainer.step(*(tensor[:8] for tensor in small)).item() > 0, "nothing was lost"
        assert trainer.steps_done == 2


def test_an_evaluation_that_will_not_fit_is_refused_before_anything_is_sent(pool: onebox.Pool, parts: Any) -> None:
    model, loss, optimizer, batch = parts
    large = (torch.ones(512, 8), torch.zeros(512, 8))
    plan = replace(halved(parts), micro_batch=512)
    small = tuple(tensor[:8] for tensor in batch)
    with onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan) as trainer:
        trainer.step(*small).item()
        before = held_bytes(pool)
        with pytest.raises(DeviceMemoryError, match=r"nothing was sent\n.*evaluate smaller batches") as caught:
            trainer.evaluate([large])
        assert held_bytes(pool) == before
        error = caught.value
        assert (error.worker, error.stage, error.allowed_bytes) == (1, 1, SMALL_BYTES)
        assert error.asked_bytes + error.used_bytes > SMALL_BYTES
        assert trainer.evaluate([small]).samples == 8
        assert trainer.step(*small).item() > 0, "nothing was lost"


def test_the_memory_of_an_evaluation_is_the_predicted_one(parts: Any) -> None:
    """To the byte; and where it is too much at once, it is divided as steps are."""
    model, loss, optimizer, batch = parts
    large = (torch.ones(1024, 8), torch.zeros(1024, 8))
    plan = Plan.data_parallel([0], [1.0], micro_batch=4)
    with onebox.open("cpu", threads=1) as pool:
        with onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan) as trainer:
            whole = trainer.evaluate([large]).loss
            measured = trainer.memory()[0].peak_bytes
            ready = trainer._run.set_up(as_batch(*large))
            (found,) = ready.evaluation_contents(as_batch(*large), at_once=True, stepped=False).values()
            assert peak_of(found) == measured
        for spare_bytes, count in ((0, 1), (-1, 256)):
            own = replace(plan, memory_bytes=(measured + spare_bytes,))
            with onebox.Trainer(model, loss, optimizer, pool=pool, plan=own) as trainer:
                assert trainer.evaluate([large]).loss == pytest.approx(whole)
                ready = trainer._run.set_up(as_batch(*large))
                assert len(ready.evaluation(as_batch(*large), stepped=False).micro_batches) == count
        own = replace(plan, micro_batch=None, memory_bytes=(measured - 1,))
        with onebox.Trainer(model, loss, optimizer, pool=pool, plan=own) as trainer:
            with pytest.raises(DeviceMemoryError, match="1 bytes too much; nothing was sent"):
                trainer.evaluate([large])
            assert held_bytes(pool) == [0]
            assert trainer.evaluate([batch]).samples == 64


def test_a_plan_may_carry_budgets_of_its_own(pool: onebox.Pool, parts: Any) -> None:
    model, loss, optimizer, batch = parts
    plan = halved(parts)
    with onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan) as trainer:
        exact = trainer.predicted_memory(*batch)
        trainer.step(*batch).item()
    for spare, fits in ((0, True), (-1, False)):
        own = replace(plan, memory_bytes=(exact[0] + spare, 0))
        with onebox.Trainer(model, loss, optimizer, pool=pool, plan=Plan.from_json(own.to_json())) as trainer:
            if fits:
                assert trainer.step(*batch).item() > 0
            else:
                with pytest.raises(
                    DeviceMemoryError, match=f"worker 0 .*the quota is {exact[0] - 1} bytes: 1 bytes too"
                ):
                    trainer.step(*batch)


def test_a_plan_is_made_for_budgets_and_carries_them(pools: Pools, parts: Any) -> None:
    model, loss, optimizer, batch = parts

    def planned(memory: Any) -> Plan:
        return onebox.make_plan(model, loss, optimizer, *batch, pool=pools(1), micro_batches=[64], memory=memory).plan

    plain = planned(None)
    assert plain.memory_bytes == ()
    assert plain.predicted is not None
    (peak_bytes,) = plain.predicted.peak_bytes
    roomy = planned({0: peak_bytes})
    assert roomy.memory_bytes == (peak_bytes,)
    assert roomy.predicted is not None
    assert roomy.predicted.peak_bytes[0] <= peak_bytes
    with pytest.raises(PlanError):
        planned("40KiB")
    with pytest.raises(UsageError, match="memory of 2 devices, but the pool has 1"):
        planned("1MiB,2MiB")
    with onebox.Trainer(model, loss, optimizer, pool=pools(1), plan=roomy) as trainer:
        assert trainer.step(*batch).item() > 0
        with pytest.raises(DeviceMemoryError, match=f"the quota is {peak_bytes}"):
            trainer.step(torch.ones(640, 8), torch.zeros(640, 8))
