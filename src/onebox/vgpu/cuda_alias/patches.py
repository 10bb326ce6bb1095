"""Replacing attributes of PyTorch, and putting them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT: Any = object()


class Patches:
    """Attributes that have been replaced, with what they were."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or a class, or give it one.

        Args:
            owner: The module or class; only its own attributes count, not those that it inherits.
            name: The attribute.
            value: What it is from now on.
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
        """Do something when everything is put back."""
        self._undo.append(action)

    def call(self, action: Callable[[], object]) -> None:
        """Do something now, and again when everything is put back; such as clearing what PyTorch remembers."""
        self._undo.append(action)
        action()

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._undo:
            self._undo.pop()()
