"""The connections between this worker and one other: a thread that sends and one that receives, each with its own."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.collectives import MessageInfo
from onebox.worker.comm.tcp.connection import TcpConnection
from onebox.worker.comm.tcp.messages import (
    HEAD_BYTES,
    Inbox,
    MessageHeader,
    PeerFault,
    ReceivedMessage,
    Window,
    decode,
    rest_bytes,
)
from onebox.worker.comm.tcp.stream import ConnectionReader, ConnectionWriter
from onebox.worker.system.cpu_affinity import use_all_cores

AT_ONCE_BYTES = 1 << 14
"""Most bytes of a message that the working thread sends itself, where the kernel takes it without a wait."""

_STACK = 1 << 19
"""Of a thread: a worker's memory is limited, and a large group has many of them."""

_LOOK_S = 0.1

_starting = threading.Lock()
"""Held while the size of the stack of the next thread is set, which is one for the whole process."""

_NOTHING = memoryview(b"")


class PeerLink:
    """The link to one other rank of a group.

    Args:
        peer: Its rank.
        connect: Makes the connections to it, or raises an error; called in a thread of the link.
        timeout_s: Longest wait for a message.
    """

    def __init__(self, peer: int, connect: Callable[[], ConnectionWriter], timeout_s: float) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self.inbox = Inbox()
        self._connect = connect
        self._writer: ConnectionWriter | None = None
        self._incoming: Sequence[TcpConnection] = ()
        self._sender: threading.Thread | None = None
        self._receiver: threading.Thread | None = None
        self._changed = threading.Condition()  # its lock guards what follows
        self._waiting: dict[int, deque[tuple[MessageHeader, memoryview, Tensor | None]]] = defaultdict(deque)
        self._turn: deque[int] = deque()  # channels with messages, each once
        self._leaves: dict[int, int] = {}  # bytes that the peer may send, by channel
        self._window = Window()
        self._writing = False
        self._left = False
        self._failure = ""  # why nothing more can be sent
        self.unreachable = ""
        """Why the peer could not be connected to."""

    @property
    def connected(self) -> tuple[bool, bool]:
        """State of the connections: to the peer, and from it."""
        return self._writer is not None, bool(self._incoming)

    @property
    def connecting(self) -> bool:
        """True as long as connections to the peer are being made."""
        return self._sender is not None and self._writer is None and not self._failure

    @property
    def moved_bytes(self) -> int:
        """Bytes that the peer has taken; grows as long as something moves."""
        return 0 if self._writer is None else self._writer.meter.acknowledged_bytes

    def begin(self) -> None:
        """Begin to connect, if that has not begun."""
        with self._changed:
            if not self._failure:
                self._wake()

    def came(self, connections: Sequence[TcpConnection]) -> None:
        """Take the connections from the peer."""
        with self._changed:
            if self._failure or self._incoming:
                for each in connections:
                    each.close()
                return
            self._incoming = tuple(connections)
            self._receiver = _start(self._receive, f"onebox-from-{self.peer}")

    def post(
        self, header: MessageHeader, body: memoryview, tensor: Tensor | None = None, *, changing: bool = False
    ) -> None:
        """Send a message without waiting.

        Args:
            header: Its header.
            body: Its bytes.
            tensor: Holds them.
            changing: Whether they may change as soon as this returns: they are copied unless they are sent at once.

        Raises:
            RankLost: Nothing more can be sent.
        """
        with self._changed:
            if self._failure or self._left:
                raise RankLost(self._failure or "the group has been left")
            size_bytes = len(body)
            if (
                size_bytes > AT_ONCE_BYTES
                or self._writer is None
                or self._writing
                or self._turn
                or not self._window.open(header.channel, size_bytes)
                or not self._writer.meter.takes()
            ):
                self._queue(header, memoryview(bytes(body)) if changing else body, None if changing else tensor)
                return
            self._window.sent(header.channel, size_bytes)
            self._writing = True
            writer = self._writer
        try:
            writer.write(header.encode(), body)
        except OSError as error:
            self._fail_sending(self._ended(error))
        finally:
            self._written()

    def _written(self) -> None:
        with self._changed:
            self._writing = False
            if self._turn or self._leaves or self._left:
                self._changed.notify_all()

    def _queue(self, header: MessageHeader, body: memoryview, tensor: Tensor | None) -> None:
        waiting = self._waiting[header.channel]
        if not waiting:
            self._turn.append(header.channel)
        waiting.append((header, body, tensor))
        self._wake()

    def _wake(self) -> None:
        if self._sender is None:
            self._sender = _start(self._send, f"onebox-to-{self.peer}")
        self._changed.notify_all()

    def expect(self, channel: int, attend: Attend, accelerator: Accelerator) -> TcpReceive:
        """Ask for the next message of a channel that has not been asked for; see :class:`TcpReceive`."""
        order, leave_bytes = self.inbox.expect(channel)
        self._give_leave(channel, leave_bytes)
        return TcpReceive(self, channel, order, attend, accelerator)

    def leave(self) -> None:
        """Send what waits, and nothing more."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    @property
    def sent(self) -> bool:
        """True once everything was sent, or nothing more can be."""
        with self._changed:
            return bool(self._failure) or not (self._turn or self._writing)

    def shut(self, why: str) -> None:
        """End everything at once; callable from any thread."""
        self._fail(why)

    def close(self) -> None:
        """Close the connections, of which nothing is used any more. Idempotent."""
        connecting = self.connecting
        self._fail("the group has been left")
        if self._sender is not None and not connecting:  # else it ends, and closes what it has made, by itself
            self._sender.join()
        if self._receiver is not None:
            self._receiver.join()
        for each in (*self._incoming, *(self._writer.connections if self._writer is not None else ())):
            each.close()
        self._waiting.clear()
        self._turn.clear()

    # ---- the threads

    def _send(self) -> None:
        use_all_cores()
        try:
            writer = self._connect()
        except (RankLost, OSError) as error:
            self.unreachable = str(error)
            self._fail(self.unreachable)
            return
        with self._changed:
            self._writer = writer
            ended = bool(self._failure)
        if ended:
            for each in writer.connections:
                each.close()
            return
        with self.inbox.changed:
            self.inbox.changed.notify_all()  # for who waits for the connections
        try:
            while (item := self._next()) is not None:
                try:
                    writer.write(item[0].encode(), item[1])
                finally:
                    self._written()
                del item  # it is not kept until the next one
        except OSError as error:
            self._fail_sending(self._ended(error))

    def _next(self) -> tuple[MessageHeader, memoryview, Tensor | None] | None:
        """Wait for the next message that may be sent, of the channels in turn; return ``None`` at the end."""
        with self._changed:
            while not self._failure:
                if not self._writing:
                    item = self._choose()
                    if item is not None:
                        self._writing = True
                        return item
                    if self._left and not self._turn:
                        return None
                self._changed.wait()
            return None

    def _choose(self) -> tuple[MessageHeader, memoryview, Tensor | None] | None:
        if self._leaves:
            channel, size_bytes = self._leaves.popitem()
            return MessageHeader(channel, 0, 0, size_bytes, None), _NOTHING, None
        for _ in range(len(self._turn)):
            channel = self._turn.popleft()
            waiting = self._waiting[channel]
            size_bytes = len(waiting[0][1])
            if not self._window.open(channel, size_bytes):
                self._turn.append(channel)
                continue
            item = waiting.popleft()
            if waiting:
                self._turn.append(channel)
            else:
                del self._waiting[channel]
            self._window.sent(channel, size_bytes)
            return item
        return None

    def _receive(self) -> None:
        use_all_cores()
        reader = ConnectionReader(self._incoming)
        inbox = self.inbox
        try:
            while (part := reader.read(HEAD_BYTES)) is not None:
                head = bytes(part)
                rest = reader.read(rest_bytes(head))
                if rest is None:
                    raise ConnectionError("the connection ended in the head of a message")
                header = decode(head, rest)
                if header.spec is None:
                    with self._changed:
                        self._window.leave(header.channel, header.size_bytes)
                        self._changed.notify_all()
                    continue
                target = inbox.place(header)
                if len(target) and not reader.read_into(target):
                    raise ConnectionError("the connection ended in the middle of a message")
                del target
                self._give_leave(header.channel, inbox.filed(header))
            self._fail(f"rank {self.peer} has left the group")
        except (OSError, PeerFault, MemoryError, RuntimeError) as error:  # RuntimeError: PyTorch has no memory
            self._fail(self._ended(error))

    def _give_leave(self, channel: int, size_bytes: int) -> None:
        if size_bytes:
            with self._changed:
                if not self._failure and not self._left:
                    self._leaves[channel] = self._leaves.get(channel, 0) + size_bytes
                    self._wake()

    def _ended(self, error: Exception) -> str:
        return f"rank {self.peer} is not connected any more: {str(error) or type(error).__name__}"

    def _fail_sending(self, why: str) -> None:
        """Note why nothing more goes, and end the waits for that; what has come before the peer's end is still read."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()
            writer = self._writer
        for each in writer.connections if writer is not None else ():
            each.shut()

    def _fail(self, why: str) -> None:
        """Note why nothing more comes or goes, and end all waits."""
        self._fail_sending(why)
        self.inbox.end(why)
        for each in self._incoming:
            each.shut()


class Attend(Protocol):
    """Work of a waiting thread between two looks."""

    def __call__(self, *, missing: bool) -> object:
        """Do it; ``missing`` if the awaited rank has not connected."""


class TcpReceive:
    """A message that was asked for; it is forgotten when this object is dropped.

    Args:
        link: The link by which it comes.
        channel: Its channel.
        order: Its order there.
        attend: Called now and then by the thread that owns the channel to the client, while it waits.
        accelerator: Device of the tensors.
    """

    __slots__ = ("_accelerator", "_attend", "_channel", "_done", "_link", "_message", "_order")

    lasting = True

    def __init__(self, link: PeerLink, channel: int, order: int, attend: Attend, accelerator: Accelerator) -> None:
        self._link = link
        self._channel = channel
        self._order = order
        self._attend = attend
        self._accelerator = accelerator
        self._message: ReceivedMessage | None = None
        self._done = False

    def wait(self, *, aside: bool = False) -> MessageInfo:
        """Wait for it, in any thread.

        Raises:
            RankLost: It does not come.
        """
        link, inbox = self._link, self._link.inbox
        end_s = time.monotonic() + link.timeout_s
        while True:
            with inbox.changed:
                message = inbox.take(self._channel, self._order)
                if message is None:
                    if inbox.failure:
                        raise RankLost(inbox.failure)
                    inbox.changed.wait(_LOOK_S)
                    message = inbox.take(self._channel, self._order)
            if message is not None:
                self._message, self._done = message, True
                return MessageInfo(message.code, message.spec, time.monotonic_ns())
            if not aside:
                self._attend(missing=not link.connected[1])
            if time.monotonic() > end_s:
                raise RankLost(f"rank {link.peer} did not come within {link.timeout_s:.0f} s")

    def part(self) -> Tensor:
        """Return its elements."""
        assert self._message is not None
        return self._message.tensor

    def take(self) -> Tensor:
        """Return a tensor of the device with its elements."""
        return self._accelerator.to_device(self.part())

    def give_back(self) -> None:
        """Let go of it."""
        self._message = None

    def __del__(self) -> None:
        if not self._done:
            self._link.inbox.drop(self._channel, self._order)


def _start(run: Callable[[], Any], name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _starting:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
