"""Landlock: a process permanently gives up rights to files, ports and signals that it does not need (``landlock(7)``).

The kernel then refuses every access of the kinds in a :class:`Ruleset` that no rule allows. Open files stay open. A
process under a ruleset cannot inspect processes outside it, nor those with their own rulesets.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all processors
_GET_VERSION = 1
_PATH_BENEATH, _NET_PORT = 1, 2

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_FOLDER = 1 << 3
REMOVE_FILE = 1 << 5
MAKE_FILE = 1 << 8
MAKE_SOCKET = 1 << 9
TRUNCATE = 1 << 14
DEVICE_COMMANDS = 1 << 15

READ = READ_FILE | READ_FOLDER
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | DEVICE_COMMANDS
"""Rights that a rule on a file, rather than a folder, can grant."""

_BIND, _CONNECT = 1, 2
_SCOPE_SIGNALS = 1 << 1

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


@functools.cache
def version() -> int:
    """Return the Landlock version of this kernel; 0 if it has none, or it is disabled. It is asked for once: a filter
    of system calls may refuse it later."""
    return max(0, int(_syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)))


def handled_files(abi: int) -> int:
    """Return the rights on files of a version: all of them are refused unless a rule allows them."""
    bits = 13 + (abi >= 2) + (abi >= 3)  # 13 from the start, then moving among folders, then truncation
    return (1 << bits) - 1 | (DEVICE_COMMANDS if abi >= 5 else 0)


class Ruleset:
    """Rights that remain after enforcement. Each of several enforced rulesets must allow an access.

    Args:
        abi: The version to use, at least 1 and at most :func:`version`.
        files: Whether it covers files.
        ports: Whether it covers TCP ports, which requires version 4.

    Raises:
        OSError: The kernel refuses to create it.
    """

    def __init__(self, abi: int, *, files: bool = True, ports: bool = False) -> None:
        self.ports = ports
        self.signals = abi >= 6 and files
        self._handled = handled_files(abi) if files else 0
        attributes = struct.pack("=Q", self._handled)
        attributes += struct.pack("=Q", _BIND | _CONNECT if self.ports else 0) if abi >= 4 else b""
        attributes += struct.pack("=Q", _SCOPE_SIGNALS) if self.signals else b""
        self._descriptor = int(_syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
        if self._descriptor < 0:
            raise _error("landlock_create_ruleset")

    def allow(self, path: str | Path, rights: int) -> bool:
        """Allow rights on a file, or on everything beneath a folder; return whether the path exists.

        Raises:
            OSError: The kernel rejects the rule.
        """
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            rights &= self._handled
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= OF_FILES
            if not rights:
                return False
            if _syscall(_ADD_RULE, self._descriptor, _PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0) < 0:
                raise _error(f"landlock_add_rule for {path}")
        finally:
            os.close(descriptor)
        return True

    def allow_ports(self, ports: Iterable[int]) -> None:
        """Allow TCP on ports, both connecting and listening, and listening on a port of the kernel's choice.

        Raises:
            OSError: The kernel rejects the rule.
        """
        rule = (ctypes.c_uint64 * 2)(_BIND, 0)
        reference = ctypes.byref(rule)
        for port in (0, *ports):
            rule[0], rule[1] = _BIND | (_CONNECT if port else 0), port
            if _syscall(_ADD_RULE, self._descriptor, _NET_PORT, reference, 0) < 0:
                raise _error(f"landlock_add_rule for port {port}")

    def enforce(self) -> None:
        """Enforce the rules for this thread and everything started from it; new privileges must have been given up
        before.

        Raises:
            OSError: The kernel refuses.
        """
        if _syscall(_RESTRICT_SELF, self._descriptor, 0) < 0:
            raise _error("landlock_restrict_self")

    def close(self) -> None:
        """Free the rules; enforced ones stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {errno.errorcode.get(code, code)} {os.strerror(code)}")
