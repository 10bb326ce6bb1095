"""Memory shared by the processes of one host, with words to sleep on.

The memory is anonymous (``memfd``): nothing is left behind, however the processes end. Its address range is far larger
than its use, because a page takes memory only once it is written; so it never has to grow, every process maps it once,
and written data stays readable for processes that have mapped it even after the writer has ended.

A writer fills memory first and then sets a word; a reader checks the word first. That suffices if stores become visible
in order, as on x86-64; other processors would need barriers, so they are not supported.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import platform
import weakref

import torch
from torch import Tensor

from onebox.wire import DTYPES, TensorSpec
from onebox.worker.comm.api import RankLost

SPAN_BYTES = 1 << 36
"""Address space of one memory: more than the main memory of most hosts, and 2,000 of them fit into a process."""

SLICE_S = 0.1
"""Interval at which a wait checks that the other process is alive."""

LEAST_BYTES = 1 << 26
"""Smallest size of a memory."""

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_FUTEX = 202  # the number of the system call on x86-64
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
_MADV_REMOVE = 9


def supported() -> bool:
    """Return whether this system is supported: Linux on x86-64."""
    return platform.machine() == "x86_64" and hasattr(os, "memfd_create")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_futex = _libc.syscall
_futex.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
)
_slice = _Timespec(0, int(SLICE_S * 1e9))


class SharedMemory:
    """Memory that other processes of this user can map; its pages are freed when no process maps it any more.

    Args:
        descriptor: A descriptor of it; held until :meth:`seal`.
        size: Bytes, a multiple of 8.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor: int | None = descriptor
        try:
            self.map = _map(descriptor, size)
        except OSError:
            self.seal()
            raise
        self.words = memoryview(self.map).cast("B").cast("q")
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = ctypes.addressof(self.map)

    @classmethod
    def make(cls) -> SharedMemory:
        """Create memory, smaller than :data:`SPAN_BYTES` if the address space of this process is limited."""
        size = SPAN_BYTES
        while True:
            descriptor = os.memfd_create("onebox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, size)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            except OSError:
                os.close(descriptor)
                raise
            try:
                return cls(descriptor, size)
            except OSError:
                if size <= LEAST_BYTES:
                    raise
                size //= 4

    @property
    def descriptor(self) -> int:
        """Descriptor for mapping it in other processes, until it is sealed."""
        assert self._descriptor is not None
        return self._descriptor

    def elements(self, spec: TensorSpec, offset: int) -> Tensor:
        """Return the elements of a tensor that lies at an offset, flat."""
        count, dtype = math.prod(spec.shape), DTYPES[spec.dtype]
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=offset)

    @property
    def inode(self) -> int:
        """Identifies it among all memories of this host, until it is sealed."""
        return os.fstat(self.descriptor).st_ino

    @classmethod
    def of(cls, descriptor: int, size: int) -> SharedMemory:
        """Map the memory of another process by a descriptor received from it, which is closed.

        Raises:
            RankLost: It is smaller than declared, or could become so.
        """
        # Access to a page beyond its end would end this process.
        if os.fstat(descriptor).st_size < size or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            os.close(descriptor)
            raise RankLost(f"a memory of fewer than {size} bytes, or not for good, came from another worker")
        memory = cls(descriptor, size)
        memory.seal()
        return memory

    def seal(self) -> None:
        """Prevent further processes from mapping it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def publish(self, word: int, value: int) -> None:
        """Set a word after all earlier writes, and wake its sleepers."""
        self.words[word] = value
        self.wake(word)

    def wake(self, word: int) -> None:
        """Wake the sleepers on a word."""
        self._call(word, _WAKE, _ALL, None)

    def sleep(self, word: int, value: int) -> bool:
        """Sleep while a word has a value, for :data:`SLICE_S` at most; return whether the sleep timed out."""
        # The kernel compares the low half of the word.
        return self._call(word, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(_slice)) == errno.ETIMEDOUT

    def _call(self, word: int, action: int, value: int, timeout: int | None) -> int:
        if _futex(_FUTEX, self.address + 8 * word, action, value, timeout, None, 0) >= 0:
            return 0
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return code

    def discard(self, offset: int, size: int) -> None:
        """Return the pages of a range to the system; later reads return zeros."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            _libc.madvise(self.address + first, last - first, _MADV_REMOVE)  # the pages stay if this is refused


def _map(descriptor: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """Map memory for the lifetime of the returned object; unlike Python's own mapping, without a descriptor."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    mapped = (ctypes.c_char * size).from_address(address)
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    return mapped
