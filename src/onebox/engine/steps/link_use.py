"""Use of the links between hosts by the steps of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onebox.engine.steps.results import StepTrace
from onebox.wire.protocol.responses import LinkTraffic


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """Use of the link from one host to another.

    Args:
        source: The host that sends.
        target: The host that receives.
        size_bytes: Bytes that have arrived.
        busy_s: Seconds in which bytes were on the way or queued, summed over connections.
    """

    source: str
    target: str
    size_bytes: int
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class LinkEvent:
    """Use of the link from one host to another in a step, for a timeline.

    Args:
        step: The step with whose replies it was reported.
        start_ns: The beginning of the step on the host that sends, on its monotonic clock; not before the end of the
            event before on the same link.
        end_ns: Its end there.
        use: The use of the link since the event before.
    """

    step: int
    start_ns: int
    end_ns: int
    use: LinkUse


Traffic = Mapping[tuple[int, int], LinkTraffic]
"""What connections between hosts carried, by source and target device."""


def add_traffic(sums: dict[tuple[int, int], LinkTraffic], further: Traffic) -> None:
    """Add what connections carried to what they did before."""
    for way, carried in further.items():
        before = sums.get(way, LinkTraffic(way[1], 0, 0))
        size_bytes, busy_ns = before.size_bytes + carried.size_bytes, before.busy_ns + carried.busy_ns
        sums[way] = LinkTraffic(way[1], size_bytes, busy_ns)


def used_links(traffic: Traffic, hosts: Sequence[str]) -> tuple[LinkUse, ...]:
    """Return the use of links between hosts.

    Args:
        traffic: What was carried, by source and target device.
        hosts: The host of each device.
    """
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for (source, target), found in traffic.items():
        size_bytes, busy_ns = sums.get(ends := (hosts[source], hosts[target]), (0, 0))
        sums[ends] = size_bytes + found.size_bytes, busy_ns + found.busy_ns
    return tuple(
        LinkUse(source=source, target=target, size_bytes=size_bytes, busy_s=busy_ns / 1e9)
        for (source, target), (size_bytes, busy_ns) in sums.items()
    )


def link_events(traces: Iterable[StepTrace], hosts: Sequence[str]) -> list[LinkEvent]:
    """Return the use of each link between hosts in each step, in order of time for each link.

    Args:
        traces: What was carried in the steps, and when workers executed them; several may be of the same step.
        hosts: The host of each device.
    """
    steps: dict[tuple[str, str, int], tuple[dict[tuple[int, int], LinkTraffic], list[int]]] = {}
    for trace in traces:
        for way, carried in trace.traffic.items():
            _, times_ns, _ = trace.workers[way[0]]
            if times_ns:
                sums, own_ns = steps.setdefault((hosts[way[0]], hosts[way[1]], trace.step), ({}, []))
                add_traffic(sums, {way: carried})
                own_ns += min(times_ns), max(times_ns)
    found = []
    ends_ns: dict[tuple[str, str], int] = {}
    for (_, _, step), (sums, own_ns) in sorted(steps.items(), key=lambda item: max(item[1][1])):
        (use,) = used_links(sums, hosts)
        start_ns = max(min(own_ns), ends_ns.get((use.source, use.target), min(own_ns)))
        end_ns = ends_ns[use.source, use.target] = max(own_ns)
        found.append(LinkEvent(step=step, start_ns=start_ns, end_ns=end_ns, use=use))
    return found


def use_since(before: Iterable[LinkUse], now: Iterable[LinkUse]) -> tuple[LinkUse, ...]:
    """Return the use of links between two moments, given that up to each of them."""
    known = {(each.source, each.target): each for each in before}
    found = []
    for each in now:
        old = known.get((each.source, each.target))
        size_bytes, busy_s = (0, 0.0) if old is None else (old.size_bytes, old.busy_s)
        found.append(
            LinkUse(
                source=each.source,
                target=each.target,
                size_bytes=each.size_bytes - size_bytes,
                busy_s=each.busy_s - busy_s,
            )
        )
    return tuple(found)
