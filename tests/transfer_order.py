"""Order check of every plan that a test builds; those of CPUs, whose messages have tags, are put in order for it."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

import pytest

_LOWERING = "onebox.engine.compile.lowering"


def check_every_lowering() -> None:
    """Have the routines of every step checked, once their module is there."""
    module: Any = sys.modules.get(_LOWERING)
    if module is None or hasattr(module.Lowering._in_order, "__wrapped__"):
        return
    lower = module.Lowering._in_order

    @functools.wraps(lower)
    def checked(self: Any, routines: Mapping[int, Sequence[Any]]) -> Any:
        made = lower(self, routines)
        require_order(made, {number: members for members, number in self._numbers.groups.items()}, self.gradients)
        return made

    module.Lowering._in_order = checked


def require_order(
    routines: Mapping[int, Sequence[Any]], groups: Mapping[int, tuple[int, ...]], shared: Container[int] = ()
) -> None:
    """Require that routines in order have no faults under NCCL's rules.

    Args:
        routines: For each worker its routine, or its three windows.
        groups: Members of each group.
        shared: Buffers that have the same meaning on all workers.
    """
    from onebox.engine.compile.message_order import in_send_order
    from onebox.engine.compile.order_check import fault_text, step_faults

    ordered = in_send_order(routines, groups, functools.partial(next, itertools.count(1 << 40)))
    faults = step_faults(ordered, groups, shared=shared)
    assert not faults, fault_text(faults)


class PostedInstructions:
    """All instructions that this process posts to workers from now on.

    Args:
        patch: Undone at the end of the test.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._posted: dict[int, list[Any]] = defaultdict(list)
        from onebox.pool import Pool

        post = Pool.post

        def posting(pool: Any, worker: int, instructions: Sequence[Any], *args: Any, **options: Any) -> Any:
            with self._lock:
                self._posted[worker] += instructions
            return post(pool, worker, instructions, *args, **options)

        patch.setattr(Pool, "post", posting)

    def faults(self) -> Sequence[Any]:
        """Return the faults of everything posted, with the instructions of the routines in place of their runs."""
        from onebox.engine.compile.order_check import WorkerInstructions, order_faults
        from onebox.wire.protocol.groups import FormGroup
        from onebox.wire.protocol.requests import Define, Routine, Run, StoredProgram

        workers, ranks = {}, defaultdict(dict)
        for worker, posted in self._posted.items():
            routines: dict[int, Routine] = {}
            programs: dict[int, Any] = {}
            flat: list[Any] = []
            for instruction in posted:
                match instruction:
                    case Define(number=number, what=Routine() as routine):
                        routines[number] = routine
                    case Define(number=number, what=StoredProgram() as stored):
                        programs[number] = stored.program
                    case Run():
                        flat += routines[instruction.routine].steps
                    case FormGroup():
                        ranks[instruction.group][instruction.rank] = worker
                    case _:
                        flat.append(instruction)
            workers[worker] = WorkerInstructions(instructions=flat, programs=programs)
        groups = {group: tuple(own[rank] for rank in sorted(own)) for group, own in ranks.items()}
        return order_faults(workers, groups)

    def count(self, kind: type) -> int:
        """Return how many instructions of a kind were posted outside of routines."""
        return sum(isinstance(instruction, kind) for posted in self._posted.values() for instruction in posted)
