"""Operators that need more than recording: factories, compositions, and queries to the worker."""

from __future__ import annotations

__all__: list[str] = []
