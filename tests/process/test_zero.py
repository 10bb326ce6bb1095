"""A plan whose replicas share out the optimizer's state: the result of one process, and a part of the memory each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import onebox
from onebox.errors import UsageError
from onebox.plan import Plan, Stage
from onebox.pool import raise_first
from onebox.wire.protocol.instructions import Ask
from tests.kit.hosts import sum_in_hosts_first
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import SEED, outcome, reference, run, staged
from tests.kit.trainer_arguments import grouped

SIZES = (8, 8, 5, 8, 8)
HALF = 2


def split(name: str) -> Plan:
    """Return a plan of two replicas, each split over two workers."""
    return Plan(stages=(Stage(segments=(), replicas=((0, 1), (2, 3)), shares=(1.0, 1.0)),), micro_batch=2)


def replicas(*shares: float) -> Callable[[str], Plan]:
    return lambda name: Plan.data_parallel(range(len(shares)), shares, micro_batch=3)


PLANS: dict[str, tuple[str, Callable[[str], Plan], dict[str, Any]]] = {
    "two replicas": ("mlp", replicas(1.0, 1.0), {"optimizer": "sgd"}),
    "three uneven replicas": ("dropping", replicas(3.0, 2.0, 1.0), {"optimizer": "adam-in-groups"}),
    "clipped": ("mlp", replicas(1.0, 1.0, 1.0), {"clip_grad_norm": 0.3}),
    "stages with replicas": ("mlp", lambda name: staged(name, [(0, 1), (2, 3)]), {"clip_grad_norm": 0.3}),
    "a parameter of two stages": ("tied", lambda name: staged(name, [0, 1], schedule="zb-h1"), {}),
    "split layers": ("cnn", split, {}),
}


def sharded(plan: Plan) -> Plan:
    return replace(plan, optimizer="sharded")


@pytest.mark.parametrize("name", PLANS)
def test_shared_out_states_give_the_result_of_one_process(name: str, pools: Pools) -> None:
    """And the bits of replicated ones; of a norm for clipping that is added up in another order, nearly."""
    case, make, options = PLANS[name]
    plan = make(case)
    pool = pools(len(plan.devices))
    found = run(pool, case, sharded(plan), SIZES, **options)
    if "replicas" in name:
        clipped = "clip_grad_norm" in options
        assert_same(found, run(pool, case, plan, SIZES, **options), **({} if clipped else {"tolerance": 0}))
    renamed = {"max_norm" if key == "clip_grad_norm" else key: value for key, value in options.items()}
    assert_same(found, reference(case, plan, SIZES, **renamed))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])


def trainer_on(
    pool: onebox.Pool, plan: Plan | None, name: str, make: Callable[[nn.Module], Any], **options: Any
) -> onebox.Trainer:
    case = CASES[name]
    model = case.model()
    return onebox.Trainer(
        model, case.loss, make(model), **grouped(pool=pool, plan=plan, seed=SEED, check_every=1, **options)
    )


def steps(trainer: onebox.Trainer, name: str, first: int = 0, last: int = len(SIZES)) -> Outcome:
    batches = CASES[name].batches(list(SIZES))[first:last]
    return outcome(trainer, [trainer.step(*batch) for batch in batches])


def test_an_optimizer_that_looks_at_whole_parameters_steps_them_whole(pools: Pools) -> None:
    plan = replicas(1.0, 1.0)("mlp")
    found = []
    for each in (plan, sharded(plan)):
        with trainer_on(pools(2), each, "mlp", muon) as trainer:
            found.append(steps(trainer, "mlp"))
    assert_same(*found, tolerance=0)


@pytest.mark.parametrize(("optimizer", "before", "after"), [("adamw", 2, 3), ("sgd", 3, 2), ("adamw", 2, 0)])
def test_checkpoints_go_on_with_another_number_of_replicas(
    optimizer: str, before: int, after: int, pools: Pools, tmp_path: Path
) -> None:
    """``0``: on two that have everything."""
    plans = {count: sharded(replicas(*[1.0] * count)("mlp")) for count in (2, 3)} | {0: replicas(1.0, 1.0)("mlp")}
    case = CASES["mlp"]
    with trainer_on(pools(before), plans[before], "mlp", OPTIMIZERS[optimizer]) as trainer:
        steps(trainer, "mlp", 0, HALF)
        saved = trainer.save(tmp_path)
        straight = steps(trainer, "mlp", HALF)
    model = case.model()
    options = {"pool": pools(after or 2), "plan": plans[after]}
    resumed = onebox.Trainer.resume(saved, model, case.loss, OPTIMIZERS[optimizer](model), **grouped(**options))
    with resumed as trainer:
        assert_same(steps(trainer, "mlp", HALF), straight, **({"tolerance": 0} if not after else {}))


@pytest.mark.feature("Data parallel: Shard the state of the optimizer")
def test_each_replica_has_its_part_of_the_state_and_that_is_predicted_to_the_byte(pools: Pools) -> None:
    pool, sizes = pools(3), []
    inputs, targets = torch.ones(9, 24), torch.arange(9)
    for plan in (replicas(1.0, 1.0, 1.0)("deep"), sharded(replicas(1.0, 1.0, 1.0)("deep"))):
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(9)))
        optimizer = torch.optim.AdamW(model.parameters())
        with onebox.Trainer(
            model, nn.functional.cross_entropy, optimizer, pool=pool, plan=plan, engine=onebox.Engine(in_flight=1)
        ) as trainer:
            trainer.step(inputs, targets)
            trainer.wait()
            parameters = sum(tensor.nbytes for tensor in trainer.tensors().values())
            sizes.append([memory.used_bytes - parameters for memory in trainer.memory()])
            raise_first([pool.post(worker, [Ask("peak")], answer=True) for worker in range(3)])
            trainer.step(inputs, targets)
            trainer.wait()
            peaks = {number: memory.peak_bytes for number, memory in enumerate(trainer.memory())}
            assert trainer.predicted_memory(inputs, targets) == peaks
    whole, parts = sizes
    assert len(set(whole)) == 1
    assert sum(parts) == pytest.approx(whole[0], rel=0.01)
    assert max(parts) < 0.35 * whole[0], "a third each"


def test_it_is_an_option_of_a_trainer_without_a_plan(pools: Pools) -> None:
    with trainer_on(pools(2), None, "mlp", OPTIMIZERS["adamw"], shard_optimizer=True) as trainer:
        steps(trainer, "mlp", 0, 1)
        assert trainer.plan is not None
        assert trainer.plan.optimizer == "sharded"
    with pytest.raises(UsageError, match="needs sync='workers'"):
        trainer_on(pools(2), None, "mlp", OPTIMIZERS["adamw"], shard_optimizer=True, sync="client")


def test_it_steps_on_the_host_too(pools: Pools) -> None:
    plan = replace(sharded(staged("cnn", [(0, 1)])), update="host")
    found = run(pools(2), "cnn", plan, SIZES)
    assert_same(found, reference("cnn", plan, SIZES))


# ---- sums in each host first


def test_sums_in_each_host_first_give_the_result_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of two hosts of two."""
    sum_in_hosts_first(monkeypatch, (0, 1), (2, 3))
    plan = replicas(1.0, 1.0, 1.0, 1.0)("mlp")
    with (
        onebox.open("cpu*4", threads=1) as pool,
        trainer_on(pool, plan, "mlp", OPTIMIZERS["adamw"], in_flight=1) as trainer,
    ):
        found = steps(trainer, "mlp")
        raise_first([pool.post(worker, [Ask("peak")], answer=True) for worker in range(4)])
        (batch,) = CASES["mlp"].batches([8])
        trainer.step(*batch)
        trainer.wait()
        peaks = {number: memory.peak_bytes for number, memory in enumerate(trainer.memory())}
        assert trainer.predicted_memory(*batch) == peaks
        transfers = Counter((event.worker, event.name) for event in trainer.events() if event.step == 0)
    assert [transfers[worker, "broadcast"] for worker in range(4)] == [transfers[0, "broadcast"]] * 4
    reduces = [transfers[worker, "reduce"] for worker in range(4)]
    assert reduces[0] == reduces[2] == 2 * reduces[1] == 2 * reduces[3] > 0, "who is first of its host sums up twice"
    assert_same(found, reference("mlp", plan, SIZES))
