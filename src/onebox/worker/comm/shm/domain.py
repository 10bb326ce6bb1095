"""Shared-memory domain of a process: the processes with which it may share memory, and which it can watch, as
detected.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SPACES = ("user", "pid", "net")
"""Namespaces: of users; of processes, whose numbers are valid inside only; of networks, with the names of sockets."""


@functools.cache
def shm_domain() -> str:
    """Return an identifier shared by processes under one kernel, of one user, in the same namespaces.

    Host names do not identify it: containers have their own names, and one machine may have several. If the system does
    not provide the information, the identifier is unique to this process.
    """
    try:
        places = [os.readlink(f"/proc/self/ns/{space}") for space in _SPACES]
        text = "\n".join([_BOOT.read_text().strip(), str(os.getuid()), *places])
    except OSError:
        text = secrets.token_hex(16)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
