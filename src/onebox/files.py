"""Files that are put in place whole or not at all, and survive a loss of power; and the reader of files that others may
have made."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from onebox.portable import open_to_read, sync


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


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading, and return its descriptor, which the caller closes.

    Raises:
        OSError: It cannot be opened, or is a folder, a pipe or a device: a read might block for ever, or never end.
    """
    descriptor = open_to_read(path)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file, which may come from others.
        most_bytes: A larger one is not read.

    Raises:
        OSError: It cannot be read, is no regular file, or is too large.
    """
    with open(open_regular(path), "rb") as file:
        content = file.read(most_bytes + 1) if os.fstat(file.fileno()).st_size <= most_bytes else None
    if content is None or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", os.fspath(path))
    return content


__all__ = ["make_folder", "open_regular", "put_file", "read_regular", "sync"]
