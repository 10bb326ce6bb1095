"""Several virtual devices at once: ``nn.DataParallel``, and ``torch.distributed`` with threads for ranks."""

from __future__ import annotations

__all__: list[str] = []
