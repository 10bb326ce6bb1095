"""Patches: replaced attributes of PyTorch that can be restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT: Any = object()


class Patches:
    """Replaced attributes, with their original values."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace or add an attribute of a module or a class.

        Args:
            owner: The module or class; only its own attributes count, not those that it inherits.
            name: The attribute.
            value: Its new value.
        """
        before = vars(owner).get(name, _ABSENT)
        self._undo.append(lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before))
        setattr(owner, name, value)

    def put(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Add an entry to a dictionary."""
        before = mapping.get(key, _ABSENT)
        self._undo.append(lambda: mapping.pop(key, None) if before is _ABSENT else mapping.update({key: before}))
        mapping[key] = value

    def undoing(self, action: Callable[[], object]) -> None:
        """Register an action for :meth:`undo`."""
        self._undo.append(action)

    def call(self, action: Callable[[], object]) -> None:
        """Run an action now and again in :meth:`undo`, such as clearing a cache of PyTorch."""
        self._undo.append(action)
        action()

    def undo(self) -> None:
        """Restore everything, in reverse order."""
        while self._undo:
            self._undo.pop()()
