"""Measurement of what this worker's own connections carry to workers of other hosts, while steps use them.

The kernel counts the bytes that the other end has acknowledged, and the time in which some were on the way or queued
(``tcpi_busy_time`` of ``struct tcp_info``), in ticks of some milliseconds. Where encryption is slower than the network,
the processor's time that it takes is the longer one, and counts. Each burst also takes the round trip of its last
acknowledgement, which says nothing of the rate. Of several connections to one worker, which are busy at the same time,
the one that was busy for longest counts.

Several are used only where one does not fill the link. The first carries everything until the kernel says that for much
of the busy time it was the window that held back what was to be sent (``tcpi_rwnd_limited``, ``tcpi_sndbuf_limited``;
since Linux 4.10), and not a queue on the way, in which all of the window waits where routers have long ones. Then there
is one more, which is judged with the others in the same way.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from onebox.wire.protocol.responses import GroupTraffic
from onebox.worker.comm.tcp.connection import TcpConnection

_INFO = struct.Struct("=24xI40xI48xQ16xII16xQQQ")
"""Of ``linux/tcp.h``: unacked, rtt, bytes_acked, notsent_bytes, min_rtt, busy_time, rwnd_limited, sndbuf_limited."""

_UNKNOWN_US = 1 << 31
"""Round trips from here up are no measurement: the kernel gives the largest number where it has none."""

HELD_BACK = 0.2
"""Share of the busy time from which on it counts that the window held a link back: it is some hundredths on links that
one connection fills, while windows grow."""

JUDGED_TRIPS = 16
"""Round trips of busy time after which it is judged: longer than windows grow."""

_FEW_PACKETS = 4
"""Packets without an acknowledgement beside which there is room for a short message."""

QUEUED = 2
"""Ratio of the recent round trip to the shortest one from which on at least half of what is on the way waits in queues:
the link is full, and the window that it fits into holds nothing back."""


class _Counters(NamedTuple):
    """Fields of ``struct tcp_info``."""

    unacked: int
    recent_trip_us: int
    acked_bytes: int
    unsent_bytes: int
    trip_us: int
    busy_us: int
    receiver_limited_us: int
    sender_limited_us: int


class _Totals(NamedTuple):
    """Totals of a connection.

    Args:
        size_bytes: Bytes that have arrived.
        busy_ns: Time in which some were on the way or queued, by the kernel.
        writing_ns: The sender's processor time.
        trips_ns: Round trips of all bursts.
    """

    size_bytes: int = 0
    busy_ns: int = 0
    writing_ns: int = 0
    trips_ns: int = 0


class UsedConnections:
    """Decision of how many connections of a link are used: one at first, then more, never fewer.

    Args:
        most: Those that there are.
    """

    def __init__(self, most: int) -> None:
        self.count = 1
        """The connections that are used; the first ones."""
        self._most = most
        self._busy_us = self._limited_us = 0  # when the time that is judged began

    def judge(self, found: Sequence[_Counters]) -> None:
        """Use one more if the window has held back those that are used.

        Args:
            found: The counters of those that are used.
        """
        if self.count == self._most or found[0].trip_us >= _UNKNOWN_US:
            return
        busy_us = sum(each.busy_us for each in found)
        passed_us = busy_us - self._busy_us
        if passed_us < JUDGED_TRIPS * found[0].trip_us * len(found):
            return
        limited_us = sum(each.receiver_limited_us + each.sender_limited_us for each in found)
        full = max(each.recent_trip_us for each in found) >= QUEUED * found[0].trip_us
        if not full and limited_us - self._limited_us >= HELD_BACK * passed_us:
            self.count += 1
        self._busy_us, self._limited_us = busy_us, limited_us


class LinkMeter:
    """Meter of the connections to one peer, by way of which all is sent.

    Args:
        connections: The connections; their owner closes them.
        group: The group that they belong to.
        peer: The rank at their other end.
    """

    def __init__(self, connections: Sequence[TcpConnection], group: int, peer: int) -> None:
        self._group, self._peer = group, peer
        self._connections = connections
        self._used = UsedConnections(len(connections))
        self._bursts = [0] * len(connections)
        self._writing_ns = [0] * len(connections)
        self._reported = [_Totals()] * len(connections)
        self._seen: list[_Counters] = []
        """Counters of the first connection, as :meth:`takes` has just seen them."""

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all of some parts by the used connection with the fewest bytes that the network has not taken yet.

        Raises:
            OSError: A connection has ended.
        """
        begin_ns = time.thread_time_ns()
        found, self._seen = self._seen, []
        found += [_counters(each.raw) for each in self._connections[len(found) : self._used.count]]
        self._used.judge(found)
        place = min(range(len(found)), key=lambda number: found[number].unsent_bytes)
        self._bursts[place] += not found[place].unacked and not found[place].unsent_bytes
        try:
            self._connections[place].send(*parts)
        finally:
            self._writing_ns[place] += time.thread_time_ns() - begin_ns

    def takes(self) -> bool:
        """Return whether the kernel takes a short message at once: little is on the way, whose acknowledgement may take
        its time, and nothing waits to be sent. If so, the caller sends it now."""
        try:
            found = _counters(self._connections[0].raw)
        except OSError:
            return False
        if found.unsent_bytes or found.unacked > _FEW_PACKETS:
            return False
        self._seen = [found]
        return True

    @property
    def acknowledged_bytes(self) -> int:
        """Bytes that the other end has acknowledged; 0 of connections that have ended."""
        try:
            return sum(found.acked_bytes for found in (_counters(each.raw) for each in self._connections))
        except OSError:
            return 0

    def take(self) -> GroupTraffic | None:
        """Return what has been carried since the last call; ``None`` if the connections are closed."""
        try:
            found = [_counters(each.raw) for each in self._connections]
        except OSError:
            return None
        new = []
        for place, counted in enumerate(found):
            trip_ns = 1000 * counted.trip_us if counted.trip_us < _UNKNOWN_US else 0
            now = _Totals(
                counted.acked_bytes, 1000 * counted.busy_us, self._writing_ns[place], self._bursts[place] * trip_ns
            )
            new.append(_Totals(*(one - other for one, other in zip(now, self._reported[place], strict=True))))
            self._reported[place] = now
        longest = max(new, key=lambda each: each.busy_ns)
        writing_ns = sum(each.writing_ns for each in new)
        net_ns = max(0, max(longest.busy_ns, writing_ns) - max(0, longest.trips_ns))
        return GroupTraffic(self._group, self._peer, max(0, sum(each.size_bytes for each in new)), net_ns)


def round_trip_s(raw: socket.socket) -> float:
    """Return the shortest time there and back that the kernel has measured on a connection; 0 if it has none."""
    trip_us = _counters(raw).trip_us
    return trip_us / 1e6 if trip_us < _UNKNOWN_US else 0.0


def _counters(raw: socket.socket) -> _Counters:
    found = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    return _Counters(*_INFO.unpack(found.ljust(_INFO.size, b"\0")))


class LinkMeters:
    """The meters of a worker's connections, of all its groups."""

    def __init__(self) -> None:
        self._meters: list[LinkMeter] = []
        self._lock = threading.Lock()

    def add(self, connections: Sequence[TcpConnection], group: int, peer: int) -> LinkMeter:
        """Return the meter of new connections to a rank of a group."""
        meter = LinkMeter(connections, group, peer)
        with self._lock:
            self._meters.append(meter)
        return meter

    def take(self) -> tuple[GroupTraffic, ...]:
        """Return what has been carried to each peer since the last call; those without anything are left out."""
        with self._lock:
            found = [(meter, meter.take()) for meter in self._meters]
            self._meters = [meter for meter, carried in found if carried is not None]
        return tuple(carried for _, carried in found if carried is not None and carried.size_bytes)
