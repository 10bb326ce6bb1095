"""Heartbeat thread of a worker: authenticates the client, sends heartbeats, and ends the worker with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from onebox.errors import WireError
from onebox.wire import SMALL_BYTES, KeyPair, ReceiveWatch, configure, decode_envelope, encode, listen, receive
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.requests import ReadClock
from onebox.wire.protocol.responses import ClockReading, Heartbeat
from onebox.worker.progress import PeakMeter, WorkerProgress
from onebox.worker.system.cpu_affinity import use_all_cores
from onebox.worker.system.process_watch import DISK_WAIT_S

HEARTBEAT_S = 0.5
IDLE_HEARTBEAT_S = 1.0
"""Interval between heartbeats of a worker that has something to do, and of one that waits for others. They are sent at
multiples of it, so that the workers of a host, and their client, wake together."""

_BATCH = 16
"""Most messages that are processed between two checks of the owner."""

_IDLE_SHARE = 0.04
"""Fraction of a core above which a thread counts as computing; the watcher itself uses less."""

_LATE_S = 2 * HEARTBEAT_S
"""Longest interval that counts between two readings: after a longer pause of the watcher it is unknown whether other
threads could run."""


class StallDetector:
    """Detector of stalled work; pure: readings in, seconds out.

    A worker that waits for its peers or for the client, that uses or is ready to use the processor, or that reads from
    a disk (including swapped memory) is not stalled. Nor is one that waits for a single read of a disk, such as of a
    page that its siblings need, too, and that counts as read by one of them; but not without end.
    """

    def __init__(self) -> None:
        self._executed = -1
        self._disk_reads = 0
        self._disk_wait_s = 0.0
        self._processor_s = 0.0
        self._at_s = 0.0
        self._stalled_s = 0.0

    def reading(
        self,
        *,
        executed: int,
        waiting: bool,
        processor_s: float,
        now_s: float,
        disk_reads: int = 0,
        state: str = "S",
    ) -> float:
        """Process a reading and return the seconds for which the worker has been stalled.

        Args:
            executed: Number of instructions and operators so far.
            waiting: Whether it waits for others.
            processor_s: Processor time of the process so far.
            now_s: The time.
            disk_reads: Number of the process's major page faults and blocks read so far.
            state: State of the working thread as in proc(5): R if it is ready to run, D if it waits for a disk.
        """
        elapsed = now_s - self._at_s
        waits_for_disk = state == "D" and disk_reads == self._disk_reads
        self._disk_wait_s = self._disk_wait_s + min(elapsed, _LATE_S) if waits_for_disk else 0.0
        busy = state == "R" or 0 < self._disk_wait_s <= DISK_WAIT_S
        idle = processor_s - self._processor_s < _IDLE_SHARE * elapsed and disk_reads == self._disk_reads
        self._disk_reads = disk_reads
        stalled = not waiting and executed == self._executed and idle and not busy
        self._stalled_s = self._stalled_s + min(elapsed, _LATE_S) if stalled else 0.0
        self._executed, self._processor_s, self._at_s = executed, processor_s, now_s
        return self._stalled_s


class HeartbeatThread:
    """The watching thread.

    Args:
        context: ZeroMQ context of its sockets.
        keys: The worker's keys.
        client_key: The only public key that is accepted.
        address: Bind address; see :func:`~onebox.wire.listen`.
        ports: Allowed ports; see :func:`~onebox.wire.listen`.
        owner_descriptors: Descriptors, any of which becomes readable when the owner has ended.
        progress: The worker's progress.
        meter: The memory of its buffers.
        interrupt: Called with the number of a group whose waits in the working thread must end.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        keys: KeyPair,
        client_key: str,
        address: str,
        owner_descriptors: Sequence[int],
        progress: WorkerProgress,
        meter: PeakMeter,
        interrupt: Callable[[int], None],
        ports: Sequence[int] = (),
    ) -> None:
        self._context = context
        self._interrupt = interrupt
        self._owner_descriptors = owner_descriptors
        self._progress = progress
        self._meter = meter
        self._bell = context.socket(zmq.PAIR)
        self._bell.bind("inproc://onebox.stop")
        self._authenticator = zmq.auth.Authenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("onebox", _OneKey(client_key))
        self._socket = context.socket(zmq.DEALER)
        configure(self._socket, keys, server_key=None, queue=4)
        self._watches = [ReceiveWatch(self._socket, SMALL_BYTES)]
        self._socket.rcvtimeo = 0  # milliseconds; a poller finds it readable when the client connects, too
        self.endpoint = listen(self._socket, address, ports)
        self._thread = threading.Thread(target=self._watch, name="onebox-watch", daemon=True)

    def check_receipt(self, watch: ReceiveWatch) -> None:
        """Check the connections of another socket, too; before :meth:`start`."""
        self._watches.append(watch)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its sockets."""
        with self._context.socket(zmq.PAIR) as bell:
            bell.connect("inproc://onebox.stop")
            bell.send(b"")
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        use_all_cores()
        try:
            self._serve()
        except BaseException:  # otherwise the end of the owner would go unnoticed, and no client could connect
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        poller = zmq.Poller()
        zap = self._authenticator.zap_socket
        assert zap is not None
        poller.register(zap, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN | zmq.POLLOUT)  # the pool opens with the first heartbeat
        for source in (*self._owner_descriptors, *(watch.monitor for watch in self._watches)):
            poller.register(source, zmq.POLLIN)
        stall = StallDetector()
        next_s = time.monotonic()
        heard = False
        while True:
            ready = dict(poller.poll(max(0, math.ceil((next_s - time.monotonic()) * 1000))))
            if any(descriptor in ready for descriptor in self._owner_descriptors):
                os._exit(0)
            if self._bell in ready:
                break
            if zap in ready:
                asyncio.run(self._authenticator.handle_zap_message(zap.recv_multipart()))
            if ready.get(self._socket, 0) & zmq.POLLIN:
                self._receive()
            self._check_connections(ready)
            if time.monotonic() >= next_s or ready.get(self._socket, 0) & zmq.POLLOUT:
                if self._send_heartbeat(stall) and not heard:
                    heard = True
                    poller.modify(self._socket, zmq.POLLIN)
                next_s = self._next_s(time.monotonic())
        self._authenticator.stop()
        for watch in self._watches:
            watch.close()
        self._socket.close(0)
        self._bell.close(0)

    def _next_s(self, now_s: float) -> float:
        """Return the time of the heartbeat after one."""
        interval_s = IDLE_HEARTBEAT_S if self._progress.waiting else HEARTBEAT_S
        return (now_s // interval_s + 1) * interval_s

    def _receive(self) -> None:
        """Process client messages outside the queue: groups to leave at once because of silent members, and questions
        for the time."""
        with contextlib.suppress(zmq.Again, WireError):  # ignore messages that violate the protocol
            for _ in range(_BATCH):
                envelope, _ = decode_envelope(receive(self._socket, self._watches[0]))
                for instruction in envelope.instructions:
                    if isinstance(instruction, LeaveGroup):
                        self._interrupt(instruction.group)
                    elif isinstance(instruction, ReadClock):
                        reading = ClockReading(instruction.asked_ns, time.monotonic_ns())
                        self._socket.send(encode(reading), zmq.NOBLOCK)

    def _check_connections(self, ready: dict[Any, int]) -> None:
        """End this worker if too much has come without completing a message."""
        now_s = time.monotonic()
        for watch in self._watches:
            if watch.monitor in ready:
                watch.attend()
            for cut in watch.check(now_s):
                size_text = f"{cut.size_bytes} bytes without completing a message"
                print(f"onebox worker: {size_text} came from {cut.address}; this worker ends", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)

    def _send_heartbeat(self, stall: StallDetector) -> bool:
        """Send a heartbeat, and return whether a client is connected."""
        progress, used = self._progress, resource.getrusage(resource.RUSAGE_SELF)
        stalled_s = stall.reading(
            executed=progress.executed,
            waiting=progress.waiting,
            processor_s=time.process_time(),
            now_s=time.monotonic(),
            disk_reads=used.ru_majflt + used.ru_inblock,
            state=main_thread_state(),
        )
        meter = self._meter
        message = encode(Heartbeat(progress.executed, stalled_s, progress.doing, meter.used_bytes, meter.peak_bytes))
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def main_thread_state() -> str:
    """Return the state of the main thread, which does the work, according to Linux's proc(5)."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return "S"


class _OneKey:
    """Accepts one public key; the interface that :mod:`zmq.auth` requires."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's key is the accepted one."""
        return hmac.compare_digest(key, self._key)
