"""Order check of every plan that a test builds; those of CPUs, whose messages have tags, are put in order for it."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any

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
    from onebox.engine.compile.order_check import fault_text, step_faults
    from onebox.engine.compile.receive_order import in_send_order

    ordered = in_send_order(routines, groups, functools.partial(next, itertools.count(1 << 40)))
    faults = step_faults(ordered, groups, shared=shared)
    assert not faults, fault_text(faults)
