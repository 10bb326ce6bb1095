"""Named schedules: the literature's tables and bubbles where all is even, and a valid schedule everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from onebox.errors import UsageError
from onebox.plan import NAMED, Action, Routes, Schedule, ideal_step_time, named_schedule, simulate, validate
from tests.unit.plan.cases import Case, cases, edges_of, even, work_for

EVEN = [
    (name, devices, micro_batches, stages)
    for name, stages in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]
    for devices in (1, 2, 3, 4, 8)
    for micro_batches in (devices, devices + 1, 2 * devices, 2 * devices + 3)
    if name != "interleaved" or micro_batches % devices == 0
]


def routes_for(name: str, devices: int, micro_batches: int, stages: int) -> Routes:
    return even(devices, micro_batches, stages, vee=name == "zbv")


def step_s(schedule: Schedule, routes: Routes) -> float:
    return simulate(schedule, routes, work_for(routes), detail=False).step_s


@pytest.mark.parametrize(("name", "devices", "micro_batches", "stages"), EVEN)
def test_even_devices_reach_the_theory(name: str, devices: int, micro_batches: int, stages: int) -> None:
    routes = routes_for(name, devices, micro_batches, stages)
    schedule = named_schedule(name, routes)
    validate(schedule, routes)
    assert step_s(schedule, routes) == ideal_step_time(name, devices, micro_batches, stages, stages, stages, stages)


def test_theory_by_hand() -> None:
    assert ideal_step_time("gpipe", 4, 8, 1, 2, 3) == (8 + 3) * 6
    assert ideal_step_time("1f1b", 4, 2, 1, 2, 3) == (2 + 3) * 6
    assert ideal_step_time("interleaved", 4, 8, 2, 4, 6, 2) == 8 * 12 + 3 * 6
    assert ideal_step_time("zb-h1", 4, 8, 3, 2, 1) == 8 * 6 + 3 * 4
    assert ideal_step_time("zb-h1", 4, 8, 1, 2, 3) == 8 * 6 + 3 * 1
    assert ideal_step_time("zbv", 4, 8, 2, 2, 2, 2) == 8 * 6 + 3 * 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("auto", 2, 2, 1, 1, 1), "no theory of a schedule 'auto'"),
        (("zbv", 2, 2, 1, 1, 1), "zbv has 2 stages on a device, not 1"),
        (("zb-h1", 4, 3, 1, 1, 1), "holds from 4 up"),
        (("gpipe", 0, 3, 1, 1, 1), "1 or more"),
    ],
)
def test_theory_where_there_is_none(arguments: tuple[str, int, int, float, float, float], what: str) -> None:
    stages = 1
    with pytest.raises(UsageError, match=what):
        ideal_step_time(*arguments, stages)


def test_the_table_of_1f1b() -> None:
    """Figure 4 of Narayanan et al. 2021: as many forwards as there are stages from here on, then in turn."""
    assert named_schedule("1f1b", even(4, 5)).lines() == (
        "0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1: 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
        "3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    )


def test_the_table_of_gpipe() -> None:
    assert named_schedule("gpipe", even(2, 3)).lines() == ("0: 0F0 0F1 0F2 0B0 0B1 0B2", "1: 1F0 1F1 1F2 1B0 1B1 1B2")


def in_flight(schedule: Schedule, until: str) -> int:
    """Return the most micro-batches that a device holds between forward and one of the given kinds."""
    most = 0
    for row in schedule.rows.values():
        level = 0
        for action in row:
            level += action.kind == "F"
            most = max(most, level)
            level -= action.kind in until
    return most


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_zero_bubble_needs_no_more_memory_than_1f1b(devices: int) -> None:
    """By the activations that wait for their weight gradient, as in the papers' tables."""
    micro_batches = 2 * devices + 3
    assert in_flight(named_schedule("1f1b", even(devices, micro_batches)), "B") == devices
    assert in_flight(named_schedule("zb-h1", even(devices, micro_batches)), "W") == devices
    assert in_flight(named_schedule("zbv", even(devices, micro_batches, 2, vee=True)), "W") == 2 * devices


def test_interleaved_warms_up_as_the_paper_says() -> None:
    """Device `d` of `D`, `v` stages: `2 (D - d - 1) + (v - 1) D` forwards, and one more before the first backward."""
    for devices, stages in ((2, 2), (4, 2), (4, 3)):
        schedule = named_schedule("interleaved", even(devices, 4 * devices, stages))
        for device, row in schedule.rows.items():
            forwards = [action.kind for action in row].index("B")
            assert forwards == 2 * (devices - device - 1) + (stages - 1) * devices + 1


def test_replicas_have_as_many_in_flight_as_they_need() -> None:
    # stages of 1, 2 and 1 devices: 4 replicas from the first stage on, 3 from the second, over 2 of its own
    routes = (((0,),) * 8, ((1,), (2,)) * 4, ((3,),) * 8)
    schedule = named_schedule("1f1b", routes)
    validate(schedule, routes)
    first = {device: [action.kind for action in row].index("B") for device, row in schedule.rows.items()}
    assert first == {0: 4, 1: 2, 2: 2, 3: 1}


def test_fewer_micro_batches_than_stages_and_one_device() -> None:
    for name in NAMED:
        for routes in (even(4, 1), even(4, 2), even(5, 3, 2), even(1, 3), even(1, 2, 3), even(3, 2, 2, vee=True)):
            validate(named_schedule(name, routes), routes)


def test_branches_run_at_the_same_time() -> None:
    routes = even(4, 1)
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    for name in NAMED:
        schedule = named_schedule(name, routes, edges=edges)
        validate(schedule, routes, edges)
        split = name in ("zb-h1", "zbv")
        assert simulate(schedule, routes, work_for(routes, edges), detail=False).step_s == (7 if split else 9)


def test_what_is_no_name_and_no_edge() -> None:
    with pytest.raises(UsageError, match="no schedule 'auto' is made of routes alone; allowed are gpipe"):
        named_schedule("auto", even(2, 2))
    with pytest.raises(UsageError, match="from stage 1 to 0"):
        named_schedule("1f1b", even(2, 2), edges=[(1, 0)])
    with pytest.raises(UsageError, match="routes for 0 stages"):
        named_schedule("1f1b", ())


def torchs(name: str, devices: int, micro_batches: int, stages: int) -> Schedule:
    """Return the table that torch.distributed.pipelining makes, from its own function."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    rounds = max(1, micro_batches // devices)
    state = SimpleNamespace(
        pp_group_size=devices,
        num_stages=devices * stages,
        _n_microbatches=micro_batches,
        n_local_stages=stages,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    owner = {
        "1f1b": "ScheduleInterleaved1F1B",  # of one stage; the table of Schedule1F1B lacks the last device's first F
        "interleaved": "ScheduleInterleaved1F1B",
        "zb-h1": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
    }[name]
    make = getattr(getattr(module, owner, None), "_calculate_single_rank_operations", None)
    if make is None:
        pytest.skip(f"this torch has no {owner}._calculate_single_rank_operations")
    try:
        rows = {rank: make(state, rank) for rank in range(devices)}
    except AttributeError as error:
        pytest.skip(f"torch's {owner} wants more of itself than it did: {error}")
    return Schedule(rows={rank: tuple(actions_of(row)) for rank, row in rows.items()})


def actions_of(row: list[SimpleNamespace | None]) -> Iterator[Action]:
    for action in row:
        if action is not None and action.computation_type.value in ("F", "I", "W", "B"):
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches", "stages"),
    [
        *(("1f1b", d, m, 1) for d in (2, 4, 8) for m in (d, d + 1, 3 * d)),
        *(
            ("interleaved", d, m, v)
            for d, m in ((2, 2), (2, 6), (4, 3), (4, 4), (4, 10), (4, 12), (8, 16))
            for v in (2, 3)
        ),
        *(("zb-h1", d, m, 1) for d in (2, 4, 8) for m in (d, 2 * d)),
        *(("zbv", d, m, 2) for d in (2, 3, 4, 8) for m in (1, d, 2 * d + 1, 3 * d)),
    ],
)
def test_never_slower_than_torchs_own_table(name: str, devices: int, micro_batches: int, stages: int) -> None:
    routes = routes_for(name, devices, micro_batches, stages)
    theirs = torchs(name, devices, micro_batches, stages)
    validate(theirs, routes)
    assert step_s(named_schedule(name, routes), routes) <= step_s(theirs, routes)


@pytest.mark.feature("Pipelines: Run named schedules and tables")
@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_name_gives_a_valid_schedule_for_everything(case: Case) -> None:
    edges = edges_of(case.work)
    for name in NAMED:
        schedule = named_schedule(name, case.routes, edges=edges)
        validate(schedule, case.routes, edges)
        assert schedule == named_schedule(name, case.routes, edges=edges)
        ascending(schedule)


def ascending(schedule: Schedule) -> None:
    """Check that each kind of action of a stage goes through the micro-batches in their order on each device."""
    for row in schedule.rows.values():
        for kinds in ("F", "IB", "W"):
            for stage in {action.stage for action in row}:
                turns = [action.micro_batch for action in row if action.stage == stage and action.kind in kinds]
                assert turns == sorted(turns)
