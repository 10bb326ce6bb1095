"""Index of a tar archive, read from its headers: contents are not read.

Strict where Python's ``tarfile`` is lenient: a damaged header or a missing end is an error and not the end of the
archive, sizes are checked against the size of the file before anything of that size is read, and only files and folders
are allowed. Formats are those of POSIX.1-2017 (``pax``, "pax Interchange Format" and "ustar Interchange Format") and of
GNU tar (its manual, "Basic Tar Format": long names, sizes in base 256).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from onebox.errors import DataError
from onebox.feed.sources.formats.files import open_regular, read_part, unreadable

BLOCK_BYTES = 512
MAX_EXTENSION_BYTES = 1 << 20  # limit of a long name or of pax records, which have some hundred
NEAR_BYTES = 1 << 14  # headers nearer to each other than this are read together
WINDOW_BYTES = 1 << 18
COMPRESSED = {
    b"\x1f\x8b": "gzip -dk",
    b"BZh": "bzip2 -dk",
    b"\xfd7zXZ\x00": "xz -dk",
    b"\x28\xb5\x2f\xfd": "zstd -dk",
    b"\x04\x22\x4d\x18": "lz4 -dk",
}
"""First bytes of compressed files, and the programs that unpack them."""


class TarMember(NamedTuple):
    """A file in an archive: its name, the offset of its content in bytes, and the content's size."""

    name: str
    offset: int
    size_bytes: int


def members(path: Path) -> Iterator[TarMember]:
    """Yield the files in an archive, in its order; folders are ignored.

    Args:
        path: The archive, uncompressed.

    Raises:
        DataError: It cannot be read, is compressed or not an archive, is damaged or truncated, or contains a link or a
            device.
    """
    try:
        fd = open_regular(path)
        try:
            yield from _Scan(fd, path).members()
        finally:
            os.close(fd)
    except OSError as error:
        raise unreadable(path, error) from error


class _Scan:
    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._size_bytes = os.fstat(fd).st_size
        self._window = b""
        self._window_start = 0
        self._step = 0

    def members(self) -> Iterator[TarMember]:
        start = read_part(self._fd, BLOCK_BYTES, 0)
        for magic, tool in COMPRESSED.items():
            if start.startswith(magic):
                problem = f"{self._path} is compressed, and samples in it cannot be reached in any order"
                raise DataError(f"{problem}; unpack it first: {tool} {self._path.name}.", path=self._path)
        if len(start) < BLOCK_BYTES or (start != bytes(BLOCK_BYTES) and not _is_header(start)):
            raise self._damaged("it is no tar archive: it does not begin with a header")
        place, extended = 0, dict[str, str]()
        while (header := self._block(place)) != bytes(BLOCK_BYTES):
            if len(header) < BLOCK_BYTES:
                raise self._damaged(f"it is cut off at byte {place}: there is no end marker")
            if not _is_header(header):
                raise self._damaged(f"it has no valid header, and no end marker, at byte {place}")
            place = yield from self._member(header, place + BLOCK_BYTES, extended)

    def _member(self, header: bytes, place: int, extended: dict[str, str]) -> Generator[TarMember, None, int]:
        """Yield the member of a header, if it is a file, and return the offset of the next header."""
        kind = header[156:157]
        if kind in b"xgLK":
            size_bytes = self._number(header, header[:100])
            extended.update(self._extension(kind, place, size_bytes))
            return self._end(place, size_bytes)
        raw_name = header[:100].split(b"\0", 1)[0]
        prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
        name = extended.get("path") or _text(prefix + b"/" + raw_name if prefix else raw_name)
        size_bytes = int(extended["size"]) if "size" in extended else self._number(header, raw_name)
        extended.clear()
        if kind == b"5" or (kind == b"\0" and name.endswith("/")):
            return place
        if kind not in (b"0", b"\0", b"7"):
            raise self._bad(name, "is a link, a device or sparse; allowed are plain files. Pack them as such")
        if place + size_bytes > self._size_bytes:
            came = f"has {size_bytes} bytes, of which the archive holds {max(0, self._size_bytes - place)}"
            raise self._bad(name, f"{came}: it is cut off or damaged. Fetch it again")
        yield TarMember(name, place, size_bytes)
        return self._end(place, size_bytes)

    def _extension(self, kind: bytes, place: int, size_bytes: int) -> dict[str, str]:
        """Return the next member's ``path`` and ``size`` from an extended header."""
        if size_bytes > MAX_EXTENSION_BYTES:
            raise self._damaged(f"the extended header at byte {place} has {size_bytes} bytes")
        content = read_part(self._fd, size_bytes, place)
        if len(content) < size_bytes:
            raise self._damaged(f"it is cut off in the extended header at byte {place}")
        if kind in b"LK":
            return {"path": _text(content.split(b"\0", 1)[0])} if kind == b"L" else {}
        records = self._records(content, place)
        if any(key.startswith("GNU.sparse") for key in records):
            raise self._damaged(f"the member after byte {place} is sparse, which is not read. Pack it as a plain file")
        extended = {key: value for key, value in records.items() if key in ("path", "size")}
        if kind == b"g" and extended:
            raise self._damaged(f"the global header at byte {place} sets {', '.join(extended)} of all members")
        if not extended.get("size", "0").isdecimal() or len(extended.get("size", "")) > 18:
            raise self._damaged(f"the extended header at byte {place} has the size {extended['size'][:40]!r}")
        return extended

    def _records(self, content: bytes, place: int) -> dict[str, str]:
        """Parse the records of a pax header, each ``LENGTH KEY=VALUE`` and a newline."""
        records: dict[str, str] = {}
        while content.strip(b"\0"):
            length, _, _ = content[:20].partition(b" ")
            end = int(length) if length.isdigit() else 0
            key, equals, value = content[len(length) + 1 : end - 1].partition(b"=")
            if not equals or content[end - 1 : end] != b"\n":
                raise self._damaged(f"the extended header at byte {place} is no list of records")
            records[_text(key)] = _text(value)
            content = content[end:]
        return records

    def _number(self, header: bytes, name: bytes) -> int:
        field = header[124:136]
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        text = field.split(b"\0", 1)[0].strip()
        if text.strip(b"01234567"):
            raise self._bad(_text(name), f"has the size {text!r} in its header: it is damaged. Fetch it again")
        return int(text or b"0", 8)

    def _end(self, place: int, size_bytes: int) -> int:
        """Return the offset of the next header: content is padded to a whole block."""
        self._step = size_bytes
        return place + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def _block(self, place: int) -> bytes:
        begin = place - self._window_start
        if not 0 <= begin <= len(self._window) - BLOCK_BYTES:
            near = self._step <= NEAR_BYTES
            self._window = read_part(self._fd, WINDOW_BYTES if near else BLOCK_BYTES, place)
            self._window_start, begin = place, 0
        return self._window[begin : begin + BLOCK_BYTES]

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self._path} is damaged or no tar archive: {what}. Fetch it again.", path=self._path)

    def _bad(self, name: str, what: str) -> DataError:
        return DataError(f"{self._path}: member {name[:200]!r} {what}.", path=self._path, sample=name)


def _is_header(block: bytes) -> bool:
    """Return whether the checksum of a header is right: the sum of its bytes, its own field counted as spaces."""
    text = block[148:156].split(b"\0", 1)[0].strip()
    try:
        return int(text, 8) == sum(block) - sum(block[148:156]) + 8 * 0x20
    except ValueError:
        return False


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
