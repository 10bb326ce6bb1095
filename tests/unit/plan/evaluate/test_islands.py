"""The prediction of islands against cases worked out by hand, and the bytes of plans and outer steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onebox.plan import Links, Plan, Problem, Stage
from onebox.plan.evaluate.islands import OuterSchedule, OuterSum, outer_step_s, outer_traffic
from onebox.plan.evaluate.modes import published_islands
from onebox.plan.evaluate.traffic import between_groups, gradient_traffic, step_traffic
from onebox.plan.model.problem import DeviceSpec, SegmentValue
from tests.unit.plan.problems import links, segment

SLOW = links(4, bandwidth_bps=10.0)
"""Ten bytes a second between any two devices."""

QUIET = (0.0, 0.0)


def outer(*fragments: tuple[OuterSum, ...], begins: tuple[tuple[int, ...], ...], overlap: int = 0) -> OuterSchedule:
    return OuterSchedule(begins=begins, overlap=overlap, fragments=fragments)


def summed(*leaders: int, size: int = 80, travelling: int | None = None) -> OuterSum:
    groups = tuple((leader,) for leader in leaders)
    return OuterSum(groups=groups, size_bytes=size, travelling_bytes=size if travelling is None else travelling)


def test_islands_wait_for_the_slowest_and_for_the_sums() -> None:
    every = ((), (), (), (0,))
    # four steps of 3 s, then 80 bytes in a ring of two: 8 s
    assert outer_step_s([1.0, 3.0], outer((summed(0, 1),), begins=every), SLOW, QUIET) == (5.0, 2.0)
    # in a lossy codec a quarter of the bytes travels; the outer optimizer takes another 1 s of the slower island
    coded = outer((summed(0, 1, travelling=20),), begins=every)
    assert outer_step_s([1.0, 3.0], coded, SLOW, (2.0, 1.0)) == (3.75, 0.5)
    # of three islands each sends 2/3 of the bytes twice
    assert outer_step_s([3.0] * 3, outer((summed(0, 1, 2),), begins=every), SLOW, [0.0] * 3)[0] == pytest.approx(
        3 + 4 / 3 * 8 / 4
    )


def test_sums_take_turns_on_their_leaders_and_on_an_uplink_that_they_share() -> None:
    two = outer((summed(0, 2), summed(1, 3)), begins=((), (0,)))
    assert outer_step_s([1.0, 1.0], two, SLOW, QUIET)[0] == 1 + 8 / 2
    shared = replace(SLOW, uplinks={0: "a", 1: "a", 2: "b", 3: "b"})
    assert outer_step_s([1.0, 1.0], two, shared, QUIET)[0] == 1 + 16 / 2
    same = outer((summed(0, 2), summed(0, 2)), begins=((), (0,)))
    assert outer_step_s([1.0, 1.0], same, SLOW, QUIET)[0] == 1 + 16 / 2


def test_overlap_hides_sums_as_long_as_its_steps_and_fragments_divide_them() -> None:
    every = ((), (), (), (), (0,))
    sums = (summed(0, 1),)  # 8 s
    waits = {n: outer_step_s([2.0, 2.0], outer(sums, begins=every, overlap=n), SLOW, QUIET)[0] for n in range(5)}
    assert waits == {0: 2 + 8 / 5, 1: 2 + 6 / 5, 2: 2 + 4 / 5, 3: 2 + 2 / 5, 4: 2}
    # two halves of the sum, at different times: 4 s each
    halves = outer((summed(0, 1, size=40),), (summed(0, 1, size=40),), begins=((), (), (1,), (), (0,)), overlap=1)
    assert outer_step_s([2.0, 2.0], halves, SLOW, QUIET)[0] == 2 + 4 / 5
    # more than the links carry: a step takes as long as its part of the sums
    busy = outer((summed(0, 1, size=400),), begins=every, overlap=4)
    assert outer_step_s([2.0, 2.0], busy, SLOW, QUIET) == (pytest.approx((40 + 2) / 5), 8.0)


def test_leaders_hand_new_values_to_the_others_of_their_islands() -> None:
    near = {0: {1: 100.0}, 1: {0: 100.0}, 2: {3: 100.0}, 3: {2: 100.0}}
    bandwidth = {a: {b: near[a].get(b, 10.0) for b in range(4)} for a in range(4)}
    pairs = Links(latency_s=SLOW.latency_s, bandwidth_bps=bandwidth)
    each = OuterSum(groups=((0, 1), (2, 3)), size_bytes=80, travelling_bytes=80)
    assert outer_step_s([1.0, 1.0], outer((each,), begins=((0,),)), pairs, QUIET)[0] == pytest.approx(1 + 8 + 0.8)


def test_bytes_of_an_outer_step_are_spread_over_the_steps_between_two() -> None:
    steps = outer((summed(0, 2),), (summed(1, 3, travelling=40),), begins=((), (1,), (), (0,)))
    assert outer_traffic(steps, SLOW) == {(0, 2): 20, (2, 0): 20, (1, 3): 10, (3, 1): 10}
    ring = outer((summed(0, 1, 2, size=30),), begins=((0,),))
    assert outer_traffic(ring, SLOW) == {(0, 1): 40, (1, 2): 40, (2, 0): 40}


def case() -> Problem:
    return Problem(
        segments=tuple(segment(f"s{n}", 1e-3, state=8192 * (n + 1)) for n in range(2)),
        devices=tuple(DeviceSpec(number=n, type="quick") for n in range(4)),
        links=SLOW,
        batch=8,
        micro_batches=(2,),
        values=(SegmentValue(source=0, consumers=(1,), forward_bytes=10, backward_bytes=5),),
    )


def test_bytes_of_a_step_by_hand() -> None:
    replicas = Plan.data_parallel((0, 2), (1.0, 1.0), micro_batch=2)
    assert step_traffic(case(), replicas) == {(0, 2): 6144, (2, 0): 6144}  # all gradients, in a ring of two
    stages = (
        Stage(segments=("s0",), replicas=((0,), (1,)), shares=(1.0, 1.0)),
        Stage(segments=("s1",), replicas=((2,), (3,)), shares=(1.0, 1.0)),
    )
    hybrid = Plan(stages=stages, micro_batch=2)
    assert gradient_traffic(case(), hybrid) == {(0, 1): 2048, (1, 0): 2048, (2, 3): 4096, (3, 2): 4096}
    found = step_traffic(case(), hybrid)
    assert between_groups(found, ((0, 1), (2, 3))) == {(0, 1): 80, (1, 0): 40}  # 8 samples
    coded = Plan(stages=(Stage(replicas=((0,), (2,)), shares=(1.0, 1.0), gradients="bf16"),), micro_batch=2)
    assert step_traffic(case(), coded) == {(0, 2): 3072, (2, 0): 3072}


def test_where_hosts_sum_first_only_one_device_of_each_sends_between_them() -> None:
    near = {0: {1}, 1: {0}, 2: {3}, 3: {2}}
    bandwidth = {a: {b: 1e9 if b in near[a] else 1e3 for b in range(4)} for a in range(4)}
    problem = replace(case(), links=Links(latency_s=SLOW.latency_s, bandwidth_bps=bandwidth))
    found = gradient_traffic(problem, Plan.data_parallel(range(4), [1.0] * 4, micro_batch=2))
    assert between_groups(found, ((0, 1), (2, 3))) == {(0, 1): 6144, (1, 0): 6144}
    assert found[0, 1] == found[1, 0] == found[2, 3] == found[3, 2] == 6144


@pytest.mark.parametrize(
    ("parameters", "islands", "said"),
    [
        (75_434, 2, "loss +0.7 % (2 islands, language model of 35M parameters, H=30: arXiv:2503.09799)"),
        (200_000_000, 3, "loss +1.1 % (4 islands, language model of 180M parameters, H=30: arXiv:2503.09799)"),
        (2_000_000_000, 8, "loss +1.3 % (8 islands, language model of 1.3B parameters, H=30: arXiv:2503.09799)"),
        (35_000_000, 16, "not published for more than 8 islands (arXiv:2503.09799)"),
    ],
)
def test_published_price_of_islands(parameters: int, islands: int, said: str) -> None:
    assert published_islands(parameters, islands) == said
