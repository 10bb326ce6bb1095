"""Constant arguments of operators: conversion from the wire to PyTorch."""

from __future__ import annotations

import operator as op
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onebox.errors import WireError
from onebox.wire import DTYPES, Complex, DType, LayoutArgument, Many, MemoryFormat, OwnDevice

_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

ValueIndex = int | tuple[int, ...]
"""Position of an argument among values; several positions for a list."""


def constant(value: Any, device: torch.device) -> Any:
    """Return an argument without tensors in PyTorch's form.

    Args:
        value: The argument from the wire.
        device: The worker's device, for placeholders.

    Raises:
        WireError: It names an element type, layout or memory format that is not allowed.
    """
    if isinstance(value, Many):
        return [constant(item, device) for item in value.items]
    if isinstance(value, DType):
        if value.name not in DTYPES:
            raise WireError(f"element type {value.name!r} is not allowed")
        return DTYPES[value.name]
    if isinstance(value, OwnDevice):
        return device
    if isinstance(value, LayoutArgument):
        if value.name != "strided":
            raise WireError(f"layout {value.name!r} is not allowed; allowed: strided")
        return torch.strided
    if isinstance(value, MemoryFormat):
        if value.name not in _FORMATS:
            raise WireError(f"memory format {value.name!r} is not allowed; allowed: {', '.join(_FORMATS)}")
        return getattr(torch, value.name)
    if isinstance(value, Complex):
        return complex(value.real, value.imag)
    return value


def picker(places: Sequence[ValueIndex]) -> Callable[[Any], Sequence[Any]]:
    """Return a function that selects values by position from a list, implemented in C if no position is a list.

    Positions may be negative, as everywhere.
    """
    if all(isinstance(place, int) for place in places):
        if len(places) > 1:
            return op.itemgetter(*places)
        return op.itemgetter(slice(places[0], places[0] + 1 or None) if places else slice(0))  # type: ignore[operator]
    parts = [op.itemgetter(place) if isinstance(place, int) else picker(place) for place in places]

    def pick(values: Any) -> list[Any]:
        return [part(values) for part in parts]

    return pick


def by_keyword(call: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that passes its last positional arguments by keyword."""
    count = len(names)
    if count == 1:
        (name,) = names

        def run_one(*args: Any, **keywords: Any) -> Any:
            keywords[name] = args[-1]
            return call(*args[:-1], **keywords)

        return run_one

    def run(*args: Any, **keywords: Any) -> Any:
        return call(*args[:-count], **dict(zip(names, args[-count:], strict=True)), **keywords)

    return run
