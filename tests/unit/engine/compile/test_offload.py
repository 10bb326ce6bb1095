"""What goes to the host when, and comes back when: as data, and played against plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onebox.engine.compile import offload
from onebox.engine.compile.offload import OffloadInterval, find_offload_intervals, with_offloading, with_transfers
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.memory.simulator import MemorySimulator
from onebox.plan import Action, ActivationPolicy, Plan, UpdateAt
from onebox.wire import Operator, Program, SlotArgument, TensorSpec, with_deaths
from onebox.wire.protocol.instructions import (
    Ask,
    Call,
    Evict,
    Free,
    Offload,
    OptimizerStep,
    Prefetch,
    Receive,
    Send,
    Step,
    references,
)
from tests.unit.engine.compile.test_lowering import check
from tests.unit.engine.nets import Lowered, batch, lower, plan, stage
from tests.unit.engine.player import play, steps_of

SAMPLES = 4

LEAST = 100
"""What is smaller stays, so that values of the net go."""

SPEC = TensorSpec("float64", (32, 8))
FATES: list[ActivationPolicy] = ["offload", "swap", "offload", "keep", "recompute"]
TRANSFERS = (Offload, Evict, Prefetch)


@pytest.fixture(autouse=True, scope="module")
def small_ones_go() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "LEAST_BYTES", LEAST)
        yield


def program(name: str = "aten.relu.default", inputs: int = 1) -> Program:
    """Return a program of one operator."""
    slots = tuple(SlotArgument(index) for index in range(inputs))
    out = TensorSpec("float64", (8, 32)) if name == "aten.t.default" else SPEC
    return with_deaths(
        Program((SPEC,) * inputs, (Operator(name, slots, {}, (inputs,), (out,)),), (inputs,), inputs + 1)
    )


ONE, TURN = 1, 2
PROGRAMS = {ONE: program(), TURN: program("aten.t.default")}


def chain(count: int) -> tuple[list[Action], list[Step], list[int]]:
    """Return a row of so many stages on one device, whose forward makes 10, 20, ... that backward reads."""
    actions = [Action("F", s, 0) for s in range(count)] + [Action("B", s, 0) for s in reversed(range(count))]
    steps: list[Step] = [Call(ONE, (10 * s,), (10 * s + 10,)) for s in range(count)]
    steps += [Call(ONE, (10 * s + 10,), (1000 + s,), (0,)) for s in reversed(range(count))]
    return actions, steps, list(range(len(steps) + 1))


def times(absences: Sequence[OffloadInterval]) -> dict[tuple[int, ...], tuple[int, int, int, int]]:
    return {one.buffers: (one.offload, one.evict, one.prefetch, one.read) for one in absences}


def test_in_a_chain_all_but_the_last_few_go() -> None:
    """What is made by stage s is read by forward of s + 1 last, and by its own backward first."""
    actions, steps, bounds = chain(6)
    found = find_offload_intervals(steps, PROGRAMS, bounds, actions, ["offload"] * 6)
    assert times(found) == {(10,): (1, 2, 10, 11), (20,): (2, 3, 9, 10), (30,): (3, 4, 8, 9), (40,): (4, 5, 7, 8)}
    assert [(one.stage, one.micro_batch, one.size_bytes) for one in found] == [(s, 0, 2048) for s in range(4)]


def test_each_stage_has_a_policy_of_its_own() -> None:
    actions, steps, bounds = chain(6)
    policies: list[ActivationPolicy] = ["keep", "offload", "recompute", "offload", "keep", "offload"]
    assert [one.stage for one in find_offload_intervals(steps, PROGRAMS, bounds, actions, policies)] == [1, 3]
    assert find_offload_intervals(steps, PROGRAMS, bounds, actions, ["keep"] * 6) == []


def test_transfers_are_where_they_belong_and_say_what_they_are() -> None:
    actions, steps, bounds = chain(5)
    absences = find_offload_intervals(steps, PROGRAMS, bounds, actions, ["offload"] * 5)
    whose = [InstructionLabel(f"{action.kind}{action.stage}") for action in actions]
    made, labels = with_transfers(steps, whose, bounds, absences)
    assert [label.name for label in labels] == [
        "F0", "F1", "offload stage 0 (micro-batch 0)", "F2", "evict stage 0 (micro-batch 0)",
        "offload stage 1 (micro-batch 0)", "F3", "evict stage 1 (micro-batch 0)",
        "offload stage 2 (micro-batch 0)", "F4", "evict stage 2 (micro-batch 0)", "B4",
        "prefetch stage 2 (micro-batch 0)", "B3", "prefetch stage 1 (micro-batch 0)", "B2",
        "prefetch stage 0 (micro-batch 0)", "B1", "B0",
    ]  # fmt: skip
    tracks = {label.track for step, label in zip(made, labels, strict=True) if isinstance(step, Offload | Prefetch)}
    assert tracks == {"transfer"}
    assert [step for step in made if not isinstance(step, TRANSFERS)] == steps


def test_what_is_swapped_goes_at_once_and_comes_back_when_it_is_read() -> None:
    actions, steps, bounds = chain(4)
    absences = find_offload_intervals(steps, PROGRAMS, bounds, actions, ["swap"] * 4)
    assert times(absences) == {(10,): (1, 1, 7, 7), (20,): (2, 2, 6, 6), (30,): (3, 3, 5, 5)}
    whose = [InstructionLabel(f"{action.kind}{action.stage}") for action in actions]
    made, labels = with_transfers(steps, whose, bounds, absences)
    assert [label.name for label in labels if " " not in label.name or label.name.startswith("offload")] == [
        "F0", "F1", "offload stage 0 (micro-batch 0)", "F2", "offload stage 1 (micro-batch 0)", "F3",
        "offload stage 2 (micro-batch 0)", "B3", "B2", "B1", "B0",
    ]  # fmt: skip
    kinds = [type(step) for step in made]
    assert [kinds[place + 1] for place, kind in enumerate(kinds) if kind is Offload] == [Evict] * 3
    assert [made[place + 1] for place, kind in enumerate(kinds) if kind is Prefetch] == steps[5:]


def test_both_may_be_beside_each_other() -> None:
    """What is swapped ends ahead of what comes back meanwhile, and behind the copies that begin."""
    actions, steps, bounds = chain(5)
    absences = find_offload_intervals(steps, PROGRAMS, bounds, actions, ["offload", "swap", "offload", "swap", "keep"])
    assert times(absences) == {(10,): (1, 2, 8, 9), (20,): (2, 2, 8, 8), (30,): (3, 4, 6, 7), (40,): (4, 4, 6, 6)}
    _, labels = with_transfers(steps, [InstructionLabel("") for _ in steps], bounds, absences)
    assert [label.name.split(" (")[0] for label in labels if label.name] == [
        "offload stage 0", "evict stage 0", "offload stage 1", "evict stage 1", "offload stage 2", "evict stage 2",
        "offload stage 3", "evict stage 3", "prefetch stage 3", "prefetch stage 2", "prefetch stage 1",
        "prefetch stage 0",
    ]  # fmt: skip


def test_nothing_hides_under_actions_without_instructions() -> None:
    """Weight gradients of a recomputed stage are computed with those of its inputs: its W is empty."""
    actions, steps, bounds = chain(6)
    policies: list[ActivationPolicy] = ["offload"] * 6
    plain = with_offloading(steps, [InstructionLabel("")] * 12, PROGRAMS, bounds, actions, policies)
    row, starts = [], []
    for action, start in zip(actions, bounds, strict=False):
        row += [Action("W", 5, 9), action, Action("W", 4, 9)]
        starts += [start, start, start + 1]
    assert with_offloading(steps, [InstructionLabel("")] * 12, PROGRAMS, [*starts, 12], row, policies) == plain
    row = [actions[0], *(Action("W", s, 9) for s in range(5)), actions[-1]]
    few = [steps[0], Call(ONE, (10,), (1000,), (0,))]
    assert with_offloading(few, [InstructionLabel("")] * 2, PROGRAMS, [0, 1, 1, 1, 1, 1, 1, 2], row, policies)[0] == few


def test_views_of_a_storage_go_together_and_as_late_as_any_is_read() -> None:
    """A view is read by a later forward than what it views, which backward reads first: one storage, one absence."""
    actions = [Action("F", s, 0) for s in range(4)] + [Action("B", s, 0) for s in (3, 2, 1, 0)]
    steps: list[Step] = [
        Call(ONE, (1,), (10,)), Call(TURN, (10,), (11,)),  # F0
        Call(ONE, (10,), (20,)), Call(TURN, (11,), (12,), (0,)),  # F1: 12 is 10 once more, and 11 ends
        Call(ONE, (12,), (30,)), Call(ONE, (30,), (40,), (0,)),  # F2, F3
        Call(ONE, (40,), (41,), (0,)), Call(ONE, (41,), (42,), (0,)),  # B3, B2
        Call(ONE, (12,), (43,), (0,)), Call(ONE, (10,), (44,), (0,)),  # B1, B0
    ]  # fmt: skip
    bounds = [0, 2, 4, 5, 6, 7, 8, 9, 10]
    found = find_offload_intervals(steps, PROGRAMS, bounds, actions, ["offload"] * 4)
    assert times(found) == {(10, 12): (2, 3, 5, 6)}
    (one,) = found
    assert (one.stage, one.size_bytes) == (0, 2048)


def test_a_value_from_elsewhere_belongs_to_who_reads_it_first_here() -> None:
    actions = [Action("F", s, 0) for s in range(1, 6)] + [Action("B", s, 0) for s in (5, 4, 3, 2, 1)]
    steps: list[Step] = [Receive(5, SPEC, 1, 0), Call(ONE, (1,), (10,)), Send(10, 1, 2), Call(ONE, (5,), (20,), ())]
    steps += [Call(ONE, (20,), (30,), (0,)), Call(ONE, (30,), (40,), (0,)), Call(ONE, (40,), (50,), (0,))]
    steps += [Call(ONE, (50,), (50,), (0,))] * 3 + [Call(ONE, (5,), (51,), (0,)), Call(ONE, (10,), (52,), (0,))]
    bounds = [0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    found = find_offload_intervals(steps, PROGRAMS, bounds, actions, ["offload"] * 6)
    assert times(found) == {(10,): (0, 1, 8, 9), (5,): (1, 2, 7, 8)}
    assert [one.stage for one in found] == [1, 2]


def test_what_is_small_or_not_a_value_of_forward_stays() -> None:
    actions, steps, bounds = chain(6)
    small = TensorSpec("float64", (LEAST // 8 - 1,))
    tiny = with_deaths(
        Program((small,), (Operator("aten.relu.default", (SlotArgument(0),), {}, (1,), (small,)),), (1,), 2)
    )
    assert find_offload_intervals(steps, {ONE: tiny}, bounds, actions, ["offload"] * 6) == []
    steps = [Call(ONE, (1,), (2,)) for _ in range(6)] + [Call(ONE, (2,), (3,)) for _ in range(6)]
    assert find_offload_intervals(steps, PROGRAMS, bounds, actions, ["offload"] * 6) == [], (
        "made anew by each, like a statistic"
    )
    steps = [Call(ONE, (10,), (11,))] * 6 + [Call(ONE, (1,), (70,))] + [Call(ONE, (70,), (71,))] * 5
    assert find_offload_intervals(steps, PROGRAMS, bounds, actions, ["offload"] * 6) == [], "made by a backward"
    steps, bounds = (
        [Call(ONE, (1,), (2,)), *[Call(ONE, (1,), (3,))] * 11, Ask("scalars", (2,)), Free((2,))],
        [*range(13)],
    )
    assert find_offload_intervals(steps, PROGRAMS, bounds, actions, ["offload"] * 6) == [], "read behind the row only"


def test_the_ledger_counts_a_storage_once_wherever_it_is() -> None:
    ledger, size = MemorySimulator(0), SPEC.size_bytes

    def after(step: Step) -> tuple[int, int]:
        ledger.follow(step, PROGRAMS)
        return ledger.used_bytes, ledger.host_bytes

    ledger.fill(1, size)
    assert after(Call(TURN, (1,), (2,))) == (size, 0)
    assert after(Call(ONE, (1,), (3,))) == (2 * size, 0)
    assert after(Offload((1, 2, 3))) == (2 * size, 2 * size)
    assert after(Evict((1,))) == (2 * size, 2 * size), "another view of it is still there"
    assert after(Evict((2, 3))) == (0, 2 * size)
    assert after(Prefetch((2,))) == (size, 2 * size), "what is left on the host is a view of it"
    assert after(Prefetch((1, 3))) == (3 * size, 0), "each a storage of its own by now"
    assert after(Offload((3,))) == (3 * size, size)
    assert after(Call(ONE, (3,), (3,), (0,))) == (3 * size, 0), "what is made anew is not there any more"
    assert after(Free((1, 2, 3))) == (0, 0)
    assert ledger.host_peak_bytes == 2 * size


# ---- whole steps


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw cuts, two or three devices of which some have several stages, policies, and a schedule."""
    count = draw(st.integers(2, 4))
    cuts = sorted(draw(st.sets(st.integers(1, 3), min_size=count - 1, max_size=count - 1)))
    made = []
    for start, end in itertools.pairwise([0, *cuts, 4]):
        devices = draw(st.permutations(range(2)))[: draw(st.sampled_from([1, 1, 1, 2]))]
        made.append(stage("abcd"[start:end], *devices, policy=draw(st.sampled_from(FATES))))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]))
    return plan(*made, schedule=schedule, micro_batch=SAMPLES, update=draw(st.sampled_from(["device", "host"])))


@given(plans(), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_plan_gives_what_one_process_gives(made: Plan, parts: int, random: Any) -> None:
    """The player refuses to read what is not there, to offload or bring back anything twice, and to leave anything."""
    lowered = lower(made, SAMPLES * parts)
    played = play(lowered, batch(SAMPLES * parts), turn=random.choice)
    check(lowered, played)
    assert not any(played.left.values())
    for worker in made.devices:
        assert_in_order(lowered, worker)


def assert_in_order(lowered: Lowered, worker: int) -> None:
    """Require that each instruction comes once, in order, and nothing reads what is away or writes what is copied."""
    where: dict[int, str] = {}
    read_there: set[int] = set()  # gradients that the optimizer has read on the host
    for step in steps_of(lowered, worker):
        match step:
            case Offload():
                assert not any(number in where for number in step.buffers)
                where |= dict.fromkeys(step.buffers, "both")
            case Evict():
                assert {where[number] for number in step.buffers} == {"both"}
                where |= dict.fromkeys(step.buffers, "there")
            case Prefetch():
                assert {where.pop(number) for number in step.buffers} == {"there"}
            case OptimizerStep() if lowered.plan.update == "host":
                read_there = {number for number in step.gradients if where.get(number) == "there"}
                assert not any(where.get(number) == "both" for number in step.gradients)
            case Free() if read_there.intersection(step.buffers):
                for number in read_there:
                    del where[number]
            case Call():
                assert not any(where.get(number) == "there" for number in step.inputs)
                assert not any(number in where for number in step.outputs)
            case _:
                assert not any(number in where for number in references(step))
    assert not where


@pytest.mark.parametrize("policy", ["offload", "swap"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_a_row_of_one_device_offloads_in_every_schedule(schedule: str, policy: ActivationPolicy) -> None:
    stages = [stage(letter, 0, policy=policy) for letter in "abcd"]
    lowered = lower(plan(*stages, schedule=schedule, micro_batch=SAMPLES), 3 * SAMPLES)
    kinds = [type(step) for step in steps_of(lowered, 0)]
    counts = [kinds.count(kind) for kind in TRANSFERS]
    assert len(set(counts)) == 1
    assert counts[0] >= 3, "each micro-batch has something that goes"
    check(lowered, play(lowered, batch(3 * SAMPLES)))


@pytest.mark.parametrize(
    ("update", "policy", "gone"), [("host", "swap", 5), ("device", "swap", 0), ("host", "offload", 0)]
)
def test_gradients_wait_on_the_host_for_the_optimizer_there(
    update: UpdateAt, policy: ActivationPolicy, gone: int
) -> None:
    """Those that are large enough: of d, b and a between two backwards, and behind the last one of d and b."""
    stages = [stage(letter, 0, policy=policy) for letter in "abcd"]
    lowered = lower(plan(*stages, micro_batch=SAMPLES, update=update), 2 * SAMPLES)
    sums = {number: name for name, number in lowered.gradients.sums.items()}
    steps = steps_of(lowered, 0)
    found = [[n for n in step.buffers if n in sums] for step in steps if isinstance(step, Evict)]
    assert len([names for names in found if names]) == gone, [[sums[n] for n in names] for names in found]
    back = [n for step in steps if isinstance(step, Prefetch) for n in step.buffers if n in sums]
    assert len(back) < sum(map(len, found)) or not gone, "the last time they are read where they are"
    check(lowered, play(lowered, batch(2 * SAMPLES)))


def test_gradients_of_which_the_norm_is_asked_stay() -> None:
    stages = [stage(letter, 0, policy="swap") for letter in "abcd"]
    lowered = lower(plan(*stages, micro_batch=SAMPLES, update="host"), 2 * SAMPLES, max_norm=1.0)
    sums = set(lowered.gradients.sums.values())
    assert not any(sums & set(step.buffers) for step in steps_of(lowered, 0) if isinstance(step, Evict))


def test_nothing_goes_where_nothing_is_offloaded() -> None:
    stages = [stage(letter, 0) for letter in "abcd"]
    lowered = lower(plan(*stages, micro_batch=SAMPLES), 3 * SAMPLES)
    assert not any(isinstance(step, TRANSFERS) for step in steps_of(lowered, 0))
