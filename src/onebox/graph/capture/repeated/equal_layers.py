"""Of equal layers Dynamo reads one by itself; in what it reads of a step, operators stand for the calls of all of them.

What it has read of the one, its guards, must hold for each other one: then the code does the same there, on which
Dynamo's own caches rely, too. They are compared for each layer at each step, so that a change of any is noticed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebox.graph.capture.guards import PLAIN, LayerGuards
from onebox.graph.capture.repeated.layers import repeated

_MOST = 3
"""Most readings of layers of a class that are called alike; the rest of them is read where they are called."""


class _Unlike(Exception):
    """A layer takes, returns or does what no operator can stand for."""


@dataclass(frozen=True)
class _TensorOf:
    """A tensor among the arguments or results of a call, by its number."""

    number: int


@dataclass(frozen=True)
class _Constant:
    kind: type  # 1 == True
    text: str  # 0.0 == -0.0
    value: Any


@dataclass
class _Reading:
    """Results of one layer, and the guards of its code; none where no operator can stand for it."""

    layer: nn.Module
    guards: LayerGuards | None = None
    results: Any = None
    tensors: Sequence[tuple[Any, ...]] = ()
    inside: bool = False


class EqualLayers:
    """The calls of equal layers while Dynamo reads a step.

    Args:
        owners: The model, and the loss if it is a module; empty if all is to be read where it is called.
        read: Lets Dynamo read the call of a module by itself.
    """

    def __init__(
        self, owners: Iterable[nn.Module], read: Callable[[nn.Module, tuple[Any, Any]], LayerGuards | None]
    ) -> None:
        self._layers = {id(layer.module) for owner in owners for layer in repeated(owner, ())}
        self._read = read
        self._now: _Reading | None = None
        self._readings: dict[Hashable, list[_Reading]] = defaultdict(list)
        self.called: dict[tuple[str, int], tuple[LayerGuards, str, nn.Module]] = {}
        """The layers for which operators stand: guards, Dynamo's name, and module."""

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Let operators stand for the calls within the context."""
        from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

        if not self._layers:
            yield
            return
        mine = threading.get_ident()
        kind: Any = UnspecializedNNModuleVariable
        called = kind.call_function

        def call_function(self_: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            made, now = None, self._now
            if threading.get_ident() != mine:
                pass
            elif now is None and id(self_.value) in self._layers and self_.source:
                made = self._stand_in(self_, tx, args, kwargs)
            elif now is not None and now.layer is self_.value and not now.inside:
                now.inside = True
                try:
                    made = _noted(now, tx, args, kwargs, lambda: called(self_, tx, args, kwargs))
                finally:
                    now.inside = False
            return called(self_, tx, args, kwargs) if made is None else made

        kind.call_function = call_function
        try:
            yield
        finally:
            kind.call_function = called
            self._layers.clear()  # another thread may have found this function, and put it back

    def _stand_in(self, called: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a layer returns; ``None`` where it is to be read where it is called."""
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.variables.builder import wrap_fx_proxy

        output, layer = tx.output, called.value
        if output.current_tracer.parent is not None or tx.symbolic_torch_function_state.mode_stack or _changes(tx):
            return None
        tensors: dict[Any, tuple[int, Tensor]] = {}
        try:
            nesting = _described((tuple(args), kwargs), tensors)
            looks = tuple(_look(tensor) for _, tensor in tensors.values())
        except _Unlike:
            return None
        reading = self._reading(layer, (type(layer), nesting, looks, _modes()), nesting, looks)
        if reading is None or reading.guards is None:
            return None
        guard = called.source.make_guard(GuardBuilder.ID_MATCH)
        install_guard(guard)
        self.called[guard.name, id(reading)] = reading.guards, guard.name, layer
        made = [wrap_fx_proxy(tx, output.create_proxy("call_function", _blank, look, {})) for look in reading.tensors]
        return _rebuilt(reading.results, made)

    def _reading(self, layer: nn.Module, key: Hashable, nesting: Any, looks: Sequence[Any]) -> _Reading | None:
        readings = self._readings[key]
        for reading in readings:
            if reading.guards is None or reading.guards.hold(layer):
                return reading
        if len(readings) == _MOST:
            return None
        self._now = reading = _Reading(layer)
        try:
            reading.guards = self._read(layer, _plain(nesting, [_like(*look) for look in looks]))
        except Exception:  # is met again where the layer is called, and explained
            reading.guards = None
        finally:
            self._now = None
        readings.append(reading)
        return reading


def _noted(reading: _Reading, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
    """Make the call of a layer that is read by itself, and note its results."""
    given: dict[Any, tuple[int, Tensor]] = {}
    tensors: dict[Any, tuple[int, Tensor]] = {}
    _described((tuple(args), kwargs), given)
    before = [(*_look(tensor), tensor._version) for _, tensor in given.values()]
    modes = _modes()
    result = call()
    reading.results = _described(result, tensors)
    reading.tensors = [_look(tensor)[:4] for _, tensor in tensors.values()]
    storages = {tensor.untyped_storage()._cdata for _, tensor in given.values()}
    if (
        _changes(tx)
        or _modes() != modes
        or before != [(*_look(tensor), tensor._version) for _, tensor in given.values()]
        or any(node.op == "placeholder" for node in tensors)
        or any(tensor.untyped_storage()._cdata in storages for _, tensor in tensors.values())
    ):
        raise _Unlike
    return result


def _modes() -> tuple[Any, ...]:
    """Return the modes of PyTorch that what a layer does may depend on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._functorch.peek_interpreter_stack() is None,
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )


def _changes(tx: Any) -> bool:
    """Return whether code so far has changed Python's state, which a layer might read, or added hooks."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects = tx.output.side_effects
    new = AttributeMutationNew | ValueMutationNew
    return bool(effects.tensor_hooks or effects.save_for_backward) or any(
        not isinstance(each.mutation_type, new) and effects.is_modified(each)
        for each in effects.id_to_variable.values()
    )


def _described(value: Any, tensors: dict[Any, tuple[int, Tensor]]) -> Any:
    """Return arguments or results in a comparable form, and number their tensors."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable

    if isinstance(value, Mapping):
        return tuple((name, _described(each, tensors)) for name, each in value.items())
    if isinstance(value, tuple):
        return tuple(_described(each, tensors) for each in value)
    value = value.realize()
    if type(value) is TensorVariable and value.class_type is Tensor:
        node = value.as_proxy().node
        return _TensorOf(tensors.setdefault(node, (len(tensors), node.meta["example_value"]))[0])
    if type(value) is ConstantVariable:
        constant = value.as_python_constant()
        if isinstance(constant, (*PLAIN, torch.dtype, torch.device)):
            return _Constant(type(constant), repr(constant), constant)
    if type(value) is TupleVariable:
        return tuple(_described(each, tensors) for each in value.items)
    raise _Unlike


def _plain(nesting: Any, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a call as plain values."""

    def of(each: Any) -> Any:
        if isinstance(each, _TensorOf):
            return tensors[each.number]
        return each.value if isinstance(each, _Constant) else tuple(map(of, each))

    args, kwargs = nesting
    return of(args), {name: of(each) for name, each in kwargs}


def _rebuilt(nesting: Any, tensors: Sequence[Any]) -> Any:
    """Return the results of a call as Dynamo has them."""
    from torch._dynamo.variables import ConstantVariable, TupleVariable

    if isinstance(nesting, _TensorOf):
        return tensors[nesting.number]
    if isinstance(nesting, _Constant):
        return ConstantVariable.create(nesting.value)
    return TupleVariable([_rebuilt(each, tensors) for each in nesting])


def _look(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor that code sees without its values.

    Raises:
        _Unlike: It is of no ordinary kind.
    """
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise _Unlike
    if not all(type(size) is int for size in (*tensor.shape, *tensor.stride())):
        raise _Unlike
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_leaf


def _like(shape: Any, stride: Any, dtype: torch.dtype, requires_grad: bool, is_leaf: bool) -> Tensor:
    """Return a tensor for a layer that is read by itself; its memory is not touched."""
    made = torch.empty_strided(shape, stride, dtype=dtype).requires_grad_(requires_grad)
    with torch.enable_grad():
        return made if is_leaf else made.view_as(made)


def _blank(shape: Any, stride: Any, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    """Return a result of a layer, which autograd has computed where it requires gradients."""
    made = torch.empty_strided(shape, stride, dtype=dtype)
    if requires_grad:
        with torch.enable_grad():
            made.copy_(torch.zeros((), dtype=dtype, requires_grad=True))
    return made
