"""Which islands take part, and whose samples count in an outer step."""

from __future__ import annotations

import pytest

from onebox.engine.islands.membership import IslandChange, Membership


def membership(fragments: int = 1) -> Membership:
    return Membership(3, [[0.0] * 3] * fragments, [0] * fragments)


def test_the_samples_of_a_lost_island_are_lost_and_the_others_share_batches_and_weights() -> None:
    made = membership()
    made.count([2.0, 4.0, 6.0])
    assert made.leave(1) == 4.0
    assert (made.present, made.absent) == ((0, 2), (1,))
    assert made.shares([1.0, 2.0, 3.0]) == (1.0, 0.0, 3.0)
    assert made.begin(0) == (0.25, 0.75)
    made.join(1)
    assert made.samples == ((0.0, 0.0, 0.0),)
    assert made.begin(0) is None


def test_samples_in_sums_that_are_void_count_again_but_for_those_of_islands_that_left() -> None:
    made = membership(fragments=2)
    made.count([1.0, 2.0, 3.0])
    assert made.begin(1, due=7) is not None
    assert (made.due, made.travelling) == ((0, 7), (1,))
    made.count([1.0, 1.0, 1.0])
    made.leave(2)
    made.void(1)
    assert (made.due, made.samples) == ((0, 0), ((2.0, 3.0, 0.0), (2.0, 3.0, 0.0)))
    assert made.begin(1) == (0.4, 0.6)
    made.applied(1)
    made.void(1)
    assert made.samples[1] == (0.0, 0.0, 0.0)
    assert made.outer_steps == 1


def test_the_samples_of_a_late_island_count_when_it_is_punctual_again() -> None:
    made = membership()
    made.count([2.0, 5.0, 2.0])
    made.fall_behind(1)
    assert (made.present, made.punctual, made.late) == ((0, 1, 2), (0, 2), (1,))
    assert made.shares([1.0, 1.0, 1.0]) == (1.0, 0.0, 1.0)
    assert made.begin(0) == (0.5, 0.5)
    made.applied(0)
    made.count([2.5, 0.0, 2.5])
    made.catch_up(1)
    assert made.begin(0) == (0.25, 0.5, 0.25)
    made.fall_behind(2)
    made.leave(2)
    assert made.late == ()


def test_islands_that_have_lost_workers() -> None:
    made = membership()
    made.leave(0)
    assert made.losing({0, 3, 9}, [[0, 1], [2, 3], [4]]) == (1,)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            IslandChange(at_s=0.0, kind="left", island=1, step=4, samples=24.0, cause="WorkerDied: gone", seconds=0.5),
            "island 1 left after step 4: 24 samples since its last outer step are lost, the others go on after 0.5 s "
            "(WorkerDied: gone)",
        ),
        (
            IslandChange(at_s=0.0, kind="joined", island=1, step=8, seconds=1.0),
            "island 1 joined after step 8, with the global parameters, in 1.0 s",
        ),
        (
            IslandChange(at_s=0.0, kind="late", island=0, step=8, seconds=5.0),
            "island 0 is late after step 8: the others go on without it after 5.0 s",
        ),
        (
            IslandChange(at_s=0.0, kind="punctual", island=0, step=12, samples=6.0),
            "island 0 is back after step 12, with 6 samples since its last outer step, and took the global parameters "
            "in 0.0 s",
        ),
        (
            IslandChange(at_s=0.0, kind="redone", island=None, step=4, fragment=1, cause="PeerLost: cut"),
            "an outer step of fragment 1 after step 4 was void and is done again (PeerLost: cut)",
        ),
    ],
)
def test_a_change_is_one_line(change: IslandChange, line: str) -> None:
    assert str(change) == line
