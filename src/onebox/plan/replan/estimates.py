"""Estimates of devices and links from measurements, and the planning problem that follows. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import layout_of
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import ComputeTime, DeviceSpec, Problem, Segment
from onebox.plan.model.work import Links
from onebox.plan.replan.change_detection import AGAIN, DriftDetector, RateChange
from onebox.plan.replan.measurements import StepMeasurement, action_times, planned_seconds
from onebox.plan.replan.network_rates import LinkProbe, NetworkRates, ProbeResult

PLAIN = 1.5
"""Factor above which a change is attributed to the device. A smaller one is attributed to the segments that it
computes, as an error in their profile, and moves with them: otherwise each move of a poorly known segment would make
one device look slower and another one quicker, and cause the next move."""

_ODDEST = 1e3
"""Limit of a sample's factor, and inverse of its lower limit."""

_TELLING = 0.3
"""Ratio of a message's time for bytes to its latency above which a slow link counts as one of less bandwidth; below it
the cause is unknown, and both count as worse."""

DevicePair = tuple[int, int]
_Key = TypeVar("_Key")


@dataclass
class _Estimates:
    """Present estimates.

    Args:
        devices: Of each device.
        stages: Of each of several stages of a device, relative to that.
        updates: Of the optimizer's step on each device.
        links: Of each link.
        segments: Factors by which segments exceed their planned times, on any device.
    """

    devices: dict[int, DriftDetector]
    stages: dict[tuple[int, int], DriftDetector]
    updates: dict[int, DriftDetector]
    links: dict[DevicePair, DriftDetector]
    segments: dict[int, float]


class RateEstimator:
    """Running estimates of devices and links, relative to a problem.

    Args:
        problem: The problem that the plan was made for.
        plan: The plan under which steps are measured.
        probe: Steps without use after which a slow device or link is assumed to be as planned again, since only use can
            measure it; doubled each time.
    """

    def __init__(self, problem: Problem, plan: Plan, probe: int) -> None:
        self._problem, self._probe = problem, probe
        self._found = _Estimates({}, {}, {}, {}, {})
        self._networks = NetworkRates(problem)
        self._silent: dict[int | DevicePair, int] = {}
        self._patience: dict[int | DevicePair, int] = {}
        self._message_bytes: dict[DevicePair, float] = {}
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Compare steps with another plan from now on; estimates of devices and links stay."""
        self._plan, self._layout = plan, layout_of(self._problem, plan)
        self._found.stages.clear()
        self._expect()

    def _expect(self) -> None:
        """Compute the expected times of actions on devices that are as planned."""
        parts = self._plan.micro_batches(self._problem.batch)
        segments = tuple(self._learned(index) for index in range(len(self._problem.segments)))
        work, _ = CostModel(replace(self._problem, segments=segments)).work(self._layout, parts)
        self._expected = action_times(work)

    def see(self, seen: StepMeasurement) -> list[RateChange]:
        """Process a step's measurements; return the changes."""
        changes: list[RateChange] = []
        if any(task._replace(kind="F") not in self._expected for task in seen.actions):
            return changes  # measured under another plan
        for device in {task.device for task in seen.actions}:
            changes += self._see_device(seen, device)
        for device, seconds in seen.update_s.items():
            planned = self._update_s(device)
            drift = self._found.updates.setdefault(device, DriftDetector())
            before, name = drift.factor, f"the update on device {device}"
            changed = bool(planned and seconds) and drift.see(bounded(seconds / planned), seen.step)
            if changed and not any(device in change.devices for change in changes):
                changes.append(RateChange(name, (device,), drift.factor, _since(drift), drift.factor / before))
        for link, carried in seen.links.items():
            self._message_bytes[link] = carried.size_bytes / carried.messages
            planned = carried.messages * self._latency_s(link) + carried.size_bytes / self._bandwidth_bps(link)
            drift = self._found.links.setdefault(link, DriftDetector())
            before, each_s = drift.factor, planned / carried.messages
            parts = (carried.least_s / each_s, carried.most_s / each_s) if planned else (0.0, math.inf)
            if planned and carried.seconds and drift.see(bounded(carried.seconds / planned), seen.step, parts):
                changes.append(RateChange(_link(link), link, drift.factor, _since(drift), drift.factor / before))
        return changes + self._networks.see(seen) + self._hope(seen)

    def probe(self) -> LinkProbe | None:
        """Return the probe of a slow link between hosts that is due; ``None`` for none."""
        return self._networks.probe(self._plan.devices)

    def probed(self, result: ProbeResult, step: int) -> list[RateChange]:
        """Process the result of a probe after a step; return the changes."""
        return self._networks.probed(result, step)

    @property
    def alarmed(self) -> bool:
        """Return whether an estimate may be about to change: of a link between hosts after one sample, as all links of
        a host become slow together."""
        return any(drift.alarmed for drift in self._drifts) or any(drift.doubted for drift in self._networks.drifts)

    @property
    def doubted(self) -> bool:
        """Return whether one more step like the last would indicate a change."""
        return any(drift.doubted for drift in self._drifts)

    @property
    def _drifts(self) -> tuple[DriftDetector, ...]:
        """The estimates of devices and of links."""
        return (*self._found.devices.values(), *self._found.links.values(), *self._networks.drifts)

    def differing(self) -> list[RateChange]:
        """Return the estimates that differ from the plan."""
        devices = ((f"device {number}", (number,), drift) for number, drift in self._found.devices.items())
        links = ((_link(link), link, drift) for link, drift in self._found.links.items())
        found = (RateChange(what, of, one.factor, _since(one), one.factor) for what, of, one in (*devices, *links))
        return [change for change in found if change.plain] + self.slow_links()

    def slow_links(self) -> list[RateChange]:
        """Return the links between hosts that are slower than planned."""
        return self._networks.slow()

    def problem(self) -> Problem:
        """Return the problem with the present estimates."""
        devices = [replace(device, type=f"{device.type}@{device.number}") for device in self._problem.devices]
        segments = tuple(self._segment(index) for index in range(len(self._problem.segments)))
        return replace(self._problem, devices=tuple(devices), segments=segments, links=self._links())

    def kept(self) -> _Estimates:
        """Return a copy of the present estimates, for :meth:`restore`."""
        return deepcopy(self._found)

    def restore(self, before: _Estimates, devices: frozenset[int]) -> None:
        """Restore earlier estimates of some devices and their links; stages are those of that plan again."""
        for device in devices:
            _put_back(self._found.devices, before.devices, device)
            _put_back(self._found.updates, before.updates, device)
        for link in {*self._found.links, *before.links}:
            if not devices.isdisjoint(link):
                _put_back(self._found.links, before.links, link)
        self._found.stages, self._found.segments = deepcopy(before.stages), dict(before.segments)
        self._expect()

    def _see_device(self, seen: StepMeasurement, device: int) -> list[RateChange]:
        """Process a device's actions, and separately those stages that differ from the others."""
        by_stage: dict[int, list[float]] = {}
        for task, took in seen.actions.items():
            if task.device == device:
                sums = by_stage.setdefault(task.stage, [0.0, 0.0])
                sums[0] += took.mean_s * took.actions
                sums[1] += planned_seconds(self._expected, task, seen.actions) * took.actions
        measured, planned = (math.fsum(sums[place] for sums in by_stage.values()) for place in (0, 1))
        if not measured or not planned:
            return []
        drift = self._found.devices.setdefault(device, DriftDetector())
        before, found = drift.factor, []
        if drift.see(bounded(measured / planned), seen.step, self._parts(seen, device)):
            found.append(self._attributed(device, drift, before, tuple(by_stage)))
        for stage, (took_s, planned_s) in by_stage.items() if len(by_stage) > 1 else ():
            own = self._found.stages.setdefault((device, stage), DriftDetector())
            if took_s and planned_s and own.see(bounded(took_s / planned_s * planned / measured), seen.step):
                what = f"stage {stage} on device {device}"
                found.append(RateChange(what, (device,), own.factor, _since(own), own.factor))
                self._learn((stage,), own.factor)
                own.believe(1.0)
        return found

    def _parts(self, seen: StepMeasurement, device: int) -> tuple[float, float]:
        """Return the least and the most factor of a device's actions whose expected time is not negligible."""
        own = ((task, took) for task, took in seen.actions.items() if task.device == device)
        known = ((planned_seconds(self._expected, task, seen.actions), took) for task, took in own)
        pairs = [(took.least_s / planned, took.most_s / planned) for planned, took in known if planned]
        return min(least for least, _ in pairs), max(most for _, most in pairs)

    def _attributed(self, device: int, drift: DriftDetector, before: float, stages: tuple[int, ...]) -> RateChange:
        """Return a change of the times of a device's actions, attributed to the device or to its segments.

        A device that becomes slow by degrees makes its segments look slow. A change back, all at once, is theirs, too:
        otherwise the device would count as quicker than planned, and its segments as slow on any other device, so that
        an idle one would not be used any more.
        """
        change, since = drift.factor / before, _since(drift)
        own = change / self._unlearned(stages, change)
        if 1 / PLAIN < own < PLAIN:
            own = 1.0
        alone = all(len(self._layout.parts[stage].devices) == 1 for stage in stages)
        if not alone or own == change:
            return RateChange(f"device {device}", (device,), drift.factor, since, change)
        self._learn(stages, change / own)
        drift.believe(before * own, since)
        factor = drift.factor * fmean(self._found.segments[index] for index in self._segments_of(stages))
        return RateChange(f"the work of device {device}", (device,), factor, since, change)

    def _unlearned(self, stages: tuple[int, ...], change: float) -> float:
        """Return the part of a change that brings the estimates of the segments of some stages back to the plan, as far
        as all of them differ from it in the other direction; 1 for none."""
        factors = [self._found.segments.get(index, 1.0) for index in self._segments_of(stages)]
        if change < 1:
            return max(change, 1 / max(1.0, min(factors)))
        return min(change, 1 / min(1.0, max(factors)))

    def _learn(self, stages: tuple[int, ...], factor: float) -> None:
        """Raise or lower the estimates of the segments of some stages by a factor, on any device."""
        for index in self._segments_of(stages):
            self._found.segments[index] = bounded(self._found.segments.get(index, 1.0) * factor)
        self._expect()

    def _segments_of(self, stages: tuple[int, ...]) -> list[int]:
        return [index for stage in stages for index in self._layout.parts[stage].segments]

    def _hope(self, seen: StepMeasurement) -> list[RateChange]:
        """Reset the estimates of slow devices, their updates and links that have been unused for long to the plan."""
        working = {task.device for task in seen.actions}
        known: dict[int | DevicePair, list[DriftDetector]] = {link: [own] for link, own in self._found.links.items()}
        for drifts in (self._found.devices, self._found.updates):
            for device, own in drifts.items():
                known.setdefault(device, []).append(own)
        found = []
        for what, every in known.items():
            used = what in working or what in seen.links
            silent = self._silent[what] = 0 if used else self._silent.get(what, 0) + 1
            slowest = max(drift.factor for drift in every)
            if slowest > AGAIN and silent >= self._patience.get(what, self._probe):
                self._patience[what] = 2 * self._patience.get(what, self._probe)
                self._silent[what] = 0
                by = 1.0 / slowest
                for drift in every:
                    drift.believe(1.0)
                if isinstance(what, int):
                    found.append(RateChange(f"device {what}", (what,), 1.0, seen.step, by, hoped=True))
                else:
                    found.append(RateChange(_link(what), what, 1.0, seen.step, by, hoped=True))
        return found

    def _learned(self, index: int) -> Segment:
        """Return a segment with its estimated times on devices that are as planned."""
        segment, factor = self._problem.segments[index], self._found.segments.get(index, 1.0)
        if factor == 1:
            return segment
        forward_s, input_s, weight_s = (longer(known, factor) for known in _times(segment))
        return replace(segment, forward_s=forward_s, input_s=input_s, weight_s=weight_s)

    def _segment(self, index: int) -> Segment:
        """Return a segment with its estimated times on each device."""
        segment = self._learned(index)
        times: tuple[dict[str, ComputeTime], ...] = ({}, {}, {})
        updates: dict[str, float] = {}
        for device in self._problem.devices:
            kind, drift = f"{device.type}@{device.number}", self._found.devices.get(device.number)
            for found, known in zip(times, _times(segment), strict=True):
                found[kind] = _longer(known[device.type], drift.factor if drift else 1.0)
            update = self._found.updates.get(device.number)
            updates[kind] = segment.update_s.get(device.type, 0.0) * (update.factor if update else 1.0)
        return replace(segment, forward_s=times[0], input_s=times[1], weight_s=times[2], update_s=updates)

    def _links(self) -> Links:
        """Return the links as estimated."""
        latency_s = {a: dict(row) for a, row in self._problem.links.latency_s.items()}
        bandwidth_bps = {a: dict(row) for a, row in self._problem.links.bandwidth_bps.items()}
        for (a, b), drift in self._found.links.items():
            empty_s, bytes_s = latency_s[a][b], self._message_bytes[a, b] / bandwidth_bps[a][b]
            if drift.factor > 1 and bytes_s > _TELLING * empty_s:
                bandwidth_bps[a][b] /= (drift.factor * (empty_s + bytes_s) - empty_s) / bytes_s
            else:
                latency_s[a][b] *= drift.factor
                bandwidth_bps[a][b] /= drift.factor
        for a, row in bandwidth_bps.items():
            for b in row:
                row[b] /= self._networks.factor(a, b)
        return replace(self._problem.links, latency_s=latency_s, bandwidth_bps=bandwidth_bps)

    def _update_s(self, number: int) -> float:
        """Return the planned seconds of a device's optimizer steps; 0 where they are not computed there."""
        if self._plan.update == "host":
            return 0.0
        device: DeviceSpec = self._problem.device[number]
        mine: Sequence[int] = [i for part in self._layout.parts if number in part.devices for i in part.segments]
        return math.fsum(self._problem.segments[i].update_s.get(device.type, 0.0) for i in mine) / device.speed

    def _latency_s(self, link: DevicePair) -> float:
        return self._problem.links.latency_s[link[0]][link[1]]

    def _bandwidth_bps(self, link: DevicePair) -> float:
        return self._problem.links.bandwidth_bps[link[0]][link[1]]


def bounded(factor: float) -> float:
    """Return a factor of times within the limits of estimates."""
    return max(1 / _ODDEST, min(_ODDEST, factor))


def _times(segment: Segment) -> tuple[Mapping[str, ComputeTime], ...]:
    return segment.forward_s, segment.input_s, segment.weight_s


def longer(times: Mapping[str, ComputeTime], factor: float, *, of: str | None = None) -> dict[str, ComputeTime]:
    """Return times by type of device, multiplied by a factor: all, or those of one type."""
    return {kind: _longer(time, factor) if of in (None, kind) else time for kind, time in times.items()}


def _longer(time: ComputeTime, factor: float) -> ComputeTime:
    return ComputeTime(fixed_s=time.fixed_s * factor, sample_s=time.sample_s * factor)


def _link(link: DevicePair) -> str:
    return f"link {link[0]} → {link[1]}"


def _since(drift: DriftDetector) -> int:
    return -1 if drift.since is None else drift.since


def _put_back(now: dict[_Key, DriftDetector], before: Mapping[_Key, DriftDetector], key: _Key) -> None:
    if key in before:
        now[key] = deepcopy(before[key])
    else:
        now.pop(key, None)
