"""Synchronous operators, whose results only the worker can determine: each costs a round trip, and raises at its own
line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onebox.errors import OperatorError, WireError
from onebox.vgpu.core.metadata import from_wire
from onebox.vgpu.core.tensor import Handle, handle_of, is_virtual, layout_of, relay, wrap
from onebox.vgpu.dispatch.op_inference import describe, versioned_inputs
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.wire import Complex, Strided

_KINDS: dict[str, type[Exception]] = {
    "IndexError": IndexError,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
    torch.linalg.LinAlgError.__name__: torch.linalg.LinAlgError,
}
"""PyTorch's exception types for wrong arguments, by the name that a worker sends; others become a ``RuntimeError``."""


LATE = (
    "The operator that failed was issued before this line. For an error at its own line, wait for every operator: "
    "onebox run --synchronous, or onebox.vgpu.set_synchronous(True)."
)
"""Note on errors that are raised later than their operator."""


def run_synchronously(
    queue: CommandQueue,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    floats: list[float],
) -> Any:
    """Run an operator synchronously and return its result.

    Args:
        queue: Command queue of its device.
        func: The overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        tensors: The tensors among them.
        floats: The floating-point numbers among them.

    Raises:
        RuntimeError: It failed, with the worker's PyTorch message; also the other types that PyTorch raises.
        OneboxError: The worker is gone, or an argument is void.
    """
    try:
        kernel = describe(func, args, kwargs)
    except WireError as error:
        raise NotImplementedError(str(error)) from None
    handles = {id(tensor): handle_of(tensor) for tensor in tensors}  # one tensor twice is one on the worker, too
    try:
        made, first = queue.perform(kernel, [handles[id(tensor)].number for tensor in tensors], floats)
    except OperatorError as error:
        raise_plain(error, str(func))
    for tensor, now in zip(tensors, made.inputs, strict=True):
        layout = from_wire(now)
        if layout is not layout_of(tensor):
            relay(tensor, layout)
    increment_version([tensors[position] for position in versioned_inputs(kernel)])
    return _result(queue, func, args, kwargs, list(made.results), first)


def _result(
    queue: CommandQueue, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any], first: int
) -> Any:
    """Assemble an operator's return value by its schema."""
    returns = func._schema.returns
    values: list[Any] = []
    position = 0
    written = _written(func, args, kwargs)
    listed = [number for number, value in enumerate(returns) if str(value.type) not in _SINGLE]
    spare = len(results) - len(returns) + len(listed)  # at most one list takes what the others leave
    for number, value in enumerate(returns):
        count = spare if number in listed else 1
        items = [
            _value(queue, item, first + position + k) for k, item in enumerate(results[position : position + count])
        ]
        position += count
        target = written.get(next(iter(value.alias_info.before_set), "")) if value.alias_info is not None else None
        if target is not None and value.alias_info.is_write:
            values.append(target)
        else:
            values.append(items if number in listed else items[0])
    if not returns:
        return None
    return values[0] if len(returns) == 1 else tuple(values)


_SINGLE = {"Tensor", "Optional[Tensor]", "number", "int", "float", "bool"}


def _value(queue: CommandQueue, item: Any, number: int) -> Any:
    if isinstance(item, Strided):
        return wrap(Handle(queue, number), from_wire(item))
    return complex(item.real, item.imag) if isinstance(item, Complex) else item


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that an operator writes to, by the name of their alias set."""
    found = {}
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            if is_virtual(given):
                found[next(iter(argument.alias_info.before_set), "")] = given
    return found


def raise_plain(error: OperatorError, func: str) -> NoReturn:
    """Raise the error that PyTorch would have raised for an operator that failed on a worker.

    Args:
        error: The worker's error.
        func: The operator that was issued, or none.
    """
    if error.operator not in (func, "perform"):  # an argument is void: another operator failed
        if LATE not in getattr(error, "__notes__", ()):
            error.add_note(LATE)
        try:
            raise error
        finally:
            del error  # it would reference this frame, and this frame it
    kind = _KINDS.get(error.cause, RuntimeError)
    raise kind(error.said or str(error)) from error
