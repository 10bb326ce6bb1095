"""Order check: right orders have no faults, under the rules of the groups; each seeded fault is found and named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as struct_replace

from onebox.engine.compile.order_check import (
    OrderFault,
    TransferRules,
    WorkerInstructions,
    fault_text,
    order_faults,
    step_faults,
)
from onebox.engine.compile.routine import StepRoutine
from onebox.plan import Plan
from onebox.plan_names import GradientCodec
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import (
    Ask,
    Branch,
    Broadcast,
    Free,
    Gather,
    OptimizerStep,
    Receive,
    Reduce,
    Rename,
    Send,
    Step,
)
from onebox.wire.protocol.requests import Define, Instruction, OptimizerSpec
from tests.unit.engine.nets import PLANS, Lowered, batch, lower, plan, stage
from tests.unit.engine.player import play

LIBRARY = TransferRules(paired=True, lazy=True)
SPEC, OTHER = TensorSpec("float32", (4, 2)), TensorSpec("float32", (3, 2))
GROUP = {1: (0, 1, 2), 2: (0, 1), 3: (1, 2), 4: (0, 2)}
DEFERRED = Define(7, OptimizerSpec("SGD", (((0, 1), {}),), (1, 2), succeeds=True))
"""An optimizer that is made where it is used first."""


def faults(rules: TransferRules | None = None, **workers: Sequence[Instruction]) -> tuple[OrderFault, ...]:
    """Return the faults of workers, given as ``w0``, ``w1`` and so on; buffers up to 99 are of one spec."""
    specs = dict.fromkeys(range(100), SPEC)
    found = {int(name[1:]): WorkerInstructions(instructions=own, specs=specs) for name, own in workers.items()}
    return order_faults(found, GROUP, rules or TransferRules())


def send(buffer: int, peer: int, channel: int = 0, group: int = 1) -> Send:
    return Send(buffer, group, peer, channel)


def receive(buffer: int, peer: int, channel: int = 0, group: int = 1, spec: TensorSpec = SPEC) -> Receive:
    return Receive(buffer, spec, group, peer, channel)


def read(*buffers: int) -> Ask:
    return Ask("scalars", buffers)


# ---- messages


def test_messages_in_one_order_are_right_whenever_they_are_read() -> None:
    assert not faults(w0=[send(1, 1, 7), send(2, 1, 8)], w1=[receive(3, 0, 7), receive(4, 0, 8), read(4), read(3)])


def test_channels_that_are_received_in_another_order_are_named() -> None:
    """The sizes are the same: without the check the tensors would swap silently."""
    found = faults(w0=[send(1, 1, 7), send(2, 1, 8)], w1=[receive(4, 0, 8), receive(3, 0, 7), read(3, 4)])
    assert [fault.kind for fault in found] == ["mismatch", "mismatch"]
    assert [(place.worker, place.number) for place in found[0].places] == [(0, 0), (1, 0)]
    assert "channel 7" in found[0].message and "channel 8" in found[0].message


def test_another_shape_or_type_is_named() -> None:
    for spec in (OTHER, TensorSpec("float64", (4, 2))):
        (found,) = faults(w0=[send(1, 1)], w1=[receive(3, 0, spec=spec), read(3)])
        assert found.kind == "mismatch" and str(spec) in found.message and str(SPEC) in found.message


def test_chunks_are_messages_of_their_own() -> None:
    halves = dict.fromkeys((1, 2), TensorSpec("float32", (2, 2)))
    chunks = [Send(1, 1, 1, 7, SPEC, 0), Send(2, 1, 1, 7, SPEC, 2)]

    def of(sends: Sequence[Instruction], receives: Sequence[Instruction]) -> list[str]:
        sender = WorkerInstructions(instructions=sends, specs=halves | {5: SPEC})
        found = order_faults({0: sender, 1: WorkerInstructions(instructions=receives)}, GROUP)
        return [fault.kind for fault in found]

    whole = Receive(3, SPEC, 1, 0, 7, (2, 2))
    assert of(chunks, [whole]) == []
    assert of(chunks, [Receive(3, SPEC, 1, 0, 7)]) == ["mismatch", "unmatched"]
    assert of(chunks[::-1], [whole]) == ["mismatch", "mismatch"]
    between = [chunks[0], Send(5, 1, 1, 8), chunks[1]]
    assert of(between, [whole, receive(4, 0, 8)]) == ["mismatch", "mismatch"]


def test_a_message_that_is_never_sent_or_never_received_is_named() -> None:
    (never,) = faults(w0=[], w1=[receive(3, 0), read(3)])
    assert never.kind == "unmatched" and never.places[0][:2] == (1, 0)
    (left,) = faults(w0=[send(1, 1)], w1=[])
    assert left.kind == "unmatched" and left.places[0][:2] == (0, 0)


def test_a_circle_of_waits_is_named_with_all_its_instructions() -> None:
    own: dict[str, list[Instruction]] = {
        f"w{worker}": [receive(9, (worker - 1) % 3), read(9), send(1, (worker + 1) % 3)] for worker in range(3)
    }
    (found,) = faults(None, **own)
    assert found.kind == "deadlock"
    assert {(place.worker, place.number) for place in found.places} == {(w, n) for w in range(3) for n in (0, 1)}
    assert not faults(None, **{worker: [steps[0], steps[2], steps[1]] for worker, steps in own.items()})


def test_a_buffer_that_is_given_up_or_renumbered_is_waited_for_where_it_is_read() -> None:
    first = [receive(9, 1, group=2), Rename((9,), (8,)), read(9), send(1, 1, group=2)]
    other = [receive(9, 0, group=2), Free((9,)), read(9), send(1, 0, group=2)]
    assert not faults(w0=first, w1=other)
    late = [receive(9, 1, group=2), Rename((9,), (8,)), read(8), send(1, 1, group=2)]
    assert [fault.kind for fault in faults(w0=late, w1=[receive(9, 0, group=2), read(9), send(1, 0, group=2)])] == [
        "deadlock"
    ]


# ---- the library's rules


def test_one_communicator_for_both_directions_lets_early_receives_block_sends() -> None:
    own: dict[str, list[Instruction]] = {
        "w0": [receive(9, 1, group=2), send(1, 1, group=2), read(9)],
        "w1": [receive(9, 0, group=2), send(1, 0, group=2), read(9)],
    }
    assert not faults(None, **own)
    (found,) = faults(TransferRules(paired=True), **own)
    assert found.kind == "deadlock"
    assert {(place.worker, place.number) for place in found.places} == {(0, 0), (1, 0)}


def test_communicators_that_are_made_at_their_first_use_lock_three_workers() -> None:
    own: dict[str, list[Instruction]] = {
        "w0": [send(1, 1), receive(9, 2)],
        "w1": [send(1, 2), receive(9, 0)],
        "w2": [send(1, 0), receive(9, 1)],
    }
    assert not faults(None, **own)
    (found,) = faults(TransferRules(lazy=True), **own)
    assert found.kind == "deadlock"
    assert {place.worker for place in found.places} == {0, 1, 2}


def test_a_receive_that_blocks_its_worker_needs_the_send_first() -> None:
    own: dict[str, list[Instruction]] = {
        "w0": [receive(9, 1, group=2), send(1, 1, group=2)],
        "w1": [receive(9, 0, group=2), read(9), send(1, 0, group=2)],
    }
    assert not faults(None, **own)
    assert [fault.kind for fault in faults(TransferRules(blocking=True), **own)] == ["deadlock"]


def test_messages_of_tagged_groups_match_by_channel() -> None:
    own: dict[str, list[Instruction]] = {
        "w0": [send(1, 1, 7), send(2, 1, 8)],
        "w1": [receive(4, 0, 8), read(4), receive(3, 0, 7), read(3)],
    }
    assert faults(None, **own)
    assert not faults(TransferRules(tagged=(1,)), **own)
    del own["w0"][0]
    assert [fault.kind for fault in faults(TransferRules(tagged=(1,)), **own)] == ["unmatched"]


# ---- collectives


@pytest.mark.parametrize(
    "other",
    [
        [Reduce((2,), 2), Reduce((1,), 2, 0)],
        [Reduce((2,), 2, 0), Reduce((1,), 2)],
        [Broadcast((1,), 2, 0), Reduce((2,), 2, 0)],
        [Reduce((1, 5), 2), Reduce((2,), 2, 0)],
        [Reduce((100,), 2), Reduce((2,), 2, 0)],
        [Gather(1, 3, SPEC, 2, (1, 1)), Reduce((2,), 2, 0)],
    ],
)
def test_collectives_that_differ_are_named(other: Sequence[Instruction]) -> None:
    own = [Reduce((1,), 2), Reduce((2,), 2, 0)]
    specs = dict.fromkeys(range(100), SPEC) | {100: OTHER}

    def of(second: Sequence[Instruction]) -> tuple[OrderFault, ...]:
        both = {0: WorkerInstructions(instructions=own, specs=specs)}
        return order_faults(both | {1: WorkerInstructions(instructions=second, specs=specs)}, GROUP, shared=(1, 2))

    assert not of(own)
    found = of(other)
    assert found and found[0].kind == "mismatch"
    assert [(place.worker, place.number) for place in found[0].places] == [(0, 0), (1, 0)]


def test_collectives_of_two_groups_in_two_orders_are_right_until_one_is_read_between() -> None:
    own: dict[str, list[Instruction]] = {
        "w0": [Reduce((1,), 2), Reduce((2,), 4), read(1, 2)],
        "w1": [Reduce((2,), 3), Reduce((1,), 2), read(1, 2)],
        "w2": [Reduce((2,), 4), Reduce((1,), 3), read(1, 2)],
    }
    assert not faults(None, **own)
    own["w0"].insert(1, read(1))
    own["w1"].insert(1, read(2))
    own["w2"].insert(1, read(2))
    (found,) = faults(None, **own)
    assert found.kind == "deadlock" and {place.worker for place in found.places} == {0, 1, 2}


def test_only_the_root_of_a_sum_waits_for_it() -> None:
    own: dict[str, list[Instruction]] = {
        "w0": [Reduce((1,), 2, 0), send(2, 1, group=2), read(1)],
        "w1": [receive(9, 0, group=2), read(9), Reduce((1,), 2, 0)],
    }
    assert not faults(None, **own)
    own["w0"] = [own["w0"][0], own["w0"][2], own["w0"][1]]
    assert [fault.kind for fault in faults(None, **own)] == ["deadlock"]


@pytest.mark.parametrize(
    "reader",
    [
        (Define(7, OptimizerSpec("SGD", (((0, 1), {}),), (1, 2))),),
        (DEFERRED, OptimizerStep(7, (5,), members=(1,))),
        (DEFERRED, Branch(7, (3, 4), behind=1), OptimizerStep(7, (5, 6))),
        (DEFERRED, Branch(7, (3, 4))),
        (Define(7, OptimizerSpec("SGD", (((0, 1), {}),), (2, 1), succeeds=True)), Branch(7, (3, 4))),
    ],
)
def test_what_an_optimizer_updates_or_copies_is_waited_for(reader: Sequence[Instruction]) -> None:
    """Device 0 waits for a broadcast of parameter 1 before it sends what device 1 needs to begin that broadcast."""
    own = {
        "w0": [Broadcast((1,), 2, 1, (SPEC,)), *reader, send(5, 1, group=2)],
        "w1": [receive(9, 0, group=2), read(9), Broadcast((1,), 2, 1)],
    }
    assert [fault.kind for fault in faults(None, **own)] == ["deadlock"]
    own["w1"] = [own["w1"][0], own["w1"][2], own["w1"][1]]
    assert not faults(None, **own)


def test_what_an_optimizer_leaves_alone_is_not_waited_for() -> None:
    there = [Define(7, OptimizerSpec("SGD", (((0, 1), {}),), (1, 2)))]
    own = {
        "w0": [*there, Broadcast((1,), 2, 1, (SPEC,)), OptimizerStep(7, (5,), members=(1,)), send(5, 1, group=2)],
        "w1": [receive(9, 0, group=2), read(9), Broadcast((1,), 2, 1)],
    }
    assert not faults(None, **own)
    own["w0"][2] = OptimizerStep(7, (5,), members=(0,))
    assert [fault.kind for fault in faults(None, **own)] == ["deadlock"]


# ---- seeded faults in real routines

Overlap = Literal["", "exact", "stale"]


def routines_of(lowered: Lowered) -> dict[int, tuple[StepRoutine, ...]]:
    """Return the routines of each worker: one, or three windows."""
    windows = {worker: (own.fill, own.steady, own.drain) for worker, own in lowered.windows.items()}
    return windows or {worker: (own,) for worker, own in lowered.routines.items()}


def groups_of(lowered: Lowered) -> dict[int, tuple[int, ...]]:
    return {number: members for members, number in lowered.numbers.groups.items()}


def check(lowered: Lowered, rules: TransferRules | None = None) -> tuple[OrderFault, ...]:
    numbers, shared = lowered.numbers, {*lowered.gradients.sums.values(), *lowered.gradients.late.values()}
    stepped = {worker: lowered.holdings.stepped_by(worker, lowered.trained) for worker in lowered.routines}
    updated = {w: {numbers.optimizer: [numbers.state[name] for name in names]} for w, names in stepped.items()}
    return step_faults(routines_of(lowered), groups_of(lowered), rules or TransferRules(), shared, updated)


def changed(lowered: Lowered, worker: int, change: Callable[[list[Step]], object]) -> tuple[OrderFault, ...]:
    """Return the faults after a change of one worker's steps."""
    routine = lowered.routines[worker]
    pairs = list(zip(routine.steps, routine.labels, strict=True))
    steps = list(routine.steps)
    change(steps)
    labels = {id(step): label for step, label in pairs}
    routine = routine.with_steps(steps, [labels[id(step)] for step in steps])
    return check(replace(lowered, routines={**lowered.routines, worker: routine}))


def swap(steps: list[Step], one: int, other: int) -> None:
    steps[one], steps[other] = steps[other], steps[one]


def places(steps: Sequence[Step], kind: type[Step], **more: int) -> list[int]:
    """Return the places of instructions of a kind whose fields have certain values."""
    found = (place for place, step in enumerate(steps) if isinstance(step, kind))
    return [place for place in found if all(getattr(steps[place], name) == value for name, value in more.items())]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("overlap", ["", "exact", "stale"])
def test_routines_in_order_have_no_faults(name: str, overlap: Overlap) -> None:
    assert not check(lower(PLANS[name], 12, overlap=overlap, untagged=True))


@pytest.mark.parametrize("name", [name for name in PLANS if name != "spans"])  # which offloads
@pytest.mark.parametrize("codec", ["int8", "powersgd"])
@pytest.mark.parametrize("overlap", ["", "exact"])
def test_lossy_messages_are_in_order(name: str, codec: GradientCodec, overlap: Overlap) -> None:
    """Slices of gradients go between the members of a group while sums and values of stages do."""
    given = PLANS[name]
    stages = tuple(struct_replace(each, gradients=codec, activations="int8") for each in given.stages)
    lowered = lower(struct_replace(given, stages=stages), 12, overlap=overlap, untagged=True)
    assert not check(lowered)
    coded = any(isinstance(step, Gather) for routine in lowered.routines.values() for step in routine.steps)
    assert coded or codec != "int8" or all(len(each.replicas) == 1 for each in given.stages)


def test_the_first_step_of_a_pipeline_would_hang_under_the_rules_of_the_library() -> None:
    for schedule in ("gpipe", "1f1b"):
        two = plan(stage("ab", 0), stage("cd", 1), schedule=schedule)
        found = check(lower(two, 8, untagged=True), LIBRARY)
        assert found and found[0].kind == "deadlock"
        assert {place.worker for place in found[0].places} == {0, 1}
        assert "receive for" in found[0].message and "both first on one communicator" in found[0].message


def test_each_pair_of_swapped_receives_is_found_and_named() -> None:
    lowered = lower(PLANS["zbv"], 8, untagged=True)
    steps = lowered.routines[1].steps
    tried = 0
    for one, other in itertools.pairwise(places(steps, Receive)):
        found = changed(lowered, 1, lambda own, one=one, other=other: swap(own, one, other))  # type: ignore[misc]
        assert found and found[0].kind == "mismatch"
        assert any(place.worker == 1 and place.number in (one, other) for place in found[0].places)
        assert "receive for" in fault_text(found) and "send of stage" in fault_text(found)
        tried += 1
    assert tried > 4


def test_each_reduction_that_changes_places_or_is_left_out_is_found() -> None:
    lowered = lower(PLANS["two by two"], 12, max_norm=1.0, untagged=True)
    tried = 0
    for worker in lowered.routines:
        steps = lowered.routines[worker].steps
        for place in places(steps, Reduce):
            left_out = changed(lowered, worker, lambda own, place=place: own.pop(place))  # type: ignore[misc]
            assert left_out and all(fault.kind in ("mismatch", "deadlock", "unmatched") for fault in left_out)
        for one, other in itertools.combinations(places(steps, Reduce), 2):
            first, second = steps[one], steps[other]
            assert isinstance(first, Reduce) and isinstance(second, Reduce)
            if first.group == second.group and len(first.buffers) != len(second.buffers):
                found = changed(lowered, worker, lambda own, one=one, other=other: swap(own, one, other))  # type: ignore[misc]
                assert found[0].kind == "mismatch" and '"reduce"' in found[0].message
                tried += 1
    assert tried


def test_each_send_that_is_left_out_is_found() -> None:
    lowered = lower(PLANS["two stages"], 8, untagged=True)
    for worker, routine in lowered.routines.items():
        for place in places(routine.steps, Send):
            assert changed(lowered, worker, lambda own, place=place: own.pop(place))  # type: ignore[misc]


# ---- messages in one order


def messages(routines: Mapping[int, Sequence[StepRoutine]], kind: type[Step]) -> list[str]:
    """Return what each worker sends or receives, whatever the order; of windows, what they do together."""
    found = []
    for worker, own in routines.items():
        steps = [step for routine in own for step in routine.steps if isinstance(step, kind)]
        found += [f"{worker} {step.channel} {step.peer} {getattr(step, 'spec', None)}" for step in steps]  # type: ignore[attr-defined]
    return sorted(found)


LATE = ("async-1f1b",)
STEPS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


@st.composite
def any_plan(draw: st.DrawFn, schedules: Sequence[str]) -> Plan:
    """Draw cuts, up to four workers (some in several stages), replicas, policies and a schedule."""
    count = draw(st.integers(2, 4))
    bounds = [0, *sorted(draw(st.sets(st.integers(1, 3), min_size=count - 1, max_size=count - 1))), 4]
    workers, schedule = draw(st.integers(2, 4)), draw(st.sampled_from(schedules))
    made = []
    for start, end in itertools.pairwise(bounds):
        devices = draw(st.permutations(range(workers)))[: draw(st.integers(1, min(3, workers)))]
        policies = ("keep",) if schedule in LATE else ("keep", "keep", "recompute", "offload")
        made.append(stage("abcd"[start:end], *devices, policy=draw(st.sampled_from(policies))))
    more = (
        {"in_flight": tuple(draw(st.integers(0, 4)) for _ in made)} if schedule in LATE and draw(st.booleans()) else {}
    )
    return plan(*made, schedule=schedule, **more)


@given(any_plan(STEPS), st.integers(1, 6), st.sampled_from(["", "exact", "stale"]))
@settings(max_examples=160, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_plan_is_in_order(made: Plan, parts: int, overlap: Overlap) -> None:
    """No fault; nothing but the order of receives changes, and nothing at all if it was right."""
    ordered, plain = (lower(made, 2 * parts, overlap=overlap, untagged=untagged) for untagged in (True, False))
    assert not check(ordered), fault_text(check(ordered))
    for worker, own in routines_of(plain).items():
        for before, after in zip(own, routines_of(ordered)[worker], strict=True):
            rest = [step for step in before.steps if not isinstance(step, Receive)]
            moved = [step for step in after.steps if not isinstance(step, Receive)]
            assert moved[: len(rest)] == rest
            assert len(moved) <= len(rest) + 1  # renumbering for the next window
            assert len(after.labels) == len(after.steps)
    assert messages(routines_of(ordered), Receive) == messages(routines_of(plain), Receive)
    if not check(plain):
        assert routines_of(plain) == routines_of(ordered)


@given(any_plan(STEPS), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_steps_in_order_give_the_same_to_the_last_bit(made: Plan, parts: int, random: Any) -> None:
    ordered, plain = (lower(made, 2 * parts, untagged=untagged) for untagged in (True, False))
    first, other = play(plain, batch(2 * parts)), play(ordered, batch(2 * parts), turn=random.choice)
    assert first.losses == other.losses and not any(other.left.values())
    for worker, found in first.gradients.items():
        assert all(torch.equal(found[name], other.gradients[worker][name]) for name in found)


SKEWED = [
    (plan(stage("a", 3), stage("b", 1), stage("c", 0), stage("d", 3), schedule="async-1f1b"), 8),
    (plan(stage("a", 3), stage("b", 3, 1), stage("c", 1, 2), stage("d", 2), schedule="async-1f1b"), 4),
    (
        plan(
            stage("a", 3, 2), stage("b", 2), stage("c", 3, 0), stage("d", 2),
            schedule="async-1f1b", in_flight=(1, 1, 0, 3),
        ),
        2,
    ),
]  # fmt: skip
"""Plans whose late steps receive in the window before that of the reader; the last one also sends later."""


def in_both_ways(made: tuple[Plan, int]) -> tuple[Lowered, Lowered]:
    """Return late steps that are as they are emitted, which is wrong, and in order."""
    plain, ordered = (lower(*made, overlap="stale", untagged=untagged) for untagged in (False, True))
    assert any(fault.kind == "mismatch" for fault in check(plain))
    assert not check(ordered), fault_text(check(ordered))
    return plain, ordered


@pytest.mark.parametrize("made", SKEWED[:2])
def test_a_receive_moves_to_the_window_in_which_its_message_is_sent(made: tuple[Plan, int]) -> None:
    renamed = [
        [step for own in routines_of(one).values() for step in own[1].steps if isinstance(step, Rename)]
        for one in in_both_ways(made)
    ]
    assert len(renamed[0]) < len(renamed[1])


def test_what_is_read_before_the_next_step_is_sent_ahead_of_its_messages() -> None:
    plain, ordered = in_both_ways(SKEWED[2])
    sends = [[s for s in routines_of(one)[3][1].steps if isinstance(s, Send)] for one in (plain, ordered)]
    assert sends[0] != sends[1] and sorted(sends[0], key=str) == sorted(sends[1], key=str)
    assert not any(routines_of(plain)[3][which] != routines_of(ordered)[3][which] for which in (0, 2))


@given(any_plan(LATE), st.integers(1, 6))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_late_steps_are_in_order(made: Plan, parts: int) -> None:
    """No fault; each window sends and receives the same, but for receives that are in the window before."""
    ordered, plain = (lower(made, 2 * parts, overlap="stale", untagged=untagged) for untagged in (True, False))
    assert not check(ordered), fault_text(check(ordered))
    for window in range(3):
        own = ({w: (all_[window],) for w, all_ in routines_of(one).items()} for one in (ordered, plain))
        assert len({tuple(messages(routines, Send)) for routines in own}) == 1
    steady = ({w: (own[1],) for w, own in routines_of(one).items()} for one in (ordered, plain))
    assert len({tuple(messages(routines, Receive)) for routines in steady}) == 1
    if not check(plain):
        assert routines_of(plain) == routines_of(ordered)
