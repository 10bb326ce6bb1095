"""Random numbers of sharded tensors (``DTensor``) on devices whose generator has no offset.

PyTorch has each rank draw the numbers of its shard at an offset in one sequence, and sets all ranks' generators to its
end afterwards. A GPU's generator (Philox) has such an offset. That of a CPU (Mersenne Twister) has none: there, the
numbers from an offset on are those of a generator seeded by its state and the offset. As on a GPU, the shards differ,
copies of a shard are equal, and all ranks go on in one state.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.patches import Patch, Patches

PHILOX_BYTES = 16
"""Of the state of a generator that has an offset: a seed, and the offset."""


def _with_offsets(original: Any) -> Any:
    """Extend PyTorch's view of a generator's state to those that have no offset."""

    class SeededState(original):
        _state: Tensor

        def __init__(self, state: Tensor) -> None:
            super().__init__(state)
            self._begin = self._state

        @property
        def offset(self) -> Tensor:
            if self._begin.numel() == PHILOX_BYTES:
                return original.offset.fget(self)
            return torch.zeros(1, dtype=torch.int64)

        @offset.setter
        def offset(self, offset: Tensor) -> None:
            if self._begin.numel() == PHILOX_BYTES:
                original.offset.fset(self, offset)
            else:
                self._state = state_at(self._begin, int(offset))

    return SeededState


def state_at(state: Tensor, offset: int) -> Tensor:
    """Return the state of a CPU's generator that stands for an offset from another one."""
    if not offset:
        return state
    told = hashlib.blake2b(state.numpy().tobytes() + offset.to_bytes(8, "little"), digest_size=8)
    return torch.Generator().manual_seed(int.from_bytes(told.digest(), "little")).get_state()


@functools.cache
def patches() -> Patches:
    """Return the patches of PyTorch for sharded tensors; made where a mesh is, as the import takes long."""
    from torch.distributed.tensor import _random

    return Patches((Patch(_random, "_PhiloxState", _with_offsets),))


def meshing(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a mesh of devices, over which tensors are sharded."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        patches().apply()
        original(self, *args, **kwargs)

    return __init__
