"""The time of a script by its parts: waits of its lines for values, uploads, and the work of its devices. Pure.

All times are arguments, in nanoseconds on the clock of ``time.monotonic_ns``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LINES = 1 << 12
"""The most lines whose waits are told apart."""


class ScriptLine(NamedTuple):
    """A line of a script.

    Args:
        file: Its file.
        number: Its number in the file.
    """

    file: str
    number: int


class LineWaits(NamedTuple):
    """The waits of a line.

    Args:
        line: The line.
        waits: Their number.
        waited_s: Seconds of all of them.
    """

    line: ScriptLine
    waits: int
    waited_s: float


class DeviceBusy(NamedTuple):
    """A device that a script has used.

    Args:
        name: Its name in the script.
        busy_s: Seconds for which it has worked.
        waited_s: Seconds for which it has waited for other devices.
    """

    name: str
    busy_s: float
    waited_s: float = 0.0

    def since(self, before: DeviceBusy | None) -> DeviceBusy:
        """Return what has come since an earlier time."""
        if before is None:
            return self
        return DeviceBusy(self.name, self.busy_s - before.busy_s, self.waited_s - before.waited_s)


@dataclass(frozen=True, kw_only=True)
class ScriptFigures:
    """The time of a script since it first used a device, by its parts.

    What several threads wait for at the same time counts once, except for their lines.

    Args:
        elapsed_s: The time.
        reading_s: The part in which it waited for values, or for a device.
        ahead_s: The part in which it waited because it was too far ahead of its devices.
        uploading_s: The part in which it copied what it uploaded, or waited while nothing but uploads went on.
        upload_bytes: The bytes that it uploaded.
        devices: The devices that it has used.
        lines: The lines that waited for values, the longest wait first.
    """

    elapsed_s: float = 0.0
    reading_s: float = 0.0
    ahead_s: float = 0.0
    uploading_s: float = 0.0
    upload_bytes: int = 0
    devices: tuple[DeviceBusy, ...] = ()
    lines: tuple[LineWaits, ...] = ()

    @property
    def own_s(self) -> float:
        """The rest: what the script itself did."""
        return max(0.0, self.elapsed_s - self.reading_s - self.ahead_s - self.uploading_s)

    def share(self, part_s: float) -> float:
        """Return a part of the time as a share of it, 0 to 1."""
        return min(1.0, part_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0

    def since(self, before: ScriptFigures) -> ScriptFigures:
        """Return the figures of the time since earlier ones."""
        waits = {each.line: each for each in before.lines}
        earlier = {each.name: each for each in before.devices}
        lines = (
            LineWaits(line, count - waits[line].waits, waited_s - waits[line].waited_s)
            if line in waits
            else LineWaits(line, count, waited_s)
            for line, count, waited_s in self.lines
        )
        return ScriptFigures(
            elapsed_s=self.elapsed_s - before.elapsed_s,
            reading_s=max(0.0, self.reading_s - before.reading_s),
            ahead_s=max(0.0, self.ahead_s - before.ahead_s),
            uploading_s=max(0.0, self.uploading_s - before.uploading_s),
            upload_bytes=self.upload_bytes - before.upload_bytes,
            devices=tuple(each.since(earlier.get(each.name)) for each in self.devices),
            lines=_longest_first(each for each in lines if each.waits),
        )


class ScriptTime:
    """Adds up where the time of a script goes; for any threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun_ns = 0
        self._waiting = 0  # threads that wait
        self._since_ns = 0  # when the first of them began
        self._waited_ns = 0  # in which at least one thread waited
        self._reading_ns = self._ahead_ns = self._arriving_ns = 0  # of all threads together
        self._copying_ns = self._upload_bytes = 0
        self._lines: dict[ScriptLine, tuple[int, int]] = {}

    def begin(self, now_ns: int) -> None:
        """Begin to count, with the first use of a device."""
        self._begun_ns = self._begun_ns or now_ns

    def begin_wait(self, now_ns: int) -> None:
        """Note that a thread begins to wait."""
        with self._lock:
            if not self._waiting:
                self._since_ns = now_ns
            self._waiting += 1

    def end_wait(
        self, line: ScriptLine | None, since_ns: int, now_ns: int, *, arriving_ns: int = 0, ahead: bool = False
    ) -> None:
        """Note that a thread has waited.

        Args:
            line: The line of the script that did; ``None`` for none of it.
            since_ns: When it began.
            now_ns: The time.
            arriving_ns: The part of the wait in which the device waited, too, for uploads.
            ahead: Whether the thread was too far ahead, and did not wait for a value.
        """
        took_ns = now_ns - since_ns
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._waited_ns += now_ns - self._since_ns
            self._arriving_ns += arriving_ns
            if ahead:
                self._ahead_ns += took_ns - arriving_ns
                return
            self._reading_ns += took_ns - arriving_ns
            if line is not None and (line in self._lines or len(self._lines) < LINES):
                count, waited_ns = self._lines.get(line, (0, 0))
                self._lines[line] = count + 1, waited_ns + took_ns

    def uploaded(self, size_bytes: int, took_ns: int) -> None:
        """Note that a thread has copied what it uploads."""
        with self._lock:
            self._upload_bytes += size_bytes
            self._copying_ns += took_ns

    def figures(self, now_ns: int, devices: Sequence[DeviceBusy] = ()) -> ScriptFigures:
        """Return the figures up to a time.

        Args:
            now_ns: The time.
            devices: The devices that the script has used.
        """
        with self._lock:
            going_ns = now_ns - self._since_ns if self._waiting else 0
            waited_ns = self._waited_ns + going_ns
            reading_ns, ahead_ns, arriving_ns = self._reading_ns + going_ns, self._ahead_ns, self._arriving_ns
            lines = [LineWaits(line, count, each_ns / 1e9) for line, (count, each_ns) in self._lines.items()]
            copying_ns, upload_bytes = self._copying_ns, self._upload_bytes
        whole_ns = reading_ns + ahead_ns + arriving_ns
        once = waited_ns / whole_ns / 1e9 if whole_ns else 0.0
        return ScriptFigures(
            elapsed_s=(now_ns - self._begun_ns) / 1e9 if self._begun_ns else 0.0,
            reading_s=reading_ns * once,
            ahead_s=ahead_ns * once,
            uploading_s=arriving_ns * once + copying_ns / 1e9,
            upload_bytes=upload_bytes,
            devices=tuple(devices),
            lines=_longest_first(lines),
        )


def _longest_first(lines: Iterable[LineWaits]) -> tuple[LineWaits, ...]:
    return tuple(sorted(lines, key=lambda each: -each.waited_s))
