"""Python values that a user's functions read: variables of closures and of globals, attributes of objects.

Snapshots of the values allow comparisons with later ones.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onebox.graph.capture.locate import is_users

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum, range)
"""Values that cannot be changed in place."""

_MOST = 512
"""Maximum number of parts of a container or an object that are compared."""

MISSING = object()
"""The value of an unassigned variable."""


@dataclass(frozen=True, eq=False)
class WatchedValue:
    """A Python value that has been read.

    Args:
        path: For an attribute of a module: the module, as in ``model.body.0``; otherwise empty.
        name: The attribute, or the variable.
        held: For a variable: its holder, a cell or a dict, of globals or of the attributes of an object.
        label: The variable as written in code.
    """

    path: str
    name: str
    held: Any = None
    label: str = ""

    def __hash__(self) -> int:
        return hash((self.path, self.name, id(self.held)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WatchedValue):
            return NotImplemented
        return (self.path, self.name) == (other.path, other.name) and self.held is other.held

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.label or self.name

    @property
    def value(self) -> Any:
        """The present value of a variable."""
        if isinstance(self.held, types.CellType):
            try:
                return self.held.cell_contents
            except ValueError:  # not assigned yet
                return MISSING
        return self.held.get(self.name, MISSING)


Reads = Mapping[WatchedValue, Any]
"""The values read, with snapshots."""


class _Versions(dict[str, Any]):
    """Changes with a tensor's contents, with the interface of a dict."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def get(self, key: str, default: Any = None) -> Any:
        """Return the tensor's version and its memory address."""
        return self._tensor._version, self._tensor.data_ptr()


def watched_tensors(tensors: Iterable[Tensor]) -> dict[WatchedValue, Any]:
    """Return values that change when tensors are written to, with their snapshots.

    Args:
        tensors: Tensors whose present values a graph holds.
    """
    found = {}
    for tensor in tensors:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        watched = WatchedValue("", "version", _Versions(tensor), f"a tensor that is none of the model's ({kind})")
        found[watched] = snapshot(watched.value)
    return found


def snapshot(value: Any) -> Any:
    """Return an object that equals the snapshot of another value if both are the same, as far as a forward can detect.

    Tensors are compared by identity and version, functions and modules by identity.
    """
    return _snapshot(value, [_MOST])


def _snapshot(value: Any, left: list[int]) -> Any:
    left[0] -= 1
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):  # the contents of a parameter are not Python state
        return "tensor", id(value), 0 if isinstance(value, nn.Parameter) else value._version
    if isinstance(value, np.ndarray):
        return "array", value.shape, value.dtype.str, value.tobytes() if value.nbytes <= 1 << 16 else id(value)
    if isinstance(value, random.Random):
        return "generator", value.getstate()
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return "generator", numpy_state(value)
    if left[0] < 0 or isinstance(value, nn.Module | type | types.ModuleType) or callable(value):
        return "object", id(value)
    if isinstance(value, list | tuple | deque | set | frozenset):
        return type(value), len(value), tuple(_snapshot(each, left) for each in itertools.islice(value, _MOST))
    if isinstance(value, dict):
        items = itertools.islice(value.items(), _MOST)
        return dict, len(value), tuple((_snapshot(key, left), _snapshot(each, left)) for key, each in items)
    own = getattr(value, "__dict__", None)
    plain = {key: each for key, each in own.items() if isinstance(each, PLAIN)} if isinstance(own, dict) else {}
    return "object", id(value), tuple(_snapshot(each, left) for each in plain.values())


def numpy_state(generator: Any) -> Any:
    """Return the state of a NumPy generator in a comparable form."""
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(False)
    inner = {key: each.tobytes() if isinstance(each, np.ndarray) else each for key, each in state["state"].items()}
    return inner, {key: each for key, each in state.items() if key != "state"}


def _is_followed(file: str) -> bool:
    """Return whether code is the user's own: neither part of an installed library nor generated by one."""
    if file.startswith("<"):
        return not file.startswith(("<frozen", "<eval_with_key", "<string"))
    return is_users(file) and "site-packages" not in file and "dist-packages" not in file


def _is_followed_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _is_followed(file) if file else kind.__module__ == "__main__"


def functions_of(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield the users' functions that modules call: their own methods, functions that they hold, and hooks."""
    for base in {base: None for module in modules for base in type(module).__mro__}:
        if _is_followed_class(base):
            own = (value.fget if isinstance(value, property) else value for value in vars(base).values())
            yield from (value for value in own if inspect.isfunction(value))
    for module in modules:
        yield from (each for each in vars(module).values() if callable(each) and not isinstance(each, nn.Module))
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            yield from hooks.values()
        for tensor in module._parameters.values():
            yield from (getattr(tensor, "_backward_hooks", None) or {}).values()


def variables(given: Iterable[Any]) -> list[WatchedValue]:
    """Return the variables of closures, globals and objects that functions, and the functions that they call, read.

    Args:
        given: The functions, or callable objects.
    """
    return _Variables(given).found()


class _Variables:
    """A traversal from functions to all values that they read."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._found: dict[WatchedValue, None] = {}
        self._objects: dict[int, tuple[str, Any]] = {}
        self._attributes: set[str] = set()
        self._seen: set[int] = set()
        self._waiting = [("", each) for each in given]

    def found(self) -> list[WatchedValue]:
        """Return the variables."""
        while self._waiting:
            name, value = self._waiting.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._visit(name, getattr(value, "__wrapped__", value))
            if not self._waiting:
                self._visit_attributes()
        return list(self._found)

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, types.MethodType):
            self._waiting += [("", value.__func__), ("self", value.__self__)]
        elif isinstance(value, functools.partial):
            called = (value.func, *value.args, *value.keywords.values())
            self._waiting += [("", each) for each in called if callable(each)]
        elif inspect.isfunction(value):
            self._visit_function(value)
        elif inspect.ismodule(value):
            if _is_followed(getattr(value, "__file__", None) or "<frozen"):
                self._objects[id(value)] = name, value
        elif _is_followed_class(type(value)) and not isinstance(value, nn.Module | type):
            self._objects[id(value)] = name, value
            if callable(value):
                self._waiting.append((name, type(value).__call__))

    def _visit_function(self, function: Any) -> None:
        if not _is_followed(function.__code__.co_filename):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        names, attributes = _names_read(function.__code__)
        self._attributes |= attributes
        held = [WatchedValue("", name, cell) for name, cell in cells]
        for source in [*held, *(WatchedValue("", name, function.__globals__) for name in names)]:
            self._note(source)

    def _visit_attributes(self) -> None:
        """Follow the functions' reads of objects, which are known once all functions are."""
        for name, each in self._objects.values():
            own = getattr(each, "__dict__", {})
            for key in own.keys() & self._attributes:
                self._note(WatchedValue("", key, own, f"{name}.{key}"))

    def _note(self, source: WatchedValue) -> None:
        value = source.value
        if _is_variable(value):
            self._found[source] = None
        elif id(value) not in self._seen:
            self._waiting.append((str(source), value))


def _is_variable(value: Any) -> bool:
    """Return whether something is a value, and not code or an object with attributes of the user's."""
    kinds = (*PLAIN, Tensor, np.ndarray, random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) or type(value) in (list, tuple, dict, set, deque, types.SimpleNamespace)


@functools.lru_cache(maxsize=4096)
def _names_read(code: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of globals and of attributes that code reads, with those of functions within it."""
    instructions = list(dis.get_instructions(code))
    names = [each.argval for each in instructions if each.opname == "LOAD_GLOBAL"]
    attributes = {each.argval for each in instructions if each.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    for each in code.co_consts:
        if inspect.iscode(each):
            more, others = _names_read(each)
            names, attributes = [*names, *more], attributes | others
    return tuple(dict.fromkeys(names)), frozenset(attributes)
