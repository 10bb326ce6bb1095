"""Python state that a forward reads or changes: attributes of modules, variables of closures, globals, generators.

A graph holds the results of Python code during its trace. The values read are recorded, so that a change is detected
later and the model is traced again; changes by forward itself, as of a counter or a hidden state carried from step to
step, cannot be repeated by a graph, and are refused by name.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from onebox.errors import CaptureError
from onebox.graph.capture.locate import SourceLocation, is_users
from onebox.graph.capture.python_variables import (
    MISSING,
    PLAIN,
    Reads,
    WatchedValue,
    functions_of,
    numpy_state,
    snapshot,
    variables,
)

_T = TypeVar("_T")

_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module that hold PyTorch's own bookkeeping."""

OWN_HOOK = "onebox_reads"
"""Attribute of a hook that belongs to onebox and does nothing in a trace."""

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)

Owners = Mapping[str, nn.Module]
"""The model and the loss, if it is a module, by these names."""


class PythonStateGuard:
    """Python state read during a trace, to be compared with its present values.

    Args:
        owners: The model and the loss, if it is a module.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        modules = [module for owner in owners.values() for module in owner.modules()]
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        self._hooks = [getattr(module, kind) for module in modules for kind in kinds]
        self._tensors = [tensor for owner in owners.values() for tensor in owner.parameters()]
        self._hooks_of_all = (-1, 0)
        """The number of all hooks of modules, and of the user's among them."""
        hooks = WatchedValue("", "hooks", self, "the number of hooks")
        self._watched: dict[WatchedValue, tuple[Callable[[], Any], Any]] = {}
        self._watched[hooks] = self._count_hooks, snapshot(self._count_hooks())
        self._same: list[tuple[dict[str, Any], str, Any]] = []
        """Immutable attributes that were unchanged at the last check: an identity comparison suffices."""
        self._others = list(self._watched)

    def add(self, reads: Reads) -> None:
        """Watch more values.

        Args:
            reads: The values read.
        """
        for source, before in reads.items():
            if source not in self._watched:
                self._watched[source] = self._getter(source), before
                self._others.append(source)

    def _count_hooks(self) -> int:
        own = (getattr(tensor, "_backward_hooks", None) for tensor in self._tensors)
        count = sum(map(len, self._hooks))
        if count != self._hooks_of_all[0]:  # else the number of onebox's own is the same, too
            users = sum(not hasattr(hook, OWN_HOOK) for hooks in self._hooks for hook in hooks.values())
            self._hooks_of_all = count, users
        return self._hooks_of_all[1] + sum(len(hooks) for hooks in own if hooks)

    def changed(self) -> list[tuple[WatchedValue, Any]]:
        """Return the changed values: the source, and the present value."""
        for own, name, value in self._same:
            if own.get(name, MISSING) is not value:
                self._same, self._others = [], list(self._watched)
                break
        found, others = [], []
        for source in self._others:
            get, before = self._watched[source]
            now = get()
            place = self._place_of(source) if isinstance(now, PLAIN) else None
            if snapshot(now) != before:
                found.append((source, now))
                others.append(source)
            elif place is None or place[0].get(place[1], MISSING) is not now:
                others.append(source)
            else:
                self._same.append((*place, now))
        self._others = others
        return found

    def _getter(self, source: WatchedValue) -> Callable[[], Any]:
        if source.held is not None:
            return lambda: source.value
        own, name = self._place_of(source) or ({}, source.name)
        module = self._module_of(source)
        return (lambda: own.get(name, MISSING)) if name in own else lambda: _attribute(module, name)

    def _place_of(self, source: WatchedValue) -> tuple[dict[str, Any], str] | None:
        """Return the dict that holds a value, and its key there."""
        if source.held is not None:
            return (source.held, source.name) if type(source.held) is dict else None
        return vars(self._module_of(source)), source.name

    def _module_of(self, source: WatchedValue) -> nn.Module:
        root, _, rest = source.path.partition(".")
        return self._owners[root].get_submodule(rest)


def _attribute(module: nn.Module, name: str) -> Any:
    own = vars(module)
    return own[name] if name in own else getattr(type(module), name, MISSING)


def _is_torchs(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is a cache of PyTorch's own."""
    return name.startswith("_") and type(module).__module__.startswith("torch.")


def _is_kept(module: nn.Module, name: str) -> bool:
    """Return whether a failed read needs no record: of a special attribute, a registered one or a property."""
    own = object.__getattribute__(module, "__dict__")
    return (
        name[:2] == "__"
        or any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
        or _attribute(module, name) is not MISSING  # a property that raises the error itself
    )


class StateRecorder:
    """Records the Python state that a forward reads, and refuses changes of it.

    Args:
        owners: The model and the loss, if it is a module.
        functions: The loss, the metrics and all other callables of the user.
    """

    def __init__(self, owners: Owners, functions: Iterable[Any]) -> None:
        self.reads: dict[WatchedValue, Any] = {}
        self._paths: dict[int, str] = {}
        for root, owner in owners.items():
            for path, module in owner.named_modules():
                self._paths.setdefault(id(module), f"{root}.{path}" if path else root)
        self._modules = [module for owner in owners.values() for module in owner.modules()]
        self._variables = variables([*functions, *functions_of(self._modules)])

    def run(self, forward: Callable[[], _T], *, part: bool = False) -> _T:
        """Compute a forward, and restore Python's state afterwards.

        Args:
            forward: Computes it.
            part: Whether it is a part of one, whose reads are not kept: they are those of the middle of a forward.

        Raises:
            CaptureError: It changes a value that it would read the next time.
        """
        before = {source: source.value for source in self._variables}
        seen = {source: snapshot(value) for source, value in before.items()}
        copies = [(value, _copied(value)) for value in before.values()]
        attributes = _Attributes(self._paths)
        drawn = _Drawn()
        try:
            with attributes.noted(), drawn.noted():
                result = forward()
            self._refuse_changes(attributes, seen)
            if drawn.module:
                raise _drawing(drawn.module, drawn.place(forward))
        finally:
            attributes.restore()
            drawn.restore()
            for source, value in before.items():
                _assign(source, value)
            for value, copied in copies:
                _refill(value, copied)
        if not part:
            self.reads |= seen | attributes.reads
            attributes.warn()
        return result

    def _refuse_changes(self, attributes: _Attributes, seen: Reads) -> None:
        for source, value in seen.items():
            if snapshot(source.value) != value:
                generator = isinstance(source.value, _GENERATORS)
                raise (
                    _drawing(f"{source}, a generator of random numbers", None)
                    if generator
                    else _changing(f"the variable {source}", None)
                )
        for source, module, value in attributes.read:
            if snapshot(_attribute(module, source.name)) != value:
                raise _changing(f"the attribute {source}", attributes.written.get(source))


class _Attributes:
    """Attributes of modules that are read and written."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.reads: dict[WatchedValue, Any] = {}
        self.read: list[tuple[WatchedValue, nn.Module, Any]] = []
        self.written: dict[WatchedValue, SourceLocation | None] = {}
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._copies: list[tuple[Any, Any]] = []
        self._paths = paths

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record this thread's reads and writes."""
        mine, set_attribute = threading.get_ident(), nn.Module.__setattr__

        def read(module: Any, name: str) -> Any:
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:  # a parameter, buffer or submodule, or missing, as in getattr(self, "t", 0)
                if threading.get_ident() == mine and not _is_kept(module, name):
                    self._note_read(module, name, MISSING)
                raise
            if name not in _OWN and name[:2] != "__" and threading.get_ident() == mine:
                self._note_read(module, name, value)
            return value

        def write(module: Any, name: str, value: Any) -> None:
            if threading.get_ident() == mine:
                self._note_write(module, name)
            set_attribute(module, name, value)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign]
        nn.Module.__setattr__ = write  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]

    def _note_read(self, module: nn.Module, name: str, value: Any) -> None:
        path = self._paths.get(id(module))
        if path is None or isinstance(value, Tensor | nn.Module) or inspect.isroutine(value):
            return
        if _is_torchs(module, name) or inspect.isdatadescriptor(getattr(type(module), name, None)):
            return  # of a property, the attributes that it reads are recorded
        source = WatchedValue(path, name)
        if source not in self.reads and source not in self.written:
            self.reads[source] = snapshot(value)
            self.read.append((source, module, self.reads[source]))
            self._copies.append((value, _copied(value)))

    def _note_write(self, module: nn.Module, name: str) -> None:
        own = object.__getattribute__(module, "__dict__")
        if id(module) not in self._paths or name in own["_parameters"] or name in own["_buffers"]:
            return
        source = WatchedValue(self._paths[id(module)], name)
        if source not in self.written:
            self._before.append((own, name, own.get(name, MISSING)))
            caller = sys._getframe(2)
            place = SourceLocation(caller.f_code.co_filename, caller.f_lineno)
            self.written[source] = place if is_users(place.file) else None

    def restore(self) -> None:
        """Restore all attributes."""
        for own, name, value in self._before:
            if value is MISSING:
                own.pop(name, None)
            else:
                own[name] = value
        for value, copied in self._copies:
            _refill(value, copied)

    def warn(self) -> None:
        """Warn of attributes that forward assigns and does not read: their values are lost."""
        for source, place in self.written.items():
            if source not in self.reads and place is not None:
                warnings.warn(
                    f"forward assigns {source} at {place}: {place.text}\n  It runs on workers: the attribute of the "
                    "model here stays as it is. Return what is wanted of it, or compute it on a virtual device (vgpu)",
                    stacklevel=2,
                )


class _Drawn:
    """Random numbers that are drawn from generators other than PyTorch's."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._made = ""
        self._bits = numpy_state(np.random.mtrand._rand)

    @property
    def module(self) -> str:
        """The module whose numbers have been drawn, if any."""
        if self._made:
            return self._made
        if random.getstate() != self._python:
            return "random"
        return "numpy.random" if numpy_state(np.random.mtrand._rand) != self._bits else ""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record generators that this thread creates with a seed of the operating system."""
        mine, make = threading.get_ident(), np.random.default_rng

        def default_rng(seed: Any = None) -> np.random.Generator:
            if seed is None and threading.get_ident() == mine:
                self._made = "numpy.random.default_rng() without a seed"
            return make(seed)

        np.random.default_rng = default_rng
        try:
            yield
        finally:
            np.random.default_rng = make

    def restore(self) -> None:
        """Restore the generators."""
        self._made = ""
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def place(self, forward: Callable[[], Any]) -> SourceLocation | None:
        """Return the line that draws.

        Args:
            forward: Computes the drawing code once more.
        """
        found: list[SourceLocation] = []
        before = sys.gettrace()

        def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
            if found or not is_users(frame.f_code.co_filename):
                return None
            last = frame.f_lineno

            def line(frame: types.FrameType, event: str, argument: Any) -> Any:
                nonlocal last
                if not found and self.module:
                    found.append(SourceLocation(frame.f_code.co_filename, last))
                last = frame.f_lineno
                return line

            return line

        self.restore()
        sys.settrace(trace)
        try:
            with self.noted():
                forward()
        finally:
            sys.settrace(before)
        return found[0] if found else None


def _drawing(module: str, place: SourceLocation | None) -> CaptureError:
    where = f" at {place}: {place.text}" if place else ""
    return CaptureError(
        f"forward draws numbers from {module}{where}\n  A graph would hold those that were drawn first. Draw with "
        "torch (torch.rand, torch.bernoulli, dropout), or give the numbers as inputs; on a virtual device (vgpu) the "
        "code runs as it is",
        where=str(place) if place else None,
    )


def _changing(what: str, place: SourceLocation | None) -> CaptureError:
    where = f" at {place}: {place.text}" if place else ""
    return CaptureError(
        f"forward, or a hook, changes {what}, which outlasts it{where}\n"
        "  A graph would hold what it was at first. Make it a buffer that forward writes to (self.register_buffer), or "
        "an input of the model; on a virtual device (vgpu) it runs as it is",
        where=str(place) if place else None,
    )


def _copied(value: Any) -> Any:
    """Return a shallow copy of a mutable object; of a generator, its state."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, list | dict | set | deque):
        return value.copy()
    return None


def _refill(value: Any, copied: Any) -> None:
    """Restore a container's contents, or a generator's state, from its copy."""
    if isinstance(value, random.Random):
        value.setstate(copied)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = copied
    elif isinstance(value, np.random.RandomState):
        value.set_state(copied)
    elif copied is not None and not _holds_the_same(value, copied):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(copied)


def _holds_the_same(value: Any, copied: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() == copied.keys() and all(value[key] is copied[key] for key in copied)
    return len(value) == len(copied) and all(a is b for a, b in zip(value, copied, strict=True))


def _assign(source: WatchedValue, value: Any) -> None:
    """Restore a variable."""
    if source.value is value:
        return
    if isinstance(source.held, types.CellType):
        source.held.cell_contents = value
    elif value is not MISSING:
        source.held[source.name] = value
