"""Patches of PyTorch: the one module that replaces attributes of its objects, and restores them.

A set of patches is applied and removed as a whole. Most of its entries are a :class:`Patch`, a line of a table: object,
attribute, replacement, versions of PyTorch. The rest are functions that call the methods of the set, where the names
are found at run time or PyTorch has a registry.

The sets: :mod:`onebox.vgpu.registration` has that for any script; ``distributed.ranks`` and ``compile.dynamo`` have
those for scripts with ranks or ``torch.compile``, and ``cuda_alias`` has that of the alias. No two sets replace
the same attribute, except the alias, which is applied on top of the others.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.jit import _builtins

from onebox.errors import PoolError

_ABSENT: Any = object()
_BUILT_IN = types.BuiltinFunctionType | types.MethodDescriptorType
_VERSION = tuple(map(int, str(torch.__version__).split(".")[:2]))
_lock = threading.RLock()


class Patch(NamedTuple):
    """A replaced attribute.

    Args:
        owner: A module or a class; only its own attributes count, not those that it inherits.
        name: The attribute.
        replaced: Returns the new value for the original one, which is ``None`` where it is absent.
        also: Other owners that have the same value under the same name, as after ``from … import``.
        added: Whether the attribute may be absent.
        since: The first version of PyTorch to which the patch applies.
        until: The last one; ``None`` for all later ones.
    """

    owner: Any
    name: str
    replaced: Callable[[Any], Any]
    also: tuple[Any, ...] = ()
    added: bool = False
    since: tuple[int, int] = (2, 11)
    until: tuple[int, int] | None = None

    def applies(self) -> bool:
        """Return whether it is for this version of PyTorch."""
        return self.since <= _VERSION and (self.until is None or self.until >= _VERSION)


class Patches:
    """A set of patches.

    Args:
        entries: The patches, in the order in which they are applied; a function is called with the set.
    """

    def __init__(self, entries: Iterable[Patch | Callable[[Patches], object]]) -> None:
        self._entries = tuple(entries)
        self._undo: list[Callable[[], object]] = []

    def apply(self) -> None:
        """Apply all patches. Idempotent.

        Raises:
            PoolError: This version of PyTorch lacks an attribute; nothing is applied then.
        """
        with _lock:
            if self in _applied:
                return
            try:
                for entry in self._entries:
                    if isinstance(entry, Patch):
                        self._apply(entry)
                    else:
                        entry(self)
            except BaseException:
                self._restore()
                raise
            _applied.append(self)
            _identify_again()

    def remove(self) -> None:
        """Restore what was there before, in reverse order. Idempotent."""
        with _lock:
            if self in _applied:
                _applied.remove(self)
                self._restore()
                _identify_again()

    # ---- for functions among the entries

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace or add an attribute.

        Args:
            owner: Its module or class; only its own attributes count, not those that it inherits.
            name: The attribute.
            value: Its new value.
        """
        before = vars(owner).get(name, _ABSENT)
        self._undo.append(lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before))
        setattr(owner, name, value)
        if isinstance(before, _BUILT_IN) and inspect.isfunction(value):  # pickled by name
            inner = isinstance(owner, type)
            value.__module__ = owner.__module__ if inner else owner.__name__
            value.__qualname__ = f"{owner.__qualname__}.{name}" if inner else name
        known = _builtins._get_builtin_table()
        if id(before) in known:  # torch.jit.script looks functions up by identity
            self.put(known, id(value), known[id(before)])

    def put(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Replace or add an entry of a dictionary."""
        before = mapping.get(key, _ABSENT)
        self._undo.append(lambda: mapping.pop(key, None) if before is _ABSENT else mapping.update({key: before}))
        mapping[key] = value

    def append(self, items: list[Any], item: Any) -> None:
        """Add an item to a list, unless it is there."""
        if item not in items:
            self._undo.append(lambda: items.remove(item))
            items.append(item)

    def on_removal(self, action: Callable[[], object]) -> None:
        """Register an action that undoes what the caller has done."""
        self._undo.append(action)

    def call(self, action: Callable[[], object]) -> None:
        """Run an action now and again at the removal, such as clearing a cache of PyTorch."""
        self._undo.append(action)
        action()

    # ---- internals

    def _apply(self, patch: Patch) -> None:
        if not patch.applies():
            return
        original = getattr(patch.owner, patch.name, _ABSENT)
        if original is _ABSENT and not patch.added:
            place = getattr(patch.owner, "__name__", patch.owner)
            raise PoolError(
                f"PyTorch {torch.__version__} has no {place}.{patch.name}, which virtual devices replace; use PyTorch "
                "2.11 to 2.13, or open the pool without virtual devices"
            )
        value = patch.replaced(None if original is _ABSENT else original)
        for owner in (patch.owner, *patch.also):
            self.set(owner, patch.name, value)

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()


_applied: list[Patches] = []


def _identify_again() -> None:
    """Make Dynamo, where it is loaded, look PyTorch's functions up again: it knows them by identity."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map.cache_clear()


def remove_all() -> None:
    """Remove all sets, the last one first."""
    with _lock:
        for patches in _applied[::-1]:
            patches.remove()
