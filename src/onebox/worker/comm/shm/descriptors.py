"""Exchange of file descriptors between processes of one host that cannot inspect each other.

Each process has a socket with a name chosen by the kernel, and sends its descriptor to the others' sockets
(``SCM_RIGHTS``, see ``unix(7)``): a confined process cannot open ``/proc/PID/fd``. Any process on this host can see
such a name and send to it, so the receiver checks the identity of each received file.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

_SLICE_MS = 20
"""Longest single poll; a peer's queue may have room again afterwards."""

_MANY = 16


class DescriptorExchange:
    """A socket for descriptors, to be closed when all exchanges are done."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind("")  # the kernel chooses a name, and creates no file
        name = self._socket.getsockname()
        self.name: str = bytes(name[1:]).hex() if isinstance(name, bytes) else name[1:].encode().hex()

    def exchange(
        self, own: int, peers: Mapping[int, str], wanted: Mapping[int, int], waiting: Callable[[int], bool]
    ) -> dict[int, int]:
        """Send a descriptor to all peers and receive one from each.

        Args:
            own: The descriptor to send; it stays open.
            peers: Names of the peers' sockets.
            wanted: Inode of the expected file of each peer.
            waiting: Called repeatedly with an awaited peer; returns whether it may still send.

        Returns:
            The received descriptors by peer, which the caller must close; without those of peers that have ended before
                sending, are unreachable, or took too long.
        """
        device = os.fstat(own).st_dev  # the same inode on another device is another file
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
                    if peer in gone or not waiting(peer):  # a peer that is done may leave, but has sent its own before
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
        """Send a descriptor; return whether it was sent."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            self._socket.sendmsg([b"\0"], rights, 0, _address(name))
        except (BlockingIOError, ConnectionRefusedError):
            return False
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            return False  # all processes of this user have that many descriptors on their way: 1,024, as a rule
        return True

    def _receive(self) -> list[int]:
        """Return the received descriptors, after a short wait."""
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
    """Return whether a socket of a name exists."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asking:
        try:
            asking.connect(_address(name))
        except ConnectionRefusedError:
            return False
    return True
