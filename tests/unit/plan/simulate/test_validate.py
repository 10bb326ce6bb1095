"""Validation: it accepts exactly what can be run, and says what is wrong with the rest."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.plan import NAMED, Action, Routes, Schedule, named_schedule, validate
from tests.unit.plan.cases import Case, cases, edges_of, even, table, work_for

TWO = even(2, 2)
WIDE: Routes = (((0, 1),) * 2, ((0, 2),) * 2)


def refused(text: str, routes: Routes = TWO) -> str:
    with pytest.raises(UsageError) as caught:
        validate(table(text), routes)
    return str(caught.value)


def test_what_can_be_run() -> None:
    validate(table("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"), TWO)
    validate(table("0: 0F0 0F1 0I1 0I0 0W1 0W0\n1: 1F0 1F1 1B1 1I0 1W0"), TWO)  # gradients need not ascend
    validate(table("0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1\n1: 0F0 0B0 0F1 0B1\n2: 1F0 1B0 1F1 1B1"), WIDE)
    validate(
        table("0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1"), TWO, ()
    )  # two stages that have nothing to do with another


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0: 0F0 0F1 0B0\n1: 1F0 1B0 1F1 1B1", "0B1 (or 0I1 and 0W1) is missing on device 0"),
        ("0: 0F0 0F1 0B0 0I1\n1: 1F0 1B0 1F1 1B1", "0W1 is missing on device 0"),
        ("0: 0F0 0B0\n1: 1F0 1B0 1F1 1B1", "0F1 is missing on device 0"),
        ("0: 0F0 0F1 0B0 0B1", "1F0 is missing on device 1"),
        ("0: 0F0 0F1 0B0 0B1 0B1\n1: 1F0 1B0 1F1 1B1", "0B1 is on device 0 twice"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1I0 1W0 1F1 1B1", "device 1 has both 1I0 and 1B0"),
        ("0: 0F1 0F0 0B0 0B1\n1: 1F0 1B0 1F1 1B1", "0F0 comes after 0F1 on device 0; forwards of a stage ascend"),
        (
            "0: 0F0 0F1 0B0 0B1 0F2\n1: 1F0 1B0 1F1 1B1",
            "0F2 on device 0: allowed are F, I, W and B of the stages 0 to 1",
        ),
        ("0: 0F0 0F1 0B0 0B1 2F0\n1: 1F0 1B0 1F1 1B1", "2F0 on device 0: allowed are"),
        ("0: 0F0 0F1 0B0 0B1 1F0\n1: 1F0 1B0 1F1 1B1", "1F0 is on device 0; stage 1 has micro-batch 0 on 1"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1B0 1F0 1F1 1B1", "1B0 on device 1 comes before 1F0, which it needs"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1W1 1I1", "1W1 on device 1 comes before 1I1, which it needs"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n4:", "row for device 4; the plan's devices are 0, 1"),
        (
            "0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1",
            "wait for ever: 0B0 on device 0 waits for 1B0 on device 1, which comes there after 1F1; "
            "1F1 on device 1 waits for 0F1 on device 0, which comes there after 0B0",
        ),
    ],
)
def test_what_cannot(text: str, what: str) -> None:
    assert what in refused(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1\n1: 0F0 0F1 0B0 0B1\n2: 1F0 1B0 1F1 1B1",
            "0B0 on device 0 waits for 0B0 on device 1, which comes there after 0F1",
        ),
        (
            "0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1\n1: 0F0 0B0 0F1 0B1\n2: 1F0 1B0 1F1 1I1 1W1",
            "have 1B1 and 1I1; all of them do the same",
        ),
        (
            "0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1\n1: 0F0 0B0 0F1 0B1\n2: 1F0 1B0 1F1",
            "1B1 (or 1I1 and 1W1) is missing on device 2",
        ),
    ],
)
def test_what_devices_that_share_a_stage_cannot(text: str, what: str) -> None:
    assert what in refused(text, WIDE)


def test_memory() -> None:
    schedule = table("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1")
    sizes = {"state_bytes": 50, "saved_bytes": 20, "backward_work_bytes": 4}
    validate(schedule, TWO, work=work_for(TWO, capacity={0: 94, 1: 74}, **sizes))
    with pytest.raises(UsageError, match="lacks 1 bytes at 0B0: the schedule needs 94 bytes, the device has 93 bytes"):
        validate(schedule, TWO, work=work_for(TWO, capacity={0: 93, 1: 74}, **sizes))
    validate(schedule, TWO, work=work_for(TWO, capacity={0: 93, 1: 74}, **sizes), sizes=(1.0, 0.5))
    with pytest.raises(UsageError, match="device 1 lacks 50 bytes before it does anything"):
        validate(schedule, TWO, work=work_for(TWO, capacity={1: 0}, state_bytes=50))


def orderly(schedule: Schedule, routes: Routes) -> bool:
    """Say by definition whether every row has its actions once each, and forwards of a stage ascend."""
    for device, row in schedule.rows.items():
        mine = {(stage, m) for stage, row_of in enumerate(routes) for m, who in enumerate(row_of) if device in who}
        kinds = {place: sorted(action.kind for action in row if action[1:] == place) for place in mine}
        forwards = [action[1:] for action in row if action.kind == "F"]
        if {action[1:] for action in row} - mine or not all(
            found in (["B", "F"], ["F", "I", "W"]) for found in kinds.values()
        ):
            return False
        if any(a[0] == b[0] and a[1] > b[1] for turn, b in enumerate(forwards) for a in forwards[:turn]):
            return False
    return True


def runnable(schedule: Schedule, case: Case) -> bool:
    """Say by definition whether a schedule can be run: rows are orderly, and an order exists for everything."""
    routes, work, sizes = case
    if not orderly(schedule, routes):
        return False
    before: dict[Action, set[Action]] = {}
    for row in schedule.rows.values():
        for turn, action in enumerate(row):
            before.setdefault(action, set()).update(row[turn - 1 : turn])
    back = {(action.stage, action.micro_batch): action for action in before if action.kind in "IB"}
    if len(back) < sum(action.kind in "IB" for action in before):
        return False  # devices that share a stage do different things
    for action, earlier in before.items():
        if action.kind in "IB":
            earlier.add(Action("F", *action[1:]))
        if action.kind == "W":
            earlier.add(back[action[1:]])
    for edge in work.edges:
        for m in range(len(sizes)):
            before[Action("F", edge.target, m)].add(Action("F", edge.source, m))
            before[back[edge.source, m]].add(back[edge.target, m])
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def accepted(schedule: Schedule, case: Case) -> bool:
    try:
        validate(schedule, case.routes, edges_of(case.work))
    except UsageError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(NAMED), st.data())
def test_a_change_is_accepted_exactly_if_it_can_be_run(case: Case, name: str, data: st.DataObject) -> None:
    schedule = named_schedule(name, case.routes, edges=edges_of(case.work))
    assert runnable(schedule, case)
    assert accepted(schedule, case)
    device = data.draw(st.sampled_from(sorted(schedule.rows)))
    row = list(schedule.rows[device])
    one, other = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    change = data.draw(st.sampled_from(["swap", "omit", "repeat", "move", "elsewhere"]))
    rows = dict(schedule.rows)
    if change == "swap":
        row[one], row[other] = row[other], row[one]
    elif change == "move":
        row.insert(other, row.pop(one))
    elif change == "repeat":
        row.insert(other, row[one])
    elif change == "omit":
        row.pop(one)
    else:
        rows[data.draw(st.sampled_from(sorted(rows)))] += (row.pop(one),)
        row = row if rows[device] == schedule.rows[device] else [*row, rows[device][-1]]
    changed = Schedule(rows={**rows, device: tuple(row)})
    assert accepted(changed, case) == runnable(changed, case)
    if change in ("omit", "repeat"):
        assert not accepted(changed, case)
