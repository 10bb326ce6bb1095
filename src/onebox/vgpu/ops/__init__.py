"""Operators that need more than to be recorded: made from nothing, from others, or asked of the worker."""

from __future__ import annotations

__all__: list[str] = []
