"""The account of wall time: the share of each cause, which together are all of it. Pure.

The time of every device is divided among what it does and, where it does nothing, what it waits for: another device, a
link, or something that the client does. A device that waits for one that waits itself waits for what that one waits
for. The account of a run is the mean over its devices. All times are on the client's clock, in nanoseconds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.results import StepTrace
from onebox.pool.discovery import HERE
from onebox.wire.protocol.responses import LinkTraffic

COMPUTING = "computing"
CLIENT = "client"
FEED = "feed"
SAVING = "saving"
EVALUATING = "evaluating"
PLANNING = "capture and planning"
RECOVERING = "recovery"
HOST_COPIES = "copies to and from host memory"
UNKNOWN = "not attributed"

STEPS = "steps"
"""The client waits for replies to steps: what devices do then is the cause."""

UNSAMPLED = "step"
"""A step whose instructions were not looked at; it is divided as those that were."""

_DISPATCH_NS = 20_000
"""A shorter gap between two instructions is the worker's own work, not a wait."""

_I = TypeVar("_I")

_MOST_HOPS = 8
"""Devices that are followed from one that waits to the cause of its wait."""


class ClientInterval(NamedTuple):
    """An interval of the client's thread.

    Args:
        doing: What it does.
        start_ns: Its beginning.
        end_ns: Its end.
    """

    doing: str
    start_ns: int
    end_ns: int


class DeviceInterval(NamedTuple):
    """An interval of a device's time within a step.

    Args:
        start_ns: Its beginning.
        end_ns: Its end.
        cause: The cause that its time belongs to.
        device: The device that it waits for, whose own causes count instead; -1 for none.
    """

    start_ns: int
    end_ns: int
    cause: str
    device: int = -1


class Launch(NamedTuple):
    """A step of a device.

    Args:
        sent_ns: When the client had sent it.
        start_ns: When the device began it.
        end_ns: When the device ended it.
    """

    sent_ns: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """The activity of a device in an interval of time.

    Args:
        host: Its host; empty for that of the client.
        launches: Its steps, in order; they do not overlap.
        intervals: What it does in these, in order; they do not overlap.
    """

    host: str = ""
    launches: Sequence[Launch] = ()
    intervals: Sequence[DeviceInterval] = ()


@dataclass(frozen=True, kw_only=True)
class Account:
    """The shares of causes in an interval of wall time.

    Args:
        seconds: Its length.
        shares: The share of each cause, the largest first; they sum to 1, unless there is no time.
        computing: The part of its own time in which each device computes.
    """

    seconds: float
    shares: Mapping[str, float] = field(default_factory=dict)
    computing: Mapping[int, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The shares of at least half a percent in one line."""
        said = [f"{cause} {100 * share:.0f} %" for cause, share in self.shares.items() if share >= 0.005]
        return ", ".join(said) or "no time has passed"

    @property
    def bound(self) -> str:
        """The cause of the largest share, with it; empty where no time has passed."""
        return next((f"{cause} ({100 * share:.0f} % of the time)" for cause, share in self.shares.items()), "")

    @property
    def training_s(self) -> float:
        """Seconds without capture and planning, which happen once."""
        return self.seconds * (1.0 - self.shares.get(PLANNING, 0.0))

    def rate(self, samples: int) -> float | None:
        """Return samples per second without capture and planning; ``None`` where no time has passed."""
        return samples / self.training_s if self.training_s else None


def joined(accounts: Iterable[Account]) -> Account:
    """Return the account of several intervals together."""
    found = [each for each in accounts if each.seconds > 0]
    sums: dict[str, list[float]] = {}
    own: dict[int, list[float]] = {}
    for each in found:
        for cause, share in each.shares.items():
            sums.setdefault(cause, []).append(share * each.seconds)
        for device, share in each.computing.items():
            own.setdefault(device, []).append(share * each.seconds)
    seconds = math.fsum(each.seconds for each in found)
    computing = {device: math.fsum(parts) / seconds for device, parts in own.items()}
    return _account(seconds, {cause: math.fsum(parts) for cause, parts in sums.items()}, computing)


def make_account(
    begin_ns: int, end_ns: int, spans: Sequence[ClientInterval], devices: Mapping[int, DeviceTime]
) -> Account:
    """Return the account of an interval.

    Args:
        begin_ns: Its beginning.
        end_ns: Its end.
        spans: What the client did in it, in order; they do not overlap. It is the client's own time between them.
        devices: What each device of the run did; without any, the client's time alone counts.
    """
    wall_ns = end_ns - begin_ns
    if wall_ns <= 0:
        return Account(seconds=0.0)
    sweep = _Sweep(spans, devices)
    lines = {device: sweep.line(device, begin_ns, end_ns) for device in devices} or {-1: sweep.client(begin_ns, end_ns)}
    sums: dict[str, float] = {}
    for line in lines.values():
        for cause, spent_ns in line.items():
            sums[cause] = sums.get(cause, 0.0) + spent_ns / len(lines)
    computing = {device: lines[device].get(COMPUTING, 0.0) / wall_ns for device in devices}
    return _account(wall_ns / 1e9, sums, computing)


def _account(seconds: float, sums: Mapping[str, float], computing: Mapping[int, float]) -> Account:
    """Return an account of parts in any unit."""
    total = math.fsum(sums.values())
    shares = {cause: part / total for cause, part in sorted(sums.items(), key=lambda item: -item[1]) if part > 0}
    return Account(seconds=seconds, shares=shares, computing=computing)


class _Sweep:
    """The division of devices' time; each method returns the nanoseconds of each cause in an interval."""

    def __init__(self, spans: Sequence[ClientInterval], devices: Mapping[int, DeviceTime]) -> None:
        self._spans = spans
        self._devices = devices
        self._span_ends = [span.end_ns for span in spans]
        self._interval_ends = {n: [each.end_ns for each in own.intervals] for n, own in devices.items()}
        self._launch_ends = {n: [each.end_ns for each in own.launches] for n, own in devices.items()}
        self._last_to_end = _LastToEnd(devices, self._launch_ends)
        self._far = next((own.host for own in devices.values() if own.host and own.launches), "")

    def line(self, device: int, begin_ns: int, end_ns: int) -> dict[str, float]:
        """Divide a device's whole time; steps that were not looked at are divided as the others."""
        found: dict[str, float] = {}
        inside: dict[str, float] = {}
        at_ns, asked = begin_ns, (device,)
        for launch in _after(self._devices[device].launches, self._launch_ends[device], begin_ns):
            if launch.start_ns >= end_ns:
                break
            start_ns, stop_ns = max(launch.start_ns, at_ns), min(launch.end_ns, end_ns)
            self._idle(device, at_ns, start_ns, asked, found)
            self._step(device, start_ns, stop_ns, asked, inside)
            at_ns = max(at_ns, stop_ns)
        self._idle(device, at_ns, end_ns, asked, found)
        unsampled = inside.pop(UNSAMPLED, 0.0) + found.pop(UNSAMPLED, 0.0)
        if unsampled:
            known = math.fsum(inside.values())
            scale = 1 + unsampled / known if known else 0.0
            inside = {cause: part * scale for cause, part in inside.items()} if known else {UNKNOWN: unsampled}
        for cause, part in inside.items():
            found[cause] = found.get(cause, 0.0) + part
        return found

    def client(self, begin_ns: int, end_ns: int) -> dict[str, float]:
        """Divide the client's time."""
        found: dict[str, float] = {}
        for doing, start_ns, stop_ns in self._doing(begin_ns, end_ns):
            _add(found, UNKNOWN if doing == STEPS else doing, start_ns, stop_ns)
        return found

    def _step(self, device: int, begin_ns: int, end_ns: int, asked: tuple[int, ...], found: dict[str, float]) -> None:
        """Divide time of a device within a step."""
        at_ns = begin_ns
        for interval in _after(self._devices[device].intervals, self._interval_ends[device], begin_ns):
            if interval.start_ns >= end_ns:
                break
            start_ns, stop_ns = max(interval.start_ns, at_ns), min(interval.end_ns, end_ns)
            _add(found, UNKNOWN, at_ns, start_ns)
            if interval.device >= 0:
                self._meanwhile(interval.device, start_ns, stop_ns, asked, found)
            else:
                others = len(asked) > 1 and interval.cause == COMPUTING
                _add(found, waiting_for(device) if others else interval.cause, start_ns, stop_ns)
            at_ns = max(at_ns, stop_ns)
        _add(found, UNKNOWN, at_ns, end_ns)

    def _meanwhile(
        self, device: int, begin_ns: int, end_ns: int, asked: tuple[int, ...], found: dict[str, float]
    ) -> None:
        """Divide time in which others wait for a device."""
        if device in asked or len(asked) > _MOST_HOPS or device not in self._devices:
            _add(found, waiting_for(device), begin_ns, end_ns)
            return
        asked, at_ns = (*asked, device), begin_ns
        for launch in _after(self._devices[device].launches, self._launch_ends[device], begin_ns):
            if launch.start_ns >= end_ns:
                break
            start_ns, stop_ns = max(launch.start_ns, at_ns), min(launch.end_ns, end_ns)
            self._idle(device, at_ns, start_ns, asked, found)
            self._step(device, start_ns, stop_ns, asked, found)
            at_ns = max(at_ns, stop_ns)
        self._idle(device, at_ns, end_ns, asked, found)

    def _idle(self, device: int, begin_ns: int, end_ns: int, asked: tuple[int, ...], found: dict[str, float]) -> None:
        """Divide time of a device between two of its steps: the next is not sent yet, or on its way."""
        if end_ns <= begin_ns:
            return
        own = self._devices[device]
        place = bisect.bisect_right(self._launch_ends[device], begin_ns)
        sent_ns = own.launches[place].sent_ns if place < len(own.launches) else end_ns
        sent_ns = min(max(sent_ns, begin_ns), end_ns)
        for doing, start_ns, stop_ns in self._doing(begin_ns, sent_ns):
            if doing == STEPS:
                self._replies(device, start_ns, stop_ns, asked, found)
            else:
                _add(found, doing, start_ns, stop_ns)
        _add(found, _way(own.host), sent_ns, end_ns)

    def _replies(
        self, device: int, begin_ns: int, end_ns: int, asked: tuple[int, ...], found: dict[str, float]
    ) -> None:
        """Divide time in which the client waits for replies: for the device whose step ends last or, where all have
        ended, for the reply itself."""
        ending = self._last_to_end.find(begin_ns, end_ns, asked) if len(asked) <= _MOST_HOPS else None
        if ending is None:
            _add(found, _way(self._devices[device].host or self._far), begin_ns, end_ns)
            return
        slowest, last = ending
        start_ns, stop_ns = max(begin_ns, last.start_ns), min(end_ns, last.end_ns)
        if begin_ns < start_ns:
            self._replies(device, begin_ns, start_ns, (*asked, slowest), found)
        self._step(slowest, start_ns, stop_ns, (*asked, slowest), found)
        if stop_ns < end_ns:
            self._replies(device, stop_ns, end_ns, asked, found)

    def _doing(self, begin_ns: int, end_ns: int) -> list[tuple[str, int, int]]:
        """Return what the client does in an interval, without gaps: each part with its start and end."""
        found, at_ns = [], begin_ns
        for span in _after(self._spans, self._span_ends, begin_ns):
            if span.start_ns >= end_ns:
                break
            start_ns, stop_ns = max(span.start_ns, at_ns), min(span.end_ns, end_ns)
            if at_ns < start_ns:
                found.append((CLIENT, at_ns, start_ns))
            if start_ns < stop_ns:
                found.append((span.doing, start_ns, stop_ns))
            at_ns = max(at_ns, stop_ns)
        if at_ns < end_ns:
            found.append((CLIENT, at_ns, end_ns))
        return found


class _Ending(NamedTuple):
    """A launch, to be compared by its end; of two with the same end, that of the first device is greater."""

    end_ns: int
    order: int
    device: int
    place: int


class _LastToEnd:
    """Finds, of the launches in an interval, the one that ends last, whatever the number of devices.

    Args:
        devices: What each device did.
        ends: The ends of each device's launches.
    """

    def __init__(self, devices: Mapping[int, DeviceTime], ends: Mapping[int, Sequence[int]]) -> None:
        self._devices, self._ends = devices, ends
        begun = sorted(
            (launch.start_ns, _Ending(launch.end_ns, -order, device, place))
            for order, (device, own) in enumerate(devices.items())
            for place, launch in enumerate(own.launches)
        )
        self._starts = [start_ns for start_ns, _ in begun]
        self._latest: list[tuple[_Ending, ...]] = []
        """Of the launches so far, the last to end of the two devices that have the latest."""
        latest: tuple[_Ending, ...] = ()
        for _, each in begun:
            others = [one for one in latest if one.device != each.device]
            if len(others) == len(latest) or each > next(one for one in latest if one.device == each.device):
                latest = tuple(sorted([each, *others], reverse=True)[:2])
            self._latest.append(latest)

    def find(self, begin_ns: int, end_ns: int, barred: Sequence[int]) -> tuple[int, Launch] | None:
        """Return the device, none of the barred ones, whose next launch of an interval ends last, and that launch."""
        before = bisect.bisect_left(self._starts, end_ns)
        for end, _, device, place in self._latest[before - 1] if before else ():
            if device in barred:
                continue
            if end <= begin_ns:
                return None
            if not place or self._ends[device][place - 1] <= begin_ns:
                return device, self._devices[device].launches[place]
            break  # it has several in the interval
        return self._search(begin_ns, end_ns, barred)

    def _search(self, begin_ns: int, end_ns: int, barred: Sequence[int]) -> tuple[int, Launch] | None:
        """Look at each device."""
        found: tuple[int, Launch] | None = None
        for device, own in self._devices.items():
            place = bisect.bisect_right(self._ends[device], begin_ns)
            if device in barred or place == len(own.launches):
                continue
            launch = own.launches[place]
            if launch.start_ns < end_ns and (found is None or launch.end_ns > found[1].end_ns):
                found = device, launch
        return found


def _after(intervals: Sequence[_I], ends_ns: Sequence[int], begin_ns: int) -> Iterator[_I]:
    """Yield the intervals that end after a time; without a copy of all that follow, of which few are looked at."""
    return map(intervals.__getitem__, range(bisect.bisect_right(ends_ns, begin_ns), len(intervals)))


def _add(found: dict[str, float], cause: str, begin_ns: int, end_ns: int) -> None:
    if end_ns > begin_ns:
        found[cause] = found.get(cause, 0.0) + end_ns - begin_ns


def waiting_for(device: int) -> str:
    """Return the cause of waits for a device."""
    return f"waiting for device {device}"


def link_between(one: str, other: str) -> str:
    """Return the cause of waits for the link between two hosts, or within one."""
    return f"link {'–'.join(sorted((one, other)))}" if one != other else f"transfers within {one}"


def _way(host: str) -> str:
    """Return the cause of waits for messages between the client and a host; empty for its own."""
    return link_between(HERE, host) if host else CLIENT


# ---- from the traces of steps


Exchanges = Mapping[tuple[int, ...], Mapping[int, int]]
"""When each device began its part of each exchange."""


def exchanges_of(trace: StepTrace) -> dict[tuple[int, ...], dict[int, int]]:
    """Return when each device began its part of the exchanges in a step."""
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for worker, (labels, times_ns, _) in trace.workers.items():
        for label, start_ns in zip(labels, times_ns[::2], strict=False):
            if label.exchange:
                found.setdefault(label.exchange, {})[worker] = start_ns
    return found


def device_intervals(
    worker: int,
    labels: Sequence[InstructionLabel],
    times_ns: Sequence[int],
    begun: Exchanges,
    hosts: Sequence[str],
    traffic: Mapping[tuple[int, int], LinkTraffic],
) -> list[DeviceInterval]:
    """Return the intervals of a worker's step: what it computes, and the causes of the gaps between.

    Args:
        worker: The worker.
        labels: The label of each of its instructions.
        times_ns: Start and end of each.
        begun: The exchanges of the step, and of the one before.
        hosts: The host of each device.
        traffic: What connections carried, by source and target.
    """
    work = sorted(
        (times_ns[2 * place], times_ns[2 * place + 1])
        for place, label in enumerate(labels)
        if label.track != "transfer"
    )
    transfers = [
        (times_ns[2 * place + 1], times_ns[2 * place], label)
        for place, label in enumerate(labels)
        if label.track == "transfer"
    ]
    at_ns = min(times_ns, default=0)
    found: list[DeviceInterval] = []
    for start_ns, end_ns in work:
        if start_ns - at_ns >= _DISPATCH_NS:
            found += _wait(worker, at_ns, start_ns, transfers, begun, hosts, traffic)
        elif start_ns > at_ns:
            found.append(DeviceInterval(at_ns, start_ns, COMPUTING))
        if end_ns > max(at_ns, start_ns):
            found.append(DeviceInterval(max(at_ns, start_ns), end_ns, COMPUTING))
        at_ns = max(at_ns, end_ns)
    return found


def _wait(
    worker: int,
    begin_ns: int,
    end_ns: int,
    transfers: Iterable[tuple[int, int, InstructionLabel]],
    begun: Exchanges,
    hosts: Sequence[str],
    traffic: Mapping[tuple[int, int], LinkTraffic],
) -> list[DeviceInterval]:
    """Divide a gap: until others had begun their part of the transfer that ended it, and the transfer after that."""
    meanwhile = [each for each in transfers if each[1] < end_ns and each[0] > begin_ns]
    inside = [each for each in meanwhile if each[0] <= end_ns and (each[2].peers or not each[2].exchange)]
    if not inside:
        sending = [each[2] for each in meanwhile if each[1] >= begin_ns - _DISPATCH_NS] or [
            each[2] for each in meanwhile
        ]
        return [
            DeviceInterval(begin_ns, end_ns, _sent_over(worker, sending[-1], hosts, traffic) if sending else UNKNOWN)
        ]
    last = max(inside, key=lambda each: each[0])
    label = last[2]
    if not label.peers:
        return [DeviceInterval(begin_ns, end_ns, HOST_COPIES)]
    starts_ns = begun.get(label.exchange, {})
    peer = max(label.peers, key=lambda each: starts_ns.get(each, 0))
    since_ns = min(max(starts_ns.get(peer, 0), begin_ns), end_ns)
    found = [DeviceInterval(begin_ns, since_ns, "", peer)] if since_ns > begin_ns else []
    if since_ns < end_ns:
        found.append(DeviceInterval(since_ns, end_ns, _carrier((worker, *label.peers), hosts, traffic)))
    return found


def _sent_over(
    worker: int, label: InstructionLabel, hosts: Sequence[str], traffic: Mapping[tuple[int, int], LinkTraffic]
) -> str:
    """Return the link that a worker sends its part of an exchange over."""
    others = (label.target,) if label.target >= 0 else label.peers
    return _carrier((worker, *others), hosts, traffic) if others else HOST_COPIES


def _carrier(members: Sequence[int], hosts: Sequence[str], traffic: Mapping[tuple[int, int], LinkTraffic]) -> str:
    """Return the link that an exchange of some devices waits for: of several between hosts, the busiest."""
    own = dict.fromkeys(hosts[member] for member in members)
    if len(own) < 3:
        return link_between(next(iter(own)), list(own)[-1])
    busy_ns: dict[str, int] = {}
    for (source, target), carried in traffic.items():
        if hosts[source] != hosts[target] and hosts[source] in own and hosts[target] in own:
            link = link_between(hosts[source], hosts[target])
            busy_ns[link] = busy_ns.get(link, 0) + carried.busy_ns
    first, *_, last = own
    return max(busy_ns, key=lambda link: busy_ns[link]) if busy_ns else link_between(first, last)
