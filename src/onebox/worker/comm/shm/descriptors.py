"""Processes of one host hand descriptors to each other, though none may look into another.

Each has a socket with a name that the kernel chose, and sends its descriptor to the others' (``SCM_RIGHTS``, see
``unix(7)``): a process that has confined itself could not open ``/proc/PID/fd``. Anybody on this host can see such a
name and send to it, so whoever receives looks at which file it was that came.
"""

from __future__ import annotations

import array
import os
import select
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

_SLICE_MS = 20
"""How long one look for what has come takes at most; somebody's queue may have room again by then."""

_MANY = 16


class DescriptorExchange:
    """A socket for descriptors; close it when everybody has what they need."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind("")  # the kernel chooses a name, and no file is made
        name = self._socket.getsockname()
        self.name: str = bytes(name[1:]).hex() if isinstance(name, bytes) else name[1:].encode().hex()

    def exchange(
        self, own: int, peers: Mapping[int, str], wanted: Mapping[int, int], waiting: Callable[[int], bool]
    ) -> dict[int, int]:
        """Send a descriptor to all peers and receive one from each.

        Args:
            own: The descriptor; it stays open.
            peers: Names of the peers' sockets.
            wanted: Inode of the file that is to come from each peer.
            waiting: Called with a peer that is waited for, again and again: whether it may still come.

        Returns:
            The descriptors that came, by their peers, which the caller closes. That of a peer which has gone without
            sending it, cannot be reached, or took too long is not among them.
        """
        device = os.fstat(own).st_dev  # a file of that inode elsewhere is another
        unsent = dict(peers)
        missing = {(device, inode): peer for peer, inode in wanted.items()}
        came: dict[int, int] = {}
        try:
            while unsent or missing:
                gone = [peer for peer in {*unsent, *missing.values()} if not _is_there(peers[peer])]
                for peer in list(unsent):
                    if peer not in gone and self._send(peers[peer], own):
                        del unsent[peer]
                for descriptor in self._receive():
                    found = os.fstat(descriptor)
                    sender = missing.pop((found.st_dev, found.st_ino), None)
                    if sender is None:
                        os.close(descriptor)
                    else:
                        came[sender] = descriptor
                for peer in {*unsent, *missing.values()}:
                    if peer in gone or not waiting(peer):  # one that has all it needs goes, but has sent its own before
                        unsent.pop(peer, None)
                        missing = {file: other for file, other in missing.items() if other != peer}
        except BaseException:
            for descriptor in came.values():
                os.close(descriptor)
            raise
        return came

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _send(self, name: str, descriptor: int) -> bool:
        """Send a descriptor; tell whether it has gone."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        with suppress(BlockingIOError, ConnectionRefusedError):
            self._socket.sendmsg([b"\0"], rights, 0, _address(name))
            return True
        return False

    def _receive(self) -> list[int]:
        """Return the descriptors that have come, after a short wait."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(_SLICE_MS)
        came = array.array("i")
        room = socket.CMSG_SPACE(_MANY * came.itemsize)
        with suppress(BlockingIOError):
            for _ in range(_MANY):
                _, parts, _, _ = self._socket.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
                for level, kind, content in parts:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        came.frombytes(content[: len(content) - len(content) % came.itemsize])
        return came.tolist()


def _address(name: str) -> bytes:
    return b"\0" + bytes.fromhex(name)


def _is_there(name: str) -> bool:
    """Tell whether somebody still has the socket of a name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asking:
        try:
            asking.connect(_address(name))
        except ConnectionRefusedError:
            return False
    return True
