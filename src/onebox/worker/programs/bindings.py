"""Direct bindings: functions of torch's C interface that call one operator with less overhead than its overload object.

A call of ``torch.ops.aten.mm.default`` converts its arguments by the operator's schema, which takes about 1 µs longer
than the argument parser of ``torch.mm``. Such a function may stand for several overloads, and chooses one by the types
of its arguments. So a candidate is called once for each kind of call, with a dispatch mode that refuses the operator
before it runs: it is used only if the dispatcher would have been given the same overload and the same arguments.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class _AnyTensor:
    def __repr__(self) -> str:
        return "tensor"


TENSOR: Final = _AnyTensor()
"""Stands for any tensor among the arguments of a call."""

_known: dict[tuple[str, str], Callable[..., Any]] = {}
"""Bindings found by this process, by operator and constant arguments."""

_spread: dict[tuple[Callable[..., Any], str, str], bool] = {}
"""Results of :func:`spreads` in this process, by function, operator and constant arguments."""

_FACTORIES = frozenset({"arange", "full", "ones", "scalar_tensor", "zeros"})
"""Operators without tensors among their arguments whose functions do nothing besides the call."""

_KNOWN = 1 << 14
"""Most bindings kept."""


def fastest(call: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that calls an operator with the least overhead; without a binding the overload's own.

    Args:
        call: The operator.
        args: Positional arguments of the calls, :data:`TENSOR` in place of tensors.
        keywords: Their keyword arguments.
    """
    key = str(call), repr((args, keywords))
    found = _known.get(key)
    if found is None:
        if len(_known) >= _KNOWN:
            _known.clear()
        found = _known[key] = next((one for one in _candidates(call) if _agrees(one, call, args, keywords)), call._op)
    return found


def _candidates(call: OpOverload) -> Iterator[Callable[..., Any]]:
    """Yield functions with the operator's name that do nothing besides its call."""
    arguments, name = call._schema.arguments, call._schema.name.removeprefix("aten::")
    first = str(arguments[0].type) if arguments else ""
    if call.namespace != "aten" or not ("Tensor" in first or name in _FACTORIES):
        return
    if call.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return  # functions with such names may do something else, depending on the values
    for place in (torch._C.TensorBase, torch._C._VariableFunctions, torch._C._nn):
        found = getattr(place, name, None)
        if isinstance(found, types.MethodDescriptorType | types.BuiltinFunctionType):
            yield found


def _agrees(function: Callable[..., Any], call: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether a function calls the operator with the same arguments as the overload itself.

    The argument parser tries the overloads in a fixed order, and takes a tensor of integers without dimensions for a
    number where it can. If it chooses the right overload for such tensors, it does so for all others.
    """
    for shape, dtype in (((), torch.int64), ((2, 2), torch.float32)):
        positional, named = _fill(list(args), shape, dtype), _fill(dict(keywords), shape, dtype)
        wanted, found = _dispatched(call, positional, named), _dispatched(function, positional, named)
        if wanted is None or found is None or wanted[0] is not call:
            return False
        if not _holds_tensors(args):  # factories: their parser names a default
            wanted, found = _without_pinning(wanted), _without_pinning(found)
        if not _same(wanted, found):
            return False
    return True


def _holds_tensors(args: Sequence[Any]) -> bool:
    return any(one is TENSOR or (isinstance(one, list) and TENSOR in one) for one in args)


def _without_pinning(dispatched: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an operator and its arguments without ``pin_memory=False``, which is the default."""
    func, args, keywords = dispatched
    return func, args, {key: value for key, value in keywords.items() if key != "pin_memory" or value is not False}


def spreads(function: Callable[..., Any], call: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether a direct binding takes the numbers of its last argument, a list, one by one as well.

    The argument parser takes half as long for them as for a list.

    Args:
        function: The binding.
        call: The operator.
        args: Positional arguments of the calls, :data:`TENSOR` in place of tensors; there are no others.
    """
    if len(args) < 2 or not isinstance(args[-1], list) or not args[-1] or {*map(type, args[-1])} != {int}:
        return False
    key = function, str(call), repr(args)
    found = _spread.get(key)
    if found is None:
        if len(_spread) >= _KNOWN:
            _spread.clear()
        found = _spread[key] = _agrees(lambda *given: function(*given[:-1], *given[-1]), call, args, {})
    return found


def _fill(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return arguments with a tensor of its own in each place of one, so that an exchange is noticed."""
    if isinstance(value, dict):
        return {key: _fill(one, shape, dtype) for key, one in value.items()}
    if isinstance(value, list):
        return [_fill(one, shape, dtype) for one in value]
    return torch.empty(shape, dtype=dtype, device="meta") if value is TENSOR else value


class _Intercepted(Exception):
    """The dispatcher was given an operator; it and its arguments are in ``args``."""


class _Intercept(TorchDispatchMode):
    """Raises :class:`_Intercepted` in place of the first operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevent that the first call imports torch's compiler only to disable it: 1 s and 70 MB in each worker."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Intercepted(func, args, kwargs or {})


def _dispatched(function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the first operator that a function calls, with its arguments; ``None`` if it calls none."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError), _Intercept():
        try:
            function(*args, **keywords)
        except _Intercepted as found:
            return found.args
    return None


def _same(left: Any, right: Any) -> bool:
    """Return whether arguments are the same: tensors by identity, all else by type and value."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor | OpOverload):
        return left is right
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return repr(left) == repr(right)
