"""System call filter (``seccomp(2)``): calls that no operator makes fail, in all threads of the process.

It is a deny-list of calls that start, inspect, signal or slow down other processes, gain privileges in a new namespace,
outlive the process, or reach rarely used parts of the kernel, which have had many vulnerabilities. It holds without
another user id, and therefore where an ordinary user runs the workers of several clients.

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
from collections.abc import Iterable

REFUSED = {
    "ptrace": 101,
    "execve": 59,
    "execveat": 322,
    "fork": 57,
    "vfork": 58,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "process_madvise": 440,
    "process_mrelease": 448,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "pidfd_send_signal": 424,
    "tkill": 200,
    "kcmp": 312,
    "ioprio_set": 251,
    "migrate_pages": 256,
    "unshare": 272,
    "setns": 308,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "chroot": 161,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "open_by_handle_at": 304,
    "fanotify_init": 300,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "landlock_add_rule": 445,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "init_module": 175,
    "finit_module": 313,
    "kexec_load": 246,
    "kexec_file_load": 320,
    "syslog": 103,
    "modify_ldt": 154,
    "reboot": 169,
    "swapon": 167,
    "acct": 163,
    "msgget": 68,
    "msgsnd": 69,
    "msgrcv": 70,
    "msgctl": 71,
    "mq_open": 240,
    "mq_unlink": 241,
}
"""Names and numbers on x86-64. An object of System V needs only its number to be used, so that all of its calls are
refused."""

CPU_REFUSED = {
    "shmget": 29,
    "shmat": 30,
    "shmctl": 31,
    "semget": 64,
    "semop": 65,
    "semctl": 66,
    "semtimedop": 220,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "utime": 132,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "utimes": 235,
    "fchownat": 260,
    "futimesat": 261,
    "fchmodat": 268,
    "utimensat": 280,
    "fchmodat2": 452,
    "flock": 73,
    "setxattrat": 463,
    "removexattrat": 466,
    "file_setattr": 469,
}
"""Also refused to workers without a driver: shared memory and semaphores of System V, which other processes of the user
may have, and what locks files or changes their rights, owners, times and attributes, which Landlock does not restrict
(``landlock(7)``). CUDA's documentation does not say that its driver and its services do without them."""

OWN_THREAD = {"prlimit64": 302, "move_pages": 279}
"""Allowed where the first argument, a process or thread, is 0: the calling one. The C library's ``getrlimit`` and
``setrlimit`` are ``prlimit64`` with 0."""

SCHEDULER = {"sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314}
"""Done where the first argument is 0; else without effect."""

OWN_PROCESS = {"kill": 62, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297}
"""Signals: allowed where the first argument is the id of this process."""

_CLONE, _CLONE3, _SETPRIORITY, _MBIND, _FCNTL, _IOCTL, _SOCKET, _SETSOCKOPT = 56, 435, 141, 237, 72, 16, 41, 54
_CLONE_THREAD, _CLONE_NEWUSER = 0x00010000, 0x10000000
_MPOL_MF_MOVE_ALL = 1 << 2  # pages that other processes use, too
_COMMANDS = {_FCNTL: (8, 15, 1024, 1026), _IOCTL: (0x8901, 0x8902)}
"""Refused commands: those that name the process that gets a signal when a file is ready (``F_SETOWN``, ``F_SETOWN_EX``;
``FIOSETOWN``, ``SIOCSPGRP``), and those that delay or observe who opens a file (``F_SETLEASE``, ``F_NOTIFY``)."""

_LOCKS = (6, 7, 37, 38)
"""Commands of ``fcntl`` that lock parts of a file, which :data:`CPU_REFUSED` has as ``flock`` for a whole one."""

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Families of sockets that stay; the C library lists network interfaces by the last."""

_NETWORKS = (socket.AF_INET, socket.AF_INET6)
PROTOCOLS = (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP)
KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM)
"""Protocols and types of network sockets that stay. Landlock knows the ports of TCP only: MPTCP, SMC and SCTP have the
same ports, or ports of their own, and no rules."""

_TYPE_BITS = 0xF  # of a socket's type, without flags

_FLAGS = {"sendto": (44, 3), "sendmsg": (46, 2), "sendmmsg": (307, 3)}
_FAST_OPEN = 0x20000000
"""Numbers and flags' places of the calls that send messages; and the flag by which they connect, past Landlock's
rules."""

_TCP_ULP = 31  # an option of TCP's sockets that changes what they are

_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_X32 = 0x40000000  # another numbering of this processor's calls

_LOAD, _AND, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000

_SECCOMP = 317
_SET_FILTER, _ALL_THREADS = 1, 1

_libc = ctypes.CDLL(None, use_errno=True)

_Line = tuple[int, int, int, int]
"""Operation, lines to skip where it holds, lines to skip where it does not, operand."""

_REFUSE: _Line = (_RETURN, 0, 0, _FAIL | errno.EPERM)
_IGNORE: _Line = (_RETURN, 0, 0, _FAIL)  # "error" 0, which is success
_PASS: _Line = (_RETURN, 0, 0, _ALLOW)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def supported() -> bool:
    """Return whether the filter supports this processor, and the kernel supports filters."""
    return platform.machine() == "x86_64" and "Seccomp:" in _status()


def program(*, gpu: bool, process: int) -> bytes:
    """Return the filter as classic BPF for the kernel.

    A call with another numbering ends the process. ``clone3`` is reported as missing, so that the C library uses
    ``clone``, whose flags are visible to the filter: it starts threads, and no processes.

    Args:
        gpu: Whether the worker uses a GPU's driver.
        process: The id of the process, to which it may send signals.
    """
    code: list[_Line] = [
        (_LOAD, 0, 0, 4),  # the processor
        (_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, 0, 1, _X32),
        _REFUSE,
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for number in (REFUSED if gpu else REFUSED | CPU_REFUSED).values():
        code += _on(number, [_REFUSE])
    for number in OWN_THREAD.values():
        code += _on(number, [_load(0), *_equal([0])])
    for number in SCHEDULER.values():
        code += _on(number, [_load(0), (_EQUAL, 1, 0, 0), _IGNORE, _PASS])
    for number in OWN_PROCESS.values():
        code += _on(number, [_load(0), *_equal([process])])
    code += _on(_CLONE, [_load(0), (_BITS, 1, 0, _CLONE_NEWUSER), (_BITS, 1, 0, _CLONE_THREAD), _REFUSE, _PASS])
    code += _on(_SETPRIORITY, [_load(0), (_EQUAL, 1, 0, os.PRIO_PROCESS), _REFUSE, _load(1), *_equal([0])])
    code += _on(_MBIND, [_load(5), (_BITS, 0, 1, _MPOL_MF_MOVE_ALL), _REFUSE, _PASS])
    for number, commands in _COMMANDS.items():
        code += _on(number, _but(1, commands if gpu or number != _FCNTL else (*commands, *_LOCKS)))
    code += _on(_SOCKET, _sockets())
    for number, place in _FLAGS.values():
        code += _on(number, [_load(place), (_BITS, 0, 1, _FAST_OPEN), _REFUSE, _PASS])
    code += _on(_SETSOCKOPT, [_load(1), (_EQUAL, 1, 0, socket.IPPROTO_TCP), _PASS, *_but(2, [_TCP_ULP])])
    return _packed(code)


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


def socket_program(*, networks: bool = True) -> bytes:
    """Return the filter of sockets, which refuses others than those of networks, and datagrams on this machine.

    Services of a machine, such as a container engine, a message bus or a display, listen on Unix sockets of streams or
    of packets in sequence; to a file's socket a process may connect whatever Landlock says. Workers find each other's
    memory by datagrams. A listening socket accepts connections as before.

    Args:
        networks: Whether those of networks, and the lists of them, stay.
    """
    others = _equal(family for family in FAMILIES if networks and family != socket.AF_UNIX)
    datagrams = [_load(1), (_AND, 0, 0, _TYPE_BITS), *_equal([socket.SOCK_DGRAM])]
    by_family = [_load(0), (_EQUAL, 0, len(datagrams), socket.AF_UNIX), *datagrams, *others]
    return _packed([(_LOAD, 0, 0, 0), *_on(_SOCKET, by_family)])


def refuse_calls(program: bytes) -> None:
    """Enforce a filter in all threads of this process, beside those before; the process must have given up new
    privileges.

    Raises:
        OSError: The kernel refuses.
    """
    filled = _Program(len(program) // 8, program)
    found = _libc.syscall(_SECCOMP, _SET_FILTER, _ALL_THREADS, ctypes.byref(filled))
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
    """Return a filter that allows what its lines do not decide."""
    return b"".join(struct.pack("=HBBI", *line) for line in (*code, _PASS))


def _status() -> str:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return status.read()
    except OSError:
        return ""
