"""Files that are put in place whole or not at all, and that survive a loss of power."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from onebox.portable import sync


def put_file(path: Path, content: bytes, *, private: bool = True) -> None:
    """Put a file in place whole or not at all; other writers of it do not disturb.

    Args:
        path: The file, in a folder that exists; an earlier one is replaced.
        content: All of its bytes.
        private: Whether this user alone may read it; else the process's umask decides.

    Raises:
        OSError: It cannot be written; an earlier one is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(temporary, flags, 0o600 if private else 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it where they are missing, so that a loss of power leaves them there.

    Raises:
        OSError: One of them cannot be made.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync(each.parent)
    path.mkdir(exist_ok=True)  # an error for a file


__all__ = ["make_folder", "put_file", "sync"]
