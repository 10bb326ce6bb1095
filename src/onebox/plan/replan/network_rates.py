"""Estimates of the links between hosts, from what connections between their devices carried. Pure.

All devices of two hosts share a link in each direction: what is measured between two of them holds for the others, and
for the opposite direction while that is unknown. Few bytes tell nothing of a rate: they may have waited behind those
that go to another host.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from onebox.plan.model.problem import Problem
from onebox.plan.replan.change_detection import AGAIN, DriftDetector, RateChange
from onebox.plan.replan.measurements import StepMeasurement
from onebox.sizes import bit_rate_text

TICK_S = 5e-3
"""Seconds within which busy times count as planned: the kernel counts them in ticks of up to 4 ms."""

_LITTLE = 0.1
"""Part of the shortest step within which they do, too: processors that are short make quick links seem slow."""

_MOVED = 1.5
"""Factor by which an estimate that follows the first samples after a change differs from the reported one if that is
another change."""

_LEAST_BYTES = 16 << 10
"""Fewest bytes of a step that tell a rate."""

_SURE_BPS = 125e6
"""Bytes per second up to which the network sets the pace. Above, it may be the processors at its ends, which a kernel
does not count, so that a link is not believed to be quicker than planned."""

_PROBE_S = 3.0
"""Least seconds of steps between two probes of a slow link that no step uses."""

_PROBE_SHARE = 0.05
"""Most part of the run's time that probes may take."""

_PROBE_CHANGE = 2.0
"""Factor by which the rate of a probe differs from the estimate if the link has changed."""

_Hosts = tuple[str, str]


class LinkProbe(NamedTuple):
    """A measurement of a link that no step uses.

    Args:
        source: The device that sends.
        target: The device of another host that receives.
        rate_bps: Believed bytes per second.
    """

    source: int
    target: int
    rate_bps: float


class ProbeResult(NamedTuple):
    """The result of a probe.

    Args:
        probe: The probe.
        size_bytes: Bytes that were carried; 0 if it failed.
        seconds: Their seconds.
    """

    probe: LinkProbe
    size_bytes: int
    seconds: float


class NetworkRates:
    """Running estimates of links between hosts, relative to a problem.

    Args:
        problem: The problem that the plan was made for.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._drifts: dict[_Hosts, DriftDetector] = {}
        self._reported: dict[_Hosts, float] = {}
        self._least_s = math.inf
        self._used: set[frozenset[str]] = set()
        self._idle_s: dict[frozenset[str], float] = {}
        self._pause_s: dict[frozenset[str], float] = {}

    @property
    def drifts(self) -> Collection[DriftDetector]:
        """The estimates."""
        return self._drifts.values()

    def factor(self, source: int, target: int) -> float:
        """Return the factor by which bytes take longer than planned from one device to another."""
        hosts = self._hosts(source, target)
        drift = self._drifts.get(hosts) or self._drifts.get(hosts[::-1])
        return 1.0 if drift is None else drift.factor

    def see(self, seen: StepMeasurement) -> list[RateChange]:
        """Process what connections carried in a step; return the changes."""
        self._least_s = min(self._least_s, seen.step_s)
        little_s = max(TICK_S, _LITTLE * self._least_s * seen.steps)
        sums: dict[_Hosts, tuple[float, float, float]] = {}
        for (source, target), found in seen.carried.items():
            hosts = self._hosts(source, target)
            if hosts[0] != hosts[1]:
                size, seconds, planned_s = sums.get(hosts, (0.0, 0.0, 0.0))
                own_s = found.size_bytes / self._problem.links.bandwidth_bps[source][target]
                sums[hosts] = size + found.size_bytes, seconds + found.seconds, planned_s + own_s
        changes, self._used = [], set()
        for hosts, (size, seconds, planned_s) in sums.items():
            believed = self._drifts[hosts].factor if hosts in self._drifts else 1.0
            if size < _LEAST_BYTES or planned_s <= 0 or max(seconds, planned_s * believed) < little_s:
                continue
            self._used.add(frozenset(hosts))
            drift = self._drifts.setdefault(hosts, DriftDetector())
            factor, reported = _factor(size, seconds, planned_s, little_s), self._reported.get(hosts, 1.0)
            changed = drift.see(factor, seen.step, (factor, factor))
            if changed or not 1 / _MOVED < drift.factor / reported < _MOVED:
                changes.append(self._change(hosts, reported, seen.step))
                self._reported[hosts] = drift.factor
        lasted_s = seen.step_s * seen.steps
        for pair in {frozenset(hosts) for hosts in self._drifts}:
            self._idle_s[pair] = 0.0 if pair in self._used else self._idle_s.get(pair, 0.0) + lasted_s
        return changes

    def slow(self) -> list[RateChange]:
        """Return the estimates of links that are slower than planned."""
        found = (self._change(hosts, 1.0, -1) for hosts in self._drifts)
        return [change for change in found if change.by > _MOVED]

    def probe(self, used: Collection[int]) -> LinkProbe | None:
        """Return the probe of a slow link that is due, because no step has used it for a while; ``None`` for none.

        Args:
            used: Devices that are at work, which a probe keeps waiting; others are preferred.
        """
        for hosts, drift in self._drifts.items():
            pair = frozenset(hosts)
            if drift.factor > AGAIN and self._idle_s.get(pair, 0.0) >= self._pause_s.get(pair, _PROBE_S):
                ends = [self._at(host) for host in hosts]
                source, target = (min(own, key=lambda device: (device in used, device)) for own in ends)
                planned_bps = self._problem.links.bandwidth_bps[source][target]
                return LinkProbe(source, target, planned_bps / drift.factor)
        return None

    def probed(self, result: ProbeResult, step: int) -> list[RateChange]:
        """Process the result of a probe after a step, which holds for both directions; return the changes."""
        (source, target, _), size_bytes, seconds = result
        hosts = self._hosts(source, target)
        self._idle_s[frozenset(hosts)] = 0.0
        self._pause_s[frozenset(hosts)] = max(_PROBE_S, seconds / _PROBE_SHARE)
        if not size_bytes:
            return []
        planned_s = size_bytes / self._problem.links.bandwidth_bps[source][target]
        factor = _factor(size_bytes, seconds, planned_s, TICK_S)
        changes = []
        for way in (hosts, hosts[::-1]):
            drift = self._drifts.get(way)
            if drift is not None and not 1 / _PROBE_CHANGE < factor / drift.factor < _PROBE_CHANGE:
                before = drift.factor
                drift.believe(factor, step)
                self._reported[way] = factor
                changes.append(self._change(way, before, step))
        return changes

    def _change(self, hosts: _Hosts, before: float, step: int) -> RateChange:
        drift = self._drifts[hosts]
        source, target = (self._at(host)[0] for host in hosts)
        return RateChange(
            "link " + "–".join(sorted(hosts)),
            (*self._at(hosts[0]), *self._at(hosts[1])),
            drift.factor,
            step if drift.since is None else drift.since,
            drift.factor / before,
            rate=bit_rate_text(self._problem.links.bandwidth_bps[source][target] / drift.factor),
        )

    def _hosts(self, source: int, target: int) -> _Hosts:
        devices = self._problem.device
        return (devices[source].host, devices[target].host) if source in devices and target in devices else ("", "")

    def _at(self, host: str) -> tuple[int, ...]:
        return tuple(device.number for device in self._problem.devices if device.host == host)


def _factor(size_bytes: float, seconds: float, planned_s: float, little_s: float) -> float:
    """Return the factor by which bytes took longer than planned; within some seconds they took as long."""
    took_s = max(seconds, min(planned_s, size_bytes / _SURE_BPS))
    return 1.0 if abs(took_s - planned_s) < little_s else took_s / planned_s
