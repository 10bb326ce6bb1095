"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re

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
