"""Benchmark of links: messages go from one worker to another and a small one comes back, timed by the workers'
traces.

Links that are alike are measured once: between two hosts it is their network that counts, and within a host the kinds
of the devices. Links without a common host are measured at the same time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from onebox.cost import near_groups, shortest_tree
from onebox.cost.benchmark_kernels import filled, first_element
from onebox.cost.links import (
    LARGEST_BYTES,
    LEAST_REPEATS,
    SMALLEST_BYTES,
    fit_link,
    has_changed,
    is_doubtful,
    long_enough_s,
    next_probe_size,
    next_size,
    repeats,
)
from onebox.errors import OneboxError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.devices import DeviceInfo, distinct_hosts
from onebox.pool.errors import raise_first
from onebox.pool.network.emulated import LinkMap
from onebox.pool.network.measured_pool import MeasuredPool
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Ask, Call, Free, Receive, Send, Step
from onebox.wire.protocol.requests import Define, Instruction, Routine, Run, StoredProgram
from onebox.wire.protocol.responses import LinkTraffic

Pair = tuple[int, int]
"""Two devices, in a direction where there is one."""

LinkSpeeds = Mapping[Pair, tuple[float, float]]
"""Latency in seconds and bandwidth in bytes per second, by source and target."""

_STEPS = 4
"""Instructions of a round trip on either side."""

_MORE_ROUNDS = 3
"""The most repetitions of a link's measurement, for each of the two reasons."""

_METERED_S = 0.2
"""Seconds of a metered message on a link of the expected rate; a quarter is enough."""

_METERED_BYTES = 64 << 10
"""Fewest bytes of one."""

_TINY = TensorSpec("float32", (1,))


def measure_links(pool: MeasuredPool, members: Sequence[int], rooms: Sequence[int]) -> LinkSpeeds:
    """Measure the links between some devices in both directions, one of those that are alike.

    Args:
        pool: The pool.
        members: The devices.
        rooms: Bytes that may be used on each device of the pool.

    Raises:
        OneboxError: A worker failed or ended, or the group cannot be formed.
    """
    alike = representatives([pool.devices[member] for member in members], pool.links, rooms)
    ends = sorted({device for pair in alike.values() for device in pair})
    hosts = _host_of(pool)
    with _Group(pool, ends) as group:
        ways = {(a, b): group.way((a, b), min(rooms[a], rooms[b])) for a, b in set(alike.values())}
        return settled(alike, lambda pairs: _in_rounds(pairs, hosts, lambda pair: ways[pair].measure()))


def representatives(devices: Sequence[DeviceInfo], links: LinkMap, rooms: Sequence[int]) -> dict[Pair, Pair]:
    """Return for each direction of each link the one to measure: of those that are alike, where most memory is free.

    Links between two hosts are alike if the devices are of the same kinds, as the hosts share their connection; within
    a host, unless they are links of GPUs, whose wiring differs. Links with another emulated speed are others.

    Args:
        devices: The devices.
        links: Emulated links of their pool.
        rooms: Bytes that may be used on each device of the pool.
    """
    classes: dict[Hashable, list[Pair]] = {}
    hosts = {device: host for host, own in distinct_hosts(devices).items() for device in own}
    for one, other in itertools.combinations(devices, 2):
        within = hosts[one.number] == hosts[other.number]
        (kind, a), (other_kind, b) = sorted((_link_end(device, within), device.number) for device in (one, other))
        classes.setdefault((kind, other_kind, links.get((a, b)), links.get((b, a))), []).append((a, b))
    found: dict[Pair, Pair] = {}
    for pairs in classes.values():
        chosen = max(pairs, key=lambda pair: min(rooms[pair[0]], rooms[pair[1]]))
        for a, b in pairs:
            found |= {(a, b): chosen, (b, a): chosen[::-1]}
    return found


def _link_end(device: DeviceInfo, within_host: bool) -> tuple[str | float, ...]:
    """Return the properties of a device that a link depends on, besides emulation."""
    own = device.number if within_host and device.kind == "cuda" else -1
    return device.host, device.kind, device.name, device.speed, own


def rounds(pairs: Iterable[Pair], hosts: Mapping[int, str]) -> list[list[Pair]]:
    """Return pairs of devices in rounds, in each of which a host takes part in one pair at most.

    They are a proper edge colouring of the complete graph of the hosts: with an odd number `n` of them, or one more,
    those numbered `i` and `j` meet in round `(i + j) mod n`; devices of host `i` in round `2 i mod n`, in which it
    meets no other. Further pairs of the same hosts follow in further rounds of that kind.

    Args:
        pairs: The pairs, in one direction each.
        hosts: The host of each device.
    """
    pairs = list(pairs)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts[end] for pair in pairs for end in pair))}
    count = len(numbers) | 1
    earlier: Counter[frozenset[int]] = Counter()
    found: dict[tuple[int, int], list[Pair]] = {}
    for pair in pairs:
        ends = [numbers[hosts[end]] for end in pair]
        found.setdefault((earlier[frozenset(ends)], sum(ends) % count), []).append(pair)
        earlier[frozenset(ends)] += 1
    return [found[place] for place in sorted(found)]


def _in_rounds(
    ways: Iterable[Pair], hosts: Mapping[int, str], measure: Callable[[Pair], tuple[float, float]]
) -> dict[Pair, tuple[float, float]]:
    """Measure links in rounds of those without a common host, the directions of each one after the other.

    Args:
        ways: The links, with their directions.
        hosts: The host of each device.
        measure: Measures one direction of a link.
    """
    directions: dict[Pair, list[Pair]] = {}
    for way in ways:
        directions.setdefault((min(way), max(way)), []).append(way)

    def both(pair: Pair) -> list[tuple[float, float]]:
        return [measure(way) for way in directions[pair]]

    found: dict[Pair, tuple[float, float]] = {}
    for pairs in rounds(directions, hosts):
        with ThreadPoolExecutor(len(pairs), thread_name_prefix="onebox links") as threads:
            for pair, speeds in zip(pairs, threads.map(both, pairs), strict=True):
                found |= zip(directions[pair], speeds, strict=True)
    return found


def _host_of(pool: MeasuredPool) -> dict[int, str]:
    return {device: host for host, own in distinct_hosts(pool.devices).items() for device in own}


def probe_links(pool: MeasuredPool, pairs: Iterable[Pair], known: LinkSpeeds, rooms: Mapping[int, int]) -> LinkSpeeds:
    """Measure some links quickly, in both directions: a second a pair at most, from 1 Mbit/s up, on short ways.
    Links without a common host are measured at the same time.

    A link that seems slower than before is probed a second time: disturbances only make a measurement slower.

    Args:
        pool: The pool.
        pairs: The links, in one direction each.
        known: Their earlier measurements, in both directions.
        rooms: Bytes that may be used on each of their devices.

    Raises:
        OneboxError: A worker failed or ended, or the group cannot be formed.
    """
    both = [way for pair in pairs for way in (pair, pair[::-1])]
    with _Group(pool, sorted({device for way in both for device in way})) as group:

        def probe(pair: Pair) -> tuple[float, float]:
            way = group.way(pair, min(rooms[pair[0]], rooms[pair[1]]))
            found = way.probe()
            return way.probe() if has_changed(known[pair], found) else found

        return _in_rounds(both, _host_of(pool), probe)


def send_metered(pool: MeasuredPool, source: int, target: int, rate_bps: float, room_bytes: int) -> LinkTraffic:
    """Send messages from one worker to one of another host, which may be at work, until one takes long enough.

    The sender's meter counts the time in which a message is on the way, whenever the receiver takes it.

    Args:
        pool: The pool.
        source: The sender.
        target: The receiver.
        rate_bps: Expected bytes per second; the first message is short if that is right.
        room_bytes: Bytes that may be used on each of the two.

    Returns:
        What was carried of the last message; nothing if there is no meter.

    Raises:
        OneboxError: A worker failed or ended, or the group cannot be formed.
    """
    with _Group(pool, (source, target)) as group:
        return group.way((source, target), room_bytes).metered(rate_bps)


def settled(alike: Mapping[Pair, Pair], measure: Callable[[Collection[Pair]], LinkSpeeds]) -> LinkSpeeds:
    """Measure links, and measure again those that matter most and may have been disturbed.

    Links whose opposite direction is much faster are repeated until there are none; the shortest links that join all
    devices, which determine the groups of near devices, until the groups are stable; both a few times at most.

    Args:
        alike: For each direction of each link the one that is measured for it; see :func:`representatives`.
        measure: A function that measures directions of links; its results may only improve.
    """
    measured = dict(measure(sorted(set(alike.values()))))
    for _ in range(_MORE_ROUNDS):
        doubtful = [pair for pair, link in measured.items() if is_doubtful(link, measured[pair[::-1]])]
        measured |= measure(doubtful)
    devices = sorted({device for pair in alike for device in pair})

    def links() -> dict[Pair, tuple[float, float]]:
        return {pair: measured[chosen] for pair, chosen in alike.items()}

    for _ in range(_MORE_ROUNDS):
        known = tables(links(), devices)
        measured |= measure({alike[way] for a, b in shortest_tree(*known) for way in ((a, b), (b, a))})
        if near_groups(*tables(links(), devices)) == near_groups(*known):
            break
    return links()


def tables(
    links: LinkSpeeds, devices: Iterable[int]
) -> tuple[dict[int, dict[int, float]], dict[int, dict[int, float]]]:
    """Return latencies and bandwidths by source, then target; every device is a source."""
    latency_s, bandwidth_bps = ({source: dict[int, float]() for source in devices} for _ in range(2))
    for (source, target), (latency, bandwidth) in links.items():
        latency_s[source][target], bandwidth_bps[source][target] = latency, bandwidth
    return latency_s, bandwidth_bps


def one_way_s(sent_ns: Sequence[int], answered_ns: Sequence[int], *, clock: bool, back_s: float | None) -> list[float]:
    """Return the one-way times of messages, from the traces of round trips.

    Args:
        sent_ns: Trace of the sender in nanoseconds: send, receive, synchronise, free, for each round trip.
        answered_ns: Trace of the receiver: receive, call (which waits for it), send, free.
        clock: Whether both traces use the same clock and show the time of arrival.
        back_s: Seconds of the way back, subtracted where only the round trip is known; half of the round trip where
            ``None``. The result is at least half of the round trip, since the message back is the smaller one: a
            disturbed ``back_s`` would otherwise give messages that take no time.
    """
    found = []
    for start in range(0, len(sent_ns), 2 * _STEPS):
        left_ns, back_ns, there_ns = sent_ns[start], sent_ns[start + 5], answered_ns[start + 2]
        if clock:
            found.append((there_ns - left_ns) / 1e9)
        else:
            there_and_back_s = (back_ns - left_ns) / 1e9
            half_s = there_and_back_s / 2
            found.append(half_s if back_s is None else max(half_s, there_and_back_s - back_s))
    return [max(seconds, 1e-9) for seconds in found]


def have_one_clock(one: DeviceInfo, other: DeviceInfo) -> bool:
    """Return whether the traces of two devices are comparable to the microsecond: on one host's clock, which the times
    of a GPU's events only approach."""
    return one.host == other.host and "cuda" not in (one.kind, other.kind)


class _Group:
    """A group of workers, left at the end of a ``with`` block.

    Args:
        pool: The pool.
        members: The workers; their order gives the ranks.
    """

    def __init__(self, pool: MeasuredPool, members: Sequence[int]) -> None:
        self._pool = pool
        self._members = members
        self._number = pool.form_group(members, "workers")

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.leave_group(self._number, self._members)

    def way(self, pair: Pair, room_bytes: int) -> _Way:
        """Return one direction of the link between two members.

        Args:
            pair: The sender and the receiver.
            room_bytes: Limit of a message and its copies in bytes.
        """
        source, target = ((self._members.index(device), device) for device in pair)
        return _Way(self._pool, self._number, source, target, room_bytes)


class _Way:
    """One direction of a link between two workers.

    Args:
        pool: The pool.
        group: A group that both are in.
        source: The sender's rank and number.
        target: The receiver's rank and number.
        room_bytes: Limit of a message and its copies in bytes.
    """

    def __init__(
        self, pool: MeasuredPool, group: int, source: tuple[int, int], target: tuple[int, int], room_bytes: int
    ) -> None:
        self._pool = pool
        self._group = group
        self._source_rank, self._source = source
        self._target_rank, self._target = target
        self._most_bytes = min(LARGEST_BYTES, room_bytes // 4)
        self._fastest_s: dict[int, float] = {}
        self._clock = have_one_clock(pool.devices[self._source], pool.devices[self._target])

    def measure(self) -> tuple[float, float]:
        """Return latency and bandwidth, from the fastest message of each size so far: no disturbance makes one
        faster."""
        seconds = {SMALLEST_BYTES: min(self._trips(SMALLEST_BYTES, LEAST_REPEATS, None))}
        if (more := repeats(2 * seconds[SMALLEST_BYTES])) > LEAST_REPEATS:
            seconds[SMALLEST_BYTES] = min(self._trips(SMALLEST_BYTES, more, None))
        while (size := next_size(seconds, self._most_bytes)) is not None:
            count = repeats(2 * seconds[SMALLEST_BYTES] + _more_s(seconds, size))
            seconds[size] = min(self._trips(size, count, seconds[SMALLEST_BYTES]))
        self._fastest_s |= {size: min(taken, self._fastest_s.get(size, taken)) for size, taken in seconds.items()}
        return fit_link(self._fastest_s)

    def probe(self) -> tuple[float, float]:
        """Return latency and bandwidth as :meth:`measure` does, from fewer and shorter messages."""
        seconds = {SMALLEST_BYTES: min(self._trips(SMALLEST_BYTES, LEAST_REPEATS, None))}
        while (size := next_probe_size(seconds, self._most_bytes)) is not None:
            seconds[size] = min(self._trips(size, 1, seconds[SMALLEST_BYTES]))
        self._fastest_s |= {size: min(taken, self._fastest_s.get(size, taken)) for size, taken in seconds.items()}
        return fit_link(self._fastest_s)

    def metered(self, rate_bps: float) -> LinkTraffic:
        """Return what was carried of the last of some messages; see :func:`send_metered`."""
        latency_s = min(self._trips(SMALLEST_BYTES, LEAST_REPEATS, None))
        enough_ns = 1e9 * long_enough_s(latency_s, _METERED_S / 4)
        size = int(min(max(_METERED_S * rate_bps, _METERED_BYTES), self._most_bytes))
        while True:
            _, sent = self._exchange(size // SMALLEST_BYTES * SMALLEST_BYTES, 1)
            carried = [each for each in sent.traffic if each.worker == self._target]
            found = carried[0] if carried else LinkTraffic(self._target, 0, 0)
            if not carried or found.busy_ns >= enough_ns or size >= self._most_bytes:
                return found
            size = min(4 * size, self._most_bytes)

    def _trips(self, size: int, count: int, back_s: float | None) -> list[float]:
        """Send ``count`` messages of a size; return the seconds of each."""
        answered, sent = self._exchange(size, count)
        return one_way_s(sent.times_ns, answered.times_ns, clock=self._clock, back_s=back_s)

    def _exchange(self, size: int, count: int) -> Sequence[WorkerReply]:
        """Send ``count`` messages of a size and as many small ones back; return the replies of receiver and sender."""
        spec = TensorSpec("float32", (size // SMALLEST_BYTES,))
        numbers = [self._pool.new_number() for _ in range(4)]
        try:
            with self._pool.order:  # steps that go on meanwhile come before both or after both
                asked = [
                    self._pool.post(self._target, self._answering(spec, count, numbers), answer=True),
                    self._pool.post(self._source, self._sending(spec, count, numbers), answer=True),
                ]
            return raise_first(asked)
        finally:
            with contextlib.suppress(OneboxError):  # the pool may be broken
                for worker in (self._source, self._target):
                    self._pool.post(worker, [Free(tuple(numbers[:2]), tuple(numbers[2:]))])

    def _sending(self, spec: TensorSpec, count: int, numbers: Sequence[int]) -> list[Instruction]:
        message, back, program, routine = numbers
        trip: tuple[Step, ...] = (
            Send(message, self._group, self._target_rank),
            Receive(back, _TINY, self._group, self._target_rank),
            Ask("scalars", (back,)),
            Free((back,)),
        )
        return [
            Define(program, StoredProgram(filled(spec))),
            Call(program, (), (message,)),
            *_run(routine, trip, count),
        ]

    def _answering(self, spec: TensorSpec, count: int, numbers: Sequence[int]) -> list[Instruction]:
        message, back, program, routine = numbers
        trip: tuple[Step, ...] = (
            Receive(message, spec, self._group, self._source_rank),
            Call(program, (message,), (back,)),
            Send(back, self._group, self._source_rank),
            Free((message, back)),
        )
        return [
            Define(program, StoredProgram(first_element(spec))),
            *_run(routine, trip, count),
        ]


def _run(routine: int, trip: tuple[Step, ...], count: int) -> list[Instruction]:
    assert len(trip) == _STEPS
    return [Define(routine, Routine(trip * count, 0)), Run(routine, trace=True)]


def _more_s(seconds: Mapping[int, float], size: int) -> float:
    """Return how much longer a message of a size takes than the smallest, as far as known."""
    if len(seconds) < 2:
        return 0.0
    smallest, largest = min(seconds), max(seconds)
    return max(0.0, seconds[largest] - seconds[smallest]) / (largest - smallest) * (size - smallest)
