"""The agent's journal: events as JSON lines, on disk and in memory, with a count for each event.

Text from clients is written here, so every value is bounded, and escaped for terminals. Keys and data are excluded:
only plain values are written, and none whose name suggests a secret. So are addresses of memory: clients may read the
journal, and workers of several may have the same.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from onebox.errors import UsageError
from onebox.pool.launch.stderr_tail import without_addresses

FILE_BYTES = 8 << 20
"""Size at which a file is renamed to ``NAME.1`` and a new one begun: two files are kept."""

LINES = 2000
"""The most lines that are kept in memory."""

LINE_BYTES = 4096
"""The most bytes of a line, including its newline."""

_TEXT = 600
"""The most characters of a value; escaped they are up to twelve times as many bytes, and may then exceed a line."""

_SCANNED = 1 << 16

_FIELDS = 16
_EVENTS = 128
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_OWN = frozenset({"time", "event", "host"})
_SECRET = re.compile(r"key|secret|passw|token|cookie|credential|(?<!exit_)code$|payload|content|data$")
_WITHHELD = "(withheld)"

# A CURVE key is 40 characters of Z85. A run of exactly that length, optionally after a name and "=" or ":", counts as
# one, but not a fingerprint at the end of a sentence.
_Z85 = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]"
_PRINT = r"[a-z2-7]{4}(?::[a-z2-7]{4}){7}"
_KEY = re.compile(rf"(?:(?<!{_Z85})|(?<=[=:]))(?!{_PRINT}){_Z85}{{40}}(?!{_Z85})")


class Journal:
    """A log of events; callable from any thread, and from a signal handler.

    Logging never raises: lines that cannot be written to the disk are counted in :attr:`lost`, and stay in memory.

    Args:
        path: The file, in a folder that exists; None for none. Readable by its owner alone. Existing lines stay.
        stream: Second destination of every line, such as standard error.
        file_bytes: Size at which the file is rotated.
        clock: Function that returns the time in seconds since 1970.

    Raises:
        UsageError: The file cannot be opened.

    Example:
        >>> journal = Journal(None)
        >>> journal.tell("leased", client="ann@lab", lease=1)
        >>> journal.counts["leased"]
        1
    """

    def __init__(
        self,
        path: Path | None,
        stream: TextIO | None = None,
        *,
        file_bytes: int = FILE_BYTES,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._path = path
        self._stream = stream
        self._file_bytes = file_bytes
        self._clock = clock or (lambda: datetime.now(UTC).timestamp())
        self._host = _clean(platform.node() or "unknown")
        self._lock = threading.RLock()  # a signal handler may run in the middle of a line
        self._counts: Counter[str] = Counter()
        self._lines: deque[str] = deque(maxlen=LINES)
        self.lost = 0
        self._descriptor: int | None = None
        self._written = 0
        if path is not None:
            try:
                self._descriptor = _open(path)
                self._written = os.fstat(self._descriptor).st_size
                self._lines.extend(_tail(path))
            except OSError as error:
                raise UsageError(
                    f"the journal {path} cannot be opened: {error.strerror}; name a file that this user can write to"
                ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of occurrences of each event since this journal was opened."""
        with self._lock:
            return dict(self._counts)

    def tell(self, event: str, **fields: str | int | float | None) -> None:
        """Write a line.

        Args:
            event: Name of the event: lower-case words with hyphens.
            **fields: Its details; ``times`` if the line stands for several events. Long text is cut, text that looks
                like a key and fields whose names suggest secrets are withheld, other values are replaced by their type.
        """
        name = event if _NAME.fullmatch(event) else "unnamed"
        with self._lock:
            known = name in self._counts or len(self._counts) < _EVENTS
            times = fields.get("times")
            self._counts[name if known else "other"] += times if isinstance(times, int) and times > 0 else 1
            line = _line(self._clock(), name, self._host, fields)
            self._lines.append(line)
            self._write(line.encode() + b"\n")
        if self._stream is not None:
            try:
                print(line, file=self._stream, flush=True)
            except (OSError, ValueError):
                self._stream = None  # the reader is gone

    def last(self, count: int, *, size_bytes: int = 1 << 19) -> list[str]:
        """Return the newest lines, oldest first, within both limits.

        Args:
            count: The most lines.
            size_bytes: The most bytes in total, such as the size of a message.
        """
        found: list[str] = []
        with self._lock:
            for line in reversed(self._lines):
                size_bytes -= len(line)
                if len(found) >= count or size_bytes < 0:
                    break
                found.append(line)
        return found[::-1]

    def close(self) -> None:
        """Close the file. Idempotent. Later lines stay in memory."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _write(self, line: bytes) -> None:
        if self._descriptor is None or self._path is None:
            return
        try:
            if self._written and self._written + len(line) > self._file_bytes:
                self._turn(self._path)
            done = os.write(self._descriptor, line)
            self._written += done
            if done < len(line):  # a full disk: the rest must not run into the next line
                os.ftruncate(self._descriptor, self._written - done)
                self._written -= done
                self.lost += 1
        except OSError:
            self.lost += 1

    def _turn(self, path: Path) -> None:
        os.replace(path, path.with_name(f"{path.name}.1"))
        fresh = _open(path)
        old, self._descriptor = self._descriptor, fresh
        self._written = 0
        if old is not None:
            os.close(old)


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        end = os.lseek(descriptor, 0, os.SEEK_END)
        if end and os.pread(descriptor, 1, end - 1) != b"\n":  # a crash in the middle of a line
            os.write(descriptor, b"\n")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _tail(path: Path) -> list[str]:
    """Return the last whole lines of a file."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - (1 << 17))
        file.seek(start)
        lines = file.read().splitlines()[1 if start else 0 :]
    return [line.decode("ascii") for line in lines if line.startswith(b"{") and line.isascii()][-LINES:]


def _line(now_s: float, event: str, host: str, fields: Mapping[str, object]) -> str:
    """Format a line of at most LINE_BYTES with its newline; the last fields of a longer one are left out."""
    time = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    record: dict[str, object] = {"time": time, "event": event, "host": host}
    size = len(json.dumps(record)) + len(', "cut": true}\n')
    for count, (name, value) in enumerate(fields.items()):
        if not _NAME.fullmatch(name) or name in _OWN:
            name = f"field_{count}"  # noqa: PLW2901 - whatever its name, the field is kept
        plain = _WITHHELD if _SECRET.search(name) else _plain(value)
        size += len(json.dumps({name: plain}))
        if count >= _FIELDS or size > LINE_BYTES:
            record["cut"] = True
            break
        record[name] = plain
    return json.dumps(record)  # escapes all but ASCII: a client's name must not control a terminal


def _plain(value: object) -> str | int | float | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 63 else "(too large)"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return f"({type(value).__name__})"


def _clean(text: str) -> str:
    """Return text without keys and addresses, which clients may not read, cut to the maximum length."""
    whole = len(text) <= _SCANNED
    text = without_addresses(_KEY.sub(_WITHHELD, text[:_SCANNED].replace("\x7f", "?")))
    text = text if whole else text[:-40]  # a key may have been cut in two here
    return text if len(text) <= _TEXT else text[: _TEXT // 3] + " ... " + text[-(_TEXT * 2 // 3 - 5) :]
