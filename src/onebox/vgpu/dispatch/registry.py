"""The operators that do not run on one device, or not unchanged, and the functions that run instead.

Modules of operators add themselves here when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Special = Callable[[tuple[Any, ...], dict[str, Any]], Any]
MixedCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

specials: dict[str, Special] = {}
"""Operators that do not run on one device, or not unchanged, by the names of their overloads: copies, reads and the
like. Where a function returns ``NotImplemented``, the operator runs as any other."""

_mixed: list[MixedCall] = []


def special(*functions: Any) -> Callable[[Special], Special]:
    """Decorator that makes a function the implementation of operators."""

    def register(handler: Special) -> Special:
        for function in functions:
            specials[function.name()] = handler
        return handler

    return register


def for_mixed_calls(handler: MixedCall) -> MixedCall:
    """Decorator that makes a function run the operators of which some tensor is not a virtual one."""
    _mixed[:] = [handler]
    return handler


def run_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of which some tensor is not a virtual one.

    Args:
        func: The overload.
        args: Its arguments.
        kwargs: Likewise.

    Raises:
        RuntimeError: It cannot have such a tensor.
    """
    return _mixed[0](func, args, kwargs)
