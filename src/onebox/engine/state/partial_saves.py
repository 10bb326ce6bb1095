"""Temporary folders of checkpoints that are being written or removed, and what ended processes have left of them.

Their names tell the process that owns them, so that writers on several hosts may share a file system.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from onebox.worker.system.process_watch import start_time

ABANDONED_S = 24 * 3600.0
"""Time without a change after which the temporary folder of a process elsewhere counts as abandoned: one in use
changes as each file is written."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PIDS = "/proc/self/ns/pid"
_NAME = re.compile(r"\.(?:writing|removing)-[\w-]*\.([0-9a-f]{16})\.(\d+)\.(\d*)\.[0-9a-f]+")

_own: set[Path] = set()
"""The temporary folders in use by this process."""


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder in a checkpoint folder, and remove those that ended processes have left there.

    It may be renamed; otherwise it is removed at the end of the context.

    Raises:
        OSError: It cannot be made.
    """
    path = folder / _name("writing")
    _own.add(path)
    try:
        path.mkdir()
        _remove_leftovers(folder, now_s=path.stat().st_mtime)  # by the clock of the file system
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _own.discard(path)


def remove_save(save: Path) -> None:
    """Remove a save; a process that ends meanwhile leaves nothing that looks like one."""
    path = save.with_name(_name("removing"))
    _own.add(path)
    try:
        with contextlib.suppress(OSError):  # another process may have removed it
            save.rename(path)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        _own.discard(path)


def _name(what: str) -> str:
    host = re.sub(r"[^\w-]", "_", socket.gethostname(), flags=re.ASCII)[:64]
    return f".{what}-{host}.{_kernel()}.{os.getpid()}.{start_time(os.getpid())}.{secrets.token_hex(4)}"


@functools.cache
def _kernel() -> str:
    """Return an identifier of the host, since its last start, and of the namespace of its process ids.

    If the system does not provide the information, the identifier is unique to this process.
    """
    try:
        text = "\n".join([socket.gethostname(), _BOOT.read_text().strip(), os.readlink(_PIDS)])
    except OSError:
        text = secrets.token_hex(16)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _remove_leftovers(folder: Path, now_s: float) -> None:
    """Remove the temporary folders of ended processes."""
    for path in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
        if path not in _own and _is_abandoned(path, now_s):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path, now_s: float) -> bool:
    """Return whether the owner of a temporary folder has ended; elsewhere, whether it has been still for long."""
    match = _NAME.fullmatch(path.name)
    if match is not None and match[1] == _kernel():
        return int(match[2]) == os.getpid() or start_time(int(match[2])) != match[3]
    try:
        changed_s = max(each.stat().st_mtime for each in (path, *path.iterdir()))
    except OSError:  # its owner has just renamed or removed it
        return False
    return now_s - changed_s > ABANDONED_S
