"""Cables of a network that take their time: carries frames between the two ends of each of them, as late as asked for.

As a program: ``python delay_line.py SECONDS HOST=DEVICE=SWITCH=PORT ...``, one word for each cable. It makes a network
card (TAP) named DEVICE in the namespace HOST and one named PORT in the namespace SWITCH, carries what leaves either one
to the other, and says ``ready``. The cards are gone with this process. A frame may be a segment of 64 KiB that a real
card would cut up (TSO), as between veths. For kernels that have no ``netem``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_NEW_NET = 0x40000000  # CLONE_NEWNET of sched.h; os.setns came with Python 3.12
_SET_CARD, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF and TUNSETOFFLOAD of linux/if_tun.h
_TAP, _NO_INFO, _WITH_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6 = 1, 2, 4
_FRAME_BYTES = 10 + 14 + 65536
"""The most of a frame: the header that says how it is to be cut, that of Ethernet, and the packet."""

_AT_ONCE = 64
"""Frames that are taken from a card before others have their turn."""


class Way:
    """One direction of a cable.

    Args:
        source: Descriptor of the card that it leads from.
        target: Of the other one.
        delay_s: Seconds from one to the other.
    """

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self._source, self._target, self._delay_s = source, target, delay_s
        self._frames: deque[tuple[float, bytes]] = deque()

    def take(self, now_s: float) -> None:
        """Take what has come by now."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                self._frames.append((now_s + self._delay_s, os.read(self._source, _FRAME_BYTES)))

    def give(self, now_s: float) -> None:
        """Hand on what is due; it is lost where the other card is not up."""
        while self._frames and self._frames[0][0] <= now_s:
            with contextlib.suppress(OSError):
                os.write(self._target, self._frames.popleft()[1])

    @property
    def due_s(self) -> float:
        """The time of the next frame; infinite where there is none."""
        return self._frames[0][0] if self._frames else float("inf")


def card(space: str, name: str) -> int:
    """Make a network card in a namespace, which this thread is in from now on; return its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as there:
        if libc.setns(there.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), "setns")
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(made, _SET_CARD, struct.pack("16sH22x", name.encode(), _TAP | _NO_INFO | _WITH_HEADER))
    fcntl.ioctl(made, _SET_OFFLOAD, _CHECKSUM | _TSO4 | _TSO6)
    return made


def main() -> None:
    """Carry frames until the end of this process."""
    delay_s = float(sys.argv[1])
    ways: dict[int, Way] = {}
    for cable in sys.argv[2:]:
        host, device, switch, port = cable.split("=")
        outer, inner = card(switch, port), card(host, device)
        ways |= {inner: Way(inner, outer, delay_s), outer: Way(outer, inner, delay_s)}
    with open(f"/run/netns/{switch}") as there:  # the namespace in which whoever ends this process looks for it
        ctypes.CDLL(None).setns(there.fileno(), _NEW_NET)
    with contextlib.suppress(OSError):
        os.nice(-10)  # a cable does not wait for a processor
    poll = select.poll()
    for each in ways:
        poll.register(each, select.POLLIN)
    print("ready", flush=True)
    while True:
        left_s = min(way.due_s for way in ways.values()) - time.monotonic()
        for each, _ in poll.poll(None if left_s == float("inf") else max(0.0, 1e3 * left_s)):
            ways[each].take(time.monotonic())
        now_s = time.monotonic()
        for way in ways.values():
            way.give(now_s)


if __name__ == "__main__":
    main()
