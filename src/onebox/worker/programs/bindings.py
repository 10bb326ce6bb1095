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
    arguments = call._schema.arguments
    if not arguments or "Tensor" not in str(arguments[0].type) or call.namespace != "aten":
        return
    if call.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return  # functions with such names may do something else, depending on the values
    name = call._schema.name.removeprefix("aten::")
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
        if wanted is None or found is None or wanted[0] is not call or not _same(wanted, found):
            return False
    return True


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
