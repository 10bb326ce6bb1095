"""Sums over workers of one host through shared memory: no sockets, no threads, and one wait at the end.

Each rank publishes its part of a bucket by copying it into memory that the others map, and adds up all parts itself, in
the order of the ranks, so that every rank gets the same bits. For n ranks a bucket of S bytes costs each rank one copy
and one sum of n parts; Gloo over loopback copies it through the kernel twice in each direction
(``benchmarks/scaling.py``).

The memory is anonymous (``memfd``): nothing is left behind, whatever happens to the processes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALIGN = 64
_FIRST_BYTES = 1 << 20
_SLICE_S = 0.1
"""A wait looks this often whether a peer has left."""

_PUBLISHED, _DONE, _LEFT = 0, 16, 32
"""Words of a rank's control page, each in a cache line of its own: buckets published, buckets done, has left."""


class Store(Protocol):
    """What is needed of a group's key-value store."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""


class PeerLeft(RuntimeError):
    """A rank has left, or did not come in time."""


def supported() -> bool:
    """Tell whether this system has what is needed: Linux on a known processor."""
    return _FUTEX is not None and hasattr(os, "memfd_create")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Memory:
    """Memory that other processes of this user can map.

    Args:
        descriptor: A descriptor of it; closed with the memory.
        size: Bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.map = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.words = np.frombuffer(self.map, dtype=np.int32)

    @classmethod
    def make(cls, size: int) -> _Memory:
        """Make new memory."""
        descriptor = os.memfd_create("onebox", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        return cls(descriptor, size)

    @classmethod
    def of(cls, name: str) -> _Memory:
        """Map the memory that another process has named."""
        process, descriptor, size, inode = (int(part) for part in name.split(":"))
        try:
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLeft(f"process {process} has closed its memory: {error}") from error
        if os.fstat(opened).st_ino != inode:
            os.close(opened)
            raise PeerLeft(f"process {process} has closed its memory")
        return cls(opened, size)

    @property
    def name(self) -> str:
        """A name under which other processes can map it."""
        return f"{os.getpid()}:{self.descriptor}:{len(self.map)}:{os.fstat(self.descriptor).st_ino}"

    def wait(self, word: int, value: int) -> None:
        """Sleep while a word has a value, for a short while at most."""
        timeout = _Timespec(0, int(_SLICE_S * 1e9))
        self._futex(word, _WAIT, value, ctypes.byref(timeout))

    def set(self, word: int, value: int) -> None:
        """Set a word, after all that was written before, and wake who sleeps on it."""
        self.words[word] = value
        self._futex(word, _WAKE, 1 << 30, None)

    def _futex(self, word: int, action: int, value: int, timeout: object) -> None:
        address = ctypes.c_void_p(self.words.ctypes.data + 4 * word)
        result = _libc.syscall(_FUTEX, address, action, ctypes.c_int(value), timeout, None, 0)
        code = ctypes.get_errno()
        if result < 0 and code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last tensor over it."""
        os.close(self.descriptor)


_libc = ctypes.CDLL(None, use_errno=True)


class SharedReducer:
    """Sums buckets over the ranks of a group on one host.

    All ranks call :meth:`reduce` for the same buckets in the same order.

    Args:
        store: Of the group.
        rank: This rank.
        size: How many ranks.
        timeout_s: Bound of every wait.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._generation = 0
        self._control = self._exchange("control", mmap.PAGESIZE)
        self._arena: list[_Memory] = []
        self._retired: list[_Memory] = []
        self._offset = 0
        self._published = 0
        self._open: set[int] = set()

    def reduce(self, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Publish tensors of one type; return what waits for the others' and returns the flat sum."""
        self._published += 1
        order = self._published
        counts = [tensor.numel() for tensor in tensors]
        dtype = tensors[0].dtype
        size = sum(counts) * tensors[0].element_size()
        arena, offset = self._place(size)
        parts = [memory.bytes[offset : offset + size].view(dtype) for memory in arena]
        for target, tensor in zip(parts[self._rank].split(counts), tensors, strict=True):
            target.copy_(tensor.reshape(-1))
        self._open.add(order)
        self._control[self._rank].set(_PUBLISHED, order)

        def finish() -> Tensor:
            for rank in range(self._size):
                self._await(rank, _PUBLISHED, order)
            total = parts[0] + parts[1] if self._size > 1 else parts[0].clone()
            for part in parts[2:]:
                total += part
            parts.clear()
            self._open.discard(order)
            done = min(self._open, default=self._published + 1) - 1
            self._control[self._rank].set(_DONE, done)
            return total

        return finish

    def leave(self) -> None:
        """Tell the others that this rank is gone, and let go of the memory."""
        self._control[self._rank].set(_LEFT, 1)
        for memory in (*self._control, *self._arena, *self._retired):
            memory.close()
        self._control, self._arena, self._retired = [], [], []

    def _place(self, size: int) -> tuple[list[_Memory], int]:
        """Return where the next bucket goes; when no bucket is open the memory is used from its beginning again."""
        if not self._open:
            for rank in range(self._size):
                self._await(rank, _DONE, self._published - 1)
            self._offset = 0
            self._discard()
        offset = self._offset
        self._offset += -(-size // _ALIGN) * _ALIGN
        capacity = len(self._arena[0].map) if self._arena else 0
        if self._offset > capacity or not self._arena:
            self._retired += self._arena  # a slower rank may still be about to map them
            wanted = max(_FIRST_BYTES, 2 * self._offset)
            self._arena = self._exchange(f"arena{self._generation}", wanted)
            self._generation += 1
        return self._arena, offset

    def _discard(self) -> None:
        """Let go of the memory that has become too small; every rank has mapped it by now."""
        for memory in self._retired:
            memory.close()
        self._retired.clear()

    def _exchange(self, what: str, size: int) -> list[_Memory]:
        """Make memory, name it to the others, and map theirs."""
        mine = _Memory.make(size)
        self._store.set(f"shared/{what}/{self._rank}", mine.name)
        return [
            mine if rank == self._rank else _Memory.of(self._store.get(f"shared/{what}/{rank}").decode())
            for rank in range(self._size)
        ]

    def _await(self, rank: int, word: int, order: int) -> None:
        """Wait until a rank's word has come to an order.

        Raises:
            PeerLeft: The rank has left, or did not come in time.
        """
        if not self._control:
            raise PeerLeft("the group has been left")
        memory = self._control[rank]
        end_s = time.monotonic() + self._timeout_s
        while True:
            value = int(memory.words[word])
            if value >= order:
                return
            if memory.words[_LEFT]:
                raise PeerLeft(f"rank {rank} has left the group")
            if time.monotonic() > end_s:
                raise PeerLeft(f"rank {rank} did not come within {self._timeout_s:.0f} s")
            memory.wait(word, value)
