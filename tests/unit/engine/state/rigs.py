"""Workers without processes, as a pool."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from onebox.pool import Pool, WorkerReply
from onebox.wire.protocol.requests import Instruction
from tests.unit.machines import Rig


class Rigs:
    """Workers without processes, to which a client posts as to those of a pool."""

    def __init__(self, count: int) -> None:
        self.rigs = [Rig() for _ in range(count)]
        self.posted: Counter[type[Instruction]] = Counter()
        self.present = tuple(range(count))
        self._numbers = itertools.count(1000)

    def new_number(self) -> int:
        return next(self._numbers)

    def post(
        self, worker: int, instructions: Sequence[Any], frames: Sequence[Any] = (), *, answer: bool = False
    ) -> Future[WorkerReply]:
        self.posted.update(type(one) for one in instructions)
        rig = self.rigs[worker]
        results = rig.do(*instructions, frames=[bytes(frame) for frame in frames])
        assert not rig.failures
        future: Future[WorkerReply] = Future()
        future.set_result(WorkerReply(tuple(results), [bytes(frame) for frame in rig.frames_out], ()))
        return future

    @property
    def pool(self) -> Pool:
        """Itself, as the type that it stands in for."""
        return cast("Pool", self)
