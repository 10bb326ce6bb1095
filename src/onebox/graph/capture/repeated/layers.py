"""Layers that are called many times with equal effect: found by running forward once without values, traced once each.

Autograd's trace of a layer takes a tenth of a second of processor, and a run without values a twentieth of that. So
forward is first run without values, and the operators of each call of a module that has several of its kind are
recorded (:mod:`~onebox.graph.capture.repeated.records`). Of calls with equal records one is traced; in the trace of the
model each is one operator, whose place copies of that trace take in the end.

What a layer does in Python beside its operators and results is not done in that trace. Therefore forward is run
without values once more, with the operators in the place of calls: if anything around them is then another, no call is
replaced.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from onebox.errors import OneboxError
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

    def run(self, given: Sequence[Tensor]) -> Any:
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

    def described(self, arguments: Sequence[Any], nesting: Any, held: Sequence[int]) -> bool:
        """Return whether a call has the same arguments, beside tensors."""
        value = self.record.value
        return (value(arguments), str(nesting), list(held)) == (value(self.arguments), str(self.nesting), self.held)

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
        restored: Returns the result of a function that runs the user's Python, and restores Python's state.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Places,
        stack: Callable[[], LayerStack],
        within: Callable[[LayerStack], contextlib.AbstractContextManager[Any]],
        restored: Callable[[Callable[[], LayerTrace]], LayerTrace],
    ) -> None:
        self._layers = repeated(model, places)
        self._stack, self._within, self._restored = stack, within, restored
        self._recorder: Recorder | None = None
        self._used = self._within_layer = False
        self._calls: list[_Call] = []
        self._numbers: dict[tuple[_Layer, int], int] = {}
        self._by_number: dict[int, _Call] = {}
        self._copies: dict[int, LayerCopy] = {}
        self._counts: Counter[_Layer] = Counter()

    @property
    def used(self) -> bool:
        """Return whether operators have stood for calls of layers."""
        return self._used

    @contextlib.contextmanager
    def found(self, run: Callable[[], Any], tensors: Sequence[Tensor]) -> Iterator[None]:
        """Find the layers, and let operators stand for their calls in the traces within the context.

        Args:
            run: Runs forward without values.
            tensors: Its tensors: parameters, buffers, inputs and targets.

        Raises:
            OneboxError: Forward cannot be captured.
        """
        try:
            if self._layers:
                self._find(run, tensors)
            yield
        finally:
            self._drop()

    def _find(self, run: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        try:
            first = self._watched(run, tensors)
        except OneboxError:
            raise
        except Exception:  # the trace of the model meets it, too, and says what is the matter
            return
        calls = list(self._calls)
        groups: dict[Hashable, list[_Call]] = defaultdict(list)
        for call in calls if first.comparable else ():
            if call.record.comparable:
                groups[call.record.key].append(call)
        for alike in groups.values():
            if len(alike) >= _LEAST:
                with contextlib.suppress(Exception):  # what one call does not allow in its trace alone
                    self._add(alike, self._restored(lambda call=alike[0]: self._trace(call)))  # type: ignore[misc]
        if self._copies and not self._stands(run, tensors, first, calls):
            self._drop()

    def _stands(self, run: Callable[[], Any], tensors: Sequence[Tensor], first: Record, calls: Sequence[_Call]) -> bool:
        """Return whether forward is the same with operators in the place of calls."""
        try:
            again = self._watched(run, tensors)
        except Exception:
            return False
        apart = {(call.layer, call.ordinal): call.record.key for call in self._calls}
        return again.key == first.key and all(
            apart.get((call.layer, call.ordinal)) == call.record.key
            for call in calls
            if (call.layer, call.ordinal) not in self._numbers
        )

    def _watched(self, run: Callable[[], Any], tensors: Sequence[Tensor]) -> Record:
        """Run forward, and return the record of what is around the calls of layers."""
        self._recorder = recorder = Recorder(tensors)
        self._calls = []
        try:
            with recorder.watching():
                run()
        finally:
            self._recorder = None
        return recorder.outside

    def _drop(self) -> None:
        """Let nothing stand for calls."""
        for number in self._by_number:
            remove_call(number)
        self._by_number.clear()
        self._numbers.clear()
        self._copies.clear()

    def _trace(self, call: _Call) -> LayerTrace:
        """Trace a call.

        Raises:
            Unrepeatable: It cannot stand for others.
        """
        ambient, recorder = call.record.ambient, Recorder()

        def compute(*given: Tensor) -> tuple[Tensor, ...]:
            with self._within(call.outside), ambient.restored():
                return tuple(each for each in pytree.tree_leaves(call.run(given)) if isinstance(each, Tensor))

        given = [_leaf(tensor) for tensor in call.record.given]
        with (
            given[0].fake_mode,  # type: ignore[attr-defined]
            recorder.watching(),
            self._within(call.outside),
            ambient.restored(),
            recorder.recorded(given, call.arguments, call.nesting, call.held) as again,
        ):
            again.end(call.run(given))
        if not again.comparable or again.key != call.record.key:  # with all of its state, not only what is restored
            raise Unrepeatable("something around the layer changes what it computes")
        with torch.set_grad_enabled(ambient.gradients):
            return trace_layer(compute, given)

    def _add(self, calls: Sequence[_Call], trace: LayerTrace) -> None:
        relaid: set[int] = set()
        for call in calls:
            number = add_call(CallSpecs(results=call.record.results, gradients=trace.gradient_specs, relaid=relaid))
            self._used = True
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
        @functools.wraps(forward)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            if self._within_layer or (recorder is not None and recorder.busy):
                return forward(*args, **kwargs)
            ordinal = self._counts[layer]
            self._counts[layer] += 1
            number = self._numbers.get((layer, ordinal))
            if recorder is not None and number is None:
                return self._recorded(recorder, layer, ordinal, forward, args, kwargs)
            if number is None:
                self._within_layer = True
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._within_layer = False
            call = self._by_number[number]
            given, arguments, nesting, held = _given(layer, args, kwargs)
            if not call.described(arguments, nesting, held):
                raise Unrepeatable("a layer is called with other arguments than before")
            if recorder is None:
                return call.returned(call_layer(number, given))
            with recorder.aside():
                results = call_layer(number, given)
            recorder.outside.call((layer.path, ordinal, call.record.entries[len(given)]), given, results)
            return call.returned(results)

        return stand_in

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
        recorder.outside.call((layer.path, ordinal, record.entries[len(given)]), given, record.results)
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


def repeated(model: nn.Module, places: Places) -> list[_Layer]:
    """Return the outermost modules, of several modules each, of which there are several alike."""
    paths = {module: path for path, module in model.named_modules()}
    held: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for owner, key in places:
        held[id(owner)].append((owner, key))
    looks: dict[nn.Module, Hashable] = {}

    def look(module: nn.Module) -> Hashable:
        if module not in looks:
            parts = tuple((name, look(part)) for name, part in module._modules.items() if part is not None)
            tensors = tuple(
                (name, tensor.shape, tensor.dtype, tensor.requires_grad)
                for own in (module._parameters, module._buffers)
                for name, tensor in own.items()
                if tensor is not None
            )
            looks[module] = type(module), module.training, parts, tensors
        return looks[module]

    for module in paths:
        look(module)
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
