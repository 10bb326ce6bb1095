"""``cuda`` for scripts that say cuda."""

from __future__ import annotations

from onebox.vgpu.cuda_alias.alias import CudaAlias, alias_cuda

__all__ = ["CudaAlias", "alias_cuda"]
