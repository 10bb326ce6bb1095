"""System call filter (``seccomp(2)``): calls that no operator makes fail, in all threads of the process.

It is a deny-list of calls that start or inspect other processes, gain privileges in a new namespace, or reach rarely
used parts of the kernel, which have had many vulnerabilities.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

REFUSED = {
    "ptrace": 101,
    "execve": 59,
    "execveat": 322,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "pidfd_getfd": 438,
    "kcmp": 312,
    "unshare": 272,
    "setns": 308,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "chroot": 161,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsmount": 432,
    "mount_setattr": 442,
    "open_by_handle_at": 304,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "init_module": 175,
    "finit_module": 313,
    "kexec_load": 246,
    "kexec_file_load": 320,
    "reboot": 169,
    "swapon": 167,
    "acct": 163,
}
"""Names and numbers on x86-64."""

_CLONE, _CLONE3 = 56, 435
_NEW_USER = 0x10000000
_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_X32 = 0x40000000  # another numbering of this processor's calls

_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000

_SECCOMP = 317
_SET_FILTER, _ALL_THREADS = 1, 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def supported() -> bool:
    """Return whether the filter supports this processor, and the kernel supports filters."""
    return platform.machine() == "x86_64" and "Seccomp:" in _status()


def program() -> bytes:
    """Return the filter as classic BPF for the kernel.

    A call with another numbering ends the process. ``clone3`` is reported as missing, so that the C library uses
    ``clone``, whose request for a user namespace is visible to the filter.
    """
    refused = sorted(REFUSED.values())
    tail = [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    count = len(refused)
    code = [
        (_LOAD, 0, 0, 4),  # the processor
        (_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, count + 5, 0, _X32),
        (_EQUAL, count + 5, 0, _CLONE3),
        *((_EQUAL, count - position + 3, 0, number) for position, number in enumerate(refused)),
        (_EQUAL, 0, 2, _CLONE),
        (_LOAD, 0, 0, 16),  # the low half of its first argument
        (_BITS, 1, 0, _NEW_USER),
        *tail,
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def refuse_calls() -> None:
    """Enforce the filter in all threads of this process; it must have given up new privileges before.

    Raises:
        OSError: The kernel refuses.
    """
    code = program()
    filled = _Program(len(code) // 8, code)
    found = _libc.syscall(_SECCOMP, _SET_FILTER, _ALL_THREADS, ctypes.byref(filled))
    if found != 0:  # above 0: a thread that already has another filter
        number = ctypes.get_errno() if found < 0 else errno.EBUSY
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _status() -> str:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return status.read()
    except OSError:
        return ""
