"""Prediction of a run of islands: the time of a step, and what the links between them carry. Pure.

Each island makes its steps by itself; an outer step begins for an island when it comes to it, and its sums when all
have come. Sums of the same leaders, and those that share an uplink, take place one after the other. Without overlap
islands wait for the sums; with overlap they go on, and wait after so many steps for those that have not ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onebox.plan.evaluate.traffic import Traffic, total_traffic
from onebox.plan.model.work import Links

_PERIODS = 8
"""Simulated periods of outer steps; the last half of them is the steady state, which begins after one or two."""


@dataclass(frozen=True, kw_only=True)
class OuterSum:
    """Parameters or buffers that islands sum together in an outer step.

    Args:
        groups: For each island, the workers that hold them; the first of them is its leader there, which sums.
        size_bytes: Their bytes.
        travelling_bytes: Bytes whose sum in a ring of the islands takes as long, and sends as many: these, or fewer for
            a lossy codec.
    """

    groups: tuple[tuple[int, ...], ...]
    size_bytes: int
    travelling_bytes: int

    @property
    def leaders(self) -> tuple[int, ...]:
        """The workers that sum: one of each island."""
        return tuple(members[0] for members in self.groups)


@dataclass(frozen=True, kw_only=True)
class OuterSchedule:
    """Outer steps of a run of islands.

    Args:
        begins: For each step of a period, the fragments whose sums begin after it.
        overlap: Steps during which sums travel while islands go on.
        fragments: The sums of each fragment, in their order.
    """

    begins: tuple[tuple[int, ...], ...]
    overlap: int = 0
    fragments: tuple[tuple[OuterSum, ...], ...]

    @property
    def every(self) -> int:
        """Steps of a period, in which each fragment is synchronised once."""
        return len(self.begins)


@dataclass(frozen=True, kw_only=True)
class IslandsPrediction:
    """The prediction of a run of islands.

    Args:
        batch: Samples of a step, of all islands together.
        step_s: Seconds of a step, its part of the outer steps included.
        islands_s: Seconds of a step of each island by itself.
        sums_s: Seconds of a step's part of the sums of outer steps, each from when all islands have come to it until it
            has ended, whether they wait for it or not.
        traffic: Bytes of a step from device to device between islands; an outer step's are spread over the steps
            between two.
    """

    batch: int
    step_s: float
    islands_s: tuple[float, ...]
    sums_s: float
    traffic: Traffic


def outer_step_s(
    islands_s: Sequence[float], outer: OuterSchedule, links: Links, update_s: Sequence[float]
) -> tuple[float, float]:
    """Return the seconds of a step of islands with its part of the outer steps, and of the sums in that part.

    Args:
        islands_s: Seconds of a step of each island by itself.
        outer: The outer steps.
        links: Links between the devices.
        update_s: Seconds of the outer optimizer's step of the whole model, in each island.
    """
    clocks, free = [0.0] * len(islands_s), dict[object, float]()
    whole = sum(each.size_bytes for sums in outer.fragments for each in sums)
    ends: dict[int, float] = {}
    due: dict[int, int] = {}
    marks, spent_s = [0.0], 0.0

    def apply(fragment: int) -> None:
        sums = outer.fragments[fragment]
        part = sum(each.size_bytes for each in sums) / whole if whole else 0.0
        for island, now in enumerate(clocks):
            handed_s = sum(_handed_out_s(each, island, links) for each in sums)
            clocks[island] = max(now, ends[fragment]) + part * update_s[island] + handed_s

    for step in range(1, _PERIODS * outer.every + 1):
        clocks = [now + each for now, each in zip(clocks, islands_s, strict=True)]
        for fragment in [fragment for fragment, at in due.items() if at == step]:
            del due[fragment]
            apply(fragment)
        for fragment in outer.begins[(step - 1) % outer.every]:
            ends[fragment] = ready = max(clocks)
            for each in outer.fragments[fragment]:
                seconds = links.ring_seconds([(leader,) for leader in each.leaders], each.travelling_bytes)
                shared = (each.leaders, *links.shared_by(each.leaders))
                end = max([ready, *(free.get(one, 0.0) for one in shared)]) + seconds
                free |= dict.fromkeys(shared, end)
                ends[fragment] = max(ends[fragment], end)
            spent_s += ends[fragment] - ready
            if outer.overlap:
                due[fragment] = step + outer.overlap
            else:
                apply(fragment)
        if step % outer.every == 0:
            marks.append(max(clocks))
    half = _PERIODS // 2
    return (marks[-1] - marks[-1 - half]) / (half * outer.every), spent_s / (_PERIODS * outer.every)


def outer_traffic(outer: OuterSchedule, links: Links) -> Traffic:
    """Return the bytes of a step between the devices of different islands, those of outer steps spread over all."""
    sums = (each for own in outer.fragments for each in own)
    total = total_traffic(*(links.sum_traffic(each.leaders, each.travelling_bytes) for each in sums))
    return {way: size_bytes / outer.every for way, size_bytes in total.items()}


def _handed_out_s(each: OuterSum, island: int, links: Links) -> float:
    """Return the seconds in which the leader of an island hands new values to the others there."""
    leader, *others = each.groups[island]
    return max((links.seconds(leader, other, each.size_bytes) for other in others), default=0.0)
