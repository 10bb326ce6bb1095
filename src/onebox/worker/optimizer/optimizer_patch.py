"""Classes of ``torch.optim`` without their compiler support, as a worker compiles nothing.

On the first construction or step of an optimizer, torch imports its compiler only to disable it there: 800 modules, at
least a second of processor time, and 70 MB in each worker (see ``benchmarks/opening.py``).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch


@functools.cache
def without_compiler(name: str) -> Any:
    """Return a class of ``torch.optim`` with bitwise equal steps, without gradients of its own and without hooks.

    Args:
        name: Name of a torch class.
    """
    made = getattr(torch.optim, name)
    original = inspect.unwrap(made.step)

    @torch.no_grad()
    def step(self: torch.optim.Optimizer) -> None:
        original(self)

    vars(step)["hooked"] = True  # else torch wraps it with hooks and profiling
    members: dict[str, Any] = {"step": step, "add_param_group": inspect.unwrap(made.add_param_group)}
    return type(name, (made,), members)
