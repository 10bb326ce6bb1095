"""Guards: the Python state that a graph depends on, and whether it has changed.

The graph holds the results of Python code at its trace: attributes of modules and of other objects, globals, variables
of closures, hooks. :mod:`onebox.graph.capture.reading` finds every one that the code reads.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import re
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onebox.errors import CaptureError
from onebox.graph.capture.locate import SourceLocation, at_line

OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
"""Hooks of modules for gradients, which Dynamo does not read; all hooks of gradients are compared by identity."""

_CELL = re.compile(r"(.*)\.__closure__\[(\d+)\]\.cell_contents(.*)$")
_ATTRIBUTE = re.compile(r"hasattr\((.*), '(\w+)'\)")

_MOST_BYTES = 1 << 16
"""Bytes of an array up to which its contents are compared."""

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_HELD = (list, dict, set, deque)
_OTHERS = (random.Random, np.ndarray, np.generic, type(os.environ))
_FUNCTIONS = (types.FunctionType, property, classmethod, staticmethod)
_UNGUARDED = PLAIN if torch.__version__ < "2.12" else ()
"""What guards of torch 2.11 leave out: values of classes, and of defaults."""

_MISSING = object()
_NO_PLACE = (AttributeError, IndexError, KeyError, SyntaxError, TypeError, ValueError)


_LAYER = "L['layer']"


class LayerGuards:
    """The Python state that the code of one layer has read, to be compared with that of equal layers.

    Args:
        manager: Dynamo's guards, of a scope in which the layer has this name.
        own: Those of them that are about the layer.
        variables: The globals of the code that Dynamo began with.
        read: All that was read, by Dynamo's names; objects that guards know by their addresses last as long as these.
        tensors: The names of tensors that were read.
        key: The guards as text.
        layer: The layer.
    """

    def __init__(
        self,
        manager: Any,
        own: Any,
        variables: dict[str, Any],
        read: Mapping[str, Any],
        tensors: Iterable[str],
        key: frozenset[str],
        layer: nn.Module,
    ) -> None:
        self.manager, self.own, self.key = manager, own, key
        self._globals, self._tensors = variables, sorted(tensors)
        self._read = {**dict.fromkeys(self._tensors), **read}
        self._places = {name: ast.parse(name, mode="eval").body for name in self._read if name}
        self._looks = self._look(self.present(layer))

    def present(self, layer: nn.Module) -> dict[str, Any]:
        """Return what a layer has now at the places that were read."""
        scope = {"layer": layer}
        found = {name: _present(place, scope, self._globals) for name, place in self._places.items()}
        return {name: self._read[name] if value is _MISSING else value for name, value in found.items()}

    def hold(self, layer: nn.Module) -> bool:
        """Return whether another layer's code does what that of the one that was read does."""
        return self.manager.check({"layer": layer}) and self._look(self.present(layer)) == self._looks

    def _look(self, found: Mapping[str, Any]) -> Any:
        """Return what guards do not compare: the looks of tensors, and which places have the same object."""
        numbers: dict[int, int] = {}
        same = [numbers.setdefault(id(value), len(numbers)) for value in found.values() if not isinstance(value, PLAIN)]
        tensors = [found[name] for name in self._tensors]
        return same, [
            (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf)
            if isinstance(x, Tensor) and x.layout is torch.strided
            else object()
            for x in tensors
        ]


class Guards:
    """The Python state that code has read, to be compared with the present one.

    Args:
        manager: Dynamo's guards.
        scope: The objects that the code was given.
        variables: The globals of the code that Dynamo began with.
        read: All that was read, by Dynamo's names; objects that guards know by their addresses last as long as these.
        key: The guards as text.
        example: Inputs and targets.
        batch: Returns whether the same is read for another number of samples.
        counters: Integers among what was read, by Dynamo's names, whose values the code does not depend on.
        layers: Layers of each of which an equal one was read: its guards, Dynamo's name for the layer, and the layer.
    """

    def __init__(
        self,
        manager: Any,
        scope: Mapping[str, Any],
        variables: dict[str, Any],
        read: Mapping[str, Any],
        key: frozenset[str],
        example: tuple[Any, Any],
        batch: Callable[[int], bool],
        counters: Collection[str] = (),
        layers: Collection[tuple[LayerGuards, str, nn.Module]] = (),
    ) -> None:
        self.key = key.union(text.replace(_LAYER, name) for guards, name, _ in layers for text in guards.key)
        """Equal for guards that hold at the same time."""
        self.effects: Callable[[], object] | None = None
        """Does to Python's state what the code does to it, once; ``None`` where that is nothing, or takes the values of
        tensors."""
        self._counters = counters
        self._manager, self._scope, self._globals = manager, dict(scope), variables
        self.read = {name: self._present(name) if value is None else value for name, value in read.items() if name}
        """All that was read, by Dynamo's names."""
        self._layers: list[tuple[Any, dict[str, Any], str]] = []
        of_all = set[LayerGuards]()
        for guards, name, layer in layers:
            found = guards.present(layer).items()
            self.read |= {each.replace(_LAYER, name): value for each, value in found}
            self._layers.append((guards.own if guards in of_all else guards.manager, {"layer": layer}, name))
            of_all.add(guards)
        self._example, self._batch = _described(example), batch
        self._others = {
            name: (value, _content(value)) for name, value in self.read.items() if isinstance(value, _OTHERS)
        }
        """What Dynamo does not compare by contents."""

    @property
    def names(self) -> set[str]:
        """All that was read, as the user's code has it."""
        return set(map(self._called, self.read))

    @property
    def equal_layers(self) -> list[str]:
        """The layers of each of which an equal one was read, as the user's code has them."""
        return [_readable(name) for _, _, name in self._layers]

    def serve(self, example: tuple[Any, Any]) -> bool:
        """Return whether the code reads the same for inputs and targets of other sizes."""
        sizes = {shape[0] for shape in _described(example)[2] if shape}
        return _described(example) == self._example or (
            self.differ_in_samples(example) and len(sizes) == 1 and self._batch(*sizes)
        )

    def differ_in_samples(self, example: tuple[Any, Any]) -> bool:
        """Return whether inputs and targets differ from those that were read in their number of samples at most."""
        (nesting, kinds, shapes), (own_nesting, own_kinds, own_shapes) = _described(example), self._example
        alike = [shape[1:] for shape in shapes] == [shape[1:] for shape in own_shapes]
        return alike and (nesting, kinds) == (own_nesting, own_kinds)

    @property
    def changed(self) -> str | None:
        """The first change that is found, as text; ``None`` if there is none."""
        if not self._manager.check(self._scope):
            return self._failed(self._manager.check_verbose(self._scope).verbose_code_parts)
        for manager, scope, name in self._layers:
            if not manager.check(scope):
                said = manager.check_verbose(scope).verbose_code_parts
                return self._failed([part.replace(_LAYER, name) for part in said])
        return next((self._called(name) for name, other in self._others.items() if self._differs(name, *other)), None)

    def _differs(self, name: str, value: Any, content: Any) -> bool:
        now = self._present(name)
        return _content(value) != content or (now is not value and now is not _MISSING)

    def _failed(self, said: Sequence[str]) -> str:
        """Return what the first guard that fails is about."""
        failed = _ATTRIBUTE.sub(r"\1.\2", said[0].split("  #")[0].strip()) if said else ""
        name = max((name for name in self.read if name in failed), key=len, default="")
        if failed.startswith("not ") and self._present(failed[4:]) is not _MISSING:
            name = failed[4:]
        if not name:
            return _readable(failed) or "something that the model reads"
        now = self._present(name)
        return f"{self._called(name)} (now {now!r})" if isinstance(now, PLAIN) else self._called(name)

    def _called(self, name: str) -> str:
        """Return one of Dynamo's names as the user's code has it."""
        if cell := _CELL.match(name):
            code = getattr(self._present(cell[1]), "__code__", None)
            if code is not None:
                return _readable(code.co_freevars[int(cell[2])] + cell[3])
        return _readable(name)

    def _present(self, name: str) -> Any:
        """Return what is at one of Dynamo's names now."""
        try:
            return _present(ast.parse(name, mode="eval").body, self._scope, self._globals)
        except _NO_PLACE:
            return _MISSING

    def tried(self, owners: Iterable[nn.Module]) -> list[str] | None:
        """Try the side effects, and return the integers, by Dynamo's names, that they change of what was read.

        Returns:
            ``None`` where they change anything else of it; empty where they change nothing of it, or there are none.
        """
        if self.effects is None:
            return []
        tables = [(own, dict(own)) for owner in owners for own in map(vars, owner.modules())]
        restore = self.kept()
        try:
            self.effects()
            if self.changed is None:
                return []
            changed = [name for name, value in self.read.items() if type(value) is int and self._present(name) != value]
        finally:
            restore()
            for own, before in tables:
                if len(own) != len(before) or any(own.get(key, _MISSING) is not before[key] for key in before):
                    own.clear()
                    own.update(before)
        return changed or None

    def kept(self) -> Callable[[], None]:
        """Return a function that restores what was read to its present state, as far as it is plain values."""
        held = [(value, value.copy()) for value in self.read.values() if type(value) in _HELD]
        drawn = [(value, value.getstate()) for value in self.read.values() if isinstance(value, random.Random)]
        read = {**self.read, **{name: self._present(name) for name in self._counters}}

        def restore() -> None:
            for value, before in held:
                if len(value) != len(before) or any(a is not b for a, b in zip(_all(value), _all(before), strict=True)):
                    value.clear()
                    value.update(before) if isinstance(value, dict | set) else value.extend(before)
            for value, state in drawn:
                value.setstate(state)
            if self._counters or not self._manager.check(self._scope):
                for name, before in read.items():
                    now = self._present(name) if isinstance(before, PLAIN) else before
                    if type(now) is not type(before) or (now is not before and now != before):
                        with contextlib.suppress(*_NO_PLACE):
                            self._assign(name, before)

        return restore

    def _assign(self, name: str, value: Any) -> None:
        match ast.parse(name, mode="eval").body:
            case ast.Attribute() as node:
                setattr(_found(node.value, self._scope, self._globals), node.attr, value)
            case ast.Subscript() as node:
                place = _found(node.slice, self._scope, self._globals)
                _found(node.value, self._scope, self._globals)[place] = value


def _present(place: ast.expr, scope: Mapping[str, Any], variables: Mapping[str, Any]) -> Any:
    """Return what is at one of Dynamo's names now."""
    try:
        return _found(place, scope, variables)
    except _NO_PLACE:
        return _MISSING


def _found(node: ast.expr, scope: Mapping[str, Any], variables: Mapping[str, Any]) -> Any:
    def of(node: ast.expr) -> Any:
        return _found(node, scope, variables)

    match node:
        case ast.Name("L"):
            return scope
        case ast.Name("G"):
            return variables
        case ast.Attribute():
            return getattr(of(node.value), node.attr)
        case ast.Constant():
            return node.value
        case ast.Subscript():
            return of(node.value)[of(node.slice)]
        case ast.Call(ast.Name("list"), [items]):
            return list(of(items))
        case ast.Call(ast.Attribute(ast.Name("dict"), "keys"), [items]):
            return dict.keys(of(items))
    raise ValueError(f"no place: {ast.dump(node)}")


def _all(value: Any) -> Iterator[Any]:
    yield from value
    if isinstance(value, dict):
        yield from value.values()


_TEXTS = (
    (re.compile(r"\bG\['___unnamed_scope\w*'\]\['(\w+)'\]"), lambda found: found[1]),
    (re.compile(r"\b[GL]\['__import_(\w+)'\]"), lambda found: found[1].replace("_dot_", ".")),
    (re.compile(r"\b[GL]\['([^']*)'\]"), lambda found: found[1]),
    (re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]"), lambda found: f".{found[1]}"),
    (re.compile(r"\.__dict__\['([^']*)'\]"), lambda found: f".{found[1]}"),
)  # fmt: skip


def _readable(text: str) -> str:
    """Return one of Dynamo's names as one writes it.

    >>> _readable("L['model']._modules['0'].p == 0.5")
    'model.0.p == 0.5'
    """
    for pattern, by in _TEXTS:
        text = pattern.sub(by, text)
    return text


def _described(example: tuple[Any, Any]) -> tuple[Any, list[Any], list[torch.Size]]:
    """Return how inputs and targets are nested, their types and constants, and the shapes of their tensors."""
    leaves, nesting = pytree.tree_flatten(example)
    kinds = [leaf.dtype if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
    return nesting, kinds, [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]


def changing(what: str, place: SourceLocation | None) -> CaptureError:
    """Return the error for a forward or a hook that changes what it reads."""
    return CaptureError(
        f"forward, or a hook, changes {what}, which outlasts it{at_line(place)}\n"
        "  A graph would hold what it was at first. Make it a buffer that forward writes to (self.register_buffer), or "
        "an input of the model; on a virtual device (vgpu) it runs as it is",
        where=str(place) if place else None,
    )


class Watch:
    """All of Python's state that a graph depends on.

    Args:
        guards: What Dynamo has read.
        owners: The model, and the loss if it is a module.
        constants: Tensors whose present values the graph holds, with what they are called.
    """

    def __init__(
        self, guards: Sequence[Guards], owners: Collection[nn.Module], constants: Iterable[tuple[str, Tensor]]
    ) -> None:
        self.guards = guards
        self._dicts = [vars(module)[kind] for owner in owners for module in owner.modules() for kind in OF_BACKWARD]
        self._parameters = [tensor for owner in owners for tensor in owner.parameters()]
        self._hooks = self._present_hooks()
        self._tensors = [(name, tensor, _content(tensor)) for name, tensor in constants]
        read = [value for each in guards for value in each.read.values()]
        kinds = {type(each) for owner in owners for each in owner.modules()}.union(map(type, read))
        self._defaults: list[tuple[Any, Any]] = []
        if _UNGUARDED:
            kinds.update(value for value in read if isinstance(value, type))
            self._defaults += [(value, value.__defaults__) for value in read if isinstance(value, types.FunctionType)]
        self._functions = _functions(kinds)
        self._default = torch.get_default_dtype()

    @property
    def effects(self) -> Callable[[], object] | None:
        """Does to Python's state what one call of the code does to it; ``None`` for nothing."""
        return self.guards[0].effects if self.guards else None

    def covers(self, other: Watch) -> bool:
        """Return whether another one that holds now changes only if this one does."""
        mine, others = (frozenset[str]().union(*(guards.key for guards in each.guards)) for each in (self, other))
        tensors = {id(tensor) for _, tensor, _ in self._tensors}
        return others <= mine and tensors.issuperset(id(tensor) for _, tensor, _ in other._tensors)

    @property
    def changed(self) -> str | None:
        """The first change that is found, as text; ``None`` if there is none."""
        for guards in self.guards:
            if changed := guards.changed:
                return changed
        if any(a is not b for a, b in zip_longest(self._hooks, self._present_hooks())):
            return "a hook of a gradient"
        for kind, name, function in self._functions:
            if kind.__dict__.get(name) is not function:
                return f"{kind.__module__}.{kind.__qualname__}.{name}"
        for function, defaults in self._defaults:
            if function.__defaults__ is not defaults:
                return f"{function.__module__}.{function.__qualname__}.__defaults__"
        for name, tensor, before in self._tensors:
            if _content(tensor) != before:
                return name
        if torch.get_default_dtype() is not self._default:
            return f"torch.get_default_dtype() (now {torch.get_default_dtype()})"
        return None

    def _present_hooks(self) -> list[Any]:
        own = (getattr(tensor, "_backward_hooks", None) for tensor in self._parameters)
        return [hook for hooks in (*self._dicts, *own) if hooks for hook in hooks.values()]


def _content(value: Any) -> Any:
    """Return what changes with the contents of a tensor, an array, a generator of random numbers or the environment."""
    if isinstance(value, Tensor):
        return value._version, value.data_ptr()
    if isinstance(value, np.ndarray | np.generic):
        return value.shape, value.tobytes() if value.nbytes <= _MOST_BYTES else None
    return value.getstate() if isinstance(value, random.Random) else dict(value)


def _functions(classes: Iterable[type]) -> list[tuple[type, str, Any]]:
    """Return the functions of classes and their bases, and values that are not guarded: class, name and function."""
    others = nn.Module, object  # tracers replace methods of the one
    bases = dict.fromkeys(base for each in classes for base in each.__mro__ if base not in others)
    return [
        (base, name, value)
        for base in bases
        for name, value in vars(base).items()
        if isinstance(value, (*_FUNCTIONS, *_UNGUARDED))
    ]
