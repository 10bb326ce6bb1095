"""Memory that the processes of one host share, with words in it that they sleep on.

The memory is anonymous (``memfd``): nothing is left behind, whatever happens to the processes. It is far larger than
what is used of it, because a page takes room only once it is written to; so it never has to grow, every process maps it
once, and what was written stays readable for those who have mapped it even when the writer has gone.

A writer fills memory first and then sets a word that says so; a reader looks at the word first. That is enough where
stores become visible in their order, as on x86-64; other processors would need barriers, so they are not supported.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import weakref

import torch

from onebox.worker.comm.api import RankLost

SPAN_BYTES = 1 << 36
"""Address space of one memory: more than the main memory of most hosts, and 2,000 of them fit into a process."""

SLICE_S = 0.1
"""A wait looks this often whether the other process is still there."""

LEAST_BYTES = 1 << 26
"""No memory is smaller."""

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_FUTEX = 202  # the number of the system call on x86-64
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
_MADV_REMOVE = 9


def supported() -> bool:
    """Tell whether this system has what is needed: Linux on x86-64."""
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
    """Memory that other processes of this user can map; its pages go when nobody has it mapped any more.

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
        """Make new memory, smaller than :data:`SPAN_BYTES` where the address space of this process is limited."""
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
        """The descriptor that other processes map it by, until it is sealed."""
        assert self._descriptor is not None
        return self._descriptor

    @property
    def inode(self) -> int:
        """What tells it from all other memories of this host, until it is sealed."""
        return os.fstat(self.descriptor).st_ino

    @classmethod
    def of(cls, descriptor: int, size: int) -> SharedMemory:
        """Map the memory of another process by a descriptor that came from there, which is closed.

        Raises:
            PeerLost: It is smaller than was said, or could become so.
        """
        # A page beyond its end would end this process.
        if os.fstat(descriptor).st_size < size or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            os.close(descriptor)
            raise RankLost(f"a memory of fewer than {size} bytes, or not for good, came from another worker")
        memory = cls(descriptor, size)
        memory.seal()
        return memory

    def seal(self) -> None:
        """Let nobody else map it from now on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def publish(self, word: int, value: int) -> None:
        """Set a word, after all that was written before, and wake who sleeps on it."""
        self.words[word] = value
        self.wake(word)

    def wake(self, word: int) -> None:
        """Wake who sleeps on a word."""
        self._call(word, _WAKE, _ALL, None)

    def sleep(self, word: int, value: int) -> bool:
        """Sleep while a word has a value, for :data:`SLICE_S` at most; tell whether nobody has set it in that time."""
        # The kernel looks at the low half of the word.
        return self._call(word, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(_slice)) == errno.ETIMEDOUT

    def _call(self, word: int, action: int, value: int, timeout: int | None) -> int:
        if _futex(_FUTEX, self.address + 8 * word, action, value, timeout, None, 0) >= 0:
            return 0
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return code

    def discard(self, offset: int, size: int) -> None:
        """Give the pages of a range back to the system; who reads it next finds zeros."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            _libc.madvise(self.address + first, last - first, _MADV_REMOVE)  # the pages stay where this is refused


def _map(descriptor: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """Map memory for as long as somebody holds what this returns; unlike Python's own mapping, without a descriptor."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    mapped = (ctypes.c_char * size).from_address(address)
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    return mapped
