"""Bounds of what the pages of a Parquet file become when they are decoded, from the headers of the pages themselves.

The sizes in the file's metadata may be wrong, and do not tell what a dictionary or a run expands to: one value of a
megabyte that a hundred thousand rows name takes a few hundred bytes. The format is Apache Parquet's, its headers are
Thrift's ("Thrift Compact protocol encoding").
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onebox.extras import import_extra
from onebox.feed.sources.formats.files import open_regular, read_part

_HEADER_BYTES, _MOST_HEADER_BYTES = 1 << 9, 1 << 20  # first read of a page's header, and its limit
_DEPTH = 8
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # types of pages
_WHOLE = (0, 6)  # encodings that hold each byte of a text: plain, and lengths before all texts, which are packed
_BY_DICTIONARY = (2, 8)
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_DECIMAL_BYTES = 32
_PLACE_BYTES = 8  # of a list's place among the values, and whether it is there
_LENGTH_BYTES = 4  # of a text
_DELTA_LENGTHS = 6


class ColumnBounds(NamedTuple):
    """Bounds of a column of a row group.

    Args:
        unpacked_bytes: Bytes of its pages, decompressed but not decoded.
        decoded_bytes: Most bytes of its values.
        value_bytes: Most bytes of one of the values that may take less in the file; 0 if there are none.
        repeated: Whether a row may have many values.
    """

    unpacked_bytes: int
    decoded_bytes: int
    value_bytes: int
    repeated: bool


class _Page(NamedTuple):
    kind: int
    start: int
    packed_bytes: int
    unpacked_bytes: int
    values: int
    encoding: int


def column_bounds(path: Path, metadata: Any, group: int, names: Sequence[str] | None) -> list[ColumnBounds]:
    """Return the bounds of the columns of a row group.

    Args:
        path: The file.
        metadata: Its metadata, as pyarrow's.
        group: The row group.
        names: Names of columns of the table; all by default.

    Raises:
        ValueError: The file is damaged.
        OSError: It cannot be read.
    """
    found: list[ColumnBounds] = []
    row_group = metadata.row_group(group)
    fd = open_regular(path)
    try:
        for number in range(row_group.num_columns):
            chunk = row_group.column(number)
            name = chunk.path_in_schema
            if names is None or any(name == each or name.startswith(f"{each}.") for each in names):
                found.append(_bounds(fd, chunk, metadata.schema.column(number)))
    finally:
        os.close(fd)
    return found


def _bounds(fd: int, chunk: Any, column: Any) -> ColumnBounds:
    pages = _pages(fd, chunk)
    unpacked_bytes = sum(page.unpacked_bytes for page in pages)
    repeated = column.max_repetition_level > 0
    data = [page for page in pages if page.kind != _DICTIONARY]
    values = sum(page.values for page in data)
    places_bytes = values // 8 + values * _PLACE_BYTES * column.max_repetition_level
    if chunk.physical_type != "BYTE_ARRAY":
        width = _WIDTHS.get(chunk.physical_type, column.length)
        width = _DECIMAL_BYTES if column.logical_type.type == "DECIMAL" else width
        return ColumnBounds(unpacked_bytes, values * width + places_bytes, width, repeated)
    whole_bytes = sum(page.unpacked_bytes for page in data if page.encoding in _WHOLE)
    whole_bytes += sum(page.values for page in data if page.encoding == _DELTA_LENGTHS) * _LENGTH_BYTES
    coded = [page for page in data if page.encoding not in _WHOLE]
    longest_bytes = 0
    if any(page.encoding in _BY_DICTIONARY for page in coded):
        longest_bytes = max((_longest(fd, chunk, page) for page in pages if page.kind == _DICTIONARY), default=0)
    others = [page.unpacked_bytes for page in coded if page.encoding not in _BY_DICTIONARY]
    longest_bytes = max([longest_bytes, *others])  # a value is no longer than the page in which others begin like it
    coded_bytes = sum(page.values for page in coded) * (longest_bytes + _LENGTH_BYTES)
    return ColumnBounds(unpacked_bytes, whole_bytes + coded_bytes + places_bytes, longest_bytes, repeated)


def _pages(fd: int, chunk: Any) -> list[_Page]:
    """Return the pages of a column of a row group."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    end = start + chunk.total_compressed_size
    if start < 0 or end > os.fstat(fd).st_size:
        raise ValueError(f"column {chunk.path_in_schema} is said to end at byte {end}")
    pages: list[_Page] = []
    while start < end:
        header, header_bytes = _header(fd, start)
        page = _page(header, start + header_bytes)
        if page.packed_bytes < 0 or page.unpacked_bytes < 0 or page.values < 0:
            raise ValueError(f"the page at byte {start} has a negative size")
        start = page.start + page.packed_bytes
        pages.append(page)
    if start != end:
        raise ValueError(f"the last page of column {chunk.path_in_schema} ends at byte {start}, and not at {end}")
    return pages


def _page(header: dict[int, Any], start: int) -> _Page:
    kind = header.get(1)
    place = {_DATA: (5, 1, 2), _DICTIONARY: (7, 1, 2), _DATA_V2: (8, 1, 4)}.get(kind if isinstance(kind, int) else -1)
    inner = header.get(place[0]) if place else None
    numbers: list[Any] = [header.get(2), header.get(3)]
    numbers += [inner.get(place[1]), inner.get(place[2])] if place and isinstance(inner, dict) else []
    if place is None or len(numbers) < 4 or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"the page before byte {start} has no valid header")
    unpacked_bytes, packed_bytes, values, encoding = numbers
    assert isinstance(kind, int)
    return _Page(kind, start, packed_bytes, unpacked_bytes, values, encoding)


def _longest(fd: int, chunk: Any, page: _Page) -> int:
    """Return the bytes of the longest text of a dictionary, at most those of its page."""
    content = read_part(fd, page.packed_bytes, page.start)
    if chunk.compression != "UNCOMPRESSED":
        try:
            name = {"LZ4": "lz4_raw"}.get(chunk.compression, chunk.compression.lower())
            codec = import_extra("pyarrow", "Reading Parquet files").Codec(name)
            content = codec.decompress(content, decompressed_size=page.unpacked_bytes, asbytes=True)
        except (ValueError, OSError):  # of a kind of compression that is read nowhere else
            return page.unpacked_bytes
    longest = place = 0
    while place + 4 <= len(content):
        size = int.from_bytes(content[place : place + 4], "little")
        longest, place = max(longest, size), place + 4 + size
    return min(longest, page.unpacked_bytes)


# ---- Thrift


def _header(fd: int, start: int) -> tuple[dict[int, Any], int]:
    """Return the header of a page, and its length."""
    size = _HEADER_BYTES
    while True:
        part = read_part(fd, size, start)
        try:
            reader = _Compact(part)
            return reader.struct(), reader.place
        except IndexError:
            if len(part) < size or size >= _MOST_HEADER_BYTES:
                raise ValueError(f"the header of the page at byte {start} does not end") from None
            size *= 4


class _Compact:
    """A reader of Thrift's compact protocol that keeps whole numbers, and structures of them.

    Args:
        content: What is read; :class:`IndexError` is raised where it ends too soon.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.place = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Read a structure: its fields by their numbers."""
        found: dict[int, Any] = {}
        field = 0
        while (head := self._byte()) != 0:
            field = field + (head >> 4) if head >> 4 else self._signed()
            found[field] = self._value(head & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEPTH:
            raise ValueError("a header of a page is nested too deeply")
        if kind in (1, 2):  # a boolean
            return kind == 1
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (9, 10):
            self._list(depth)
        elif kind in (3, 7, 8):  # a byte, a float, a text
            self._skip({3: 1, 7: 8}.get(kind) or self._number())
        else:
            raise ValueError(f"a header of a page has a field of type {kind}")
        return None

    def _list(self, depth: int) -> None:
        head = self._byte()
        count = self._number() if head >> 4 == 15 else head >> 4
        for _ in range(count):
            if head & 15 in (1, 2):
                self._skip(1)
            else:
                self._value(head & 15, depth + 1)

    def _byte(self) -> int:
        self.place += 1
        return self._content[self.place - 1]

    def _skip(self, count: int) -> None:
        self.place += count
        if self.place > len(self._content):
            raise IndexError

    def _number(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
            if shift > 63:
                raise ValueError("a number in a header of a page does not end")

    def _signed(self) -> int:
        number = self._number()
        return (number >> 1) ^ -(number & 1)
