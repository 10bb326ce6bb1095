"""Tensors uploaded to workers besides the state: constants of graphs, and leaves of batches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.pool import Pool
from onebox.wire import TensorSpec, spec_of, to_frame
from onebox.wire.protocol.requests import Put


class ConstantTensors:
    """Constants of graphs on the workers.

    Args:
        pool: The pool.
        numbers: The numbers of the constants.
    """

    def __init__(self, pool: Pool, numbers: DefinitionNumbers) -> None:
        self._pool = pool
        self.uploaded: dict[int, int] = {}  # from buffer to bytes
        self._numbers = numbers
        self._there: set[tuple[Hashable, int]] = set()

    def upload(self, key: Hashable, tensors: Mapping[str, Tensor], workers: Sequence[int]) -> None:
        """Upload a graph's constants to workers, once."""
        lacking = [worker for worker in workers if (key, worker) not in self._there]
        self._there |= {(key, worker) for worker in lacking}
        numbers = self._numbers.constants(key, tensors)
        self.uploaded |= {numbers[name]: tensor.nbytes for name, tensor in tensors.items()}
        if tensors and lacking:
            put = Put(tuple(numbers.values()), tuple(spec_of(tensor) for tensor in tensors.values()))
            frames = [bytes(to_frame(tensor)) for tensor in tensors.values()]
            for worker in lacking:
                self._pool.post(worker, [put], frames)


def put_leaves(pool: Pool, leaves: Sequence[Tensor]) -> tuple[Put, tuple[int, ...], list[Any]]:
    """Return the instruction that uploads tensors into new buffers, their numbers, and their elements.

    Elements of dense tensors are not copied: do not write to them until the worker has received them.
    """
    numbers = tuple(pool.new_number() for _ in leaves)
    specs: tuple[TensorSpec, ...] = tuple(spec_of(leaf) for leaf in leaves)
    return Put(numbers, specs), numbers, [to_frame(leaf) for leaf in leaves]
