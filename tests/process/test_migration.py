"""A plan takes over from another between two steps: the result stays the same to the last bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import onebox
from onebox.engine.workload.captures import Captures
from onebox.errors import UsageError
from onebox.plan import ASYNC, Action, Plan, Stage
from onebox.plan.model.schedule import Kind
from onebox.wire.protocol.requests import Define, Instruction, Routine, StoredProgram
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import untouched
from tests.kit.stages import SEED, segments, staged
from tests.kit.trainer_arguments import grouped

STEPS = 6


CAPTURED: dict[tuple[str, torch.dtype], Captures] = {}
"""Each model is captured once."""


class Run(NamedTuple):
    """What a run ends with."""

    losses: list[float]
    tensors: Mapping[str, Tensor]
    remembered: dict[tuple[str, str], Tensor | bool | int | float | None]


DEVICES = 4
"""Workers of the pool."""


def moved(plan: Plan, cut: int, by: int) -> Plan:
    """Return a plan with the cut behind a stage moved by some segments."""
    names = [list(stage.segments) for stage in plan.stages]
    both, bound = names[cut] + names[cut + 1], len(names[cut]) + by
    names[cut], names[cut + 1] = both[:bound], both[bound:]
    stages = [replace(stage, segments=tuple(own)) for stage, own in zip(plan.stages, names, strict=True)]
    return replace(plan, stages=tuple(stages))


def trained(
    pool: onebox.Pool,
    name: str,
    plan: Plan,
    changes: Mapping[int, Plan],
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "adamw",
    **options: Any,
) -> Run:
    """Train a case, with other plans that take over before some steps."""
    case = CASES[name]
    model = case.model().to(dtype)
    batches = [
        tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in batch)
        for batch in case.batches([8] * STEPS)
    ]
    arguments = {"seed": SEED, "check_every": 1, "plan": plan, **options}
    with onebox.Trainer(model, case.loss, OPTIMIZERS[optimizer](model), **grouped(pool=pool, **arguments)) as trainer:
        trainer.share_captures(CAPTURED.setdefault((name, dtype), trainer.captures))
        losses = []
        for step, batch in enumerate(batches):
            if step in changes:
                trainer._run.adopt(changes[step])
                assert trainer.plan == changes[step]
            losses.append(trainer.step(*batch))
        found = [float(loss) for loss in losses]
        state = {(name, key): value for name, key, value in trainer.optimizer_state()}
        tensors = trainer.tensors()
    assert untouched(pool), "what the plans before had on the workers is gone"
    return Run(found, tensors, state)


def assert_same_bits(one: Run, other: Run) -> None:
    assert one.losses == other.losses
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    assert one.remembered.keys() == other.remembered.keys()
    for key, value in one.remembered.items():
        twin = other.remembered[key]
        assert torch.equal(value, twin) if isinstance(value, Tensor) and isinstance(twin, Tensor) else value == twin


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer"), [("unet", torch.float64, "adamw"), ("gpt2", torch.float32, "sgd")]
)
def test_cuts_that_move_change_no_bit(pool: onebox.Pool, name: str, dtype: torch.dtype, optimizer: str) -> None:
    plan = staged(name, (0, 1, 2))
    there = moved(plan, 0, 1)
    changes = {1: there, 2: moved(there, 1, -1), 4: replace(plan, schedule="gpipe"), 5: plan}
    whole = trained(pool, name, plan, {}, dtype=dtype, optimizer=optimizer)
    assert_same_bits(trained(pool, name, plan, changes, dtype=dtype, optimizer=optimizer), whole)


@pytest.mark.parametrize(
    ("name", "before", "after", "optimizer"),
    [
        ("dropping", (0, 1), (3, 1), "adamw"),  # another device; random numbers
        ("resnet", (0, 1), (1, 0), "sgd"),  # stages change places; batch norm's buffers
        ("tied", (0, 1), (1, 0), "adam-in-groups"),  # a weight that two stages read
    ],
)
def test_stages_that_change_places_change_no_bit(
    pool: onebox.Pool, name: str, before: Sequence[int], after: Sequence[int], optimizer: str
) -> None:
    plan, other = staged(name, before), staged(name, after)
    whole = trained(pool, name, plan, {}, optimizer=optimizer)
    assert_same_bits(trained(pool, name, plan, {1: other, 3: plan, 4: other}, optimizer=optimizer), whole)


def test_replicas_that_change_places_and_shares_keep_the_result(pool: onebox.Pool) -> None:
    plan = staged("unet", ((0, 1), (2, 3)))
    others = staged("unet", ((0, 2), (1, 3)))
    whole = trained(pool, "unet", plan, {})
    assert_same_bits(trained(pool, "unet", plan, {2: others, 4: plan}), whole)
    uneven = staged("unet", ((0, 1), (2,)), shares=((2.0, 1.0), (1.0,)))
    found = trained(pool, "unet", plan, {3: uneven, 5: plan})
    assert torch.allclose(torch.tensor(found.losses), torch.tensor(whole.losses), rtol=0, atol=1e-10)


def test_only_what_moves_travels_and_not_through_the_client(pool: onebox.Pool) -> None:
    case = CASES["gpt2"]
    plan = staged("gpt2", (0, 1))
    model, batch = case.model(), case.batches([8])[0]
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan) as trainer:
        trainer.step(*batch).item()
        before = pool.sent_bytes
        moves = trainer._run.adopt(moved(plan, 0, 1))
        sent = [now - then for now, then in zip(pool.sent_bytes, before, strict=True)]
        trainer.step(*batch).item()
    names = segments("gpt2")[: len(plan.stages[0].segments) + 1]
    assert 0 < moves.size_bytes < sum(p.nbytes for p in model.parameters()) // 2
    assert moves.names <= len(list(model.parameters()))
    assert max(sent) < moves.size_bytes, (sent, moves, names)


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_other_micro_batches_keep_the_result_of_a_model_that_does_not_depend_on_them(
    name: str, pool: onebox.Pool
) -> None:
    plan = staged(name, (0, 1), micro_batch=2)
    whole, pairs = Plan.data_parallel([2], [1.0], micro_batch=8), staged(name, ((0, 2), (1, 3)), micro_batch=1)
    usual = trained(pool, name, plan, {})
    found = trained(pool, name, plan, {1: whole, 3: pairs, 5: plan})
    assert torch.allclose(torch.tensor(found.losses), torch.tensor(usual.losses), rtol=0, atol=1e-10)
    for tensor_name, tensor in usual.tensors.items():
        torch.testing.assert_close(found.tensors[tensor_name], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["dropping", "resnet"])
def test_plans_that_cannot_take_over_are_refused_and_the_run_goes_on(name: str, pool: onebox.Pool) -> None:
    """Among them other micro-batches, where the model draws random numbers, or normalises by its batch."""
    case, plan = CASES[name], staged(name, (0, 1))
    model, batch = case.model(), case.batches([8])[0]
    whole = Plan(stages=(Stage(replicas=((0,),), shares=(1.0,)),), micro_batch=4)
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan) as trainer:
        trainer.step(*batch).item()
        for wrong, told in ((whole, "micro-batches"), (replace(plan, update="host"), "update='host'")):
            with pytest.raises(UsageError, match=told):
                trainer._run.adopt(wrong)
        assert trainer.plan == plan
        trainer.step(*batch).item()


def test_shared_out_states_of_the_optimizer_move_with_their_owners(pool: onebox.Pool) -> None:
    plan = staged("unet", ((0, 1), (2, 3)), optimizer="sharded")
    others = staged("unet", ((2, 1), (0, 3)), optimizer="sharded")
    whole = trained(pool, "unet", plan, {})
    assert_same_bits(trained(pool, "unet", plan, {2: others, 4: moved(others, 0, -1)}), whole)


@pytest.mark.parametrize("delay", ["none", "predict"])
def test_versions_of_weights_move_with_what_is_stepped(pool: onebox.Pool, delay: str) -> None:
    plan = staged("mlp", (0, 1), schedule="async-1f1b")
    more = {"staleness": 1, "delay": delay, "warm_up": 1}
    whole = trained(pool, "mlp", plan, {}, optimizer="sgd", **more)
    other = staged("mlp", (1, 0), schedule="async-1f1b")
    changes = {2: other, 3: plan, 5: other}
    assert_same_bits(trained(pool, "mlp", plan, changes, optimizer="sgd", **more), whole)


@pytest.mark.parametrize(("delay", "optimizer"), [("none", "sgd"), ("predict", "sgd"), ("both", "adamw")])
def test_versions_of_weights_move_with_shared_out_states_too(pool: onebox.Pool, delay: str, optimizer: str) -> None:
    """Also where what one owner hands out comes long after a step of the others."""
    late: dict[str, Any] = {"schedule": "async-1f1b", "optimizer": "sharded"}
    plan, others = (staged("unet", places, **late) for places in (((0, 1), (2, 3)), ((2, 1), (0, 3))))
    more = {"optimizer": optimizer, "staleness": 1, "delay": delay, "warm_up": 1}
    whole = trained(pool, "unet", plan, {}, **more)
    changes = {2: others, 4: moved(others, 0, -1), 5: plan}
    assert_same_bits(trained(pool, "unet", plan, changes, **more), whole)
    with onebox.open("cpu*3,cpu@0.1", threads=1) as uneven:
        assert_same_bits(trained(uneven, "unet", plan, changes, **more), whole)


@pytest.mark.parametrize("warm_up", [0, 3])
def test_what_was_written_down_before_a_step_holds_behind_it(warm_up: int, pool: onebox.Pool) -> None:
    """That step is the first of which weights have versions, or not, and the rate of learning is another from it on."""
    plan = staged("mlp", (0, 1), micro_batch=2, schedule=ASYNC)
    other, case, found = staged("mlp", (2, 1), micro_batch=2, schedule=ASYNC), CASES["mlp"], []
    for changes in (False, True):
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        arguments: dict[str, Any] = {"pool": pool, "plan": plan, "staleness": 1, "delay": "predict", "warm_up": warm_up}
        with onebox.Trainer(model, case.loss, optimizer, **grouped(seed=SEED, **arguments)) as trainer:
            losses, batches = [], case.batches([8] * STEPS)
            losses += [trainer.step(*batch) for batch in batches[:3]]
            prepared = trainer._run.prepare(other) if changes else None
            if prepared is not None:
                prepared.ask()
                while not prepared.write(1.0):
                    pass
            optimizer.param_groups[0]["lr"] = 0.02
            losses.append(trainer.step(*batches[3]))
            if changes:
                assert trainer._run.adopt(other, prepared).names > 0
            losses += [trainer.step(*batch) for batch in batches[4:]]
            state = {(name, key): value for name, key, value in trainer.optimizer_state()}
            found.append(Run([float(loss) for loss in losses], trainer.tensors(), state))
    assert_same_bits(*found)


def test_each_micro_batch_of_each_step_is_seen_once_also_where_the_pipeline_was_drained(pool: onebox.Pool) -> None:
    case, plan, other = CASES["mlp"], *(staged("mlp", own, schedule="async-1f1b") for own in ((0, 1), (1, 0)))
    model, batches = case.model(), case.batches([8] * 5)
    with onebox.Trainer(
        model,
        case.loss,
        OPTIMIZERS["sgd"](model),
        pool=pool,
        plan=plan,
        stale=onebox.StaleGradients(correction="none", warm_up=1),
    ) as trainer:
        for step, batch in enumerate(batches):
            if step == 3:
                trainer._run.adopt(other)
                assert trainer._run.overlap.deferred, "nobody has waited for what was left of the step before"
            trainer.step(*batch)
        trainer.wait()
        events = trainer.events()
        assert trainer.delays == {0: 1, 1: len(batches) - 2}
    seen = Counter((event.begun, event.action) for event in events if event.action is not None)
    parts = range(len(plan.micro_batches(8)))
    kinds: tuple[Kind, ...] = ("F", "B")
    expected = [Action(kind, stage, part) for kind in kinds for stage in range(len(plan.stages)) for part in parts]
    assert seen == Counter((step, action) for step in range(len(batches)) for action in expected)


def test_programs_are_sent_before_a_change_and_those_that_are_there_are_not_sent_again(
    pool: onebox.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plan = CASES["mlp"], staged("mlp", (0, 1), schedule="async-1f1b")
    other = moved(plan, 0, 1)
    model, batch = case.model(), case.batches([8])[0]
    sent: list[Instruction] = []
    post = pool.post

    def noted(worker: int, instructions: Sequence[Instruction], *rest: Any, **more: Any) -> Any:
        sent.extend(instructions)
        return post(worker, instructions, *rest, **more)

    def defined(kind: type[StoredProgram] | type[Routine]) -> int:
        return sum(isinstance(one, Define) and isinstance(one.what, kind) for one in sent)

    monkeypatch.setattr(pool, "post", noted)
    with onebox.Trainer(
        model,
        case.loss,
        OPTIMIZERS["sgd"](model),
        pool=pool,
        plan=plan,
        stale=onebox.StaleGradients(correction="none", warm_up=0),
    ) as trainer:
        trainer.step(*batch)
        sent.clear()
        prepared = trainer._run.prepare(other)
        assert defined(StoredProgram)
        assert defined(Routine) == 3 * len(plan.devices)
        sent.clear()
        trainer._run.adopt(other, prepared)
        trainer.step(*batch).item()
        assert not defined(StoredProgram)
        assert not defined(Routine)
        trainer._run.adopt(plan)
        assert not defined(StoredProgram), "the plan is taken back, and its programs are still there"
        assert defined(Routine) == 3 * len(plan.devices)
        trainer.step(*batch).item()


def test_a_checkpoint_has_the_plan_that_took_over_also_where_it_did_before_the_first_step(
    pool: onebox.Pool, tmp_path: Path
) -> None:
    case, plan, other = CASES["mlp"], staged("mlp", (0, 1)), staged("mlp", (1, 0))
    model, batch = case.model(), case.batches([8])[0]
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan) as trainer:
        trainer._run.adopt(other)
        trainer.step(*batch).item()
        assert trainer.plan == other
        trainer._run.adopt(plan)
        trainer.save(tmp_path)
        going_on = float(trainer.step(*batch))
    again = case.model()
    with onebox.Trainer.resume(tmp_path, again, case.loss, OPTIMIZERS["sgd"](again), pool=pool) as resumed:
        assert float(resumed.step(*batch)) == going_on
        assert resumed.plan == plan
