"""System call filter (``seccomp(2)``): calls that no worker needs fail, in all threads of the process.

It is an allow-list (:mod:`onebox.worker.sandbox.system_calls`), on x86-64 and aarch64; on the latter it was not run. It
holds without another user id, and therefore where an ordinary user runs the workers of several clients.

A call that is not listed is not permitted; one that is newer than the lists is missing, as on an older kernel, so that
libraries use what was there before it. Neither ends the process, since libraries try calls that they can do without,
and what an operator cannot do is an error of that operator. A call of another processor's numbering ends it.

A filter sees the number of a call and the words in its arguments, but no memory that they point to. Calls that take a
process id may name this thread, as 0, and no other: which ids are those of this process's threads is not known to it.
Libraries name their own threads to the scheduler by id: ZeroMQ sets the policy that each thread has anyway, OpenMP
binds threads to cores where a variable says so, and both end the process if that fails. So those calls report success,
and have no effect.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onebox.worker.sandbox.system_calls import DRIVER, EVERY

OWN_THREAD = ("prlimit64", "move_pages")
"""Allowed where the first argument, a process or thread, is 0: the calling one. The C library's ``getrlimit`` and
``setrlimit`` are ``prlimit64`` with 0."""

SCHEDULER = ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
"""Done where the first argument is 0; else without effect."""

OWN_PROCESS = ("kill", "tgkill")
"""Signals: allowed where the first argument is the id of this process."""

_CLONE_THREAD, _NAMESPACES = 0x00010000, 0x7E020000
"""Flags of ``clone``: a thread of this process; and new namespaces, each of them."""

_MPOL_MF_MOVE_ALL = 1 << 2  # pages that other processes use, too

_OWNERS = (8, 15, 1024, 1026)
_IOCTL_OWNERS = (0x8901, 0x8902)
"""Refused commands of ``fcntl`` and ``ioctl``: those that name the process that gets a signal when a file is ready
(``F_SETOWN``, ``F_SETOWN_EX``; ``FIOSETOWN``, ``SIOCSPGRP``), and those that delay or observe who opens a file
(``F_SETLEASE``, ``F_NOTIFY``)."""

_LOCKS = (6, 7, 37, 38)
"""Commands of ``fcntl`` that lock parts of a file, as ``flock`` does a whole one; of GPUs' workers only."""

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Families of sockets that stay; the C library lists network interfaces by the last."""

_NETWORKS = (socket.AF_INET, socket.AF_INET6)
PROTOCOLS = (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP)
KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM)
"""Protocols and types of network sockets that stay. Landlock knows the ports of TCP only: MPTCP, SMC and SCTP have the
same ports, or ports of their own, and no rules."""

_TYPE_BITS = 0xF  # of a socket's type, without flags

_FLAGS = {"sendto": 3, "sendmsg": 2, "sendmmsg": 3}
_FAST_OPEN = 0x20000000
"""Flags' places in the calls that send messages; and the flag by which they connect, past Landlock's rules."""

_TCP_ULP = 31  # an option of TCP's sockets that changes what they are

_NEWER = 453
"""The first number of calls that are newer than the lists: the same on both processors."""

_X32 = 0x40000000  # another numbering of an x86-64's calls

_LOAD, _AND, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000

_SET_FILTER, _ALL_THREADS = 1, 1

_libc = ctypes.CDLL(None, use_errno=True)

_Line = tuple[int, int, int, int]
"""Operation, lines to skip where it holds, lines to skip where it does not, operand."""

_REFUSE: _Line = (_RETURN, 0, 0, _FAIL | errno.EPERM)
_MISSING: _Line = (_RETURN, 0, 0, _FAIL | errno.ENOSYS)
_IGNORE: _Line = (_RETURN, 0, 0, _FAIL)  # "error" 0, which is success
_PASS: _Line = (_RETURN, 0, 0, _ALLOW)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


@dataclass(frozen=True)
class Processor:
    """How a processor's calls are numbered.

    Args:
        audit: What the kernel calls the processor (``AUDIT_ARCH_X86_64``, ``AUDIT_ARCH_AARCH64``).
        place: Which number of a call in the lists is its.
    """

    audit: int
    place: int

    def numbers(self, calls: Mapping[str, tuple[int | None, int | None]]) -> dict[str, int]:
        """Return the numbers of calls that it has."""
        found = {name: numbers[self.place] for name, numbers in calls.items()}
        return {name: number for name, number in found.items() if number is not None}


PROCESSORS = {"x86_64": Processor(0xC000003E, 0), "aarch64": Processor(0xC00000B7, 1)}


def supported() -> bool:
    """Return whether the filter supports this processor, and the kernel supports filters."""
    return platform.machine() in PROCESSORS and "Seccomp:" in _status()


def program(*, gpu: bool, process: int, machine: str | None = None) -> bytes:
    """Return the filter as classic BPF for the kernel.

    ``clone3`` is reported as missing, so that the C library uses ``clone``, whose flags are visible to the filter: it
    starts threads, and no processes.

    Args:
        gpu: Whether the worker uses a GPU's driver.
        process: The id of the process, to which it may send signals.
        machine: The processor, by :data:`PROCESSORS`; this one's where ``None``.
    """
    processor = _processor(machine)
    numbers = processor.numbers({**EVERY, **DRIVER} if gpu else EVERY)
    code: list[_Line] = [
        (_LOAD, 0, 0, 4),  # the processor
        (_EQUAL, 1, 0, processor.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, 0, 1, _X32),
        _REFUSE,
    ]
    for name, lines in _checks(gpu, process).items():
        if name in numbers:
            code += _on(numbers.pop(name), lines)
    for first, after in _ranges(numbers.values()):
        code += [(_AT_LEAST, 0, 2, first), (_AT_LEAST, 1, 0, after), _PASS]
    return _packed([*code, (_AT_LEAST, 0, 1, _NEWER), _MISSING, _REFUSE])


def _checks(gpu: bool, process: int) -> dict[str, list[_Line]]:
    """Return the decisions on calls that depend on their arguments."""
    found: dict[str, list[_Line]] = {"clone3": [_MISSING]}
    found |= {name: [_load(0), *_equal([0])] for name in OWN_THREAD}
    found |= {name: [_load(0), (_EQUAL, 1, 0, 0), _IGNORE, _PASS] for name in SCHEDULER}
    found |= {name: [_load(0), *_equal([process])] for name in OWN_PROCESS}
    found |= {name: [_load(place), (_BITS, 0, 1, _FAST_OPEN), _REFUSE, _PASS] for name, place in _FLAGS.items()}
    return found | {
        "clone": [_load(0), (_BITS, 1, 0, _NAMESPACES), (_BITS, 1, 0, _CLONE_THREAD), _REFUSE, _PASS],
        "setpriority": [_load(0), (_EQUAL, 1, 0, os.PRIO_PROCESS), _REFUSE, _load(1), *_equal([0])],
        "mbind": [_load(5), (_BITS, 0, 1, _MPOL_MF_MOVE_ALL), _REFUSE, _PASS],
        "fcntl": _but(1, _OWNERS if gpu else (*_OWNERS, *_LOCKS)),
        "ioctl": _but(1, _IOCTL_OWNERS),
        "socket": _sockets(),
        "setsockopt": [_load(1), (_EQUAL, 1, 0, socket.IPPROTO_TCP), _PASS, *_but(2, [_TCP_ULP])],
    }


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges, each from its first to the one after its last."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def _sockets() -> list[_Line]:
    """Return the decision on a new socket: of TCP and UDP, of this machine, or of the kernel's lists of networks."""
    stream, datagram = KINDS
    network = [
        _load(1),
        (_AND, 0, 0, _TYPE_BITS),
        (_EQUAL, 2, 0, stream),
        (_EQUAL, 1, 0, datagram),
        _REFUSE,
        _load(2),
        *_equal(PROTOCOLS),
    ]
    others = _equal(family for family in FAMILIES if family not in _NETWORKS)
    one, two = _NETWORKS
    return [_load(0), (_EQUAL, 1, 0, one), (_EQUAL, 0, len(network), two), *network, *others]


def socket_program(*, networks: bool = True, machine: str | None = None) -> bytes:
    """Return the filter of sockets, which refuses others than those of networks, and datagrams on this machine.

    Services of a machine, such as a container engine, a message bus or a display, listen on Unix sockets of streams or
    of packets in sequence; to a file's socket a process may connect whatever Landlock says. Workers find each other's
    memory by datagrams. A listening socket accepts connections as before.

    Args:
        networks: Whether those of networks, and the lists of them, stay.
        machine: As for :func:`program`.
    """
    others = _equal(family for family in FAMILIES if networks and family != socket.AF_UNIX)
    datagrams = [_load(1), (_AND, 0, 0, _TYPE_BITS), *_equal([socket.SOCK_DGRAM])]
    by_family = [_load(0), (_EQUAL, 0, len(datagrams), socket.AF_UNIX), *datagrams, *others]
    number = _processor(machine).numbers(EVERY)["socket"]
    return _packed([(_LOAD, 0, 0, 0), *_on(number, by_family), _PASS])


def refuse_calls(program: bytes) -> None:
    """Enforce a filter in all threads of this process, beside those before; the process must have given up new
    privileges.

    Raises:
        OSError: The kernel refuses.
    """
    filled = _Program(len(program) // 8, program)
    found = _libc.syscall(_processor().numbers(EVERY)["seccomp"], _SET_FILTER, _ALL_THREADS, ctypes.byref(filled))
    if found != 0:  # above 0: a thread that already has another filter
        number = ctypes.get_errno() if found < 0 else errno.EBUSY
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _load(argument: int) -> _Line:
    """Return the line that loads the low half of an argument."""
    return (_LOAD, 0, 0, 16 + 8 * argument)


def _on(number: int, lines: list[_Line]) -> list[_Line]:
    """Return the decision on a call, by lines that end in one."""
    return [(_EQUAL, 0, len(lines), number), *lines]


def _equal(allowed: Iterable[int]) -> list[_Line]:
    """Return the decision to allow some values of what was loaded, and no others."""
    return [*(line for value in allowed for line in ((_EQUAL, 0, 1, value), _PASS)), _REFUSE]


def _but(argument: int, refused: Iterable[int]) -> list[_Line]:
    """Return the decision to refuse some values of an argument, and no others."""
    return [_load(argument), *(line for value in refused for line in ((_EQUAL, 0, 1, value), _REFUSE)), _PASS]


def _packed(code: Iterable[_Line]) -> bytes:
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def _processor(machine: str | None = None) -> Processor:
    return PROCESSORS[machine or platform.machine()]


def _status() -> str:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return status.read()
    except OSError:
        return ""
