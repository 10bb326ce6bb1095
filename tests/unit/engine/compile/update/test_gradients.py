"""Gradients: accumulated once a micro-batch, summed once over their holders, clipped over all stages, applied once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from msgspec import structs

from onebox.engine.compile.routine import RoutineBuilder
from onebox.engine.compile.update.gradients import Gradients, WorkerGradients
from onebox.engine.compile.update.optimizer_update import WorkerUpdate
from onebox.engine.compile.update.reductions import ReductionQueue, RoutineScope
from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.errors import CaptureError
from onebox.plan import Action, Plan
from onebox.plan_names import GradientCodec
from onebox.wire import Program
from onebox.wire.protocol.instructions import Call, Free, Gather, OptimizerStep, Reduce, Step
from tests.unit.engine.nets import PLANS, Lowered, batch, lower, plan, stage
from tests.unit.engine.player import play, programs_of, steps_of


def named(lowered: Lowered, worker: int, label: str) -> list[Step]:
    """Return the instructions of a worker that have a label."""
    labels = lowered.routines[worker].labels
    return [step for step, each in zip(steps_of(lowered, worker), labels, strict=True) if each.name == label]


def contributions(lowered: Lowered, worker: int) -> Counter[str]:
    """Return how often a worker makes each gradient, as its schedule says."""
    row = lowered.job.schedule.rows.get(worker, ())
    programs = [lowered.job.programs(action.micro_batch).of(action.stage, action.kind) for action in row]
    return Counter(str(port.name) for part in programs for port in part.outputs if port.kind == "gradient")


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_accumulated_once_a_micro_batch(name: str, parts: int) -> None:
    """Each is made as often as the schedule says, and all but the first are added to those before."""
    lowered = lower(PLANS[name], 2 * parts)
    gradients = lowered.gradients
    for worker in lowered.plan.devices:
        due = contributions(lowered, worker)
        made = Counter[int]()
        labels = lowered.routines[worker].labels
        for step, label in zip(steps_of(lowered, worker), labels, strict=True):
            if isinstance(step, Call) and label.action is not None:
                made.update(step.outputs)
        for gradient, times in due.items():
            assert made[gradients.sums[gradient]] == 1
            assert made[gradients.fresh[gradient]] == times - 1
        added = Counter(n for step in named(lowered, worker, "accumulate") for n in _outputs(step))
        assert added == Counter({gradients.sums[g]: times - 1 for g, times in due.items() if times > 1})


def _outputs(step: Step) -> Sequence[int]:
    assert isinstance(step, Call)
    return step.outputs


def test_a_weight_in_two_stages_is_made_in_both_and_summed_over_both() -> None:
    lowered = lower(plan(stage("ab", 0), stage("cd", 1)), 4)
    assert [contributions(lowered, worker)["model.b.weight"] for worker in (0, 1)] == [2, 2]
    played = play(lowered, batch(4))
    one, other = (played.gradients[worker]["model.b.weight"] for worker in (0, 1))
    assert torch.equal(one, other)


def test_a_weight_in_two_stages_of_one_device_is_summed_by_nobody() -> None:
    lowered = lower(plan(stage("a", 0), stage("b", 1), stage("c", 1), stage("d", 0), schedule="zbv"), 4)
    assert lowered.holdings.holders["model.b.weight"] == (1,)
    assert contributions(lowered, 1)["model.b.weight"] == 4
    assert not any(isinstance(step, Reduce) for worker in (0, 1) for step in steps_of(lowered, worker))


# ---- sums over holders


def reduced(lowered: Lowered, worker: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the sums of a worker: the group, and the buffers."""
    return [(step.group, step.buffers) for step in steps_of(lowered, worker) if isinstance(step, Reduce)]


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("size", [2, 4, 12])
@pytest.mark.parametrize("name", PLANS)
def test_all_members_sum_the_same_in_the_same_order(name: str, size: int, max_norm: float) -> None:
    """Sums are told apart by their order alone: a worker that leaves one out would hang or ruin all others."""
    lowered = lower(PLANS[name], size, max_norm=max_norm)
    for members, group in lowered.numbers.groups.items():
        orders = [[buffers for number, buffers in reduced(lowered, w) if number == group] for w in members]
        assert all(order == orders[0] for order in orders)
        strangers = set(lowered.plan.devices) - set(members)
        assert not any(number == group for worker in strangers for number, _ in reduced(lowered, worker))


@pytest.mark.parametrize("codec", ["int8", "powersgd"])
def test_coded_and_exact_sums_of_one_group_have_one_order(codec: GradientCodec) -> None:
    """Each worker has the gradients of another stage ready first."""
    across = plan(structs.replace(stage("ab", 0, 1), gradients=codec), stage("cd", 1, 0, shares=(1.0, 3.0)))
    lowered = lower(across, 12)
    orders = [
        [
            step.buffers if isinstance(step, Reduce) else (step.buffer,)
            for step in steps_of(lowered, worker)
            if isinstance(step, Reduce | Gather)
        ]
        for worker in (0, 1)
    ]
    assert len(orders[0]) > 2 and orders[0] == orders[1]


@pytest.mark.parametrize("name", PLANS)
def test_each_gradient_is_summed_once_over_its_holders(name: str) -> None:
    lowered = lower(PLANS[name], 8)
    gradients = lowered.gradients
    for worker in lowered.plan.devices:
        seen = Counter((group, number) for group, buffers in reduced(lowered, worker) for number in buffers)
        assert set(seen.values()) <= {1}
        for gradient in lowered.holdings.held_by(worker, lowered.trained):
            holders = lowered.holdings.holders[gradient]
            groups = [group for group, number in seen if number == gradients.sums[gradient]]
            assert groups == ([lowered.numbers.groups[holders]] if len(holders) > 1 else [])


@pytest.mark.parametrize("name", ["two replicas", "uneven replicas", "two by two", "one by two"])
def test_a_worker_without_micro_batches_contributes_zeros(name: str) -> None:
    """A batch of one micro-batch: only one replica of each stage has anything to do."""
    lowered = lower(PLANS[name], 2)
    busy = {worker for worker, row in lowered.job.schedule.rows.items() if row}
    idle = set(lowered.plan.devices) - busy
    assert idle
    gradients = lowered.gradients
    for worker in idle:
        made = programs_of(lowered, worker)
        zeros = {
            number
            for step in named(lowered, worker, "zero")
            if isinstance(step, Call) and _all_zero(made[step.program])
            for number in step.outputs
        }
        held = lowered.holdings.held_by(worker, lowered.trained)
        assert {gradients.sums[gradient] for gradient in held} <= zeros
        assert any(isinstance(step, OptimizerStep) for step in steps_of(lowered, worker))


def _all_zero(program: Program) -> bool:
    return all(operator.name == "aten.zeros.default" for operator in program.operators)


def test_sums_begin_while_backward_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is complete travels while the rest is computed; with earlier micro-batches nothing is cut."""
    monkeypatch.setattr("onebox.engine.compile.update.gradients.BUCKET_BYTES", 100)
    lowered = lower(Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=2), 8)
    steps, labels = steps_of(lowered, 0), lowered.routines[0].labels
    calls = [label.action for step, label in zip(steps, labels, strict=True) if isinstance(step, Call)]
    pieces = Counter(action for action in calls if action is not None and action.kind == "B")
    assert [pieces[action] > 1 for action in sorted(pieces, key=lambda action: action.micro_batch)] == [False, True]
    places = [place for place, step in enumerate(steps) if isinstance(step, Reduce)]
    computing = [place for place, label in enumerate(labels) if label.action is not None]
    assert any(place < max(computing) for place in places[1:])


# ---- clipping and stepping


@pytest.mark.parametrize("name", PLANS)
def test_clipping_counts_each_gradient_once(name: str) -> None:
    """Over all stages, a tied weight and what replicas have alike too; every worker clips by the same norm."""
    lowered = lower(PLANS[name], 8, max_norm=0.25)
    played = play(lowered, batch(8))
    whole: dict[str, torch.Tensor] = {}
    for found in played.gradients.values():
        whole |= found
    assert set(whole) == set(lowered.trained)
    square = sum(float(gradient.square().sum()) for gradient in whole.values())
    everywhere = all(lowered.holdings.holders[g] == lowered.plan.devices for g in lowered.trained)
    holding = {worker for worker in lowered.plan.devices if lowered.holdings.held_by(worker, lowered.trained)}
    assert set(played.norms) == (set() if everywhere else holding)
    for found_square in played.norms.values():
        assert found_square == pytest.approx(square, rel=1e-12)
    steps = [step for w in lowered.plan.devices for step in steps_of(lowered, w) if isinstance(step, OptimizerStep)]
    assert all(step.max_norm == 0.25 for step in steps)
    assert all(bool(step.square_norm) == (not everywhere) for step in steps)


@pytest.mark.parametrize("name", PLANS)
def test_without_clipping_nobody_asks_for_a_norm(name: str) -> None:
    lowered = lower(PLANS[name], 8)
    for worker in lowered.plan.devices:
        assert not named(lowered, worker, "norm")
        steps = [step for step in steps_of(lowered, worker) if isinstance(step, OptimizerStep)]
        assert all(not step.max_norm and not step.square_norm for step in steps)


@pytest.mark.parametrize("name", PLANS)
def test_the_optimizer_steps_once_behind_all_gradients(name: str) -> None:
    lowered = lower(PLANS[name], 8, max_norm=1.0)
    gradients = lowered.gradients
    for worker in lowered.plan.devices:
        steps = steps_of(lowered, worker)
        held = lowered.holdings.held_by(worker, lowered.trained)
        found = [step for step in steps if isinstance(step, OptimizerStep)]
        assert len(found) == bool(held)
        for step in found:
            assert step.gradients == tuple(gradients.sums[gradient] for gradient in held)
            assert step.optimizer == lowered.numbers.optimizer
            behind = steps[steps.index(step) + 1 :]
            assert not any(isinstance(other, Call | Reduce) for other in behind)
            assert any(isinstance(other, Free) and set(step.gradients) <= set(other.buffers) for other in behind)


def test_a_worker_with_nothing_to_train_takes_part_in_the_norm_and_keeps_nothing() -> None:
    """The stage of the second layer alone: its bias is frozen, its weight another stage's too where that is cut off."""
    lowered = lower(plan(stage("a", 0), stage("bcd", 1)), 4, max_norm=1.0)
    mine = dict.fromkeys(lowered.trained, (0,))
    alone = dataclasses.replace(
        lowered.holdings,
        holders={**lowered.holdings.holders, **mine},
        replica_groups={**lowered.holdings.replica_groups, **{name: (members,) for name, members in mine.items()}},
    )
    assert alone.held_by(1, lowered.trained) == ()
    made = _finish(lowered, alone, worker=1)
    kinds = [type(step) for step in made]
    assert kinds == [Call, Reduce, Free]
    assert made[0].outputs == made[1].buffers == made[2].buffers  # type: ignore[union-attr]


def _finish(lowered: Lowered, holdings: ShardingSpec, *, worker: int, actions: Sequence[Action] = ()) -> list[Step]:
    """Return what the end of a step is on a worker that has computed nothing yet."""
    builder = RoutineBuilder(lowered.numbers.new)
    gradients = Gradients(holdings, lowered.numbers, trained=lowered.trained, model=lowered.model, max_norm=1.0)
    exchanges = ReductionQueue(builder, worker, lowered.numbers.groups)
    scope = RoutineScope(builder=builder, worker=worker, actions=actions, job=lowered.job, exchanges=exchanges)
    WorkerGradients(gradients, scope)
    WorkerUpdate(gradients, builder, worker).finish()
    return builder.steps


def test_gpus_exchange_larger_buckets_among_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = lower(Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=2), 8)
    monkeypatch.setattr("onebox.engine.compile.update.gradients.BUCKET_BYTES", 1)

    def buckets(*gpus: int) -> int:
        trained, model = lowered.trained, lowered.model
        made = Gradients(lowered.holdings, lowered.numbers, trained=trained, model=model, max_norm=0.0, gpus=gpus)
        return sum(map(len, made.buckets.values()))

    assert [buckets(), buckets(0), buckets(0, 1)] == [len(lowered.trained), len(lowered.trained), 1]


def test_a_gradient_that_a_worker_does_not_hold_is_an_error_and_not_left_out() -> None:
    """Who holds what is settled with the first batch; a graph of another size that disagrees must not train wrongly."""
    lowered = lower(plan(stage("ab", 0), stage("cd", 1)), 4)
    lowered.holdings.holders["model.b.weight"] = (0,)  # type: ignore[index]
    with pytest.raises(CaptureError, match=r"device 1 would make a part of the gradient of model\.b\.weight"):
        _finish(lowered, lowered.holdings, worker=1, actions=lowered.job.schedule.rows[1])
