"""What is kept for a recovery: the newest snapshot, the steps since, and how far apart snapshots are."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onebox.engine.recovery.policy import (
    FIRST_AFTER,
    MOST_STEPS_APART,
    SHARE,
    RecoveryRecord,
    SnapshotCadence,
    StepHistory,
)

Kept = StepHistory[str, int]


def begun(history: Kept, count: int) -> None:
    for _ in range(count):
        history.begin(history.steps, 1)


def test_at_first_all_steps_are_done_again_from_the_beginning() -> None:
    history: Kept = StepHistory(3, "start", limit_bytes=1000)
    begun(history, 4)
    restart = history.restart()
    assert (restart.step, restart.snapshot, restart.replay) == (3, "start", (3, 4, 5, 6))


def test_a_snapshot_counts_only_when_it_has_come() -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=1000)
    begun(history, 4)
    history.ask()
    begun(history, 2)
    assert history.asked
    assert history.snapshot_step == 0
    history.arrive("four")
    assert not history.asked
    restart = history.restart()
    assert (restart.step, restart.snapshot, restart.replay) == (4, "four", (4, 5))


def test_after_a_snapshot_that_did_not_come_the_one_before_is_whole() -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=1000)
    begun(history, 2)
    history.ask()
    history.arrive("two")
    begun(history, 2)
    history.ask()
    history.give_up()
    assert not history.asked
    assert history.snapshot == "two"
    restart = history.restart()
    assert (restart.step, restart.snapshot, restart.replay) == (2, "two", (2, 3))


def test_a_snapshot_is_due_after_so_many_steps_and_one_at_a_time() -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=1000)
    found = []
    for _ in range(5):
        begun(history, 1)
        found.append(history.due(3))
    assert found == [False, False, True, True, True]
    history.ask()
    begun(history, 9)
    assert not history.due(3)
    history.arrive("five")
    assert history.due(3)


def test_a_snapshot_is_due_when_the_batches_since_take_too_much() -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=10)
    history.begin(0, 10)
    assert not history.due(100)
    history.begin(1, 1)
    assert history.due(100)


def test_steps_wait_for_a_snapshot_that_falls_behind() -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=1000)
    begun(history, 3)
    assert not history.must_wait(3)
    history.ask()
    begun(history, 2)
    assert not history.must_wait(3)
    begun(history, 1)
    assert history.must_wait(3)
    history.arrive("three")
    assert not history.must_wait(3)


def test_a_snapshot_of_what_has_been_brought_back_takes_no_step_away() -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=1000)
    begun(history, 2)
    history.ask(again=True)
    begun(history, 1)
    assert history.arrive("start, again") == "start"
    assert history.restart().snapshot == "start, again"
    assert history.restart().replay == (0, 1, 2)


def test_a_snapshot_that_finds_no_room_is_put_off_and_the_one_before_stays() -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=1000)
    begun(history, 3)
    history.ask()
    history.put_off(4)
    due = []
    for _ in range(5):
        begun(history, 1)
        due.append(history.due(3))
    assert due == [False, False, False, True, True]
    assert history.complete
    assert (history.restart().snapshot, history.restart().replay) == ("start", tuple(range(8)))


@pytest.mark.parametrize("size", [1, 300])
def test_what_is_kept_without_snapshots_has_a_bound_and_is_then_given_up(size: int) -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=1000, limit_steps=20)
    while not history.full:
        history.begin(history.steps, size)
    assert history.steps == (20 if size == 1 else 7)
    steps = history.steps
    assert history.forget() == "start"
    assert not history.complete and not history.full and history.snapshot is None
    begun(history, 5)
    assert history.steps == steps + 5
    assert history.due(3)
    history.ask()
    begun(history, 2)
    history.arrive("later")
    assert history.complete
    restart = history.restart()
    assert (restart.step, restart.snapshot, restart.replay) == (steps + 5, "later", (steps + 5, steps + 6))


def test_what_is_given_up_while_a_snapshot_is_under_way_is_what_comes_before_it() -> None:
    history: Kept = StepHistory(0, "start", limit_bytes=1000)
    begun(history, 3)
    history.ask()
    begun(history, 2)
    history.forget()
    begun(history, 1)
    history.arrive("three")
    assert (history.restart().step, history.restart().replay) == (3, (3, 4, 5))
    history.forget()
    history.ask()
    begun(history, 2)
    history.give_up()
    assert history.steps == 8 and history.snapshot_step == 8 and not history.complete


@example(["step"] * 8, 1, 0)
@given(
    st.lists(st.sampled_from(["step", "arrive", "again", "give up"]), max_size=60),
    st.integers(1, 5),
    st.integers(0, 100),
)
def test_whatever_happens_nothing_is_missing_and_what_is_kept_has_a_bound(
    events: list[str], every: int, first: int
) -> None:
    history: Kept = StepHistory(first, f"after {first}", limit_bytes=1 << 40)
    asked = -1
    for event in events:
        if event == "step":
            if history.must_wait(every):
                history.arrive(f"after {asked}")
            history.begin(history.steps, 1)
            if history.due(every):
                history.ask()
                asked = history.steps
        elif event == "again":
            history.give_up()
            history.ask(again=True)
            asked = history.snapshot_step
        elif history.asked:
            if event == "arrive":
                history.arrive(f"after {asked}")
            else:
                history.give_up()
        assert history.steps - history.snapshot_step <= every * (2 + events.count("again") + events.count("give up"))
    restart = history.restart()
    assert restart.snapshot == f"after {restart.step}"
    assert restart.replay == tuple(range(restart.step, history.steps))


def test_until_costs_are_known_a_snapshot_comes_early() -> None:
    cadence = SnapshotCadence()
    assert cadence.every == FIRST_AFTER
    cadence.step_took(0.1)
    assert cadence.every == FIRST_AFTER


@given(st.floats(1e-4, 10), st.floats(1e-5, 100))
def test_snapshots_take_their_share_of_the_time_at_most(step_s: float, cost_s: float) -> None:
    cadence = SnapshotCadence()
    cadence.step_took(step_s)
    for _ in range(4):
        cadence.snapshot_took(cost_s)
    every = cadence.every
    assert 1 <= every <= MOST_STEPS_APART
    if every < MOST_STEPS_APART:
        assert cost_s <= SHARE * step_s * every * (1 + 1e-9)
    if every > 1:
        assert cost_s > SHARE * step_s * (every - 1) * (1 - 1e-9) or every == MOST_STEPS_APART


def test_a_first_snapshot_that_was_dear_does_not_put_the_next_one_off_for_long() -> None:
    cadence = SnapshotCadence()
    cadence.step_took(0.007)
    cadence.snapshot_took(0.3)
    assert cadence.every == 4 * FIRST_AFTER
    for _ in range(2):
        cadence.snapshot_took(0.001)
    assert cadence.every == 8  # 0.001 s in steps of 0.007 s


def test_what_steps_take_longer_beside_a_snapshot_is_part_of_its_cost() -> None:
    alone, beside = SnapshotCadence(), SnapshotCadence()
    for cadence in (alone, beside):
        for _ in range(5):
            cadence.step_took(0.1)
        cadence.step_took(0.12, beside=cadence is beside)
        cadence.step_took(0.11, beside=cadence is beside)
        cadence.snapshot_took(0.001)
    assert alone.every == 1
    assert beside.every == 16  # 0.031 s in steps of 0.1 s
    assert beside.apart_s == pytest.approx(1.6)
    beside.snapshot_took(-0.5)  # as of steps that happened to be fast
    beside.snapshot_took(-0.5)
    assert beside.every == 1


def test_steps_of_workers_that_have_just_begun_are_no_cost() -> None:
    cadence = SnapshotCadence()
    for _ in range(5):
        cadence.step_took(0.1)
    cadence.step_took(0.9, beside=True)
    cadence.pass_over()
    cadence.snapshot_took(0.001)
    assert cadence.every == 1


def test_dearer_snapshots_are_further_apart() -> None:
    found = []
    for cost_s in (0.001, 0.01, 0.1):
        cadence = SnapshotCadence()
        cadence.step_took(0.1)
        cadence.snapshot_took(cost_s)
        found.append(cadence.every)
    assert all(before < after for before, after in pairwise(found))


def test_what_the_user_says_holds() -> None:
    cadence = SnapshotCadence(7)
    cadence.step_took(0.1)
    cadence.snapshot_took(100.0)
    assert cadence.every == 7


def test_a_story_is_one_line() -> None:
    story = RecoveryRecord(
        at_s=0.0,
        failure="WorkerDied: worker 1 was ended by signal 9",
        lost=(1, 2),
        replaced=(1,),
        gone=(2,),
        plan="1 stage",
        step=40,
        snapshot_step=31,
        redone=9,
        attempts=2,
        seconds=1.25,
    )
    line = str(story)
    assert "\n" not in line
    for part in (
        "step 40",
        "1.2 s",
        "2 attempts",
        "workers 1, 2",
        "started worker 1 again",
        "worker 2 gone",
        "1 stage",
    ):
        assert part in line
    assert "redid 9 steps from the snapshot after step 31" in line
    assert "was ended by signal 9" in line
    assert "last bits" not in line
    assert "which may differ in the last bits" in str(dataclasses.replace(story, exact=False))
    assert "last bits" not in str(dataclasses.replace(story, exact=False, redone=0))
