"""Program cache: programs and constants on the workers, from any plan, which need not be sent again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set

import torch
from torch import Tensor

from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.compile.routine import StepRoutine
from onebox.pool import Pool
from onebox.wire import DTYPES, spec_of, to_frame
from onebox.wire.protocol.instructions import Free
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


class ProgramCache:
    """Programs by content, with the workers that have them; and the constants of graphs.

    Args:
        pool: The pool.
        numbers: The numbers of programs and constants.
    """

    def __init__(self, pool: Pool, numbers: DefinitionNumbers) -> None:
        self.numbers = numbers
        self.constants = ConstantTensors(pool, numbers)
        self._pool = pool
        self._there: dict[int, set[int]] = {}

    def store(self, worker: int, routine: StepRoutine) -> dict[int, int]:
        """Send a worker a routine, with the programs that it lacks.

        Returns:
            The bytes of its one-element buffers, by number.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        tensors = [torch.tensor(value, dtype=DTYPES[spec.dtype]) for value, spec in routine.constants.values()]
        put = Put(tuple(routine.constants), tuple(spec_of(tensor) for tensor in tensors))
        there = self._there.setdefault(worker, set())
        new = [define for define in routine.definitions if define.number not in there]
        there.update(define.number for define in new)
        self._pool.post(worker, [put, *new], [bytes(to_frame(tensor)) for tensor in tensors])
        return {number: spec.size_bytes for number, (_, spec) in routine.constants.items()}

    def forget(self, worker: int) -> None:
        """Record that a worker has been replaced by another one, which has nothing."""
        self._there.pop(worker, None)

    def keep(self, wanted: Mapping[int, Set[int]]) -> None:
        """Drop programs on workers that are no longer needed.

        Args:
            wanted: For each worker, the definitions that may still be needed.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        self.numbers.release_programs()
        for worker, there in self._there.items():
            gone = there - wanted.get(worker, set())
            there.difference_update(gone)
            if gone and worker in self._pool.present:
                self._pool.post(worker, [Free((), tuple(sorted(gone)))])
