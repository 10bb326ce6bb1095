"""The worker process: reads its configuration, opens its channel, and executes what comes until it is told to end."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import math
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import zmq
from msgspec import Struct

from onebox.errors import WireError
from onebox.wire import Connection, KeyPair, codecs, configure, decode_envelope, detect_dead_peers, encode, listen, send
from onebox.wire.protocol.groups import Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.requests import PROTOCOL, Envelope, Shutdown
from onebox.wire.protocol.responses import Hello, Reply, Result, WorkerFailure, WorkerMessage
from onebox.worker.comm.api import RankLost
from onebox.worker.device import ComputeDevice
from onebox.worker.emulated import EmulatedDevice
from onebox.worker.execution.executor import Executor
from onebox.worker.faults import Fault, FaultInjector
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.process.heartbeat import HeartbeatThread
from onebox.worker.sandbox.confine import confine, failures
from onebox.worker.system.cpu_affinity import use_cores

SEND_TIMEOUT_S = 300.0
"""How long a client may leave unread what a worker says; one that is gone for good ends the worker in other ways."""

_DEAF = f"the client has taken nothing for {SEND_TIMEOUT_S:.0f} s; this worker ends"

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the parent of a worker writes to its standard input, as one line of JSON.

    Args:
        device: ``cpu``, ``cuda:k`` or ``sim``.
        threads: Threads that operators may use.
        public: The worker's public key.
        secret: Its secret key.
        client: The public key of the one client.
        address: Where to bind: an IP address, for TCP; or a folder of this machine, for sockets in it.
        quota_bytes: The most bytes that buffers may take; 0 for no limit.
        faults: For tests.
        speed: Fraction of its full speed that a CPU works at; of ``sim``, what costs are divided by.
        first_port: The first of the TCP ports that it may bind, with ``last_port``; 0 for any.
        last_port: The last.
        owner: The process that wanted it and with which it ends; 0 for whichever its parent is.
        cores: The cores that its operators run on; none for any.
    """

    device: str
    threads: int
    public: str
    secret: str
    client: str
    address: str = "127.0.0.1"
    quota_bytes: int = 0
    faults: tuple[Fault, ...] = ()
    speed: float = 1.0
    first_port: int = 0
    last_port: int = 0
    owner: int = 0
    cores: tuple[int, ...] = ()

    @property
    def ports(self) -> range:
        """The TCP ports that it may bind; none for any."""
        return range(self.first_port, self.last_port + 1) if self.first_port else range(0)

    def __repr__(self) -> str:  # never with the secret
        return f"WorkerConfig(device={self.device!r}, threads={self.threads}, address={self.address!r})"


class Ports(Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker answers on its standard output, as one line of JSON: the endpoints that it bound."""

    commands: str
    beats: str


class WorkerServer:
    """The working thread of a worker: its channel and its machine."""

    def __init__(self, config: WorkerConfig, owner_descriptors: Sequence[int]) -> None:
        self._cores = len(os.sched_getaffinity(0))  # before any thread keeps to some of them
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        sim = config.device == "sim"
        self._device = (
            EmulatedDevice(config.speed) if sim else ComputeDevice(config.device, config.threads, config.speed)
        )
        keys = KeyPair(config.public, config.secret)
        self.machine = Executor(
            self._device,
            self,
            self._report,
            quota_bytes=self._device.quota_bytes(config.quota_bytes),
            faults=FaultInjector(config.faults),
        )
        self._watcher = HeartbeatThread(
            self._context,
            keys=keys,
            client_key=config.client,
            address=config.address,
            ports=config.ports,
            owner_descriptors=owner_descriptors,
            progress=self.machine.progress,
            interrupt=self.machine.interrupt,
        )
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, keys, server_key=None)
        detect_dead_peers(self._socket)
        self._socket.sndtimeo = int(SEND_TIMEOUT_S * 1000)
        self.ports = Ports(listen(self._socket, config.address, config.ports), self._watcher.endpoint)
        self._link = Connection(self._socket, self._transmit, self.ports.commands, own=True)
        self._deferred: deque[tuple[Envelope, Sequence[Any]]] = deque()
        self._answers: dict[int, tuple[Rendezvous | Reduced | TicketCancelled, Sequence[Any]]] = {}
        self._tickets = 0
        self._number = 0
        self._failed = False

    # ---- what groups need (ClientChannel)

    def say(self, saying: WorkerMessage, frames: Sequence[Any] = ()) -> None:
        """Send something to the client; end this worker where the client has taken nothing for
        :data:`SEND_TIMEOUT_S`."""
        self._link.send([encode(saying), *frames])
        if self._link.full:
            end_s = time.monotonic() + SEND_TIMEOUT_S
            with self.machine.progress.wait():
                while self._link.full and self._hear(end_s):
                    pass
            if self._link.full:
                raise SystemExit(_DEAF)

    def _transmit(self, frames: list[Any]) -> None:
        try:
            send(self._socket, frames, zmq.NOBLOCK, copy=not self._link.keeps)
            return
        except zmq.Again:  # no room, or nobody there: not yet, or not since a connection broke
            pass
        with self.machine.progress.wait():
            try:
                send(self._socket, frames, copy=not self._link.keeps)
            except zmq.Again:
                raise SystemExit(_DEAF) from None

    def new_ticket(self) -> int:
        """Return a number that no other ticket of this worker has."""
        self._tickets += 1
        return self._tickets

    def await_ticket(self, ticket: int, timeout_s: float) -> tuple[Rendezvous | Reduced, Sequence[Any]]:
        """Wait for the client's answer to a ticket; other messages wait meanwhile.

        Raises:
            PeerLost: It will not come, or did not come in time.
        """
        end_s = time.monotonic() + timeout_s
        with self.machine.progress.wait():
            while ticket not in self._answers:
                if not self._hear(end_s):
                    raise RankLost(f"the others of the group did not come within {timeout_s:.0f} s")
        answer, frames = self._answers.pop(ticket)
        if isinstance(answer, TicketCancelled):
            raise RankLost("another worker has left the group")
        return answer, frames

    # ---- the loop

    def serve(self) -> None:
        """Execute messages until told to end."""
        memory = self._device.memory_bytes()
        quota = self.machine.store.quota_bytes
        torch_version = str(torch.__version__)
        self._watcher.start()
        self.say(
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
            )
        )
        with torch.inference_mode():
            while self._handle(*self._next()):
                pass
        self.machine.close()
        self._watcher.stop()
        self._socket.close(0)
        self._context.term()

    def _next(self) -> tuple[Envelope, Sequence[Any]]:
        while not self._deferred:
            with self.machine.progress.wait():
                self._hear()
        return self._deferred.popleft()

    def _hear(self, end_s: float = math.inf) -> bool:
        """Take what comes next, if only news of what has arrived; tell whether anything came until a time.

        What is due to be sent meanwhile, such as an acknowledgement, is sent.
        """
        link = self._link
        while True:
            now_s = time.monotonic()
            link.flush(now_s)
            until_s = min(end_s, link.due_s)
            patience_ms = -1 if until_s == math.inf else max(0, math.ceil((until_s - now_s) * 1000))
            self._socket.setsockopt(zmq.RCVTIMEO, patience_ms)  # cheaper than to poll and then to receive
            try:
                for parts in link.receive():
                    self._sort(*decode_envelope(parts))
            except zmq.Again:
                if time.monotonic() < end_s:
                    continue
                return False
            except WireError as error:
                self._complain(error)
            return True

    def _complain(self, error: WireError) -> None:
        """Tell of a message that could not be read, whose number is not known."""
        if self._link.full:
            raise SystemExit(f"the client sends what it should not, and takes no answers: {error}")
        self._link.send([encode(Reply(0, (), WorkerFailure("protocol", "receive", str(error))))])

    def _sort(self, envelope: Envelope, frames: Sequence[Any]) -> None:
        """Keep the answers to tickets, queue everything else."""
        first = envelope.instructions[0] if envelope.instructions else None
        if isinstance(first, Rendezvous | Reduced | TicketCancelled):
            self._answers[first.ticket] = (first, frames)
        else:
            self._deferred.append((envelope, frames))

    def _handle(self, envelope: Envelope, frames: Sequence[Any]) -> bool:
        """Execute one message and answer it; return whether to go on."""
        machine = self.machine
        self._number, self._failed = envelope.number, False
        results: list[Result] = []
        machine.times_ns, machine.used_bytes, machine.frames_out = [], [], []
        left = iter(frames)
        for instruction in envelope.instructions:
            if isinstance(instruction, Shutdown):
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
            traced = tuple(machine.times_ns), tuple(machine.used_bytes)
            reply = Reply(envelope.number, tuple(results), None, *traced)
            self.say(reply, machine.frames_out)
        return True

    def _report(self, failure: WorkerFailure) -> None:
        """Tell the client of a failure, once a message."""
        if not self._failed:
            self._failed = True
            self.say(Reply(self._number, (), failure))


def main(owner: int = 0, watched: Sequence[int] = ()) -> None:
    """Run a worker; its configuration comes on standard input, which then stays open as long as its owner lives.

    Args:
        owner: The process that wanted it; its parent where that is 0.
        watched: Descriptors of processes with which it ends; its parent's where there are none.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner ends it
    faulthandler.enable()  # a crash in a library says where
    name_process("onebox-worker")
    wake_with_owner()
    owner = owner or os.getppid()
    owner_descriptors = (
        sys.stdin.fileno(),
        *(watched or (os.pidfd_open(owner),)),
    )  # a fork of the owner holds the first open
    config = msgspec.json.decode(_first_line(owner_descriptors[0]), type=WorkerConfig)
    if config.owner not in (0, owner):
        raise SystemExit(f"process {config.owner}, which started this worker, has ended")
    # Before there are other threads, which it would not hold.
    memory_bytes = 0 if config.device == "sim" else config.quota_bytes
    done = confine(config.device, config.address, memory_bytes=memory_bytes, threads=config.threads)
    for failure in failures(done):
        print(f"onebox worker: not confined as it could be: {failure}", file=sys.stderr)
    server = WorkerServer(config, owner_descriptors)
    if config.cores:
        use_cores(config.cores)
    gc.freeze()  # what is there stays: a collection that looks at all of torch takes 100 ms out of some step
    gc.enable()
    os.write(sys.stdout.fileno(), msgspec.json.encode(server.ports) + b"\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads on: what a library prints must not fill the pipe
    status = 1
    try:
        server.serve()
        status = 0
    except SystemExit as error:
        print(f"onebox worker: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # libraries' own threads must not hold up the end


def wake_with_owner() -> None:
    """Ask the kernel to continue this process, should it be stopped, when its owner ends: its watcher then ends it.

    The signal is SIGCONT and not SIGKILL because it comes, too, when only the thread has ended that started this
    process; to one that runs it does nothing.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT), 0, 0, 0)


def name_process(name: str) -> None:
    """Say what this process is to who looks at a list of processes.

    Args:
        name: At most 15 bytes are kept.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def _first_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 1)
        if not part:
            raise SystemExit("onebox worker: no configuration on standard input; start workers with onebox.open()")
        line += part
    return line
