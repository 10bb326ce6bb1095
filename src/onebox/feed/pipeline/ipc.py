"""Inter-process values: a structure encoded by msgspec, and tensors in shared memory.

A value is written into anonymous memory (``memfd_create(2)``) and the memory's descriptor is sent, whatever its size:
the data of tensors and arrays is copied once, and large tensors and arrays of the receiver use that memory. It is freed
with the last of them. Small ones are copied out, so that a caller who keeps the labels of all batches does not keep
their images in memory. Short bytes, such as the files of a batch of small pictures, are part of the structure: a system
call for each would cost more than the copy.

No code is sent. Classes are sent by name, and looked up among the dataclasses and named tuples of imported modules,
which are the same in a forked child.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from onebox.errors import UsageError

SHARED_BYTES = 1 << 16
"""Minimum size of a receiver's tensor that uses the shared memory, and of bytes outside of the structure."""

_ALIGN = 64
_VECTORS = 512  # buffers of a write; the system allows 1,024
_HEADER = struct.Struct("<QQ")  # bytes of the structure, and of everything
_PLAIN = (type(None), bool, int, float, str)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder()


def send(link: socket.socket, value: Any) -> None:
    """Send a value to the other end of a pair of sockets.

    Args:
        link: This end.
        value: None, numbers, text, bytes, CPU tensors and NumPy arrays, nested in lists, tuples, dictionaries,
            dataclasses and named tuples.

    Raises:
        UsageError: It contains another type. Nothing was sent.
        OSError: The other end is closed, or there is no memory.
    """
    packing = _Packing()
    text = _ENCODER.encode(packing.pack(value))
    begin = _aligned(len(text))
    total = begin + packing.size_bytes
    descriptor = os.memfd_create("onebox-feed", os.MFD_CLOEXEC)
    try:
        _write(descriptor, [memoryview(text), *packing.buffers], total)
        socket.send_fds(link, [_HEADER.pack(len(text), total)], [descriptor])
    finally:
        os.close(descriptor)


def receive(link: socket.socket) -> Any:
    """Receive a value from the other end.

    Raises:
        EOFError: The other end is closed.
    """
    try:
        header, descriptors, _, _ = socket.recv_fds(link, _HEADER.size, 1, socket.MSG_WAITALL)
    except ConnectionError as error:
        raise EOFError from error
    try:
        if len(header) < _HEADER.size or not descriptors:
            raise EOFError
        length, total = _HEADER.unpack(header)
        text = os.pread(descriptors[0], length, 0)
        return _Unpacking(descriptors[0], _aligned(length), total).unpack(_DECODER.decode(text))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class _Packing:
    """Converts a value to plain lists, and collects the data of its tensors.

    Attributes:
        buffers: The collected data, each padded to the beginning of the next.
        size_bytes: Total size of the buffers.
    """

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.size_bytes = 0

    def pack(self, value: Any) -> Any:
        """Convert a value to None, numbers, text, short bytes, and lists that begin with their type."""
        kind = type(value)
        if kind in _PLAIN:
            return ["int", hex(value)] if kind is int and not -(1 << 63) <= value < 1 << 64 else value
        if kind is bytes and len(value) < SHARED_BYTES:
            return value
        if kind is list or kind is tuple:
            return [kind.__name__, *map(self.pack, value)]
        if kind is dict:
            return ["dict", *(self.pack(each) for pair in value.items() for each in pair)]
        if kind is bytes or kind is bytearray:
            return [kind.__name__, *self._aside(memoryview(value))]
        if isinstance(value, Tensor):
            return self._pack_tensor(value)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.dtype.names is None:
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            where = self._aside(flat.data)
            return ["scalar" if isinstance(value, np.generic) else "array", value.dtype.str, list(value.shape), *where]
        fields = _fields(kind)
        if fields is not None and _class(kind.__module__, kind.__qualname__) is kind:
            return ["class", kind.__module__, kind.__qualname__, *(self.pack(getattr(value, each)) for each in fields)]
        raise _refusal(f"a {kind.__module__}.{kind.__qualname__}")

    def _pack_tensor(self, tensor: Tensor) -> list[Any]:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            raise _refusal(f"a {type(tensor).__name__} with layout {tensor.layout}")
        if tensor.device.type != "cpu" or tensor.requires_grad:
            raise _refusal(f"a tensor on {tensor.device}" if not tensor.requires_grad else "a tensor with a gradient")
        plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        where = self._aside(plain.numpy().data)
        return ["tensor", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), *where]

    def _aside(self, buffer: memoryview) -> tuple[int, int]:
        """Add a buffer; return its offset and size."""
        begin = self.size_bytes
        self.buffers.append(buffer)
        self.size_bytes += _aligned(buffer.nbytes)
        return begin, buffer.nbytes


class _Unpacking:
    """Restores a value from the output of :class:`_Packing`.

    Args:
        descriptor: The shared memory; may be closed afterwards.
        begin: Offset of the first buffer.
        total: End of the buffers.
    """

    def __init__(self, descriptor: int, begin: int, total: int) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._total = total
        self._map: mmap.mmap | None = None

    def unpack(self, packed: Any) -> Any:
        """Restore the value."""
        if not isinstance(packed, list):
            return packed
        kind, *rest = packed
        if kind == "list":
            return [self.unpack(each) for each in rest]
        if kind == "tuple":
            return tuple(self.unpack(each) for each in rest)
        if kind == "dict":
            parts = iter([self.unpack(each) for each in rest])
            return dict(zip(parts, parts, strict=True))
        if kind == "bytes":
            return self._bytes(*rest)
        if kind == "bytearray":
            return bytearray(self._bytes(*rest))
        if kind == "int":
            return int(rest[0], 16)
        if kind == "tensor":
            name, shape, *where = rest
            dtype = getattr(torch, name)
            buffer = self._buffer(*where)
            flat = torch.frombuffer(buffer, dtype=dtype) if buffer is not None else torch.empty(0, dtype=dtype)
            return flat.reshape(shape)
        if kind in ("array", "scalar"):
            name, shape, *where = rest
            buffer = self._buffer(*where)
            array = np.frombuffer(b"" if buffer is None else buffer, dtype=np.dtype(name)).reshape(shape)
            return array[()] if kind == "scalar" else array
        return self._unpack_class(*rest)

    def _unpack_class(self, module: str, name: str, *values: Any) -> Any:
        found = _class(module, name)
        fields = None if found is None else _fields(found)
        assert found is not None and fields is not None, "the sender has looked it up"
        made = dict(zip(fields, map(self.unpack, values), strict=True))
        if issubclass(found, tuple):
            return found(**made)
        value = object.__new__(found)  # restored as it was, without repeating its checks
        for field, each in made.items():
            object.__setattr__(value, field, each)
        return value

    def _bytes(self, offset: int, size_bytes: int) -> bytes:
        parts = []
        while size_bytes:
            part = os.pread(self._descriptor, size_bytes, self._begin + offset)
            if not part:
                raise EOFError
            parts.append(part)
            offset, size_bytes = offset + len(part), size_bytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _buffer(self, offset: int, size_bytes: int) -> Any:
        """Return writable bytes: small ones a copy, large ones the shared memory itself."""
        if size_bytes == 0:
            return None
        if size_bytes < SHARED_BYTES:
            return bytearray(self._bytes(offset, size_bytes))
        if self._map is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # map all pages at once: separate page faults cost more
            self._map = mmap.mmap(self._descriptor, self._total, flags=flags)
        return memoryview(self._map)[self._begin + offset : self._begin + offset + size_bytes]


def _fields(kind: type) -> tuple[str, ...] | None:
    """Return the field names of a dataclass or a named tuple; ``None`` for any other class."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return getattr(kind, "_fields", None) if issubclass(kind, tuple) else None


def _class(module: str, name: str) -> type | None:
    """Look up a dataclass or named tuple by its name."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and _fields(found) is not None else None


def _write(descriptor: int, buffers: list[memoryview], total: int) -> None:
    """Write buffers consecutively, each padded."""
    os.ftruncate(descriptor, total)
    offset = 0
    for vectors in _groups(buffers):
        while vectors:
            written = os.pwritev(descriptor, vectors, offset)
            offset += written
            while vectors and written >= vectors[0].nbytes:
                written -= vectors.pop(0).nbytes
            if vectors:
                vectors[0] = vectors[0][written:]


def _groups(buffers: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the buffers and their padding, in lists for one write each."""
    padded: list[memoryview] = []
    for buffer in buffers:
        padding = _aligned(buffer.nbytes) - buffer.nbytes
        padded += [each for each in (buffer.cast("B") if buffer.nbytes else buffer, _ZEROS[:padding]) if each.nbytes]
    for begin in range(0, len(padded), _VECTORS):
        yield padded[begin : begin + _VECTORS]


_ZEROS = memoryview(bytes(_ALIGN))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN) * _ALIGN


def _refusal(what: str) -> UsageError:
    allowed = "None, numbers, text, bytes, CPU tensors without gradients and NumPy arrays, in lists, tuples, "
    allowed += "dictionaries, and dataclasses or named tuples of a module"
    return UsageError(f"{what} cannot go between processes; allowed are {allowed}. Or use threads.")
