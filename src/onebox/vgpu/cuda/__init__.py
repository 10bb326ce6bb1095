"""``cuda`` for scripts that say cuda."""

from __future__ import annotations

from onebox.vgpu.cuda.alias import CudaAlias, alias_cuda

__all__ = ["CudaAlias", "alias_cuda"]
