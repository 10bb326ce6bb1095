"""Numbers of programs and constants on the workers: what is the same has the same number, whichever plan it is for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping

import msgspec
from torch import Tensor

from onebox.wire import Program
from onebox.wire.protocol.requests import StoredProgram


class DefinitionNumbers:
    """Numbers of programs by their content, and of the constants of graphs.

    Args:
        new: Makes a number for something that stays on the workers, beyond any plan.
    """

    def __init__(self, new: Callable[[], int]) -> None:
        self._new = new
        self._programs: dict[bytes, int] = {}
        self._known: dict[tuple[int, float], tuple[Program, int]] = {}
        self._constants: dict[Hashable, dict[str, int]] = {}

    def program(self, program: Program, cost_s: float) -> int:
        """Return the number of a program: equal ones have the same.

        Args:
            program: The program.
            cost_s: What it costs a device that computes nothing.
        """
        key = (id(program), cost_s)
        if key not in self._known:
            digest = hashlib.blake2b(msgspec.msgpack.encode(StoredProgram(program, cost_s)), digest_size=20).digest()
            if digest not in self._programs:
                self._programs[digest] = self._new()
            self._known[key] = program, self._programs[digest]  # kept alive, so that its id stays its own
        return self._known[key][1]

    def constants(self, key: Hashable, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the buffers of a graph's constants, by name."""
        if key not in self._constants:
            self._constants[key] = {name: self._new() for name in tensors}
        return self._constants[key]

    def release_programs(self) -> None:
        """Keep programs alive no longer; equal ones still get the same numbers."""
        self._known = {}
