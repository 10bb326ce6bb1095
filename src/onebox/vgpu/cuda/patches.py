"""Replacing attributes of PyTorch, and putting them back."""

from __future__ import annotations

from typing import Any

_ABSENT: Any = object()


class Patches:
    """Attributes that have been replaced, with what they were."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or a class, or give it one.

        Args:
            owner: The module or class; only its own attributes count, not those that it inherits.
            name: The attribute.
            value: What it is from now on.
        """
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
