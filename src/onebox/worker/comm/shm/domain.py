"""Where a process is: which others it may share memory with, and look after, is found out and not assumed."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SPACES = ("user", "pid", "net")
"""Namespaces: of users; of processes, whose numbers say nothing outside; of networks, with the names of sockets."""


@functools.cache
def shm_domain() -> str:
    """Return a word that processes have in common which run under one kernel, as one user, in the same namespaces.

    What hosts are called says nothing: containers have names of their own, and one machine may go by several. Where
    the system does not tell, the word is this process's alone.
    """
    try:
        places = [os.readlink(f"/proc/self/ns/{space}") for space in _SPACES]
        text = "\n".join([_BOOT.read_text().strip(), str(os.getuid()), *places])
    except OSError:
        text = secrets.token_hex(16)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
