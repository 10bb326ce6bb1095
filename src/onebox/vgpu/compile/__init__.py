"""``torch.compile`` on virtual devices: graphs become programs on the workers."""

from __future__ import annotations

__all__: list[str] = []
