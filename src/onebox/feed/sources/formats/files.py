"""Files that many threads and processes read at once: name patterns, whole files, and parts of open ones."""

from __future__ import annotations

import errno
import glob
import os
import re
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from onebox import files
from onebox.errors import DataError, UsageError
from onebox.portable import read_at

MAX_NAMES = 100_000  # limit of one pattern: more shards than any known data set has
MAX_FILE_BYTES = 1 << 28  # limit of one sample: a thousand times a usual picture
MAX_OPEN = 128  # files kept open by one source, of the 1,024 that a process usually may
BRACES = re.compile(r"\{([^{}]*)\}")
SPAN = re.compile(r"(\d{1,12})\.\.(\d{1,12})")

Paths = str | os.PathLike[str] | Sequence["str | os.PathLike[str]"]


def expand(pattern: Paths) -> list[Path]:
    """Return the files that match a pattern.

    Args:
        pattern: A path, in which ``{000..012}`` stands for the numbers from 000 to 012 (with as many digits), ``{a,b}``
            for a and b, and ``*``, ``?`` and ``[...]`` for existing names; a leading ``~`` is the home folder. Or a
            sequence of such.

    Returns:
        list: Paths, in the order of the numbers; matches of ``*`` are sorted by name.

    Raises:
        UsageError: More than 100,000 names.
        DataError: A file is missing, or nothing matches.

    Example:
        >>> [path.name for path in expand(__file__.replace("files.py", "{files,npy}.py"))]
        ['files.py', 'npy.py']
    """
    patterns = [pattern] if isinstance(pattern, str | os.PathLike) else list(pattern)
    found: list[Path] = []
    for one in patterns:
        text = os.path.expanduser(os.fspath(one))
        names = [text] if os.path.lexists(text) else _names(text)
        for name in names:
            found.extend(_existing(name, text))
    if not found:
        raise UsageError("No file is named; give a path, a pattern such as 'train-{000..012}.tar', or several.")
    return found


def _existing(name: str, pattern: str) -> list[Path]:
    if os.path.lexists(name):
        return [Path(name)]
    if glob.has_magic(name):
        found = [Path(each) for each in sorted(glob.glob(name))]
        if found:
            return found
        raise DataError(f"No file fits {name!r}; put the files there, or correct the pattern.", path=name)
    of = "" if name == pattern else f" (one of {pattern!r})"
    raise DataError(f"{name} is missing{of}; put it there, or correct the name.", path=Path(name))


def _names(pattern: str) -> list[str]:
    """Expand braces, the first pair varying slowest."""
    braces = BRACES.search(pattern)
    if braces is None:
        return [pattern]
    names: list[str] = []
    for choice in _choices(braces[1], pattern):
        rests = _names(pattern[braces.end() :])
        if len(names) + len(rests) > MAX_NAMES:
            raise UsageError(f"{pattern!r} stands for more than the {MAX_NAMES} files that are allowed.")
        names.extend(pattern[: braces.start()] + choice + rest for rest in rests)
    return names


def _choices(text: str, pattern: str) -> Iterable[str]:
    span = SPAN.fullmatch(text)
    if span is None:
        return text.split(",")
    first, last = int(span[1]), int(span[2])
    if last - first >= MAX_NAMES:
        raise UsageError(f"{pattern!r} stands for more than the {MAX_NAMES} files that are allowed.")
    if last < first:
        raise UsageError(f"{pattern!r} counts from {span[1]} down to {span[2]}; the smaller number comes first.")
    return [f"{number:0{len(span[1])}d}" for number in range(first, last + 1)]


def read_file(path: str | os.PathLike[str], *, sample: object = None, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole regular file; the GIL is released meanwhile.

    Args:
        path: The file.
        sample: Number of the sample, for the error.
        max_bytes: A larger file is rejected before it is read.

    Raises:
        DataError: It cannot be read, is not a regular file, or is empty or too large.
    """
    try:
        fd = open_regular(path, sample=sample)
        try:
            size_bytes = os.fstat(fd).st_size
            if not 0 < size_bytes <= max_bytes:
                came = f"{path} has {size_bytes} bytes; allowed are 1 to {max_bytes}"
                raise DataError(f"{came}. Fetch it again, or take it away.", path=path, sample=sample)
            return read_part(fd, size_bytes, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise unreadable(path, error, sample) from error


def read_part(fd: int, size_bytes: int, offset: int) -> bytes:
    """Read up to a number of bytes of an open file at an offset, fewer only at its end; the file position is not
    used."""
    part = read_at(fd, size_bytes, offset)
    if len(part) == size_bytes or not part:
        return part
    parts = [part]  # a signal interrupted it, or the file system returns less at a time
    while part and (missing := size_bytes - sum(map(len, parts))):
        part = read_at(fd, missing, offset + size_bytes - missing)
        parts.append(part)
    return b"".join(parts)


def open_regular(path: str | os.PathLike[str], *, sample: object = None) -> int:
    """Open a regular file for reading.

    Returns:
        int: The descriptor, which is the caller's to close.

    Raises:
        DataError: It is a folder, a pipe or a device, on which a read might block for ever.
        OSError: It cannot be opened.
    """
    try:
        return files.open_regular(path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    raise DataError(f"{path} is no regular file; data are read from files only.", path=path, sample=sample)


def unreadable(path: object, error: OSError, sample: object = None) -> DataError:
    """Return the error for a file that the system does not let us read."""
    todo = "see that it exists and that you may read it"
    if isinstance(error, FileNotFoundError):
        todo = "put it there, or correct the name"
        if os.path.islink(str(path)):
            todo = f"it is a link to {os.readlink(str(path))}, which is not there"
    return DataError(f"{path} cannot be read ({error.strerror or error}); {todo}.", path=path, sample=sample)


class OpenFiles:
    """Files of which parts are read at given places, by many threads and processes at once without a lock.

    The first 128 stay open until the object is dropped; others are opened for each part.

    Args:
        paths: The files.

    Raises:
        DataError: A file that would stay open cannot be opened.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._fds: list[int] = []
        self._end = weakref.finalize(self, _close, self._fds)
        for path in self.paths[:MAX_OPEN]:
            try:
                self._fds.append(open_regular(path))
            except OSError as error:
                raise unreadable(path, error) from error

    def size_bytes(self, number: int) -> int:
        """Bytes of a file."""
        return os.stat(self.paths[number]).st_size

    def read(self, number: int, size_bytes: int, offset: int) -> bytes:
        """Read a number of bytes from an offset on; fewer where the file ends before.

        Raises:
            OSError: It cannot be read.
        """
        if number < len(self._fds):
            return read_part(self._fds[number], size_bytes, offset)
        fd = open_regular(self.paths[number])
        try:
            return read_part(fd, size_bytes, offset)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the open files; later reads open a file each. Idempotent."""
        self._end()


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
