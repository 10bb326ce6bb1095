"""Numbers of bytes and of seconds as people write and read them, and the memory budgets of several devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onebox.errors import UsageError

_UNITS = {
    f"{letter}{end}": base**power
    for power, letter in enumerate(("", "k", "m", "g", "t"))
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)", re.ASCII)


def parse_size(what: str, text: str) -> int:
    """Turn ``2GiB``, ``512M`` or ``1000000`` into bytes; K, M, G and T are powers of 1024, KB and so on of 1000.

    Args:
        what: What has that size, for the message.
        text: What was written.

    Raises:
        UsageError: It is no size from one byte up.

    Example:
        >>> parse_size("memory", "1.5GiB")
        1610612736
    """
    match = _SIZE.fullmatch(text.strip().lower())
    size_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if not 1 <= size_bytes < 1 << 63:
        raise UsageError(f"{what} {text}: allowed are bytes from 1 up, such as 2GiB, 512MiB or 1000000")
    return size_bytes


def size_text(size_bytes: int) -> str:
    """Say a number of bytes as people do, in binary units.

    Example:
        >>> [size_text(size_bytes) for size_bytes in (100, 3 << 20, 25_276_514_304)]
        ['100 bytes', '3 MiB', '23.5 GiB']
    """
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.1f} GiB"
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes} bytes"


def bytes_text(size_bytes: int) -> str:
    """Format a number of bytes with three digits, in a suitable unit; whole bytes below one KiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            value = size_bytes / unit
            return f"{value:,.0f} {name}" if value >= 99.95 else f"{value:.3g} {name}"
    return f"{size_bytes} B"


def bit_rate_text(bytes_per_s: float) -> str:
    """Say a rate in bits per second, as those of networks are given.

    Example:
        >>> [bit_rate_text(rate) for rate in (1.2e6, 11.9e6, 117e6, 1.25e9)]
        ['9.6 Mbit/s', '95 Mbit/s', '936 Mbit/s', '10 Gbit/s']
    """
    mega = 8 * bytes_per_s / 1e6
    if mega >= 1e6:
        return "more than a Tbit/s"
    value, unit = (mega / 1e3, "Gbit/s") if mega >= 1e3 else (mega, "Mbit/s")
    return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"


def time_text(seconds: float) -> str:
    """Format a time with three significant digits, in microseconds, milliseconds or seconds."""
    for least, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= least * 0.9995:
            return f"{_digits(seconds / least)} {unit}"
    return "0 µs" if seconds < 5e-10 else f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def enough_text(size_bytes: int) -> str:
    """Say a number of bytes as :func:`size_text` does, but no smaller than it is.

    Example:
        >>> [enough_text(size_bytes) for size_bytes in (100, (3 << 20) + 1, 25_276_514_304)]
        ['100 bytes', '4 MiB', '23.6 GiB']
    """
    step = 2**30 / 10 if size_bytes >= 2**30 else 2**20 if size_bytes >= 2**20 else 1
    return size_text(round(math.ceil(size_bytes / step) * step))


Memory = int | str | Sequence[int | str] | Mapping[int, int | str]
"""Budgets as a user gives them; see :func:`parse_budgets`."""

_NUMBERED = re.compile(r"\s*(\d{1,4})\s*:(.*)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The most bytes that the buffers of each device of a pool may take.

    Args:
        every: Of each device; 0 for no limit.
        listed: Of the first, the second and so on, where they were listed; empty where not.
        own: Of devices by their numbers, where these were named; others have no limit then.
    """

    every: int = 0
    listed: tuple[int, ...] = ()
    own: Mapping[int, int] = field(default_factory=dict)

    @property
    def alike(self) -> bool:
        """True if all devices have the same budget."""
        return not self.listed and not self.own

    def of(self, count: int, whose: str = "the pool") -> tuple[int, ...]:
        """Return what each of some devices may take, in their order; 0 for no limit.

        Args:
            count: How many devices there are.
            whose: Who has them, for messages.

        Raises:
            UsageError: More or fewer budgets were listed, or one is of a device that is not there.
        """
        if self.listed and len(self.listed) != count:
            raise UsageError(
                f"memory of {len(self.listed)} devices, but {whose} has {count}: give one for all, or one for each, or "
                "name the devices, such as 0:2GiB"
            )
        beyond = [number for number in self.own if number >= count]
        if beyond:
            raise UsageError(f"memory of device {beyond[0]}, but {whose} has {count}, numbered from 0")
        return self.listed or tuple(self.own.get(number, self.every) for number in range(count))


def parse_budgets(what: str, memory: Memory | None) -> Budgets:
    """Read what each device may take.

    Args:
        what: What has that size, for messages.
        memory: Bytes, or text such as ``2GiB``, for each device; or one for each in their order, as a list or between
            commas, ``2GiB,4GiB``; or of some devices only by their numbers, ``{0: "2GiB"}`` or ``0:2GiB,3:1GiB``.
            ``None`` for no limit.

    Raises:
        UsageError: It is none of these, or less than a byte.

    Example:
        >>> parse_budgets("memory", "1KiB,2KiB").of(2)
        (1024, 2048)
        >>> parse_budgets("memory", "1:1KiB").of(3)
        (0, 1024, 0)
    """
    if memory is None:
        return Budgets()
    if isinstance(memory, str):
        parts = memory.split(",")
        named = [match for part in parts if (match := _NUMBERED.fullmatch(part))]
        if len(named) not in (0, len(parts)):
            raise UsageError(f"{what} {memory}: name all devices, as in 0:2GiB,1:4GiB, or none, as in 2GiB,4GiB")
        if len({int(match[1]) for match in named}) < len(named):
            raise UsageError(f"{what} {memory}: a device is named twice")
        memory = {int(match[1]): match[2] for match in named} or (parts if len(parts) > 1 else parts[0])
    if isinstance(memory, Mapping):
        own = {_number(what, number): _size(what, size) for number, size in memory.items()}
        if not own:
            raise UsageError(f"{what} {{}}: name a device, or leave it out for no limit")
        return Budgets(own=own)
    if isinstance(memory, int | str):
        return Budgets(every=_size(what, memory))
    if not isinstance(memory, Sequence) or isinstance(memory, bytes) or not memory:
        raise UsageError(f"{what} {memory!r}: allowed are bytes or text such as 2GiB, a list of them, or a mapping")
    return Budgets(listed=tuple(_size(what, size) for size in memory))


def _number(what: str, number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UsageError(f"{what} of device {number!r}: devices are numbered from 0")
    return number


def _size(what: str, size: int | str) -> int:
    if isinstance(size, str):
        return parse_size(what, size)
    if not isinstance(size, int) or isinstance(size, bool):
        raise UsageError(f"{what} {size!r}: allowed are whole bytes, or text such as 2GiB")
    return parse_size(what, str(size))
