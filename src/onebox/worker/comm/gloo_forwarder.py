"""Forwarding of Gloo's connections over encrypted ones.

Gloo has no encryption in PyTorch's builds, and takes anybody's connection. So its sockets are on this host's loopback
only, and both ends of each belong to this process: for each peer, two threads carry what Gloo writes to the peer's
forwarder, and the other way round. Gloo's algorithms, and so the order of its sums, stay as they are.

Of each pair of ranks, Gloo lets the one with the higher address connect to the other. Rank r has the address 127.77.x.y
of number r on all hosts, so that all agree who that is; ports are any that are free. The forwarder of the higher rank
listens in place of the lower one, by an address that it puts into what Gloo reads from the store; the forwarder of the
lower rank connects to its Gloo when the first bytes arrive.

What Gloo writes goes in numbered chunks, each by the connection that has the fewest bytes queued, of those that are
used (``link_meter.py``): one where it fills the link. The other end puts them in order.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from onebox.worker.comm.link_meter import LinkMeter
from onebox.worker.comm.tls_mesh import DuplexLink
from onebox.worker.system.tcp_connections import own_connections, shut_down

_NETWORK = bytes([127, 77])
_FAMILY = struct.pack("=H", socket.AF_INET)
_ENDPOINT = re.compile(re.escape(_FAMILY) + b"(..)" + re.escape(_NETWORK) + b"(..)", re.DOTALL)
"""A ``sockaddr_in`` of :data:`_NETWORK`, as in the addresses that Gloo puts into the store."""

_CHUNK = 1 << 18
_HEAD = struct.Struct("!II")
"""Of a chunk: its number, modulo :data:`_NUMBERS`, and its bytes."""

_NUMBERS = 1 << 32

_LAST_MS = 100
"""Time without anything more after which what Gloo had written has all been read."""

_ACKNOWLEDGED_S = 0.002
"""Interval of looks at whether a peer has acknowledged what was sent."""

_STACK = 1 << 19
"""Of a thread that forwards: a worker's memory is limited, and a large group has many of them."""

_starting = threading.Lock()
"""Held while the size of the stack of the next thread is set, which is one for the whole process."""


def loopback_address(rank: int) -> str:
    """Return the address of a rank's Gloo, the same on all hosts.

    Example:
        >>> loopback_address(0), loopback_address(255)
        ('127.77.0.1', '127.77.1.0')
    """
    return socket.inet_ntoa(_NETWORK + struct.pack("!H", rank + 1))


class GlooForwarder:
    """The forwarder of one group.

    Args:
        rank: This worker's rank.
        links: Encrypted connections with each other rank; closed with this forwarder.
        store: The group's key-value store.
        meters: The meters of what is sent to some of the ranks, whose owner they report to.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, DuplexLink],
        store: dist.Store,
        meters: Mapping[int, LinkMeter] | None = None,
    ) -> None:
        self.address = loopback_address(rank)
        """The address at which Gloo has to listen."""
        self.store = _ForwardingStore(store, self)
        """The store that Gloo has to use."""
        self._gloo_port = 0
        self._ports: dict[int, int] = {}
        self._channels: list[_Channel] = []
        try:
            for peer, link in links.items():
                listener = socket.create_server((loopback_address(peer), 0)) if peer < rank else None
                if listener is not None:
                    self._ports[peer] = listener.getsockname()[1]
                meter = (meters or {}).get(peer) or LinkMeter(link.outgoing, 0, peer)
                self._channels.append(_Channel(peer, link, meter, listener, lambda: (self.address, self._gloo_port)))
            for channel in self._channels:
                channel.start()
        except BaseException:
            self.close()
            for link in links.values():
                link.close()
            raise

    def formed(self) -> None:
        """Shut down connections of other processes to this worker's Gloo, which must have formed its group."""
        own = own_connections()
        addresses = {local for local, _ in own.values()}
        for name, (local, peer) in own.items():
            if local == (self.address, self._gloo_port) and peer not in addresses:
                shut_down(name)

    def drain(self, timeout_s: float) -> bool:
        """Forward what Gloo has written, and nothing more; return whether the kernel has taken it within a time."""
        end_s = time.monotonic() + timeout_s
        for channel in self._channels:
            channel.finish()
        return all(channel.finished(end_s) for channel in self._channels)

    def acknowledged(self, timeout_s: float) -> bool:
        """Return whether all peers have acknowledged what was forwarded, waiting for a time."""
        end_s = time.monotonic() + timeout_s
        while (pending := any(channel.pending for channel in self._channels)) and time.monotonic() < end_s:
            time.sleep(_ACKNOWLEDGED_S)
        return not pending

    def close(self) -> None:
        """Close everything; what has not been forwarded is lost."""
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def announced(self, value: bytes) -> None:
        """Read from a value that Gloo sets where it listens."""
        for port, number in _ENDPOINT.findall(value):
            if socket.inet_ntoa(_NETWORK + number) == self.address:
                (self._gloo_port,) = struct.unpack("!H", port)

    def redirected(self, value: bytes) -> bytes:
        """Return a value that Gloo reads, with this forwarder's ports in place of those of lower ranks."""

        def put(found: re.Match[bytes]) -> bytes:
            (number,) = struct.unpack("!H", found[2])
            port = self._ports.get(number - 1)
            return found[0] if port is None else _FAMILY + struct.pack("!H", port) + _NETWORK + found[2]

        return _ENDPOINT.sub(put, value)


class _ForwardingStore(dist.Store):
    """A key-value store in which addresses of Gloo are those of a forwarder."""

    def __init__(self, store: dist.Store, forwarder: GlooForwarder) -> None:
        super().__init__()
        self._store = store
        self._forwarder = forwarder

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._forwarder.announced(value if isinstance(value, bytes) else value.encode())
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""
        return self._forwarder.redirected(self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, waiting for them."""
        return [self._forwarder.redirected(value) for value in self._store.multi_get(keys)]

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return the result."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return self._store.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._store.wait(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waiting for a key."""
        self._store.set_timeout(timeout)


class _Channel:
    """The forwarding between this worker's Gloo and that of one peer.

    The end of any of the connections ends the others, after what came before it has been forwarded.

    Args:
        peer: Its rank.
        link: The encrypted connections.
        meter: Sends to the peer.
        listener: Where this worker's Gloo connects to; else this channel connects to it.
        gloo: Returns where this worker's Gloo listens.
    """

    def __init__(
        self,
        peer: int,
        link: DuplexLink,
        meter: LinkMeter,
        listener: socket.socket | None,
        gloo: Callable[[], tuple[str, int]],
    ) -> None:
        self._link = link
        self._meter = meter
        self._listener = listener
        self._gloo = gloo
        self._local: socket.socket | None = None
        self._encrypting = threading.Thread(target=self._run, name=f"onebox-to-{peer}", daemon=True)
        self._decrypting: threading.Thread | None = None
        self._name = f"onebox-from-{peer}"
        self._finishing = False

    def start(self) -> None:
        """Begin."""
        _start(self._encrypting)

    def finish(self) -> None:
        """Forward what Gloo has written, and then end: when it has closed its connection, or nothing more comes.

        Ending the connection here would lose what the kernel has not passed on to its other end.
        """
        self._finishing = True

    def finished(self, end_s: float) -> bool:
        """Return whether everything was forwarded, waiting until a time."""
        if self._local is not None:
            self._encrypting.join(max(0.0, end_s - time.monotonic()))
        return self._local is None or not self._encrypting.is_alive()

    @property
    def pending(self) -> bool:
        """True if the peer has not acknowledged what was forwarded."""
        return self._meter.pending

    def close(self) -> None:
        """End."""
        if self._encrypting.ident is not None:
            self._shut()
            self._encrypting.join()
        if self._decrypting is not None:
            self._decrypting.join()
        if self._local is not None:
            self._local.close()
        if self._listener is not None:
            self._listener.close()
        self._link.close()

    def _run(self) -> None:
        try:
            local = self._accept(self._listener) if self._listener is not None else self._connect()
            local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local = local
            decrypting = threading.Thread(target=self._decrypt, args=(local,), name=self._name, daemon=True)
            _start(decrypting)
            self._decrypting = decrypting
            self._encrypt(local)
        except (OSError, RuntimeError):  # of a connection that has ended, or was shut down; no further thread
            pass
        finally:
            self._shut()

    def _encrypt(self, local: socket.socket) -> None:
        """Send what Gloo writes, until the end.

        Raises:
            OSError: A connection has ended.
        """
        buffer, number = memoryview(bytearray(_HEAD.size + _CHUNK)), 0
        written = select.poll()
        written.register(local, select.POLLIN)
        while True:
            try:
                size_bytes = local.recv_into(buffer[_HEAD.size :], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not written.poll(_LAST_MS) and self._finishing:
                    return
                continue
            if not size_bytes:
                return
            _HEAD.pack_into(buffer, 0, number, size_bytes)
            self._meter.send(buffer[: _HEAD.size + size_bytes])
            number = (number + 1) % _NUMBERS

    def _accept(self, listener: socket.socket) -> socket.socket:
        """Return the connection of this process's Gloo; others are closed."""
        with listener:
            while True:
                local, peer = listener.accept()
                if any(peer == own for own, _ in own_connections().values()):
                    return local
                local.close()

    def _connect(self) -> socket.socket:
        _wait(self._link.incoming)
        return socket.create_connection(self._gloo())

    def _decrypt(self, local: socket.socket) -> None:
        chunks, buffer = _ChunkReader(self._link.incoming), memoryview(bytearray(_CHUNK))
        try:
            while count := chunks.read_into(buffer):
                local.sendall(buffer[:count])
        except OSError:
            pass
        finally:
            _shut(local)

    def _shut(self) -> None:
        for each in (self._listener, self._local, *self._link.outgoing, *self._link.incoming):
            if each is not None:
                _shut(each)


class _ChunkReader:
    """Reads chunks that come by several connections, in their order.

    Args:
        connections: The connections; they do not block any more.
    """

    def __init__(self, connections: Iterable[ssl.SSLSocket]) -> None:
        self._waiting = list(connections)
        """Those whose next chunk has not begun to arrive."""
        self._begun: dict[int, tuple[ssl.SSLSocket, int]] = {}
        """The connections of the others and the bytes that are left, by the number of their chunk."""
        self._number = 0
        for each in self._waiting:
            each.setblocking(False)

    def read_into(self, buffer: memoryview) -> int:
        """Read what has arrived, and wait for it; return the number of bytes, 0 at the end.

        Raises:
            OSError: A connection has ended, or does not have chunks.
        """
        while self._number not in self._begun:
            if not self._waiting:
                return 0
            self._read_heads()
        connection, left = self._begun.pop(self._number)
        count = _read_available(connection, buffer[:left])
        if count < left:
            self._begun[self._number] = connection, left - count
        else:
            self._number = (self._number + 1) % _NUMBERS
            self._waiting.append(connection)
        return count

    def _read_heads(self) -> None:
        """Read the heads of further chunks, or wait for one; connections that have ended are left out."""
        head, before = bytearray(_HEAD.size), len(self._waiting)
        for connection in self._waiting.copy():
            with suppress(ssl.SSLWantReadError):
                count = connection.recv_into(head)
                self._waiting.remove(connection)
                if count:
                    number, size_bytes = _HEAD.unpack(head)
                    if count < len(head) or not 0 < size_bytes <= _CHUNK or number in self._begun:
                        raise ConnectionError("no head of a chunk")
                    self._begun[number] = connection, size_bytes
        if len(self._waiting) == before:
            _wait(self._waiting)


def _start(thread: threading.Thread) -> None:
    with _starting:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


def _read_available(connection: ssl.SSLSocket, buffer: memoryview) -> int:
    """Read what has arrived, as OpenSSL returns one record at a time, and wait for it; return 0 at the end."""
    count = 0
    while count < len(buffer):
        try:
            received = connection.recv_into(buffer[count:])
        except ssl.SSLWantReadError:
            if count:
                break
            _wait([connection])
            continue
        if not received:
            break
        count += received
    return count


def _wait(connections: Iterable[ssl.SSLSocket]) -> None:
    """Wait until something has arrived by one of some connections."""
    arrived = select.poll()
    for each in connections:
        arrived.register(each, select.POLLIN)
    arrived.poll()


def _shut(connection: socket.socket) -> None:
    """End waits of a socket; unlike ``SSLSocket.shutdown``, without a change of what another thread uses."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
