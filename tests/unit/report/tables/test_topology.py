"""The line that says which devices are near to each other, and what goes between those that are not."""

from __future__ import annotations

from onebox.plan import ComputeTime, DeviceSpec, Links, Plan, Problem, Segment, SegmentValue, Stage
from onebox.report.tables.topology import cross_group_bytes, topology_line
from tests.unit.clusters import two_hosts

TIME = {"sim": ComputeTime(sample_s=1e-3)}


def problem(links: Links) -> Problem:
    return Problem(
        segments=tuple(Segment(name=name, forward_s=TIME, input_s=TIME, weight_s=TIME, update_s={}) for name in "abc"),
        devices=tuple(DeviceSpec(number=number, type="sim") for number in range(4)),
        links=links,
        batch=8,
        micro_batches=(2,),
        values=(
            SegmentValue(source=0, consumers=(1,), forward_bytes=100, backward_bytes=100),
            SegmentValue(source=1, consumers=(2,), forward_bytes=1000, backward_bytes=0),
        ),
    )


def plan(*places: tuple[int, ...]) -> Plan:
    stages = tuple(
        Stage(segments=(name,), replicas=tuple((d,) for d in own), shares=(1.0,) * len(own))
        for name, own in zip("abc", places, strict=True)
    )
    return Plan(stages=stages, micro_batch=2, schedule="1f1b")


def hosts() -> Links:
    latency_s, bandwidth_bps = two_hosts(2).matrix()
    return Links(latency_s=latency_s, bandwidth_bps=bandwidth_bps)


def test_what_crosses_is_counted() -> None:
    """Even numbers are in one host, odd ones in the other."""
    assert cross_group_bytes(problem(hosts()), plan((0,), (2,), (0,))) == 0
    assert cross_group_bytes(problem(hosts()), plan((0,), (1,), (3,))) == 8 * 200
    assert cross_group_bytes(problem(hosts()), plan((0,), (2,), (1,))) == 8 * 1000
    assert cross_group_bytes(problem(hosts()), plan((0, 1), (2, 3), (1, 0))) == 8 * 1000, (
        "each in its host, then all cross"
    )


def test_the_line_names_groups_and_bytes() -> None:
    line = topology_line(problem(hosts()), plan((0,), (1,), (3,)))
    assert line.startswith(
        "devices near to each other, by their links: 0 2; 1 3; between these go 1600 bytes of values"
    )


def test_nothing_is_said_where_all_are_equally_near() -> None:
    row = dict.fromkeys(range(4), 1e-4)
    flat = Links(latency_s=dict.fromkeys(range(4), row), bandwidth_bps=dict.fromkeys(range(4), dict.fromkeys(row, 1e9)))
    assert topology_line(problem(flat), plan((0,), (1,), (2,))) == ""
