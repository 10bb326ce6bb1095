"""Program cache: programs and constants on the workers, from any plan, which need not be sent again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Set

import msgspec
import torch

from onebox.engine.compile.routine import StepRoutine
from onebox.engine.install.constant_tensors import ConstantTensors
from onebox.pool import Pool
from onebox.wire import DTYPES, Program, spec_of, to_frame
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Put, StoredProgram


class ProgramCache:
    """Programs by content, with the workers that have them; and the constants of graphs.

    Args:
        pool: The pool.
        new: Returns a new number for an object that outlives any plan.
    """

    def __init__(self, pool: Pool, new: Callable[[], int]) -> None:
        self.constants = ConstantTensors(pool, new)
        self._pool = pool
        self._new = new
        self._numbers: dict[bytes, int] = {}
        self._known: dict[tuple[int, float], tuple[Program, int]] = {}
        self._there: dict[int, set[int]] = {}

    def number(self, program: Program, cost_s: float) -> int:
        """Return the number of a program; equal programs share a number.

        Args:
            program: The program.
            cost_s: Its cost on an emulated device.
        """
        key = (id(program), cost_s)
        if key not in self._known:
            digest = hashlib.blake2b(msgspec.msgpack.encode(StoredProgram(program, cost_s)), digest_size=20).digest()
            if digest not in self._numbers:
                self._numbers[digest] = self._new()
            self._known[key] = program, self._numbers[digest]  # kept alive, so that its id stays unique
        return self._known[key][1]

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

    def keep(self, wanted: Mapping[int, Set[int]]) -> None:
        """Drop programs on workers that are no longer needed.

        Args:
            wanted: For each worker, the definitions that may still be needed.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        self._known = {}
        for worker, there in self._there.items():
            gone = there - wanted.get(worker, set())
            there.difference_update(gone)
            if gone and worker in self._pool.present:
                self._pool.post(worker, [Free((), tuple(sorted(gone)))])
