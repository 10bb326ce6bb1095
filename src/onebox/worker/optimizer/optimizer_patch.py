"""Classes of ``torch.optim`` without what concerns compilers: in a worker nothing is compiled.

The first time that one of them is made or steps, torch imports its compiler to say that this is not to be compiled: 800
modules, a second or more of a processor, and 70 MB in each worker (see ``benchmarks/opening.py``).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch


@functools.cache
def without_compiler(name: str) -> Any:
    """Return a class of ``torch.optim`` whose steps have the same bits; without gradients of its own, and hooks.

    Args:
        name: Of a class that torch has.
    """
    made = getattr(torch.optim, name)
    original = inspect.unwrap(made.step)

    @torch.no_grad()
    def step(self: torch.optim.Optimizer) -> None:
        original(self)

    vars(step)["hooked"] = True  # else torch wraps it with what looks for hooks and tells a profiler
    members: dict[str, Any] = {"step": step, "add_param_group": inspect.unwrap(made.add_param_group)}
    return type(name, (made,), members)
