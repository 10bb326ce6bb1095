"""Lowering: the routines of a step, played in one process against plain PyTorch, and looked at as data."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from onebox.engine.compile.routine import StepRoutine
from onebox.plan import Action, Plan, Prediction
from onebox.wire.protocol.instructions import (
    Ask,
    Call,
    Free,
    OptimizerStep,
    Receive,
    Reduce,
    Send,
    Step,
    Vote,
    references,
)
from onebox.wire.protocol.requests import StoredProgram
from tests.unit.engine.nets import PLANS, Lowered, batch, build, lower, plan, stage, state_of
from tests.unit.engine.player import Played, play, programs_of, steps_of

SIZES = (1, 2, 4, 7, 12)
"""Samples of a batch: fewer than a micro-batch, one micro-batch, fewer than there are replicas, with a rest, many."""


def fitting(size: int) -> bool:
    """Tell whether batch norm has a variance: no micro-batch is of one sample."""
    return size % 2 == 0


def expected(sizes: Sequence[int]) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses of micro-batches, the gradients of a batch, and the state, as plain PyTorch has them."""
    model = build()
    x_BD, y_BD = batch(sum(sizes))
    losses, start = [], 0
    for size in sizes:
        loss = functional.mse_loss(model(x_BD[start : start + size]), y_BD[start : start + size])
        (loss * (size / sum(sizes))).backward()
        losses.append(float(loss.detach()))
        start += size
    gradients = {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, state_of(model)


def check(lowered: Lowered, played: Played) -> None:
    """Require what plain PyTorch gives: losses, gradients on every holder, buffers on every holder."""
    losses, gradients, state = expected([part.size for part in lowered.job.micro_batches])
    assert [played.losses[index] for index in range(len(losses))] == pytest.approx(losses, abs=1e-12)
    assert set(lowered.trained) == set(gradients)
    for worker in lowered.plan.devices:
        held = lowered.holdings.held_by(worker, lowered.trained)
        assert set(played.gradients.get(worker, {})) == set(held)
        for name in held:
            torch.testing.assert_close(played.gradients[worker][name], gradients[name], rtol=0, atol=1e-12, msg=name)
        for name, found in played.state[worker].items():
            torch.testing.assert_close(found, state[name], rtol=0, atol=1e-12, msg=name)
        assert set(played.state[worker]) == {n for n, h in lowered.holdings.holders.items() if worker in h}


@pytest.mark.parametrize("size", [size for size in SIZES if fitting(size)])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_gives_what_one_process_gives(name: str, size: int) -> None:
    lowered = lower(PLANS[name], size)
    check(lowered, play(lowered, batch(size)))


@pytest.mark.parametrize("name", PLANS)
def test_values_from_other_hosts_are_received_several_actions_ahead(name: str) -> None:
    near, far = (lower(PLANS[name], 12, apart=apart) for apart in (False, True))
    check(far, play(far, batch(12)))
    early, remote = 0, False
    for worker, routine in far.routines.items():
        before, now = (receive_places(found) for found in (near.routines[worker], routine))
        assert before.keys() == now.keys()
        assert all(now[value] <= place for value, place in before.items())
        early += sum(now[value] < place for value, place in before.items())
        remote |= bool(before)
    assert bool(early) == remote


def receive_places(routine: StepRoutine) -> dict[tuple[str, int], int]:
    """Return the number of calls before each receive, by its action and sender, and its place among theirs."""
    found, calls, count = dict[tuple[str, int], int](), 0, Counter[str]()
    for step, label in zip(routine.steps, routine.labels, strict=True):
        calls += isinstance(step, Call)
        if isinstance(step, Receive):
            found[label.name, count[label.name]] = calls
            count[label.name] += 1
    return found


@pytest.mark.parametrize("more", [{"untagged": True}, {"overlap": "exact"}, {"overlap": "stale"}])
def test_where_messages_have_an_order_it_is_kept_across_hosts(more: dict[str, Any]) -> None:
    near, far = (lower(PLANS["gpipe"], 12, apart=apart, **more) for apart in (False, True))
    assert [found.steps for found in near.routines.values()] == [found.steps for found in far.routines.values()]


@given(st.sampled_from(sorted(PLANS)), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_in_whatever_order_the_workers_get_on(name: str, parts: int, random: Any) -> None:
    """Any interleaving ends, and gives the same to the last bit: nothing depends on who is faster."""
    lowered = lower(PLANS[name], 2 * parts)
    first, other = play(lowered, batch(2 * parts)), play(lowered, batch(2 * parts), turn=random.choice)
    assert first.losses == other.losses
    for worker, found in first.gradients.items():
        assert all(torch.equal(found[name], other.gradients[worker][name]) for name in found)


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    """Draw cuts, devices (some in several stages), replicas, shares and a schedule."""
    count = draw(st.integers(2, 4))
    cuts = sorted(draw(st.sets(st.integers(1, 3), min_size=count - 1, max_size=count - 1)))
    bounds = [0, *cuts, 4]
    made = []
    for start, end in itertools.pairwise(bounds):
        devices = draw(st.permutations(range(4)))[: draw(st.integers(1, 3))]
        shares = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(devices), max_size=len(devices)))
        made.append(stage("abcd"[start:end], *devices, shares=shares))
    return plan(*made, schedule=draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])))


@given(any_plan(), st.integers(1, 6))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_plan_gives_what_one_process_gives(made: Plan, parts: int) -> None:
    lowered = lower(made, 2 * parts)
    played = play(lowered, batch(2 * parts))
    check(lowered, played)
    assert not any(played.left.values())


@pytest.mark.parametrize("name", PLANS)
def test_an_evaluation_gives_what_one_process_gives(name: str) -> None:
    lowered = lower(PLANS[name], 7, train=False)
    played = play(lowered, batch(7))
    model = build().eval().requires_grad_(False)
    x_BD, y_BD = batch(7)
    for part in lowered.job.micro_batches:
        rows = slice(part.start, part.start + part.size)
        assert played.losses[part.index] == pytest.approx(float(functional.mse_loss(model(x_BD[rows]), y_BD[rows])))
    assert not any(played.left.values())
    assert all(
        torch.equal(found, state_of(build())[name])
        for state in played.state.values()
        for name, found in state.items()
    )  # fmt: skip


# ---- buffers


@pytest.mark.parametrize("size", [size for size in SIZES if fitting(size)])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", PLANS)
def test_a_routine_leaves_only_what_was_there(name: str, max_norm: float, size: int) -> None:
    """What is read before it is there, freed twice or overwritten is an error of the player."""
    assert not any(play(lower(PLANS[name], size, max_norm=max_norm), batch(size)).left.values())


@pytest.mark.parametrize("name", PLANS)
def test_values_die_with_their_last_reader(name: str) -> None:
    """No buffer of a value outlives the instruction that reads it last: it is taken, or freed next."""
    lowered = lower(PLANS[name], 8)
    lasting = set(lowered.numbers.state.values()) | {n for r in lowered.routines.values() for n in r.constants}
    for worker in lowered.plan.devices:
        steps = steps_of(lowered, worker)
        last = {number: place for place, step in enumerate(steps) for number in references(step) if number >= 1000}
        for number, place in last.items():
            step = steps[place]
            if number in lasting or isinstance(step, Free):
                continue
            ends = step.buffers if isinstance(step, Vote) else [step.inputs[index] for index in step.takes]
            assert number in ends


# ---- sends and receives

Ends = dict[tuple[int, int, int], list[tuple[int, int]]]


def ends(lowered: Lowered, kind: type[Send] | type[Receive]) -> Ends:
    """Return (group, source, target) and channel of all sends, or receives, with the worker and the place of each."""
    members = {number: found for found, number in lowered.numbers.groups.items()}
    found: Ends = {}
    for worker in lowered.plan.devices:
        for place, step in enumerate(steps_of(lowered, worker)):
            if isinstance(step, kind):
                peer = members[step.group][step.peer]
                source, target = (worker, peer) if isinstance(step, Send) else (peer, worker)
                found.setdefault((source, target, step.channel), []).append((worker, place))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_sends_and_receives_match_one_to_one(name: str) -> None:
    lowered = lower(PLANS[name], 12)
    sent, received = ends(lowered, Send), ends(lowered, Receive)
    assert sent.keys() == received.keys()
    assert all(len(places) == 1 for places in (*sent.values(), *received.values()))
    channels = [channel for _, _, channel in sent]
    assert len(set(channels)) == len(channels), "a channel carries one value to one worker"
    assert all(source != target for source, target, _ in sent)
    assert bool(sent) == (len(set(lowered.job.routes)) > 1), "stages on the same devices send nothing"


STAGED = [name for name, each in PLANS.items() if len(each.stages) > 1]


def computed(lowered: Lowered, worker: int) -> list[Action]:
    """Return the actions of a worker that have anything to compute: nobody waits for the inputs of the first stage."""
    row = lowered.job.schedule.rows[worker]
    return [a for a in row if lowered.job.programs(a.micro_batch).of(a.stage, a.kind).program.operators]


@pytest.mark.parametrize("name", STAGED)
def test_receives_are_posted_one_action_ahead(name: str) -> None:
    """When an action begins, what the next one needs has been asked for just before; nothing earlier, nothing twice."""
    lowered = lower(PLANS[name], 12)
    for worker in lowered.plan.devices:
        steps, labels = steps_of(lowered, worker), lowered.routines[worker].labels
        row, begun, posted = lowered.job.schedule.rows[worker], list[Action](), dict[int, list[Action]]()
        turns = {action: turn for turn, action in enumerate(row)}
        for step, label in zip(steps, labels, strict=True):
            if isinstance(step, Receive):
                assert step.buffer not in posted
                posted[step.buffer] = list(begun)
            if label.action is not None and label.action not in begun:
                begun.append(label.action)
                assert isinstance(step, Call)
            for number in posted.keys() & set(step.inputs if isinstance(step, Call) else ()):
                assert label.action is not None
                ahead = [action for action in computed(lowered, worker) if turns[action] < turns[label.action] - 1]
                assert posted.pop(number) == ahead
        assert not posted


@pytest.mark.parametrize("name", STAGED)
def test_a_value_is_sent_as_soon_as_it_is_there(name: str) -> None:
    lowered = lower(PLANS[name], 8)
    for worker in lowered.plan.devices:
        steps = steps_of(lowered, worker)
        for place, step in enumerate(steps):
            if isinstance(step, Send):
                made = max(p for p in range(place) if isinstance(s := steps[p], Call) and step.buffer in s.outputs)
                between = steps[made + 1 : place]
                extra = [s for s in between if isinstance(s, Call) and not _adds(lowered, worker, s)]
                assert not extra, "nothing but what belongs to the same action comes before"


def _adds(lowered: Lowered, worker: int, call: Call) -> bool:
    """Tell whether a call only adds gradients up, or belongs to a backward in pieces."""
    steps, labels = steps_of(lowered, worker), lowered.routines[worker].labels
    label = labels[[id(step) for step in steps].index(id(call))]
    return label.name == "accumulate" or (label.action is not None and label.action.kind != "F")


def test_a_skip_goes_straight_to_where_it_is_read() -> None:
    """From the first stage to the third; the second hands nothing on that it was given."""
    lowered = lower(plan(*(stage(letter, place) for place, letter in enumerate("abcd"))), 2)
    ahead = {(source, target) for source, target, _ in ends(lowered, Send) if source < target}
    assert ahead == {(0, 1), (0, 2), (1, 2), (2, 3)}
    for worker in lowered.plan.devices:
        steps = steps_of(lowered, worker)
        given_away = {step.buffer for step in steps if isinstance(step, Send)}
        assert not given_away & {step.buffer for step in steps if isinstance(step, Receive)}


# ---- what a routine is


@pytest.mark.parametrize("name", PLANS)
def test_labels_are_one_for_each_instruction_and_say_which_action(name: str) -> None:
    lowered = lower(PLANS[name], 12)
    for worker in lowered.plan.devices:
        steps, labels = steps_of(lowered, worker), lowered.routines[worker].labels
        assert len(labels) == len(steps)
        seen = dict.fromkeys(label.action for label in labels if label.action is not None)
        assert list(seen) == computed(lowered, worker), "in the order of the schedule"
        for step, label in zip(steps, labels, strict=True):
            assert (label.track == "transfer") == isinstance(step, Send | Receive | Reduce)
            computes = label.action is not None or isinstance(step, OptimizerStep)
            assert (label.track == "compute") == computes
            if label.action is not None:
                assert isinstance(step, Call)
                assert step.micro_batch == label.action.micro_batch


@pytest.mark.parametrize("name", PLANS)
def test_programs_are_stored_once(name: str) -> None:
    lowered = lower(PLANS[name], 12)
    for worker in lowered.plan.devices:
        defined = programs_of(lowered, worker)
        assert {step.program for step in steps_of(lowered, worker) if isinstance(step, Call)} == set(defined)
        again = programs_of(lower(PLANS[name], 24), worker)
        assert len(again) <= len(defined) + 4, "not with each micro-batch"  # decays over longer gaps may be new


def test_weights_of_the_losses_are_shares_of_the_batch() -> None:
    for each, size in ((PLANS["two by two"], 8), (PLANS["one by two"], 10), (PLANS["one device"], 6)):
        lowered = lower(each, size)
        values = [value for routine in lowered.routines.values() for value, _ in routine.constants.values()]
        assert sum(values) == pytest.approx(1.0)
        assert all(spec.shape == () for r in lowered.routines.values() for _, spec in r.constants.values())


def test_leaves_go_only_where_they_are_read() -> None:
    lowered = lower(PLANS["four stages"], 6)
    inputs, targets = 0, 1
    assert {leaf for _, leaf in lowered.routines[0].leaves} == {inputs}
    assert {leaf for _, leaf in lowered.routines[3].leaves} == {targets}
    assert lowered.routines[1].leaves == lowered.routines[2].leaves == ()


def test_a_device_that_computes_nothing_sleeps_for_what_the_plan_expects() -> None:
    times = ((1.0, 2.0, 4.0), (8.0, 16.0, 32.0))
    guess = Prediction(batch=8, step_s=1.0, bubble=0.0, peak_bytes=(1, 1), stages_s=times)
    for schedule, first_s in (("1f1b", 7.0), ("zb-h1", 7.0)):  # there all of the first backward comes as W
        lowered = lower(plan(stage("ab", 0), stage("cd", 1), schedule=schedule, predicted=guess), 6)
        for worker, expected_s in enumerate((first_s, 56.0)):
            costs = {
                define.number: define.what.cost_s
                for define in lowered.routines[worker].definitions
                if isinstance(define.what, StoredProgram)
            }
            calls = [step for step in steps_of(lowered, worker) if isinstance(step, Call)]
            assert sum(costs[call.program] for call in calls) == pytest.approx(3 * expected_s)


@pytest.mark.parametrize("name", PLANS)
def test_references_are_all_named(name: str) -> None:
    """What decides whether a routine is refused must know every kind of instruction."""
    kinds: set[type[Step]] = set()
    for worker in PLANS[name].devices:
        for step in steps_of(lower(PLANS[name], 8, max_norm=1.0), worker):
            kinds.add(type(step))
            fields = [field for field in step.__struct_fields__ if field != "root"]  # a rank, or -1
            numbers = {value for field in fields for value in _ints(getattr(step, field)) if value < 0}
            assert numbers <= set(references(step))
    assert {Call, Free, Ask, OptimizerStep} <= kinds


def _ints(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [item for item in value if isinstance(item, int)] if isinstance(value, tuple) else []
