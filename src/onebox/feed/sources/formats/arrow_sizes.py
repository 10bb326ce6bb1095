"""Unpacked sizes of compressed batches in Arrow's files and streams.

A compressed buffer begins with its unpacked size, which Arrow allocates. The format is Apache Arrow's ("Serialization
and Interprocess Communication"), its metadata are flatbuffers, which pyarrow has verified when it returns a message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from onebox.extras import import_extra

_READING = "Reading Arrow files"
_DICTIONARY, _BATCH = 2, 3  # types of messages
_COMPRESSION = 3  # field of a batch
_TAIL_BYTES = 10  # the length of the footer, and the magic bytes


def stream_sizes(content: Any) -> tuple[int, list[int]]:
    """Return the unpacked bytes of all compressed dictionaries of a stream, and of each of its batches.

    Args:
        content: The stream, as a buffer of pyarrow's.

    Raises:
        ValueError: It is damaged.
    """
    pa = import_extra("pyarrow", _READING)
    return _sizes(pa.ipc.MessageReader.open_stream(pa.BufferReader(content)))


def file_sizes(content: Any) -> tuple[int, list[int]]:
    """Return the unpacked bytes of all compressed dictionaries of a file, and of each of its batches.

    Args:
        content: The file, as a buffer of pyarrow's.

    Raises:
        ValueError: It is damaged.
    """
    pa = import_extra("pyarrow", _READING)
    view = memoryview(content)
    footer_bytes = _Table.integer(view, len(view) - _TAIL_BYTES, "<i")
    footer = _Table.root(view[len(view) - _TAIL_BYTES - footer_bytes : len(view) - _TAIL_BYTES])

    def messages() -> Iterator[Any]:
        for field in (2, 3):
            for offset, metadata_bytes, body_bytes in footer.structs(field, "<qi4xq"):
                if not 0 <= offset <= len(view) or metadata_bytes < 0 or body_bytes < 0:
                    raise ValueError(f"its footer names a batch at byte {offset}")
                yield pa.ipc.read_message(content.slice(offset, metadata_bytes + body_bytes))

    return _sizes(messages())


def _sizes(messages: Iterator[Any]) -> tuple[int, list[int]]:
    dictionary_bytes, batches = 0, list[int]()
    for message in messages:
        header = _Table.root(memoryview(message.metadata))
        kind, inner = header.number(1, "<B"), header.table(2)
        if inner is not None and kind == _DICTIONARY:
            data = inner.table(1)
            dictionary_bytes += 0 if data is None else _unpacked(data, message)
        elif inner is not None and kind == _BATCH:
            batches.append(_unpacked(inner, message))
    return dictionary_bytes, batches


def _unpacked(batch: _Table, message: Any) -> int:
    """Return the unpacked bytes of the compressed buffers of a batch; others are used in the file."""
    if batch.table(_COMPRESSION) is None:
        return 0
    body = memoryview(b"" if message.body is None else message.body)
    total = 0
    for offset, length in batch.structs(2, "<qq"):
        unpacked = _Table.integer(body, offset, "<q") if length else 0
        if length < 0 or unpacked < -1:
            raise ValueError(f"a buffer has {length} bytes, and {unpacked} unpacked")
        total += max(0, unpacked)  # -1: it is not compressed
    return total


class _Table:
    """A table of a flatbuffer.

    Args:
        content: The flatbuffer.
        place: Offset of the table.
    """

    def __init__(self, content: memoryview, place: int) -> None:
        self._content = content
        self._place = place
        self._index = place - self.integer(content, place, "<i")
        self._index_bytes = self.integer(content, self._index, "<H")

    @classmethod
    def root(cls, content: memoryview) -> _Table:
        """Return the first table."""
        return cls(content, cls.integer(content, 0, "<I"))

    @staticmethod
    def integer(content: memoryview, place: int, kind: str) -> int:
        """Return a number.

        Raises:
            ValueError: It is not within the content.
        """
        if not 0 <= place <= len(content) - struct.calcsize(kind):
            raise ValueError(f"it refers to byte {place} of {len(content)}")
        return int(struct.unpack_from(kind, content, place)[0])

    def number(self, field: int, kind: str) -> int:
        """Return a field that is a number, 0 if it is not there."""
        place = self._field(field)
        return self.integer(self._content, place, kind) if place else 0

    def table(self, field: int) -> _Table | None:
        """Return a field that is a table."""
        place = self._field(field)
        return _Table(self._content, place + self.integer(self._content, place, "<I")) if place else None

    def structs(self, field: int, kind: str) -> Iterator[tuple[int, ...]]:
        """Yield the elements of a field that is a list of structures."""
        place = self._field(field)
        if not place:
            return
        place += self.integer(self._content, place, "<I")
        count, size = self.integer(self._content, place, "<I"), struct.calcsize(kind)
        if place + 4 + count * size > len(self._content):
            raise ValueError(f"it has a list of {count} elements")
        for number in range(count):
            yield struct.unpack_from(kind, self._content, place + 4 + number * size)

    def _field(self, field: int) -> int:
        """Return the offset of a field; 0 if it is not there."""
        place = 4 + 2 * field
        offset = self.integer(self._content, self._index + place, "<H") if place < self._index_bytes else 0
        return self._place + offset if offset else 0
