"""What is said of fates: what they spare, what they cost, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onebox.errors import UsageError
from onebox.plan import DeviceSpec, Links, Plan, Problem, Segment, Stage, Time, Value
from onebox.plan.plan import Fate
from onebox.plan.reasons import segment_memory

SIZE = 4
SAVED, CROSSING = 1000, 100
HOST_BPS = 1e6


def problem(*, kinds: tuple[str, ...] = ("gpu",)) -> Problem:
    """Return four segments in a chain; forward takes 1 ms a sample, and each half of backward as long."""
    time = dict.fromkeys(("gpu", "cpu"), Time(sample_s=1e-3))
    numbers = range(len(kinds))
    return Problem(
        segments=tuple(
            Segment(name=f"s{n}", forward_s=time, input_s=time, weight_s=time, update_s={}, saved_bytes=SAVED)
            for n in range(4)
        ),
        devices=tuple(
            DeviceSpec(number=n, type=kind, host="h", host_bps=HOST_BPS, processor=kind == "cpu")
            for n, kind in enumerate(kinds)
        ),
        links=Links(
            latency_s={a: dict.fromkeys(numbers, 0.0) for a in numbers},
            bandwidth_bps={a: dict.fromkeys(numbers, 1e9) for a in numbers},
        ),
        batch=8,
        micro_batches=(SIZE,),
        values=tuple(
            Value(source=n, consumers=(n + 1,), forward_bytes=CROSSING, backward_bytes=CROSSING) for n in range(3)
        ),
    )


def plan(*stages: tuple[int, Fate], on: tuple[int, ...] = ()) -> Plan:
    """Return stages of so many segments with fates, on one device or on those that are named."""
    found, first = [], 0
    for turn, (count, fate) in enumerate(stages):
        names = tuple(f"s{n}" for n in range(first, first + count))
        device = on[turn] if on else 0
        found.append(Stage(segments=names, replicas=((device,),), shares=(1.0,), fate=fate))
        first += count
    return Plan(stages=tuple(found), micro_batch=SIZE)


def test_a_plan_that_has_room_keeps_all() -> None:
    rows = segment_memory(problem(), Plan.data_parallel([0], [1.0], micro_batch=SIZE))
    assert [one.segment for one in rows] == ["s0", "s1", "s2", "s3"]
    assert {(one.fate, one.saved_bytes, one.paid_s, one.why) for one in rows} == {("keep", 0, 0.0, "there is room")}
    assert {one.would_keep_bytes for one in rows} == {SAVED * SIZE}


def test_what_is_computed_again_costs_its_forward_and_spares_what_does_not_leave_the_stage() -> None:
    rows = segment_memory(problem(), plan((2, "recompute"), (2, "keep")))
    assert [one.fate for one in rows] == ["recompute", "recompute", "keep", "keep"]
    assert [one.saved_bytes for one in rows] == [SAVED * SIZE, (SAVED - CROSSING) * SIZE, 0, 0]
    assert [one.paid_s for one in rows] == pytest.approx([4e-3, 4e-3, 0, 0])
    assert rows[0].why == "4 ms to compute it again, against 8 ms to move it there and back"
    assert rows[3].why == "its backward comes right after its forward"


def test_what_moves_costs_what_does_not_hide_under_the_next_stage() -> None:
    rows = segment_memory(problem(), plan((1, "offload"), (3, "keep")))
    assert (rows[0].fate, rows[0].saved_bytes, rows[0].paid_s) == ("offload", SAVED * SIZE, 0.0)
    slow = problem()
    slow = replace(slow, devices=tuple(replace(device, host_bps=1e5) for device in slow.devices))
    (first, *_) = segment_memory(slow, plan((1, "offload"), (3, "keep")))
    assert first.paid_s == pytest.approx((40e-3 - 12e-3) + (40e-3 - 24e-3))
    assert "of which 44 ms do not hide" in first.why
    (first, *_) = segment_memory(slow, plan((1, "offload"), (3, "recompute")))
    assert first.paid_s == pytest.approx((40e-3 - 12e-3) + (40e-3 - 36e-3)), "more hides it when it comes back"


def test_what_is_kept_beside_others_that_are_not_says_what_freeing_it_would_cost() -> None:
    rows = segment_memory(problem(), plan((1, "offload"), (1, "keep"), (1, "recompute"), (1, "keep")))
    assert rows[1].why == "freeing it would cost 4 ms"


def test_a_part_on_the_processor_beside_a_device_has_that_fate() -> None:
    rows = segment_memory(problem(kinds=("gpu", "cpu")), plan((1, "keep"), (3, "keep"), on=(1, 0)))
    assert [one.fate for one in rows] == ["cpu", "keep", "keep", "keep"]
    assert [one.devices for one in rows] == [(1,), (0,), (0,), (0,)]
    only = segment_memory(problem(kinds=("cpu", "cpu")), plan((1, "keep"), (3, "keep"), on=(1, 0)))
    assert {one.fate for one in only} == {"keep"}, "processors among themselves are devices like others"


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(UsageError):
        segment_memory(problem(), plan((2, "keep"), (1, "keep")))
