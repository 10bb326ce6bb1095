"""A plan whose optimizer steps on the host: the bits of one on the devices, and none of their memory for its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import onebox
from onebox.errors import UsageError
from onebox.plan import Plan, Stage
from onebox.pool import raise_first
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import WorkerMemory
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import SEED, reference, run, staged
from tests.kit.trainer_arguments import grouped

SIZES = (8, 8, 5, 8)
HALF = 2


def split(name: str) -> Plan:
    """Return a plan whose one stage is split over two workers."""
    return Plan(stages=(Stage(segments=(), replicas=((0, 1),), shares=(1.0,)),), micro_batch=2)


PLANS: dict[str, tuple[str, Callable[[str], Plan]]] = {
    "two replicas": ("dropping", lambda name: Plan.data_parallel([0, 1], [2.0, 1.0], micro_batch=3)),
    "sums at the client": ("mlp", lambda name: Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=3, sync="client")),
    "two stages": ("cnn", lambda name: staged(name, [0, 1])),
    "a parameter of two stages": ("tied", lambda name: staged(name, [0, 1], schedule="zb-h1")),
    "split layers": ("cnn", split),
}


def on_host(plan: Plan) -> Plan:
    return replace(plan, update="host")


@pytest.mark.feature("Memory: Update parameters on the host")
@pytest.mark.parametrize("name", PLANS)
def test_steps_on_the_host_have_the_bits_of_steps_on_the_devices(name: str, pools: Pools) -> None:
    case, make = PLANS[name]
    options: dict[str, Any] = {} if name == "two stages" else {"clip_grad_norm": 0.3}
    plan = make(case)
    found = run(pools(2), case, on_host(plan), SIZES, optimizer="adam-in-groups", **options)
    assert_same(found, run(pools(2), case, plan, SIZES, optimizer="adam-in-groups", **options), tolerance=0)
    plain = {"max_norm": options["clip_grad_norm"]} if options else {}
    assert_same(found, reference(case, plan, SIZES, optimizer="adam-in-groups", **plain))


def peaks(pool: onebox.Pool, name: str, plan: Plan) -> tuple[dict[int, int], list[WorkerMemory]]:
    """Return what a trainer predicts of the memory of a step, and what its workers count in the third one."""
    case = CASES[name]
    model = case.model()
    (batch,) = case.batches([6])
    optimizer = OPTIMIZERS["adamw"](model)
    arguments: dict[str, Any] = {"plan": plan, "in_flight": 1, "check_every": 0}
    with onebox.Trainer(model, case.loss, optimizer, **grouped(pool=pool, **arguments)) as trainer:
        for _ in range(2):
            trainer.step(*batch)
        trainer.wait()
        raise_first([pool.post(worker, [Ask("peak")], answer=True) for worker in range(len(pool))])
        trainer.step(*batch)
        trainer.wait()
        return trainer.predicted_memory(*batch), trainer.memory()


@pytest.mark.parametrize("name", ["two stages", "split layers"])
def test_the_memory_of_the_devices_is_predicted_to_the_byte(name: str, pools: Pools) -> None:
    case, make = PLANS[name]
    plan, pool = make(case), pools(2)
    (there, counted_there), (here, counted_here) = (peaks(pool, case, each) for each in (plan, on_host(plan)))
    assert there == {number: memory.peak_bytes for number, memory in enumerate(counted_there)}
    assert here == {number: memory.peak_bytes for number, memory in enumerate(counted_here)}
    for number, memory in enumerate(counted_here):
        assert memory.host_bytes == counted_there[number].used_bytes - memory.used_bytes > 0
        assert counted_there[number].host_bytes == 0
        assert here[number] == there[number] - memory.host_bytes


def test_where_the_optimizer_steps_is_an_option_of_a_trainer_without_a_plan(pools: Pools) -> None:
    case = CASES["mlp"]
    model = case.model()
    with pytest.raises(UsageError, match="update='hosts': allowed are 'device', 'host'"):
        onebox.Trainer(
            model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2), plan=onebox.DataParallel(update="hosts")
        )  # type: ignore[arg-type]
    with onebox.Trainer(
        model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2), plan=onebox.DataParallel(update="host")
    ) as trainer:
        trainer.step(*case.batches([4])[0])
        trainer.wait()
        assert trainer.plan is not None
        assert trainer.plan.update == "host"


def steps(trainer: onebox.Trainer, batches: list[Any]) -> Outcome:
    losses = [trainer.step(*batch) for batch in batches]
    return Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=trainer.tensors())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("split layers", "host", "device"), ("split layers", "device", "host"), ("two replicas", "host", "host")],
)
def test_checkpoints_of_either_kind_go_on_as_either(
    name: str, before: Any, after: Any, pools: Pools, tmp_path: Path
) -> None:
    key, make = PLANS[name]
    case, plan, pool = CASES[key], make(key), pools(2)
    batches = case.batches(list(SIZES))
    model = case.model()
    first = replace(plan, update=before)
    with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, plan=first, seed=SEED) as trainer:
        steps(trainer, batches[:HALF])
        saved = trainer.save(tmp_path)
        straight = steps(trainer, batches[HALF:])
    model = case.model()
    options = {} if before == after else {"plan": replace(plan, update=after)}
    resumed = onebox.Trainer.resume(
        saved, model, case.loss, OPTIMIZERS["adamw"](model), **grouped(pool=pool, **options)
    )
    with resumed as trainer:
        found = steps(trainer, batches[HALF:])
        assert trainer.plan is not None
        assert trainer.plan.update == after
        assert all((memory.host_bytes > 0) == (after == "host") for memory in trainer.memory())
    assert_same(found, straight, tolerance=0)
    assert all(memory.host_bytes == 0 for worker in range(2) for memory in _memory(pool, worker)), "nothing stays"


def _memory(pool: onebox.Pool, worker: int) -> list[WorkerMemory]:
    answer = pool.post(worker, [Ask("memory")], answer=True).result(30)
    return [result for result in answer.results if isinstance(result, WorkerMemory)]
