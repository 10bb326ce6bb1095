"""Layers that are called many times with equal effect: found by running forward once without values, traced once each.

Autograd's trace of a layer takes a tenth of a second of processor, and a run without values a twentieth of that. So
forward is first run without values, and the operators of each call of a module that has several of its kind are
recorded (:mod:`~onebox.graph.capture.repeated.records`). Of calls with equal records one is traced; in the trace of the
model each is one operator, whose place copies of that trace take in the end. The user's Python of every call has then
run once at least, and nothing is assumed of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from onebox.graph.capture.repeated.layer_operator import CallSpecs, Unrepeatable, add_call, call_layer, remove_call
from onebox.graph.capture.repeated.layer_trace import LayerCopy, LayerTrace, put_copies, trace_layer
from onebox.graph.capture.repeated.records import Number, Record, Recorder

_LEAST = 4
"""Fewest calls with equal effect for which one is traced apart."""

Places = Sequence[tuple[dict[str, Any], str]]
"""Where modules hold tensors: the dict, and the key in it."""

LayerStack = tuple[tuple[str, str], ...]
"""Path and class of the modules that are being computed, from the outermost."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    """A module whose calls are recorded.

    Args:
        module: The module.
        path: Its path.
        places: The tensors of it and of the modules in it.
    """

    module: nn.Module
    path: str
    places: Places


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a layer.

    Args:
        layer: The layer.
        ordinal: Its place among the calls of this layer.
        forward: The method.
        arguments: Positional and keyword arguments, flattened, with numbers of tensors for tensors.
        nesting: How to nest them.
        held: The number of the tensor in each of the layer's places.
        outside: The modules around it.
        record: Its operators.
        result: What it returned.
    """

    layer: _Layer
    ordinal: int
    forward: Callable[..., Any]
    arguments: Sequence[Any]
    nesting: Any
    held: Sequence[int]
    outside: LayerStack
    record: Record
    result: Any

    def compute(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the results that are tensors, computed by the layer's own Python with other tensors."""
        return tuple(each for each in pytree.tree_leaves(self.called(given)) if isinstance(each, Tensor))

    def called(self, given: Sequence[Tensor]) -> Any:
        """Return what the layer returns for other tensors, by its own Python."""
        leaves = [given[leaf.number] if isinstance(leaf, Number) else leaf for leaf in self.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self.nesting)
        before = [held[key] for held, key in self.layer.places]
        try:
            for (held, key), number in zip(self.layer.places, self.held, strict=True):
                held[key] = given[number]
            return self.forward(*args, **kwargs)
        finally:
            for (held, key), tensor in zip(self.layer.places, before, strict=True):
                held[key] = tensor

    def returned(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the layer returns, with other tensors."""
        left = iter(tensors)
        return pytree.tree_map_only(Tensor, lambda _: next(left), self.result)


class RepeatedLayers:
    """The layers of a model that are traced once each.

    Args:
        model: The traced module.
        places: Where its modules hold the tensors that the trace replaces.
        stack: Returns the modules that are being computed.
        within: A context in which the user's forward is called, inside given modules.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Places,
        stack: Callable[[], LayerStack],
        within: Callable[[LayerStack], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._layers = _repeated(model, places)
        self._stack, self._within = stack, within
        self._recorder: Recorder | None = None
        self._calls: list[_Call] = []
        self._numbers: dict[tuple[_Layer, int], int] = {}
        self._by_number: dict[int, _Call] = {}
        self._copies: dict[int, LayerCopy] = {}
        self._counts: Counter[_Layer] = Counter()

    @property
    def used(self) -> bool:
        """Return whether operators stand for calls of layers."""
        return bool(self._copies)

    @contextlib.contextmanager
    def found(self, run: Callable[[], Any]) -> Iterator[None]:
        """Find the layers, and let operators stand for their calls in the traces within the context.

        Args:
            run: Runs forward without values.
        """
        if self._layers:
            with contextlib.suppress(Exception):  # the trace of the model meets it too, and says what is the matter
                self._find(run)
        try:
            yield
        finally:
            for number in self._by_number:
                remove_call(number)
            self._numbers.clear()

    def _find(self, run: Callable[[], Any]) -> None:
        self._recorder = Recorder()
        try:
            with self._recorder.watching():
                run()
        finally:
            self._recorder = None
        groups: dict[Hashable, list[_Call]] = defaultdict(list)
        for call in self._calls:
            if call.record.comparable:
                groups[call.record.key].append(call)
        for calls in groups.values():
            if len(calls) >= _LEAST:
                with contextlib.suppress(Unrepeatable):
                    self._add(calls, self._trace(calls[0]))

    def _trace(self, call: _Call) -> LayerTrace:
        """Trace a call.

        Raises:
            Unrepeatable: It cannot stand for others.
        """

        ambient, recorder = call.record.ambient, Recorder()

        def compute(*given: Tensor) -> tuple[Tensor, ...]:
            with self._within(call.outside), ambient.restored():
                return call.compute(*given)

        given = [_leaf(tensor) for tensor in call.record.given]
        with (
            given[0].fake_mode,  # type: ignore[attr-defined]
            recorder.watching(),
            self._within(call.outside),
            ambient.restored(),
            recorder.recorded(given, call.arguments, call.nesting, call.held) as again,
        ):
            again.end(call.called(given))
        if again.key != call.record.key:
            raise Unrepeatable("something around the layer changes what it computes")
        with torch.set_grad_enabled(ambient.gradients):
            return trace_layer(compute, given)

    def _add(self, calls: Sequence[_Call], trace: LayerTrace) -> None:
        for call in calls:
            number = add_call(CallSpecs(results=call.record.results, gradients=trace.gradient_specs))
            self._by_number[number] = call
            self._numbers[call.layer, call.ordinal] = number
            self._copies[number] = LayerCopy(trace=trace, names=_names(calls[0], call), number=number)

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Record the calls of layers within the context, or have operators in their place once they are found."""
        self._counts.clear()
        try:
            for layer in self._layers:
                vars(layer.module)["forward"] = self._standing_for(layer, layer.module.forward)
            yield
        finally:
            for layer in self._layers:
                vars(layer.module).pop("forward", None)

    def _standing_for(self, layer: _Layer, forward: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            ordinal = self._counts[layer]
            self._counts[layer] += 1
            if self._recorder is not None:
                if self._recorder.busy:
                    return forward(*args, **kwargs)
                return self._recorded(self._recorder, layer, ordinal, forward, args, kwargs)
            number = self._numbers.get((layer, ordinal))
            if number is None:
                return forward(*args, **kwargs)
            given = _given(layer, args, kwargs)[0]
            return self._by_number[number].returned(call_layer(number, given))

        return called

    def _recorded(
        self,
        recorder: Recorder,
        layer: _Layer,
        ordinal: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        given, arguments, nesting, held = _given(layer, args, kwargs)
        before = _held(layer.module)
        with recorder.recorded(given, arguments, nesting, held) as record:
            result = forward(*args, **kwargs)
            record.end(result)
        after = _held(layer.module)
        if before.keys() != after.keys() or any(after[place] is not value for place, value in before.items()):
            record.comparable = False
        self._calls.append(
            _Call(
                layer=layer,
                ordinal=ordinal,
                forward=forward,
                arguments=arguments,
                nesting=nesting,
                held=held,
                outside=self._stack(),
                record=record,
                result=result,
            )
        )
        return result

    def put(self, graph: fx.Graph) -> None:
        """Put copies of the layers' traces in the place of their operators in a graph."""
        if self._copies:
            put_copies(graph, self._copies)


def _repeated(model: nn.Module, places: Places) -> list[_Layer]:
    """Return the outermost modules, of several modules each, of which there are several alike."""
    paths = {module: path for path, module in model.named_modules()}
    held: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for owner, key in places:
        held[id(owner)].append((owner, key))
    looks: dict[nn.Module, Hashable] = {}
    for module in reversed(list(paths)):
        parts = tuple((name, looks[part]) for name, part in module._modules.items() if part is not None)
        tensors = tuple(
            (name, tensor.shape, tensor.dtype, tensor.requires_grad)
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        )
        looks[module] = hash((type(module), module.training, parts, tensors))
    counts = Counter(looks.values())
    found: list[_Layer] = []

    def visit(module: nn.Module) -> None:
        if counts[looks[module]] >= _LEAST and module._modules and "forward" not in vars(module):
            own = [
                place
                for part in module.modules()
                for owner in (part._parameters, part._buffers, vars(part))
                for place in held[id(owner)]
            ]
            found.append(_Layer(module=module, path=paths[module], places=own))
            return
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                visit(part)

    seen: set[nn.Module] = set()
    visit(model)
    return found


def _given(
    layer: _Layer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Any], Any, list[int]]:
    """Return the tensors of a call, each once; its arguments, with their numbers for tensors, and their nesting; and
    the numbers of the tensors that the layer holds."""
    leaves, nesting = pytree.tree_flatten((args, dict(kwargs)))
    given: dict[int, tuple[int, Tensor]] = {}

    def number(tensor: Tensor) -> int:
        return given.setdefault(id(tensor), (len(given), tensor))[0]

    arguments = [Number(number(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    held = [number(owner[key]) for owner, key in layer.places]
    return [tensor for _, tensor in given.values()], arguments, nesting, held


def _held(module: nn.Module) -> dict[tuple[int, int, str], Any]:
    """Return all that the modules of a layer hold."""
    return {
        (number, kind, name): value
        for number, part in enumerate(module.modules())
        for kind, own in enumerate((vars(part), part._parameters, part._buffers))
        for name, value in own.items()
    }


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor without values that looks like another one, and has no history."""
    with tensor.fake_mode:  # type: ignore[attr-defined]
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _names(traced: _Call, other: _Call) -> dict[str, str]:
    """Return the paths of modules of a call for those of the traced one."""
    outer = ((was[0], now[0]) for was, now in zip(traced.outside, other.outside, strict=False))
    inner = (
        (
            f"{traced.layer.path}.{name}" if name else traced.layer.path,
            f"{other.layer.path}.{name}" if name else other.layer.path,
        )
        for name, _ in traced.layer.module.named_modules()
    )
    return {**dict(outer), **dict(inner)}
