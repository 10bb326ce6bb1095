"""Parallelism over several virtual devices: ``nn.DataParallel``, and ``torch.distributed`` with threads as ranks."""

from __future__ import annotations

__all__: list[str] = []
