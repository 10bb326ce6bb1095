"""Memory in which an access outside of a tensor is noticed: guard pages, canaries, and a debug allocator.

The inputs of a call lie in :class:`Arena`; what PyTorch allocates itself comes from ``guard_malloc.c``, where there is
a compiler to build it. Both leave a word in all memory that belongs to no tensor, and in fresh memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor

from onebox.wire import DTYPES

WORDS = (0xA5C396E7D1B284F9, 0x9C35B7D2E8F1A6C4)
"""Content of memory that belongs to no tensor, in two variants: a result that differs between them depends on memory
that the operator must not read."""

_SOURCE = Path(__file__).with_name("guard_malloc.c")
_PAGE = mmap.PAGESIZE
_PERTURB = -6
"""``M_PERTURB`` of ``mallopt``: fills what malloc() hands out and takes back."""


def build_allocator() -> Path | None:
    """Return the debug allocator's library, built on first use; ``None`` without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    folder = Path(tempfile.gettempdir()) / f"onebox-operator-fuzz-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    library = folder / f"guard_malloc-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(_SOURCE)], check=True, timeout=60)
        made.rename(library)
    return library


class Allocator:
    """The debug allocator of this process; without it, malloc's own means to fill memory."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self.present = hasattr(self._libc, "guard_damaged")
        if self.present:
            self._libc.guard_damaged.restype = ctypes.c_uint64
            self._libc.guard_fill.argtypes = [ctypes.c_uint64]
            self._libc.guard_limit.argtypes = [ctypes.c_size_t]

    def enable(self, limit_bytes: int) -> None:
        """Serve tensors from here on, up to a size."""
        if self.present:
            self._libc.guard_limit(limit_bytes)
            self._libc.guard_enable(1)

    def fill(self, word: int, at_start: bool) -> None:
        """Choose what fresh and freed memory holds, and the side of a block at which an inaccessible page begins."""
        self._libc.mallopt(_PERTURB, word & 0xFF)
        if self.present:
            self._libc.guard_fill(word)
            self._libc.guard_place_at_start(int(at_start))

    @property
    def damaged(self) -> int:
        """Freed blocks beside which something had been written."""
        return int(self._libc.guard_damaged()) if self.present else 0


class Image(Struct, frozen=True, array_like=True):
    """A tensor as a client may have made it.

    Args:
        dtype: Name of its element type.
        shape: Sizes.
        strides: Strides, none of them negative.
        data: The bytes from its first element to its last.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data: bytes


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def ordinary(image: Image) -> Tensor:
    """Return a tensor over memory of PyTorch's own, which operators may resize."""
    dtype = DTYPES[image.dtype]
    made = torch.empty(len(image.data) // dtype.itemsize, dtype=dtype)
    ctypes.memmove(made.data_ptr(), image.data, len(image.data))
    return made.as_strided(image.shape, image.strides)


class Slot:
    """Pages between two inaccessible ones.

    Args:
        begin: Offset of the first page in the arena.
        size: Bytes.
    """

    def __init__(self, begin: int, size: int) -> None:
        self.begin = begin
        self.end = begin + size
        self.fillings = tuple(word.to_bytes(8, "little") * (size // 8) for word in WORDS)


class Arena:
    """Memory for the inputs of one call at a time.

    Args:
        sizes: Pages of each slot, in ascending order.
        shared: Whether processes that this one forks have the same memory.

    Attributes:
        memory: All of it.
    """

    def __init__(
        self, sizes: Sequence[int] = (1,) * 24 + (4,) * 8 + (16,) * 4 + (64,) * 2, *, shared: bool = False
    ) -> None:
        total = sum(sizes) + len(sizes) + 1
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        self.memory = mmap.mmap(-1, total * _PAGE, flags=kind | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._slots: list[Slot] = []
        at = 0
        for pages in (*sizes, 0):
            if libc.mprotect(self._address + at, _PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect of a guard page failed")
            if pages:
                self._slots.append(Slot(at + _PAGE, pages * _PAGE))
            at += (1 + pages) * _PAGE
        self._length = total * _PAGE
        self._used: list[tuple[Slot, int, int, bytes]] = []

    def place(self, images: Sequence[Image], variant: int, at_start: bool) -> list[Tensor]:
        """Return tensors over fresh copies of images, each in a slot of its own; earlier ones must be gone.

        Args:
            images: The images.
            variant: Of :data:`WORDS`, which surrounds them.
            at_start: Whether they begin behind an inaccessible page, instead of ending before one.

        Raises:
            MemoryError: There is no slot for one of them.
        """
        self._used.clear()
        free = iter(self._slots)
        made = []
        for image in sorted(range(len(images)), key=lambda number: len(images[number].data)):
            size = len(images[image].data)
            slot = next((slot for slot in free if slot.end - slot.begin >= size), None)
            if slot is None:
                raise MemoryError(f"no slot for {size} bytes")
            made.append((image, self._fill(slot, images[image], variant, at_start)))
        return [tensor for _, tensor in sorted(made, key=lambda pair: pair[0])]

    def _fill(self, slot: Slot, image: Image, variant: int, at_start: bool) -> Tensor:
        size = len(image.data)
        begin = slot.begin if at_start else slot.end - size
        filling = slot.fillings[variant]
        behind = begin + size
        whole = filling[: begin - slot.begin] + image.data + filling[behind - slot.begin :]
        self.memory[slot.begin : slot.end] = whole
        self._used.append((slot, begin, behind, whole))
        dtype = DTYPES[image.dtype]
        if not size:
            return torch.empty(0, dtype=dtype).as_strided(image.shape, image.strides)
        flat = torch.frombuffer(self.memory, dtype=dtype, count=size // dtype.itemsize, offset=begin)
        return flat.as_strided(image.shape, image.strides)

    def changed(self, tensor_data: Sequence[bytes], written: frozenset[int]) -> tuple[int, list[int]]:
        """Compare memory with what it held when the images were placed.

        Args:
            tensor_data: Data of the images, in order.
            written: Images that the call may have written to.

        Returns:
            The number of slots whose canaries changed; and the images that changed though they must not.
        """
        canaries, inputs = 0, []
        order = sorted(range(len(tensor_data)), key=lambda number: len(tensor_data[number]))
        for number, (slot, begin, behind, whole) in zip(order, self._used, strict=True):
            now = self.memory[slot.begin : slot.end]
            if now == whole:
                continue
            low, high = begin - slot.begin, behind - slot.begin
            canaries += now[:low] != whole[:low] or now[high:] != whole[high:]
            if number not in written and now[low:high] != whole[low:high]:
                inputs.append(number)
        return canaries, inputs

    def offset(self, tensor: Tensor) -> int:
        """Return where in the memory a tensor begins."""
        return tensor.data_ptr() - self._address

    def holds(self, address: int) -> bool:
        """Return whether an address is in the arena."""
        return self._address <= address < self._address + self._length
