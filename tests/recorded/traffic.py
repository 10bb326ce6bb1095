"""The bytes that this process sends to the workers of this machine, as they go to their sockets.

They are taken where ZeroMQ takes them, so that nothing depends on how the modules between are called. Over sockets of
one machine a message is its frames and nothing else; what this process sends elsewhere, such as to agents of another
test, is left out. Messages that answer a rendezvous are left out: they carry names that are drawn at random. Sums that
the client computes come after all others: they go out whenever the last worker has sent its part, before or after what
the caller sends meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

RANDOM = frozenset({"rendezvous"})
"""Kinds of instructions whose bytes are drawn at random."""

UNORDERED = frozenset({"reduced"})
"""Kinds of instructions that another thread sends, at any time."""


class Traffic:
    """Messages to each worker, in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[Any, list[bytes]] = {}
        self._sent: dict[Any, list[tuple[bytes, ...]]] = {}

    def add(self, socket: Any, part: Any, *, more: bool) -> None:
        """Take down a part of a message that goes to a socket.

        Args:
            socket: The socket.
            part: The part.
            more: Whether further parts follow.
        """
        if socket.type == zmq.DEALER and socket.LAST_ENDPOINT.startswith(b"ipc://"):
            with self._lock:
                begun = self._begun.setdefault(socket, [])
                begun.append(bytes(memoryview(part).cast("B")))
                if not more:
                    self._sent.setdefault(socket, []).append(tuple(self._begun.pop(socket)))

    def messages(self) -> list[list[tuple[bytes, ...]]]:
        """Return the frames of the messages to each worker."""
        with self._lock:
            every = [[frames for frames in sent if RANDOM.isdisjoint(kinds(frames[0]))] for sent in self._sent.values()]
        return [sorted(sent, key=lambda frames: not UNORDERED.isdisjoint(kinds(frames[0]))) for sent in every]

    def record(self) -> list[dict[str, Any]]:
        """Return for each worker how many messages and bytes it was sent, and their hash."""
        found = []
        for worker in self.messages():
            digest = hashlib.sha256()
            for frames in worker:
                for frame in frames:
                    digest.update(len(frame).to_bytes(8, "little") + frame)
            size = sum(len(frame) for frames in worker for frame in frames)
            found.append({"messages": len(worker), "bytes": size, "sha256": digest.hexdigest()})
        return sorted(found, key=lambda one: (one["messages"], one["bytes"], one["sha256"]))

    def instructions(self) -> list[dict[str, Any]]:
        """Return for each worker how many instructions it was sent, and their hash, whatever message each was in.

        What is freed is left out, as on virtual devices it goes with the next message, or with one of its own after a
        while; and so is what each message begins with there, which numbers them.
        """
        apart = ("free", "stream")
        found = []
        for worker in self.messages():
            every = [one for frames in worker for one in msgspec.msgpack.decode(frames[0])[2] if one[0] not in apart]
            every = [one[:5] if one[0] == "replay" else one for one in every]  # the last part of it is what is freed
            digest = hashlib.sha256(msgspec.msgpack.encode(every))
            for frames in worker:
                for frame in frames[1:]:
                    digest.update(len(frame).to_bytes(8, "little") + frame)
            found.append({"instructions": len(every), "sha256": digest.hexdigest()})
        return sorted(found, key=lambda one: (one["instructions"], one["sha256"]))


def kinds(header: bytes) -> list[str]:
    """Return the kinds of the instructions of a message."""
    _, _, instructions = msgspec.msgpack.decode(header)
    return [instruction[0] for instruction in instructions]


@contextlib.contextmanager
def recorded() -> Iterator[Traffic]:
    """Take down what is sent to workers while the context is open."""
    traffic = Traffic()
    plain = zmq.Socket.send

    def send(self: Any, part: Any, flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        traffic.add(self, part, more=bool(flags & zmq.SNDMORE))
        return plain(self, part, flags, *args, **kwargs)

    zmq.Socket.send = send  # type: ignore[assignment, method-assign]
    try:
        yield traffic
    finally:
        zmq.Socket.send = plain  # type: ignore[method-assign]
