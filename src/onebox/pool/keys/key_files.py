"""Key files: permissions of a file are checked before its content is trusted.

A file is replaced atomically, and writers hold a lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from onebox.errors import UsageError
from onebox.files import open_regular, put_file
from onebox.portable import access_of_others, lock_file

MOST_BYTES = 1 << 20
"""Size limit of one file."""

_LOCK_S = 5.0
"""Bound of the wait for the lock: a writer holds it for some milliseconds."""

T = TypeVar("T")


def read(path: Path, kind: type[T], *, secret: bool = False) -> T | None:
    """Read a file; ``None`` where there is none.

    Raises:
        UsageError: Other users can write to it, or read a secret one; or it is damaged.
    """
    try:
        _check_folder(path.parent)
        with open(open_regular(path), "rb") as file:
            _check_mode(path, os.fstat(file.fileno()), secret=secret)
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path} is damaged: it has more than {MOST_BYTES} bytes; delete it and pair again")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        what = "" if secret else f": {error}"  # an error may quote the file's content
        raise UsageError(f"{path} is damaged{what}; delete it and pair again") from None


def _check_folder(folder: Path) -> None:
    about = folder.stat()
    if not stat.S_ISDIR(about.st_mode):
        raise UsageError(f"{folder} is no folder; keys are kept in one, which ONEBOX_CONFIG may name")
    others = access_of_others(about)
    if others.owned:
        raise UsageError(f"{folder} belongs to another user; name a folder of your own in ONEBOX_CONFIG")
    if others.writable:
        raise UsageError(f"other users can put keys into {folder}; end that with: chmod 700 {folder}")


def _check_mode(path: Path, about: os.stat_result, *, secret: bool) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise UsageError(f"{path} is no plain file")
    others = access_of_others(about)
    if others.owned:
        raise UsageError(f"{path} belongs to another user; delete it and pair again")
    if secret and others.readable:
        raise UsageError(
            f"other users can read the secret key in {path}: delete it and pair again; or, if nobody can have read "
            f"it, end that with: chmod 600 {path}"
        )
    if others.writable:
        raise UsageError(f"other users can write to {path}: check what is in it, and end that with: chmod 600 {path}")


@contextlib.contextmanager
def changing(path: Path) -> Iterator[Path]:
    """Lock the files of a folder against other writers; the folder is created where it is missing.

    Raises:
        UsageError: The folder cannot be created or written to, or another writer does not release the lock.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path.parent)
        descriptor = os.open(path.parent / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor, path.parent)
            yield path
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be written: {error.strerror}") from None


def _lock(descriptor: int, folder: Path) -> None:
    end_s = time.monotonic() + _LOCK_S
    while True:
        try:
            lock_file(descriptor)
            return
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise UsageError(f"another onebox has been changing the keys in {folder} for {_LOCK_S:.0f} s") from None
            time.sleep(0.02)


def write(path: Path, value: object) -> None:
    """Replace a file atomically, readable for this user alone."""
    content = msgspec.json.format(msgspec.json.encode(value)) + b"\n"
    put_file(path, content)
