"""Use of links between hosts."""

from __future__ import annotations

from onebox.engine.steps.link_use import LinkEvent, LinkUse, link_events, use_since, used_links
from onebox.engine.steps.results import StepTrace
from onebox.wire.protocol.responses import LinkTraffic

HOSTS = ("lab1", "lab1", "lab2", "lab3")


def use(source: str, target: str, size_bytes: int, busy_s: float) -> LinkUse:
    return LinkUse(source=source, target=target, size_bytes=size_bytes, busy_s=busy_s)


def test_traffic_of_all_devices_of_two_hosts_is_that_of_their_link() -> None:
    traffic = {
        (0, 2): LinkTraffic(2, 1000, 10**9),
        (1, 2): LinkTraffic(2, 500, 2 * 10**9),
        (2, 0): LinkTraffic(0, 70, 10**8),
    }
    assert used_links(traffic, HOSTS) == (use("lab1", "lab2", 1500, 3.0), use("lab2", "lab1", 70, 0.1))


def trace(step: int, times_ns: dict[int, tuple[int, ...]], *carried: tuple[int, LinkTraffic]) -> StepTrace:
    workers = {worker: ((), times, ()) for worker, times in times_ns.items()}
    return StepTrace(step=step, workers=workers, traffic={(source, each.worker): each for source, each in carried})


def test_the_use_of_a_link_in_a_step_lies_in_the_time_of_the_workers_that_send() -> None:
    from_0, from_1, from_2 = LinkTraffic(2, 1000, 10**9), LinkTraffic(2, 500, 10**9), LinkTraffic(0, 70, 10**8)
    traces = [
        trace(0, {0: (10, 20, 20, 30), 1: (12, 40), 2: (900, 990)}, (0, from_0), (1, from_1), (2, from_2)),
        trace(1, {0: (35, 60), 1: (40, 70), 2: (990, 999)}, (0, from_0)),  # begun while the other one was at step 0
        trace(1, {1: (70, 90)}, (1, from_1)),  # of another island, or an outer step
        trace(2, {0: (), 2: (1000, 1001)}, (0, from_0)),  # no times
    ]
    assert link_events(traces, HOSTS) == [
        LinkEvent(step=0, start_ns=10, end_ns=40, use=use("lab1", "lab2", 1500, 2.0)),
        LinkEvent(step=1, start_ns=40, end_ns=90, use=use("lab1", "lab2", 1500, 2.0)),
        LinkEvent(step=0, start_ns=900, end_ns=990, use=use("lab2", "lab1", 70, 0.1)),
    ]


def test_use_between_two_moments_is_the_difference() -> None:
    before = (use("lab1", "lab2", 100, 1.0),)
    now = (use("lab1", "lab2", 250, 4.0), use("lab2", "lab1", 60, 0.5))
    assert use_since(before, now) == (use("lab1", "lab2", 150, 3.0), use("lab2", "lab1", 60, 0.5))
