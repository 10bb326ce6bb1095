"""Measurement of what this worker's own connections carry to workers of other hosts, while steps use them.

The kernel counts the bytes that the other end has acknowledged, and the time in which some were on the way or queued
(``tcpi_busy_time`` of ``struct tcp_info``), in ticks of some milliseconds. Where encryption is slower than the network,
the processor's time that it takes is the longer one, and counts. Each burst also takes the round trip of its last
acknowledgement, which says nothing of the rate.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from typing import NamedTuple

from onebox.wire.protocol.responses import GroupTraffic

_COUNTERS = struct.Struct("=24xI92xQ16xII16xQ")  # unacked, bytes_acked, notsent_bytes, min_rtt, busy_time (linux/tcp.h)
_UNKNOWN_US = 1 << 31
"""Round trips from here up are no measurement: the kernel gives the largest number where it has none."""


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


class LinkMeter:
    """Meter of one connection, by way of which all is sent.

    Args:
        connection: The connection; its owner closes it.
        group: The group that it belongs to.
        peer: The rank at its other end.
    """

    def __init__(self, connection: ssl.SSLSocket, group: int, peer: int) -> None:
        self._group, self._peer = group, peer
        self._connection = connection
        self._bursts = self._writing_ns = 0
        self._reported = _Totals()

    def send(self, data: bytes | memoryview) -> None:
        """Send all of some data.

        Raises:
            OSError: The connection has ended.
        """
        begin_ns = time.thread_time_ns()
        unacked, _, unsent, *_ = self._counters()
        self._bursts += not unacked and not unsent
        try:
            self._connection.sendall(data)
        finally:
            self._writing_ns += time.thread_time_ns() - begin_ns

    def take(self) -> GroupTraffic | None:
        """Return what has been carried since the last call; ``None`` if the connection is closed."""
        try:
            _, acked_bytes, _, trip_us, busy_us = self._counters()
        except OSError:
            return None
        trip_ns = 1000 * trip_us if trip_us < _UNKNOWN_US else 0
        now = _Totals(acked_bytes, 1000 * busy_us, self._writing_ns, self._bursts * trip_ns)
        size_bytes, busy_ns, writing_ns, trips_ns = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        net_ns = max(0, max(busy_ns, writing_ns) - max(0, trips_ns))
        return GroupTraffic(self._group, self._peer, max(0, size_bytes), net_ns)

    def _counters(self) -> tuple[int, int, int, int, int]:
        found = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
        unacked, acked_bytes, unsent_bytes, trip_us, busy_us = _COUNTERS.unpack(found.ljust(_COUNTERS.size, b"\0"))
        return unacked, acked_bytes, unsent_bytes, trip_us, busy_us


class LinkMeters:
    """The meters of a worker's connections, of all its groups."""

    def __init__(self) -> None:
        self._meters: list[LinkMeter] = []
        self._lock = threading.Lock()

    def add(self, connection: ssl.SSLSocket, group: int, peer: int) -> LinkMeter:
        """Return the meter of a new connection to a rank of a group."""
        meter = LinkMeter(connection, group, peer)
        with self._lock:
            self._meters.append(meter)
        return meter

    def take(self) -> tuple[GroupTraffic, ...]:
        """Return what each connection has carried since the last call; those that carried nothing are left out."""
        with self._lock:
            found = [(meter, meter.take()) for meter in self._meters]
            self._meters = [meter for meter, carried in found if carried is not None]
        return tuple(carried for _, carried in found if carried is not None and carried.size_bytes)
