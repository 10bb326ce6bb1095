"""A small on-disk cache of measurements: JSON files in the user's cache folder, named by a hash.

Files are not trusted: one that is damaged, too large, or of another format or type counts as missing. Concurrent
readers and writers are allowed: a file is put in place atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from onebox.files import put_file, read_regular
from onebox.portable import access_of_others

FORMAT = 1
"""Version of the files: other versions count as missing."""

MOST_FILES = 256
MOST_BYTES = 16 << 20
"""Maximum bytes of one file."""

_ABANDONED_S = 3600.0
"""Age from which a temporary file counts as left by a killed writer."""

T = TypeVar("T")


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a file."""

    format: int
    key: str
    value: Raw


def key_of(*parts: object) -> str:
    """Return the name of a cache entry that depends on some parts only.

    Args:
        parts: Anything that msgspec encodes as JSON.

    Returns:
        32 hexadecimal digits.
    """
    return hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=16).hexdigest()


def cache_folder(kind: str = "profiles") -> Path:
    """Return a folder of ``onebox`` in the user's cache folder, which follows the XDG base directory specification.

    Args:
        kind: Its name.

    Raises:
        RuntimeError: The user has no home.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path.home() / ".cache"  # the specification ignores a relative one
    return base / "onebox" / kind


def load(key: str, kind: type[T]) -> T | None:
    """Return a stored value, or ``None`` where there is no valid one.

    Args:
        key: From :func:`key_of`.
        kind: Its type, which is checked.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError, msgspec.MsgspecError):
        path = cache_folder() / f"{key}.json"
        keep_private(path.parent)
        found = msgspec.json.decode(read_regular(path, MOST_BYTES), type=_File)
        if (found.format, found.key) == (FORMAT, key):
            return msgspec.json.decode(found.value, type=kind)
    return None


def store(key: str, value: object) -> bool:
    """Store a value, and delete the oldest ones above the limit; a failure raises no error.

    Args:
        key: From :func:`key_of`.
        value: Anything that msgspec encodes as JSON and decodes again.

    Returns:
        Whether it was stored.
    """
    content = msgspec.json.encode(_File(FORMAT, key, Raw(msgspec.json.encode(value))))
    if len(content) > MOST_BYTES:
        return False
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_private(folder)
        put_file(folder / f"{key}.json", content)
    except (OSError, RuntimeError):
        return False
    _prune(folder)
    return True


def keep_private(folder: Path) -> None:
    """Ensure that only the user can write to the folder.

    Raises:
        OSError: It is missing or belongs to another user.
    """
    about = folder.lstat()
    others = access_of_others(about)
    if not stat.S_ISDIR(about.st_mode) or others.owned:
        raise PermissionError(f"{folder} is no folder of this user")
    if others.readable:
        folder.chmod(0o700)


def _prune(folder: Path) -> None:
    """Delete the oldest files above the limit, and abandoned temporary ones."""
    with contextlib.suppress(OSError):
        files = sorted((when, path) for path in folder.glob("*.json") if (when := _modified_s(path)) is not None)
        for _, path in files[: max(0, len(files) - MOST_FILES)]:
            path.unlink(missing_ok=True)
        for path in folder.glob(".*.tmp"):
            when = _modified_s(path)
            if when is not None and time.time() - when > _ABANDONED_S:
                path.unlink(missing_ok=True)


def _modified_s(path: Path) -> float | None:
    """Return a file's modification time; ``None`` where another process has deleted it."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return None
