"""Side effects of a forward: attributes that it assigns, random numbers that it draws, hooks that it adds.

A trace runs the user's Python several times, and must leave no mark: all is undone, but for hooks that forward adds and
its note of them. What forward would read the next time, as a counter or a hidden state carried from step to step,
cannot be repeated by a graph, and is refused by name.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import nn

from onebox.errors import CaptureError
from onebox.graph.capture.guards import PLAIN, Guards, changing
from onebox.graph.capture.locate import SourceLocation, at_line, is_users
from onebox.graph.capture.traced_calls import is_traced

_T = TypeVar("_T")

_MISSING = object()
"""The value of an unassigned attribute."""

Owners = Mapping[str, nn.Module]
"""The model and the loss, if it is a module, by these names."""


class SideEffects:
    """Runs a forward, and undoes what it does to Python's state.

    Args:
        owners: The model and the loss, if it is a module.
        guards: What the forward reads, where that is known.
    """

    def __init__(self, owners: Owners, guards: Guards | None) -> None:
        self._guards, self._owners = guards, owners
        self._paths: dict[int, str] = {}
        for root, owner in owners.items():
            for path, module in owner.named_modules():
                self._paths.setdefault(id(module), f"{root}.{path}" if path else root)

    def run(self, forward: Callable[[], _T], *, part: bool = False) -> _T:
        """Compute a forward, and restore Python's state afterwards.

        Args:
            forward: Computes it.
            part: Whether it is a part of one, in whose middle no state is as it was read.

        Raises:
            CaptureError: It changes a value that it would read the next time.
        """
        attributes, hooks = _Attributes(self._paths), forward_hooks(self._owners.values())
        drawn = _Drawn()
        restore = None if self._guards is None else self._guards.kept()
        try:
            with attributes.noted(), drawn.noted():
                result = forward()
            if drawn.module:
                raise _drawing(drawn.module, drawn.place(forward))
            changed = None if part or self._guards is None else self._guards.changed or attributes.carried(self._guards)
            if changed:
                raise changing(changed, attributes.place(changed))
            unread = attributes.changed()
        finally:
            drawn.restore()
            if forward_hooks(self._owners.values()) == hooks:
                attributes.restore()
                if restore is not None:
                    restore()
            else:  # it has noted that its hooks are there, so that it does not add them again
                attributes.restore(but=PLAIN)
        if not part and (self._guards is None or self._guards.effects is None):
            _warn(unread)
        return result


def forward_hooks(owners: Iterable[nn.Module]) -> list[list[int]]:
    """Return the numbers of all hooks of forward."""
    return [[*each._forward_pre_hooks, *each._forward_hooks] for owner in owners for each in owner.modules()]


class _Attributes:
    """Attributes of modules that are assigned."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._written: dict[str, SourceLocation | None] = {}
        self._before: dict[str, tuple[dict[str, Any], str, Any]] = {}
        self._paths = paths

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record this thread's assignments."""
        mine, set_attribute = threading.get_ident(), nn.Module.__setattr__

        def write(module: Any, name: str, value: Any) -> None:
            if threading.get_ident() == mine:
                self._note_write(module, name)
            set_attribute(module, name, value)

        nn.Module.__setattr__ = write  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]

    def _note_write(self, module: nn.Module, name: str) -> None:
        own = vars(module)
        if id(module) not in self._paths or name in own["_parameters"] or name in own["_buffers"]:
            return
        source = f"{self._paths[id(module)]}.{name}"
        if source not in self._before:
            self._before[source] = own, name, own.get(name, _MISSING)
            caller = sys._getframe(2)
            place = SourceLocation(caller.f_code.co_filename, caller.f_lineno)
            self._written[source] = place if is_users(place.file) else None

    def place(self, source: str) -> SourceLocation | None:
        """Return the line that assigns an attribute.

        Args:
            source: The attribute, as :attr:`Guards.changed` has it.
        """
        return next((place for name, place in self._written.items() if source.split(" ", maxsplit=1)[0] == name), None)

    def carried(self, guards: Guards) -> str | None:
        """Return a tensor that is an attribute, and is read and assigned."""
        read = guards.names if any(is_traced(value) for _, _, value in self._before.values()) else ()
        return next(
            (source for source, (_, _, value) in self._before.items() if is_traced(value) and source in read), None
        )

    def changed(self) -> dict[str, SourceLocation]:
        """Return the attributes that users' code has given other values, with the lines."""
        return {
            source: place
            for source, place in self._written.items()
            if place is not None and not _same(self._before[source])
        }

    def restore(self, *, but: tuple[type, ...] = ()) -> None:
        """Restore all attributes.

        Args:
            but: Types of present values that stay.
        """
        for own, name, value in self._before.values():
            if isinstance(own.get(name, _MISSING), but):
                continue
            if value is _MISSING:
                own.pop(name, None)
            elif not is_traced(value):  # else what it stood for is there again
                own[name] = value


def _same(before: tuple[dict[str, Any], str, Any]) -> bool:
    own, name, value = before
    return own.get(name, _MISSING) is value or (isinstance(value, PLAIN) and own.get(name, _MISSING) == value)


def _warn(unread: Mapping[str, SourceLocation]) -> None:
    """Warn of attributes that forward assigns and does not read: their values are lost."""
    for source, place in unread.items():
        warnings.warn(
            f"forward assigns {source} at {place}: {place.text}\n  It runs on workers: the attribute of the model here "
            "stays as it is. Return what is wanted of it, or compute it on a virtual device (vgpu)",
            stacklevel=3,
        )


class _Drawn:
    """Random numbers that are drawn from generators other than PyTorch's."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._made = ""
        self._bits = _numpy_state()

    @property
    def module(self) -> str:
        """The module whose numbers have been drawn, if any."""
        if self._made:
            return self._made
        if random.getstate() != self._python:
            return "random"
        return "numpy.random" if _numpy_state() != self._bits else ""

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


def _numpy_state() -> Any:
    """Return the state of NumPy's own generator in a comparable form."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return kind, np.asarray(keys).tobytes(), rest


def _drawing(module: str, place: SourceLocation | None) -> CaptureError:
    return CaptureError(
        f"forward draws numbers from {module}{at_line(place)}\n"
        "  A graph would hold those that were drawn first. Draw with torch (torch.rand, torch.bernoulli, dropout), or "
        "give the numbers as inputs; on a virtual device (vgpu) the code runs as it is",
        where=str(place) if place else None,
    )
