"""A router without translation of addresses in the kernel: hands connections to some of its ports on to a host inside.

As a program: ``python port_forwarder.py ADDRESS INNER PORTS...``, where PORTS are 7171 or 7200-7299. It says ``ready``
once it listens.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading


def main() -> None:
    """Forward until the end of this process."""
    address, inner, *ports = sys.argv[1:]
    selector = selectors.DefaultSelector()
    for each in ports:
        first, _, last = each.partition("-")
        for port in range(int(first), int(last or first) + 1):
            selector.register(socket.create_server((address, port)), selectors.EVENT_READ, port)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            listener = key.fileobj
            assert isinstance(listener, socket.socket)
            accepted, _ = listener.accept()
            threading.Thread(target=forward, args=(accepted, inner, key.data), daemon=True).start()


def forward(outside: socket.socket, inner: str, port: int) -> None:
    """Forward one connection."""
    with outside, contextlib.suppress(OSError), socket.create_connection((inner, port)) as inside:
        back = threading.Thread(target=carry, args=(inside, outside), daemon=True)
        back.start()
        carry(outside, inside)
        back.join()


def carry(source: socket.socket, target: socket.socket) -> None:
    """Carry bytes until their end."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
