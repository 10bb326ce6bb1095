"""Records of the operators that calls of layers run, and of those around them, in a form that can be compared.

Two calls with equal records compute the same function of their tensors: every operator is recorded with its arguments,
where a tensor is named by the call's argument or operator that it comes from. Whatever a record cannot hold makes it
incomparable: a tensor from elsewhere, a gradient written in Python, a hook, a tensor that leaves the call otherwise
than by its results.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_NUMBERS = torch.SymInt | torch.SymFloat | torch.SymBool
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_GRAD_FN: Any = inspect.getattr_static(Tensor, "grad_fn").__get__
_UNSEEN = frozenset({Tensor.register_hook, Tensor.retain_grad, _GRAD_FN})
"""Calls that let Python run in backward, or depend on how a tensor was computed."""

_GENERATED = "GeneratedBackwardFor_"
"""Prefix of the classes that PyTorch makes for the gradient formulas of operators."""


@dataclass(frozen=True)
class Number:
    """The number of a tensor, in its place among a call's arguments."""

    number: int


@dataclass(kw_only=True)
class Record:
    """The operators of a call.

    Args:
        given: Its tensors: arguments, parameters and buffers, each once.
        ambient: The state of PyTorch that it depends on.
        entries: What it runs, and returns.
        comparable: Whether another call with an equal record computes the same.
        results: The tensors that it returns.
        anything: Whether tensors from elsewhere get names in the order of their reading, instead of making it
            incomparable.
    """

    given: tuple[Tensor, ...]
    ambient: Ambient
    entries: list[Hashable] = field(default_factory=list)
    comparable: bool = True
    results: tuple[Tensor, ...] = ()
    anything: bool = False
    _names: dict[int, Hashable] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, tensor in enumerate(self.given):
            self._names[id(tensor)] = number
            self.entries.append(_looks(tensor))
        self.comparable = self.anything or (bool(self.given) and not any(map(_is_lazy, self.given)))

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The record as a value; equal for calls that compute the same."""
        return self.ambient, *self.entries

    @property
    def inner(self) -> Iterator[Tensor]:
        """The tensors that it makes and does not return."""
        outside = {id(tensor) for tensor in (*self.given, *self.results)}
        return (tensor for tensor in self._kept if id(tensor) not in outside)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operator.

        Args:
            func: The operator.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: What it returned.
        """
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        if not made and not func._schema.is_mutable:
            return  # a question, such as for the device; what the answer leads to is recorded
        self.entries.append((func, torch.is_grad_enabled(), self.value(args), self.value(kwargs)))
        self._name(made)

    def call(self, described: Hashable, given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Record a call of a layer as a whole.

        Args:
            described: The layer, and its arguments.
            given: Its tensors.
            results: The tensors that it returns.
        """
        self.entries.append((described, torch.is_grad_enabled(), self.value(tuple(given))))
        self._name(results)

    def _name(self, made: Sequence[Tensor]) -> None:
        """Name tensors by the latest entry."""
        for place, tensor in enumerate(made):
            self._names.setdefault(id(tensor), (len(self.entries), place))
            self._kept.append(tensor)

    def adopt(self, record: Record) -> None:
        """Name the tensors of a call that is recorded apart."""
        for tensor in record.inner:
            self._names.setdefault(id(tensor), ("inner", len(self.entries), record._names[id(tensor)]))

    def end(self, result: Any) -> None:
        """Record the results of the call."""
        self.results = tuple(each for each in pytree.tree_leaves(result) if isinstance(each, Tensor))
        self.entries.append(self.value(result))
        self.entries += [_looks(tensor) for tensor in self.results]
        given = {_memory(tensor) for tensor in self.given}
        if len({_memory(tensor) for tensor in self.results} - given) < len(self.results) or not self.results:
            self.comparable = False  # a result that is an argument, or a view of one or of another result
        with torch._C.DisableTorchFunction():
            if any(map(_is_lazy, self.results)) or _has_python(self.results, self.given):
                self.comparable = False

    def value(self, value: Any) -> Hashable:
        """Return an argument as a value that can be compared; the record is incomparable where there is none."""
        if isinstance(value, Tensor):
            if id(value) not in self._names:
                if self.anything:
                    self._names[id(value)] = "elsewhere", len(self._kept), _looks(value)
                    self._kept.append(value)
                else:
                    self.comparable = False
            return "tensor", self._names.get(id(value)), value.requires_grad
        if isinstance(value, _NUMBERS):
            return _Symbol(value)
        if isinstance(value, float | complex):
            return type(value), repr(value)  # 0.0 and -0.0 differ
        if value is None or isinstance(value, (*_PLAIN, Number)):
            return type(value), value
        if type(value) in (list, tuple) or isinstance(value, torch.Size):
            return type(value), *map(self.value, value)
        if type(value) is dict:
            return dict, *((key, self.value(each)) for key, each in value.items())
        self.comparable = False
        return None


def _is_lazy(tensor: Tensor) -> bool:
    """Return whether a tensor is marked for something that is to be done to its elements."""
    return tensor.is_conj() or tensor.is_neg()


def _has_python(results: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Return whether the gradients of results run Python that is none of PyTorch's."""
    seen = {tensor.grad_fn for tensor in given}
    left = [tensor.grad_fn for tensor in results]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        python = isinstance(node, torch.autograd.function.BackwardCFunction)
        if python and not type(node).__name__.startswith(_GENERATED):
            return True
        left += [each for each, _ in node.next_functions]
    return False


def _looks(tensor: Tensor) -> Hashable:
    sizes = (tuple(map(_size, each)) for each in (tensor.shape, tensor.stride()))
    return *sizes, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)


def _size(size: Any) -> Any:
    return _Symbol(size) if isinstance(size, torch.SymInt) else size


class _Symbol:
    """A size with a symbol, compared by all that is known of it by then: two symbols may turn out to be equal."""

    def __init__(self, value: Any) -> None:
        self._node = value.node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Symbol) and bool(self._node.expr == other._node.expr)

    def __hash__(self) -> int:
        return hash(self._node.expr)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, kw_only=True)
class Ambient:
    """The state of PyTorch, of one thread, on which operators may depend beside their arguments.

    Args:
        gradients: Whether gradients are recorded.
        autocast: Whether autocast is on.
        narrow: Its type.
        dtype: The type of new tensors.
        transformed: Whether a transform of ``torch.func`` is active.
    """

    gradients: bool
    autocast: bool
    narrow: torch.dtype
    dtype: torch.dtype
    transformed: bool

    @classmethod
    def now(cls) -> Ambient:
        """Return the present state."""
        return cls(
            gradients=torch.is_grad_enabled(),
            autocast=torch.is_autocast_enabled("cpu"),
            narrow=torch.get_autocast_dtype("cpu"),
            dtype=torch.get_default_dtype(),
            transformed=torch._C._functorch.peek_interpreter_stack() is not None,
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set gradients and autocast as they were, within the context."""
        with torch.set_grad_enabled(self.gradients), torch.autocast("cpu", self.narrow, enabled=self.autocast):
            yield


class Recorder(TorchDispatchMode):
    """Records the operators of calls, and notes tensors that leave a call otherwise than by its results.

    Args:
        given: Tensors that are there before the calls.
    """

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.outside = Record(given=tuple(given), ambient=Ambient.now(), anything=True)
        """The operators around the calls, and the calls."""
        self._record: Record | None = None
        self._aside = False
        self._inner: dict[int, tuple[Record, Tensor]] = {}

    @property
    def busy(self) -> bool:
        """Return whether a call is being recorded."""
        return self._record is not None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Record nothing within the context."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    @contextlib.contextmanager
    def recorded(
        self, given: Sequence[Tensor], arguments: Sequence[Any], nesting: Any, held: Sequence[int]
    ) -> Iterator[Record]:
        """Record a call, which begins and ends with the context.

        Args:
            given: Its tensors, each once.
            arguments: Its arguments, flattened, with numbers of tensors for tensors.
            nesting: Their nesting.
            held: The numbers of the tensors that the layer holds.
        """
        self._leave(given)
        record = self._record = Record(given=tuple(given), ambient=Ambient.now())
        record.entries += [record.value(arguments), str(nesting), tuple(held)]
        try:
            yield record
        finally:
            self._record = None
            for tensor in record.inner:
                self._inner.setdefault(id(tensor), (record, tensor))
            self.outside.adopt(record)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record operators within the context."""
        with _UnseenCalls(self), self:
            yield

    def refuse(self) -> None:
        """Make the record of the present call incomparable, or that of what is around the calls."""
        (self._record or self.outside).comparable = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inner and not self._aside:
            self._leave(pytree.tree_leaves((args, kwargs)))
        if not self._aside:
            with torch._C.DisableTorchFunction():
                (self._record or self.outside).run(func, args, kwargs or {}, result)
        return result

    def _leave(self, values: Iterable[Any]) -> None:
        """Make the records incomparable of calls that made one of these values and did not return it."""
        for each in values:
            if id(each) in self._inner:
                self._inner[id(each)][0].comparable = False


class _UnseenCalls(TorchFunctionMode):
    """Makes records with calls incomparable of whose effect operators show nothing."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _UNSEEN:
            self._recorder.refuse()
        return func(*args, **(kwargs or {}))
