"""The worker process: reads its configuration, opens its channel, and executes messages until its end."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import math
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from ipaddress import ip_address
from secrets import SystemRandom
from typing import Any

import msgspec
import psutil
import torch
import zmq

from onebox.errors import WireError
from onebox.forking import signal_at_end_of_parent
from onebox.wire import (
    Connection,
    KeyPair,
    ReceiveWatch,
    codecs,
    configure,
    decode_envelope,
    detect_dead_peers,
    encode,
    held_bytes,
    listen,
    send,
)
from onebox.wire.protocol.groups import Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.requests import PROTOCOL, Envelope, Shutdown
from onebox.wire.protocol.responses import Hello, Reply, WorkerFailure, WorkerMessage
from onebox.worker.accelerator import KERNELS_AT_ONCE, DeviceFailed, needs_driver
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.tcp.mesh import GroupNetwork
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.errors import describe_failure, require_device
from onebox.worker.execution.executor import Executor
from onebox.worker.execution.numerics import CUBLAS_BUFFERS
from onebox.worker.execution.pending_reply import LOOK_S, Outcome, PendingReply
from onebox.worker.execution.throttled import ThrottledExecutor
from onebox.worker.faults import FaultInjector
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.memory.host import HOST_SHARE
from onebox.worker.process.config import Ports, WorkerConfig, read_config
from onebox.worker.process.device_waiter import DeviceWaiter
from onebox.worker.process.heartbeat import HeartbeatThread
from onebox.worker.sandbox.confine import confine, confine_sockets, failures
from onebox.worker.system.cpu_affinity import use_cores

SETTLE_S = 0.05
"""Interval at which a worker that has nothing to do frees memory that readers of groups it has left may still use."""

SEND_TIMEOUT_S = 300.0
"""Longest time that a client may leave messages unread; the end of a client is detected in other ways."""

WAITING_BYTES = 1 << 30
MESSAGE_BYTES = 1 << 10
"""Limit of messages that wait, beside what a quota allows the worker to hold; and what each counts beside frames."""

TICKETS = 1 << 16
"""Most tickets of which a reply may come."""

_DEAF = f"the client has taken nothing for {SEND_TIMEOUT_S:.0f} s; this worker ends"

DYNAMIC_PORTS = range(49152, 65536)
"""Ports that nobody is assigned (RFC 6335), from which ZeroMQ takes those of the channel, too."""

_GROUP_PORTS = 16
"""Number of them that a worker tries for a group that forms."""

_MOST_MS = (1 << 31) - 1
"""Longest timeout of a ZeroMQ socket."""

PROGRAMS = {"sim": "onebox.emulator.server"}
"""Programs of devices that do not compute: modules with a ``server_class``. They are made of this package's parts, and
therefore named here rather than imported."""

_PR_SET_NAME = 15


def _group_network(config: WorkerConfig) -> GroupNetwork:
    """Return the addresses by which a group that forms finds this worker: at ports of the range from which those of the
    channel are taken, and at the bound address if the advertised one is a router's."""
    own = config.address.startswith("/") or ip_address(config.address).is_unspecified
    ports = config.ports[::-1] or SystemRandom().sample(DYNAMIC_PORTS, _GROUP_PORTS)  # the channel takes the first
    return GroupNetwork(bound="" if own else config.address, ports=ports)


class WorkerServer:
    """The working thread of a worker: its channel and its executor."""

    def __init__(self, config: WorkerConfig, owner_descriptors: Sequence[int]) -> None:
        self._cores = len(os.sched_getaffinity(0))  # before any thread is restricted to some of them
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._device = self._device_of(config)
        keys = KeyPair(config.public, config.secret)
        self.machine = self._executor_of(config)(
            self._device,
            self,
            self._report,
            quota_bytes=self._device.quota_bytes(config.quota_bytes, config.sharing),
            faults=FaultInjector(config.faults),
            between=self._send_complete,
            address=config.group_address,
            network=_group_network(config),
            sharing_key=bytes.fromhex(config.sharing_key),
        )
        self._watcher = HeartbeatThread(
            self._context,
            keys=keys,
            client_key=config.client,
            address=config.address,
            ports=config.ports,
            owner_descriptors=owner_descriptors,
            progress=self.machine.progress,
            meter=self.machine.store,
            interrupt=self.machine.interrupt,
        )
        self._socket = self._context.socket(zmq.DEALER)
        self._most_bytes = waiting_bytes(self.machine.store.quota_bytes)
        watch = ReceiveWatch(self._socket, self._most_bytes)
        self._watcher.check_receipt(watch)
        configure(self._socket, keys, server_key=None)
        detect_dead_peers(self._socket)
        self._socket.sndtimeo = int(SEND_TIMEOUT_S * 1000)
        self.ports = Ports(listen(self._socket, config.address, config.ports), self._watcher.endpoint)
        self._link = Connection(self._socket, self._transmit, self.ports.commands, own=True, watch=watch)
        self._deferred: deque[tuple[Envelope, Sequence[Any], int]] = deque()
        self._waiting_bytes = 0  # of deferred messages and of answers
        self._awaited: dict[int, None] = {}  # tickets without a reply, in order
        self._answers: dict[int, tuple[Rendezvous | Reduced | TicketCancelled, Sequence[Any], int]] = {}
        self._replies: deque[PendingReply] = deque()
        self._waiter = DeviceWaiter(self._device.accelerator)
        self._tickets = 0
        self._number = 0
        self._failed = False

    def _device_of(self, config: WorkerConfig) -> ComputeDevice:
        return ComputeDevice(config.device, config.threads, config.speed)

    def _executor_of(self, config: WorkerConfig) -> type[Executor]:
        return ThrottledExecutor if config.speed < 1 else Executor

    # ---- the interface of groups (ClientChannel)

    def send_to_client(self, message: WorkerMessage, frames: Sequence[Any] = ()) -> None:
        """Send a message to the client; end this worker if the client has received nothing for
        :data:`SEND_TIMEOUT_S`.

        Raises:
            WireError: The message cannot be encoded.
        """
        self._link.send([encode(message), *frames])
        if self._link.full:
            end_s = time.monotonic() + SEND_TIMEOUT_S
            with self.machine.progress.wait():
                while self._link.full and self._receive(end_s):
                    pass
            if self._link.full:
                raise SystemExit(_DEAF)

    def _transmit(self, frames: list[Any]) -> None:
        try:
            send(self._socket, frames, zmq.NOBLOCK, copy=not self._link.keeps)
            return
        except zmq.Again:  # no space, or no connection: not yet, or broken
            pass
        with self.machine.progress.wait():
            try:
                send(self._socket, frames, copy=not self._link.keeps)
            except zmq.Again:
                raise SystemExit(_DEAF) from None

    def new_ticket(self) -> int:
        """Return a ticket number that is unique on this worker."""
        self._tickets += 1
        self._awaited[self._tickets] = None
        if len(self._awaited) > TICKETS:  # such as those of messages that have no reply
            del self._awaited[next(iter(self._awaited))]
        return self._tickets

    def await_ticket(self, ticket: int, timeout_s: float) -> tuple[Rendezvous | Reduced, Sequence[Any]]:
        """Wait for the client's reply to a ticket; other messages are queued meanwhile.

        Raises:
            RankLost: It will not arrive, or did not arrive in time.
        """
        end_s = time.monotonic() + timeout_s
        with self.machine.progress.wait():
            while ticket not in self._answers:
                if not self._receive(end_s):
                    raise RankLost(f"the others of the group did not come within {timeout_s:.0f} s")
        answer, frames, size_bytes = self._answers.pop(ticket)
        self._waiting_bytes -= size_bytes
        if isinstance(answer, TicketCancelled):
            raise RankLost("another worker has left the group")
        return answer, frames

    # ---- the loop

    def serve(self) -> None:
        """Execute messages until its end."""
        memory = self._device.memory_bytes()
        quota = self.machine.store.quota_bytes
        torch_version = str(torch.__version__)
        self._watcher.start()
        self.send_to_client(
            Hello(
                PROTOCOL,
                torch_version,
                self._device.name,
                self._device.product_name(),
                self._device.threads,
                min(memory, quota) if quota else memory,
                self._device.speed,
                self._device.emulated,
                *self._device.make(),
                self._device.instructions(),
                self._cores,
                codecs(),
                self.machine.host.limit_bytes,
                self.machine.host.free_bytes,
                self._device.gpu(),
            )
        )
        with torch.inference_mode():
            while self._handle(*self._next()):
                pass
        self.close()

    def close(self) -> None:
        """Leave all groups, end the other threads and close the sockets. Idempotent."""
        if not self._context.closed:
            self.machine.close()
            self._waiter.close()
            self._watcher.stop()
            self._socket.close(0)
            self._context.term()

    def _next(self) -> tuple[Envelope, Sequence[Any]]:
        progress = self.machine.progress
        while not self._deferred:
            end_s = math.inf if self.machine.settle() else time.monotonic() + SETTLE_S
            with progress.wait():
                self._receive(end_s)
        envelope, frames, size_bytes = self._deferred.popleft()
        self._waiting_bytes -= size_bytes
        return envelope, frames

    def _receive(self, end_s: float = math.inf) -> bool:
        """Process the next message or acknowledgement; return whether one arrived before a time.

        Due messages, such as acknowledgements, are sent meanwhile.
        """
        link = self._link
        while True:
            now_s = time.monotonic()
            link.flush(now_s)
            self._send_complete()
            until_s = min(end_s, link.due_s)
            if self._replies:
                until_s = self._await_reply(now_s, until_s)
            wait_ms = max(0.0, until_s - now_s) * 1000
            patience_ms = -1 if wait_ms == math.inf else min(_MOST_MS, math.ceil(wait_ms))
            self._socket.setsockopt(zmq.RCVTIMEO, patience_ms)  # cheaper than a poll followed by a receive
            try:
                for parts in link.receive():
                    self._dispatch(*decode_envelope(parts), MESSAGE_BYTES + held_bytes(parts))
            except zmq.Again:
                if time.monotonic() < end_s:
                    continue
                return False
            except WireError as error:
                self._report_unreadable(error)
            return True

    def _await_reply(self, now_s: float, until_s: float) -> float:
        """Wait for the device to come to the first reply, for a message, or for the time when groups are looked at;
        return until when to wait for a message then."""
        self._await_device(min(until_s - now_s, LOOK_S), self._socket)
        return now_s

    def _await_device(self, within_s: float, *sockets: zmq.Socket[bytes]) -> None:
        after = self._replies[0].after
        assert after is not None
        self._waiter.wait(after, within_s, *sockets)

    def _report_unreadable(self, error: WireError) -> None:
        """Report a message that could not be decoded, whose number is unknown."""
        if self._link.full:
            raise SystemExit(f"the client sends what it should not, and takes no answers: {error}")
        self._link.send([encode(Reply(0, (), WorkerFailure("protocol", "receive", str(error))))])

    def _dispatch(self, envelope: Envelope, frames: Sequence[Any], size_bytes: int) -> None:
        """Store replies to tickets, and queue all other messages.

        Raises:
            SystemExit: More messages wait than this worker may hold.
        """
        first = envelope.instructions[0] if envelope.instructions else None
        if isinstance(first, Rendezvous | Reduced | TicketCancelled):
            if first.ticket in self._awaited:
                del self._awaited[first.ticket]
                self._answers[first.ticket] = (first, frames, size_bytes)
                self._waiting_bytes += size_bytes
        else:
            self._deferred.append((envelope, frames, size_bytes))
            self._waiting_bytes += size_bytes
        if self._waiting_bytes > self._most_bytes:
            raise SystemExit(f"messages of {self._waiting_bytes} bytes wait; allowed are {self._most_bytes}")

    def _handle(self, envelope: Envelope, frames: Sequence[Any]) -> bool:
        """Execute one message and reply to it; return whether to continue."""
        machine = self.machine
        self._number, self._failed = envelope.number, False
        results: list[Outcome] = []
        machine.begin()
        left = iter(frames)
        for instruction in envelope.instructions:
            if isinstance(instruction, Shutdown):
                self._send_all()
                return False
            try:
                results += machine.execute(instruction, left)
            except Poisoned as error:
                self._report(error.failure)
                break
        else:
            if any(True for _ in left):
                self._report(WorkerFailure("protocol", "message", "it has more frames than its instructions need"))
        if envelope.answer and not self._failed:
            self._replies.append(machine.reply(envelope.number, results))
            self._send_complete()
        return True

    def _send_complete(self) -> None:
        """Send the replies that are complete, in their order.

        One whose group has failed meanwhile is a failure: its values may be those of interrupted operations.

        Raises:
            DeviceFailed: The device can do no more work in this process.
        """
        while self._replies:
            reply = self._replies[0]
            try:
                if not reply.complete:
                    return
                message, frames = reply.message()
            except DeviceFailed:
                raise
            except Exception as error:
                require_device(self._device, error, "run")
                message, frames = Reply(reply.number, (), describe_failure(error, "run")), []
            self._replies.popleft()
            try:
                self.send_to_client(message, frames)
            except WireError as error:  # such as results that are too long
                self.send_to_client(Reply(reply.number, (), WorkerFailure("protocol", "reply", str(error))))

    def _send_all(self) -> None:
        """Wait for all replies, and send them.

        Raises:
            SystemExit: The device did not come to them within :data:`SEND_TIMEOUT_S`.
            DeviceFailed: It can do no more work in this process.
        """
        end_s = time.monotonic() + SEND_TIMEOUT_S
        with self.machine.progress.wait():  # the device may hang until its group is interrupted
            self._send_complete()
            while self._replies:
                if time.monotonic() > end_s:
                    raise SystemExit(
                        f"the device has not done its work within {SEND_TIMEOUT_S:.0f} s; this worker ends"
                    )
                self._await_device(LOOK_S)
                self._send_complete()

    def _report(self, failure: WorkerFailure) -> None:
        """Report a failure to the client, once for each message."""
        if not self._failed:
            self._failed = True
            self.send_to_client(Reply(self._number, (), failure))


def waiting_bytes(quota_bytes: int) -> int:
    """Return the limit of the messages that wait in a worker, and of one that is incomplete.

    Args:
        quota_bytes: Most bytes of its buffers; without a limit, half of the host's memory may wait.
    """
    if not quota_bytes:
        return max(WAITING_BYTES, psutil.virtual_memory().total // 2)
    return (1 + HOST_SHARE) * quota_bytes + WAITING_BYTES


def main(owner: int = 0, watched: Sequence[int] = ()) -> None:
    """Run a worker; its configuration comes on standard input, which stays open as long as its owner lives.

    Args:
        owner: Process id of the owner; 0 for the parent.
        watched: Descriptors of processes with which it ends; the owner's if empty.
    """
    ignore_end_signals()
    faulthandler.enable()  # reports crashes in libraries
    name_process("onebox-worker")
    wake_with_owner()
    owner = owner or os.getppid()
    owner_descriptors = (
        sys.stdin.fileno(),
        *(watched or (os.pidfd_open(owner),)),
    )  # a fork of the owner keeps the first open
    os.environ.setdefault(*CUBLAS_BUFFERS)
    config = read_config(_first_line(owner_descriptors))
    server_class = _server_class(config.device)
    load_kernels_at_once(config)
    if config.owner not in (0, owner):
        raise SystemExit(f"process {config.owner}, which started this worker, has ended")
    # Before there are other threads, which it would not affect.
    memory_bytes = 0 if config.device == "sim" else config.quota_bytes
    done = confine(
        config.device,
        config.address,
        memory_bytes=memory_bytes,
        threads=config.threads,
        most_processes=config.most_processes,
    )
    ignore_warnings()
    server = server_class(config, owner_descriptors)
    for failure in failures(done | confine_sockets(config.device)):
        print(f"onebox worker: not confined as it could be: {failure}", file=sys.stderr)
    if config.cores:
        use_cores(config.cores)
    gc.freeze()  # keep present objects: a collection over all of torch takes 100 ms
    gc.enable()
    os.write(sys.stdout.fileno(), msgspec.json.encode(server.ports) + b"\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # no reader from here on: output must not fill the pipe
    status = 1
    try:
        server.serve()
        status = 0
    except (SystemExit, DeviceFailed) as error:  # its owner reports it with the end of this process
        print(f"onebox worker: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # libraries' threads must not delay the end


def _server_class(device: str) -> type[WorkerServer]:
    if device not in PROGRAMS:
        return WorkerServer
    made: type[WorkerServer] = importlib.import_module(PROGRAMS[device]).server_class
    return made


def load_programs() -> None:
    """Import the programs of all devices, once for all forks of this process."""
    for program in PROGRAMS.values():
        importlib.import_module(program)


def ignore_warnings() -> None:
    """Ignore warnings, such as those of operators: a client could repeat them without end, and Python keeps a record of
    each text."""
    warnings.simplefilter("ignore")


def load_kernels_at_once(config: WorkerConfig) -> None:
    """Have the driver of a GPU load its kernels when it starts, unless the environment says otherwise.

    It takes time and memory of the GPU. Workers that share one have no room for that: they load them as needed.
    """
    if needs_driver(config.device) and config.sharing == 1:
        os.environ.setdefault(*KERNELS_AT_ONCE)


def ignore_end_signals() -> None:
    """Ignore the signals that may be sent to all processes of a job: its owner handles them, saves its state with the
    workers' help, and ends them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def wake_with_owner() -> None:
    """Have the kernel resume this process if it is stopped when its owner ends; the watcher then ends it.

    The signal is SIGCONT rather than SIGKILL because it is also sent when only the thread that started this process has
    ended; it does not affect a running process.
    """
    signal_at_end_of_parent(signal.SIGCONT)


def name_process(name: str) -> None:
    """Set the name of this process in process lists.

    Args:
        name: The name; at most 15 bytes are used.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def _first_line(owner_descriptors: Sequence[int]) -> bytes:
    """Read the line of the configuration; end if the owner does first, even if a fork of it holds the pipe open."""
    poll = select.poll()
    for each in owner_descriptors:
        poll.register(each, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        ready = {descriptor for descriptor, _ in poll.poll()}
        part = os.read(owner_descriptors[0], 1) if owner_descriptors[0] in ready else b""
        if not part:
            raise SystemExit("onebox worker: no configuration on standard input; start workers with onebox.open()")
        line += part
    return line
